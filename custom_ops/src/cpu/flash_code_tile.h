// Products of few queries with keys that are codes, as floats, and sums of weighted values that are
// codes. Vector lanes are numbers of a head, as in flash_row_tile.h.
//
// Included by attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstdint>

#include "flash_calls.h"
#include "flash_codes.h"
#include "kvconv/cache_format.h"
#include "vec.h"

namespace kvconv {
namespace {

constexpr int kMixGroups = kLanes == 16 ? 2 : 1;  // groups of a value whose sums are in registers

// Writes the products of `rows` queries and `keys` keys, each the sum of a vector's lanes.
template <int rows, int keys>
static inline void store_products(const Vec (&sums)[rows][keys], float* scores,
                                  std::int64_t score_stride) {
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
    float* row = scores + r * score_stride;
    if constexpr (keys == 4) {
      store_sums(row, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    } else {
      row[0] = sum_of_lanes(sums[r][0]);
    }
  }
}

// scores[r][t] = query r . key t for `rows` queries and `keys` keys; `codes` is where the first
// key's begin, and scales [groups, scale_stride] are theirs.
template <DataType type, int rows, int keys>
void dot_codes(const float* queries, std::int64_t query_stride, const char* codes,
               const float* scales, std::int64_t scale_stride, std::int64_t width, float* scores,
               std::int64_t score_stride) {
  const std::int64_t groups = num_groups(width);
  const std::int64_t bytes = row_bytes(type, width);
  std::uint8_t part[kGroupSize];
  Vec sums[rows][keys];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < keys; ++t) sums[r][t] = set(0.0F);
  }
  for (std::int64_t g = 0; g < groups; ++g) {
    const float* query = queries + g * kGroupSize;
#pragma GCC unroll 4
    for (int t = 0; t < keys; ++t) {
      const GroupCodes group = group_at<type>(codes + t * bytes, g, width, part);
#pragma GCC unroll 4
      for (int j = 0; j < 16; j += kLanes) {
        const Pair pair = load_pair<type>(group, j, scales[g * scale_stride + t]);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          const float* numbers = query + r * query_stride + j;
          sums[r][t] = fma(load(numbers), pair.first, sums[r][t]);
          sums[r][t] = fma(load(numbers + 16), pair.second, sums[r][t]);
        }
      }
    }
  }
  store_products(sums, scores, score_stride);
}

// accumulator[r][i] = alpha[r] * accumulator[r][i] + sum over t of weights[r][t] * value t's number
// i, for `groups` groups of numbers from group `first` on. factors [rows, groups of a value,
// factor_stride] are the weights times the groups' scales.
template <DataType type, int rows, int groups>
void mix_codes(const float* factors, std::int64_t factor_stride, const char* codes,
               std::int64_t width, std::int64_t first, std::int64_t keys, float* accumulator,
               std::int64_t stride, const float* alpha, Calls& calls) {
  constexpr int vecs = static_cast<int>(kGroupSize) / kLanes;
  const std::int64_t row_groups = num_groups(width);
  const std::int64_t bytes = row_bytes(type, width);
  std::uint8_t part[kGroupSize];
  Vec sums[rows][groups * vecs];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < groups * vecs; ++v) {
      sums[r][v] = mul(set(alpha[r]), load(accumulator + r * stride + v * kLanes));
    }
  }
  for (std::int64_t t = 0; t < keys; ++t) {
    if (t % 4 == 0) calls.step();
#pragma GCC unroll 2
    for (int g = 0; g < groups; ++g) {
      Vec factor[rows];
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        factor[r] = set(factors[(r * row_groups + first + g) * factor_stride + t]);
      }
      const GroupCodes group = group_at<type>(codes + t * bytes, first + g, width, part);
#pragma GCC unroll 4
      for (int v = 0; v < vecs / 2; ++v) {
        const Pair pair = load_pair<type>(group, v * kLanes, 1.0F);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          Vec* sum = &sums[r][g * vecs + v];
          sum[0] = fma(factor[r], pair.first, sum[0]);
          sum[vecs / 2] = fma(factor[r], pair.second, sum[vecs / 2]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < groups * vecs; ++v)
      store(accumulator + r * stride + v * kLanes, sums[r][v]);
  }
}

}  // namespace
}  // namespace kvconv
