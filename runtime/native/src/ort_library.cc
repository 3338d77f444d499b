#include "ort_library.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <optional>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include "error.h"

namespace kvconv::runtime {
namespace {

namespace fs = std::filesystem;
constexpr int kFatalOnly = 4;  // ORT_LOGGING_LEVEL_FATAL: errors arrive as statuses
constexpr int kArenaAllocator = 1, kDefaultMemory = 0;

std::optional<OrtLibrary> loaded;

#if defined(_WIN32)
void* load(const fs::path& path) { return LoadLibraryW(path.c_str()); }
std::string load_error() { return text("error ", GetLastError()); }
#else
void* load(const fs::path& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  // An extension module of Python takes Python's functions from the program, which may not be
  // Python.
  static constexpr std::string_view kMark = ".cpython-3";
  const std::string name = path.filename().string();
  const std::size_t mark = name.find(kMark);
  if (library != nullptr || mark == std::string::npos) return library;
  const std::string minor =
      name.substr(mark + kMark.size(),
                  name.find_first_not_of("0123456789", mark + kMark.size()) - mark - kMark.size());
  dlopen(text("libpython3.", minor, ".so.1.0").c_str(), RTLD_NOW | RTLD_GLOBAL);
  return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}
std::string load_error() {
  const char* error = dlerror();
  return error == nullptr ? "unknown error" : error;
}
#endif

// Returns the newest library in a folder whose name begins like one of the stems; empty where there
// is none.
fs::path find_in(const fs::path& folder, const std::vector<std::string_view>& stems) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    for (const std::string_view stem : stems) {
      const bool begins = name.compare(0, stem.size(), stem) == 0;
      if (begins && name.find(kLibrarySuffix, stem.size() - 1) != std::string::npos)
        found.push_back(entry.path());
    }
  }
  return found.empty() ? fs::path() : *std::max_element(found.begin(), found.end());
}

}  // namespace

fs::path own_folder() {
#if defined(_WIN32)
  HMODULE self = nullptr;
  wchar_t name[32768] = {};
  GetModuleHandleExW(
      GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
      reinterpret_cast<const wchar_t*>(&own_folder), &self);
  GetModuleFileNameW(self, name, 32768);
  return fs::path(name).parent_path();
#else
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr)
    return {};
  std::error_code ignored;
  return fs::absolute(info.dli_fname, ignored).parent_path();
#endif
}

DynamicLibrary DynamicLibrary::open(const Search& search) {
  const char* wanted = search.path;
  std::string asked = search.option;
  if (wanted == nullptr && search.variable != nullptr) {
    const char* value = std::getenv(search.variable);
    if (value != nullptr && *value != '\0') {
      wanted = value;
      asked = text("the environment variable ", search.variable);
    }
  }
  DynamicLibrary library;
  if (wanted != nullptr) {
    fs::path path = utf8_path(wanted);
    std::error_code ignored;
    if (fs::is_directory(path, ignored)) {
      const fs::path inside = find_in(path, search.stems);
      if (inside.empty()) {
        fail(KVCONV_LIBRARY_ERROR, "There is no ", search.what, " in the folder ", wanted,
             ", which ", asked, " names.");
      }
      path = inside;
    }
    library.handle_ = load(path);
    if (library.handle_ == nullptr) {
      fail(KVCONV_LIBRARY_ERROR, "The ", search.what, " that ", asked,
           " names cannot be loaded: ", load_error(), ".");
    }
    library.path_ = path;
    return library;
  }
  std::string looked;
  for (const fs::path& folder : search.folders) {
    looked += text(looked.empty() ? "" : ", ", shown(folder));
    const fs::path path = find_in(folder, search.stems);
    if (path.empty()) continue;
    library.handle_ = load(path);
    if (library.handle_ == nullptr) {  // it is there: another one would be a surprise
      fail(KVCONV_LIBRARY_ERROR, "The ", search.what, " ", shown(path),
           " cannot be loaded: ", load_error(), ".");
    }
    library.path_ = path;
    return library;
  }
  for (const std::string& name : search.names) {
    library.handle_ = load(name);
    if (library.handle_ != nullptr) {
      library.path_ = name;
      return library;
    }
  }
  fail(KVCONV_LIBRARY_ERROR, "There is no ", search.what, ": not in ", looked,
       search.names.empty() ? "" : ", nor where the system looks", ". Name one by ", search.option,
       search.variable == nullptr ? "" : text(" or the environment variable ", search.variable),
       ".");
}

void keep_loaded(const fs::path& path) { load(path); }

void* DynamicLibrary::find(const char* name) const {
#if defined(_WIN32)
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(handle_), name));
#else
  return dlsym(handle_, name);
#endif
}

const OrtLibrary& load_onnxruntime(const char* path) {
  static std::mutex mutex;
  static std::string first_path;
  const std::lock_guard lock(mutex);
  if (loaded) {
    if (path != nullptr && first_path != path) {
      fail(KVCONV_LIBRARY_ERROR, "ONNX Runtime ", loaded->version, " is loaded already, from ",
           first_path.empty() ? "where it was found" : first_path, "; a process has one, and ",
           path, " is another path. Name the same one for every model, or none after the first.");
    }
    return *loaded;
  }
  const fs::path own = own_folder();
  const DynamicLibrary library = DynamicLibrary::open({
      .what = "ONNX Runtime library",
      .option = "kvconv_model_options.onnxruntime_library",
      .path = path,
      .variable = "KVCONV_ONNXRUNTIME",
#if defined(_WIN32)
      .stems = {"onnxruntime."},
      .folders = {own, own / ".." / ".." / "onnxruntime" / "capi"},
      .names = {"onnxruntime.dll"},
#else
      .stems = {"libonnxruntime."},
      .folders = {own,
                  own / ".." / ".." / "onnxruntime" / "capi"},  // that of a wheel beside kvconv's
      .names = {"libonnxruntime.so.1", "libonnxruntime.so", "libonnxruntime.dylib"},
#endif
  });
  auto* get_base = reinterpret_cast<const ort::ApiBase* (*)()>(library.find("OrtGetApiBase"));
  if (get_base == nullptr) {
    fail(KVCONV_LIBRARY_ERROR, shown(library.path()),
         " is not ONNX Runtime: it has no OrtGetApiBase.");
  }
  const ort::ApiBase* base = get_base();
  OrtLibrary found{};
  found.version = base->get_version_string();
  found.api = base->get_api(ort::kApiVersion);
  if (found.api == nullptr) {
    fail(KVCONV_LIBRARY_ERROR, shown(library.path()), " is ONNX Runtime ", found.version,
         "; the bundle's operators need 1.", ort::kApiVersion, " or newer. Upgrade it.");
  }
  // From here on statuses can be read. The environment lives as long as the process, as its threads
  // may.
  loaded = found;
  try {
    check(ort::create_env(found.api, kFatalOnly, "kvconv", &found.env));
    check(
        ort::create_cpu_memory_info(found.api, kArenaAllocator, kDefaultMemory, &found.cpu_memory));
    check(ort::get_allocator_with_default_options(found.api, &found.allocator));
  } catch (...) {
    loaded.reset();
    throw;
  }
  loaded = found;
  if (path != nullptr) first_path = path;
  return *loaded;
}

const OrtLibrary& onnxruntime() { return *loaded; }

std::string take_message(ort::Status* status) {
  if (status == nullptr) return {};
  const ort::Api* api = onnxruntime().api;
  std::string message = ort::get_error_message(api, status);
  ort::release_status(api, status);
  message.erase(message.find_last_not_of(". \n") + 1);
  return message + ".";
}

void check(ort::Status* status) {
  if (status != nullptr) fail(KVCONV_FAILED, "ONNX Runtime failed: ", take_message(status));
}

Value make_value(void* data, std::size_t num_bytes, const std::vector<std::int64_t>& shape,
                 ort::ElementType element) {
  const OrtLibrary& runtime = onnxruntime();
  ort::Value* value = nullptr;
  check(ort::create_tensor_with_data(runtime.api, runtime.cpu_memory, data, num_bytes, shape.data(),
                                     shape.size(), element, &value));
  return Value(value);
}

}  // namespace kvconv::runtime
