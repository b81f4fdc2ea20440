// One tile of query rows of one head: packing, scores and masks, which the forward and the backward pass
// share; then both passes. Owns its scratch memory and is used for tile after tile by one thread. Internal to
// src/attention.
//
// Tiles hold the query row in the lane (attention_kernels.h): S, P, dP, dS are [key][row]; O and dQ are
// [feature][row]; dK and dV are [key][feature].
#pragma once

#include <vector>

#include "attention/cpu_operands.h"
#include "attention/row_shift.h"
#include "base/sizes.h"

namespace evenkeel {

class RowTile {
 public:
  explicit RowTile(const Call& call);

  void forward(int64_t b, int64_t h, int64_t first_row, const AttentionForward& out);

  struct BackwardTask {
    View<const float> grad_output;  // (B, H, T, Dv)
    const AttentionForward& saved;
    const AttentionBackward& out;
    bool write_rows = true;         // dQ and the per-row facts
    float* shared_delta = nullptr;  // (B, H, T), if given: written with the rows, read where they are not
    float *dk = nullptr, *dv = nullptr;  // if given, contributions are added here: [key - first_key][stride]
    int64_t first_key = 0, last_key = INT64_MAX;  // tiles of keys that start in [first_key, last_key)
  };
  void backward(int64_t b, int64_t h, int64_t first_row, const BackwardTask& task);

 private:
  const PrecisionPlan& plan() const { return head_->plan; }
  int64_t head_index() const { return b_ * call_.problem.H + h_; }
  // The same among all sequences of the step: names random numbers.
  int64_t random_head() const { return head_index() + call_.problem.first_sequence * call_.problem.H; }

  // --- shared
  void start(int64_t b, int64_t h, int64_t first_row);
  // rows[i][d] = from(row + i, d), rounded at its site; transposed[d][i] likewise.
  void pack(View<const float> from, Site site, std::vector<float>& rows, std::vector<float>& transposed);
  void pack_plain(View<const float> from, std::vector<float>& transposed);   // without a rounding
  void unpack(const View<float>& to, const std::vector<float>& transposed);  // [feature][row] to its place
  void unpack_row_values(const View<float>& to, const std::vector<float>& values);
  // Rounds a block of [line][row] at its site and shows it to the observer. Lines are numbered first_line... of
  // all_lines in this head: that names their random numbers. `column` is the key or feature of the first line.
  void round_lines(Site site, float* block, int64_t lines, int64_t first_line, int64_t all_lines,
                   int64_t column);
  // The two halves of it. show: exact_ holds the block as it was before.
  void round_only(Site site, float* block, int64_t lines, int64_t first_line, int64_t all_lines);
  void round_elements(const Rounding& rounding, Site site, float* block, int64_t lines, int64_t first_line,
                      int64_t all_lines);
  // The same with shared scales, which stay in scales_: [row][block of lines].
  void round_shared(Site site, float* block, int64_t lines, int64_t first_line, int64_t all_lines);
  void show(Site site, const float* block, int64_t lines, int64_t column);
  // As AttentionKernels::multiply, by the plan's model of accumulation for operands of this site.
  void multiply(Site operand, int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
                int64_t a_column, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                bool accumulate, float scale = 1) const;
  // body(first key, number of keys) for every tile of keys that some row may see, ascending. Tiles are anchored
  // at key 0, so that they do not depend on which rows share a tile; keys behind the last one seen are left out.
  template <class Body>
  void for_each_key_tile(Body body) const;
  void score_tile(int64_t key, int64_t keys);  // tile_ = S, -inf where masked
  void add_mean_queries(int64_t key, int64_t keys);
  // The mean that was subtracted from row i's query; zeros where queries are as given. (depth)
  const float* mean_query(int64_t i) const { return &mean_query_[at(i / kScaleTileRows * depth_)]; }
  void mask_tile(float* scores, int64_t key, int64_t keys) const;
  void count_at_least(const std::vector<float>& threshold,
                      int64_t keys);  // counts_[i] += #{j: S_ij >= threshold_i}

  // --- forward
  void find_maxima();
  void shift_rows(int64_t keys);
  void probabilities(int64_t keys);
  void round_shifted(int64_t keys);
  void add_sink(float sink);
  void write_forward(const AttentionForward& out);
  void write_ties(const View<int32_t>& ties);

  // --- backward
  void load_row_values(const AttentionForward& saved);
  void add_over_rows(Site operand, int64_t keys, const float* left, const float* right, float* sums) const;
  void add_mean_query(int64_t keys, int64_t first, int64_t last, float* dk) const;
  void recompute_tile(int64_t key, int64_t keys);  // tile_ = P, dp_ = dP
  void find_delta(const BackwardTask& task);
  void score_gradients(int64_t key, int64_t keys, bool facts);  // dp_ = dS
  void measure_residual(int64_t keys, const Rounding& rounding);
  void add_keel_of_mean_key(const AttentionForward& saved);
  void write_facts(const BackwardTask& task);

  const Call& call_;
  const AttentionKernels& kernels_;
  SiteObserver* observer_;
  const int64_t D_, Dv_, width_,
      depth_;  // head sizes; rows a tile and the larger size, padded to kColumnStep
  int64_t b_ = 0, h_ = 0, row_ = 0, rows_ = 0;
  int64_t key_ = 0;      // the tile of keys at hand
  int64_t columns_ = 0;  // rows_ padded to kColumnStep; the padding's values are never written out
  const HeadPlan* head_ = nullptr;

  std::vector<int64_t> first_key_, last_key_;  // [row]: keys that causal and window let it see
  std::vector<float> q_, qt_;                  // [row][depth], [D][row]
  std::vector<float> mean_query_;              // [tile of rows][depth]
  std::vector<float> tile_;                    // [key][row]: S, then P
  std::vector<float> exact_;                   // values before a rounding, for the observer
  std::vector<float> zeros_, unused_;          // [row]
  std::vector<float> scales_;                  // of the last site with shared scales
  std::vector<RowShift> shifts_;               // [row]
  std::vector<float> units_;                   // [row]: the row's random number
  std::vector<float> tile_max_, m_,
      factor_;                   // [row]: of the last tile; shift; what earlier sums are scaled by
  std::vector<int32_t> counts_;  // [row]
  std::vector<float> tile_sum_, sum_, wide_sum_;  // [row]: of the tile; l; l unrounded
  std::vector<float> o_, wide_o_, normalised_;    // [Dv][row]: O-bar, unrounded O-bar, O

  std::vector<float> do_, dot_;                // [row][depth], [Dv][row]: dO for dV; dO for dP and delta
  std::vector<float> spare_;                   // [row][depth]
  std::vector<float> dp_, operand_, softcap_;  // [key][row]: dP then dS; P for dV; softcap's derivative
  std::vector<float> dqt_, delta_, lse_;       // [D][row], [row], [row]
  std::vector<double> residual_, floor_, prob_sum_;  // [row]
  bool floor_wanted_ = false;
};

template <class Body>
void RowTile::for_each_key_tile(Body body) const {
  int64_t first = INT64_MAX, last = 0;
  for (int64_t i = 0; i < rows_; ++i) {
    if (first_key_[at(i)] >= last_key_[at(i)]) continue;
    first = std::min(first, first_key_[at(i)]);
    last = std::max(last, last_key_[at(i)]);
  }
  if (first >= last) return;
  const int64_t step = call_.tile_keys();
  for (int64_t key = first / step * step; key < last; key += step) body(key, std::min(step, last - key));
}

}  // namespace evenkeel
