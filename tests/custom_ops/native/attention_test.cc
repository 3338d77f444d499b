// Every build of the flash kernel that this machine can run, against the reference kernel.
// `attention_test FIRST END` runs the random cases of the seeds [FIRST, END).
#include <algorithm>
#include <cstring>
#include <new>

#include "buffer.h"
#include "threads.h"

namespace kvconv::test {
namespace {

// One random run of the kernel, with the memory it needs.
struct Case {
  AttentionParams p;
  std::vector<Buffer> buffers;
  std::vector<std::int64_t> mask;
  std::vector<std::vector<float>> tables;
  bool in_place = false;
  std::string text;

  const void* input(Random& random, std::int64_t elements, DataType type) {
    buffers.emplace_back(elements, type);
    buffers.back().randomize(random);
    return buffers.back().data();
  }
  const float* table(Random& random, std::int64_t elements, float factor) {
    tables.emplace_back();
    for (std::int64_t i = 0; i < elements; ++i) tables.back().push_back(factor * random.normal());
    return tables.back().data();
  }
};

// Elements of a row of the cache, as Buffer counts them.
std::int64_t key_size_of(const AttentionParams& p) {
  return is_quantized(p.cache_type) ? row_bytes(key_type(p.cache_type), p.head_dim) : p.head_dim;
}
std::int64_t value_size_of(const AttentionParams& p) {
  return is_quantized(p.cache_type) ? row_bytes(p.cache_type, p.value_head_dim) : p.value_head_dim;
}
int largest_code(DataType cache_type) { return cache_type == DataType::kInt8 ? 127 : 8; }

// Makes some new rows into what rounding must get right: zeros, one number, and a channel 50 times
// the rest or what is not a number. Not both in one case: where scores are that large, the weight
// of a NaN may be 0 in float32 alone.
void make_special(Random& random, const AttentionParams& p, const void* rows,
                  std::int64_t token_stride, std::int64_t width, bool has_spikes) {
  for (std::int64_t token = 0; token < p.batch_size * p.sequence_length; ++token) {
    if (random.chance(50)) continue;
    const std::int64_t first = token * token_stride + random.below(p.kv_num_heads) * width;
    const std::int64_t special = first + random.below(width);
    const auto set = [&](std::int64_t i, float value) {
      store_element(const_cast<void*>(rows), i, p.activation_type, value);
    };
    const std::int64_t kind = random.below(6);
    for (std::int64_t h = 0; h < width && kind < 2; ++h) set(first + h, kind == 0 ? 0.0F : -2.5F);
    if (kind < 2) continue;
    const float not_a_number = random.chance(50) ? std::nanf("") : -HUGE_VALF;
    set(special, has_spikes ? 50.0F * random.normal() : not_a_number);
  }
}

Case make_case(std::uint64_t seed) {
  Random random(seed);
  Case c;
  AttentionParams& p = c.p;
  // Around vectors, strips of rows (12, 24 or 48) and tiles of keys (64, or 128 for few rows).
  const std::vector<std::int64_t> edges = {1,  2,  3,  5,  12, 15, 16, 17,  31,  33,
                                           47, 48, 49, 63, 64, 65, 97, 127, 128, 129};
  p.batch_size = 1 + random.below(3);
  p.kv_num_heads = 1 + random.below(3);
  p.num_heads = p.kv_num_heads * (1 + random.below(5));
  p.sequence_length = random.chance(40) ? 1 : random.pick(edges);
  p.past_sequence_length = random.chance(25)   ? 0
                           : random.chance(15) ? 900
                                               : random.pick(edges) * (1 + random.below(3));
  p.total_sequence_length = p.past_sequence_length + p.sequence_length;
  p.head_dim = random.chance(3) ? 1000 : random.pick(edges);
  p.value_head_dim = random.chance(50) ? p.head_dim : random.pick(edges);
  p.activation_type = random.chance(70) ? DataType::kFloat32 : DataType::kFloat16;
  p.cache_type = random.pick<DataType>({DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16,
                                        DataType::kInt8, DataType::kInt4});
  p.scale = 1.0F / std::sqrt(static_cast<float>(p.head_dim));
  p.softcap = random.chance(25) ? 1.5F : 0.0F;
  p.window_size = random.chance(30) ? random.pick(edges) : 0;
  p.is_causal = random.chance(80);

  const bool ring = p.window_size > 0 && random.chance(60);
  const bool concat = !ring && random.chance(30);
  c.in_place = !concat && random.chance(70);
  const std::int64_t slots = ring ? p.window_size + p.sequence_length - 1 : p.total_sequence_length;
  p.past_capacity = concat ? p.past_sequence_length : slots + random.below(9);
  p.present_capacity = concat ? p.total_sequence_length : p.past_capacity;

  const std::int64_t tokens = p.batch_size * p.sequence_length;
  const std::int64_t heads = p.batch_size * p.kv_num_heads;
  c.buffers.reserve(16);
  const std::int64_t query_size = p.num_heads * p.head_dim;
  const std::int64_t key_size = p.kv_num_heads * p.head_dim;
  const std::int64_t value_size = p.kv_num_heads * p.value_head_dim;
  if (random.chance(40)) {  // packed: each token's query, key and value heads side by side
    const std::int64_t size = query_size + key_size + value_size;
    const auto* packed =
        static_cast<const char*>(c.input(random, tokens * size, p.activation_type));
    p.query = packed;
    p.key = packed + query_size * bytes_of(p.activation_type);
    p.value = packed + (query_size + key_size) * bytes_of(p.activation_type);
    p.query_token_stride = p.key_token_stride = p.value_token_stride = size;
  } else {
    p.query = c.input(random, tokens * query_size, p.activation_type);
    p.key = c.input(random, tokens * key_size, p.activation_type);
    p.value = c.input(random, tokens * value_size, p.activation_type);
    p.query_token_stride = query_size;
    p.key_token_stride = key_size;
    p.value_token_stride = value_size;
  }
  const std::int64_t past_rows = heads * p.past_capacity;
  p.past_key = c.input(random, past_rows * key_size_of(p), p.cache_type);
  p.past_value = c.input(random, past_rows * value_size_of(p), p.cache_type);
  if (is_quantized(p.cache_type)) {
    const auto scales = [&](std::int64_t width) {
      c.buffers.emplace_back(past_rows * num_groups(width), DataType::kBFloat16);
      for (std::int64_t i = 0; i < c.buffers.back().size(); ++i) {
        store_element(c.buffers.back().data(), i, DataType::kBFloat16,
                      random.normal() / static_cast<float>(2 * largest_code(p.cache_type)));
      }
      return static_cast<const std::uint16_t*>(c.buffers.back().data());
    };
    if (random.chance(30)) {
      const bool has_spikes = random.chance(60);
      make_special(random, p, p.key, p.key_token_stride, p.head_dim, has_spikes);
      make_special(random, p, p.value, p.value_token_stride, p.value_head_dim, has_spikes);
    }
    p.past_key_scale = scales(p.head_dim);
    p.past_value_scale = scales(p.value_head_dim);
  }
  if (random.chance(60)) {
    p.mask_width = p.total_sequence_length + (random.chance(20) ? random.below(5) : 0);
    const int percent = random.pick<int>({0, 10, 50, 95, 100});
    for (std::int64_t i = 0; i < p.batch_size * p.mask_width; ++i) {
      c.mask.push_back(random.chance(percent) ? 0 : 1);
    }
    p.attention_mask = c.mask.data();
  }
  c.tables.reserve(8);
  if (p.head_dim >= 2 && random.chance(40)) {
    p.rotary_dim = 2 * (1 + random.below(p.head_dim / 2));
    p.rotary_interleaved = random.chance(50);
    const bool shared = random.chance(50);
    const std::int64_t size = p.sequence_length * p.rotary_dim / 2;
    p.rotary_batch_stride = shared ? 0 : size;
    p.cos = c.table(random, shared ? size : size * p.batch_size, 1.0F);
    p.sin = c.table(random, shared ? size : size * p.batch_size, 1.0F);
  }
  if (random.chance(30)) {
    const std::int64_t full[4] = {p.batch_size, p.num_heads, p.sequence_length,
                                  p.total_sequence_length};
    std::int64_t stride = 1;
    for (int axis = 3; axis >= 0; --axis) {
      if (random.chance(40)) continue;  // broadcast
      p.bias_strides[axis] = stride;
      stride *= full[axis];
    }
    p.attention_bias = c.input(random, stride, p.activation_type);
  }
  if (random.chance(20)) p.alibi_slopes = c.table(random, p.num_heads, 0.3F);
  if (random.chance(20)) p.head_sink = c.table(random, p.num_heads, 2.0F);

  c.text = "case " + std::to_string(seed) + " (S " + std::to_string(p.sequence_length) + ", past " +
           std::to_string(p.past_sequence_length) + ", C " + std::to_string(p.past_capacity) +
           ", H " + std::to_string(p.head_dim) + ", Hv " + std::to_string(p.value_head_dim) +
           ", G " + std::to_string(p.num_heads / p.kv_num_heads) + ", cache type " +
           std::to_string(static_cast<int>(p.cache_type)) + ")";
  return c;
}

// What a run leaves: output and both caches.
struct Result {
  Buffer output;
  Buffer key;
  Buffer value;
  Buffer key_scale;
  Buffer value_scale;
};

void write_into(Result& result, AttentionParams& p) {
  p.present_key = result.key.data();
  p.present_value = result.value.data();
  p.present_key_scale = static_cast<std::uint16_t*>(result.key_scale.data());
  p.present_value_scale = static_cast<std::uint16_t*>(result.value_scale.data());
  p.output = result.output.data();
}

template <typename Run>
Result run_case(const Case& c, const Run& run) {
  AttentionParams p = c.p;
  const std::int64_t rows = p.batch_size * p.kv_num_heads * p.present_capacity;
  Result result{
      Buffer(p.batch_size * p.sequence_length * p.num_heads * p.value_head_dim, p.activation_type),
      Buffer(rows * key_size_of(p), p.cache_type), Buffer(rows * value_size_of(p), p.cache_type),
      Buffer(rows * num_scales(p.cache_type, p.head_dim), DataType::kBFloat16),
      Buffer(rows * num_scales(p.cache_type, p.value_head_dim), DataType::kBFloat16)};
  if (c.in_place) {
    std::memcpy(result.key.data(), p.past_key, result.key.bytes());
    std::memcpy(result.value.data(), p.past_value, result.value.bytes());
    p.past_key = result.key.data();
    p.past_value = result.value.data();
    if (is_quantized(p.cache_type)) {
      std::memcpy(result.key_scale.data(), p.past_key_scale, result.key_scale.bytes());
      std::memcpy(result.value_scale.data(), p.past_value_scale, result.value_scale.bytes());
      p.past_key_scale = static_cast<const std::uint16_t*>(result.key_scale.data());
      p.past_value_scale = static_cast<const std::uint16_t*>(result.value_scale.data());
    }
  }
  write_into(result, p);
  run(p);
  return result;
}

// A reference that attends over the cache that a kernel has written: a number between two codes
// may be rounded to either, which is no error of the attention.
Result attend_over(const Case& c, const Result& written) {
  AttentionParams p = c.p;
  Result result = written;
  write_into(result, p);
  attend_reference(p);
  return result;
}

// Compares the numbers of used slots. Those of a quantised cache may be a code apart.
void check_quantized(const AttentionParams& p, DataType type, std::int64_t width,
                     const Buffer& actual, const Buffer& actual_scales, const Buffer& expected,
                     const Buffer& expected_scales, const std::string& what) {
  const auto* scales = static_cast<const std::uint16_t*>(actual_scales.data());
  const auto* wanted_scales = static_cast<const std::uint16_t*>(expected_scales.data());
  const std::int64_t slots = std::min(p.total_sequence_length, p.present_capacity);  // of a ring
  for (std::int64_t head = 0; head < p.batch_size * p.kv_num_heads; ++head) {
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      const std::int64_t row = head * p.present_capacity + slot;
      for (std::int64_t h = 0; h < width; ++h) {
        const float a = load_number(type, actual.data(), scales, width, row, h);
        const float b = load_number(type, expected.data(), wanted_scales, width, row, h);
        const float scale =
            bfloat16_to_float(wanted_scales[row * num_groups(width) + h / kGroupSize]);
        CHECK(std::fabs(a - b) <= std::fabs(scale) * 1.1F || (std::isnan(a) && std::isnan(b)),
              "%s: number %d of slot %d is %.9g, the reference says %.9g", what.c_str(),
              static_cast<int>(h), static_cast<int>(slot), static_cast<double>(a),
              static_cast<double>(b));
      }
    }
  }
}

Result run_kernel(const FlashKernel& kernel, const Case& c, std::int64_t num_workers) {
  return run_case(c, [&](const AttentionParams& p) {
    const ParallelFor parallel_for{run_on_threads, nullptr, num_workers};
    const std::size_t bytes = kernel.workspace_bytes(p, num_workers);
    void* workspace = ::operator new(bytes, std::align_val_t(64));
    std::memset(workspace, 0xFF, bytes);
    kernel.run(p, workspace, parallel_for);
    ::operator delete(workspace, std::align_val_t(64));
  });
}

bool are_equal(const Buffer& a, const Buffer& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

bool have_equal_caches(const Result& a, const Result& b) {
  return are_equal(a.key, b.key) && are_equal(a.value, b.value) &&
         are_equal(a.key_scale, b.key_scale) && are_equal(a.value_scale, b.value_scale);
}

void test_kernel(const FlashKernel& kernel, const Case& c, const Result& expected,
                 std::int64_t num_workers) {
  const Result actual = run_kernel(kernel, c, num_workers);
  const std::string what = std::string(kernel.name) + ", " + c.text;
  if (is_quantized(c.p.cache_type)) {
    check_quantized(c.p, key_type(c.p.cache_type), c.p.head_dim, actual.key, actual.key_scale,
                    expected.key, expected.key_scale, what + ", present_key");
    check_quantized(c.p, c.p.cache_type, c.p.value_head_dim, actual.value, actual.value_scale,
                    expected.value, expected.value_scale, what + ", present_value");
    const Result attended = have_equal_caches(actual, expected) ? expected : attend_over(c, actual);
    check_close(actual.output.data(), attended.output.data(), attended.output.size(),
                c.p.activation_type, quantized_tolerance_of(c.p.activation_type),
                what + ", output");
    return;
  }
  // Slots that are not used hold the same NaN bits (or the same past) on both sides.
  const float cache_tolerance = tolerance_of(c.p.cache_type);
  check_close(actual.key.data(), expected.key.data(), expected.key.size(), c.p.cache_type,
              cache_tolerance, what + ", present_key");
  check_close(actual.value.data(), expected.value.data(), expected.value.size(), c.p.cache_type,
              cache_tolerance, what + ", present_value");
  // The two may round a rotated key to different neighbours, and attend over different caches.
  const float tolerance = tolerance_of(c.p.activation_type);
  check_close(
      actual.output.data(), expected.output.data(), expected.output.size(), c.p.activation_type,
      c.p.rotary_dim > 0 ? std::max(tolerance, cache_tolerance) : tolerance, what + ", output");
}

// Every build with every case, whose reference is computed once.
void test_kernels(const std::vector<FlashKernel>& kernels, std::uint64_t first, std::uint64_t end) {
  for (std::uint64_t seed = first; seed < end; ++seed) {
    const Case c = make_case(seed);
    const Result expected = run_case(c, attention_reference);
    for (const FlashKernel& kernel : kernels) {
      test_kernel(kernel, c, expected, seed % 2 == 0 ? 1 : 7);
    }
  }
  for (const FlashKernel& kernel : kernels) {
    std::printf("%s: cases %d to %d agree with the reference\n", kernel.name,
                static_cast<int>(first), static_cast<int>(end - 1));
  }
}

// Shapes alone divide the work, so that the number of workers changes no bit.
void test_workers(const FlashKernel& kernel, std::uint64_t first, std::uint64_t end) {
  for (std::uint64_t seed = first; seed < end; ++seed) {
    const Case c = make_case(seed);
    const Result one = run_kernel(kernel, c, 1);
    for (const std::int64_t num_workers : {2, 7}) {
      const Result many = run_kernel(kernel, c, num_workers);
      const auto bytes =
          static_cast<std::size_t>(one.output.size() * bytes_of(c.p.activation_type));
      CHECK(
          std::memcmp(one.output.data(), many.output.data(), bytes) == 0 &&
              std::memcmp(one.key.data(), many.key.data(), one.key.bytes()) == 0 &&
              std::memcmp(one.value.data(), many.value.data(), one.value.bytes()) == 0 &&
              std::memcmp(one.key_scale.data(), many.key_scale.data(), one.key_scale.bytes()) == 0,
          "%s, %s: other bits with %d workers", kernel.name, c.text.c_str(),
          static_cast<int>(num_workers));
    }
  }
}

// Sixteen times the tokens, 256 times the scores: the same memory, because no kernel holds them.
void test_workspace(const FlashKernel& kernel) {
  AttentionParams p;
  p.batch_size = 1;
  p.num_heads = 8;
  p.kv_num_heads = 2;
  p.head_dim = 64;
  p.value_head_dim = 64;
  std::size_t bytes[2];
  for (int i = 0; i < 2; ++i) {
    p.sequence_length = i == 0 ? 4096 : 65536;
    p.total_sequence_length = p.sequence_length;
    bytes[i] = kernel.workspace_bytes(p, 2);
  }
  CHECK(bytes[0] == bytes[1], "%s: %zu bytes of workspace at 4096 tokens, %zu at 65536",
        kernel.name, bytes[0], bytes[1]);
}

}  // namespace
}  // namespace kvconv::test

int main(int argc, char** argv) {
  CHECK(argc == 3, "attention_test FIRST END");
  const std::uint64_t first = std::strtoull(argv[1], nullptr, 10);
  const std::uint64_t end = std::strtoull(argv[2], nullptr, 10);
  kvconv::test::test_kernels(kvconv::flash_kernels(), first, end);
  for (const kvconv::FlashKernel& kernel : kvconv::flash_kernels()) {
    kvconv::test::test_workspace(kernel);
    kvconv::test::test_workers(kernel, first, first + (end - first) / 10);
  }
  return 0;
}
