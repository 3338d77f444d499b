// What a bundle's kvconv.json says, as far as a run needs it; kvconv/manifest.py documents the
// fields.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvconv/ort_abi.h"

namespace kvconv::runtime {

inline constexpr std::int64_t kFormatVersion = 6;
inline constexpr std::int64_t kOpVersion = 4;
inline constexpr std::int64_t kFloatCachesOpVersion = 2;
inline constexpr std::string_view kModelFile = "model.onnx";
inline constexpr std::string_view kWeightsFile = "model.onnx.data";
inline constexpr std::string_view kBundleLibraryFile = "libkvconv_ops.so";

// One tensor of a layer's cache: [1, num_heads, slots, width], as kvconv/cache_layout.py lays it
// out.
struct StoredTensor {
  std::string_view name;  // key, value, key_scale or value_scale
  ort::ElementType element;
  std::int64_t num_heads;
  std::int64_t width;

  std::int64_t slot_bytes() const;
};

struct CacheLayer {
  std::int64_t num_key_value_heads;
  std::int64_t key_head_dim;
  std::int64_t value_head_dim;
  std::string dtype;
  std::optional<std::int64_t> window_size;
  std::optional<std::int64_t> capacity;  // of a ring

  std::int64_t slots(std::int64_t max_sequence_length) const;
  std::optional<std::int64_t> slack() const;  // slots of a ring beyond its window
  std::vector<StoredTensor> stored_tensors() const;
};

struct RunSizes {
  std::int64_t num_attention_heads;
  std::int64_t activation_width;
  std::int64_t packed_bytes;
};

struct FileEntry {
  std::int64_t size;
  std::string sha256;
};

struct Manifest {
  std::filesystem::path folder;
  std::string source_model;
  std::string attention;
  std::optional<std::int64_t> op_version;
  bool is_quantized;
  std::int64_t vocab_size;
  std::int64_t max_sequence_length;
  std::vector<std::int32_t> eos_token_ids;
  std::optional<std::int64_t> bos_token_id;
  std::vector<CacheLayer> cache_layers;
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  std::map<std::string, FileEntry> files;
  std::optional<RunSizes> run_sizes;

  // The standard flavour's caches grow with every run; the others' past and present are one memory.
  bool has_shared_buffer() const { return attention != "standard"; }
  std::int64_t weight_bytes() const;
};

// Reads and checks the manifest and the bundle's files: their sizes, and hashes of those below 64
// MB. Throws an Error (KVCONV_BUNDLE_ERROR) that names the file at fault.
Manifest open_bundle(const std::filesystem::path& folder);

// Reads a whole file.
std::string read_file(const std::filesystem::path& path);

}  // namespace kvconv::runtime
