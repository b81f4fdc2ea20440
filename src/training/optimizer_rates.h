// The numbers of a step that every backend's optimiser shares: derived once, in FP64, on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "training/optimizer.h"

namespace evenkeel {

// Of the t-th applied step, t from 1.
struct StepRates {
  float rate;          // lr / (1 - beta1^t)
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
  float keep;          // 1 - lr weight_decay, of what decays

  StepRates(const OptimizerConfig& config, double lr, int64_t t)
      : rate(static_cast<float>(lr / (1 - std::pow(static_cast<double>(config.beta1), t)))),
        inverse_root(static_cast<float>(1 / std::sqrt(1 - std::pow(static_cast<double>(config.beta2), t)))),
        keep(static_cast<float>(1 - lr * config.weight_decay)) {}
};

// Muon's update has the root mean square 0.2 that AdamW's typically has, so both take the same learning rate and
// decay. An orthogonal matrix of r by c has 1 / sqrt(max(r, c)). (J. Liu et al., "Muon is scalable for LLM training",
// 2025.)
inline float muon_scale(double lr, int64_t rows, int64_t columns) {
  return static_cast<float>(lr * 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns))));
}

// Newton-Schulz: x <- A x + (B g + C g g) x with g = x x^T, so many times. Of Jordan, 2024: steep at 0, and settles
// near 1 without converging.
inline constexpr float kNewtonSchulzA = 3.4445f, kNewtonSchulzB = -4.7750f, kNewtonSchulzC = 2.0315f;
inline constexpr int kNewtonSchulzSteps = 5;

}  // namespace evenkeel
