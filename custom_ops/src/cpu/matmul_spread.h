// A few rows of int8 activations, spread over vectors so that they meet the weights.
//
// A span is 32 columns: a piece, or two at block size 16. A vector has kSpans spans side by side, a
// quarter (128 bits) each: the same word of activations four times, once per row of the weights.
// Included by matmul.cc only, after matmul_tile.h; internal linkage throughout.
#pragma once

#include <cstdint>
#include <cstring>

#include "matmul_tile.h"

namespace kvconv {
namespace {

constexpr std::int64_t kSpans = kLanes / 4;
constexpr std::int64_t kSpanWords = 8;  // words of a span's activations

// What the runs of four rows share.
struct FewRows {
  std::int64_t num_vectors;  // kSpans spans each, of a row
  std::int64_t halves;       // pieces per span
  std::int8_t* words;        // [vectors, M, kSpanWords] vectors: a word of each span, four times
  std::int32_t* starts;      // [vectors, M, halves] vectors
};

FewRows few_rows_of(const Pieces& pieces) {
  const std::int64_t halves = 32 / pieces.columns;
  return {(pieces.count + halves * kSpans - 1) / (halves * kSpans), halves, nullptr, nullptr};
}

void repeat_four(const void* value, void* target) {
  for (int i = 0; i < 4; ++i) std::memcpy(static_cast<char*>(target) + 4 * i, value, 4);
}

// Spreads a row of activations; beyond the last piece they are zeros.
void spread_row(const MatMulParams& p, const Pieces& pieces, const Activations& a, std::int64_t row,
                const FewRows& few) {
  const std::int64_t num_words = pieces.count * pieces.columns / 4;
  const std::int8_t* bytes = a.bytes + row * num_words * 4;
  const std::int32_t* starts = a.starts + row * pieces.count;
  const std::int32_t none = 0;
  for (std::int64_t v = 0; v < few.num_vectors; ++v) {
    const std::int64_t block = v * p.num_rows + row;
    for (std::int64_t s = 0; s < kSpans; ++s) {
      const std::int64_t span = v * kSpans + s;
      std::int8_t* words = few.words + block * kSpanWords * kVectorBytes + s * 16;
      for (std::int64_t j = 0; j < kSpanWords; ++j) {
        const std::int64_t word = span * kSpanWords + j;
        const void* value = word < num_words ? static_cast<const void*>(bytes + word * 4) : &none;
        repeat_four(value, words + j * kVectorBytes);
      }
      for (std::int64_t h = 0; h < few.halves; ++h) {
        const std::int64_t piece = span * few.halves + h;
        repeat_four(piece < pieces.count ? starts + piece : &none,
                    few.starts + (block * few.halves + h) * kLanes + s * 4);
      }
    }
  }
}

}  // namespace
}  // namespace kvconv
