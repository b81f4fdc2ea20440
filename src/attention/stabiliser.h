// What the stabilisers are made of: five rules, for the shift of a row, its sum, the output that backward
// reads, delta, and the keys. A stabiliser is one row of kStabiliserTable. Every implementation reads
// the rules, never the name: a new combination of rules is a new row here and nothing else.
// Plain C++, for host and device code; free of tensors and threads. Costs and mechanism: docs/numerics.md.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#if defined(__CUDACC__)
#define EVENKEEL_HOST_DEVICE __host__ __device__
#else
#define EVENKEEL_HOST_DEVICE
#endif

namespace evenkeel {

// m, which is subtracted from a row's scores (row_shift.h has the arithmetic).
enum class ShiftRule : uint8_t {
  row_max,       // the largest score, exactly: scores that tie with it have P = 1
  lagging_max,   // the same, but a kernel may let m stay behind the maximum by a bounded factor to save time
  paper,         // arXiv 2510.04212 as its authors' code has it, tile by tile, holes included
  paper_capped,  // the same with the holes closed: bounded, never zero, ties counted across tiles
  dither,        // the maximum and the row's own random part of log 2; a kernel may let it lag too
  power_of_two,  // the maximum rounded up to a whole number of log 2; a kernel may let it lag too
};

// l, and the probabilities of the backward pass.
enum class SumRule : uint8_t {
  exact_probs,    // l sums Pb before its rounding; backward computes P = exp(S - L) afresh
  rounded_probs,  // l sums Pb after its rounding; backward uses these Pb over l, and dP is not rounded
};

// O, and the O that delta uses.
enum class OutputRule : uint8_t {
  planned,     // both rounded as the plan says
  stochastic,  // both in the plan's formats, rounded stochastically
  wide,  // the O for delta from pv and row_sum before they are rounded, in FP32 or the plan's own format for it
};

enum class DeltaRule : uint8_t {
  output,  // dO . O
  probs,   // sum P dP / sum P
};

enum class KeyRule : uint8_t {
  given,
  centred,  // the mean key is subtracted from every key
};

// As PrecisionPlan names it.
enum class Stabiliser {
  none,
  paper,
  paper_capped,
  dither,
  stochastic_output,
  centre_keys,
  wide_output,
  consistent,
  zero_sum,
};

struct StabiliserRules {
  Stabiliser stabiliser;
  std::string_view name;
  ShiftRule shift = ShiftRule::row_max;
  SumRule sum = SumRule::exact_probs;
  OutputRule output = OutputRule::planned;
  DeltaRule delta = DeltaRule::output;
  KeyRule keys = KeyRule::given;
};

// clang-format off
inline constexpr std::array kStabiliserTable = {
    StabiliserRules{Stabiliser::none, "none"},
    StabiliserRules{Stabiliser::paper, "paper", ShiftRule::paper},
    StabiliserRules{Stabiliser::paper_capped, "paper_capped", ShiftRule::paper_capped},
    StabiliserRules{Stabiliser::dither, "dither", ShiftRule::dither},
    StabiliserRules{Stabiliser::stochastic_output, "stochastic_output", ShiftRule::row_max, SumRule::exact_probs, OutputRule::stochastic},
    StabiliserRules{Stabiliser::centre_keys, "centre_keys", ShiftRule::row_max, SumRule::exact_probs, OutputRule::planned, DeltaRule::output, KeyRule::centred},
    StabiliserRules{Stabiliser::wide_output, "wide_output", ShiftRule::lagging_max, SumRule::exact_probs, OutputRule::wide},
    StabiliserRules{Stabiliser::consistent, "consistent", ShiftRule::power_of_two, SumRule::rounded_probs, OutputRule::wide},
    StabiliserRules{Stabiliser::zero_sum, "zero_sum", ShiftRule::lagging_max, SumRule::exact_probs, OutputRule::planned, DeltaRule::probs},
};
// clang-format on

constexpr const StabiliserRules& rules_of(Stabiliser s) { return kStabiliserTable[static_cast<size_t>(s)]; }
constexpr std::string_view name(Stabiliser s) { return rules_of(s).name; }

inline constexpr auto kStabiliserNames = [] {
  std::array<std::string_view, kStabiliserTable.size()> names{};
  for (size_t n = 0; n < names.size(); ++n) names[n] = kStabiliserTable[n].name;
  return names;
}();

static_assert(
    [] {
      for (size_t n = 0; n < kStabiliserTable.size(); ++n)
        if (kStabiliserTable[n].stabiliser != static_cast<Stabiliser>(n)) return false;
      return true;
    }(),
    "rows stand in the order of the enumeration");

// Does the rule count scores that tie with the maximum? Does it draw a random number for each row? May a kernel let m
// stay behind the row's maximum for a while?
EVENKEEL_HOST_DEVICE constexpr bool counts_ties(ShiftRule rule) {
  return rule == ShiftRule::paper || rule == ShiftRule::paper_capped;
}
EVENKEEL_HOST_DEVICE constexpr bool draws_number(ShiftRule rule) {
  return rule == ShiftRule::dither || rule == ShiftRule::paper_capped;
}
EVENKEEL_HOST_DEVICE constexpr bool may_lag(ShiftRule rule) {
  return rule == ShiftRule::lagging_max || rule == ShiftRule::dither || rule == ShiftRule::power_of_two;
}

}  // namespace evenkeel
