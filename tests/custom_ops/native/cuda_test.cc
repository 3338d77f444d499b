// The CUDA op and its launcher without a GPU: under a fake ONNX Runtime and a shim of the driver,
// which compares every launch with what the kernel's image says.
//
//   cuda_test PATH_OF_THE_SHIM
#include <dlfcn.h>

#include <cstring>
#include <functional>
#include <map>

#include "attention_op.h"
#include "check.h"
#include "cuda/launcher.h"
#include "cuda_shim.h"
#include "fake_ort.h"
#include "kvconv/cache_format.h"
#include "pack_writer.h"

namespace kvconv::test {
namespace {

using cuda::Argument;
using cuda::KernelKind;

constexpr const char* kProvider = "CUDAExecutionProvider";

template <typename Function>
Function* shim(const char* name) {
  void* symbol = dlsym(RTLD_DEFAULT, name);
  CHECK(symbol != nullptr, "the shim has no %s", name);
  return reinterpret_cast<Function*>(symbol);
}

#define SHIM(name) shim<decltype(name)>(#name)

// Every argument there is, in an order of its own.
const std::vector<Argument>& all_arguments() {
  static const std::vector<Argument> arguments = [] {
    std::vector<Argument> all;
    for (int id = 1; id <= 18; ++id) all.push_back(static_cast<Argument>(id));
    all.push_back(Argument::kScale);
    for (int id = 32; id <= 34; ++id) all.push_back(static_cast<Argument>(id));
    for (int id = 40; id <= 52; ++id) all.push_back(static_cast<Argument>(id));
    all.push_back(Argument::kSoftcapValue);
    return all;
  }();
  return arguments;
}

struct Case {
  std::int64_t batch = 2;
  std::int64_t heads = 6;
  std::int64_t kv_heads = 2;
  std::int64_t head_dim = 64;
  std::int64_t value_head_dim = 96;
  std::int64_t new_tokens = 5;
  std::int64_t capacity = 700;
  std::int64_t mask_width = 700;
  std::int64_t window = 0;
  bool is_ring = false;
  bool is_packed = false;
  bool in_place = true;
  bool has_rotary = true;
  bool has_bias = false;
  bool has_kernels = true;
  DataType activation = DataType::kFloat16;
  DataType cache = DataType::kInt8;
};

std::uint32_t features_of(const Case& c) {
  return cuda::kMask | cuda::kCausal | (c.has_rotary ? cuda::kRotary : 0U) |
         (c.has_bias ? cuda::kBias : 0U) | (c.window > 0 ? cuda::kWindow : 0U) |
         (c.is_ring ? cuda::kRing : 0U);
}

Bytes pack_of(const Case& c) {
  std::vector<PackedKernel> kernels;
  for (const auto& [kind, name] :
       {std::pair{KernelKind::kAppend, "append"}, std::pair{KernelKind::kPrefill, "prefill"},
        std::pair{KernelKind::kDecode, "decode"}, std::pair{KernelKind::kCombine, "combine"}}) {
    PackedKernel kernel;
    kernel.variant = {kind,
                      c.activation,
                      c.cache,
                      static_cast<std::uint32_t>(c.head_dim),
                      static_cast<std::uint32_t>(c.value_head_dim),
                      static_cast<std::uint32_t>(c.heads / c.kv_heads),
                      c.has_rotary ? static_cast<std::uint32_t>(c.head_dim) : 0U,
                      features_of(c)};
    kernel.tile_m = kind == KernelKind::kAppend ? 4 : 16;
    kernel.tile_n = 64;
    kernel.shared_bytes = kind == KernelKind::kPrefill ? 100000 : 2048;
    kernel.num_warps = kind == KernelKind::kPrefill ? 8 : 4;
    kernel.function = name;
    kernel.arguments = all_arguments();
    kernels.push_back(kernel);
  }
  return write_pack(kernels);
}

struct Launch {
  std::string function;
  std::vector<unsigned> grid;
  unsigned threads;
  unsigned shared_bytes;
  void* stream;
  std::map<Argument, std::uint64_t> values;
  std::vector<std::uint64_t> hidden;
};

std::vector<Launch> launches;

void note(const KvconvShimLaunch* launch, void*) {
  Launch noted{launch->function,
               {launch->grid[0], launch->grid[1], launch->grid[2]},
               launch->block[0],
               launch->shared_bytes,
               launch->stream,
               {},
               {}};
  for (std::size_t i = 0; i < launch->num_arguments; ++i) {
    std::uint64_t value = 0;
    std::memcpy(&value, launch->arguments + launch->offsets[i], launch->sizes[i]);
    if (i < all_arguments().size()) {
      noted.values[all_arguments()[i]] = value;
    } else {
      noted.hidden.push_back(value);
    }
  }
  launches.push_back(noted);
}

// A node's tensors.
struct Tensors {
  std::vector<std::unique_ptr<FakeTensor>> inputs{kNumAttentionInputs};
  std::map<std::size_t, std::unique_ptr<FakeTensor>> presents;
  FakeContext context;

  FakeTensor& add(AttentionInput input, ort::ElementType type, std::vector<std::int64_t> shape) {
    inputs[input] = std::make_unique<FakeTensor>(type, std::move(shape));
    return *inputs[input];
  }
};

Tensors tensors_of(const Case& c) {
  Tensors t;
  const ort::ElementType activation = element_type(c.activation);
  const std::int64_t keys = c.kv_heads * c.head_dim;
  const std::int64_t values = c.kv_heads * c.value_head_dim;
  const std::int64_t queries = c.heads * c.head_dim;
  if (c.is_packed) {
    t.add(kQuery, activation, {c.batch, c.new_tokens, queries + keys + values});
  } else {
    t.add(kQuery, activation, {c.batch, c.new_tokens, queries});
    t.add(kKey, activation, {c.batch, c.new_tokens, keys});
    t.add(kValue, activation, {c.batch, c.new_tokens, values});
  }
  const ort::ElementType cache = element_type(c.cache);
  const auto add_cache = [&](AttentionInput past, AttentionOutput present, ort::ElementType type,
                             std::int64_t width) {
    FakeTensor& tensor = t.add(past, type, {c.batch, c.kv_heads, c.capacity, width});
    if (c.in_place) {
      t.context.bound[present] = &tensor;
    } else {
      t.presents[present] = std::make_unique<FakeTensor>(type, tensor.shape);
      t.context.bound[present] = t.presents[present].get();
    }
  };
  add_cache(kPastKey, kPresentKey, cache, cache_row_size(key_type(c.cache), c.head_dim));
  add_cache(kPastValue, kPresentValue, cache, cache_row_size(c.cache, c.value_head_dim));
  if (is_quantized(c.cache)) {
    add_cache(kPastKeyScale, kPresentKeyScale, ort::kBFloat16, num_groups(c.head_dim));
    add_cache(kPastValueScale, kPresentValueScale, ort::kBFloat16, num_groups(c.value_head_dim));
  }
  t.add(kAttentionMask, ort::kInt64, {c.batch, c.mask_width});
  if (c.has_rotary) {
    for (AttentionInput input : {kCos, kSin}) {
      t.add(input, ort::kFloat32, {c.batch, c.new_tokens, c.head_dim / 2});
    }
  }
  if (c.has_bias) t.add(kAttentionBias, activation, {1, c.heads, c.new_tokens, c.mask_width});
  // -1 at first: a launcher that read it on the host would refuse it.
  t.add(kPastSequenceLength, ort::kInt32, {1});
  if (c.has_kernels) {
    const Bytes pack = pack_of(c);
    FakeTensor& kernels = t.add(kKernels, ort::kUInt8, {static_cast<std::int64_t>(pack.size())});
    std::memcpy(kernels.data.get(), pack.data(), pack.size());
  }
  return t;
}

// Runs a node once and returns its complaint; `launches` holds what it launched.
std::string run(const Case& c, Tensors& t) {
  FakeInfo info;
  info.ints = {{"num_heads", c.heads}, {"kv_num_heads", c.kv_heads}, {"window_size", c.window}};
  if (c.is_ring) info.strings["cache_mode"] = "ring";
  info.constants.resize(kNumAttentionInputs);
  info.constants[kKernels] = t.inputs[kKernels].get();
  for (const auto& input : t.inputs) t.context.inputs.push_back(input.get());
  launches.clear();
  const ort::CustomOp& op =
      find_op("FlashAttention",
              {{kQuery, element_type(c.activation)}, {kPastKey, element_type(c.cache)}}, kProvider);
  const std::string message = run_node(op, info, t.context, "cuda");
  CHECK(SHIM(kvconv_shim_num_loaded)() == 0, "a module was not unloaded");
  CHECK(SHIM(kvconv_shim_num_retained)() == 0, "a context was not released");
  const std::string complaints = SHIM(kvconv_shim_complaints)();
  CHECK(complaints.empty(), "%s", complaints.c_str());
  return message;
}

std::string run(const Case& c) {
  Tensors t = tensors_of(c);
  return run(c, t);
}

void check_grid(const Launch& launch, const std::string& function, std::vector<unsigned> grid) {
  CHECK(launch.function == function, "%s instead of %s", launch.function.c_str(), function.c_str());
  CHECK(launch.grid == grid, "the grid of %s is %u x %u x %u", function.c_str(), launch.grid[0],
        launch.grid[1], launch.grid[2]);
  CHECK(launch.stream == fake_stream(), "%s is on another stream", function.c_str());
  CHECK(launch.hidden == std::vector<std::uint64_t>({0, 0}), "the hidden pointers are not null");
}

std::uint64_t address_of(const FakeTensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data.get());
}

void check_value(const Launch& launch, Argument argument, std::uint64_t expected) {
  const std::uint64_t value = launch.values.at(argument);
  CHECK(value == expected, "argument %d of %s is %llu instead of %llu", static_cast<int>(argument),
        launch.function.c_str(), static_cast<unsigned long long>(value),
        static_cast<unsigned long long>(expected));
}

void check_refused(const std::string& message, const std::string& part) {
  CHECK(message.find(part) != std::string::npos, "wanted \"%s\" in \"%s\"", part.c_str(),
        message.c_str());
  CHECK(launches.empty(), "something was launched before \"%s\"", message.c_str());
}

void test_prefill_appends_and_attends() {
  Case c;
  c.is_packed = true;
  c.window = 100;
  Tensors t = tensors_of(c);
  const std::string message = run(c, t);
  CHECK(message.empty(), "%s", message.c_str());
  CHECK(launches.size() == 2, "%zu launches", launches.size());
  check_grid(launches[0], "append", {2, 2, 2});
  check_grid(launches[1], "prefill", {1, 6, 2});
  CHECK(launches[1].threads == 256 && launches[1].shared_bytes == 100000, "block of prefill");
  const Launch& l = launches[1];
  const std::uint64_t query = address_of(*t.inputs[kQuery]);
  check_value(l, Argument::kQuery, query);
  check_value(l, Argument::kKey, query + 6 * 64 * 2);
  check_value(l, Argument::kValue, query + 8 * 64 * 2);
  check_value(l, Argument::kPresentKey, address_of(*t.inputs[kPastKey]));
  check_value(l, Argument::kPresentValue, address_of(*t.inputs[kPastValue]));
  check_value(l, Argument::kPresentKeyScale, address_of(*t.inputs[kPastKeyScale]));
  check_value(l, Argument::kPresentValueScale, address_of(*t.inputs[kPastValueScale]));
  check_value(l, Argument::kAttentionMask, address_of(*t.inputs[kAttentionMask]));
  check_value(l, Argument::kCos, address_of(*t.inputs[kCos]));
  check_value(l, Argument::kSin, address_of(*t.inputs[kSin]));
  check_value(l, Argument::kAttentionBias, 0);
  check_value(l, Argument::kPastSequenceLength, address_of(*t.inputs[kPastSequenceLength]));
  check_value(l, Argument::kOutput, address_of(*t.context.outputs[kOutput]));
  check_value(l, Argument::kQueryTokenStride, 8 * 64 + 2 * 96);
  check_value(l, Argument::kValueTokenStride, 8 * 64 + 2 * 96);
  check_value(l, Argument::kSequenceLength, 5);
  check_value(l, Argument::kCapacity, 700);
  check_value(l, Argument::kMaskWidth, 700);
  check_value(l, Argument::kNumHeads, 6);
  check_value(l, Argument::kKvNumHeads, 2);
  check_value(l, Argument::kRotaryBatchStride, 5 * 32);
  check_value(l, Argument::kWindowSize, 100);
  check_value(l, Argument::kScale, std::bit_cast<std::uint32_t>(0.125F));
}

void test_decode_splits_the_capacity() {
  Case c;
  c.new_tokens = 1;
  c.has_bias = true;
  c.capacity = c.mask_width = 5000;
  Tensors t = tensors_of(c);
  const std::string message = run(c, t);
  CHECK(message.empty(), "%s", message.c_str());
  CHECK(launches.size() == 3, "%zu launches", launches.size());
  check_grid(launches[0], "append", {1, 2, 2});
  // 5000 slots in 20 parts of at least 256: 250, rounded up to whole tiles.
  check_grid(launches[1], "decode", {20, 2, 2});
  check_grid(launches[2], "combine", {6, 2, 1});
  check_value(launches[1], Argument::kNumSplits, 20);
  check_value(launches[1], Argument::kSlotsPerSplit, 256);
  check_value(launches[1], Argument::kBiasStrideBatch, 0);
  check_value(launches[1], Argument::kBiasStrideHead, 5000);
  check_value(launches[1], Argument::kBiasStrideQuery, 0);
  check_value(launches[1], Argument::kBiasStrideSlot, 1);
  for (Argument partial :
       {Argument::kPartialOutput, Argument::kPartialMaximum, Argument::kPartialSum}) {
    CHECK(launches[1].values.at(partial) != 0, "partials are missing");
    check_value(launches[2], partial, launches[1].values.at(partial));
  }
  const std::uint64_t rows = 20 * 2 * 6;
  CHECK(launches[1].values.at(Argument::kPartialMaximum) -
                launches[1].values.at(Argument::kPartialOutput) >=
            rows * 96 * 4,
        "partials overlap");
  CHECK(launches[1].values.at(Argument::kPartialSum) -
                launches[1].values.at(Argument::kPartialMaximum) >=
            rows * 4,
        "partials overlap");
}

void test_splits_cover_every_slot() {
  for (std::int64_t capacity : {1, 63, 64, 255, 256, 257, 512, 5000, 131072}) {
    for (std::int64_t rows : {1, 2, 3, 8, 216, 500}) {
      for (std::int64_t tile : {16, 64, 128}) {
        const cuda::Splits splits = cuda::split_slots(capacity, rows, tile, 108);
        CHECK(splits.slots % tile == 0, "slots %lld", static_cast<long long>(splits.slots));
        CHECK(
            splits.count * splits.slots >= capacity && (splits.count - 1) * splits.slots < capacity,
            "%lld splits of %lld slots for %lld", static_cast<long long>(splits.count),
            static_cast<long long>(splits.slots), static_cast<long long>(capacity));
        CHECK(splits.count <= std::max<std::int64_t>(1, 216 / rows), "too many splits");
      }
    }
  }
}

void test_present_apart_from_past_is_copied_first() {
  Case c;
  c.in_place = false;
  Tensors t = tensors_of(c);
  for (AttentionInput input : {kPastKey, kPastValue, kPastKeyScale, kPastValueScale}) {
    std::memset(t.inputs[input]->data.get(), input, t.inputs[input]->bytes());
  }
  const std::string message = run(c, t);
  CHECK(message.empty(), "%s", message.c_str());
  for (const auto& [input, output] :
       {std::pair{kPastKey, kPresentKey}, std::pair{kPastValue, kPresentValue},
        std::pair{kPastKeyScale, kPresentKeyScale},
        std::pair{kPastValueScale, kPresentValueScale}}) {
    const FakeTensor& past = *t.inputs[input];
    CHECK(std::memcmp(t.presents.at(output)->data.get(), past.data.get(), past.bytes()) == 0,
          "output %d is no copy", static_cast<int>(output));
  }
}

void test_every_type_has_an_op() {
  for (DataType activation : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
    for (DataType cache : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16,
                           DataType::kInt8, DataType::kInt4}) {
      Case c;
      c.activation = activation;
      c.cache = cache;
      const std::string message = run(c);
      CHECK(message.empty() && launches.size() == 2, "%s", message.c_str());
    }
  }
}

void test_what_the_device_cannot_do_is_refused_first() {
  const auto changed = [](const std::function<void(Case&)>& change) {
    Case c;
    change(c);
    return c;
  };
  check_refused(run(changed([](Case& c) { c.has_kernels = false; })), "kernels is absent");
  check_refused(run(changed([](Case& c) { c.mask_width = 4; })), "attention_mask is 4 wide");
  check_refused(run(changed([](Case& c) { c.capacity = 4; })), "capacity is 4");
  check_refused(run(changed([](Case& c) {
                  c.heads = c.kv_heads = 1;
                  c.head_dim = 72;
                })),
                "a multiple of 16");
  check_refused(run(changed([](Case& c) {
                  c.heads = c.kv_heads = 70000;
                  c.head_dim = c.value_head_dim = 16;
                  c.new_tokens = 1;
                  c.batch = 1;
                  c.capacity = c.mask_width = 1;
                })),
                "a grid of 1 x 70000 x 1");
  {
    Case c;
    Tensors t = tensors_of(c);
    t.inputs[kPastSequenceLength].reset();
    check_refused(run(c, t), "past_sequence_length is absent; CUDA kernels need it");
  }
  {
    Case c;
    c.has_bias = true;
    Tensors t = tensors_of(c);
    t.add(kAttentionBias, ort::kFloat16, {1, 1, 5, 699});
    check_refused(run(c, t), "dimension 3 is 699 and must be 1 or 700");
  }
  {
    Case c;  // kernels of another variant
    Tensors t = tensors_of(c);
    c.window = 8;
    check_refused(run(c, t),
                  "the kernel pack has no append of float16 over int8 caches, head_dim "
                  "64, value_head_dim 96, 3 query heads");
  }
  {
    Case c;  // of other types, which the node can tell when it is made
    Tensors t = tensors_of(c);
    const Bytes other = pack_of(changed([](Case& of) { of.cache = DataType::kFloat16; }));
    FakeTensor& kernels = t.add(kKernels, ort::kUInt8, {static_cast<std::int64_t>(other.size())});
    std::memcpy(kernels.data.get(), other.data(), other.size());
    check_refused(run(c, t),
                  "has no kernel of this node's types for this GPU, whose compute "
                  "capability is 8.0");
  }
  {
    Case c;
    Tensors t = tensors_of(c);
    t.inputs[kKernels]->data[100] ^= 1;
    check_refused(run(c, t), "the kernel pack is damaged: its sha256");
  }
}

void test_what_the_driver_refuses_is_said() {
  for (const auto& [function, part] :
       {std::pair{"cuDeviceGet", "cannot open GPU 0: CUDA error 100, no CUDA-capable device"},
        std::pair{"cuDevicePrimaryCtxRetain", "cannot open the GPU's context"},
        std::pair{"cuModuleLoadDataEx", "cannot load append (the driver serves CUDA 12.4"},
        std::pair{"cuModuleGetFunction", "cannot find append"},
        std::pair{"cuFuncSetAttribute", "cannot give shared memory to prefill"},
        std::pair{"cuLaunchKernel", "cannot launch append"}}) {
    SHIM(kvconv_shim_fail)(function, 100);
    const std::string message = run(Case());
    SHIM(kvconv_shim_fail)(function, 0);
    check_refused(message, part);
  }
  SHIM(kvconv_shim_set_device)(75, 40, 65536);
  check_refused(run(Case()), "compute capability is 7.5. kvconv's kernels need 8.0 or newer");
  SHIM(kvconv_shim_set_device)(80, 108, 166912);
}

void test_a_ring_is_a_kernel_of_its_own() {
  Case c;
  c.is_ring = true;
  c.window = 512;
  c.capacity = 768;
  c.mask_width = 5000;
  const std::string message = run(c);
  CHECK(message.empty(), "%s", message.c_str());
  check_value(launches[1], Argument::kCapacity, 768);
  check_value(launches[1], Argument::kMaskWidth, 5000);
}

void test_nothing_new_launches_nothing() {
  Case c;
  c.new_tokens = 0;
  CHECK(run(c).empty() && launches.empty(), "no tokens");
  c = Case();
  c.batch = 0;
  CHECK(run(c).empty() && launches.empty(), "no rows");
}

void test_no_driver_is_said() {
  Case c;
  FakeInfo info;
  info.ints = {{"num_heads", c.heads}, {"kv_num_heads", c.kv_heads}};
  Tensors t = tensors_of(c);
  info.constants.resize(kNumAttentionInputs);
  info.constants[kKernels] = t.inputs[kKernels].get();
  const ort::CustomOp& op =
      find_op("FlashAttention", {{kQuery, ort::kFloat16}, {kPastKey, ort::kInt8}}, kProvider);
  check_refused(run_node(op, info, t.context, "no driver"),
                "no NVIDIA driver was found (libcuda.so.1)");
}

}  // namespace
}  // namespace kvconv::test

int main(int argc, char** argv) {
  using namespace kvconv::test;
  CHECK(argc == 2, "usage: cuda_test PATH_OF_THE_SHIM");
  if (void* driver = dlopen("libcuda.so.1", RTLD_NOW)) {  // a machine with a GPU
    dlclose(driver);
  } else {
    test_no_driver_is_said();
  }
  CHECK(dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) != nullptr, "cannot load %s", argv[1]);
  SHIM(kvconv_shim_on_launch)(note, nullptr);
  test_prefill_appends_and_attends();
  test_decode_splits_the_capacity();
  test_splits_cover_every_slot();
  test_present_apart_from_past_is_copied_first();
  test_every_type_has_an_op();
  test_what_the_device_cannot_do_is_refused_first();
  test_what_the_driver_refuses_is_said();
  test_a_ring_is_a_kernel_of_its_own();
  test_nothing_new_launches_nothing();
  std::printf("CUDA op and launcher: all right\n");
  return 0;
}
