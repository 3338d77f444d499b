// A few rows of int8 activations by four rows of the weights at a time, read as they are stored.
//
// The lanes of a quarter (128 bits) are the four rows of the weights: transposing them within
// quarters is all that it takes to get there. Sums, scaling and their order are those of the tiles,
// and so are the bits of the result. Included by matmul.cc only; internal linkage throughout.
#pragma once

#include <cstdint>
#include <cstring>

#include "matmul_spread.h"
#include "vec_four.h"

namespace kvconv {
namespace {

constexpr std::int64_t kMaxFewRows = 8;
constexpr std::int64_t kPrefetchedBytes = 4096;  // of weights, fetched ahead

// One worker's memory: scales and zeros of four rows, [vectors, halves, kSpans, 4].
struct FourScales {
  float* scales;
  float* zeros;  // (middle - zero point) * scale
};

// Where a piece's scales are in FourScales.
std::int64_t place_of(const FewRows& few, std::int64_t piece) {
  if (few.halves == 1) return piece * 4;
  const std::int64_t span = piece / 2;
  return ((span / kSpans * 2 + piece % 2) * kSpans + span % kSpans) * 4;
}

// Four rows of the weights from row `first` on; beyond the last row it is repeated.
struct FourRows {
  std::int64_t row[4];

  FourRows(const QuantizedMatrix& w, std::int64_t first) {
    for (std::int64_t i = 0; i < 4; ++i) row[i] = min_of(first + i, w.rows - 1);
  }
  template <typename T>
  void locate(const void* data, std::int64_t row_elements, const T** rows) const {
    for (int i = 0; i < 4; ++i) rows[i] = static_cast<const T*>(data) + row[i] * row_elements;
  }
};

// Widens what the blocks of four rows have (scales or zero points) to target[place_of(piece)].
void unpack_fours(const QuantizedMatrix& w, const Pieces& pieces, const FewRows& few,
                  const FourRows& four, const void* source, std::int64_t rows_ahead,
                  float* target) {
  const std::int64_t count = w.num_blocks();
  const float* floats[4];
  const std::uint16_t* halves[4];
  const bool is_float32 = w.scale_type == DataType::kFloat32;
  four.locate(source, count, floats);
  four.locate(source, count, halves);
  const char* ahead = static_cast<const char*>(source) +
                      (four.row[0] + rows_ahead) * count * bytes_of(w.scale_type);
  for (std::int64_t i = 0; i < 4 * count * bytes_of(w.scale_type); i += 64) {
    __builtin_prefetch(ahead + i, 0, 3);
  }
  const bool is_in_order = pieces.per_block == 1 && few.halves == 1;
  for (std::int64_t b = 0; b < count; b += 4) {
    const std::int64_t some = min_of(4, count - b);
    float values[16];
    float* four_blocks = is_in_order ? target + b * 4 : values;
    if (some < 4) {
      for (std::int64_t i = 0; i < 4 * some; ++i) {
        four_blocks[i] = load_element(source, four.row[i % 4] * count + b + i / 4, w.scale_type);
      }
    } else if (is_float32) {
      transpose_fours(floats, b, four_blocks);
    } else {
      transpose_fours(halves, b, four_blocks);
    }
    if (is_in_order) continue;
    for (std::int64_t i = 0; i < some; ++i) {
      for (std::int64_t j = 0; j < pieces.per_block; ++j) {
        store_four(target + place_of(few, (b + i) * pieces.per_block + j),
                   load_four(values + 4 * i));
      }
    }
  }
}

void unpack_four_scales(const QuantizedMatrix& w, const Pieces& pieces, const FewRows& few,
                        const FourRows& four, std::int64_t rows_ahead, const FourScales& to) {
  unpack_fours(w, pieces, few, four, w.scales, rows_ahead, to.scales);
  if (w.zero_points == nullptr) return;
  unpack_fours(w, pieces, few, four, w.zero_points, rows_ahead, to.zeros);
  const Four middle = set_four(static_cast<float>(w.middle()));
  for (std::int64_t i = 0; i < pieces.count; ++i) {
    const std::int64_t at = place_of(few, i);
    store_four(to.zeros + at,
               mul_four(sub_four(middle, load_four(to.zeros + at)), load_four(to.scales + at)));
  }
}

// The weights of four rows in vector `v`: word j of the activations meets words[j].
template <int bits, bool is_whole>
void load_span_words(const std::uint8_t* const* rows, std::int64_t v, std::int64_t row_bytes,
                     Words* words) {
  const auto load_at = [&](const std::uint8_t* row, std::int64_t offset) {
    if constexpr (is_whole) return load_words(row + offset);
    const std::int64_t count = max_of(0, (row_bytes - offset) / 4);
    return load_some_words(row + min_of(offset, row_bytes), count);
  };
  const std::int64_t offset = v * kVectorBytes * bits / 4;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    words[i] = load_at(rows[i], offset);
    if constexpr (bits == 8) {
      words[4 + i] = load_at(rows[i], offset + kVectorBytes);
      pair_quarters(words + i, words + 4 + i);
    }
  }
  transpose_quarters(words);
  if constexpr (bits == 8) {
    transpose_quarters(words + 4);
  } else {
#pragma GCC unroll 4
    for (int j = 3; j >= 0; --j) {
      words[2 * j + 1] = high_nibbles(words[j]);
      words[2 * j] = low_nibbles(words[j]);
    }
  }
}

// Adds the products of vector `v` to the totals, [M, 4].
template <int bits, int halves, bool is_whole>
void add_products(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                  const FewRows& few, const std::uint8_t* const* rows, std::int64_t v,
                  const FourScales& weights, std::int64_t num_rows, float (*totals)[4]) {
  constexpr int kPlanes = bits == 8 && kSplitsBytes ? 2 : 1;
  constexpr int kPieceWords = kSpanWords / halves;
  const bool has_zeros = p.weights.zero_points != nullptr;
  Words words[kSpanWords];
  load_span_words<bits, is_whole>(rows, v, p.weights.row_bytes(), words);
  const std::int64_t first_piece = v * kSpans * halves;
  const std::int64_t num_spans =
      is_whole ? kSpans : (pieces.count - first_piece + halves - 1) / halves;
  const float* scales = weights.scales + v * halves * kLanes;
  const float* zeros = weights.zeros + v * halves * kLanes;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    // 1. The sums of each piece, scaled by the weights' scales.
    float products[halves][kPlanes][kLanes];
    const std::int64_t block = v * num_rows + row;
    const auto* spread =
        reinterpret_cast<const std::uint8_t*>(few.words) + block * kSpanWords * kVectorBytes;
#pragma GCC unroll 2
    for (int h = 0; h < halves; ++h) {
      const Vec scale = load(scales + h * kLanes);
      Sums sums = load_sums(few.starts + (block * halves + h) * kLanes);
      Sums low_sums = set_sums(0);  // of the plane of low halves
#pragma GCC unroll 8
      for (int j = h * kPieceWords; j < (h + 1) * kPieceWords; ++j) {
        const Words four = load_words(spread + j * kVectorBytes);
        if constexpr (kPlanes == 2) {
          sums = multiply_vectors(sums, high_nibbles(words[j]), four);
          low_sums = multiply_vectors(low_sums, low_nibbles(words[j]), four);
        } else {
          sums = multiply_vectors(sums, words[j], four);
        }
      }
      store(products[h][0], mul(to_float<kPlanes == 2>(sums), scale));
      if constexpr (kPlanes == 2) store(products[h][1], mul(to_float<false>(low_sums), scale));
    }
    // 2. Piece after piece.
    const std::int64_t offset = row * pieces.count + first_piece;
    Four total = load_four(totals[row]);
#pragma GCC unroll 4
    for (std::int64_t s = 0; s < num_spans; ++s) {
#pragma GCC unroll 2
      for (int h = 0; h < halves; ++h) {
        const std::int64_t i = offset + s * halves + h;
        if (!is_whole && first_piece + s * halves + h >= pieces.count) break;
        const Four scale = set_four(a.scales[i]);
#pragma GCC unroll 2
        for (int plane = 0; plane < kPlanes; ++plane) {
          total = fma_four(load_four(products[h][plane] + s * 4), scale, total);
        }
        if (has_zeros) {
          total = fma_four(load_four(zeros + (h * kSpans + s) * 4), set_four(a.sums[i]), total);
        }
      }
    }
    store_four(totals[row], total);
  }
}

// Adds the bias and writes the totals, [M, 4], to the columns from `column` on.
void write_fours(const MatMulParams& p, std::int64_t column, float (*totals)[4]) {
  const std::int64_t count = min_of(4, p.weights.rows - column);
  const std::int64_t element_bytes = bytes_of(p.activation_type);
  for (std::int64_t row = 0; row < p.num_rows; ++row) {
    if (p.bias != nullptr) {
      for (std::int64_t i = 0; i < count; ++i) {
        totals[row][i] += load_element(p.bias, column + i, p.activation_type);
      }
    }
    char* target = static_cast<char*>(p.output) + (row * p.weights.rows + column) * element_bytes;
    if (count == 4 && p.activation_type == DataType::kFloat32) {
      std::memcpy(target, totals[row], sizeof(totals[row]));
    } else {
      narrow(totals[row], target, p.activation_type, count);
    }
  }
}

// All activations by the rows [begin, end) of the weights; `begin` is a multiple of four. `rows`:
// how many activations there are where it is known, else 0.
template <int bits, int halves, int rows>
void multiply_few_of(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                     const FewRows& few, std::int64_t begin, std::int64_t end,
                     const FourScales& weights) {
  const QuantizedMatrix& w = p.weights;
  const std::int64_t num_rows = rows == 0 ? p.num_rows : rows;
  const std::int64_t row_bytes = w.row_bytes();
  const std::int64_t rows_ahead = round_up(kPrefetchedBytes / row_bytes + 1, 4);
  const std::int64_t whole = row_bytes / (kVectorBytes * bits / 4);
  for (std::int64_t first = begin; first < end; first += 4) {
    const FourRows four(w, first);
    unpack_four_scales(w, pieces, few, four, rows_ahead, weights);
    const std::uint8_t* pointers[4];
    four.locate(w.data, row_bytes, pointers);
    float totals[rows == 0 ? kMaxFewRows : rows][4] = {};
    for (std::int64_t v = 0; v < whole; ++v) {
      for (int i = 0; i < 4; ++i) {
        const std::uint8_t* ahead =
            pointers[i] + rows_ahead * row_bytes + v * kVectorBytes * bits / 4;
        __builtin_prefetch(ahead, 0, 3);
        if constexpr (bits == 8) __builtin_prefetch(ahead + kVectorBytes, 0, 3);
      }
      add_products<bits, halves, true>(p, pieces, a, few, pointers, v, weights, num_rows, totals);
    }
    for (std::int64_t v = whole; v < few.num_vectors; ++v) {
      add_products<bits, halves, false>(p, pieces, a, few, pointers, v, weights, num_rows, totals);
    }
    write_fours(p, first, totals);
  }
}

template <int bits, int halves>
void multiply_few_with(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                       const FewRows& few, std::int64_t begin, std::int64_t end,
                       const FourScales& weights) {
  p.num_rows == 1 ? multiply_few_of<bits, halves, 1>(p, pieces, a, few, begin, end, weights)
                  : multiply_few_of<bits, halves, 0>(p, pieces, a, few, begin, end, weights);
}

void multiply_few(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                  const FewRows& few, std::int64_t begin, std::int64_t end,
                  const FourScales& weights) {
  if (p.weights.bits == 4) {
    few.halves == 1 ? multiply_few_with<4, 1>(p, pieces, a, few, begin, end, weights)
                    : multiply_few_with<4, 2>(p, pieces, a, few, begin, end, weights);
  } else {
    few.halves == 1 ? multiply_few_with<8, 1>(p, pieces, a, few, begin, end, weights)
                    : multiply_few_with<8, 2>(p, pieces, a, few, begin, end, weights);
  }
}

}  // namespace
}  // namespace kvconv
