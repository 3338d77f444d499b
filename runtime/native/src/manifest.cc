#include "manifest.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <set>

#include "error.h"
#include "json.h"
#include "sha256.h"

namespace kvconv::runtime {
namespace {

constexpr std::string_view kManifestFile = "kvconv.json";
constexpr std::string_view kChecksumKey = "manifest_sha256";
constexpr std::size_t kChecksumDigits = 64;
constexpr std::int64_t kHashedOnOpenBytes = 64 * 1024 * 1024;
constexpr std::int64_t kGroupWidth = 32;  // numbers of a head that share a scale

[[noreturn]] void fail_damaged(const std::string& reason) {
  fail(KVCONV_BUNDLE_ERROR, kManifestFile, " is damaged: ", reason,
       ". Copy the bundle again from where it came, or export the model again.");
}

// Reads members of a JSON object, each of which must be there and of its type.
class Fields {
 public:
  Fields(const Json& json, std::string where)
      : where_(std::move(where)), object_(json.get<Json::Object>()) {
    if (object_ == nullptr) fail_damaged(where_ + " must be an object");
  }

  const Json& at(std::string_view name) const {
    const auto found = object_->find(name);
    if (found == object_->end()) fail_damaged(text(where_, " lacks ", name));
    return found->second;
  }

  // The members' names must be these, and may be the others.
  void check_names(std::set<std::string_view> required,
                   const std::set<std::string_view>& optional) const {
    for (const auto& [name, value] : *object_) {
      if (required.erase(name) == 0 && optional.count(name) == 0) {
        fail_damaged(text(where_, " has unknown ", name));
      }
    }
    if (!required.empty()) fail_damaged(text(where_, " lacks ", *required.begin()));
  }

  bool has(std::string_view name) const {
    const auto found = object_->find(name);
    return found != object_->end() && found->second.get<std::nullptr_t>() == nullptr;
  }

  template <typename Type>
  const Type& get(std::string_view name, const char* type) const {
    const Type* value = at(name).get<Type>();
    if (value == nullptr) fail_damaged(text(where_, ".", name, " must be ", type));
    return *value;
  }

  std::int64_t whole(std::string_view name, std::int64_t least, std::int64_t most) const {
    const std::int64_t value = get<std::int64_t>(name, "a whole number");
    if (value < least || value > most) {
      fail_damaged(text(where_, ".", name, " is ", value, ", not in [", least, ", ", most, "]"));
    }
    return value;
  }

  std::optional<std::int64_t> optional_whole(std::string_view name, std::int64_t least,
                                             std::int64_t most) const {
    at(name);
    return has(name) ? std::optional(whole(name, least, most)) : std::nullopt;
  }

  std::string one_of(std::string_view name, const std::vector<std::string_view>& allowed) const {
    const std::string& value = get<std::string>(name, "a string");
    if (std::find(allowed.begin(), allowed.end(), value) == allowed.end()) {
      fail_damaged(text(where_, ".", name, " is '", value, "', which is none of the known ones"));
    }
    return value;
  }

  std::vector<std::string> strings(std::string_view name) const {
    std::vector<std::string> strings;
    for (const Json& item : get<Json::Array>(name, "a list")) {
      if (item.get<std::string>() == nullptr)
        fail_damaged(text(where_, ".", name, " must hold strings"));
      strings.push_back(*item.get<std::string>());
    }
    return strings;
  }

 private:
  const std::string where_;
  const Json::Object* const object_;
};

constexpr std::int64_t kMostTokens = std::numeric_limits<std::int32_t>::max() / 2;
constexpr std::int64_t kMostWidth = 1 << 20;

CacheLayer read_layer(const Json& json, std::size_t index) {
  const Fields fields(json, text("manifest.cache_layers[", index, "]"));
  CacheLayer layer{
      .num_key_value_heads = fields.whole("num_key_value_heads", 1, kMostWidth),
      .key_head_dim = fields.whole("key_head_dim", 1, kMostWidth),
      .value_head_dim = fields.whole("value_head_dim", 1, kMostWidth),
      .dtype = fields.one_of("dtype", {"float32", "float16", "bfloat16", "int8", "int4"}),
      .window_size = fields.optional_whole("window_size", 1, kMostTokens),
      .capacity = fields.optional_whole("capacity", 1, kMostTokens),
  };
  const bool is_ring = fields.one_of("cache_mode", {"auto", "ring"}) == "ring";
  if (is_ring != layer.capacity.has_value() || layer.slack().value_or(0) < 0) {
    fail_damaged(text("layer ", index, " has a cache of mode ", is_ring ? "ring" : "auto",
                      ", capacity ", layer.capacity.value_or(0), " and window_size ",
                      layer.window_size.value_or(0)));
  }
  return layer;
}

Manifest read_fields(const Json& document, const std::filesystem::path& folder) {
  const Fields fields(document, "manifest");
  fields.check_names(
      {"source",         "architecture",   "model_type",   "attention",    "dtype",
       "weights_dtype",  "opset",          "op_version",   "vocab_size",   "max_sequence_length",
       "eos_token_ids",  "bos_token_id",   "pad_token_id", "cache_layers", "inputs",
       "outputs",        "rewrites",       "files",        "refusals",     "verification",
       "kvconv_version", "format_version", kChecksumKey},
      {"quantization", "run_sizes", "kernels"});
  Manifest manifest;
  manifest.folder = folder;
  manifest.source_model =
      Fields(fields.at("source"), "manifest.source").get<std::string>("model", "a string");
  manifest.attention = fields.one_of("attention", {"flash", "standard", "gqa"});
  manifest.op_version = fields.optional_whole("op_version", 1, kMostTokens);
  const std::string weights =
      fields.one_of("weights_dtype", {"float32", "float16", "int8", "int4"});
  manifest.is_quantized = fields.has("quantization");
  if (manifest.is_quantized != (weights == "int8" || weights == "int4")) {
    fail_damaged(text("its weights_dtype is ", weights, ", and it ",
                      manifest.is_quantized ? "has" : "lacks", " quantization"));
  }
  manifest.vocab_size = fields.whole("vocab_size", 1, kMostTokens);
  manifest.max_sequence_length = fields.whole("max_sequence_length", 1, kMostTokens);
  for (const Json& id : fields.get<Json::Array>("eos_token_ids", "a list")) {
    const std::int64_t* number = id.get<std::int64_t>();
    if (number == nullptr || *number < 0 || *number > kMostTokens) {
      fail_damaged("manifest.eos_token_ids must hold token ids");
    }
    manifest.eos_token_ids.push_back(static_cast<std::int32_t>(*number));
  }
  manifest.bos_token_id = fields.optional_whole("bos_token_id", 0, kMostTokens);
  for (const Json& layer : fields.get<Json::Array>("cache_layers", "a list")) {
    manifest.cache_layers.push_back(read_layer(layer, manifest.cache_layers.size()));
  }
  manifest.inputs = fields.strings("inputs");
  manifest.outputs = fields.strings("outputs");
  for (const auto& [name, json] : fields.get<Json::Object>("files", "an object")) {
    // A bundle is flat; anything else could reach outside the folder.
    if (name.empty() || name == "." || name == ".." ||
        name.find_first_of("/\\:") != std::string::npos) {
      fail_damaged(text("it lists '", name, "', which is not a plain file name"));
    }
    const Fields entry(json, "manifest.files." + name);
    manifest.files[name] = {entry.whole("size", 0, std::numeric_limits<std::int64_t>::max()),
                            entry.get<std::string>("sha256", "a string")};
  }
  if (fields.has("run_sizes")) {
    const Fields sizes(fields.at("run_sizes"), "manifest.run_sizes");
    manifest.run_sizes = {sizes.whole("num_attention_heads", 0, kMostWidth),
                          sizes.whole("activation_width", 0, std::int64_t{1} << 40),
                          sizes.whole("packed_bytes", 0, std::int64_t{1} << 60)};
  }
  return manifest;
}

Manifest read_manifest(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder)) {
    fail(KVCONV_BUNDLE_ERROR, "There is no bundle at ", shown(folder),
         ". Make one with: kvconv export MODEL -o BUNDLE");
  }
  if (!std::filesystem::is_regular_file(folder / kManifestFile)) {
    fail(KVCONV_BUNDLE_ERROR, shown(folder), " is not a bundle: it has no ", kManifestFile,
         ". Make one with: kvconv export MODEL -o BUNDLE");
  }
  std::string raw = read_file(folder / kManifestFile);
  Json document;
  try {
    document = parse_json(raw);
  } catch (const std::runtime_error& error) {
    fail_damaged(text("it is not JSON (", error.what(), ")"));
  }
  const auto* object = document.get<Json::Object>();
  if (object == nullptr) fail_damaged("it is not a JSON object");
  if (const auto version = object->find("format_version"); version != object->end()) {
    const std::int64_t* number = version->second.get<std::int64_t>();
    if (number != nullptr && *number > kFormatVersion) {
      fail(KVCONV_BUNDLE_ERROR, kManifestFile, " has format version ", *number,
           "; this kvconv reads up to ", kFormatVersion,
           ". Upgrade kvconv, or export the model again.");
    }
  }
  const auto found = object->find(kChecksumKey);
  const std::string* checksum = found == object->end() ? nullptr : found->second.get<std::string>();
  if (checksum == nullptr || checksum->size() != kChecksumDigits) {
    fail_damaged(text("its ", kChecksumKey, " is missing"));
  }
  for (std::size_t at = 0; (at = raw.find(*checksum, at)) != std::string::npos;
       at += kChecksumDigits) {
    raw.replace(at, kChecksumDigits, kChecksumDigits, '0');
  }
  Sha256 hash;
  hash.update(raw);
  if (hash.digest() != *checksum) fail_damaged("its checksum does not match its content");
  return read_fields(document, folder);
}

std::string hash_file(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::vector<char> piece(1 << 18);
  Sha256 hash;
  while (stream) {
    stream.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    hash.update({piece.data(), static_cast<std::size_t>(stream.gcount())});
  }
  return hash.digest();
}

void check_file(const std::filesystem::path& folder, const std::string& name,
                const FileEntry& entry) {
  const std::filesystem::path path = folder / utf8_path(name);
  if (!std::filesystem::is_regular_file(path)) {
    fail(KVCONV_BUNDLE_ERROR, "The bundle ", shown(folder), " is incomplete: ", name,
         " is missing. Copy it again from where it came, or export the model again.");
  }
  const auto size = static_cast<std::int64_t>(std::filesystem::file_size(path));
  if (size != entry.size) {
    fail(KVCONV_BUNDLE_ERROR, name, " in ", shown(folder), " is damaged: it has ", size,
         " bytes, the manifest says ", entry.size,
         ". Copy it again from where it came, or export the model again.");
  }
  if (size < kHashedOnOpenBytes && hash_file(path) != entry.sha256) {
    fail(KVCONV_BUNDLE_ERROR, name, " in ", shown(folder),
         " is damaged: its sha256 differs from the manifest's. Copy it again from where it came, "
         "or export the "
         "model again.");
  }
}

}  // namespace

std::int64_t StoredTensor::slot_bytes() const {
  const std::int64_t bytes = element == ort::kFloat32                          ? 4
                             : element == ort::kInt8 || element == ort::kUInt8 ? 1
                                                                               : 2;
  return num_heads * width * bytes;
}

std::int64_t CacheLayer::slots(std::int64_t max_sequence_length) const {
  return std::min(capacity.value_or(max_sequence_length), max_sequence_length);
}

std::optional<std::int64_t> CacheLayer::slack() const {
  if (!capacity || !window_size) return std::nullopt;
  return *capacity - *window_size;
}

std::vector<StoredTensor> CacheLayer::stored_tensors() const {
  const std::int64_t heads = num_key_value_heads;
  const auto groups = [](std::int64_t width) { return (width + kGroupWidth - 1) / kGroupWidth; };
  const std::int64_t key_groups = groups(key_head_dim), value_groups = groups(value_head_dim);
  if (dtype == "int8" || dtype == "int4") {
    const bool is_int8 = dtype == "int8";
    const ort::ElementType element = is_int8 ? ort::kInt8 : ort::kUInt8;
    return {{"key", element, heads, is_int8 ? key_head_dim : 20 * key_groups},
            {"value", element, heads, is_int8 ? value_head_dim : 16 * value_groups},
            {"key_scale", ort::kBFloat16, heads, key_groups},
            {"value_scale", ort::kBFloat16, heads, value_groups}};
  }
  const ort::ElementType element = dtype == "float32"   ? ort::kFloat32
                                   : dtype == "float16" ? ort::kFloat16
                                                        : ort::kBFloat16;
  return {{"key", element, heads, key_head_dim}, {"value", element, heads, value_head_dim}};
}

std::int64_t Manifest::weight_bytes() const {
  std::int64_t bytes = 0;
  for (const std::string_view name : {kModelFile, kWeightsFile}) {
    const auto file = files.find(std::string(name));
    if (file != files.end()) bytes += file->second.size;
  }
  return bytes;
}

Manifest open_bundle(const std::filesystem::path& folder) {
  try {
    Manifest manifest = read_manifest(folder);
    for (const auto& [name, entry] : manifest.files) check_file(folder, name, entry);
    if (manifest.files.count(std::string(kModelFile)) == 0) {
      fail(KVCONV_BUNDLE_ERROR, "The bundle ", shown(folder), " has no ", kModelFile,
           ". Export the model again.");
    }
    return manifest;
  } catch (const std::filesystem::filesystem_error& error) {
    fail(KVCONV_BUNDLE_ERROR, "The bundle ", shown(folder), " cannot be read: ", error.what(), ".");
  }
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream content;
  content << stream.rdbuf();
  if (!stream) fail(KVCONV_BUNDLE_ERROR, shown(path), " cannot be read. Check its permissions.");
  return std::move(content).str();
}

}  // namespace kvconv::runtime
