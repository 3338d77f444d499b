// Products of bytes on vectors of sixteen sums: AVX-512, with VNNI where the build has it. The
// interface is described in int8_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "int8_pairs.h"
#include "vec_avx512.h"

namespace kvconv {

#if defined(KVCONV_USE_VNNI)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif

using Words = __m512i;
using Sums = __m512i;
using Integers = __m512i;

static inline Words load_words(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
static inline void store_words(std::uint8_t* p, Words w) { _mm512_storeu_si512(p, w); }
static inline Words low_nibbles(Words w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
static inline Words high_nibbles(Words w) {
  return _mm512_and_si512(_mm512_srli_epi32(w, 4), _mm512_set1_epi8(15));
}
static inline Words low_nibbles_with_fifth(Words w, Words fifths, int first) {
  // Entry n has bit i of n at bit 8 * i + 4; the choice looks at no higher bits of its index.
  const __m512i spread =
      _mm512_setr_epi32(0x00000000, 0x00000010, 0x00001000, 0x00001010, 0x00100000, 0x00100010,
                        0x00101000, 0x00101010, 0x10000000, 0x10000010, 0x10001000, 0x10001010,
                        0x10100000, 0x10100010, 0x10101000, 0x10101010);
  const __m512i bits =
      _mm512_permutexvar_epi32(_mm512_srli_epi32(fifths, static_cast<unsigned>(first)), spread);
  constexpr int kOrOfAnd = 0xF8;  // bits | (w & 15)
  return _mm512_ternarylogic_epi32(bits, w, _mm512_set1_epi8(15), kOrOfAnd);
}
static inline Words high_nibbles_with_fifth(Words w, Words fifths, int first) {
  return low_nibbles_with_fifth(_mm512_srli_epi32(w, 4), fifths, first);
}
static inline Words subtract_bytes(Words w, int number) {
  return _mm512_sub_epi8(w, _mm512_set1_epi8(static_cast<char>(number)));
}
static inline Sums set_sums(std::int32_t start) { return _mm512_set1_epi32(start); }
static inline Integers add_integers(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
static inline Vec to_float(Integers i) { return _mm512_cvtepi32_ps(i); }

#if defined(KVCONV_USE_VNNI)

static inline Sums multiply_vectors(Sums sums, Words weights, Words activations) {
  return _mm512_dpbusd_epi32(sums, weights, activations);
}
template <int factor>
static inline Integers to_integers(Sums s) {
  static_assert(factor == 1 || factor == 256);
  return factor == 1 ? s : _mm512_slli_epi32(s, 8);
}

#else

static inline Sums multiply_vectors(Sums sums, Words weights, Words activations) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, activations));
}
template <int factor>
static inline Integers to_integers(Sums s) {
  return _mm512_madd_epi16(s, _mm512_set1_epi16(factor));
}

#endif

static inline Sums multiply_words(Sums sums, Words weights, const std::int8_t* activations) {
  std::int32_t four;
  std::memcpy(&four, activations, sizeof(four));
  return multiply_vectors(sums, weights, _mm512_set1_epi32(four));
}

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

// Stores 16 bytes and adds up sums of two, first and second pairs by turns.
static inline void store_bytes(__m512i integers, std::int8_t* out, std::int32_t* pairs) {
  const __m128i bytes = _mm512_cvtepi32_epi8(integers);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  add_pairs(bytes, pairs);
}

static inline void round_to_bytes(const float* p, float factor, std::int8_t* out,
                                  std::int32_t* pairs) {
  store_bytes(_mm512_cvtps_epi32(mul(load(p), set(factor))), out, pairs);
}
static inline void round_to_two_bytes(const float* p, float factor, std::int8_t* high,
                                      std::int8_t* low, std::int32_t* high_pairs,
                                      std::int32_t* low_pairs) {
  const __m512i rounded = _mm512_cvtps_epi32(mul(load(p), set(factor)));
  const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)), 8);
  store_bytes(upper, high, high_pairs);
  store_bytes(_mm512_sub_epi32(rounded, _mm512_slli_epi32(upper, 8)), low, low_pairs);
}

static inline Integers round_to_words(const float* p, float factor, std::int8_t* out) {
  const __m512i first = _mm512_cvtps_epi32(mul(load(p), set(factor)));
  const __m512i second = _mm512_cvtps_epi32(mul(load(p + kLanes), set(factor)));
  const __m512i half = _mm512_set1_epi32(128);
  // Half a high byte more, so that the upper byte is the high one; the lower is off by that half.
  const __m512i shorts =
      _mm512_packs_epi32(_mm512_add_epi32(first, half), _mm512_add_epi32(second, half));
  const __m512i split =
      _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
  const __m512i bytes =
      _mm512_xor_si512(_mm512_shuffle_epi8(shorts, split), _mm512_set1_epi64(-0x7F7F7F8000000000));
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi64(order, bytes));
  return _mm512_add_epi32(first, second);
}
static inline std::int32_t sum_of_integers(Integers s) {  // may wrap
  const __m256i eight =
      _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return _mm_cvtsi128_si32(four);
}

// Transposes four words of four bytes in each quarter.
static inline Words transpose_quarters(Words w) {
  return _mm512_shuffle_epi8(w, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6,
                                                                     10, 14, 3, 7, 11, 15)));
}
static inline Words interleave(const std::uint8_t* a, const std::uint8_t* b, const std::uint8_t* c,
                               const std::uint8_t* d) {
  __m512i rows = _mm512_castsi128_si512(load_codes(a));
  rows = _mm512_inserti32x4(rows, load_codes(b), 1);
  rows = _mm512_inserti32x4(rows, load_codes(c), 2);
  rows = _mm512_inserti32x4(rows, load_codes(d), 3);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return transpose_quarters(_mm512_permutexvar_epi32(order, rows));
}
static inline void interleave_two(const std::uint8_t* a, const std::uint8_t* b,
                                  const std::uint8_t* c, const std::uint8_t* d, Words (&w)[2]) {
  const auto load_two = [](const std::uint8_t* low, const std::uint8_t* high) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  };
  const __m512i ab = load_two(a, b);
  const __m512i cd = load_two(c, d);
  const __m512i first = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
  const __m512i second =
      _mm512_setr_epi32(4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31);
  w[0] = transpose_quarters(_mm512_permutex2var_epi32(ab, first, cd));
  w[1] = transpose_quarters(_mm512_permutex2var_epi32(ab, second, cd));
}

}  // namespace kvconv
