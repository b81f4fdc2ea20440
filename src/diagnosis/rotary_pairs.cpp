#include "diagnosis/rotary_pairs.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/sizes.h"

namespace evenkeel {
namespace {

// Mean and deviation of a row's terms: of every pair, and in the last place of whole scores.
struct RowTerms {
  std::vector<double> mean, deviation;  // (D / 2 + 1)
};

RowTerms terms_of_row(const Capture& c, int64_t b, int64_t head, int64_t i) {
  const int64_t D = c.q.shape()[3], pairs = D / 2, keys = c.causal ? i + 1 : c.k.shape()[2],
                group = c.group_of(head);
  const bool neighbours = c.positions == Positions::rotary_pairs;
  const double scale = c.scale > 0 ? c.scale : 1 / std::sqrt(static_cast<double>(D));
  const float* q = c.q.view().at(b, head, i);
  std::vector<double> sum(at(pairs + 1)), squares(at(pairs + 1));
  for (int64_t j = 0; j < keys; ++j) {
    const float* k = c.k.view().at(b, group, j);
    double score = 0;
    for (int64_t p = 0; p < pairs; ++p) {
      const int64_t first = neighbours ? 2 * p : p, second = neighbours ? 2 * p + 1 : p + pairs;
      const double term = scale * (double{q[first]} * k[first] + double{q[second]} * k[second]);
      sum[at(p)] += term;
      squares[at(p)] += term * term;
      score += term;
    }
    sum[at(pairs)] += score;
    squares[at(pairs)] += score * score;
  }
  RowTerms terms;
  for (size_t n = 0; n < sum.size(); ++n) {
    const double mean = sum[n] / static_cast<double>(keys);
    terms.mean.push_back(mean);
    terms.deviation.push_back(std::sqrt(std::max(0.0, squares[n] / static_cast<double>(keys) - mean * mean)));
  }
  return terms;
}

}  // namespace

RotaryShares rotary_shares(const Capture& c, int64_t head) {
  require(c.is_rotary(), "expected a capture of a model with rotary positions, got one with {}",
          kPositionNames[static_cast<size_t>(c.positions)]);
  const int64_t B = c.q.shape()[0], T = c.q.shape()[2], D = c.q.shape()[3];
  const auto pairs = at(D / 2);
  std::vector<double> best(pairs + 1), squares(pairs + 1);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t i = 0; i < T; ++i) {
      const RowTerms terms = terms_of_row(c, b, head, i);
      for (size_t n = 0; n <= pairs; ++n) squares[n] += terms.deviation[n] * terms.deviation[n];
      if (std::fabs(terms.mean[pairs]) > std::fabs(best[pairs])) best = terms.mean;
    }
  const auto visible = [&](size_t n) { return std::sqrt(squares[n] / static_cast<double>(B * T)); };
  RotaryShares shares{best[pairs], visible(pairs), {}};
  for (size_t p = 0; p < pairs; ++p)
    shares.pairs.push_back(
        {std::pow(static_cast<double>(c.rotary_base), -2.0 * static_cast<double>(p) / static_cast<double>(D)),
         best[p], visible(p)});
  return shares;
}

}  // namespace evenkeel
