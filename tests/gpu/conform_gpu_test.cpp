// conform on the kernels that run on this GPU: the default remedy and zero_sum leave no bias and no noise beyond the
// bound, and plain flash2 is found out. EVENKEEL_SLOW=1: on every family of inputs.
#include <gtest/gtest.h>

#include <cstdlib>

#include "diagnosis/conform_gpu.h"

namespace evenkeel {
namespace {

std::vector<ConformCase> cases(std::initializer_list<std::string_view> names) {
  std::vector<ConformCase> chosen;
  for (const ConformCase& c : conform_cases())
    if (std::getenv("EVENKEEL_SLOW") || std::find(names.begin(), names.end(), c.name) != names.end())
      chosen.push_back(c);
  return chosen;
}

std::vector<ConformPlan> judged(std::initializer_list<const char*> texts, const std::vector<ConformCase>& on,
                                int64_t rows) {
  std::vector<ConformPlan> plans;
  for (const char* text : texts) plans.push_back({text, parse_plan(text), {}});
  GpuConform gpu;
  conform(plans, on, rows, /*seed=*/1, gpu.kernel(), {}, /*constant_feature=*/true);
  for (const std::string& use : gpu.uses()) printf("  %s\n", use.c_str());
  return plans;
}

void print(const ConformPlan& plan) {
  for (const ConformResult& r : plan.results)
    printf("  %-32s %-18s mean %+.2e  z %+7.1f  rms %.2e  bound %.2e\n", plan.name.c_str(),
           std::string(r.case_name).c_str(), r.residual.mean(), r.residual.z(), r.residual.rms(),
           r.noise_bound());
}

TEST(ConformGpu, remedies_pass) {
  const auto on = cases({"random", "ties_2_tail", "ties_7", "sink", "row_max_zero", "scores_100",
                         "common_offset", "loss_feedback", "masked_rows", "one_row", "odd_rows"});
  for (const ConformPlan& plan :
       judged({"flash2,stabiliser=consistent", "flash2,stabiliser=zero_sum"}, on, kBiasRows)) {
    print(plan);
    for (const ConformResult& r : plan.results)
      EXPECT_TRUE(r.passes()) << plan.name << " on " << r.case_name << ": " << r.nonfinite
                              << " not finite, z " << r.residual.z() << ", rms " << r.residual.rms() << " of "
                              << r.noise_bound();
  }
}

// Rows that see one key, far away: exact on the kernels that are chosen here, by a second launch of their forward pass.
TEST(ConformGpu, far_rows_pass) {
  const auto on = cases({"far_one_key", "far_padding"});
  for (const ConformPlan& plan :
       judged({"flash2", "flash2,stabiliser=wide_output", "flash2,stabiliser=zero_sum"}, on, 6400)) {
    print(plan);
    for (const ConformResult& r : plan.results) {
      if (r.one_key_rows == 0) continue;  // EVENKEEL_SLOW: other families
      EXPECT_TRUE(r.passes()) << plan.name << " on " << r.case_name << ": " << r.verdict();
    }
  }
}

TEST(ConformGpu, any_plan_remedies_pass) {
  const auto on = cases({"ties_2_tail", "sink", "scores_100"});
  for (const ConformPlan& plan :
       judged({"bf16_all,stabiliser=consistent", "bf16_all,stabiliser=zero_sum", "fp32"}, on, kBiasRows)) {
    print(plan);
    for (const ConformResult& r : plan.results) EXPECT_TRUE(r.passes()) << plan.name << " on " << r.case_name;
  }
}

// E4M3 operands, whose P is rounded to four bits in the forward pass alone: zero_sum keeps the sum, and without it leaks.
TEST(ConformGpu, eight_bits_keep_the_sum) {
  const auto on = cases({"random", "ties_2_tail", "sink", "scores_100", "common_offset"});
  const std::vector<ConformPlan> plans =
      judged({"fp8_trains,stabiliser=zero_sum", "fp8_trains"}, on, kBiasRows);
  for (const ConformPlan& plan : plans) print(plan);
  for (const ConformResult& r : plans[0].results) EXPECT_TRUE(r.passes()) << r.case_name;
  EXPECT_FALSE(plans[1].passes());
}

// The test of the test, and what the CPU's table says of the same plans.
TEST(ConformGpu, leaks_are_found) {
  for (const ConformPlan& plan : judged({"flash2", "bf16_all"}, cases({"sink", "ties_2_tail"}), 6400)) {
    print(plan);
    EXPECT_FALSE(plan.passes()) << plan.name;
  }
}

}  // namespace
}  // namespace evenkeel
