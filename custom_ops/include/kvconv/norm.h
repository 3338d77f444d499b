// What norms are given, and the kernels there are. Knows nothing of ONNX Runtime.
#pragma once

#include <cstdint>
#include <vector>

#include "kvconv/kernel.h"

namespace kvconv {

// A residual addition and the norm behind it. Both norms divide by a root and multiply by a weight:
//
//   kRms    x / sqrt(mean(x^2) + epsilon) * weight
//   kLayer  the same of x - mean(x), + bias
enum class Norm : std::uint8_t { kRms, kLayer };

// sum[r] = input[r] + skip[r]; output[r] = norm(sum[r])
//
// The input may have a bias or be normed by kRms itself before it is added. A float16 sum is
// rounded before its norm is taken, which reads what later layers read.
struct SkipNormParams {
  Norm norm = Norm::kRms;
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
  float epsilon = 0.0f;
  DataType type = DataType::kFloat32;  // or float16; all arithmetic is float32
  const void* input = nullptr;         // [num_rows, width]
  const void* skip = nullptr;          // [num_rows, width]
  const void* weight = nullptr;        // [width]
  const void* bias = nullptr;          // [width], of kLayer; null: 0
  const void* input_bias = nullptr;    // [width]; null: 0
  const void* input_weight = nullptr;  // [width]; null: the input is not normed
  void* output = nullptr;              // [num_rows, width]
  void* sum = nullptr;                 // [num_rows, width]
};

// The kRms norm of each query head and each key head of a packed projection. What lies behind them,
// the value heads, is copied.
struct HeadNormParams {
  std::int64_t num_rows = 0;
  std::int64_t width = 0;  // at least (num_heads + kv_num_heads) * head_dim
  std::int64_t num_heads = 0;
  std::int64_t kv_num_heads = 0;
  std::int64_t head_dim = 0;
  float epsilon = 0.0f;
  DataType type = DataType::kFloat32;  // or float16
  const void* input = nullptr;         // [num_rows, width]
  const void* query_weight = nullptr;  // [head_dim]
  const void* key_weight = nullptr;    // [head_dim]
  void* output = nullptr;              // [num_rows, width]
};

struct NormKernel {
  const char* name;
  void (*skip_norm)(const SkipNormParams& params, const ParallelFor& parallel_for);
  void (*head_norm)(const HeadNormParams& params, const ParallelFor& parallel_for);
};

// The builds that this machine can run, best first; never empty, the last one is portable.
const std::vector<NormKernel>& norm_kernels();

// The plain ones that every fast one is tested against: one thread, double precision.
void skip_norm_reference(const SkipNormParams& params);
void head_norm_reference(const HeadNormParams& params);

}  // namespace kvconv
