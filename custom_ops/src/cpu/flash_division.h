// How a run of the flash kernel is divided into tasks, and the memory that each worker gets.
//
// The division depends on shapes alone, so a result does not depend on the number of threads.
// Included by attention_flash.cc only, after a vec_*.h; internal linkage throughout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvconv/attention.h"
#include "tasks.h"

namespace kvconv {
namespace {

constexpr std::int64_t kKeyTile = 64;  // keys whose scores are held at once
constexpr std::int64_t kMaxBlockRows = 64;
constexpr std::int64_t kMinSplitKeys = 256;  // fewer are not worth the combining
constexpr std::int64_t kWantedTasks = 64;

// How the work is divided.
struct Division {
  std::int64_t group;       // G
  std::int64_t rows;        // S * G, per batch and key/value head
  std::int64_t block_rows;  // rows of a block, padded to whole vectors
  std::int64_t num_blocks;  // per batch and key/value head
  std::int64_t num_splits;  // key ranges per block
  std::int64_t num_heads;   // B * K
};

Division divide(const AttentionParams& p) {
  Division d;
  d.group = p.num_heads / p.kv_num_heads;
  d.rows = p.sequence_length * d.group;
  d.block_rows = min_of(kMaxBlockRows, round_up(d.rows, kLanes));
  d.num_blocks = d.rows == 0 ? 0 : (d.rows + d.block_rows - 1) / d.block_rows;
  d.num_heads = p.batch_size * p.kv_num_heads;
  const std::int64_t num_tasks = max_of(1, d.num_heads * d.num_blocks);
  std::int64_t keys = p.total_sequence_length;
  if (p.window_size > 0 && p.is_causal) keys = min_of(keys, p.window_size + p.sequence_length);
  d.num_splits = max_of(1, min_of(kWantedTasks / num_tasks, keys / kMinSplitKeys));
  return d;
}

// Position among the new tokens, and query head, of row `row` of a key/value head.
std::int64_t position_of(const Division& d, std::int64_t row) { return row / d.group; }
std::int64_t query_head_of(const Division& d, std::int64_t kv_head, std::int64_t row) {
  return kv_head * d.group + row % d.group;
}

// Some of the rows of a key/value head.
struct Block {
  std::int64_t batch;
  std::int64_t kv_head;
  std::int64_t first_row;
  std::int64_t num_rows;
};

// The block that comes `index`-th.
Block block_of(const AttentionParams& p, const Division& d, std::int64_t index) {
  // Late blocks see most keys; taking them first leaves small tasks to fill the end.
  const std::int64_t head = index % d.num_heads;
  const std::int64_t first_row = (d.num_blocks - 1 - index / d.num_heads) * d.block_rows;
  return {head / p.kv_num_heads, head % p.kv_num_heads, first_row,
          min_of(d.block_rows, d.rows - first_row)};
}

// The running sums of a block over a range of keys.
struct Partial {
  float* maximum;      // [rows]
  float* sum;          // [rows]
  float* accumulator;  // [Hv, rows]
};

std::int64_t partial_floats(const AttentionParams& p, const Division& d) {
  return round_up(d.block_rows * (2 + p.value_head_dim), 16);
}

Partial partial_at(float* memory, const Division& d) {
  return {memory, memory + d.block_rows, memory + 2 * d.block_rows};
}

// One worker's memory.
struct Scratch {
  float* queries;       // [H, rows]: rotated and scaled
  float* scores;        // [kKeyTile, rows]
  float* keys;          // [kKeyTile, H], when the cache is not float32
  float* values;        // [kKeyTile, Hv]
  float* row;           // [max(H, Hv)]
  float* alpha;         // [rows]
  float* slopes;        // [rows]
  float* query_offset;  // [rows]: slot of the row's query, counted from the tile's first
  float* first;         // [rows]: first key of the tile that the row sees
  float* last;          // [rows]: and the one after the last
  Partial partial;      // when the keys are not split
};

// Lays a Scratch out in memory and returns the number of floats it takes.
std::int64_t lay_out(const AttentionParams& p, const Division& d, float* memory, Scratch* scratch) {
  std::int64_t used = 0;
  const auto take = [&](std::int64_t count) {
    float* start = memory == nullptr ? nullptr : memory + used;
    used += round_up(count, 16);
    return start;
  };
  const bool widens = p.cache_type != DataType::kFloat32;
  scratch->queries = take(p.head_dim * d.block_rows);
  scratch->scores = take(kKeyTile * d.block_rows);
  scratch->keys = take(widens ? kKeyTile * p.head_dim : 0);
  scratch->values = take(widens ? kKeyTile * p.value_head_dim : 0);
  scratch->row = take(max_of(p.head_dim, p.value_head_dim));
  scratch->alpha = take(d.block_rows);
  scratch->slopes = take(d.block_rows);
  scratch->query_offset = take(d.block_rows);
  scratch->first = take(d.block_rows);
  scratch->last = take(d.block_rows);
  float* partial = take(partial_floats(p, d));
  if (memory != nullptr) scratch->partial = partial_at(partial, d);
  return used;
}

}  // namespace
}  // namespace kvconv
