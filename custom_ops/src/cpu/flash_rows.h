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
                    std::int64_t keys, const Scratch& scratch) {
  widen(cached_keys.scales_at(row), DataType::kBFloat16, scratch.key_scales,
        keys * cached_keys.num_scales);
  widen(cached_values.scales_at(row), DataType::kBFloat16, scratch.value_scales,
        keys * cached_values.num_scales);
  return {cached_keys.row_at(row), cached_values.row_at(row), scratch.key_scales,
          scratch.value_scales, keys};
}

template <DataType type>
void attend_rows(const AttentionParams& p, const Division& d, const Block& block,
                 const Range& range, const Memory& after, bool skips_zero_weights,
                 const Scratch& scratch, const Partial& partial) {
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
    const RowTile tile = row_tile_at(cached_keys, cached_values, cache_row, keys, scratch);
    const std::int64_t row_groups = ceil_div(block.num_rows, kMaxDotRows);
    Calls values({tile.values, keys * cached_values.bytes}, row_groups * (keys / kDotKeys));
    for_each_row_group(block.num_rows, [&](std::int64_t r, auto count) {
      dot_rows<type, count.value>(p, d, tile, scratch.queries + r * d.key_width,
                                  scratch.scores + r * kFewRowsKeyTile, values);
    });
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
    Calls next_keys(is_last ? after : first_keys(p, d, block, {slot + keys, range.end}),
                    row_groups * keys);
    for_each_row_group(block.num_rows, [&](std::int64_t r, auto count) {
      mix_rows<type, count.value>(p, d, tile, scratch.scores + r * kFewRowsKeyTile,
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
  start_partial(p, d, block, range, partial);
  attend_rows<type>(p, d, block, range, after, false, scratch, partial);
  if (has_nonfinite(partial.accumulator, block.num_rows * d.value_width)) {
    start_partial(p, d, block, range, partial);
    attend_rows<type>(p, d, block, range, Memory{}, true, scratch, partial);
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
