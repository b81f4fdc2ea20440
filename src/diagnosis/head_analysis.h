// The analyses of the paper (arXiv 2510.04212, section 3.3 and appendix D) on one head of a capture: from the gradient's
// error down to the additions that made it. Notation as in precision_plan.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diagnosis/probes.h"
#include "numerics/explain.h"

namespace evenkeel {

// A sum along one row, and its rounding as if the sum ended at each key in turn (the paper's equation 5, Figs. 6b, 6c).
// All keys in one tile, as there.
struct SumTrace {
  Site site = Site::pv;  // the sum whose rounding is looked at:
                         //   row_sum  l = sum Pb    pv  O-bar = sum Pb v    output_for_delta  O = sum P v
  Rounding rounding;     // of it
  int64_t feature = -1;  // of v; -1: of none
  std::vector<float> probability;  // (keys): Pb as the sum meets it
  std::vector<float> factor;       // (keys): v; empty for row_sum
  std::vector<float> sum;          // (keys): up to and with the key, FP32
  std::vector<double> error;       // (keys): sum rounded at its site, less the same sum in FP64

  // An addition behind which the error jumps, taken apart.
  struct Guilty {
    int64_t key;
    double jump;  // of the error
    Explanation explanation;
  };
  std::vector<Guilty> guilty;  // the largest jumps, largest first
};

struct HeadAnalysis {
  int64_t head = 0;               // among the capture's
  int64_t sequence = 0, row = 0;  // what is looked at closely: where delta's error is largest
  // Figs. 4 and 8: rows of PK and X at some tokens of the sequence, and the cosines of their M_t = (PK)_t^T X_t.
  std::vector<int64_t> tokens;
  std::vector<std::vector<double>> pk, x;       // (tokens, D), (tokens, C); x may be empty
  std::vector<std::vector<double>> similarity;  // (tokens, tokens); empty without x
  std::vector<double> column_share;  // (C): share of the common direction's squares in each input feature
  // Fig. 5: errors of delta along the sequence; at the row, what makes the error, feature by feature.
  std::vector<double> delta_error;                 // (T)
  std::vector<double> d_o, output_error, product;  // (D): dO, O as delta uses it less FP64's, their product
  double sign_agreement = 0;  // share of features whose error is not 0 where the first two agree
  // Figs. 6b and 6c; none where the plan rounds none of the sums.
  std::optional<SumTrace> trace;
  // Fig. 9
  std::vector<int32_t> ties;  // (T): scores of the row that tie with its largest, itself included
};

// What is to be looked at; -1 and nothing: what is worst.
struct Look {
  int64_t sequence = -1, row = -1;
  int64_t tokens = 8;  // rows of PK and X
  std::optional<Site>
      site;  // the sum to be traced: row_sum, pv or output_for_delta; the first that is rounded
};
// REQUIRES: head, sequence and row are there, and the site is one of the three; std::invalid_argument otherwise. A head
// with numbers that are not finite gives NaNs, and no trace.
HeadAnalysis analyse_head(const Capture& capture, int64_t head, const Look& look = {});

// How alike the common directions of two captures of the same head are (two steps of a run, say): a cosine.
double direction_similarity(const Capture& a, int64_t head_of_a, const Capture& b, int64_t head_of_b);

}  // namespace evenkeel
