// Numbers and expressions as `explain` reads them, and the explanation of whatever was accepted. The first
// byte picks how it is explained, the rest is the expression.
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "fuzz/fuzz.h"
#include "numerics/explain.h"

using namespace evenkeel;

namespace {

bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

bool same(const std::vector<ExpressionTerm>& x, const std::vector<ExpressionTerm>& y) {
  if (x.size() != y.size()) return false;
  for (size_t i = 0; i < x.size(); ++i)
    if (!same(x[i].a.value, y[i].a.value) || x[i].b.has_value() != y[i].b.has_value() ||
        (x[i].b && !same(x[i].b->value, y[i].b->value)))
      return false;
  return true;
}

std::string written(const std::vector<ExpressionTerm>& terms) {
  std::string text;
  for (const ExpressionTerm& term : terms) {
    text += (text.empty() ? "" : " + ") + shortest(term.a.value);
    if (term.b) text += " * " + shortest(term.b->value);
  }
  return text;
}

ExplainOptions options_of(uint8_t choice) {
  ExplainOptions options;
  const Rounding kStores[] = {
      {}, {kBf16}, {kFp16, RoundingMode::up}, {kE4m3, RoundingMode::stochastic, true, 8}};
  options.in = kStores[choice & 3];
  if (choice & 4) options.to = kStores[choice >> 3 & 3];
  if (choice & 32) options.tensor_core = &find_tensor_core_model(choice & 64 ? kBf16 : kE4m3);
  options.seed = choice;
  return options;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::vector<ExpressionTerm> terms;
  if (!fuzz::accepts([&] { terms = parse_expression(fuzz::text_of(data + 1, size - 1)); })) return 0;
  fuzz::must(!terms.empty(), "an expression has a term");
  fuzz::must(same(parse_expression(written(terms)), terms),
             "an expression is the same written and read again");

  Explanation explanation;
  if (!fuzz::accepts([&] { explanation = explain(terms, options_of(data[0])); })) return 0;
  fuzz::must(!to_text(explanation, /*colour=*/true).empty(), "an explanation has words");
  fuzz::must(nlohmann::json::accept(to_json(explanation)), "an explanation is JSON");
  return 0;
}
