// kvconv::GatedActivation towards ONNX Runtime: activation(gate) * up of a packed projection.
//
//   input       [.., 2 * I] float32 or float16: gate, then up
//   output      [.., I] of the same type
//   activation  "silu", "gelu", "gelu_tanh" or "relu"
#include "kvconv/gated_activation.h"
#include "op_support.h"
#include "ops.h"

namespace kvconv {
namespace {

Activation read_activation(const ort::Api* api, const ort::KernelInfo* info) {
  const std::string name = read_string(api, info, "activation", "");
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  refuse(text("activation is \"", name,
              "\"; it must be \"silu\", \"gelu\", \"gelu_tanh\" or \"relu\"."));
}

struct GatedActivationNode {
  static constexpr const char* kName = "kvconv::GatedActivation";
  static constexpr std::array<const char*, 1> kInputNames = {"input"};
  static constexpr std::size_t kNumOutputs = 1;

  const ort::Api* api;
  Activation activation;
  DataType type;

  void compute(ort::KernelContext* context) const {
    const Tensor input = read_input(api, context, 0, kInputNames[0]);
    require_type(input, element_type(type));
    Shape shape = input.shape;
    if (shape.empty() || shape.back() % 2 != 0) {
      refuse(text("input has shape ", shape_text(shape),
                  "; its last dimension must be even: gate, then up."));
    }
    shape.back() /= 2;

    GatedActivationParams p;
    p.size = shape.back();
    p.num_rows = shape.num_rows();
    p.activation = activation;
    p.type = type;
    p.input = input.data;
    p.output = make_output(api, context, 0, shape);
    if (p.num_rows == 0 || p.size == 0) return;
    Pool pool(api, context);
    gated_activation_kernels().front().run(p, pool.parallel_for());
    pool.throw_if_failed();
  }
};

struct GatedActivationOp : OpEntry<GatedActivationOp, GatedActivationNode> {
  explicit GatedActivationOp(ort::ElementType element_type) : element(element_type) {}

  ort::ElementType input_type(std::size_t) const { return element; }
  ort::ElementType output_type(std::size_t) const { return element; }
  static bool requires_input(std::size_t) { return true; }
  GatedActivationNode make_node(const ort::Api* api, const ort::KernelInfo* info) const {
    return {api, read_activation(api, info), data_type(element)};
  }

  ort::ElementType element;
};

}  // namespace

std::vector<const ort::CustomOp*> gated_activation_ops() {
  static const GatedActivationOp table[] = {GatedActivationOp(ort::kFloat32),
                                            GatedActivationOp(ort::kFloat16)};
  return {&table[0], &table[1]};
}

}  // namespace kvconv
