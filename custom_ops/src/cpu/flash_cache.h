// The cache of the flash kernel: rotary embedding, and the append of new keys and values.
//
// Included by attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvconv/attention.h"
#include "tasks.h"
#include "vec_math.h"

namespace kvconv {
namespace {

// The row of a head's present in which a slot lies.
std::int64_t cache_row(const AttentionParams& p, std::int64_t slot) {
  return slot % p.present_capacity;
}

// How many slots of [slot, end), at most `most`, lie in rows behind one another: a ring wraps.
std::int64_t tile_slots(const AttentionParams& p, std::int64_t slot, std::int64_t end,
                        std::int64_t most) {
  return min_of(min_of(most, end - slot), p.present_capacity - cache_row(p, slot));
}

void rotate(const AttentionParams& p, std::int64_t batch, std::int64_t position, float* row) {
  const std::int64_t half = p.rotary_dim / 2;
  const float* c = p.cos + batch * p.rotary_batch_stride + position * half;
  const float* s = p.sin + batch * p.rotary_batch_stride + position * half;
  const std::int64_t step = p.rotary_interleaved ? 2 : 1;
  float* second = row + (p.rotary_interleaved ? 1 : half);
  std::int64_t i = 0;
  if (!p.rotary_interleaved) {
    for (; i + kLanes <= half; i += kLanes) {
      const Vec x1 = load(row + i);
      const Vec x2 = load(second + i);
      store(row + i, sub(mul(x1, load(c + i)), mul(x2, load(s + i))));
      store(second + i, add(mul(x2, load(c + i)), mul(x1, load(s + i))));
    }
  }
  for (; i < half; ++i) {
    const float x1 = row[i * step];
    const float x2 = second[i * step];
    row[i * step] = x1 * c[i] - x2 * s[i];
    second[i * step] = x2 * c[i] + x1 * s[i];
  }
}

// Copies the past of one cache head, rows of `row_bytes`: what the new tokens leave of it, as in a
// ring they take the rows of the oldest.
void copy_past(const AttentionParams& p, const char* past, char* present, std::int64_t row_bytes) {
  std::int64_t slot = max_of(0, p.total_sequence_length - p.present_capacity);
  while (slot < p.past_sequence_length) {
    const std::int64_t count = tile_slots(p, slot, p.past_sequence_length, p.present_capacity);
    const std::int64_t offset = cache_row(p, slot) * row_bytes;
    std::memcpy(present + offset, past + offset, static_cast<std::size_t>(count * row_bytes));
    slot += count;
  }
}

// Writes the new tokens [begin, end) of cache head `head` into their slots, and with the first of
// them the past, unless past and present are one.
void append_tokens(const AttentionParams& p, std::int64_t head, std::int64_t begin,
                   std::int64_t end, const void* past, void* present, const void* source,
                   std::int64_t token_stride, std::int64_t width, bool rotates, float* row) {
  const std::int64_t cache_row_bytes = width * bytes_of(p.cache_type);
  char* target = static_cast<char*>(present) + head * p.present_capacity * cache_row_bytes;
  if (begin == 0 && past != present) {
    copy_past(p, static_cast<const char*>(past) + head * p.past_capacity * cache_row_bytes, target,
              cache_row_bytes);
  }
  const std::int64_t batch = head / p.kv_num_heads;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t token = batch * p.sequence_length + i;
    const std::int64_t offset = token * token_stride + head % p.kv_num_heads * width;
    widen(static_cast<const char*>(source) + offset * bytes_of(p.activation_type),
          p.activation_type, row, width);
    if (rotates) rotate(p, batch, i, row);
    narrow(row, target + cache_row(p, p.past_sequence_length + i) * cache_row_bytes, p.cache_type,
           width);
  }
}

}  // namespace
}  // namespace kvconv
