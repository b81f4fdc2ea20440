// The forward pass of one tile of rows: online softmax over tiles of keys.
#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/row_tile.h"

namespace evenkeel {

void RowTile::forward(int64_t b, int64_t h, int64_t first_row, const AttentionForward& out) {
  start(b, h, first_row);
  pack(call_.in.q, Site::q, q_, qt_);
  const size_t rows = at(width_);
  shifts_.assign(rows, RowShift{});
  units_.assign(rows, 0.5f);
  if (draws_number(head_->shift.rule))
    for (int64_t i = 0; i < rows_; ++i)
      units_[at(i)] = random_unit(stream_key(call_.problem, plan(), kShiftStream),
                                  static_cast<uint64_t>(random_head() * call_.problem.T + row_ + i));
  sum_.assign(rows, 0.0f);
  wide_sum_.assign(rows, 0.0f);
  m_.assign(rows, 0.0f);
  factor_.assign(rows, 0.0f);
  tile_max_.assign(rows, 0.0f);
  o_.assign(at(Dv_ * width_), 0.0f);
  if (head_->shadow) wide_o_.assign(at(Dv_ * width_), 0.0f);
  tile_sum_.assign(rows, 0.0f);
  if (head_->max_first) find_maxima();

  const int64_t tiles = (call_.problem.N + call_.tile_keys() - 1) / call_.tile_keys();
  for_each_key_tile([&](int64_t key, int64_t keys) {
    const int64_t tile = key / call_.tile_keys();
    key_ = key;
    score_tile(key, keys);
    shift_rows(keys);
    // What was summed under the old shift, under the new one.
    if (std::any_of(factor_.begin(), factor_.begin() + columns_, [](float factor) { return factor != 1; })) {
      kernels_.scale_columns(sum_.data(), 1, columns_, width_, factor_.data());
      kernels_.scale_columns(wide_sum_.data(), 1, columns_, width_, factor_.data());
      kernels_.scale_columns(o_.data(), Dv_, columns_, width_, factor_.data());
      if (head_->shadow) kernels_.scale_columns(wide_o_.data(), Dv_, columns_, width_, factor_.data());
    }
    // Pb, rounded; its sum is added to l.
    probabilities(keys);
    const float* v = call_.operands.v(b_, h_, key);
    multiply(Site::probs, Dv_, columns_, keys, v, 1, depth_, tile_.data(), width_, o_.data(), width_, true);
    if (head_->shadow)
      multiply(Site::probs, Dv_, columns_, keys, v, 1, depth_, tile_.data(), width_, wide_o_.data(), width_,
               true);
    round_lines(Site::row_sum, sum_.data(), 1, tile, tiles, 0);
    round_lines(Site::pv, o_.data(), Dv_, tile * Dv_, tiles * Dv_, 0);
  });
  write_forward(out);
  if (out.ties.present()) write_ties(out.ties);
}

// The rows' maxima by a pass over all keys, so that the shift is final from the first tile on.
void RowTile::find_maxima() {
  SiteObserver* const observer = std::exchange(observer_, nullptr);  // will see these scores again
  for_each_key_tile([&](int64_t key, int64_t keys) {
    score_tile(key, keys);
    shift_rows(keys);
  });
  observer_ = observer;
}

// Takes the tile's scores into the rows' shifts: m_ for this tile, factor_ = exp(m before - m now).
void RowTile::shift_rows(int64_t keys) {
  std::fill_n(tile_max_.begin(), columns_, RowShift::kNone);
  kernels_.column_max(tile_.data(), keys, columns_, width_, tile_max_.data());
  std::fill_n(counts_.begin(), columns_, 0);
  if (counts_ties(head_->shift.rule)) {
    for (int64_t i = 0; i < columns_; ++i)
      m_[at(i)] = shifts_[at(i)].tie_threshold(head_->shift, tile_max_[at(i)]);
    count_at_least(m_, keys);
  }
  for (int64_t i = 0; i < columns_; ++i) {
    RowShift& shift = shifts_[at(i)];
    const float before = shift.m;
    shift.add_tile(head_->shift, tile_max_[at(i)], counts_[at(i)], units_[at(i)]);
    // A row without a key yet has nothing to scale; its scores are all -inf, and -inf - 0 is too.
    m_[at(i)] = shift.m == RowShift::kNone ? 0.0f : shift.m;
    factor_[at(i)] = before == RowShift::kNone ? RowShift::kNone : before - m_[at(i)];
    if (head_->power_shift())
      factor_[at(i)] = std::ldexp(1.0f, static_cast<int>(std::max(-300.0f, factor_[at(i)])));
  }
  if (!head_->power_shift())
    kernels_.exp_shifted(factor_.data(), 1, columns_, width_, zeros_.data(), unused_.data());
}

// tile_ = Pb rounded, from S; l grows by the tile's sum, which is added up from zero in the order of the
// keys.
void RowTile::probabilities(int64_t keys) {
  float* p = tile_.data();
  std::fill_n(tile_sum_.begin(), columns_, 0.0f);
  if (head_->power_shift()) {
    kernels_.exp_scaled(p, keys, columns_, width_, m_.data());
    kernels_.column_sum(p, keys, columns_, width_, tile_sum_.data());
  } else if (is_identity(plan().at(Site::shifted)) && !observer_) {
    kernels_.exp_shifted(p, keys, columns_, width_, m_.data(), tile_sum_.data());
  } else {
    kernels_.subtract(p, keys, columns_, width_, m_.data());
    round_shifted(keys);
    kernels_.exp_shifted(p, keys, columns_, width_, zeros_.data(), tile_sum_.data());
  }
  round_lines(Site::probs, p, keys, key_, call_.problem.N, key_);
  if (head_->sums_rounded) {  // l is the sum of the probabilities that are used
    std::fill_n(tile_sum_.begin(), columns_, 0.0f);
    kernels_.column_sum(p, keys, columns_, width_, tile_sum_.data());
  }
  for (int64_t i = 0; i < columns_; ++i) {
    sum_[at(i)] += tile_sum_[at(i)];
    wide_sum_[at(i)] += tile_sum_[at(i)];
  }
}

// S - m at its site. A masked -inf stays one, also in a format that has none.
void RowTile::round_shifted(int64_t keys) {
  const Rounding& rounding = plan().at(Site::shifted);
  const bool keeps_infinity = rounding.format.has_infinity && !rounding.saturate;
  if (observer_ || !keeps_infinity) exact_.assign(tile_.begin(), tile_.begin() + keys * width_);
  round_only(Site::shifted, tile_.data(), keys, key_, call_.problem.N);
  if (!keeps_infinity)
    for (int64_t n = 0; n < keys * width_; ++n)
      if (exact_[at(n)] == RowShift::kNone) tile_[at(n)] = RowShift::kNone;
  if (observer_) show(Site::shifted, tile_.data(), keys, key_);
}

// The sink's share of l, where a row sees keys. A sink that leaves them nothing makes l infinite: O = 0, and so is P.
void RowTile::add_sink(float sink) {
  for (int64_t i = 0; i < rows_; ++i) {
    if (shifts_[at(i)].max == RowShift::kNone) continue;
    const float share =
        std::exp(sink - (head_->power_shift() ? static_cast<float>(m_[at(i)] * kLog2) : m_[at(i)]));
    sum_[at(i)] += share;
    wide_sum_[at(i)] += share;
  }
}

void RowTile::write_forward(const AttentionForward& out) {
  // A row that sees no key: O = 0, L = -inf. (l = 0 with a key in sight is an underflow, and 0 / 0 shows it.)
  const auto no_key = [&](int64_t i) { return shifts_[at(i)].max == RowShift::kNone && sum_[at(i)] == 0; };
  const float* const sink = call_.problem.sinks.empty() ? nullptr : &call_.problem.sinks[at(h_)];
  if (sink) add_sink(*sink);
  const auto divide = [&](const std::vector<float>& o, const std::vector<float>& sum) {
    for (int64_t i = 0; i < columns_; ++i) factor_[at(i)] = no_key(i) ? 1.0f : sum[at(i)];
    normalised_.resize(at(Dv_ * width_));
    kernels_.divide_columns(normalised_.data(), o.data(), Dv_, columns_, width_, factor_.data());
  };
  divide(o_, sum_);
  round_lines(Site::output, normalised_.data(), Dv_, 0, Dv_, 0);
  unpack(out.o, normalised_);
  if (head_->wide_output || observer_ || plan().at(Site::output_for_delta) != plan().at(Site::output)) {
    divide(head_->shadow ? wide_o_ : o_, head_->wide_output ? wide_sum_ : sum_);
    round_lines(Site::output_for_delta, normalised_.data(), Dv_, 0, Dv_, 0);
  }
  unpack(out.o_for_delta, normalised_);

  const float* mean_key = call_.operands.mean_key(b_, h_);
  for (int64_t i = 0; i < rows_; ++i) {
    float lse = sink ? *sink : RowShift::kNone;
    if (!no_key(i)) {
      const float l = head_->sums_rounded ? wide_sum_[at(i)] : sum_[at(i)];
      lse = head_->power_shift() ? static_cast<float>(m_[at(i)] * kLog2 + std::log(static_cast<double>(l)))
                                 : m_[at(i)] + std::log(l);
      // Centred keys lowered every score of the row by a q . mean: L is of the scores as they were.
      if (head_->centres_keys) {
        double dot = 0;
        for (int64_t d = 0; d < D_; ++d)
          dot += (static_cast<double>(q_[at(i * depth_ + d)]) + mean_query(i)[d]) * mean_key[d];
        lse += static_cast<float>(call_.problem.scale * dot);
      }
    }
    if (sink && std::isinf(lse)) lse = *sink;  // beside which the keys count for nothing
    *out.lse.at(b_, h_, row_ + i) = lse;
    *out.row_max.at(b_, h_, row_ + i) = shifts_[at(i)].m;
    *out.row_sum.at(b_, h_, row_ + i) = head_->sums_rounded ? wide_sum_[at(i)] : sum_[at(i)];
  }
}

// One more pass over the keys, so that the count is about the row's final maximum.
void RowTile::write_ties(const View<int32_t>& ties) {
  std::fill_n(counts_.begin(), columns_, 0);
  for (int64_t i = 0; i < columns_; ++i) {
    const float max = shifts_[at(i)].max;  // no key: nothing reaches +inf
    m_[at(i)] = max == RowShift::kNone ? -RowShift::kNone : max - plan().tie_tolerance;
  }
  SiteObserver* const observer = std::exchange(observer_, nullptr);  // has seen these scores
  for_each_key_tile([&](int64_t key, int64_t keys) {
    score_tile(key, keys);
    count_at_least(m_, keys);
  });
  observer_ = observer;
  for (int64_t i = 0; i < rows_; ++i) *ties.at(b_, h_, row_ + i) = counts_[at(i)];
}

}  // namespace evenkeel
