// Runs attention with a pack's kernels, on a stream of the caller's. Knows nothing of ONNX Runtime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kernel_pack.h"
#include "kvconv/attention.h"

namespace kvconv::cuda {

// One run on the device. Every pointer is device memory, and the lengths are known there alone:
// params.past_sequence_length is not read, and of the total no more than a least value is known.
struct Run {
  AttentionParams params;
  const std::int32_t* past_sequence_length = nullptr;  // [1]
  bool is_ring = false;
  void* stream = nullptr;
};

// Device memory for the time of a run: what is freed may be used by whatever the stream does next.
class Scratch {
 public:
  virtual ~Scratch() = default;
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void free(void* memory) noexcept = 0;
};

// How decode shares the slots of a cache out among programs.
struct Splits {
  std::int64_t count = 0;
  std::int64_t slots = 0;  // of each, a multiple of the kernel's tile
};

Splits split_slots(std::int64_t capacity, std::int64_t batch_times_heads, std::int64_t tile,
                   std::int64_t num_multiprocessors);

// A pack on a device. Kernels are loaded once per context, when they are first needed.
class Launcher {
 public:
  // The one launcher of a pack and a device, made by the first call; throws CudaError where the
  // pack is damaged, or there is no driver, or no such device.
  static std::shared_ptr<const Launcher> shared(std::span<const std::uint8_t> pack, int ordinal);

  Launcher(std::span<const std::uint8_t> pack, int ordinal);
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // Refuses where the device runs no kernel for these types, whatever the shapes.
  void require_types(DataType activation_type, DataType cache_type) const;

  // Appends the new tokens to the cache and attends; returns as soon as all of it is on the stream.
  // Everything is refused (CudaError) before anything is launched.
  void run(const Run& run, Scratch& scratch) const;

 private:
  class Loaded;

  KernelPack pack_;
  Device device_;
  std::int64_t num_multiprocessors_ = 0;
  int device_id_ = 0;
  std::unique_ptr<Loaded> loaded_;
};

}  // namespace kvconv::cuda
