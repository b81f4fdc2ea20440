// What decides which work a call of a model puts on the stream. Internal to src/model.
#pragma once

#include <cstdint>
#include <tuple>

namespace evenkeel::device {

struct CallKind {
  int64_t B, T;
  bool backward;
  float loss_scale;
  bool score_facts = false, tie_facts = false, residual_facts = false;
  int64_t fact_sequences = 0;  // of ties and residuals: the first so many of B
  uint64_t plan_version = 0;
  bool writes_gradients = false;  // other than adds to them: a graph of its own

  bool has_facts() const { return score_facts || attention_has_facts(); }
  bool attention_has_facts() const { return tie_facts || residual_facts; }
  // The loss is a mean over tokens, and so is the z-loss of keel: the scale of every gradient of a step.
  float gradient_scale() const { return loss_scale / static_cast<float>(B * T); }
  auto tie() const {
    return std::tie(B, T, backward, loss_scale, score_facts, tie_facts, residual_facts, fact_sequences,
                    plan_version, writes_gradients);
  }
  bool operator<(const CallKind& other) const { return tie() < other.tie(); }
};

}  // namespace evenkeel::device
