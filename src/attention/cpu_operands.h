// What a call of CPU attention works out before its tiles: k and v as the products read them. Internal to
// src/attention.
#pragma once

#include <array>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_kernels.h"
#include "attention/head_plan.h"
#include "base/sizes.h"
#include "numerics/round_block.h"
#include "numerics/tensor_core.h"

namespace evenkeel {

// target[n] = source[n * stride].
void copy_strided(float* target, const float* source, int64_t stride, int64_t count);

// Rows [first, first + rows) of one head of q or dO, packed: every `stride` floats of x. With `means`, (tiles, stride), each
// tile of rows less its mean, which goes there; `first` is a tile's first row.
void pack_rows(const View<const float>& from, int64_t b, int64_t h, int64_t first, int64_t rows, float* x,
               int64_t stride, float* means);

// The stream of random numbers of a site (or of the rows' shifts) in this layer and step.
inline constexpr uint32_t kShiftStream = 63;
static_assert(kSiteCount <= static_cast<int>(kShiftStream));
inline RandomKey stream_key(const AttentionProblem& problem, const PrecisionPlan& plan, uint32_t stream) {
  return {plan.seed, problem.step, problem.layer * 64 + stream};
}

// Rounds rows of a head's operand, `columns` values each, every `stride` floats. Where tiles or blocks of a column share
// scales, rows start at a multiple of kScaleTileRows. `largest` is of what shares a scale beyond these rows
// (Operands::largest). Value j of row i draws number first_element + i * columns + j.
void round_rows(const Rounding& rounding, float* x, int64_t rows, int64_t columns, int64_t stride,
                LargestBeyond largest, const RandomKey& key, uint64_t first_element);

enum class Pass { forward, backward };

// k and v of every sequence and head: packed, keys centred where asked, rounded at their sites of this pass. Heads of one
// group share a copy unless their plans differ in it. Memory: O(B G N D).
class Operands {
 public:
  // grad_output: of the backward pass.
  Operands(const AttentionProblem& problem, const std::vector<HeadPlan>& plans, const AttentionInputs& in,
           View<const float> grad_output, Pass pass, SiteObserver* observer);

  int64_t stride() const { return stride_; }  // the larger of D and Dv padded to kColumnStep, with zeros
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
  Pass pass() const { return pass_; }
  // Of q and dO: the largest magnitude of the head, or of all heads of the sequence; and of each column of the head.
  // Nothing where the rounding at the site has no scale that so many values share.
  LargestBeyond largest(Site site, int64_t b, int64_t h) const {
    const Largest& of = largest_[static_cast<size_t>(site)];
    if (of.of_head.empty()) return {};
    const size_t head = static_cast<size_t>(b) * copy_of_head_.size() + static_cast<size_t>(h);
    return {of.of_head[head], of.of_columns.data() + head * (of.of_columns.size() / of.of_head.size())};
  }

 private:
  void choose_copies(const AttentionProblem& problem, const std::vector<HeadPlan>& plans);
  void find_largest(const AttentionProblem& problem, const std::vector<HeadPlan>& plans, Site site,
                    const View<const float>& x);
  int64_t offset(int64_t b, int64_t h, int64_t key) const {
    return ((b * copies_ + copy_of_head_[static_cast<size_t>(h)]) * keys_ + key) * stride_;
  }

  struct Largest {
    std::vector<float> of_head, of_columns;  // (B, H), (B, H, columns)
  };

  Pass pass_;
  int64_t keys_, stride_, copies_ = 0;
  std::vector<int64_t> copy_of_head_;  // (H)
  std::vector<int64_t> owner_;         // of each copy: the first head that reads it
  std::array<Largest, kSiteCount> largest_;
  std::vector<float> k_, v_;  // (B, copies, N, stride)
  std::vector<float> mean_;   // (B, copies, stride)
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
  // Whole tiles of shared scales and of promotions, too.
  int64_t tile_rows() const {
    return round_up(std::min(problem.tile_rows, problem.T), needs_whole_tiles() ? kScaleTileRows : kRowStep);
  }
  bool needs_whole_tiles() const;
  int64_t tile_keys() const {
    return problem.tile_keys == 0 ? problem.N : std::min(problem.tile_keys, problem.N);
  }
};

}  // namespace evenkeel
