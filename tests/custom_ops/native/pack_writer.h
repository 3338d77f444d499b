// Writes kernel packs for tests, from the format as ARCHITECTURE.md has it. Images are PTX that
// declares a kernel's parameters and does nothing.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/kernel_pack.h"
#include "cuda/sha256.h"

namespace kvconv::test {

struct PackedKernel {
  cuda::Variant variant;
  cuda::ImageFormat format = cuda::ImageFormat::kPtx;
  std::uint32_t compute_capability = 80;
  std::uint32_t num_warps = 4;
  std::uint32_t shared_bytes = 1024;
  std::uint32_t tile_m = 64;
  std::uint32_t tile_n = 32;
  std::string function = "kernel";
  std::vector<cuda::Argument> arguments;
};

inline std::string ptx_of(const PackedKernel& kernel) {
  std::string text = "//\n.visible .entry " + kernel.function + "(\n";
  std::size_t index = 0;
  const auto add = [&](const char* type) {
    text +=
        (index == 0 ? "" : ",\n") + std::string("  .param .") + type + " p" + std::to_string(index);
    ++index;
  };
  for (cuda::Argument argument : kernel.arguments) {
    const int id = static_cast<int>(argument);
    add(id < 32 ? "u64" : id < 64 ? "u32" : "f32");
  }
  add("u64");  // Triton's two
  add("u64");
  return text + "\n)\n.reqntid " + std::to_string(32 * kernel.num_warps) + "\n{ ret; }\n";
}

inline std::uint32_t onnx_type(DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return 10;
    case DataType::kBFloat16:
      return 16;
    case DataType::kInt8:
      return 3;
    case DataType::kInt4:
      return 2;
    default:
      return 1;
  }
}

using Bytes = std::vector<std::uint8_t>;

inline void put(Bytes& bytes, std::size_t at, std::uint64_t value, std::size_t width) {
  for (std::size_t i = 0; i < width; ++i) bytes[at + i] = static_cast<std::uint8_t>(value >> 8 * i);
}

inline void put_digest(Bytes& bytes, std::size_t at, std::span<const std::uint8_t> of) {
  const auto digest = cuda::sha256(of);
  std::memcpy(bytes.data() + at, digest.data(), digest.size());
}

// Makes a changed pack's size and sha256 right again.
inline void seal(Bytes& pack) {
  put(pack, 16, pack.size(), 8);
  put_digest(pack, 24, std::span(pack).subspan(64));
}

inline Bytes write_pack(const std::vector<PackedKernel>& kernels) {
  Bytes pack(64 + 320 * kernels.size());
  std::memcpy(pack.data(), "KVCKERN\0", 8);
  put(pack, 8, 1, 4);
  put(pack, 12, kernels.size(), 4);
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    const PackedKernel& k = kernels[i];
    std::string image = ptx_of(k);
    image.push_back('\0');
    pack.resize((pack.size() + 63) / 64 * 64);
    const std::size_t offset = pack.size();
    pack.insert(pack.end(), image.begin(), image.end());
    const std::size_t entry = 64 + 320 * i;
    const std::uint32_t numbers[] = {static_cast<std::uint32_t>(k.variant.kind),
                                     static_cast<std::uint32_t>(k.format),
                                     k.compute_capability,
                                     onnx_type(k.variant.activation_type),
                                     onnx_type(k.variant.cache_type),
                                     k.variant.head_dim,
                                     k.variant.value_head_dim,
                                     k.variant.group,
                                     k.variant.rotary_dim,
                                     k.variant.features,
                                     k.num_warps,
                                     k.shared_bytes,
                                     k.tile_m,
                                     k.tile_n,
                                     0,
                                     0,
                                     static_cast<std::uint32_t>(k.arguments.size()),
                                     0};
    for (std::size_t n = 0; n < std::size(numbers); ++n) put(pack, entry + 4 * n, numbers[n], 4);
    put(pack, entry + 72, offset, 8);
    put(pack, entry + 80, image.size(), 8);
    put_digest(pack, entry + 88, std::span(pack).subspan(offset));
    std::memcpy(pack.data() + entry + 120, k.function.data(), k.function.size());
    for (std::size_t a = 0; a < k.arguments.size(); ++a) {
      pack[entry + 216 + a] = static_cast<std::uint8_t>(k.arguments[a]);
    }
  }
  seal(pack);
  return pack;
}

}  // namespace kvconv::test
