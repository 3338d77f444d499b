// A strict reader of JSON (RFC 8259) for files that somebody else may have written.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace kvconv::runtime {

// One value. Whole numbers that fit are int64, all others double.
struct Json {
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json, std::less<>>;

  std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Array, Object> value;

  template <typename Type>
  const Type* get() const {
    return std::get_if<Type>(&value);
  }
};

// Reads a whole document. Refused, with a std::runtime_error that says where: anything behind the
// value, bytes that are not UTF-8, a key twice, lone surrogates, more than 64 levels. NaN and
// Infinity are read, because Python's json module writes them.
Json parse_json(std::string_view document);

// Returns the text of a member of the object that a document is, without reading the others; empty
// where it is absent. For large files, of which little is needed.
std::string_view find_member(std::string_view document, std::string_view name);

// Returns a string as JSON, quotes included.
std::string quote_json(std::string_view text);

// Returns whether bytes are UTF-8: shortest forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(std::string_view bytes);

}  // namespace kvconv::runtime
