// What the fuzzers of the ops' faces share.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "fake_ort.h"
#include "op_support.h"

namespace kvconv::test {

inline std::unique_ptr<FakeTensor> make_floats(Random& random, ort::ElementType type,
                                               const std::vector<std::int64_t>& shape) {
  auto tensor = std::make_unique<FakeTensor>(type, shape);
  for (std::int64_t i = 0; i < tensor->size(); ++i) {
    store_element(tensor->data.get(), i, data_type(type), random.normal());
  }
  return tensor;
}

// One of the inputs that are there.
inline std::unique_ptr<FakeTensor>& pick_input(Random& random,
                                               std::vector<std::unique_ptr<FakeTensor>>& inputs) {
  std::vector<std::size_t> present;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i] != nullptr) present.push_back(i);
  }
  return inputs[random.pick(present)];
}

// One of the dimensions of a shape that has some.
inline std::int64_t& pick_dim(Random& random, std::vector<std::int64_t>& shape) {
  return shape[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(shape.size())))];
}

// Replaces a tensor by one of another shape or type, keeping what fits of its contents.
inline void replace(std::unique_ptr<FakeTensor>& tensor, ort::ElementType type,
                    const std::vector<std::int64_t>& shape) {
  auto changed = std::make_unique<FakeTensor>(type, shape);
  const std::size_t kept = std::min(changed->bytes(), tensor->bytes());
  if (kept > 0) std::memcpy(changed->data.get(), tensor->data.get(), kept);
  if (changed->bytes() > kept) std::memset(changed->data.get() + kept, 0, changed->bytes() - kept);
  tensor = std::move(changed);
}

// Takes a tensor away, or gives it another type or shape.
inline void spoil_tensor(Random& random, std::unique_ptr<FakeTensor>& tensor) {
  std::vector<std::int64_t> shape = tensor->shape;
  ort::ElementType type = tensor->type;
  switch (random.below(6)) {
    case 0:
      tensor.reset();
      return;
    case 1:
      type = random.pick<ort::ElementType>({ort::kFloat32, ort::kInt8, ort::kInt64});
      break;
    case 2:
      shape.push_back(1);
      break;
    case 3:
      if (!shape.empty()) shape.pop_back();
      break;
    default:
      if (shape.empty()) break;
      std::int64_t& dim = pick_dim(random, shape);
      dim = std::max<std::int64_t>(0, random.chance(25) ? 0 : dim + random.below(5) - 2);
  }
  replace(tensor, type, shape);
}

// Executes runs [first seed] to [first seed] + [number of seeds], the arguments of a test;
// execute(seed) returns whether the op accepted the run, and ends the test where it was wrong to.
inline void fuzz(int argc, char** argv, std::uint64_t default_count,
                 bool (*execute)(std::uint64_t seed)) {
  const std::uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const std::uint64_t count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : default_count;
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

}  // namespace kvconv::test
