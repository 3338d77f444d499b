// Vectors of four floats in the compiler's own vector extension: SSE2, NEON or plain code.
//
// Every vec_*.h has this same interface. Everything is static and no standard template is used,
// because the file is compiled for one instruction set and nothing of it may be shared.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvconv/float16.h"

namespace kvconv {

constexpr int kLanes = 4;
constexpr int kRowsOneVec = 12;    // rows of a register block that is one vector wide,
constexpr int kRowsTwoVecs = 6;    // two,
constexpr int kRowsThreeVecs = 4;  // and three: 12 accumulators of 16 registers
constexpr int kMaxDotRows = 2;     // queries whose products with four keys are held in registers
constexpr int kFewRows = 3;        // up to here vectors along the heads are faster than across rows

typedef float Vec __attribute__((vector_size(16)));
typedef std::uint32_t VecBits __attribute__((vector_size(16)));

static inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
static inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
// v itself. A vector from memory that several products take is loaded once this way; compilers like
// to load it once for each.
static inline Vec in_register(Vec v) { return v; }
static inline Vec set(float x) { return Vec{x, x, x, x}; }
static inline Vec add(Vec a, Vec b) { return a + b; }
static inline Vec sub(Vec a, Vec b) { return a - b; }
static inline Vec mul(Vec a, Vec b) { return a * b; }
static inline Vec div(Vec a, Vec b) { return a / b; }
// a * b + c
static inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
// a < b ? x : y, lane by lane; a NaN is never less.
static inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  const VecBits less = (VecBits)(a < b);
  return (Vec)((less & (VecBits)x) | (~less & (VecBits)y));
}
// a == b ? x : y, lane by lane.
static inline Vec select_equal(Vec a, Vec b, Vec x, Vec y) {
  const VecBits equal = (VecBits)(a == b);
  return (Vec)((equal & (VecBits)x) | (~equal & (VecBits)y));
}
// The larger of both; b where either is NaN.
static inline Vec max(Vec a, Vec b) { return select_less(b, a, a, b); }
static inline Vec absolute(Vec a) { return (Vec)((VecBits)a & 0x7FFFFFFFU); }
// a < b ? 0 : y, lane by lane.
static inline Vec zero_if_less(Vec a, Vec b, Vec y) {
  return (Vec)(~(VecBits)(a < b) & (VecBits)y);
}
// The float whose exponent field is in the low bits of a.
static inline Vec low_bits_to_exponent(Vec a) { return (Vec)((VecBits)a << 23); }
// The first `count` lanes from memory, the others 0.
static inline Vec load_part(const float* p, std::int64_t count) {
  Vec v = set(0.0F);
  std::memcpy(&v, p, static_cast<std::size_t>(count) * sizeof(float));
  return v;
}
static inline float sum_of_lanes(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
static inline float max_of_lanes(Vec v) {
  const float a = v[0] > v[1] ? v[0] : v[1];
  const float b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
// Stores the four sums over lanes.
static inline void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  p[0] = sum_of_lanes(a);
  p[1] = sum_of_lanes(b);
  p[2] = sum_of_lanes(c);
  p[3] = sum_of_lanes(d);
}
// target[j][i] = source[i][j] for kLanes rows of kLanes floats; strides in floats.
static inline void transpose(const float* source, std::int64_t source_stride, float* target,
                             std::int64_t target_stride) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) target[j * target_stride + i] = source[i * source_stride + j];
  }
}

// The same of the first `count` floats of each row; no others are read, and zeros stand for them.
static inline void transpose_part(const float* source, std::int64_t source_stride,
                                  std::int64_t count, float* target, std::int64_t target_stride) {
  for (int i = 0; i < kLanes; ++i) {
    const Vec row = load_part(source + i * source_stride, count);
    for (int j = 0; j < kLanes; ++j) target[j * target_stride + i] = row[j];
  }
}

static inline Vec load_float16(const std::uint16_t* p) {
  return Vec{float16_to_float(p[0]), float16_to_float(p[1]), float16_to_float(p[2]),
             float16_to_float(p[3])};
}
static inline void store_float16(std::uint16_t* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_float16(v[i]);
}
static inline Vec load_bfloat16(const std::uint16_t* p) {
  return Vec{bfloat16_to_float(p[0]), bfloat16_to_float(p[1]), bfloat16_to_float(p[2]),
             bfloat16_to_float(p[3])};
}

// Sums and differences of neighbours: lane i becomes a[i] + a[i + stride] where i & stride is 0,
// and a[i - stride] - a[i] elsewhere. stride is a power of two below kLanes.
template <int stride>
static inline Vec butterfly(Vec a) {
  if constexpr (stride == 1) return Vec{a[0] + a[1], a[0] - a[1], a[2] + a[3], a[2] - a[3]};
  return Vec{a[0] + a[2], a[1] + a[3], a[0] - a[2], a[1] - a[3]};
}
// To whole numbers, halves to the even one.
static inline Vec round_to_even(Vec a) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(__builtin_lrintf(a[i]));
  return v;
}
// Bit i tells whether lane i of a is at least b's.
static inline std::uint32_t bits_at_least(Vec a, Vec b) {
  std::uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<std::uint32_t>(a[i] >= b[i]) << i;
  return bits;
}
// Stores whole numbers from -128 to 255 as bytes.
static inline void store_bytes(std::uint8_t* p, Vec a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<std::uint8_t>(static_cast<int>(a[i]));
}

// Numbers [j, j + kLanes) and [16 + j, 16 + j + kLanes) of a group of 32 (cache_format.h).
struct Pair {
  Vec first;
  Vec second;
};
// codes: of the first number. fifth_bits: those of the group from number j on.
static inline Pair load_int8_pair(const std::uint8_t* codes, float scale) {
  Pair pair;
  for (int i = 0; i < kLanes; ++i) {
    pair.first[i] = static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale;
    pair.second[i] = static_cast<float>(static_cast<std::int8_t>(codes[16 + i])) * scale;
  }
  return pair;
}
static inline Pair load_int4_pair(const std::uint8_t* codes, float scale) {
  Pair pair;
  for (int i = 0; i < kLanes; ++i) {
    pair.first[i] = static_cast<float>((codes[i] & 15) - 8) * scale;
    pair.second[i] = static_cast<float>((codes[i] >> 4) - 8) * scale;
  }
  return pair;
}
static inline Pair load_int5_pair(const std::uint8_t* codes, std::uint32_t fifth_bits,
                                  float scale) {
  Pair pair;
  for (int i = 0; i < kLanes; ++i) {
    const int first = (codes[i] & 15) | static_cast<int>(fifth_bits >> i & 1U) << 4;
    const int second = (codes[i] >> 4) | static_cast<int>(fifth_bits >> (16 + i) & 1U) << 4;
    pair.first[i] = static_cast<float>(first - 16) * scale;
    pair.second[i] = static_cast<float>(second - 16) * scale;
  }
  return pair;
}

}  // namespace kvconv
