#include "attention/head_plan.h"

namespace evenkeel {
namespace {

// Does the rounding of Pb times a power of two give the rounded Pb times that power? Each row has a power of its own.
bool commutes_with_powers(const Rounding& r) {
  const SharedScale& shared = r.shared;
  if (shared == SharedScale{}) return r.format.has_nan && !r.format.tapered;
  const bool own_row = shared.group <= ScaleGroup::row && shared.outer <= ScaleGroup::row;
  return own_row && !(shared.rule == ScaleRule::e4m3 && shared.outer == ScaleGroup::none);
}

}  // namespace

HeadPlan::HeadPlan(const PrecisionPlan& asked) : plan(asked) {
  const StabiliserRules& rules = rules_of(plan.stabiliser);
  sums_rounded = rules.sum == SumRule::rounded_probs;
  wide_output = rules.output == OutputRule::wide;
  probs_delta = rules.delta == DeltaRule::probs;
  centres_keys = rules.keys == KeyRule::centred || plan.keys == KeyRule::centred;
  centres_queries = plan.queries == QueryRule::centred;
  const bool commutes = rules.shift == ShiftRule::power_of_two && is_identity(plan.at(Site::shifted)) &&
                        commutes_with_powers(plan.at(Site::probs));
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
  for (Site site : {Site::k, Site::v, Site::k_bwd, Site::v_bwd})
    if (a.plan.at(site) != b.plan.at(site)) return false;
  return a.plan.seed == b.plan.seed && a.centres_keys == b.centres_keys;
}

}  // namespace evenkeel
