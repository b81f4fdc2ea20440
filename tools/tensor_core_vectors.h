// Dot products that a real chip computed, kept as text (tests/vectors/tensor_core/FORMAT.txt), and the wrong
// models that such cases must tell from the right one. Shared by the program that asks the chip
// (tensor_core_chip.cu) and by the test that asks the model without one.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <istream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "numerics/tensor_core.h"

namespace evenkeel {

enum Instruction { kMmaSync, kWgmma, kInstructions };
inline constexpr std::string_view kInstructionNames[kInstructions] = {"mma.sync", "wgmma"};

constexpr bool is_fp8(Format format) { return code_bits(format) == 8; }

// The row of the table that is to hold for an instruction: the two differ for FP8 alone.
inline const TensorCoreModel& model_of(Format format, Instruction instruction) {
  return find_tensor_core_model(format, instruction == kMmaSync && is_fp8(format) ? "h200_mma" : "h200");
}

struct WrongModel {
  std::string name;
  TensorCoreModel model;
};

// What the right model could be mistaken for: every number of its row off by a little, and what has been
// claimed of FP8.
inline std::vector<WrongModel> wrong_models(const TensorCoreModel& right) {
  std::vector<WrongModel> wrong;
  const auto add = [&](const std::string& name, auto change) {
    TensorCoreModel model = right;
    change(model);
    model.output_bits = std::min(model.output_bits, model.alignment_bits);
    wrong.push_back({name, model});
  };
  const auto number = [](int x) { return std::to_string(x); };
  for (const int step : {-1, +1})
    add(number(right.alignment_bits + step) + " alignment bits", [&](auto& m) { m.alignment_bits += step; });
  add(number(right.output_bits - 1) + " output bits", [](auto& m) { --m.output_bits; });
  add("blocks of " + number(right.block_terms / 2), [](auto& m) { m.block_terms /= 2; });
  // Products as small as the floor of the alignment need FP32's exponents.
  if (right.operand.exponent_bits == kFp32.exponent_bits)
    for (const int step : {-1, +1})
      add("floor " + number(right.min_exponent + step), [&](auto& m) { m.min_exponent += step; });
  if (right.passes == 2) {
    add("two passes, 13 bits", [](auto& m) { m.alignment_bits = 13; });
    add("one pass of 32, 25 bits", [](auto& m) { m.passes = 1, m.block_terms = 32; });
    add("two blocks of 16, c first", [](auto& m) { m.passes = 1; });
    wrong.push_back({"one pass of 32, 13 bits (wgmma)", find_tensor_core_model(right.operand, "h200")});
  } else if (is_fp8(right.operand)) {
    wrong.push_back({"two passes, 25 bits (mma.sync)", find_tensor_core_model(right.operand, "h200_mma")});
  }
  return wrong;
}

// How an operand lies in a register: its code, in as many bytes as it takes; tf32 in the upper bits of four.
constexpr int element_bits(Format format) { return code_bits(format) > 16 ? 32 : code_bits(format); }
constexpr int element_shift(Format format) { return element_bits(format) - code_bits(format); }

struct ChipCase {
  std::string kind;            // of operands: a word, for the reader
  std::vector<uint32_t> a, b;  // (terms) elements
  uint32_t c = 0;              // addend and results: FP32 words
  uint32_t results[kInstructions] = {};
};

inline std::vector<float> element_values(Format format, const std::vector<uint32_t>& elements) {
  std::vector<float> values;
  for (const uint32_t element : elements) values.push_back(decode(format, element >> element_shift(format)));
  return values;
}

inline uint32_t model_result(const TensorCoreModel& model, const ChipCase& one) {
  const std::vector<float> a = element_values(model.operand, one.a), b = element_values(model.operand, one.b);
  const auto c = std::bit_cast<float>(one.c);
  return std::bit_cast<uint32_t>(tensor_core_dot(model, a.data(), b.data(), a.size(), c));
}

// A line: KIND A B C MMA_SYNC WGMMA. A and B are their elements in hexadecimal, joined, the first term first.
inline std::string to_line(Format format, const ChipCase& one) {
  char digits[16];
  const auto hex = [&](uint32_t word, int bits) {
    std::snprintf(digits, sizeof digits, "%0*x", bits / 4, word);
    return std::string(digits);
  };
  std::string line = one.kind;
  for (const auto* elements : {&one.a, &one.b}) {
    line += ' ';
    for (const uint32_t element : *elements) line += hex(element, element_bits(format));
  }
  for (const uint32_t word : {one.c, one.results[kMmaSync], one.results[kWgmma]}) line += ' ' + hex(word, 32);
  return line;
}

// The cases of a file; lines that start with '#' are remarks. Throws std::runtime_error that names the line.
inline std::vector<ChipCase> read_cases(Format format, std::istream& file) {
  std::vector<ChipCase> cases;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.empty() || line[0] == '#') continue;
    const auto fail = [&](const std::string& what) {
      throw std::runtime_error("line " + std::to_string(number) + ": " + what);
    };
    const auto word = [&](const std::string& digits) {
      size_t used = 0;
      uint32_t value = 0;
      try {
        value = static_cast<uint32_t>(std::stoul(digits, &used, 16));
      } catch (const std::exception&) {
      }
      if (used != digits.size()) fail("expected hexadecimal digits, found '" + digits + "'");
      return value;
    };
    std::istringstream fields(line);
    ChipCase one;
    std::string a, b, c, results[kInstructions];
    if (!(fields >> one.kind >> a >> b >> c >> results[kMmaSync] >> results[kWgmma]))
      fail("expected KIND A B C MMA_SYNC WGMMA, found '" + line + "'");
    const auto width = static_cast<size_t>(element_bits(format) / 4);
    if (a.size() != b.size() || a.size() % width != 0)
      fail("expected as many operands in A as in B, " + std::to_string(width) + " digits each; found " +
           std::to_string(a.size()) + " and " + std::to_string(b.size()) + " digits");
    for (size_t at = 0; at < a.size(); at += width) {
      one.a.push_back(word(a.substr(at, width)));
      one.b.push_back(word(b.substr(at, width)));
    }
    one.c = word(c);
    for (int i = 0; i < kInstructions; ++i) one.results[i] = word(results[i]);
    cases.push_back(std::move(one));
  }
  return cases;
}

}  // namespace evenkeel
