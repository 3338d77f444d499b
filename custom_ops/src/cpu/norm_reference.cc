// The references of the norms: one thread, double precision.
#include <cmath>
#include <functional>

#include "kvconv/float16.h"
#include "kvconv/norm.h"

namespace kvconv {
namespace {

using Numbers = std::function<double(std::int64_t index)>;

double inverse_root(const Numbers& numbers, std::int64_t width, float epsilon) {
  double squares = 0.0;
  for (std::int64_t i = 0; i < width; ++i) squares += numbers(i) * numbers(i);
  return 1.0 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(epsilon));
}

Numbers elements(const void* data, std::int64_t start, DataType type) {
  return [=](std::int64_t i) { return static_cast<double>(load_element(data, start + i, type)); };
}

}  // namespace

void skip_norm_reference(const SkipNormParams& p) {
  const auto parameter = [&](const void* data, std::int64_t i, double absent) {
    return data == nullptr ? absent : static_cast<double>(load_element(data, i, p.type));
  };
  const double width = static_cast<double>(p.width);
  for (std::int64_t row = 0; row < p.num_rows; ++row) {
    const std::int64_t start = row * p.width;
    const Numbers input = elements(p.input, start, p.type);
    const Numbers skip = elements(p.skip, start, p.type);
    const Numbers sum = elements(p.sum, start, p.type);
    const double inner = p.input_weight == nullptr ? 1.0 : inverse_root(input, p.width, p.epsilon);
    double mean = 0.0;
    for (std::int64_t i = 0; i < p.width; ++i) {
      const double x = input(i) * inner * parameter(p.input_weight, i, 1.0);
      store_element(p.sum, start + i, p.type,
                    static_cast<float>(x + parameter(p.input_bias, i, 0.0) + skip(i)));
      if (p.norm == Norm::kLayer) mean += sum(i) / width;
    }
    const Numbers centred = [&](std::int64_t i) { return sum(i) - mean; };
    const double factor = inverse_root(centred, p.width, p.epsilon);
    for (std::int64_t i = 0; i < p.width; ++i) {
      const double y = centred(i) * factor * parameter(p.weight, i, 1.0);
      store_element(p.output, start + i, p.type, static_cast<float>(y + parameter(p.bias, i, 0.0)));
    }
  }
}

void head_norm_reference(const HeadNormParams& p) {
  for (std::int64_t row = 0; row < p.num_rows; ++row) {
    for (std::int64_t i = 0; i < p.width; ++i) {
      const std::int64_t head = i / p.head_dim;
      const std::int64_t start = row * p.width + head * p.head_dim;
      double x = load_element(p.input, row * p.width + i, p.type);
      if (head < p.num_heads + p.kv_num_heads) {
        x *= inverse_root(elements(p.input, start, p.type), p.head_dim, p.epsilon);
        const void* weight = head < p.num_heads ? p.query_weight : p.key_weight;
        x *= static_cast<double>(load_element(weight, i % p.head_dim, p.type));
      }
      store_element(p.output, row * p.width + i, p.type, static_cast<float>(x));
    }
  }
}

}  // namespace kvconv
