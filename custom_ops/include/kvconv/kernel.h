// What all kernels share: the types of elements, and how they get their threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvconv {

// Of elements. The last three are those of caches alone (cache_format.h).
enum class DataType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kInt8, kInt4, kInt5 };

// How a kernel gets its threads: run(pool, task, data, count) calls task(data, i) once for every i
// in [0, count), on any thread, and returns when all are done. A task must not throw.
struct ParallelFor {
  void (*run)(void* pool, void (*task)(void* data, std::size_t index), void* data,
              std::size_t count) = nullptr;
  void* pool = nullptr;
  std::int64_t num_workers = 1;  // more than this many tasks never run at once
};

}  // namespace kvconv
