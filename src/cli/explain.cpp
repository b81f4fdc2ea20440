// `evenkeel explain`: one operation, one sum, or files of tensor-core products, bit by bit.
#include "numerics/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "attention/precision_plan.h"
#include "base/error.h"
#include "base/mma_files.h"
#include "base/whole_file.h"
#include "cli/options.h"
#include "numerics/explain_block.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ExplainCommand {
  std::vector<std::string> words;
  std::string to, in, mode, accumulate, mma, chip, file_a, file_b, file_c;
  int64_t row = 0;  // 0: all
  int64_t seed = 0;
  bool json = false;
};

// Of operands, nine bytes a number. A pipe is read, too, and a device may never end.
constexpr size_t kMostText = size_t{1} << 28;

Rounding rounding_of(const std::string& text, const std::string& mode) {
  Rounding rounding = parse_rounding(text);
  if (mode.empty()) return rounding;
  const RoundingMode parsed = parse_rounding_mode(mode);
  require(rounding.mode == RoundingMode::nearest_even || rounding.mode == parsed,
          "--mode {} contradicts the mode in '{}': give one of them", mode, text);
  rounding.mode = parsed;
  return rounding;
}

Format mma_format(const std::string& name) {
  for (const NamedFormat& row : kNamedFormats)
    if (row.name == name && row.format != kFp32) return row.format;
  throw std::invalid_argument(
      fmt::format("unknown operand format '{}' for --mma: expected bf16, fp16, tf32, e4m3 or e5m2", name));
}

// Numbers that share scales, as one row of a matrix: separated by spaces or commas.
int explain_shared(const ExplainCommand& command, const Rounding& rounding) {
  require(command.in.empty() && command.accumulate.empty() && command.mma.empty() && command.chip.empty() &&
              rounding.mode != RoundingMode::stochastic,
          "--in, --accumulate, --mma, --chip and stochastic rounding do not go with a shared scale");
  std::string text;
  for (const std::string& word : command.words) text += word + " ";
  std::replace(text.begin(), text.end(), ',', ' ');
  std::vector<float> values;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const std::vector<ExpressionTerm> terms = parse_expression(word);
    require(terms.size() == 1 && !terms[0].b && std::isfinite(terms[0].a.value),
            "expected finite numbers with --to {}, found '{}'", command.to, word);
    values.push_back(terms[0].a.value);
  }
  const BlockExplanation explanation = explain_block(rounding, values);
  fmt::print("{}", command.json ? to_json(explanation) + "\n" : to_text(explanation));
  return 0;
}

int explain_expression(const ExplainCommand& command) {
  const bool tensor_core = command.accumulate == name(Accumulate::tensor_core) || !command.mma.empty();
  require(
      command.accumulate.empty() || tensor_core || command.accumulate == name(Accumulate::fp32_sequential),
      "unknown --accumulate '{}': expected {} or {}", command.accumulate, name(Accumulate::fp32_sequential),
      name(Accumulate::tensor_core));
  require(command.mma.empty() || command.accumulate.empty() ||
              command.accumulate == name(Accumulate::tensor_core),
          "--mma is a tensor core's sum: it does not go with --accumulate {}", command.accumulate);
  require(command.chip.empty() || tensor_core, "--chip needs --mma or --accumulate tensor_core");
  require(command.in.empty() || !tensor_core, "--in does not go with a tensor core, which decides by itself");
  require(command.file_b.empty() && command.file_c.empty() && command.row == 0,
          "--file-b, --file-c and --row need --mma and --file-a");

  ExplainOptions options;
  options.seed = static_cast<uint64_t>(command.seed);
  // --mode is that of the last rounding; another one's is written with its format, as in --in
  // fp32/toward_zero.
  const std::string no_mode;
  const bool has_to = !command.to.empty();
  require(command.mode.empty() || has_to || !tensor_core,
          "--mode needs --to with a tensor core, which truncates");
  options.in = rounding_of(command.in.empty() ? "fp32" : command.in, has_to ? no_mode : command.mode);
  if (has_to) options.to = rounding_of(command.to, command.mode);
  if (tensor_core)
    options.tensor_core = &find_tensor_core_model(command.mma.empty() ? kBf16 : mma_format(command.mma),
                                                  command.chip.empty() ? kDefaultChip : command.chip);

  std::string text;
  for (const std::string& word : command.words) text += (text.empty() ? "" : " ") + word;
  const Explanation explanation = explain(parse_expression(text), options);
  fmt::print("{}", command.json ? to_json(explanation) + "\n" : to_text(explanation, use_colour()));
  return 0;
}

int explain_files(const ExplainCommand& command) {
  require(!command.mma.empty(), "--file-a needs --mma FORMAT");
  require(!command.file_b.empty(), "--mma with --file-a needs --file-b too");
  require(command.words.empty(), "unexpected '{}': with --file-a there is no expression",
          command.words.empty() ? "" : command.words[0]);
  require(command.to.empty() && command.in.empty() && command.mode.empty() && command.accumulate.empty(),
          "--to, --in, --mode and --accumulate do not go with --file-a: results are FP32, as the tensor core "
          "leaves them");
  const Format format = mma_format(command.mma);
  const TensorCoreModel& model =
      find_tensor_core_model(format, command.chip.empty() ? kDefaultChip : command.chip);

  const MmaOperands a =
      parse_mma_operands(read_whole_file(command.file_a, kMostText), command.file_a, format);
  const MmaOperands b =
      parse_mma_operands(read_whole_file(command.file_b, kMostText), command.file_b, format);
  std::vector<float> c;
  if (!command.file_c.empty())
    c = parse_mma_words(read_whole_file(command.file_c, kMostText), command.file_c);
  check_mma_shapes(a, command.file_a, b, command.file_b, command.file_c.empty() ? nullptr : &c,
                   command.file_c);
  require(command.row <= static_cast<int64_t>(a.rows), "--row {}: expected 1 to {}, the rows of {}",
          command.row, a.rows, command.file_a);
  const auto addend = [&](size_t row) { return c.empty() ? 0.0f : c[row]; };

  if (command.row > 0) {
    const size_t row = static_cast<size_t>(command.row) - 1;
    const TensorCoreTrace trace =
        tensor_core_trace(model, {a.row(row), a.columns}, {b.row(row), b.columns}, addend(row));
    fmt::print("{}", command.json ? to_json(trace) + "\n" : to_text(trace, use_colour()));
    return 0;
  }
  std::string text;
  Json results = Json::array();
  for (size_t row = 0; row < a.rows; ++row) {
    const float result = tensor_core_dot(model, a.row(row), b.row(row), a.columns, addend(row));
    const std::string word = fmt::format("{:08x}", std::bit_cast<uint32_t>(result));
    if (command.json)
      results.push_back(word);
    else
      text += word + "\n";
  }
  if (command.json)
    text =
        Json{{"chip", model.chip}, {"operand", to_string(format)}, {"results", std::move(results)}}.dump() +
        "\n";
  fmt::print("{}", text);
  return 0;
}

}  // namespace

int run_explain(int argc, char** argv) {
  ExplainCommand command;
  Options options(
      "explain EXPRESSION [options]\n       evenkeel explain --mma FORMAT --file-a A --file-b B [--file-c C] "
      "[options]",
      "Shows one operation, or a whole sum, bit by bit: alignment, carry, what each rounding keeps and cuts "
      "off, and\n"
      "the signed error. EXPRESSION is A, A + B, A x B, A x B + C (fused) or a longer sum, A + B x C + D "
      "...; quote *.\n"
      "Numbers: decimal, hexadecimal float (0x1.8p3), FP32 word (0xC01A0E2E: 8 digits), inf, nan.\n"
      "Formats: fp32, tf32, bf16, fp16, e4m3, e5m2, e2m3, e3m2, e2m1, int8, int4, hif8, eXmY; also\n"
      "FORMAT[^SHIFT][/MODE][/saturate]. With a shared scale, --to 'FORMAT*GROUP[@SCALE][*OUTER]' as in "
      "'e4m3*block32@e8m0',\n"
      "EXPRESSION is a row of numbers (or a column), and each is shown with its block's scale. GROUP: "
      "block16, block32,\n"
      "block64, block128, row, column16, column32, column64, column; SCALE: fp32, e4m3, e8m0, e8m0_up.\n"
      "With --file-a: dot products as tensor cores add them, a line each, as 8 hexadecimal digits of FP32. A "
      "and B\n"
      "hold a row of FP32 words in hexadecimal a line, C one FP32 word in binary digits a line.",
      "explain -2.4071154594421387 + -2.296875 --to bf16");
  options.words("EXPRESSION", command.words, 0, 10000);
  options.value("--to", "FORMAT", "what the result is stored as", command.to);
  options.value("--in", "FORMAT", "what the arithmetic rounds to first (fp32)", command.in);
  options.value("--mode", "MODE",
                "of the last rounding: nearest_even, nearest_away, toward_zero, up, down, stochastic",
                command.mode);
  options.value("--accumulate", "HOW",
                "sums: fp32_sequential, or tensor_core with the first number as accumulator",
                command.accumulate);
  options.value("--mma", "FORMAT", "tensor-core operands: bf16, fp16, tf32, e4m3, e5m2", command.mma);
  options.value("--chip", "CHIP",
                fmt::format("whose tensor cores ({}): {}", kDefaultChip, tensor_core_chips()), command.chip);
  options.value("--file-a", "FILE", "left operands", command.file_a);
  options.value("--file-b", "FILE", "right operands", command.file_b);
  options.value("--file-c", "FILE", "addends (0 without it)", command.file_c);
  options.value("--row", "N", "the trace of one row of the files, counted from 1", command.row, 1,
                std::numeric_limits<int64_t>::max());
  options.value("--seed", "N", "of stochastic rounding", command.seed, 0,
                std::numeric_limits<int64_t>::max());
  options.flag("--json", "one JSON object instead of text", command.json);

  if (!options.parse(argc, argv)) return 0;

  if (!command.file_a.empty()) return explain_files(command);
  require(!command.words.empty(), "expected an expression, as in explain -2.4 + -2.3 --to bf16, or {}",
          command.mma.empty() ? "--mma with files: see explain --help" : "--file-a and --file-b with --mma");
  if (command.to.find('*') != std::string::npos)
    return explain_shared(command, rounding_of(command.to, command.mode));
  return explain_expression(command);
}

}  // namespace evenkeel::cli
