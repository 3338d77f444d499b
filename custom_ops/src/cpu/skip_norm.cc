// Residual addition and root mean square norm: memory decides, so plain loops that any compiler
// turns into vectors are enough.
#include "kvconv/skip_norm.h"

#include <cmath>

#include "tasks.h"

namespace kvconv {
namespace {

constexpr std::int64_t kLanes = 16;            // partial sums, so that additions do not wait
constexpr std::int64_t kTaskElements = 16384;  // less than this is not worth a second thread

void norm_row(const SkipNormParams& p, std::int64_t row) {
  const float* input = p.input + row * p.width;
  const float* skip = p.skip + row * p.width;
  float* output = p.output + row * p.width;
  float* sum = p.sum + row * p.width;
  float squares[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= p.width; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const float x = input[i + lane] + skip[i + lane];
      sum[i + lane] = x;
      squares[lane] += x * x;
    }
  }
  for (; i < p.width; ++i) {
    sum[i] = input[i] + skip[i];
    squares[i % kLanes] += sum[i] * sum[i];
  }
  double total = 0.0;
  for (const float square : squares) total += square;
  const auto scale = static_cast<float>(
      1.0 / std::sqrt(total / static_cast<double>(p.width) + static_cast<double>(p.epsilon)));
  for (i = 0; i < p.width; ++i) output[i] = sum[i] * scale * p.weight[i];
}

}  // namespace

void skip_norm(const SkipNormParams& p, const ParallelFor& parallel_for) {
  const std::int64_t rows_per_task = max_of(1, kTaskElements / max_of(1, p.width));
  const std::int64_t tasks = (p.num_rows + rows_per_task - 1) / rows_per_task;
  for_each_task(parallel_for, tasks, [&](std::int64_t, std::int64_t task) {
    const std::int64_t end = min_of(p.num_rows, (task + 1) * rows_per_task);
    for (std::int64_t row = task * rows_per_task; row < end; ++row) norm_row(p, row);
  });
}

}  // namespace kvconv
