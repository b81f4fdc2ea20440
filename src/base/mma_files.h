// Text files of matrix products, one row a line, as tensor-core results are published: operands as FP32 words
// in hexadecimal, addends and results as FP32 words in binary digits. Takes text, reads no files. Every fault
// is a DataError that names the file, the line, what was expected and what was found.
#pragma once

#include <string_view>
#include <vector>

#include "numerics/format.h"

namespace evenkeel {

struct MmaOperands {
  size_t rows = 0, columns = 0;
  std::vector<float> values;  // (rows, columns)

  const float* row(size_t index) const { return values.data() + index * columns; }
};

// Lines of words of 8 hexadecimal digits, separated by spaces; as many on each line. Every word must be a
// number of the format, an infinity it has, or NaN. Empty lines are allowed at the end alone.
MmaOperands parse_mma_operands(std::string_view text, std::string_view file, Format format);

// Lines of one word of 32 binary digits each; any FP32 value.
std::vector<float> parse_mma_words(std::string_view text, std::string_view file);

// What belongs to one product must fit together: as many rows and columns in b as in a, as many words in c as
// a has rows (or no c at all: nullptr).
void check_mma_shapes(const MmaOperands& a, std::string_view a_file, const MmaOperands& b,
                      std::string_view b_file, const std::vector<float>* c, std::string_view c_file);

}  // namespace evenkeel
