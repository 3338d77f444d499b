// Elements that a kernel reads or writes, in memory of their exact size.
#pragma once

#include <cstring>
#include <memory>

#include "check.h"
#include "kvconv/cache_format.h"

namespace kvconv::test {

// Memory of exactly the elements asked for, so that AddressSanitizer sees one element too far. Of
// quantised caches an element is a byte.
class Buffer {
 public:
  Buffer(std::int64_t elements, DataType type)
      : type_(type),
        bytes_(static_cast<std::size_t>(is_quantized(type) ? elements : elements * bytes_of(type))),
        data_(new unsigned char[bytes_]) {
    std::memset(data_.get(), 0xFF, bytes_);  // NaN in all three types
  }
  Buffer(const Buffer& other)
      : type_(other.type_), bytes_(other.bytes_), data_(new unsigned char[bytes_]) {
    std::memcpy(data_.get(), other.data_.get(), bytes_);
  }
  void randomize(Random& random) {
    if (is_quantized(type_)) {
      for (std::size_t i = 0; i < bytes_; ++i) {
        data_[i] = static_cast<unsigned char>(random.below(256));
      }
      return;
    }
    for (std::int64_t i = 0; i < size(); ++i) store_element(data(), i, type_, random.normal());
  }
  std::int64_t size() const { return static_cast<std::int64_t>(bytes_) / bytes_of(type_); }
  std::size_t bytes() const { return bytes_; }
  void* data() const { return data_.get(); }

 private:
  DataType type_;
  std::size_t bytes_;
  std::unique_ptr<unsigned char[]> data_;
};

}  // namespace kvconv::test
