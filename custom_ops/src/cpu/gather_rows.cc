// Rows of a quantised matrix as float32: the embedding whose table the last projection shares.
#include "kvconv/float16.h"
#include "kvconv/quantized.h"
#include "tasks.h"

namespace kvconv {
namespace {

constexpr std::int64_t kRowsPerTask = 16;

void write_row(const QuantizedMatrix& w, std::int64_t row, float* output) {
  constexpr std::int64_t kWordStride = 4 * QuantizedMatrix::kGroupRows;
  const std::uint8_t* word = w.data + w.word_offset(row);
  for (std::int64_t b = 0; b < w.num_blocks(); ++b) {
    const std::int64_t index = w.scale_offset(row) + b * w.kGroupRows;
    const float scale = load_element(w.scales, index, w.scale_type);
    const float zero_point = w.zero_points == nullptr
                                 ? static_cast<float>(w.middle())
                                 : load_element(w.zero_points, index, w.scale_type);
    const auto put = [&](std::int64_t k, int q) {
      if (k < w.columns) output[k] = (static_cast<float>(q) - zero_point) * scale;
    };
    const std::int64_t end = (b + 1) * w.block_size;
    for (std::int64_t k = b * w.block_size; k < end; word += kWordStride) {
      for (int i = 0; i < 4; ++i) {
        put(k + i, w.bits == 8 ? word[i] : word[i] & 15);
        if (w.bits == 4) put(k + 4 + i, word[i] >> 4);
      }
      k += 32 / w.bits;
    }
  }
}

}  // namespace

void gather_rows(const QuantizedMatrix& weights, const std::int64_t* indices, std::int64_t count,
                 float* output, const ParallelFor& parallel_for) {
  const std::int64_t num_tasks = ceil_div(count, kRowsPerTask);
  for_each_task(parallel_for, num_tasks, [&](std::int64_t, std::int64_t task) {
    const std::int64_t end = min_of(count, (task + 1) * kRowsPerTask);
    for (std::int64_t i = task * kRowsPerTask; i < end; ++i) {
      write_row(weights, indices[i], output + i * weights.columns);
    }
  });
}

}  // namespace kvconv
