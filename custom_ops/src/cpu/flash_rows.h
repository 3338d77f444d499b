// Attention of few rows (decode): each key and value is read once, vectors lie along the heads.
//
// Included by attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstdint>

#include "flash_operands.h"
#include "flash_row_tile.h"
#include "kvconv/attention.h"
#include "vec_math.h"

namespace kvconv {
namespace {

// The keys of the first tile of a range.
Memory first_keys(const AttentionParams& p, const Division& d, const Block& block,
                  const Range& range) {
  const Cache keys = keys_of(p);
  return {keys.row_at(cache_row_of(p, block, range.begin)),
          tile_slots(p, range.begin, range.end, d.key_tile) * keys.bytes};
}

// Turns a row's products into weights 2^(score - maximum) and updates its maximum and sum; returns
// the factor by which what it summed before shrinks.
float weigh_row(const AttentionParams& p, const Division& d, const Block& block, std::int64_t r,
                std::int64_t tile, std::int64_t keys, const std::int64_t* mask, float* scores,
                const Scratch& scratch, float* maximum, float* sum) {
  const std::int64_t row = block.first_row + r;
  const std::int64_t slot = p.past_sequence_length + position_of(d, row) - tile;
  const std::int64_t padded = round_up(keys, kLanes);
  if (p.softcap > 0.0F) apply_softcap(scores, padded, p.softcap);
  if (p.alibi_slopes != nullptr) {
    const float slope = kLog2E * p.alibi_slopes[query_head_of(d, block.kv_head, row)];
    for (std::int64_t t = 0; t < keys; ++t) scores[t] += slope * static_cast<float>(t - slot);
  }
  if (p.attention_bias != nullptr) {
    load_bias(p, d, block, r, tile, keys, scratch.bias);
    for (std::int64_t t = 0; t < keys; ++t) scores[t] += scratch.bias[t];
  }
  const std::int64_t first = p.window_size > 0 ? min_of(slot - p.window_size + 1, keys) : 0;
  const std::int64_t last = p.is_causal ? max_of(min_of(slot + 1, keys), 0) : keys;
  for (std::int64_t t = 0; t < first; ++t) scores[t] = kMinusInfinity;
  for (std::int64_t t = last; t < padded; ++t) scores[t] = kMinusInfinity;
  if (mask != nullptr) {
    for (std::int64_t t = 0; t < keys; ++t) scores[t] = mask[t] == 0 ? kMinusInfinity : scores[t];
  }

  Vec largest = set(*maximum);
  for (std::int64_t t = 0; t < padded; t += kLanes) largest = max(load(scores + t), largest);
  const float new_maximum = max_of_lanes(largest);
  // A row that has seen nothing keeps its -infinity; 0 in its place keeps NaN out of the weights.
  const Vec shift = set(new_maximum == kMinusInfinity ? 0.0F : new_maximum);
  Vec total = set(0.0F);
  for (std::int64_t t = 0; t < padded; t += kLanes) {
    const Vec weight = exp2_nonpositive(sub(load(scores + t), shift));
    store(scores + t, weight);
    total = add(total, weight);
  }
  float alpha[kLanes];
  store(alpha, exp2_nonpositive(sub(set(*maximum), shift)));
  *sum = *sum * alpha[0] + sum_of_lanes(total);
  *maximum = new_maximum;
  return alpha[0];
}

// The slow sum for tiles where values are met that are not finite: a weight of 0 takes nothing.
void mix_skipping_zeros(const Cache& values, const Division& d, std::int64_t first_row,
                        std::int64_t keys, std::int64_t num_rows, const float* weights,
                        float* accumulator, const float* alpha) {
  for (std::int64_t r = 0; r < num_rows; ++r) {
    for (std::int64_t h = 0; h < values.width; ++h) {
      float sum = accumulator[r * d.value_width + h] * alpha[r];
      for (std::int64_t t = 0; t < keys; ++t) {
        const float weight = weights[r * kFewRowsKeyTile + t];
        if (weight == 0.0F) continue;
        sum += weight * load_number(values.type, values.present, values.present_scales,
                                    values.width, first_row + t, h);
      }
      accumulator[r * d.value_width + h] = sum;
    }
  }
}

// The tile of `keys` keys from the cache's row `row` on, its scales widened.
RowTile row_tile_at(const Cache& cached_keys, const Cache& cached_values, std::int64_t row,
                    std::int64_t keys, std::int64_t key_tile, const Scratch& scratch) {
  widen_scales(cached_keys.scales_at(row), keys, cached_keys.num_scales, scratch.key_scales,
               key_tile);
  widen_scales(cached_values.scales_at(row), keys, cached_values.num_scales, scratch.value_scales,
               key_tile);
  for (std::int64_t g = 0; g < cached_values.num_scales; ++g) {
    float* scales = scratch.value_scales + g * key_tile;
    for (std::int64_t t = keys; t < round_up(keys, 2 * kLanes); ++t) scales[t] = 0.0F;
  }
  return {cached_keys.row_at(row), cached_values.row_at(row), scratch.key_scales,
          scratch.value_scales, keys};
}

// Sets the factors of each row and group of a tile's values, zeros behind the last, and where they
// may be rounded their largest magnitude.
void scale_weights(const Division& d, std::int64_t num_rows, std::int64_t keys,
                   const Scratch& scratch) {
  const std::int64_t groups = d.value_width / kGroupSize;
  for (std::int64_t r = 0; r < num_rows; ++r) {
    for (std::int64_t g = 0; g < groups; ++g) {
      float* factors = scratch.factors + (r * groups + g) * d.key_tile;
      Vec largest = set(0.0F);
      for (std::int64_t t = 0; t < round_up(keys, 2 * kLanes); t += kLanes) {
        const Vec scale = load(scratch.value_scales + g * d.key_tile + t);
        const Vec weight = t < keys ? load(scratch.scores + r * kFewRowsKeyTile + t) : set(0.0F);
        const Vec factor = mul(weight, scale);
        store(factors + t, factor);
        if constexpr (kMultipliesBytes) largest = max(absolute(factor), largest);
      }
      if constexpr (kMultipliesBytes) {
        scratch.weights.scales[r * groups + g] = max_of_lanes(largest);
      }
    }
  }
}

template <DataType type>
void attend_rows(const AttentionParams& p, const Division& d, const Block& block,
                 const Range& range, const Memory& after, bool multiplies_bytes,
                 bool skips_zero_weights, const Scratch& scratch, const Partial& partial) {
  std::memset(partial.accumulator, 0,
              static_cast<std::size_t>(block.num_rows * d.value_width) * sizeof(float));
  const Cache cached_keys = keys_of(p);
  const Cache cached_values = values_of(p);
  std::int64_t keys = 0;
  for (std::int64_t slot = range.begin; slot < range.end; slot += keys) {
    keys = tile_slots(p, slot, range.end, d.key_tile);
    const TileMask mask = tile_mask(p, block, slot, keys);
    if (mask.hides_all) continue;
    const std::int64_t cache_row = cache_row_of(p, block, slot);
    const RowTile tile =
        row_tile_at(cached_keys, cached_values, cache_row, keys, d.key_tile, scratch);
    const std::int64_t row_groups = ceil_div(block.num_rows, kMaxDotRows);
    const Memory value_memory = {tile.values, keys * cached_values.bytes};
    if (multiplies_bytes && keys >= kLanes) {
      Calls values(value_memory, ceil_div(keys, kLanes));
      if constexpr (is_quantized(type)) {
        dot_all_rows<key_type(type)>(p, d, tile, block.num_rows, scratch, values);
      }
    } else {
      Calls values(value_memory, row_groups * (keys / kDotKeys));
      for_each_row_group(block.num_rows, [&](std::int64_t r, auto count) {
        dot_rows<type, count.value>(p, d, tile, scratch.queries + r * d.key_width,
                                    scratch.scores + r * kFewRowsKeyTile, values);
      });
    }
    for (std::int64_t r = 0; r < block.num_rows; ++r) {
      scratch.alpha[r] =
          weigh_row(p, d, block, r, slot, keys, mask.keys, scratch.scores + r * kFewRowsKeyTile,
                    scratch, partial.maximum + r, partial.sum + r);
    }
    if (skips_zero_weights) {
      mix_skipping_zeros(cached_values, d, cache_row, keys, block.num_rows, scratch.scores,
                         partial.accumulator, scratch.alpha);
      continue;
    }
    const bool is_last = slot + keys == range.end;
    const Memory next = is_last ? after : first_keys(p, d, block, {slot + keys, range.end});
    const float* weights = scratch.scores;
    std::int64_t row_weights = kFewRowsKeyTile;
    if (is_quantized(type)) {
      scale_weights(d, block.num_rows, keys, scratch);
      weights = scratch.factors;
      row_weights = cached_values.num_scales * d.key_tile;
    }
    if constexpr (kMultipliesBytes && is_quantized(type)) {
      const std::int64_t groups = cached_values.num_scales;
      if (keys >= kLanes && are_finite(scratch.value_scales, groups, keys, d)) {
        Calls next_keys(next, row_groups * groups * (16 / kLanes) * (keys / 16));
        round_weights<type>(d, scratch.factors, block.num_rows * groups, keys, scratch.weights);
        for_each_row_group(block.num_rows, [&](std::int64_t r, auto count) {
          mix_rows_of_words<type, count.value>(p, d, tile, r, scratch,
                                               partial.accumulator + r * d.value_width, next_keys);
        });
        continue;
      }
    }
    Calls next_keys(next, row_groups * (is_quantized(type) ? ceil_div(keys, 4) : keys));
    for_each_row_group(block.num_rows, [&](std::int64_t r, auto count) {
      mix_rows<type, count.value>(p, d, tile, weights + r * row_weights,
                                  partial.accumulator + r * d.value_width, scratch.alpha + r,
                                  next_keys);
    });
  }
}

template <DataType type>
void attend_few_rows_of(const AttentionParams& p, const Division& d, const Block& block,
                        const Range& range, const Memory& after, const Scratch& scratch,
                        const Partial& partial) {
  for (std::int64_t r = 0; r < block.num_rows; ++r) {
    load_query(p, d, block, r, scratch.queries + r * d.key_width);
  }
  bool multiplies_bytes = false;
  if constexpr (kMultipliesBytes && is_quantized(type)) {
    const bool has_words = row_bytes(key_type(type), p.head_dim) % 4 == 0;
    const int middle = type == DataType::kInt8 ? 128 : zero_point(key_type(type));
    multiplies_bytes =
        has_words && round_queries(d, scratch.queries, block.num_rows, scratch.bytes, middle);
  }
  start_partial(p, d, block, range, partial);
  attend_rows<type>(p, d, block, range, after, multiplies_bytes, false, scratch, partial);
  if (has_nonfinite(partial.accumulator, block.num_rows * d.value_width)) {
    start_partial(p, d, block, range, partial);
    attend_rows<type>(p, d, block, range, Memory{}, multiplies_bytes, true, scratch, partial);
  }
}

// Attends with all rows of a key/value head.
void attend_few_rows(const AttentionParams& p, const Division& d, const Block& block,
                     const Range& range, const Memory& after, const Scratch& scratch,
                     const Partial& partial) {
  switch (p.cache_type) {
    case DataType::kFloat16:
      return attend_few_rows_of<DataType::kFloat16>(p, d, block, range, after, scratch, partial);
    case DataType::kBFloat16:
      return attend_few_rows_of<DataType::kBFloat16>(p, d, block, range, after, scratch, partial);
    case DataType::kInt8:
      return attend_few_rows_of<DataType::kInt8>(p, d, block, range, after, scratch, partial);
    case DataType::kInt4:
      return attend_few_rows_of<DataType::kInt4>(p, d, block, range, after, scratch, partial);
    default:
      return attend_few_rows_of<DataType::kFloat32>(p, d, block, range, after, scratch, partial);
  }
}

}  // namespace
}  // namespace kvconv
