// The flash kernel: tiles of keys, online softmax, no score matrix. Compiled once per instruction
// set (KVCONV_USE_...); kernels.cc picks one.
//
// The S x G queries that share a key/value head are one list of rows, ordered by position. A task
// is a block of those rows against a range of keys: each tile of keys is read once for all rows of
// the block. When there are few blocks (decode), the keys are split over several tasks, whose
// partial sums are combined at the end. How the work is divided depends on shapes alone, so the
// result does not depend on the number of threads. Letters: see kvconv/attention.h.
//
// Nothing here may call a shared inline function (no standard containers or algorithms): the
// linker could pick this file's copy, compiled for newer processors, for everybody.
#include "kvconv/attention.h"
#include "kvconv/float16.h"

#if defined(KVCONV_USE_AVX512)
#include "vec_avx512.h"
#elif defined(KVCONV_USE_AVX2)
#include "vec_avx2.h"
#else
#include "vec_generic.h"
#endif

#include "vec_math.h"
// After the vectors that they compute with.
#include "flash_cache.h"
#include "flash_division.h"
#include "flash_tile.h"

namespace kvconv {
namespace {

constexpr std::int64_t kSerialElements = 1 << 15;  // appending less than this needs no threads

void load_queries(const AttentionParams& p, const Division& d, const Block& block,
                  const Scratch& scratch) {
  const std::int64_t element_bytes = bytes_of(p.activation_type);
  for (std::int64_t r = 0; r < d.block_rows; ++r) {
    const bool is_real = r < block.num_rows;
    const std::int64_t head = query_head_of(d, block.kv_head, block.first_row + r);
    scratch.slopes[r] = is_real && p.alibi_slopes != nullptr ? p.alibi_slopes[head] : 0.0F;
    if (is_real) {
      const std::int64_t position = position_of(d, block.first_row + r);
      const std::int64_t token = block.batch * p.sequence_length + position;
      const std::int64_t offset =
          (token * p.query_token_stride + head * p.head_dim) * element_bytes;
      widen(static_cast<const char*>(p.query) + offset, p.activation_type, scratch.row, p.head_dim);
      rotate(p, block.batch, position, scratch.row);
    }
    for (std::int64_t h = 0; h < p.head_dim; ++h) {
      scratch.queries[h * d.block_rows + r] = is_real ? scratch.row[h] * p.scale : 0.0F;
    }
  }
}

void add_bias(const AttentionParams& p, const Division& d, const Block& block, std::int64_t tile,
              std::int64_t keys, float* scores) {
  for (std::int64_t r = 0; r < block.num_rows; ++r) {
    const std::int64_t row = block.first_row + r;
    const std::int64_t start = block.batch * p.bias_strides[0] +
                               query_head_of(d, block.kv_head, row) * p.bias_strides[1] +
                               position_of(d, row) * p.bias_strides[2] + tile * p.bias_strides[3];
    for (std::int64_t t = 0; t < keys; ++t) {
      scores[t * d.block_rows + r] +=
          load_element(p.attention_bias, start + t * p.bias_strides[3], p.activation_type);
    }
  }
}

// The tile's rows of a cache head as float32 [keys, width]: in place, or widened into `buffer`.
const float* tile_of(const AttentionParams& p, const void* present, std::int64_t slot,
                     std::int64_t keys, std::int64_t width, float* buffer) {
  if (p.cache_type == DataType::kFloat32) return static_cast<const float*>(present) + slot * width;
  widen(static_cast<const char*>(present) + slot * width * bytes_of(p.cache_type), p.cache_type,
        buffer, keys * width);
  return buffer;
}

// Attends with a block over the slots [begin, end) into `partial`.
void attend_range(const AttentionParams& p, const Division& d, const Block& block,
                  std::int64_t begin, std::int64_t end, bool has_sink, bool skips_zero_weights,
                  const Scratch& scratch, const Partial& partial) {
  const std::int64_t lanes = d.block_rows;
  const std::int64_t cache_head =
      (block.batch * p.kv_num_heads + block.kv_head) * p.present_capacity;
  const auto query_slot = [&](std::int64_t r) {
    return p.past_sequence_length + position_of(d, block.first_row + min_of(r, block.num_rows - 1));
  };
  const std::int64_t first_query = query_slot(0);
  const std::int64_t last_query = query_slot(block.num_rows - 1);

  // 1. Nothing seen yet; a sink is a logit that has been.
  for (std::int64_t r = 0; r < lanes; ++r) {
    const float sink = has_sink && r < block.num_rows
                           ? p.head_sink[query_head_of(d, block.kv_head, block.first_row + r)]
                           : kMinusInfinity;
    partial.maximum[r] = sink;
    partial.sum[r] = sink == kMinusInfinity ? 0.0F : 1.0F + (sink - sink);  // NaN stays NaN
  }
  std::memset(partial.accumulator, 0,
              static_cast<std::size_t>(p.value_head_dim * lanes) * sizeof(float));

  for (std::int64_t tile = begin; tile < end; tile += kKeyTile) {
    const std::int64_t keys = min_of(kKeyTile, end - tile);

    // 2. Padding: a tile that nobody attends to is skipped whole.
    const std::int64_t* mask = nullptr;
    std::int64_t num_attended = keys;
    if (p.attention_mask != nullptr) {
      mask = p.attention_mask + block.batch * p.mask_width + tile;
      num_attended = 0;
      for (std::int64_t t = 0; t < keys; ++t) num_attended += mask[t] != 0;
      if (num_attended == 0) continue;
    }

    // 3. Scores, [keys, rows].
    const float* key_tile =
        tile_of(p, p.present_key, cache_head + tile, keys, p.head_dim, scratch.keys);
    multiply(keys, key_tile, p.head_dim, 1, scratch.queries, p.head_dim, scratch.scores, lanes,
             nullptr);
    if (p.softcap > 0.0F) apply_softcap(scratch.scores, keys * lanes, p.softcap);
    if (p.alibi_slopes != nullptr) {
      for (std::int64_t r = 0; r < lanes; ++r) {
        scratch.query_offset[r] = static_cast<float>(query_slot(r) - tile);
      }
      add_alibi(scratch.scores, keys, lanes, scratch.slopes, scratch.query_offset);
    }
    if (p.attention_bias != nullptr) add_bias(p, d, block, tile, keys, scratch.scores);

    // 4. Masks, after all that could turn -infinity into something else.
    const bool meets_future = p.is_causal && tile + keys > first_query + 1;
    const bool meets_window = p.window_size > 0 && tile <= last_query - p.window_size;
    if (meets_future || meets_window) {
      for (std::int64_t r = 0; r < lanes; ++r) {
        const std::int64_t slot = query_slot(r) - tile;
        const std::int64_t first = p.window_size > 0 ? slot - p.window_size + 1 : 0;
        const std::int64_t last = p.is_causal ? slot + 1 : keys;
        scratch.first[r] = static_cast<float>(min_of(max_of(first, 0), keys));
        scratch.last[r] = static_cast<float>(min_of(max_of(last, 0), keys));
      }
      apply_limits(scratch.scores, keys, lanes, scratch.first, scratch.last);
    }
    if (num_attended < keys) apply_mask(scratch.scores, keys, lanes, mask);

    // 5. Weights, and the values they take.
    online_softmax(scratch.scores, keys, lanes, partial.maximum, partial.sum, scratch.alpha);
    const float* value_tile =
        tile_of(p, p.present_value, cache_head + tile, keys, p.value_head_dim, scratch.values);
    if (skips_zero_weights) {
      accumulate_skipping_zeros(scratch.scores, value_tile, keys, p.value_head_dim,
                                partial.accumulator, lanes, scratch.alpha);
    } else {
      multiply(p.value_head_dim, value_tile, 1, p.value_head_dim, scratch.scores, keys,
               partial.accumulator, lanes, scratch.alpha);
    }
  }
}

// Divides the sums and writes the block's rows of the output.
void write_output(const AttentionParams& p, const Division& d, const Block& block,
                  const Partial& partial, float* row) {
  for (std::int64_t r = 0; r < block.num_rows; ++r) {
    const float sum = partial.sum[r];
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;  // no slot seen: a row of zeros
    for (std::int64_t h = 0; h < p.value_head_dim; ++h) {
      row[h] = partial.accumulator[h * d.block_rows + r] * inverse;
    }
    const std::int64_t token =
        block.batch * p.sequence_length + position_of(d, block.first_row + r);
    const std::int64_t head = query_head_of(d, block.kv_head, block.first_row + r);
    const std::int64_t offset =
        (token * p.num_heads + head) * p.value_head_dim * bytes_of(p.activation_type);
    narrow(row, static_cast<char*>(p.output) + offset, p.activation_type, p.value_head_dim);
  }
}

// Adds the partial sums of a block's splits up in the first of them.
void combine(const AttentionParams& p, const Division& d, float* partials) {
  const std::int64_t size = partial_floats(p, d);
  const Partial result = partial_at(partials, d);
  for (std::int64_t lane = 0; lane < d.block_rows; lane += kLanes) {
    Vec maximum = load(result.maximum + lane);
    for (std::int64_t s = 1; s < d.num_splits; ++s) {
      maximum = max(load(partial_at(partials + s * size, d).maximum + lane), maximum);
    }
    const Vec shift = select_equal(maximum, set(kMinusInfinity), set(0.0F), maximum);
    Vec sum = set(0.0F);
    for (std::int64_t s = 0; s < d.num_splits; ++s) {
      const Partial split = partial_at(partials + s * size, d);
      const Vec factor = exp_nonpositive(sub(load(split.maximum + lane), shift));
      sum = fma(factor, load(split.sum + lane), sum);
      for (std::int64_t h = 0; h < p.value_head_dim; ++h) {
        float* total = result.accumulator + h * d.block_rows + lane;
        const Vec before = s == 0 ? set(0.0F) : load(total);
        store(total, fma(factor, load(split.accumulator + h * d.block_rows + lane), before));
      }
    }
    store(result.sum + lane, sum);
  }
}

void attend_task(const AttentionParams& p, const Division& d, std::int64_t task,
                 const Scratch& scratch, float* partials) {
  const Block block = block_of(p, d, task / d.num_splits);
  const std::int64_t split = task % d.num_splits;

  // The slots that any row of the block may see, and this split's share of them.
  const std::int64_t first_query = p.past_sequence_length + position_of(d, block.first_row);
  const std::int64_t last_query =
      p.past_sequence_length + position_of(d, block.first_row + block.num_rows - 1);
  const std::int64_t block_end = p.is_causal ? last_query + 1 : p.total_sequence_length;
  const std::int64_t block_begin =
      p.window_size > 0 ? min_of(max_of(0, first_query - p.window_size + 1), block_end) : 0;
  const std::int64_t share =
      round_up((block_end - block_begin + d.num_splits - 1) / d.num_splits, kKeyTile);
  const std::int64_t begin = min_of(block_begin + split * share, block_end);
  const std::int64_t end = min_of(begin + share, block_end);

  const Partial partial =
      d.num_splits == 1 ? scratch.partial : partial_at(partials + task * partial_floats(p, d), d);
  const bool has_sink = p.head_sink != nullptr && split == 0;
  load_queries(p, d, block, scratch);
  attend_range(p, d, block, begin, end, has_sink, false, scratch, partial);
  // 0 * NaN: a slot that is masked out may hold anything, so such a block is done again with care.
  if (has_nonfinite(partial.accumulator, p.value_head_dim * d.block_rows)) {
    attend_range(p, d, block, begin, end, has_sink, true, scratch, partial);
  }
  if (d.num_splits == 1) write_output(p, d, block, partial, scratch.row);
}

std::size_t workspace_bytes(const AttentionParams& p, std::int64_t num_workers) {
  const Division d = divide(p);
  Scratch scratch;
  const std::int64_t partials =
      d.num_splits == 1 ? 0 : d.num_heads * d.num_blocks * d.num_splits * partial_floats(p, d);
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
  const bool copies_past = p.past_sequence_length > 0 &&
                           (p.past_key != p.present_key || p.past_value != p.present_value);
  const std::int64_t new_elements =
      d.num_heads * p.sequence_length * (p.head_dim + p.value_head_dim);
  const ParallelFor serial;
  const bool is_small = !copies_past && new_elements < kSerialElements;
  for_each_task(is_small ? serial : parallel_for, d.num_heads,
                [&](std::int64_t worker, std::int64_t head) {
                  float* row = scratch_of(worker).row;
                  append_head(p, head, p.past_key, p.present_key, p.key, p.key_token_stride,
                              p.head_dim, true, row);
                  append_head(p, head, p.past_value, p.present_value, p.value, p.value_token_stride,
                              p.value_head_dim, false, row);
                });

  // 2. Attention.
  const std::int64_t num_blocks = d.num_heads * d.num_blocks;
  for_each_task(parallel_for, num_blocks * d.num_splits,
                [&](std::int64_t worker, std::int64_t task) {
                  attend_task(p, d, task, scratch_of(worker), partials);
                });
  if (d.num_splits == 1) return;

  // 3. The splits of each block.
  for_each_task(serial, num_blocks, [&](std::int64_t worker, std::int64_t index) {
    float* splits = partials + index * d.num_splits * partial_floats(p, d);
    combine(p, d, splits);
    write_output(p, d, block_of(p, d, index), partial_at(splits, d), scratch_of(worker).row);
  });
}

}  // namespace

#if defined(KVCONV_USE_AVX512)
extern const FlashKernel kFlashAvx512 = {"avx512", workspace_bytes, run};
#elif defined(KVCONV_USE_AVX2)
extern const FlashKernel kFlashAvx2 = {"avx2", workspace_bytes, run};
#else
extern const FlashKernel kFlashPortable = {"portable", workspace_bytes, run};
#endif

}  // namespace kvconv
