// Sums of weighted values as whole numbers: lanes are numbers of a head, and a vector multiplies
// the codes of four tokens at once.
//
// The factors of a tile (weights times scales) are rounded to 16 bits of the largest of their row
// and group. Where that cannot be (a scale that is not finite), or keys are fewer than lanes, the
// sums are those of floats (flash_code_tile.h). Included by attention_flash.cc only; internal
// linkage throughout.
#pragma once

#include <cstdint>

#include "flash_calls.h"
#include "flash_codes.h"
#include "flash_division.h"
#include "int8.h"
#include "kvconv/cache_format.h"
#include "vec_math.h"

namespace kvconv {
namespace {

// What is subtracted from a value's code after it was read as a number without a sign.
constexpr std::uint32_t middle_of(DataType type) {
  return type == DataType::kInt8 ? 128U : static_cast<std::uint32_t>(zero_point(type));
}

// Whether the scales [groups, key_tile] of a tile's `keys` values are.
bool are_finite(const float* scales, std::int64_t groups, std::int64_t keys, const Division& d) {
  for (std::int64_t g = 0; g < groups; ++g) {
    if (has_nonfinite(scales + g * d.key_tile, round_up(keys, kLanes))) return false;
  }
  return true;
}

// Rounds factors [count, key_tile], zeros behind `keys`, of which weights.scales has the largest
// magnitudes and gets the scales. Where none reaches 1e-33 they are 0.
template <DataType type>
void round_weights(const Division& d, const float* factors, std::int64_t count, std::int64_t keys,
                   const WeightBytes& weights) {
  constexpr float kLargest = 127.0F * 256.0F;
  static_assert(127.0F * kLargest * kFewRowsKeyTile < 0x1p31F, "a tile's sum has 32 bits");
  for (std::int64_t i = 0; i < count; ++i) {
    const float* row = factors + i * d.key_tile;
    const float largest = weights.scales[i];
    const float inverse = largest < 1e-33F ? 0.0F : kLargest / largest;
    weights.scales[i] = largest * (1.0F / kLargest);
    Integers sums = set_sums(0);
    for (std::int64_t t = 0; t < keys; t += 2 * kLanes) {
      sums = add_integers(
          sums, round_to_words(row + t, inverse, weights.numbers + 2 * (i * d.key_tile + t)));
    }
    // Unsigned, as a weight that is NaN (its row's sum is, too) counts as the least of integers.
    const auto sum = static_cast<std::uint32_t>(sum_of_integers(sums));
    weights.starts[i] = static_cast<std::int32_t>(0U - middle_of(type) * sum);
  }
}

// accumulator[r][i] = alpha[r] * accumulator[r][i] + sum over t of factors[r][t] * code i of value
// t, for the numbers of group g.
template <DataType type, int rows>
void mix_words(const Division& d, const WeightBytes& weights, std::int64_t first_row,
               std::int64_t groups, std::int64_t g, const char* values, std::int64_t row_bytes,
               std::int64_t keys, float* accumulator, const float* alpha, Calls& calls) {
  const std::int64_t first = first_row * groups + g;
  const std::int8_t* numbers = weights.numbers + first * 2 * d.key_tile;
  const std::int64_t stride = groups * 2 * d.key_tile;
  for (std::int64_t j = 0; j < 16; j += kLanes) {
    Sums high[rows][2];
    Sums low[rows][2];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      high[r][0] = high[r][1] = set_sums(0);
      low[r][0] = low[r][1] = set_sums(weights.starts[first + r * groups]);
    }
    const auto* codes = reinterpret_cast<const std::uint8_t*>(values) + j +
                        g * (type == DataType::kInt8 ? kGroupSize : kGroupSize / 2);
    const auto add_four = [&](const std::uint8_t* one, const std::uint8_t* two,
                              const std::uint8_t* three, const std::uint8_t* four, std::int64_t t) {
      Words pair[2];
      if constexpr (type == DataType::kInt8) {
        interleave_two(one, two, three, four, pair);
        pair[0] = subtract_bytes(pair[0], 128);
        pair[1] = subtract_bytes(pair[1], 128);
      } else {
        const Words both = interleave(one, two, three, four);
        pair[0] = low_nibbles(both);
        pair[1] = high_nibbles(both);
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const std::int8_t* factors = numbers + r * stride + 2 * t;
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          high[r][i] = multiply_words(high[r][i], pair[i], factors);
          low[r][i] = multiply_words(low[r][i], pair[i], factors + 4);
        }
      }
    };
    std::int64_t t = 0;
    for (; t + 16 <= keys; t += 16) {
      calls.step();
#pragma GCC unroll 4
      for (int i = 0; i < 16; i += 4, codes += 4 * row_bytes) {
        add_four(codes, codes + row_bytes, codes + 2 * row_bytes, codes + 3 * row_bytes, t + i);
      }
    }
    for (; t < keys; t += 4, codes += 4 * row_bytes) {
      // The last value stands for those behind it, whose factors are 0.
      const std::int64_t last = keys - 1 - t;
      add_four(codes, codes + min_of(1, last) * row_bytes, codes + min_of(2, last) * row_bytes,
               codes + min_of(3, last) * row_bytes, t);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Vec scale = set(weights.scales[first + r * groups]);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Vec sum =
            to_float(add_integers(to_integers<256>(high[r][i]), to_integers<1>(low[r][i])));
        float* target = accumulator + r * d.value_width + 16 * i + j;
        store(target, fma(sum, scale, mul(set(alpha[r]), load(target))));
      }
    }
  }
}

}  // namespace
}  // namespace kvconv
