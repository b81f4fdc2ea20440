// One head's plan, resolved: the stabiliser's rules applied to the formats of the sites. Every implementation starts
// from this. Plain C++, for host code of CPU and GPU. Internal to src/attention.
#pragma once

#include "attention/precision_plan.h"
#include "attention/row_shift.h"

namespace evenkeel {

struct HeadPlan {
  explicit HeadPlan(const PrecisionPlan& asked);

  // Sites as the rules change them. OutputRule::wide: output_for_delta is FP32, or what the plan says of it where that
  // is not what it says of output (e8m15: eight more bits than BF16). SumRule::rounded_probs: dprobs is FP32, where any
  // fused kernel has it, since delta knows nothing of a rounding of dP.
  PrecisionPlan plan;
  ShiftParameters shift;
  // SumRule::rounded_probs. The backward pass must find the forward's Pb again, to the bit. With a shift by powers of
  // two it does: a later, larger m scales by a power of two, and rounding commutes with that. It does not with any other
  // shift, where S - m is itself rounded (site shifted), or where rows share a scale. Then a pass of its own finds the
  // row's maximum (max_first).
  bool sums_rounded;
  bool max_first;
  bool wide_output;   // OutputRule::wide
  bool shadow;        // wide_output, and pv or row_sum is rounded: a second O-bar and l are kept, unrounded
  bool probs_delta;   // DeltaRule::probs
  bool centres_keys;  // KeyRule::centred, of the stabiliser or the plan
  bool centres_queries;  // QueryRule::centred

  bool power_shift() const { return shift.rule == ShiftRule::power_of_two; }
};

// Do two heads of one group read k and v alike, so that one copy of the operands serves both?
bool read_keys_alike(const HeadPlan& a, const HeadPlan& b);

}  // namespace evenkeel
