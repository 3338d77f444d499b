// Calling for memory before it is read.
//
// Included by attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstdint>

#include "tasks.h"

namespace kvconv {
namespace {

struct Memory {
  const char* data = nullptr;
  std::int64_t bytes = 0;
};

// Calls for memory that is read later, step by step while something else is computed. The fronts
// advance side by side: a processor looks ahead within a page only, so that one page after the
// other would leave it with half of the requests that it can have under way.
class Calls {
 public:
  Calls(const Memory& memory, std::int64_t num_steps)
      : data_(memory.data),
        front_bytes_(round_up(ceil_div(memory.bytes, kFronts), kCacheLine)),
        step_bytes_(ceil_div(front_bytes_, max_of(num_steps, 1))) {}

  void step() {
    due_ = min_of(due_ + step_bytes_, front_bytes_);
    for (; called_ < due_; called_ += kCacheLine) {
#pragma GCC unroll 4
      for (int i = 0; i < kFronts; ++i) __builtin_prefetch(data_ + i * front_bytes_ + called_);
    }
  }

 private:
  static constexpr int kFronts = 4;
  static constexpr std::int64_t kCacheLine = 64;

  const char* data_;
  std::int64_t front_bytes_;
  std::int64_t step_bytes_;
  std::int64_t due_ = 0;  // bytes of each front that have been or are to be called for by now
  std::int64_t called_ = 0;
};

}  // namespace
}  // namespace kvconv
