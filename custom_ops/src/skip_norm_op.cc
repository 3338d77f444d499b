// kvconv::SkipRMSNormalization towards ONNX Runtime: residual addition and norm in one pass.
//
//   input, skip  [.., width] float32, of one shape
//   weight       [width] float32
//   epsilon      at least 0, added to the mean square
//   output       [.., width]: the norm of input + skip
//   sum          [.., width]: input + skip
#include "skip_norm_op.h"

#include <cmath>

#include "kvconv/skip_norm.h"

namespace kvconv {
namespace {

constexpr const char* kName = "kvconv::SkipRMSNormalization";

struct SkipNormNode {
  const ort::Api* api;
  InputReader<3> inputs;
  float epsilon;
};

void compute(const SkipNormNode& node, ort::KernelContext* context) {
  const Tensor input = node.inputs(context, 0);
  const Tensor skip = node.inputs(context, 1);
  const Tensor weight = node.inputs(context, 2);
  require_type(input, "input", ort::kFloat32);
  require_type(skip, "skip", ort::kFloat32);
  require_type(weight, "weight", ort::kFloat32);
  if (input.shape.empty() || skip.shape != input.shape) {
    refuse(text("input has shape ", shape_text(input.shape), " and skip ", shape_text(skip.shape),
                "; both must be [.., width]."));
  }
  if (weight.shape != Shape{input.shape.back()}) {
    refuse(text("weight has shape ", shape_text(weight.shape), ", input ", shape_text(input.shape),
                "; weight must be as wide as input."));
  }
  SkipNormParams p;
  p.width = input.shape.back();
  p.num_rows = input.shape.num_rows();
  p.epsilon = node.epsilon;
  p.input = static_cast<const float*>(input.data);
  p.skip = static_cast<const float*>(skip.data);
  p.weight = static_cast<const float*>(weight.data);
  p.output = static_cast<float*>(make_output(node.api, context, 0, input.shape));
  p.sum = static_cast<float*>(make_output(node.api, context, 1, input.shape));
  if (p.num_rows == 0 || p.width == 0) return;
  Pool pool(node.api, context);
  skip_norm(p, pool.parallel_for());
  pool.throw_if_failed();
}

struct SkipNormOp : ort::CustomOp {
  SkipNormOp() {
    get_name = [](const ort::CustomOp*) { return "SkipRMSNormalization"; };
    get_execution_provider_type = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
    get_input_type = [](const ort::CustomOp*, std::size_t) { return ort::kFloat32; };
    get_input_type_count = [](const ort::CustomOp*) -> std::size_t { return 3; };
    get_output_type = get_input_type;
    get_output_type_count = [](const ort::CustomOp*) -> std::size_t { return 2; };
    get_input_characteristic = [](const ort::CustomOp*, std::size_t) { return ort::kRequired; };
    get_output_characteristic = get_input_characteristic;
    get_input_memory_type = [](const ort::CustomOp*, std::size_t) { return 0; };  // the provider's
    create_kernel_v2 = [](const ort::CustomOp*, const ort::Api* api, const ort::KernelInfo* info,
                          void** node) {
      return guarded(api, kName, [&] {
        const float epsilon = read_float(api, info, "epsilon", 1e-5f);
        if (!(epsilon >= 0.0F && std::isfinite(epsilon))) {
          refuse(text("epsilon is ", epsilon, "; it must be a number of at least 0."));
        }
        *node = new SkipNormNode{api, InputReader<3>(api, info), epsilon};
      });
    };
    kernel_compute_v2 = [](void* node, ort::KernelContext* context) {
      const auto* self = static_cast<const SkipNormNode*>(node);
      return guarded(self->api, kName, [&] { compute(*self, context); });
    };
    kernel_destroy = [](void* node) { delete static_cast<SkipNormNode*>(node); };
  }
};

}  // namespace

std::vector<const ort::CustomOp*> skip_norm_ops() {
  static const SkipNormOp op;
  return {&op};
}

}  // namespace kvconv
