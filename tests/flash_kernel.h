// A tiled attention kernel in plain FP32 loops, written for the judge's tests alone: online softmax forward, recomputing
// backward, everything that a form may ask for. With some of the faults that kernels have been shipped with.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <vector>

#include "diagnosis/conform_judge.h"
#include "numerics/round_array.h"

namespace evenkeel::flash {

enum class Bug {
  late_rescale,
  row_sum_not_rescaled,
  mask_at_tile_edge,
  window_too_wide,
  last_tile_dropped,
  exp_without_maximum,
  delta_of_next_head,
  biased_dk,
  sinks_not_in_lse,
  packed_off_by_one,
  random_dq,
  fp16_dscores,
  writes_outside,
  hides_nan,
  coarse_lse,
  // Those of public_bugs, in its order.
  empty_half_tile,      // a backward pass with a mask scores keys beyond the last 0, up to a multiple of 128
  single_row_tail,      // the same of one row
  fp16_scores,          // the backward pass has scores of FP16, without the scale
  delta_of_sequence_0,  // with heads of 256: delta of the first sequence for all
  unrounded_row_sum,    // FlashAttention-2's: rounded numerators, delta from the rounded O
  rounded_probs_in_ds,  // both factors of dS are rounded
  fused_exponent,  // 2^fma(S, c, -m'), m' = m c rounded: P of the largest score is not 1 where m is large
};

using Bugs = std::vector<Bug>;

class Kernel {
 public:
  Kernel(const ConformForm& form, const FormTensors& t, const Bugs& bugs, int64_t tile, uint32_t call)
      : f_(form), t_(t), tile_(tile), call_(call), type_(rounding_of(form.type)), a_(form.softmax_scale()) {
    for (Bug bug : bugs) bugs_ |= bit_of(bug);
  }

  void run() {
    const auto rows = static_cast<size_t>(f_.batch() * f_.H * f_.all_rows());
    m_.assign(rows, 0), l_ = delta_ = m_;
    dk_.assign(static_cast<size_t>(f_.batch() * f_.G * f_.all_keys() * f_.D), 0);
    dv_.assign(static_cast<size_t>(f_.batch() * f_.G * f_.all_keys() * f_.Dv), 0);
    sinks_.assign(static_cast<size_t>(f_.H), 0);
    for_each_row([this](const Row& row) { forward(row); });
    for_each_row([this](const Row& row) { find_delta(row); });
    for_each_row([this](const Row& row) { backward(row); });
    Rounding of_dk = type_;
    if (has(Bug::biased_dk)) of_dk.mode = RoundingMode::toward_zero;
    round_array(of_dk, t_.dk, dk_.data(), dk_.size());
    round_array(type_, t_.dv, dv_.data(), dv_.size());
    round_array(type_, t_.dq, t_.dq, static_cast<size_t>(f_.batch() * f_.H * f_.all_rows() * f_.D));
    for (int64_t h = 0; t_.grad_sinks && h < f_.H; ++h) t_.grad_sinks[h] = sinks_[static_cast<size_t>(h)];
    if (has(Bug::writes_outside)) t_.o[-1] = 0;
  }

 private:
  static uint32_t bit_of(Bug bug) { return uint32_t{1} << static_cast<int>(bug); }
  bool has(Bug bug) const { return (bugs_ & bit_of(bug)) != 0; }
  struct Row {
    int64_t b, h, i, number, keys, first_key, kv;  // kv: the key head's first row in k and v
  };
  template <class Body>
  void for_each_row(Body body) {
    for (int64_t b = 0; b < f_.B; ++b)
      for (int64_t h = 0; h < f_.H; ++h)
        for (int64_t i = 0; i < f_.rows(b); ++i) {
          const int64_t batch = f_.packed ? 0 : b, g = h / (f_.H / f_.G);
          int64_t first_key = f_.packed ? t_.key_starts[b] : 0;
          if (has(Bug::packed_off_by_one) && f_.packed && b > 0) --first_key;
          const int64_t first_row = f_.packed ? t_.query_starts[b] : 0;
          body(Row{b, h, i, (batch * f_.H + h) * f_.all_rows() + first_row + i, f_.keys(b), first_key,
                   (batch * f_.G + g) * f_.all_keys() + first_key});
        }
  }
  bool sees(const Row& row, int64_t j) const {
    const int64_t position = row.i + row.keys - f_.rows(row.b);
    const int64_t wider = has(Bug::window_too_wide) ? 1 : 0;
    if (f_.causal && j > position && !(has(Bug::mask_at_tile_edge) && j == position + 1 && j % tile_ == 0))
      return false;
    if (f_.window_left >= 0 && j < position - f_.window_left - wider) return false;
    if (f_.window_right >= 0 && j > position + f_.window_right) return false;
    return !t_.visible || t_.visible[((row.b * f_.H + row.h) * f_.T + row.i) * f_.N + j] != 0;
  }
  int64_t last_key(const Row& row) const {
    return has(Bug::last_tile_dropped) && row.keys > tile_ ? row.keys / tile_ * tile_ : row.keys;
  }
  float score(const Row& row, int64_t j, float* slope = nullptr) const {
    float sum = 0;
    const float *q = t_.q + row.number * f_.D, *k = t_.k + (row.kv + j) * f_.D;
    for (int64_t d = 0; d < f_.D; ++d) sum += q[d] * k[d];
    if (slope && has(Bug::fp16_scores)) sum = round_to(Rounding{kFp16}, sum);
    sum *= a_;
    if (f_.softcap == 0) return sum;
    const float tanh = std::tanh(sum / f_.softcap);
    if (slope) *slope = 1 - tanh * tanh;
    return f_.softcap * tanh;
  }

  float numerator(float s, float m) const {
    constexpr auto c = static_cast<float>(1 / std::numbers::ln2);
    const float rounded = m * c;
    return has(Bug::fused_exponent) ? std::exp2(std::fma(s, c, -rounded)) : std::exp(s - m);
  }

  void forward(const Row& row) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    std::vector<float> o(static_cast<size_t>(f_.Dv)), s(static_cast<size_t>(tile_));
    const float sink = t_.sinks ? t_.sinks[row.h] : kNone;
    float m = sink, l = t_.sinks ? 1.0f : 0.0f;
    if (has(Bug::exp_without_maximum)) m = 0, l = t_.sinks ? std::exp(sink) : 0.0f;
    for (int64_t begin = 0; begin < last_key(row); begin += tile_) {
      const int64_t count = std::min(tile_, last_key(row) - begin);
      float next = m;
      for (int64_t n = 0; n < count; ++n) {
        s[static_cast<size_t>(n)] = sees(row, begin + n) ? score(row, begin + n) : kNone;
        if (!has(Bug::exp_without_maximum)) next = std::max(next, s[static_cast<size_t>(n)]);
      }
      if (next == kNone) continue;
      const float alpha = m == kNone ? 0 : std::exp(m - next);
      if (!has(Bug::row_sum_not_rescaled)) l *= alpha;
      if (!has(Bug::late_rescale))
        for (float& x : o) x *= alpha;
      for (int64_t n = 0; n < count; ++n) {
        const float unrounded = numerator(s[static_cast<size_t>(n)], next);
        l += unrounded;
        const float p = has(Bug::unrounded_row_sum) ? round_to(type_, unrounded) : unrounded;
        if (p == 0) continue;
        const float* const v = t_.v + (row.kv + begin + n) * f_.Dv;
        const bool hides_nan = has(Bug::hides_nan);
        for (size_t d = 0; d < o.size(); ++d) o[d] += p * (hides_nan && std::isnan(v[d]) ? 0 : v[d]);
      }
      if (has(Bug::late_rescale) && m != kNone)
        for (float& x : o) x *= alpha;
      m = next;
    }
    m_[static_cast<size_t>(row.number)] = m, l_[static_cast<size_t>(row.number)] = l;
    const bool empty = l == 0 && !has(Bug::exp_without_maximum);
    for (int64_t d = 0; d < f_.Dv; ++d)
      t_.o[row.number * f_.Dv + d] = empty ? 0 : round_to(type_, o[static_cast<size_t>(d)] / l);
    float kept = l;
    if (has(Bug::sinks_not_in_lse) && t_.sinks) kept -= std::exp(sink - m);
    t_.lse[row.number] = empty ? kNone : m + std::log(kept);
  }

  float probability(const Row& row, int64_t j, float* slope) const {
    if (!sees(row, j)) return 0;
    const float m = m_[static_cast<size_t>(row.number)], l = l_[static_cast<size_t>(row.number)];
    const float s = score(row, j, slope);
    // From L as it was kept, in BF16: the paper's arithmetic at its worst.
    if (has(Bug::coarse_lse)) return std::exp(s - round_to(Rounding{kBf16}, m + std::log(l)));
    return std::exp(s - m) / l;
  }
  float dp(const Row& row, int64_t j) const {
    float sum = 0;
    const float *d_o = t_.grad_output + row.number * f_.Dv, *v = t_.v + (row.kv + j) * f_.Dv;
    for (int64_t d = 0; d < f_.Dv; ++d) sum += d_o[d] * v[d];
    return sum;
  }
  // sum P dP, of the probabilities that the backward pass has.
  void find_delta(const Row& row) {
    float sum = 0, slope = 1;
    if (has(Bug::unrounded_row_sum)) {
      for (int64_t d = 0; d < f_.Dv; ++d)
        sum += t_.o[row.number * f_.Dv + d] * t_.grad_output[row.number * f_.Dv + d];
      delta_[static_cast<size_t>(row.number)] = sum;
      return;
    }
    for (int64_t j = 0; j < last_key(row); ++j)
      if (const float p = probability(row, j, &slope); p != 0) sum += p * dp(row, j);
    delta_[static_cast<size_t>(row.number)] = sum;
  }

  static void add_times(float factor, const float* x, float* to, int64_t count) {
    for (int64_t n = 0; n < count; ++n) to[n] += factor * x[n];
  }
  void backward(const Row& row) {
    int64_t of = row.number;
    if (has(Bug::delta_of_next_head) && f_.H > 1) of += (row.h + 1 == f_.H ? 1 - f_.H : 1) * f_.all_rows();
    if (has(Bug::delta_of_sequence_0) && f_.D == 256 && !f_.packed) of -= row.b * f_.H * f_.all_rows();
    const float grad_l = t_.grad_lse ? t_.grad_lse[row.number] : 0, delta = delta_[static_cast<size_t>(of)];
    std::vector<float> dq(static_cast<size_t>(f_.D));
    const auto add_key = [&](int64_t j) {
      float slope = 1;
      const float p = probability(row, j, &slope);
      if (p == 0) return;
      float away = dp(row, j) - delta + grad_l;
      if (has(Bug::rounded_probs_in_ds)) away = round_to(type_, away);
      float ds = (has(Bug::rounded_probs_in_ds) ? round_to(type_, p) : p) * away;
      // FP16 loses dS in its range: kept in FP32 unless that is the bug.
      if (f_.type != FormType::fp16 || has(Bug::fp16_dscores)) ds = round_to(type_, ds);
      ds *= a_ * slope;
      const int64_t key = row.kv + j;
      add_times(ds, t_.k + key * f_.D, dq.data(), f_.D);
      add_times(ds, t_.q + row.number * f_.D, dk_.data() + key * f_.D, f_.D);
      add_times(p, t_.grad_output + row.number * f_.Dv, dv_.data() + key * f_.Dv, f_.Dv);
    };
    const int64_t keys = last_key(row);
    // Sums in another order in every other call.
    const bool reversed = has(Bug::random_dq) && call_ % 2 == 1;
    for (int64_t j = 0; j < keys; ++j) add_key(reversed ? keys - 1 - j : j);
    // A key that is not there: its score, its k and its v are 0, and so is the part of a masked sum.
    const float beyond = std::exp(-t_.lse[row.number]) * 0.0f;
    if (has(Bug::empty_half_tile) && t_.visible && keys % 128 == 64)
      for (float& x : dq) x += beyond;
    if (has(Bug::single_row_tail) && f_.T == 1 && keys % 128 == 0) {
      for (float& x : dk_) x += beyond;
      for (float& x : dv_) x += beyond;
    }
    std::copy(dq.begin(), dq.end(), t_.dq + row.number * f_.D);
    if (t_.sinks && l_[static_cast<size_t>(row.number)] > 0) {
      const float p = std::exp(t_.sinks[row.h] - m_[static_cast<size_t>(row.number)]) /
                      l_[static_cast<size_t>(row.number)];
      sinks_[static_cast<size_t>(row.h)] += p * (grad_l - delta_[static_cast<size_t>(row.number)]);
    }
  }

  const ConformForm& f_;
  const FormTensors& t_;
  uint32_t bugs_ = 0;  // a bit each: they are asked for in the innermost loops
  const int64_t tile_;
  const uint32_t call_;
  const Rounding type_;
  const float a_;
  std::vector<float> m_, l_, delta_, dk_, dv_, sinks_;  // (rows) each, and gradients
};

inline FormKernel kernel(const Bugs& bugs, int64_t tile = 32) {
  return [bugs, tile, call = uint32_t{0}](const ConformForm& form, const FormTensors& t) mutable {
    Kernel(form, t, bugs, tile, call++).run();
    return FormAnswer::done;
  };
}

}  // namespace evenkeel::flash
