// The C ABI: checks of arguments and handles, and translation of exceptions; no logic.
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <variant>

#include "error.h"
#include "generator.h"
#include "kvconv.h"
#include "memory.h"
#include "session.h"
#include "tokenizer.h"

namespace kvconv::runtime {
namespace {

thread_local std::string last_error;

// What a handle names. Those that serve one thread at a time can tell when a second one comes.
template <typename Type>
struct Exclusive {
  std::unique_ptr<Type> object;
  std::atomic_flag is_busy = ATOMIC_FLAG_INIT;
};
using ModelObject = std::shared_ptr<const LoadedModel>;
using GeneratorObject = std::shared_ptr<Exclusive<Generator>>;
using TokenizerObject = std::shared_ptr<const Tokenizer>;
using StreamObject = std::shared_ptr<Exclusive<TextStream>>;

// All living handles. A handle is a number that is never used again, so that every misuse is found:
// NULL, destroyed twice or used afterwards, of another kind. Objects live until the last call that
// uses them ends.
class Handles {
 public:
  template <typename Handle, typename Object>
  Handle* add(Object object) {
    const std::lock_guard lock(mutex_);
    next_ += 16;  // a number that no program gets by adding to another handle
    objects_.emplace(next_, std::move(object));
    return reinterpret_cast<Handle*>(next_);
  }

  template <typename Object>
  Object find(const void* handle, const char* kind) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<std::uintptr_t>(handle));
    const Object* object = found == objects_.end() ? nullptr : std::get_if<Object>(&found->second);
    if (object == nullptr) {
      fail(KVCONV_INVALID_HANDLE, "The ", kind, " is ", handle == nullptr ? "NULL" : "not one",
           handle == nullptr ? "" : ": it was destroyed, or is of another kind",
           ". Use what the library gave, before it is destroyed.");
    }
    return *object;
  }

  template <typename Object>
  void remove(const void* handle) {
    Any removed;  // destroyed without the lock
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<std::uintptr_t>(handle));
    if (found == objects_.end() || !std::holds_alternative<Object>(found->second)) return;
    removed = std::move(found->second);
    objects_.erase(found);
  }

 private:
  using Any =
      std::variant<std::monostate, ModelObject, GeneratorObject, TokenizerObject, StreamObject>;

  std::mutex mutex_;
  std::map<std::uintptr_t, Any> objects_;
  std::uintptr_t next_ = 0x1000;
};

// Never destroyed: other threads may outlive main.
Handles& handles() {
  static Handles& all = *new Handles;
  return all;
}

template <typename Body>
kvconv_status guarded(Body body) {
  try {
    last_error.clear();
    body();
    return KVCONV_OK;
  } catch (const Error& error) {
    last_error = error.what();
    return error.code;
  } catch (const std::bad_alloc&) {
    last_error = "Memory could not be allocated. Close other programs, or use less.";
    return KVCONV_NOT_ENOUGH_MEMORY;
  } catch (const std::exception& error) {
    last_error = text("Something went wrong that kvconv did not foresee: ", error.what(),
                      ". Please report it.");
    return KVCONV_FAILED;
  }
}

void require(const void* pointer, const char* name) {
  if (pointer == nullptr)
    fail(KVCONV_INVALID_ARGUMENT, name, " is NULL; it must point to something.");
}

template <typename Struct>
void require_struct(const Struct* pointer, const char* name) {
  require(pointer, name);
  if (pointer->struct_size != sizeof(Struct)) {
    fail(KVCONV_ABI_MISMATCH, name, " has struct_size ", pointer->struct_size,
         "; this library knows ", sizeof(Struct),
         " bytes. Set it to the size of the structure, and build with the kvconv.h of this "
         "library.");
  }
}

// Lets one thread in, as long as this lives.
template <typename Object>
class Use {
 public:
  Use(Object object, const char* kind) : object_(std::move(object)) {
    if (object_->is_busy.test_and_set(std::memory_order_acquire)) {
      object_.reset();
      fail(KVCONV_BUSY, "Another thread uses this ", kind, " now. Give each thread its own.");
    }
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() {
    if (object_) object_->is_busy.clear(std::memory_order_release);
  }

  auto* operator->() const { return object_->object.get(); }

 private:
  Object object_;
};

Use<GeneratorObject> use(kvconv_generator* generator) {
  return {handles().find<GeneratorObject>(generator, "generator"), "generator"};
}

Use<StreamObject> use(kvconv_text_stream* stream) {
  return {handles().find<StreamObject>(stream, "text stream"), "text stream"};
}

// Copies elements to a caller's buffer, or says how many there are.
template <typename Type, typename Size>
void fill(const Type* from, std::size_t count, Type* to, Size capacity, Size* needed) {
  require(needed, "needed");
  *needed = static_cast<Size>(count);
  if (capacity > 0) require(to, "the buffer");
  if (static_cast<std::size_t>(capacity < 0 ? 0 : capacity) < count) {
    fail(KVCONV_BUFFER_TOO_SMALL, "The buffer has a place for ", capacity, ", and ", count,
         " are needed.");
  }
  if (count > 0) std::memcpy(to, from, count * sizeof(Type));
}

void fill_text(const std::string& from, char* to, std::size_t capacity, std::size_t* needed) {
  fill(from.c_str(), from.size() + 1, to, capacity, needed);
}

constexpr kvconv_sampling kGreedy = KVCONV_SAMPLING_INIT;

}  // namespace
}  // namespace kvconv::runtime

using namespace kvconv::runtime;

uint32_t kvconv_abi_version(void) { return KVCONV_ABI_VERSION; }
const char* kvconv_version(void) { return KVCONV_VERSION; }
const char* kvconv_last_error(void) { return last_error.c_str(); }

kvconv_status kvconv_model_open(const char* bundle, const kvconv_model_options* options,
                                kvconv_model** out) {
  return guarded([&] {
    require(bundle, "bundle");
    require(out, "out");
    require(options, "options");
    if (options->abi_version != KVCONV_ABI_VERSION) {
      fail(KVCONV_ABI_MISMATCH, "The program was built for version ", options->abi_version,
           " of kvconv's C interface; this library has ", KVCONV_ABI_VERSION,
           ". Begin the options with KVCONV_MODEL_OPTIONS_INIT, and build with the kvconv.h of "
           "this library.");
    }
    require_struct(options, "options");
    if (options->threads < 0)
      fail(KVCONV_INVALID_ARGUMENT, "threads is ", options->threads, "; it must be >= 0");
    *out = handles().add<kvconv_model>(
        ModelObject(std::make_shared<LoadedModel>(utf8_path(bundle), *options)));
  });
}

kvconv_status kvconv_model_get_info(kvconv_model* model, kvconv_model_info* out) {
  return guarded([&] {
    const ModelObject object = handles().find<ModelObject>(model, "model");
    require_struct(out, "out");
    const Manifest& manifest = object->manifest();
    out->vocab_size = static_cast<std::int32_t>(manifest.vocab_size);
    out->max_sequence_length = static_cast<std::int32_t>(manifest.max_sequence_length);
    out->num_layers = static_cast<std::int32_t>(manifest.cache_layers.size());
    out->bos_token_id = static_cast<std::int32_t>(manifest.bos_token_id.value_or(-1));
    out->num_eos_token_ids = static_cast<std::int32_t>(manifest.eos_token_ids.size());
    out->max_prefill_chunk = static_cast<std::int32_t>(largest_chunk(manifest).value_or(0));
    out->threads = object->threads();
    out->weight_bytes = manifest.weight_bytes();
  });
}

kvconv_status kvconv_model_get_eos_token_ids(kvconv_model* model, int32_t* ids, int32_t capacity,
                                             int32_t* needed) {
  return guarded([&] {
    const ModelObject object = handles().find<ModelObject>(model, "model");
    const std::vector<std::int32_t>& eos = object->manifest().eos_token_ids;
    fill(eos.data(), eos.size(), ids, capacity, needed);
  });
}

void kvconv_model_destroy(kvconv_model* model) { handles().remove<ModelObject>(model); }

namespace {

kvconv_generator* add_generator(std::unique_ptr<Generator> generator) {
  auto object = std::make_shared<Exclusive<Generator>>();
  object->object = std::move(generator);
  return handles().add<kvconv_generator>(std::move(object));
}

}  // namespace

kvconv_status kvconv_generator_create(kvconv_model* model, int32_t capacity, int32_t prefill_chunk,
                                      kvconv_generator** out) {
  return guarded([&] {
    ModelObject object = handles().find<ModelObject>(model, "model");
    require(out, "out");
    *out = add_generator(std::make_unique<Generator>(std::move(object), capacity, prefill_chunk));
  });
}

kvconv_status kvconv_generator_append(kvconv_generator* generator, const int32_t* token_ids,
                                      int32_t count) {
  return guarded([&] {
    const auto object = use(generator);
    if (count < 1)
      fail(KVCONV_PROMPT_ERROR, "The prompt is empty: count is ", count, ". Give some tokens.");
    require(token_ids, "token_ids");
    object->append({token_ids, static_cast<std::size_t>(count)});
  });
}

kvconv_status kvconv_generator_next(kvconv_generator* generator, const kvconv_sampling* sampling,
                                    int32_t* token_id, int32_t* finish) {
  return guarded([&] {
    const auto object = use(generator);
    require(token_id, "token_id");
    require(finish, "finish");
    if (sampling == nullptr) sampling = &kGreedy;
    require_struct(sampling, "sampling");
    check_sampling(*sampling);
    std::int32_t reason = KVCONV_FINISH_NONE;
    *token_id = object->next(*sampling, reason);
    *finish = reason;
  });
}

kvconv_status kvconv_generator_get_logits(kvconv_generator* generator, const float** logits,
                                          int32_t* count) {
  return guarded([&] {
    const auto object = use(generator);
    require(logits, "logits");
    require(count, "count");
    const std::span<const float> found = object->logits();
    *logits = found.data();
    *count = static_cast<std::int32_t>(found.size());
  });
}

kvconv_status kvconv_generator_get_tokens(kvconv_generator* generator, int32_t* token_ids,
                                          int32_t capacity, int32_t* needed) {
  return guarded([&] {
    const auto object = use(generator);
    fill(object->tokens().data(), object->tokens().size(), token_ids, capacity, needed);
  });
}

kvconv_status kvconv_generator_seed(kvconv_generator* generator, uint64_t seed) {
  return guarded([&] { use(generator)->seed(seed); });
}

kvconv_status kvconv_generator_rewind(kvconv_generator* generator, int32_t length) {
  return guarded([&] { use(generator)->rewind(length); });
}

kvconv_status kvconv_generator_reset(kvconv_generator* generator) {
  return guarded([&] { use(generator)->rewind(0); });
}

kvconv_status kvconv_generator_fork(kvconv_generator* generator, kvconv_generator** out) {
  return guarded([&] {
    const auto object = use(generator);
    require(out, "out");
    *out = add_generator(object->fork());
  });
}

kvconv_status kvconv_generator_get_stats(kvconv_generator* generator, kvconv_generator_stats* out) {
  return guarded([&] {
    const auto object = use(generator);
    require_struct(out, "out");
    const std::uint32_t size = out->struct_size;
    *out = object->stats();
    out->struct_size = size;
  });
}

void kvconv_generator_destroy(kvconv_generator* generator) {
  handles().remove<GeneratorObject>(generator);
}

kvconv_status kvconv_tokenizer_open(const char* bundle, const char* library,
                                    kvconv_tokenizer** out) {
  return guarded([&] {
    require(bundle, "bundle");
    require(out, "out");
    *out = handles().add<kvconv_tokenizer>(
        TokenizerObject(std::make_shared<Tokenizer>(utf8_path(bundle), library)));
  });
}

kvconv_status kvconv_tokenizer_encode(kvconv_tokenizer* tokenizer, const char* text,
                                      int32_t add_special_tokens, int32_t* ids, int32_t capacity,
                                      int32_t* needed) {
  return guarded([&] {
    const TokenizerObject object = handles().find<TokenizerObject>(tokenizer, "tokenizer");
    require(text, "text");
    const std::vector<std::int32_t> found = object->encode(text, add_special_tokens != 0);
    fill(found.data(), found.size(), ids, capacity, needed);
  });
}

kvconv_status kvconv_tokenizer_decode(kvconv_tokenizer* tokenizer, const int32_t* ids,
                                      int32_t count, char* text, size_t capacity, size_t* needed) {
  return guarded([&] {
    const TokenizerObject object = handles().find<TokenizerObject>(tokenizer, "tokenizer");
    if (count < 0) fail(KVCONV_INVALID_ARGUMENT, "count is ", count, "; it must be >= 0");
    if (count > 0) require(ids, "ids");
    fill_text(object->decode({ids, static_cast<std::size_t>(count)}), text, capacity, needed);
  });
}

kvconv_status kvconv_tokenizer_render_chat(kvconv_tokenizer* tokenizer, const char* const* roles,
                                           const char* const* contents, int32_t count, char* text,
                                           size_t capacity, size_t* needed) {
  return guarded([&] {
    const TokenizerObject object = handles().find<TokenizerObject>(tokenizer, "tokenizer");
    if (count < 1)
      fail(KVCONV_PROMPT_ERROR, "The conversation is empty: count is ", count, ". Give a message.");
    require(roles, "roles");
    require(contents, "contents");
    std::vector<Message> messages;
    for (std::int32_t i = 0; i < count; ++i) {
      require(roles[i], "a role");
      require(contents[i], "a content");
      messages.push_back({roles[i], contents[i]});
    }
    fill_text(object->render_chat(messages), text, capacity, needed);
  });
}

void kvconv_tokenizer_destroy(kvconv_tokenizer* tokenizer) {
  handles().remove<TokenizerObject>(tokenizer);
}

kvconv_status kvconv_text_stream_create(kvconv_tokenizer* tokenizer, kvconv_text_stream** out) {
  return guarded([&] {
    TokenizerObject object = handles().find<TokenizerObject>(tokenizer, "tokenizer");
    require(out, "out");
    auto stream = std::make_shared<Exclusive<TextStream>>();
    stream->object = std::make_unique<TextStream>(std::move(object));
    *out = handles().add<kvconv_text_stream>(std::move(stream));
  });
}

kvconv_status kvconv_text_stream_push(kvconv_text_stream* stream, int32_t token_id,
                                      const char** text) {
  return guarded([&] {
    const auto object = use(stream);
    require(text, "text");
    *text = object->push(token_id);
  });
}

kvconv_status kvconv_text_stream_flush(kvconv_text_stream* stream, const char** text) {
  return guarded([&] {
    const auto object = use(stream);
    require(text, "text");
    *text = object->flush();
  });
}

void kvconv_text_stream_destroy(kvconv_text_stream* stream) {
  handles().remove<StreamObject>(stream);
}
