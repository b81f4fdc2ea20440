#include "numerics/explain.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "numerics/random.h"

namespace evenkeel {
namespace {

// ---------------------------------------------------------------------------------- reading an expression

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex_digit(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

class ExpressionReader {
 public:
  explicit ExpressionReader(std::string_view text) : text_(text) {}

  std::vector<ExpressionTerm> read() {
    std::vector<ExpressionTerm> terms;
    terms.push_back(read_term());
    for (skip_spaces(); at_ < text_.size(); skip_spaces()) {
      const char sign = text_[at_];
      if (sign != '+' && sign != '-') fail(terms.back().b ? "+ or -" : "+, -, * or x");
      ++at_;
      terms.push_back(read_term());
      if (sign == '-') negate(terms.back().a);
    }
    return terms;
  }

 private:
  static constexpr std::string_view kTimes = "\u00d7";

  [[noreturn]] void fail(const std::string& expected) const {
    // The word at the fault, without cutting a multi-byte character in two.
    size_t end = at_;
    while (end < text_.size() && text_[end] != ' ' && end - at_ < 40) ++end;
    while (end < text_.size() && (text_[end] & 0xC0) == 0x80) ++end;
    const std::string found =
        at_ == text_.size() ? "the end" : "'" + std::string(text_.substr(at_, end - at_)) + "'";
    throw std::invalid_argument("expected " + expected + ", found " + found + " at character " +
                                std::to_string(at_ + 1) + " of '" + std::string(text_.substr(0, 200)) + "'");
  }

  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t')) ++at_;
  }

  static void negate(Literal& literal) {
    literal.value = -literal.value;
    literal.read = -literal.read;
    const bool signed_text = !literal.text.empty() && (literal.text[0] == '-' || literal.text[0] == '+');
    literal.text = (literal.text[0] == '-' ? "" : "-") + literal.text.substr(signed_text ? 1 : 0);
  }

  ExpressionTerm read_term() {
    ExpressionTerm term{read_number(), std::nullopt};
    skip_spaces();
    const std::string_view rest = text_.substr(at_);
    const size_t sign = rest.starts_with(kTimes) ? kTimes.size()
                        : rest.starts_with('*') || rest.starts_with('x') || rest.starts_with('X') ? 1
                                                                                                  : 0;
    if (sign != 0) {
      at_ += sign;
      term.b = read_number();
    }
    return term;
  }

  Literal read_number() {
    skip_spaces();
    const size_t start = at_;
    Literal literal;
    const bool signed_text = at_ < text_.size() && (text_[at_] == '-' || text_[at_] == '+');
    const bool negative = signed_text && text_[at_] == '-';
    if (signed_text) ++at_;
    const std::string_view rest = text_.substr(at_);
    if (rest.starts_with("0x") || rest.starts_with("0X")) {
      read_hexadecimal(literal, start, signed_text);
    } else if (!rest.empty() && is_letter(rest[0])) {
      read_word(literal, start);
    } else {
      read_decimal(literal, start);
    }
    if (negative) literal.read = -literal.read, literal.value = -literal.value;
    literal.text = std::string(text_.substr(start, at_ - start));
    return literal;
  }

  void read_word(Literal& literal, size_t start) {
    std::string word;
    size_t end = at_;
    while (end < text_.size() && is_letter(text_[end])) word += static_cast<char>(text_[end++] | 0x20);
    if (word != "inf" && word != "infinity" && word != "nan") {
      at_ = start;
      fail("a number");
    }
    at_ = end;
    literal.value =
        word == "nan" ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    literal.read = literal.value;
  }

  void read_hexadecimal(Literal& literal, size_t start, bool signed_text) {
    const size_t digits = at_ + 2;
    size_t end = digits;
    while (end < text_.size() && (is_hex_digit(text_[end]) || text_[end] == '.')) ++end;
    const bool has_power = end < text_.size() && (text_[end] == 'p' || text_[end] == 'P');
    const std::string_view body = text_.substr(digits, end - digits);
    if (!has_power && body.size() == 8 && body.find('.') == std::string_view::npos) {
      if (signed_text) {
        at_ = start;
        fail("an FP32 word without a sign (it has its own)");
      }
      uint32_t bits = 0;
      std::from_chars(body.data(), body.data() + body.size(), bits, 16);
      literal.value = std::bit_cast<float>(bits);
      literal.read = literal.value;
      at_ = end;
      return;
    }
    double read = 0;
    // from_chars reads 1.8p3 without the 0x.
    const auto [stop, error] =
        std::from_chars(text_.data() + digits, text_.data() + text_.size(), read, std::chars_format::hex);
    const bool has_digits = has_power && stop > text_.data() + end;  // after the p
    if (!has_digits || error == std::errc::invalid_argument) {
      at_ = start;
      fail("an FP32 word of 8 hexadecimal digits (0xC01A0E2E) or a hexadecimal float with a power (0x1.8p3)");
    }
    finish(literal, start, stop, error, read, std::chars_format::hex, digits);
  }

  void read_decimal(Literal& literal, size_t start) {
    double read = 0;
    const size_t digits = at_;
    const bool starts_well = at_ < text_.size() && (is_digit(text_[at_]) || text_[at_] == '.');
    const auto [stop, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), read);
    if (!starts_well || error == std::errc::invalid_argument) {
      at_ = start;
      fail("a number");
    }
    finish(literal, start, stop, error, read, std::chars_format::general, digits);
  }

  // Rounds to FP32 from the text itself: going through the double would round twice.
  void finish(Literal& literal, size_t start, const char* stop, std::errc error, double read,
              std::chars_format format, size_t digits) {
    if (error != std::errc()) {
      at_ = start;
      fail("a number within the range of double");
    }
    literal.read = read;
    float value = 0;
    const auto narrow = std::from_chars(text_.data() + digits, stop, value, format);
    literal.value = narrow.ec == std::errc() ? value : static_cast<float>(read);
    literal.rounded = static_cast<double>(literal.value) != read;
    at_ = static_cast<size_t>(stop - text_.data());
  }

  std::string_view text_;
  size_t at_ = 0;
};

// ------------------------------------------------------------------------------------------- one rounding

ExactSum exact_of(float x) {
  ExactSum sum;
  sum.add(x);
  return sum;
}

ExactSum exact_of(const ExpressionTerm& term) {
  ExactSum sum;
  if (term.b)
    sum.add_product(term.a.value, term.b->value);
  else
    sum.add(term.a.value);
  return sum;
}

// value - exact, correctly rounded.
double error_of(float value, const ExactSum& exact) {
  ExactSum error = exact_of(value);
  error.subtract(exact);
  return error.to_double();
}

RoundingStep round_step(const ExactSum& exact, const Rounding& rounding, uint32_t random) {
  const ExactRounding rounded = exact.round(rounding, random);
  const Format f = rounding.format;
  RoundingStep step;
  step.rounding = rounding;
  step.before = exact.to_double();
  step.value = rounded.value;
  step.after = take_apart(f, std::ldexp(rounded.value, rounding.scale_exponent));
  step.error = error_of(rounded.value, exact);
  step.random = rounding.mode == RoundingMode::stochastic ? random : 0;
  step.special = exact.special().has_value() || exact.is_zero();
  step.overflow = rounded.overflow;
  if (step.special) return step;
  step.exponent = point_exponent(f, exact.leading() + rounding.scale_exponent) - rounding.scale_exponent;
  step.kept = point_digits(exact, step.exponent, step.exponent, rounded.step);
  step.cut = exact.digits(rounded.step - 1, exact.trailing());
  const double sign = exact.sign();
  step.toward_zero = sign * std::ldexp(static_cast<double>(rounded.kept), rounded.step);
  step.away = sign * std::ldexp(static_cast<double>(rounded.kept + !rounded.exact()), rounded.step);
  step.round_bit = rounded.round_bit;
  step.sticky_bit = rounded.sticky_bit;
  step.tie = rounded.tie();
  step.direction = rounded.exact() ? Direction::exact : rounded.up ? Direction::up : Direction::down;
  step.carried = rounded.up && rounded.kept + 1 == uint64_t{2} << (step.exponent - rounded.step);
  return step;
}

// Where the randomness of stochastic rounding comes from: the rounding with number `element` of a stream.
struct Randomness {
  uint64_t seed = 0, element = 0;
};

// Sends what was computed, and is held as `held` says, through the roundings; then sets the result and its
// error against what is exact.
void finish(Explanation& e, const ExactSum& exact, const ExactSum& computed, float value, Rounding held,
            const std::vector<Rounding>& chain, Randomness randomness) {
  ExactSum current = computed;
  for (const Rounding& rounding : chain) {
    const uint32_t random = random_bits({.seed = randomness.seed}, randomness.element++);
    e.roundings.push_back(round_step(current, rounding, random));
    value = e.roundings.back().value;
    current = exact_of(value);
    held = rounding;
  }
  e.exact = exact.to_double();
  e.exact_in_double = exact.special() || exact.is_zero() || exact.leading() - exact.trailing() < 53;
  e.special = exact.special().has_value();
  e.value = value;
  const float scaled = std::ldexp(value, held.scale_exponent);
  e.result = take_apart(held.format, scaled);
  e.error = error_of(value, exact);
  e.error_steps =
      e.error == 0 ? 0 : e.error / std::ldexp(double{ulp(held.format, scaled)}, -held.scale_exponent);
}

std::vector<Rounding> chain_of(const ExplainOptions& options, bool arithmetic) {
  std::vector<Rounding> chain;
  // A lone number went through no arithmetic: it is rounded to `in` only where that changes something.
  if (arithmetic || !is_identity(options.in)) chain.push_back(options.in);
  if (options.to && (chain.empty() || *options.to != chain.back())) chain.push_back(*options.to);
  return chain;
}

// ------------------------------------------------------------------------------------------ one operation

std::string text_of(const ExpressionTerm& term) {
  return term.b ? term.a.text + " x " + term.b->text : term.a.text;
}

void add_operands(Explanation& e, const std::vector<ExpressionTerm>& terms) {
  for (const ExpressionTerm& term : terms) {
    e.expression += (e.expression.empty() ? "" : " + ") + text_of(term);
    for (const Literal* literal : {&term.a, term.b ? &*term.b : nullptr}) {
      if (!literal) continue;
      e.literals.push_back(*literal);
      e.operands.push_back(take_apart(kFp32, literal->value));
    }
  }
}

// Lays the addends and their sum out on one grid.
void align(Explanation& e, const std::vector<ExpressionTerm>& terms, const ExactSum& exact) {
  struct Addend {
    ExactSum value;
    int exponent, lowest;
    bool negative;
  };
  std::vector<Addend> addends;
  int lowest = std::numeric_limits<int>::max();
  e.exponent = std::numeric_limits<int>::min();
  for (const ExpressionTerm& term : terms) {
    Addend addend{exact_of(term), take_apart(kFp32, term.a.value).exponent, 0, std::signbit(term.a.value)};
    addend.lowest = addend.exponent - kFp32.significand_bits;
    if (term.b) {
      addend.exponent += take_apart(kFp32, term.b->value).exponent;
      addend.lowest =
          addend.value.is_zero() ? addend.exponent : std::min(addend.value.trailing(), addend.exponent);
      addend.negative = addend.negative != std::signbit(term.b->value);
    }
    addends.push_back(addend);
    if (addend.value.is_zero()) continue;
    e.exponent = std::max(e.exponent, addend.exponent);
    lowest = std::min(lowest, addend.lowest);
  }
  if (lowest == std::numeric_limits<int>::max()) {  // zeros only
    e.exponent = min_exponent(kFp32);
    lowest = e.exponent - kFp32.significand_bits;
  }
  char letter = 'a';
  for (size_t i = 0; i < terms.size(); ++i) {
    const Addend& addend = addends[i];
    const bool zero = addend.value.is_zero();
    std::string name(1, letter++);
    if (terms[i].b) name += std::string(" x ") + letter++;
    const int highest = zero ? e.exponent : std::max(addend.value.leading(), e.exponent);
    e.aligned.push_back({name, addend.negative, zero ? 0 : e.exponent - addend.exponent,
                         point_digits(addend.value, highest, e.exponent, lowest)});
  }
  const int leading = exact.is_zero() ? e.exponent : exact.leading();
  e.exact_digits = point_digits(exact, leading, e.exponent, lowest);
  e.exact_negative = exact.sign() < 0;
  e.normalise = leading - e.exponent;
  e.carry_out = e.normalise > 0;
}

Explanation explain_operation(const std::vector<ExpressionTerm>& terms, const std::vector<Rounding>& chain,
                              Randomness randomness) {
  Explanation e;
  ExactSum exact;
  bool product = false;
  for (const ExpressionTerm& term : terms) {
    exact.add(exact_of(term));
    product |= term.b.has_value();
  }
  e.operation = terms.size() == 1 ? (product ? Operation::multiply : Operation::value)
                                  : (product ? Operation::fused_multiply_add : Operation::add);
  add_operands(e, terms);
  if (!exact.special() && e.operation != Operation::value) align(e, terms, exact);
  finish(e, exact, exact, terms[0].a.value, {}, chain, randomness);
  const bool random = std::any_of(chain.begin(), chain.end(),
                                  [](const Rounding& r) { return r.mode == RoundingMode::stochastic; });
  if (chain.size() > 1 && !random && !e.special) {
    e.rounded_once = exact.round(chain.back()).value;
    e.rounded_twice = e.rounded_once != e.value && !std::isnan(e.value);
  }
  return e;
}

// -------------------------------------------------------------------------------------------------- sums

Literal running_literal(float value) { return {shortest(value), value, value, false}; }

// From the left, one operation after another.
float add_in_order(Explanation& e, const std::vector<ExpressionTerm>& terms, const ExplainOptions& options) {
  float sum = terms[0].a.value;
  for (size_t i = terms[0].b ? 0 : 1; i < terms.size(); ++i) {
    std::vector<ExpressionTerm> pair;
    if (i > 0) pair.push_back({running_literal(sum), std::nullopt});
    pair.push_back(terms[i]);
    e.steps.push_back(explain_operation(pair, {options.in}, {options.seed, i}));
    sum = e.steps.back().value;
    const Direction direction = e.steps.back().roundings[0].direction;
    ++(direction == Direction::up     ? e.rounded_up
       : direction == Direction::down ? e.rounded_down
                                      : e.not_rounded);
  }
  return sum;
}

// The first term, where it is no product, is the accumulator; the others are products (a number is a product
// with 1).
float add_in_blocks(Explanation& e, const std::vector<ExpressionTerm>& terms, const TensorCoreModel& model) {
  std::vector<float> a, b;
  const auto operand = [&](const Literal& literal) {
    const float rounded = round_to({.format = model.operand}, literal.value);
    if (rounded != literal.value && !std::isnan(literal.value))
      throw std::invalid_argument(literal.text + " is no number of " + to_string(model.operand) +
                                  ", the tensor core's operand: expected one, such as the nearest, " +
                                  shortest(rounded) +
                                  " (only the first number may be FP32: the accumulator)");
    return literal.value;
  };
  for (size_t i = terms[0].b ? 0 : 1; i < terms.size(); ++i) {
    a.push_back(operand(terms[i].a));
    b.push_back(terms[i].b ? operand(*terms[i].b) : 1.0f);
  }
  e.tensor_core = tensor_core_trace(model, a, b, terms[0].b ? 0.0f : terms[0].a.value);
  return e.tensor_core->result;
}

Explanation explain_sum(const std::vector<ExpressionTerm>& terms, const ExplainOptions& options) {
  Explanation e;
  e.operation = Operation::sum;
  add_operands(e, terms);
  ExactSum exact;
  for (const ExpressionTerm& term : terms) exact.add(exact_of(term));
  const float sum =
      options.tensor_core ? add_in_blocks(e, terms, *options.tensor_core) : add_in_order(e, terms, options);
  e.accumulated_error = error_of(sum, exact);
  std::vector<Rounding> chain;
  if (options.to && (options.tensor_core || *options.to != options.in)) chain.push_back(*options.to);
  finish(e, exact, exact_of(sum), sum, options.tensor_core ? Rounding{} : options.in, chain,
         {options.seed, terms.size()});
  return e;
}

}  // namespace

std::string code_text(uint32_t code, Format format) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  std::string text = "0x";
  for (int shift = (code_bits(format) + 3) / 4 * 4 - 4; shift >= 0; shift -= 4)
    text += kDigits[code >> shift & 15];
  return text;
}

std::vector<ExpressionTerm> parse_expression(std::string_view text) { return ExpressionReader(text).read(); }

NumberParts take_apart(Format format, float value) {
  NumberParts parts;
  parts.format = format;
  parts.value = value;
  parts.code = encode(format, value);
  parts.negative = std::signbit(value);
  const bool finite = std::isfinite(value);
  const ExactSum exact = exact_of(finite ? value : 0.0f);
  // Of zeros, Inf and NaN: as of the smallest number.
  const int leading = exact.is_zero() ? std::ilogb(min_subnormal(format)) : exact.leading();
  parts.exponent = point_exponent(format, leading);
  const int fraction_bits = parts.exponent - gap_exponent(format, leading);
  for (int i = code_bits(format) - 2; i >= (format.tapered ? fraction_bits : format.significand_bits); --i)
    parts.exponent_field += parts.code >> i & 1 ? '1' : '0';
  if (!finite) {
    parts.kind = std::isnan(value) ? NumberKind::nan : NumberKind::infinity;
    return parts;
  }
  parts.kind = value == 0                              ? NumberKind::zero
               : std::fabs(value) < min_normal(format) ? NumberKind::subnormal
                                                       : NumberKind::normal;
  parts.significand = point_digits(exact, parts.exponent, parts.exponent, parts.exponent - fraction_bits);
  return parts;
}

Explanation explain(const std::vector<ExpressionTerm>& terms, const ExplainOptions& options) {
  bool products = false;
  for (const ExpressionTerm& term : terms) products |= term.b.has_value();
  const bool two_products = terms.size() == 2 && terms[0].b && terms[1].b;
  if (terms.size() > 2 || two_products || options.tensor_core) return explain_sum(terms, options);
  return explain_operation(terms, chain_of(options, terms.size() > 1 || products), {options.seed, 0});
}

std::string shortest(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x < 0 ? "-inf" : "inf";
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, x);
  return std::string(buffer, end);
}

}  // namespace evenkeel
