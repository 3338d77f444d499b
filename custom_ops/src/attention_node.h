// kvconv::FlashAttention towards ONNX Runtime: what its nodes and its table have in common on all
// providers. A provider's own part is how a run that was checked is done.
#pragma once

#include <initializer_list>
#include <vector>

#include "attention_op.h"
#include "kvconv/cache_format.h"

namespace kvconv {

// A node of a session.
class AttentionNode {
 public:
  static constexpr const char* kName = "kvconv::FlashAttention";
  static constexpr const auto& kInputNames = kAttentionInputNames;
  static constexpr std::size_t kNumOutputs = kNumAttentionOutputs;

  AttentionNode(const ort::Api* ort_api, const ort::KernelInfo* info, ort::ElementType activation,
                ort::ElementType cache)
      : api(ort_api),
        reader(ort_api, info, kAttentionInputNames),
        attributes(read_attributes(ort_api, info)),
        activation_type(data_type(activation)),
        cache_type(data_type(cache)) {}

  const ort::Api* api;

 protected:
  AttentionInputs read_inputs(const ort::KernelContext* context) const {
    AttentionInputs inputs;
    // All but the last: kernels is for the making of a node.
    for (std::size_t i = 0; i < kKernels; ++i) inputs[i] = reader(context, i);
    return inputs;
  }

  // Where the caller bound past and present to one buffer, they are one here.
  void make_outputs(ort::KernelContext* context, AttentionParams* p) const {
    p->output = make_output(api, context, kOutput,
                            {p->batch_size, p->sequence_length, p->num_heads * p->value_head_dim});
    const auto make_present = [&](AttentionOutput output, std::int64_t size) {
      return make_output(api, context, output,
                         {p->batch_size, p->kv_num_heads, p->present_capacity, size});
    };
    p->present_key =
        make_present(kPresentKey, cache_row_size(key_type(p->cache_type), p->head_dim));
    p->present_value =
        make_present(kPresentValue, cache_row_size(p->cache_type, p->value_head_dim));
    if (!is_quantized(p->cache_type)) return;
    p->present_key_scale =
        static_cast<std::uint16_t*>(make_present(kPresentKeyScale, num_groups(p->head_dim)));
    p->present_value_scale = static_cast<std::uint16_t*>(
        make_present(kPresentValueScale, num_groups(p->value_head_dim)));
  }

  InputReader<kNumAttentionInputs> reader;
  AttentionAttributes attributes;
  DataType activation_type;
  DataType cache_type;
};

// An entry of the op's table: a provider's nodes of these types. Node has kProvider besides.
template <typename Node>
struct FlashAttentionOp : OpEntry<FlashAttentionOp<Node>, Node> {
  FlashAttentionOp(ort::ElementType activation_type, ort::ElementType cache_type)
      : activation(activation_type), cache(cache_type) {
    this->get_execution_provider_type = [](const ort::CustomOp*) { return Node::kProvider; };
    this->get_input_memory_type = [](const ort::CustomOp*, std::size_t index) -> int {
      return index == kKernels ? ort::kCpuInput : ort::kProviderMemory;
    };
    this->get_output_characteristic = [](const ort::CustomOp*, std::size_t index) {
      return index <= kPresentValue ? ort::kRequired : ort::kOptional;
    };
  }

  ort::ElementType input_type(std::size_t index) const {
    switch (index) {
      case kQuery:
      case kKey:
      case kValue:
      case kAttentionBias:
        return activation;
      case kPastKey:
      case kPastValue:
        return cache;
      case kAttentionMask:
        return ort::kInt64;
      case kPastKeyScale:
      case kPastValueScale:
        return ort::kBFloat16;
      case kPastSequenceLength:
        return ort::kInt32;
      case kKernels:
        return ort::kUInt8;
      default:
        return ort::kFloat32;
    }
  }

  ort::ElementType output_type(std::size_t index) const {
    if (index == kOutput) return activation;
    return index == kPresentKey || index == kPresentValue ? cache : ort::kBFloat16;
  }

  static bool requires_input(std::size_t index) {
    return index == kQuery || index == kPastKey || index == kPastValue;
  }

  Node make_node(const ort::Api* api, const ort::KernelInfo* info) const {
    return Node(api, info, activation, cache);
  }

  ort::ElementType activation;
  ort::ElementType cache;
};

// A provider's entries, made once: these activations over every type of cache.
template <typename Node>
std::vector<const ort::CustomOp*> attention_table(
    std::initializer_list<ort::ElementType> activations) {
  static const std::vector<FlashAttentionOp<Node>> table = [&] {
    std::vector<FlashAttentionOp<Node>> ops;
    // uint8: int4 caches.
    for (ort::ElementType activation : activations) {
      for (ort::ElementType cache :
           {ort::kFloat32, ort::kFloat16, ort::kBFloat16, ort::kInt8, ort::kUInt8}) {
        ops.emplace_back(activation, cache);
      }
    }
    return ops;
  }();
  std::vector<const ort::CustomOp*> pointers;
  for (const FlashAttentionOp<Node>& op : table) pointers.push_back(&op);
  return pointers;
}

}  // namespace kvconv
