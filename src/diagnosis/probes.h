// Probes: figures of one head at one step. Every number is a double of HeadProbe, and kProbeFields names it for
// records, tables and programs alike. Computed from a capture in FP64 by the definitions below; only what a plan's
// roundings did (ties, leak, delta, dQ) comes from attention as it runs. Notation as in precision_plan.h; rows are all
// rows of all captured sequences; NaN is "not known", or the answer to inputs that are not finite.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "diagnosis/capture.h"
#include "diagnosis/spectrum.h"

namespace evenkeel {

inline constexpr double kNotKnown = std::numeric_limits<double>::quiet_NaN();

struct HeadProbe {
  // --- the scores, unrounded (behind softcap)
  double largest_score = kNotKnown;       // of S
  double row_mean = kNotKnown;            // mean over rows of the row's mean score
  double largest_row_mean = kNotKnown;    // largest |row's mean score|
  double row_spread = kNotKnown;          // mean over rows of the row's standard deviation
  double largest_row_spread = kNotKnown;  // largest |S - row's mean|
  double mean_lse = kNotKnown;            // of L
  double largest_lse = kNotKnown;         // of |L|
  double key_share = kNotKnown;           // of the keys, what they all share (model/key_share.h)
  // --- the probabilities
  double entropy = kNotKnown;        // -sum_j P log P, nats; mean over rows
  double sink_mass = kNotKnown;      // P on key 0; mean over rows
  double heaviest_mass = kNotKnown;  // largest P of a row; mean over rows
  double tied_rows = kNotKnown;      // share of rows where another score ties with the largest, by the plan
  // --- the zero-sum residual rho = sum_j dS_ij / a, by the plan (0 in exact arithmetic)
  double residual_mean = kNotKnown, residual_error = kNotKnown;  // mean over rows; its standard error
  double residual_z = kNotKnown;                                 // mean / error
  double residual_rms = kNotKnown, delta_rms = kNotKnown;
  double residual_share = kNotKnown;  // residual_rms / delta_rms
  // --- delta as the plan has it (keel aside) less delta in FP64
  double delta_error_sum = kNotKnown;      // over rows
  double delta_error_running = kNotKnown;  // the sum of that over the steps probed so far; only in a run
  // --- weights and inputs; the projections of the head, (C, D) each
  double norm_q = kNotKnown, norm_k = kNotKnown, norm_v = kNotKnown;  // largest singular values
  double weight_entropy = kNotKnown;                                  // spectral_entropy of W_Q W_K^T
  double score_entropy = kNotKnown;                                   // of Q K^T, mean over sequences
  // |sum v| / sum |v| over the keys of a feature: 1 where V has one sign there. And the share of the commoner sign.
  double one_signed = kNotKnown, largest_one_signed = kNotKnown;  // mean and largest over features
  double sign_purity = kNotKnown;                                 // mean over features
  // --- the gradient of W_Q, as X^T dQ: by the plan, less FP64's (what lies between W_Q and q left aside)
  double gradient_norm = kNotKnown;    // of FP64's; Frobenius
  double gradient_error = kNotKnown;   // of the difference
  double gradient_share = kNotKnown;   // gradient_error / gradient_norm
  double gradient_rank_1 = kNotKnown;  // share of the difference's squares in its largest singular value
  // The matrices M_t = (PK)_t^T X_t of every row t. The sum of a rho M is the part of the error that leaks make,
  // and drifts. Its norm over gradient_norm. The mean cosine of two M. The ratio |sum rho M| / sum |rho M|:
  // 1 where all rows add up, about 1 / sqrt(rows) where they cancel as noise does.
  double leak_share = kNotKnown;
  double similarity = kNotKnown, coherence = kNotKnown;
  // --- what the law of drift needs (docs/study.md): means over rows, and what happens along them. k^ and x^ are the means'
  // directions; W_Q's step along k^ x^' is what moves the offset.
  double mean_q = kNotKnown, mean_k = kNotKnown, mean_x = kNotKnown;  // norms of the mean q, k and x
  double mean_score = kNotKnown;  // a (mean q) . (mean k): the offset with its sign
  double effective_size =
      kNotKnown;  // (sum_d q_d k_d)^2 / sum_d (q_d k_d)^2 of the means: D, if all d count alike
  double leak_along = kNotKnown;  // a sum rho M along k^ x^', with its sign
  double gradient_along =
      kNotKnown;  // W_Q's gradient by the plan: its root mean square, weighted by (k^_d x^_c)^2
  double leak_lag_1 =
      kNotKnown;  // autocorrelation of the steps' mean leaks since the last probe; only in a run
  // --- what is NaN or infinite in q, k, v and dO: a finding. Of dO alone, all figures of the forward pass are known.
  double nonfinite = 0;  // how many numbers
};

struct ProbeField {
  std::string_view name;
  double HeadProbe::*value;
  std::string_view meaning;
};
extern const std::span<const ProbeField> kProbeFields;

// Spectral norms from probe to probe: a head's three, and one of the gradient's error.
struct HeadNorms {
  SpectralNorm q, k, v, gradient;
};

// Every head of a capture, in its order. O(B H T^2 D) in FP64, about ten times attention's own operations. norms, if
// given: (H), kept from the last probe of the same heads.
std::vector<HeadProbe> probe(const Capture& capture, std::span<HeadNorms> norms = {});

// PK of one head, FP64: (B T, D), rows of zeros where a row is not finite.
std::vector<double> pk_rows(const Capture& capture, int64_t head);
// The mean over rows of M_t / |M_t|: (D, C), in FP64; its norm squared is about the similarity. REQUIRES: x is there.
std::vector<double> common_direction(const Capture& capture, int64_t head);
double cosine(std::span<const double> a, std::span<const double> b);  // NaN where one is zero

// The head that leaks most: by leak_share (residual_share where there is no x); one that is not finite first. An error of
// the gradient that keeps the rows' sums is not counted: it was found harmless (docs/experiments.md). -1 for none.
int64_t worst_head(std::span<const HeadProbe> probes);
// One or two plain sentences about it. names: "layer 2 head 3".
std::string in_words(const HeadProbe& probe, const std::string& name);

}  // namespace evenkeel
