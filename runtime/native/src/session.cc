#include "session.h"

#include <algorithm>
#include <set>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

#include "error.h"
#include "memory.h"

namespace kvconv::runtime {
namespace {

// 0 (a thread per physical core) unless this process may use only some of the cores.
std::int32_t default_threads() {
#if defined(__linux__)
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) == 0) {
    const int count = CPU_COUNT(&usable);
    return count < static_cast<int>(std::thread::hardware_concurrency()) ? count : 0;
  }
#endif
  return 0;
}

std::filesystem::path op_library(const Manifest& manifest, const kvconv_model_options& options) {
  const std::string bundle = shown(manifest.folder);
  if (options.use_bundle_library != 0) {
    if (manifest.files.count(std::string(kBundleLibraryFile)) == 0) {
      fail(KVCONV_LIBRARY_ERROR, "The bundle ", bundle, " carries no ", kBundleLibraryFile,
           ". Leave use_bundle_library 0 to use the installed one.");
    }
    return manifest.folder / kBundleLibraryFile;
  }
  if (*manifest.op_version > kOpVersion) {
    fail(KVCONV_LIBRARY_ERROR, "The bundle ", bundle, " needs version ", *manifest.op_version,
         " of the kvconv operators; the installed library has ", kOpVersion,
         ". Upgrade kvconv, or, if you trust who made the bundle, set use_bundle_library.");
  }
  if (*manifest.op_version < kFloatCachesOpVersion && manifest.is_quantized) {
    fail(KVCONV_LIBRARY_ERROR, "The bundle ", bundle, " has quantised weights as version ",
         *manifest.op_version, " of the kvconv operators read them; the installed library has ",
         kOpVersion, ", which reads them in another order. Export the model again.");
  }
  const std::filesystem::path path = options.op_library != nullptr
                                         ? utf8_path(options.op_library)
                                         : own_folder() / text("libkvconv_ops", kLibrarySuffix);
  if (!std::filesystem::is_regular_file(path)) {
    fail(KVCONV_LIBRARY_ERROR, "There is no op library at ", shown(path),
         ". It belongs beside the runtime library; or name it by kvconv_model_options.op_library.");
  }
  return path;
}

std::set<std::string> names(const ort::Session* session, auto get_count, auto get_name) {
  const OrtLibrary& runtime = onnxruntime();
  std::size_t count = 0;
  check(get_count(runtime.api, session, &count));
  std::set<std::string> names;
  for (std::size_t i = 0; i < count; ++i) {
    char* name = nullptr;
    check(get_name(runtime.api, session, i, runtime.allocator, &name));
    names.insert(name);
    check(ort::allocator_free(runtime.api, runtime.allocator, name));
  }
  return names;
}

}  // namespace

LoadedModel::LoadedModel(const std::filesystem::path& bundle, const kvconv_model_options& options)
    : manifest_(open_bundle(bundle)),
      threads_(options.threads == 0 ? default_threads() : options.threads) {
  if (manifest_.op_version && options.use_bundle_library == 0) op_library(manifest_, options);
  const OrtLibrary& runtime = load_onnxruntime(options.onnxruntime_library);
  check_weights_fit(manifest_);
  ort::SessionOptions* created = nullptr;
  check(ort::create_session_options(runtime.api, &created));
  const SessionOptions session_options(created);
  check(ort::set_intra_op_num_threads(runtime.api, created, threads_));
  if (options.no_spin != 0) {
    check(ort::add_session_config_entry(runtime.api, created, "session.intra_op.allow_spinning",
                                        "0"));
  }
  // Every decode step has new shapes, so a plan of the memory would never be used again.
  check(ort::disable_mem_pattern(runtime.api, created));
  check(ort::set_session_log_severity_level(runtime.api, created, 4));  // errors arrive as statuses
  if (manifest_.op_version) {
    const std::filesystem::path library = op_library(manifest_, options);
    // ONNX Runtime closes it with the last session, and its one domain would be lost each time.
    keep_loaded(library);
    ort::Status* status = ort::register_custom_ops_library(runtime.api, created, library.c_str());
    if (status != nullptr) {
      fail(KVCONV_LIBRARY_ERROR, "ONNX Runtime ", runtime.version, " refuses the op library ",
           shown(library), ": ", take_message(status),
           " Install kvconv and ONNX Runtime again, for the same machine and both up to date.");
    }
  } else if (options.use_bundle_library != 0) {
    fail(KVCONV_LIBRARY_ERROR, "The bundle ", shown(bundle),
         " needs no op library. Leave use_bundle_library 0.");
  }
  ort::Session* session = nullptr;
  const std::filesystem::path model = bundle / kModelFile;
  ort::Status* status =
      ort::create_session(runtime.api, runtime.env, model.c_str(), created, &session);
  if (status != nullptr) {
    fail(KVCONV_BUNDLE_ERROR, "ONNX Runtime ", runtime.version, " cannot load ", kModelFile, " of ",
         shown(bundle), ": ", take_message(status),
         " Check the files with `kvconv inspect --check`; if they are whole, upgrade ",
         "ONNX Runtime or export again.");
  }
  session_.reset(session);
  check_names();
}

bool LoadedModel::has_input(std::string_view name) const {
  return std::find(manifest_.inputs.begin(), manifest_.inputs.end(), name) !=
         manifest_.inputs.end();
}

Binding LoadedModel::new_binding() const {
  ort::IoBinding* binding = nullptr;
  check(ort::create_io_binding(onnxruntime().api, session_.get(), &binding));
  return Binding(binding);
}

void LoadedModel::run(const ort::IoBinding* binding) const {
  ort::Status* status = ort::run_with_binding(onnxruntime().api, session_.get(), nullptr, binding);
  if (status != nullptr) {
    fail(KVCONV_FAILED, "ONNX Runtime failed while running ", shown(manifest_.folder), ": ",
         take_message(status),
         " The cache is as it was; `kvconv inspect --check` checks the files.");
  }
}

// The graph must take and give what the manifest says, and what every run binds.
void LoadedModel::check_names() const {
  const ort::Session* session = session_.get();
  std::set<std::string> found =
      names(session, ort::session_get_input_count, ort::session_get_input_name);
  found.merge(names(session, ort::session_get_overridable_initializer_count,
                    ort::session_get_overridable_initializer_name));
  found.merge(names(session, ort::session_get_output_count, ort::session_get_output_name));
  std::set<std::string> wanted(manifest_.inputs.begin(), manifest_.inputs.end());
  wanted.insert(manifest_.outputs.begin(), manifest_.outputs.end());
  std::set<std::string> wrong;
  std::set_symmetric_difference(found.begin(), found.end(), wanted.begin(), wanted.end(),
                                std::inserter(wrong, wrong.end()));
  std::set<std::string> bound = {"input_ids", "attention_mask", "num_logits_to_keep", "logits"};
  for (std::size_t i = 0; i < manifest_.cache_layers.size(); ++i) {
    const CacheLayer& layer = manifest_.cache_layers[i];
    for (const StoredTensor& tensor : layer.stored_tensors()) {
      bound.insert(text("past_key_values.", i, ".", tensor.name));
      bound.insert(text("present.", i, ".", tensor.name));
    }
    if (layer.capacity) bound.insert("past_sequence_length");
  }
  std::set_difference(bound.begin(), bound.end(), found.begin(), found.end(),
                      std::inserter(wrong, wrong.end()));
  if (wrong.empty()) return;
  std::string list;
  for (const std::string& name : wrong) list += (list.empty() ? "" : ", ") + name;
  fail(KVCONV_BUNDLE_ERROR, kModelFile, " of ", shown(manifest_.folder),
       " does not have the inputs and outputs that the manifest says; they differ in ", list,
       ". Export the model again.");
}

}  // namespace kvconv::runtime
