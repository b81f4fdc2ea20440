// Explanations as JSON, built by hand: this folder may use the standard library alone.
#include <algorithm>
#include <cmath>

#include "numerics/explain.h"

namespace evenkeel {
namespace {

std::string quoted(std::string_view text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string result = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (byte < 0x20) {
      result += "\\u00";
      result += kDigits[byte >> 4];
      result += kDigits[byte & 15];
    } else {
      result += c;
    }
  }
  return result + "\"";
}

std::string number(double x) { return std::isfinite(x) ? shortest(x) : quoted(shortest(x)); }

// {"key": value, ...} in the order of the calls.
class Object {
 public:
  Object& raw(std::string_view key, const std::string& json) {
    text_ += (text_.empty() ? "" : ",") + quoted(key) + ":" + json;
    return *this;
  }
  Object& add(std::string_view key, std::string_view value) { return raw(key, quoted(value)); }
  Object& add(std::string_view key, const std::string& value) { return raw(key, quoted(value)); }
  Object& add(std::string_view key, const char* value) { return raw(key, quoted(value)); }
  Object& add(std::string_view key, bool value) { return raw(key, value ? "true" : "false"); }
  Object& add(std::string_view key, double value) { return raw(key, number(value)); }
  Object& add(std::string_view key, float value) { return raw(key, number(value)); }
  Object& add(std::string_view key, int value) { return raw(key, std::to_string(value)); }
  Object& add(std::string_view key, int64_t value) { return raw(key, std::to_string(value)); }
  std::string str() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

template <class Items, class Render>
std::string array(const Items& items, Render render) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ",") + render(item);
  return "[" + text + "]";
}

std::string json_of(const NumberParts& x) {
  Object o;
  o.add("format", to_string(x.format)).add("value", x.value).add("code", code_text(x.code, x.format));
  o.add("kind", kNumberKindNames[static_cast<size_t>(x.kind)]).add("negative", x.negative);
  o.add("exponent", x.exponent).add("exponent_field", x.exponent_field).add("significand", x.significand);
  return o.str();
}

std::string json_of(const AlignedTerm& term) {
  Object o;
  o.add("name", term.name).add("negative", term.negative).add("shift", term.shift).add("digits", term.digits);
  return o.str();
}

std::string json_of(const RoundingStep& s) {
  Object o;
  o.add("rounding", to_string(s.rounding));
  o.add("mode", kRoundingModeNames[static_cast<size_t>(s.rounding.mode)]);
  o.add("before", s.before);
  if (!s.special) {
    o.add("exponent", s.exponent).add("kept", s.kept).add("cut", s.cut);
    o.add("toward_zero", s.toward_zero).add("away", s.away);
    o.add("round_bit", s.round_bit ? 1 : 0).add("sticky_bit", s.sticky_bit ? 1 : 0);
  }
  o.add("direction", kDirectionNames[static_cast<size_t>(s.direction)]).add("tie", s.tie);
  o.add("carried", s.carried).add("overflow", s.overflow);
  if (s.rounding.mode == RoundingMode::stochastic) o.add("random", static_cast<int64_t>(s.random));
  o.raw("after", json_of(s.after)).add("value", s.value).add("error", s.error);
  return o.str();
}

std::string json_of(const TensorCoreTerm& t) {
  Object o;
  o.add("index", static_cast<int64_t>(t.index)).add("a", t.a).add("b", t.b).add("value", t.value);
  o.add("takes_part", t.takes_part).add("exponent", t.exponent).add("shift", t.shift);
  o.add("aligned", t.aligned).add("lost", t.lost);
  return o.str();
}

std::string json_of(const TensorCoreBlock& b) {
  Object o;
  o.raw("terms", array(b.terms, [](const TensorCoreTerm& t) { return json_of(t); }));
  o.add("special", b.special).add("max_exponent", b.max_exponent).add("sum", b.sum).add("lost", b.lost);
  o.add("result", b.result).add("code", code_text(std::bit_cast<uint32_t>(b.result), kFp32));
  return o.str();
}

std::string json_of_step(const Explanation& e) {
  Object o;
  o.add("operation", kOperationNames[static_cast<size_t>(e.operation)]).add("expression", e.expression);
  int shift = 0;
  for (const AlignedTerm& term : e.aligned) shift = std::max(shift, term.shift);
  o.add("shift", shift).add("carry_out", e.carry_out).add("normalise", e.normalise).add("exact", e.exact);
  o.raw("roundings", array(e.roundings, [](const RoundingStep& s) { return json_of(s); }));
  o.add("value", e.value).add("error", e.error);
  return o.str();
}

}  // namespace

std::string to_json(const TensorCoreTrace& t) {
  Object o;
  o.add("chip", t.model.chip)
      .add("operand", to_string(t.model.operand))
      .add("block_terms", t.model.block_terms);
  o.add("alignment_bits", t.model.alignment_bits).add("output_bits", t.model.output_bits);
  o.add("min_exponent", t.model.min_exponent).add("passes", t.model.passes).add("addend", t.addend);
  o.raw("blocks", array(t.blocks, [](const TensorCoreBlock& b) { return json_of(b); }));
  o.add("result", t.result).add("code", code_text(std::bit_cast<uint32_t>(t.result), kFp32));
  return o.str();
}

std::string to_json(const Explanation& e) {
  Object o;
  o.add("operation", kOperationNames[static_cast<size_t>(e.operation)]).add("expression", e.expression);
  size_t index = 0;
  o.raw("operands", array(e.operands, [&](const NumberParts& x) {
          const Literal& literal = e.literals[index++];
          Object operand;
          operand.add("text", literal.text).add("read", literal.read).add("rounded_to_fp32", literal.rounded);
          return operand.raw("fp32", json_of(x)).str();
        }));
  if (!e.aligned.empty()) {
    o.raw("aligned", array(e.aligned, [](const AlignedTerm& term) { return json_of(term); }));
    o.add("exponent", e.exponent).add("exact_digits", e.exact_digits).add("exact_negative", e.exact_negative);
    o.add("carry_out", e.carry_out).add("normalise", e.normalise);
  }
  o.add("exact", e.exact).add("exact_in_double", e.exact_in_double);
  if (e.operation == Operation::sum) {
    if (e.tensor_core) {
      o.raw("tensor_core", to_json(*e.tensor_core));
    } else {
      o.raw("steps", array(e.steps, json_of_step));
      o.add("rounded_up", e.rounded_up).add("rounded_down", e.rounded_down).add("not_rounded", e.not_rounded);
    }
    o.add("accumulated_error", e.accumulated_error);
  }
  o.raw("roundings", array(e.roundings, [](const RoundingStep& s) { return json_of(s); }));
  o.raw("result", json_of(e.result))
      .add("value", e.value)
      .add("error", e.error)
      .add("error_steps", e.error_steps);
  o.add("rounded_twice", e.rounded_twice);
  if (e.rounded_twice) o.add("rounded_once", e.rounded_once);
  return o.str();
}

}  // namespace evenkeel
