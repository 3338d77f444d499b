// Products of bytes on vectors of four sums, in plain code; after vec_generic.h.
//
// Every int8_*.h has this same interface. A vector of words holds in each 32-bit lane four bytes of
// one row of the weights; a vector of sums gathers, in the same lane, their products with four
// activations. Everything is static and nothing of it may be shared between instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

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

static inline Words load_words(const std::uint8_t* p) {
  Words w;
  std::memcpy(&w, p, sizeof(w));
  return w;
}
// The first `count` words, or all where there are more; the others 0.
static inline Words load_some_words(const std::uint8_t* p, std::int64_t count) {
  Words w = {};
  std::memcpy(&w, p, static_cast<std::size_t>(count < kLanes ? count : kLanes) * 4);
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
static inline Sums load_sums(const std::int32_t* p) {
  Sums s;
  std::memcpy(&s, p, sizeof(s));
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
// The sums as floats; `shifted`: 16 times as much, for the plane of high halves.
template <bool shifted>
static inline Vec to_float(Sums s) {
  Vec v;
  for (int lane = 0; lane < kLanes; ++lane) {
    v[lane] = static_cast<float>(shifted ? s.lanes[lane] * 16 : s.lanes[lane]);
  }
  return v;
}

// Transposes four vectors within their quarters (four lanes, here the only ones): lane i of w[j]
// becomes what lane j of w[i] was.
static inline void transpose_quarters(Words* w) {
  Words out[4];
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) std::memcpy(out[j].bytes + i * 4, w[i].bytes + j * 4, 4);
  }
  for (int i = 0; i < 4; ++i) w[i] = out[i];
}
// The even quarters of a, then b, become a; the odd ones b. A single quarter each is that already.
static inline void pair_quarters(Words*, Words*) {}

// Reads `count` words (at most kLanes) at `offset` bytes of each of kLanes rows; out[w] holds the
// rows' w-th words side by side. Nothing beyond the words is read.
static inline void transpose_words(const std::uint8_t* const* rows, std::int64_t offset, int count,
                                   Words* out) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int w = 0; w < count; ++w) {
      std::memcpy(out[w].bytes + lane * 4, rows[lane] + offset + w * 4, 4);
    }
  }
}

// The low and the high float16 of each lane.
static inline Vec low_float16(Words w) {
  Vec v;
  for (int lane = 0; lane < kLanes; ++lane) {
    std::uint16_t half;
    std::memcpy(&half, w.bytes + lane * 4, 2);
    v[lane] = float16_to_float(half);
  }
  return v;
}
static inline Vec high_float16(Words w) {
  Vec v;
  for (int lane = 0; lane < kLanes; ++lane) {
    std::uint16_t half;
    std::memcpy(&half, w.bytes + lane * 4 + 2, 2);
    v[lane] = float16_to_float(half);
  }
  return v;
}
static inline Vec as_floats(Words w) {
  Vec v;
  std::memcpy(&v, &w, sizeof(v));
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

// Rounds 16 floats times `factor` (magnitudes up to 127) to bytes and adds them to pairs as
// start_of takes them. `sorts`: of each eight the even ones come first, as nibbles are unpacked.
static inline void round_to_bytes(const float* p, float factor, bool sorts, std::int8_t* out,
                                  std::int32_t* pairs) {
  for (int i = 0; i < 16; ++i) {
    const float x = p[sorts ? i / 8 * 8 + i % 4 * 2 + i % 8 / 4 : i] * factor;
    const float rounded = (x + 12582912.0F) - 12582912.0F;  // 1.5 * 2^23: to nearest, ties to even
    out[i] = rounded >= -127.0F && rounded <= 127.0F ? static_cast<std::int8_t>(rounded) : 0;
    pairs[i % 4 / 2] += out[i];
  }
}

}  // namespace kvconv
