#include "launcher.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "arguments.h"
#include "driver.h"
#include "kvconv/cache_format.h"
#include "kvconv/text.h"

namespace kvconv::cuda {
namespace {

constexpr std::int64_t kLeastSlotsPerSplit = 256;
constexpr std::int64_t kMaxGridYZ = 65535;
constexpr unsigned kThreadsPerWarp = 32;
constexpr unsigned kSharedBytesWithoutAsking = 48 * 1024;

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

Variant variant_of(const Run& run, KernelKind kind) {
  const AttentionParams& p = run.params;
  Variant v;
  v.kind = kind;
  v.activation_type = p.activation_type;
  v.cache_type = p.cache_type;
  v.head_dim = static_cast<std::uint32_t>(p.head_dim);
  v.value_head_dim = static_cast<std::uint32_t>(p.value_head_dim);
  v.group = static_cast<std::uint32_t>(p.num_heads / p.kv_num_heads);
  v.rotary_dim = static_cast<std::uint32_t>(p.rotary_dim);
  const auto set = [&v](bool condition, Feature feature) {
    if (condition) v.features |= feature;
  };
  set(p.cos != nullptr, kRotary);
  set(p.cos != nullptr && p.rotary_interleaved, kRotaryInterleaved);
  set(p.attention_mask != nullptr, kMask);
  set(p.attention_bias != nullptr, kBias);
  set(p.alibi_slopes != nullptr, kAlibi);
  set(p.head_sink != nullptr, kSink);
  set(p.softcap > 0.0F, kSoftcap);
  set(p.window_size > 0, kWindow);
  set(run.is_ring, kRing);
  set(p.is_causal, kCausal);
  return v;
}

struct Grid {
  std::int64_t x;
  std::int64_t y;
  std::int64_t z;
};

void check_grid(const Grid& grid) {
  if (grid.x <= std::numeric_limits<std::int32_t>::max() && grid.y <= kMaxGridYZ &&
      grid.z <= kMaxGridYZ) {
    return;
  }
  refuse(text("the run would take a grid of ", grid.x, " x ", grid.y, " x ", grid.z,
              " blocks; CUDA has at most ", std::numeric_limits<std::int32_t>::max(), " x ",
              kMaxGridYZ, " x ", kMaxGridYZ, ". Run fewer rows at once."));
}

// Memory of a Scratch, given back at the end: what runs then is on the same stream.
class Borrowed {
 public:
  Borrowed(Scratch& scratch, std::size_t bytes)
      : scratch_(scratch), memory_(bytes == 0 ? nullptr : scratch.allocate(bytes)) {}
  ~Borrowed() {
    if (memory_ != nullptr) scratch_.free(memory_);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  char* get() const { return static_cast<char*>(memory_); }

 private:
  Scratch& scratch_;
  void* memory_;
};

std::size_t round_up_bytes(std::int64_t bytes) {
  constexpr std::int64_t kAlignment = 256;
  return static_cast<std::size_t>(divide_up(bytes, kAlignment) * kAlignment);
}

DevicePointer address(const void* pointer) {
  return static_cast<DevicePointer>(reinterpret_cast<std::uintptr_t>(pointer));
}

}  // namespace

Splits split_slots(std::int64_t capacity, std::int64_t batch_times_heads, std::int64_t tile,
                   std::int64_t num_multiprocessors) {
  // Two programs a multiprocessor hide each other's waits; more would only add partials.
  const std::int64_t most = std::max<std::int64_t>(1, 2 * num_multiprocessors / batch_times_heads);
  const std::int64_t wanted =
      std::clamp<std::int64_t>(divide_up(capacity, kLeastSlotsPerSplit), 1, most);
  const std::int64_t slots = divide_up(divide_up(capacity, wanted), tile) * tile;
  return {divide_up(capacity, slots), slots};
}

// The kernels in each context that they were launched in.
class Launcher::Loaded {
 public:
  explicit Loaded(const KernelPack& pack) : pack_(pack) {}

  ~Loaded() {
    for (const auto& [context, kernels] : contexts_) {
      // At the end of a process the driver may be gone before us; then there is nothing to unload.
      if (driver().push_context(context) != 0) continue;
      for (const Entry& entry : kernels) {
        if (entry.module != nullptr) driver().unload_module(entry.module);
      }
      Context popped = nullptr;
      driver().pop_context(&popped);
    }
  }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;

  // The kernel in the thread's current context.
  Function function(std::size_t index) {
    const Driver& d = driver();
    Context context = nullptr;
    d.check(d.get_current_context(&context), "ask for the CUDA context");
    if (context == nullptr) refuse("the thread has no CUDA context; ONNX Runtime makes one.");
    const std::scoped_lock lock(mutex_);
    std::vector<Entry>& kernels = contexts_[context];
    kernels.resize(pack_.kernels().size());
    Entry& entry = kernels[index];
    if (entry.function == nullptr) entry = load(pack_.kernels()[index]);
    return entry.function;
  }

 private:
  struct Entry {
    Module module = nullptr;
    Function function = nullptr;
  };

  static Entry load(const Kernel& kernel) {
    const Driver& d = driver();
    Entry entry;
    d.check(d.load_module(&entry.module, kernel.image.data(), 0, nullptr, nullptr), "load",
            text(kernel.function, " (the driver serves CUDA ", d.version_text(),
                 "; where that is too old, install a newer one, or use the CPU)"));
    try {
      d.check(d.get_function(&entry.function, entry.module, kernel.function.c_str()), "find",
              kernel.function);
      if (kernel.shared_bytes > kSharedBytesWithoutAsking) {
        d.check(d.set_function_attribute(entry.function, kMaxDynamicSharedBytes,
                                         static_cast<int>(kernel.shared_bytes)),
                "give shared memory to", kernel.function);
      }
    } catch (...) {
      d.unload_module(entry.module);
      throw;
    }
    return entry;
  }

  const KernelPack& pack_;
  std::mutex mutex_;
  std::map<Context, std::vector<Entry>> contexts_;
};

std::shared_ptr<const Launcher> Launcher::shared(std::span<const std::uint8_t> pack, int ordinal) {
  static std::mutex mutex;
  static std::vector<std::pair<int, std::weak_ptr<const Launcher>>> launchers;
  const std::scoped_lock lock(mutex);
  std::erase_if(launchers, [](const auto& entry) { return entry.second.expired(); });
  for (const auto& [entry_ordinal, weak] : launchers) {
    const std::shared_ptr<const Launcher> launcher = weak.lock();
    if (launcher != nullptr && entry_ordinal == ordinal && launcher->pack_.is_copy_of(pack)) {
      return launcher;
    }
  }
  auto launcher = std::make_shared<const Launcher>(pack, ordinal);
  launchers.emplace_back(ordinal, launcher);
  return launcher;
}

Launcher::Launcher(std::span<const std::uint8_t> pack, int ordinal) : pack_(pack) {
  const Driver& d = driver();
  d.check(d.get_device(&device_id_, ordinal), "open GPU", std::to_string(ordinal));
  const auto attribute = [&](DeviceAttribute which) {
    int value = 0;
    d.check(d.get_device_attribute(&value, which, device_id_), "ask what the GPU can do");
    return value;
  };
  device_.compute_capability =
      10 * attribute(kComputeCapabilityMajor) + attribute(kComputeCapabilityMinor);
  device_.max_shared_bytes = static_cast<unsigned>(attribute(kMaxSharedMemoryPerBlockOptin));
  num_multiprocessors_ = attribute(kMultiprocessorCount);
  // Kept as long as there are modules in it.
  Context context = nullptr;
  d.check(d.retain_primary_context(&context, device_id_), "open the GPU's context");
  loaded_ = std::make_unique<Loaded>(pack_);
}

Launcher::~Launcher() {
  loaded_.reset();
  driver().release_primary_context(device_id_);
}

void Launcher::require_types(DataType activation_type, DataType cache_type) const {
  const auto& kernels = pack_.kernels();
  const bool has_kernel = std::any_of(kernels.begin(), kernels.end(), [&](const Kernel& kernel) {
    return kernel.variant.activation_type == activation_type &&
           kernel.variant.cache_type == cache_type && KernelPack::runs_on(kernel, device_);
  });
  if (has_kernel) return;
  refuse(text("the kernel pack (", pack_.gpus_text(), ") has no kernel of this node's types for ",
              "this GPU, whose compute capability is ", capability_text(device_.compute_capability),
              ". ", remedy(device_)));
}

void Launcher::run(const Run& run, Scratch& scratch) const {
  const AttentionParams& p = run.params;
  const Driver& d = driver();
  struct Launch {
    const Kernel* kernel;
    Function function;
    Grid grid;
  };
  std::array<Launch, 3> launches;
  std::size_t num_launches = 0;
  const auto add = [&](KernelKind kind, auto&& grid_of) {
    const std::size_t index = pack_.find(variant_of(run, kind), device_);
    const Kernel& kernel = pack_.kernels()[index];
    const Grid grid = grid_of(kernel);
    check_grid(grid);
    launches[num_launches++] = {&kernel, loaded_->function(index), grid};
  };

  // 1. Choose all kernels, before anything is written.
  Splits splits;
  if (p.sequence_length > 0) {
    const auto tiles = [&](const Kernel& kernel, std::int64_t heads) {
      return Grid{divide_up(p.sequence_length, kernel.tile_m), heads, p.batch_size};
    };
    add(KernelKind::kAppend, [&](const Kernel& kernel) { return tiles(kernel, p.kv_num_heads); });
    if (p.sequence_length > 1) {
      add(KernelKind::kPrefill, [&](const Kernel& kernel) { return tiles(kernel, p.num_heads); });
    } else {
      add(KernelKind::kDecode, [&](const Kernel& kernel) {
        splits = split_slots(p.present_capacity, p.batch_size * p.kv_num_heads, kernel.tile_n,
                             num_multiprocessors_);
        return Grid{splits.count, p.kv_num_heads, p.batch_size};
      });
      add(KernelKind::kCombine, [&](const Kernel&) { return Grid{p.num_heads, p.batch_size, 1}; });
    }
  }

  // 2. Partials, in one piece of memory.
  const std::int64_t partial_rows = splits.count * p.batch_size * p.num_heads;
  const std::size_t output_bytes = round_up_bytes(partial_rows * p.value_head_dim * 4);
  const std::size_t number_bytes = round_up_bytes(partial_rows * 4);
  const Borrowed memory(scratch, output_bytes + 2 * number_bytes);
  Partials partials;
  if (memory.get() != nullptr) {
    partials.output = reinterpret_cast<float*>(memory.get());
    partials.maximum = reinterpret_cast<float*>(memory.get() + output_bytes);
    partials.sum = reinterpret_cast<float*>(memory.get() + output_bytes + number_bytes);
  }
  std::array<std::optional<PackedArguments>, 3> arguments;
  for (std::size_t i = 0; i < num_launches; ++i) {
    arguments[i].emplace(*launches[i].kernel, run, splits, partials);
  }

  // 3. A present apart from its past begins as a copy of it.
  const std::int64_t rows = p.batch_size * p.kv_num_heads * p.present_capacity;
  const auto copy = [&](const void* past, void* present, std::int64_t bytes_of_row) {
    if (past == present || rows * bytes_of_row == 0) return;
    d.check(d.copy(address(present), address(past), static_cast<std::size_t>(rows * bytes_of_row),
                   run.stream),
            "copy the cache");
  };
  copy(p.past_key, p.present_key, row_bytes(key_type(p.cache_type), p.head_dim));
  copy(p.past_value, p.present_value, row_bytes(p.cache_type, p.value_head_dim));
  copy(p.past_key_scale, p.present_key_scale, 2 * num_scales(p.cache_type, p.head_dim));
  copy(p.past_value_scale, p.present_value_scale, 2 * num_scales(p.cache_type, p.value_head_dim));

  // 4. Launch.
  for (std::size_t i = 0; i < num_launches; ++i) {
    const auto& [kernel, function, grid] = launches[i];
    d.check(d.launch(function, static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                     static_cast<unsigned>(grid.z), kernel->num_warps * kThreadsPerWarp, 1, 1,
                     kernel->shared_bytes, run.stream, arguments[i]->pointers(), nullptr),
            "launch", kernel->function);
  }
}

}  // namespace kvconv::cuda
