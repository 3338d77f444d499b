// The weights as the tiles take them: as they are stored, or unpacked into a panel.
//
// A panel is two vectors' worth of rows, lanes being rows; its halves lie side by side. A piece is
// 32 columns (16 at block size 16): what is summed as integers before it is scaled. Included by
// matmul.cc only; internal linkage throughout.
#pragma once

#include <cstdint>

#include "int8.h"
#include "kvconv/quantized.h"
#include "tasks.h"
#include "vec.h"

namespace kvconv {
namespace {

constexpr std::int64_t kPanelRows = 2 * kLanes;
constexpr std::int64_t kVectorBytes = 4 * kLanes;
constexpr std::int64_t kGroupRows = QuantizedMatrix::kGroupRows;
static_assert(kGroupRows % kLanes == 0);

// How a run's columns are divided.
struct Pieces {
  std::int64_t columns;  // per piece
  std::int64_t count;
  std::int64_t per_block;
  std::int64_t planes;  // 2: bytes are the high halves of all words, then the low halves
  std::int64_t terms;   // bytes per activation

  explicit Pieces(const MatMulParams& p) {
    const QuantizedMatrix& w = p.weights;
    columns = min_of(w.block_size, 32);
    per_block = w.block_size / columns;
    count = w.num_blocks() * per_block;
    planes = w.bits == 8 && kSplitsBytes ? 2 : 1;
    terms = p.rounding == Rounding::kInt16 ? 2 : 1;
  }
};

static inline Vec load_values(const void* data, std::int64_t index, DataType type) {
  return type == DataType::kFloat16 ? load_float16(static_cast<const std::uint16_t*>(data) + index)
                                    : load(static_cast<const float*>(data) + index);
}

// A vector of rows as they are stored: half a panel.
struct StoredRows {
  const std::uint8_t* words;  // 4 * kGroupRows bytes from one to the next
  std::int64_t first_scale;   // in elements; kGroupRows from one block to the next

  // The rows from `first` on; beyond the last group it is repeated.
  StoredRows(const QuantizedMatrix& w, std::int64_t first) {
    const std::int64_t row = min_of(first, w.num_groups() * kGroupRows - kLanes);
    words = w.data + w.word_offset(row);
    first_scale = w.scale_offset(row);
  }
  Words word(std::int64_t index) const { return load_words(words + index * 4 * kGroupRows); }
  Vec scale(const QuantizedMatrix& w, std::int64_t block) const {
    return load_values(w.scales, first_scale + block * kGroupRows, w.scale_type);
  }
  Vec zero_point(const QuantizedMatrix& w, std::int64_t block) const {
    return w.zero_points == nullptr
               ? set(static_cast<float>(w.middle()))
               : load_values(w.zero_points, first_scale + block * kGroupRows, w.scale_type);
  }
  // (middle - zero point) * scale: what a sum of activations adds.
  Vec zero(const QuantizedMatrix& w, std::int64_t block) const {
    const Vec middle = set(static_cast<float>(w.middle()));
    return mul(sub(middle, zero_point(w, block)), scale(w, block));
  }
};

// Weights that are unpacked as they are used, for a few rows of activations.
template <int weight_bits>
class StoredWeights {
 public:
  static constexpr int kPlanes = weight_bits == 8 && kSplitsBytes ? 2 : 1;

  StoredWeights(const MatMulParams& p, const Pieces& pieces, std::int64_t first)
      : matrix_(p.weights),
        halves_{StoredRows(p.weights, first), StoredRows(p.weights, first + kLanes)} {
    while (pieces.per_block >> block_shift_ > 1) ++block_shift_;
  }
  // Vector k of a piece of `depth` vectors, four columns each.
  template <int depth, int plane>
  Words word(int half, std::int64_t piece, int k) const {
    if constexpr (weight_bits == 4) {
      const Words both = halves_[half].word(piece * (depth / 2) + k / 2);
      return k % 2 == 0 ? low_nibbles(both) : high_nibbles(both);
    }
    const Words bytes = halves_[half].word(piece * depth + k);
    if constexpr (kPlanes == 1) return bytes;
    return plane == 0 ? high_nibbles(bytes) : low_nibbles(bytes);
  }
  Vec scale(int half, std::int64_t piece) const {
    return halves_[half].scale(matrix_, piece >> block_shift_);
  }
  Vec zero(int half, std::int64_t piece) const {
    return halves_[half].zero(matrix_, piece >> block_shift_);
  }

 private:
  const QuantizedMatrix& matrix_;
  StoredRows halves_[2];
  int block_shift_ = 0;
};

// One worker's panel.
struct Panel {
  std::uint8_t* words;  // [pieces, planes, columns / 4, 2] vectors, activations as integers
  float* weights;       // [K, 2] vectors, float32 activations
  float* scales;        // [pieces, 2] vectors, activations as integers
  float* zeros;         // [pieces, 2] vectors, the same with zero points
};

// Unpacked weights.
template <int num_planes>
class PanelWeights {
 public:
  static constexpr int kPlanes = num_planes;

  explicit PanelWeights(const Panel& panel) : panel_(panel) {}
  template <int depth, int plane>
  Words word(int half, std::int64_t piece, int k) const {
    const std::int64_t vector = (piece * kPlanes + plane) * depth + k;
    return load_words(panel_.words + (2 * vector + half) * kVectorBytes);
  }
  Vec scale(int half, std::int64_t piece) const {
    return load(panel_.scales + piece * kPanelRows + half * kLanes);
  }
  Vec zero(int half, std::int64_t piece) const {
    return load(panel_.zeros + piece * kPanelRows + half * kLanes);
  }

 private:
  Panel panel_;
};

// Scales and zeros of half a panel.
void unpack_scales(const QuantizedMatrix& w, const Pieces& pieces, const StoredRows& rows,
                   float* scales, float* zeros) {
  for (std::int64_t block = 0; block < w.num_blocks(); ++block) {
    const Vec scale = rows.scale(w, block);
    const Vec zero = rows.zero(w, block);
    for (std::int64_t i = 0; i < pieces.per_block; ++i) {
      store(scales, scale);
      scales += kPanelRows;
      if (w.zero_points == nullptr) continue;
      store(zeros, zero);
      zeros += kPanelRows;
    }
  }
}

// The weights of half a panel as bytes; `is_signed` subtracts the middle.
template <bool is_signed>
void unpack_bytes(const QuantizedMatrix& w, const Pieces& pieces, const StoredRows& rows,
                  std::uint8_t* target) {
  const auto put = [&](std::int64_t vector, Words v) {
    if constexpr (is_signed) v = subtract_bytes(v, w.middle());
    store_words(target + vector * 2 * kVectorBytes, v);
  };
  const std::int64_t count = w.row_words();
  if (w.bits == 4) {
    for (std::int64_t word = 0; word < count; ++word) {
      const Words both = rows.word(word);
      put(2 * word, low_nibbles(both));
      put(2 * word + 1, high_nibbles(both));
    }
  } else if (kSplitsBytes) {
    const std::int64_t depth = pieces.columns / 4;
    for (std::int64_t first = 0; first < count; first += depth) {
      for (std::int64_t k = 0; k < depth; ++k) {
        const Words bytes = rows.word(first + k);
        put(2 * first + k, high_nibbles(bytes));
        put(2 * first + depth + k, low_nibbles(bytes));
      }
    }
  } else {
    for (std::int64_t word = 0; word < count; ++word) put(word, rows.word(word));
  }
}

// The weights of half a panel as floats.
void unpack_floats(const QuantizedMatrix& w, const StoredRows& rows, float* target) {
  const std::int64_t words_per_block = w.row_words() / w.num_blocks();
  for (std::int64_t block = 0; block < w.num_blocks(); ++block) {
    const Vec scale = rows.scale(w, block);
    const Vec zero_point = rows.zero_point(w, block);
    const auto put = [&](Vec q) {
      store(target, mul(sub(q, zero_point), scale));
      target += kPanelRows;
    };
    const auto put_four = [&](Words four) {
      put(byte_to_float<0>(four));
      put(byte_to_float<1>(four));
      put(byte_to_float<2>(four));
      put(byte_to_float<3>(four));
    };
    for (std::int64_t i = 0; i < words_per_block; ++i) {
      const Words v = rows.word(block * words_per_block + i);
      if (w.bits == 8) {
        put_four(v);
      } else {
        put_four(low_nibbles(v));
        put_four(high_nibbles(v));
      }
    }
  }
}

// Unpacks the panel whose first row is `first`; `is_signed`: with the middle subtracted.
void unpack_panel(const MatMulParams& p, const Pieces& pieces, std::int64_t first, bool is_signed,
                  const Panel& panel) {
  const QuantizedMatrix& w = p.weights;
  for (std::int64_t half = 0; half < 2; ++half) {
    const StoredRows rows(w, first + half * kLanes);
    if (p.rounding == Rounding::kNone) {
      unpack_floats(w, rows, panel.weights + half * kLanes);
      continue;
    }
    const std::int64_t lane = half * kLanes;
    unpack_scales(w, pieces, rows, panel.scales + lane, panel.zeros + lane);
    std::uint8_t* words = panel.words + half * kVectorBytes;
    if (is_signed) {
      unpack_bytes<true>(w, pieces, rows, words);
    } else {
      unpack_bytes<false>(w, pieces, rows, words);
    }
  }
}

}  // namespace
}  // namespace kvconv
