// The values that kernels are launched with.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernel_pack.h"
#include "launcher.h"

namespace kvconv::cuda {

// What decode leaves for combine: float32, num_splits times that of the whole batch.
struct Partials {
  float* output = nullptr;   // [num_splits, B, N, Hv]
  float* maximum = nullptr;  // [num_splits, B, N]
  float* sum = nullptr;      // [num_splits, B, N]
};

// A kernel's arguments in the form in which the driver takes them: a pointer to each value.
class PackedArguments {
 public:
  // Throws CudaError, naming the argument, where a value is not what kernels were compiled for:
  // out of int32, or no multiple of 16.
  PackedArguments(const Kernel& kernel, const Run& run, const Splits& splits,
                  const Partials& partials);
  PackedArguments(const PackedArguments&) = delete;
  PackedArguments& operator=(const PackedArguments&) = delete;

  void** pointers() { return pointers_.data(); }

 private:
  // Triton's kernels take two more pointers, both null: scratch memory that ours do not use.
  static constexpr std::size_t kMax = 64 + 2;

  std::array<std::uint64_t, kMax> values_{};
  std::array<void*, kMax> pointers_{};
};

}  // namespace kvconv::cuda
