// The arithmetic of the matrix product: activations rounded to bytes, and tiles of the result.
//
// Every sum runs over the pieces in order, whatever the tile's size, so a row of the result has
// the same bits however many rows there are. Included by matmul.cc only; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "matmul_panel.h"

namespace kvconv {
namespace {

constexpr float kTiny = 1e-30F;  // a piece of smaller activations counts as zeros

// The activations of a run as the tiles take them. Rows are `stride` elements apart.
struct Activations {
  std::int8_t* bytes;    // [M, pieces * columns]; of each eight the even ones first, at 4 bits
  float* scales;         // [M, pieces]: largest magnitude / 127
  std::int32_t* starts;  // [M, pieces]: see start_of
  float* sums;           // [M, pieces]: of a piece, scaled; only with zero points
  const float* floats;   // [M, K]: instead of all these, float32 activations
};

void quantize_row(const MatMulParams& p, const Pieces& pieces, std::int64_t row,
                  const Activations& a) {
  const std::int64_t size = p.weights.columns;
  const bool sorts = p.weights.bits == 4;
  const int middle = sorts || kSplitsBytes ? 8 : 128;
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
    float largest = largest_magnitude(x);
    if (pieces.columns == 32) {
      const float other = largest_magnitude(x + 16);
      if (!(largest >= other)) largest = largest != largest ? largest : other;
    }
    const float factor = largest < kTiny ? 0.0F : 127.0F / largest;
    a.scales[index] = largest / 127.0F;
    // 3. Its bytes and their sums.
    std::int32_t pairs[2] = {0, 0};
    std::int8_t* target = a.bytes + index * pieces.columns;
    for (std::int64_t k = 0; k < pieces.columns; k += 16) {
      round_to_bytes(x + k, factor, sorts, target + k, pairs);
    }
    a.starts[index] = start_of(pairs, middle);
    if (a.sums != nullptr) {
      a.sums[index] = static_cast<float>(pairs[0] + pairs[1]) * a.scales[index];
    }
  }
}

template <int number>
struct Constant {
  static constexpr int value = number;
};

// A tile's sums, [rows, 2] vectors.
template <int rows>
struct Tile {
  Vec sums[rows][2];
};

// int8 activations: row r of the tile is row `first + r` of the activations.
template <int rows, int depth, bool two_planes, bool has_zeros>
Tile<rows> multiply_bytes(const Pieces& pieces, const Activations& a, std::int64_t first,
                          const Panel& panel) {
  Tile<rows> tile;
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) tile.sums[r][0] = tile.sums[r][1] = set(0.0F);
  const std::int64_t count = pieces.count;
  const std::int8_t* bytes = a.bytes + first * count * depth * 4;
  const float* scales = a.scales + first * count;
  const std::int32_t* starts = a.starts + first * count;
  const std::uint8_t* words = panel.words;
  for (std::int64_t i = 0; i < count; ++i) {
    const Vec weight_scales[2] = {load(panel.scales + i * kPanelRows),
                                  load(panel.scales + i * kPanelRows + kLanes)};
#pragma GCC unroll 2
    for (int plane = 0; plane < (two_planes ? 2 : 1); ++plane) {
      Sums sums[rows][2];
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        sums[r][0] = sums[r][1] = set_sums(plane == 0 ? starts[r * count + i] : 0);
      }
#pragma GCC unroll 8
      for (int k = 0; k < depth; ++k) {
        const Words left = load_words(words);
        const Words right = load_words(words + kVectorBytes);
        words += 2 * kVectorBytes;
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
          const std::int8_t* four = bytes + (r * count + i) * depth * 4 + k * 4;
          sums[r][0] = multiply_words(sums[r][0], left, four);
          sums[r][1] = multiply_words(sums[r][1], right, four);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const Vec scale = set(scales[r * count + i]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const Vec value = two_planes && plane == 0 ? to_float<two_planes>(sums[r][h])
                                                     : to_float<false>(sums[r][h]);
          tile.sums[r][h] = fma(mul(value, weight_scales[h]), scale, tile.sums[r][h]);
        }
      }
    }
    if constexpr (has_zeros) {
      const float* zeros = panel.zeros + i * kPanelRows;
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const Vec sum = set(a.sums[(first + r) * count + i]);
        tile.sums[r][0] = fma(load(zeros), sum, tile.sums[r][0]);
        tile.sums[r][1] = fma(load(zeros + kLanes), sum, tile.sums[r][1]);
      }
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

template <int rows>
Tile<rows> multiply(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                    std::int64_t first, const Panel& panel) {
  if (!p.quantizes_activations) {
    return multiply_floats<rows>(pieces, p.weights.columns, a, first, panel);
  }
  const auto with_depth = [&](auto depth) {
    constexpr int kDepth = decltype(depth)::value;
    const bool has_zeros = p.weights.zero_points != nullptr;
    if (kSplitsBytes && p.weights.bits == 8) {
      return has_zeros ? multiply_bytes<rows, kDepth, kSplitsBytes, true>(pieces, a, first, panel)
                       : multiply_bytes<rows, kDepth, kSplitsBytes, false>(pieces, a, first, panel);
    }
    return has_zeros ? multiply_bytes<rows, kDepth, false, true>(pieces, a, first, panel)
                     : multiply_bytes<rows, kDepth, false, false>(pieces, a, first, panel);
  };
  return pieces.columns == 32 ? with_depth(Constant<8>()) : with_depth(Constant<4>());
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
