// SHA-256 (FIPS 180-4), for files that must be what they were when they were written.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvconv::cuda {

std::array<std::uint8_t, 32> sha256(std::span<const std::uint8_t> bytes);

}  // namespace kvconv::cuda
