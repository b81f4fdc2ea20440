// The backward pass of one tile of rows.
#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/row_tile.h"

namespace evenkeel {

void RowTile::backward(int64_t b, int64_t h, int64_t first_row, const BackwardTask& task) {
  start(b, h, first_row);
  // Where rows are not written the observer sees this tile in the pass that does.
  observer_ = task.write_rows ? call_.observer : nullptr;
  pack(call_.in.q, Site::q_bwd, q_, qt_);
  pack(task.grad_output, Site::grad_output, do_, dot_);
  if (observer_ || plan().at(Site::grad_output_for_dprobs) != plan().at(Site::grad_output))
    pack(task.grad_output, Site::grad_output_for_dprobs, spare_, dot_);
  const size_t tile_size = at(call_.tile_keys() * width_);
  dp_.resize(tile_size);
  operand_.resize(tile_size);
  dqt_.assign(at(D_ * width_), 0.0f);
  residual_.assign(at(width_), 0.0);
  floor_.assign(at(width_), 0.0);
  prob_sum_.assign(at(width_), 0.0);
  load_row_values(task.saved);
  find_delta(task);

  const bool facts = task.write_rows && (task.out.residual.present() || task.out.residual_floor.present());
  floor_wanted_ = task.out.residual_floor.present();
  for_each_key_tile([&](int64_t key, int64_t keys) {
    if (key < task.first_key || key >= task.last_key) return;
    recompute_tile(key, keys);
    if (task.dv) {
      // P as operand of dV is rounded apart from the P that dS uses.
      const bool rounded = observer_ || !is_identity(plan().at(Site::probs_bwd));
      if (rounded) {
        std::copy_n(tile_.begin(), keys * width_, operand_.begin());
        round_lines(Site::probs_bwd, operand_.data(), keys, key, call_.problem.N, key);
      }
      add_over_rows(Site::probs_bwd, keys, rounded ? operand_.data() : tile_.data(), do_.data(),
                    task.dv + (key - task.first_key) * depth_);
    }
    score_gradients(key, keys, facts);
    if (task.write_rows)
      multiply(Site::dscores, D_, columns_, keys, call_.operands.k(b_, h_, key), 1, depth_, dp_.data(),
               width_, dqt_.data(), width_, true);
    if (task.dk)
      add_over_rows(Site::dscores, keys, dp_.data(), q_.data(), task.dk + (key - task.first_key) * depth_);
  });
  if (!task.write_rows) return;
  if (head_->centres_keys && plan().keel != 0) add_keel_of_mean_key(task.saved);
  round_lines(Site::dq, dqt_.data(), D_, 0, D_, 0);
  unpack(task.out.dq, dqt_);
  if (task.out.delta.present()) unpack_row_values(task.out.delta, delta_);
  if (facts) write_facts(task);
}

// sums[key][d] += sum over the tile's rows, by groups of rows that no choice of tile_rows parts: a promotion ends with its
// group.
void RowTile::add_over_rows(Site operand, int64_t keys, const float* left, const float* right,
                            float* sums) const {
  for (int64_t i = 0; i < rows_; i += kScaleTileRows) {
    const int64_t last = std::min(i + kScaleTileRows, rows_);
    multiply(operand, keys, depth_, last - i, left + i, width_, 1, right + i * depth_, depth_, sums, depth_,
             true);
    if (operand == Site::dscores && head_->centres_queries) add_mean_query(keys, i, last, sums);
  }
}

// dK's other part, in FP32: (sum over rows [first, last) of dS) mean, where q holds queries less that mean. dQ has no such
// part: the mean's gradient through q - mean and that through what the scores get back cancel.
void RowTile::add_mean_query(int64_t keys, int64_t first, int64_t last, float* dk) const {
  const float* const mean = mean_query(first);
  for (int64_t j = 0; j < keys; ++j) {
    float sum = 0;
    for (int64_t i = first; i < last; ++i) sum += dp_[at(j * width_ + i)];
    for (int64_t d = 0; d < D_; ++d) dk[j * depth_ + d] += sum * mean[d];
  }
}

// m_ and sum_ as the forward pass left them; lse_ as the exponent's shift; a row without keys gets 0 for
// -inf.
void RowTile::load_row_values(const AttentionForward& saved) {
  m_.assign(at(width_), 0.0f);
  sum_.assign(at(width_), 1.0f);
  lse_.assign(at(width_), 0.0f);
  for (int64_t i = 0; i < rows_; ++i) {
    const float m = *saved.row_max.at(b_, h_, row_ + i), l = *saved.row_sum.at(b_, h_, row_ + i);
    if (m == RowShift::kNone && l == 0) continue;
    m_[at(i)] = m;
    sum_[at(i)] = l;
    lse_[at(i)] = m + std::log(l);  // the forward's L to the bit, but of centred keys where they are
  }
}

// tile_ = P and dp_ = dP. The observer sees the scores' rounding in the forward pass, not again here.
void RowTile::recompute_tile(int64_t key, int64_t keys) {
  key_ = key;
  SiteObserver* const observer = std::exchange(observer_, nullptr);
  score_tile(key, keys);
  if (call_.problem.softcap > 0) {
    // d(c tanh(s / c)) / ds = 1 - tanh^2, from the capped score; masked entries are multiplied by P = 0.
    softcap_.resize(at(call_.tile_keys() * width_));
    for (int64_t n = 0; n < keys * width_; ++n) {
      const float t = tile_[at(n)] == RowShift::kNone ? 0.0f : tile_[at(n)] / call_.problem.softcap;
      softcap_[at(n)] = 1.0f - t * t;
    }
  }
  if (head_->sums_rounded) {
    // The very Pb of the forward pass, over their own sum.
    if (head_->power_shift()) {
      kernels_.exp_scaled(tile_.data(), keys, columns_, width_, m_.data());
    } else {
      kernels_.subtract(tile_.data(), keys, columns_, width_, m_.data());
      round_shifted(keys);
      kernels_.exp_shifted(tile_.data(), keys, columns_, width_, zeros_.data(), unused_.data());
    }
    round_lines(Site::probs, tile_.data(), keys, key, call_.problem.N, key);
    kernels_.divide_columns(tile_.data(), tile_.data(), keys, columns_, width_, sum_.data());
  } else {
    kernels_.exp_shifted(tile_.data(), keys, columns_, width_, lse_.data(), unused_.data());
  }
  observer_ = observer;
  multiply(Site::v_bwd, keys, columns_, Dv_, call_.operands.v(b_, h_, key), depth_, 1, dot_.data(), width_,
           dp_.data(), width_, /*accumulate=*/false);
  round_lines(Site::dprobs, dp_.data(), keys, key, call_.problem.N, key);
}

void RowTile::find_delta(const BackwardTask& task) {
  delta_.assign(at(width_), 0.0f);
  float* const shared =
      task.shared_delta ? task.shared_delta + head_index() * call_.problem.T + row_ : nullptr;
  if (shared && !task.write_rows) {
    std::copy_n(shared, rows_, delta_.begin());
    return;
  }
  if (head_->probs_delta) {
    // delta = sum P dP / sum P makes the row of dS sum to zero whatever is wrong with P. A pass of its own.
    SiteObserver* const observer = std::exchange(observer_, nullptr);
    factor_.assign(at(width_), 0.0f);
    for_each_key_tile([&](int64_t key, int64_t keys) {
      recompute_tile(key, keys);
      kernels_.column_dot(tile_.data(), dp_.data(), keys, columns_, width_, delta_.data());
      kernels_.column_sum(tile_.data(), keys, columns_, width_, factor_.data());
    });
    observer_ = observer;
    if (!call_.problem.sinks.empty())
      for (int64_t i = 0; i < rows_; ++i)
        factor_[at(i)] += std::exp(call_.problem.sinks[at(h_)] - *task.saved.lse.at(b_, h_, row_ + i));
    for (int64_t i = 0; i < columns_; ++i)
      delta_[at(i)] = factor_[at(i)] == 0 ? 0.0f : delta_[at(i)] / factor_[at(i)];
  } else {
    pack_plain(task.saved.o_for_delta, o_);
    kernels_.column_dot(dot_.data(), o_.data(), Dv_, columns_, width_, delta_.data());
  }
  if (plan().keel != 0)
    for (int64_t i = 0; i < rows_; ++i) {
      const float lse = *task.saved.lse.at(b_, h_, row_ + i);
      if (lse != RowShift::kNone) delta_[at(i)] -= 2 * plan().keel * lse;
    }
  if (task.out.grad_lse.present())
    for (int64_t i = 0; i < rows_; ++i)
      if (*task.saved.lse.at(b_, h_, row_ + i) != RowShift::kNone)
        delta_[at(i)] -= *task.out.grad_lse.at(b_, h_, row_ + i);
  round_lines(Site::delta, delta_.data(), 1, 0, 1, 0);
  if (shared) std::copy_n(delta_.begin(), rows_, shared);
}

// A row of dS sums to zero but for keel's part, so centred keys give the same dQ but for that part.
void RowTile::add_keel_of_mean_key(const AttentionForward& saved) {
  const float* mean_key = call_.operands.mean_key(b_, h_);
  for (int64_t i = 0; i < rows_; ++i) {
    const float lse = *saved.lse.at(b_, h_, row_ + i);
    if (lse == RowShift::kNone) continue;
    const float sum = call_.problem.scale * 2 * plan().keel * lse;
    for (int64_t d = 0; d < D_; ++d) dqt_[at(d * width_ + i)] += sum * mean_key[d];
  }
}

// dp_ = dS = a P (dP - delta), through softcap, rounded. With softcap the residual is taken before its derivative, whose
// slopes would hide it; else from what dQ and dK receive.
void RowTile::score_gradients(int64_t key, int64_t keys, bool facts) {
  kernels_.score_gradient(tile_.data(), dp_.data(), keys, columns_, width_, delta_.data(),
                          call_.problem.scale);
  if (call_.problem.softcap > 0) {
    if (facts) measure_residual(keys, Rounding{});
    for (int64_t n = 0; n < keys * width_; ++n) dp_[at(n)] *= softcap_[at(n)];
    facts = false;
  }
  round_lines(Site::dscores, dp_.data(), keys, key, call_.problem.N, key);
  if (facts) measure_residual(keys, plan().at(Site::dscores));
}

// Adds dp_ to the rows' residuals, and the variance of one rounding to their floors, which takes most of
// the time and is left out where nobody asks.
void RowTile::measure_residual(int64_t keys, const Rounding& rounding) {
  const bool shared = rounding.shared != SharedScale{};
  const int64_t group = group_columns(rounding.shared, keys), per_row = scales_per_row(rounding.shared, keys);
  const double inverse_scale = 1.0 / call_.problem.scale;
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t n = j * width_ + i;
      if (tile_[at(n)] == 0) continue;
      prob_sum_[at(i)] += tile_[at(n)];
      residual_[at(i)] += dp_[at(n)] * inverse_scale;
      if (!floor_wanted_) continue;
      const float scale = shared ? scales_[at(i * per_row + j / group)] : 1.0f;
      if (scale == 0) continue;
      const double gap =
          static_cast<double>(ulp(rounding.format, dp_[at(n)] / scale)) * scale * inverse_scale;
      floor_[at(i)] += gap * gap / 12;  // of an error spread evenly over one gap
    }
}

void RowTile::write_facts(const BackwardTask& task) {
  for (int64_t i = 0; i < rows_; ++i) {
    const float lse = *task.saved.lse.at(b_, h_, row_ + i);
    // keel leaves 2 z L sum P in the row on purpose, a gradient of L its own part, and a sink what it takes itself.
    const double dL = task.out.grad_lse.present() ? double{*task.out.grad_lse.at(b_, h_, row_ + i)} : 0.0;
    double meant = 0;
    if (lse != RowShift::kNone) {
      const double pull = 2.0 * plan().keel * lse + dL;
      meant = pull * prob_sum_[at(i)];
      if (!call_.problem.sinks.empty())
        meant += std::exp(double{call_.problem.sinks[at(h_)]} - lse) * (delta_[at(i)] + pull);
    }
    if (task.out.residual.present()) *task.out.residual.at(b_, h_, row_ + i) = residual_[at(i)] - meant;
    if (task.out.residual_floor.present())
      *task.out.residual_floor.at(b_, h_, row_ + i) = std::sqrt(floor_[at(i)]);
  }
}

}  // namespace evenkeel
