// kvconv for C++17: kvconv.h with owners, exceptions and iteration. Header only; link
// libkvconv_runtime.
//
//   #include <kvconv.hpp>
//   #include <iostream>
//
//   int main() try {
//     const kvconv::Model model("smollm2");
//     const kvconv::Tokenizer tokenizer("smollm2");
//     kvconv::Generator generator(model, 512);
//     generator.append(tokenizer.encode(tokenizer.render_chat({{"user", "What is the capital of
//     France?"}}), false)); for (const std::string& piece : kvconv::text(generator, tokenizer,
//     100)) std::cout << piece << std::flush;
//   } catch (const kvconv::Error& error) {
//     std::cerr << error.what() << '\n';
//     return 1;
//   }
//
// kvconv.h says what every function does, which errors it has, and what threads may do. Objects
// move and are not copied; they may be destroyed in any order.
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvconv.h"

namespace kvconv {

// A failure: kvconv.h's code, and a text of complete sentences.
class Error : public std::runtime_error {
 public:
  Error(kvconv_status code, const char* text) : std::runtime_error(text), code_(code) {}
  kvconv_status code() const noexcept { return code_; }

 private:
  kvconv_status code_;
};

inline void check(kvconv_status status) {
  if (status != KVCONV_OK) throw Error(status, kvconv_last_error());
}

namespace detail {

template <typename Handle, void (*destroy)(Handle*)>
struct Destroy {
  void operator()(Handle* handle) const noexcept { destroy(handle); }
};
template <typename Handle, void (*destroy)(Handle*)>
using Owner = std::unique_ptr<Handle, Destroy<Handle, destroy>>;

// Calls a function of (text, capacity, needed) twice: for the size, then for the text.
template <typename Fill>
std::string filled(Fill fill) {
  std::size_t needed = 0;
  const kvconv_status status = fill(nullptr, std::size_t{0}, &needed);
  if (status != KVCONV_BUFFER_TOO_SMALL) check(status);
  std::string text(needed, '\0');
  check(fill(text.data(), text.size(), &needed));
  text.pop_back();  // the zero byte
  return text;
}

template <typename Fill>
std::vector<std::int32_t> filled_ids(Fill fill) {
  std::int32_t needed = 0;
  const kvconv_status status = fill(nullptr, std::int32_t{0}, &needed);
  if (status != KVCONV_BUFFER_TOO_SMALL) check(status);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(needed));
  check(fill(ids.data(), needed, &needed));
  return ids;
}

}  // namespace detail

// How a model is opened; empty paths are searched for.
struct ModelOptions {
  int threads = 0;  // 0: a thread per core
  bool spin = true;
  bool use_bundle_library = false;
  std::string onnxruntime_library;
  std::string op_library;
};

class Model {
 public:
  explicit Model(const std::string& bundle, const ModelOptions& options = {}) {
    kvconv_model_options raw = KVCONV_MODEL_OPTIONS_INIT;
    raw.threads = options.threads;
    raw.no_spin = options.spin ? 0 : 1;
    raw.use_bundle_library = options.use_bundle_library ? 1 : 0;
    if (!options.onnxruntime_library.empty())
      raw.onnxruntime_library = options.onnxruntime_library.c_str();
    if (!options.op_library.empty()) raw.op_library = options.op_library.c_str();
    kvconv_model* handle = nullptr;
    check(kvconv_model_open(bundle.c_str(), &raw, &handle));
    handle_.reset(handle);
  }

  kvconv_model_info info() const {
    kvconv_model_info info{};
    info.struct_size = sizeof(info);
    check(kvconv_model_get_info(get(), &info));
    return info;
  }

  std::vector<std::int32_t> eos_token_ids() const {
    return detail::filled_ids([&](std::int32_t* ids, std::int32_t capacity, std::int32_t* needed) {
      return kvconv_model_get_eos_token_ids(get(), ids, capacity, needed);
    });
  }

  kvconv_model* get() const noexcept { return handle_.get(); }

 private:
  detail::Owner<kvconv_model, kvconv_model_destroy> handle_;
};

// How tokens are chosen; greedy as it is.
struct Sampling {
  double temperature = 0;
  int top_k = 0;
  double top_p = 1;
  double min_p = 0;
  double repetition_penalty = 1;

  kvconv_sampling raw() const {
    kvconv_sampling sampling = KVCONV_SAMPLING_INIT;
    sampling.temperature = temperature;
    sampling.top_k = top_k;
    sampling.top_p = top_p;
    sampling.min_p = min_p;
    sampling.repetition_penalty = repetition_penalty;
    return sampling;
  }
};

struct Token {
  std::int32_t id;
  kvconv_finish finish;
};

class Generator {
 public:
  // capacity, prefill_chunk: 0 for the default.
  explicit Generator(const Model& model, std::int32_t capacity = 0,
                     std::int32_t prefill_chunk = 0) {
    kvconv_generator* handle = nullptr;
    check(kvconv_generator_create(model.get(), capacity, prefill_chunk, &handle));
    handle_.reset(handle);
  }

  void append(const std::vector<std::int32_t>& token_ids) {
    check(kvconv_generator_append(get(), token_ids.data(),
                                  static_cast<std::int32_t>(token_ids.size())));
  }

  Token next(const Sampling& sampling = {}) {
    const kvconv_sampling raw = sampling.raw();
    std::int32_t id = 0, finish = KVCONV_FINISH_NONE;
    check(kvconv_generator_next(get(), &raw, &id, &finish));
    return {id, static_cast<kvconv_finish>(finish)};
  }

  // Valid until the next call for this generator.
  const float* logits() {
    const float* logits = nullptr;
    std::int32_t count = 0;
    check(kvconv_generator_get_logits(get(), &logits, &count));
    return logits;
  }

  std::vector<std::int32_t> tokens() const {
    return detail::filled_ids([&](std::int32_t* ids, std::int32_t capacity, std::int32_t* needed) {
      return kvconv_generator_get_tokens(get(), ids, capacity, needed);
    });
  }

  kvconv_generator_stats stats() const {
    kvconv_generator_stats stats{};
    stats.struct_size = sizeof(stats);
    check(kvconv_generator_get_stats(get(), &stats));
    return stats;
  }

  void seed(std::uint64_t seed) { check(kvconv_generator_seed(get(), seed)); }
  void rewind(std::int32_t length) { check(kvconv_generator_rewind(get(), length)); }
  void reset() { check(kvconv_generator_reset(get())); }

  Generator fork() const {
    kvconv_generator* handle = nullptr;
    check(kvconv_generator_fork(get(), &handle));
    return Generator(handle);
  }

  kvconv_generator* get() const noexcept { return handle_.get(); }

 private:
  explicit Generator(kvconv_generator* handle) : handle_(handle) {}

  detail::Owner<kvconv_generator, kvconv_generator_destroy> handle_;
};

struct Message {
  std::string role, content;
};

class Tokenizer {
 public:
  explicit Tokenizer(const std::string& bundle, const std::string& library = {}) {
    kvconv_tokenizer* handle = nullptr;
    check(kvconv_tokenizer_open(bundle.c_str(), library.empty() ? nullptr : library.c_str(),
                                &handle));
    handle_.reset(handle);
  }

  std::vector<std::int32_t> encode(const std::string& text, bool add_special_tokens = true) const {
    return detail::filled_ids([&](std::int32_t* ids, std::int32_t capacity, std::int32_t* needed) {
      return kvconv_tokenizer_encode(get(), text.c_str(), add_special_tokens ? 1 : 0, ids, capacity,
                                     needed);
    });
  }

  std::string decode(const std::vector<std::int32_t>& ids) const {
    return detail::filled([&](char* text, std::size_t capacity, std::size_t* needed) {
      return kvconv_tokenizer_decode(get(), ids.data(), static_cast<std::int32_t>(ids.size()), text,
                                     capacity, needed);
    });
  }

  std::string render_chat(const std::vector<Message>& messages) const {
    std::vector<const char*> roles, contents;
    for (const Message& message : messages) {
      roles.push_back(message.role.c_str());
      contents.push_back(message.content.c_str());
    }
    return detail::filled([&](char* text, std::size_t capacity, std::size_t* needed) {
      return kvconv_tokenizer_render_chat(get(), roles.data(), contents.data(),
                                          static_cast<std::int32_t>(messages.size()), text,
                                          capacity, needed);
    });
  }

  kvconv_tokenizer* get() const noexcept { return handle_.get(); }

 private:
  detail::Owner<kvconv_tokenizer, kvconv_tokenizer_destroy> handle_;
};

// Turns ids into pieces of text, each of whole characters.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer) {
    kvconv_text_stream* handle = nullptr;
    check(kvconv_text_stream_create(tokenizer.get(), &handle));
    handle_.reset(handle);
  }

  std::string push(std::int32_t token_id) {
    const char* text = nullptr;
    check(kvconv_text_stream_push(handle_.get(), token_id, &text));
    return text;
  }

  std::string flush() {
    const char* text = nullptr;
    check(kvconv_text_stream_flush(handle_.get(), &text));
    return text;
  }

 private:
  detail::Owner<kvconv_text_stream, kvconv_text_stream_destroy> handle_;
};

namespace detail {

// What a range-based for runs over: `next` gives elements until there is none.
template <typename Value, typename Next>
class Stream {
 public:
  explicit Stream(Next next) : next_(std::move(next)) {}

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Value;
    using difference_type = std::ptrdiff_t;
    using pointer = const Value*;
    using reference = const Value&;

    reference operator*() const { return *value_; }
    pointer operator->() const { return &*value_; }
    Iterator& operator++() {
      value_ = stream_->next_();
      return *this;
    }
    void operator++(int) { ++*this; }
    // Equal to the end once there is nothing more.
    bool operator==(const Iterator& other) const {
      return value_.has_value() == other.value_.has_value();
    }
    bool operator!=(const Iterator& other) const { return !(*this == other); }

   private:
    friend class Stream;
    Stream* stream_ = nullptr;
    std::optional<Value> value_;
  };

  Iterator begin() {
    Iterator first;
    first.stream_ = this;
    return ++first;
  }
  Iterator end() const { return {}; }

 private:
  Next next_;
};

}  // namespace detail

// The next tokens, at most `max_new_tokens`, up to one that ends the text or fills the cache. Runs
// as it is iterated; the generator must live as long.
inline auto tokens(Generator& generator, std::int32_t max_new_tokens,
                   const Sampling& sampling = {}) {
  auto next = [&generator, left = max_new_tokens, sampling]() mutable -> std::optional<Token> {
    if (left-- <= 0) return std::nullopt;
    const Token token = generator.next(sampling);
    if (token.finish != KVCONV_FINISH_NONE) left = 0;
    return token;
  };
  return detail::Stream<Token, decltype(next)>(std::move(next));
}

// The text of the same tokens, in pieces that are not empty.
inline auto text(Generator& generator, const Tokenizer& tokenizer, std::int32_t max_new_tokens,
                 const Sampling& sampling = {}) {
  auto stream = std::make_shared<TextStream>(tokenizer);
  auto next = [&generator, stream, left = max_new_tokens,
               sampling]() mutable -> std::optional<std::string> {
    while (left > 0) {
      const Token token = generator.next(sampling);
      left = token.finish == KVCONV_FINISH_NONE ? left - 1 : 0;
      std::string piece = token.finish == KVCONV_FINISH_EOS ? "" : stream->push(token.id);
      if (left == 0) piece += stream->flush();
      if (!piece.empty()) return piece;
    }
    return std::nullopt;
  };
  return detail::Stream<std::string, decltype(next)>(std::move(next));
}

}  // namespace kvconv
