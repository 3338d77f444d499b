// kvconv::SkipRMSNormalization, as the parts of the library share it.
#pragma once

#include <vector>

#include "op_support.h"

namespace kvconv {

// The CustomOp table: one entry.
std::vector<const ort::CustomOp*> skip_norm_ops();

}  // namespace kvconv
