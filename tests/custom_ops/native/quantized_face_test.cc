// A seeded fuzzer of the faces of MatMulNBits and GatherBlockQuantized under a fake ONNX Runtime:
// valid runs and runs with one thing wrong. Every run must end in a status that says something,
// with nothing made, or in the right result.
//
//   quantized_face_test [first seed] [number of seeds]
#include <algorithm>
#include <cstring>

#include "check.h"
#include "fake_ort.h"
#include "fuzz.h"
#include "kvconv/quantized.h"
#include "quantized_check.h"

namespace kvconv::test {
namespace {

struct Run {
  bool is_product = true;  // else a gather
  FakeInfo attributes;
  std::vector<std::unique_ptr<FakeTensor>> inputs;
  ort::ElementType activation = ort::kFloat32;
  ort::ElementType scale = ort::kFloat32;
  bool is_valid = true;
};

Run make_run(Random& random) {
  Run run;
  run.is_product = random.chance(60);
  run.activation = random.chance(60) ? ort::kFloat32 : ort::kFloat16;
  run.scale = random.chance(50) ? ort::kFloat32 : ort::kFloat16;
  const std::vector<std::int64_t> edges = {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100};
  const std::int64_t rows = random.pick(edges);
  const std::int64_t columns = random.pick(edges) * (1 + random.below(3));
  const std::int64_t bits = random.chance(50) ? 4 : 8;
  const std::int64_t block_size = random.pick<std::int64_t>({16, 32, 64, 128, 256});
  const std::int64_t blocks = (columns + block_size - 1) / block_size;
  const std::int64_t groups = (rows + 15) / 16;
  run.attributes.ints = {{"K", columns}, {"N", rows}, {"bits", bits}, {"block_size", block_size}};

  auto data = std::make_unique<FakeTensor>(
      ort::kUInt8, std::vector<std::int64_t>{groups, blocks * block_size * bits / 32, 16, 4});
  for (std::int64_t i = 0; i < data->size(); ++i) {
    data->data[i] = static_cast<unsigned char>(random.below(256));
  }
  std::vector<std::int64_t> leading;
  for (std::int64_t axis = random.below(4); axis > 0; --axis) leading.push_back(random.below(5));
  auto scales = make_floats(random, run.scale, {groups, blocks, 16});
  std::unique_ptr<FakeTensor> zero_points;
  if (random.chance(40)) zero_points = make_floats(random, run.scale, {groups, blocks, 16});
  if (run.is_product) {
    const std::int64_t level = random.pick<std::int64_t>({0, 1, 2, 4});
    if (level != 0) run.attributes.ints["accuracy_level"] = level;
    leading.push_back(columns);
    run.inputs.resize(kNumMatMulInputs);
    run.inputs[kMatMulA] = make_floats(random, run.activation, leading);
    run.inputs[kMatMulB] = std::move(data);
    run.inputs[kMatMulScales] = std::move(scales);
    run.inputs[kMatMulZeroPoints] = std::move(zero_points);
    if (random.chance(40)) run.inputs[kMatMulBias] = make_floats(random, run.activation, {rows});
  } else {
    auto indices = std::make_unique<FakeTensor>(ort::kInt64, leading);
    for (std::int64_t i = 0; i < indices->size(); ++i) {
      reinterpret_cast<std::int64_t*>(indices->data.get())[i] = random.below(2 * rows) - rows;
    }
    run.inputs.resize(kNumGatherInputs);
    run.inputs[kGatherData] = std::move(data);
    run.inputs[kGatherIndices] = std::move(indices);
    run.inputs[kGatherScales] = std::move(scales);
    run.inputs[kGatherZeroPoints] = std::move(zero_points);
  }
  return run;
}

// Makes one thing about the inputs or attributes different; what was random before stays.
void spoil(Random& random, Run& run) {
  run.is_valid = false;
  if (random.chance(25)) {
    const char* name = random.pick<const char*>({"K", "N", "bits", "block_size"});
    run.attributes.ints[name] = random.chance(5) ? INT32_MAX : random.below(300) - 20;
    return;
  }
  std::unique_ptr<FakeTensor>& tensor = pick_input(random, run.inputs);
  if (!run.is_product && tensor == run.inputs[kGatherIndices] && tensor->size() > 0) {
    reinterpret_cast<std::int64_t*>(tensor->data.get())[0] = 1000 * (random.below(2) * 2 - 1);
    return;
  }
  spoil_tensor(random, tensor);
}

const ort::CustomOp& op_for(const Run& run) {
  if (!run.is_product) return find_op("GatherBlockQuantized", {{kGatherScales, run.scale}});
  return find_op("MatMulNBits", {{kMatMulA, run.activation}, {kMatMulScales, run.scale}});
}

QuantizedMatrix matrix_of(const Run& run) {
  const std::size_t scales = run.is_product ? std::size_t{kMatMulScales} : kGatherScales;
  const std::size_t zeros = run.is_product ? std::size_t{kMatMulZeroPoints} : kGatherZeroPoints;
  const FakeTensor& data = *run.inputs[run.is_product ? std::size_t{kMatMulB} : kGatherData];
  QuantizedMatrix w;
  w.rows = run.attributes.ints.at("N");
  w.columns = run.attributes.ints.at("K");
  w.bits = static_cast<int>(run.attributes.ints.at("bits"));
  w.block_size = run.attributes.ints.at("block_size");
  w.scale_type = data_type(run.scale);
  w.data = data.data.get();
  w.scales = run.inputs[scales]->data.get();
  w.zero_points = run.inputs[zeros] == nullptr ? nullptr : run.inputs[zeros]->data.get();
  return w;
}

void check_product(const Run& run, const FakeTensor& output, const std::string& what) {
  const FakeTensor& a = *run.inputs[kMatMulA];
  MatMulParams p;
  p.weights = matrix_of(run);
  p.num_rows = a.size() / p.weights.columns;
  p.activation_type = data_type(run.activation);
  const auto level = run.attributes.ints.find("accuracy_level");
  p.rounding = level == run.attributes.ints.end() || level->second == 2 ? Rounding::kInt16
               : level->second == 1                                     ? Rounding::kNone
                                                                        : Rounding::kInt8;
  p.a = a.data.get();
  if (run.inputs[kMatMulBias] != nullptr) p.bias = run.inputs[kMatMulBias]->data.get();
  FakeTensor expected(output.type, output.shape);
  p.output = expected.data.get();
  matmul_reference(p);
  float largest = 1.0F;  // what rounds is a sum of large numbers
  for (std::int64_t i = 0; i < output.size(); ++i) {
    largest = std::max(largest, std::fabs(load_element(p.output, i, p.activation_type)));
  }
  for (std::int64_t i = 0; i < output.size(); ++i) {
    const float got = load_element(output.data.get(), i, p.activation_type);
    const float wanted = load_element(expected.data.get(), i, p.activation_type);
    if (got == wanted) continue;  // infinities of float16
    const float relative = p.activation_type == DataType::kFloat32 ? 1e-4F : 4e-3F;
    CHECK(std::fabs(got - wanted) <= relative * largest, "%s: %.9g, the reference says %.9g",
          what.c_str(), static_cast<double>(got), static_cast<double>(wanted));
  }
}

void check_gather(const Run& run, const FakeTensor& output, const std::string& what) {
  const QuantizedMatrix w = matrix_of(run);
  const FakeTensor& indices = *run.inputs[kGatherIndices];
  std::vector<float> expected(static_cast<std::size_t>(w.columns));
  for (std::int64_t i = 0; i < indices.size(); ++i) {
    std::int64_t row = reinterpret_cast<const std::int64_t*>(indices.data.get())[i];
    row += row < 0 ? w.rows : 0;
    gather_rows(w, &row, 1, expected.data(), ParallelFor{});
    CHECK(std::memcmp(output.data.get() + i * w.columns * 4, expected.data(),
                      static_cast<std::size_t>(w.columns) * 4) == 0,
          "%s: row %lld differs", what.c_str(), static_cast<long long>(i));
  }
}

// Returns whether the op accepted the run.
bool execute(std::uint64_t seed) {
  Random random(seed);
  Run run = make_run(random);
  if (random.chance(50)) spoil(random, run);
  // Constants are read when the node is made; a run must not need them again.
  const bool has_constants = random.chance(50);
  const std::size_t varying = run.is_product ? std::size_t{kMatMulA} : kGatherIndices;
  if (has_constants) {
    for (const auto& input : run.inputs) run.attributes.constants.push_back(input.get());
    run.attributes.constants[varying] = nullptr;
  }
  const std::string what = "seed " + std::to_string(seed);
  FakeContext context;
  for (std::size_t i = 0; i < run.inputs.size(); ++i) {
    context.inputs.push_back(has_constants && i != varying ? nullptr : run.inputs[i].get());
  }
  const std::string message = run_node(op_for(run), run.attributes, context, what);
  if (!message.empty()) {
    CHECK(!run.is_valid, "%s: a valid run was refused: %s", what.c_str(), message.c_str());
    CHECK(context.made.empty(), "%s: a refused run made an output", what.c_str());
    return false;
  }
  if (run.is_product) {
    check_product(run, *context.outputs[0], what);
  } else {
    check_gather(run, *context.outputs[0], what);
  }
  return true;
}

}  // namespace
}  // namespace kvconv::test

int main(int argc, char** argv) { kvconv::test::fuzz(argc, argv, 1000, kvconv::test::execute); }
