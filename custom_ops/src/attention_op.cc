// kvconv::FlashAttention towards ONNX Runtime: the table of its types, kernel creation, and a run
// from inputs to outputs. The checks are in attention_check.cc, the arithmetic in cpu/.
#include "attention_op.h"

namespace kvconv {
namespace {

constexpr const char* kName = "kvconv::FlashAttention";

// One entry of the table.
struct FlashAttentionOp : ort::CustomOp {
  FlashAttentionOp(const char* provider, ort::ElementType activation, ort::ElementType cache);

  const char* provider;
  ort::ElementType activation;
  ort::ElementType cache;
};

// A node of a session.
struct FlashAttentionNode {
  const ort::Api* api;
  InputReader<kNumAttentionInputs> reader;
  AttentionAttributes attributes;
  DataType activation_type;
  DataType cache_type;
};

bool is_float(ort::ElementType type) {
  return type == ort::kFloat32 || type == ort::kFloat16 || type == ort::kBFloat16;
}

void compute(const FlashAttentionNode& node, ort::KernelContext* context) {
  // 1. Read and check everything, before anything is written.
  AttentionInputs inputs;
  for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = node.reader(context, i);
  AttentionParams p = check_inputs(node.attributes, inputs, node.activation_type, node.cache_type);

  // 2. The outputs. Where the caller bound past and present to one buffer, they are one here.
  p.output = make_output(node.api, context, kOutput,
                         {p.batch_size, p.sequence_length, p.num_heads * p.value_head_dim});
  p.present_key = make_output(node.api, context, kPresentKey,
                              {p.batch_size, p.kv_num_heads, p.present_capacity, p.head_dim});
  p.present_value =
      make_output(node.api, context, kPresentValue,
                  {p.batch_size, p.kv_num_heads, p.present_capacity, p.value_head_dim});
  if (p.batch_size == 0 || p.total_sequence_length == 0) return;

  // 3. Run.
  const FlashKernel& kernel = flash_kernels().front();
  Pool pool(node.api, context);
  const ParallelFor parallel_for = pool.parallel_for();
  const BorrowedWorkspace workspace(kernel.workspace_bytes(p, parallel_for.num_workers));
  kernel.run(p, workspace.get(), parallel_for);
  pool.throw_if_failed();
}

ort::ElementType input_type(const ort::CustomOp* op, std::size_t index) {
  const auto* self = static_cast<const FlashAttentionOp*>(op);
  switch (index) {
    case kQuery:
    case kKey:
    case kValue:
    case kAttentionBias:
      return self->activation;
    case kPastKey:
    case kPastValue:
      return self->cache;
    case kAttentionMask:
      return ort::kInt64;
    case kPastSequenceLength:
      return ort::kInt32;
    default:
      return ort::kFloat32;
  }
}

ort::ElementType output_type(const ort::CustomOp* op, std::size_t index) {
  const auto* self = static_cast<const FlashAttentionOp*>(op);
  if (index == kOutput) return self->activation;
  return index == kPresentKey || index == kPresentValue ? self->cache : ort::kFloat32;
}

ort::Status* create_node(const ort::CustomOp* op, const ort::Api* api, const ort::KernelInfo* info,
                         void** node) {
  const auto* self = static_cast<const FlashAttentionOp*>(op);
  return guarded(api, kName, [&] {
    if (!is_float(self->cache)) {
      refuse(text("the cache is ", self->cache == ort::kInt8 ? "int8" : "uint8 (int4)",
                  "; this version of the op library takes float32, float16 and bfloat16 caches."),
             ort::kNotImplemented);
    }
    *node = new FlashAttentionNode{api, InputReader<kNumAttentionInputs>(api, info),
                                   read_attributes(api, info), data_type(self->activation),
                                   data_type(self->cache)};
  });
}

FlashAttentionOp::FlashAttentionOp(const char* provider_name, ort::ElementType activation_type,
                                   ort::ElementType cache_type)
    : provider(provider_name), activation(activation_type), cache(cache_type) {
  get_name = [](const ort::CustomOp*) { return "FlashAttention"; };
  get_execution_provider_type = [](const ort::CustomOp* op) {
    return static_cast<const FlashAttentionOp*>(op)->provider;
  };
  get_input_type = input_type;
  get_input_type_count = [](const ort::CustomOp*) -> std::size_t { return kNumAttentionInputs; };
  get_output_type = output_type;
  get_output_type_count = [](const ort::CustomOp*) -> std::size_t { return kNumAttentionOutputs; };
  get_input_characteristic = [](const ort::CustomOp*, std::size_t index) {
    const bool is_required = index == kQuery || index == kPastKey || index == kPastValue;
    return is_required ? ort::kRequired : ort::kOptional;
  };
  get_output_characteristic = [](const ort::CustomOp*, std::size_t index) {
    return index <= kPresentValue ? ort::kRequired : ort::kOptional;
  };
  get_input_memory_type = [](const ort::CustomOp*, std::size_t) { return 0; };  // the provider's
  create_kernel_v2 = create_node;
  kernel_compute_v2 = [](void* node, ort::KernelContext* context) {
    const auto* self = static_cast<const FlashAttentionNode*>(node);
    return guarded(self->api, kName, [&] { compute(*self, context); });
  };
  kernel_destroy = [](void* node) { delete static_cast<FlashAttentionNode*>(node); };
}

}  // namespace

std::vector<const ort::CustomOp*> attention_ops() {
  static const std::vector<FlashAttentionOp> table = [] {
    std::vector<FlashAttentionOp> ops;
    // Quantised caches are in the table so that a session over one is refused with a reason.
    for (ort::ElementType activation : {ort::kFloat32, ort::kFloat16}) {
      for (ort::ElementType cache :
           {ort::kFloat32, ort::kFloat16, ort::kBFloat16, ort::kInt8, ort::kUInt8}) {
        ops.emplace_back("CPUExecutionProvider", activation, cache);
      }
    }
    return ops;
  }();
  std::vector<const ort::CustomOp*> pointers;
  for (const FlashAttentionOp& op : table) pointers.push_back(&op);
  return pointers;
}

}  // namespace kvconv
