#include "report/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>

#include "base/text.h"
#include "diagnosis/health.h"

namespace evenkeel {
namespace {

struct Term {
  std::string_view name;
  std::string meaning;
};
// One sentence each; the words are those of the command line and the records.
const Term kTerms[] = {
    {"loss", "The mean cross-entropy of the next token, in nats a token; training makes it smaller."},
    {"gradient norm", "The length of the gradient of all weights together, before clipping."},
    {"step", "One update of the weights, computed from one batch."},
    {"layer", "One of the model's blocks, counted from 0; each has its own attention."},
    {"head", "One of the independent attentions inside a layer, counted from 0."},
    {"site", "A named place in attention where a number is rounded, such as row_sum or output."},
    {"precision plan", "Which number format every site of attention has, by layer and head."},
    {"stabiliser",
     "A change to the kernel, without effect in exact arithmetic, that keeps the sum of each row of dS at "
     "zero."},
    {"score", "How well a query fits a key: their scaled product, before softmax."},
    {"row", "One query with all the keys it may look at: one softmax."},
    {"offset",
     "The largest absolute row mean of a head's scores. Softmax ignores a constant that is added to a row, "
     "so "
     "nothing in the loss pulls it back."},
    {"spread", "How far the scores of a row lie from their own mean: the part that softmax does see."},
    {"log-sum-exp",
     "The logarithm of a row's sum of exponentials: the number every flash kernel keeps, and a direct "
     "view of the offset."},
    {"drift", drift_in_words()},
    {"tie", "A row in which another score equals the largest, in the plan's own numbers."},
    {"delta", "The number each row's backward pass subtracts, so that its gradient sums to zero: dO · O."},
    {"delta error", "Delta as the plan computes it, less delta in 64 bits."},
    {"leak", "The sum of a row of dS. It is zero in exact arithmetic, so whatever is there is error."},
    {"confidence band", "Where the true mean lies in 95 of 100 cases, given how much the rows scatter."},
    {"spectral norm", "A matrix's largest singular value: the most by which it can stretch a vector."},
    {"W_Q", "The weights that make a head's queries."},
    {"PK", "The keys of a row averaged by its probabilities: where an error of delta pushes the query."},
    {"X", "What a layer's projections read: one row of features a token."},
    {"(PK)ᵀX",
     "The matrix of one token along which an error of its delta changes W_Q; alike for all tokens, the "
     "errors "
     "add up."},
    {"dO", "The gradient of the loss with respect to attention's output."},
    {"output error", "Attention's output as delta reads it, less the same in 64 bits."},
    {"V",
     "The values that attention averages; a feature in which all have one sign rounds in one direction."},
    {"O-bar", "The running sum of probabilities times values, before it is divided by the row sum."},
    {"row sum", "The sum of a row's exponentials, which the row is divided by; site row_sum."},
    {"feature", "One component of a vector."},
    {"round bit", "The first bit that is cut off: half a step of the format."},
    {"sticky bit", "Whether any bit after the round bit is 1: more than half, or just half."},
    {"control", "The same steps on the same batches with all of attention in FP32."},
    {"placebo", "The same steps with a change that cannot matter: it shows what chance alone does."},
    {"replay",
     "A stretch of the recorded run again, from a checkpoint, on its own batches, with one thing changed."},
    {"guard", "Watches the heads while a run trains, and switches zero_sum on in those that drift."},
    {"checkpoint", "Weights and optimiser on disk, from which the run can continue or be replayed."},
    {"finding", "Something that ended the run early, such as a loss that is not finite."},
    {"lead time", "Steps from an indicator's alarm to the step at which the loss moves."},
    {"zero_sum",
     "A stabiliser: delta is the mean of dP under the probabilities that the row uses, so the row of dS "
     "sums to zero whatever was rounded."},
    {"capture", "What one layer's attention read at one step, frozen in a file."},
};

std::string anchor(std::string_view name) {
  std::string id = "term-";
  for (const char c : name)
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) id += static_cast<char>(c | 0x20);
  return id;
}

constexpr std::string_view kSuperscripts[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};

std::string superscript(int n) {
  std::string text = n < 0 ? "⁻" : "";
  for (const char digit : std::to_string(std::abs(n))) text += kSuperscripts[digit - '0'];
  return text;
}

// "-12345.5" -> "−12,345.5"
std::string grouped(std::string text) {
  const bool negative = text.starts_with('-');
  if (negative) text.erase(0, 1);
  size_t point = std::min(text.find('.'), text.size());
  if (point > 4)
    for (size_t n = point; n > 3; n -= 3) text.insert(n - 3, ",");
  if (text.starts_with(',')) text.erase(0, 1);
  return (negative ? "−" : "") + text;
}

}  // namespace

std::string figure(double x, int digits) {
  if (std::isnan(x)) return "not known";
  if (std::isinf(x)) return "not finite";
  if (x == 0) return "0";
  const int exponent = static_cast<int>(std::floor(std::log10(std::fabs(x))));
  if (exponent < -4 || exponent > 6) {
    // As printed: 9.99 may round to 10.
    const std::string text = fmt::format("{:.{}e}", x, digits - 1);
    const size_t e = text.find('e');
    return grouped(text.substr(0, e)) + " × 10" + superscript(std::stoi(text.substr(e + 1)));
  }
  return grouped(fmt::format("{:.{}f}", x, std::max(0, digits - 1 - exponent)));
}

std::string count(int64_t n) { return grouped(std::to_string(n)); }

std::string power_of_ten(int exponent) {
  return exponent == 0 ? "1" : exponent == 1 ? "10" : "10" + superscript(exponent);
}

std::string term(std::string_view name, std::string_view shown) {
  const auto* found =
      std::find_if(std::begin(kTerms), std::end(kTerms), [&](const Term& t) { return t.name == name; });
  if (found == std::end(kTerms))
    throw std::logic_error(fmt::format("[report] expected a word of the glossary, got '{}'", name));
  const std::string id = anchor(name);
  return fmt::format("<a class=\"term\" href=\"#{}\" aria-describedby=\"{}-is\" data-is=\"{}\">{}</a>", id,
                     id, escape(found->meaning), shown.empty() ? escape(name) : std::string(shown));
}

std::string glossary() {
  std::string text = "<dl class=\"glossary\">\n";
  for (const Term& t : kTerms)
    text += fmt::format("<div id=\"{}\"><dt>{}</dt><dd id=\"{}-is\">{}</dd></div>\n", anchor(t.name),
                        escape(t.name), anchor(t.name), escape(t.meaning));
  return text + "</dl>\n";
}

}  // namespace evenkeel
