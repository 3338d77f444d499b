#include "kernel_pack.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <set>
#include <string_view>

#include "../op_support.h"
#include "kvconv/text.h"
#include "sha256.h"

namespace kvconv::cuda {
namespace {

constexpr std::string_view kMagic("KVCKERN\0", 8);
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHeaderBytes = 64;
constexpr std::size_t kEntryBytes = 320;
constexpr std::size_t kImageAlignment = 64;
constexpr std::size_t kMaxArguments = 64;
constexpr std::size_t kFunctionBytes = 96;
constexpr std::size_t kMaxWarps = 32;
constexpr int kLeastCapability = 80;  // what Triton's kernels need
constexpr const char* kRemedy = " Run `kvconv build` on the bundle again, or export it again.";

[[noreturn]] void refuse_pack(const std::string& what) {
  refuse(text("the kernel pack ", what, kRemedy));
}

// Reads little-endian numbers one after the other.
class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  std::uint32_t u32() { return static_cast<std::uint32_t>(number(4)); }
  std::uint64_t u64() { return number(8); }
  std::span<const std::uint8_t> take(std::size_t count) {
    const auto taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }

 private:
  std::uint64_t number(std::size_t width) {
    std::uint64_t value = 0;
    const auto taken = take(width);
    for (std::size_t i = 0; i < width; ++i) value |= std::uint64_t{taken[i]} << (8 * i);
    return value;
  }

  std::span<const std::uint8_t> bytes_;
};

bool has_digest(std::span<const std::uint8_t> bytes, std::span<const std::uint8_t> digest) {
  const auto actual = sha256(bytes);
  return std::equal(actual.begin(), actual.end(), digest.begin(), digest.end());
}

// From ONNX's element types; uint8 is an int4 cache.
std::optional<DataType> type_of(std::uint32_t onnx_type) {
  switch (onnx_type) {
    case 1:
      return DataType::kFloat32;
    case 2:
      return DataType::kInt4;
    case 3:
      return DataType::kInt8;
    case 10:
      return DataType::kFloat16;
    case 16:
      return DataType::kBFloat16;
    default:
      return std::nullopt;
  }
}

bool is_argument(std::uint8_t id) {
  return (id >= 1 && id <= 18) || (id >= 32 && id <= 34) || (id >= 40 && id <= 52) || id == 64 ||
         id == 65;
}

// How many of the pack's parts there can be is known: every read of `entry` stays inside it.
Kernel read_entry(std::span<const std::uint8_t> entry, std::size_t index, std::size_t table_end,
                  std::span<const std::uint8_t> file) {
  const auto require = [index](bool condition, const auto&... what) {
    if (!condition) refuse_pack(text("is damaged: kernel ", index, " ", what..., "."));
  };
  Reader reader(entry);
  Kernel kernel;
  const std::uint32_t kind = reader.u32();
  require(kind >= 1 && kind <= 4, "has the unknown kind ", kind);
  kernel.variant.kind = static_cast<KernelKind>(kind);
  const std::uint32_t format = reader.u32();
  require(format == 1 || format == 2, "has the unknown format ", format);
  kernel.format = static_cast<ImageFormat>(format);
  const std::uint32_t capability = reader.u32();
  require(capability >= 10 && capability < 10000, "has compute capability ", capability);
  kernel.compute_capability = static_cast<int>(capability);
  for (DataType* type : {&kernel.variant.activation_type, &kernel.variant.cache_type}) {
    const std::uint32_t onnx_type = reader.u32();
    const std::optional<DataType> known = type_of(onnx_type);
    require(known.has_value(), "has the unknown element type ", onnx_type);
    *type = *known;
  }
  kernel.variant.head_dim = reader.u32();
  kernel.variant.value_head_dim = reader.u32();
  kernel.variant.group = reader.u32();
  kernel.variant.rotary_dim = reader.u32();
  kernel.variant.features = reader.u32();
  kernel.num_warps = reader.u32();
  require(kernel.num_warps >= 1 && kernel.num_warps <= kMaxWarps, "has ", kernel.num_warps,
          " warps; 1 to ", kMaxWarps, " can be");
  kernel.shared_bytes = reader.u32();
  kernel.tile_m = reader.u32();
  kernel.tile_n = reader.u32();
  require(kernel.tile_m >= 1 && kernel.tile_n >= 1, "has tiles of ", kernel.tile_m, " x ",
          kernel.tile_n);
  reader.u32();  // registers and spilled bytes are for people
  reader.u32();
  const std::uint32_t num_arguments = reader.u32();
  require(num_arguments <= kMaxArguments, "has ", num_arguments, " arguments; ", kMaxArguments,
          " can be");
  reader.u32();

  const std::uint64_t offset = reader.u64();
  const std::uint64_t size = reader.u64();
  const auto digest = reader.take(32);
  require(offset % kImageAlignment == 0 && offset >= table_end && offset <= file.size() &&
              size >= 1 && size <= file.size() - offset,
          "is said to be ", size, " bytes at ", offset, ", and the file has ", file.size());
  kernel.image = file.subspan(offset, size);
  require(has_digest(kernel.image, digest), "has another sha256 than its table says");
  require(kernel.format != ImageFormat::kPtx || kernel.image.back() == 0,
          "is PTX text without its final zero");

  const auto function = reader.take(kFunctionBytes);
  const auto end = std::find(function.begin(), function.end(), std::uint8_t{0});
  require(end != function.begin() && end != function.end(), "has no name");
  kernel.function.assign(function.begin(), end);
  for (std::uint8_t id : reader.take(kMaxArguments).first(num_arguments)) {
    require(is_argument(id), "takes the unknown argument ", static_cast<int>(id));
    kernel.arguments.push_back(static_cast<Argument>(id));
  }
  return kernel;
}

}  // namespace

std::string capability_text(int capability) { return text(capability / 10, ".", capability % 10); }

std::string remedy(const Device& device) {
  if (device.compute_capability < kLeastCapability) {
    return text("kvconv's kernels need ", capability_text(kLeastCapability),
                " or newer: use the CPU.");
  }
  return text("Run `kvconv build BUNDLE --gpu sm_", device.compute_capability,
              "`, or use the CPU.");
}

std::string variant_text(const Variant& variant) {
  static constexpr std::array kinds = {"append", "prefill", "decode", "combine"};
  std::string result =
      text(kinds[static_cast<std::size_t>(variant.kind) - 1], " of ",
           name_of(variant.activation_type), " over ", name_of(variant.cache_type),
           " caches, head_dim ", variant.head_dim, ", value_head_dim ", variant.value_head_dim,
           ", ", variant.group, " query heads a key/value head, rotary_dim ", variant.rotary_dim);
  static constexpr std::array features = {"rotary", "interleaved", "mask",   "bias", "alibi",
                                          "sink",   "softcap",     "window", "ring", "causal"};
  for (std::size_t i = 0; i < features.size(); ++i) {
    if ((variant.features >> i & 1U) != 0) result += text(", ", features[i]);
  }
  return result;
}

KernelPack::KernelPack(std::span<const std::uint8_t> file) : file_(file.begin(), file.end()) {
  if (file_.size() < kHeaderBytes) {
    refuse_pack(text("is cut short: it has ", file_.size(), " bytes, and its header alone ",
                     kHeaderBytes, "."));
  }
  const std::span<const std::uint8_t> bytes(file_);
  Reader header(bytes);
  if (std::memcmp(header.take(kMagic.size()).data(), kMagic.data(), kMagic.size()) != 0) {
    refuse_pack("does not begin as a kernel pack does; it is another file.");
  }
  const std::uint32_t version = header.u32();
  if (version != kVersion) {
    refuse_pack(text("has version ", version, "; this kvconv reads version ", kVersion, "."));
  }
  const std::uint64_t num_kernels = header.u32();
  const std::uint64_t file_size = header.u64();
  if (file_size != file_.size()) {
    refuse_pack(text("has ", file_.size(), " bytes, and its header says ", file_size,
                     "; it is cut short or has grown."));
  }
  if (!has_digest(bytes.subspan(kHeaderBytes), header.take(32))) {
    refuse_pack("is damaged: its sha256 is not what its header says.");
  }
  if (num_kernels > (file_.size() - kHeaderBytes) / kEntryBytes) {
    refuse_pack(text("is damaged: its header says ", num_kernels, " kernels, and ", file_.size(),
                     " bytes do not hold their table."));
  }
  const std::size_t table_end = kHeaderBytes + num_kernels * kEntryBytes;
  for (std::size_t i = 0; i < num_kernels; ++i) {
    kernels_.push_back(read_entry(bytes.subspan(kHeaderBytes + i * kEntryBytes, kEntryBytes), i,
                                  table_end, bytes));
  }
}

bool KernelPack::is_copy_of(std::span<const std::uint8_t> file) const {
  return std::equal(file.begin(), file.end(), file_.begin(), file_.end());
}

bool KernelPack::runs_on(const Kernel& kernel, const Device& device) {
  if (kernel.shared_bytes > device.max_shared_bytes) return false;
  if (kernel.compute_capability > device.compute_capability) return false;
  return kernel.format == ImageFormat::kPtx ||
         kernel.compute_capability / 10 == device.compute_capability / 10;
}

std::size_t KernelPack::find(const Variant& variant, const Device& device) const {
  std::optional<std::size_t> best;
  bool has_variant = false;
  for (std::size_t i = 0; i < kernels_.size(); ++i) {
    if (kernels_[i].variant != variant) continue;
    has_variant = true;
    if (!runs_on(kernels_[i], device)) continue;
    // Machine code before PTX, which the driver has to compile; then the newer one.
    const auto rank = [this](std::size_t index) {
      return std::pair(kernels_[index].format == ImageFormat::kCubin,
                       kernels_[index].compute_capability);
    };
    if (!best || rank(i) > rank(*best)) best = i;
  }
  if (best) return *best;
  if (!has_variant) {
    refuse(text("the kernel pack has no ", variant_text(variant),
                ". Run `kvconv build` on the bundle again, or use the CPU."));
  }
  refuse(text("this GPU has compute capability ", capability_text(device.compute_capability),
              " and ", device.max_shared_bytes,
              " bytes of shared memory for a block; the kernel pack has ", gpus_text(), " of ",
              variant_text(variant), ". ", remedy(device)));
}

std::string KernelPack::gpus_text() const {
  std::set<std::pair<int, int>> gpus;
  for (const Kernel& kernel : kernels_) {
    gpus.emplace(static_cast<int>(kernel.format), kernel.compute_capability);
  }
  std::string result;
  for (const auto& [format, capability] : gpus) {
    if (!result.empty()) result += ", ";
    result += format == static_cast<int>(ImageFormat::kCubin)
                  ? text("sm_", capability)
                  : text("PTX from ", capability_text(capability));
  }
  return result.empty() ? "no kernels" : result;
}

}  // namespace kvconv::cuda
