// What a model and a run take of memory, and what the machine has: kvconv/plan.py and
// kvconv/memory.py.
#pragma once

#include <cstdint>
#include <optional>

#include "manifest.h"

namespace kvconv::runtime {

inline constexpr std::int64_t kPrefillChunkTokens = 512;

// What can be allocated before the system, or a control group around this process, runs out;
// nothing where the system does not tell.
std::optional<std::int64_t> free_memory_bytes();

// Most tokens of a prompt that rings take at once; nothing without rings.
std::optional<std::int64_t> largest_chunk(const Manifest& manifest);

// Bytes of all buffers of a cache of that capacity.
std::int64_t kv_cache_bytes(const Manifest& manifest, std::int64_t capacity);

// Refuses weights, or a cache and what a run takes beside it, that are more than is free
// (KVCONV_NOT_ENOUGH_MEMORY).
void check_weights_fit(const Manifest& manifest);
void check_run_fits(const Manifest& manifest, std::int64_t capacity, std::int64_t prefill_chunk);

}  // namespace kvconv::runtime
