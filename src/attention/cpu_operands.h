// What a call of CPU attention works out before its tiles: k and v as the products read them. Internal to
// src/attention.
#pragma once

#include <vector>

#include "attention/attention.h"
#include "attention/attention_kernels.h"
#include "attention/head_plan.h"
#include "base/sizes.h"
#include "numerics/tensor_core.h"

namespace evenkeel {

// target[n] = source[n * stride].
void copy_strided(float* target, const float* source, int64_t stride, int64_t count);

// The stream of random numbers of a site (or of the rows' shifts) in this layer and step.
inline constexpr uint32_t kShiftStream = 63;
static_assert(kSiteCount <= static_cast<int>(kShiftStream));
inline RandomKey stream_key(const AttentionProblem& problem, const PrecisionPlan& plan, uint32_t stream) {
  return {plan.seed, problem.step, problem.layer * 64 + stream};
}

// k and v of every sequence and head: packed, keys centred where asked, rounded at their sites. Heads of one
// group share a copy unless their plans differ in it. Memory: O(B G N D).
class Operands {
 public:
  Operands(const AttentionProblem& problem, const std::vector<HeadPlan>& plans, const AttentionInputs& in,
           SiteObserver* observer);

  int64_t stride() const { return stride_; }  // D padded to kColumnStep, with zeros
  const float* k(int64_t b, int64_t h, int64_t key) const {
    return k_.data() + offset(b, h, key);
  }  // (N, stride)
  const float* v(int64_t b, int64_t h, int64_t key) const {
    return v_.data() + offset(b, h, key);
  }  // (N, stride)
  // The mean key that centre_keys took away; zeros elsewhere. (stride)
  const float* mean_key(int64_t b, int64_t h) const {
    return mean_.data() + (b * copies_ + copy_of_head_[static_cast<size_t>(h)]) * stride_;
  }

 private:
  int64_t offset(int64_t b, int64_t h, int64_t key) const {
    return ((b * copies_ + copy_of_head_[static_cast<size_t>(h)]) * keys_ + key) * stride_;
  }

  int64_t keys_, stride_, copies_ = 0;
  std::vector<int64_t> copy_of_head_;  // (H)
  std::vector<float> k_, v_;           // (B, copies, N, stride)
  std::vector<float> mean_;            // (B, copies, stride)
};

// What every tile of one call shares.
struct Call {
  const AttentionProblem& problem;     // complete
  const std::vector<HeadPlan>& plans;  // (H)
  const AttentionInputs& in;
  const Operands& operands;
  SiteObserver* observer;
  const AttentionKernels& kernels = attention_kernels();

  // Whole vectors, and whole blocks of a tensor core, which adds over rows in dK and dV.
  static constexpr int64_t kRowStep = 32;
  static_assert(kRowStep % kColumnStep == 0 && kRowStep % kMaxBlockTerms == 0);
  int64_t tile_rows() const { return round_up(std::min(problem.tile_rows, problem.T), kRowStep); }
  int64_t tile_keys() const {
    return problem.tile_keys == 0 ? problem.N : std::min(problem.tile_keys, problem.N);
  }
};

}  // namespace evenkeel
