// The part of ONNX Runtime's C ABI that the op library and the native runtime use, declared by us.
//
// ONNX Runtime's wheels ship no C headers, and its ABI is a table of function pointers that only
// ever grows: so the library needs a slot number and a signature for each entry, nothing else, and
// runs on every ONNX Runtime from API version 18 on. Source: onnxruntime_c_api.h, structs
// OrtApiBase, OrtApi and OrtCustomOp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

namespace kvconv::ort {

inline constexpr std::uint32_t kApiVersion = 18;

struct Api;  // a table of pointers; read through Entry
struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct Value;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct Env;
struct Session;
struct IoBinding;
struct RunOptions;
struct MemoryInfo;
struct Allocator;

using PathChar = std::filesystem::path::value_type;  // wchar_t on Windows, as in ONNX Runtime

struct ApiBase {
  const Api* (*get_api)(std::uint32_t version);
  const char* (*get_version_string)();
};

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2, kNotImplemented = 9 };

enum ElementType : int {
  kFloat32 = 1,
  kUInt8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kBFloat16 = 16,
};

// Where an input or an allocator's memory is.
enum MemoryType : int { kProviderMemory = 0, kCpuInput = -2 };

enum Characteristic : int { kRequired = 0, kOptional = 1 };

// One function of the API table: `entry(api, arguments...)` calls it.
template <std::size_t slot_, typename Function>
struct Entry;

template <std::size_t slot_, typename Result, typename... Arguments>
struct Entry<slot_, Result(Arguments...)> {
  using Pointer = Result (*)(Arguments...);
  static constexpr std::size_t slot = slot_;

  Result operator()(const Api* api, Arguments... arguments) const {
    return reinterpret_cast<const Pointer*>(api)[slot](arguments...);
  }
};

inline constexpr Entry<0, Status*(ErrorCode, const char*)> create_status;
inline constexpr Entry<2, const char*(const Status*)> get_error_message;
inline constexpr Entry<3, Status*(int, const char*, Env**)> create_env;
inline constexpr Entry<7, Status*(const Env*, const PathChar*, const SessionOptions*, Session**)>
    create_session;
inline constexpr Entry<10, Status*(SessionOptions**)> create_session_options;
inline constexpr Entry<17, Status*(SessionOptions*)> disable_mem_pattern;
inline constexpr Entry<22, Status*(SessionOptions*, int)> set_session_log_severity_level;
inline constexpr Entry<24, Status*(SessionOptions*, int)> set_intra_op_num_threads;
inline constexpr Entry<26, Status*(const char*, CustomOpDomain**)> create_custom_op_domain;
inline constexpr Entry<27, Status*(CustomOpDomain*, const struct CustomOp*)> custom_op_domain_add;
inline constexpr Entry<28, Status*(SessionOptions*, CustomOpDomain*)> add_custom_op_domain;
inline constexpr Entry<30, Status*(const Session*, std::size_t*)> session_get_input_count;
inline constexpr Entry<31, Status*(const Session*, std::size_t*)> session_get_output_count;
inline constexpr Entry<32, Status*(const Session*, std::size_t*)>
    session_get_overridable_initializer_count;
inline constexpr Entry<36, Status*(const Session*, std::size_t, Allocator*, char**)>
    session_get_input_name;
inline constexpr Entry<37, Status*(const Session*, std::size_t, Allocator*, char**)>
    session_get_output_name;
inline constexpr Entry<38, Status*(const Session*, std::size_t, Allocator*, char**)>
    session_get_overridable_initializer_name;
inline constexpr Entry<49, Status*(const MemoryInfo*, void*, std::size_t, const std::int64_t*,
                                   std::size_t, ElementType, Value**)>
    create_tensor_with_data;
inline constexpr Entry<51, Status*(Value*, void**)> get_tensor_mutable_data;
inline constexpr Entry<60, Status*(const TensorInfo*, ElementType*)> get_tensor_element_type;
inline constexpr Entry<61, Status*(const TensorInfo*, std::size_t*)> get_dimensions_count;
inline constexpr Entry<62, Status*(const TensorInfo*, std::int64_t*, std::size_t)> get_dimensions;
inline constexpr Entry<65, Status*(const Value*, TensorInfo**)> get_tensor_type_and_shape;
inline constexpr Entry<69, Status*(int, int, MemoryInfo**)> create_cpu_memory_info;
inline constexpr Entry<72, Status*(const MemoryInfo*, int*)> memory_info_get_id;
inline constexpr Entry<75, Status*(Allocator*, std::size_t, void**)> allocator_alloc;
inline constexpr Entry<76, Status*(Allocator*, void*)> allocator_free;
inline constexpr Entry<77, Status*(const Allocator*, const MemoryInfo**)> allocator_get_info;
inline constexpr Entry<78, Status*(Allocator**)> get_allocator_with_default_options;
inline constexpr Entry<85, Status*(const KernelInfo*, const char*, float*)> get_attribute_float;
inline constexpr Entry<86, Status*(const KernelInfo*, const char*, std::int64_t*)>
    get_attribute_int64;
inline constexpr Entry<87, Status*(const KernelInfo*, const char*, char*, std::size_t*)>
    get_attribute_string;
inline constexpr Entry<90, Status*(const KernelContext*, std::size_t, const Value**)> get_input;
inline constexpr Entry<91, Status*(KernelContext*, std::size_t, const std::int64_t*, std::size_t,
                                   Value**)>
    get_output;
inline constexpr Entry<93, void(Status*)> release_status;
inline constexpr Entry<95, void(Session*)> release_session;
inline constexpr Entry<96, void(Value*)> release_value;
inline constexpr Entry<99, void(TensorInfo*)> release_tensor_info;
inline constexpr Entry<100, void(SessionOptions*)> release_session_options;
inline constexpr Entry<130, Status*(SessionOptions*, const char*, const char*)>
    add_session_config_entry;
inline constexpr Entry<132, void(Allocator*)> release_allocator;
inline constexpr Entry<133, Status*(Session*, const RunOptions*, const IoBinding*)>
    run_with_binding;
inline constexpr Entry<134, Status*(Session*, IoBinding**)> create_io_binding;
inline constexpr Entry<135, void(IoBinding*)> release_io_binding;
inline constexpr Entry<136, Status*(IoBinding*, const char*, const Value*)> bind_input;
inline constexpr Entry<137, Status*(IoBinding*, const char*, const Value*)> bind_output;
inline constexpr Entry<193, Status*(const KernelContext*, void**)> get_gpu_compute_stream;
inline constexpr Entry<228, Status*(SessionOptions*, const PathChar*)> register_custom_ops_library;
inline constexpr Entry<249, Status*(const KernelInfo*, std::size_t, int*, const Value**)>
    get_constant_input;
inline constexpr Entry<274, Status*(const KernelContext*, void (*)(void*, std::size_t), std::size_t,
                                    std::size_t, void*)>
    parallel_for;

inline constexpr Entry<278, Status*(const KernelInfo*, MemoryType, Allocator**)> get_allocator;

// What ONNX Runtime calls; the order of the fields is the ABI. A null entry is an absent feature.
struct CustomOp {
  std::uint32_t version = kApiVersion;
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*) = nullptr;
  const char* (*get_name)(const CustomOp*) = nullptr;
  const char* (*get_execution_provider_type)(const CustomOp*) = nullptr;
  ElementType (*get_input_type)(const CustomOp*, std::size_t) = nullptr;
  std::size_t (*get_input_type_count)(const CustomOp*) = nullptr;
  ElementType (*get_output_type)(const CustomOp*, std::size_t) = nullptr;
  std::size_t (*get_output_type_count)(const CustomOp*) = nullptr;
  void (*kernel_compute)(void*, KernelContext*) = nullptr;
  void (*kernel_destroy)(void*) = nullptr;
  Characteristic (*get_input_characteristic)(const CustomOp*, std::size_t) = nullptr;
  Characteristic (*get_output_characteristic)(const CustomOp*, std::size_t) = nullptr;
  int (*get_input_memory_type)(const CustomOp*, std::size_t) = nullptr;
  int (*get_variadic_input_min_arity)(const CustomOp*) = nullptr;
  int (*get_variadic_input_homogeneity)(const CustomOp*) = nullptr;
  int (*get_variadic_output_min_arity)(const CustomOp*) = nullptr;
  int (*get_variadic_output_homogeneity)(const CustomOp*) = nullptr;
  Status* (*create_kernel_v2)(const CustomOp*, const Api*, const KernelInfo*, void**) = nullptr;
  Status* (*kernel_compute_v2)(void*, KernelContext*) = nullptr;
  Status* (*infer_output_shape)(const CustomOp*, void*) = nullptr;
  int (*get_start_version)(const CustomOp*) = nullptr;
  int (*get_end_version)(const CustomOp*) = nullptr;
  std::size_t (*get_may_inplace)(int**, int**) = nullptr;
  void (*release_may_inplace)(int*, int*) = nullptr;
  std::size_t (*get_alias_map)(int**, int**) = nullptr;
  void (*release_alias_map)(int*, int*) = nullptr;
};

}  // namespace kvconv::ort
