// What a kernel's leak means for training: how fast GPT-2 124M at a learning rate of 1e-3 would drift.
//
// The offset c of a head grows as d ln c / dt = 2 eta a N b |x|^2 / s. The mean leak b is what the loss itself makes of the
// kernel's rounding (docs/numerics.md, section 5). For one model and learning rate the time to a given offset goes as
// 1 / b. The family loss_feedback measures b in units of delta's root mean square. The times are those of our runs:
//   FlashAttention-2's arithmetic, b = -3.6e-4: GPT-2 124M, seed 1, constant rate, 16,384 tokens a step, passes an offset of
//   1,000 at step 4,000 on one text (docs/experiments.md) and at step 7,900 on another (docs/curves/size.json; there the loss
//   fails at step 18,200). PyTorch with its FLASH kernel was at 733 at step 14,000 on the first text. On the second it
//   passes 1,000 at step 8,550; the times above were fitted before that run.
//   With wide_output (b = -6.8e-6) the second run's offset never passes 435 in 20,000 steps.
//   At nano size seven runs of FlashAttention-2's arithmetic passed 1,000 at steps 2,425 to 7,800 (median 3,975). A row sum in
//   BF16 (b twice as large) did at 1,000 to 1,100 in four runs, the paper's arithmetic (twice as large) at 3,000. With zero_sum
//   (b below 1e-5) none did in 25,000 steps.
// So the time is known to a factor of three downwards and five upwards.
#pragma once

#include <optional>
#include <string>

#include "diagnosis/conform.h"

namespace evenkeel {

// Steps: the geometric mean of the two runs' 4,000 and 7,900.
inline constexpr double kRiskReferenceBias = 3.6e-4, kRiskReferenceSteps = 5600, kRiskOffset = 1000;
inline constexpr double kRiskFaster = 3, kRiskSlower = 5;
inline constexpr double kRiskLongRun = 100'000;  // steps: slower drifts count as none

struct Risk {
  double bias = 0, bias_error = 0;  // b and its standard error
  double steps = 0, earliest = 0,
         latest = 0;  // to an offset of kRiskOffset; infinite where b is 0 within its error
  bool drifts() const { return earliest < kRiskLongRun && bias > 4 * bias_error; }
};
// REQUIRES: a result of the family loss_feedback.
Risk risk_of(const ConformResult& loss_feedback);
// Of the plan's result of loss_feedback. None where it was not judged, or its outputs are not right.
std::optional<Risk> risk_of(const ConformPlan& judged);
// A sentence or two: "GPT-2 124M at lr 1e-3 is expected to pass an offset of 1,000 near step 5,600 (1,900 to 28,000) ..."
std::string in_words(const Risk& risk);

}  // namespace evenkeel
