// The cache of the flash kernel: rotary embedding, and the append of new keys and values.
//
// Included by attention_flash.cc only, after vec_math.h; internal linkage throughout.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvconv/attention.h"

namespace kvconv {
namespace {

void rotate(const AttentionParams& p, std::int64_t batch, std::int64_t position, float* row) {
  const std::int64_t half = p.rotary_dim / 2;
  const std::int64_t table = batch * p.rotary_batch_stride + position * half;
  for (std::int64_t i = 0; i < half; ++i) {
    float* first = row + (p.rotary_interleaved ? 2 * i : i);
    float* second = row + (p.rotary_interleaved ? 2 * i + 1 : i + half);
    const float c = p.cos[table + i];
    const float s = p.sin[table + i];
    const float x1 = *first;
    const float x2 = *second;
    *first = x1 * c - x2 * s;
    *second = x2 * c + x1 * s;
  }
}

// Copies the past slots of cache head `head` (unless past and present are one) and writes the new
// tokens behind them.
void append_head(const AttentionParams& p, std::int64_t head, const void* past, void* present,
                 const void* source, std::int64_t token_stride, std::int64_t width, bool rotates,
                 float* row) {
  const std::int64_t cache_row_bytes = width * bytes_of(p.cache_type);
  char* target = static_cast<char*>(present) + head * p.present_capacity * cache_row_bytes;
  if (past != present && p.past_sequence_length > 0) {
    std::memcpy(target, static_cast<const char*>(past) + head * p.past_capacity * cache_row_bytes,
                static_cast<std::size_t>(p.past_sequence_length * cache_row_bytes));
  }
  const std::int64_t batch = head / p.kv_num_heads;
  for (std::int64_t i = 0; i < p.sequence_length; ++i) {
    const std::int64_t token = batch * p.sequence_length + i;
    const std::int64_t offset = token * token_stride + head % p.kv_num_heads * width;
    widen(static_cast<const char*>(source) + offset * bytes_of(p.activation_type),
          p.activation_type, row, width);
    if (rotates) rotate(p, batch, i, row);
    narrow(row, target + (p.past_sequence_length + i) * cache_row_bytes, p.cache_type, width);
  }
}

}  // namespace
}  // namespace kvconv
