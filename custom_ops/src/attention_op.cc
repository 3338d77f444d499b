// kvconv::FlashAttention towards ONNX Runtime: a run from inputs to outputs, and the table of its
// types. The checks are in attention_check.cc, the arithmetic in cpu/.
#include "attention_op.h"

#include "kvconv/cache_format.h"
#include "ops.h"

namespace kvconv {
namespace {

// A node of a session.
struct FlashAttentionNode {
  static constexpr const char* kName = "kvconv::FlashAttention";
  static constexpr const auto& kInputNames = kAttentionInputNames;
  static constexpr std::size_t kNumOutputs = kNumAttentionOutputs;

  const ort::Api* api;
  InputReader<kNumAttentionInputs> reader;
  AttentionAttributes attributes;
  DataType activation_type;
  DataType cache_type;

  void compute(ort::KernelContext* context) const {
    // 1. Read and check everything, before anything is written.
    AttentionInputs inputs;
    for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = reader(context, i);
    AttentionParams p = check_inputs(attributes, inputs, activation_type, cache_type);

    // 2. The outputs. Where the caller bound past and present to one buffer, they are one here.
    p.output = make_output(api, context, kOutput,
                           {p.batch_size, p.sequence_length, p.num_heads * p.value_head_dim});
    const DataType key_rows = key_type(p.cache_type);
    p.present_key = make_present(context, p, kPresentKey, cache_row_size(key_rows, p.head_dim));
    p.present_value =
        make_present(context, p, kPresentValue, cache_row_size(p.cache_type, p.value_head_dim));
    if (is_quantized(p.cache_type)) {
      p.present_key_scale = static_cast<std::uint16_t*>(
          make_present(context, p, kPresentKeyScale, num_groups(p.head_dim)));
      p.present_value_scale = static_cast<std::uint16_t*>(
          make_present(context, p, kPresentValueScale, num_groups(p.value_head_dim)));
    }
    if (p.batch_size == 0 || p.total_sequence_length == 0) return;

    // 3. Run.
    const FlashKernel& kernel = flash_kernels().front();
    Pool pool(api, context);
    const ParallelFor parallel_for = pool.parallel_for();
    const BorrowedWorkspace workspace(kernel.workspace_bytes(p, parallel_for.num_workers));
    kernel.run(p, workspace.get(), parallel_for);
    pool.throw_if_failed();
  }

 private:
  // An output [B, K, C, size].
  void* make_present(ort::KernelContext* context, const AttentionParams& p, AttentionOutput output,
                     std::int64_t size) const {
    return make_output(api, context, output,
                       {p.batch_size, p.kv_num_heads, p.present_capacity, size});
  }
};

struct FlashAttentionOp : CpuOp<FlashAttentionOp, FlashAttentionNode> {
  FlashAttentionOp(ort::ElementType activation_type, ort::ElementType cache_type)
      : activation(activation_type), cache(cache_type) {
    get_output_characteristic = [](const ort::CustomOp*, std::size_t index) {
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

  FlashAttentionNode make_node(const ort::Api* api, const ort::KernelInfo* info) const {
    return {api,
            {api, info, kAttentionInputNames},
            read_attributes(api, info),
            data_type(activation),
            data_type(cache)};
  }

  ort::ElementType activation;
  ort::ElementType cache;
};

}  // namespace

std::vector<const ort::CustomOp*> attention_ops() {
  static const std::vector<FlashAttentionOp> table = [] {
    std::vector<FlashAttentionOp> ops;
    // uint8: int4 caches.
    for (ort::ElementType activation : {ort::kFloat32, ort::kFloat16}) {
      for (ort::ElementType cache :
           {ort::kFloat32, ort::kFloat16, ort::kBFloat16, ort::kInt8, ort::kUInt8}) {
        ops.emplace_back(activation, cache);
      }
    }
    return ops;
  }();
  std::vector<const ort::CustomOp*> pointers;
  for (const FlashAttentionOp& op : table) pointers.push_back(&op);
  return pointers;
}

}  // namespace kvconv
