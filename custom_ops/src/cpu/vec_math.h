// 2^x, e^x, tanh and rows of 16-bit floats on vectors; compiled once per instruction set.
// tanh: Cephes (tanhf.c), about one unit in the last place.
#pragma once

#include <cstring>

#include "kvconv/float16.h"
#include "vec.h"

namespace kvconv {

constexpr float kLog2E = 1.44269504F;

// 2^r for r in [-1/2, 1/2]: the best polynomial of its degree with value 1 at 0, 1e-7 relative.
static inline Vec exp2_near_zero(Vec r) {
  Vec y = set(1.3264727165e-3F);
  y = fma(y, r, set(9.6715126419e-3F));
  y = fma(y, r, set(5.5507337434e-2F));
  y = fma(y, r, set(2.4022242085e-1F));
  y = fma(y, r, set(6.9314697760e-1F));
  return fma(y, r, set(1.0F));
}

// Added to an x above -2^22, this leaves x rounded to an integer n in the low bits, as n + 127: the
// exponent field of 2^n. It is 1.5 * 2^23 + 127.
constexpr float kToExponent = 12583039.0F;

// 2^x for x <= 0; exactly 0 below -125 and at -infinity; NaN for NaN.
static inline Vec exp2_nonpositive(Vec x) {
  const Vec shifted = add(x, set(kToExponent));
  const Vec r = sub(x, sub(shifted, set(kToExponent)));
  const Vec y = mul(exp2_near_zero(r), low_bits_to_exponent(shifted));
  return zero_if_less(x, set(-125.0F), y);
}

// e^x for x <= 0; exactly 0 below -87 and at -infinity; NaN for NaN.
static inline Vec exp_nonpositive(Vec x) {
  const Vec shifted = fma(x, set(kLog2E), set(kToExponent));
  const Vec n = sub(shifted, set(kToExponent));
  const Vec r = fma(n, set(2.12194440e-4F), fma(n, set(-0.693359375F), x));  // x - n * ln 2
  const Vec y = mul(exp2_near_zero(mul(r, set(kLog2E))), low_bits_to_exponent(shifted));
  return zero_if_less(x, set(-87.0F), y);
}

static inline Vec tanh(Vec x) {
  const Vec magnitude = absolute(x);
  const Vec square = mul(x, x);
  Vec y = set(-5.70498872745e-3F);
  y = fma(y, square, set(2.06390887954e-2F));
  y = fma(y, square, set(-5.37397155531e-2F));
  y = fma(y, square, set(1.33314422036e-1F));
  y = fma(y, square, set(-3.33332819422e-1F));
  const Vec small = fma(mul(y, square), x, x);
  const Vec e = exp_nonpositive(mul(magnitude, set(-2.0F)));
  const Vec large = div(sub(set(1.0F), e), add(set(1.0F), e));
  const Vec signed_large = select_less(x, set(0.0F), sub(set(0.0F), large), large);
  return select_less(magnitude, set(0.625F), small, signed_large);
}

// Converts `size` elements to float32.
static inline void widen(const void* source, DataType type, float* target, std::int64_t size) {
  std::int64_t i = 0;
  if (type == DataType::kFloat32) {
    if (size > 0) std::memcpy(target, source, static_cast<std::size_t>(size) * sizeof(float));
    return;
  }
  const std::uint16_t* bits = static_cast<const std::uint16_t*>(source);
  if (type == DataType::kFloat16) {
    for (; i + kLanes <= size; i += kLanes) store(target + i, load_float16(bits + i));
  } else {
    for (; i + kLanes <= size; i += kLanes) store(target + i, load_bfloat16(bits + i));
  }
  for (; i < size; ++i) target[i] = load_element(source, i, type);
}

// Converts `size` float32 elements to `type`.
static inline void narrow(const float* source, void* target, DataType type, std::int64_t size) {
  std::int64_t i = 0;
  if (type == DataType::kFloat32) {
    if (size > 0) std::memcpy(target, source, static_cast<std::size_t>(size) * sizeof(float));
    return;
  }
  if (type == DataType::kFloat16) {
    std::uint16_t* bits = static_cast<std::uint16_t*>(target);
    for (; i + kLanes <= size; i += kLanes) store_float16(bits + i, load(source + i));
  }
  for (; i < size; ++i) store_element(target, i, type, source[i]);
}

}  // namespace kvconv
