// Products of bytes on vectors of four sums, in plain code.
//
// Every int8_*.h has this same interface. A vector of words holds in each 32-bit lane four bytes of
// one row of the weights; a vector of sums gathers, in the same lane, their products with four
// activations. Everything is static and nothing of it may be shared between instruction sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vec_generic.h"

namespace kvconv {

// Rows of activations in a register block that is two vectors wide.
constexpr int kTileRows = 2;
// Whether 8-bit weights are multiplied as two planes of 4 bits, because their products with int8
// would not fit into the sums.
constexpr bool kSplitsBytes = false;

struct Words {
  std::uint8_t bytes[kLanes * 4];
};
struct Sums {
  std::int32_t lanes[kLanes];
};
// Whole sums, 32 bits a lane.
using Integers = Sums;

static inline Words load_words(const std::uint8_t* p) {
  Words w;
  std::memcpy(&w, p, sizeof(w));
  return w;
}
static inline void store_words(std::uint8_t* p, Words w) { std::memcpy(p, &w, sizeof(w)); }
static inline Words low_nibbles(Words w) {
  for (std::uint8_t& byte : w.bytes) byte &= 15;
  return w;
}
static inline Words high_nibbles(Words w) {
  for (std::uint8_t& byte : w.bytes) byte >>= 4;
  return w;
}
// The halves of bytes with a fifth bit: bits [first, first + 4) of each lane of `fifths`.
static inline Words low_nibbles_with_fifth(Words w, Words fifths, int first) {
  for (int i = 0; i < 4 * kLanes; ++i) {
    const int bit = first + i % 4;
    const int fifth = fifths.bytes[i / 4 * 4 + bit / 8] >> (bit % 8) & 1;
    w.bytes[i] = static_cast<std::uint8_t>((w.bytes[i] & 15) | fifth << 4);
  }
  return w;
}
static inline Words high_nibbles_with_fifth(Words w, Words fifths, int first) {
  return low_nibbles_with_fifth(high_nibbles(w), fifths, first);
}
// Subtracts a number from every byte; they become signed.
static inline Words subtract_bytes(Words w, int number) {
  for (std::uint8_t& byte : w.bytes) byte = static_cast<std::uint8_t>(byte - number);
  return w;
}

// What sums start with when every weight of a piece has `middle` subtracted: the piece's
// activations are added up to pairs[0] (bytes 0 and 1 of each word) and pairs[1] (bytes 2 and 3).
static inline std::int32_t start_of(const std::int32_t* pairs, int middle) {
  return -middle * (pairs[0] + pairs[1]);
}
static inline Sums set_sums(std::int32_t start) {
  Sums s;
  for (std::int32_t& lane : s.lanes) lane = start;
  return s;
}
// sums + the products of weights (unsigned) with activations (signed), four in each lane.
static inline Sums multiply_vectors(Sums sums, Words weights, Words activations) {
  for (int i = 0; i < 4 * kLanes; ++i) {
    sums.lanes[i / 4] += weights.bytes[i] * static_cast<std::int8_t>(activations.bytes[i]);
  }
  return sums;
}
// The same with four activations for all lanes.
static inline Sums multiply_words(Sums sums, Words weights, const std::int8_t* activations) {
  Words all;
  for (int lane = 0; lane < kLanes; ++lane) std::memcpy(all.bytes + lane * 4, activations, 4);
  return multiply_vectors(sums, weights, all);
}
// The sums as they are, times `factor`: 1 or 256, or 16 times that where bytes are split.
template <int factor>
static inline Integers to_integers(Sums s) {
  for (std::int32_t& lane : s.lanes) lane *= factor;
  return s;
}
static inline Integers add_integers(Integers a, Integers b) {
  for (int lane = 0; lane < kLanes; ++lane) a.lanes[lane] += b.lanes[lane];
  return a;
}
static inline Vec to_float(Integers i) {
  Vec v;
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = static_cast<float>(i.lanes[lane]);
  return v;
}

// One byte of each lane's word as a float.
template <int byte>
static inline Vec byte_to_float(Words w) {
  Vec v;
  for (int lane = 0; lane < kLanes; ++lane) {
    v[lane] = static_cast<float>(w.bytes[lane * 4 + byte]);
  }
  return v;
}

// The largest magnitude of 16 floats by bit pattern, so that a NaN counts as the largest.
static inline float largest_magnitude(const float* p) {
  std::uint32_t largest = 0;
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t bits = bits_from_float(p[i]) & 0x7FFFFFFFU;
    largest = bits > largest ? bits : largest;
  }
  return float_from_bits(largest);
}

// The integer nearest to x, ties to even, and 0 for a NaN or what is out of reach. No adding of a
// large number: a compiler may fuse that with the product that x is, and ties fall otherwise then.
static inline std::int32_t round_one(float x) {
  const bool is_in_reach = x >= -4194304.0F && x <= 4194304.0F;
  return is_in_reach ? static_cast<std::int32_t>(std::lrint(x)) : 0;
}
// Rounds 16 floats times `factor` (magnitudes up to 127) to bytes and adds them to pairs as
// start_of takes them.
static inline void round_to_bytes(const float* p, float factor, std::int8_t* out,
                                  std::int32_t* pairs) {
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<std::int8_t>(round_one(p[i] * factor));
    pairs[i % 4 / 2] += out[i];
  }
}
// Rounds 16 floats times `factor` (magnitudes up to 127 * 256) to 256 * high + low.
static inline void round_to_two_bytes(const float* p, float factor, std::int8_t* high,
                                      std::int8_t* low, std::int32_t* high_pairs,
                                      std::int32_t* low_pairs) {
  for (int i = 0; i < 16; ++i) {
    const std::int32_t rounded = round_one(p[i] * factor);
    high[i] = static_cast<std::int8_t>((rounded + 128) >> 8);
    low[i] = static_cast<std::int8_t>(rounded - 256 * high[i]);
    high_pairs[i % 4 / 2] += high[i];
    low_pairs[i % 4 / 2] += low[i];
  }
}

// Rounds 2 * kLanes floats times `factor` (magnitudes up to 127 * 256) to 256 * high + low and
// writes, of each four, the high bytes and then the low ones. Returns sums of the rounded numbers,
// to be added up across lanes.
static inline Integers round_to_words(const float* p, float factor, std::int8_t* out) {
  Integers sums = {};
  for (int i = 0; i < 2 * kLanes; ++i) {
    const std::int32_t rounded = round_one(p[i] * factor);
    std::int8_t* byte = out + i / 4 * 8 + i % 4;
    byte[0] = static_cast<std::int8_t>((rounded + 128) >> 8);
    byte[4] = static_cast<std::int8_t>(rounded - 256 * byte[0]);
    sums.lanes[i % kLanes] += rounded;
  }
  return sums;
}
static inline std::int32_t sum_of_integers(Integers s) {
  std::int32_t sum = 0;
  for (const std::int32_t lane : s.lanes) sum += lane;
  return sum;
}

// Words whose lane i has byte i of each of four rows.
static inline Words interleave(const std::uint8_t* a, const std::uint8_t* b, const std::uint8_t* c,
                               const std::uint8_t* d) {
  Words w;
  for (int i = 0; i < kLanes; ++i) {
    w.bytes[4 * i] = a[i];
    w.bytes[4 * i + 1] = b[i];
    w.bytes[4 * i + 2] = c[i];
    w.bytes[4 * i + 3] = d[i];
  }
  return w;
}
// The same of bytes [0, kLanes) and [16, 16 + kLanes) of rows of 32.
static inline void interleave_two(const std::uint8_t* a, const std::uint8_t* b,
                                  const std::uint8_t* c, const std::uint8_t* d, Words (&w)[2]) {
  w[0] = interleave(a, b, c, d);
  w[1] = interleave(a + 16, b + 16, c + 16, d + 16);
}

}  // namespace kvconv
