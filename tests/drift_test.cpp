// The failure at its smallest, and its cures: one head, a few hundred steps, seconds.
#include "diagnosis/drift.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/threads.h"

namespace evenkeel {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kSteps = 60;
#else
constexpr int64_t kSteps = 900;
#endif

DriftPoint end_of(const char* plan, uint64_t seed = 1, int64_t steps = kSteps) {
  DriftSettings settings;
  settings.steps = steps;
  settings.points = 10;
  settings.seed = seed;
  return run_drift(parse_plan(plan), settings).back();
}

TEST(Drift, ARoundedRowSumDerailsAndTheSumCures) {
  if (kSteps < 900) GTEST_SKIP() << "too few steps under a sanitizer";
  for (uint64_t seed : {1, 2}) {
    const double healthy = end_of("fp32", seed).offset;
    EXPECT_LT(healthy, 15);
    EXPECT_GT(end_of("fp32,row_sum=e5m2", seed).offset, 100);
    EXPECT_GT(end_of("fp32,row_sum=e5m2/stochastic", seed).offset, 100);
    EXPECT_LT(end_of("fp32,row_sum=e5m2,stabiliser=zero_sum", seed).offset, 15);
    EXPECT_LT(end_of("fp32,row_sum=e5m2,keel=1e-3", seed).offset, 20);
  }
}

// The same error in delta hurts only where the loss has seen it too, or where it has one sign of itself.
TEST(Drift, TheLossMakesTheBias) {
  if (kSteps < 900) GTEST_SKIP() << "too few steps under a sanitizer";
  EXPECT_GT(end_of("fp32,output=e8m2/stochastic").offset, 100);
  EXPECT_LT(end_of("fp32,output=e8m2/stochastic,output_for_delta=fp32").offset, 20);
  EXPECT_LT(end_of("fp32,output_for_delta=e8m2/stochastic").offset, 20);
  EXPECT_LT(end_of("fp32,output=e8m2,output_for_delta=e8m2/stochastic").offset, 20);
  EXPECT_GT(end_of("fp32,output_for_delta=e8m2/toward_zero", 1, 2500).offset, 100);
}

TEST(Drift, RepeatsToTheBitForAnyThreadCount) {
  const int threads = thread_count();
  set_thread_count(1);
  const DriftPoint one = end_of("bf16_all,row_sum=e5m2/stochastic");
  set_thread_count(3);
  const DriftPoint three = end_of("bf16_all,row_sum=e5m2/stochastic");
  set_thread_count(threads);
  EXPECT_EQ(one.loss, three.loss);
  EXPECT_EQ(one.offset, three.offset);
}

}  // namespace
}  // namespace evenkeel
