// The cache of the flash kernel: rotary embedding, and the append of new keys and values.
//
// Included by attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstdint>
#include <cstring>

#include "flash_codes.h"
#include "kvconv/attention.h"
#include "kvconv/cache_format.h"
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

// Keys or values as they are kept: a tensor of rows [B, K, C] and, where it is quantised, theirs
// of scales.
struct Cache {
  DataType type;
  std::int64_t width;       // numbers of a row,
  std::int64_t bytes;       // the bytes they take,
  std::int64_t num_scales;  // and their scales
  const void* past;
  void* present;
  const std::uint16_t* past_scales;
  std::uint16_t* present_scales;

  // Row `row` of the present, and its scales.
  const char* row_at(std::int64_t row) const {
    return static_cast<const char*>(present) + row * bytes;
  }
  const std::uint16_t* scales_at(std::int64_t row) const {
    return num_scales == 0 ? nullptr : present_scales + row * num_scales;
  }
};

Cache cache_of(DataType type, std::int64_t width, const void* past, void* present,
               const std::uint16_t* past_scales, std::uint16_t* present_scales) {
  return {type,    width,       row_bytes(type, width), num_scales(type, width), past,
          present, past_scales, present_scales};
}

Cache keys_of(const AttentionParams& p) {
  return cache_of(key_type(p.cache_type), p.head_dim, p.past_key, p.present_key, p.past_key_scale,
                  p.present_key_scale);
}

Cache values_of(const AttentionParams& p) {
  return cache_of(p.cache_type, p.value_head_dim, p.past_value, p.present_value, p.past_value_scale,
                  p.present_value_scale);
}

// Copies the past of one cache head, rows of `row_bytes`, unless past and present are one: what the
// new tokens leave of it, as in a ring they take the rows of the oldest.
void copy_past(const AttentionParams& p, std::int64_t head, const void* past, void* present,
               std::int64_t row_bytes) {
  if (past == present || row_bytes == 0) return;  // a float cache has no scales
  const char* source = static_cast<const char*>(past) + head * p.past_capacity * row_bytes;
  char* target = static_cast<char*>(present) + head * p.present_capacity * row_bytes;
  std::int64_t slot = max_of(0, p.total_sequence_length - p.present_capacity);
  while (slot < p.past_sequence_length) {
    const std::int64_t count = tile_slots(p, slot, p.past_sequence_length, p.present_capacity);
    const std::int64_t offset = cache_row(p, slot) * row_bytes;
    std::memcpy(target + offset, source + offset, static_cast<std::size_t>(count * row_bytes));
    slot += count;
  }
}

// Writes a row, which is overwritten, as the cache's row `index`.
void store_row(const Cache& cache, float* row, std::int64_t index) {
  char* target = static_cast<char*>(cache.present) + index * cache.bytes;
  if (!is_quantized(cache.type)) return narrow(row, target, cache.type, cache.width);
  transform(row, cache.width);
  auto* codes = reinterpret_cast<std::uint8_t*>(target);
  std::uint16_t* scales = cache.present_scales + index * cache.num_scales;
  switch (cache.type) {
    case DataType::kInt8:
      return quantize_row<DataType::kInt8>(row, cache.width, codes, scales);
    case DataType::kInt4:
      return quantize_row<DataType::kInt4>(row, cache.width, codes, scales);
    default:
      return quantize_row<DataType::kInt5>(row, cache.width, codes, scales);
  }
}

// Writes the new tokens [begin, end) of cache head `head` into their slots, and with the first of
// them the past, unless past and present are one.
void append_tokens(const AttentionParams& p, const Cache& cache, std::int64_t head,
                   std::int64_t begin, std::int64_t end, const void* source,
                   std::int64_t token_stride, bool rotates, float* row) {
  if (begin == 0) {
    copy_past(p, head, cache.past, cache.present, cache.bytes);
    copy_past(p, head, cache.past_scales, cache.present_scales,
              cache.num_scales * static_cast<std::int64_t>(sizeof(std::uint16_t)));
  }
  const std::int64_t batch = head / p.kv_num_heads;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t token = batch * p.sequence_length + i;
    const std::int64_t offset = token * token_stride + head % p.kv_num_heads * cache.width;
    widen(static_cast<const char*>(source) + offset * bytes_of(p.activation_type),
          p.activation_type, row, cache.width);
    if (rotates) rotate(p, batch, i, row);
    store_row(cache, row, head * p.present_capacity + cache_row(p, p.past_sequence_length + i));
  }
}

}  // namespace
}  // namespace kvconv
