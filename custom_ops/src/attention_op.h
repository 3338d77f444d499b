// kvconv::FlashAttention, as the parts of its face share it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvconv/attention.h"
#include "op_support.h"

namespace kvconv {

enum AttentionInput : std::size_t {
  kQuery,
  kKey,
  kValue,
  kPastKey,
  kPastValue,
  kAttentionMask,
  kCos,
  kSin,
  kAttentionBias,
  kAlibiSlopes,
  kHeadSink,
  kPastKeyScale,
  kPastValueScale,
  kPastSequenceLength,
  kKernels,
  kNumAttentionInputs,
};

inline constexpr std::array<const char*, kNumAttentionInputs> kAttentionInputNames = {
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "attention_mask",
    "cos",
    "sin",
    "attention_bias",
    "alibi_slopes",
    "head_sink",
    "past_key_scale",
    "past_value_scale",
    "past_sequence_length",
    "kernels",
};

enum AttentionOutput : std::size_t {
  kOutput,
  kPresentKey,
  kPresentValue,
  kPresentKeyScale,
  kPresentValueScale,
  kNumAttentionOutputs,
};

struct AttentionAttributes {
  std::int64_t num_heads = 0;
  std::int64_t kv_num_heads = 0;
  float scale = 0.0F;            // 0 = 1 / sqrt(head_dim)
  float softcap = 0.0F;          // 0 = off
  std::int64_t window_size = 0;  // 0 = off
  bool is_causal = true;
  bool rotary_interleaved = false;
  std::int64_t rotary_dim = 0;  // 0 = the whole head
  bool is_ring = false;         // cache_mode
};

using AttentionInputs = std::array<Tensor, kNumAttentionInputs>;

// Reads and checks a node's attributes; throws OpError.
AttentionAttributes read_attributes(const ort::Api* api, const ort::KernelInfo* info);

// The last dimension of a cache of rows of this type: elements, or bytes of packed codes.
std::int64_t cache_row_size(DataType type, std::int64_t width);

// Where past_sequence_length can be read. On a device it is for the kernels alone: it must be
// there, because waiting for the device to tell it would stop the stream, and what depends on it is
// not checked.
enum class LengthsAt { kHost, kDevice };

// Checks every input against the others and returns what a kernel needs, all but the outputs. With
// lengths on the device, total_sequence_length is the least that it can be, and past is 0.
// Throws OpError, naming both numbers that disagree.
AttentionParams check_inputs(const AttentionAttributes& attributes, const AttentionInputs& inputs,
                             DataType activation_type, DataType cache_type, LengthsAt lengths_at);

}  // namespace kvconv
