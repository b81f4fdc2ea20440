#include "base/mma_files.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/text.h"
#include "numerics/rounding.h"

namespace evenkeel {
namespace {

constexpr std::string_view kSpaces = " \t\r";

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpaces);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpaces) - first + 1);
}

// The text's lines without spaces around them; empty ones at the end are dropped.
std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    lines.push_back(trimmed(text.substr(start, end - start)));
    start = end + 1;
  }
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

// A word of exactly `digits` digits. False: it is none.
bool parse_word(std::string_view word, size_t digits, int base, uint32_t& bits) {
  if (word.size() != digits) return false;
  const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), bits, base);
  return error == std::errc() && stop == word.data() + word.size();
}

bool is_of_format(Format format, float value) {
  return std::isnan(value) || round_to({.format = format}, value) == value;
}

}  // namespace

MmaOperands parse_mma_operands(std::string_view text, std::string_view file, Format format) {
  const std::vector<std::string_view> lines = lines_of(text);
  require_data(!lines.empty(), "{}: expected rows of FP32 words, found an empty file", file);
  MmaOperands operands;
  operands.rows = lines.size();
  for (size_t i = 0; i < lines.size(); ++i) {
    size_t columns = 0;
    for (std::string_view rest = lines[i]; !rest.empty(); ++columns) {
      const std::string_view word = rest.substr(0, rest.find_first_of(kSpaces));
      uint32_t bits = 0;
      require_data(parse_word(word, 8, 16, bits),
                   "{}:{}: expected FP32 words of 8 hexadecimal digits, found '{}'", file, i + 1,
                   shown(word));
      const auto value = std::bit_cast<float>(bits);
      require_data(is_of_format(format, value),
                   "{}:{}: expected numbers of {}, found '{}' ({}), which is none", file, i + 1,
                   to_string(format), word, value);
      operands.values.push_back(value);
      rest = trimmed(rest.substr(word.size()));
    }
    if (i == 0) operands.columns = columns;
    require_data(columns == operands.columns, "{}:{}: expected {} words as on line 1, found {}", file, i + 1,
                 operands.columns, columns);
  }
  // Leading empty lines would make rows of nothing.
  require_data(operands.columns > 0, "{}:1: expected FP32 words of 8 hexadecimal digits, found an empty line",
               file);
  return operands;
}

std::vector<float> parse_mma_words(std::string_view text, std::string_view file) {
  const std::vector<std::string_view> lines = lines_of(text);
  require_data(!lines.empty(), "{}: expected lines of one FP32 word, found an empty file", file);
  std::vector<float> words;
  for (size_t i = 0; i < lines.size(); ++i) {
    uint32_t bits = 0;
    require_data(parse_word(lines[i], 32, 2, bits),
                 "{}:{}: expected an FP32 word of 32 binary digits, found '{}'", file, i + 1,
                 shown(lines[i]));
    words.push_back(std::bit_cast<float>(bits));
  }
  return words;
}

void check_mma_shapes(const MmaOperands& a, std::string_view a_file, const MmaOperands& b,
                      std::string_view b_file, const std::vector<float>* c, std::string_view c_file) {
  require_data(b.rows == a.rows, "{}: expected {} rows as in {}, found {}", b_file, a.rows, a_file, b.rows);
  require_data(b.columns == a.columns, "{}: expected {} words a row as in {}, found {}", b_file, a.columns,
               a_file, b.columns);
  if (c)
    require_data(c->size() == a.rows, "{}: expected {} rows as in {}, found {}", c_file, a.rows, a_file,
                 c->size());
}

}  // namespace evenkeel
