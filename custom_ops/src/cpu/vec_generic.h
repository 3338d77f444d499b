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
// The nearest integer, for |a| < 2^22.
static inline Vec nearest(Vec a) {
  const Vec magic = set(12582912.0F);  // 1.5 * 2^23
  return (a + magic) - magic;
}
// a * 2^n, for an integer n in [-126, 127].
static inline Vec scale_by_power(Vec a, Vec n) {
  const VecBits bits = (VecBits)(n + set(12582912.0F));  // n in the low mantissa bits
  return a * (Vec)((bits + 127U) << 23);
}
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

}  // namespace kvconv
