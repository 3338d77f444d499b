// The checks of a quantised matrix: attributes when a session is made, tensors at every run.
#include "quantized_check.h"

#include <limits>

namespace kvconv {
namespace {

// Far beyond any model, and far from overflow in every product of sizes.
constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();
constexpr const char* kBlocksAxes = "[ceil(N / 16), ceil(K / block_size), 16]";

std::int64_t read_size(const ort::Api* api, const ort::KernelInfo* info, const char* name) {
  const std::int64_t value = read_int(api, info, name, 0);
  if (value < 1 || value > kMaxSize) {
    refuse(text(name, " is ", value, "; it must be from 1 to ", kMaxSize, "."));
  }
  return value;
}

void require_shape(const Tensor& tensor, const Shape& expected, const char* axes) {
  if (tensor.shape == expected) return;
  // Version 1 of the operators had a row of this matrix to a row of the tensor.
  const char* remedy = tensor.shape.size() == 2 ? " Export the model again." : "";
  refuse(text(tensor.name, " has shape ", shape_text(tensor.shape), "; it must be ",
              shape_text(expected), ": ", axes, ".", remedy));
}

}  // namespace

QuantizedMatrix read_quantized_attributes(const ort::Api* api, const ort::KernelInfo* info) {
  QuantizedMatrix matrix;
  matrix.columns = read_size(api, info, "K");
  matrix.rows = read_size(api, info, "N");
  const std::int64_t bits = read_int(api, info, "bits", 4);
  if (bits != 4 && bits != 8) refuse(text("bits is ", bits, "; it must be 4 or 8."));
  matrix.bits = static_cast<int>(bits);
  matrix.block_size = read_int(api, info, "block_size", 0);
  if (matrix.block_size < 16 || matrix.block_size > 256 ||
      (matrix.block_size & (matrix.block_size - 1)) != 0) {
    refuse(text("block_size is ", matrix.block_size, "; it must be 16, 32, 64, 128 or 256."));
  }
  return matrix;
}

void read_quantized_inputs(const Tensor& data, const Tensor& scales, const Tensor& zero_points,
                           QuantizedMatrix* matrix) {
  require_type(data, ort::kUInt8);
  require_type(scales, element_type(matrix->scale_type));
  constexpr std::int64_t kGroupRows = QuantizedMatrix::kGroupRows;
  const Shape blocks = {matrix->num_groups(), matrix->num_blocks(), kGroupRows};
  require_shape(data, {matrix->num_groups(), matrix->row_words(), kGroupRows, 4},
                "[ceil(N / 16), ceil(K / block_size) * block_size * bits / 32, 16, 4]");
  require_shape(scales, blocks, kBlocksAxes);
  if (zero_points.exists) {
    require_type(zero_points, element_type(matrix->scale_type));
    require_shape(zero_points, blocks, kBlocksAxes);
  }
  matrix->data = static_cast<const std::uint8_t*>(data.data);
  matrix->scales = scales.data;
  matrix->zero_points = zero_points.data;
}

}  // namespace kvconv
