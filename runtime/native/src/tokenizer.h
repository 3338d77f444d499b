// Text to token ids and back, through onnxruntime-extensions' C library, which is loaded at run
// time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace kvconv::runtime {

struct Message {
  std::string role, content;
};

struct TokenizerLibrary;
struct OrtxObject;

struct DisposeOrtx {
  void operator()(OrtxObject* object) const;
};
using Ortx = std::unique_ptr<OrtxObject, DisposeOrtx>;

class Tokenizer {
 public:
  // library: a file, a folder, or null. Throws KVCONV_BUNDLE_ERROR or KVCONV_LIBRARY_ERROR.
  Tokenizer(const std::filesystem::path& bundle, const char* library);

  std::vector<std::int32_t> encode(const std::string& text, bool add_special_tokens) const;
  std::string decode(std::span<const std::int32_t> ids) const;
  std::string render_chat(std::span<const Message> messages) const;

  // Returns whether an id has no text of its own.
  bool is_special(std::int32_t id) const;

 private:
  const std::filesystem::path bundle_;
  std::int64_t vocab_size_;
  std::string chat_template_;
  std::vector<std::int32_t> special_ids_;  // ascending
  Ortx object_;
  mutable std::mutex mutex_;  // the library's options are state of the tokenizer
};

// Turns ids into pieces of text which, joined, are the text of all ids; holds back what later ids
// may change.
//
// kvconv/runtime/tokenizer.py's Detokenizer: a piece is the difference between two texts with the
// same beginning.
class TextStream {
 public:
  explicit TextStream(std::shared_ptr<const Tokenizer> tokenizer)
      : tokenizer_(std::move(tokenizer)) {}

  const char* push(std::int32_t id);
  const char* flush();

 private:
  const std::shared_ptr<const Tokenizer> tokenizer_;
  std::vector<std::int32_t> ids_;
  std::size_t num_shown_ = 0;
  std::string shown_text_, piece_;
};

}  // namespace kvconv::runtime
