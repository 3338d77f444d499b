// kvconv::FlashAttention on the CPU. The checks are in attention_check.cc, the arithmetic in cpu/.
#include "attention_node.h"
#include "ops.h"

namespace kvconv {
namespace {

struct CpuAttentionNode : AttentionNode {
  static constexpr const char* kProvider = "CPUExecutionProvider";

  using AttentionNode::AttentionNode;

  void compute(ort::KernelContext* context) const {
    // 1. Read and check everything, before anything is written.
    AttentionParams p = check_inputs(attributes, read_inputs(context), activation_type, cache_type,
                                     LengthsAt::kHost);

    // 2. The outputs.
    make_outputs(context, &p);
    if (p.batch_size == 0 || p.total_sequence_length == 0) return;

    // 3. Run.
    const FlashKernel& kernel = flash_kernels().front();
    Pool pool(api, context);
    const ParallelFor parallel_for = pool.parallel_for();
    const BorrowedWorkspace workspace(kernel.workspace_bytes(p, parallel_for.num_workers));
    kernel.run(p, workspace.get(), parallel_for);
    pool.throw_if_failed();
  }
};

}  // namespace

std::vector<const ort::CustomOp*> attention_ops() {
  return attention_table<CpuAttentionNode>({ort::kFloat32, ort::kFloat16});
}

}  // namespace kvconv
