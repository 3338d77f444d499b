// The arithmetic of the matrix product: activations rounded to bytes, and tiles of the result.
//
// Every sum runs over the pieces in order, whatever the tile's size, so a row of the result has
// the same bits however many rows there are. Included by matmul.cc only; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "matmul_weights.h"
#include "vec_math.h"

namespace kvconv {
namespace {

constexpr float kTiny = 1e-30F;  // a piece of smaller activations counts as zeros

// The activations of a run as the tiles take them. A term is a byte of each activation: the only
// one, or high and low, which counts for 1/256.
struct Activations {
  std::int8_t* bytes;    // [M, pieces, terms, columns]
  std::int32_t* starts;  // [M, pieces, terms]: see start_of
  float* scales;         // [M, pieces]: what 1 in the last term stands for
  float* sums;           // [M, pieces]: of a piece, scaled; only with zero points
  const float* floats;   // [M, K]: instead of all these, float32 activations
};

// The largest magnitude of a piece; a NaN is the largest.
static inline float largest_of_piece(const float* x, std::int64_t columns) {
  const float largest = largest_magnitude(x);
  if (columns == 16) return largest;
  const float other = largest_magnitude(x + 16);
  if (largest >= other) return largest;
  return largest != largest ? largest : other;
}

void quantize_row(const MatMulParams& p, const Pieces& pieces, std::int64_t row,
                  const Activations& a) {
  const std::int64_t size = p.weights.columns;
  const int middle = p.weights.bits == 4 || kSplitsBytes ? 8 : 128;
  const float steps = pieces.terms == 2 ? 127.0F * 256.0F : 127.0F;
  const std::int64_t element_bytes = bytes_of(p.activation_type);
  for (std::int64_t i = 0; i < pieces.count; ++i) {
    // 1. The piece, padded with zeros.
    const std::int64_t column = i * pieces.columns;
    const std::int64_t index = row * pieces.count + i;
    const std::int64_t count = max_of(0, min_of(pieces.columns, size - column));
    const char* source = static_cast<const char*>(p.a) + (row * size + column) * element_bytes;
    float padded[32];
    const float* x = padded;
    if (count == pieces.columns && p.activation_type == DataType::kFloat32) {
      x = reinterpret_cast<const float*>(source);
    } else {
      widen(source, p.activation_type, padded, count);
      for (std::int64_t k = count; k < pieces.columns; ++k) padded[k] = 0.0F;
    }
    // 2. Its scale; a NaN stays one and makes the whole row NaN.
    const float largest = largest_of_piece(x, pieces.columns);
    const float factor = largest < kTiny ? 0.0F : steps / largest;
    a.scales[index] = largest / steps;
    // 3. Its bytes and their sums.
    std::int32_t pairs[2][2] = {};
    std::int8_t* target = a.bytes + index * pieces.terms * pieces.columns;
    for (std::int64_t k = 0; k < pieces.columns; k += 16) {
      if (pieces.terms == 2) {
        round_to_two_bytes(x + k, factor, target + k, target + pieces.columns + k, pairs[0],
                           pairs[1]);
      } else {
        round_to_bytes(x + k, factor, target + k, pairs[0]);
      }
    }
    std::int32_t sum = 0;
    for (std::int64_t term = 0; term < pieces.terms; ++term) {
      a.starts[index * pieces.terms + term] = start_of(pairs[term], middle);
      sum = sum * 256 + pairs[term][0] + pairs[term][1];
    }
    if (a.sums != nullptr) a.sums[index] = static_cast<float>(sum) * a.scales[index];
  }
}

// A tile's sums, [rows, 2] vectors.
template <int rows>
struct Tile {
  Vec sums[rows][2];
};

// Adds piece `i` by one plane of the weights and one term of the activations to integers.
template <int rows, int depth, int terms, int plane, int term, typename Weights>
void add_piece(const Pieces& pieces, const Activations& a, std::int64_t first,
               const Weights& weights, std::int64_t i, Integers (*integers)[2]) {
  constexpr int kFactor = (term + 1 < terms ? 256 : 1) * (plane + 1 < Weights::kPlanes ? 16 : 1);
  const std::int64_t count = pieces.count;
  Sums sums[rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const std::int32_t start = a.starts[((first + r) * count + i) * terms + term];
    sums[r][0] = sums[r][1] = set_sums(plane == 0 ? start : 0);
  }
#pragma GCC unroll 8
  for (int k = 0; k < depth; ++k) {
    const Words left = weights.template word<depth, plane>(0, i, k);
    const Words right = weights.template word<depth, plane>(1, i, k);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const std::int8_t* four =
          a.bytes + (((first + r) * count + i) * terms + term) * depth * 4 + k * 4;
      sums[r][0] = multiply_words(sums[r][0], left, four);
      sums[r][1] = multiply_words(sums[r][1], right, four);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Integers whole = to_integers<kFactor>(sums[r][half]);
      integers[r][half] = plane + term == 0 ? whole : add_integers(integers[r][half], whole);
    }
  }
}

// Activations as integers: row r of the tile is row `first + r` of the activations.
template <int rows, int depth, int terms, typename Weights>
Tile<rows> multiply_bytes(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                          std::int64_t first, const Weights& weights) {
  const bool has_zeros = p.weights.zero_points != nullptr;
  Tile<rows> tile;
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) tile.sums[r][0] = tile.sums[r][1] = set(0.0F);
  const float* scales = a.scales + first * pieces.count;
  for (std::int64_t i = 0; i < pieces.count; ++i) {
    Integers integers[rows][2];
    add_piece<rows, depth, terms, 0, 0>(pieces, a, first, weights, i, integers);
    if constexpr (Weights::kPlanes == 2) {
      add_piece<rows, depth, terms, 1, 0>(pieces, a, first, weights, i, integers);
    }
    if constexpr (terms == 2) {
      add_piece<rows, depth, terms, 0, 1>(pieces, a, first, weights, i, integers);
    }
    if constexpr (terms == 2 && Weights::kPlanes == 2) {
      add_piece<rows, depth, terms, 1, 1>(pieces, a, first, weights, i, integers);
    }
    const Vec weight_scales[2] = {weights.scale(0, i), weights.scale(1, i)};
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Vec scale = set(scales[r * pieces.count + i]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const Vec value = mul(to_float(integers[r][half]), weight_scales[half]);
        tile.sums[r][half] = fma(value, scale, tile.sums[r][half]);
      }
    }
    if (!has_zeros) continue;
    const Vec zeros[2] = {weights.zero(0, i), weights.zero(1, i)};
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Vec sum = set(a.sums[(first + r) * pieces.count + i]);
      tile.sums[r][0] = fma(zeros[0], sum, tile.sums[r][0]);
      tile.sums[r][1] = fma(zeros[1], sum, tile.sums[r][1]);
    }
  }
  return tile;
}

// float32 activations. Each piece is summed on its own, so that several are computed at a time.
template <int rows>
Tile<rows> multiply_floats(const Pieces& pieces, std::int64_t columns, const Activations& a,
                           std::int64_t first, const Panel& panel) {
  Tile<rows> tile;
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) tile.sums[r][0] = tile.sums[r][1] = set(0.0F);
  const float* floats = a.floats + first * columns;
  for (std::int64_t begin = 0; begin < columns; begin += pieces.columns) {
    const std::int64_t end = min_of(begin + pieces.columns, columns);
    Vec sums[rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) sums[r][0] = sums[r][1] = set(0.0F);
    for (std::int64_t k = begin; k < end; ++k) {
      const Vec left = load(panel.weights + k * kPanelRows);
      const Vec right = load(panel.weights + k * kPanelRows + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const Vec element = set(floats[r * columns + k]);
        sums[r][0] = fma(element, left, sums[r][0]);
        sums[r][1] = fma(element, right, sums[r][1]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      tile.sums[r][0] = add(tile.sums[r][0], sums[r][0]);
      tile.sums[r][1] = add(tile.sums[r][1], sums[r][1]);
    }
  }
  return tile;
}

// Activations as integers, whatever their pieces and terms.
template <int rows, typename Weights>
Tile<rows> multiply_integers(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                             std::int64_t first, const Weights& weights) {
  const auto with = [&](auto depth, auto terms) {
    constexpr int kDepth = decltype(depth)::value;
    constexpr int kTerms = decltype(terms)::value;
    return multiply_bytes<rows, kDepth, kTerms>(p, pieces, a, first, weights);
  };
  if (pieces.columns == 32) {
    return pieces.terms == 2 ? with(Constant<8>(), Constant<2>())
                             : with(Constant<8>(), Constant<1>());
  }
  return pieces.terms == 2 ? with(Constant<4>(), Constant<2>())
                           : with(Constant<4>(), Constant<1>());
}

// Adds the bias and writes one row of a tile, from column `column` on.
void write_row(const MatMulParams& p, std::int64_t row, std::int64_t column, const Vec* sums) {
  const std::int64_t count = min_of(kPanelRows, p.weights.rows - column);
  const std::int64_t element_bytes = bytes_of(p.activation_type);
  float values[kPanelRows];
  if (p.bias != nullptr) {
    for (std::int64_t i = count; i < kPanelRows; ++i) values[i] = 0.0F;
    widen(static_cast<const char*>(p.bias) + column * element_bytes, p.activation_type, values,
          count);
    store(values, add(sums[0], load(values)));
    store(values + kLanes, add(sums[1], load(values + kLanes)));
  } else {
    store(values, sums[0]);
    store(values + kLanes, sums[1]);
  }
  char* target = static_cast<char*>(p.output) + (row * p.weights.rows + column) * element_bytes;
  narrow(values, target, p.activation_type, count);
}

}  // namespace
}  // namespace kvconv
