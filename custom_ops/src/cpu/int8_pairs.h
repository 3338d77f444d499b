// What the x86 builds share: sums of bytes and, where there is no VNNI, products in pairs of sums.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvconv {

#if defined(KVCONV_USE_VNNI)

constexpr bool kSplitsBytes = false;

static inline std::int32_t start_of(const std::int32_t* pairs, int middle) {
  return -middle * (pairs[0] + pairs[1]);
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

#endif

// Adds up sums of two of 16 bytes, first and second pairs by turns.
static inline void add_pairs(__m128i bytes, std::int32_t* pairs) {
  __m128i sums = _mm_maddubs_epi16(_mm_set1_epi8(1), bytes);
  sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4E));
  sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xB1));
  const std::int32_t both = _mm_cvtsi128_si32(sums);
  pairs[0] += static_cast<std::int16_t>(both & 0xFFFF);
  pairs[1] += both >> 16;
}

}  // namespace kvconv
