#include "base/markup.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"

namespace evenkeel {
namespace {

// The code point of a mark, at the head of UTF-8 text, that changes the direction of the text behind it (U+061C, U+200E,
// U+200F, U+202A to U+202E, U+2066 to U+2069). The result is 0 where there is none.
int direction_mark(std::string_view text) {
  const auto byte = [&](size_t n) { return n < text.size() ? static_cast<unsigned char>(text[n]) : 0; };
  if (byte(0) == 0xd8 && byte(1) == 0x9c) return 0x61c;
  if (byte(0) != 0xe2 || (byte(1) & 0xfe) != 0x80) return 0;
  const int code = 0x2000 | (byte(1) & 1) << 6 | (byte(2) & 0x3f);
  const auto between = [&](int low, int high) { return code >= low && code <= high; };
  return between(0x200e, 0x200f) || between(0x202a, 0x202e) || between(0x2066, 0x2069) ? code : 0;
}

}  // namespace

std::string escape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t bad = std::min(find_not_utf8(text), text.size());
    for (size_t n = 0; n < bad; ++n) {
      const char c = text[n];
      const auto byte = static_cast<unsigned char>(c);
      if (const int mark = direction_mark(text.substr(n, bad - n))) {
        out += fmt::format("[U+{:04X}]", mark);
        n += mark == 0x61c ? 1 : 2;
      } else if (c == '&')
        out += "&amp;";
      else if (c == '<')
        out += "&lt;";
      else if (c == '>')
        out += "&gt;";
      else if (c == '"')
        out += "&quot;";
      else if (c == '\'')
        out += "&#39;";
      else if ((byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7f)
        out += "\uFFFD";
      else
        out += c;
    }
    if (bad == text.size()) break;
    out += "\uFFFD";
    text.remove_prefix(bad + 1);
  }
  return out;
}

}  // namespace evenkeel
