// Rows of a quantised matrix as float32: the embedding whose table the last projection shares.
#include "kvconv/float16.h"
#include "kvconv/quantized.h"
#include "tasks.h"

namespace kvconv {
namespace {

constexpr std::int64_t kRowsPerTask = 16;

void write_row(const QuantizedMatrix& w, std::int64_t row, float* output) {
  const std::uint8_t* data = w.data + row * w.row_bytes();
  for (std::int64_t b = 0; b < w.num_blocks(); ++b) {
    const std::int64_t index = row * w.num_blocks() + b;
    const float scale = load_element(w.scales, index, w.scale_type);
    const float zero_point = w.zero_points == nullptr
                                 ? static_cast<float>(w.middle())
                                 : load_element(w.zero_points, index, w.scale_type);
    const std::int64_t end = min_of(w.columns, (b + 1) * w.block_size);
    std::int64_t k = b * w.block_size;
    if (w.bits == 8) {
      for (; k < end; ++k) output[k] = (static_cast<float>(data[k]) - zero_point) * scale;
    } else {
      for (; k + 1 < end; k += 2) {
        output[k] = (static_cast<float>(data[k / 2] & 15) - zero_point) * scale;
        output[k + 1] = (static_cast<float>(data[k / 2] >> 4) - zero_point) * scale;
      }
      if (k < end) output[k] = (static_cast<float>(data[k / 2] & 15) - zero_point) * scale;
    }
  }
}

}  // namespace

void gather_rows(const QuantizedMatrix& weights, const std::int64_t* indices, std::int64_t count,
                 float* output, const ParallelFor& parallel_for) {
  const std::int64_t num_tasks = (count + kRowsPerTask - 1) / kRowsPerTask;
  for_each_task(parallel_for, num_tasks, [&](std::int64_t, std::int64_t task) {
    const std::int64_t end = min_of(count, (task + 1) * kRowsPerTask);
    for (std::int64_t i = task * kRowsPerTask; i < end; ++i) {
      write_row(weights, indices[i], output + i * weights.columns);
    }
  });
}

}  // namespace kvconv
