// The failure at its smallest: one causal attention head, trained by Adam to imitate another, with a
// precision plan. Seconds on one core. It shows what mechanism and cure are, not when a real run fails.
//
// Every token shares one feature (as tokens behind a LayerNorm do), so that W_Q and W_K can add a constant to
// all scores of a row. Softmax cannot see it, exact gradients along it are zero, and whatever a plan's
// rounding leaves in the sum of a row of dS moves it, step after step.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/precision_plan.h"

namespace evenkeel {

struct DriftSettings {
  int64_t steps = 3000;
  int64_t points = 30;  // measurements over the run
  float learning_rate = 0.01f;
  uint64_t seed = 1;
};

struct DriftPoint {
  int64_t step;
  double loss;       // mean over the steps since the last point
  double offset;     // largest |mean score of a row|: the direction softmax cannot see
  double max_score;  // largest |score|
};

// Deterministic for the same plan and settings.
std::vector<DriftPoint> run_drift(const PrecisionPlan& plan, const DriftSettings& settings = {});

}  // namespace evenkeel
