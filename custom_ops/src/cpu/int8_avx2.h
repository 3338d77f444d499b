// Products of bytes on vectors of eight sums: AVX2, with VNNI where the build has it. The interface
// is described in int8_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "int8_pairs.h"
#include "vec_avx2.h"

namespace kvconv {

constexpr int kTileRows = 3;

using Words = __m256i;
using Sums = __m256i;
using Integers = __m256i;

static inline Words load_words(const std::uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
static inline void store_words(std::uint8_t* p, Words w) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w);
}
static inline Words low_nibbles(Words w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
static inline Words high_nibbles(Words w) {
  return _mm256_and_si256(_mm256_srli_epi32(w, 4), _mm256_set1_epi8(15));
}
static inline Words low_nibbles_with_fifth(Words w, Words fifths, int first) {
  const __m256i four = _mm256_and_si256(_mm256_srli_epi32(fifths, first), _mm256_set1_epi32(15));
  // Bit i to bit 8 * i + 4; the products' other bits fall between.
  const __m256i spread = _mm256_mullo_epi32(four, _mm256_set1_epi32(0x02040810));
  return _mm256_or_si256(low_nibbles(w), _mm256_and_si256(spread, _mm256_set1_epi32(0x10101010)));
}
static inline Words high_nibbles_with_fifth(Words w, Words fifths, int first) {
  return low_nibbles_with_fifth(_mm256_srli_epi32(w, 4), fifths, first);
}
static inline Words subtract_bytes(Words w, int number) {
  return _mm256_sub_epi8(w, _mm256_set1_epi8(static_cast<char>(number)));
}

static inline Sums set_sums(std::int32_t start) { return _mm256_set1_epi32(start); }
static inline Integers add_integers(Integers a, Integers b) { return _mm256_add_epi32(a, b); }
static inline Vec to_float(Integers i) { return _mm256_cvtepi32_ps(i); }
#if defined(KVCONV_USE_VNNI)
static inline Sums multiply_vectors(Sums sums, Words weights, Words activations) {
  return _mm256_dpbusd_avx_epi32(sums, weights, activations);
}
template <int factor>
static inline Integers to_integers(Sums s) {
  static_assert(factor == 1 || factor == 256);
  return factor == 1 ? s : _mm256_slli_epi32(s, 8);
}
#else
static inline Sums multiply_vectors(Sums sums, Words weights, Words activations) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, activations));
}
template <int factor>
static inline Integers to_integers(Sums s) {
  return _mm256_madd_epi16(s, _mm256_set1_epi16(factor));
}
#endif
static inline Sums multiply_words(Sums sums, Words weights, const std::int8_t* activations) {
  std::int32_t four;
  std::memcpy(&four, activations, sizeof(four));
  return multiply_vectors(sums, weights, _mm256_set1_epi32(four));
}
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

// Stores 16 bytes and adds up sums of two, first and second pairs by turns.
static inline void store_bytes(__m256i first, __m256i second, std::int8_t* out,
                               std::int32_t* pairs) {
  const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xD8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  add_pairs(bytes, pairs);
}
static inline __m256i round_eight(const float* p, float factor) {
  return _mm256_cvtps_epi32(mul(load(p), set(factor)));
}

static inline void round_to_bytes(const float* p, float factor, std::int8_t* out,
                                  std::int32_t* pairs) {
  store_bytes(round_eight(p, factor), round_eight(p + 8, factor), out, pairs);
}
static inline void round_to_two_bytes(const float* p, float factor, std::int8_t* high,
                                      std::int8_t* low, std::int32_t* high_pairs,
                                      std::int32_t* low_pairs) {
  __m256i lower[2];
  __m256i upper[2];
  for (int i = 0; i < 2; ++i) {
    const __m256i rounded = round_eight(p + 8 * i, factor);
    upper[i] = _mm256_srai_epi32(_mm256_add_epi32(rounded, _mm256_set1_epi32(128)), 8);
    lower[i] = _mm256_sub_epi32(rounded, _mm256_slli_epi32(upper[i], 8));
  }
  store_bytes(upper[0], upper[1], high, high_pairs);
  store_bytes(lower[0], lower[1], low, low_pairs);
}

static inline Integers round_to_words(const float* p, float factor, std::int8_t* out) {
  const __m256i first = round_eight(p, factor);
  const __m256i second = round_eight(p + 8, factor);
  const __m256i half = _mm256_set1_epi32(128);
  // Half a high byte more, so that the upper byte is the high one; the lower is off by that half.
  const __m256i shorts =
      _mm256_packs_epi32(_mm256_add_epi32(first, half), _mm256_add_epi32(second, half));
  const __m256i split = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
  const __m256i bytes =
      _mm256_xor_si256(_mm256_shuffle_epi8(shorts, split), _mm256_set1_epi64x(-0x7F7F7F8000000000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(bytes, 0xD8));
  return _mm256_add_epi32(first, second);
}
static inline std::int32_t sum_of_integers(Integers s) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return _mm_cvtsi128_si32(four);
}

static inline Words interleave(const std::uint8_t* a, const std::uint8_t* b, const std::uint8_t* c,
                               const std::uint8_t* d) {
  const auto load_two = [](const std::uint8_t* low, const std::uint8_t* high) {
    const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(low));
    const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high));
    return _mm_unpacklo_epi64(first, second);
  };
  const __m256i rows = _mm256_set_m128i(load_two(c, d), load_two(a, b));
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m256i transposition = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(rows, order), transposition);
}
static inline void interleave_two(const std::uint8_t* a, const std::uint8_t* b,
                                  const std::uint8_t* c, const std::uint8_t* d, Words (&w)[2]) {
  w[0] = interleave(a, b, c, d);
  w[1] = interleave(a + 16, b + 16, c + 16, d + 16);
}

}  // namespace kvconv
