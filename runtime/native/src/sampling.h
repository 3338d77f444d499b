// Choosing the next token; kvconv/runtime/sampling.py step by step, so that both draw alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvconv.h"

namespace kvconv::runtime {

// SplitMix64 (Steele, Lea, Flood 2014): small, and the same in every language.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  // Returns a number in [0, 1), a multiple of 2^-53.
  double next();

 private:
  std::uint64_t state_;
};

// Returns a seed that nobody can foresee.
std::uint64_t fresh_seed();

// Refuses parameters outside their intervals (KVCONV_INVALID_ARGUMENT).
void check_sampling(const kvconv_sampling& sampling);

// Returns the next token's id; draws once unless the temperature is 0.
//
// seen: the tokens so far, for the repetition penalty. Throws KVCONV_FAILED where the logits are
// not numbers.
std::int32_t choose_token(const kvconv_sampling& sampling, std::span<const std::int32_t> seen,
                          std::span<const float> logits, Random& random);

}  // namespace kvconv::runtime
