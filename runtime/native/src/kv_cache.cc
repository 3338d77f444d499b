#include "kv_cache.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "error.h"

namespace kvconv::runtime {

KvCache::KvCache(const Manifest& manifest, std::int64_t capacity, ort::IoBinding* binding)
    : capacity_(capacity), has_shared_buffer_(manifest.has_shared_buffer()), binding_(binding) {
  for (std::size_t i = 0; i < manifest.cache_layers.size(); ++i) {
    const CacheLayer& layer = manifest.cache_layers[i];
    for (const StoredTensor& tensor : layer.stored_tensors()) {
      slots_.push_back({tensor, &layer, text("past_key_values.", i, ".", tensor.name),
                        text("present.", i, ".", tensor.name)});
    }
    // A cache of fewer tokens than a ring has slots never loses one.
    if (layer.slack() && layer.slots(capacity) < capacity)
      rings_.emplace_back(layer.slots(capacity), *layer.slack());
  }
  pasts_ = new_tensors(has_shared_buffer_ ? capacity : 0);
  if (has_shared_buffer_) bind(pasts_, pasts_);
  // Graphs with rings take it, and those for CUDA.
  const auto& inputs = manifest.inputs;
  if (std::find(inputs.begin(), inputs.end(), "past_sequence_length") != inputs.end()) {
    past_length_value_ = make_value(&past_length_, sizeof(past_length_), {1}, ort::kInt32);
    check(ort::bind_input(onnxruntime().api, binding_, "past_sequence_length",
                          past_length_value_.get()));
  }
}

std::int64_t KvCache::num_bytes() const {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i)
    bytes += pasts_[i].slots * slots_[i].tensor.slot_bytes();
  return bytes;
}

std::int64_t KvCache::most_new_tokens() const {
  std::int64_t most = capacity_;
  for (const auto& [slots, slack] : rings_) most = std::min(most, slack + 1);
  return most;
}

std::int64_t KvCache::shortest_rewind() const {
  std::int64_t shortest = 0;
  for (const auto& [slots, slack] : rings_) {
    if (most_written_ > slots) shortest = std::max(shortest, most_written_ - slack - 1);
  }
  return shortest;
}

void KvCache::prepare_run(std::int64_t new_tokens) {
  past_length_ = static_cast<std::int32_t>(length_);
  most_written_ =
      std::max(most_written_, length_ + new_tokens);  // now: a run that fails may have written
  if (has_shared_buffer_) return;
  presents_ = new_tensors(length_ + new_tokens);
  bind(pasts_, presents_);
}

void KvCache::commit_run(std::int64_t new_tokens) {
  length_ += new_tokens;
  if (!has_shared_buffer_) pasts_ = std::move(presents_);
}

void KvCache::rewind(std::int64_t length) {
  if (!has_shared_buffer_ && length < length_) {
    std::vector<Tensor> kept = new_tensors(length);
    copy_slots(pasts_, kept, length);
    pasts_ = std::move(kept);
  }
  length_ = length;
  if (length == 0) most_written_ = 0;
}

void KvCache::copy_from(const KvCache& source) {
  if (!has_shared_buffer_) pasts_ = new_tensors(source.length_);
  copy_slots(source.pasts_, pasts_, source.length_);
  length_ = source.length_;
  most_written_ = source.most_written_;
}

// Does not touch the memory: the system backs a slot only when a token is written to it.
std::vector<KvCache::Tensor> KvCache::new_tensors(std::int64_t slots) const {
  std::vector<Tensor> tensors;
  tensors.reserve(slots_.size());
  for (const Slot& slot : slots_) {
    const std::int64_t own = slot.layer->slots(slots);
    const auto num_bytes = static_cast<std::size_t>(own * slot.tensor.slot_bytes());
    Tensor& tensor = tensors.emplace_back();
    tensor.slots = own;
    tensor.memory.reset(
        static_cast<std::byte*>(::operator new[](std::max<std::size_t>(num_bytes, 1), kAlignment)));
    tensor.value =
        make_value(tensor.memory.get(), num_bytes,
                   {1, slot.tensor.num_heads, own, slot.tensor.width}, slot.tensor.element);
  }
  return tensors;
}

void KvCache::bind(const std::vector<Tensor>& pasts, const std::vector<Tensor>& presents) const {
  const ort::Api* api = onnxruntime().api;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    check(ort::bind_input(api, binding_, slots_[i].past_name.c_str(), pasts[i].value.get()));
    check(ort::bind_output(api, binding_, slots_[i].present_name.c_str(), presents[i].value.get()));
  }
}

// A ring that is full is copied whole.
void KvCache::copy_slots(const std::vector<Tensor>& from, std::vector<Tensor>& to,
                         std::int64_t slots) const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const std::int64_t heads = slots_[i].tensor.num_heads;
    const std::int64_t row = slots_[i].tensor.slot_bytes() / heads;
    const auto copied =
        static_cast<std::size_t>(std::min({slots, from[i].slots, to[i].slots}) * row);
    for (std::int64_t head = 0; head < heads; ++head) {
      std::memcpy(to[i].memory.get() + head * to[i].slots * row,
                  from[i].memory.get() + head * from[i].slots * row, copied);
    }
  }
}

}  // namespace kvconv::runtime
