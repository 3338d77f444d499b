// A seeded fuzzer of the op's face: valid runs and runs with one thing wrong, with zero lengths,
// full caches, huge heads, NaN and infinities. Every run must end in a status that says something,
// with nothing written, or in the reference kernel's result.
//
//   face_fuzz_test [first seed] [number of seeds]
#include <algorithm>
#include <cstring>
#include <limits>

#include "attention_op.h"
#include "check.h"
#include "fake_ort.h"
#include "fuzz.h"
#include "kvconv/cache_format.h"

namespace kvconv::test {
namespace {

constexpr std::int64_t kMaxWork = 2'000'000;  // multiplications of the reference, per run

struct Run {
  FakeInfo attributes;
  std::vector<std::unique_ptr<FakeTensor>> inputs{kNumAttentionInputs};
  DataType activation = DataType::kFloat32;
  DataType cache = DataType::kFloat32;
  bool in_place = false;
  bool is_valid = true;
};

// Fills a float tensor with random numbers, and rarely with what is not a number.
void randomize(Random& random, FakeTensor& tensor, bool has_specials) {
  for (std::int64_t i = 0; i < tensor.size(); ++i) {
    float value = random.normal();
    if (has_specials && random.chance(1)) {
      value = random.chance(50) ? std::numeric_limits<float>::quiet_NaN()
                                : std::numeric_limits<float>::infinity();
    }
    store_element(tensor.data.get(), i, data_type(tensor.type), value);
  }
}

// Fills a quantised cache with codes.
void randomize_codes(Random& random, FakeTensor& tensor) {
  for (std::int64_t i = 0; i < tensor.size(); ++i) {
    tensor.data[static_cast<std::size_t>(i)] = static_cast<unsigned char>(random.below(256));
  }
}

// A run in which everything fits.
Run make_run(Random& random) {
  Run run;
  const std::vector<std::int64_t> edges = {1, 1, 2, 3, 8, 16, 17, 33, 63, 64, 65};
  const std::int64_t batch = random.chance(4) ? 0 : 1 + random.below(3);
  const std::int64_t kv_heads = 1 + random.below(3);
  const std::int64_t heads = kv_heads * (1 + random.below(4));
  std::int64_t new_tokens = random.chance(6) ? 0 : random.chance(50) ? 1 : random.pick(edges);
  std::int64_t past = random.chance(25) ? 0 : random.pick(edges) * (1 + random.below(10));
  std::int64_t width = random.chance(2) ? 5000 : random.pick(edges);
  std::int64_t value_width = random.chance(2)    ? 4097
                             : random.chance(50) ? width
                                                 : random.pick(edges);
  run.cache = random.pick<DataType>({DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16,
                                     DataType::kInt8, DataType::kInt4});
  const bool is_packed = random.chance(30);
  if (is_packed && run.cache == DataType::kInt4) {  // whole groups only
    width = num_groups(width) * kGroupSize;
    value_width = num_groups(value_width) * kGroupSize;
  }
  while (batch * heads * new_tokens * (past + new_tokens) * (width + value_width) > kMaxWork) {
    new_tokens = (new_tokens + 1) / 2;
    if (new_tokens == 1) past /= 2;
  }
  const std::int64_t total = past + new_tokens;
  run.activation = random.chance(60) ? DataType::kFloat32 : DataType::kFloat16;
  const ort::ElementType activation = element_type(run.activation);
  const bool has_specials = random.chance(15);

  const auto add = [&](AttentionInput input, ort::ElementType type,
                       std::vector<std::int64_t> shape) -> FakeTensor& {
    run.inputs[input] = std::make_unique<FakeTensor>(type, std::move(shape));
    return *run.inputs[input];
  };
  const auto add_floats = [&](AttentionInput input, ort::ElementType type,
                              std::vector<std::int64_t> shape) {
    randomize(random, add(input, type, std::move(shape)), has_specials);
  };

  const bool ring = random.chance(20);
  const std::int64_t window = ring || random.chance(30) ? random.pick(edges) : 0;
  const bool gives_length = ring || random.chance(40);
  const bool concat = !gives_length && random.chance(40);
  const std::int64_t ring_slots = window + std::max<std::int64_t>(new_tokens, 1) - 1;
  const std::int64_t slots = ring ? std::min(ring_slots, total) : total;
  const std::int64_t capacity = concat ? past : slots + (random.chance(40) ? 0 : random.below(70));
  run.in_place = !concat && random.chance(60);
  if (is_packed) {
    add_floats(kQuery, activation,
               {batch, new_tokens, (heads + kv_heads) * width + kv_heads * value_width});
  } else {
    add_floats(kQuery, activation, {batch, new_tokens, heads * width});
    add_floats(kKey, activation, {batch, new_tokens, kv_heads * width});
    add_floats(kValue, activation, {batch, new_tokens, kv_heads * value_width});
  }
  const ort::ElementType cache = element_type(run.cache);
  const std::vector<std::int64_t> past_key = {batch, kv_heads, capacity,
                                              cache_row_size(key_type(run.cache), width)};
  const std::vector<std::int64_t> past_value = {batch, kv_heads, capacity,
                                                cache_row_size(run.cache, value_width)};
  if (is_quantized(run.cache)) {
    randomize_codes(random, add(kPastKey, cache, past_key));
    randomize_codes(random, add(kPastValue, cache, past_value));
    add_floats(kPastKeyScale, ort::kBFloat16, {batch, kv_heads, capacity, num_groups(width)});
    add_floats(kPastValueScale, ort::kBFloat16,
               {batch, kv_heads, capacity, num_groups(value_width)});
    const float factor = run.cache == DataType::kInt8 ? 1.0F / 127.0F : 1.0F / 16.0F;
    for (AttentionInput input : {kPastKeyScale, kPastValueScale}) {
      FakeTensor& scales = *run.inputs[input];
      for (std::int64_t i = 0; i < scales.size(); ++i) {
        const float scale = load_element(scales.data.get(), i, DataType::kBFloat16);
        // The op stores no infinite scales: they would be NaN.
        store_element(scales.data.get(), i, DataType::kBFloat16,
                      std::isinf(scale) ? std::numeric_limits<float>::quiet_NaN() : scale * factor);
      }
    }
  } else {
    add_floats(kPastKey, cache, past_key);
    add_floats(kPastValue, cache, past_value);
  }
  if (!gives_length || random.chance(50)) {
    const std::int64_t mask_width =
        gives_length && random.chance(50) ? std::max(capacity, total) : total;
    FakeTensor& mask = add(kAttentionMask, ort::kInt64, {batch, mask_width});
    const int percent = random.pick<int>({0, 0, 10, 90, 100});
    for (std::int64_t i = 0; i < mask.size(); ++i) {
      reinterpret_cast<std::int64_t*>(mask.data.get())[i] = random.chance(percent) ? 0 : 1;
    }
  }
  if (gives_length) {
    const auto length = static_cast<std::int32_t>(past);
    std::memcpy(add(kPastSequenceLength, ort::kInt32, {1}).data.get(), &length, sizeof(length));
  }
  if (width >= 2 && random.chance(30)) {
    const std::int64_t rotary_dim = 2 * (1 + random.below(width / 2));
    const std::int64_t tables = random.chance(50) ? 1 : batch;
    add_floats(kCos, ort::kFloat32, {tables, new_tokens, rotary_dim / 2});
    add_floats(kSin, ort::kFloat32, {tables, new_tokens, rotary_dim / 2});
    run.attributes.ints["rotary_dim"] = rotary_dim;
    run.attributes.ints["rotary_interleaved"] = random.below(2);
  }
  if (random.chance(25)) {
    std::vector<std::int64_t> shape = {batch, heads, new_tokens, total};
    for (std::int64_t& dim : shape) dim = random.chance(30) ? 1 : dim;
    shape.erase(shape.begin(), shape.begin() + random.below(5));
    add_floats(kAttentionBias, activation, shape);
  }
  if (random.chance(15)) {
    FakeTensor& slopes = add(kAlibiSlopes, ort::kFloat32, {heads});
    for (std::int64_t h = 0; h < heads; ++h) {  // small: e^-87 is 0 in float32 only
      reinterpret_cast<float*>(slopes.data.get())[h] = 0.01F * random.normal();
    }
  }
  if (random.chance(15)) add_floats(kHeadSink, ort::kFloat32, {heads});

  run.attributes.ints["num_heads"] = heads;
  run.attributes.ints["kv_num_heads"] = kv_heads;
  if (window > 0) {
    run.attributes.ints["window_size"] =
        !ring && random.chance(10) ? std::numeric_limits<std::int64_t>::max() : window;
  }
  if (ring) run.attributes.strings["cache_mode"] = "ring";
  if (random.chance(20)) run.attributes.ints["causal"] = 0;
  if (random.chance(20)) run.attributes.floats["softcap"] = 2.0F;
  if (random.chance(20)) run.attributes.floats["scale"] = 0.1F;
  return run;
}

// Makes one thing about the inputs or attributes different.
void spoil(Random& random, Run& run) {
  run.is_valid = false;
  if (random.chance(15)) {
    const char* name =
        random.pick<const char*>({"num_heads", "kv_num_heads", "window_size", "rotary_dim"});
    run.attributes.ints[name] = random.below(40) - 8;
    return;
  }
  spoil_tensor(random, pick_input(random, run.inputs));
}

std::vector<unsigned char> contents(const FakeTensor* tensor) {
  if (tensor == nullptr || tensor->data == nullptr) return {};
  return {tensor->data.get(), tensor->data.get() + tensor->bytes()};
}

// The reference kernel's outputs for what the op was given. Where the cache is quantised, attention
// is over what the op stored: a number between two codes may be rounded to either.
std::vector<std::unique_ptr<FakeTensor>> reference_outputs(const Run& run,
                                                           const FakeContext& context) {
  AttentionInputs inputs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    inputs[i] = read_input(fake_api(), reinterpret_cast<const ort::KernelContext*>(&context), i,
                           kAttentionInputNames[i]);
  }
  const auto attributes =
      read_attributes(fake_api(), reinterpret_cast<const ort::KernelInfo*>(&run.attributes));
  AttentionParams p = check_inputs(attributes, inputs, run.activation, run.cache, LengthsAt::kHost);
  std::vector<std::unique_ptr<FakeTensor>> outputs;
  for (const FakeTensor* made : context.outputs) {
    outputs.push_back(made == nullptr ? nullptr
                                      : std::make_unique<FakeTensor>(made->type, made->shape));
  }
  p.output = outputs[kOutput]->data.get();
  p.present_key = outputs[kPresentKey]->data.get();
  p.present_value = outputs[kPresentValue]->data.get();
  if (!is_quantized(run.cache)) {
    attention_reference(p);
    return outputs;
  }
  const auto scales = [](const FakeTensor& tensor) {
    return reinterpret_cast<std::uint16_t*>(tensor.data.get());
  };
  p.present_key_scale = scales(*outputs[kPresentKeyScale]);
  p.present_value_scale = scales(*outputs[kPresentValueScale]);
  append_reference(p);
  p.present_key = context.outputs[kPresentKey]->data.get();
  p.present_value = context.outputs[kPresentValue]->data.get();
  p.present_key_scale = scales(*context.outputs[kPresentKeyScale]);
  p.present_value_scale = scales(*context.outputs[kPresentValueScale]);
  attend_reference(p);
  return outputs;
}

// The same of a quantised cache: numbers may be a code apart.
void check_quantized_cache(const FakeTensor& actual, const FakeTensor& actual_scales,
                           const FakeTensor& expected, const FakeTensor& expected_scales,
                           std::int64_t used, std::int64_t width, DataType type,
                           const std::string& what) {
  const auto scales_of = [](const FakeTensor& tensor) {
    return reinterpret_cast<const std::uint16_t*>(tensor.data.get());
  };
  const std::int64_t capacity = actual.shape[2];
  for (std::int64_t row = 0; row < actual.shape[0] * actual.shape[1] * capacity; ++row) {
    if (row % capacity >= used) continue;
    for (std::int64_t h = 0; h < width; ++h) {
      const float a = load_number(type, actual.data.get(), scales_of(actual_scales), width, row, h);
      const float b =
          load_number(type, expected.data.get(), scales_of(expected_scales), width, row, h);
      const float scale =
          bfloat16_to_float(scales_of(expected_scales)[row * num_groups(width) + h / kGroupSize]);
      CHECK(
          a == b || (std::isnan(a) && std::isnan(b)) || std::fabs(a - b) <= std::fabs(scale) * 1.1F,
          "%s: number %d of row %d is %.9g, the reference says %.9g", what.c_str(),
          static_cast<int>(h), static_cast<int>(row), static_cast<double>(a),
          static_cast<double>(b));
    }
  }
}

// Compares one cache's rows below `used`; above, nothing may differ from `before`.
void check_cache(const FakeTensor& actual, const FakeTensor& expected, std::int64_t used,
                 const FakeTensor* before, DataType type, const std::string& what) {
  const std::int64_t row = actual.shape[3];
  const std::int64_t capacity = actual.shape[2];
  for (std::int64_t head = 0; head < actual.shape[0] * actual.shape[1]; ++head) {
    const std::int64_t start = head * capacity * row * bytes_of(type);
    check_close(actual.data.get() + start, expected.data.get() + start, used * row, type,
                tolerance_of(type), what);
    if (before == nullptr || used == capacity) continue;
    const std::int64_t skipped = start + used * row * bytes_of(type);
    CHECK(std::memcmp(actual.data.get() + skipped, before->data.get() + skipped,
                      static_cast<std::size_t>((capacity - used) * row * bytes_of(type))) == 0,
          "%s: a slot beyond the new tokens was written", what.c_str());
  }
}

// The head_dim of a run that was accepted.
std::int64_t width_of(const Run& run, const std::vector<std::unique_ptr<FakeTensor>>& inputs) {
  if (inputs[kKey] != nullptr)
    return inputs[kKey]->shape[2] / run.attributes.ints.at("kv_num_heads");
  const std::int64_t size = inputs[kPastKey]->shape[3];
  return run.cache == DataType::kInt4 ? size / row_bytes(DataType::kInt5, kGroupSize) * kGroupSize
                                      : size;
}

// Returns whether the op accepted the run.
bool execute(std::uint64_t seed) {
  Random random(seed);
  Run run = make_run(random);
  if (random.chance(50)) spoil(random, run);
  const std::string what = "seed " + std::to_string(seed);

  // 1. Run it, in place or not; keep copies of what it was given.
  FakeContext context;
  std::vector<std::unique_ptr<FakeTensor>> originals;
  for (const auto& input : run.inputs) {
    context.inputs.push_back(input.get());
    if (input == nullptr) {
      originals.push_back(nullptr);
      continue;
    }
    originals.push_back(std::make_unique<FakeTensor>(input->type, input->shape));
    if (input->bytes() > 0) {
      std::memcpy(originals.back()->data.get(), input->data.get(), input->bytes());
    }
  }
  if (run.in_place) {
    context.bound[kPresentKey] = run.inputs[kPastKey].get();
    context.bound[kPresentValue] = run.inputs[kPastValue].get();
    if (is_quantized(run.cache) && run.inputs[kPastKeyScale] && run.inputs[kPastValueScale]) {
      context.bound[kPresentKeyScale] = run.inputs[kPastKeyScale].get();
      context.bound[kPresentValueScale] = run.inputs[kPastValueScale].get();
    }
  }
  const ort::CustomOp& op = find_op("FlashAttention", {{kQuery, element_type(run.activation)},
                                                       {kPastKey, element_type(run.cache)}});
  const std::string message = run_node(op, run.attributes, context, what);

  // 2. A refusal wrote nothing.
  if (!message.empty()) {
    CHECK(!run.is_valid, "%s: a valid run was refused: %s", what.c_str(), message.c_str());
    for (std::size_t i = 0; i < run.inputs.size(); ++i) {
      CHECK(contents(run.inputs[i].get()) == contents(originals[i].get()),
            "%s: input %zu was changed by a refused run", what.c_str(), i);
    }
    return false;
  }

  // 3. Anything else is right.
  for (std::size_t i = 0; i < originals.size(); ++i) context.inputs[i] = originals[i].get();
  const auto expected = reference_outputs(run, context);
  const FakeTensor& output = *context.outputs[kOutput];
  // Rotated keys may be rounded to either neighbour; see attention_test.cc.
  const float tolerance = std::max(tolerance_of(run.activation),
                                   run.inputs[kCos] != nullptr ? tolerance_of(run.cache) : 0.0F);
  check_close(output.data.get(), expected[kOutput]->data.get(), output.size(), run.activation,
              tolerance, what + ", output");
  std::int64_t used = originals[kQuery]->shape[1];
  if (originals[kPastSequenceLength] != nullptr) {
    used += *reinterpret_cast<const std::int32_t*>(originals[kPastSequenceLength]->data.get());
  } else {
    used = originals[kAttentionMask]->shape[1];
  }
  if (is_quantized(run.cache)) {
    const std::int64_t heads = run.attributes.ints.at("num_heads");
    const std::int64_t value_width = output.shape[2] / heads;
    const std::int64_t width = width_of(run, originals);
    if (output.shape[0] == 0) return true;
    check_quantized_cache(*context.outputs[kPresentKey], *context.outputs[kPresentKeyScale],
                          *expected[kPresentKey], *expected[kPresentKeyScale], used, width,
                          key_type(run.cache), what + ", present_key");
    check_quantized_cache(*context.outputs[kPresentValue], *context.outputs[kPresentValueScale],
                          *expected[kPresentValue], *expected[kPresentValueScale], used,
                          value_width, run.cache, what + ", present_value");
    return true;
  }
  for (const auto& [present, past] :
       {std::pair{kPresentKey, kPastKey}, std::pair{kPresentValue, kPastValue}}) {
    if (context.outputs[present]->size() == 0) continue;
    const std::int64_t rows = std::min(used, context.outputs[present]->shape[2]);
    check_cache(*context.outputs[present], *expected[present], rows,
                run.in_place ? originals[past].get() : nullptr, run.cache, what + ", present");
  }
  return true;
}

}  // namespace
}  // namespace kvconv::test

int main(int argc, char** argv) { kvconv::test::fuzz(argc, argv, 2000, kvconv::test::execute); }
