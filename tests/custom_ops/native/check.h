// What the C++ tests share: a check that explains itself, random numbers, comparison of rows.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "kvconv/attention.h"
#include "kvconv/float16.h"

// Ends the test with a message when the condition does not hold.
#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fprintf(stderr, "\n");                                          \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

namespace kvconv::test {

// The same numbers on every machine and standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(limit));
  }
  bool chance(int percent) { return below(100) < percent; }
  template <typename T>
  T pick(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(below(static_cast<std::int64_t>(choices.size())))];
  }
  // About normal: the sum of four uniform numbers.
  float normal() {
    float sum = 0.0F;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(below(1 << 20)) / (1 << 20) - 0.5F;
    return sum * 1.7F;
  }

 private:
  std::mt19937_64 engine_;
};

// Largest difference allowed, relative to 1 + |expected|: a few roundings of the type.
inline float tolerance_of(DataType type) {
  if (type == DataType::kFloat32) return 1e-4F;
  return type == DataType::kFloat16 ? 4e-3F : 3e-2F;
}

// The same where the cache is quantised: weights of values are rounded by up to 1/65024 of the
// largest of a tile, about 1e-5 each, and a hundred such errors add up to 1e-4 where one weight is
// nearly all of the sum.
inline float quantized_tolerance_of(DataType type) {
  return type == DataType::kFloat32 ? 2e-4F : tolerance_of(type);
}

// Compares element by element; NaN must meet NaN. `what` says which case failed.
inline void check_close(const void* actual, const void* expected, std::int64_t size, DataType type,
                        float tolerance, const std::string& what) {
  for (std::int64_t i = 0; i < size; ++i) {
    const float a = load_element(actual, i, type);
    const float b = load_element(expected, i, type);
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    CHECK(std::fabs(a - b) <= tolerance * (1.0F + std::fabs(b)),
          "%s: element %lld is %.9g, the reference says %.9g", what.c_str(),
          static_cast<long long>(i), static_cast<double>(a), static_cast<double>(b));
  }
}

}  // namespace kvconv::test
