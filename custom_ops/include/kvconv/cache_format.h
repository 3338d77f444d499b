// How a cache keeps a row: the numbers of one head of one token.
//
// Float caches keep the numbers as they are. Quantised ones first rotate the row by a normalised
// Walsh-Hadamard transform, in blocks of rotation_size() numbers, which spreads a channel that is
// larger than the rest over its block; queries are rotated alike and outputs rotated back. Then
// each group of 32 numbers (the last may have fewer) has a bfloat16 scale, and a number is
// (code - zero point) * scale.
//
// - kInt8: codes from -127 to 127, a signed byte each.
// - kInt4: codes from 0 to 15, zero point 8, the values of int4 caches. Byte j of a group's 16 has
//   the code of number j in its low half, of number 16 + j in its high half.
// - kInt5: codes from 0 to 31, zero point 16, the keys of int4 caches. The low four bits of all
//   groups are laid out as above, behind them come four bytes a group: bit j of these 32, little
//   endian, is the fifth bit of number j.
//
// What fills up the last group has the zero point as its code. All functions are static; see
// float16.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvconv/float16.h"

namespace kvconv {

constexpr std::int64_t kGroupSize = 32;

static constexpr bool is_quantized(DataType type) { return type >= DataType::kInt8; }

// The type of a cache's keys; its values have the cache's own.
static constexpr DataType key_type(DataType cache_type) {
  return cache_type == DataType::kInt4 ? DataType::kInt5 : cache_type;
}

static constexpr std::int64_t num_groups(std::int64_t width) {
  return (width + kGroupSize - 1) / kGroupSize;
}

// Bytes of a row of `width` numbers, without its scales.
static inline std::int64_t row_bytes(DataType type, std::int64_t width) {
  switch (type) {
    case DataType::kInt8:
      return width;
    case DataType::kInt4:
      return num_groups(width) * 16;
    case DataType::kInt5:
      return num_groups(width) * 20;
    default:
      return width * bytes_of(type);
  }
}

// Scales of a row.
static inline std::int64_t num_scales(DataType type, std::int64_t width) {
  return is_quantized(type) ? num_groups(width) : 0;
}

static constexpr int zero_point(DataType type) {
  return type == DataType::kInt8 ? 0 : type == DataType::kInt4 ? 8 : 16;
}

// Numbers of the blocks in which a row is rotated: the largest power of two that divides its width.
static inline std::int64_t rotation_size(std::int64_t width) { return width & -width; }

// Number h of row `row`, as it was rotated.
static inline float load_number(DataType type, const void* rows, const std::uint16_t* scales,
                                std::int64_t width, std::int64_t row, std::int64_t h) {
  if (!is_quantized(type)) return load_element(rows, row * width + h, type);
  const auto* codes = static_cast<const std::uint8_t*>(rows) + row * row_bytes(type, width);
  const std::int64_t group = h / kGroupSize;
  const std::int64_t j = h % kGroupSize;
  int code;
  if (type == DataType::kInt8) {
    code = static_cast<std::int8_t>(codes[h]);
  } else {
    const std::uint8_t both = codes[group * 16 + j % 16];
    code = j < 16 ? both & 15 : both >> 4;
  }
  if (type == DataType::kInt5) {
    const std::uint8_t* fifth_bits = codes + (num_groups(width) * 16 + group * 4);
    code += (fifth_bits[j / 8] >> (j % 8) & 1) * 16;
  }
  const float scale = bfloat16_to_float(scales[row * num_groups(width) + group]);
  return static_cast<float>(code - zero_point(type)) * scale;
}

}  // namespace kvconv
