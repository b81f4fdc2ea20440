// Captures: what is accepted has the shapes that a probe relies on.
#include "diagnosis/capture.h"

#include "fuzz/fuzz.h"

using namespace evenkeel;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string file(fuzz::text_of(data, size));
  fuzz::accepts([&] {
    const Capture c = read_capture(Safetensors(bytes_of(file), "f"), "f");
    const AttentionProblem shape =
        problem_of(c.attention_problem(), c.inputs());  // throws where they do not fit
    fuzz::must(c.d_o.shape() == c.q.shape(), "dO has the shape of q");
    fuzz::must(c.plans.size() == c.heads.size() && c.heads.size() == static_cast<size_t>(shape.H),
               "a plan a head");
    fuzz::must(c.has_weights() == !c.w_v.values().empty(), "all weights or none");
    fuzz::must(c.x.values().empty() || c.x.shape()[2] == shape.T, "x has a row for each of q's");
    for (const PrecisionPlan& plan : c.plans)
      fuzz::must(parse_plan(to_string(plan)) == plan, "a plan reads back");
  });
  return 0;
}
