#include "base/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <vector>

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

namespace {

// Damerau's distance with swaps of neighbours that are not touched again. O(|a| |b|).
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i)
    for (size_t k = 0; k <= b.size(); ++k) {
      if (i == 0 || k == 0) {
        cost[i][k] = i + k;
        continue;
      }
      const size_t change = a[i - 1] == b[k - 1] ? 0 : 1;
      cost[i][k] = std::min({cost[i - 1][k] + 1, cost[i][k - 1] + 1, cost[i - 1][k - 1] + change});
      if (i > 1 && k > 1 && a[i - 1] == b[k - 2] && a[i - 2] == b[k - 1])
        cost[i][k] = std::min(cost[i][k], cost[i - 2][k - 2] + 1);
    }
  return cost[a.size()][b.size()];
}

}  // namespace

std::string_view nearest_name(std::string_view word, std::span<const std::string_view> names) {
  constexpr size_t kLongest = 64;  // bytes; a longer word is no misspelling
  if (word.size() > kLongest) return {};
  std::string_view best;
  size_t allowed = std::max<size_t>(1, word.size() / 3) + 1;  // one more than may differ
  for (const std::string_view name : names)
    if (const size_t distance = edit_distance(word, name); distance < allowed) {
      allowed = distance;
      best = name;
    }
  return best;
}

std::string joined(const std::vector<std::string>& words, std::string_view between) {
  return fmt::format("{}", fmt::join(words, between));
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
