// SHA-256 (FIPS 180-4), for the checksums of a bundle.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvconv::runtime {

class Sha256 {
 public:
  void update(std::string_view bytes);

  // Returns the digest as 64 hexadecimal digits; nothing may follow.
  std::string digest();

 private:
  void block(const unsigned char* bytes);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> held_ = {};
  std::size_t num_held_ = 0;
  std::uint64_t num_bytes_ = 0;
};

}  // namespace kvconv::runtime
