// A bundle loaded into ONNX Runtime; holds no tokens, and any number of threads may run it at once.
#pragma once

#include <memory>

#include "kvconv.h"
#include "manifest.h"
#include "ort_library.h"

namespace kvconv::runtime {

class LoadedModel {
 public:
  // Throws an Error for everything that is wrong with the bundle, the libraries or the memory.
  LoadedModel(const std::filesystem::path& bundle, const kvconv_model_options& options);

  const Manifest& manifest() const { return manifest_; }
  std::int32_t threads() const { return threads_; }
  bool has_input(std::string_view name) const;

  Binding new_binding() const;

  // Runs the graph once; throws KVCONV_FAILED with what ONNX Runtime says.
  void run(const ort::IoBinding* binding) const;

 private:
  void check_names() const;

  Manifest manifest_;
  std::int32_t threads_;
  Session session_;
};

}  // namespace kvconv::runtime
