// What the faces of the ops over a quantised matrix share: their inputs, and how they read it.
#pragma once

#include <cstdint>

#include "kvconv/quantized.h"
#include "op_support.h"

namespace kvconv {

enum MatMulInput : std::size_t {
  kMatMulA,
  kMatMulB,
  kMatMulScales,
  kMatMulZeroPoints,
  kMatMulBias,
  kNumMatMulInputs,
};

enum GatherInput : std::size_t {
  kGatherData,
  kGatherIndices,
  kGatherScales,
  kGatherZeroPoints,
  kNumGatherInputs,
};

// Reads and checks N, K, bits and block_size; throws OpError. All else of the matrix is left for a
// run.
QuantizedMatrix read_quantized_attributes(const ort::Api* api, const ort::KernelInfo* info);

// Fills in the matrix of a run from its inputs. `matrix` holds the attributes. Throws OpError,
// naming both shapes that disagree.
void read_quantized_inputs(const Tensor& data, const Tensor& scales, const Tensor& zero_points,
                           QuantizedMatrix* matrix);

}  // namespace kvconv
