// Reading a node and making its outputs, over the C ABI.
#include "op_support.h"

#include <algorithm>
#include <thread>

namespace kvconv {
namespace {

// Frees the status and tells whether it meant success.
bool succeeded(const ort::Api* api, ort::Status* status) {
  if (status == nullptr) return true;
  ort::release_status(api, status);
  return false;
}

// ONNX Runtime reports an absent attribute and one of another type alike; this tells them apart.
void throw_if_other_type(const ort::Api* api, const ort::KernelInfo* info, const char* name,
                         const char* wanted) {
  std::int64_t number = 0;
  float real = 0.0F;
  std::size_t size = 0;
  if (succeeded(api, ort::get_attribute_int64(api, info, name, &number)) ||
      succeeded(api, ort::get_attribute_float(api, info, name, &real)) ||
      succeeded(api, ort::get_attribute_string(api, info, name, nullptr, &size))) {
    refuse(text("attribute ", name, " must be ", wanted, "."));
  }
}

constexpr std::align_val_t kAlignment{64};

thread_local Workspace thread_workspace;

std::int64_t num_workers() {
  static const std::int64_t count =
      std::clamp<std::int64_t>(std::thread::hardware_concurrency(), 1, 256);
  return count;
}

}  // namespace

Shape::Shape(std::initializer_list<std::int64_t> dims) : rank_(dims.size()) {
  std::copy(dims.begin(), dims.end(), begin());
}

bool Shape::operator==(const Shape& other) const {
  return std::equal(begin(), end(), other.begin(), other.end());
}

void Shape::resize(std::size_t rank, const char* name) {
  if (rank > kMaxRank) {
    refuse(text(name, " has rank ", rank, "; this op takes at most ", kMaxRank, "."));
  }
  rank_ = rank;
}

void Shape::push_back(std::int64_t dim, const char* name) {
  resize(rank_ + 1, name);
  back() = dim;
}

std::int64_t Shape::num_rows() const {
  std::int64_t product = 1;
  for (std::size_t axis = 0; axis + 1 < rank_; ++axis) {
    if (dims_[axis] == 0) return 0;
    product *= dims_[axis];
  }
  return product;
}

const char* name_of(DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return "float16";
    case DataType::kBFloat16:
      return "bfloat16";
    case DataType::kInt8:
      return "int8";
    case DataType::kInt4:
    case DataType::kInt5:
      return "int4";
    default:
      return "float32";
  }
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string result = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    result += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return result + "]";
}

ort::ElementType element_type(DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return ort::kFloat16;
    case DataType::kBFloat16:
      return ort::kBFloat16;
    case DataType::kInt8:
      return ort::kInt8;
    case DataType::kInt4:
    case DataType::kInt5:
      return ort::kUInt8;
    default:
      return ort::kFloat32;
  }
}

DataType data_type(ort::ElementType type) {
  if (type == ort::kFloat16) return DataType::kFloat16;
  if (type == ort::kBFloat16) return DataType::kBFloat16;
  if (type == ort::kInt8) return DataType::kInt8;
  if (type == ort::kUInt8) return DataType::kInt4;
  return DataType::kFloat32;
}

void require_type(const Tensor& tensor, ort::ElementType type) {
  if (!tensor.exists || tensor.type == type) return;
  refuse(
      text(tensor.name, " has ONNX element type ", tensor.type, "; this node takes ", type, "."));
}

namespace {

Tensor read_value(const ort::Api* api, const ort::Value* value, const char* name) {
  Tensor tensor;
  tensor.name = name;
  if (value == nullptr) return tensor;
  tensor.exists = true;

  ort::TensorInfo* info = nullptr;
  throw_if_failed(ort::get_tensor_type_and_shape(api, value, &info));
  struct Release {
    const ort::Api* api;
    ort::TensorInfo* info;
    ~Release() { ort::release_tensor_info(api, info); }
  } release{api, info};
  throw_if_failed(ort::get_tensor_element_type(api, info, &tensor.type));
  std::size_t rank = 0;
  throw_if_failed(ort::get_dimensions_count(api, info, &rank));
  tensor.shape.resize(rank, name);
  throw_if_failed(ort::get_dimensions(api, info, tensor.shape.data(), rank));

  void* data = nullptr;  // the ABI has no const variant at this version; nothing is written
  throw_if_failed(ort::get_tensor_mutable_data(api, const_cast<ort::Value*>(value), &data));
  tensor.data = data;
  return tensor;
}

}  // namespace

Tensor read_input(const ort::Api* api, const ort::KernelContext* context, std::size_t index,
                  const char* name) {
  const ort::Value* value = nullptr;
  throw_if_failed(ort::get_input(api, context, index, &value));
  return read_value(api, value, name);
}

Tensor read_constant(const ort::Api* api, const ort::KernelInfo* info, std::size_t index,
                     const char* name) {
  int is_constant = 0;
  const ort::Value* value = nullptr;
  throw_if_failed(ort::get_constant_input(api, info, index, &is_constant, &value));
  return read_value(api, is_constant != 0 ? value : nullptr, name);
}

void* make_output(const ort::Api* api, ort::KernelContext* context, std::size_t index,
                  const Shape& shape) {
  ort::Value* value = nullptr;
  throw_if_failed(ort::get_output(api, context, index, shape.data(), shape.size(), &value));
  if (value == nullptr) {
    refuse(text("output ", index, " is absent; every output that this op makes must be there."));
  }
  void* data = nullptr;
  throw_if_failed(ort::get_tensor_mutable_data(api, value, &data));
  return data;
}

std::int64_t read_int(const ort::Api* api, const ort::KernelInfo* info, const char* name,
                      std::int64_t default_value) {
  std::int64_t value = 0;
  if (succeeded(api, ort::get_attribute_int64(api, info, name, &value))) return value;
  throw_if_other_type(api, info, name, "an integer");
  return default_value;
}

float read_float(const ort::Api* api, const ort::KernelInfo* info, const char* name,
                 float default_value) {
  float value = 0.0F;
  if (succeeded(api, ort::get_attribute_float(api, info, name, &value))) return value;
  throw_if_other_type(api, info, name, "a float");
  return default_value;
}

std::string read_string(const ort::Api* api, const ort::KernelInfo* info, const char* name,
                        const std::string& default_value) {
  std::size_t size = 0;  // with the terminating zero
  if (!succeeded(api, ort::get_attribute_string(api, info, name, nullptr, &size))) {
    throw_if_other_type(api, info, name, "a string");
    return default_value;
  }
  std::string value(size, '\0');
  throw_if_failed(ort::get_attribute_string(api, info, name, value.data(), &size));
  value.resize(size > 0 ? size - 1 : 0);
  return value;
}

void Workspace::reserve(std::size_t bytes) {
  if (bytes <= bytes_) return;
  memory_.reset();
  bytes_ = 0;
  memory_.reset(::operator new(bytes, kAlignment));
  bytes_ = bytes;
}

void Workspace::Delete::operator()(void* memory) const { ::operator delete(memory, kAlignment); }

BorrowedWorkspace::BorrowedWorkspace(std::size_t bytes)
    : workspace_(std::exchange(thread_workspace, Workspace())) {
  workspace_.reserve(bytes);
}

BorrowedWorkspace::~BorrowedWorkspace() { thread_workspace = std::move(workspace_); }

ParallelFor Pool::parallel_for() { return {run, this, num_workers()}; }

void Pool::throw_if_failed() const { kvconv::throw_if_failed(failure_); }

void Pool::run(void* pool, void (*task)(void*, std::size_t), void* data, std::size_t count) {
  Pool* self = static_cast<Pool*>(pool);
  ort::Status* status = ort::parallel_for(self->api_, self->context_, task, count, 0, data);
  if (status == nullptr) return;
  if (self->failure_ != nullptr) ort::release_status(self->api_, self->failure_);
  self->failure_ = status;
}

}  // namespace kvconv
