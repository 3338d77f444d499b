// What an attention kernel is given, and the kernels there are. Knows nothing of ONNX Runtime.
//
// Letters used in every kernel:
//   B batch_size   N num_heads       S sequence_length (new tokens)   H  head_dim
//   C capacity     K kv_num_heads    T total_sequence_length          Hv value_head_dim
//   R rotary_dim   G = N / K, the query heads that share one key/value head
// Query i of a run sits in cache slot T - S + i. Slot j lies in row j mod C of a cache: in a ring,
// which has fewer than T rows, a new token takes the row of one that no query sees any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvconv/kernel.h"

namespace kvconv {

// One run of the op on the CPU: every pointer and size, already checked by the op's face. A kernel
// appends the new keys (rotated) and values to the cache, then attends; it cannot fail.
struct AttentionParams {
  std::int64_t batch_size = 0;
  std::int64_t num_heads = 0;
  std::int64_t kv_num_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_head_dim = 0;
  std::int64_t sequence_length = 0;
  std::int64_t past_sequence_length = 0;
  std::int64_t total_sequence_length = 0;  // past + new
  std::int64_t past_capacity = 0;          // rows of past_key and past_value
  std::int64_t present_capacity = 0;       // rows of present_key and present_value

  float scale = 1.0F;
  float softcap = 0.0F;          // 0 leaves the scores unchanged
  std::int64_t window_size = 0;  // slots a query sees, its own included; 0 = all
  bool is_causal = true;
  std::int64_t rotary_dim = 0;  // 0 = no rotary embedding
  bool rotary_interleaved = false;

  DataType activation_type = DataType::kFloat32;  // query, key, value, attention_bias, output
  DataType cache_type = DataType::kFloat32;       // past and present; see cache_format.h

  const void* query = nullptr;          // [B, S, N, H]
  const void* key = nullptr;            // [B, S, K, H]
  const void* value = nullptr;          // [B, S, K, Hv]
  std::int64_t query_token_stride = 0;  // elements from one token's heads to the next token's:
  std::int64_t key_token_stride = 0;    // more than the heads take where query, key and value
  std::int64_t value_token_stride = 0;  // are packed into one tensor
  const void* past_key = nullptr;       // [B, K, C, H]; slots before past_sequence_length are read
  const void* past_value = nullptr;     // [B, K, C, Hv]
  void* present_key = nullptr;          // the same memory as past_key, or apart from it
  void* present_value = nullptr;
  const std::uint16_t* past_key_scale = nullptr;  // bfloat16 [B, K, C, groups of H] where the cache
  const std::uint16_t* past_value_scale = nullptr;  // is quantised
  std::uint16_t* present_key_scale = nullptr;
  std::uint16_t* present_value_scale = nullptr;
  void* output = nullptr;  // [B, S, N, Hv]

  const std::int64_t* attention_mask = nullptr;  // [B, mask_width], 0 = never attend; may be null
  std::int64_t mask_width = 0;                   // at least T
  const float* cos = nullptr;                    // [B or 1, S, R / 2]; null without rotary
  const float* sin = nullptr;
  std::int64_t rotary_batch_stride = 0;  // elements; 0 = one table for all of the batch
  const void* attention_bias = nullptr;  // added to the scores; may be null
  std::int64_t bias_strides[4] = {};     // elements, of batch, head, query and slot; 0 = broadcast
  const float* alibi_slopes = nullptr;   // [N]: slope * (slot - query's slot) is added; may be null
  const float* head_sink = nullptr;      // [N]: one more logit in the softmax; may be null
};

// A build of the flash kernel for one instruction set.
struct FlashKernel {
  const char* name;
  std::size_t (*workspace_bytes)(const AttentionParams& params, std::int64_t num_workers);
  // workspace: 64-byte aligned, workspace_bytes long, contents ignored and overwritten.
  void (*run)(const AttentionParams& params, void* workspace, const ParallelFor& parallel_for);
};

// The builds that this machine can run, best first; never empty, the last one is portable.
const std::vector<FlashKernel>& flash_kernels();

// The plain kernel that every fast one is tested against: one thread, double precision.
void attention_reference(const AttentionParams& params);
// Its two halves: the append, and attention over a cache that holds the new tokens already.
void append_reference(const AttentionParams& params);
void attend_reference(const AttentionParams& params);

}  // namespace kvconv
