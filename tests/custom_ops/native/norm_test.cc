// The norms: every kernel against the reference, and a seeded fuzzer of the ops' faces under a fake
// ONNX Runtime: valid runs and runs with one thing wrong. Every run must end in a status that says
// something, with nothing made, or in the right result.
//
//   norm_test [first seed] [number of seeds]
#include "kvconv/norm.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "fake_ort.h"
#include "fuzz.h"
#include "op_support.h"
#include "threads.h"

namespace kvconv::test {
namespace {

constexpr float kFloatTolerance = 1e-5F;
// One rounding to float16, and the reference may have rounded a sum to the other neighbour.
constexpr float kHalfTolerance = 2e-3F;

float norm_tolerance(DataType type) {
  return type == DataType::kFloat32 ? kFloatTolerance : kHalfTolerance;
}

// Exactly so many elements on the heap, so that AddressSanitizer sees one too far.
class Elements {
 public:
  Elements(std::int64_t size, DataType type)
      : size_(size), type_(type), bytes_(static_cast<std::size_t>(size * bytes_of(type)), 0xFF) {}
  Elements(Random& random, std::int64_t size, DataType type, float factor, float centre = 0.0F)
      : Elements(size, type) {
    for (std::int64_t i = 0; i < size; ++i) set(i, centre + factor * random.normal());
  }

  void set(std::int64_t i, float value) { store_element(bytes_.data(), i, type_, value); }
  float get(std::int64_t i) const { return load_element(bytes_.data(), i, type_); }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  const void* at(std::int64_t i) const { return bytes_.data() + i * bytes_of(type_); }
  std::int64_t size() const { return size_; }

 private:
  std::int64_t size_;
  DataType type_;
  std::vector<unsigned char> bytes_;
};

// What a run leaves; a head norm has no sum.
struct Result {
  Elements output;
  Elements sum;
};

template <typename Run>
Result run_skip(SkipNormParams p, const Run& run) {
  Result result{Elements(p.num_rows * p.width, p.type), Elements(p.num_rows * p.width, p.type)};
  p.output = result.output.data();
  p.sum = result.sum.data();
  run(p);
  return result;
}

template <typename Run>
Elements run_head(HeadNormParams p, const Run& run) {
  Elements output(p.num_rows * p.width, p.type);
  p.output = output.data();
  run(p);
  return output;
}

void check_equal(const void* actual, const void* expected, std::int64_t bytes,
                 const std::string& what) {
  if (bytes == 0) return;  // nothing may have no address
  CHECK(std::memcmp(actual, expected, static_cast<std::size_t>(bytes)) == 0,
        "%s: not the same bits", what.c_str());
}

// A skip norm with random tensors; which optional ones there are follows from `seed`.
struct SkipCase {
  SkipCase(std::uint64_t seed, Norm norm, DataType type, std::int64_t num_rows, std::int64_t width,
           float factor)
      : random(seed),
        input(random, num_rows * width, type, factor),
        // A mean far from 0, which a norm that squares too early would drown in.
        skip(random, num_rows * width, type, factor, norm == Norm::kLayer ? 30 * factor : 0.0F),
        weight(random, width, type, 1.0F),
        bias(random, width, type, 1.0F),
        input_bias(random, width, type, factor),
        input_weight(random, width, type, 1.0F) {
    p.norm = norm;
    p.type = type;
    p.num_rows = num_rows;
    p.width = width;
    p.epsilon = random.chance(50) ? 1e-6F : 0.1F;
    p.input = input.data();
    p.skip = skip.data();
    p.weight = weight.data();
    if (norm == Norm::kLayer && random.chance(70)) p.bias = bias.data();
    if (random.chance(40)) p.input_bias = input_bias.data();
    if (random.chance(40)) p.input_weight = input_weight.data();
  }

  Random random;
  Elements input, skip, weight, bias, input_bias, input_weight;
  SkipNormParams p;
};

// Widths around vectors and strips of every build, rows around a task's 16384 elements, and rows
// wider than it.
void test_skip_norm(const NormKernel& kernel) {
  int cases = 0;
  for (Norm norm : {Norm::kRms, Norm::kLayer}) {
    for (DataType type : {DataType::kFloat32, DataType::kFloat16}) {
      for (std::int64_t width : {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 1000, 20000}) {
        const std::int64_t rows_per_task = std::max<std::int64_t>(1, 16384 / width);
        const std::int64_t many = std::min<std::int64_t>(2 * rows_per_task + 1, 1100);
        for (std::int64_t num_rows : {std::int64_t{1}, std::int64_t{2}, many}) {
          const float factor =
              type == DataType::kFloat16
                  ? 1.0F
                  : std::vector{1e-4F, 1.0F, 1e4F}[static_cast<std::size_t>(cases % 3)];
          const SkipCase c(static_cast<std::uint64_t>(cases), norm, type, num_rows, width, factor);
          const SkipNormParams& p = c.p;
          const std::string what = std::string(kernel.name) + ", skip norm " +
                                   std::to_string(cases) + ", " + std::to_string(num_rows) +
                                   " rows of " + std::to_string(width);
          const auto run_kernel = [&](const SkipNormParams& q, std::int64_t num_workers) {
            return run_skip(q, [&](const SkipNormParams& rows) {
              kernel.skip_norm(rows, ParallelFor{run_on_threads, nullptr, num_workers});
            });
          };
          const Result expected = run_skip(p, skip_norm_reference);
          const Result actual = run_kernel(p, 7);
          const std::int64_t size = num_rows * width;
          const std::int64_t bytes = bytes_of(type);
          // Relative to the numbers added, of which little may be left.
          const float scale = std::max(1.0F, 30 * factor);
          check_close(actual.sum.data(), expected.sum.data(), size, type,
                      norm_tolerance(type) * scale, what + ", sum");
          if (p.input_weight == nullptr && p.input_bias == nullptr) {
            check_equal(actual.sum.data(), expected.sum.data(), size * bytes, what + ", sum");
          }
          // Few numbers may all but cancel, and a rounding of their sum counts in full.
          if (width > 8) {
            const float noise = type == DataType::kFloat16 || norm == Norm::kLayer ? 10.0F : 1.0F;
            check_close(actual.output.data(), expected.output.data(), size, type,
                        norm_tolerance(type) * noise, what + ", output");
          }

          // Neither the number of threads nor the other rows change a bit.
          check_equal(run_kernel(p, 1).output.data(), actual.output.data(), size * bytes,
                      what + ", alone");
          SkipNormParams last = p;
          last.num_rows = 1;
          last.input = c.input.at(size - width);
          last.skip = c.skip.at(size - width);
          check_equal(run_kernel(last, 1).output.data(), actual.output.at(size - width),
                      width * bytes, what + ", last row");
          ++cases;
        }
      }
    }
  }
  std::printf("%s: %d skip norms agree with the reference\n", kernel.name, cases);
}

void test_head_norm(const NormKernel& kernel) {
  int cases = 0;
  for (DataType type : {DataType::kFloat32, DataType::kFloat16}) {
    for (std::int64_t head_dim : {1, 2, 8, 12, 16, 17, 64, 65, 128}) {
      for (std::int64_t rest : {std::int64_t{0}, std::int64_t{1}, head_dim, 2 * head_dim}) {
        Random random(static_cast<std::uint64_t>(cases));
        HeadNormParams p;
        p.type = type;
        p.num_heads = 1 + random.below(5);
        p.kv_num_heads = 1 + random.below(3);
        p.head_dim = head_dim;
        p.width = (p.num_heads + p.kv_num_heads) * head_dim + rest;
        p.num_rows = random.chance(30) ? 16384 / p.width + 2 : 1 + random.below(3);
        p.epsilon = 1e-3F;
        const Elements input(random, p.num_rows * p.width, type, 2.0F);
        const Elements query_weight(random, head_dim, type, 1.0F);
        const Elements key_weight(random, head_dim, type, 1.0F);
        p.input = input.data();
        p.query_weight = query_weight.data();
        p.key_weight = key_weight.data();
        const std::string what = std::string(kernel.name) + ", head norm " + std::to_string(cases);
        const auto run_kernel = [&](std::int64_t num_workers) {
          return run_head(p, [&](const HeadNormParams& rows) {
            kernel.head_norm(rows, ParallelFor{run_on_threads, nullptr, num_workers});
          });
        };
        const Elements expected = run_head(p, head_norm_reference);
        const Elements actual = run_kernel(5);
        check_close(actual.data(), expected.data(), expected.size(), type, norm_tolerance(type),
                    what);
        check_equal(run_kernel(1).data(), actual.data(), actual.size() * bytes_of(type),
                    what + ", alone");
        ++cases;
      }
    }
  }
  std::printf("%s: %d head norms agree with the reference\n", kernel.name, cases);
}

// What is not a number stays in its row, and shows there.
void test_specials(const NormKernel& kernel) {
  for (Norm norm : {Norm::kRms, Norm::kLayer}) {
    for (float special : {NAN, INFINITY}) {
      SkipCase c(1, norm, DataType::kFloat32, 3, 35, 1.0F);
      c.skip.set(35 + 33, special);
      const Result actual = run_skip(c.p, [&](const SkipNormParams& rows) {
        kernel.skip_norm(rows, ParallelFor{run_on_threads, nullptr, 2});
      });
      for (std::int64_t i = 0; i < 105; ++i) {
        const bool is_other_row = i / 35 != 1;
        CHECK(!is_other_row || std::isfinite(actual.output.get(i)), "element %d",
              static_cast<int>(i));
        CHECK(i != 35 + 33 || std::isnan(actual.output.get(i)), "element %d", static_cast<int>(i));
      }
    }
  }
}

// A node of one of the ops, and what a run of it is fed.
struct Run {
  FakeInfo attributes;
  std::string op;
  DataType type = DataType::kFloat32;
  std::vector<std::unique_ptr<FakeTensor>> inputs;
  std::size_t num_required = 3;
  bool is_valid = true;
};

Run make_run(Random& random) {
  Run run;
  run.op = random.pick<std::string>(
      {"SkipRMSNormalization", "SkipLayerNormalization", "HeadRMSNormalization"});
  run.type = random.chance(50) ? DataType::kFloat32 : DataType::kFloat16;
  std::vector<std::int64_t> shape;
  for (std::int64_t axis = random.below(4); axis > 0; --axis) shape.push_back(random.below(5));
  const auto add_input = [&](const std::vector<std::int64_t>& dims) {
    run.inputs.push_back(make_floats(random, element_type(run.type), dims));
  };
  if (random.chance(60)) run.attributes.floats["epsilon"] = 0.3F;
  if (run.op == "HeadRMSNormalization") {
    const std::int64_t head_dim = 1 + random.below(20);
    const std::int64_t heads = 1 + random.below(4);
    const std::int64_t kv_heads = 1 + random.below(3);
    run.attributes.ints["num_heads"] = heads;
    run.attributes.ints["kv_num_heads"] = kv_heads;
    shape.push_back((heads + kv_heads) * head_dim + random.below(9));
    add_input(shape);
    add_input({head_dim});
    add_input({head_dim});
    return run;
  }
  const std::vector<std::int64_t> edges = {0, 1, 2, 15, 16, 17, 33, 100};
  const std::int64_t width = random.pick(edges);
  shape.push_back(width);
  add_input(shape);
  add_input(shape);
  add_input({width});
  const int optional = run.op == "SkipLayerNormalization" ? 2 : 1;
  for (int i = 0; i < optional; ++i) {
    add_input({width});
    if (random.chance(40)) run.inputs.back().reset();
  }
  return run;
}

// Makes one thing about the inputs or attributes different.
void spoil(Random& random, Run& run) {
  run.is_valid = false;
  const bool is_head = run.op == "HeadRMSNormalization";
  if (random.chance(10)) {
    run.attributes.floats.clear();
    run.attributes.ints["epsilon"] = 1;
    return;
  }
  if (is_head && random.chance(30)) {
    run.attributes.ints[random.chance(50) ? "num_heads" : "kv_num_heads"] =
        random.pick<std::int64_t>({-1, 0, 1000, std::int64_t{1} << 62});
    return;
  }
  const auto index =
      static_cast<std::size_t>(random.below(static_cast<std::int64_t>(run.inputs.size())));
  std::unique_ptr<FakeTensor>& tensor = run.inputs[index];
  if (tensor == nullptr || (random.chance(20) && index < run.num_required)) {
    run.inputs[0].reset();
    return;
  }
  std::vector<std::int64_t> shape = tensor->shape;
  ort::ElementType type = element_type(run.type);
  switch (is_head && index == 0 ? 0 : random.below(4)) {
    case 0:
      type = random.pick<ort::ElementType>({ort::kBFloat16, ort::kInt8, ort::kInt64});
      break;
    case 1:
      shape.insert(shape.begin(), 1);
      break;
    case 2:
      shape.pop_back();
      break;
    default:
      std::int64_t& dim = pick_dim(random, shape);
      dim += dim == 0 || random.chance(50) ? 1 : -1;
  }
  replace(tensor, type, shape);
}

// What the reference makes of a valid run's inputs: output, and the sum where there is one.
std::vector<Elements> expected_of(const Run& run) {
  const FakeTensor& input = *run.inputs[0];
  const auto data = [&](std::size_t index) -> const void* {
    return run.inputs[index] == nullptr ? nullptr : run.inputs[index]->data.get();
  };
  const auto given = run.attributes.floats.find("epsilon");
  const float epsilon = given == run.attributes.floats.end() ? 1e-5F : given->second;
  const std::int64_t width = input.shape.back();
  const std::int64_t num_rows = width == 0 ? 0 : input.size() / width;
  if (run.op == "HeadRMSNormalization") {
    HeadNormParams p;
    p.num_rows = num_rows;
    p.width = width;
    p.num_heads = run.attributes.ints.at("num_heads");
    p.kv_num_heads = run.attributes.ints.at("kv_num_heads");
    p.head_dim = run.inputs[1]->shape[0];
    p.epsilon = epsilon;
    p.type = run.type;
    p.input = data(0);
    p.query_weight = data(1);
    p.key_weight = data(2);
    return {run_head(p, head_norm_reference)};
  }
  SkipNormParams p;
  p.norm = run.op == "SkipLayerNormalization" ? Norm::kLayer : Norm::kRms;
  p.num_rows = num_rows;
  p.width = width;
  p.epsilon = epsilon;
  p.type = run.type;
  p.input = data(0);
  p.skip = data(1);
  p.weight = data(2);
  p.bias = p.norm == Norm::kLayer ? data(3) : nullptr;
  p.input_bias = p.norm == Norm::kLayer ? data(4) : nullptr;
  p.input_weight = p.norm == Norm::kLayer ? nullptr : data(3);
  const Result result = run_skip(p, skip_norm_reference);
  return {result.output, result.sum};
}

// Returns whether the op accepted the run.
bool execute(std::uint64_t seed) {
  Random random(seed);
  Run run = make_run(random);
  if (random.chance(50)) spoil(random, run);
  const std::string what = "seed " + std::to_string(seed) + ", " + run.op;
  FakeContext context;
  for (const auto& input : run.inputs) context.inputs.push_back(input.get());
  const std::string message =
      run_node(find_op(run.op, {{0, element_type(run.type)}}), run.attributes, context, what);
  if (!message.empty()) {
    CHECK(!run.is_valid, "%s: a valid run was refused: %s", what.c_str(), message.c_str());
    CHECK(message.starts_with("kvconv::" + run.op + ": "), "%s: %s", what.c_str(), message.c_str());
    CHECK(context.made.empty(), "%s: a refused run made an output", what.c_str());
    return false;
  }

  // Whatever spoil() does is wrong, so what is accepted fits.
  CHECK(run.is_valid, "%s: a spoilt run was accepted", what.c_str());
  const FakeTensor& input = *run.inputs[0];
  const std::vector<Elements> expected = expected_of(run);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const FakeTensor& made = *context.outputs[i];
    CHECK(made.shape == input.shape, "%s: output %zu has shape %s, not %s", what.c_str(), i,
          shape_text(made.shape).c_str(), shape_text(input.shape).c_str());
    // A rounding of the sum counts in full where its few numbers all but cancel; epsilon is large
    // or the numbers are, unless the mean goes.
    check_close(made.data.get(), expected[i].data(), input.size(), run.type,
                20 * norm_tolerance(run.type), what);
  }
  return true;
}

}  // namespace
}  // namespace kvconv::test

int main(int argc, char** argv) {
  for (const kvconv::NormKernel& kernel : kvconv::norm_kernels()) {
    kvconv::test::test_skip_norm(kernel);
    kvconv::test::test_head_norm(kernel);
    kvconv::test::test_specials(kernel);
  }
  kvconv::test::fuzz(argc, argv, 1500, kvconv::test::execute);
}
