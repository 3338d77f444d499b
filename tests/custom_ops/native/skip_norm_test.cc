// kvconv::SkipRMSNormalization: the kernel against float64, and a seeded fuzzer of the op's face
// under a fake ONNX Runtime: valid runs and runs with one thing wrong. Every run must end in a
// status that says something, with nothing made, or in the right result.
//
//   skip_norm_test [first seed] [number of seeds]
#include "kvconv/skip_norm.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "fake_ort.h"
#include "op_support.h"
#include "threads.h"

namespace kvconv::test {
namespace {

constexpr float kTolerance = 1e-5F;

// Plain double arithmetic, one row after the other.
void reference(const SkipNormParams& p) {
  for (std::int64_t row = 0; row < p.num_rows; ++row) {
    const std::int64_t start = row * p.width;
    double squares = 0.0;
    for (std::int64_t i = 0; i < p.width; ++i) {
      p.sum[start + i] = p.input[start + i] + p.skip[start + i];
      squares += static_cast<double>(p.sum[start + i]) * static_cast<double>(p.sum[start + i]);
    }
    const double mean = squares / static_cast<double>(p.width);
    const double root = std::sqrt(mean + static_cast<double>(p.epsilon));
    for (std::int64_t i = 0; i < p.width; ++i) {
      p.output[start + i] = static_cast<float>(static_cast<double>(p.sum[start + i]) / root *
                                               static_cast<double>(p.weight[i]));
    }
  }
}

// Exactly so many floats on the heap, so that AddressSanitizer sees one too far.
std::vector<float> random_floats(Random& random, std::int64_t size, float factor) {
  std::vector<float> values(static_cast<std::size_t>(size));
  for (float& value : values) value = factor * random.normal();
  return values;
}

struct Result {
  explicit Result(const SkipNormParams& p)
      : output(static_cast<std::size_t>(p.num_rows * p.width), NAN), sum(output) {}
  std::vector<float> output;
  std::vector<float> sum;
};

template <typename Run>
Result run_rows(SkipNormParams p, const Run& run) {
  Result result(p);
  p.output = result.output.data();
  p.sum = result.sum.data();
  run(p);
  return result;
}

Result run_kernel(const SkipNormParams& p, std::int64_t num_workers) {
  return run_rows(p, [&](const SkipNormParams& rows) {
    skip_norm(rows, ParallelFor{run_on_threads, nullptr, num_workers});
  });
}

void check_equal(const float* actual, const float* expected, std::int64_t size,
                 const std::string& what) {
  if (size == 0) return;  // nothing may have no address
  CHECK(std::memcmp(actual, expected, static_cast<std::size_t>(size) * sizeof(float)) == 0,
        "%s: not the same bits", what.c_str());
}

// Widths around the lanes of the sum, rows around a task's 16384 elements, and rows wider than it.
void test_kernel() {
  int cases = 0;
  for (std::int64_t width : {1, 2, 15, 16, 17, 31, 32, 33, 576, 1000, 16384, 20000}) {
    const std::int64_t rows_per_task = std::max<std::int64_t>(1, 16384 / width);
    for (std::int64_t num_rows :
         {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, rows_per_task - 1, rows_per_task,
          rows_per_task + 1, 2 * rows_per_task + 1}) {
      for (float factor : {1e-4F, 1.0F, 1e4F}) {
        Random random(static_cast<std::uint64_t>(cases));
        SkipNormParams p;
        p.num_rows = num_rows;
        p.width = width;
        p.epsilon = random.chance(50) ? 1e-6F : 0.1F;
        const std::vector<float> input = random_floats(random, num_rows * width, factor);
        const std::vector<float> skip = random_floats(random, num_rows * width, factor);
        const std::vector<float> weight = random_floats(random, width, 1.0F);
        p.input = input.data();
        p.skip = skip.data();
        p.weight = weight.data();
        const std::string what = "skip_norm, " + std::to_string(num_rows) + " rows of " +
                                 std::to_string(width) + ", times " + std::to_string(factor);

        const Result expected = run_rows(p, reference);
        const Result actual = run_kernel(p, 7);
        const std::int64_t size = num_rows * width;
        check_equal(actual.sum.data(), expected.sum.data(), size, what + ", sum");
        check_close(actual.output.data(), expected.output.data(), size, DataType::kFloat32,
                    kTolerance, what + ", output");

        // Neither the number of threads nor the other rows change a bit.
        check_equal(run_kernel(p, 1).output.data(), actual.output.data(), size, what + ", alone");
        if (num_rows > 0) {
          const std::int64_t start = (num_rows - 1) * width;
          SkipNormParams last = p;
          last.num_rows = 1;
          last.input += start;
          last.skip += start;
          check_equal(run_kernel(last, 1).output.data(), actual.output.data() + start, width,
                      what + ", last row");
        }
        ++cases;
      }
    }
  }
  std::printf("skip_norm: %d cases agree with the reference\n", cases);
}

// What is not a number stays in its row, and shows there.
void test_specials() {
  for (float special : {NAN, INFINITY}) {
    Random random(1);
    SkipNormParams p;
    p.num_rows = 3;
    p.width = 35;
    p.epsilon = 1e-5F;
    const std::vector<float> input = random_floats(random, 105, 1.0F);
    std::vector<float> skip = random_floats(random, 105, 1.0F);
    const std::vector<float> weight = random_floats(random, 35, 1.0F);
    skip[35 + 33] = special;
    p.input = input.data();
    p.skip = skip.data();
    p.weight = weight.data();
    const Result expected = run_rows(p, reference);
    const Result actual = run_kernel(p, 2);
    check_close(actual.output.data(), expected.output.data(), 105, DataType::kFloat32, kTolerance,
                "skip_norm of what is not a number");
    for (std::size_t i = 0; i < 105; ++i) {
      const bool is_other_row = i / 35 != 1;
      CHECK(!is_other_row || std::isfinite(actual.output[i]), "element %zu", i);
      CHECK(i != 35 + 33 || std::isnan(actual.output[i]), "element %zu", i);
    }
  }
}

enum Input : std::size_t { kInput, kSkip, kWeight, kNumInputs };

struct Run {
  FakeInfo attributes;
  std::vector<std::unique_ptr<FakeTensor>> inputs{kNumInputs};
  bool is_valid = true;
};

Run make_run(Random& random) {
  Run run;
  const std::vector<std::int64_t> edges = {0, 1, 2, 15, 16, 17, 33, 100};
  std::vector<std::int64_t> shape;
  for (std::int64_t axis = random.below(4); axis > 0; --axis) shape.push_back(random.below(5));
  const std::int64_t width = random.pick(edges);
  shape.push_back(width);
  run.inputs[kInput] = std::make_unique<FakeTensor>(ort::kFloat32, shape);
  run.inputs[kSkip] = std::make_unique<FakeTensor>(ort::kFloat32, shape);
  run.inputs[kWeight] =
      std::make_unique<FakeTensor>(ort::kFloat32, std::vector<std::int64_t>{width});
  for (const auto& tensor : run.inputs) {
    for (std::int64_t i = 0; i < tensor->size(); ++i) {
      store_element(tensor->data.get(), i, DataType::kFloat32, random.normal());
    }
  }
  if (random.chance(60)) run.attributes.floats["epsilon"] = 0.3F;
  return run;
}

// Makes one thing about the inputs or attributes different.
void spoil(Random& random, Run& run) {
  run.is_valid = false;
  if (random.chance(10)) {
    run.attributes.floats.clear();
    run.attributes.ints["epsilon"] = 1;
    return;
  }
  std::unique_ptr<FakeTensor>& tensor =
      run.inputs[static_cast<std::size_t>(random.below(kNumInputs))];
  std::vector<std::int64_t> shape = tensor->shape;
  ort::ElementType type = ort::kFloat32;
  switch (random.below(5)) {
    case 0:
      tensor.reset();
      return;
    case 1:
      type = random.pick<ort::ElementType>({ort::kFloat16, ort::kInt8, ort::kInt64});
      break;
    case 2:
      shape.insert(shape.begin(), 1);
      break;
    case 3:
      shape.pop_back();
      break;
    default:
      std::int64_t& dim =
          shape[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(shape.size())))];
      dim += dim == 0 || random.chance(50) ? 1 : -1;
  }
  tensor = std::make_unique<FakeTensor>(type, shape);
  if (tensor->bytes() > 0) std::memset(tensor->data.get(), 0, tensor->bytes());
}

const ort::CustomOp& skip_norm_op() {
  for (const ort::CustomOp* op : registered_ops()) {
    if (op->get_name(op) == std::string("SkipRMSNormalization")) return *op;
  }
  CHECK(false, "SkipRMSNormalization is not registered");
  std::abort();
}

// Returns whether the op accepted the run.
bool execute(std::uint64_t seed) {
  Random random(seed);
  Run run = make_run(random);
  if (random.chance(50)) spoil(random, run);
  const std::string what = "seed " + std::to_string(seed);
  const std::int64_t live = num_live_objects();

  const ort::CustomOp& op = skip_norm_op();
  void* node = nullptr;
  FakeContext context;
  context.types = {ort::kFloat32, ort::kFloat32};
  context.bound.resize(2);
  context.outputs.resize(2);
  for (const auto& input : run.inputs) context.inputs.push_back(input.get());
  std::string message = take_message(op.create_kernel_v2(
      &op, fake_api(), reinterpret_cast<const ort::KernelInfo*>(&run.attributes), &node));
  if (message.empty()) {
    message =
        take_message(op.kernel_compute_v2(node, reinterpret_cast<ort::KernelContext*>(&context)));
    op.kernel_destroy(node);
  }
  CHECK(num_live_objects() == live, "%s: an object of ONNX Runtime was not freed", what.c_str());
  if (!message.empty()) {
    CHECK(!run.is_valid, "%s: a valid run was refused: %s", what.c_str(), message.c_str());
    CHECK(message.starts_with("kvconv::SkipRMSNormalization: "), "%s: %s", what.c_str(),
          message.c_str());
    CHECK(context.made.empty(), "%s: a refused run made an output", what.c_str());
    return false;
  }

  // Whatever spoil() does is wrong, so what is accepted fits.
  CHECK(run.is_valid, "%s: a spoilt run was accepted", what.c_str());
  const FakeTensor& input = *run.inputs[kInput];
  SkipNormParams p;
  p.width = input.shape.back();
  p.num_rows = p.width == 0 ? 0 : input.size() / p.width;
  const auto epsilon = run.attributes.floats.find("epsilon");
  p.epsilon = epsilon == run.attributes.floats.end() ? 1e-5F : epsilon->second;
  p.input = reinterpret_cast<const float*>(input.data.get());
  p.skip = reinterpret_cast<const float*>(run.inputs[kSkip]->data.get());
  p.weight = reinterpret_cast<const float*>(run.inputs[kWeight]->data.get());
  const Result expected = run_rows(p, reference);
  for (std::size_t i : {0, 1}) {
    const FakeTensor& made = *context.outputs[i];
    CHECK(made.shape == input.shape, "%s: output %zu has shape %s, not %s", what.c_str(), i,
          shape_text(made.shape).c_str(), shape_text(input.shape).c_str());
    check_close(made.data.get(), (i == 0 ? expected.output : expected.sum).data(), input.size(),
                DataType::kFloat32, kTolerance, what);
  }
  return true;
}

void fuzz_face(std::uint64_t first, std::uint64_t count) {
  std::uint64_t accepted = 0;
  for (std::uint64_t seed = first; seed < first + count; ++seed) accepted += execute(seed) ? 1 : 0;
  // A fuzzer whose every run is refused tests nothing.
  CHECK(count < 100 || (accepted > count / 3 && accepted < count),
        "%llu of %llu runs were accepted", static_cast<unsigned long long>(accepted),
        static_cast<unsigned long long>(count));
  std::printf("%llu runs: %llu right results, %llu refusals\n",
              static_cast<unsigned long long>(count), static_cast<unsigned long long>(accepted),
              static_cast<unsigned long long>(count - accepted));
}

}  // namespace
}  // namespace kvconv::test

int main(int argc, char** argv) {
  kvconv::test::test_kernel();
  kvconv::test::test_specials();
  kvconv::test::fuzz_face(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0,
                          argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1000);
  return 0;
}
