// What a gated activation kernel is given, and the kernels there are. Knows nothing of ONNX
// Runtime.
#pragma once

#include <cstdint>
#include <vector>

#include "kvconv/kernel.h"

namespace kvconv {

enum class Activation : std::uint8_t { kSilu, kGelu, kGeluTanh, kRelu };

// output[r, i] = activation(input[r, i]) * input[r, size + i]
struct GatedActivationParams {
  std::int64_t num_rows = 0;
  std::int64_t size = 0;
  Activation activation = Activation::kSilu;
  DataType type = DataType::kFloat32;  // or float16
  const void* input = nullptr;         // [num_rows, 2 * size]: gate, then up
  void* output = nullptr;              // [num_rows, size]
};

struct GatedActivationKernel {
  const char* name;
  void (*run)(const GatedActivationParams& params, const ParallelFor& parallel_for);
};

// The builds that this machine can run, best first; never empty, the last one is portable.
const std::vector<GatedActivationKernel>& gated_activation_kernels();

// The plain one that every fast one is tested against: one thread, double precision.
void gated_activation_reference(const GatedActivationParams& params);

}  // namespace kvconv
