// One sequence: its tokens, its cache, and the choice of the next token.
//
// Tokens behind the cache's length are pending: they run when logits are wanted. So a chosen token
// that ends a text never runs, and what a rewind leaves can always be continued.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "kv_cache.h"
#include "kvconv.h"
#include "sampling.h"
#include "session.h"

namespace kvconv::runtime {

class Generator {
 public:
  // capacity, prefill_chunk: 0 for the default. Throws an Error where they are more than the model
  // or the memory takes.
  Generator(std::shared_ptr<const LoadedModel> model, std::int64_t capacity,
            std::int64_t prefill_chunk);

  void append(std::span<const std::int32_t> token_ids);
  std::int32_t next(const kvconv_sampling& sampling, std::int32_t& finish);
  std::span<const float> logits();
  void seed(std::uint64_t seed) { random_ = Random(seed); }
  void rewind(std::int64_t length);
  std::unique_ptr<Generator> fork() const;

  std::span<const std::int32_t> tokens() const { return tokens_; }
  kvconv_generator_stats stats() const;

 private:
  void run(std::span<const std::int32_t> token_ids);
  void bind_tokens(std::int64_t count);
  void run_pending();
  std::int64_t shortest_rewind() const;

  const std::shared_ptr<const LoadedModel> model_;
  const std::int64_t prefill_chunk_;
  const Binding binding_;
  KvCache cache_;
  std::vector<std::int32_t> tokens_;
  Random random_;

  std::vector<std::int64_t> ids_, positions_, mask_;  // what the graph reads
  std::int64_t bound_tokens_ = 0;  // as many as ids_ and positions_ are bound for
  std::int64_t num_logits_ = 1;
  std::vector<float> logits_;
  std::int64_t logits_length_ = -1;  // tokens that logits_ follow; -1 for none
  Value ids_value_, positions_value_, mask_value_, num_logits_value_, logits_value_;

  kvconv_generator_stats counts_{};
};

}  // namespace kvconv::runtime
