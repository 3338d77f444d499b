// The checks of a quantised matrix: attributes when a session is made, tensors at every run.
#include "quantized_check.h"

#include <limits>

namespace kvconv {
namespace {

// Far beyond any model, and far from overflow in every product of sizes.
constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();

std::int64_t read_size(const ort::Api* api, const ort::KernelInfo* info, const char* name) {
  const std::int64_t value = read_int(api, info, name, 0);
  if (value < 1 || value > kMaxSize) {
    refuse(text(name, " is ", value, "; it must be from 1 to ", kMaxSize, "."));
  }
  return value;
}

void require_shape(const Tensor& tensor, const char* name, std::int64_t rows, std::int64_t columns,
                   const char* axes) {
  if (tensor.shape.size() != 2) {
    refuse(text(name, " has shape ", shape_text(tensor.shape), " of rank ", tensor.shape.size(),
                "; it must be ", axes, " of rank 2."));
  }
  const std::int64_t expected[2] = {rows, columns};
  for (std::size_t axis = 0; axis < 2; ++axis) {
    if (tensor.shape[axis] == expected[axis]) continue;
    refuse(text(name, " has shape ", shape_text(tensor.shape), ": dimension ", axis, " is ",
                tensor.shape[axis], " and must be ", expected[axis], "; it is ", axes, "."));
  }
}

}  // namespace

QuantizedMatrix read_quantized_attributes(const ort::Api* api, const ort::KernelInfo* info,
                                          bool has_rows) {
  QuantizedMatrix matrix;
  matrix.columns = read_size(api, info, "K");
  if (has_rows) matrix.rows = read_size(api, info, "N");
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
                           const QuantizedInputNames& names, QuantizedMatrix* matrix) {
  require_type(data, names.data, ort::kUInt8);
  require_type(scales, names.scales, element_type(matrix->scale_type));
  if (matrix->rows == 0) matrix->rows = data.shape.empty() ? 0 : data.shape[0];
  require_shape(data, names.data, matrix->rows, matrix->row_bytes(),
                "[N, ceil(K / block_size) * block_size * bits / 8]");
  require_shape(scales, names.scales, matrix->rows, matrix->num_blocks(),
                "[N, ceil(K / block_size)]");
  if (zero_points.exists) {
    require_type(zero_points, names.zero_points, element_type(matrix->scale_type));
    require_shape(zero_points, names.zero_points, matrix->rows, matrix->num_blocks(),
                  "[N, ceil(K / block_size)]");
  }
  matrix->data = static_cast<const std::uint8_t*>(data.data);
  matrix->scales = scales.data;
  matrix->zero_points = zero_points.data;
}

}  // namespace kvconv
