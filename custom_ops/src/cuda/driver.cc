#include "driver.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include "kernel_pack.h"
#include "kvconv/text.h"

namespace kvconv::cuda {
namespace {

#if defined(_WIN32)
constexpr const char* kLibrary = "nvcuda.dll";
void* open_library() { return reinterpret_cast<void*>(LoadLibraryA(kLibrary)); }
void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), name));
}
#else
constexpr const char* kLibrary = "libcuda.so.1";
void* open_library() { return dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL); }
void* find_symbol(void* library, const char* name) { return dlsym(library, name); }
#endif

constexpr const char* kRemedy = "Install NVIDIA's driver, or use the CPU (--provider cpu).";

template <typename Pointer>
void load(void* library, const char* name, Pointer* pointer) {
  void* symbol = find_symbol(library, name);
  if (symbol == nullptr) {
    refuse(text("the NVIDIA driver (", kLibrary, ") is too old: it has no ", name,
                ". Install a newer one, or use the CPU (--provider cpu)."));
  }
  *pointer = reinterpret_cast<Pointer>(symbol);
}

Driver load_driver() {
  void* library = open_library();
  if (library == nullptr) {
    refuse(text("no NVIDIA driver was found (", kLibrary, "). ", kRemedy));
  }
  Driver d{};
  load(library, "cuInit", &d.init);
  load(library, "cuDriverGetVersion", &d.get_version);
  load(library, "cuGetErrorString", &d.get_error_string);
  load(library, "cuDeviceGet", &d.get_device);
  load(library, "cuDeviceGetName", &d.get_device_name);
  load(library, "cuDeviceGetAttribute", &d.get_device_attribute);
  load(library, "cuDevicePrimaryCtxRetain", &d.retain_primary_context);
  load(library, "cuDevicePrimaryCtxRelease_v2", &d.release_primary_context);
  load(library, "cuCtxGetCurrent", &d.get_current_context);
  load(library, "cuCtxPushCurrent_v2", &d.push_context);
  load(library, "cuCtxPopCurrent_v2", &d.pop_context);
  load(library, "cuModuleLoadDataEx", &d.load_module);
  load(library, "cuModuleUnload", &d.unload_module);
  load(library, "cuModuleGetFunction", &d.get_function);
  load(library, "cuFuncSetAttribute", &d.set_function_attribute);
  load(library, "cuLaunchKernel", &d.launch);
  load(library, "cuMemcpyDtoDAsync_v2", &d.copy);
  d.check(d.init(0), "start the NVIDIA driver");
  return d;
}

}  // namespace

void Driver::check(Result result, std::string_view doing, std::string_view what) const {
  if (result == 0) return;
  const char* reason = nullptr;
  if (get_error_string(result, &reason) != 0 || reason == nullptr) reason = "unknown error";
  refuse(text("cannot ", doing, what.empty() ? "" : " ", what, ": CUDA error ", result, ", ",
              reason, "."));
}

std::string Driver::version_text() const {
  int version = 0;
  if (get_version(&version) != 0) return "an unknown version";
  return text(version / 1000, ".", version % 1000 / 10);
}

const Driver& driver() {
  static const Driver loaded = load_driver();  // a failure is tried again by the next call
  return loaded;
}

}  // namespace kvconv::cuda
