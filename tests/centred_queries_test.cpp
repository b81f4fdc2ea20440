// queries=centred: against FP64 with the same rounded operands, against calculus, against the definition; and what it is for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention_cases.h"
#include "attention_runs.h"
#include "numerics/round_block.h"

namespace evenkeel {
namespace {

using namespace attention_runs;
using cases::find_case;

// A matrix less its means: of tiles of so many rows. FP32: the means and differences are.
struct Centred {
  std::vector<double> x, mean;  // (rows, D) both

  Centred(std::vector<double> given, int64_t D, int64_t tile, bool fp32)
      : x(std::move(given)), mean(x.size()) {
    const auto rows = static_cast<int64_t>(x.size()) / D;
    const auto narrow = [&](double value) { return fp32 ? double{static_cast<float>(value)} : value; };
    for (int64_t first = 0; first < rows; first += tile)
      for (int64_t d = 0; d < D; ++d) {
        const int64_t last = std::min(first + tile, rows);
        double sum = 0;
        for (int64_t i = first; i < last; ++i) sum += x[size_of(i * D + d)];
        const double of_tile = narrow(sum / static_cast<double>(last - first));
        for (int64_t i = first; i < last; ++i) {
          mean[size_of(i * D + d)] = of_tile;
          x[size_of(i * D + d)] = narrow(x[size_of(i * D + d)] - of_tile);
        }
      }
  }
};

// One head, every row seeing the keys up to its own position from the end, in FP64. S = a (rounded(q - m) . rounded(k) + m . k).
struct Head {
  int64_t T, N, D;
  double a;
  std::vector<double> q, k, v, d_o;  // (T, D), (N, D), (N, D), (T, D)
  bool centres_keys = false, fp32 = false;
  std::function<void(std::vector<double>&)> round_q = [](auto&) {}, round_k = [](auto&) {};

  std::vector<double> o = {}, lse = {}, dq = {}, dk = {}, dk_of_means = {}, dv = {};

  double run() {
    const Centred queries(q, D, kScaleTileRows, fp32);
    const Centred keys(k, D, N, fp32);
    const std::vector<double> zeros(k.size());
    std::vector<double> q_hat = queries.x, k_hat = centres_keys ? keys.x : k;
    const std::vector<double> k_exact = k_hat, &k_mean = centres_keys ? keys.mean : zeros;
    round_q(q_hat);
    round_k(k_hat);
    o.assign(q.size(), 0), dq = o, lse.assign(size_of(T), 0), dk.assign(k.size(), 0), dv = dk,
                           dk_of_means = dk;
    double loss = 0;
    for (int64_t i = 0; i < T; ++i) {
      const auto at = [&](const std::vector<double>& x, int64_t row, int64_t d) {
        return x[size_of(row * D + d)];
      };
      const int64_t seen = std::max<int64_t>(0, i + N - T + 1);
      std::vector<double> P(size_of(seen));
      double m = -1e300, l = 0, shift = 0, delta = 0;
      for (int64_t j = 0; j < seen; ++j) {
        for (int64_t d = 0; d < D; ++d)
          P[size_of(j)] +=
              a * (at(q_hat, i, d) * at(k_hat, j, d) + at(queries.mean, i, d) * at(k_exact, j, d));
        m = std::max(m, P[size_of(j)]);
      }
      for (double& p : P) l += p = std::exp(p - m);
      for (int64_t d = 0; d < D; ++d)
        shift += a * (at(q_hat, i, d) + at(queries.mean, i, d)) * at(k_mean, 0, d);
      lse[size_of(i)] = m + std::log(l) + shift;
      for (int64_t j = 0; j < seen; ++j)
        for (int64_t d = 0; d < D; ++d) o[size_of(i * D + d)] += (P[size_of(j)] / l) * at(v, j, d);
      for (int64_t d = 0; d < D; ++d) delta += at(d_o, i, d) * at(o, i, d);
      loss += delta;
      for (int64_t j = 0; j < seen; ++j) {
        const double p = P[size_of(j)] / l;
        double dP = 0;
        for (int64_t d = 0; d < D; ++d) dP += at(d_o, i, d) * at(v, j, d);
        const double dS = a * p * (dP - delta);
        for (int64_t d = 0; d < D; ++d) {
          dq[size_of(i * D + d)] += dS * at(k_hat, j, d);
          dk[size_of(j * D + d)] += dS * (at(q_hat, i, d) + at(queries.mean, i, d));
          dk_of_means[size_of(j * D + d)] += dS * at(queries.mean, i, d);
          dv[size_of(j * D + d)] += p * at(d_o, i, d);
        }
      }
    }
    return loss;
  }
};

std::vector<double> head_of(const View<const float>& x, int64_t b, int64_t h) {
  std::vector<double> values;
  for (int64_t i = 0; i < x.shape[2]; ++i)
    for (int64_t d = 0; d < x.shape[3]; ++d) values.push_back(double{*x.at(b, h, i, d)});
  return values;
}

// A rounding of a head's matrix by the definition.
std::function<void(std::vector<double>&)> rounding_of(const Rounding& r, int64_t D) {
  return [=](std::vector<double>& x) {
    std::vector<float> narrow(x.begin(), x.end());
    const auto rows = static_cast<int64_t>(x.size()) / D;
    const int64_t step = r.shared.group == ScaleGroup::tile ? kScaleTileRows : rows;
    if (r.shared == SharedScale{})
      for (float& value : narrow) value = round_to(r, value);
    else
      for (int64_t i = 0; i < rows; i += step)
        round_block(r, {narrow.data() + i * D, std::min(step, rows - i), D, D, 1});
    x.assign(narrow.begin(), narrow.end());
  };
}

// Queries and keys with a part that all have in common, as trained models have it.
Problem with_common_parts(const Case& c, float of_q, float of_k) {
  Problem p = make_problem(c);
  cases::Draw draw(9, 0);
  std::vector<float> q(size_of(c.D)), k(size_of(c.D));
  for (int64_t d = 0; d < c.D; ++d)
    q[size_of(d)] = of_q * draw.normal(), k[size_of(d)] = of_k * draw.normal();
  const auto add = [](View<float> x, const std::vector<float>& part) {
    cases::fill_view(
        x, [&](int64_t b, int64_t h, int64_t i, int64_t d) { return *x.at(b, h, i, d) + part[size_of(d)]; });
  };
  add(p.q(), q);
  add(p.k(), k);
  return p;
}

// |found - expected| relative to the largest expected.
double largest_error(const std::vector<float>& found, const std::vector<double>& expected) {
  double error = 0, size = 1e-30;
  for (size_t n = 0; n < expected.size(); ++n) {
    error = std::max(error, std::fabs(double{found[n]} - expected[n]));
    size = std::max(size, std::fabs(expected[n]));
  }
  return found.size() == expected.size() ? error / size : 1e30;
}

TEST(CentredQueries, are_those_of_the_formula_with_rounded_operands) {
  for (const char* text :
       {"fp32,queries=centred", "q=int8*tile,k=int8*tile,queries=centred",
        "q=int4*column,k=int4*column,queries=centred", "q=e4m3*head,k=e4m3,queries=centred,keys=centred",
        "q=int8*row,k=int8*row,queries=centred,keys=centred,seed=3"}) {
    SCOPED_TRACE(text);
    const PrecisionPlan plan = parse_plan(text);
    const Problem p =
        with_common_parts({{2, 2, 2, 100, 130, 24}, {.fill = Fill::fp32_normal, .causal = true}, ""}, 2, 1);
    const AttentionBuffers got = run(p.with(plan), p);
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t h = 0; h < 2; ++h) {
        Head head{100,
                  130,
                  24,
                  1 / std::sqrt(24.0f),
                  head_of(p.in.q, b, h),
                  head_of(p.in.k, b, h),
                  head_of(p.in.v, b, h),
                  head_of(p.grad_output, b, h)};
        head.fp32 = true;
        head.centres_keys = plan.keys == KeyRule::centred;
        head.round_q = rounding_of(plan.at(Site::q), 24);
        head.round_k = rounding_of(plan.at(Site::k), 24);
        head.run();
        EXPECT_LT(largest_error(part_of(got.o, b, h, 100), head.o), 1e-5);
        EXPECT_LT(largest_error(part_of(got.lse, b, h, 100), head.lse), 1e-5);
        EXPECT_LT(largest_error(part_of(got.dq, b, h, 100), head.dq), 2e-5);
        EXPECT_LT(largest_error(part_of(got.dk, b, h, 130), head.dk), 2e-5);
        EXPECT_LT(largest_error(part_of(got.dv, b, h, 130), head.dv), 1e-5);
        // The means' part of dK would be missed.
        double part = 0;
        for (double x : head.dk_of_means) part = std::max(part, std::fabs(x));
        EXPECT_GT(part, 0.1 * std::fabs(*std::max_element(head.dk.begin(), head.dk.end())));
      }
  }
}

// The loss as a function of q, whose mean is a function of q too: dQ = dS K has no part of the mean, dK has both.
TEST(CentredQueries, gradients_are_those_of_calculus) {
  Head head{70, 74, 3, 0.6, {}, {}, {}, {}};
  cases::Draw draw(4, 0);
  for (auto* x : {&head.q, &head.d_o})
    for (int64_t n = 0; n < head.T * head.D; ++n) x->push_back(double{draw.normal()} + 1);
  for (auto* x : {&head.k, &head.v})
    for (int64_t n = 0; n < head.N * head.D; ++n) x->push_back(double{draw.normal()});
  for (const bool centres_keys : {false, true}) {
    head.centres_keys = centres_keys;
    head.run();
    const std::vector<double> dq = head.dq, dk = head.dk, dv = head.dv;
    for (const auto& pair : {std::pair{&head.q, &dq}, {&head.k, &dk}, {&head.v, &dv}}) {
      const auto x = pair.first;
      const auto gradient = pair.second;
      for (size_t n = 0; n < x->size(); n += 17) {
        const double given = (*x)[n];
        const auto central = [&](double h) {
          (*x)[n] = given + h;
          const double above = head.run();
          (*x)[n] = given - h;
          const double below = head.run();
          (*x)[n] = given;
          return (above - below) / (2 * h);
        };
        EXPECT_NEAR((*gradient)[n], (4 * central(0x1p-9) - central(0x1p-8)) / 3, 1e-7) << n;
      }
    }
  }
}

// Nothing but the last places of FP32 in every form; and no sign is preferred.
TEST(CentredQueries, change_nothing_where_nothing_is_rounded) {
  double sum = 0, squares = 0, count = 0;
  for (const char* name : {"plain_fp32", "one_row", "odd_129", "grouped", "window", "rows_over_keys",
                           "ragged", "masked_rows", "softcap", "negative_scale", "packed", "tiny_tiles"}) {
    SCOPED_TRACE(name);
    const Problem p = with_common_parts(find_case(name), 1, 0.5f);
    AttentionProblem config = p.with(parse_plan("fp32,queries=centred"));
    const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
    const AttentionBuffers got = run(config, p);
    for (const auto& [found, expected] : {std::pair{&got.o, &exact.o},
                                          {&got.lse, &exact.lse},
                                          {&got.dq, &exact.dq},
                                          {&got.dk, &exact.dk},
                                          {&got.dv, &exact.dv}}) {
      double size = 1e-30;
      for (double x : expected->values())
        if (std::isfinite(x)) size = std::max(size, std::fabs(x));
      for (size_t n = 0; n < expected->values().size(); ++n) {
        const double x = expected->values()[n], y = double{found->values()[n]};
        if (x == y) continue;  // L of a row without keys
        const double error = (y - x) / size;
        EXPECT_LT(std::fabs(error), 2e-5);
        sum += error, squares += error * error, ++count;
      }
    }
  }
  // Errors that prefer a sign would have a mean near their size.
  EXPECT_LT(std::fabs(sum / count), 0.1 * std::sqrt(squares / count));
}

// The rest of a problem goes with it: sinks, slopes, the gradient of L.
TEST(CentredQueries, go_with_sinks_and_slopes) {
  const Problem p =
      with_common_parts({{1, 2, 2, 70, 80, 16}, {.fill = Fill::fp32_normal, .causal = true}, ""}, 1, 0.5f);
  AttentionProblem config = p.with(parse_plan("fp32,queries=centred"));
  const std::vector<float> sinks = {0.5f, -1}, slopes = {0.1f, 0.02f};
  config.sinks = sinks;
  config.slopes = slopes;
  const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
  const AttentionBuffers got = run(config, p);
  EXPECT_LT(largest_error(got.o.values(), exact.o.values()), 1e-5);
  EXPECT_LT(largest_error(got.dq.values(), exact.dq.values()), 1e-5);
  EXPECT_LT(largest_error(got.dk.values(), exact.dk.values()), 1e-5);
}

// What it is for: four bits hold queries less their common part, and not the common part beside them.
TEST(CentredQueries, keep_four_bits_for_what_differs) {
  const Problem p =
      with_common_parts({{1, 4, 4, 128, 128, 64}, {.fill = Fill::fp32_normal, .causal = true}, ""}, 4, 0);
  const auto error = [&](const char* plan) {
    const AttentionProblem config = p.with(parse_plan(plan));
    const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
    const AttentionBuffers got = run(config, p);
    double squares = 0;
    for (size_t n = 0; n < exact.o.values().size(); ++n)
      squares += std::pow(double{got.o.values()[n]} - exact.o.values()[n], 2);
    return std::sqrt(squares);
  };
  EXPECT_GT(error("q=int4*tile"), 3 * error("q=int4*tile,queries=centred"));
  // Nor beside it where each feature has a scale.
  EXPECT_GT(error("q=int4*column"), 1.5 * error("q=int4*column,queries=centred"));
}

}  // namespace
}  // namespace evenkeel
