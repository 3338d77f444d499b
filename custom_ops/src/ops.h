// The tables of the library's ops: one entry per combination of types.
#pragma once

#include <vector>

#include "kvconv/ort_abi.h"

namespace kvconv {

std::vector<const ort::CustomOp*> attention_ops();
std::vector<const ort::CustomOp*> cuda_attention_ops();
std::vector<const ort::CustomOp*> matmul_ops();
std::vector<const ort::CustomOp*> gather_ops();
std::vector<const ort::CustomOp*> gated_activation_ops();
std::vector<const ort::CustomOp*> norm_ops();

}  // namespace kvconv
