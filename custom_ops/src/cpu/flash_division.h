// How a run of the flash kernel is divided into tasks, and the memory that each worker gets.
//
// The division depends on shapes alone, so a result does not depend on the number of threads.
// Included by attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_cache.h"
#include "kvconv/attention.h"
#include "kvconv/cache_format.h"
#include "tasks.h"
#include "vec.h"

namespace kvconv {
namespace {

// Blocks of kLanes keys that queries meet together as whole numbers: each word of a query is loaded
// once for all of them, and no sum waits for the one before. Few registers have room for one.
constexpr int kDotBlocks = kLanes == 16 ? 2 : 1;

constexpr std::int64_t kStripRows = 3 * kLanes;  // rows whose scores are computed at once
constexpr std::int64_t kMaxBlockRows = 96;       // rows that read a tile of keys after one another
constexpr std::int64_t kKeyTile = 64;            // keys whose scores are held at once
constexpr std::int64_t kFewRowsKeyTile = 256;    // the same where rows are few: at most (128
constexpr std::int64_t kFewRowsTileBytes = 16384;  // of floats), and about so many bytes of keys
constexpr std::int64_t kMinSplitKeys = 256;        // fewer are not worth the combining,
constexpr std::int64_t kLeastSplitKeys = 64;       // unless there would be less than
constexpr std::int64_t kLeastTasks = 4;            // tasks
constexpr std::int64_t kWantedTasks = 64;
constexpr float kSerialProducts = 48e3F;     // fewer take two threads no less time than one
constexpr std::int64_t kAppendTokens = 256;  // new tokens that one task appends

// Calls body(worker, first, end) for runs of neighbouring tasks, long ones first: a worker that
// goes on where it left off knows what it reads next.
template <typename Body>
void for_each_run(const ParallelFor& parallel_for, std::int64_t count, const Body& body) {
  const std::int64_t workers = max_of(1, min_of(count, parallel_for.num_workers));
  const std::int64_t parts = workers == 1 ? 1 : 2 * workers;
  std::int64_t next = 0;
  for_each_task(parallel_for, workers, [&](std::int64_t worker, std::int64_t) {
    std::int64_t first = __atomic_load_n(&next, __ATOMIC_RELAXED);
    while (first < count) {
      const std::int64_t end = first + ceil_div(count - first, parts);
      if (!__atomic_compare_exchange_n(&next, &first, end, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED)) {
        continue;  // another worker took it, and `first` is now what that one left
      }
      body(worker, first, end);
      first = __atomic_load_n(&next, __ATOMIC_RELAXED);
    }
  });
}

// How the work is divided.
struct Division {
  std::int64_t group;       // G
  std::int64_t rows;        // S * G, per batch and key/value head
  bool has_few_rows;        // vectors lie along the heads, otherwise across the rows
  bool is_serial;           // too little for a second thread
  std::int64_t block_rows;  // rows of a block, padded to whole vectors unless they are few
  std::int64_t num_blocks;  // per batch and key/value head
  std::int64_t num_splits;  // key ranges per block
  std::int64_t key_tile;    // keys whose scores are held at once
  std::int64_t num_heads;   // B * K
  std::int64_t key_width;   // H and Hv, padded to whole vectors, to whole groups where quantised
  std::int64_t value_width;
};

Division divide(const AttentionParams& p) {
  Division d;
  d.group = p.num_heads / p.kv_num_heads;
  d.rows = p.sequence_length * d.group;
  d.num_heads = p.batch_size * p.kv_num_heads;
  d.has_few_rows = d.rows <= kFewRows;
  d.block_rows = d.has_few_rows ? d.rows : min_of(kMaxBlockRows, round_up(d.rows, kLanes));
  // Many blocks keep many threads busy.
  if (d.block_rows > kStripRows && d.num_heads * d.rows < kWantedTasks * d.block_rows) {
    d.block_rows = kStripRows;
  }
  d.num_blocks = d.rows == 0 ? 0 : ceil_div(d.rows, d.block_rows);
  const std::int64_t num_tasks = max_of(1, d.num_heads * d.num_blocks);
  std::int64_t keys = p.total_sequence_length;
  if (p.window_size > 0 && p.is_causal) keys = min_of(keys, p.window_size + p.sequence_length);
  const float products = static_cast<float>(d.num_heads * d.rows) * static_cast<float>(keys) *
                         static_cast<float>(p.head_dim + p.value_head_dim);
  d.is_serial = products < kSerialProducts;
  d.num_splits = max_of(min_of(kWantedTasks / num_tasks, keys / kMinSplitKeys),
                        min_of(ceil_div(kLeastTasks, num_tasks), keys / kLeastSplitKeys));
  d.num_splits = d.is_serial ? 1 : max_of(1, d.num_splits);
  const std::int64_t fitting = kFewRowsTileBytes / row_bytes(key_type(p.cache_type), p.head_dim);
  const std::int64_t most = is_quantized(p.cache_type) ? kFewRowsKeyTile : kFewRowsKeyTile / 2;
  d.key_tile = d.has_few_rows ? max_of(32, min_of(fitting / 32 * 32, most)) : kKeyTile;
  const std::int64_t unit = is_quantized(p.cache_type) ? kGroupSize : kLanes;
  d.key_width = round_up(p.head_dim, unit);
  d.value_width = round_up(p.value_head_dim, unit);
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

// The row, of all heads' rows, in which a slot of the block's head lies.
std::int64_t cache_row_of(const AttentionParams& p, const Block& block, std::int64_t slot) {
  const std::int64_t head = block.batch * p.kv_num_heads + block.kv_head;
  return head * p.present_capacity + cache_row(p, slot);
}

// Slots, first and one after the last; sinks count in the first range of a block.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool is_first = true;
};

// The slots that any of the rows [first, last] of a key/value head may see.
Range visible_slots(const AttentionParams& p, const Division& d, std::int64_t first,
                    std::int64_t last) {
  const std::int64_t first_query = p.past_sequence_length + position_of(d, first);
  const std::int64_t last_query = p.past_sequence_length + position_of(d, last);
  const std::int64_t end = p.is_causal ? last_query + 1 : p.total_sequence_length;
  const std::int64_t begin = p.window_size > 0 ? max_of(0, first_query - p.window_size + 1) : 0;
  return {min_of(begin, end), end};
}

// The running sums of a block over a range of keys.
struct Partial {
  float* maximum;      // [rows], of scores in units of ln 2
  float* sum;          // [rows]
  float* accumulator;  // [rows, value_width]
};

std::int64_t partial_floats(const Division& d) {
  return round_up(2 * d.block_rows, 16) + round_up(d.block_rows * d.value_width, 16);
}

Partial partial_at(float* memory, const Division& d) {
  return {memory, memory + d.block_rows, memory + round_up(2 * d.block_rows, 16)};
}

// Queries as whole numbers 256 * high + low, times a scale.
struct QueryBytes {
  std::int8_t* numbers = nullptr;  // [rows, (high, low), key_width]
  std::int32_t* starts = nullptr;  // [rows, (high, low), groups]: see start_of
  float* scales = nullptr;         // [rows]
};

// Weights times scales of values as whole numbers, per row and group.
struct WeightBytes {
  std::int8_t* numbers = nullptr;  // [rows, groups, keys of a tile / 4, (high, low), 4]
  std::int32_t* starts = nullptr;  // [rows, groups]: what takes the codes' middle off
  float* scales = nullptr;         // [rows, groups]
};

// One worker's memory. Where rows are few: queries [rows, key_width], scores [rows, keys]. Else
// each strip has its own queries [H, kStripRows] and sums [Hv, kStripRows], one after the other.
struct Scratch {
  float* queries;  // rotated and scaled
  float* scores;
  float* strips;      // running sums of the strips
  float* keys;        // [kKeyTile, H] and a group more, when the cache is not float32 and rows
  float* values;      // are many; [kKeyTile, Hv]
  float* key_scales;  // [groups of H, keys of a tile], when the cache is quantised
  float* value_scales;
  float* factors = nullptr;  // [rows, groups of Hv, keys of a tile]: weights times scales
  WeightBytes weights;       // these as whole numbers
  QueryBytes bytes;          // the queries as whole numbers, when keys are multiplied as such,
  float* words = nullptr;    // and the words of kDotBlocks * kLanes keys, lanes being keys
  float* rows;               // [kLanes, max(key_width, value_width, kKeyTile)]
  float* bias;               // [kFewRowsKeyTile]
  float* alpha;              // [rows]
  float* slopes;             // [rows]
  float* query_offset;       // [rows]: slot of the row's query, counted from the tile's first
  float* first;              // [rows]: first key of the tile that the row sees
  float* last;               // [rows]: and the one after the last
  Partial partial;           // when the keys are not split
};

// Lays a Scratch out in memory and returns the number of floats it takes.
std::int64_t lay_out(const AttentionParams& p, const Division& d, float* memory, Scratch* scratch) {
  std::int64_t used = 0;
  const auto take = [&](std::int64_t count) {
    float* start = memory == nullptr ? nullptr : memory + used;
    used += round_up(count, 16);
    return start;
  };
  const std::int64_t lanes = round_up(d.block_rows, kStripRows);
  const bool widens = p.cache_type != DataType::kFloat32 && !d.has_few_rows;
  scratch->queries = take(d.has_few_rows ? d.block_rows * d.key_width : lanes * d.key_width);
  scratch->scores = take(d.has_few_rows ? d.block_rows * kFewRowsKeyTile : kStripRows * kKeyTile);
  scratch->strips = take(d.has_few_rows ? 0 : lanes * d.value_width);
  scratch->keys = take(widens ? kKeyTile * p.head_dim + kGroupSize : 0);
  scratch->values = take(widens ? kKeyTile * p.value_head_dim + kGroupSize : 0);
  scratch->key_scales = take(d.key_tile * num_scales(p.cache_type, p.head_dim));
  scratch->value_scales = take(d.key_tile * num_scales(p.cache_type, p.value_head_dim));
  if (is_quantized(p.cache_type) && d.has_few_rows) {
    const std::int64_t groups = num_groups(p.head_dim);
    const std::int64_t words = row_bytes(key_type(p.cache_type), p.head_dim) / 4;
    const std::int64_t factors = d.block_rows * num_groups(p.value_head_dim);
    scratch->factors = take(factors * d.key_tile);
    scratch->weights.scales = take(factors);
    scratch->weights.starts = reinterpret_cast<std::int32_t*>(take(factors));
    scratch->weights.numbers = reinterpret_cast<std::int8_t*>(take(factors * d.key_tile / 2));
    scratch->bytes.scales = take(d.block_rows);
    scratch->bytes.starts = reinterpret_cast<std::int32_t*>(take(d.block_rows * groups * 2));
    scratch->bytes.numbers = reinterpret_cast<std::int8_t*>(take(d.block_rows * d.key_width / 2));
    scratch->words = take(kDotBlocks * kLanes * round_up(words, kLanes));
  }
  scratch->rows = take(kLanes * max_of(max_of(d.key_width, d.value_width), kKeyTile));
  scratch->bias = take(kFewRowsKeyTile);
  scratch->alpha = take(lanes);
  scratch->slopes = take(lanes);
  scratch->query_offset = take(lanes);
  scratch->first = take(lanes);
  scratch->last = take(lanes);
  float* partial = take(partial_floats(d));
  if (memory != nullptr) scratch->partial = partial_at(partial, d);
  return used;
}

}  // namespace
}  // namespace kvconv
