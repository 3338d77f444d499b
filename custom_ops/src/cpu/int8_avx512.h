// Products of bytes on vectors of sixteen sums: AVX-512, with VNNI where the build has it. The
// interface is described in int8_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "int8_pairs.h"
#include "vec_avx512.h"

namespace kvconv {

constexpr int kTileRows = 6;

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

}  // namespace kvconv
