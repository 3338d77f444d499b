// The checks of kvconv::FlashAttention at every run: types and shapes, each against the others.
//
// Nothing is written before all of them pass. Letters: see kvconv/attention.h.
#include <cmath>
#include <utility>

#include "attention_op.h"
#include "kvconv/cache_format.h"
#include "kvconv/float16.h"

namespace kvconv {
namespace {

class Checker {
 public:
  explicit Checker(const AttentionInputs& inputs) : inputs_(inputs) {}

  const Tensor& operator[](AttentionInput input) const { return inputs_[input]; }

  void require_type(AttentionInput input, ort::ElementType type) const {
    kvconv::require_type(inputs_[input], type);
  }

  void require_rank(AttentionInput input, std::size_t rank, const char* axes) const {
    const Tensor& tensor = inputs_[input];
    if (!tensor.exists) refuse(text(tensor.name, " is absent; it is required."));
    if (tensor.shape.size() == rank) return;
    refuse(text(tensor.name, " has shape ", shape_text(tensor.shape), " of rank ",
                tensor.shape.size(), "; it must be ", axes, " of rank ", rank, "."));
  }

  void require_dim(AttentionInput input, std::size_t axis, std::int64_t expected,
                   const char* why) const {
    const Tensor& tensor = inputs_[input];
    if (tensor.shape[axis] == expected) return;
    refuse(text(tensor.name, " has shape ", shape_text(tensor.shape), ": dimension ", axis, " is ",
                tensor.shape[axis], " and must be ", expected, ", ", why, "."));
  }

  std::int64_t positive_dim(AttentionInput input, std::size_t axis) const {
    const Tensor& tensor = inputs_[input];
    const std::int64_t size = tensor.shape[axis];
    if (size > 0) return size;
    refuse(text(tensor.name, " has shape ", shape_text(tensor.shape), ": dimension ", axis, " is ",
                size, " and must be at least 1."));
  }

  // The width of one head, from a dimension that holds `heads` of them side by side.
  std::int64_t head_width(AttentionInput input, std::int64_t heads, const char* heads_name) const {
    const Tensor& tensor = inputs_[input];
    const std::int64_t size = tensor.shape[2];
    if (size > 0 && size % heads == 0) return size / heads;
    refuse(text(tensor.name, " has shape ", shape_text(tensor.shape), ": dimension 2 is ", size,
                " and must be a positive multiple of ", heads_name, " ", heads, "."));
  }

 private:
  const AttentionInputs& inputs_;
};

void check_types(const Checker& check, DataType activation_type, DataType cache_type) {
  for (AttentionInput input : {kQuery, kKey, kValue, kAttentionBias}) {
    check.require_type(input, element_type(activation_type));
  }
  for (AttentionInput input : {kPastKey, kPastValue}) {
    check.require_type(input, element_type(cache_type));
  }
  for (AttentionInput input : {kCos, kSin, kAlibiSlopes, kHeadSink}) {
    check.require_type(input, ort::kFloat32);
  }
  for (AttentionInput input : {kPastKeyScale, kPastValueScale}) {
    check.require_type(input, ort::kBFloat16);
  }
  check.require_type(kAttentionMask, ort::kInt64);
  check.require_type(kPastSequenceLength, ort::kInt32);
}

// Query, key and value as three tensors: sets H, Hv and where each one's heads are.
void check_separate(const Checker& check, AttentionParams* p) {
  check.require_rank(kKey, 3, "[batch_size, sequence_length, kv_num_heads * head_dim]");
  check.require_rank(kValue, 3, "[batch_size, sequence_length, kv_num_heads * value_head_dim]");
  p->head_dim = check.head_width(kQuery, p->num_heads, "num_heads");
  for (AttentionInput input : {kKey, kValue}) {
    check.require_dim(input, 0, p->batch_size, "the batch_size of query");
    check.require_dim(input, 1, p->sequence_length, "the sequence_length of query");
  }
  check.require_dim(kKey, 2, p->kv_num_heads * p->head_dim, "kv_num_heads * head_dim");
  p->value_head_dim = check.head_width(kValue, p->kv_num_heads, "kv_num_heads");
  p->key = check[kKey].data;
  p->value = check[kValue].data;
  p->query_token_stride = check[kQuery].shape[2];
  p->key_token_stride = check[kKey].shape[2];
  p->value_token_stride = check[kValue].shape[2];
}

// The width of a head, from a cache whose rows are of this type.
std::int64_t width_of_rows(const Checker& check, AttentionInput input, DataType type) {
  const std::int64_t size = check.positive_dim(input, 3);
  if (type != DataType::kInt4 && type != DataType::kInt5) return size;
  const std::int64_t group_bytes = row_bytes(type, kGroupSize);
  if (size % group_bytes == 0) return size / group_bytes * kGroupSize;
  refuse(text(check[input].name, " has shape ", shape_text(check[input].shape), ": dimension 3 is ",
              size, " and must be a multiple of ", group_bytes, ", the bytes of a group of ",
              kGroupSize, " int4 numbers."));
}

// The same where query holds all three: each token's query heads, key heads and value heads. The
// cache tells how wide a head is.
void check_packed(const Checker& check, AttentionParams* p) {
  p->head_dim = width_of_rows(check, kPastKey, key_type(p->cache_type));
  p->value_head_dim = width_of_rows(check, kPastValue, p->cache_type);
  const std::int64_t size = check[kQuery].shape[2];
  // Divided, not multiplied: a tensor without elements may have any size, and a node any number.
  const bool is_too_large =
      p->num_heads > size / p->head_dim || p->kv_num_heads > size / p->value_head_dim;
  const std::int64_t keys = is_too_large ? size : p->num_heads * p->head_dim;
  const std::int64_t values = is_too_large ? size : keys + p->kv_num_heads * p->head_dim;
  if (is_too_large || size - values != p->kv_num_heads * p->value_head_dim) {
    refuse(text("query has shape ", shape_text(check[kQuery].shape), ": dimension 2 is ", size,
                " and must be (num_heads ", p->num_heads, " + kv_num_heads ", p->kv_num_heads,
                ") * head_dim ", p->head_dim, " + kv_num_heads * value_head_dim ",
                p->value_head_dim, " of the cache, because key and value are absent.",
                p->cache_type == DataType::kInt4
                    ? " Over an int4 cache heads must be multiples of 32 wide for that; give key "
                      "and value where they are not."
                    : ""));
  }
  if (check[kQuery].data != nullptr) {
    const char* query = static_cast<const char*>(check[kQuery].data);
    const std::int64_t element_bytes = bytes_of(p->activation_type);
    p->key = query + keys * element_bytes;
    p->value = query + values * element_bytes;
  }
  p->query_token_stride = p->key_token_stride = p->value_token_stride = size;
}

// Query, key, value and the cache: sets B, S, N, K, H, Hv and C.
void check_heads(const Checker& check, AttentionParams* p) {
  if (check[kKey].exists != check[kValue].exists) {
    refuse(text(check[kKey].exists ? "value" : "key",
                " is absent; key and value must be given together, or be absent together where "
                "query holds all three."));
  }
  const bool is_packed = !check[kKey].exists;
  check.require_rank(kQuery, 3,
                     is_packed ? "[batch_size, sequence_length, (num_heads + kv_num_heads) * "
                                 "head_dim + kv_num_heads * value_head_dim]"
                               : "[batch_size, sequence_length, num_heads * head_dim]");
  check.require_rank(kPastKey, 4, "[batch_size, kv_num_heads, capacity, head_dim]");
  check.require_rank(kPastValue, 4, "[batch_size, kv_num_heads, capacity, value_head_dim]");
  p->query = check[kQuery].data;
  p->batch_size = check[kQuery].shape[0];
  p->sequence_length = check[kQuery].shape[1];
  if (is_packed) {
    check_packed(check, p);
  } else {
    check_separate(check, p);
  }

  p->past_capacity = check[kPastKey].shape[2];
  for (AttentionInput input : {kPastKey, kPastValue}) {
    check.require_dim(input, 0, p->batch_size, "the batch_size of query");
    check.require_dim(input, 1, p->kv_num_heads, "kv_num_heads");
  }
  check.require_dim(kPastValue, 2, p->past_capacity, "the capacity of past_key");
  const bool is_int4 = p->cache_type == DataType::kInt4;
  check.require_dim(
      kPastKey, 3, cache_row_size(key_type(p->cache_type), p->head_dim),
      is_int4 ? "20 bytes for each 32 of the head_dim of query" : "the head_dim of query");
  check.require_dim(kPastValue, 3, cache_row_size(p->cache_type, p->value_head_dim),
                    is_int4 ? "16 bytes for each 32 of the value_head_dim of value"
                            : "the value_head_dim of value");
}

// The scales of a quantised cache; no other has any.
void check_scales(const Checker& check, const AttentionParams& p) {
  for (const auto& [input, width] :
       {std::pair{kPastKeyScale, p.head_dim}, std::pair{kPastValueScale, p.value_head_dim}}) {
    if (!is_quantized(p.cache_type)) {
      if (!check[input].exists) continue;
      refuse(text(check[input].name, " is given, but the cache is ", name_of(p.cache_type),
                  " and only quantised caches, int8 and int4, have scales; leave it out."));
    }
    if (!check[input].exists) {
      refuse(text(check[input].name, " is absent; the cache is ", name_of(p.cache_type),
                  " and quantised caches have scales, bfloat16 [batch_size, kv_num_heads, "
                  "capacity, ceil(width / ",
                  kGroupSize, ")]."));
    }
    check.require_rank(input, 4, "[batch_size, kv_num_heads, capacity, groups]");
    check.require_dim(input, 0, p.batch_size, "the batch_size of query");
    check.require_dim(input, 1, p.kv_num_heads, "kv_num_heads");
    check.require_dim(input, 2, p.past_capacity, "the capacity of past_key");
    check.require_dim(input, 3, num_groups(width), "a scale for each 32 numbers of a head");
  }
}

// A ring that wraps must keep all that its first new token sees while it takes in the last one.
void check_ring(std::int64_t window_size, const AttentionParams& p) {
  if (p.total_sequence_length <= p.past_capacity) return;
  const std::int64_t most_new = p.past_capacity - window_size + 1;
  if (most_new > 0 && p.sequence_length <= most_new) return;
  refuse(text("past_key is a ring of ", p.past_capacity, " slots and window_size is ", window_size,
              ", so behind ", p.past_sequence_length, " tokens a run may have at most ",
              most_new > 0 ? most_new : std::int64_t{0}, " new ones; sequence_length is ",
              p.sequence_length,
              ". Run fewer at once, or give a ring of at least window_size + sequence_length - 1 "
              "slots."));
}

// The mask and the mode: sets past, T and the capacity of present.
void check_lengths(const Checker& check, const AttentionAttributes& attributes,
                   LengthsAt lengths_at, AttentionParams* p) {
  const Tensor& mask = check[kAttentionMask];
  const Tensor& past_length = check[kPastSequenceLength];
  if (mask.exists) {
    check.require_rank(kAttentionMask, 2, "[batch_size, total_sequence_length]");
    check.require_dim(kAttentionMask, 0, p->batch_size, "the batch_size of query");
    p->mask_width = mask.shape[1];
  }
  const std::int64_t capacity = p->past_capacity;
  const std::int64_t new_tokens = p->sequence_length;

  if (lengths_at == LengthsAt::kDevice && !past_length.exists) {
    refuse(
        "past_sequence_length is absent; CUDA kernels need it, int32 [1], and shared buffers as "
        "past and present.");
  }
  if (attributes.is_ring && !past_length.exists) {
    refuse(
        "past_sequence_length is absent; cache_mode \"ring\" needs it, because attention_mask "
        "alone "
        "does not tell how much of the cache is in use.");
  }
  if (past_length.exists) {
    check.require_rank(kPastSequenceLength, 1, "[1]");
    check.require_dim(kPastSequenceLength, 0, 1, "one length for the whole batch");
    if (lengths_at == LengthsAt::kHost) {
      p->past_sequence_length = *static_cast<const std::int32_t*>(past_length.data);
    }
    if (p->past_sequence_length < 0) {
      refuse(text("past_sequence_length is ", p->past_sequence_length, "; it must be at least 0."));
    }
    p->total_sequence_length = p->past_sequence_length + new_tokens;
    if (attributes.is_ring) {
      check_ring(attributes.window_size, *p);
    } else if (capacity < p->total_sequence_length) {
      refuse(text("the cache's capacity is ", capacity, " but past_sequence_length ",
                  p->past_sequence_length, " + sequence_length ", new_tokens, " = ",
                  p->total_sequence_length, " slots are needed; give a larger buffer."));
    }
    if (mask.exists && p->mask_width < p->total_sequence_length) {
      refuse(text("attention_mask is ", p->mask_width,
                  " wide but past_sequence_length + sequence_length is ", p->total_sequence_length,
                  "; it must be at least as wide."));
    }
    p->present_capacity = capacity;
    return;
  }

  if (!mask.exists) {
    refuse(
        "attention_mask and past_sequence_length are both absent; give at least one of them, "
        "they tell how many tokens the cache holds.");
  }
  p->total_sequence_length = p->mask_width;
  p->past_sequence_length = p->total_sequence_length - new_tokens;
  if (p->past_sequence_length < 0) {
    refuse(text("attention_mask is ", p->mask_width, " wide but sequence_length is ", new_tokens,
                "; its width must be the past and the new tokens together."));
  }
  if (capacity >= p->total_sequence_length) {
    p->present_capacity = capacity;
  } else if (capacity == p->past_sequence_length) {
    p->present_capacity = p->total_sequence_length;
  } else {
    refuse(text("past_key has ", capacity, " slots, which fits neither mode with attention_mask ",
                p->total_sequence_length, " wide and sequence_length ", new_tokens,
                ": give a shared buffer of at least ", p->total_sequence_length,
                " slots, or a past of exactly ", p->past_sequence_length, "."));
  }
}

void check_rotary(const Checker& check, const AttentionAttributes& attributes, AttentionParams* p) {
  if (check[kCos].exists != check[kSin].exists) {
    refuse(text(check[kCos].exists ? "sin" : "cos",
                " is absent; cos and sin must be given together."));
  }
  if (!check[kCos].exists) {
    if (attributes.rotary_dim != 0) {
      refuse(text("rotary_dim is ", attributes.rotary_dim, " but cos and sin are absent."));
    }
    return;
  }
  p->rotary_interleaved = attributes.rotary_interleaved;
  p->rotary_dim = attributes.rotary_dim == 0 ? p->head_dim : attributes.rotary_dim;
  if (p->rotary_dim % 2 != 0 || p->rotary_dim > p->head_dim) {
    refuse(text("rotary_dim is ", p->rotary_dim, "; it must be even and no larger than head_dim ",
                p->head_dim, "."));
  }
  for (AttentionInput input : {kCos, kSin}) {
    check.require_rank(input, 3, "[batch_size or 1, sequence_length, rotary_dim / 2]");
    if (check[input].shape[0] != 1) {
      check.require_dim(input, 0, p->batch_size, "1 or the batch_size of query");
    }
    check.require_dim(input, 1, p->sequence_length, "the sequence_length of query");
    check.require_dim(input, 2, p->rotary_dim / 2, "rotary_dim / 2");
  }
  check.require_dim(kSin, 0, check[kCos].shape[0], "the batch_size of cos");
  p->rotary_batch_stride = check[kCos].shape[0] == 1 ? 0 : p->sequence_length * (p->rotary_dim / 2);
}

void check_bias(const Checker& check, LengthsAt lengths_at, AttentionParams* p) {
  const Tensor& bias = check[kAttentionBias];
  if (!bias.exists) return;
  std::int64_t target[4] = {p->batch_size, p->num_heads, p->sequence_length,
                            p->total_sequence_length};
  // With the total on the device, what is known of it: it passes neither the mask's width nor,
  // where there is no mask, the capacity.
  if (lengths_at == LengthsAt::kDevice) {
    target[3] = check[kAttentionMask].exists ? p->mask_width : p->present_capacity;
  }
  const std::size_t rank = bias.shape.size();
  if (rank > 4) {
    refuse(text("attention_bias has rank ", rank, "; it may have at most 4: [batch_size, ",
                "num_heads, sequence_length, total_sequence_length]."));
  }
  // Where past_sequence_length rules, a bias may be as wide as the capacity, like the mask.
  const bool may_be_wider = check[kPastSequenceLength].exists;
  std::int64_t stride = 1;
  for (std::size_t i = 0; i < rank; ++i) {  // from the last axis backwards
    const std::size_t axis = 3 - i;
    const std::int64_t size = bias.shape[rank - 1 - i];
    const bool fits = size == target[axis] || (axis == 3 && may_be_wider && size > target[axis]);
    if (size != 1 && !fits) {
      refuse(text("attention_bias has shape ", shape_text(bias.shape), ": dimension ", rank - 1 - i,
                  " is ", size, " and must be 1 or ", target[axis], ", to broadcast to ",
                  shape_text(target), "."));
    }
    p->bias_strides[axis] = size == 1 ? 0 : stride;
    stride *= size;
  }
  p->attention_bias = bias.data;
}

}  // namespace

std::int64_t cache_row_size(DataType type, std::int64_t width) {
  return is_quantized(type) ? row_bytes(type, width) : width;
}

AttentionParams check_inputs(const AttentionAttributes& attributes, const AttentionInputs& inputs,
                             DataType activation_type, DataType cache_type, LengthsAt lengths_at) {
  const Checker check(inputs);
  AttentionParams p;
  p.num_heads = attributes.num_heads;
  p.kv_num_heads = attributes.kv_num_heads;
  p.softcap = attributes.softcap;
  p.is_causal = attributes.is_causal;
  p.activation_type = activation_type;
  p.cache_type = cache_type;

  check_types(check, activation_type, cache_type);
  check_heads(check, &p);
  check_scales(check, p);
  check_lengths(check, attributes, lengths_at, &p);
  // A window that holds every slot is none; dropping it also keeps sums with it in range.
  if (lengths_at == LengthsAt::kDevice || attributes.window_size < p.total_sequence_length) {
    p.window_size = attributes.window_size;
  }
  check_rotary(check, attributes, &p);
  check_bias(check, lengths_at, &p);
  for (AttentionInput input : {kAlibiSlopes, kHeadSink}) {
    if (!check[input].exists) continue;
    check.require_rank(input, 1, "[num_heads]");
    check.require_dim(input, 0, p.num_heads, "num_heads");
  }

  p.scale = attributes.scale != 0.0F ? attributes.scale
                                     : 1.0F / std::sqrt(static_cast<float>(p.head_dim));
  p.past_key = check[kPastKey].data;
  p.past_value = check[kPastValue].data;
  p.past_key_scale = static_cast<const std::uint16_t*>(check[kPastKeyScale].data);
  p.past_value_scale = static_cast<const std::uint16_t*>(check[kPastValueScale].data);
  p.attention_mask = static_cast<const std::int64_t*>(check[kAttentionMask].data);
  p.cos = static_cast<const float*>(check[kCos].data);
  p.sin = static_cast<const float*>(check[kSin].data);
  p.alibi_slopes = static_cast<const float*>(check[kAlibiSlopes].data);
  p.head_sink = static_cast<const float*>(check[kHeadSink].data);
  return p;
}

}  // namespace kvconv
