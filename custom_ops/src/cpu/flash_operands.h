// What both ways of attending read beside the cache: queries, mask, bias and sinks.
//
// Included by attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstdint>
#include <cstring>

#include "flash_cache.h"
#include "flash_division.h"
#include "flash_tile.h"
#include "kvconv/attention.h"
#include "vec_math.h"

namespace kvconv {
namespace {

// Writes row r of the block, rotated and scaled, into row [key_width]; zeros behind H.
void load_query(const AttentionParams& p, const Division& d, const Block& block, std::int64_t r,
                float* row) {
  const std::int64_t position = position_of(d, block.first_row + r);
  const std::int64_t token = block.batch * p.sequence_length + position;
  const std::int64_t head = query_head_of(d, block.kv_head, block.first_row + r);
  const std::int64_t offset = token * p.query_token_stride + head * p.head_dim;
  for (std::int64_t h = p.head_dim / kLanes * kLanes; h < d.key_width; h += kLanes) {
    store(row + h, set(0.0F));
  }
  widen(static_cast<const char*>(p.query) + offset * bytes_of(p.activation_type), p.activation_type,
        row, p.head_dim);
  if (p.rotary_dim > 0) rotate(p, block.batch, position, row);
  if (is_quantized(p.cache_type)) transform(row, p.head_dim);
  // Scores are in units of ln 2; a softcap wants them as they are.
  const Vec scale = set(p.softcap > 0.0F ? p.scale : p.scale * kLog2E);
  for (std::int64_t h = 0; h < d.key_width; h += kLanes) store(row + h, mul(load(row + h), scale));
}

// Writes what attention_bias adds to the block's row r at the slots [first, first + keys).
void load_bias(const AttentionParams& p, const Division& d, const Block& block, std::int64_t r,
               std::int64_t first, std::int64_t keys, float* bias) {
  const std::int64_t row = block.first_row + r;
  const std::int64_t step = p.bias_strides[3];
  const std::int64_t start = block.batch * p.bias_strides[0] +
                             query_head_of(d, block.kv_head, row) * p.bias_strides[1] +
                             position_of(d, row) * p.bias_strides[2] + first * step;
  if (step == 1) {
    widen(static_cast<const char*>(p.attention_bias) + start * bytes_of(p.activation_type),
          p.activation_type, bias, keys);
  } else {  // the same at every slot
    const float value = load_element(p.attention_bias, start, p.activation_type);
    for (std::int64_t t = 0; t < keys; ++t) bias[t] = value;
  }
  for (std::int64_t t = 0; t < keys; ++t) bias[t] *= kLog2E;
}

// What attention_mask says of a tile of keys.
struct TileMask {
  const std::int64_t* keys;  // null where all are attended
  bool hides_all;
};

TileMask tile_mask(const AttentionParams& p, const Block& block, std::int64_t first,
                   std::int64_t keys) {
  if (p.attention_mask == nullptr) return {nullptr, false};
  const std::int64_t* mask = p.attention_mask + block.batch * p.mask_width + first;
  std::int64_t num_attended = 0;
  for (std::int64_t t = 0; t < keys; ++t) num_attended += mask[t] != 0;
  return {num_attended == keys ? nullptr : mask, num_attended == 0};
}

// Sets maxima and sums to nothing seen yet; in the first range a sink is a logit that has been.
void start_partial(const AttentionParams& p, const Division& d, const Block& block,
                   const Range& range, const Partial& partial) {
  for (std::int64_t r = 0; r < d.block_rows; ++r) {
    float sink = kMinusInfinity;
    if (p.head_sink != nullptr && range.is_first && r < block.num_rows) {
      sink = p.head_sink[query_head_of(d, block.kv_head, block.first_row + r)] * kLog2E;
    }
    partial.maximum[r] = sink;
    partial.sum[r] = sink == kMinusInfinity ? 0.0F : 1.0F + (sink - sink);  // NaN stays NaN
  }
}

}  // namespace
}  // namespace kvconv
