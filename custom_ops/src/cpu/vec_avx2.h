// Vectors of eight floats: AVX2, FMA and F16C. The interface is described in vec_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvconv {

constexpr int kLanes = 8;
constexpr int kRowsOneVec = 12;
constexpr int kRowsTwoVecs = 6;
constexpr int kRowsThreeVecs = 4;
constexpr int kMaxDotRows = 3;
constexpr int kFewRows = 6;

using Vec = __m256;

static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
static inline Vec in_register(Vec v) {
  __asm__("" : "+x"(v));
  return v;
}
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
static inline Vec zero_if_less(Vec a, Vec b, Vec y) {
  return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ), y);
}
static inline Vec low_bits_to_exponent(Vec a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
}
static inline Vec load_part(const float* p, std::int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(p,
                            _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane));
}
static inline __m128 sum_of_halves(Vec v) {
  return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}
static inline float sum_of_lanes(Vec v) {
  __m128 x = sum_of_halves(v);
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline float max_of_lanes(Vec v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
static inline void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 low = _mm256_shuffle_ps(ab, cd, _MM_SHUFFLE(1, 0, 1, 0));
  const __m256 high = _mm256_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 2, 3, 2));
  _mm_storeu_ps(p, sum_of_halves(_mm256_add_ps(low, high)));
}
// Writes the rows of a, transposed.
static inline void store_columns(Vec (&a)[8], float* target, std::int64_t target_stride) {
  Vec b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], _MM_SHUFFLE(1, 0, 1, 0));
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], _MM_SHUFFLE(3, 2, 3, 2));
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], _MM_SHUFFLE(1, 0, 1, 0));
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], _MM_SHUFFLE(3, 2, 3, 2));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(target + i * target_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(target + (i + 4) * target_stride,
                     _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}
static inline void transpose(const float* source, std::int64_t source_stride, float* target,
                             std::int64_t target_stride) {
  Vec a[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = load(source + i * source_stride);
  store_columns(a, target, target_stride);
}
static inline void transpose_part(const float* source, std::int64_t source_stride,
                                  std::int64_t count, float* target, std::int64_t target_stride) {
  Vec a[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = load_part(source + i * source_stride, count);
  store_columns(a, target, target_stride);
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

template <int stride>
static inline Vec butterfly(Vec a) {
  if constexpr (stride == 1) {
    const Vec b = _mm256_permute_ps(a, 0xB1);
    return _mm256_blend_ps(_mm256_add_ps(b, a), _mm256_sub_ps(b, a), 0xAA);
  } else if constexpr (stride == 2) {
    const Vec b = _mm256_permute_ps(a, 0x4E);
    return _mm256_blend_ps(_mm256_add_ps(b, a), _mm256_sub_ps(b, a), 0xCC);
  } else {
    const Vec b = _mm256_permute2f128_ps(a, a, 0x01);
    return _mm256_blend_ps(_mm256_add_ps(b, a), _mm256_sub_ps(b, a), 0xF0);
  }
}
static inline Vec round_to_even(Vec a) { return _mm256_round_ps(a, 0); }
static inline std::uint32_t bits_at_least(Vec a, Vec b) {
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
}
static inline void store_bytes(std::uint8_t* p, Vec a) {
  const __m256i bytes = _mm256_and_si256(_mm256_cvtps_epi32(a), _mm256_set1_epi32(255));
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}

struct Pair {
  Vec first;
  Vec second;
};
static inline __m128i load_codes(const std::uint8_t* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}
static inline Pair load_int8_pair(const std::uint8_t* codes, float scale) {
  return {mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_codes(codes))), set(scale)),
          mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_codes(codes + 16))), set(scale))};
}
// (code - zero point) * scale, without a rounding in between.
static inline Vec scaled(__m256i codes, float zero_point, float scale) {
  return fma(_mm256_cvtepi32_ps(codes), set(scale), set(-zero_point * scale));
}
static inline Pair load_int4_pair(const std::uint8_t* codes, float scale) {
  const __m256i both = _mm256_cvtepu8_epi32(load_codes(codes));
  return {scaled(_mm256_and_si256(both, _mm256_set1_epi32(15)), 8.0F, scale),
          scaled(_mm256_srli_epi32(both, 4), 8.0F, scale)};
}
static inline Pair load_int5_pair(const std::uint8_t* codes, std::uint32_t fifth_bits,
                                  float scale) {
  const __m256i both = _mm256_cvtepu8_epi32(load_codes(codes));
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i bit_4 = _mm256_set1_epi32(16);
  // Each lane's fifth bit at bit 4.
  const auto fifth = [&](std::uint32_t bits) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>((bits & 0xFFFFU) << 4));
    return _mm256_and_si256(_mm256_srlv_epi32(all, lane), bit_4);
  };
  const __m256i first = _mm256_and_si256(both, _mm256_set1_epi32(15));
  const __m256i second = _mm256_srli_epi32(both, 4);
  return {scaled(_mm256_or_si256(first, fifth(fifth_bits)), 16.0F, scale),
          scaled(_mm256_or_si256(second, fifth(fifth_bits >> 16)), 16.0F, scale)};
}

}  // namespace kvconv
