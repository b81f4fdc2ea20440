// Text files of matrix products. The first byte picks the operands' format, the rest is the file.
#include "base/mma_files.h"

#include <bit>
#include <bitset>
#include <iterator>

#include "fuzz/fuzz.h"

using namespace evenkeel;

namespace {

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) return false;
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const Format format = kNamedFormats[data[0] % std::size(kNamedFormats)].format;
  const std::string_view text = fuzz::text_of(data + 1, size - 1);
  fuzz::accepts([&] {
    const MmaOperands operands = parse_mma_operands(text, "a.txt", format);
    fuzz::must(operands.rows > 0 && operands.columns > 0 &&
                   operands.values.size() == operands.rows * operands.columns,
               "there are as many numbers as rows and columns say");
    std::string written;
    for (size_t i = 0; i < operands.rows; ++i) {
      for (size_t j = 0; j < operands.columns; ++j)
        written += fmt::format("{:08x} ", std::bit_cast<uint32_t>(operands.row(i)[j]));
      written += "\n";
    }
    const MmaOperands again = parse_mma_operands(written, "a.txt", format);
    fuzz::must(again.rows == operands.rows && again.columns == operands.columns &&
                   same_bits(again.values, operands.values),
               "operands are the same written and read again");
    check_mma_shapes(operands, "a.txt", again, "b.txt", nullptr, "");
  });
  fuzz::accepts([&] {
    const std::vector<float> words = parse_mma_words(text, "c.txt");
    fuzz::must(!words.empty(), "a file of words has a word");
    std::string written;
    for (float word : words) written += std::bitset<32>(std::bit_cast<uint32_t>(word)).to_string() + "\n";
    fuzz::must(same_bits(parse_mma_words(written, "c.txt"), words),
               "words are the same written and read again");
  });
  return 0;
}
