#include "fake_ort.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <thread>

#include "check.h"

extern "C" kvconv::ort::Status* RegisterCustomOps(kvconv::ort::SessionOptions* options,
                                                  const kvconv::ort::ApiBase* base);

namespace kvconv::test {
namespace {

struct FakeStatus {
  std::string message;
};

std::atomic<std::int64_t> live_objects = 0;
std::vector<const ort::CustomOp*> ops;

ort::Status* make_status(const std::string& message) {
  ++live_objects;
  return reinterpret_cast<ort::Status*>(new FakeStatus{message});
}

ort::Status* create_status(ort::ErrorCode, const char* message) { return make_status(message); }

void release_status(ort::Status* status) {
  --live_objects;
  delete reinterpret_cast<FakeStatus*>(status);
}

// Takes a status apart and frees it; empty means success.
std::string take_message(ort::Status* status) {
  if (status == nullptr) return "";
  std::string message = reinterpret_cast<FakeStatus*>(status)->message;
  release_status(status);
  return message;
}

ort::Status* create_domain(const char*, ort::CustomOpDomain** domain) {
  static int place;
  *domain = reinterpret_cast<ort::CustomOpDomain*>(&place);
  return nullptr;
}

ort::Status* add_op(ort::CustomOpDomain*, const ort::CustomOp* op) {
  ops.push_back(op);
  return nullptr;
}

ort::Status* add_domain(ort::SessionOptions*, ort::CustomOpDomain*) { return nullptr; }

const FakeTensor* tensor_of(const void* handle) { return static_cast<const FakeTensor*>(handle); }

ort::Status* get_data(ort::Value* value, void** data) {
  *data = tensor_of(value)->data.get();
  return nullptr;
}

ort::Status* get_info(const ort::Value* value, ort::TensorInfo** info) {
  ++live_objects;
  *info = reinterpret_cast<ort::TensorInfo*>(const_cast<ort::Value*>(value));
  return nullptr;
}

void release_info(ort::TensorInfo*) { --live_objects; }

ort::Status* get_type(const ort::TensorInfo* info, ort::ElementType* type) {
  *type = tensor_of(info)->type;
  return nullptr;
}

ort::Status* get_rank(const ort::TensorInfo* info, std::size_t* rank) {
  *rank = tensor_of(info)->shape.size();
  return nullptr;
}

ort::Status* get_dims(const ort::TensorInfo* info, std::int64_t* dims, std::size_t count) {
  const std::vector<std::int64_t>& shape = tensor_of(info)->shape;
  CHECK(count == shape.size(), "asked for %zu of %zu dimensions", count, shape.size());
  for (std::size_t i = 0; i < count; ++i) dims[i] = shape[i];
  return nullptr;
}

template <typename T>
ort::Status* find(const std::map<std::string, T>& attributes, const char* name, T* value) {
  const auto found = attributes.find(name);
  if (found == attributes.end()) return make_status("no such attribute");
  *value = found->second;
  return nullptr;
}

const FakeInfo& info_of(const ort::KernelInfo* info) {
  return *reinterpret_cast<const FakeInfo*>(info);
}

ort::Status* get_float(const ort::KernelInfo* info, const char* name, float* value) {
  return find(info_of(info).floats, name, value);
}

ort::Status* get_int(const ort::KernelInfo* info, const char* name, std::int64_t* value) {
  return find(info_of(info).ints, name, value);
}

ort::Status* get_string(const ort::KernelInfo* info, const char* name, char* out,
                        std::size_t* size) {
  std::string value;
  if (ort::Status* status = find(info_of(info).strings, name, &value)) return status;
  if (out != nullptr) std::memcpy(out, value.c_str(), value.size() + 1);
  *size = value.size() + 1;
  return nullptr;
}

ort::Status* get_constant(const ort::KernelInfo* info, std::size_t index, int* is_constant,
                          const ort::Value** value) {
  const std::vector<FakeTensor*>& constants = info_of(info).constants;
  *is_constant = index < constants.size() && constants[index] != nullptr ? 1 : 0;
  if (*is_constant != 0) *value = reinterpret_cast<const ort::Value*>(constants[index]);
  return nullptr;
}

FakeContext& context_of(const ort::KernelContext* context) {
  return *reinterpret_cast<FakeContext*>(const_cast<ort::KernelContext*>(context));
}

ort::Status* get_input(const ort::KernelContext* context, std::size_t index,
                       const ort::Value** value) {
  *value = reinterpret_cast<const ort::Value*>(context_of(context).inputs.at(index));
  return nullptr;
}

ort::Status* get_output(ort::KernelContext* handle, std::size_t index, const std::int64_t* dims,
                        std::size_t count, ort::Value** value) {
  FakeContext& context = context_of(handle);
  const std::vector<std::int64_t> shape(dims, dims + count);
  FakeTensor* tensor = nullptr;
  if (const auto found = context.bound.find(index); found != context.bound.end()) {
    tensor = found->second;
    if (tensor->shape != shape) return make_status("the bound output has another shape");
  } else {
    context.made.push_back(std::make_unique<FakeTensor>(context.types.at(index), shape));
    tensor = context.made.back().get();
  }
  context.outputs.at(index) = tensor;
  *value = reinterpret_cast<ort::Value*>(tensor);
  return nullptr;
}

ort::Status* parallel_for(const ort::KernelContext*, void (*task)(void*, std::size_t),
                          std::size_t total, std::size_t, void* data) {
  std::thread other([=] {
    for (std::size_t i = 1; i < total; i += 2) task(data, i);
  });
  for (std::size_t i = 0; i < total; i += 2) task(data, i);
  other.join();
  return nullptr;
}

// The allocator of a provider's memory, which here is the process's own; counted like statuses.
ort::Status* get_allocator(const ort::KernelInfo*, ort::MemoryType type,
                           ort::Allocator** allocator) {
  CHECK(type == ort::kProviderMemory, "memory type %d was asked for", static_cast<int>(type));
  ++live_objects;
  static int place;
  *allocator = reinterpret_cast<ort::Allocator*>(&place);
  return nullptr;
}

void release_allocator(ort::Allocator*) { --live_objects; }

ort::Status* allocator_info(const ort::Allocator*, const ort::MemoryInfo** info) {
  static int place;
  *info = reinterpret_cast<const ort::MemoryInfo*>(&place);
  return nullptr;
}

ort::Status* memory_id(const ort::MemoryInfo*, int* id) {
  *id = 0;
  return nullptr;
}

ort::Status* allocate(ort::Allocator*, std::size_t bytes, void** memory) {
  ++live_objects;
  *memory = ::operator new(bytes, std::align_val_t{256});
  return nullptr;
}

ort::Status* free_memory(ort::Allocator*, void* memory) {
  --live_objects;
  ::operator delete(memory, std::align_val_t{256});
  return nullptr;
}

ort::Status* get_stream(const ort::KernelContext*, void** stream) {
  *stream = fake_stream();
  return nullptr;
}

void missing() { CHECK(false, "the library called a function that the fake does not have"); }

// One slot of the table: Entry's own slot number and signature.
template <typename Entry>
void fill(std::vector<void (*)()>& slots, const Entry&, typename Entry::Pointer function) {
  slots[Entry::slot] = reinterpret_cast<void (*)()>(function);
}

const char* version_string() { return "fake"; }

const ort::Api* get_api(std::uint32_t) { return fake_api(); }

// Registers the library with the fake and returns its ops.
const std::vector<const ort::CustomOp*>& registered_ops() {
  if (ops.empty()) {
    const ort::ApiBase base{get_api, version_string};
    const std::string message = take_message(RegisterCustomOps(nullptr, &base));
    CHECK(message.empty(), "registering failed: %s", message.c_str());
  }
  return ops;
}

}  // namespace

FakeTensor::FakeTensor(ort::ElementType element_type, std::vector<std::int64_t> dims)
    : type(element_type), shape(std::move(dims)) {
  if (size() == 0) return;
  data.reset(new unsigned char[bytes()]);
  std::memset(data.get(), 0xFF, bytes());  // NaN in every float type
}

std::int64_t FakeTensor::size() const {
  std::int64_t product = 1;
  for (std::int64_t dim : shape) {
    if (dim == 0) return 0;
    product *= dim;
  }
  return product;
}

std::size_t FakeTensor::bytes() const {
  const std::size_t width = type == ort::kInt64                            ? 8
                            : type == ort::kFloat32 || type == ort::kInt32 ? 4
                            : type == ort::kInt8 || type == ort::kUInt8    ? 1
                                                                           : 2;
  return static_cast<std::size_t>(size()) * width;
}

const ort::Api* fake_api() {
  static const std::vector<void (*)()> table = [] {
    std::vector<void (*)()> slots(400, missing);
    fill(slots, ort::create_status, create_status);
    fill(slots, ort::release_status, release_status);
    fill(slots, ort::create_custom_op_domain, create_domain);
    fill(slots, ort::custom_op_domain_add, add_op);
    fill(slots, ort::add_custom_op_domain, add_domain);
    fill(slots, ort::get_tensor_mutable_data, get_data);
    fill(slots, ort::get_tensor_type_and_shape, get_info);
    fill(slots, ort::release_tensor_info, release_info);
    fill(slots, ort::get_tensor_element_type, get_type);
    fill(slots, ort::get_dimensions_count, get_rank);
    fill(slots, ort::get_dimensions, get_dims);
    fill(slots, ort::get_attribute_float, get_float);
    fill(slots, ort::get_attribute_int64, get_int);
    fill(slots, ort::get_attribute_string, get_string);
    fill(slots, ort::get_constant_input, get_constant);
    fill(slots, ort::get_input, get_input);
    fill(slots, ort::get_output, get_output);
    fill(slots, ort::parallel_for, parallel_for);
    fill(slots, ort::get_allocator, get_allocator);
    fill(slots, ort::release_allocator, release_allocator);
    fill(slots, ort::allocator_get_info, allocator_info);
    fill(slots, ort::memory_info_get_id, memory_id);
    fill(slots, ort::allocator_alloc, allocate);
    fill(slots, ort::allocator_free, free_memory);
    fill(slots, ort::get_gpu_compute_stream, get_stream);
    return slots;
  }();
  return reinterpret_cast<const ort::Api*>(table.data());
}

const ort::CustomOp& find_op(const std::string& name,
                             const std::map<std::size_t, ort::ElementType>& input_types,
                             const std::string& provider) {
  for (const ort::CustomOp* op : registered_ops()) {
    const bool fits = std::all_of(input_types.begin(), input_types.end(), [&](const auto& input) {
      return input.first < op->get_input_type_count(op) &&
             op->get_input_type(op, input.first) == input.second;
    });
    if (op->get_name(op) == name && op->get_execution_provider_type(op) == provider && fits) {
      return *op;
    }
  }
  CHECK(false, "no %s takes these types", name.c_str());
  std::abort();
}

void* fake_stream() {
  static int place;
  return &place;
}

std::string run_node(const ort::CustomOp& op, const FakeInfo& info, FakeContext& context,
                     const std::string& what) {
  const std::size_t num_outputs = op.get_output_type_count(&op);
  for (std::size_t i = 0; i < num_outputs; ++i) {
    context.types.push_back(op.get_output_type(&op, i));
  }
  context.outputs.resize(num_outputs);
  const std::int64_t live = live_objects;
  void* node = nullptr;
  std::string message = take_message(
      op.create_kernel_v2(&op, fake_api(), reinterpret_cast<const ort::KernelInfo*>(&info), &node));
  if (message.empty()) {
    message =
        take_message(op.kernel_compute_v2(node, reinterpret_cast<ort::KernelContext*>(&context)));
    op.kernel_destroy(node);
  }
  CHECK(live_objects == live, "%s: an object of ONNX Runtime was not freed", what.c_str());
  return message;
}

}  // namespace kvconv::test
