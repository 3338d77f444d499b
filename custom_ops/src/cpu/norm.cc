// Norms. Compiled once per instruction set (KVCONV_USE_...); kernels.cc picks one.
//
// Nothing here may call a shared inline function (no standard containers or algorithms): the
// linker could pick this file's copy, compiled for newer processors, for everybody.
#include "kvconv/norm.h"

#include "kvconv/float16.h"
#include "tasks.h"
#include "vec_math.h"

namespace kvconv {
namespace {

constexpr std::int64_t kTaskElements = 1 << 14;  // less than this is not worth a second thread
constexpr int kSums = 4;                         // partial sums, so that additions do not wait

using Half = std::uint16_t;

// The first `count` lanes from memory, the others 0.
inline Vec read(const float* p, std::int64_t count) {
  return count == kLanes ? load(p) : load_part(p, count);
}
inline Vec read(const Half* p, std::int64_t count) {
  if (count == kLanes) return load_float16(p);
  float lanes[kLanes] = {};
  widen(p, DataType::kFloat16, lanes, count);
  return load(lanes);
}

// The first `count` lanes, the others 0.
inline Vec first_lanes(Vec v, std::int64_t count) {
  if (count == kLanes) return v;
  float lanes[kLanes];
  store(lanes, v);
  return load_part(lanes, count);
}

// Writes `count` lanes, and returns what a read of them gives.
inline Vec write(float* p, Vec v, std::int64_t count) {
  if (count == kLanes) {
    store(p, v);
  } else {
    float lanes[kLanes];
    store(lanes, v);
    narrow(lanes, p, DataType::kFloat32, count);
  }
  return first_lanes(v, count);
}
inline Vec write(Half* p, Vec v, std::int64_t count) {
  if (count == kLanes) {
    store_float16(p, v);
  } else {
    float lanes[kLanes];
    store(lanes, v);
    narrow(lanes, p, DataType::kFloat16, count);
  }
  return read(p, count);
}

// Calls vector_at(i, count) for the vectors of a row and returns the sum of what they hold, lane by
// lane; a last vector that is not full must be 0 behind its end.
template <typename VectorAt>
float sum_of(std::int64_t width, const VectorAt& vector_at) {
  Vec sums[kSums];
  for (Vec& sum : sums) sum = set(0.0F);
  std::int64_t i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < kSums; ++j) sums[j] = add(sums[j], vector_at(i + j * kLanes, kLanes));
  }
  for (; i < width; i += kLanes) sums[0] = add(sums[0], vector_at(i, min_of(kLanes, width - i)));
  return sum_of_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

float mean_of(float sum, std::int64_t width) {
  return static_cast<float>(static_cast<double>(sum) / static_cast<double>(width));
}

// 1 / sqrt(mean + epsilon), from a sum of squares.
float inverse_root(float squares, std::int64_t width, float epsilon) {
  const double mean = static_cast<double>(squares) / static_cast<double>(width);
  return static_cast<float>(1.0 / __builtin_sqrt(mean + static_cast<double>(epsilon)));
}

template <typename Element>
float inverse_root_of(const Element* x, std::int64_t width, float epsilon) {
  const float squares = sum_of(width, [&](std::int64_t i, std::int64_t count) {
    const Vec v = read(x + i, count);
    return mul(v, v);
  });
  return inverse_root(squares, width, epsilon);
}

// output = x * factor * weight
template <typename Element>
void scale(const Element* x, float factor, const Element* weight, Element* output,
           std::int64_t width) {
  const Vec factors = set(factor);
  for (std::int64_t i = 0; i < width; i += kLanes) {
    const std::int64_t count = min_of(kLanes, width - i);
    write(output + i, mul(mul(read(x + i, count), factors), read(weight + i, count)), count);
  }
}

// output = (x - mean) * factor * weight + bias
template <typename Element>
void scale_centred(const Element* x, float mean, float factor, const Element* weight,
                   const Element* bias, Element* output, std::int64_t width) {
  const Vec means = set(mean);
  const Vec factors = set(factor);
  for (std::int64_t i = 0; i < width; i += kLanes) {
    const std::int64_t count = min_of(kLanes, width - i);
    const Vec v = mul(mul(sub(read(x + i, count), means), factors), read(weight + i, count));
    write(output + i, bias == nullptr ? v : add(v, read(bias + i, count)), count);
  }
}

// The vectors of input + skip, the input prepared as the parameters say; written to p.sum.
template <typename Element>
struct Sum {
  Vec operator()(std::int64_t i, std::int64_t count) const {
    Vec x = read(input + i, count);
    if (input_weight != nullptr) x = mul(mul(x, set(factor)), read(input_weight + i, count));
    if (input_bias != nullptr) x = add(x, read(input_bias + i, count));
    return write(sum + i, add(x, read(skip + i, count)), count);
  }

  const Element* input;
  const Element* skip;
  const Element* input_weight;
  const Element* input_bias;
  float factor;
  Element* sum;
};

template <typename Element>
void skip_norm_row(const SkipNormParams& p, std::int64_t row) {
  const std::int64_t start = row * p.width;
  const auto* weight = static_cast<const Element*>(p.weight);
  const auto* bias = static_cast<const Element*>(p.bias);
  auto* output = static_cast<Element*>(p.output) + start;
  Sum<Element> added{static_cast<const Element*>(p.input) + start,
                     static_cast<const Element*>(p.skip) + start,
                     static_cast<const Element*>(p.input_weight),
                     static_cast<const Element*>(p.input_bias),
                     1.0F,
                     static_cast<Element*>(p.sum) + start};
  if (added.input_weight != nullptr) {
    added.factor = inverse_root_of(added.input, p.width, p.epsilon);
  }
  if (p.norm == Norm::kRms) {
    const float squares = sum_of(p.width, [&](std::int64_t i, std::int64_t count) {
      const Vec v = added(i, count);
      return mul(v, v);
    });
    scale(added.sum, inverse_root(squares, p.width, p.epsilon), weight, output, p.width);
    return;
  }
  // The mean first: a difference of large sums would lose what little a row varies.
  const float mean = mean_of(sum_of(p.width, added), p.width);
  const float squares = sum_of(p.width, [&](std::int64_t i, std::int64_t count) {
    const Vec v = first_lanes(sub(read(added.sum + i, count), set(mean)), count);
    return mul(v, v);
  });
  scale_centred(added.sum, mean, inverse_root(squares, p.width, p.epsilon), weight, bias, output,
                p.width);
}

template <typename Element>
void head_norm_row(const HeadNormParams& p, std::int64_t row) {
  const Element* input = static_cast<const Element*>(p.input) + row * p.width;
  Element* output = static_cast<Element*>(p.output) + row * p.width;
  const std::int64_t heads = p.num_heads + p.kv_num_heads;
  for (std::int64_t head = 0; head < heads; ++head) {
    const void* weight = head < p.num_heads ? p.query_weight : p.key_weight;
    const std::int64_t start = head * p.head_dim;
    const float factor = inverse_root_of(input + start, p.head_dim, p.epsilon);
    scale(input + start, factor, static_cast<const Element*>(weight), output + start, p.head_dim);
  }
  const std::int64_t rest = heads * p.head_dim;
  if (rest < p.width) {
    std::memcpy(output + rest, input + rest,
                static_cast<std::size_t>(p.width - rest) * sizeof(Element));
  }
}

template <typename Params, typename Body>
void for_rows(const Params& p, const ParallelFor& parallel_for, const Body& body) {
  const std::int64_t rows_per_task = max_of(1, kTaskElements / max_of(1, p.width));
  const std::int64_t tasks = ceil_div(p.num_rows, rows_per_task);
  for_each_task(parallel_for, tasks, [&](std::int64_t, std::int64_t task) {
    const std::int64_t end = min_of(p.num_rows, (task + 1) * rows_per_task);
    for (std::int64_t row = task * rows_per_task; row < end; ++row) body(row);
  });
}

void skip_norm(const SkipNormParams& p, const ParallelFor& parallel_for) {
  for_rows(p, parallel_for, [&](std::int64_t row) {
    p.type == DataType::kFloat32 ? skip_norm_row<float>(p, row) : skip_norm_row<Half>(p, row);
  });
}

void head_norm(const HeadNormParams& p, const ParallelFor& parallel_for) {
  for_rows(p, parallel_for, [&](std::int64_t row) {
    p.type == DataType::kFloat32 ? head_norm_row<float>(p, row) : head_norm_row<Half>(p, row);
  });
}

}  // namespace

#if defined(KVCONV_USE_AVX512)
extern const NormKernel kNormAvx512 = {"avx512", skip_norm, head_norm};
#elif defined(KVCONV_USE_AVX2)
extern const NormKernel kNormAvx2 = {"avx2", skip_norm, head_norm};
#else
extern const NormKernel kNormPortable = {"portable", skip_norm, head_norm};
#endif

}  // namespace kvconv
