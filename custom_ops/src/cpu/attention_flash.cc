// The flash kernel: tiles of keys, online softmax, no score matrix. Compiled once per instruction
// set (KVCONV_USE_...); kernels.cc picks one.
//
// The S x G queries that share a key/value head are one list of rows, ordered by position. A task
// is a block of those rows against a range of keys: each tile of keys is read once for all rows of
// the block. Few rows (decode) have vectors along their heads (flash_rows.h), many across the rows
// (flash_strips.h). When there are few blocks, the keys are split over several tasks, whose
// partial sums are combined at the end. How the work is divided depends on shapes alone, so the
// result does not depend on the number of threads. Letters: see kvconv/attention.h.
//
// Nothing here may call a shared inline function (no standard containers or algorithms): the
// linker could pick this file's copy, compiled for newer processors, for everybody.
#include "flash_rows.h"
#include "flash_strips.h"
#include "kvconv/attention.h"
#include "kvconv/float16.h"
#include "vec_math.h"

namespace kvconv {
namespace {

constexpr std::int64_t kSerialElements = 1 << 15;  // appending less than this needs no threads

// Divides the sums and writes the block's rows of the output.
void write_output(const AttentionParams& p, const Division& d, const Block& block,
                  const Partial& partial) {
  for (std::int64_t r = 0; r < block.num_rows; ++r) {
    const float sum = partial.sum[r];
    const Vec inverse = set(sum == 0.0F ? 0.0F : 1.0F / sum);  // no slot seen: a row of zeros
    float* row = partial.accumulator + r * d.value_width;
    for (std::int64_t h = 0; h < d.value_width; h += kLanes) {
      store(row + h, mul(load(row + h), inverse));
    }
    if (is_quantized(p.cache_type)) transform(row, p.value_head_dim);
    const std::int64_t token =
        block.batch * p.sequence_length + position_of(d, block.first_row + r);
    const std::int64_t head = query_head_of(d, block.kv_head, block.first_row + r);
    const std::int64_t offset =
        (token * p.num_heads + head) * p.value_head_dim * bytes_of(p.activation_type);
    narrow(row, static_cast<char*>(p.output) + offset, p.activation_type, p.value_head_dim);
  }
}

// Adds the partial sums of a block's splits up in the first of them.
void combine(const Division& d, std::int64_t num_rows, float* partials) {
  const std::int64_t size = partial_floats(d);
  const Partial result = partial_at(partials, d);
  for (std::int64_t r = 0; r < num_rows; ++r) {
    float maximum = result.maximum[r];
    for (std::int64_t s = 1; s < d.num_splits; ++s) {
      const float other = partial_at(partials + s * size, d).maximum[r];
      if (other > maximum) maximum = other;
    }
    const Vec shift = set(maximum == kMinusInfinity ? 0.0F : maximum);
    Vec sum = set(0.0F);
    float* total = result.accumulator + r * d.value_width;
    for (std::int64_t s = 0; s < d.num_splits; ++s) {
      const Partial split = partial_at(partials + s * size, d);
      const Vec factor = exp2_nonpositive(sub(set(split.maximum[r]), shift));
      sum = fma(factor, set(split.sum[r]), sum);
      const float* part = split.accumulator + r * d.value_width;
      for (std::int64_t h = 0; h < d.value_width; h += kLanes) {
        const Vec before = s == 0 ? set(0.0F) : load(total + h);
        store(total + h, fma(factor, load(part + h), before));
      }
    }
    float lanes[kLanes];
    store(lanes, sum);
    result.sum[r] = lanes[0];
  }
}

// A block of rows and the slots that they meet.
struct Task {
  Block block;
  Range range;
};

Task task_at(const AttentionParams& p, const Division& d, std::int64_t index) {
  const Block block = block_of(p, d, index / d.num_splits);
  const std::int64_t split = index % d.num_splits;
  const Range slots = visible_slots(p, d, block.first_row, block.first_row + block.num_rows - 1);
  const std::int64_t share = round_up(ceil_div(slots.end - slots.begin, d.num_splits), d.key_tile);
  const std::int64_t begin = min_of(slots.begin + split * share, slots.end);
  return {block, {begin, min_of(begin + share, slots.end), split == 0}};
}

// `after` is what the worker reads next.
void attend_task(const AttentionParams& p, const Division& d, std::int64_t index,
                 const Memory& after, const Scratch& scratch, float* partials) {
  const Task task = task_at(p, d, index);
  const Partial partial =
      d.num_splits == 1 ? scratch.partial : partial_at(partials + index * partial_floats(d), d);
  if (d.has_few_rows) {
    attend_few_rows(p, d, task.block, task.range, after, scratch, partial);
  } else {
    attend_many_rows(p, d, task.block, task.range, scratch, partial);
  }
  if (d.num_splits == 1) write_output(p, d, task.block, partial);
}

// Attends with few rows in the tasks [first, end), each of which calls for the next one's keys.
void attend_run(const AttentionParams& p, const Division& d, std::int64_t first, std::int64_t end,
                const Scratch& scratch, float* partials) {
  const auto first_keys_of = [&](std::int64_t index) {
    if (index == end) return Memory{};
    const Task task = task_at(p, d, index);
    return first_keys(p, d, task.block, task.range);
  };
  Calls(first_keys_of(first), 1).step();
  for (std::int64_t index = first; index < end; ++index) {
    attend_task(p, d, index, first_keys_of(index + 1), scratch, partials);
  }
}

std::size_t workspace_bytes(const AttentionParams& p, std::int64_t num_workers) {
  const Division d = divide(p);
  Scratch scratch;
  const std::int64_t partials =
      d.num_splits == 1 ? 0 : d.num_heads * d.num_blocks * d.num_splits * partial_floats(d);
  const std::int64_t floats = num_workers * lay_out(p, d, nullptr, &scratch) + partials;
  return static_cast<std::size_t>(floats) * sizeof(float);
}

void run(const AttentionParams& p, void* workspace, const ParallelFor& parallel_for) {
  const Division d = divide(p);
  Scratch layout;
  const std::int64_t worker_floats = lay_out(p, d, nullptr, &layout);
  float* const workers = static_cast<float*>(workspace);
  float* const partials = workers + parallel_for.num_workers * worker_floats;
  const auto scratch_of = [&](std::int64_t worker) {
    Scratch scratch;
    lay_out(p, d, workers + worker * worker_floats, &scratch);
    return scratch;
  };

  // 1. The cache: past and new keys and values.
  const bool copies_past =
      p.past_sequence_length > 0 &&
      (p.past_key != p.present_key || p.past_value != p.present_value ||
       p.past_key_scale != p.present_key_scale || p.past_value_scale != p.present_value_scale);
  const std::int64_t new_elements =
      d.num_heads * p.sequence_length * (p.head_dim + p.value_head_dim);
  const ParallelFor serial;
  const bool is_small = !copies_past && new_elements < kSerialElements;
  const std::int64_t num_pieces = max_of(1, ceil_div(p.sequence_length, kAppendTokens));
  for_each_task(is_small ? serial : parallel_for, d.num_heads * num_pieces,
                [&](std::int64_t worker, std::int64_t task) {
                  float* row = scratch_of(worker).rows;
                  const std::int64_t head = task / num_pieces;
                  const std::int64_t begin = task % num_pieces * kAppendTokens;
                  const std::int64_t end = min_of(begin + kAppendTokens, p.sequence_length);
                  append_tokens(p, keys_of(p), head, begin, end, p.key, p.key_token_stride,
                                p.rotary_dim > 0, row);
                  append_tokens(p, values_of(p), head, begin, end, p.value, p.value_token_stride,
                                false, row);
                });

  // 2. Attention.
  const std::int64_t num_blocks = d.num_heads * d.num_blocks;
  const std::int64_t num_tasks = num_blocks * d.num_splits;
  const ParallelFor& workers_for_all = d.is_serial ? serial : parallel_for;
  if (d.has_few_rows) {
    for_each_run(workers_for_all, num_tasks,
                 [&](std::int64_t worker, std::int64_t first, std::int64_t end) {
                   attend_run(p, d, first, end, scratch_of(worker), partials);
                 });
  } else {
    for_each_task(workers_for_all, num_tasks, [&](std::int64_t worker, std::int64_t task) {
      attend_task(p, d, task, Memory{}, scratch_of(worker), partials);
    });
  }
  if (d.num_splits == 1) return;

  // 3. The splits of each block.
  for (std::int64_t index = 0; index < num_blocks; ++index) {
    float* splits = partials + index * d.num_splits * partial_floats(d);
    const Block block = block_of(p, d, index);
    combine(d, block.num_rows, splits);
    write_output(p, d, block, partial_at(splits, d));
  }
}

}  // namespace

#if defined(KVCONV_USE_AVX512) && defined(KVCONV_USE_VNNI)
extern const FlashKernel kFlashAvx512Vnni = {"avx512vnni", workspace_bytes, run};
#elif defined(KVCONV_USE_AVX512)
extern const FlashKernel kFlashAvx512 = {"avx512", workspace_bytes, run};
#elif defined(KVCONV_USE_AVX2) && defined(KVCONV_USE_VNNI)
extern const FlashKernel kFlashAvxVnni = {"avxvnni", workspace_bytes, run};
#elif defined(KVCONV_USE_AVX2)
extern const FlashKernel kFlashAvx2 = {"avx2", workspace_bytes, run};
#else
extern const FlashKernel kFlashPortable = {"portable", workspace_bytes, run};
#endif

}  // namespace kvconv
