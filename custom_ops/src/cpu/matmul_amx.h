// Tiles of the matrix product on AMX: 16 rows of activations by a vector of rows of the weights.
//
// The processor's own tiles sum a piece's products exactly, as multiply_bytes does, and the scaling
// is the same, so both give the same bits. Weights are signed here: unpack_bytes subtracts the
// middle. Included by matmul.cc only; internal linkage throughout.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "matmul_tile.h"

namespace kvconv {
namespace {

constexpr int kAmxRows = 16;

// Tiles 0 and 1: a piece of activations, [16, 32] bytes, by term. Tile 2: weights, [8, 16] words.
// Tiles 4 to 7: sums, [16, 16], by term, even and odd pieces by turns.
void configure_tiles() {
  struct alignas(64) {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {32, 32, 64, 0, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 8, 0, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
}

// The tile whose first row is `first` and whose weights are half `half` of the panel. `first` is a
// multiple of 16; rows beyond the last hold anything.
template <int terms>
void multiply_amx(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                  std::int64_t first, const Panel& panel, std::int64_t half, Vec* sums) {
  alignas(64) std::int32_t products[2][terms][kAmxRows][kLanes];
  const bool has_zeros = p.weights.zero_points != nullptr;
  const std::int64_t count = pieces.count;
  const std::int64_t stride = count * terms * 32;
  const std::int8_t* bytes = a.bytes + first * stride;
  const std::uint8_t* words = panel.words + half * kVectorBytes;
  const auto start = [&](std::int64_t i) {
    const std::int8_t* piece = bytes + i * terms * 32;
    _tile_loadd(2, words + i * 8 * 2 * kVectorBytes, 2 * kVectorBytes);
    _tile_loadd(0, piece, stride);
    if constexpr (terms == 2) _tile_loadd(1, piece + 32, stride);
    if (i % 2 == 0) {
      _tile_zero(4);
      _tile_dpbssd(4, 0, 2);
      if constexpr (terms == 2) {
        _tile_zero(5);
        _tile_dpbssd(5, 1, 2);
        _tile_stored(5, products[0][terms - 1], 4 * kLanes);
      }
      _tile_stored(4, products[0][0], 4 * kLanes);
    } else {
      _tile_zero(6);
      _tile_dpbssd(6, 0, 2);
      if constexpr (terms == 2) {
        _tile_zero(7);
        _tile_dpbssd(7, 1, 2);
        _tile_stored(7, products[1][terms - 1], 4 * kLanes);
      }
      _tile_stored(6, products[1][0], 4 * kLanes);
    }
  };
  Vec totals[kAmxRows];
#pragma GCC unroll 16
  for (int r = 0; r < kAmxRows; ++r) totals[r] = set(0.0F);
  const float* scales = a.scales + first * count;
  start(0);
  for (std::int64_t i = 0; i < count; ++i) {
    if (i + 1 < count) start(i + 1);
    const Vec weight_scales = load(panel.scales + i * kPanelRows + half * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; ++r) {
      __m512i value = _mm512_load_si512(products[i % 2][0][r]);
      if constexpr (terms == 2) {
        value =
            _mm512_add_epi32(_mm512_slli_epi32(value, 8), _mm512_load_si512(products[i % 2][1][r]));
      }
      totals[r] = fma(mul(to_float(value), weight_scales), set(scales[r * count + i]), totals[r]);
    }
    if (!has_zeros) continue;
    const Vec zeros = load(panel.zeros + i * kPanelRows + half * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; ++r) {
      totals[r] = fma(zeros, set(a.sums[(first + r) * count + i]), totals[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kAmxRows; ++r) sums[r] = totals[r];
}

// Multiplies rows [first, end) with the panel, whose first row is `column`, and writes the result.
void multiply_and_write_amx(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                            std::int64_t first, std::int64_t end, std::int64_t column,
                            const Panel& panel) {
  configure_tiles();
  for (std::int64_t row = first; row < end; row += kAmxRows) {
    Vec halves[2][kAmxRows];
    for (std::int64_t half = 0; half < 2; ++half) {
      if (pieces.terms == 2) {
        multiply_amx<2>(p, pieces, a, row, panel, half, halves[half]);
      } else {
        multiply_amx<1>(p, pieces, a, row, panel, half, halves[half]);
      }
    }
    for (std::int64_t r = 0; r < min_of(kAmxRows, end - row); ++r) {
      const Vec sums[2] = {halves[0][r], halves[1][r]};
      write_row(p, row + r, column, sums);
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace kvconv
