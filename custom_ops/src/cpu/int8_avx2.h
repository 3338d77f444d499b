// Products of bytes on vectors of eight sums: AVX2. The interface is described in int8_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kvconv {

constexpr int kTileRows = 3;

// Sums are pairs of 16 bits: enough for 32 products of 4 bits with int8, two pairs a word, once
// the middle is subtracted; what is in between may wrap.
constexpr bool kSplitsBytes = true;

using Words = __m256i;
using Sums = __m256i;

static inline Words load_words(const std::uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
static inline Words load_some_words(const std::uint8_t* p, std::int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), mask);
}
static inline void store_words(std::uint8_t* p, Words w) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w);
}
static inline Words low_nibbles(Words w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
static inline Words high_nibbles(Words w) {
  return _mm256_and_si256(_mm256_srli_epi32(w, 4), _mm256_set1_epi8(15));
}
static inline Words subtract_bytes(Words w, int number) {
  return _mm256_sub_epi8(w, _mm256_set1_epi8(static_cast<char>(number)));
}

static inline std::int32_t start_of(const std::int32_t* pairs, int middle) {
  const std::uint32_t low = static_cast<std::uint16_t>(-middle * pairs[0]);
  const std::uint32_t high = static_cast<std::uint16_t>(-middle * pairs[1]);
  return static_cast<std::int32_t>(low | (high << 16));
}
static inline Sums set_sums(std::int32_t start) { return _mm256_set1_epi32(start); }
static inline Sums load_sums(const std::int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
static inline Sums multiply_vectors(Sums sums, Words weights, Words activations) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, activations));
}
static inline Sums multiply_words(Sums sums, Words weights, const std::int8_t* activations) {
  std::int32_t four;
  std::memcpy(&four, activations, sizeof(four));
  return multiply_vectors(sums, weights, _mm256_set1_epi32(four));
}
template <bool shifted>
static inline Vec to_float(Sums s) {
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(s, _mm256_set1_epi16(shifted ? 16 : 1)));
}

static inline void transpose_quarters(Words* w) {
  const Words low01 = _mm256_unpacklo_epi32(w[0], w[1]);
  const Words high01 = _mm256_unpackhi_epi32(w[0], w[1]);
  const Words low23 = _mm256_unpacklo_epi32(w[2], w[3]);
  const Words high23 = _mm256_unpackhi_epi32(w[2], w[3]);
  w[0] = _mm256_unpacklo_epi64(low01, low23);
  w[1] = _mm256_unpackhi_epi64(low01, low23);
  w[2] = _mm256_unpacklo_epi64(high01, high23);
  w[3] = _mm256_unpackhi_epi64(high01, high23);
}
static inline void pair_quarters(Words* a, Words* b) {
  const Words even = _mm256_permute2x128_si256(*a, *b, 0x20);
  *b = _mm256_permute2x128_si256(*a, *b, 0x31);
  *a = even;
}

static inline void transpose_words(const std::uint8_t* const* rows, std::int64_t offset, int count,
                                   Words* out) {
  Words r[8];
  if (count == 8) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = load_words(rows[i] + offset);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = load_some_words(rows[i] + offset, count);
  }
  // Four by four within the halves, then the halves.
  transpose_quarters(r);
  transpose_quarters(r + 4);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x20);
    out[4 + i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
  }
}

static inline Vec low_float16(Words w) {
  const __m256i low = _mm256_and_si256(w, _mm256_set1_epi32(0xFFFF));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
static inline Vec high_float16(Words w) { return low_float16(_mm256_srli_epi32(w, 16)); }
static inline Vec as_floats(Words w) { return _mm256_castsi256_ps(w); }

template <int byte>
static inline Vec byte_to_float(Words w) {
  return _mm256_cvtepi32_ps(
      _mm256_and_si256(_mm256_srli_epi32(w, 8 * byte), _mm256_set1_epi32(255)));
}

static inline float largest_magnitude(const float* p) {
  const __m256i sign = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256i both = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(load(p)), sign),
                                        _mm256_and_si256(_mm256_castps_si256(load(p + 8)), sign));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

static inline void round_to_bytes(const float* p, float factor, bool sorts, std::int8_t* out,
                                  std::int32_t* pairs) {
  const __m256i first = _mm256_cvtps_epi32(mul(load(p), set(factor)));
  const __m256i second = _mm256_cvtps_epi32(mul(load(p + 8), set(factor)));
  const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xD8);
  __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
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
