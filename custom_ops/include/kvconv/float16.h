// Conversions between float32 and the two 16-bit formats, one element at a time.
//
// All functions are static: this header is also included by files compiled for newer instruction
// sets, and a shared inline function would let the linker pick their copy for every machine.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvconv/kernel.h"

namespace kvconv {

static inline float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline std::uint32_t bits_from_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float bfloat16_to_float(std::uint16_t bits) {
  return float_from_bits(static_cast<std::uint32_t>(bits) << 16);
}

// Rounds to nearest, ties to even; a NaN stays one.
static inline std::uint16_t float_to_bfloat16(float value) {
  const std::uint32_t bits = bits_from_float(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

static inline float float16_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // infinity or NaN
    return float_from_bits(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13));
  }
  if (magnitude >= 0x400U) return float_from_bits(sign | ((magnitude << 13) + 0x38000000U));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24F;
  return float_from_bits(sign | bits_from_float(subnormal));
}

// Rounds to nearest, ties to even; what is too large becomes an infinity, a NaN stays one.
static inline std::uint16_t float_to_float16(float value) {
  const std::uint32_t bits = bits_from_float(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  } else if (magnitude >= 0x477FF000U) {  // rounds to 65536 or more
    half = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {  // normal
    half = (magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  } else {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits
    half = bits_from_float(float_from_bits(magnitude) + 0.5F) - 0x3F000000U;
  }
  return static_cast<std::uint16_t>(sign | half);
}

// Of the three float types.
static inline std::int64_t bytes_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

static inline float load_element(const void* data, std::int64_t index, DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return float16_to_float(static_cast<const std::uint16_t*>(data)[index]);
    case DataType::kBFloat16:
      return bfloat16_to_float(static_cast<const std::uint16_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

static inline void store_element(void* data, std::int64_t index, DataType type, float value) {
  switch (type) {
    case DataType::kFloat16:
      static_cast<std::uint16_t*>(data)[index] = float_to_float16(value);
      break;
    case DataType::kBFloat16:
      static_cast<std::uint16_t*>(data)[index] = float_to_bfloat16(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

}  // namespace kvconv
