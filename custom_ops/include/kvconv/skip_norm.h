// Residual addition and root mean square norm in one pass. Knows nothing of ONNX Runtime.
#pragma once

#include <cstdint>

#include "kvconv/kernel.h"

namespace kvconv {

// sum[r] = input[r] + skip[r]
// output[r] = sum[r] / sqrt(mean(sum[r]^2) + epsilon) * weight
struct SkipNormParams {
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
  float epsilon = 0.0f;
  const float* input = nullptr;   // [num_rows, width]
  const float* skip = nullptr;    // [num_rows, width]
  const float* weight = nullptr;  // [width]
  float* output = nullptr;        // [num_rows, width]
  float* sum = nullptr;           // [num_rows, width]
};

void skip_norm(const SkipNormParams& params, const ParallelFor& parallel_for);

}  // namespace kvconv
