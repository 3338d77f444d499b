// The reference of the gated activation: one thread, double precision.
#include <cmath>

#include "kvconv/float16.h"
#include "kvconv/gated_activation.h"

namespace kvconv {
namespace {

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kGelu:
      return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0)));
    case Activation::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return x < 0.0 ? 0.0 : x;
    default:
      return x / (1.0 + std::exp(-x));
  }
}

}  // namespace

void gated_activation_reference(const GatedActivationParams& p) {
  for (std::int64_t r = 0; r < p.num_rows; ++r) {
    for (std::int64_t i = 0; i < p.size; ++i) {
      const double gate = load_element(p.input, r * 2 * p.size + i, p.type);
      const double up = load_element(p.input, r * 2 * p.size + p.size + i, p.type);
      store_element(p.output, r * p.size + i, p.type,
                    static_cast<float>(activate(p.activation, gate) * up));
    }
  }
}

}  // namespace kvconv
