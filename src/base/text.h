// Text from outside: shown without harm, and checked for UTF-8.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace evenkeel {

// A piece of text for a message: short, and with nothing in it that a terminal would obey.
std::string shown(std::string_view text, size_t longest = 40);

std::string joined(const std::vector<std::string>& words, std::string_view between);

// A word of a shell's command, quoted where it must be.
std::string shell_word(const std::string& text);

// Where the text stops being UTF-8 (RFC 3629: no surrogates, nothing overlong, nothing above U+10FFFF), or
// npos.
size_t find_not_utf8(std::string_view text);
inline bool is_utf8(std::string_view text) { return find_not_utf8(text) == std::string_view::npos; }

// Appends a code point as UTF-8. REQUIRES: code_point <= 0x10FFFF and no surrogate.
void append_utf8(std::string& text, char32_t code_point);

// The name that was probably meant by a misspelt word: the one with the fewest insertions, deletions, replacements and
// swaps of neighbours between them. These may be at most a third of the word's letters (at least one). The answer is ""
// where none is that near, and the first of equals.
std::string_view nearest_name(std::string_view word, std::span<const std::string_view> names);

}  // namespace evenkeel
