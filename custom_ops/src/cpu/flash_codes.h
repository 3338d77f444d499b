// Rows of quantised caches: the rotation, the codes of a row, and the numbers of codes. What they
// are is described in kvconv/cache_format.h.
//
// Included by attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstdint>
#include <cstring>

#include "flash_tile.h"
#include "kvconv/cache_format.h"
#include "tasks.h"
#include "vec_math.h"

namespace kvconv {
namespace {

// Applies the Walsh-Hadamard transform to each block of a row of `width` numbers. The row's memory
// is whole vectors; what it has behind the numbers is overwritten.
void transform(float* row, std::int64_t width) {
  const std::int64_t size = rotation_size(width);
  float factor = 1.0F;  // 1 / sqrt(size)
  for (std::int64_t s = size; s >= 4; s /= 4) factor *= 0.5F;
  if ((size & 0x5555555555555555) == 0) factor *= 0.707106781F;  // an odd power of two
  const Vec first_factor = set(size <= kLanes ? factor : 1.0F);
  for (std::int64_t h = 0; h < width; h += kLanes) {
    Vec v = load(row + h);
    if (size >= 2) v = butterfly<1>(v);
    if (size >= 4) v = butterfly<2>(v);
    if constexpr (kLanes >= 8) v = size >= 8 ? butterfly<4>(v) : v;
    if constexpr (kLanes >= 16) v = size >= 16 ? butterfly<8>(v) : v;
    store(row + h, mul(v, first_factor));
  }
  for (std::int64_t stride = kLanes; stride < size; stride *= 2) {
    const Vec last_factor = set(2 * stride == size ? factor : 1.0F);
    for (std::int64_t block = 0; block < width; block += 2 * stride) {
      for (std::int64_t h = block; h < block + stride; h += kLanes) {
        const Vec a = load(row + h);
        const Vec b = load(row + h + stride);
        store(row + h, mul(add(a, b), last_factor));
        store(row + h + stride, mul(sub(a, b), last_factor));
      }
    }
  }
}

// The number of largest magnitude in a group; the first such.
float largest_of(const float* group) {
  Vec above = load(group);
  Vec below = sub(set(0.0F), above);
  for (std::int64_t j = kLanes; j < kGroupSize; j += kLanes) {
    const Vec v = load(group + j);
    above = max(v, above);
    below = max(sub(set(0.0F), v), below);
  }
  const float most = max_of_lanes(above);
  const float least = -max_of_lanes(below);
  if (most != -least) return most > -least ? most : least;
  std::int64_t j = 0;
  while (group[j] != most && group[j] != least) ++j;
  return group[j];
}

// A group's codes, given its scale's inverse: `group` is numbers, `codes` where its bytes begin and
// `fifth_bits` where its fifth bits do.
template <DataType type>
void store_group(const float* group, float inverse, std::uint8_t* codes, std::uint8_t* fifth_bits) {
  constexpr float zero = static_cast<float>(zero_point(type));
  const auto code_of = [&](const float* x) {
    const Vec code = round_to_even(mul(load(x), set(inverse)));
    if constexpr (type == DataType::kInt8) return code;  // the scale's rounding is less than 1/254
    const Vec most = set(zero - 1.0F);
    return add(select_less(code, most, code, most), set(zero));
  };
  std::uint32_t fifths = 0;
  for (std::int64_t j = 0; j < 16; j += kLanes) {
    Vec first = code_of(group + j);
    Vec second = code_of(group + 16 + j);
    if constexpr (type == DataType::kInt8) {
      store_bytes(codes + j, first);
      store_bytes(codes + 16 + j, second);
      continue;
    }
    if constexpr (type == DataType::kInt5) {
      const Vec limit = set(16.0F);
      fifths |= bits_at_least(first, limit) << j | bits_at_least(second, limit) << (16 + j);
      first = select_less(first, limit, first, sub(first, limit));
      second = select_less(second, limit, second, sub(second, limit));
    }
    store_bytes(codes + j, add(first, mul(second, set(16.0F))));
  }
  if constexpr (type == DataType::kInt5) {
    for (int byte = 0; byte < 4; ++byte) {
      fifth_bits[byte] = static_cast<std::uint8_t>(fifths >> (8 * byte));
    }
  }
}

// Writes the codes and scales of a row whose memory is whole groups; what the row has behind its
// `width` numbers is overwritten.
template <DataType type>
void quantize_row(float* row, std::int64_t width, std::uint8_t* codes, std::uint16_t* scales) {
  constexpr std::int64_t kCodeBytes = type == DataType::kInt8 ? 32 : 16;
  constexpr std::uint16_t kNan = 0x7FC0;
  const std::int64_t groups = num_groups(width);
  for (std::int64_t h = width; h < groups * kGroupSize; ++h) row[h] = 0.0F;
  const bool is_finite = !has_nonfinite(row, groups * kGroupSize);
  for (std::int64_t g = 0; g < groups; ++g) {
    float* group = row + g * kGroupSize;
    const bool is_number = is_finite || !has_nonfinite(group, kGroupSize);
    if (!is_number) std::memset(group, 0, kGroupSize * sizeof(float));
    const float largest = largest_of(group);
    const std::uint16_t rounded = float_to_bfloat16(
        type == DataType::kInt8 ? __builtin_fabsf(largest) / 127.0F : largest / -zero_point(type));
    const float scale = bfloat16_to_float(rounded);
    const bool is_zero = __builtin_fabsf(scale) < 0x1p-126F;
    scales[g] = !is_number ? kNan : is_zero ? std::uint16_t{0} : rounded;
    const float inverse = is_zero ? 0.0F : 1.0F / scale;
    std::uint8_t* fifth_bits = codes + groups * 16 + g * 4;
    if (type == DataType::kInt8 && (g + 1) * kGroupSize > width) {
      std::uint8_t part[kGroupSize];
      store_group<type>(group, inverse, part, nullptr);
      std::memcpy(codes + g * kCodeBytes, part, static_cast<std::size_t>(width - g * kGroupSize));
    } else {
      store_group<type>(group, inverse, codes + g * kCodeBytes, fifth_bits);
    }
  }
}

// A group's codes as they are loaded: where its bytes begin, and its fifth bits.
struct GroupCodes {
  const std::uint8_t* codes;
  std::uint32_t fifth_bits;
};

// Group g of a row. The bytes of a part of a group of int8 are copied into `part`.
template <DataType type>
static inline GroupCodes group_at(const char* row, std::int64_t g, std::int64_t width,
                                  std::uint8_t (&part)[kGroupSize]) {
  const auto* codes = reinterpret_cast<const std::uint8_t*>(row);
  if constexpr (type == DataType::kInt8) {
    const std::int64_t rest = width - g * kGroupSize;
    if (rest >= kGroupSize) return {codes + g * kGroupSize, 0};
    std::memset(part, 0, kGroupSize);
    std::memcpy(part, codes + g * kGroupSize, static_cast<std::size_t>(rest));
    return {part, 0};
  }
  std::uint32_t fifth_bits = 0;
  if constexpr (type == DataType::kInt5) {
    const std::uint8_t* bytes = codes + num_groups(width) * 16 + g * 4;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    std::memcpy(&fifth_bits, bytes, sizeof(fifth_bits));
#else
    for (int byte = 0; byte < 4; ++byte) fifth_bits |= std::uint32_t{bytes[byte]} << (8 * byte);
#endif
  }
  return {codes + g * 16, fifth_bits};
}

// Numbers [j, j + kLanes) and [16 + j, 16 + j + kLanes) of a group.
template <DataType type>
static inline Pair load_pair(const GroupCodes& group, int j, float scale) {
  if constexpr (type == DataType::kInt8) return load_int8_pair(group.codes + j, scale);
  if constexpr (type == DataType::kInt4) return load_int4_pair(group.codes + j, scale);
  return load_int5_pair(group.codes + j, group.fifth_bits >> j, scale);
}

template <int groups>
void widen_scales_of(const std::uint16_t* scales, std::int64_t count, float* target,
                     std::int64_t stride) {
  for (std::int64_t t = 0; t < count; ++t) {
    for (int g = 0; g < groups; ++g) {
      target[g * stride + t] = bfloat16_to_float(scales[t * groups + g]);
    }
  }
}

// Widens the scales [count, groups] of `count` rows to float32 [groups, stride].
void widen_scales(const std::uint16_t* scales, std::int64_t count, std::int64_t groups,
                  float* target, std::int64_t stride) {
  switch (groups) {  // the compiler has vectors for these
    case 1:
      return widen_scales_of<1>(scales, count, target, stride);
    case 2:
      return widen_scales_of<2>(scales, count, target, stride);
    case 4:
      return widen_scales_of<4>(scales, count, target, stride);
    default:
      for (std::int64_t g = 0; g < groups; ++g) {
        for (std::int64_t t = 0; t < count; ++t) {
          target[g * stride + t] = bfloat16_to_float(scales[t * groups + g]);
        }
      }
  }
}

// Widens `count` rows to float32, [count, width] with up to a group more behind the last. Scales
// are [groups, stride].
template <DataType type>
void widen_rows(const char* rows, const float* scales, std::int64_t stride, std::int64_t count,
                std::int64_t width, float* target) {
  const std::int64_t groups = num_groups(width);
  std::uint8_t part[kGroupSize];
  for (std::int64_t t = 0; t < count; ++t) {
    const char* row = rows + t * row_bytes(type, width);
    for (std::int64_t g = 0; g < groups; ++g) {
      const GroupCodes group = group_at<type>(row, g, width, part);
      float* numbers = target + t * width + g * kGroupSize;  // what is too much is written over
      for (int j = 0; j < 16; j += kLanes) {
        const Pair pair = load_pair<type>(group, j, scales[g * stride + t]);
        store(numbers + j, pair.first);
        store(numbers + 16 + j, pair.second);
      }
    }
  }
}

}  // namespace
}  // namespace kvconv
