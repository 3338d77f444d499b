// The reference kernel: every step of the op spelled out, one thread, double precision.
//
// It is what the fast kernels are tested against and stays as plain as it can be: no tiles, no
// vector instructions, a whole row of scores in memory. Letters: see kvconv/attention.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kvconv/attention.h"
#include "kvconv/float16.h"

namespace kvconv {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Reads `size` activations from `offset` on.
std::vector<double> load_row(const AttentionParams& p, const void* data, std::int64_t offset,
                             std::int64_t size) {
  std::vector<double> row(static_cast<std::size_t>(size));
  for (std::int64_t h = 0; h < size; ++h)
    row[h] = load_element(data, offset + h, p.activation_type);
  return row;
}

void rotate(const AttentionParams& p, std::int64_t batch, std::int64_t position,
            std::vector<double>& row) {
  const std::int64_t half = p.rotary_dim / 2;
  const std::int64_t table = batch * p.rotary_batch_stride + position * half;
  for (std::int64_t i = 0; i < half; ++i) {
    const std::int64_t first = p.rotary_interleaved ? 2 * i : i;
    const std::int64_t second = p.rotary_interleaved ? 2 * i + 1 : i + half;
    const double c = p.cos[table + i];
    const double s = p.sin[table + i];
    const double x1 = row[first];
    const double x2 = row[second];
    row[first] = x1 * c - x2 * s;
    row[second] = x2 * c + x1 * s;
  }
}

// The row of a cache in which a slot lies.
std::int64_t cache_row(const AttentionParams& p, std::int64_t slot) {
  return slot % p.present_capacity;
}

// Copies the past slots of one cache tensor [B, K, C, width] unless past and present are one.
void copy_past(const AttentionParams& p, const void* past, void* present, std::int64_t width) {
  if (past == present || p.past_sequence_length == 0) return;
  const std::int64_t row_bytes = width * bytes_of(p.cache_type);
  const std::int64_t rows = std::min(p.past_sequence_length, p.past_capacity);
  for (std::int64_t head = 0; head < p.batch_size * p.kv_num_heads; ++head) {
    std::memcpy(static_cast<char*>(present) + head * p.present_capacity * row_bytes,
                static_cast<const char*>(past) + head * p.past_capacity * row_bytes,
                static_cast<std::size_t>(rows * row_bytes));
  }
}

// Writes new token `i` of one head into its slot of a cache tensor.
void append(const AttentionParams& p, const std::vector<double>& row, void* present,
            std::int64_t batch, std::int64_t kv_head, std::int64_t i) {
  const std::int64_t cached = cache_row(p, p.past_sequence_length + i);
  const std::int64_t width = static_cast<std::int64_t>(row.size());
  const std::int64_t offset =
      ((batch * p.kv_num_heads + kv_head) * p.present_capacity + cached) * width;
  for (std::int64_t h = 0; h < width; ++h) {
    store_element(present, offset + h, p.cache_type, static_cast<float>(row[h]));
  }
}

// Attends with one query of one head over all slots.
void attend(const AttentionParams& p, std::int64_t batch, std::int64_t head, std::int64_t i) {
  const std::int64_t kv_head = head / (p.num_heads / p.kv_num_heads);
  const std::int64_t cache_head = (batch * p.kv_num_heads + kv_head) * p.present_capacity;
  const std::int64_t query_slot = p.past_sequence_length + i;
  const std::int64_t token = batch * p.sequence_length + i;

  std::vector<double> query =
      load_row(p, p.query, token * p.query_token_stride + head * p.head_dim, p.head_dim);
  rotate(p, batch, i, query);

  // 1. Scores, -infinity where the query must not look.
  std::vector<double> scores(static_cast<std::size_t>(p.total_sequence_length), kMinusInfinity);
  double maximum = p.head_sink != nullptr ? p.head_sink[head] : kMinusInfinity;
  for (std::int64_t j = 0; j < p.total_sequence_length; ++j) {
    if (p.is_causal && j > query_slot) continue;
    if (p.window_size > 0 && j <= query_slot - p.window_size) continue;
    if (p.attention_mask != nullptr && p.attention_mask[batch * p.mask_width + j] == 0) continue;
    double score = 0.0;
    const std::int64_t key_row = cache_head + cache_row(p, j);
    for (std::int64_t h = 0; h < p.head_dim; ++h) {
      score += query[h] * load_element(p.present_key, key_row * p.head_dim + h, p.cache_type);
    }
    score *= p.scale;
    if (p.softcap > 0.0F) score = p.softcap * std::tanh(score / p.softcap);
    if (p.alibi_slopes != nullptr) {
      score += static_cast<double>(p.alibi_slopes[head]) * static_cast<double>(j - query_slot);
    }
    if (p.attention_bias != nullptr) {
      score += load_element(p.attention_bias,
                            batch * p.bias_strides[0] + head * p.bias_strides[1] +
                                i * p.bias_strides[2] + j * p.bias_strides[3],
                            p.activation_type);
    }
    scores[j] = score;
    if (!(score <= maximum)) maximum = score;
  }

  // 2. Softmax. A slot whose weight is 0 contributes nothing, whatever its value holds.
  const bool has_sink = p.head_sink != nullptr && p.head_sink[head] != kMinusInfinity;
  double sum = has_sink ? std::exp(p.head_sink[head] - maximum) : 0.0;
  std::vector<double> result(static_cast<std::size_t>(p.value_head_dim), 0.0);
  for (std::int64_t j = 0; j < p.total_sequence_length; ++j) {
    if (scores[j] == kMinusInfinity) continue;
    const double weight = std::exp(scores[j] - maximum);
    sum += weight;
    const std::int64_t value_row = cache_head + cache_row(p, j);
    for (std::int64_t h = 0; h < p.value_head_dim; ++h) {
      result[h] +=
          weight * load_element(p.present_value, value_row * p.value_head_dim + h, p.cache_type);
    }
  }

  // 3. A row that sees no slot at all is 0.
  const std::int64_t offset = (token * p.num_heads + head) * p.value_head_dim;
  for (std::int64_t h = 0; h < p.value_head_dim; ++h) {
    const double value = sum == 0.0 ? 0.0 : result[h] / sum;
    store_element(p.output, offset + h, p.activation_type, static_cast<float>(value));
  }
}

}  // namespace

void attention_reference(const AttentionParams& p) {
  copy_past(p, p.past_key, p.present_key, p.head_dim);
  copy_past(p, p.past_value, p.present_value, p.value_head_dim);
  for (std::int64_t batch = 0; batch < p.batch_size; ++batch) {
    for (std::int64_t i = 0; i < p.sequence_length; ++i) {
      const std::int64_t token = batch * p.sequence_length + i;
      for (std::int64_t head = 0; head < p.kv_num_heads; ++head) {
        std::vector<double> key =
            load_row(p, p.key, token * p.key_token_stride + head * p.head_dim, p.head_dim);
        rotate(p, batch, i, key);
        append(p, key, p.present_key, batch, head, i);
        const std::int64_t value_offset = token * p.value_token_stride + head * p.value_head_dim;
        append(p, load_row(p, p.value, value_offset, p.value_head_dim), p.present_value, batch,
               head, i);
      }
    }
    for (std::int64_t head = 0; head < p.num_heads; ++head) {
      for (std::int64_t i = 0; i < p.sequence_length; ++i) attend(p, batch, head, i);
    }
  }
}

}  // namespace kvconv
