// The arithmetic on one tile of keys and few rows: products of queries with keys, and sums of
// weighted values. Vector lanes are elements of a head.
//
// Included by attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstdint>
#include <cstring>

#include "flash_calls.h"
#include "flash_code_tile.h"
#include "flash_codes.h"
#include "flash_division.h"
#include "flash_dots.h"
#include "flash_sums.h"
#include "kvconv/attention.h"
#include "kvconv/float16.h"
#include "vec.h"

namespace kvconv {
namespace {

constexpr int kDotKeys = 4;  // keys whose products are summed across lanes together

// Elements [i, i + kLanes) of a cache, as floats.
template <DataType type>
static inline Vec load_cached(const void* data, std::int64_t i) {
  if constexpr (type == DataType::kFloat32) return load(static_cast<const float*>(data) + i);
  const std::uint16_t* bits = static_cast<const std::uint16_t*>(data) + i;
  return type == DataType::kFloat16 ? load_float16(bits) : load_bfloat16(bits);
}

// Elements [i, i + count), and zeros behind them.
template <DataType type>
static inline Vec load_cached_part(const void* data, std::int64_t i, std::int64_t count) {
  if constexpr (type == DataType::kFloat32) {
    return load_part(static_cast<const float*>(data) + i, count);
  }
  std::uint16_t part[kLanes] = {};
  std::memcpy(part, static_cast<const std::uint16_t*>(data) + i,
              static_cast<std::size_t>(count) * sizeof(std::uint16_t));
  return load_cached<type>(part, 0);
}

// scores[r][t] = query r . key t for `rows` queries and `keys` keys, whose elements start at
// `first`; strides in floats.
template <DataType type, int rows, int keys>
void dot_block(const float* queries, std::int64_t query_stride, const void* data,
               std::int64_t first, std::int64_t width, float* scores, std::int64_t score_stride) {
  Vec sums[rows][keys];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < keys; ++t) sums[r][t] = set(0.0F);
  }
  const auto add_products = [&](std::int64_t h, const auto& load_key) {
    Vec elements[keys];
#pragma GCC unroll 4
    for (int t = 0; t < keys; ++t) elements[t] = in_register(load_key(first + t * width + h));
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Vec query = load(queries + r * query_stride + h);
#pragma GCC unroll 4
      for (int t = 0; t < keys; ++t) sums[r][t] = fma(query, elements[t], sums[r][t]);
    }
  };
  std::int64_t h = 0;
  for (; h + kLanes <= width; h += kLanes) {
    add_products(h, [&](std::int64_t i) { return load_cached<type>(data, i); });
  }
  if (h < width) {
    add_products(h, [&](std::int64_t i) { return load_cached_part<type>(data, i, width - h); });
  }
  store_products(sums, scores, score_stride);
}

// accumulator[r][i] = alpha[r] * accumulator[r][i] + sum over t of weights[r][t] * value t's
// element i, for `vecs` vectors of elements.
template <DataType type, int rows, int vecs, bool is_part>
void mix_block(const float* weights, std::int64_t weight_stride, const void* data,
               std::int64_t first, std::int64_t width, std::int64_t part, std::int64_t keys,
               float* accumulator, std::int64_t stride, const float* alpha, Calls& calls) {
  Vec sums[rows][vecs];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vecs; ++v) {
      sums[r][v] = mul(set(alpha[r]), load(accumulator + r * stride + v * kLanes));
    }
  }
  for (std::int64_t t = 0; t < keys; ++t) {
    calls.step();
    Vec factors[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) factors[r] = set(weights[r * weight_stride + t]);
#pragma GCC unroll 4
    for (int v = 0; v < vecs; ++v) {
      const std::int64_t i = first + t * width + v * kLanes;
      const Vec value =
          in_register(is_part ? load_cached_part<type>(data, i, part) : load_cached<type>(data, i));
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) sums[r][v] = fma(factors[r], value, sums[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vecs; ++v) store(accumulator + r * stride + v * kLanes, sums[r][v]);
  }
}

// Calls body(first row, Constant of the number of rows) for groups of at most kMaxDotRows rows.
template <typename Body>
void for_each_row_group(std::int64_t num_rows, const Body& body) {
  std::int64_t r = 0;
  if constexpr (kMaxDotRows >= 4) {
    for (; num_rows - r >= 4; r += 4) body(r, Constant<4>());
  }
  if constexpr (kMaxDotRows >= 3) {
    for (; num_rows - r >= 3 && num_rows - r != 4; r += 3) body(r, Constant<3>());
  }
  for (; num_rows - r >= 2; r += 2) body(r, Constant<2>());
  if (r < num_rows) body(r, Constant<1>());
}

// A tile of keys and values, and how it meets the rows.
struct RowTile {
  const char* keys;
  const char* values;
  const float* key_scales;  // where the cache is quantised
  const float* value_scales;
  std::int64_t count;
};

template <DataType type, int rows>
void dot_rows(const AttentionParams& p, const Division& d, const RowTile& tile,
              const float* queries, float* scores, Calls& calls) {
  const auto dot = [&](std::int64_t t, auto keys) {
    if constexpr (is_quantized(type)) {
      dot_codes<key_type(type), rows, keys.value>(
          queries, d.key_width, tile.keys + t * row_bytes(key_type(type), p.head_dim),
          tile.key_scales + t, d.key_tile, p.head_dim, scores + t, kFewRowsKeyTile);
    } else {
      dot_block<type, rows, keys.value>(queries, d.key_width, tile.keys, t * p.head_dim, p.head_dim,
                                        scores + t, kFewRowsKeyTile);
    }
  };
  std::int64_t t = 0;
  for (; t + kDotKeys <= tile.count; t += kDotKeys) {
    calls.step();
    dot(t, Constant<kDotKeys>());
  }
  for (; t < tile.count; ++t) dot(t, Constant<1>());
}

// The same for all rows at once, as whole numbers; the tile has at least `blocks` blocks of keys.
template <DataType type, int blocks>
void dot_blocks(const AttentionParams& p, const Division& d, const RowTile& tile,
                std::int64_t num_rows, const Scratch& scratch, Calls& calls) {
  constexpr std::int64_t kKeys = blocks * kLanes;
  const std::int64_t num_words = row_bytes(type, p.head_dim) / 4;
  for (std::int64_t first = 0; first < tile.count; first += kKeys) {
    const std::int64_t t = min_of(first, tile.count - kKeys);  // the last blocks may overlap
    for (int b = 0; b < blocks; ++b) {
      calls.step();
      const auto* keys = reinterpret_cast<const float*>(tile.keys) + (t + b * kLanes) * num_words;
      for (std::int64_t word = 0; word < num_words; word += kLanes) {
        transpose_part(keys + word, num_words, min_of(kLanes, num_words - word),
                       scratch.words + word * kKeys + b * kLanes, kKeys);
      }
    }
    for_each_row_group(num_rows, [&](std::int64_t r, auto count) {
      dot_words<type, count.value, blocks>(
          d, scratch.bytes, r, scratch.words, num_words, tile.key_scales + t, d.key_tile,
          scratch.scores + r * kFewRowsKeyTile + t, kFewRowsKeyTile);
    });
  }
}

template <DataType type>
void dot_all_rows(const AttentionParams& p, const Division& d, const RowTile& tile,
                  std::int64_t num_rows, const Scratch& scratch, Calls& calls) {
  if (tile.count >= kDotBlocks * kLanes) {
    dot_blocks<type, kDotBlocks>(p, d, tile, num_rows, scratch, calls);
  } else {
    dot_blocks<type, 1>(p, d, tile, num_rows, scratch, calls);
  }
}

// The same as whole numbers; a group that is not whole is left to the factors.
template <DataType type, int rows>
void mix_rows_of_words(const AttentionParams& p, const Division& d, const RowTile& tile,
                       std::int64_t first_row, const Scratch& scratch, float* accumulator,
                       Calls& calls) {
  const std::int64_t groups = num_groups(p.value_head_dim);
  const float* alpha = scratch.alpha + first_row;
  for (std::int64_t g = 0; g < groups; ++g) {
    float* sums = accumulator + g * kGroupSize;
    if (type != DataType::kInt8 || (g + 1) * kGroupSize <= p.value_head_dim) {
      mix_words<type, rows>(d, scratch.weights, first_row, groups, g, tile.values,
                            row_bytes(type, p.value_head_dim), tile.count, sums, alpha, calls);
    } else {
      mix_codes<type, rows, 1>(scratch.factors + first_row * groups * d.key_tile, d.key_tile,
                               tile.values, p.value_head_dim, g, tile.count, sums, d.value_width,
                               alpha, calls);
    }
  }
}

// weights: the factors of mix_codes where the cache is quantised.
template <DataType type, int rows>
void mix_rows(const AttentionParams& p, const Division& d, const RowTile& tile,
              const float* weights, float* accumulator, const float* alpha, Calls& calls) {
  std::int64_t i = 0;
  if constexpr (is_quantized(type)) {
    const auto mix = [&](const auto& block) {
      block(weights, d.key_tile, tile.values, p.value_head_dim, i / kGroupSize, tile.count,
            accumulator + i, d.value_width, alpha, calls);
    };
    constexpr std::int64_t kBlock = kMixGroups * kGroupSize;
    for (; i + kBlock <= d.value_width; i += kBlock) mix(mix_codes<type, rows, kMixGroups>);
    for (; i < d.value_width; i += kGroupSize) mix(mix_codes<type, rows, 1>);
  } else {
    const auto mix = [&](const auto& block, std::int64_t part) {
      block(weights, kFewRowsKeyTile, tile.values, i, p.value_head_dim, part, tile.count,
            accumulator + i, d.value_width, alpha, calls);
    };
    for (; i + 4 * kLanes <= p.value_head_dim; i += 4 * kLanes)
      mix(mix_block<type, rows, 4, false>, 0);
    for (; i + kLanes <= p.value_head_dim; i += kLanes) mix(mix_block<type, rows, 1, false>, 0);
    if (i < p.value_head_dim) mix(mix_block<type, rows, 1, true>, p.value_head_dim - i);
  }
}

}  // namespace
}  // namespace kvconv
