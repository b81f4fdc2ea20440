#include "base/text.h"

#include <algorithm>
#include <cctype>

namespace evenkeel {

std::string shown(std::string_view text, size_t longest) {
  std::string safe;
  for (const char c : text.substr(0, longest)) safe += c < ' ' || c > '~' ? '?' : c;
  return safe + (text.size() > longest ? "..." : "");
}

size_t find_not_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t k) { return static_cast<unsigned char>(text[k]); };
    const unsigned lead = byte(i);
    const size_t length = lead < 0x80 ? 1 : lead >> 5 == 0b110 ? 2 : lead >> 4 == 0b1110 ? 3 : 4;
    if (length == 4 && lead >> 3 != 0b11110) return i;
    if (length > text.size() - i) return i;
    char32_t point = length == 1 ? lead : lead & (0xFFu >> (length + 1));
    for (size_t k = 1; k < length; ++k) {
      if (byte(i + k) >> 6 != 0b10) return i;
      point = point << 6 | (byte(i + k) & 0x3F);
    }
    constexpr char32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};  // that needs so many bytes
    if (point < kSmallest[length] || point > 0x10FFFF || (point >= 0xD800 && point <= 0xDFFF)) return i;
    i += length;
  }
  return std::string_view::npos;
}

void append_utf8(std::string& text, char32_t code_point) {
  const auto add = [&](char32_t byte) { text += static_cast<char>(byte); };
  const auto add_rest = [&](int shift) {
    for (; shift >= 0; shift -= 6) add(0x80 | (code_point >> shift & 0x3F));
  };
  if (code_point < 0x80) {
    add(code_point);
  } else if (code_point < 0x800) {
    add(0xC0 | code_point >> 6);
    add_rest(0);
  } else if (code_point < 0x10000) {
    add(0xE0 | code_point >> 12);
    add_rest(6);
  } else {
    add(0xF0 | code_point >> 18);
    add_rest(12);
  }
}

std::string shell_word(const std::string& text) {
  const bool is_plain = !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) ||
           std::string_view("_-./,:=@+").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (is_plain) return text;
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace evenkeel
