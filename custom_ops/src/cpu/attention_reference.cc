// The reference kernel: every step of the op spelled out, one thread, double precision.
//
// It is what the fast kernels are tested against and stays as plain as it can be: no tiles, no
// vector instructions, a whole row of scores in memory. Letters: see kvconv/attention.h.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kvconv/attention.h"
#include "kvconv/cache_format.h"
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

// Multiplies each block of the row by the Hadamard matrix of its size: the signs are those of
// Sylvester's construction, and it is its own inverse.
void transform(std::vector<double>& row) {
  const std::int64_t size = rotation_size(static_cast<std::int64_t>(row.size()));
  const std::vector<double> given = row;
  for (std::size_t h = 0; h < row.size(); ++h) {
    const std::size_t block = h / size * size;
    double sum = 0.0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(size); ++i) {
      const bool is_negative = std::popcount(i & (h - block)) % 2 != 0;
      sum += is_negative ? -given[block + i] : given[block + i];
    }
    row[h] = sum / std::sqrt(static_cast<double>(size));
  }
}

// The scale of a group of numbers, and what each is divided by to get its code.
std::uint16_t scale_of(DataType type, const std::vector<float>& group) {
  float largest = 0.0F;
  for (const float x : group) {
    if (!std::isfinite(x)) return float_to_bfloat16(std::numeric_limits<float>::quiet_NaN());
    if (std::fabs(x) > std::fabs(largest)) largest = x;
  }
  const std::uint16_t scale =
      float_to_bfloat16(type == DataType::kInt8 ? std::fabs(largest) / 127.0F
                                                : largest / static_cast<float>(-zero_point(type)));
  const float number = bfloat16_to_float(scale);
  if (std::isinf(number)) return float_to_bfloat16(std::numeric_limits<float>::quiet_NaN());
  return std::fabs(number) < std::numeric_limits<float>::min() ? 0 : scale;
}

// The codes of a group under its scale.
std::vector<int> codes_of(DataType type, const std::vector<float>& group, std::uint16_t scale) {
  const float number = bfloat16_to_float(scale);
  const bool has_codes = number != 0.0F && !std::isnan(number);
  const int zero = zero_point(type);
  const int smallest = type == DataType::kInt8 ? -127 : -zero;
  const int largest = type == DataType::kInt8 ? 127 : zero - 1;
  std::vector<int> codes(kGroupSize, zero);
  for (std::size_t j = 0; j < group.size() && has_codes; ++j) {
    const int code = static_cast<int>(std::lrint(group[j] * (1.0F / number)));
    codes[j] = std::min(std::max(code, smallest), largest) + zero;
  }
  return codes;
}

// Writes a row's codes and scales.
void quantize(DataType type, const std::vector<double>& row, std::uint8_t* codes,
              std::uint16_t* scales) {
  const auto width = static_cast<std::int64_t>(row.size());
  for (std::int64_t g = 0; g < num_groups(width); ++g) {
    const auto end = std::min((g + 1) * kGroupSize, width);
    const std::vector<float> group(row.begin() + g * kGroupSize, row.begin() + end);
    scales[g] = scale_of(type, group);
    const std::vector<int> group_codes = codes_of(type, group, scales[g]);
    if (type == DataType::kInt8) {
      for (std::size_t j = 0; j < group.size(); ++j) {
        codes[g * kGroupSize + static_cast<std::int64_t>(j)] =
            static_cast<std::uint8_t>(group_codes[j]);
      }
      continue;
    }
    std::uint32_t fifth_bits = 0;
    for (std::size_t j = 0; j < 16; ++j) {
      codes[g * 16 + static_cast<std::int64_t>(j)] =
          static_cast<std::uint8_t>((group_codes[j] & 15) | (group_codes[16 + j] & 15) << 4);
    }
    for (std::size_t j = 0; j < 32; ++j) {
      fifth_bits |= static_cast<std::uint32_t>(group_codes[j] >> 4) << j;
    }
    if (type != DataType::kInt5) continue;
    for (std::int64_t byte = 0; byte < 4; ++byte) {
      codes[num_groups(width) * 16 + g * 4 + byte] =
          static_cast<std::uint8_t>(fifth_bits >> (8 * byte));
    }
  }
}

// One tensor of the cache [B, K, C, width], keys or values.
struct Cache {
  DataType type;
  std::int64_t width;
  const void* past;
  void* present;
  const std::uint16_t* past_scale;
  std::uint16_t* present_scale;
};

Cache keys_of(const AttentionParams& p) {
  return {key_type(p.cache_type), p.head_dim,       p.past_key,
          p.present_key,          p.past_key_scale, p.present_key_scale};
}

Cache values_of(const AttentionParams& p) {
  return {p.cache_type,    p.value_head_dim,   p.past_value,
          p.present_value, p.past_value_scale, p.present_value_scale};
}

// The row of a cache in which a slot lies.
std::int64_t cache_row(const AttentionParams& p, std::int64_t slot) {
  return slot % p.present_capacity;
}

// Copies the past slots of a tensor [B, K, C, bytes] unless past and present are one.
void copy_past(const AttentionParams& p, const void* past, void* present, std::int64_t row_bytes) {
  if (past == present || row_bytes == 0 || p.past_sequence_length == 0) return;
  const std::int64_t rows = std::min(p.past_sequence_length, p.past_capacity);
  for (std::int64_t head = 0; head < p.batch_size * p.kv_num_heads; ++head) {
    std::memcpy(static_cast<char*>(present) + head * p.present_capacity * row_bytes,
                static_cast<const char*>(past) + head * p.past_capacity * row_bytes,
                static_cast<std::size_t>(rows * row_bytes));
  }
}

void copy_past(const AttentionParams& p, const Cache& cache) {
  copy_past(p, cache.past, cache.present, row_bytes(cache.type, cache.width));
  copy_past(p, cache.past_scale, cache.present_scale,
            num_scales(cache.type, cache.width) * static_cast<std::int64_t>(sizeof(std::uint16_t)));
}

// Writes new token `i` of one head into its slot of the cache.
void append(const AttentionParams& p, const Cache& cache, std::vector<double> row,
            std::int64_t batch, std::int64_t kv_head, std::int64_t i) {
  const std::int64_t index = (batch * p.kv_num_heads + kv_head) * p.present_capacity +
                             cache_row(p, p.past_sequence_length + i);
  if (is_quantized(cache.type)) {
    transform(row);
    quantize(cache.type, row,
             static_cast<std::uint8_t*>(cache.present) + index * row_bytes(cache.type, cache.width),
             cache.present_scale + index * num_scales(cache.type, cache.width));
    return;
  }
  for (std::int64_t h = 0; h < cache.width; ++h) {
    store_element(cache.present, index * cache.width + h, cache.type, static_cast<float>(row[h]));
  }
}

// Attends with one query of one head over all slots.
void attend(const AttentionParams& p, std::int64_t batch, std::int64_t head, std::int64_t i) {
  const std::int64_t kv_head = head / (p.num_heads / p.kv_num_heads);
  const std::int64_t cache_head = (batch * p.kv_num_heads + kv_head) * p.present_capacity;
  const std::int64_t query_slot = p.past_sequence_length + i;
  const std::int64_t token = batch * p.sequence_length + i;
  const Cache keys = keys_of(p);
  const Cache values = values_of(p);
  const auto load = [&](const Cache& cache, std::int64_t slot, std::int64_t h) {
    return load_number(cache.type, cache.present, cache.present_scale, cache.width,
                       cache_head + cache_row(p, slot), h);
  };

  std::vector<double> query =
      load_row(p, p.query, token * p.query_token_stride + head * p.head_dim, p.head_dim);
  rotate(p, batch, i, query);
  if (is_quantized(p.cache_type)) transform(query);

  // 1. Scores, -infinity where the query must not look.
  std::vector<double> scores(static_cast<std::size_t>(p.total_sequence_length), kMinusInfinity);
  double maximum = p.head_sink != nullptr ? p.head_sink[head] : kMinusInfinity;
  for (std::int64_t j = 0; j < p.total_sequence_length; ++j) {
    if (p.is_causal && j > query_slot) continue;
    if (p.window_size > 0 && j <= query_slot - p.window_size) continue;
    if (p.attention_mask != nullptr && p.attention_mask[batch * p.mask_width + j] == 0) continue;
    double score = 0.0;
    for (std::int64_t h = 0; h < p.head_dim; ++h) score += query[h] * load(keys, j, h);
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
    for (std::int64_t h = 0; h < p.value_head_dim; ++h) result[h] += weight * load(values, j, h);
  }

  // 3. A row that sees no slot at all is 0.
  const std::int64_t offset = (token * p.num_heads + head) * p.value_head_dim;
  for (double& value : result) value = sum == 0.0 ? 0.0 : value / sum;
  if (is_quantized(p.cache_type)) transform(result);
  for (std::int64_t h = 0; h < p.value_head_dim; ++h) {
    store_element(p.output, offset + h, p.activation_type, static_cast<float>(result[h]));
  }
}

}  // namespace

void append_reference(const AttentionParams& p) {
  const Cache keys = keys_of(p);
  const Cache values = values_of(p);
  copy_past(p, keys);
  copy_past(p, values);
  for (std::int64_t batch = 0; batch < p.batch_size; ++batch) {
    for (std::int64_t i = 0; i < p.sequence_length; ++i) {
      const std::int64_t token = batch * p.sequence_length + i;
      for (std::int64_t head = 0; head < p.kv_num_heads; ++head) {
        std::vector<double> key =
            load_row(p, p.key, token * p.key_token_stride + head * p.head_dim, p.head_dim);
        rotate(p, batch, i, key);
        append(p, keys, key, batch, head, i);
        const std::int64_t offset = token * p.value_token_stride + head * p.value_head_dim;
        append(p, values, load_row(p, p.value, offset, p.value_head_dim), batch, head, i);
      }
    }
  }
}

void attend_reference(const AttentionParams& p) {
  for (std::int64_t batch = 0; batch < p.batch_size; ++batch) {
    for (std::int64_t head = 0; head < p.num_heads; ++head) {
      for (std::int64_t i = 0; i < p.sequence_length; ++i) attend(p, batch, head, i);
    }
  }
}

void attention_reference(const AttentionParams& p) {
  append_reference(p);
  attend_reference(p);
}

}  // namespace kvconv
