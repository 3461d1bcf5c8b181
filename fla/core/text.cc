#include "fla/core/text.h"

#include <cstddef>

namespace fla {
namespace {

// Bytes of the character of UTF-8 that `text` starts with; 0 where it is none.
std::size_t character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t n = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < n) return 0;
  for (std::size_t i = 1; i < n; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  const bool overlong = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xf0 && byte(1) < 0x90);
  const bool beyond = (first == 0xed && byte(1) >= 0xa0) || (first == 0xf4 && byte(1) >= 0x90);
  return overlong || beyond ? 0 : n;
}

}  // namespace

std::string printable(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string s;
  const auto escape = [&s](unsigned char byte) {
    s += "\\x";
    s += kHex[byte >> 4];
    s += kHex[byte & 0xf];
  };
  while (!text.empty()) {
    const std::size_t n = character(text);
    const auto c = static_cast<unsigned char>(text[0]);
    const bool control = c < 0x20 || c == 0x7f;
    // U+0080 to U+009f: terminals take them for commands too.
    const bool high_control = n == 2 && c == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0;
    if (c == '\n') {
      s += "\\n";
    } else if (c == '\t') {
      s += "\\t";
    } else if (c == '\r') {
      s += "\\r";
    } else if (n == 0 || control) {
      escape(c);
    } else if (high_control) {
      escape(c);
      escape(static_cast<unsigned char>(text[1]));
    } else {
      s += text.substr(0, n);
    }
    text.remove_prefix(n == 0 ? 1 : n);
  }
  return s;
}

}  // namespace fla
