// Explains an operation bit by bit: what is aligned, added, carried, normalised, and what every rounding
// keeps, cuts off and why. Plain data, and two renderings of it: text for people, JSON for programs. Exact
// throughout (exact.h); refuses to be fast. Reads no files and prints nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "numerics/exact.h"
#include "numerics/rounding.h"
#include "numerics/tensor_core.h"

namespace evenkeel {

// A number as someone typed it: decimal, hexadecimal float (0x1.8p3), FP32 word (0xC01A0E2E: eight
// hexadecimal digits), inf, nan.
struct Literal {
  std::string text;
  double read = 0;       // what the text says, to the nearest double
  float value = 0;       // what is computed with
  bool rounded = false;  // value differs from read: the text is no number of FP32
};
struct ExpressionTerm {
  Literal a;
  std::optional<Literal> b;  // the term is a * b
};

// TERM (('+' | '-') TERM)*, where TERM is NUMBER or NUMBER ('*' | 'x') NUMBER. A minus is moved into its
// term. Throws std::invalid_argument saying what was expected, what was found and where.
std::vector<ExpressionTerm> parse_expression(std::string_view text);

// A number's bits in hexadecimal digits, as many as the format has: 0x3F80.
std::string code_text(uint32_t code, Format format);

enum class NumberKind { zero, subnormal, normal, infinity, nan };
inline constexpr std::string_view kNumberKindNames[] = {"zero", "subnormal", "normal", "infinity", "nan"};

// A number of a format, taken apart: value = (-1)^negative * significand * 2^exponent.
struct NumberParts {
  Format format = kFp32;
  float value = 0;
  uint32_t code = 0;
  NumberKind kind = NumberKind::zero;
  bool negative = false;
  int exponent = 0;            // the format's least one for zeros and subnormals
  std::string exponent_field;  // its stored bits
  std::string significand;     // "1.0011010", "0.0000001"; empty for Inf and NaN
};
// REQUIRES: value is a number of the format.
NumberParts take_apart(Format format, float value);

// One addend on the common grid, whose point stands after the place 2^Explanation::exponent.
struct AlignedTerm {
  std::string name;  // "a", "b", "a x b", "c"
  bool negative = false;
  int shift = 0;       // places to the right
  std::string digits;  // "0.01011", every bit of it
};

enum class Direction { exact, down, up };  // of the magnitude: down is toward zero, up is away from it
inline constexpr std::string_view kDirectionNames[] = {"exact", "down", "up"};

// One rounding of an exact value to a format.
struct RoundingStep {
  Rounding rounding;
  double before = 0;  // the value that came in, to the nearest double
  NumberParts after;  // what is stored; of the scaled value where the rounding has a scale
  float value = 0;    // what is stored, scale taken out
  double error = 0;   // value - before, correctly rounded

  bool special = false;              // zero, Inf or NaN came in: there are no bits to cut
  int exponent = 0;                  // of the place before the point of `kept`
  std::string kept;                  // "1.0010110"; "0.0010110" among the subnormals
  std::string cut;                   // every bit after it: the round bit, then those that sticky is the OR of
  double toward_zero = 0, away = 0;  // the format's numbers around the value; equal where it is one of them
  bool round_bit = false, sticky_bit = false;
  Direction direction = Direction::exact;
  bool tie = false;
  bool carried = false;  // going up made the next power of two
  bool overflow = false;
  uint32_t random = 0;  // stochastic: the 32 uniform bits it was given
};

enum class Operation { value, add, multiply, fused_multiply_add, sum };
inline constexpr std::string_view kOperationNames[] = {"value", "add", "multiply", "fused_multiply_add",
                                                       "sum"};

struct Explanation {
  Operation operation = Operation::value;
  std::string expression;             // as computed: "-2.4071154594421387 + -2.296875"
  std::vector<Literal> literals;      // as typed
  std::vector<NumberParts> operands;  // in FP32, one per literal

  // One operation: the addends on a common grid, their exact sum, and where its leading one lies.
  std::vector<AlignedTerm> aligned;
  int exponent = 0;          // of the grid: the largest exponent of an addend
  std::string exact_digits;  // "10.01011": the exact result on the same grid
  bool exact_negative = false;
  bool carry_out = false;  // the result's leading one lies left of the point
  int normalise = 0;       // places the point moves: > 0 left, after a carry; < 0 right, after a cancellation
  bool special = false;    // Inf or NaN

  double exact = 0;                     // the exact result, to the nearest double
  bool exact_in_double = true;          // exact is all of it
  std::vector<RoundingStep> roundings;  // in order; for a sum: those after the last addition
  NumberParts result;                   // what is stored in the end
  float value = 0;                      // its value, scale taken out
  double error = 0;                     // value - exact, correctly rounded
  double error_steps = 0;               // the same in steps of the last format there
  bool rounded_twice = false;  // one rounding, straight to the last format, would have given another result
  float rounded_once = 0;      // that result

  // A sum: one explanation per addition, or the trace of the tensor core's blocks.
  std::vector<Explanation> steps;
  int64_t rounded_up = 0, rounded_down = 0, not_rounded = 0;
  double accumulated_error = 0;  // of all additions, signed, before `roundings`
  std::optional<TensorCoreTrace> tensor_core;
};

struct ExplainOptions {
  Rounding in;  // what the arithmetic stores: every addition of a sum, or one operation's result
  std::optional<Rounding> to;  // what the result is then stored as
  uint64_t seed = 0;           // of stochastic rounding
  // Sums: add as this chip does, blocks of products, instead of one after another. `in` is then what it is.
  const TensorCoreModel* tensor_core = nullptr;
};

// One term: a value or a product. Two terms: an addition, or a fused multiply-add where one of them is a
// product. More, or with a tensor core: a sum, from the left, a product being a fused multiply-add. REQUIRES:
// not empty. Throws std::invalid_argument where a tensor core's operand is no number of its format.
Explanation explain(const std::vector<ExpressionTerm>& terms, const ExplainOptions& options = {});

// Text for a terminal of 100 columns and up. With colour, kept, round and sticky bits are green, yellow and
// magenta.
std::string to_text(const Explanation& explanation, bool colour);
std::string to_text(const TensorCoreTrace& trace, bool colour);
// One JSON object. Numbers are shortest round-trip decimals; "inf", "-inf" and "nan" are strings.
std::string to_json(const Explanation& explanation);
std::string to_json(const TensorCoreTrace& trace);

// Shortest decimal that reads back as the same double: "-4.703990459442139", "inf".
std::string shortest(double x);

}  // namespace evenkeel
