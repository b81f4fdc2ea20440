#include "attention/head_plan.h"

namespace evenkeel {

HeadPlan::HeadPlan(const PrecisionPlan& asked) : plan(asked) {
  const StabiliserRules& rules = rules_of(plan.stabiliser);
  sums_rounded = rules.sum == SumRule::rounded_probs;
  wide_output = rules.output == OutputRule::wide;
  probs_delta = rules.delta == DeltaRule::probs;
  centres_keys = rules.keys == KeyRule::centred;
  const bool commutes = rules.shift == ShiftRule::power_of_two && is_identity(plan.at(Site::shifted));
  max_first = sums_rounded && !commutes;
  // With the maximum known beforehand nothing is scaled later: a power of two has no use.
  shift = {rules.shift == ShiftRule::power_of_two && max_first ? ShiftRule::row_max : rules.shift, plan.beta,
           plan.cap, plan.tie_tolerance};
  shadow = wide_output && !(is_identity(plan.at(Site::pv)) && is_identity(plan.at(Site::row_sum)));
  if (wide_output && plan.at(Site::output_for_delta) == plan.at(Site::output))
    plan.at(Site::output_for_delta) = Rounding{};
  if (sums_rounded) plan.at(Site::dprobs) = Rounding{};
  if (rules.output == OutputRule::stochastic)
    for (Site site : {Site::output, Site::output_for_delta}) plan.at(site).mode = RoundingMode::stochastic;
}

bool read_keys_alike(const HeadPlan& a, const HeadPlan& b) {
  return a.plan.at(Site::k) == b.plan.at(Site::k) && a.plan.at(Site::v) == b.plan.at(Site::v) &&
         a.plan.seed == b.plan.seed && a.centres_keys == b.centres_keys;
}

}  // namespace evenkeel
