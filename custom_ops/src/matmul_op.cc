// kvconv::MatMulNBits towards ONNX Runtime: activations times quantised weights.
//
//   A            [.., K] float32 or float16
//   B            [ceil(N / 16), ceil(K / block_size) * block_size * bits / 32, 16, 4] uint8:
//                groups of 16 rows, the words of which lie side by side; see kvconv/quantized.h
//   scales       [ceil(N / 16), ceil(K / block_size), 16] float32 or float16
//   zero_points  as scales; absent = 2^(bits - 1)
//   bias         [N] of A's type; may be absent
//   Y            [.., N] of A's type
//   K, N, bits (4 or 8), block_size
//   accuracy_level: activations are float32 (1), 16-bit integers (2) or 8-bit ones (4)
#include "matmul_op.h"

#include "kvconv/quantized.h"
#include "quantized_check.h"

namespace kvconv {
namespace {

constexpr const char* kName = "kvconv::MatMulNBits";
constexpr QuantizedInputNames kInputNames = {"B", "scales", "zero_points"};

struct MatMulOp : ort::CustomOp {
  MatMulOp(ort::ElementType activation_type, ort::ElementType scale_type);

  ort::ElementType activation;
  ort::ElementType scale;
};

// A node of a session: a run's parameters as far as the attributes tell them.
struct MatMulNode {
  const ort::Api* api;
  InputReader<kNumMatMulInputs> inputs;
  MatMulParams params;
};

void compute(const MatMulNode& node, ort::KernelContext* context) {
  // 1. Read and check everything, before anything is written.
  MatMulParams p = node.params;
  QuantizedMatrix& w = p.weights;
  const Tensor a = node.inputs(context, kMatMulA);
  const Tensor bias = node.inputs(context, kMatMulBias);
  const ort::ElementType activation = element_type(p.activation_type);
  require_type(a, "A", activation);
  read_quantized_inputs(node.inputs(context, kMatMulB), node.inputs(context, kMatMulScales),
                        node.inputs(context, kMatMulZeroPoints), kInputNames, &w);
  if (a.shape.empty() || a.shape.back() != w.columns) {
    refuse(text("A has shape ", shape_text(a.shape), "; its last dimension must be K ", w.columns,
                "."));
  }
  if (bias.exists) {
    require_type(bias, "bias", activation);
    if (bias.shape.size() != 1 || bias.shape[0] != w.rows) {
      refuse(
          text("bias has shape ", shape_text(bias.shape), "; it must be [N] with N ", w.rows, "."));
    }
  }
  p.num_rows = a.shape.num_rows();
  p.a = a.data;
  p.bias = bias.data;

  // 2. The output.
  Shape shape = a.shape;
  shape.back() = w.rows;
  p.output = make_output(node.api, context, 0, shape);
  if (p.num_rows == 0) return;

  // 3. Run.
  const MatMulKernel& kernel = matmul_kernels().front();
  Pool pool(node.api, context);
  const ParallelFor parallel_for = pool.parallel_for();
  const BorrowedWorkspace workspace(kernel.workspace_bytes(p, parallel_for.num_workers));
  kernel.run(p, workspace.get(), parallel_for);
  pool.throw_if_failed();
}

Rounding read_accuracy_level(const ort::Api* api, const ort::KernelInfo* info) {
  const std::int64_t level = read_int(api, info, "accuracy_level", 2);
  switch (level) {
    case 1:
      return Rounding::kNone;
    case 2:
      return Rounding::kInt16;
    case 4:
      return Rounding::kInt8;
    default:
      refuse(text("accuracy_level is ", level,
                  "; it must be 1 (float32 activations), 2 (16-bit integers) or 4 (8-bit ones)."));
  }
}

ort::Status* create_node(const ort::CustomOp* op, const ort::Api* api, const ort::KernelInfo* info,
                         void** node) {
  const auto* self = static_cast<const MatMulOp*>(op);
  return guarded(api, kName, [&] {
    MatMulParams p;
    p.weights = read_quantized_attributes(api, info);
    p.weights.scale_type = data_type(self->scale);
    p.activation_type = data_type(self->activation);
    p.rounding = read_accuracy_level(api, info);
    *node = new MatMulNode{api, InputReader<kNumMatMulInputs>(api, info), p};
  });
}

MatMulOp::MatMulOp(ort::ElementType activation_type, ort::ElementType scale_type)
    : activation(activation_type), scale(scale_type) {
  get_name = [](const ort::CustomOp*) { return "MatMulNBits"; };
  get_execution_provider_type = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  get_input_type = [](const ort::CustomOp* op, std::size_t index) {
    const auto* self = static_cast<const MatMulOp*>(op);
    if (index == kMatMulB) return ort::kUInt8;
    return index == kMatMulA || index == kMatMulBias ? self->activation : self->scale;
  };
  get_input_type_count = [](const ort::CustomOp*) -> std::size_t { return kNumMatMulInputs; };
  get_output_type = [](const ort::CustomOp* op, std::size_t) {
    return static_cast<const MatMulOp*>(op)->activation;
  };
  get_output_type_count = [](const ort::CustomOp*) -> std::size_t { return 1; };
  get_input_characteristic = [](const ort::CustomOp*, std::size_t index) {
    return index <= kMatMulScales ? ort::kRequired : ort::kOptional;
  };
  get_output_characteristic = [](const ort::CustomOp*, std::size_t) { return ort::kRequired; };
  get_input_memory_type = [](const ort::CustomOp*, std::size_t) { return 0; };  // the provider's
  create_kernel_v2 = create_node;
  kernel_compute_v2 = [](void* node, ort::KernelContext* context) {
    const auto* self = static_cast<const MatMulNode*>(node);
    return guarded(self->api, kName, [&] { compute(*self, context); });
  };
  kernel_destroy = [](void* node) { delete static_cast<MatMulNode*>(node); };
}

}  // namespace

std::vector<const ort::CustomOp*> matmul_ops() {
  static const MatMulOp table[] = {{ort::kFloat32, ort::kFloat32},
                                   {ort::kFloat32, ort::kFloat16},
                                   {ort::kFloat16, ort::kFloat32},
                                   {ort::kFloat16, ort::kFloat16}};
  std::vector<const ort::CustomOp*> pointers;
  for (const MatMulOp& op : table) pointers.push_back(&op);
  return pointers;
}

}  // namespace kvconv
