#include "memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "error.h"

namespace kvconv::runtime {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kWidthsPerToken = 5;  // see kvconv/plan.py
constexpr std::int64_t kFloat32Bytes = 4;
constexpr std::int64_t kScoresCopies = 2;

std::optional<std::int64_t> read_number(const fs::path& path) {
  std::ifstream stream(path);
  std::int64_t number = 0;
  if (stream >> number) return number;
  return std::nullopt;  // not there; or "max", which is no limit
}

// The number behind a name, in a file of lines "name number" or "name: number kB".
std::optional<std::int64_t> read_named(const fs::path& path, const std::string& name) {
  std::ifstream stream(path);
  std::string word;
  std::int64_t number = 0;
  for (std::string line; std::getline(stream, line);) {
    std::istringstream words(line);
    if (words >> word >> number && word == name) return number;
  }
  return std::nullopt;
}

// What each control group around this process leaves; cgroup v2, and v1's memory.
std::vector<std::int64_t> control_group_bytes() {
  std::vector<std::int64_t> free;
  std::ifstream lines("/proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    if (!is_v2 && controllers != "memory") continue;
    const fs::path root = fs::path("/sys/fs/cgroup") / controllers;
    fs::path group = root / fs::path(line.substr(second + 1)).relative_path();
    // In a container the path may be the host's, which is not there: the root has the limit.
    while (true) {
      const auto most = read_number(group / (is_v2 ? "memory.max" : "memory.limit_in_bytes"));
      const auto used = read_number(group / (is_v2 ? "memory.current" : "memory.usage_in_bytes"));
      const auto cached =
          read_named(group / "memory.stat", is_v2 ? "inactive_file" : "total_inactive_file");
      if (most && used && cached) free.push_back(*most - *used + *cached);
      if (group == root || group == group.parent_path()) break;
      group = group.parent_path();
    }
  }
  return free;
}

}  // namespace

std::optional<std::int64_t> free_memory_bytes() {
  const auto available = read_named("/proc/meminfo", "MemAvailable:");
  if (!available) return std::nullopt;
  std::int64_t least = *available * 1024;
  for (const std::int64_t bytes : control_group_bytes()) least = std::min(least, bytes);
  return std::max<std::int64_t>(least, 0);
}

std::optional<std::int64_t> largest_chunk(const Manifest& manifest) {
  std::optional<std::int64_t> least;
  for (const CacheLayer& layer : manifest.cache_layers) {
    if (const auto slack = layer.slack()) {
      const std::int64_t chunk = std::max<std::int64_t>(*slack, 1);
      least = std::min(least.value_or(chunk), chunk);
    }
  }
  return least;
}

std::int64_t kv_cache_bytes(const Manifest& manifest, std::int64_t capacity) {
  std::int64_t bytes = 0;
  for (const CacheLayer& layer : manifest.cache_layers) {
    for (const StoredTensor& tensor : layer.stored_tensors())
      bytes += layer.slots(capacity) * tensor.slot_bytes();
  }
  return bytes;
}

void check_weights_fit(const Manifest& manifest) {
  const auto free = free_memory_bytes();
  const std::int64_t needed =
      manifest.weight_bytes() + (manifest.run_sizes ? manifest.run_sizes->packed_bytes : 0);
  if (!free || needed <= *free) return;
  fail(KVCONV_NOT_ENOUGH_MEMORY, "The weights take ", grouped(needed), " bytes and ",
       grouped(*free),
       " are free. Close other programs, export with --weights int4, or choose a smaller model.");
}

void check_run_fits(const Manifest& manifest, std::int64_t capacity, std::int64_t prefill_chunk) {
  const auto free = free_memory_bytes();
  if (!free) return;
  const std::int64_t cache = kv_cache_bytes(manifest, capacity);
  std::int64_t run = manifest.vocab_size * kFloat32Bytes;
  if (!manifest.has_shared_buffer()) run += cache;  // the longer presents beside the pasts
  if (manifest.run_sizes) {
    const std::int64_t tokens = std::min(prefill_chunk, capacity);
    run += tokens * manifest.run_sizes->activation_width * kWidthsPerToken * kFloat32Bytes;
    if (manifest.attention != "flash") {
      run += kScoresCopies * manifest.run_sizes->num_attention_heads * tokens * capacity *
             kFloat32Bytes;
    }
  }
  if (cache + run <= *free) return;
  fail(KVCONV_NOT_ENOUGH_MEMORY, "A KV cache of 1 x ", capacity, " tokens takes ", grouped(cache),
       " bytes, and a run ", grouped(run), " more; ", grouped(*free),
       " are free. A smaller capacity takes less; `kvconv plan` says what fits.");
}

}  // namespace kvconv::runtime
