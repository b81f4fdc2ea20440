// The tensor-core model against 500 results a format that an H200 gave through mma.sync and through wgmma.
// Also the proof that these results would reveal a wrong model: tools/tensor_core_chip.cu chose them out of
// millions.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>

#include "../tools/tensor_core_vectors.h"

namespace evenkeel {
namespace {

constexpr Format kFormats[] = {kBf16, kFp16, kTf32, kE4m3, kE5m2};

std::vector<ChipCase> cases_of(Format format) {
  const std::string path = EVENKEEL_SOURCE_DIR "/tests/vectors/tensor_core/" + to_string(format) + ".txt";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot open " + path);
  return read_cases(format, file);
}

size_t matches(const std::vector<ChipCase>& cases, Instruction instruction, const TensorCoreModel& model) {
  size_t count = 0;
  for (const ChipCase& one : cases) count += model_result(model, one) == one.results[instruction];
  return count;
}

TEST(TensorCoreChip, the_model_gives_every_kept_result) {
  for (const Format format : kFormats) {
    const std::vector<ChipCase> cases = cases_of(format);
    ASSERT_EQ(cases.size(), 500u) << to_string(format);
    for (const Instruction instruction : {kMmaSync, kWgmma}) {
      const TensorCoreModel& model = model_of(format, instruction);
      for (const ChipCase& one : cases) {
        EXPECT_EQ(model_result(model, one), one.results[instruction])
            << to_string(format) << " " << kInstructionNames[instruction] << ": " << to_line(format, one);
        const auto trace = tensor_core_trace(model, element_values(format, one.a),
                                             element_values(format, one.b), std::bit_cast<float>(one.c));
        EXPECT_EQ(std::bit_cast<uint32_t>(trace.result), one.results[instruction]) << to_line(format, one);
      }
    }
  }
}

TEST(TensorCoreChip, every_wrong_model_is_found_out) {
  for (const Format format : kFormats) {
    const std::vector<ChipCase> cases = cases_of(format);
    for (const Instruction instruction : {kMmaSync, kWgmma})
      for (const WrongModel& wrong : wrong_models(model_of(format, instruction)))
        EXPECT_LE(matches(cases, instruction, wrong.model), cases.size() - 16)
            << to_string(format) << " " << kInstructionNames[instruction] << ": " << wrong.name;
  }
}

// The wrong models that matter most are among those above.
TEST(TensorCoreChip, the_wrong_models_are_the_neighbours) {
  const auto names = [](Format format, Instruction instruction) {
    std::string text;
    for (const WrongModel& wrong : wrong_models(model_of(format, instruction))) text += wrong.name + "; ";
    return text;
  };
  EXPECT_EQ(names(kBf16, kWgmma),
            "24 alignment bits; 26 alignment bits; 22 output bits; blocks of 8; floor -134; floor -132; ");
  EXPECT_EQ(
      names(kE4m3, kWgmma),
      "12 alignment bits; 14 alignment bits; 12 output bits; blocks of 16; two passes, 25 bits (mma.sync); ");
  EXPECT_EQ(names(kE5m2, kMmaSync),
            "24 alignment bits; 26 alignment bits; 22 output bits; blocks of 8; two passes, 13 bits; "
            "one pass of 32, 25 bits; two blocks of 16, c first; one pass of 32, 13 bits (wgmma); ");
}

// FP8 through mma.sync: 25 bits, where wgmma keeps 13; public sources claim either of both.
TEST(TensorCoreChip, the_two_instructions_differ_on_fp8_alone) {
  for (const Format format : kFormats) {
    size_t differ = 0;
    for (const ChipCase& one : cases_of(format)) differ += one.results[kMmaSync] != one.results[kWgmma];
    if (is_fp8(format))
      EXPECT_GT(differ, 200u) << to_string(format);
    else
      EXPECT_EQ(differ, 0u) << to_string(format);
  }
}

TEST(TensorCoreChip, all_kinds_of_operands_are_there) {
  for (const Format format : kFormats) {
    std::map<std::string, int> kinds;
    size_t chains = 0;
    const std::vector<ChipCase> cases = cases_of(format);
    size_t shortest = cases.front().a.size();
    for (const ChipCase& one : cases) shortest = std::min(shortest, one.a.size());
    for (const ChipCase& one : cases) ++kinds[one.kind], chains += one.a.size() == 2 * shortest;
    EXPECT_EQ(chains, 100u) << to_string(format);
    EXPECT_EQ(shortest, 256u / element_bits(format));
    for (const char* kind : {"nan_inf", "zero", "cancelling", "subnormal", "wide", "plain"})
      EXPECT_GE(kinds[kind], 20) << to_string(format) << " " << kind;
    // Beyond FP32's range come only products of operands with its exponents.
    if (format.exponent_bits == kFp32.exponent_bits) {
      EXPECT_GE(kinds["overflow"], 20) << to_string(format);
    }
  }
}

TEST(TensorCoreChip, faulty_lines_are_named) {
  const auto message = [](const char* text) -> std::string {
    std::istringstream file(text);
    try {
      read_cases(kE4m3, file);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message("# remark\nplain 38 38 00000000 3f800000 3f800000\n"), "");
  EXPECT_EQ(message("# remark\nplain 38 38\n"),
            "line 2: expected KIND A B C MMA_SYNC WGMMA, found 'plain 38 38'");
  EXPECT_EQ(message("plain 3838 38 0 0 0\n"),
            "line 1: expected as many operands in A as in B, 2 digits each; found 4 and 2 digits");
  EXPECT_EQ(message("plain 3x 38 0 0 0\n"), "line 1: expected hexadecimal digits, found '3x'");
}

}  // namespace
}  // namespace evenkeel
