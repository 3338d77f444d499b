// Vectors of sixteen floats: AVX-512 F, BW, DQ and VL. The interface is described in
// vec_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvconv {

constexpr int kLanes = 16;
constexpr int kRowsOneVec = 16;
constexpr int kRowsTwoVecs = 12;
constexpr int kRowsThreeVecs = 8;  // 24 accumulators of 32 registers
constexpr int kMaxDotRows = 4;
constexpr int kFewRows = 12;

using Vec = __m512;

static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
static inline Vec in_register(Vec v) {
  __asm__("" : "+v"(v));
  return v;
}
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
static inline Vec zero_if_less(Vec a, Vec b, Vec y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), y);
}
static inline Vec low_bits_to_exponent(Vec a) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23));
}
static inline Vec load_part(const float* p, std::int64_t count) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << count) - 1U), p);
}
static inline __m128 sum_of_quarters(Vec v) {
  const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
static inline float sum_of_lanes(Vec v) {
  __m128 x = sum_of_quarters(v);
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline float max_of_lanes(Vec v) {
  const __m256 x = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
static inline void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 low = _mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(1, 0, 1, 0));
  const __m512 high = _mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 2, 3, 2));
  _mm_storeu_ps(p, sum_of_quarters(_mm512_add_ps(low, high)));
}
// Writes the rows of a, transposed.
static inline void store_columns(Vec (&a)[16], float* target, std::int64_t target_stride) {
  Vec b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // a[i + j]: column j of each quarter, of rows i to i + 3
    a[i] = _mm512_shuffle_ps(b[i], b[i + 2], _MM_SHUFFLE(1, 0, 1, 0));
    a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], _MM_SHUFFLE(3, 2, 3, 2));
    a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], _MM_SHUFFLE(1, 0, 1, 0));
    a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], _MM_SHUFFLE(3, 2, 3, 2));
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 x = _mm512_shuffle_f32x4(a[j], a[j + 4], 0x88);  // quarters 0 and 2
    const __m512 y = _mm512_shuffle_f32x4(a[j], a[j + 4], 0xDD);  // quarters 1 and 3
    const __m512 z = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0x88);
    const __m512 w = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0xDD);
    _mm512_storeu_ps(target + j * target_stride, _mm512_shuffle_f32x4(x, z, 0x88));
    _mm512_storeu_ps(target + (j + 4) * target_stride, _mm512_shuffle_f32x4(y, w, 0x88));
    _mm512_storeu_ps(target + (j + 8) * target_stride, _mm512_shuffle_f32x4(x, z, 0xDD));
    _mm512_storeu_ps(target + (j + 12) * target_stride, _mm512_shuffle_f32x4(y, w, 0xDD));
  }
}
static inline void transpose(const float* source, std::int64_t source_stride, float* target,
                             std::int64_t target_stride) {
  Vec a[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = load(source + i * source_stride);
  store_columns(a, target, target_stride);
}
static inline void transpose_part(const float* source, std::int64_t source_stride,
                                  std::int64_t count, float* target, std::int64_t target_stride) {
  Vec a[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = load_part(source + i * source_stride, count);
  store_columns(a, target, target_stride);
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

template <int stride>
static inline Vec butterfly(Vec a) {
  if constexpr (stride == 1) {
    const Vec b = _mm512_permute_ps(a, 0xB1);
    return _mm512_mask_sub_ps(_mm512_add_ps(b, a), 0xAAAA, b, a);
  } else if constexpr (stride == 2) {
    const Vec b = _mm512_permute_ps(a, 0x4E);
    return _mm512_mask_sub_ps(_mm512_add_ps(b, a), 0xCCCC, b, a);
  } else if constexpr (stride == 4) {
    const Vec b = _mm512_shuffle_f32x4(a, a, 0xB1);
    return _mm512_mask_sub_ps(_mm512_add_ps(b, a), 0xF0F0, b, a);
  } else {
    const Vec b = _mm512_shuffle_f32x4(a, a, 0x4E);
    return _mm512_mask_sub_ps(_mm512_add_ps(b, a), 0xFF00, b, a);
  }
}
static inline Vec round_to_even(Vec a) { return _mm512_roundscale_ps(a, 0); }
static inline std::uint32_t bits_at_least(Vec a, Vec b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
}
static inline void store_bytes(std::uint8_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}

struct Pair {
  Vec first;
  Vec second;
};
static inline __m128i load_codes(const std::uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
static inline Pair load_int8_pair(const std::uint8_t* codes, float scale) {
  const Vec factor = _mm512_set1_ps(scale);
  return {mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_codes(codes))), factor),
          mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_codes(codes + 16))), factor)};
}
// Numbers of four bits are looked up in a table, whose choice looks at no higher bits.
static inline Pair load_int4_pair(const std::uint8_t* codes, float scale) {
  const Vec table =
      mul(_mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7), set(scale));
  const __m512i both = _mm512_cvtepu8_epi32(load_codes(codes));
  return {_mm512_permutexvar_ps(both, table),
          _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), table)};
}
// The same in two tables: a rotation takes each lane's fifth bit to where it chooses between them.
static inline Pair load_int5_pair(const std::uint8_t* codes, std::uint32_t fifth_bits,
                                  float scale) {
  const Vec low =
      mul(_mm512_setr_ps(-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1),
          set(scale));
  const Vec high =
      mul(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), set(scale));
  const __m512i to_bit_4 =
      _mm512_setr_epi32(4, 3, 2, 1, 0, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21);
  const __m512i from_16_to_bit_4 =
      _mm512_setr_epi32(20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5);
  const __m512i bit_4 = _mm512_set1_epi32(16);
  const __m512i bits = _mm512_set1_epi32(static_cast<int>(fifth_bits));
  const __m512i both = _mm512_cvtepu8_epi32(load_codes(codes));
  constexpr int kFirstChooses = 0xCA;
  const __m512i first =
      _mm512_ternarylogic_epi32(bit_4, _mm512_rolv_epi32(bits, to_bit_4), both, kFirstChooses);
  const __m512i second = _mm512_ternarylogic_epi32(bit_4, _mm512_rolv_epi32(bits, from_16_to_bit_4),
                                                   _mm512_srli_epi32(both, 4), kFirstChooses);
  return {_mm512_permutex2var_ps(low, first, high), _mm512_permutex2var_ps(low, second, high)};
}

}  // namespace kvconv
