// Every build of the quantised matrix product and of the gated activation that this machine can
// run, against the references.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "check.h"
#include "kvconv/gated_activation.h"
#include "kvconv/quantized.h"
#include "threads.h"

namespace kvconv::test {
namespace {

// Memory of exactly the bytes asked for, so that AddressSanitizer sees one byte too far.
using Bytes = std::unique_ptr<unsigned char[]>;

Bytes make_floats(Random& random, std::int64_t count, DataType type, float middle, float spread) {
  Bytes bytes(new unsigned char[static_cast<std::size_t>(count * bytes_of(type))]);
  for (std::int64_t i = 0; i < count; ++i) {
    store_element(bytes.get(), i, type, middle + spread * random.normal());
  }
  return bytes;
}

Bytes poisoned(std::size_t size) {
  Bytes bytes(new unsigned char[size]);
  std::memset(bytes.get(), 0xFF, size);  // NaN in every type
  return bytes;
}

struct Case {
  MatMulParams p;
  Bytes data, scales, zero_points, a, bias;
  std::string text;
};

Case make_case(std::uint64_t seed) {
  Random random(seed);
  Case c;
  MatMulParams& p = c.p;
  QuantizedMatrix& w = p.weights;
  const std::vector<std::int64_t> edges = {1,  2,  3,  4,  5,  6,  7,  8,  9,   15,  16,
                                           17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129};
  w.rows = random.pick(edges);
  w.columns = random.chance(10) ? 576 : random.pick(edges) * (1 + random.below(3));
  w.bits = random.chance(60) ? 4 : 8;
  w.block_size = random.pick<std::int64_t>({16, 32, 32, 32, 64, 128, 256});
  w.scale_type = random.chance(60) ? DataType::kFloat16 : DataType::kFloat32;
  p.num_rows = random.chance(30) ? 1 : random.chance(5) ? 515 : random.pick(edges);
  p.activation_type = random.chance(75) ? DataType::kFloat32 : DataType::kFloat16;
  p.rounding = random.pick<Rounding>({Rounding::kNone, Rounding::kInt16, Rounding::kInt8});

  const std::int64_t blocks = w.num_groups() * w.kGroupRows * w.num_blocks();
  const std::int64_t num_bytes = w.num_groups() * w.kGroupRows * w.row_words() * 4;
  c.data.reset(new unsigned char[static_cast<std::size_t>(num_bytes)]);
  const int percent = random.pick<int>({0, 0, 100, 50});  // of extreme weights
  for (std::int64_t i = 0; i < num_bytes; ++i) {
    c.data[i] = static_cast<unsigned char>(random.chance(percent) ? random.below(2) * 255
                                                                  : random.below(256));
  }
  w.data = c.data.get();
  c.scales = make_floats(random, blocks, w.scale_type, 0.05F, 0.02F);
  w.scales = c.scales.get();
  if (random.chance(40)) {
    const float middle = static_cast<float>(w.middle());
    c.zero_points = make_floats(random, blocks, w.scale_type, middle, middle / 3);
    w.zero_points = c.zero_points.get();
  }
  c.a = make_floats(random, p.num_rows * w.columns, p.activation_type, 0.0F, 1.0F);
  if (random.chance(25)) {  // extreme activations, and none
    for (std::int64_t i = 0; i < p.num_rows * w.columns; ++i) {
      const bool is_zero = i / w.columns % 3 == 1 || i % w.columns / 32 % 3 == 1;
      store_element(c.a.get(), i, p.activation_type, is_zero ? 0.0F : i % 7 == 0 ? -2.5F : 2.5F);
    }
  }
  p.a = c.a.get();
  if (random.chance(40)) {
    c.bias = make_floats(random, w.rows, p.activation_type, 0.0F, 1.0F);
    p.bias = c.bias.get();
  }
  c.text = "case " + std::to_string(seed) + " (M " + std::to_string(p.num_rows) + ", N " +
           std::to_string(w.rows) + ", K " + std::to_string(w.columns) + ", " +
           std::to_string(w.bits) + " bits, block " + std::to_string(w.block_size) +
           (p.rounding == Rounding::kNone    ? ", float32"
            : p.rounding == Rounding::kInt16 ? ", int16"
                                             : ", int8") +
           (w.zero_points != nullptr ? ", zero points)" : ")");
  return c;
}

std::size_t output_bytes(const MatMulParams& p) {
  return static_cast<std::size_t>(p.num_rows * p.weights.rows * bytes_of(p.activation_type));
}

Bytes run_kernel(const MatMulKernel& kernel, MatMulParams p, std::int64_t num_workers) {
  Bytes output = poisoned(output_bytes(p));
  p.output = output.get();
  const std::size_t bytes = kernel.workspace_bytes(p, num_workers);
  void* workspace = ::operator new(bytes, std::align_val_t(64));
  std::memset(workspace, 0xFF, bytes);
  kernel.run(p, workspace, ParallelFor{run_on_threads, nullptr, num_workers});
  ::operator delete(workspace, std::align_val_t(64));
  return output;
}

// The largest error that rounding may make: it grows with the sum of the products' magnitudes.
float allowed_error(const MatMulParams& p, std::int64_t row, std::int64_t column) {
  const QuantizedMatrix& w = p.weights;
  double sum = 0.0;
  for (std::int64_t k = 0; k < w.columns; ++k) {
    const std::int64_t block = w.scale_offset(column) + k / w.block_size * w.kGroupRows;
    const double largest = (w.zero_points == nullptr ? 1.0 : 4.0) * w.middle() *
                           load_element(w.scales, block, w.scale_type);
    sum += std::fabs(load_element(p.a, row * w.columns + k, p.activation_type) * largest);
  }
  const float relative = p.activation_type == DataType::kFloat32 ? 1e-6F : 1e-3F;
  return relative * static_cast<float>(sum + 2.0);
}

void test_matmul(const MatMulKernel& kernel, int cases) {
  for (int seed = 0; seed < cases; ++seed) {
    Case c = make_case(static_cast<std::uint64_t>(seed));
    MatMulParams& p = c.p;
    const Bytes expected = poisoned(output_bytes(p));
    p.output = expected.get();
    matmul_reference(p);
    const Bytes actual = run_kernel(kernel, p, 1);
    const std::string what = std::string(kernel.name) + ", " + c.text;
    for (std::int64_t i = 0; i < p.num_rows * p.weights.rows; ++i) {
      const float got = load_element(actual.get(), i, p.activation_type);
      const float wanted = load_element(expected.get(), i, p.activation_type);
      const float allowed = allowed_error(p, i / p.weights.rows, i % p.weights.rows);
      CHECK(std::fabs(got - wanted) <= allowed, "%s: element %lld is %.9g, the reference says %.9g",
            what.c_str(), static_cast<long long>(i), static_cast<double>(got),
            static_cast<double>(wanted));
    }
    // Neither threads nor the other rows change a bit.
    CHECK(std::memcmp(run_kernel(kernel, p, 7).get(), actual.get(), output_bytes(p)) == 0,
          "%s: threads change the result", what.c_str());
    const std::int64_t row = p.num_rows - 1;
    const std::size_t row_bytes = output_bytes(p) / static_cast<std::size_t>(p.num_rows);
    p.num_rows = 1;
    p.a = c.a.get() + row * p.weights.columns * bytes_of(p.activation_type);
    CHECK(std::memcmp(run_kernel(kernel, p, 1).get(),
                      actual.get() + static_cast<std::size_t>(row) * row_bytes, row_bytes) == 0,
          "%s: the last row is another alone", what.c_str());
  }
  std::printf("%s: %d products agree with the reference\n", kernel.name, cases);
}

// A NaN or an infinity among a row's activations shows in its results, and in no other row.
void test_specials(const MatMulKernel& kernel) {
  for (const Rounding rounding : {Rounding::kNone, Rounding::kInt16, Rounding::kInt8}) {
    for (const int kind : {0, 1, 2, 3}) {
      const int bits = kind % 2 == 0 ? 4 : 8;
      const float special = kind < 2 ? NAN : INFINITY;
      Case c = make_case(1);
      MatMulParams& p = c.p;
      Random random(1);
      p = {};
      p.num_rows = 3;
      p.weights.rows = 5;
      p.weights.columns = 70;
      p.weights.bits = bits;
      p.rounding = rounding;
      const Bytes data = make_floats(random, 16 * 96, DataType::kFloat32, 0.0F, 1.0F);
      const Bytes scales = make_floats(random, 3 * 16, DataType::kFloat32, 1.0F, 0.1F);
      const Bytes a = make_floats(random, 210, DataType::kFloat32, 0.0F, 1.0F);
      store_element(a.get(), 70 + 40, DataType::kFloat32, special);
      p.weights.data = data.get();
      p.weights.scales = scales.get();
      p.a = a.get();
      const Bytes output = run_kernel(kernel, p, 1);
      for (std::int64_t i = 0; i < 15; ++i) {
        const bool is_finite = std::isfinite(load_element(output.get(), i, DataType::kFloat32));
        CHECK(is_finite == (i / 5 != 1), "%s: element %lld", kernel.name,
              static_cast<long long>(i));
      }
    }
  }
}

void test_gated_activation(const GatedActivationKernel& kernel) {
  int cases = 0;
  for (Activation activation :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu}) {
    for (DataType type : {DataType::kFloat32, DataType::kFloat16}) {
      for (std::int64_t size : {1, 3, 15, 16, 17, 33, 1000, 20000}) {
        Random random(static_cast<std::uint64_t>(size));
        GatedActivationParams p;
        p.num_rows = size > 1000 ? 2 : 3;
        p.size = size;
        p.activation = activation;
        p.type = type;
        const Bytes input = make_floats(random, p.num_rows * 2 * size, type, 0.0F, 3.0F);
        const auto bytes = static_cast<std::size_t>(p.num_rows * size * bytes_of(type));
        const Bytes expected = poisoned(bytes);
        const Bytes actual = poisoned(bytes);
        p.input = input.get();
        p.output = expected.get();
        gated_activation_reference(p);
        p.output = actual.get();
        kernel.run(p, ParallelFor{run_on_threads, nullptr, 7});
        check_close(actual.get(), expected.get(), p.num_rows * size, type,
                    type == DataType::kFloat32 ? 2e-6F : 2e-3F,
                    std::string(kernel.name) + ", activation " +
                        std::to_string(static_cast<int>(activation)));
        ++cases;
      }
    }
  }
  std::printf("%s: %d gated activations agree with the reference\n", kernel.name, cases);
}

void test_gather() {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const Case c = make_case(seed);
    const QuantizedMatrix& w = c.p.weights;
    Random random(seed);
    std::vector<std::int64_t> indices;
    for (int i = 0; i < 37; ++i) indices.push_back(random.below(w.rows));
    std::vector<float> actual(indices.size() * static_cast<std::size_t>(w.columns));
    gather_rows(w, indices.data(), 37, actual.data(), ParallelFor{run_on_threads, nullptr, 2});
    // Unit vectors times the weights are their columns.
    for (std::int64_t k = 0; k < w.columns; k += 1 + w.columns / 9) {
      std::vector<float> unit(static_cast<std::size_t>(w.columns));
      std::vector<float> column(static_cast<std::size_t>(w.rows));
      unit[static_cast<std::size_t>(k)] = 1.0F;
      MatMulParams p;
      p.weights = w;
      p.num_rows = 1;
      p.rounding = Rounding::kNone;
      p.a = unit.data();
      p.output = column.data();
      matmul_reference(p);
      for (std::size_t i = 0; i < indices.size(); ++i) {
        const float got =
            actual[i * static_cast<std::size_t>(w.columns) + static_cast<std::size_t>(k)];
        const float wanted = column[static_cast<std::size_t>(indices[i])];
        CHECK(std::fabs(got - wanted) <= 1e-5F * (1.0F + std::fabs(wanted)),
              "gather, %s: %.9g is not %.9g", c.text.c_str(), static_cast<double>(got),
              static_cast<double>(wanted));
      }
    }
  }
  std::printf("gathered rows are the weights\n");
}

}  // namespace
}  // namespace kvconv::test

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 250;
  kvconv::test::test_gather();
  for (const kvconv::MatMulKernel& kernel : kvconv::matmul_kernels()) {
    kvconv::test::test_specials(kernel);
    kvconv::test::test_matmul(kernel, cases);
  }
  for (const kvconv::GatedActivationKernel& kernel : kvconv::gated_activation_kernels()) {
    kvconv::test::test_gated_activation(kernel);
  }
  return 0;
}
