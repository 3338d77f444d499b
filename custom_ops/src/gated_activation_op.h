// kvconv::GatedActivation, as the parts of the library share it.
#pragma once

#include <vector>

#include "op_support.h"

namespace kvconv {

// The CustomOp table: one entry per type.
std::vector<const ort::CustomOp*> gated_activation_ops();

}  // namespace kvconv
