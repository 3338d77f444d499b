// kvconv::MatMulNBits and kvconv::GatherBlockQuantized, as the parts of the library share them.
#pragma once

#include <vector>

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

// The CustomOp tables: one entry per combination of types.
std::vector<const ort::CustomOp*> matmul_ops();
std::vector<const ort::CustomOp*> gather_ops();

}  // namespace kvconv
