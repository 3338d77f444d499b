// ONNX Runtime and other libraries, found and loaded at run time.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "kvconv/ort_abi.h"

namespace kvconv::runtime {

// The folder of this library itself.
std::filesystem::path own_folder();

// A library that stays loaded for the life of the process.
class DynamicLibrary {
 public:
  // Loads the first that is there of: the path asked for (a library, or a folder that holds one),
  // what the environment variable says, the folders, and the names as the system finds them. Throws
  // KVCONV_LIBRARY_ERROR.
  struct Search {
    const char* what;                            // for errors
    std::string option;                          // how a caller names a path, for errors
    const char* path;                            // or null
    const char* variable;                        // or null
    std::vector<std::string_view> stems;         // libraries in folders begin like one of these
    std::vector<std::filesystem::path> folders;  // where it may lie
    std::vector<std::string> names;              // as the system knows it
  };
  static DynamicLibrary open(const Search& search);

  // Where it lies, as it was asked for.
  const std::filesystem::path& path() const { return path_; }

  // Returns the address of a function, or null.
  void* find(const char* name) const;

 private:
  void* handle_ = nullptr;
  std::filesystem::path path_;
};

// Keeps a library in memory for the life of the process, whoever else closes it; nothing where it
// does not load.
void keep_loaded(const std::filesystem::path& path);

// The suffix of shared libraries here, with its dot.
inline constexpr std::string_view kLibrarySuffix =
#if defined(_WIN32)
    ".dll";
#elif defined(__APPLE__)
    ".dylib";
#else
    ".so";
#endif

// ONNX Runtime: one for the whole process, never unloaded.
struct OrtLibrary {
  const ort::Api* api;
  ort::Env* env;
  ort::MemoryInfo* cpu_memory;
  ort::Allocator* allocator;
  std::string version;
};

// Loads ONNX Runtime on the first call.
//
// path: a file, a folder, or null. Throws KVCONV_LIBRARY_ERROR where there is none, where it is
// older than ONNX Runtime 1.18, or where another path was asked for before.
const OrtLibrary& load_onnxruntime(const char* path);

// What `load_onnxruntime` returned; valid once it was called.
const OrtLibrary& onnxruntime();

// Returns what a status says, without the status; empty for success.
std::string take_message(ort::Status* status);

// Throws KVCONV_FAILED with what a status says.
void check(ort::Status* status);

template <typename Type, const auto& release>
struct Release {
  void operator()(Type* object) const { release(onnxruntime().api, object); }
};
using Session = std::unique_ptr<ort::Session, Release<ort::Session, ort::release_session>>;
using SessionOptions = std::unique_ptr<ort::SessionOptions,
                                       Release<ort::SessionOptions, ort::release_session_options>>;
using Binding = std::unique_ptr<ort::IoBinding, Release<ort::IoBinding, ort::release_io_binding>>;
using Value = std::unique_ptr<ort::Value, Release<ort::Value, ort::release_value>>;

// Returns a tensor over memory that the caller keeps.
Value make_value(void* data, std::size_t num_bytes, const std::vector<std::int64_t>& shape,
                 ort::ElementType element);

}  // namespace kvconv::runtime
