// exp, tanh and rows of 16-bit floats on vectors; compiled once per instruction set, after its
// vec_*.h. Polynomials: Cephes (expf.c, tanhf.c), about one unit in the last place.
#pragma once

#include "kvconv/float16.h"

namespace kvconv {

// e^x for x <= 0; exactly 0 below -87 and at -infinity; NaN for NaN.
static inline Vec exp_nonpositive(Vec x) {
  const Vec lowest = set(-87.0F);
  const Vec clamped = max(lowest, x);
  // Adding 1.5 * 2^23 rounds x / ln 2 to the integer n and leaves n in the low mantissa bits.
  const Vec shifted = fma(clamped, set(1.44269504F), set(12582912.0F));
  const Vec n = sub(shifted, set(12582912.0F));
  Vec r = fma(n, set(-0.693359375F), clamped);
  r = fma(n, set(2.12194440e-4F), r);
  Vec y = set(1.9875691500e-4F);
  y = fma(y, r, set(1.3981999507e-3F));
  y = fma(y, r, set(8.3334519073e-3F));
  y = fma(y, r, set(4.1665795894e-2F));
  y = fma(y, r, set(1.6666665459e-1F));
  y = fma(y, r, set(5.0000001201e-1F));
  y = add(fma(y, mul(r, r), r), set(1.0F));
  return select_less(x, lowest, set(0.0F), mul(y, power_of_two(shifted)));
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
