// The failure and its cure in a whole model: a small GPT-2 on synthetic text, 400 steps at a learning rate that a healthy
// run bears. Only the offset is judged (the largest row mean of the scores, which softmax cannot see): it moves long
// before the loss. Text, batches and sums are the same bits everywhere, so the figures are, too. Of three seeds this one
// drifts first; healthy and cured runs stay below 40 with all. docs/experiments.md has the full-size runs.
#include <gtest/gtest.h>

#include <algorithm>

#include "isolation_cases.h"

namespace evenkeel {
namespace {

double last_offset(const std::string& plan, bool llama = false) {
  PlantedRun planted;
  if (llama) planted.as_llama();
  planted.config.plan = plan;
  planted.config.schedule.steps = llama ? 301 : 401;  // facts of the last step are asked for
  planted.config.checkpoint_every = 0;
  const auto trainer = Trainer::start(planted.run(), planted.config);
  while (!trainer->done()) trainer->step();
  double offset = 0;
  for (const HeadFacts& f : trainer->model().facts())
    offset = std::max(offset, static_cast<double>(f.largest_row_mean));
  printf("  %-40s offset %.0f\n", plan.c_str(), offset);
  return offset;
}

TEST(Derail, a_two_bit_row_sum_drifts_and_with_its_sum_restored_does_not) {
  SKIP_LONG_RUNS();
  const double healthy = last_offset("fp32");
  const double derailed = last_offset("fp32,row_sum=e5m2");
  const double cured = last_offset("fp32,row_sum=e5m2,stabiliser=zero_sum");
  EXPECT_LT(healthy, 100);
  EXPECT_LT(cured, 100);
  EXPECT_GT(derailed, 10 * std::max(healthy, cured));
}

// Rotary positions leave an offset the slow pairs of features (docs/experiments.md): the other family drifts as well, and is
// rescued by the same means. Its healthy offsets stay below 100 with three seeds.
TEST(Derail, so_does_a_llama_and_zero_sum_rescues_it) {
  SKIP_LONG_RUNS();
  const double derailed = last_offset("fp32,row_sum=e5m2", /*llama=*/true);
  const double cured = last_offset("fp32,row_sum=e5m2,stabiliser=zero_sum", /*llama=*/true);
  EXPECT_LT(cured, 100);
  EXPECT_GT(derailed, 10 * cured);
}

}  // namespace
}  // namespace evenkeel
