// Every probe against its definition, written out once more and slowly; planted heads; odd inputs.
#include "diagnosis/probes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "capture_cases.h"
#include "diagnosis/probe_recorder.h"
#include "diagnosis/rotary_pairs.h"
#include "model/layers.h"

namespace evenkeel {
namespace {

using Doubles = std::vector<double>;

size_t at(int64_t n) { return static_cast<size_t>(n); }

double element(const Tensor<float>& t, int64_t b, int64_t h, int64_t i, int64_t d) {
  return *t.view().at(b, h, i, d);
}

// One head by the definitions of probes.h, nothing shared with them: rows, then sums over them.
class SlowHead {
 public:
  SlowHead(const Capture& capture, int64_t head)
      : c(capture),
        h(head),
        B(c.q.shape()[0]),
        T(c.q.shape()[2]),
        D(c.q.shape()[3]),
        C(c.x.shape()[3]),
        g(h / (c.q.shape()[1] / c.k.shape()[1])),
        a(c.scale != 0 ? c.scale : static_cast<float>(1 / std::sqrt(static_cast<double>(D)))),
        ran(c.inputs(), true),
        gradient(at(D * C)),
        error(at(D * C)) {
    attention_forward(c.attention_problem(), c.inputs(), ran.forward());
    attention_backward(c.attention_problem(), c.inputs(), c.d_o.view(), ran.forward(), ran.backward());
  }

  HeadProbe probe() {
    p.largest_score = -1e300, p.largest_row_mean = p.largest_row_spread = p.largest_lse = 0;
    for (int64_t b = 0; b < B; ++b)
      for (int64_t i = 0; i < T; ++i) add_row(b, i);
    p.row_mean = mean(rows["row_mean"]), p.row_spread = mean(rows["row_spread"]);
    p.mean_lse = mean(rows["mean_lse"]);
    p.entropy = mean(rows["entropy"]), p.sink_mass = mean(rows["sink_mass"]);
    p.heaviest_mass = mean(rows["heaviest_mass"]), p.tied_rows = mean(rows["tied_rows"]);
    p.residual_mean = mean(rows["residual"]), p.residual_rms = rms(rows["residual"]);
    p.delta_rms = rms(rows["delta"]);
    double spread = 0;
    for (double r : rows["residual"]) spread += (r - p.residual_mean) * (r - p.residual_mean);
    const auto n = static_cast<double>(errors.size());
    p.residual_error = std::sqrt(spread / n / std::max(1.0, n - 1));
    p.delta_error_sum = mean(errors) * n;
    p.gradient_norm = norm(gradient), p.gradient_error = norm(error);
    find_leak();
    find_means();
    std::vector<float> error_matrix(error.begin(), error.end());
    for (float& e : error_matrix) e = static_cast<float>(e * 1e6);
    const double first = singular_values(Matrix::rows_of(error_matrix.data(), C), D, C)[0] * 1e-6;
    p.gradient_rank_1 = first * first / (p.gradient_error * p.gradient_error);
    p.norm_q = singular_values(Matrix::rows_of(c.w_q.view().at(0, h, 0), D), C, D)[0];
    p.norm_k = singular_values(Matrix::rows_of(c.w_k.view().at(0, g, 0), D), C, D)[0];
    p.norm_v = singular_values(Matrix::rows_of(c.w_v.view().at(0, g, 0), D), C, D)[0];
    find_signs();
    return p;
  }

 private:
  static double mean(const Doubles& x) {
    double sum = 0;
    for (double v : x) sum += v;
    return sum / static_cast<double>(x.size());
  }
  static double rms(const Doubles& x) {
    double sum = 0;
    for (double v : x) sum += v * v;
    return std::sqrt(sum / static_cast<double>(x.size()));
  }
  static double norm(const Doubles& x) { return rms(x) * std::sqrt(static_cast<double>(x.size())); }

  // S of the row, and the slope of each score's soft cap.
  void find_scores(int64_t b, int64_t i, Doubles& s, Doubles& slope) {
    const int64_t keys = c.causal ? i + 1 : T;
    for (int64_t j = 0; j < keys; ++j) {
      double score = 0;
      for (int64_t d = 0; d < D; ++d) score += element(c.q, b, h, i, d) * element(c.k, b, g, j, d);
      score *= a;
      const double bent = c.softcap > 0 ? std::tanh(score / c.softcap) : 0;
      if (!c.slopes.empty()) score -= c.slopes[at(h)] * std::fabs(static_cast<double>(i - j));
      s.push_back(c.softcap > 0 ? c.softcap * bent : score);
      slope.push_back(1 - bent * bent);
      p.largest_score = std::max(p.largest_score, s.back());
    }
    const double middle = mean(s);
    double variance = 0;
    for (double x : s) {
      variance += (x - middle) * (x - middle);
      p.largest_row_spread = std::max(p.largest_row_spread, std::fabs(x - middle));
    }
    rows["row_mean"].push_back(middle);
    rows["row_spread"].push_back(std::sqrt(variance / static_cast<double>(keys)));
    p.largest_row_mean = std::max(p.largest_row_mean, std::fabs(middle));
  }

  double log_sum(const Doubles& s) {
    const double top = *std::max_element(s.begin(), s.end());
    double l = 0;
    for (double x : s) l += std::exp(x - top);
    if (!c.sinks.empty()) l += std::exp(c.sinks[at(h)] - top);
    const double L = top + std::log(l);
    p.largest_lse = std::max(p.largest_lse, std::fabs(L));
    rows["mean_lse"].push_back(L);
    return L;
  }

  void add_row(int64_t b, int64_t i) {
    Doubles s, slope;
    find_scores(b, i, s, slope);
    const double L = log_sum(s);
    double entropy = 0, heaviest = 0, delta = 0;
    Doubles P, pk(at(D)), dP, dq(at(D));
    for (size_t n = 0; n < s.size(); ++n) {
      const auto j = static_cast<int64_t>(n);
      P.push_back(std::exp(s[n] - L));
      if (P.back() > 0) entropy -= P.back() * std::log(P.back());
      heaviest = std::max(heaviest, P.back());
      dP.push_back(0);
      for (int64_t d = 0; d < D; ++d) {
        dP.back() += element(c.d_o, b, h, i, d) * element(c.v, b, g, j, d);
        pk[at(d)] += P.back() * element(c.k, b, g, j, d);
      }
      delta += P.back() * dP.back();
    }
    rows["entropy"].push_back(entropy);
    rows["sink_mass"].push_back(P[0]);
    rows["heaviest_mass"].push_back(heaviest);
    const double z = c.plans[at(h)].keel;
    for (size_t n = 0; n < s.size(); ++n)
      for (int64_t d = 0; d < D; ++d)
        dq[at(d)] += a * slope[n] * P[n] * (dP[n] - delta + 2 * z * L) *
                     element(c.k, b, g, static_cast<int64_t>(n), d);
    errors.push_back(*ran.delta.view().at(b, h, i) + 2 * z * *ran.lse.view().at(b, h, i) - delta);
    rows["tied_rows"].push_back(*ran.ties.view().at(b, h, i) > 1);
    rows["residual"].push_back(*ran.residual.view().at(b, h, i));
    rows["delta"].push_back(delta + errors.back());
    matrices.emplace_back();
    for (int64_t d = 0; d < D; ++d)
      for (int64_t f = 0; f < C; ++f) {
        matrices.back().push_back(pk[at(d)] * element(c.x, b, 0, i, f));
        gradient[at(d * C + f)] += dq[at(d)] * element(c.x, b, 0, i, f);
        error[at(d * C + f)] += (*ran.dq.view().at(b, h, i, d) - dq[at(d)]) * element(c.x, b, 0, i, f);
      }
  }

  // The leak: its matrices, whether they are alike and add up.
  void find_leak() {
    const auto n = static_cast<double>(errors.size());
    double cosines = 0, sizes = 0;
    leak.resize(at(D * C));
    for (size_t s = 0; s < matrices.size(); ++s) {
      for (size_t t = 0; t < matrices.size(); ++t) {
        double product = 0;
        for (size_t m = 0; m < matrices[s].size(); ++m) product += matrices[s][m] * matrices[t][m];
        if (s != t) cosines += product / (norm(matrices[s]) * norm(matrices[t]));
      }
      const double rho = rows["residual"][s];
      for (size_t m = 0; m < leak.size(); ++m) leak[m] += rho * matrices[s][m];
      sizes += std::fabs(rho) * norm(matrices[s]);
    }
    p.similarity = n > 1 ? cosines / (n * (n - 1)) : kNotKnown;
    p.coherence = sizes == 0 ? 0 : norm(leak) / sizes;
    p.leak_share = sizes == 0 ? 0 : a * norm(leak) / p.gradient_norm;
  }

  // Means of q, k and x, and what lies along them.
  void find_means() {
    const auto n = static_cast<double>(errors.size());
    Doubles q_mean(at(D)), k_mean(at(D)), x_mean(at(C));
    for (int64_t b = 0; b < B; ++b)
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t d = 0; d < D; ++d)
          q_mean[at(d)] += element(c.q, b, h, t, d) / n, k_mean[at(d)] += element(c.k, b, g, t, d) / n;
        for (int64_t f = 0; f < C; ++f) x_mean[at(f)] += element(c.x, b, 0, t, f) / n;
      }
    p.mean_q = norm(q_mean), p.mean_k = norm(k_mean), p.mean_x = norm(x_mean);
    p.key_share = 0;
    for (int64_t b = 0; b < B; ++b) {
      Doubles sum(at(D));
      double squares = 0;
      for (int64_t t = 0; t < T; ++t)
        for (int64_t d = 0; d < D; ++d)
          sum[at(d)] += element(c.k, b, g, t, d), squares += std::pow(element(c.k, b, g, t, d), 2);
      p.key_share += std::pow(norm(sum), 2) / (static_cast<double>(T) * squares) / static_cast<double>(B);
    }
    Doubles products;
    for (int64_t d = 0; d < D; ++d) products.push_back(q_mean[at(d)] * k_mean[at(d)]);
    p.mean_score = a * mean(products) * static_cast<double>(D);
    p.effective_size = std::pow(mean(products) * static_cast<double>(D) / norm(products), 2);
    p.leak_along = p.gradient_along = 0;
    for (int64_t d = 0; d < D; ++d)
      for (int64_t f = 0; f < C; ++f) {
        const double weight = k_mean[at(d)] / p.mean_k * x_mean[at(f)] / p.mean_x;
        p.leak_along += a * weight * leak[at(d * C + f)];
        p.gradient_along += std::pow(weight * (gradient[at(d * C + f)] + error[at(d * C + f)]), 2);
      }
    p.gradient_along = std::sqrt(p.gradient_along);
  }

  // Of V's features.
  void find_signs() {
    Doubles shares, purities;
    for (int64_t d = 0; d < D; ++d) {
      double total = 0, size = 0, up = 0;
      for (int64_t b = 0; b < B; ++b)
        for (int64_t t = 0; t < T; ++t) {
          const double v = element(c.v, b, g, t, d);
          total += v, size += std::fabs(v), up += v > 0;
        }
      shares.push_back(std::fabs(total) / size);
      purities.push_back(std::max(up, static_cast<double>(B * T) - up) / static_cast<double>(B * T));
    }
    p.one_signed = mean(shares), p.largest_one_signed = *std::max_element(shares.begin(), shares.end());
    p.sign_purity = mean(purities);
  }

  const Capture& c;
  const int64_t h, B, T, D, C, g;
  const double a;
  AttentionBuffers ran;
  std::map<std::string, Doubles> rows;
  std::vector<Doubles> matrices;  // M_t, (D C) each
  Doubles errors, gradient, error, leak;
  HeadProbe p;
};

void expect_alike(const Capture& c, const std::string& what) {
  const std::vector<HeadProbe> found = probe(c);
  ASSERT_EQ(found.size(), c.heads.size());
  for (size_t h = 0; h < found.size(); ++h) {
    const HeadProbe expected = SlowHead(c, static_cast<int64_t>(h)).probe();
    for (const ProbeField& field : kProbeFields) {
      const double want = expected.*field.value, got = found[h].*field.value;
      if (field.name == "nonfinite") {
        EXPECT_EQ(got, 0);
      }
      if (std::isnan(want) && field.name != "similarity") continue;  // not defined over there
      const bool iterated = field.name.starts_with("norm_") || field.name == "gradient_rank_1";
      // Differences of nearly equal numbers (an error where nothing is rounded) are of the size of FP64's own.
      const double floor =
          field.name.starts_with("gradient_err") || field.name.starts_with("delta_err") ? 1e-15 : 1e-12;
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got)) << what << " " << field.name;
        continue;
      }
      EXPECT_NEAR(got, want, (iterated ? 2e-3 : 1e-7) * std::fabs(want) + floor) << what << " " << field.name;
    }
  }
}

TEST(Probes, as_their_definitions_say) {
  expect_alike(random_capture({}, "fp32,row_sum=e5m2"), "one of everything");
  expect_alike(random_capture({1, 1, 1, 2, 1, 3}, "bf16_all"), "two tokens");
  expect_alike(random_capture({2, 3, 3, 17, 5, 7}, "bf16_all", 2), "odd sizes");
  expect_alike(random_capture({2, 4, 2, 9, 8, 6}, "flash2", 3, 5), "two heads of queries to one of keys");
  expect_alike(random_capture({1, 2, 2, 70, 16, 24}, "fp32,row_sum=e5m2", 4, 3), "more than a tile");
  Capture c = random_capture({2, 2, 2, 11, 4, 6}, "fp32,output=e8m2", 5);
  c.causal = false;
  expect_alike(c, "no mask");
  c.softcap = 2;
  c.scale = 0.5f;
  expect_alike(c, "softcap and scale");
  for (PrecisionPlan& plan : c.plans) plan.keel = 1e-4f;
  c.softcap = 0;
  expect_alike(c, "keel");
  c.sinks = {1.5f, -0.5f};
  expect_alike(c, "sinks");
  c.sinks = {60, -80};  // one takes nearly everything, the other nearly nothing
  c.slopes = {0.5f, 0.125f};
  expect_alike(c, "sinks and slopes");
}

TEST(Probes, all_scores_tie) {
  Capture c = random_capture({2, 1, 1, 9, 4, 5}, "bf16_all");
  std::fill(c.q.values().begin(), c.q.values().end(), 0.0f);
  const HeadProbe p = probe(c)[0];
  EXPECT_DOUBLE_EQ(p.tied_rows, 8.0 / 9);  // the first row sees one key
  EXPECT_EQ(p.largest_score, 0);
  EXPECT_EQ(p.row_spread, 0);
  EXPECT_EQ(p.score_entropy, 0);
  double entropy = 0;
  for (int n = 1; n <= 9; ++n) entropy += std::log(n) / 9;
  EXPECT_NEAR(p.entropy, entropy, 1e-12);
}

TEST(Probes, one_sign_and_one_direction) {
  Capture c = random_capture({1, 1, 1, 12, 4, 5}, "fp32,row_sum=e5m2");
  for (float& v : c.v.values()) v = -std::fabs(v);
  for (int64_t t = 1; t < 12; ++t) {  // every token alike: every M_t has one direction
    std::copy_n(c.x.view().at(0, 0, 0), 5, c.x.view().at(0, 0, t));
    std::copy_n(c.k.view().at(0, 0, 0), 4, c.k.view().at(0, 0, t));
  }
  const HeadProbe p = probe(c)[0];
  EXPECT_NEAR(p.one_signed, 1, 1e-12);
  EXPECT_EQ(p.sign_purity, 1);
  EXPECT_NEAR(p.similarity, 1, 1e-12);
  EXPECT_LE(p.coherence, 1 + 1e-12);
}

TEST(Probes, sums_that_are_kept_leave_nothing) {
  for (const char* plan : {"fp32", "fp32,row_sum=e5m2,stabiliser=zero_sum"})
    EXPECT_LT(probe(random_capture({2, 1, 1, 40, 16, 8}, plan))[0].residual_share, 1e-5) << plan;
  const HeadProbe p = probe(random_capture({2, 1, 1, 40, 16, 8}, "fp32,row_sum=e5m2"))[0];
  EXPECT_GT(p.residual_share, 1e-2);
  EXPECT_GT(p.gradient_share, 1e-2);
}

// With delta alone rounded, dQ is wrong by a rho (PK) in every row and by nothing else (the paper's equation 1).
// What a sink takes from a row is no leak.
TEST(Probes, a_sink_is_no_leak) {
  Capture c = random_capture({2, 2, 2, 40, 8, 6}, "fp32");
  c.sinks = {1, 2.5f};
  for (const HeadProbe& p : probe(c)) {
    EXPECT_GT(p.delta_rms, 1e-4);
    EXPECT_LT(p.residual_rms, 1e-6 * p.delta_rms);
  }
  for (PrecisionPlan& plan : c.plans) plan.keel = 1e-4f;
  for (const HeadProbe& p : probe(c)) EXPECT_LT(p.residual_rms, 1e-6 * p.delta_rms);
  c.plans = {parse_plan("fp32,row_sum=e5m2"), parse_plan("fp32,row_sum=e5m2,stabiliser=zero_sum")};
  EXPECT_GT(probe(c)[0].residual_rms, 1e-3 * probe(c)[0].delta_rms);
  EXPECT_LT(probe(c)[1].residual_rms, 1e-6 * probe(c)[1].delta_rms);
}

TEST(Probes, the_leak_is_all_of_the_error_where_delta_alone_is_wrong) {
  const HeadProbe p = probe(random_capture({2, 1, 1, 40, 16, 8}, "fp32,delta=e8m2"))[0];
  EXPECT_GT(p.gradient_share, 1e-3);
  EXPECT_NEAR(p.leak_share, p.gradient_share, 1e-3 * p.gradient_share);
}

TEST(Probes, a_planted_head_is_the_worst_and_is_named) {
  Capture c = random_capture({2, 5, 5, 30, 8, 12}, "fp32");
  c.plans[3] = parse_plan("fp32,row_sum=e5m2");
  const std::vector<HeadProbe> probes = probe(c);
  EXPECT_EQ(worst_head(probes), 3);
  EXPECT_NE(in_words(probes[3], "head 3").find("the rows of dS leak"), std::string::npos);
  EXPECT_NE(in_words(probes[2], "head 2").find("no leak"), std::string::npos);
  EXPECT_EQ(worst_head({}), -1);
  // A coarser rounding that keeps the sums errs as much, and leaks nothing.
  c.plans[1] = parse_plan("fp32,row_sum=e5m1,stabiliser=zero_sum");
  const std::vector<HeadProbe> kept = probe(c);
  EXPECT_GT(kept[1].gradient_share, kept[3].gradient_share);
  EXPECT_LT(kept[1].leak_share, 1e-4);
  EXPECT_EQ(worst_head(kept), 3);
}

TEST(Probes, what_is_not_finite_is_a_finding_and_its_heads_alone) {
  Capture c = random_capture({1, 3, 3, 6, 4, 5}, "bf16_all");
  *c.q.view().at(0, 1, 2, 3) = std::numeric_limits<float>::quiet_NaN();
  *c.d_o.view().at(0, 1, 0, 0) = std::numeric_limits<float>::infinity();
  const std::vector<HeadProbe> probes = probe(c);
  EXPECT_EQ(probes[1].nonfinite, 2);
  EXPECT_TRUE(std::isnan(probes[1].largest_score));
  for (const size_t h : {0u, 2u}) {
    EXPECT_EQ(probes[h].nonfinite, 0);
    EXPECT_TRUE(std::isfinite(probes[h].gradient_share));
  }
  EXPECT_EQ(worst_head(probes), 1);
  EXPECT_NE(in_words(probes[1], "head 1").find("not finite"), std::string::npos);
}

// As loss scaling in FP16 makes now and then: what the forward pass says is as good as ever.
TEST(Probes, gradients_that_are_not_finite_leave_the_forward_figures) {
  Capture c = random_capture({1, 2, 2, 6, 4, 5}, "bf16_all");
  const std::vector<HeadProbe> whole = probe(c);
  *c.d_o.view().at(0, 1, 2, 0) = std::numeric_limits<float>::infinity();
  const std::vector<HeadProbe> probes = probe(c);
  EXPECT_EQ(probes[1].nonfinite, 1);
  for (const char* name : {"offset", "largest_score", "row_mean", "row_spread", "mean_lse", "largest_lse",
                           "entropy", "sink_mass", "tied_rows", "norm_q", "score_entropy", "one_signed",
                           "mean_q", "mean_score", "effective_size"}) {
    const ProbeField& field = *std::ranges::find(kProbeFields, name, &ProbeField::name);
    EXPECT_EQ(probes[1].*field.value, whole[1].*field.value) << name;
  }
  for (const char* name : {"leak_rms", "leak_mean", "delta_rms", "leak_size", "delta_error_sum",
                           "gradient_norm", "leak_share", "similarity", "leak_along"}) {
    const ProbeField& field = *std::ranges::find(kProbeFields, name, &ProbeField::name);
    EXPECT_TRUE(std::isnan(probes[1].*field.value)) << name;
  }
  EXPECT_EQ(worst_head(probes), 1);
  const std::string words = in_words(probes[1], "head 1");
  EXPECT_NE(words.find("gradient"), std::string::npos) << words;
  EXPECT_NE(words.find("the offset is"), std::string::npos) << words;
  EXPECT_EQ(words.find("the failure lies before"), std::string::npos) << words;
}

TEST(Probes, without_x_and_weights_the_rest_is_there) {
  Capture c = random_capture({1, 2, 2, 6, 4, 5}, "fp32,row_sum=e5m2");
  const std::vector<HeadProbe> whole = probe(c);
  c.x = c.w_q = c.w_k = c.w_v = Tensor<float>();
  const std::vector<HeadProbe> part = probe(c);
  EXPECT_EQ(part[1].residual_share, whole[1].residual_share);
  EXPECT_TRUE(std::isnan(part[1].gradient_share) && std::isnan(part[1].norm_q));
  EXPECT_GE(worst_head(part), 0);
}

// One direction carries everything: the offset is a |q| |k|, one feature makes it, and a leak of one sign pushes along it.
TEST(Probes, the_law_s_figures_of_a_planted_direction) {
  Capture c = random_capture({1, 1, 1, 12, 4, 5}, "fp32,row_sum=e5m2");
  for (int64_t t = 0; t < 12; ++t) {
    for (int64_t d = 0; d < 4; ++d) *c.q.view().at(0, 0, t, d) = d == 1 ? 3.0f : 0.0f;
    for (int64_t d = 0; d < 4; ++d) *c.k.view().at(0, 0, t, d) = d == 1 ? -2.0f : 0.0f;
    for (int64_t f = 0; f < 5; ++f) *c.x.view().at(0, 0, t, f) = f == 2 ? 4.0f : 0.0f;
  }
  const HeadProbe p = probe(c)[0];
  EXPECT_NEAR(p.mean_q, 3, 1e-6);
  EXPECT_NEAR(p.mean_k, 2, 1e-6);
  EXPECT_NEAR(p.key_share, 1, 1e-12);  // every key is the same
  EXPECT_NEAR(p.mean_x, 4, 1e-6);
  EXPECT_NEAR(p.mean_score, -3, 1e-6);  // a = 1 / 2
  EXPECT_NEAR(p.effective_size, 1, 1e-6);
  // Every M is 2 x 4 long and lies along it: the leak adds up to a sum rho |M|.
  EXPECT_NEAR(p.leak_along, 0.5 * 8 * 12 * p.residual_mean, 1e-5 * std::fabs(p.leak_along));
}

TEST(Probes, autocorrelation_of_neighbours) {
  LagOne none, alternating, steady, wrong;
  EXPECT_TRUE(std::isnan(none.value()));
  for (int n = 0; n < 1000; ++n) alternating.take(n % 2 ? 5.0 : 3.0), steady.take(7.0);
  EXPECT_NEAR(alternating.value(), -1, 2e-3);
  EXPECT_TRUE(std::isnan(steady.value()));
  LagOne slow;
  for (int n = 0; n < 1000; ++n) slow.take(std::sin(n / 50.0));
  EXPECT_GT(slow.value(), 0.99);
  for (const double x : {1.0, std::nan(""), 2.0, 5.0}) wrong.take(x);
  EXPECT_TRUE(std::isnan(wrong.value()));
}

TEST(Probes, names_are_unique_and_cover_every_number) {
  std::map<std::string_view, int> names;
  for (const ProbeField& field : kProbeFields) ++names[field.name];
  EXPECT_EQ(names.size(), kProbeFields.size());
  EXPECT_EQ(sizeof(HeadProbe), kProbeFields.size() * sizeof(double));
}

// --- Rotary pairs

// All tokens alike: q and k are one vector each, turned by its place. What a slow pair adds is the same all along a row; a
// fast pair's swings around zero.
TEST(RotaryPairs, slow_pairs_hold_the_offset_and_fast_ones_are_seen) {
  const int64_t T = 64, D = 8;
  for (const Positions layout : {Positions::rotary, Positions::rotary_pairs}) {
    Capture c = random_capture({1, 2, 1, T, D, 3}, "fp32");
    c.positions = layout;
    const std::vector<float> turns = rotary_turns(c.rotary_base, T, D);
    const bool neighbours = layout == Positions::rotary_pairs;
    const auto share = [&](int64_t pair, double size) {
      for (Tensor<float>* t : {&c.q, &c.k})
        for (float& x : t->values()) x = 0;
      const int64_t first = neighbours ? 2 * pair : pair;
      for (int64_t i = 0; i < T; ++i) {
        *c.q.view().at(0, 1, i, first) = static_cast<float>(size);
        *c.k.view().at(0, 0, i, first) = 1;
        rotary_forward(c.q.view().at(0, 1, i), D, turns.data() + i * D, neighbours, 1, 1, 1, D,
                       c.q.view().at(0, 1, i), D);
        rotary_forward(c.k.view().at(0, 0, i), D, turns.data() + i * D, neighbours, 1, 1, 1, D,
                       c.k.view().at(0, 0, i), D);
      }
      return rotary_shares(c, 1);
    };
    // The last of four pairs turns once in 6283 places: a row of 64 is all but constant.
    const RotaryShares slow = share(3, -80), fast = share(0, -80);
    EXPECT_NEAR(slow.offset, -80 / std::sqrt(8.0), 0.1);
    EXPECT_NEAR(slow.pairs[3].offset, slow.offset, 1e-9);
    EXPECT_LT(slow.visible, 0.02 * std::fabs(slow.offset));
    EXPECT_NEAR(fast.visible, 80 / std::sqrt(8.0) / std::sqrt(2.0), 2);  // a cosine's deviation
    EXPECT_NEAR(fast.pairs[0].visible, fast.visible, 1e-9);
    // The mean over a long row is that of a cosine: the first rows alone have one of size.
    double last = 0;
    for (int64_t d = 0; d < T; ++d) last += std::cos(static_cast<double>(d)) / static_cast<double>(T);
    EXPECT_LT(std::fabs(last), 0.03);
    EXPECT_NEAR(slow.pairs[1].turn, 0.1, 1e-6);
  }
}

TEST(RotaryPairs, parts_add_up_to_the_offset_that_the_probes_tell) {
  Capture c = random_capture({2, 4, 2, 9, 6, 5}, "fp32", 3, 2);
  c.positions = Positions::rotary;
  const std::vector<HeadProbe> probes = probe(c);
  for (int64_t h = 0; h < 4; ++h) {
    const RotaryShares shares = rotary_shares(c, h);
    ASSERT_EQ(shares.pairs.size(), 3u);
    double sum = 0;
    for (const PairShare& pair : shares.pairs) sum += pair.offset;
    EXPECT_NEAR(sum, shares.offset, 1e-12);
    EXPECT_NEAR(std::fabs(shares.offset), probes[at(h)].largest_row_mean, 1e-6);
  }
  c.positions = Positions::none;
  EXPECT_THROW(rotary_shares(c, 0), std::invalid_argument);
}

}  // namespace
}  // namespace evenkeel
