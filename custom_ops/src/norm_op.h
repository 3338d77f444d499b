// kvconv::SkipRMSNormalization, SkipLayerNormalization and HeadRMSNormalization, as the parts of
// the library share them.
#pragma once

#include <vector>

#include "op_support.h"

namespace kvconv {

// The CustomOp table: one entry per op and type.
std::vector<const ort::CustomOp*> norm_ops();

}  // namespace kvconv
