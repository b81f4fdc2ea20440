// Explanations as text that teaches: every section says what is done, shows the bits, and says why.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "numerics/explain.h"

namespace evenkeel {
namespace {

// Bits shown after the point, and of what is cut off: what is longer ends in "...".
constexpr size_t kShownDigits = 60, kShownCut = 40;
constexpr size_t kLabelWidth = 12;

// Escape sequences, or nothing without colour.
struct Palette {
  const char *label = "", *kept = "", *round = "", *sticky = "", *off = "";
};
Palette palette(bool colour) {
  if (!colour) return {};
  return {"\x1b[1m", "\x1b[32m", "\x1b[1;33m", "\x1b[35m", "\x1b[0m"};
}

std::string padded(const std::string& text, size_t width) {
  return text.size() < width ? text + std::string(width - text.size(), ' ') : text;
}
std::string flush_right(const std::string& text, size_t width) {
  return text.size() < width ? std::string(width - text.size(), ' ') + text : text;
}
std::string counted(int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}
// Four significant digits are enough for people.
std::string about(double x) {
  if (!std::isfinite(x)) return shortest(x);
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, x, std::chars_format::general, 4);
  return std::string(buffer, end);
}
std::string hex(float value) { return code_text(std::bit_cast<uint32_t>(value), kFp32); }
std::string sign_of(bool negative) { return negative ? "-" : "+"; }
std::string bit_of(bool set) { return set ? "1" : "0"; }
std::string power(int exponent) { return "x 2^" + std::to_string(exponent); }
std::string letter(size_t index) { return std::string(1, static_cast<char>('a' + index)); }

std::string clipped(const std::string& digits) {
  const size_t point = digits.find('.');
  if (point == std::string::npos || digits.size() - point - 1 <= kShownDigits) return digits;
  return digits.substr(0, point + 1 + kShownDigits) + "...";
}

std::string mode_words(RoundingMode mode) {
  switch (mode) {
    case RoundingMode::nearest_even:
      return "to nearest, ties to even";
    case RoundingMode::nearest_away:
      return "to nearest, ties away from zero";
    case RoundingMode::toward_zero:
      return "toward zero";
    case RoundingMode::up:
      return "up, toward plus infinity";
    case RoundingMode::down:
      return "down, toward minus infinity";
    case RoundingMode::stochastic:
      return "stochastically";
  }
  return "";
}

using Row = std::vector<std::string>;
// Lines of columns two spaces apart; those whose letter in `sides` is r stand flush right.
std::vector<std::string> table(const std::vector<Row>& rows, std::string_view sides) {
  std::vector<size_t> widths(sides.size(), 0);
  for (const Row& row : rows)
    for (size_t k = 0; k < sides.size(); ++k) widths[k] = std::max(widths[k], row[k].size());
  std::vector<std::string> lines;
  for (const Row& row : rows) {
    std::string text;
    for (size_t k = 0; k < sides.size(); ++k)
      text += (k == 0 ? "" : "  ") +
              (sides[k] == 'r' ? flush_right(row[k], widths[k]) : padded(row[k], widths[k]));
    lines.push_back(text);
  }
  return lines;
}

// Why the rounding went where it went, in sentences.
std::vector<std::string> reasons(const RoundingStep& s) {
  if (s.direction == Direction::exact) return {"No 1 is cut off: nothing is lost."};
  const bool up = s.direction == Direction::up;
  const std::string half = "round bit 1:  what is cut off is half a step or more;";
  const std::string add_one = "1 is added to the last kept bit.";
  std::vector<std::string> lines;
  switch (s.rounding.mode) {
    case RoundingMode::nearest_even:
    case RoundingMode::nearest_away:
      if (!s.round_bit) {
        lines = {"round bit 0:  what is cut off is less than half a step, whatever the sticky bit says.",
                 "The nearer one is that toward zero: the kept bits stay as they are."};
      } else if (s.sticky_bit) {
        lines = {half,
                 "sticky bit 1: at least one of the " +
                     counted(static_cast<int64_t>(s.cut.size()) - 1, "bit") +
                     " after it is 1, so it is more than half.",
                 "The nearer one is that away from zero: " + add_one};
      } else {
        const bool odd = s.kept.back() == '1';
        lines = {half, "sticky bit 0: all bits after it are 0, so it is exactly half. A tie.",
                 s.rounding.mode == RoundingMode::nearest_away ? "Ties go away from zero: " + add_one
                 : odd ? "Ties go to the even one: the last kept bit is 1, so " + add_one
                       : "Ties go to the even one: the last kept bit is 0, and stays."};
      }
      break;
    case RoundingMode::toward_zero:
      lines = {"Toward zero: whatever is cut off is dropped."};
      break;
    case RoundingMode::up:
    case RoundingMode::down:
      lines = {(s.rounding.mode == RoundingMode::up ? "Up is " : "Down is ") +
               (up ? "away from zero for this sign, and a 1 is cut off: " + add_one
                   : std::string("toward zero for this sign: whatever is cut off is dropped."))};
      break;
    case RoundingMode::stochastic: {
      uint32_t fraction = 0;
      for (size_t i = 0; i < 32; ++i) fraction = fraction << 1 | (i < s.cut.size() && s.cut[i] == '1');
      lines = {
          "What is cut off is " + about(fraction * 0x1p-32) +
              " of a step: that is the chance to go away from zero.",
          "Drawn: " + about(s.random * 0x1p-32) +
              (up ? ", which is less: " + add_one : ", which is not less: the kept bits stay as they are.")};
      break;
    }
  }
  if (s.carried) lines.push_back("That carries through all the ones: the exponent grows by 1.");
  return lines;
}

class TextWriter {
 public:
  explicit TextWriter(bool colour) : paint_(palette(colour)) {}

  // A section's first line starts with its label; the others are indented alike.
  void line(const std::string& label, std::string words) {
    while (words.ends_with(' ')) words.pop_back();
    const std::string head = padded(label, kLabelWidth);
    text_ += label.empty() ? head : paint_.label + head + paint_.off;
    text_ += words + "\n";
  }
  void line(const std::string& words) { line("", words); }
  void lines(std::string label, const std::vector<std::string>& words) {
    for (const std::string& each : words) line(std::exchange(label, ""), each);
  }
  // One empty line, however often it is asked for.
  void blank() {
    if (!text_.empty() && !text_.ends_with("\n\n")) text_ += "\n";
  }
  std::string str() {
    while (text_.ends_with("\n\n")) text_.pop_back();
    return text_;
  }

  void operands(const Explanation& e);
  void arithmetic(const Explanation& e);
  void additions(const Explanation& e);
  void trace(const TensorCoreTrace& trace);
  void rounding(const RoundingStep& step);
  void error(const Explanation& e);

 private:
  void special(const Explanation& e);
  void block(const TensorCoreModel& model, const TensorCoreBlock& block, size_t index);

  Palette paint_;
  std::string text_;
};

void TextWriter::operands(const Explanation& e) {
  std::vector<Row> rows = {{"", "value", "fp32 word", "sign", "exponent", "significand"}};
  for (size_t i = 0; i < e.operands.size(); ++i) {
    const NumberParts& x = e.operands[i];
    const bool number = !x.significand.empty();
    rows.push_back({letter(i), shortest(x.value), code_text(x.code, x.format),
                    bit_of(x.negative) + " " + sign_of(x.negative),
                    x.exponent_field + (number ? ": 2^" + std::to_string(x.exponent) : ""),
                    number ? x.significand : std::string(kNumberKindNames[static_cast<size_t>(x.kind)])});
  }
  lines("operands", table(rows, "llllll"));
  for (size_t i = 0; i < e.literals.size(); ++i)
    if (e.literals[i].rounded)
      line(e.literals[i].text + ", as typed, is no number of fp32: " + letter(i) + " is the nearest one");
}

void TextWriter::special(const Explanation& e) {
  bool nan = false, infinity_times_zero = false;
  for (const NumberParts& x : e.operands) nan |= x.kind == NumberKind::nan;
  // The factors are neighbours. A neighbour that is no factor cannot make a NaN of a finite or infinite addend,
  // except by zero and infinity. In that case the sum is no NaN.
  if (e.operation == Operation::multiply || e.operation == Operation::fused_multiply_add)
    for (size_t i = 0; i + 1 < e.operands.size(); ++i)
      infinity_times_zero |= std::isnan(e.operands[i].value * e.operands[i + 1].value);
  line("result", nan                    ? "a NaN among the operands makes the result NaN"
                 : !std::isnan(e.exact) ? "infinity, whatever finite number comes to it"
                 : infinity_times_zero  ? "infinity times zero has no value: NaN"
                                        : "infinity minus infinity has no value: NaN");
}

void TextWriter::arithmetic(const Explanation& e) {
  if (e.special) return special(e);
  if (e.operation == Operation::value) return;
  const bool product_alone = e.operation == Operation::multiply;

  // Points stand under each other, signs before the first digit.
  size_t names = 3, whole = std::min(e.exact_digits.find('.'), e.exact_digits.size());
  for (const AlignedTerm& term : e.aligned) {
    names = std::max(names, term.name.size());
    whole = std::max(whole, std::min(term.digits.find('.'), term.digits.size()));
  }
  const auto row = [&](const std::string& name, bool negative, const std::string& digits) {
    const size_t point = std::min(digits.find('.'), digits.size());
    return padded(name, names) + std::string(2 + whole - point, ' ') + sign_of(negative) + clipped(digits);
  };

  bool subtracts = false;
  if (product_alone) {
    line("multiply", "significands multiply, exponents add");
  } else {
    const AlignedTerm &a = e.aligned[0], &b = e.aligned[1];
    const int shift = std::max(a.shift, b.shift);
    const bool has_zero = a.digits.find('1') == std::string::npos || b.digits.find('1') == std::string::npos;
    line("align", has_zero     ? "a zero needs no shift"
                  : shift == 0 ? "the exponents are equal: nothing to shift"
                               : "to the larger exponent: " + (a.shift > b.shift ? a.name : b.name) +
                                     " moves " + counted(shift, "place") + " right");
    for (const AlignedTerm& term : e.aligned) line(row(term.name, term.negative, term.digits));
    subtracts = a.negative != b.negative && !has_zero;
    line(subtracts ? "subtract" : "add", subtracts
                                             ? "signs differ: the smaller magnitude is taken from the larger"
                                             : "signs agree: magnitudes add");
  }
  line(row(product_alone ? e.aligned[0].name : "sum",
           product_alone ? e.aligned[0].negative : e.exact_negative, e.exact_digits) +
       "  " + power(e.exponent));
  line("= " + shortest(e.exact) + (e.exact_in_double ? ", exactly" : ", to the nearest double"));
  if (e.exact_digits.find('1') == std::string::npos || e.normalise == 0) return;

  if (e.carry_out) {
    line("normalise", product_alone
                          ? "two significands below 2 can make 2 or more: the point moves 1 place left"
                          : "a carry out: " + std::to_string(e.normalise + 1) +
                                " places before the point, which moves " + counted(e.normalise, "place") +
                                " left");
    line(e.normalise == 1 ? "The format keeps as many bits as before, so one more bit falls off its end."
                          : "The format keeps as many bits as before, so more bits fall off its end.");
  } else {
    line("normalise",
         (subtracts ? "leading places cancelled: the point moves " : "zeros in front: the point moves ") +
             counted(-e.normalise, "place") + " right");
  }
  std::string digits = e.exact_digits;
  digits.erase(std::remove(digits.begin(), digits.end(), '.'), digits.end());
  digits.erase(0, digits.find('1'));
  if (digits.size() > 1) digits.insert(1, ".");
  line(row("", e.exact_negative, digits) + "  " + power(e.exponent + e.normalise));
}

void TextWriter::rounding(const RoundingStep& s) {
  const Format f = s.rounding.format;
  const std::string label = "to " + to_string(f);
  if (s.special) {
    const bool lost_infinity = std::isinf(s.before) && s.after.kind != NumberKind::infinity;
    line(label, s.before == 0         ? "zero: nothing to round"
                : !lost_infinity      ? "no bits to round"
                : s.rounding.saturate ? "infinity saturates: it becomes the largest number"
                                      : "the format has no infinity: NaN");
  } else {
    line(label,
         std::to_string(f.significand_bits) + " bits after the point, " + mode_words(s.rounding.mode) +
             (s.rounding.scale_exponent != 0 ? ", scaled by 2^" + std::to_string(s.rounding.scale_exponent)
                                             : "") +
             (s.rounding.saturate ? ", saturating" : ""));
    const std::string kept = sign_of(std::signbit(s.before)) + s.kept;
    std::string sticky = s.cut.size() < 2 ? "0" : s.cut.substr(1, kShownCut);
    if (s.cut.size() > kShownCut + 1) sticky += "...";
    const auto painted = [&](const char* paint, const std::string& words) {
      return paint + words + paint_.off;
    };
    line("  " + painted(paint_.kept, kept) + " | " + painted(paint_.round, bit_of(s.round_bit)) + " | " +
         painted(paint_.sticky, sticky) + "  " + power(s.exponent));
    line("  " + painted(paint_.kept, flush_right("kept", kept.size())) + " " +
         painted(paint_.round, "round") + " " + painted(paint_.sticky, "sticky"));
    if (s.kept[0] == '0')
      line("2^" + std::to_string(s.exponent) +
           " is the least exponent: smaller numbers are subnormal, with zeros in front and fewer bits.");
    if (s.direction != Direction::exact) {
      const bool beyond = std::fabs(std::ldexp(s.away, s.rounding.scale_exponent)) > max_finite(f);
      line((beyond ? "Were there no largest number, it would lie between "
                   : "It lies between two numbers of " + to_string(f) + ": ") +
           shortest(s.toward_zero) + " and " + shortest(s.away) + ".");
    }
    lines("", reasons(s));
    if (s.overflow) line("That is beyond the largest number, " + shortest(max_finite(f)) + ": overflow.");
  }
  const bool number = s.after.kind == NumberKind::normal || s.after.kind == NumberKind::subnormal;
  line("stored: " + code_text(s.after.code, f) +
       (number ? " = " + sign_of(s.after.negative) + s.after.significand + " " +
                     power(s.after.exponent - s.rounding.scale_exponent)
               : "") +
       " = " + shortest(s.value));
}

void TextWriter::error(const Explanation& e) {
  if (e.special) return;
  line("error", "stored - exact = " + shortest(e.error));
  if (e.error == 0) return;
  const std::string format = to_string(e.result.format);
  if (std::isfinite(e.error_steps))
    line("= " + about(e.error_steps) + " steps; a step of " + format + " is " +
         shortest(e.error / e.error_steps) + " here");
  const bool away = (e.error < 0) == (e.value < 0);
  if (std::isfinite(e.error) && e.value != 0)
    line(std::string(away ? "Away from zero" : "Toward zero") + " means " + (e.error < 0 ? "down" : "up") +
         " for a " + (e.value < 0 ? "negative" : "positive") + " number: the error is " +
         (e.error < 0 ? "negative." : "positive."));
  if (e.rounded_twice)
    line("Rounded once, straight to " + format + ", it would be " + shortest(e.rounded_once) +
         ": rounding twice is not rounding once.");
}

void TextWriter::additions(const Explanation& e) {
  std::vector<Row> rows = {{"", "adds", "shift", "carry", "round", "sticky", "rounded", "error", "sum"}};
  bool cancels = false;
  for (const Explanation& step : e.steps) {
    const RoundingStep& r = step.roundings[0];
    int shift = 0;
    for (const AlignedTerm& term : step.aligned) shift = std::max(shift, term.shift);
    std::string adds;  // all but the running sum, which comes first where there is one
    for (size_t k = step.operation == Operation::multiply ? 0 : 1; k < step.literals.size(); ++k)
      adds += (adds.empty() ? "" : " x ") + step.literals[k].text;
    const std::string direction(kDirectionNames[static_cast<size_t>(r.direction)]);
    cancels |= step.normalise < 0 && !r.special;
    rows.push_back({std::to_string(rows.size()), adds, r.special ? "-" : std::to_string(shift),
                    r.special            ? "-"
                    : step.normalise < 0 ? std::to_string(step.normalise)
                                         : bit_of(step.carry_out),
                    r.special ? "-" : bit_of(r.round_bit), r.special ? "-" : bit_of(r.sticky_bit),
                    r.tie ? "tie, " + direction : direction, shortest(r.error), shortest(step.value)});
  }
  const bool starts_with_number = e.steps[0].operation != Operation::multiply;
  line("additions", "one after another" +
                        (starts_with_number ? ", from " + e.literals[0].text : std::string()) +
                        ", each rounded to " + to_string(e.steps[0].roundings[0].rounding) + ":");
  lines("", table(rows, "rlrrrrlrl"));
  line("shift: places the smaller one moves right; up: away from zero; down: toward zero");
  if (cancels) line("carry -3: three leading places cancel");
  blank();
  line("roundings", std::to_string(e.rounded_up) + " up, " + std::to_string(e.rounded_down) + " down, " +
                        std::to_string(e.not_rounded) + " exact");
  line("sum", shortest(e.steps.back().value));
  line("exact sum", shortest(e.exact) + (e.exact_in_double ? "" : ", to the nearest double"));
  line("error", "sum - exact = " + shortest(e.accumulated_error) + ", all errors above together");
}

void TextWriter::block(const TensorCoreModel& model, const TensorCoreBlock& block, size_t index) {
  const int unit = block.max_exponent - model.alignment_bits;
  line("block " + std::to_string(index + 1),
       counted(static_cast<int64_t>(block.terms.size()) - 1, "product") + " and the addend c" +
           (block.special ? ": NaN or infinity decides"
                          : ", aligned to 2^" + std::to_string(block.max_exponent) +
                                ", cut after the place 2^" + std::to_string(unit)));
  std::vector<Row> rows = {{"", "product", "exponent", "shift", "kept", "lost"}};
  for (const TensorCoreTerm& t : block.terms) {
    const bool addend = &t == &block.terms.back();
    const std::string name = addend ? "c" : std::to_string(t.index);
    const std::string product = addend ? shortest(t.a) : shortest(t.a) + " x " + shortest(t.b);
    if (!t.takes_part || block.special)
      rows.push_back({name, product, "-", "-", "-", "-"});
    else
      rows.push_back({name, product, std::to_string(t.exponent), std::to_string(t.shift), shortest(t.aligned),
                      shortest(t.lost)});
  }
  lines("", table(rows, "rlrrll"));
  if (!block.special)
    line("sum of what is kept: " + shortest(block.sum) + "; cut to " + std::to_string(model.output_bits) +
         " fraction bits, " + shortest(block.lost) + " is lost");
  line("result: " + hex(block.result) + " = " + shortest(block.result));
}

void TextWriter::trace(const TensorCoreTrace& t) {
  line("tensor core", std::string(t.model.chip) + ", " + to_string(t.model.operand) + ": " +
                          std::to_string(t.model.block_terms) + " products at once, each cut " +
                          std::to_string(t.model.alignment_bits) + " bits after the point, toward zero");
  ExactSum exact;
  exact.add(t.addend);
  for (size_t i = 0; i < t.blocks.size(); ++i) {
    blank();
    block(t.model, t.blocks[i], i);
    for (const TensorCoreTerm& term : t.blocks[i].terms)
      if (&term != &t.blocks[i].terms.back()) exact.add_product(term.a, term.b);
  }
  blank();
  if (t.model.passes > 1)
    line("addend", shortest(t.addend) + ", added after every " + std::to_string(t.model.passes) +
                       " blocks, as FP32 adds: to nearest even");
  line("sum", hex(t.result) + " = " + shortest(t.result));
  if (exact.special()) return;
  ExactSum error;
  error.add(t.result);
  error.subtract(exact);
  const float nearest = exact.round({}).value;
  line("exact sum",
       shortest(exact.to_double()) + "; nearest FP32: " + hex(nearest) + " = " + shortest(nearest));
  line("error", "sum - exact = " + shortest(error.to_double()));
}

}  // namespace

std::string to_text(const TensorCoreTrace& trace, bool colour) {
  TextWriter writer(colour);
  writer.trace(trace);
  return writer.str();
}

std::string to_text(const Explanation& e, bool colour) {
  TextWriter writer(colour);
  writer.line("explain", e.expression);
  writer.blank();
  if (e.operation != Operation::sum) {
    writer.operands(e);
    writer.blank();
    writer.arithmetic(e);
  } else {
    if (e.tensor_core)
      writer.trace(*e.tensor_core);
    else
      writer.additions(e);
    std::vector<std::string> noted;  // once each, however often it was typed
    for (const Literal& literal : e.literals) {
      if (!literal.rounded || std::find(noted.begin(), noted.end(), literal.text) != noted.end()) continue;
      noted.push_back(literal.text);
      writer.line(literal.text + ", as typed, is no number of fp32: " + shortest(literal.value) +
                  ", the nearest one, is used");
    }
  }
  for (const RoundingStep& step : e.roundings) {
    writer.blank();
    writer.rounding(step);
  }
  writer.blank();
  if (!e.roundings.empty()) writer.error(e);
  return writer.str();
}

}  // namespace evenkeel
