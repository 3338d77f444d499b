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
#include "ops.h"
#include "quantized_check.h"

namespace kvconv {
namespace {

struct GatherNode {
  static constexpr const char* kName = "kvconv::GatherBlockQuantized";
  static constexpr std::array<const char*, kNumGatherInputs> kInputNames = {
      "data", "indices", "scales", "zero_points"};
  static constexpr std::size_t kNumOutputs = 1;

  const ort::Api* api;
  InputReader<kNumGatherInputs> inputs;
  QuantizedMatrix matrix;  // as far as the attributes tell

  void compute(ort::KernelContext* context) const {
    QuantizedMatrix weights = matrix;
    const Tensor indices = inputs(context, kGatherIndices);
    if (!indices.exists) refuse("indices is absent; it is required.");
    require_type(indices, ort::kInt64);
    read_quantized_inputs(inputs(context, kGatherData), inputs(context, kGatherScales),
                          inputs(context, kGatherZeroPoints), &weights);
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

    shape.push_back(weights.columns, "Y");
    auto* output = static_cast<float*>(make_output(api, context, 0, shape));
    Pool pool(api, context);
    gather_rows(weights, rows.data(), count, output, pool.parallel_for());
    pool.throw_if_failed();
  }
};

struct GatherOp : OpEntry<GatherOp, GatherNode> {
  explicit GatherOp(ort::ElementType scale_type) : scale(scale_type) {}

  ort::ElementType input_type(std::size_t index) const {
    if (index == kGatherData) return ort::kUInt8;
    return index == kGatherIndices ? ort::kInt64 : scale;
  }
  ort::ElementType output_type(std::size_t) const { return ort::kFloat32; }
  static bool requires_input(std::size_t index) { return index <= kGatherScales; }
  GatherNode make_node(const ort::Api* api, const ort::KernelInfo* info) const {
    QuantizedMatrix matrix = read_quantized_attributes(api, info);
    matrix.scale_type = data_type(scale);
    return {api, {api, info, GatherNode::kInputNames}, matrix};
  }

  ort::ElementType scale;
};

}  // namespace

std::vector<const ort::CustomOp*> gather_ops() {
  static const GatherOp table[] = {GatherOp(ort::kFloat32), GatherOp(ort::kFloat16)};
  return {&table[0], &table[1]};
}

}  // namespace kvconv
