// The choice among the builds of the flash kernel, made once, from what the processor reports.
#include "kvconv/attention.h"
#include "kvconv/gated_activation.h"
#include "kvconv/quantized.h"

namespace kvconv {

#if defined(KVCONV_HAS_X86)
extern const FlashKernel kFlashAvx512;
extern const FlashKernel kFlashAvx2;
#endif
extern const FlashKernel kFlashPortable;

const std::vector<FlashKernel>& flash_kernels() {
  static const std::vector<FlashKernel> supported = [] {
    std::vector<FlashKernel> kernels;
#if defined(KVCONV_HAS_X86)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      kernels.push_back(kFlashAvx512);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
      kernels.push_back(kFlashAvx2);
    }
#endif
    kernels.push_back(kFlashPortable);
    return kernels;
  }();
  return supported;
}

const std::vector<MatMulKernel>& matmul_kernels() {
  static const std::vector<MatMulKernel> supported = {
      {"reference", [](const MatMulParams&, std::int64_t) -> std::size_t { return 0; },
       [](const MatMulParams& p, void*, const ParallelFor&) { matmul_reference(p); }}};
  return supported;
}

const std::vector<GatedActivationKernel>& gated_activation_kernels() {
  static const std::vector<GatedActivationKernel> supported = {
      {"reference",
       [](const GatedActivationParams& p, const ParallelFor&) { gated_activation_reference(p); }}};
  return supported;
}

}  // namespace kvconv
