// Products of bytes on vectors of sixteen sums: AVX-512, with VNNI where the build has it. The
// interface is described in int8_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kvconv {

constexpr int kTileRows = 6;

using Words = __m512i;
using Sums = __m512i;

static inline Words load_words(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
static inline Words load_some_words(const std::uint8_t* p, std::int64_t count) {
  const auto mask = static_cast<__mmask16>(count < 16 ? (1U << count) - 1 : 0xFFFFU);
  return _mm512_maskz_loadu_epi32(mask, p);
}
static inline void store_words(std::uint8_t* p, Words w) { _mm512_storeu_si512(p, w); }
static inline Words low_nibbles(Words w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
static inline Words high_nibbles(Words w) {
  return _mm512_and_si512(_mm512_srli_epi32(w, 4), _mm512_set1_epi8(15));
}
static inline Words subtract_bytes(Words w, int number) {
  return _mm512_sub_epi8(w, _mm512_set1_epi8(static_cast<char>(number)));
}
static inline Sums set_sums(std::int32_t start) { return _mm512_set1_epi32(start); }
static inline Sums load_sums(const std::int32_t* p) { return _mm512_loadu_si512(p); }

#if defined(KVCONV_USE_VNNI)

constexpr bool kSplitsBytes = false;

static inline std::int32_t start_of(const std::int32_t* pairs, int middle) {
  return -middle * (pairs[0] + pairs[1]);
}
static inline Sums multiply_vectors(Sums sums, Words weights, Words activations) {
  return _mm512_dpbusd_epi32(sums, weights, activations);
}
template <bool shifted>
static inline Vec to_float(Sums s) {
  static_assert(!shifted);
  return _mm512_cvtepi32_ps(s);
}

#else

// Sums are pairs of 16 bits: enough for 32 products of 4 bits with int8, two pairs a word, once
// the middle is subtracted; what is in between may wrap.
constexpr bool kSplitsBytes = true;

static inline std::int32_t start_of(const std::int32_t* pairs, int middle) {
  const std::uint32_t low = static_cast<std::uint16_t>(-middle * pairs[0]);
  const std::uint32_t high = static_cast<std::uint16_t>(-middle * pairs[1]);
  return static_cast<std::int32_t>(low | (high << 16));
}
static inline Sums multiply_vectors(Sums sums, Words weights, Words activations) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, activations));
}
template <bool shifted>
static inline Vec to_float(Sums s) {
  return _mm512_cvtepi32_ps(_mm512_madd_epi16(s, _mm512_set1_epi16(shifted ? 16 : 1)));
}

#endif

static inline Sums multiply_words(Sums sums, Words weights, const std::int8_t* activations) {
  std::int32_t four;
  std::memcpy(&four, activations, sizeof(four));
  return multiply_vectors(sums, weights, _mm512_set1_epi32(four));
}

static inline void transpose_quarters(Words* w) {
  const Words low01 = _mm512_unpacklo_epi32(w[0], w[1]);
  const Words high01 = _mm512_unpackhi_epi32(w[0], w[1]);
  const Words low23 = _mm512_unpacklo_epi32(w[2], w[3]);
  const Words high23 = _mm512_unpackhi_epi32(w[2], w[3]);
  w[0] = _mm512_unpacklo_epi64(low01, low23);
  w[1] = _mm512_unpackhi_epi64(low01, low23);
  w[2] = _mm512_unpacklo_epi64(high01, high23);
  w[3] = _mm512_unpackhi_epi64(high01, high23);
}
static inline void pair_quarters(Words* a, Words* b) {
  const Words even = _mm512_shuffle_i32x4(*a, *b, 0x88);
  *b = _mm512_shuffle_i32x4(*a, *b, 0xDD);
  *a = even;
}

static inline void transpose_words(const std::uint8_t* const* rows, std::int64_t offset, int count,
                                   Words* out) {
  Words r[16];
  if (count == 16) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = load_words(rows[i] + offset);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = load_some_words(rows[i] + offset, count);
  }
  // 1. Four by four within the lanes of 128 bits: r[4 * g + i] has, in lane l, word 4 * l + i of
  //    rows 4 * g to 4 * g + 3.
#pragma GCC unroll 4
  for (int g = 0; g < 16; g += 4) transpose_quarters(r + g);
  // 2. The lanes themselves.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Words even01 = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    const Words odd01 = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    const Words even23 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    const Words odd23 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
    out[i] = _mm512_shuffle_i32x4(even01, even23, 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(even01, even23, 0xDD);
    out[12 + i] = _mm512_shuffle_i32x4(odd01, odd23, 0xDD);
  }
}

static inline Vec low_float16(Words w) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w)); }
static inline Vec high_float16(Words w) { return low_float16(_mm512_srli_epi32(w, 16)); }
static inline Vec as_floats(Words w) { return _mm512_castsi512_ps(w); }

template <int byte>
static inline Vec byte_to_float(Words w) {
  return _mm512_cvtepi32_ps(
      _mm512_and_si512(_mm512_srli_epi32(w, 8 * byte), _mm512_set1_epi32(255)));
}

static inline float largest_magnitude(const float* p) {
  const __m512i bits =
      _mm512_and_si512(_mm512_castps_si512(load(p)), _mm512_set1_epi32(0x7FFFFFFF));
  const std::int32_t largest = _mm512_reduce_max_epi32(bits);
  float value;
  std::memcpy(&value, &largest, sizeof(value));
  return value;
}

static inline void round_to_bytes(const float* p, float factor, bool sorts, std::int8_t* out,
                                  std::int32_t* pairs) {
  const __m512i rounded = _mm512_cvtps_epi32(mul(load(p), set(factor)));
  __m128i bytes = _mm512_cvtepi32_epi8(rounded);
  if (sorts) {
    bytes = _mm_shuffle_epi8(bytes,
                             _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  // Sums of two bytes, first and second pairs by turns.
  __m128i sums = _mm_maddubs_epi16(_mm_set1_epi8(1), bytes);
  sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4E));
  sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xB1));
  const std::int32_t both = _mm_cvtsi128_si32(sums);
  pairs[0] += static_cast<std::int16_t>(both & 0xFFFF);
  pairs[1] += both >> 16;
}

}  // namespace kvconv
