// What an op's face needs from ONNX Runtime: errors that become statuses, and tensors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "kvconv/kernel.h"
#include "kvconv/ort_abi.h"
#include "kvconv/text.h"

namespace kvconv {

// A complaint about the caller's values; becomes an ONNX Runtime status at the border.
struct OpError {
  std::string message;
  ort::ErrorCode code = ort::kInvalidArgument;
};

[[noreturn]] inline void refuse(const std::string& message,
                                ort::ErrorCode code = ort::kInvalidArgument) {
  throw OpError{message, code};
}

// A status that ONNX Runtime gave us, on its way back to it.
struct OrtFailure {
  ort::Status* status;
};

inline void throw_if_failed(ort::Status* status) {
  if (status != nullptr) throw OrtFailure{status};
}

// Runs `body` and returns null, or the status that tells what it threw: nothing crosses the ABI.
// Complaints begin with `who`, the op.
template <typename Body>
ort::Status* guarded(const ort::Api* api, const char* who, const Body& body) noexcept {
  try {
    try {
      body();
      return nullptr;
    } catch (const OrtFailure& failure) {
      return failure.status;
    } catch (const OpError& error) {
      return ort::create_status(api, error.code, text(who, ": ", error.message).c_str());
    }
  } catch (const std::bad_alloc&) {
    return ort::create_status(api, ort::kFail, "kvconv: out of memory.");
  } catch (...) {
    return ort::create_status(api, ort::kFail, "kvconv: an unexpected C++ exception.");
  }
}

// The dimensions of a tensor, held in place: an op reads several at every run.
class Shape {
 public:
  static constexpr std::size_t kMaxRank = 8;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);

  std::size_t size() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  std::int64_t* data() { return dims_.data(); }
  const std::int64_t* data() const { return dims_.data(); }
  std::int64_t* begin() { return data(); }
  std::int64_t* end() { return data() + rank_; }
  const std::int64_t* begin() const { return data(); }
  const std::int64_t* end() const { return data() + rank_; }
  std::int64_t operator[](std::size_t axis) const { return dims_[axis]; }
  std::int64_t& back() { return dims_[rank_ - 1]; }
  std::int64_t back() const { return dims_[rank_ - 1]; }
  bool operator==(const Shape& other) const;

  // Refuses a rank of more than kMaxRank, naming the tensor. What new dimensions are is undefined.
  void resize(std::size_t rank, const char* name);
  void push_back(std::int64_t dim, const char* name);

  // The product of all dimensions but the last.
  std::int64_t num_rows() const;

 private:
  std::array<std::int64_t, kMaxRank> dims_ = {};
  std::size_t rank_ = 0;
};

// An input as the graph gives it; an absent optional input has no value.
struct Tensor {
  const char* name = "";  // the op's for this input
  bool exists = false;
  ort::ElementType type = ort::kFloat32;
  Shape shape;
  const void* data = nullptr;  // may be null when the tensor has no elements
};

// "float16"; 4 and 5 bits are the two halves of an "int4" cache.
const char* name_of(DataType type);

// A shape as complaints spell it: [2, 3].
std::string shape_text(std::span<const std::int64_t> shape);

// The types of kernels and of ONNX; uint8 is an int4 cache.
ort::ElementType element_type(DataType type);
DataType data_type(ort::ElementType type);

// Refuses an input of another type, unless it is absent.
void require_type(const Tensor& tensor, ort::ElementType type);

Tensor read_input(const ort::Api* api, const ort::KernelContext* context, std::size_t index,
                  const char* name);

// An input that is a constant of the graph; any other counts as absent.
Tensor read_constant(const ort::Api* api, const ort::KernelInfo* info, std::size_t index,
                     const char* name);

// Reads a node's inputs. Constants, which stay where they are as long as the session lives, are
// read once: asking ONNX Runtime for a tensor takes as long as a short row of arithmetic.
template <std::size_t count>
class InputReader {
 public:
  InputReader(const ort::Api* api, const ort::KernelInfo* info,
              const std::array<const char*, count>& names)
      : api_(api) {
    for (std::size_t i = 0; i < count; ++i) constants_[i] = read_constant(api, info, i, names[i]);
  }

  Tensor operator()(const ort::KernelContext* context, std::size_t index) const {
    const Tensor& constant = constants_[index];
    return constant.exists ? constant : read_input(api_, context, index, constant.name);
  }

  // An input that is a constant of the graph; any other counts as absent.
  const Tensor& constant(std::size_t index) const { return constants_[index]; }

 private:
  const ort::Api* api_;
  std::array<Tensor, count> constants_;
};

// Makes output `index` with the shape and returns its memory; null when it has no elements.
void* make_output(const ort::Api* api, ort::KernelContext* context, std::size_t index,
                  const Shape& shape);

// An attribute's value, or the default where the node has no such attribute. A value of another
// type is an OpError.
std::int64_t read_int(const ort::Api* api, const ort::KernelInfo* info, const char* name,
                      std::int64_t default_value);
float read_float(const ort::Api* api, const ort::KernelInfo* info, const char* name,
                 float default_value);
std::string read_string(const ort::Api* api, const ort::KernelInfo* info, const char* name,
                        const std::string& default_value);

// Memory that a kernel works in, 64-byte aligned, contents undefined.
class Workspace {
 public:
  void reserve(std::size_t bytes);
  void* get() const { return memory_.get(); }

 private:
  struct Delete {
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Delete> memory_;
  std::size_t bytes_ = 0;
};

// A Workspace of at least so many bytes, for the duration of a run. Each thread that runs sessions
// keeps its last one for the next run; it is taken out of its place while in use, so that a nested
// run would get another.
class BorrowedWorkspace {
 public:
  explicit BorrowedWorkspace(std::size_t bytes);
  ~BorrowedWorkspace();
  BorrowedWorkspace(const BorrowedWorkspace&) = delete;
  BorrowedWorkspace& operator=(const BorrowedWorkspace&) = delete;
  void* get() const { return workspace_.get(); }

 private:
  Workspace workspace_;
};

// ONNX Runtime's own threads, as the kernels ask for them.
class Pool {
 public:
  Pool(const ort::Api* api, const ort::KernelContext* context) : api_(api), context_(context) {}
  ParallelFor parallel_for();
  // Throws what ONNX Runtime complained about, if anything.
  void throw_if_failed() const;

 private:
  static void run(void* pool, void (*task)(void*, std::size_t), void* data, std::size_t count);

  const ort::Api* api_;
  const ort::KernelContext* context_;
  ort::Status* failure_ = nullptr;
};

// An entry of an op's table, all but what tells the entries apart.
//
// Op, the derived class, has input_type(index), output_type(index), requires_input(index), and
// make_node(api, info) for a node of a session. A Node has kName ("kvconv::" and the op's name),
// kInputNames, kNumOutputs, api, and compute(context) for a run. The last of each throws OpError.
template <typename Op, typename Node>
struct OpEntry : ort::CustomOp {
  OpEntry() {
    get_name = [](const ort::CustomOp*) {
      return Node::kName + std::string_view("kvconv::").size();
    };
    get_execution_provider_type = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
    get_input_type = [](const ort::CustomOp* op, std::size_t index) {
      return static_cast<const Op*>(op)->input_type(index);
    };
    get_input_type_count = [](const ort::CustomOp*) -> std::size_t {
      return Node::kInputNames.size();
    };
    get_output_type = [](const ort::CustomOp* op, std::size_t index) {
      return static_cast<const Op*>(op)->output_type(index);
    };
    get_output_type_count = [](const ort::CustomOp*) -> std::size_t { return Node::kNumOutputs; };
    get_input_characteristic = [](const ort::CustomOp*, std::size_t index) {
      return Op::requires_input(index) ? ort::kRequired : ort::kOptional;
    };
    get_output_characteristic = [](const ort::CustomOp*, std::size_t) { return ort::kRequired; };
    get_input_memory_type = [](const ort::CustomOp*, std::size_t) -> int {
      return ort::kProviderMemory;
    };
    create_kernel_v2 = [](const ort::CustomOp* op, const ort::Api* api, const ort::KernelInfo* info,
                          void** node) {
      return guarded(api, Node::kName,
                     [&] { *node = new Node(static_cast<const Op*>(op)->make_node(api, info)); });
    };
    kernel_compute_v2 = [](void* node, ort::KernelContext* context) {
      const auto* self = static_cast<const Node*>(node);
      return guarded(self->api, Node::kName, [&] { self->compute(context); });
    };
    kernel_destroy = [](void* node) { delete static_cast<Node*>(node); };
  }
};

}  // namespace kvconv
