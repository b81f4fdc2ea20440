// Precision plans as text: parse_plan and ScopedPlan::parse.
#include "attention/precision_plan.h"
#include "fuzz/fuzz.h"

using namespace evenkeel;

namespace {

void check_round_trip(const PrecisionPlan& plan) {
  const std::string written = to_string(plan);
  fuzz::must(parse_plan(written) == plan, "a plan is the same after to_string and parse_plan");
  fuzz::must(to_string(parse_plan(written)) == written, "to_string of the same plan is the same text");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = fuzz::text_of(data, size);
  PrecisionPlan plan;
  const bool is_plan = fuzz::accepts([&] { plan = parse_plan(text); });
  if (is_plan) check_round_trip(plan);

  ScopedPlan scoped;
  const bool is_scoped_plan = fuzz::accepts([&] { scoped = ScopedPlan::parse(text); });
  // Errors show when the text is read, never later, at the layer they are meant for.
  if (is_scoped_plan)
    for (int layer : {0, 1, 2, 11, 1 << 20})
      for (int head : {0, 3, 7, 1 << 20}) check_round_trip(scoped.at(layer, head));
  if (is_plan) {
    fuzz::must(is_scoped_plan, "a plan is a scoped plan of one clause");
    fuzz::must(!scoped.is_scoped() && scoped.at(0, 0) == plan, "without scopes both readings agree");
  }

  fuzz::accepts([&] { fuzz::must(name(parse_site(text)) == text, "a site is called by its name"); });
  fuzz::accepts(
      [&] { fuzz::must(name(parse_stabiliser(text)) == text, "a stabiliser is called by its name"); });
  return 0;
}
