// The choice among the builds of the kernels, made once, from what the processor reports.
#include <initializer_list>

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
extern const FlashKernel kFlashAvx512Vnni;
extern const FlashKernel kFlashAvxVnni;
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

template <typename Kernel>
struct Build {
  bool is_supported;
  Kernel kernel;
};

// The kernels of those builds that this processor can run, in the same order.
template <typename Kernel>
std::vector<Kernel> supported(std::initializer_list<Build<Kernel>> builds) {
  std::vector<Kernel> kernels;
  for (const Build<Kernel>& build : builds) {
    if (build.is_supported) kernels.push_back(build.kernel);
  }
  return kernels;
}

}  // namespace

const std::vector<FlashKernel>& flash_kernels() {
  static const std::vector<FlashKernel> kernels = supported<FlashKernel>({
#if defined(KVCONV_HAS_X86)
      {has_avx512_vnni(), kFlashAvx512Vnni},
      {has_avx_vnni(), kFlashAvxVnni},
      {has_avx512(), kFlashAvx512},
      {has_avx2(), kFlashAvx2},
#endif
      {true, kFlashPortable},
  });
  return kernels;
}

const std::vector<MatMulKernel>& matmul_kernels() {
  static const std::vector<MatMulKernel> kernels = supported<MatMulKernel>({
#if defined(KVCONV_HAS_X86)
      {has_amx(), kMatMulAmx},
      {has_avx512_vnni(), kMatMulAvx512Vnni},
      {has_avx_vnni(), kMatMulAvxVnni},
      {has_avx512(), kMatMulAvx512},
      {has_avx2(), kMatMulAvx2},
#endif
      {true, kMatMulPortable},
  });
  return kernels;
}

const std::vector<GatedActivationKernel>& gated_activation_kernels() {
  static const std::vector<GatedActivationKernel> kernels = supported<GatedActivationKernel>({
#if defined(KVCONV_HAS_X86)
      {has_avx512(), kGatedActivationAvx512},
      {has_avx2(), kGatedActivationAvx2},
#endif
      {true, kGatedActivationPortable},
  });
  return kernels;
}

const std::vector<NormKernel>& norm_kernels() {
  static const std::vector<NormKernel> kernels = supported<NormKernel>({
#if defined(KVCONV_HAS_X86)
      {has_avx512(), kNormAvx512},
      {has_avx2(), kNormAvx2},
#endif
      {true, kNormPortable},
  });
  return kernels;
}

}  // namespace kvconv
