// kvconv_kernels.bin: the CUDA kernels of a bundle, compiled ahead of time. Read and checked here
// as data, without CUDA; ARCHITECTURE.md has the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvconv/kernel.h"

namespace kvconv::cuda {

// A complaint of this folder's: about the pack, the driver, the GPU, or a run that they cannot do.
struct CudaError {
  std::string message;
};

[[noreturn]] inline void refuse(std::string message) { throw CudaError{std::move(message)}; }

enum class KernelKind : std::uint32_t { kAppend = 1, kPrefill = 2, kDecode = 3, kCombine = 4 };

enum class ImageFormat : std::uint32_t { kCubin = 1, kPtx = 2 };

// What a kernel was compiled to do, bits of Variant::features.
enum Feature : std::uint32_t {
  kRotary = 1,
  kRotaryInterleaved = 2,
  kMask = 4,
  kBias = 8,
  kAlibi = 16,
  kSink = 32,
  kSoftcap = 64,
  kWindow = 128,
  kRing = 256,
  kCausal = 512,
};

// The arguments that a kernel may take, each named in its entry, in its own order.
enum class Argument : std::uint8_t {
  // Pointers, 16-byte aligned but for the last of the inputs.
  kQuery = 1,
  kKey = 2,
  kValue = 3,
  kPresentKey = 4,
  kPresentValue = 5,
  kPresentKeyScale = 6,
  kPresentValueScale = 7,
  kAttentionMask = 8,
  kCos = 9,
  kSin = 10,
  kAttentionBias = 11,
  kAlibiSlopes = 12,
  kHeadSink = 13,
  kPastSequenceLength = 14,
  kOutput = 15,
  kPartialOutput = 16,
  kPartialMaximum = 17,
  kPartialSum = 18,
  // int32, multiples of 16.
  kQueryTokenStride = 32,
  kKeyTokenStride = 33,
  kValueTokenStride = 34,
  // int32.
  kSequenceLength = 40,
  kCapacity = 41,
  kMaskWidth = 42,
  kNumHeads = 43,
  kKvNumHeads = 44,
  kRotaryBatchStride = 45,
  kBiasStrideBatch = 46,
  kBiasStrideHead = 47,
  kBiasStrideQuery = 48,
  kBiasStrideSlot = 49,
  kWindowSize = 50,
  kNumSplits = 51,
  kSlotsPerSplit = 52,
  // float32.
  kScale = 64,
  kSoftcapValue = 65,
};

// What tells kernels apart. One serves a run only where all of it is equal.
struct Variant {
  KernelKind kind = KernelKind::kAppend;
  DataType activation_type = DataType::kFloat32;
  DataType cache_type = DataType::kFloat32;
  std::uint32_t head_dim = 0;
  std::uint32_t value_head_dim = 0;
  std::uint32_t group = 0;  // query heads of a key/value head
  std::uint32_t rotary_dim = 0;
  std::uint32_t features = 0;

  bool operator==(const Variant&) const = default;
};

// As complaints spell it: prefill float16, cache int8, head_dim 64, ...
std::string variant_text(const Variant& variant);

struct Kernel {
  Variant variant;
  ImageFormat format = ImageFormat::kCubin;
  int compute_capability = 0;  // 86 = 8.6; the least that runs PTX
  unsigned num_warps = 0;
  unsigned shared_bytes = 0;
  unsigned tile_m = 0;  // new tokens of a program
  unsigned tile_n = 0;  // slots of a step
  std::string function;
  std::vector<Argument> arguments;
  std::span<const std::uint8_t> image;  // PTX: text with its final zero
};

// The device that kernels are chosen for.
struct Device {
  int compute_capability = 0;
  unsigned max_shared_bytes = 0;  // of a block, at most
};

// 86 is 8.6.
std::string capability_text(int capability);

// What helps where the pack has no kernel for a device.
std::string remedy(const Device& device);

class KernelPack {
 public:
  // Copies and checks the whole file; throws CudaError where anything is not as it was written.
  explicit KernelPack(std::span<const std::uint8_t> file);

  bool is_copy_of(std::span<const std::uint8_t> file) const;

  const std::vector<Kernel>& kernels() const { return kernels_; }

  // Whether a device runs a kernel at all.
  static bool runs_on(const Kernel& kernel, const Device& device);

  // The index of the best kernel: compiled for the device or an older one of its kind, else PTX.
  // Throws CudaError, naming what was looked for and what there is.
  std::size_t find(const Variant& variant, const Device& device) const;

  // The GPUs of the pack, for complaints: sm_80, sm_90, PTX from 8.0.
  std::string gpus_text() const;

 private:
  std::vector<std::uint8_t> file_;
  std::vector<Kernel> kernels_;
};

}  // namespace kvconv::cuda
