// The keys and values of one sequence, for all layers: memory, length, and how a run sees them.
//
// Shared buffers (flash, gqa) are allocated once, and past and present are the same memory; rings
// among them hold their newest tokens. Caches of standard bundles are replaced by longer ones in
// every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "manifest.h"
#include "ort_library.h"

namespace kvconv::runtime {

class KvCache {
 public:
  // Bound to `binding`, which lives as long as this does.
  KvCache(const Manifest& manifest, std::int64_t capacity, ort::IoBinding* binding);

  std::int64_t length() const { return length_; }
  std::int64_t capacity() const { return capacity_; }
  std::int64_t num_bytes() const;

  // Most tokens of one run, so that rings keep what the first of them sees.
  std::int64_t most_new_tokens() const;

  // Least length but 0 that `rewind` takes: of which a ring still holds the window; 0 where it
  // takes all.
  std::int64_t shortest_rewind() const;

  // A run goes prepare_run, the run itself, commit_run; one that fails is not committed. The caller
  // has checked that the new tokens fit.
  void prepare_run(std::int64_t new_tokens);
  void commit_run(std::int64_t new_tokens);

  // Forgets all tokens from `length` on; the caller has checked it.
  void rewind(std::int64_t length);

  // Takes over the tokens of a cache of the same model and capacity.
  void copy_from(const KvCache& source);

 private:
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete[](memory, kAlignment); }
  };
  static constexpr std::align_val_t kAlignment{64};  // suits vector loads

  struct Slot {  // where a tensor belongs
    StoredTensor tensor;
    const CacheLayer* layer;
    std::string past_name, present_name;
  };
  struct Tensor {
    std::unique_ptr<std::byte[], Free> memory;
    std::int64_t slots;
    Value value;
  };

  std::vector<Tensor> new_tensors(std::int64_t slots) const;
  void bind(const std::vector<Tensor>& pasts, const std::vector<Tensor>& presents) const;
  void copy_slots(const std::vector<Tensor>& from, std::vector<Tensor>& to,
                  std::int64_t slots) const;

  const std::int64_t capacity_;
  const bool has_shared_buffer_;
  ort::IoBinding* const binding_;
  std::vector<Slot> slots_;
  std::vector<std::pair<std::int64_t, std::int64_t>> rings_;  // slots, slack: those that can wrap
  std::vector<Tensor> pasts_, presents_;
  std::int64_t length_ = 0;
  std::int64_t most_written_ = 0;  // since it was empty: what a rewind takes back was written too
  std::int32_t past_length_ = 0;   // what rings read
  Value past_length_value_;
};

}  // namespace kvconv::runtime
