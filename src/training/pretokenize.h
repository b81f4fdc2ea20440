// GPT-2's splitting of text into words, before any merging of bytes. Its pattern, tried from left to right at
// every position, is
//     `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
// Text is any bytes. What is not UTF-8 is data all the same: each such byte is a character of its own that is
// neither letter nor number nor white space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace evenkeel {

enum class CharacterKind : uint8_t { other, letter, number, space };

struct Character {
  CharacterKind kind;
  uint8_t bytes;  // 1 to 4
};

// The character at text[at]. REQUIRES: at < text.size().
Character character_at(std::string_view text, size_t at);

// The end of the word that begins at text[begin]; words follow each other without gaps.
// REQUIRES: begin < text.size(), and a word begins there.
size_t word_end(std::string_view text, size_t begin);

// Is text[at] a white-space character after one that is not? A word ends there whatever comes before and after,
// so the two sides can be split into words, and encoded, apart: how text is shared between threads.
bool is_safe_cut(std::string_view text, size_t at);

// A text shared in pieces. Each piece can be found without looking at those before it. Piece i begins at
// the first safe cut in bytes [i * stride, (i + 1) * stride) and ends where the next piece begins. Without
// such a cut it is empty, and an earlier piece takes its bytes.
struct Piece {
  size_t begin, end;
};
size_t piece_count(size_t text_size, size_t stride);
Piece find_piece(std::string_view text, size_t stride, size_t index);

}  // namespace evenkeel
