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
  const std::int64_t per_word = 32 / w.bits;
  const std::uint8_t* word = w.data + w.word_offset(row) + column / per_word * 4 * w.kGroupRows;
  const std::int64_t i = column % per_word;
  const int q = w.bits == 8 ? word[i] : (word[i % 4] >> (i / 4 * 4)) & 15;
  const std::int64_t block = w.scale_offset(row) + column / w.block_size * w.kGroupRows;
  const double zero_point =
      w.zero_points == nullptr ? w.middle() : load_element(w.zero_points, block, w.scale_type);
  return (q - zero_point) * load_element(w.scales, block, w.scale_type);
}

// Rounds a piece of activations to multiples of its largest magnitude / steps.
void quantize(std::vector<double>& row, std::int64_t begin, std::int64_t end, float steps) {
  float largest = 0.0F;
  for (std::int64_t k = begin; k < end; ++k) {
    largest = std::max(largest, std::fabs(static_cast<float>(row[k])));
  }
  const float inverse = largest < kTiny ? 0.0F : steps / largest;
  for (std::int64_t k = begin; k < end; ++k) {
    row[k] = std::nearbyint(static_cast<float>(row[k]) * inverse) * (largest / steps);
  }
}

}  // namespace

void matmul_reference(const MatMulParams& p) {
  const QuantizedMatrix& w = p.weights;
  const std::int64_t piece = std::min<std::int64_t>(w.block_size, 32);
  const float steps = p.rounding == Rounding::kInt8 ? 127.0F : 127.0F * 256.0F;
  std::vector<double> row(static_cast<std::size_t>(w.columns));
  for (std::int64_t m = 0; m < p.num_rows; ++m) {
    for (std::int64_t k = 0; k < w.columns; ++k) {
      row[k] = load_element(p.a, m * w.columns + k, p.activation_type);
    }
    for (std::int64_t k = 0; p.rounding != Rounding::kNone && k < w.columns; k += piece) {
      quantize(row, k, std::min(k + piece, w.columns), steps);
    }
    for (std::int64_t n = 0; n < w.rows; ++n) {
      double sum = p.bias == nullptr ? 0.0 : load_element(p.bias, n, p.activation_type);
      for (std::int64_t k = 0; k < w.columns; ++k) sum += row[k] * weight_at(w, n, k);
      store_element(p.output, m * w.rows + n, p.activation_type, static_cast<float>(sum));
    }
  }
}

}  // namespace kvconv
