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
#include "kvconv/quantized.h"
#include "ops.h"
#include "quantized_check.h"

namespace kvconv {
namespace {

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

// A node of a session.
struct MatMulNode {
  static constexpr const char* kName = "kvconv::MatMulNBits";
  static constexpr std::array<const char*, kNumMatMulInputs> kInputNames = {"A", "B", "scales",
                                                                            "zero_points", "bias"};
  static constexpr std::size_t kNumOutputs = 1;

  const ort::Api* api;
  InputReader<kNumMatMulInputs> inputs;
  MatMulParams params;  // a run's, as far as the attributes tell them

  void compute(ort::KernelContext* context) const {
    // 1. Read and check everything, before anything is written.
    MatMulParams p = params;
    QuantizedMatrix& w = p.weights;
    const Tensor a = inputs(context, kMatMulA);
    const Tensor bias = inputs(context, kMatMulBias);
    const ort::ElementType activation = element_type(p.activation_type);
    require_type(a, activation);
    read_quantized_inputs(inputs(context, kMatMulB), inputs(context, kMatMulScales),
                          inputs(context, kMatMulZeroPoints), &w);
    if (a.shape.empty() || a.shape.back() != w.columns) {
      refuse(text("A has shape ", shape_text(a.shape), "; its last dimension must be K ", w.columns,
                  "."));
    }
    if (bias.exists) {
      require_type(bias, activation);
      if (bias.shape.size() != 1 || bias.shape[0] != w.rows) {
        refuse(text("bias has shape ", shape_text(bias.shape), "; it must be [N] with N ", w.rows,
                    "."));
      }
    }
    p.num_rows = a.shape.num_rows();
    p.a = a.data;
    p.bias = bias.data;

    // 2. The output.
    Shape shape = a.shape;
    shape.back() = w.rows;
    p.output = make_output(api, context, 0, shape);
    if (p.num_rows == 0) return;

    // 3. Run.
    const MatMulKernel& kernel = matmul_kernels().front();
    Pool pool(api, context);
    const ParallelFor parallel_for = pool.parallel_for();
    const BorrowedWorkspace workspace(kernel.workspace_bytes(p, parallel_for.num_workers));
    kernel.run(p, workspace.get(), parallel_for);
    pool.throw_if_failed();
  }
};

struct MatMulOp : OpEntry<MatMulOp, MatMulNode> {
  MatMulOp(ort::ElementType activation_type, ort::ElementType scale_type)
      : activation(activation_type), scale(scale_type) {}

  ort::ElementType input_type(std::size_t index) const {
    if (index == kMatMulB) return ort::kUInt8;
    return index == kMatMulA || index == kMatMulBias ? activation : scale;
  }
  ort::ElementType output_type(std::size_t) const { return activation; }
  static bool requires_input(std::size_t index) { return index <= kMatMulScales; }
  MatMulNode make_node(const ort::Api* api, const ort::KernelInfo* info) const {
    MatMulParams p;
    p.weights = read_quantized_attributes(api, info);
    p.weights.scale_type = data_type(scale);
    p.activation_type = data_type(activation);
    p.rounding = read_accuracy_level(api, info);
    return {api, {api, info, MatMulNode::kInputNames}, p};
  }

  ort::ElementType activation;
  ort::ElementType scale;
};

}  // namespace

std::vector<const ort::CustomOp*> matmul_ops() {
  static const MatMulOp table[] = {{ort::kFloat32, ort::kFloat32},
                                   {ort::kFloat32, ort::kFloat16},
                                   {ort::kFloat16, ort::kFloat32},
                                   {ort::kFloat16, ort::kFloat16}};
  return {&table[0], &table[1], &table[2], &table[3]};
}

}  // namespace kvconv
