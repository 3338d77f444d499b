// Text for complaints.
#pragma once

#include <sstream>
#include <string>

namespace kvconv {

// Joins its arguments into one string.
template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace kvconv
