#include "cuda_shim.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int kInvalidValue = 1;
constexpr int kInvalidImage = 200;
constexpr int kInvalidContext = 201;
constexpr int kNotFound = 500;
constexpr unsigned kSharedBytesWithoutAsking = 48 * 1024;

// What an image says of a kernel.
struct KernelFacts {
  std::map<unsigned, std::pair<unsigned, unsigned>> parameters;  // ordinal -> offset, size
  unsigned parameter_bytes = 0;
  unsigned threads[3] = {0, 1, 1};  // of a block; 0 = not said
  bool has_exact_threads = false;
};

struct Module {
  std::map<std::string, KernelFacts> kernels;
};

struct Function {
  std::string name;
  KernelFacts facts;
  unsigned most_shared_bytes = kSharedBytesWithoutAsking;
};

struct State {
  int compute_capability = 80;
  int num_multiprocessors = 108;
  int shared_bytes = 166912;
  std::map<std::string, int> failures;
  void (*callback)(const KvconvShimLaunch*, void*) = nullptr;
  void* data = nullptr;
  std::string complaints;
  int num_launches = 0;
  int num_retained = 0;
  long long copied_bytes = 0;
  std::map<Module*, std::unique_ptr<Module>> modules;
  std::map<Function*, std::unique_ptr<Function>> functions;
  std::vector<void*> contexts;
};

State& state() {
  static State* const the_state = new State;  // outlives every static that calls the driver
  return *the_state;
}

int primary_context;

int failure_of(const char* function) {
  const auto found = state().failures.find(function);
  return found == state().failures.end() ? 0 : found->second;
}

#define FAIL_IF_ASKED() \
  if (const int asked = failure_of(__func__)) return asked

template <typename T>
T read(const unsigned char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// --- Cubins: sections .nv.info.NAME of an ELF file. ---

// Attributes of .nv.info that tell of parameters and blocks.
enum : unsigned char {
  kMaxThreads = 0x05,
  kRequiredThreads = 0x10,
  kParameterInfo = 0x17,
  kParameterBytes = 0x19,
};

KernelFacts read_info(const unsigned char* bytes, std::size_t size) {
  KernelFacts facts;
  std::size_t at = 0;
  while (at + 4 <= size) {
    const unsigned char format = bytes[at];
    const unsigned char attribute = bytes[at + 1];
    const unsigned value = read<std::uint16_t>(bytes + at + 2);
    at += 4;
    if (attribute == kParameterBytes) facts.parameter_bytes = value;
    if (format != 4) continue;  // the value stands in these four bytes
    const unsigned char* payload = bytes + at;
    if (attribute == kParameterInfo) {  // index, ordinal, offset, flags with the size
      const unsigned ordinal = read<std::uint16_t>(payload + 4);
      const unsigned offset = read<std::uint16_t>(payload + 6);
      facts.parameters[ordinal] = {offset, read<std::uint32_t>(payload + 8) >> 18};
    }
    if ((attribute == kMaxThreads || attribute == kRequiredThreads) && value >= 12) {
      for (int i = 0; i < 3; ++i) facts.threads[i] = read<std::uint32_t>(payload + 4 * i);
      facts.has_exact_threads = facts.has_exact_threads || attribute == kRequiredThreads;
    }
    at += value;
  }
  return facts;
}

std::unique_ptr<Module> read_cubin(const unsigned char* image) {
  auto module = std::make_unique<Module>();
  const auto section_offset = read<std::uint64_t>(image + 0x28);
  const auto section_bytes = read<std::uint16_t>(image + 0x3A);
  const auto num_sections = read<std::uint16_t>(image + 0x3C);
  const auto names_index = read<std::uint16_t>(image + 0x3E);
  const auto section = [&](unsigned i) { return image + section_offset + i * section_bytes; };
  const unsigned char* names = image + read<std::uint64_t>(section(names_index) + 0x18);
  const std::string prefix = ".nv.info.";
  for (unsigned i = 0; i < num_sections; ++i) {
    const std::string name = reinterpret_cast<const char*>(names + read<std::uint32_t>(section(i)));
    if (name.compare(0, prefix.size(), prefix) != 0) continue;
    module->kernels[name.substr(prefix.size())] = read_info(
        image + read<std::uint64_t>(section(i) + 0x18), read<std::uint64_t>(section(i) + 0x20));
  }
  return module;
}

// --- PTX: `.visible .entry NAME( .param .u64 ..., .param .f32 ... )` and `.reqntid N`. ---

std::unique_ptr<Module> read_ptx(const std::string& text) {
  auto module = std::make_unique<Module>();
  const std::string entry = ".entry ";
  for (std::size_t at = text.find(entry); at != std::string::npos; at = text.find(entry, at)) {
    at += entry.size();
    const std::size_t open = text.find('(', at);
    const std::size_t close = text.find(')', open);
    const std::size_t body = text.find('{', close);
    if (open == std::string::npos || close == std::string::npos || body == std::string::npos) break;
    KernelFacts facts;
    const std::string name = text.substr(at, text.find_last_not_of(" \n", open - 1) + 1 - at);
    const std::string parameters = text.substr(open, close - open);
    unsigned ordinal = 0;
    for (std::size_t p = parameters.find(".param"); p != std::string::npos;
         p = parameters.find(".param", p + 1)) {
      const std::size_t type = parameters.find_first_of('.', p + 1);
      const unsigned size = parameters.compare(type + 2, 2, "64") == 0 ? 8 : 4;
      const unsigned offset = (facts.parameter_bytes + size - 1) / size * size;
      facts.parameters[ordinal++] = {offset, size};
      facts.parameter_bytes = offset + size;
    }
    const std::string rest = text.substr(close, body - close);
    if (const std::size_t exact = rest.find(".reqntid "); exact != std::string::npos) {
      facts.threads[0] = static_cast<unsigned>(std::atoi(rest.c_str() + exact + 9));
      facts.has_exact_threads = true;
    }
    module->kernels[name] = facts;
  }
  return module;
}

void complain(const Function& function, const std::string& what) {
  state().complaints += function.name + ": " + what + "\n";
}

}  // namespace

extern "C" {

void kvconv_shim_set_device(int compute_capability, int num_multiprocessors, int shared_bytes) {
  state().compute_capability = compute_capability;
  state().num_multiprocessors = num_multiprocessors;
  state().shared_bytes = shared_bytes;
}
void kvconv_shim_fail(const char* function, int result) { state().failures[function] = result; }
void kvconv_shim_on_launch(void (*callback)(const KvconvShimLaunch*, void*), void* data) {
  state().callback = callback;
  state().data = data;
}
const char* kvconv_shim_complaints() { return state().complaints.c_str(); }
int kvconv_shim_num_launches() { return state().num_launches; }
int kvconv_shim_num_loaded() { return static_cast<int>(state().modules.size()); }
int kvconv_shim_num_retained() { return state().num_retained; }
long long kvconv_shim_copied_bytes() { return state().copied_bytes; }

int cuInit(unsigned) {
  FAIL_IF_ASKED();
  return 0;
}

int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}

int cuGetErrorString(int result, const char** text) {
  *text = result == 100 ? "no CUDA-capable device is detected" : "an error of the shim's";
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  FAIL_IF_ASKED();
  if (ordinal != 0) return 101;
  *device = 0;
  return 0;
}

int cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "Shim GPU", static_cast<std::size_t>(size));
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  FAIL_IF_ASKED();
  switch (attribute) {
    case 16:
      *value = state().num_multiprocessors;
      return 0;
    case 75:
      *value = state().compute_capability / 10;
      return 0;
    case 76:
      *value = state().compute_capability % 10;
      return 0;
    case 97:
      *value = state().shared_bytes;
      return 0;
    default:
      return kInvalidValue;
  }
}

int cuDevicePrimaryCtxRetain(void** context, int) {
  FAIL_IF_ASKED();
  ++state().num_retained;
  *context = &primary_context;
  // ONNX Runtime makes it the thread's current one; here there is nobody else.
  if (state().contexts.empty()) state().contexts.push_back(*context);
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int) {
  --state().num_retained;
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = state().contexts.empty() ? nullptr : state().contexts.back();
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  state().contexts.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  if (state().contexts.empty()) return kInvalidContext;
  *context = state().contexts.back();
  state().contexts.pop_back();
  return 0;
}

int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
  FAIL_IF_ASKED();
  const auto* bytes = static_cast<const unsigned char*>(image);
  std::unique_ptr<Module> read;
  if (std::memcmp(bytes, "\177ELF", 4) == 0) {
    read = read_cubin(bytes);
  } else {
    read = read_ptx(reinterpret_cast<const char*>(bytes));
  }
  if (read->kernels.empty()) return kInvalidImage;
  Module* key = read.get();
  state().modules[key] = std::move(read);
  *module = key;
  return 0;
}

int cuModuleUnload(void* module) {
  return state().modules.erase(static_cast<Module*>(module)) == 1 ? 0 : kInvalidValue;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  FAIL_IF_ASKED();
  const auto& kernels = static_cast<Module*>(module)->kernels;
  const auto found = kernels.find(name);
  if (found == kernels.end()) return kNotFound;
  auto made = std::make_unique<Function>();
  made->name = name;
  made->facts = found->second;
  Function* key = made.get();
  state().functions[key] = std::move(made);
  *function = key;
  return 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  FAIL_IF_ASKED();
  if (attribute != 8 || value > state().shared_bytes) return kInvalidValue;
  static_cast<Function*>(function)->most_shared_bytes = static_cast<unsigned>(value);
  return 0;
}

int cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void* stream, void** arguments, void** extra) {
  FAIL_IF_ASKED();
  const Function& function = *static_cast<Function*>(handle);
  const KernelFacts& facts = function.facts;
  ++state().num_launches;
  if (extra != nullptr) complain(function, "arguments came in another form");
  if (grid_x == 0 || grid_y == 0 || grid_z == 0) complain(function, "the grid is empty");
  if (grid_y > 65535 || grid_z > 65535) complain(function, "the grid is too large");
  const unsigned threads = block_x * block_y * block_z;
  const unsigned said = facts.threads[0] * facts.threads[1] * facts.threads[2];
  if (said != 0 && (facts.has_exact_threads ? threads != said : threads > said)) {
    complain(function, "the block has " + std::to_string(threads) + " threads, the image says " +
                           std::to_string(said));
  }
  if (shared_bytes > function.most_shared_bytes) {
    complain(function, "shared memory was not asked for");
  }
  std::vector<unsigned char> bytes(facts.parameter_bytes);
  std::vector<unsigned> offsets;
  std::vector<unsigned> sizes;
  for (const auto& [ordinal, place] : facts.parameters) {
    const auto& [offset, size] = place;
    if (ordinal != offsets.size() || offset + size > bytes.size()) {
      complain(function, "the image's parameters have gaps");
      break;
    }
    if (arguments[ordinal] == nullptr) {
      complain(function, "argument " + std::to_string(ordinal) + " is missing");
      break;
    }
    std::memcpy(bytes.data() + offset, arguments[ordinal], size);
    offsets.push_back(offset);
    sizes.push_back(size);
  }
  if (state().callback != nullptr) {
    const KvconvShimLaunch launch = {function.name.c_str(),
                                     {grid_x, grid_y, grid_z},
                                     {block_x, block_y, block_z},
                                     shared_bytes,
                                     stream,
                                     bytes.data(),
                                     bytes.size(),
                                     offsets.data(),
                                     sizes.data(),
                                     offsets.size()};
    state().callback(&launch, state().data);
  }
  return 0;
}

int cuMemcpyDtoDAsync_v2(std::uint64_t to, std::uint64_t from, std::size_t bytes, void*) {
  FAIL_IF_ASKED();
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  state().copied_bytes += static_cast<long long>(bytes);
  return 0;
}

}  // extern "C"
