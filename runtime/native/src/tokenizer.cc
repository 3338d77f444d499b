#include "tokenizer.h"

#include <algorithm>
#include <array>

#include "error.h"
#include "json.h"
#include "manifest.h"
#include "ort_library.h"

namespace kvconv::runtime {

// onnxruntime-extensions' C interface (ortx_tokenizer.h, ortx_utils.h), as far as it is used.
struct TokenizerLibrary {
  struct Blob {
    const char *config, *vocabulary, *token_module, *raw_model, *reserved;
    std::size_t config_size, vocabulary_size, token_module_size, raw_model_size, reserved_size;
  };
  int (*OrtxCreateTokenizerFromBlob)(OrtxObject**, const Blob*);
  int (*OrtxUpdateTokenizerOptions)(OrtxObject*, const char**, const char**, std::size_t);
  int (*OrtxTokenize)(const OrtxObject*, const char**, std::size_t, OrtxObject**);
  int (*OrtxTokenId2DArrayGetItem)(const OrtxObject*, std::size_t, const std::uint32_t**,
                                   std::size_t*);
  int (*OrtxDetokenize1D)(const OrtxObject*, const std::uint32_t*, std::size_t, OrtxObject**);
  int (*OrtxStringArrayGetItem)(const OrtxObject*, std::size_t, const char**);
  int (*OrtxApplyChatTemplate)(const OrtxObject*, const char*, const char*, const char*,
                               OrtxObject**, bool, bool);
  int (*OrtxTensorResultGetAt)(OrtxObject*, std::size_t, OrtxObject**);
  int (*OrtxGetTensorData)(OrtxObject*, const void**, const std::int64_t**, std::size_t*);
  int (*OrtxDispose)(OrtxObject**);
  const char* (*OrtxGetLastErrorMessage)();

  std::string last_message() const {
    std::string message = OrtxGetLastErrorMessage();
    message.erase(message.find_last_not_of(". \n") + 1);
    return message + ".";
  }
};

namespace {

constexpr std::size_t kMostShown = 2;  // ids that a stream keeps as a beginning
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
constexpr std::string_view kTokenizerFile = "tokenizer.json", kConfigFile = "tokenizer_config.json",
                           kChatTemplateFile = "chat_template.jinja";

const TokenizerLibrary* loaded = nullptr;  // never unloaded

const TokenizerLibrary& load_library(const char* path) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (loaded != nullptr) return *loaded;
  const std::filesystem::path own = own_folder();
  const DynamicLibrary library = DynamicLibrary::open({
      .what = "tokenizer library (onnxruntime-extensions)",
      .option = "the library argument",
      .path = path,
      .variable = "KVCONV_TOKENIZER",
      .stems = {"libortextensions.", "ortextensions.", "_extensions_pydll."},
      .folders = {own, own / ".." / ".." / "onnxruntime_extensions"},
      .names = {text("libortextensions", kLibrarySuffix)},
  });
  auto found = std::make_unique<TokenizerLibrary>();
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(library.find(name));
    if (function == nullptr) {
      fail(KVCONV_LIBRARY_ERROR, "The tokenizer library ", shown(library.path()), " has no ", name,
           ". Install onnxruntime-extensions 0.15 or newer.");
    }
  };
  find(found->OrtxCreateTokenizerFromBlob, "OrtxCreateTokenizerFromBlob");
  find(found->OrtxUpdateTokenizerOptions, "OrtxUpdateTokenizerOptions");
  find(found->OrtxTokenize, "OrtxTokenize");
  find(found->OrtxTokenId2DArrayGetItem, "OrtxTokenId2DArrayGetItem");
  find(found->OrtxDetokenize1D, "OrtxDetokenize1D");
  find(found->OrtxStringArrayGetItem, "OrtxStringArrayGetItem");
  find(found->OrtxApplyChatTemplate, "OrtxApplyChatTemplate");
  find(found->OrtxTensorResultGetAt, "OrtxTensorResultGetAt");
  find(found->OrtxGetTensorData, "OrtxGetTensorData");
  find(found->OrtxDispose, "OrtxDispose");
  find(found->OrtxGetLastErrorMessage, "OrtxGetLastErrorMessage");
  loaded = found.release();
  return *loaded;
}

// Returns the text of a file that the manifest lists; refused where it does not.
std::string read_listed(const Manifest& manifest, std::string_view name) {
  if (manifest.files.count(std::string(name)) == 0) {
    fail(KVCONV_BUNDLE_ERROR, "The bundle ", shown(manifest.folder), " has no ", name,
         ": its model came without a tokenizer. Put the tokenizer's files into the model's folder "
         "and export it "
         "again, or give token ids.");
  }
  return read_file(manifest.folder / name);
}

const Json::Object& object_of(const Json& json, std::string_view file) {
  const auto* object = json.get<Json::Object>();
  if (object == nullptr)
    fail(KVCONV_BUNDLE_ERROR, file, " is not a JSON object. Export the model again.");
  return *object;
}

// transformers writes this for classes that have no code of their own; the library knows only
// classes.
constexpr std::string_view kNoClass = "TokenizersBackend";

// Returns the class whose code reads a tokenizer.json as it is meant; empty where none is known to.
std::string_view class_of(std::string_view tokenizer) {
  const std::string_view model = find_member(tokenizer, "model");
  if (model.empty() || find_member(model, "type") != "\"BPE\"") return {};
  const bool has_bytes =
      find_member(tokenizer, "pre_tokenizer").find("\"ByteLevel\"") != std::string_view::npos;
  if (has_bytes) return "GPT2TokenizerFast";
  const bool has_words =
      find_member(tokenizer, "normalizer").find("\"Prepend\"") != std::string_view::npos;
  if (find_member(model, "byte_fallback") == "true")
    return has_words ? "LlamaTokenizer" : "GemmaTokenizer";
  return {};
}

}  // namespace

void DisposeOrtx::operator()(OrtxObject* object) const { loaded->OrtxDispose(&object); }

Tokenizer::Tokenizer(const std::filesystem::path& bundle, const char* library) : bundle_(bundle) {
  const Manifest manifest = open_bundle(bundle);
  vocab_size_ = manifest.vocab_size;
  const std::string tokenizer = read_listed(manifest, kTokenizerFile);
  std::string config = read_listed(manifest, kConfigFile);
  const std::string chat = manifest.files.count(std::string(kChatTemplateFile)) != 0
                               ? read_listed(manifest, kChatTemplateFile)
                               : "";
  chat_template_ = chat;
  try {
    const std::string_view added = find_member(tokenizer, "added_tokens");
    const Json tokens = parse_json(added.empty() ? "[]" : added);
    for (const Json& json :
         tokens.get<Json::Array>() != nullptr ? *tokens.get<Json::Array>() : Json::Array()) {
      const Json::Object& token = object_of(json, kTokenizerFile);
      const auto special = token.find("special"), id = token.find("id");
      const bool* is_special = special == token.end() ? nullptr : special->second.get<bool>();
      const std::int64_t* number = id == token.end() ? nullptr : id->second.get<std::int64_t>();
      if (is_special == nullptr || number == nullptr)
        throw std::runtime_error("an added token lacks id or special");
      if (*is_special) special_ids_.push_back(static_cast<std::int32_t>(*number));
    }
    std::sort(special_ids_.begin(), special_ids_.end());
    const std::string_view name = find_member(config, "tokenizer_class");
    if (name.empty() || name == quote_json(kNoClass)) {
      const std::string_view known = class_of(tokenizer);
      if (known.empty()) {
        fail(KVCONV_LIBRARY_ERROR, "The tokenizer of ", shown(bundle),
             " is of a kind that onnxruntime-extensions ", "does not know (its class is ",
             name.empty() ? "not said" : kNoClass, "). Tokenize elsewhere and give token ids.");
      }
      const bool is_absent = name.empty();
      const std::size_t at =
          is_absent ? config.find('{') + 1 : static_cast<std::size_t>(name.data() - config.data());
      config.replace(
          at, name.size(),
          is_absent ? text("\"tokenizer_class\":", quote_json(known), ",") : quote_json(known));
    }
  } catch (const Error&) {
    throw;
  } catch (const std::runtime_error& error) {
    fail(KVCONV_BUNDLE_ERROR, "The tokenizer's files in ", shown(bundle),
         " are damaged: ", error.what(), ". Export the model again.");
  }
  const TokenizerLibrary& ortx = load_library(library);
  const TokenizerLibrary::Blob blob{config.data(), tokenizer.data(), nullptr, nullptr, nullptr,
                                    config.size(), tokenizer.size(), 0,       0,       0};
  OrtxObject* created = nullptr;
  if (ortx.OrtxCreateTokenizerFromBlob(&created, &blob) != 0) {
    fail(KVCONV_LIBRARY_ERROR, "onnxruntime-extensions refuses the tokenizer of ", shown(bundle),
         ": ", ortx.last_message(), " Tokenize elsewhere and give token ids.");
  }
  object_.reset(created);
}

std::vector<std::int32_t> Tokenizer::encode(const std::string& text,
                                            bool add_special_tokens) const {
  if (!is_utf8(text))
    fail(KVCONV_PROMPT_ERROR, "The prompt is not valid UTF-8. Convert it to UTF-8 first.");
  const char* option = "add_special_tokens";
  const char* value = add_special_tokens ? "true" : "false";
  const char* input = text.c_str();
  OrtxObject* created = nullptr;
  const std::lock_guard lock(mutex_);
  if (loaded->OrtxUpdateTokenizerOptions(object_.get(), &option, &value, 1) != 0 ||
      loaded->OrtxTokenize(object_.get(), &input, 1, &created) != 0) {
    fail(KVCONV_PROMPT_ERROR, "The prompt cannot be encoded: ", loaded->last_message());
  }
  const Ortx result(created);
  const std::uint32_t* ids = nullptr;
  std::size_t count = 0;
  if (loaded->OrtxTokenId2DArrayGetItem(created, 0, &ids, &count) != 0) {
    fail(KVCONV_PROMPT_ERROR, "The prompt cannot be encoded: ", loaded->last_message());
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (ids[i] >= vocab_size_) {
      fail(KVCONV_PROMPT_ERROR, "The prompt contains token ", ids[i],
           " of the tokenizer, but the model knows only the ", vocab_size_, " ids below ",
           vocab_size_, ". Leave it out of the prompt.");
    }
  }
  return {ids, ids + count};
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
  std::vector<std::uint32_t>
      shown;  // the library takes no empty list, and shows U+FFFD for special tokens alone
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= vocab_size_) {
      fail(KVCONV_INVALID_ARGUMENT, "ids holds ", id,
           "; token ids are at least 0 and below vocab_size ", vocab_size_);
    }
    if (!is_special(id)) shown.push_back(static_cast<std::uint32_t>(id));
  }
  if (shown.empty()) return {};
  OrtxObject* created = nullptr;
  const char* text = nullptr;
  const std::lock_guard lock(mutex_);
  if (loaded->OrtxDetokenize1D(object_.get(), shown.data(), shown.size(), &created) != 0) {
    fail(KVCONV_FAILED, "The ids cannot be decoded: ", loaded->last_message());
  }
  const Ortx result(created);
  if (loaded->OrtxStringArrayGetItem(created, 0, &text) != 0) {
    fail(KVCONV_FAILED, "The ids cannot be decoded: ", loaded->last_message());
  }
  return text;
}

std::string Tokenizer::render_chat(std::span<const Message> messages) const {
  if (chat_template_.empty()) {
    fail(KVCONV_PROMPT_ERROR, "The bundle ", shown(bundle_),
         " has no chat template. Give the model raw text.");
  }
  std::string json = "[";
  for (const Message& message : messages) {
    if (!is_utf8(message.role) || !is_utf8(message.content)) {
      fail(KVCONV_PROMPT_ERROR, "A message is not valid UTF-8. Convert it to UTF-8 first.");
    }
    json += text(json.size() > 1 ? "," : "", "{\"role\":", quote_json(message.role),
                 ",\"content\":", quote_json(message.content), "}");
  }
  json += "]";
  OrtxObject *created = nullptr, *tensor = nullptr;
  const void* rendered = nullptr;
  const std::lock_guard lock(mutex_);
  if (loaded->OrtxApplyChatTemplate(object_.get(), chat_template_.c_str(), json.c_str(), nullptr,
                                    &created, true, false) != 0) {
    fail(KVCONV_PROMPT_ERROR, "The chat template of ", shown(bundle_),
         " refuses the conversation: ", loaded->last_message());
  }
  const Ortx result(created);
  if (loaded->OrtxTensorResultGetAt(created, 0, &tensor) != 0)
    fail(KVCONV_FAILED, loaded->last_message());
  const Ortx owned(tensor);
  if (loaded->OrtxGetTensorData(tensor, &rendered, nullptr, nullptr) != 0)
    fail(KVCONV_FAILED, loaded->last_message());
  return static_cast<const char*>(rendered);
}

bool Tokenizer::is_special(std::int32_t id) const {
  return std::binary_search(special_ids_.begin(), special_ids_.end(), id);
}

const char* TextStream::push(std::int32_t id) {
  piece_.clear();
  // Ids without text are not kept: a beginning without text would lose the space in front of the
  // next.
  if (tokenizer_->is_special(id)) return piece_.c_str();
  ids_.push_back(id);
  std::string text = tokenizer_->decode(ids_);
  const bool may_change =
      text.size() >= kReplacement.size() &&
      text.compare(text.size() - kReplacement.size(), kReplacement.size(), kReplacement) == 0;
  if (text.size() <= shown_text_.size() || may_change) {
    if (text.size() <= shown_text_.size()) ids_.pop_back();
    return piece_.c_str();
  }
  piece_ = text.substr(shown_text_.size());
  if (ids_.size() > kMostShown) {
    ids_.erase(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(num_shown_));
    text = tokenizer_->decode(ids_);
  }
  num_shown_ = ids_.size();
  shown_text_ = std::move(text);
  return piece_.c_str();
}

const char* TextStream::flush() {
  const std::string text = tokenizer_->decode(ids_);
  piece_ = text.size() > shown_text_.size() ? text.substr(shown_text_.size()) : "";
  ids_.clear();
  num_shown_ = 0;
  shown_text_.clear();
  return piece_.c_str();
}

}  // namespace kvconv::runtime
