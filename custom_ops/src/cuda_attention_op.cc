// kvconv::FlashAttention on CUDA. The checks are in attention_check.cc; cuda/ launches the kernels,
// which are in the graph: the constant input `kernels` is the file kvconv_kernels.bin.
#include <memory>

#include "attention_node.h"
#include "cuda/launcher.h"
#include "ops.h"

namespace kvconv {
namespace {

// Runs `body`; what the launcher complains about becomes the op's complaint.
template <typename Body>
auto translated(const Body& body) {
  try {
    return body();
  } catch (const cuda::CudaError& error) {
    refuse(error.message, ort::kFail);
  }
}

// The provider's own allocator, which knows the stream: an arena, so that memory costs little and a
// captured graph finds it again.
class DeviceAllocator {
 public:
  DeviceAllocator(const ort::Api* api, const ort::KernelInfo* info)
      : allocator_(get(api, info), Release{api}) {}

  ort::Allocator* get() const { return allocator_.get(); }

  int device_ordinal() const {
    const ort::Api* api = allocator_.get_deleter().api;
    const ort::MemoryInfo* memory = nullptr;
    throw_if_failed(ort::allocator_get_info(api, allocator_.get(), &memory));
    int ordinal = 0;
    throw_if_failed(ort::memory_info_get_id(api, memory, &ordinal));
    return ordinal;
  }

 private:
  struct Release {
    const ort::Api* api;
    void operator()(ort::Allocator* allocator) const { ort::release_allocator(api, allocator); }
  };

  static ort::Allocator* get(const ort::Api* api, const ort::KernelInfo* info) {
    ort::Allocator* allocator = nullptr;
    throw_if_failed(ort::get_allocator(api, info, ort::kProviderMemory, &allocator));
    return allocator;
  }

  std::unique_ptr<ort::Allocator, Release> allocator_;
};

class OrtScratch : public cuda::Scratch {
 public:
  OrtScratch(const ort::Api* api, ort::Allocator* allocator) : api_(api), allocator_(allocator) {}

  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    throw_if_failed(ort::allocator_alloc(api_, allocator_, bytes, &memory));
    return memory;
  }

  void free(void* memory) noexcept override {
    ort::Status* status = ort::allocator_free(api_, allocator_, memory);
    if (status != nullptr) ort::release_status(api_, status);
  }

 private:
  const ort::Api* api_;
  ort::Allocator* allocator_;
};

struct CudaAttentionNode : AttentionNode {
  static constexpr const char* kProvider = "CUDAExecutionProvider";

  CudaAttentionNode(const ort::Api* ort_api, const ort::KernelInfo* info,
                    ort::ElementType activation, ort::ElementType cache)
      : AttentionNode(ort_api, info, activation, cache), allocator(ort_api, info) {
    const Tensor kernels = reader.constant(kKernels);
    if (!kernels.exists) {
      refuse(
          "kernels is absent or no constant; on CUDA it must be the bundle's kvconv_kernels.bin. "
          "Run `kvconv build` on the bundle, export with --provider cuda, or use the CPU.");
    }
    kvconv::require_type(kernels, ort::kUInt8);
    const std::size_t size =
        static_cast<std::size_t>(kernels.shape.empty() ? 1 : kernels.shape.num_rows()) *
        static_cast<std::size_t>(kernels.shape.empty() ? 1 : kernels.shape.back());
    const std::span pack(static_cast<const std::uint8_t*>(kernels.data), size);
    translated([&] {
      launcher = cuda::Launcher::shared(pack, allocator.device_ordinal());
      launcher->require_types(activation_type, cache_type);
    });
  }

  void compute(ort::KernelContext* context) const {
    // 1. Read and check everything, before anything is written. Nothing waits for the device.
    const AttentionInputs inputs = read_inputs(context);
    cuda::Run run;
    run.params = check_inputs(attributes, inputs, activation_type, cache_type, LengthsAt::kDevice);
    run.past_sequence_length = static_cast<const std::int32_t*>(inputs[kPastSequenceLength].data);
    run.is_ring = attributes.is_ring;
    throw_if_failed(ort::get_gpu_compute_stream(api, context, &run.stream));

    // 2. The outputs.
    make_outputs(context, &run.params);
    if (run.params.batch_size == 0) return;

    // 3. Run.
    OrtScratch scratch(api, allocator.get());
    translated([&] { launcher->run(run, scratch); });
  }

 private:
  DeviceAllocator allocator;
  std::shared_ptr<const cuda::Launcher> launcher;
};

}  // namespace

std::vector<const ort::CustomOp*> cuda_attention_ops() {
  return attention_table<CudaAttentionNode>({ort::kFloat32, ort::kFloat16, ort::kBFloat16});
}

}  // namespace kvconv
