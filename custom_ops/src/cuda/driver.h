// The few functions of NVIDIA's driver that launching takes, found at run time: the library links
// no CUDA, and nothing is loaded before a CUDA op is created.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvconv::cuda {

// The driver API's types and numbers, declared by us (cuda.h of CUDA 12, its ABI since CUDA 4).
using Result = int;
using DeviceId = int;
using DevicePointer = std::uint64_t;
struct ContextHandle;
struct ModuleHandle;
struct FunctionHandle;
using Context = ContextHandle*;
using Module = ModuleHandle*;
using Function = FunctionHandle*;
using Stream = void*;

enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};

inline constexpr int kMaxDynamicSharedBytes = 8;  // of cuFuncSetAttribute

struct Driver {
  Result (*init)(unsigned flags);
  Result (*get_version)(int* version);
  Result (*get_error_string)(Result result, const char** text);
  Result (*get_device)(DeviceId* device, int ordinal);
  Result (*get_device_name)(char* name, int size, DeviceId device);
  Result (*get_device_attribute)(int* value, DeviceAttribute attribute, DeviceId device);
  Result (*retain_primary_context)(Context* context, DeviceId device);
  Result (*release_primary_context)(DeviceId device);
  Result (*get_current_context)(Context* context);
  Result (*push_context)(Context context);
  Result (*pop_context)(Context* context);
  Result (*load_module)(Module* module, const void* image, unsigned num_options, int* options,
                        void** values);
  Result (*unload_module)(Module module);
  Result (*get_function)(Function* function, Module module, const char* name);
  Result (*set_function_attribute)(Function function, int attribute, int value);
  Result (*launch)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   Stream stream, void** arguments, void** extra);
  Result (*copy)(DevicePointer to, DevicePointer from, std::size_t bytes, Stream stream);

  // Throws CudaError where `result` is a failure: what was done, and what the driver says.
  void check(Result result, std::string_view doing, std::string_view what = {}) const;

  // The newest CUDA that the driver serves, 12.4.
  std::string version_text() const;
};

// The driver, loaded and started by the first call; throws CudaError where there is none.
const Driver& driver();

}  // namespace kvconv::cuda
