#include "generator.h"

#include <algorithm>
#include <numeric>

#include "error.h"
#include "memory.h"

namespace kvconv::runtime {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

std::int64_t checked_capacity(const Manifest& manifest, std::int64_t capacity) {
  const std::int64_t most = manifest.max_sequence_length;
  if (capacity < 0)
    fail(KVCONV_INVALID_ARGUMENT, "capacity is ", capacity, "; it must be at least 1, or 0");
  if (capacity > most) {
    fail(KVCONV_CACHE_FULL, "capacity is ", capacity, "; this bundle of ", manifest.source_model,
         " holds at most ", most, " tokens. Use ", most,
         " or less, or export the model again with a larger --max-sequence-length.");
  }
  return capacity == 0 ? most : capacity;
}

std::int64_t checked_chunk(const Manifest& manifest, std::int64_t chunk) {
  const auto most = largest_chunk(manifest);
  if (chunk < 0)
    fail(KVCONV_INVALID_ARGUMENT, "prefill_chunk is ", chunk, "; it must be at least 1, or 0");
  if (chunk == 0) return std::min(kPrefillChunkTokens, most.value_or(kPrefillChunkTokens));
  if (most && chunk > *most) {
    fail(KVCONV_CACHE_FULL, "prefill_chunk is ", chunk,
         ", and the ring caches of this bundle take at most ", *most,
         " tokens of a prompt at once. Choose ", *most,
         " or less, or export the model with --no-ring.");
  }
  return chunk;
}

std::int64_t checked_run(const Manifest& manifest, std::int64_t capacity, std::int64_t chunk) {
  check_run_fits(manifest, capacity, chunk);
  return capacity;
}

}  // namespace

Generator::Generator(std::shared_ptr<const LoadedModel> model, std::int64_t capacity,
                     std::int64_t prefill_chunk)
    : model_(std::move(model)),
      prefill_chunk_(checked_chunk(model_->manifest(), prefill_chunk)),
      binding_(model_->new_binding()),
      cache_(model_->manifest(),
             checked_run(model_->manifest(), checked_capacity(model_->manifest(), capacity),
                         prefill_chunk_),
             binding_.get()),
      random_(fresh_seed()),
      mask_(static_cast<std::size_t>(cache_.capacity()), 1),
      logits_(static_cast<std::size_t>(model_->manifest().vocab_size)) {
  const ort::Api* api = onnxruntime().api;
  num_logits_value_ = make_value(&num_logits_, sizeof(num_logits_), {}, ort::kInt64);
  check(ort::bind_input(api, binding_.get(), "num_logits_to_keep", num_logits_value_.get()));
  logits_value_ = make_value(logits_.data(), logits_.size() * sizeof(float),
                             {1, 1, static_cast<std::int64_t>(logits_.size())}, ort::kFloat32);
  check(ort::bind_output(api, binding_.get(), "logits", logits_value_.get()));
}

void Generator::append(std::span<const std::int32_t> token_ids) {
  const auto vocab_size = static_cast<std::int32_t>(logits_.size());
  for (const std::int32_t id : token_ids) {
    if (id < 0 || id >= vocab_size) {
      fail(KVCONV_INVALID_ARGUMENT, "token_ids holds ", id,
           "; token ids are at least 0 and below vocab_size ", vocab_size);
    }
  }
  const std::size_t needed = tokens_.size() + token_ids.size();
  if (needed > static_cast<std::size_t>(cache_.capacity())) {
    fail(KVCONV_CACHE_FULL, "The run needs ", needed, " cache slots (", tokens_.size(),
         " cached and ", token_ids.size(), " new tokens), and the cache has ", cache_.capacity(),
         ". Make a generator of a larger capacity, or rewind or reset it.");
  }
  const std::size_t before = tokens_.size();
  tokens_.insert(tokens_.end(), token_ids.begin(), token_ids.end());
  const auto start = Clock::now();
  const std::int64_t cached = cache_.length();
  try {
    run_pending();
  } catch (...) {
    tokens_.resize(std::max(before, static_cast<std::size_t>(cache_.length())));
    throw;
  }
  counts_.prefill_tokens += cache_.length() - cached;
  counts_.prefill_ns += nanoseconds_since(start);
}

std::int32_t Generator::next(const kvconv_sampling& sampling, std::int32_t& finish) {
  if (static_cast<std::int64_t>(tokens_.size()) >= cache_.capacity()) {
    fail(KVCONV_CACHE_FULL, "The sequence has ", tokens_.size(),
         " tokens and one more must fit, but the cache holds ", cache_.capacity(),
         ". Make a generator of a larger capacity, or rewind or reset it.");
  }
  const auto start = Clock::now();
  const std::int64_t cached = cache_.length();
  const std::int32_t token = choose_token(sampling, tokens_, logits(), random_);
  tokens_.push_back(token);
  counts_.decode_tokens += cache_.length() - cached;
  counts_.decode_ns += nanoseconds_since(start);
  const std::vector<std::int32_t>& eos = model_->manifest().eos_token_ids;
  const bool is_eos = std::find(eos.begin(), eos.end(), token) != eos.end();
  const bool is_full = static_cast<std::int64_t>(tokens_.size()) == cache_.capacity();
  finish = is_eos ? KVCONV_FINISH_EOS : is_full ? KVCONV_FINISH_LENGTH : KVCONV_FINISH_NONE;
  return token;
}

std::span<const float> Generator::logits() {
  if (tokens_.empty()) {
    fail(KVCONV_PROMPT_ERROR, "The prompt is empty: it has no tokens. Append some first.");
  }
  run_pending();
  return logits_;
}

void Generator::rewind(std::int64_t length) {
  const auto size = static_cast<std::int64_t>(tokens_.size());
  if (length < 0 || length > size) {
    fail(KVCONV_INVALID_ARGUMENT, "length is ", length, "; it must be in [0, ", size, "]");
  }
  if (length < cache_.length() || (length == cache_.length() && logits_length_ != length)) {
    const std::int64_t shortest = shortest_rewind();
    if (length > 0 && length < shortest) {
      fail(KVCONV_REWIND_ERROR, "The cache cannot forget ", size - length, " of its ", size,
           " tokens: its rings have overwritten what came before, so that ", size - shortest,
           " can be taken back, or all. Rewind to ", shortest,
           " or more, or reset it and run the first ", length,
           " again; a bundle exported with --no-ring can rewind to any length.");
    }
    // The last token runs again, for its logits.
    cache_.rewind(std::max<std::int64_t>(length - 1, 0));
    logits_length_ = -1;
  }
  tokens_.resize(static_cast<std::size_t>(length));
}

std::int64_t Generator::shortest_rewind() const {
  const std::int64_t shortest = cache_.shortest_rewind();
  return shortest == 0 ? 0 : shortest + 1;
}

std::unique_ptr<Generator> Generator::fork() const {
  auto copy = std::make_unique<Generator>(model_, cache_.capacity(), prefill_chunk_);
  copy->cache_.copy_from(cache_);
  copy->tokens_ = tokens_;
  copy->random_ = random_;
  std::copy(logits_.begin(), logits_.end(), copy->logits_.begin());  // its memory is bound
  copy->logits_length_ = logits_length_;
  return copy;
}

kvconv_generator_stats Generator::stats() const {
  kvconv_generator_stats stats = counts_;
  stats.length = static_cast<std::int32_t>(tokens_.size());
  stats.cached = static_cast<std::int32_t>(cache_.length());
  stats.capacity = static_cast<std::int32_t>(cache_.capacity());
  stats.shortest_rewind = static_cast<std::int32_t>(shortest_rewind());
  stats.cache_bytes = cache_.num_bytes();
  return stats;
}

void Generator::run_pending() {
  const std::int64_t chunk = std::min(prefill_chunk_, cache_.most_new_tokens());
  while (cache_.length() < static_cast<std::int64_t>(tokens_.size())) {
    const auto pending = std::span(tokens_).subspan(static_cast<std::size_t>(cache_.length()));
    run(pending.first(std::min(pending.size(), static_cast<std::size_t>(chunk))));
  }
}

void Generator::run(std::span<const std::int32_t> token_ids) {
  const ort::Api* api = onnxruntime().api;
  const auto count = static_cast<std::int64_t>(token_ids.size());
  const std::int64_t past = cache_.length(), total = past + count;
  bind_tokens(count);
  std::copy(token_ids.begin(), token_ids.end(), ids_.begin());
  std::iota(positions_.begin(), positions_.begin() + count, past);
  // The mask is as wide as the cache is full: another shape in every run, over the same ones.
  mask_value_ = make_value(mask_.data(), static_cast<std::size_t>(total) * sizeof(std::int64_t),
                           {1, total}, ort::kInt64);
  check(ort::bind_input(api, binding_.get(), "attention_mask", mask_value_.get()));
  cache_.prepare_run(count);
  logits_length_ = -1;
  const auto start = Clock::now();
  model_->run(binding_.get());
  counts_.onnxruntime_ns += nanoseconds_since(start);
  cache_.commit_run(count);
  logits_length_ = total;
}

void Generator::bind_tokens(std::int64_t count) {
  if (count == bound_tokens_) return;
  const ort::Api* api = onnxruntime().api;
  const auto size = static_cast<std::size_t>(count);
  bound_tokens_ = 0;
  if (ids_.size() < size) {
    ids_.resize(size);
    positions_.resize(size);
  }
  ids_value_ = make_value(ids_.data(), size * sizeof(std::int64_t), {1, count}, ort::kInt64);
  check(ort::bind_input(api, binding_.get(), "input_ids", ids_value_.get()));
  if (model_->has_input("position_ids")) {
    positions_value_ =
        make_value(positions_.data(), size * sizeof(std::int64_t), {1, count}, ort::kInt64);
    check(ort::bind_input(api, binding_.get(), "position_ids", positions_value_.get()));
  }
  bound_tokens_ = count;
}

}  // namespace kvconv::runtime
