#include "diagnosis/head_analysis.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/sizes.h"

namespace evenkeel {
namespace {

constexpr size_t kGuilty = 3;

// One head of a capture as a problem of its own: (B, 1, T, D) views.
struct OneHead {
  AttentionInputs in;
  View<const float> d_o;
  AttentionProblem config;

  OneHead(const Capture& c, int64_t head) : config(c.attention_problem()) {
    const auto pick = [](View<const float> all, int64_t h) {
      all.data = all.at(0, h, 0);
      all.shape[1] = 1;
      return all;
    };
    const AttentionInputs all = c.inputs();
    in = {pick(all.q, head), pick(all.k, c.group_of(head)), pick(all.v, c.group_of(head))};
    d_o = pick(c.d_o.view(), head);
    config.plans = {c.plans[at(head)]};
  }
};

// Keeps the probabilities of one row, before and after their rounding.
class ProbabilityKeeper : public SiteObserver {
 public:
  explicit ProbabilityKeeper(int64_t keys) : exact(at(keys)), rounded(at(keys)) {}
  void observe(const SiteBlock& block) override {
    if (block.site != Site::probs) return;
    for (int64_t j = 0; j < block.columns; ++j) {
      exact[at(block.column + j)] = block.exact[j * block.column_stride];
      rounded[at(block.column + j)] = block.rounded[j * block.column_stride];
    }
  }
  std::vector<float> exact, rounded;  // (keys)
};

Literal literal(float value) { return {shortest(value), value, value, false}; }

// sum + probability (x factor), stored in FP32 and rounded at its site.
Explanation explain_addition(const SumTrace& trace, int64_t key) {
  const auto k = at(key);
  std::vector<ExpressionTerm> terms;
  if (key > 0) terms.push_back({literal(trace.sum[k - 1]), {}});
  if (trace.factor.empty())
    terms.push_back({literal(trace.probability[k]), {}});
  else if (trace.probability[k] == 1)
    terms.push_back({literal(trace.factor[k]), {}});
  else
    terms.push_back({literal(trace.probability[k]), literal(trace.factor[k])});
  ExplainOptions options;
  options.to = trace.rounding;
  return explain(terms, options);
}

constexpr Site kSums[] = {Site::row_sum, Site::pv, Site::output_for_delta};

// Of the sums that the plan rounds the one asked for, or the first, at one row.
std::optional<SumTrace> trace_sum(const OneHead& head, int64_t b, int64_t row, bool causal,
                                  std::optional<Site> asked, std::span<const double> products) {
  const PrecisionPlan& plan = head.config.plans[0];
  SumTrace t;
  const auto found = std::find_if(std::begin(kSums), std::end(kSums), [&](Site site) {
    return !is_identity(plan.at(site)) && asked.value_or(site) == site;
  });
  if (found == std::end(kSums)) return {};
  t.site = *found;
  t.rounding = plan.at(t.site);

  // That row alone, all keys in one tile.
  AttentionInputs in = head.in;
  for (View<const float>* view : {&in.q, &in.k, &in.v}) view->data = view->at(b, 0, 0), view->shape[0] = 1;
  const int64_t keys = causal ? row + 1 : in.k.shape[2];
  in.q.data = in.q.at(0, 0, row), in.q.shape[2] = 1;
  in.k.shape[2] = in.v.shape[2] = keys;
  AttentionProblem config = head.config;
  config.tile_keys = 0;
  AttentionBuffers buffers(in, /*with_facts=*/false);
  ProbabilityKeeper keeper(keys);
  attention_forward(config, in, buffers.forward(), &keeper);

  const bool sums_rounded =
      t.site != Site::row_sum || rules_of(plan.stabiliser).sum == SumRule::rounded_probs;
  t.probability = sums_rounded ? keeper.rounded : keeper.exact;
  if (t.site == Site::output_for_delta)
    for (float& p : t.probability) p /= *buffers.row_sum.view().at(0, 0, 0);
  if (t.site != Site::row_sum) {
    const auto worst = std::max_element(products.begin(), products.end(),
                                        [](double x, double y) { return std::fabs(x) < std::fabs(y); });
    t.feature = worst - products.begin();
    for (int64_t j = 0; j < keys; ++j) t.factor.push_back(*in.v.at(0, 0, j, t.feature));
  }
  float sum = 0;
  double exact = 0, before = 0;
  for (int64_t j = 0; j < keys; ++j) {
    const float p = t.probability[at(j)], v = t.factor.empty() ? 1.0f : t.factor[at(j)];
    sum = std::fma(p, v, sum);
    exact += double{p} * v;
    t.sum.push_back(sum);
    // Stochastic: as if to nearest; what random numbers do is no matter of one addition.
    Rounding rounding = t.rounding;
    if (rounding.mode == RoundingMode::stochastic) rounding.mode = RoundingMode::nearest_even;
    t.error.push_back(round_to(rounding, sum) - exact);
  }
  std::vector<SumTrace::Guilty> jumps;
  for (int64_t j = 0; j < keys; ++j) {
    jumps.push_back({j, t.error[at(j)] - before, {}});
    before = t.error[at(j)];
  }
  const size_t count = std::min(kGuilty, jumps.size());
  std::partial_sort(jumps.begin(), jumps.begin() + static_cast<std::ptrdiff_t>(count), jumps.end(),
                    [](const auto& x, const auto& y) { return std::fabs(x.jump) > std::fabs(y.jump); });
  jumps.resize(count);
  for (SumTrace::Guilty& guilty : jumps) {
    if (guilty.jump == 0) break;
    guilty.explanation = explain_addition(t, guilty.key);
    t.guilty.push_back(std::move(guilty));
  }
  return t;
}

// Rows spread evenly over the sequence, the looked-at one among them; ascending.
std::vector<int64_t> spread_tokens(int64_t T, int64_t row, int64_t count) {
  std::vector<int64_t> tokens = {row};
  for (int64_t n = 1; n < count; ++n) tokens.push_back(n * (T - 1) / std::max<int64_t>(1, count - 1));
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

}  // namespace

HeadAnalysis analyse_head(const Capture& c, int64_t head, const Look& look) {
  const int64_t B = c.q.shape()[0], H = c.q.shape()[1], T = c.q.shape()[2], D = c.q.shape()[3];
  require(0 <= head && head < H, "[probe] expected one of {} heads, from 0 on, got {}", H, head);
  const auto [sequence, row, tokens, site] = look;
  require(sequence < B, "[probe] expected one of {} sequences, from 0 on, got {}", B, sequence);
  require(row < T, "[probe] expected a row from 0 to {}, got {}", T - 1, row);
  require(!look.site || std::find(std::begin(kSums), std::end(kSums), *look.site) != std::end(kSums),
          "[probe] expected one of the sums row_sum, pv and output_for_delta, got {}",
          look.site ? name(*look.site) : "none");
  const OneHead one(c, head);
  AttentionBuffers ran(one.in, /*with_facts=*/true);
  attention_forward(one.config, one.in, ran.forward());
  attention_backward(one.config, one.in, one.d_o, ran.forward(), ran.backward());
  const AttentionReference exact = attention_reference(one.config, one.in, one.d_o);
  const double z = one.config.plans[0].keel;
  const auto delta_error = [&](int64_t b, int64_t i) {
    return *ran.delta.view().at(b, 0, i) + 2 * z * *ran.lse.view().at(b, 0, i) -
           *exact.delta.view().at(b, 0, i);
  };

  HeadAnalysis a;
  a.head = head;
  a.sequence = std::max<int64_t>(0, sequence);
  a.row = std::max<int64_t>(0, row);
  double largest = -1;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t i = 0; i < T; ++i) {
      if ((sequence >= 0 && b != sequence) || (row >= 0 && i != row)) continue;
      const double size = std::fabs(delta_error(b, i));
      if (size > largest) largest = size, a.sequence = b, a.row = i;
    }
  const int64_t b = a.sequence;
  for (int64_t i = 0; i < T; ++i) {
    a.delta_error.push_back(delta_error(b, i));
    a.ties.push_back(*ran.ties.view().at(b, 0, i));
  }
  int64_t agreeing = 0, counted = 0;
  for (int64_t d = 0; d < D; ++d) {
    const double d_o = *one.d_o.at(b, 0, a.row, d);
    const double error = *ran.o_for_delta.view().at(b, 0, a.row, d) - *exact.o.view().at(b, 0, a.row, d);
    a.d_o.push_back(d_o);
    a.output_error.push_back(error);
    a.product.push_back(d_o * error);
    if (d_o * error != 0) ++counted, agreeing += d_o * error > 0;
  }
  a.sign_agreement = counted == 0 ? 0 : static_cast<double>(agreeing) / static_cast<double>(counted);

  const std::vector<double> pk = pk_rows(c, head);
  a.tokens = spread_tokens(T, a.row, tokens);
  const bool has_x = !c.x.values().empty();
  for (const int64_t t : a.tokens) {
    const double* const pk_t = pk.data() + (b * T + t) * D;
    a.pk.emplace_back(pk_t, pk_t + D);
    if (has_x) a.x.emplace_back(c.x.view().at(b, 0, t), c.x.view().at(b, 0, t) + c.x.shape()[3]);
  }
  for (size_t s = 0; has_x && s < a.tokens.size(); ++s) {
    a.similarity.emplace_back();
    for (size_t t = 0; t < a.tokens.size();
         ++t)  // of two matrices of rank 1: the product of their vectors' cosines
      a.similarity.back().push_back(cosine(a.pk[s], a.pk[t]) * cosine(a.x[s], a.x[t]));
  }
  if (has_x) {
    const std::vector<double> direction = common_direction(c, head);
    const int64_t C = c.x.shape()[3];
    a.column_share.assign(at(C), 0.0);
    double all = 0;
    for (size_t n = 0; n < direction.size(); ++n) {
      a.column_share[n % at(C)] += direction[n] * direction[n];
      all += direction[n] * direction[n];
    }
    if (all > 0)
      for (double& share : a.column_share) share /= all;
  }
  if (std::isfinite(*ran.lse.view().at(b, 0, a.row)) && largest >= 0)
    a.trace = trace_sum(one, b, a.row, c.causal, site, a.product);
  return a;
}

double direction_similarity(const Capture& a, int64_t head_of_a, const Capture& b, int64_t head_of_b) {
  const std::vector<double> left = common_direction(a, head_of_a), right = common_direction(b, head_of_b);
  require(left.size() == right.size(),
          "[probe] expected captures of one model, got heads of {} and {} weights", left.size(),
          right.size());
  return cosine(left, right);
}

}  // namespace evenkeel
