#include "arguments.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "kvconv/text.h"

namespace kvconv::cuda {
namespace {

constexpr std::int64_t kDivisor = 16;

std::uint64_t pointer(const char* name, const void* pointer) {
  const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pointer));
  if (address % kDivisor != 0) {
    refuse(text(name, " is at address ", address, "; CUDA kernels need a multiple of ", kDivisor,
                ". Give a buffer that begins on one."));
  }
  return address;
}

std::uint64_t integer(const char* name, std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) {
    refuse(text(name, " is ", value, "; CUDA kernels take at most ",
                std::numeric_limits<std::int32_t>::max(), "."));
  }
  return static_cast<std::uint64_t>(value);
}

std::uint64_t stride(const char* name, std::int64_t value) {
  if (value % kDivisor != 0) {
    refuse(text(name, " is ", value, " elements; CUDA kernels need a multiple of ", kDivisor,
                ". Use the CPU for heads of such a width."));
  }
  return integer(name, value);
}

std::uint64_t real(float value) { return std::bit_cast<std::uint32_t>(value); }

std::uint64_t value_of(Argument argument, const Run& run, const Splits& splits,
                       const Partials& partials) {
  const AttentionParams& p = run.params;
  switch (argument) {
    case Argument::kQuery:
      return pointer("query", p.query);
    case Argument::kKey:
      return pointer("key", p.key);
    case Argument::kValue:
      return pointer("value", p.value);
    case Argument::kPresentKey:
      return pointer("present_key", p.present_key);
    case Argument::kPresentValue:
      return pointer("present_value", p.present_value);
    case Argument::kPresentKeyScale:
      return pointer("present_key_scale", p.present_key_scale);
    case Argument::kPresentValueScale:
      return pointer("present_value_scale", p.present_value_scale);
    case Argument::kAttentionMask:
      return pointer("attention_mask", p.attention_mask);
    case Argument::kCos:
      return pointer("cos", p.cos);
    case Argument::kSin:
      return pointer("sin", p.sin);
    case Argument::kAttentionBias:
      return pointer("attention_bias", p.attention_bias);
    case Argument::kAlibiSlopes:
      return pointer("alibi_slopes", p.alibi_slopes);
    case Argument::kHeadSink:
      return pointer("head_sink", p.head_sink);
    case Argument::kPastSequenceLength:  // one number: it is read alone, wherever it lies
      return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(run.past_sequence_length));
    case Argument::kOutput:
      return pointer("output", p.output);
    case Argument::kPartialOutput:
      return pointer("partial_output", partials.output);
    case Argument::kPartialMaximum:
      return pointer("partial_maximum", partials.maximum);
    case Argument::kPartialSum:
      return pointer("partial_sum", partials.sum);
    case Argument::kQueryTokenStride:
      return stride("query's token stride", p.query_token_stride);
    case Argument::kKeyTokenStride:
      return stride("key's token stride", p.key_token_stride);
    case Argument::kValueTokenStride:
      return stride("value's token stride", p.value_token_stride);
    case Argument::kSequenceLength:
      return integer("sequence_length", p.sequence_length);
    case Argument::kCapacity:
      return integer("the cache's capacity", p.present_capacity);
    case Argument::kMaskWidth:
      return integer("attention_mask's width", p.mask_width);
    case Argument::kNumHeads:
      return integer("num_heads", p.num_heads);
    case Argument::kKvNumHeads:
      return integer("kv_num_heads", p.kv_num_heads);
    case Argument::kRotaryBatchStride:
      return integer("cos's batch stride", p.rotary_batch_stride);
    case Argument::kBiasStrideBatch:
      return integer("attention_bias's batch stride", p.bias_strides[0]);
    case Argument::kBiasStrideHead:
      return integer("attention_bias's head stride", p.bias_strides[1]);
    case Argument::kBiasStrideQuery:
      return integer("attention_bias's query stride", p.bias_strides[2]);
    case Argument::kBiasStrideSlot:
      return integer("attention_bias's slot stride", p.bias_strides[3]);
    case Argument::kWindowSize:
      // More than any capacity is as good as the largest number.
      return integer("window_size", std::min<std::int64_t>(
                                        p.window_size, std::numeric_limits<std::int32_t>::max()));
    case Argument::kNumSplits:
      return integer("num_splits", splits.count);
    case Argument::kSlotsPerSplit:
      return integer("slots_per_split", splits.slots);
    case Argument::kScale:
      return real(p.scale);
    case Argument::kSoftcapValue:
      return real(p.softcap);
  }
  refuse("a kernel takes an unknown argument.");
}

}  // namespace

PackedArguments::PackedArguments(const Kernel& kernel, const Run& run, const Splits& splits,
                                 const Partials& partials) {
  // Little endian: the first bytes of a value are the narrower one, as the driver reads it.
  static_assert(std::endian::native == std::endian::little);
  for (std::size_t i = 0; i < kernel.arguments.size(); ++i) {
    values_[i] = value_of(kernel.arguments[i], run, splits, partials);
  }
  for (std::size_t i = 0; i < kMax; ++i) pointers_[i] = &values_[i];
}

}  // namespace kvconv::cuda
