// Vectors of four floats beside those of kLanes: a result for each of four rows of the weights.
// Compiled once per instruction set, after its vec_*.h.
#pragma once

#include <cstdint>

namespace kvconv {

#if defined(KVCONV_USE_AVX512) || defined(KVCONV_USE_AVX2)

using Four = __m128;

static inline Four load_four(const float* p) { return _mm_loadu_ps(p); }
static inline void store_four(float* p, Four v) { _mm_storeu_ps(p, v); }
static inline Four set_four(float x) { return _mm_set1_ps(x); }
static inline Four sub_four(Four a, Four b) { return _mm_sub_ps(a, b); }
static inline Four mul_four(Four a, Four b) { return _mm_mul_ps(a, b); }
static inline Four fma_four(Four a, Four b, Four c) { return _mm_fmadd_ps(a, b, c); }

// Widens four elements from `offset` on of each of four rows: target[4 * i + r] = rows[r][offset +
// i]. Written in whole vectors, which are soon read as such.
static inline void transpose_fours(const float* const* rows, std::int64_t offset, float* target) {
  Four out[4];
  for (int i = 0; i < 4; ++i) out[i] = load_four(rows[i] + offset);
  _MM_TRANSPOSE4_PS(out[0], out[1], out[2], out[3]);
  for (int i = 0; i < 4; ++i) store_four(target + 4 * i, out[i]);
}
static inline void transpose_fours(const std::uint16_t* const* rows, std::int64_t offset,
                                   float* target) {
  __m128i r[4];
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[i] + offset));
  }
  const __m128i rows01 = _mm_unpacklo_epi16(r[0], r[1]);
  const __m128i rows23 = _mm_unpacklo_epi16(r[2], r[3]);
  const __m128i first = _mm_unpacklo_epi32(rows01, rows23);
  const __m128i second = _mm_unpackhi_epi32(rows01, rows23);
#if defined(KVCONV_USE_AVX512)
  store(target, _mm512_cvtph_ps(_mm256_set_m128i(second, first)));
#else
  store(target, _mm256_cvtph_ps(first));
  store(target + 8, _mm256_cvtph_ps(second));
#endif
}

#else

using Four = Vec;
static_assert(kLanes == 4);

static inline Four load_four(const float* p) { return load(p); }
static inline void store_four(float* p, Four v) { store(p, v); }
static inline Four set_four(float x) { return set(x); }
static inline Four sub_four(Four a, Four b) { return sub(a, b); }
static inline Four mul_four(Four a, Four b) { return mul(a, b); }
static inline Four fma_four(Four a, Four b, Four c) { return fma(a, b, c); }

static inline void transpose_fours(const float* const* rows, std::int64_t offset, float* target) {
  for (int i = 0; i < 16; ++i) target[i] = rows[i % 4][offset + i / 4];
}
static inline void transpose_fours(const std::uint16_t* const* rows, std::int64_t offset,
                                   float* target) {
  for (int i = 0; i < 16; ++i) target[i] = float16_to_float(rows[i % 4][offset + i / 4]);
}

#endif

}  // namespace kvconv
