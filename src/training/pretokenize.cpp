#include "training/pretokenize.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <span>

#include "training/unicode_tables.h"

namespace evenkeel {
namespace {

uint8_t byte_at(std::string_view text, size_t at) { return static_cast<uint8_t>(text[at]); }

constexpr bool contains(std::span<const CodePointRange> ranges, uint32_t point) {
  const auto next = std::upper_bound(ranges.begin(), ranges.end(), point,
                                     [](uint32_t p, const CodePointRange& range) { return p < range.first; });
  return next != ranges.begin() && point <= std::prev(next)->last;
}

constexpr CharacterKind kind_of(uint32_t point) {
  if (contains(kLetterRanges, point)) return CharacterKind::letter;
  if (contains(kNumberRanges, point)) return CharacterKind::number;
  return contains(kSpaceRanges, point) ? CharacterKind::space : CharacterKind::other;
}

constexpr uint8_t kFirstBeyondAscii = 0x80;

constexpr std::array<CharacterKind, kFirstBeyondAscii> kAsciiKinds = [] {
  std::array<CharacterKind, kFirstBeyondAscii> kinds{};
  for (uint32_t point = 0; point < kinds.size(); ++point) kinds[point] = kind_of(point);
  return kinds;
}();

// The bytes of the well-formed UTF-8 sequence at text[at] and its code point; 0 bytes: there is none.
struct Decoded {
  uint8_t bytes;
  uint32_t point;
};
Decoded decode(std::string_view text, size_t at) {
  const uint8_t lead = byte_at(text, at);
  const uint8_t bytes = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (bytes == 0 || bytes > text.size() - at) return {0, 0};
  uint32_t point = lead & (0x7Fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    const uint8_t next = byte_at(text, at + i);
    if ((next & 0xC0) != 0x80) return {0, 0};
    point = point << 6 | (next & 0x3Fu);
  }
  const bool overlong = (bytes == 3 && point < 0x800) || (bytes == 4 && point < 0x10000);
  const bool surrogate = point >= 0xD800 && point < 0xE000;
  if (overlong || surrogate || point > 0x10FFFF) return {0, 0};
  return {bytes, point};
}

// The length of 's 't 're 've 'm 'll 'd at text[at], which is an apostrophe; 0: none of them.
size_t contraction(std::string_view text, size_t at) {
  const char first = at + 1 < text.size() ? text[at + 1] : '\0';
  const char second = at + 2 < text.size() ? text[at + 2] : '\0';
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l'))
    return 3;
  return 0;
}

// The end of the run of characters of one kind.
size_t run_end(std::string_view text, size_t at, CharacterKind kind) {
  while (at < text.size()) {
    const Character next = character_at(text, at);
    if (next.kind != kind) break;
    at += next.bytes;
  }
  return at;
}

// The first safe cut in bytes [index * stride, (index + 1) * stride), or the text's size.
size_t find_cut(std::string_view text, size_t stride, size_t index) {
  if (index == 0) return 0;
  const size_t begin = index * stride, end = std::min(text.size(), begin + stride);
  for (size_t at = begin; at < end; ++at)
    if (is_safe_cut(text, at)) return at;
  return text.size();
}

}  // namespace

Character character_at(std::string_view text, size_t at) {
  const uint8_t lead = byte_at(text, at);
  if (lead < kFirstBeyondAscii) return {kAsciiKinds[lead], 1};
  const Decoded decoded = decode(text, at);
  if (decoded.bytes == 0) return {CharacterKind::other, 1};
  return {kind_of(decoded.point), decoded.bytes};
}

size_t word_end(std::string_view text, size_t begin) {
  if (text[begin] == '\'')
    if (const size_t length = contraction(text, begin)) return begin + length;
  const Character first = character_at(text, begin);
  if (first.kind != CharacterKind::space) return run_end(text, begin + first.bytes, first.kind);
  const size_t second = begin + first.bytes;
  if (second == text.size()) return second;
  const Character next = character_at(text, second);
  if (next.kind !=
      CharacterKind::space)  // one blank goes with the word after it; other white space stays alone
    return text[begin] == ' ' ? run_end(text, second + next.bytes, next.kind) : second;
  // A run of white space leaves its last character to what follows.
  size_t last = second, end = second + next.bytes;
  while (end < text.size()) {
    const Character more = character_at(text, end);
    if (more.kind != CharacterKind::space) return last;
    last = end;
    end += more.bytes;
  }
  return end;
}

bool is_safe_cut(std::string_view text, size_t at) {
  if (at == 0 || at >= text.size() || character_at(text, at).kind != CharacterKind::space) return false;
  // Backwards to the byte that would lead the character before: no other reading of those bytes has one there.
  constexpr size_t kMostBytes = 4;
  for (size_t back = 1; back <= std::min(at, kMostBytes); ++back) {
    if ((byte_at(text, at - back) & 0xC0) == 0x80) continue;
    const Character before = character_at(text, at - back);
    return before.bytes != back || before.kind != CharacterKind::space;
  }
  return true;  // a byte that continues nothing
}

size_t piece_count(size_t text_size, size_t stride) { return (text_size + stride - 1) / stride; }

Piece find_piece(std::string_view text, size_t stride, size_t index) {
  const size_t begin = find_cut(text, stride, index);
  size_t end = text.size();
  if (begin < end)
    for (size_t next = index + 1; next < piece_count(text.size(), stride) && end == text.size(); ++next)
      end = find_cut(text, stride, next);
  return {begin, end};
}

}  // namespace evenkeel
