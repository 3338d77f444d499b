// The 16-bit conversions, against all values there are.
#include "kvconv/float16.h"

#include "check.h"

namespace kvconv::test {
namespace {

void test_conversions() {
  // 1. Every 16-bit value survives the way to float32 and back; a NaN stays some NaN.
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto given = static_cast<std::uint16_t>(bits);
    const float half = float16_to_float(given);
    CHECK(std::isnan(half) ? std::isnan(float16_to_float(float_to_float16(half)))
                           : float_to_float16(half) == given,
          "float16 %04x", bits);
    const float brain = bfloat16_to_float(given);
    CHECK(std::isnan(brain) ? std::isnan(bfloat16_to_float(float_to_bfloat16(brain)))
                            : float_to_bfloat16(brain) == given,
          "bfloat16 %04x", bits);
  }
  // 2. Halfway between neighbours float32 rounds to the even one, and to the nearer elsewhere.
  for (std::uint32_t bits = 0; bits < 0x7BFF; ++bits) {
    const float low = float16_to_float(static_cast<std::uint16_t>(bits));
    const float high = float16_to_float(static_cast<std::uint16_t>(bits + 1));
    const float middle = (low + high) / 2;
    CHECK(float_to_float16(middle) == bits + (bits & 1U), "halfway above %04x", bits);
    CHECK(float_to_float16(std::nextafter(middle, low)) == bits, "just above %04x", bits);
    CHECK(float_to_float16(std::nextafter(middle, high)) == bits + 1, "just below %04x", bits + 1);
  }
  CHECK(float_to_float16(65520.0F) == 0x7C00, "65520 rounds to infinity");
  CHECK(float_to_float16(65519.0F) == 0x7BFF, "65519 rounds to 65504");
  CHECK(float_to_bfloat16(1.00390625F) == 0x3F80, "halfway rounds to even");
  CHECK(float_to_bfloat16(1.01171875F) == 0x3F82, "halfway rounds to even");
  std::printf("16-bit conversions are exact\n");
}

}  // namespace
}  // namespace kvconv::test

int main() {
  kvconv::test::test_conversions();
  return 0;
}
