// Vectors of eight floats: AVX2, FMA and F16C. The interface is described in vec_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvconv {

constexpr int kLanes = 8;
constexpr int kRowsOneVec = 12;
constexpr int kRowsTwoVecs = 6;

using Vec = __m256;

static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
static inline Vec set(float x) { return _mm256_set1_ps(x); }
static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
static inline Vec select_equal(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}
static inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline Vec absolute(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), a); }
static inline Vec power_of_two(Vec a) {
  const __m256i n = _mm256_add_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}

static inline Vec load_float16(const std::uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline void store_float16(std::uint16_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline Vec load_bfloat16(const std::uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

}  // namespace kvconv
