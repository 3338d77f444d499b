// The choice among the builds of the kernels, made once, from what the processor reports.
#include "kvconv/attention.h"
#include "kvconv/gated_activation.h"
#include "kvconv/norm.h"
#include "kvconv/quantized.h"

#if defined(KVCONV_HAS_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvconv {

#if defined(KVCONV_HAS_X86)
extern const FlashKernel kFlashAvx512;
extern const FlashKernel kFlashAvx2;
extern const MatMulKernel kMatMulAmx;
extern const MatMulKernel kMatMulAvx512Vnni;
extern const MatMulKernel kMatMulAvx512;
extern const MatMulKernel kMatMulAvxVnni;
extern const MatMulKernel kMatMulAvx2;
extern const GatedActivationKernel kGatedActivationAvx512;
extern const GatedActivationKernel kGatedActivationAvx2;
extern const NormKernel kNormAvx512;
extern const NormKernel kNormAvx2;
#endif
extern const FlashKernel kFlashPortable;
extern const MatMulKernel kMatMulPortable;
extern const GatedActivationKernel kGatedActivationPortable;
extern const NormKernel kNormPortable;

namespace {

#if defined(KVCONV_HAS_X86)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
// AMX needs the system's leave as well, which holds for all threads of the process.
bool has_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return has_avx512_vnni() && __builtin_cpu_supports("amx-tile") &&
         __builtin_cpu_supports("amx-int8") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
#endif

}  // namespace

const std::vector<FlashKernel>& flash_kernels() {
  static const std::vector<FlashKernel> supported = [] {
    std::vector<FlashKernel> kernels;
#if defined(KVCONV_HAS_X86)
    if (has_avx512()) kernels.push_back(kFlashAvx512);
    if (has_avx2()) kernels.push_back(kFlashAvx2);
#endif
    kernels.push_back(kFlashPortable);
    return kernels;
  }();
  return supported;
}

const std::vector<MatMulKernel>& matmul_kernels() {
  static const std::vector<MatMulKernel> supported = [] {
    std::vector<MatMulKernel> kernels;
#if defined(KVCONV_HAS_X86)
    if (has_amx()) kernels.push_back(kMatMulAmx);
    if (has_avx512_vnni()) kernels.push_back(kMatMulAvx512Vnni);
    if (has_avx_vnni()) kernels.push_back(kMatMulAvxVnni);
    if (has_avx512()) kernels.push_back(kMatMulAvx512);
    if (has_avx2()) kernels.push_back(kMatMulAvx2);
#endif
    kernels.push_back(kMatMulPortable);
    return kernels;
  }();
  return supported;
}

const std::vector<GatedActivationKernel>& gated_activation_kernels() {
  static const std::vector<GatedActivationKernel> supported = [] {
    std::vector<GatedActivationKernel> kernels;
#if defined(KVCONV_HAS_X86)
    if (has_avx512()) kernels.push_back(kGatedActivationAvx512);
    if (has_avx2()) kernels.push_back(kGatedActivationAvx2);
#endif
    kernels.push_back(kGatedActivationPortable);
    return kernels;
  }();
  return supported;
}

const std::vector<NormKernel>& norm_kernels() {
  static const std::vector<NormKernel> supported = [] {
    std::vector<NormKernel> kernels;
#if defined(KVCONV_HAS_X86)
    if (has_avx512()) kernels.push_back(kNormAvx512);
    if (has_avx2()) kernels.push_back(kNormAvx2);
#endif
    kernels.push_back(kNormPortable);
    return kernels;
  }();
  return supported;
}

}  // namespace kvconv
