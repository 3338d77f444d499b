// kvconv::GatedActivation towards ONNX Runtime: activation(gate) * up of a packed projection.
//
//   input       [.., 2 * I] float32 or float16: gate, then up
//   output      [.., I] of the same type
//   activation  "silu", "gelu", "gelu_tanh" or "relu"
#include "gated_activation_op.h"

#include "kvconv/gated_activation.h"

namespace kvconv {
namespace {

constexpr const char* kName = "kvconv::GatedActivation";

struct GatedActivationOp : ort::CustomOp {
  explicit GatedActivationOp(ort::ElementType element);

  ort::ElementType element;
};

struct GatedActivationNode {
  const ort::Api* api;
  Activation activation;
  DataType type;
};

Activation read_activation(const ort::Api* api, const ort::KernelInfo* info) {
  const std::string name = read_string(api, info, "activation", "");
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  refuse(text("activation is \"", name,
              "\"; it must be \"silu\", \"gelu\", \"gelu_tanh\" or \"relu\"."));
}

void compute(const GatedActivationNode& node, ort::KernelContext* context) {
  const Tensor input = read_input(node.api, context, 0);
  require_type(input, "input", element_type(node.type));
  Shape shape = input.shape;
  if (shape.empty() || shape.back() % 2 != 0) {
    refuse(text("input has shape ", shape_text(shape),
                "; its last dimension must be even: gate, then up."));
  }
  shape.back() /= 2;

  GatedActivationParams p;
  p.size = shape.back();
  p.num_rows = shape.num_rows();
  p.activation = node.activation;
  p.type = node.type;
  p.input = input.data;
  p.output = make_output(node.api, context, 0, shape);
  if (p.num_rows == 0 || p.size == 0) return;
  Pool pool(node.api, context);
  gated_activation_kernels().front().run(p, pool.parallel_for());
  pool.throw_if_failed();
}

ort::Status* create_node(const ort::CustomOp* op, const ort::Api* api, const ort::KernelInfo* info,
                         void** node) {
  const auto* self = static_cast<const GatedActivationOp*>(op);
  return guarded(api, kName, [&] {
    *node = new GatedActivationNode{api, read_activation(api, info), data_type(self->element)};
  });
}

GatedActivationOp::GatedActivationOp(ort::ElementType element_type) : element(element_type) {
  get_name = [](const ort::CustomOp*) { return "GatedActivation"; };
  get_execution_provider_type = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  get_input_type = [](const ort::CustomOp* op, std::size_t) {
    return static_cast<const GatedActivationOp*>(op)->element;
  };
  get_input_type_count = [](const ort::CustomOp*) -> std::size_t { return 1; };
  get_output_type = get_input_type;
  get_output_type_count = get_input_type_count;
  get_input_characteristic = [](const ort::CustomOp*, std::size_t) { return ort::kRequired; };
  get_output_characteristic = get_input_characteristic;
  get_input_memory_type = [](const ort::CustomOp*, std::size_t) { return 0; };  // the provider's
  create_kernel_v2 = create_node;
  kernel_compute_v2 = [](void* node, ort::KernelContext* context) {
    const auto* self = static_cast<const GatedActivationNode*>(node);
    return guarded(self->api, kName, [&] { compute(*self, context); });
  };
  kernel_destroy = [](void* node) { delete static_cast<GatedActivationNode*>(node); };
}

}  // namespace

std::vector<const ort::CustomOp*> gated_activation_ops() {
  static const GatedActivationOp table[] = {GatedActivationOp(ort::kFloat32),
                                            GatedActivationOp(ort::kFloat16)};
  return {&table[0], &table[1]};
}

}  // namespace kvconv
