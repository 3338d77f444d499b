#include "json.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <utility>

namespace kvconv::runtime {
namespace {

constexpr int kMostLevels = 64;

class Reader {
 public:
  explicit Reader(std::string_view document) : rest_(document), size_(document.size()) {}

  Json document() {
    Json value = read(0);
    skip_space();
    if (!rest_.empty()) refuse("something follows the value");
    return value;
  }

  std::string_view member(std::string_view name) {
    skip_space();
    if (!take("{")) refuse("not an object");
    skip_space();
    if (take("}")) return {};
    do {
      skip_space();
      if (!take("\"")) refuse("a key is missing");
      const std::string key = read_string();
      skip_space();
      if (!take(":")) refuse("a colon is missing");
      skip_space();
      const std::string_view value = rest_;
      skip();
      if (key == name) return value.substr(0, value.size() - rest_.size());
      skip_space();
    } while (take(","));
    return {};
  }

 private:
  [[noreturn]] void refuse(const char* what) const {
    throw std::runtime_error(std::string(what) + " at byte " +
                             std::to_string(size_ - rest_.size()));
  }

  void skip_space() {
    const std::size_t end = rest_.find_first_not_of(" \t\r\n");
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end);
  }

  bool take(std::string_view token) {
    if (rest_.substr(0, token.size()) != token) return false;
    rest_.remove_prefix(token.size());
    return true;
  }

  // Skips a value; what is inside is not checked but for strings and brackets.
  void skip() {
    int depth = 0;
    do {
      const std::size_t next = rest_.find_first_of(depth == 0 ? "\"{}[],: \t\r\n" : "\"{}[]");
      if (next != 0 && depth == 0) return rest_.remove_prefix(std::min(next, rest_.size()));
      if (next == std::string_view::npos) refuse("a value does not end");
      const char found = rest_[next];
      rest_.remove_prefix(next + 1);
      if (found == '"') skip_string();
      if (found == '{' || found == '[') ++depth;
      if (found == '}' || found == ']') --depth;
    } while (depth > 0);
  }

  void skip_string() {
    while (true) {
      const std::size_t next = rest_.find_first_of("\"\\");
      if (next == std::string_view::npos) refuse("a string does not end");
      const bool is_end = rest_[next] == '"';
      rest_.remove_prefix(std::min(next + (is_end ? 1 : 2), rest_.size()));
      if (is_end) return;
    }
  }

  Json read(int level) {
    if (level == kMostLevels) refuse("more than 64 levels");
    skip_space();
    if (take("{")) return {read_object(level)};
    if (take("[")) return {read_array(level)};
    if (take("\"")) return {read_string()};
    if (take("true")) return {true};
    if (take("false")) return {false};
    if (take("null")) return {nullptr};
    if (take("NaN")) return {std::numeric_limits<double>::quiet_NaN()};
    if (take("Infinity")) return {std::numeric_limits<double>::infinity()};
    if (take("-Infinity")) return {-std::numeric_limits<double>::infinity()};
    return read_number();
  }

  Json::Object read_object(int level) {
    Json::Object object;
    skip_space();
    if (take("}")) return object;
    do {
      skip_space();
      if (!take("\"")) refuse("a key is missing");
      std::string key = read_string();
      skip_space();
      if (!take(":")) refuse("a colon is missing");
      if (!object.emplace(std::move(key), read(level + 1)).second) refuse("a key occurs twice");
      skip_space();
    } while (take(","));
    if (!take("}")) refuse("an object does not end");
    return object;
  }

  Json::Array read_array(int level) {
    Json::Array array;
    skip_space();
    if (take("]")) return array;
    do {
      array.push_back(read(level + 1));
      skip_space();
    } while (take(","));
    if (!take("]")) refuse("an array does not end");
    return array;
  }

  std::string read_string() {
    std::string text;
    while (!rest_.empty()) {
      const char next = rest_.front();
      if (static_cast<unsigned char>(next) < 0x20) refuse("a control character in a string");
      rest_.remove_prefix(1);
      if (next == '"') return text;
      if (next != '\\') {
        text.push_back(next);
        continue;
      }
      if (rest_.empty()) break;
      const char escape = rest_.front();
      rest_.remove_prefix(1);
      static constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
      const std::size_t known = kEscapes.find(escape);
      if (known != std::string_view::npos) {
        text.push_back(kMeanings[known]);
      } else if (escape == 'u') {
        append_utf8(read_code_point(), text);
      } else {
        refuse("an unknown escape");
      }
    }
    refuse("a string does not end");
  }

  unsigned read_hex4() {
    unsigned unit = 0;
    const char* begin = rest_.data();
    if (rest_.size() < 4 || std::from_chars(begin, begin + 4, unit, 16).ptr != begin + 4) {
      refuse("an escape of other than four digits");
    }
    rest_.remove_prefix(4);
    return unit;
  }

  unsigned read_code_point() {
    const unsigned unit = read_hex4();
    if (unit < 0xD800 || unit > 0xDFFF) return unit;
    if (unit > 0xDBFF || !take("\\u")) refuse("a lone surrogate");
    const unsigned low = read_hex4();
    if (low < 0xDC00 || low > 0xDFFF) refuse("a lone surrogate");
    return 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
  }

  static void append_utf8(unsigned code, std::string& text) {
    const auto tail = [&](int shift) {
      text.push_back(static_cast<char>(0x80 | ((code >> shift) & 0x3F)));
    };
    if (code < 0x80) {
      text.push_back(static_cast<char>(code));
    } else if (code < 0x800) {
      text.push_back(static_cast<char>(0xC0 | (code >> 6)));
      tail(0);
    } else if (code < 0x10000) {
      text.push_back(static_cast<char>(0xE0 | (code >> 12)));
      tail(6);
      tail(0);
    } else {
      text.push_back(static_cast<char>(0xF0 | (code >> 18)));
      tail(12);
      tail(6);
      tail(0);
    }
  }

  std::size_t digits(std::size_t from) const {
    std::size_t end = from;
    while (end < rest_.size() && rest_[end] >= '0' && rest_[end] <= '9') ++end;
    if (end == from) refuse("a value is missing");
    return end;
  }

  Json read_number() {
    const std::size_t sign = !rest_.empty() && rest_.front() == '-';
    std::size_t end = digits(sign);
    if (end > sign + 1 && rest_[sign] == '0') refuse("a number begins with 0");
    bool is_whole = true;
    if (end < rest_.size() && rest_[end] == '.') {
      end = digits(end + 1);
      is_whole = false;
    }
    if (end < rest_.size() && (rest_[end] == 'e' || rest_[end] == 'E')) {
      const bool has_sign =
          end + 1 < rest_.size() && (rest_[end + 1] == '+' || rest_[end + 1] == '-');
      end = digits(end + 1 + has_sign);
      is_whole = false;
    }
    const std::string number(rest_.substr(0, end));
    rest_.remove_prefix(end);
    std::int64_t whole = 0;
    if (is_whole && std::from_chars(number.data(), number.data() + end, whole).ec == std::errc()) {
      return {whole};
    }
    return {
        std::strtod(number.c_str(), nullptr)};  // a number too large is an infinity, as in Python
  }

  std::string_view rest_;
  const std::size_t size_;
};

}  // namespace

Json parse_json(std::string_view document) {
  if (!is_utf8(document)) throw std::runtime_error("not UTF-8");
  return Reader(document).document();
}

std::string_view find_member(std::string_view document, std::string_view name) {
  return Reader(document).member(name);
}

std::string quote_json(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string quoted = "\"";
  for (const char character : text) {
    const auto code = static_cast<unsigned char>(character);
    if (code < 0x20) {
      quoted += "\\u00";
      quoted += kHex[code >> 4];
      quoted += kHex[code & 15];
      continue;
    }
    if (character == '"' || character == '\\') quoted += '\\';
    quoted += character;
  }
  return quoted + "\"";
}

bool is_utf8(std::string_view bytes) {
  for (std::size_t i = 0; i < bytes.size();) {
    const auto lead = static_cast<unsigned char>(bytes[i]);
    const std::size_t length = lead < 0x80   ? 1
                               : lead < 0xC2 ? 0
                               : lead < 0xE0 ? 2
                               : lead < 0xF0 ? 3
                               : lead < 0xF5 ? 4
                                             : 0;
    if (length == 0 || i + length > bytes.size()) return false;
    for (std::size_t j = 1; j < length; ++j) {
      if ((static_cast<unsigned char>(bytes[i + j]) & 0xC0) != 0x80) return false;
    }
    const auto second = length > 1 ? static_cast<unsigned char>(bytes[i + 1]) : 0;
    const bool is_overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
    const bool is_outside = (lead == 0xED && second > 0x9F) || (lead == 0xF4 && second > 0x8F);
    if (is_overlong || is_outside) return false;
    i += length;
  }
  return true;
}

}  // namespace kvconv::runtime
