// The norms towards ONNX Runtime. All tensors of a node are float32, or all float16; epsilon, at
// least 0, is added to each mean square.
//
// kvconv::SkipRMSNormalization: residual addition and norm in one pass.
//
//   input, skip   [.., width], of one shape
//   weight        [width]
//   input_weight  [width], optional: the input is normed too before it is added
//   output        [.., width]: the norm of the sum
//   sum           [.., width]: input, or its norm, + skip
//
// kvconv::SkipLayerNormalization: the same with the norm that subtracts the mean.
//
//   input, skip, weight, output, sum  as above
//   bias                              [width], optional: added to the output
//   input_bias                        [width], optional: added to the input
//
// kvconv::HeadRMSNormalization: the norms of query heads and key heads of a packed projection.
//
//   input                     [.., (num_heads + kv_num_heads) * head_dim or wider]
//   query_weight, key_weight  [head_dim]
//   output                    like input; what lies behind the key heads is copied
#include <cmath>

#include "kvconv/norm.h"
#include "op_support.h"
#include "ops.h"

namespace kvconv {
namespace {

float read_epsilon(const ort::Api* api, const ort::KernelInfo* info) {
  const float epsilon = read_float(api, info, "epsilon", 1e-5f);
  if (!(epsilon >= 0.0F && std::isfinite(epsilon))) {
    refuse(text("epsilon is ", epsilon, "; it must be a number of at least 0."));
  }
  return epsilon;
}

template <Norm norm>
class SkipNorm {
 public:
  static constexpr bool kIsLayer = norm == Norm::kLayer;
  static constexpr const char* kName =
      kIsLayer ? "kvconv::SkipLayerNormalization" : "kvconv::SkipRMSNormalization";
  static constexpr auto kInputNames = [] {
    if constexpr (kIsLayer) {
      return std::array{"input", "skip", "weight", "bias", "input_bias"};
    } else {
      return std::array{"input", "skip", "weight", "input_weight"};
    }
  }();
  static constexpr std::size_t kNumRequired = 3;
  static constexpr std::size_t kNumOutputs = 2;

  SkipNorm(const ort::Api* api, const ort::KernelInfo* info, ort::ElementType type)
      : api(api), inputs_(api, info, kInputNames), type_(type), epsilon_(read_epsilon(api, info)) {}

  void compute(ort::KernelContext* context) const {
    const Tensor input = inputs_(context, 0);
    const Tensor skip = inputs_(context, 1);
    require_type(input, type_);
    require_type(skip, type_);
    if (input.shape.empty() || skip.shape != input.shape) {
      refuse(text("input has shape ", shape_text(input.shape), " and skip ", shape_text(skip.shape),
                  "; both must be [.., width]."));
    }
    SkipNormParams p;
    p.norm = norm;
    p.width = input.shape.back();
    p.num_rows = input.shape.num_rows();
    p.epsilon = epsilon_;
    p.type = data_type(type_);
    p.input = input.data;
    p.skip = skip.data;
    p.weight = parameter(context, 2, input.shape);
    if constexpr (kIsLayer) {
      p.bias = parameter(context, 3, input.shape);
      p.input_bias = parameter(context, 4, input.shape);
    } else {
      p.input_weight = parameter(context, 3, input.shape);
    }
    p.output = make_output(api, context, 0, input.shape);
    p.sum = make_output(api, context, 1, input.shape);
    if (p.num_rows == 0 || p.width == 0) return;
    Pool pool(api, context);
    norm_kernels().front().skip_norm(p, pool.parallel_for());
    pool.throw_if_failed();
  }

  const ort::Api* api;

 private:
  // The data of a [width] input; null where an optional one is absent.
  const void* parameter(ort::KernelContext* context, std::size_t index, const Shape& input) const {
    const Tensor tensor = inputs_(context, index);
    if (!tensor.exists && index >= kNumRequired) return nullptr;
    require_type(tensor, type_);
    if (tensor.shape != Shape{input.back()}) {
      refuse(text(tensor.name, " has shape ", shape_text(tensor.shape), ", input ",
                  shape_text(input), "; ", tensor.name, " must be as wide as input."));
    }
    return tensor.data;
  }

  InputReader<kInputNames.size()> inputs_;
  ort::ElementType type_;
  float epsilon_;
};

class HeadNorm {
 public:
  static constexpr const char* kName = "kvconv::HeadRMSNormalization";
  static constexpr std::array kInputNames = {"input", "query_weight", "key_weight"};
  static constexpr std::size_t kNumRequired = 3;
  static constexpr std::size_t kNumOutputs = 1;

  HeadNorm(const ort::Api* api, const ort::KernelInfo* info, ort::ElementType type)
      : api(api), inputs_(api, info, kInputNames), type_(type), epsilon_(read_epsilon(api, info)) {
    num_heads_ = read_count(info, "num_heads");
    kv_num_heads_ = read_count(info, "kv_num_heads");
  }

  void compute(ort::KernelContext* context) const {
    const Tensor input = inputs_(context, 0);
    const Tensor query_weight = inputs_(context, 1);
    const Tensor key_weight = inputs_(context, 2);
    require_type(input, type_);
    require_type(query_weight, type_);
    require_type(key_weight, type_);
    if (query_weight.shape.size() != 1 || key_weight.shape != query_weight.shape ||
        query_weight.shape[0] == 0) {
      refuse(text("query_weight has shape ", shape_text(query_weight.shape), " and key_weight ",
                  shape_text(key_weight.shape), "; both must be [head_dim]."));
    }
    HeadNormParams p;
    p.head_dim = query_weight.shape[0];
    // Divided, not multiplied: attributes may be so large that a product has no place in 64 bits.
    const bool fits =
        !input.shape.empty() && num_heads_ + kv_num_heads_ <= input.shape.back() / p.head_dim;
    if (!fits) {
      refuse(text("input has shape ", shape_text(input.shape), "; it must be [.., ", num_heads_,
                  " query heads and ", kv_num_heads_, " key heads of ", p.head_dim, " or more]."));
    }
    p.width = input.shape.back();
    p.num_rows = input.shape.num_rows();
    p.num_heads = num_heads_;
    p.kv_num_heads = kv_num_heads_;
    p.epsilon = epsilon_;
    p.type = data_type(type_);
    p.input = input.data;
    p.query_weight = query_weight.data;
    p.key_weight = key_weight.data;
    p.output = make_output(api, context, 0, input.shape);
    if (p.num_rows == 0) return;
    Pool pool(api, context);
    norm_kernels().front().head_norm(p, pool.parallel_for());
    pool.throw_if_failed();
  }

  const ort::Api* api;

 private:
  std::int64_t read_count(const ort::KernelInfo* info, const char* name) const {
    const std::int64_t count = read_int(api, info, name, 0);
    if (count < 1 || count > (1 << 20)) {
      refuse(text(name, " is ", count, "; it must be at least 1 and at most 1048576."));
    }
    return count;
  }

  InputReader<kInputNames.size()> inputs_;
  ort::ElementType type_;
  float epsilon_;
  std::int64_t num_heads_;
  std::int64_t kv_num_heads_;
};

template <typename Node>
struct NormOp : OpEntry<NormOp<Node>, Node> {
  NormOp(ort::ElementType element_type) : element(element_type) {}

  ort::ElementType input_type(std::size_t) const { return element; }
  ort::ElementType output_type(std::size_t) const { return element; }
  static bool requires_input(std::size_t index) { return index < Node::kNumRequired; }
  Node make_node(const ort::Api* api, const ort::KernelInfo* info) const {
    return Node(api, info, element);
  }

  ort::ElementType element;
};

}  // namespace

std::vector<const ort::CustomOp*> norm_ops() {
  static const NormOp<SkipNorm<Norm::kRms>> rms[] = {{ort::kFloat32}, {ort::kFloat16}};
  static const NormOp<SkipNorm<Norm::kLayer>> layer[] = {{ort::kFloat32}, {ort::kFloat16}};
  static const NormOp<HeadNorm> head[] = {{ort::kFloat32}, {ort::kFloat16}};
  return {&rms[0], &rms[1], &layer[0], &layer[1], &head[0], &head[1]};
}

}  // namespace kvconv
