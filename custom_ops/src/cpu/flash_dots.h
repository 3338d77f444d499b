// Products of few queries with quantised keys as whole numbers: lanes are keys, so that nothing is
// summed across lanes, and a vector multiplies four codes of each key at once.
//
// Queries are rounded to 16 bits of their row's largest number, which is 500 times as fine as int8
// keys are. Where that cannot be (a number that is not finite), or keys are fewer than lanes, the
// products are those of floats (flash_row_tile.h). Included by attention_flash.cc only; internal
// linkage throughout.
#pragma once

#include <cstdint>

#include "flash_codes.h"
#include "flash_division.h"
#include "int8.h"
#include "kvconv/cache_format.h"
#include "vec_math.h"

namespace kvconv {
namespace {

// Whether this build multiplies four bytes in a lane at once.
constexpr bool kMultipliesBytes = !kSplitsBytes && kLanes > 4;

// Rounds queries [rows, key_width]. Returns whether all of them can be.
bool round_queries(const Division& d, const float* queries, std::int64_t num_rows,
                   const QueryBytes& bytes, int middle) {
  constexpr float kLargest = 127.0F * 256.0F;
  const std::int64_t groups = d.key_width / kGroupSize;
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const float* row = queries + r * d.key_width;
    float largest = 0.0F;
    for (std::int64_t h = 0; h < d.key_width; h += 16) {
      const float magnitude = largest_magnitude(row + h);
      if (!(magnitude <= 3e38F)) return false;
      if (magnitude > largest) largest = magnitude;
    }
    if (largest < 1e-30F) return false;  // its inverse might not be finite
    bytes.scales[r] = largest / kLargest;
    std::int8_t* high = bytes.numbers + r * 2 * d.key_width;
    std::int8_t* low = high + d.key_width;
    for (std::int64_t g = 0; g < groups; ++g) {
      std::int32_t pairs[2][2] = {};
      for (std::int64_t h = g * kGroupSize; h < (g + 1) * kGroupSize; h += 16) {
        round_to_two_bytes(row + h, kLargest / largest, high + h, low + h, pairs[0], pairs[1]);
      }
      std::int32_t* starts = bytes.starts + r * 2 * groups;
      starts[g] = start_of(pairs[0], middle);
      starts[groups + g] = start_of(pairs[1], middle);
    }
  }
  return true;
}

// scores[r][t] = query r . key t for `blocks` blocks of keys, whose words are given, [num_words,
// blocks, kLanes]; scales [groups, scale_stride] are theirs.
template <DataType type, int rows, int blocks>
void dot_words(const Division& d, const QueryBytes& bytes, std::int64_t first_row,
               const float* words, std::int64_t num_words, const float* scales,
               std::int64_t scale_stride, float* scores, std::int64_t score_stride) {
  const std::int64_t groups = d.key_width / kGroupSize;
  const auto word_at = [&](std::int64_t i, int block) {
    return load_words(reinterpret_cast<const std::uint8_t*>(words + (i * blocks + block) * kLanes));
  };
  Vec products[rows][blocks];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int b = 0; b < blocks; ++b) products[r][b] = set(0.0F);
  }
  for (std::int64_t g = 0; g < groups; ++g) {
    Sums sums[rows][2][blocks];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const std::int32_t* starts = bytes.starts + (first_row + r) * 2 * groups + g;
#pragma GCC unroll 2
      for (int b = 0; b < blocks; ++b) {
        sums[r][0][b] = set_sums(starts[0]);
        sums[r][1][b] = set_sums(starts[groups]);
      }
    }
    const std::int8_t* numbers = bytes.numbers + first_row * 2 * d.key_width + g * kGroupSize;
    const auto add_products = [&](const Words(&codes)[blocks], std::int64_t h) {
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const std::int8_t* high = numbers + r * 2 * d.key_width + h;
#pragma GCC unroll 2
        for (int b = 0; b < blocks; ++b) {
          sums[r][0][b] = multiply_words(sums[r][0][b], codes[b], high);
          sums[r][1][b] = multiply_words(sums[r][1][b], codes[b], high + d.key_width);
        }
      }
    };
    Words codes[blocks];
    if constexpr (type == DataType::kInt8) {
      const auto add_word = [&](std::int64_t i) {
#pragma GCC unroll 2
        for (int b = 0; b < blocks; ++b) codes[b] = subtract_bytes(word_at(g * 8 + i, b), 128);
        add_products(codes, 4 * i);
      };
      if (num_words - g * 8 >= 8) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) add_word(i);
      } else {
        for (std::int64_t i = 0; i < num_words - g * 8; ++i) add_word(i);
      }
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 2
        for (int b = 0; b < blocks; ++b) {
          const Words both = word_at(g * 4 + i % 4, b);
          const Words fifths = word_at(groups * 4 + g, b);
          codes[b] = i < 4 ? low_nibbles_with_fifth(both, fifths, 4 * i)
                           : high_nibbles_with_fifth(both, fifths, 4 * i);
        }
        add_products(codes, 4 * i);
      }
    }
#pragma GCC unroll 2
    for (int b = 0; b < blocks; ++b) {
      const Vec scale = load(scales + g * scale_stride + b * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const Integers sum =
            add_integers(to_integers<256>(sums[r][0][b]), to_integers<1>(sums[r][1][b]));
        products[r][b] = fma(to_float(sum), scale, products[r][b]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int b = 0; b < blocks; ++b) {
      store(scores + r * score_stride + b * kLanes,
            mul(products[r][b], set(bytes.scales[first_row + r])));
    }
  }
}

}  // namespace
}  // namespace kvconv
