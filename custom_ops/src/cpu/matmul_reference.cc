// The reference product over quantised weights: every step spelled out, one thread, double
// precision. It is what the fast kernels are tested against and stays as plain as it can be.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kvconv/float16.h"
#include "kvconv/quantized.h"

namespace kvconv {
namespace {

constexpr float kTiny = 1e-30F;  // a piece of smaller activations counts as zeros

double weight_at(const QuantizedMatrix& w, std::int64_t row, std::int64_t column) {
  const std::int64_t block = row * w.num_blocks() + column / w.block_size;
  const std::uint8_t* data = w.data + row * w.row_bytes();
  const int q = w.bits == 8 ? data[column] : (data[column / 2] >> (column % 2 * 4)) & 15;
  const double zero_point =
      w.zero_points == nullptr ? w.middle() : load_element(w.zero_points, block, w.scale_type);
  return (q - zero_point) * load_element(w.scales, block, w.scale_type);
}

// Rounds a piece of activations to multiples of its largest magnitude / 127.
void quantize(std::vector<double>& row, std::int64_t begin, std::int64_t end) {
  float largest = 0.0F;
  for (std::int64_t k = begin; k < end; ++k) {
    largest = std::max(largest, std::fabs(static_cast<float>(row[k])));
  }
  const float inverse = largest < kTiny ? 0.0F : 127.0F / largest;
  for (std::int64_t k = begin; k < end; ++k) {
    row[k] = std::nearbyint(static_cast<float>(row[k]) * inverse) * (largest / 127.0F);
  }
}

}  // namespace

void matmul_reference(const MatMulParams& p) {
  const QuantizedMatrix& w = p.weights;
  const std::int64_t piece = std::min<std::int64_t>(w.block_size, 32);
  std::vector<double> row(static_cast<std::size_t>(w.columns));
  for (std::int64_t m = 0; m < p.num_rows; ++m) {
    for (std::int64_t k = 0; k < w.columns; ++k) {
      row[k] = load_element(p.a, m * w.columns + k, p.activation_type);
    }
    for (std::int64_t k = 0; p.quantizes_activations && k < w.columns; k += piece) {
      quantize(row, k, std::min(k + piece, w.columns));
    }
    for (std::int64_t n = 0; n < w.rows; ++n) {
      double sum = p.bias == nullptr ? 0.0 : load_element(p.bias, n, p.activation_type);
      for (std::int64_t k = 0; k < w.columns; ++k) sum += row[k] * weight_at(w, n, k);
      store_element(p.output, m * w.rows + n, p.activation_type, static_cast<float>(sum));
    }
  }
}

}  // namespace kvconv
