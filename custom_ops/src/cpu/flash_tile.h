// The arithmetic on one tile of keys and a strip of many rows: products, score changes, masks,
// online softmax.
//
// Vector lanes are query rows, so a tile of scores is [key, row] and nothing is ever summed across
// lanes. Scores are in units of ln 2, except where a softcap is still to be applied. Included by
// attention_flash.cc only; internal linkage throughout.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec_math.h"

namespace kvconv {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

// c[i][lane] = alpha[lane] * c[i][lane] + sum over k of a(i, k) * b[k][lane], for `rows` rows and
// `vecs` vectors of lanes. Element a(i, k) is a[i * a_row + k * a_step]. A null alpha counts as 0.
template <int rows, int vecs>
void multiply_block(const float* a, std::int64_t a_row, std::int64_t a_step, const float* b,
                    std::int64_t depth, float* c, std::int64_t lanes, const float* alpha) {
  Vec sums[rows][vecs];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < vecs; ++v) {
      sums[i][v] = alpha == nullptr
                       ? set(0.0F)
                       : mul(load(alpha + v * kLanes), load(c + i * lanes + v * kLanes));
    }
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    Vec operands[vecs];
#pragma GCC unroll 3
    for (int v = 0; v < vecs; ++v) operands[v] = load(b + k * lanes + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const Vec element = set(a[i * a_row + k * a_step]);
#pragma GCC unroll 3
      for (int v = 0; v < vecs; ++v) sums[i][v] = fma(element, operands[v], sums[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < vecs; ++v) store(c + i * lanes + v * kLanes, sums[i][v]);
  }
}

// The last rows, fewer than a full register block: one call of the size that fits.
template <int rows, int vecs>
void multiply_rest(std::int64_t count, const float* a, std::int64_t a_row, std::int64_t a_step,
                   const float* b, std::int64_t depth, float* c, std::int64_t lanes,
                   const float* alpha) {
  if constexpr (rows > 0) {
    if (count == rows) {
      multiply_block<rows, vecs>(a, a_row, a_step, b, depth, c, lanes, alpha);
    } else {
      multiply_rest<rows - 1, vecs>(count, a, a_row, a_step, b, depth, c, lanes, alpha);
    }
  }
}

template <int block, int vecs>
void multiply_rows(std::int64_t rows, const float* a, std::int64_t a_row, std::int64_t a_step,
                   const float* b, std::int64_t depth, float* c, std::int64_t lanes,
                   const float* alpha) {
  std::int64_t i = 0;
  for (; i + block <= rows; i += block) {
    multiply_block<block, vecs>(a + i * a_row, a_row, a_step, b, depth, c + i * lanes, lanes,
                                alpha);
  }
  multiply_rest<block - 1, vecs>(rows - i, a + i * a_row, a_row, a_step, b, depth, c + i * lanes,
                                 lanes, alpha);
}

// The product of multiply_block for any number of rows and the lanes of a strip.
void multiply(std::int64_t rows, const float* a, std::int64_t a_row, std::int64_t a_step,
              const float* b, std::int64_t depth, float* c, std::int64_t lanes,
              const float* alpha) {
  if (lanes == 3 * kLanes) {
    multiply_rows<kRowsThreeVecs, 3>(rows, a, a_row, a_step, b, depth, c, lanes, alpha);
  } else if (lanes == 2 * kLanes) {
    multiply_rows<kRowsTwoVecs, 2>(rows, a, a_row, a_step, b, depth, c, lanes, alpha);
  } else {
    multiply_rows<kRowsOneVec, 1>(rows, a, a_row, a_step, b, depth, c, lanes, alpha);
  }
}

// accumulator[h][lane] = alpha * accumulator + weights x values, where a weight of 0 contributes
// nothing even if the value is NaN or infinite. Slow: only for tiles where such values are met.
void accumulate_skipping_zeros(const float* weights, const float* values, std::int64_t keys,
                               std::int64_t value_head_dim, float* accumulator, std::int64_t lanes,
                               const float* alpha) {
  for (std::int64_t h = 0; h < value_head_dim; ++h) {
    for (std::int64_t lane = 0; lane < lanes; lane += kLanes) {
      Vec sum = mul(load(alpha + lane), load(accumulator + h * lanes + lane));
      for (std::int64_t t = 0; t < keys; ++t) {
        const Vec weight = load(weights + t * lanes + lane);
        const Vec value = set(values[t * value_head_dim + h]);
        sum = select_equal(weight, set(0.0F), sum, fma(weight, value, sum));
      }
      store(accumulator + h * lanes + lane, sum);
    }
  }
}

// Of scores in natural units; the result is in units of ln 2.
void apply_softcap(float* scores, std::int64_t count, float softcap) {
  const Vec inverse = set(1.0F / softcap);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    store(scores + i, mul(set(softcap * kLog2E), tanh(mul(load(scores + i), inverse))));
  }
}

// Adds slopes[lane] * (t - query_offset[lane]); query_offset is the query's slot less the tile's.
void add_alibi(float* scores, std::int64_t keys, std::int64_t lanes, const float* slopes,
               const float* query_offset) {
  for (std::int64_t t = 0; t < keys; ++t) {
    for (std::int64_t lane = 0; lane < lanes; lane += kLanes) {
      float* score = scores + t * lanes + lane;
      const Vec distance = sub(set(static_cast<float>(t)), load(query_offset + lane));
      store(score, fma(load(slopes + lane), distance, load(score)));
    }
  }
}

// Sets the scores of keys t outside [first[lane], last[lane]) to -infinity.
void apply_limits(float* scores, std::int64_t keys, std::int64_t lanes, const float* first,
                  const float* last) {
  const Vec minus_infinity = set(kMinusInfinity);
  for (std::int64_t t = 0; t < keys; ++t) {
    const Vec key = set(static_cast<float>(t));
    for (std::int64_t lane = 0; lane < lanes; lane += kLanes) {
      float* score = scores + t * lanes + lane;
      const Vec seen = select_less(key, load(last + lane), load(score), minus_infinity);
      store(score, select_less(key, load(first + lane), minus_infinity, seen));
    }
  }
}

void apply_mask(float* scores, std::int64_t keys, std::int64_t lanes, const std::int64_t* mask) {
  for (std::int64_t t = 0; t < keys; ++t) {
    if (mask[t] != 0) continue;
    for (std::int64_t lane = 0; lane < lanes; lane += kLanes) {
      store(scores + t * lanes + lane, set(kMinusInfinity));
    }
  }
}

template <int vecs>
void online_softmax_of(float* scores, std::int64_t keys, std::int64_t lanes, float* maximum,
                       float* sum, float* alpha) {
  Vec shift[vecs];
  Vec total[vecs];
#pragma GCC unroll 3
  for (int v = 0; v < vecs; ++v) shift[v] = load(maximum + v * kLanes);
  for (std::int64_t t = 0; t < keys; ++t) {
#pragma GCC unroll 3
    for (int v = 0; v < vecs; ++v) shift[v] = max(load(scores + t * lanes + v * kLanes), shift[v]);
  }
#pragma GCC unroll 3
  for (int v = 0; v < vecs; ++v) {
    const Vec old_maximum = load(maximum + v * kLanes);
    store(maximum + v * kLanes, shift[v]);
    // A row that has seen nothing keeps its -infinity; 0 in its place keeps NaN out of the weights.
    shift[v] = select_equal(shift[v], set(kMinusInfinity), set(0.0F), shift[v]);
    const Vec shrink = exp2_nonpositive(sub(old_maximum, shift[v]));
    store(alpha + v * kLanes, shrink);
    total[v] = mul(load(sum + v * kLanes), shrink);
  }
  for (std::int64_t t = 0; t < keys; ++t) {
#pragma GCC unroll 3
    for (int v = 0; v < vecs; ++v) {
      float* score = scores + t * lanes + v * kLanes;
      const Vec weight = exp2_nonpositive(sub(load(score), shift[v]));
      store(score, weight);
      total[v] = add(total[v], weight);
    }
  }
#pragma GCC unroll 3
  for (int v = 0; v < vecs; ++v) store(sum + v * kLanes, total[v]);
}

// Turns scores into weights 2^(score - maximum), updates each row's running maximum and sum, and
// sets alpha, the factor by which a row's earlier sums shrink when its maximum grows.
void online_softmax(float* scores, std::int64_t keys, std::int64_t lanes, float* maximum,
                    float* sum, float* alpha) {
  if (lanes == 3 * kLanes) return online_softmax_of<3>(scores, keys, lanes, maximum, sum, alpha);
  if (lanes == 2 * kLanes) return online_softmax_of<2>(scores, keys, lanes, maximum, sum, alpha);
  return online_softmax_of<1>(scores, keys, lanes, maximum, sum, alpha);
}

// True when any of `count` floats (a multiple of kLanes) is NaN or infinite.
bool has_nonfinite(const float* data, std::int64_t count) {
  Vec zeros = set(0.0F);  // 0 * x is 0 for every finite x and NaN otherwise
  for (std::int64_t i = 0; i < count; i += kLanes) zeros = fma(load(data + i), set(0.0F), zeros);
  float lanes[kLanes];
  store(lanes, zeros);
  bool found = false;
  for (int i = 0; i < kLanes; ++i) found = found || lanes[i] != 0.0F;
  return found;
}

}  // namespace
}  // namespace kvconv
