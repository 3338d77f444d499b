// Attention of a block of many rows: strips of rows take turns on each tile of keys.
//
// Included by attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstdint>

#include "flash_operands.h"
#include "kvconv/attention.h"
#include "vec_math.h"

namespace kvconv {
namespace {

// The rows of a block whose scores are computed together.
struct Strip {
  std::int64_t first_row;  // of the block's
  std::int64_t num_rows;   // that exist
  std::int64_t lanes;      // padded to whole vectors
  float* queries;          // [key_width, lanes]
  float* sums;             // [value_width, lanes]
};

Strip strip_at(const Division& d, const Block& block, const Scratch& scratch, std::int64_t first) {
  return {first, min_of(kStripRows, block.num_rows - first),
          min_of(kStripRows, d.block_rows - first), scratch.queries + first * d.key_width,
          scratch.strips + first * d.value_width};
}

void load_strip_queries(const AttentionParams& p, const Division& d, const Block& block,
                        const Strip& strip, const Scratch& scratch) {
  for (std::int64_t lane = 0; lane < strip.lanes; lane += kLanes) {
    for (std::int64_t i = 0; i < kLanes; ++i) {
      const std::int64_t r = strip.first_row + min_of(lane + i, strip.num_rows - 1);
      load_query(p, d, block, r, scratch.rows + i * d.key_width);
    }
    for (std::int64_t h = 0; h < d.key_width; h += kLanes) {
      transpose(scratch.rows + h, d.key_width, strip.queries + h * strip.lanes + lane, strip.lanes);
    }
  }
}

// Adds attention_bias to the scores of the keys [first, first + keys).
void add_strip_bias(const AttentionParams& p, const Division& d, const Block& block,
                    const Strip& strip, std::int64_t first, std::int64_t keys,
                    const Scratch& scratch) {
  float column[kLanes * kLanes];  // keys of a row of lanes
  for (std::int64_t lane = 0; lane < strip.lanes; lane += kLanes) {
    for (std::int64_t i = 0; i < kLanes; ++i) {
      const std::int64_t r = strip.first_row + min_of(lane + i, strip.num_rows - 1);
      load_bias(p, d, block, r, first, keys, scratch.rows + i * kKeyTile);
    }
    for (std::int64_t t = 0; t < keys; t += kLanes) {
      transpose(scratch.rows + t, kKeyTile, column, kLanes);
      for (std::int64_t i = 0; i < min_of(kLanes, keys - t); ++i) {
        float* score = scratch.scores + (t + i) * strip.lanes + lane;
        store(score, add(load(score), load(column + i * kLanes)));
      }
    }
  }
}

// The tile's rows of a cache head as float32 [keys, width]: in place, or widened into `buffer`.
const float* tile_of(const Cache& cache, std::int64_t row, std::int64_t keys, float* buffer,
                     float* scales) {
  const char* rows = cache.row_at(row);
  if (cache.type == DataType::kFloat32) return reinterpret_cast<const float*>(rows);
  widen_scales(cache.scales_at(row), keys, cache.num_scales, scales, kKeyTile);
  switch (cache.type) {
    case DataType::kInt8:
      widen_rows<DataType::kInt8>(rows, scales, kKeyTile, keys, cache.width, buffer);
      break;
    case DataType::kInt4:
      widen_rows<DataType::kInt4>(rows, scales, kKeyTile, keys, cache.width, buffer);
      break;
    case DataType::kInt5:
      widen_rows<DataType::kInt5>(rows, scales, kKeyTile, keys, cache.width, buffer);
      break;
    default:
      widen(rows, cache.type, buffer, keys * cache.width);
  }
  return buffer;
}

// Attends with a strip over the slots [tile, tile + keys); key_tile and value_tile are theirs, and
// so is mask, which is null where all are attended.
void attend_strip(const AttentionParams& p, const Division& d, const Block& block,
                  const Strip& strip, std::int64_t tile, std::int64_t keys, const float* key_tile,
                  const float* value_tile, const std::int64_t* mask, bool skips_zero_weights,
                  const Scratch& scratch, const Partial& partial) {
  const std::int64_t lanes = strip.lanes;
  const auto query_slot = [&](std::int64_t r) {
    return p.past_sequence_length +
           position_of(d, block.first_row + strip.first_row + min_of(r, strip.num_rows - 1));
  };

  // 1. Scores, [keys, rows].
  multiply(keys, key_tile, p.head_dim, 1, strip.queries, p.head_dim, scratch.scores, lanes,
           nullptr);
  if (p.softcap > 0.0F) apply_softcap(scratch.scores, keys * lanes, p.softcap);
  if (p.alibi_slopes != nullptr) {
    for (std::int64_t r = 0; r < lanes; ++r) {
      const std::int64_t row = block.first_row + strip.first_row + min_of(r, strip.num_rows - 1);
      scratch.slopes[r] = kLog2E * p.alibi_slopes[query_head_of(d, block.kv_head, row)];
      scratch.query_offset[r] = static_cast<float>(query_slot(r) - tile);
    }
    add_alibi(scratch.scores, keys, lanes, scratch.slopes, scratch.query_offset);
  }
  if (p.attention_bias != nullptr) add_strip_bias(p, d, block, strip, tile, keys, scratch);

  // 2. Masks, after all that could turn -infinity into something else.
  const bool meets_future = p.is_causal && tile + keys > query_slot(0) + 1;
  const bool meets_window = p.window_size > 0 && tile <= query_slot(lanes - 1) - p.window_size;
  if (meets_future || meets_window) {
    for (std::int64_t r = 0; r < lanes; ++r) {
      const std::int64_t slot = query_slot(r) - tile;
      const std::int64_t first = p.window_size > 0 ? slot - p.window_size + 1 : 0;
      const std::int64_t last = p.is_causal ? slot + 1 : keys;
      scratch.first[r] = static_cast<float>(min_of(max_of(first, 0), keys));
      scratch.last[r] = static_cast<float>(min_of(max_of(last, 0), keys));
    }
    apply_limits(scratch.scores, keys, lanes, scratch.first, scratch.last);
  }
  if (mask != nullptr) apply_mask(scratch.scores, keys, lanes, mask);

  // 3. Weights, and the values they take.
  online_softmax(scratch.scores, keys, lanes, partial.maximum + strip.first_row,
                 partial.sum + strip.first_row, scratch.alpha);
  if (skips_zero_weights) {
    accumulate_skipping_zeros(scratch.scores, value_tile, keys, p.value_head_dim, strip.sums, lanes,
                              scratch.alpha);
  } else {
    multiply(p.value_head_dim, value_tile, 1, p.value_head_dim, scratch.scores, keys, strip.sums,
             lanes, scratch.alpha);
  }
}

// Attends with a block over the slots `range` into the strips' sums and the partial's other two.
void attend_strips(const AttentionParams& p, const Division& d, const Block& block,
                   const Range& range, bool skips_zero_weights, const Scratch& scratch,
                   const Partial& partial) {
  std::memset(scratch.strips, 0,
              static_cast<std::size_t>(d.block_rows * d.value_width) * sizeof(float));
  std::int64_t keys = 0;
  for (std::int64_t tile = range.begin; tile < range.end; tile += keys) {
    keys = tile_slots(p, tile, range.end, kKeyTile);
    const TileMask mask = tile_mask(p, block, tile, keys);
    if (mask.hides_all) continue;
    const std::int64_t cache_row = cache_row_of(p, block, tile);
    const float* key_tile = tile_of(keys_of(p), cache_row, keys, scratch.keys, scratch.key_scales);
    const float* value_tile =
        tile_of(values_of(p), cache_row, keys, scratch.values, scratch.value_scales);
    for (std::int64_t first = 0; first < block.num_rows; first += kStripRows) {
      const Strip strip = strip_at(d, block, scratch, first);
      const std::int64_t row = block.first_row + first;
      const Range seen = visible_slots(p, d, row, row + strip.num_rows - 1);
      const std::int64_t skipped = max_of(0, seen.begin - tile);
      const std::int64_t end = min_of(keys, seen.end - tile);
      if (skipped >= end) continue;
      attend_strip(p, d, block, strip, tile + skipped, end - skipped,
                   key_tile + skipped * p.head_dim, value_tile + skipped * p.value_head_dim,
                   mask.keys == nullptr ? nullptr : mask.keys + skipped, skips_zero_weights,
                   scratch, partial);
    }
  }
}

// Attends with a block; `partial` begins with what a sink has left in it.
void attend_many_rows(const AttentionParams& p, const Division& d, const Block& block,
                      const Range& range, const Scratch& scratch, const Partial& partial) {
  for (std::int64_t first = 0; first < block.num_rows; first += kStripRows) {
    load_strip_queries(p, d, block, strip_at(d, block, scratch, first), scratch);
  }
  start_partial(p, d, block, range, partial);
  attend_strips(p, d, block, range, false, scratch, partial);
  if (has_nonfinite(scratch.strips, d.block_rows * d.value_width)) {
    start_partial(p, d, block, range, partial);
    attend_strips(p, d, block, range, true, scratch, partial);
  }
  for (std::int64_t first = 0; first < block.num_rows; first += kStripRows) {
    const Strip strip = strip_at(d, block, scratch, first);
    for (std::int64_t lane = 0; lane < strip.lanes; lane += kLanes) {
      float* rows = partial.accumulator + (first + lane) * d.value_width;
      for (std::int64_t h = 0; h < d.value_width; h += kLanes) {
        transpose(strip.sums + h * strip.lanes + lane, strip.lanes, rows + h, d.value_width);
      }
    }
  }
}

}  // namespace
}  // namespace kvconv
