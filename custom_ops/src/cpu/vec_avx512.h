// Vectors of sixteen floats: AVX-512 F, BW, DQ and VL. The interface is described in
// vec_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvconv {

constexpr int kLanes = 16;
constexpr int kRowsOneVec = 12;
constexpr int kRowsTwoVecs = 12;  // 24 accumulators of 32 registers

using Vec = __m512;

static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
static inline Vec set(float x) { return _mm512_set1_ps(x); }
static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline Vec select_equal(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), y, x);
}
static inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline Vec absolute(Vec a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0F), a); }
static inline Vec power_of_two(Vec a) {
  const __m512i n = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}

static inline Vec load_float16(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline void store_float16(std::uint16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline Vec load_bfloat16(const std::uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

}  // namespace kvconv
