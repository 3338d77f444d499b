// kvconv::GatherBlockQuantized towards ONNX Runtime: rows of quantised weights, as float32.
//
//   data         MatMulNBits's B, uint8
//   indices      [..] int64, from -N to N - 1
//   scales       MatMulNBits's, float32 or float16
//   zero_points  as scales; absent = 2^(bits - 1)
//   Y            [.., K] float32
//   K, N, bits (4 or 8), block_size
#include <vector>

#include "kvconv/quantized.h"
#include "matmul_op.h"
#include "quantized_check.h"

namespace kvconv {
namespace {

constexpr const char* kName = "kvconv::GatherBlockQuantized";
constexpr QuantizedInputNames kInputNames = {"data", "scales", "zero_points"};

struct GatherOp : ort::CustomOp {
  explicit GatherOp(ort::ElementType scale_type);

  ort::ElementType scale;
};

struct GatherNode {
  const ort::Api* api;
  InputReader<kNumGatherInputs> inputs;
  QuantizedMatrix weights;  // as far as the attributes tell
};

void compute(const GatherNode& node, ort::KernelContext* context) {
  QuantizedMatrix weights = node.weights;
  const Tensor indices = node.inputs(context, kGatherIndices);
  if (!indices.exists) refuse("indices is absent; it is required.");
  require_type(indices, "indices", ort::kInt64);
  read_quantized_inputs(node.inputs(context, kGatherData), node.inputs(context, kGatherScales),
                        node.inputs(context, kGatherZeroPoints), kInputNames, &weights);
  Shape shape = indices.shape;
  std::int64_t count = 1;
  for (const std::int64_t dim : shape) count *= dim;
  const auto* given = static_cast<const std::int64_t*>(indices.data);
  std::vector<std::int64_t> rows(given, given + count);
  for (std::int64_t& row : rows) {
    if (row < -weights.rows || row >= weights.rows) {
      refuse(text("indices holds ", row, "; with ", weights.rows, " rows it must be from ",
                  -weights.rows, " to ", weights.rows - 1, "."));
    }
    if (row < 0) row += weights.rows;
  }

  shape.push_back(weights.columns);
  auto* output = static_cast<float*>(make_output(node.api, context, 0, shape));
  Pool pool(node.api, context);
  gather_rows(weights, rows.data(), count, output, pool.parallel_for());
  pool.throw_if_failed();
}

ort::Status* create_node(const ort::CustomOp* op, const ort::Api* api, const ort::KernelInfo* info,
                         void** node) {
  return guarded(api, kName, [&] {
    QuantizedMatrix weights = read_quantized_attributes(api, info);
    weights.scale_type = data_type(static_cast<const GatherOp*>(op)->scale);
    *node = new GatherNode{api, InputReader<kNumGatherInputs>(api, info), weights};
  });
}

GatherOp::GatherOp(ort::ElementType scale_type) : scale(scale_type) {
  get_name = [](const ort::CustomOp*) { return "GatherBlockQuantized"; };
  get_execution_provider_type = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  get_input_type = [](const ort::CustomOp* op, std::size_t index) {
    if (index == kGatherData) return ort::kUInt8;
    return index == kGatherIndices ? ort::kInt64 : static_cast<const GatherOp*>(op)->scale;
  };
  get_input_type_count = [](const ort::CustomOp*) -> std::size_t { return kNumGatherInputs; };
  get_output_type = [](const ort::CustomOp*, std::size_t) { return ort::kFloat32; };
  get_output_type_count = [](const ort::CustomOp*) -> std::size_t { return 1; };
  get_input_characteristic = [](const ort::CustomOp*, std::size_t index) {
    return index <= kGatherScales ? ort::kRequired : ort::kOptional;
  };
  get_output_characteristic = [](const ort::CustomOp*, std::size_t) { return ort::kRequired; };
  get_input_memory_type = [](const ort::CustomOp*, std::size_t) { return 0; };  // the provider's
  create_kernel_v2 = create_node;
  kernel_compute_v2 = [](void* node, ort::KernelContext* context) {
    const auto* self = static_cast<const GatherNode*>(node);
    return guarded(self->api, kName, [&] { compute(*self, context); });
  };
  kernel_destroy = [](void* node) { delete static_cast<GatherNode*>(node); };
}

}  // namespace

std::vector<const ort::CustomOp*> gather_ops() {
  static const GatherOp table[] = {GatherOp(ort::kFloat32), GatherOp(ort::kFloat16)};
  return {&table[0], &table[1]};
}

}  // namespace kvconv
