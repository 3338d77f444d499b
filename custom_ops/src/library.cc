// The library's one export: RegisterCustomOps, which ONNX Runtime calls for a session.
#include "kvconv/ort_abi.h"
#include "op_support.h"
#include "ops.h"

namespace kvconv {
namespace {

// One domain serves all sessions and lives as long as the process, as ONNX Runtime wants it to.
ort::CustomOpDomain* domain(const ort::Api* api) {
  static ort::CustomOpDomain* const shared = [api] {
    ort::CustomOpDomain* created = nullptr;
    throw_if_failed(ort::create_custom_op_domain(api, "kvconv", &created));
    for (const auto& ops : {attention_ops(), cuda_attention_ops(), matmul_ops(), gather_ops(),
                            gated_activation_ops(), norm_ops()}) {
      for (const ort::CustomOp* op : ops) {
        throw_if_failed(ort::custom_op_domain_add(api, created, op));
      }
    }
    return created;
  }();
  return shared;
}

}  // namespace
}  // namespace kvconv

#if defined(_WIN32)
#define KVCONV_EXPORT __declspec(dllexport)
#else
#define KVCONV_EXPORT __attribute__((visibility("default")))
#endif

extern "C" KVCONV_EXPORT kvconv::ort::Status* RegisterCustomOps(
    kvconv::ort::SessionOptions* options, const kvconv::ort::ApiBase* base) {
  namespace ort = kvconv::ort;
  const ort::Api* api = base->get_api(ort::kApiVersion);
  if (api == nullptr) {
    // This ONNX Runtime is older; version 1 has all that a status needs.
    const ort::Api* oldest = base->get_api(1);
    return kvconv::guarded(oldest, "kvconv", [&] {
      kvconv::refuse(kvconv::text("the op library needs ONNX Runtime 1.", ort::kApiVersion,
                                  " or newer; this is ", base->get_version_string(), "."));
    });
  }
  return kvconv::guarded(api, "kvconv", [&] {
    kvconv::throw_if_failed(ort::add_custom_op_domain(api, options, kvconv::domain(api)));
  });
}
