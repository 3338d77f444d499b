// Every build of the flash kernel that this machine can run, over rings and over whole caches.
#include <algorithm>
#include <cstring>
#include <new>

#include "buffer.h"
#include "threads.h"

namespace kvconv::test {
namespace {

// Runs of several sizes, one behind the other, over a ring and over a cache that holds all tokens:
// the outputs agree although the ring wraps several times.
void test_ring(const FlashKernel& kernel, std::uint64_t seed) {
  Random random(seed);
  AttentionParams p;
  p.batch_size = 2;
  p.kv_num_heads = 2;
  p.num_heads = p.kv_num_heads * (1 + random.below(3));
  p.head_dim = 1 + random.below(40);
  p.value_head_dim = 1 + random.below(40);
  p.cache_type =
      random.pick<DataType>({DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16});
  p.scale = 1.0F / std::sqrt(static_cast<float>(p.head_dim));
  p.softcap = random.chance(30) ? 1.5F : 0.0F;
  p.window_size = random.pick<std::int64_t>({1, 7, 40, 64, 130, 300});
  const std::int64_t most_new = random.pick<std::int64_t>({1, 4, 33, 90});
  const std::int64_t ring_slots = p.window_size + most_new - 1;
  const std::int64_t all_slots = 4 * ring_slots + most_new;
  std::vector<std::int64_t> mask(static_cast<std::size_t>(p.batch_size * all_slots), 1);
  std::fill_n(mask.begin(), random.below(2 * ring_slots), 0);  // the first row is left-padded
  p.attention_mask = mask.data();
  p.mask_width = all_slots;
  Buffer slopes(p.num_heads, DataType::kFloat32);
  Buffer sinks(p.num_heads, DataType::kFloat32);
  Buffer bias(all_slots, p.activation_type);  // per slot
  for (Buffer* buffer : {&slopes, &sinks, &bias}) buffer->randomize(random);
  if (random.chance(30)) p.alibi_slopes = static_cast<const float*>(slopes.data());
  if (random.chance(30)) p.head_sink = static_cast<const float*>(sinks.data());
  if (random.chance(30)) {
    p.attention_bias = bias.data();
    p.bias_strides[3] = 1;
  }
  p.query_token_stride = p.num_heads * p.head_dim;
  p.key_token_stride = p.kv_num_heads * p.head_dim;
  p.value_token_stride = p.kv_num_heads * p.value_head_dim;

  struct Cache {
    std::int64_t slots;
    Buffer key;
    Buffer value;
  };
  const auto make_cache = [&](std::int64_t slots) {
    const std::int64_t rows = p.batch_size * p.kv_num_heads * slots;
    return Cache{slots, Buffer(rows * p.head_dim, p.cache_type),
                 Buffer(rows * p.value_head_dim, p.cache_type)};
  };
  Cache caches[2] = {make_cache(all_slots), make_cache(ring_slots)};
  while (p.past_sequence_length + most_new <= all_slots) {
    p.sequence_length = 1 + random.below(most_new);
    p.total_sequence_length = p.past_sequence_length + p.sequence_length;
    const std::int64_t tokens = p.batch_size * p.sequence_length;
    Buffer query(tokens * p.query_token_stride, p.activation_type);
    Buffer key(tokens * p.key_token_stride, p.activation_type);
    Buffer value(tokens * p.value_token_stride, p.activation_type);
    for (Buffer* buffer : {&query, &key, &value}) buffer->randomize(random);
    p.query = query.data();
    p.key = key.data();
    p.value = value.data();
    const std::int64_t elements = tokens * p.num_heads * p.value_head_dim;
    Buffer outputs[2] = {Buffer(elements, p.activation_type), Buffer(elements, p.activation_type)};
    for (int i = 0; i < 2; ++i) {
      const Buffer past_key = caches[i].key;  // every other ring is copied and not in place
      const Buffer past_value = caches[i].value;
      const bool in_place = seed % 2 == 0;
      p.past_capacity = p.present_capacity = caches[i].slots;
      p.present_key = caches[i].key.data();
      p.present_value = caches[i].value.data();
      p.past_key = in_place ? p.present_key : past_key.data();
      p.past_value = in_place ? p.present_value : past_value.data();
      if (!in_place) {
        std::memset(p.present_key, 0xFF,
                    static_cast<std::size_t>(caches[i].key.size()) * bytes_of(p.cache_type));
        std::memset(p.present_value, 0xFF,
                    static_cast<std::size_t>(caches[i].value.size()) * bytes_of(p.cache_type));
      }
      p.output = outputs[i].data();
      const ParallelFor parallel_for{run_on_threads, nullptr, 2};
      const std::size_t bytes = kernel.workspace_bytes(p, 2);
      void* workspace = ::operator new(bytes, std::align_val_t(64));
      kernel.run(p, workspace, parallel_for);
      ::operator delete(workspace, std::align_val_t(64));
    }
    check_close(outputs[1].data(), outputs[0].data(), elements, p.activation_type,
                is_quantized(p.cache_type) ? quantized_tolerance_of(p.activation_type)
                                           : tolerance_of(p.activation_type),
                std::string(kernel.name) + ", ring of seed " + std::to_string(seed));
    p.past_sequence_length = p.total_sequence_length;
  }
}

}  // namespace
}  // namespace kvconv::test

int main() {
  std::uint64_t seed = 0;  // other cases for every build
  for (const kvconv::FlashKernel& kernel : kvconv::flash_kernels()) {
    for (int i = 0; i < 25; ++i) kvconv::test::test_ring(kernel, seed++);
    std::printf("%s: rings give what whole caches give\n", kernel.name);
  }
  return 0;
}
