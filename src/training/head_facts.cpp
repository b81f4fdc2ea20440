#include "training/head_facts.h"

#include <array>
#include <cmath>
#include <type_traits>

namespace evenkeel {
namespace {

// What a step has of a fact whose parts have as many rows each.
enum class Over {
  largest,  // NaN where one is
  mean,
  mean_square,  // the root of the mean of squares
  error,        // of a mean of means: the root of the sum of squares, over the number of parts
};

struct Row {
  HeadFact fact;
  Over over;
  double (*get)(const HeadFacts&);
  void (*set)(HeadFacts&, double);
};

template <auto Member>
constexpr Row row(HeadFact fact, Over over) {
  return {fact, over, [](const HeadFacts& f) { return static_cast<double>(f.*Member); },
          [](HeadFacts& f, double x) { f.*Member = static_cast<std::decay_t<decltype(f.*Member)>>(x); }};
}

constexpr std::array<Row, kHeadFactCount> kRows = {{
    row<&HeadFacts::largest_score>(HeadFact::largest_score, Over::largest),
    row<&HeadFacts::largest_row_mean>(HeadFact::offset, Over::largest),
    row<&HeadFacts::mean_lse>(HeadFact::mean_lse, Over::mean),
    row<&HeadFacts::largest_lse>(HeadFact::largest_lse, Over::largest),
    row<&HeadFacts::key_share>(HeadFact::key_share, Over::mean),
    row<&HeadFacts::tied_rows>(HeadFact::tied_rows, Over::mean),
    row<&HeadFacts::residual_mean>(HeadFact::leak_mean, Over::mean),
    row<&HeadFacts::residual_error>(HeadFact::leak_error, Over::error),
    row<&HeadFacts::residual_rms>(HeadFact::leak_rms, Over::mean_square),
    row<&HeadFacts::delta_rms>(HeadFact::delta_rms, Over::mean_square),
}};
constexpr bool in_order() {
  for (size_t n = 0; n < kRows.size(); ++n)
    if (kRows[n].fact != static_cast<HeadFact>(n)) return false;
  return true;
}
static_assert(in_order());

double over_parts(Over over, std::span<const double* const> parts, size_t which) {
  const auto count = static_cast<double>(parts.size());
  double largest = parts[0][which], sum = 0, squares = 0;
  for (const double* const part : parts) {
    const double x = part[which];
    if (!(x <= largest)) largest = x;  // NaN stays
    sum += x;
    squares += x * x;
  }
  switch (over) {
    case Over::largest:
      return largest;
    case Over::mean:
      return sum / count;
    case Over::mean_square:
      return std::sqrt(squares / count);
    case Over::error:
      return std::sqrt(squares / count / count);
  }
  return largest;
}

}  // namespace

double value_of(const HeadFacts& facts, HeadFact fact) { return kRows[static_cast<size_t>(fact)].get(facts); }

std::vector<double> values_of(std::span<const HeadFacts> heads, HeadFact fact) {
  std::vector<double> values;
  values.reserve(heads.size());
  for (const HeadFacts& facts : heads) values.push_back(value_of(facts, fact));
  return values;
}

void append_numbers(const HeadFacts& facts, std::vector<double>& numbers) {
  for (const Row& row : kRows) numbers.push_back(row.get(facts));
}

HeadFacts combined_facts(std::span<const double* const> parts) {
  HeadFacts facts;
  for (size_t n = 0; n < kRows.size(); ++n) kRows[n].set(facts, over_parts(kRows[n].over, parts, n));
  return facts;
}

}  // namespace evenkeel
