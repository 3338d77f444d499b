// A fake of the few ONNX Runtime functions that the op library calls, so that the op can be driven
// with any shapes, types and missing inputs at all, under the sanitizers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvconv/ort_abi.h"

namespace kvconv::test {

// A tensor in memory of exactly its size; without elements it has no memory at all.
struct FakeTensor {
  FakeTensor(ort::ElementType element_type, std::vector<std::int64_t> dims);

  std::int64_t size() const;  // elements
  std::size_t bytes() const;

  ort::ElementType type;
  std::vector<std::int64_t> shape;
  std::unique_ptr<unsigned char[]> data;
};

// A node's attributes, and its inputs that are constants of the graph.
struct FakeInfo {
  std::map<std::string, std::int64_t> ints;
  std::map<std::string, float> floats;
  std::map<std::string, std::string> strings;
  std::vector<FakeTensor*> constants;  // by input; null = not a constant; may be shorter
};

// One run: what the op reads, and what it makes.
struct FakeContext {
  std::vector<FakeTensor*> inputs;           // null = absent
  std::map<std::size_t, FakeTensor*> bound;  // output memory that the caller gives
  std::vector<ort::ElementType> types;       // of the outputs; from here on, run_node fills in
  std::vector<std::unique_ptr<FakeTensor>> made;
  std::vector<FakeTensor*> outputs;  // what get_output returned; null before it is called
};

// The fake table of functions.
const ort::Api* fake_api();

// The provider's registered op of that name which takes these types as its inputs, by index.
const ort::CustomOp& find_op(const std::string& name,
                             const std::map<std::size_t, ort::ElementType>& input_types,
                             const std::string& provider = "CPUExecutionProvider");

// What the fake gives as the stream of every run.
void* fake_stream();

// Makes a node, runs it once, and returns the message of what was refused; empty means success. The
// context needs its inputs, and memory that the caller gives for outputs; ends the test, naming
// `what`, where a status or a tensor info was not freed.
std::string run_node(const ort::CustomOp& op, const FakeInfo& info, FakeContext& context,
                     const std::string& what);

}  // namespace kvconv::test
