// activation(gate) * up. Compiled once per instruction set (KVCONV_USE_...); kernels.cc picks one.
//
// Nothing here may call a shared inline function (no standard containers or algorithms): the
// linker could pick this file's copy, compiled for newer processors, for everybody.
#include "kvconv/gated_activation.h"

#include "kvconv/float16.h"
#include "tasks.h"
#include "vec_math.h"

namespace kvconv {
namespace {

constexpr std::int64_t kElementsPerTask = 1 << 14;  // fewer are not worth another thread
constexpr std::int64_t kStrip = 16;                 // elements taken at a time

// 1 / (1 + e^-x)
Vec sigmoid(Vec x) {
  const Vec e = exp_nonpositive(sub(set(0.0F), absolute(x)));
  return div(select_less(x, set(0.0F), e, set(1.0F)), add(set(1.0F), e));
}

// The normal distribution's share below x. Polynomials: Cephes (ndtrf.c).
Vec normal_share(Vec x) {
  const Vec t = mul(absolute(x), set(0.70710678F));
  const Vec square = mul(t, t);
  // 1. erf(t) for t < 1.
  Vec y = set(7.853861353153693e-5F);
  y = fma(y, square, set(-8.010193625184903e-4F));
  y = fma(y, square, set(5.188327685732524e-3F));
  y = fma(y, square, set(-2.685381193529856e-2F));
  y = fma(y, square, set(1.128358514861418e-1F));
  y = fma(y, square, set(-3.761262582423300e-1F));
  y = fma(y, square, set(1.128379165726710e+0F));
  const Vec small = mul(y, t);
  // 2. erfc(t) for t < 2, and beyond.
  const Vec inverse = div(set(1.0F), max(t, set(1.0F)));
  const Vec q = mul(inverse, inverse);
  Vec near = set(2.326819970068386e-2F);
  near = fma(near, q, set(-1.387039388740657e-1F));
  near = fma(near, q, set(3.687424674597105e-1F));
  near = fma(near, q, set(-5.824733027278666e-1F));
  near = fma(near, q, set(6.210004621745983e-1F));
  near = fma(near, q, set(-4.944515323274145e-1F));
  near = fma(near, q, set(3.404879937665872e-1F));
  near = fma(near, q, set(-2.741127028184656e-1F));
  near = fma(near, q, set(5.638259427386472e-1F));
  Vec far = set(-1.047766399936249e+1F);
  far = fma(far, q, set(1.297719955372516e+1F));
  far = fma(far, q, set(-7.495518717768503e+0F));
  far = fma(far, q, set(2.921019019210786e+0F));
  far = fma(far, q, set(-1.015265279202700e+0F));
  far = fma(far, q, set(4.218463358204948e-1F));
  far = fma(far, q, set(-2.820767439740514e-1F));
  far = fma(far, q, set(5.641895067754075e-1F));
  const Vec polynomial = select_less(t, set(2.0F), near, far);
  const Vec tail = mul(mul(exp_nonpositive(sub(set(0.0F), square)), inverse), polynomial);
  // 3. From erfc(|x| / sqrt(2)) to the share.
  const Vec erfc = select_less(t, set(1.0F), sub(set(1.0F), small), tail);
  const Vec half = mul(set(0.5F), erfc);
  return select_less(x, set(0.0F), half, sub(set(1.0F), half));
}

template <Activation activation>
Vec activate(Vec x) {
  switch (activation) {
    case Activation::kGelu:
      return mul(x, normal_share(x));
    case Activation::kGeluTanh: {
      // (1 + tanh(u)) / 2 is sigmoid(2 * u)
      const Vec cubic = fma(mul(mul(x, x), x), set(0.044715F), x);
      return mul(x, sigmoid(mul(cubic, set(1.59576912F))));
    }
    case Activation::kRelu:
      return select_less(x, set(0.0F), set(0.0F), x);
    default:
      return mul(x, sigmoid(x));
  }
}

template <Activation activation>
void run_whole_strip(const float* gate, const float* up, float* output) {
  for (std::int64_t i = 0; i < kStrip; i += kLanes) {
    store(output + i, mul(activate<activation>(load(gate + i)), load(up + i)));
  }
}

// `count` elements, at most kStrip.
template <Activation activation>
void run_strip(const char* gate, const char* up, char* output, DataType type, std::int64_t count) {
  if (type == DataType::kFloat32 && count == kStrip) {
    return run_whole_strip<activation>(reinterpret_cast<const float*>(gate),
                                       reinterpret_cast<const float*>(up),
                                       reinterpret_cast<float*>(output));
  }
  float gates[kStrip];
  float ups[kStrip];
  for (std::int64_t i = count; i < kStrip; ++i) gates[i] = ups[i] = 0.0F;
  widen(gate, type, gates, count);
  widen(up, type, ups, count);
  run_whole_strip<activation>(gates, ups, gates);
  narrow(gates, output, type, count);
}

template <Activation activation>
void run_rows(const GatedActivationParams& p, const ParallelFor& parallel_for) {
  const std::int64_t element_bytes = bytes_of(p.type);
  const std::int64_t strips_per_row = ceil_div(p.size, kStrip);
  const std::int64_t num_strips = p.num_rows * strips_per_row;
  const std::int64_t strips_per_task = kElementsPerTask / kStrip;
  const char* input = static_cast<const char*>(p.input);
  char* output = static_cast<char*>(p.output);
  for_each_task(parallel_for, ceil_div(num_strips, strips_per_task),
                [&](std::int64_t, std::int64_t task) {
                  const std::int64_t first = task * strips_per_task;
                  const std::int64_t end = min_of(num_strips, first + strips_per_task);
                  std::int64_t row = first / strips_per_row;
                  std::int64_t column = first % strips_per_row * kStrip;
                  for (std::int64_t strip = first; strip < end; ++strip) {
                    const char* gate = input + (row * 2 * p.size + column) * element_bytes;
                    run_strip<activation>(gate, gate + p.size * element_bytes,
                                          output + (row * p.size + column) * element_bytes, p.type,
                                          min_of(kStrip, p.size - column));
                    column += kStrip;
                    if (column >= p.size) {
                      column = 0;
                      ++row;
                    }
                  }
                });
}

void run(const GatedActivationParams& p, const ParallelFor& parallel_for) {
  switch (p.activation) {
    case Activation::kGelu:
      return run_rows<Activation::kGelu>(p, parallel_for);
    case Activation::kGeluTanh:
      return run_rows<Activation::kGeluTanh>(p, parallel_for);
    case Activation::kRelu:
      return run_rows<Activation::kRelu>(p, parallel_for);
    default:
      return run_rows<Activation::kSilu>(p, parallel_for);
  }
}

}  // namespace

#if defined(KVCONV_USE_AVX512)
extern const GatedActivationKernel kGatedActivationAvx512 = {"avx512", run};
#elif defined(KVCONV_USE_AVX2)
extern const GatedActivationKernel kGatedActivationAvx2 = {"avx2", run};
#else
extern const GatedActivationKernel kGatedActivationPortable = {"portable", run};
#endif

}  // namespace kvconv
