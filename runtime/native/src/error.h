// The one exception of the runtime, and how its texts are put together.
#pragma once

#include <cstdint>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <string>

#include "kvconv.h"

namespace kvconv::runtime {

// A failure that the caller may learn about: a code, and a text of complete sentences.
class Error : public std::runtime_error {
 public:
  Error(kvconv_code code, const std::string& text) : std::runtime_error(text), code(code) {}

  const kvconv_code code;
};

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
[[noreturn]] void fail(kvconv_code code, const Parts&... parts) {
  throw Error(code, text(parts...));
}

// The path that UTF-8 names.
inline std::filesystem::path utf8_path(const std::string& path) {
  return std::filesystem::path(std::u8string(path.begin(), path.end()));
}

// A path in UTF-8, for texts.
inline std::string shown(const std::filesystem::path& path) {
  const std::u8string name = path.u8string();
  return {name.begin(), name.end()};
}

// A number with commas between its thousands.
inline std::string grouped(std::int64_t number) {
  std::string digits = std::to_string(number);
  for (int place = static_cast<int>(digits.size()) - 3; place > (number < 0 ? 1 : 0); place -= 3) {
    digits.insert(static_cast<std::size_t>(place), 1, ',');
  }
  return digits;
}

}  // namespace kvconv::runtime
