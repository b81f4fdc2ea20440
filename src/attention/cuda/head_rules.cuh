// What a head's plan asks of the fast kernels. One for all heads, or a table in device memory. Internal to src/attention.
#pragma once

#include <algorithm>

#include "attention/attention_problem.h"
#include "attention/head_plan.h"
#include "gpu/cuda/device_function.cuh"

namespace evenkeel {

struct HeadRules {
  float keel, beta, cap, tie_tolerance;
  float slack;  // how far a row's largest score may pass its shift, in powers of two, before it is moved
  bool dither;
  bool paper_capped;
  bool consistent;   // shifts by powers of two, sums of rounded probabilities
  bool wide;         // O for delta has a residue
  bool exact_delta;  // zero_sum
  uint64_t seed;
};

inline HeadRules head_rules(const PrecisionPlan& asked) {
  const HeadPlan plan(asked);
  HeadRules rules{};
  rules.keel = asked.keel;
  rules.beta = asked.beta;
  rules.cap = asked.cap;
  rules.tie_tolerance = asked.tie_tolerance;
  // A shift may stay behind the row's largest score for a while: P is then at most 2^8, and O need not be scaled for each
  // new maximum (5 % of the time on Hopper). A shift by powers of two changes no rounding by that. `row_max` stays exact:
  // with a shift that lags, scores that tie with the maximum would no longer have P = 1. The failure that the stabiliser
  // `none` is there to show would be hidden.
  rules.slack = may_lag(plan.shift.rule) ? 8.0f : 0.0f;
  rules.dither = plan.shift.rule == ShiftRule::dither;
  rules.paper_capped = plan.shift.rule == ShiftRule::paper_capped;
  rules.consistent = plan.sums_rounded;
  rules.wide = plan.wide_output;
  rules.exact_delta = plan.probs_delta;
  rules.seed = asked.seed;
  return rules;
}

// Shifts beyond this (in powers of two) are far: rounding them takes more than 2^-14 from the exponents. The first launch of a
// forward pass has plain shifts and notes far rows; a second one computes those again, with exact shifts (numerics.md).
inline constexpr float kFar = 1024;
EK_DEVICE bool is_far(float shift) { return fabsf(shift) >= kFar && shift != -INFINITY; }
// Do far rows of these heads take a second launch? (consistent rounds alike in both passes; random shifts are no score's.)
EVENKEEL_HOST_DEVICE inline bool has_second_launch(const HeadRules& rules) {
  return !rules.consistent && !rules.paper_capped && !rules.dither;
}

template <class F>
bool any_head(const AttentionProblem& problem, F f) {
  return std::any_of(problem.plans.begin(), problem.plans.end(),
                     [&](const PrecisionPlan& plan) { return f(head_rules(plan)); });
}

// Heads' rules that a kernel's arguments carry to the table in device memory: a graph that is replayed has them.
struct TableRows {
  static constexpr int kMost = 64;
  HeadRules row[kMost];
  HeadRules* table;
  int count;
};
struct FillTable {
  static constexpr int kThreads = TableRows::kMost, kBlocksAtOnce = 1;
  static constexpr size_t kSharedBytes = 0;
  EK_DEVICE static void run(const TableRows& rows) {
    if (static_cast<int>(threadIdx.x) < rows.count) rows.table[threadIdx.x] = rows.row[threadIdx.x];
  }
};
// fill(TableRows) for each piece of the table of a problem whose heads differ.
template <class Fill>
void fill_table(const AttentionProblem& problem, HeadRules* table, Fill fill) {
  for (size_t first = 0; first < problem.plans.size(); first += TableRows::kMost) {
    TableRows rows{};
    rows.table = table + first;
    rows.count = static_cast<int>(std::min<size_t>(TableRows::kMost, problem.plans.size() - first));
    for (int n = 0; n < rows.count; ++n)
      rows.row[n] = head_rules(problem.plans[first + static_cast<size_t>(n)]);
    fill(rows);
  }
}

}  // namespace evenkeel
