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
constexpr int kRowsOneVec = 12;  // rows of a register block that is one vector wide
constexpr int kRowsTwoVecs = 6;  // and two vectors wide: 12 accumulators of 16 registers

typedef float Vec __attribute__((vector_size(16)));
typedef std::uint32_t VecBits __attribute__((vector_size(16)));

static inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
static inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
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
// 2^n, for the float whose low mantissa bits hold n (see exp in vec_math.h).
static inline Vec power_of_two(Vec a) { return (Vec)(((VecBits)a + 127U) << 23); }

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
