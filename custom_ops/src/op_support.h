// What an op's face needs from ONNX Runtime: errors that become statuses, and tensors.
#pragma once

#include <cstdint>
#include <new>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kvconv/ort_abi.h"

namespace kvconv {

// Joins its arguments into one string.
template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// A complaint about the caller's values; becomes an ONNX Runtime status at the border.
struct OpError {
  std::string message;
  ort::ErrorCode code = ort::kInvalidArgument;
};

[[noreturn]] inline void refuse(const std::string& message,
                                ort::ErrorCode code = ort::kInvalidArgument) {
  throw OpError{"kvconv::FlashAttention: " + message, code};
}

// A status that ONNX Runtime gave us, on its way back to it.
struct OrtFailure {
  ort::Status* status;
};

inline void throw_if_failed(ort::Status* status) {
  if (status != nullptr) throw OrtFailure{status};
}

// Runs `body` and returns null, or the status that tells what it threw: nothing crosses the ABI.
template <typename Body>
ort::Status* guarded(const ort::Api* api, const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const OrtFailure& failure) {
    return failure.status;
  } catch (const OpError& error) {
    return ort::create_status(api, error.code, error.message.c_str());
  } catch (const std::bad_alloc&) {
    return ort::create_status(api, ort::kFail, "kvconv: out of memory.");
  } catch (...) {
    return ort::create_status(api, ort::kFail, "kvconv: an unexpected C++ exception.");
  }
}

// An input as the graph gives it; an absent optional input has no value.
struct Tensor {
  bool exists = false;
  ort::ElementType type = ort::kFloat32;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;  // may be null when the tensor has no elements
};

Tensor read_input(const ort::Api* api, const ort::KernelContext* context, std::size_t index);

// Makes output `index` with the shape and returns its memory; null when it has no elements.
void* make_output(const ort::Api* api, ort::KernelContext* context, std::size_t index,
                  const std::vector<std::int64_t>& shape);

// An attribute's value, or the default where the node has no such attribute. A value of another
// type is an OpError.
std::int64_t read_int(const ort::Api* api, const ort::KernelInfo* info, const char* name,
                      std::int64_t default_value);
float read_float(const ort::Api* api, const ort::KernelInfo* info, const char* name,
                 float default_value);
std::string read_string(const ort::Api* api, const ort::KernelInfo* info, const char* name,
                        const std::string& default_value);

}  // namespace kvconv
