// Dividing work: sizes, and tasks that workers take one after the other.
//
// Included by files that are compiled once per instruction set: internal linkage throughout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvconv/kernel.h"

namespace kvconv {
namespace {

static inline std::int64_t min_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
static inline std::int64_t max_of(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
static inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
static inline std::int64_t round_up(std::int64_t a, std::int64_t unit) {
  return ceil_div(a, unit) * unit;
}

// A number as a type, for a function whose argument chooses a template.
template <int number>
struct Constant {
  static constexpr int value = number;
};

// Calls body(worker, task) for every task in [0, count); worker is below parallel_for.num_workers.
template <typename Body>
void for_each_task(const ParallelFor& parallel_for, std::int64_t count, const Body& body) {
  struct Shared {
    const Body* body;
    std::int64_t count;
    std::int64_t next;
  } shared{&body, count, 0};
  const auto work = [](void* data, std::size_t worker) {
    Shared* s = static_cast<Shared*>(data);
    for (;;) {
      const std::int64_t task = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
      if (task >= s->count) return;
      (*s->body)(static_cast<std::int64_t>(worker), task);
    }
  };
  const std::int64_t workers = min_of(count, parallel_for.num_workers);
  if (workers > 1) {
    parallel_for.run(parallel_for.pool, work, &shared, static_cast<std::size_t>(workers));
  } else {
    work(&shared, 0);
  }
}

}  // namespace
}  // namespace kvconv
