// Panels: two vectors' worth of rows of the weights, unpacked so that a lane is a row.
//
// A panel holds vectors of words in pairs (both halves of the panel side by side), ordered by
// column: vector v has four columns of each row, in the order that the activations are sorted to.
// A piece is 32 columns (16 at block size 16): what is summed as integers before it is scaled.
// Included by matmul.cc only, after an int8_*.h; internal linkage throughout.
#pragma once

#include <cstdint>

#include "kvconv/quantized.h"
#include "tasks.h"

namespace kvconv {
namespace {

constexpr std::int64_t kPanelRows = 2 * kLanes;
constexpr std::int64_t kVectorBytes = 4 * kLanes;

// How a run's columns are divided.
struct Pieces {
  std::int64_t columns;  // per piece
  std::int64_t count;
  std::int64_t per_block;
  std::int64_t planes;  // 2: bytes are the high halves of all words, then the low halves
};

Pieces pieces_of(const QuantizedMatrix& w) {
  const std::int64_t columns = min_of(w.block_size, 32);
  return {columns, w.num_blocks() * w.block_size / columns, w.block_size / columns,
          w.bits == 8 && kSplitsBytes ? 2 : 1};
}

// One worker's panel.
struct Panel {
  std::uint8_t* words;  // [pieces, planes, columns / 4, 2] vectors, int8 activations
  float* weights;       // [K, 2] vectors, float32 activations
  float* scales;        // [pieces, 2] vectors
  float* zeros;         // [pieces, 2] vectors, with zero points: as they are (float32 activations),
                        // or (middle - zero point) * scale (int8)
};

// The rows of half a panel; beyond the last row of the weights it is repeated.
struct HalfPanel {
  std::int64_t row[kLanes];

  HalfPanel(const QuantizedMatrix& w, std::int64_t first) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) row[lane] = min_of(first + lane, w.rows - 1);
  }
  void locate(const void* data, std::int64_t row_bytes, const std::uint8_t** rows) const {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      rows[lane] = static_cast<const std::uint8_t*>(data) + row[lane] * row_bytes;
    }
  }
};

// Calls body(word, vector) for every word of the rows.
template <typename Body>
void for_each_word(const std::uint8_t* const* rows, std::int64_t count, const Body& body) {
  Words words[kLanes];
  for (std::int64_t first = 0; first < count; first += kLanes) {
    const int some = static_cast<int>(min_of(kLanes, count - first));
    transpose_words(rows, first * 4, some, words);
    for (int i = 0; i < some; ++i) body(first + i, words[i]);
  }
}

// Writes a value per block (scales or zero points) of half a panel to target[piece * kPanelRows].
void unpack_blocks(const QuantizedMatrix& w, const Pieces& pieces, const HalfPanel& half,
                   const void* source, float* target) {
  const std::int64_t num_blocks = w.num_blocks();
  const auto put = [&](std::int64_t block, Vec values) {
    for (std::int64_t i = 0; i < pieces.per_block; ++i) {
      store(target + (block * pieces.per_block + i) * kPanelRows, values);
    }
  };
  const std::uint8_t* rows[kLanes];
  half.locate(source, num_blocks * bytes_of(w.scale_type), rows);
  if (w.scale_type == DataType::kFloat32) {
    for_each_word(rows, num_blocks, [&](std::int64_t b, Words v) { put(b, as_floats(v)); });
    return;
  }
  for_each_word(rows, num_blocks / 2, [&](std::int64_t word, Words v) {
    put(2 * word, low_float16(v));
    put(2 * word + 1, high_float16(v));
  });
  if (num_blocks % 2 != 0) {
    float last[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      last[lane] = load_element(rows[lane], num_blocks - 1, DataType::kFloat16);
    }
    put(num_blocks - 1, load(last));
  }
}

// Scales and zero points of half a panel.
void unpack_scales(const QuantizedMatrix& w, const Pieces& pieces, const HalfPanel& half,
                   bool quantizes_activations, float* scales, float* zeros) {
  unpack_blocks(w, pieces, half, w.scales, scales);
  if (w.zero_points == nullptr) return;
  unpack_blocks(w, pieces, half, w.zero_points, zeros);
  if (!quantizes_activations) return;
  const Vec middle = set(static_cast<float>(w.middle()));
  for (std::int64_t i = 0; i < pieces.count * kPanelRows; i += kPanelRows) {
    store(zeros + i, mul(sub(middle, load(zeros + i)), load(scales + i)));
  }
}

// The weights of half a panel as bytes; `is_signed` subtracts the middle.
template <bool is_signed>
void unpack_bytes(const QuantizedMatrix& w, const HalfPanel& half, std::uint8_t* target) {
  const std::uint8_t* rows[kLanes];
  half.locate(w.data, w.row_bytes(), rows);
  const auto put = [&](std::int64_t vector, Words v) {
    if constexpr (is_signed) v = subtract_bytes(v, w.middle());
    store_words(target + vector * 2 * kVectorBytes, v);
  };
  if (w.bits == 4) {
    for_each_word(rows, w.row_bytes() / 4, [&](std::int64_t word, Words v) {
      put(2 * word, low_nibbles(v));
      put(2 * word + 1, high_nibbles(v));
    });
  } else if (kSplitsBytes) {
    const std::int64_t depth = min_of(w.block_size, 32) / 4;
    for_each_word(rows, w.row_bytes() / 4, [&](std::int64_t word, Words v) {
      const std::int64_t vector = word / depth * 2 * depth + word % depth;
      put(vector, high_nibbles(v));
      put(vector + depth, low_nibbles(v));
    });
  } else {
    for_each_word(rows, w.row_bytes() / 4, put);
  }
}

// The weights of half a panel as floats.
void unpack_floats(const QuantizedMatrix& w, const Pieces& pieces, const HalfPanel& half,
                   const float* scales, const float* zeros, float* target) {
  const std::uint8_t* rows[kLanes];
  half.locate(w.data, w.row_bytes(), rows);
  const Vec middle = set(static_cast<float>(w.middle()));
  const std::int64_t per_word = 32 / w.bits;
  for_each_word(rows, w.row_bytes() / 4, [&](std::int64_t word, Words v) {
    const std::int64_t column = word * per_word;
    const std::int64_t piece = column / pieces.columns * kPanelRows;
    const Vec scale = load(scales + piece);
    const Vec zero = w.zero_points == nullptr ? middle : load(zeros + piece);
    const auto put = [&](std::int64_t i, Vec q) {
      store(target + (column + i) * kPanelRows, mul(sub(q, zero), scale));
    };
    const std::int64_t step = w.bits == 4 ? 2 : 1;
    const Words first = w.bits == 4 ? low_nibbles(v) : v;
    put(0, byte_to_float<0>(first));
    put(step, byte_to_float<1>(first));
    put(2 * step, byte_to_float<2>(first));
    put(3 * step, byte_to_float<3>(first));
    if (w.bits == 4) {
      const Words second = high_nibbles(v);
      put(1, byte_to_float<0>(second));
      put(3, byte_to_float<1>(second));
      put(5, byte_to_float<2>(second));
      put(7, byte_to_float<3>(second));
    }
  });
}

// Unpacks the panel whose first row is `first`; `is_signed`: with the middle subtracted.
void unpack_panel(const MatMulParams& p, const Pieces& pieces, std::int64_t first, bool is_signed,
                  const Panel& panel) {
  const QuantizedMatrix& w = p.weights;
  for (std::int64_t h = 0; h < 2; ++h) {
    const HalfPanel half(w, first + h * kLanes);
    float* scales = panel.scales + h * kLanes;
    float* zeros = panel.zeros + h * kLanes;
    unpack_scales(w, pieces, half, p.quantizes_activations, scales, zeros);
    if (is_signed) {
      unpack_bytes<true>(w, half, panel.words + h * kVectorBytes);
    } else if (p.quantizes_activations) {
      unpack_bytes<false>(w, half, panel.words + h * kVectorBytes);
    } else {
      unpack_floats(w, pieces, half, scales, zeros, panel.weights + h * kLanes);
    }
  }
}

}  // namespace
}  // namespace kvconv
