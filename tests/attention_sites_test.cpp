// CPU attention site by site: what the observer sees before and after every rounding, chained to the site before it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "attention_bounds.h"
#include "attention_cases.h"
#include "attention_runs.h"
#include "base/threads.h"
#include "numerics/round_block.h"
#include "site_recorder.h"

namespace evenkeel {
namespace {

using namespace attention_runs;
using cases::find_case;
using cases::kCases;

// Which outputs a site may change, and must.
struct SiteReach {
  Site site;
  const char* outputs;
};
constexpr SiteReach kReach[] = {
    {Site::q, "o lse delta dq dk dv"},
    {Site::k, "o lse delta dq dk dv"},
    {Site::v, "o delta dq dk"},
    {Site::grad_output, "dv"},
    {Site::scores, "o lse delta dq dk dv"},
    {Site::shifted, "o lse delta dq dk dv"},
    {Site::probs, "o delta dq dk"},
    {Site::row_sum, "o lse delta dq dk dv"},
    {Site::pv, "o delta dq dk"},
    {Site::output, "o"},
    {Site::output_for_delta, "delta dq dk"},
    {Site::delta, "delta dq dk"},
    {Site::probs_bwd, "dv"},
    {Site::dprobs, "dq dk"},
    {Site::dscores, "dq dk"},
    {Site::dq, "dq"},
    {Site::dk, "dk"},
    {Site::dv, "dv"},
    {Site::q_bwd, "dq dk dv"},
    {Site::k_bwd, "dq dk dv"},
    {Site::v_bwd, "dq dk"},
    {Site::grad_output_for_dprobs, "delta dq dk"},
};
static_assert(std::size(kReach) == kSiteCount);

TEST(AttentionSites, each_is_a_switch_that_reaches_its_outputs_and_no_other) {
  for (int64_t tile_keys : {0, 16}) {
    const Problem p = make_problem(
        {{1, 2, 2, 24, 40, 16}, {.fill = Fill::fp32_normal, .causal = true, .tile_keys = tile_keys}, ""});
    const AttentionBuffers plain = run(p.with(PrecisionPlan{}), p);
    for (const SiteReach& reach : kReach)
      for (const char* format : {"bf16", "e5m2", "tf32/stochastic"}) {
        SCOPED_TRACE(std::string(name(reach.site)) + "=" + format + ", tile_keys " +
                     std::to_string(tile_keys));
        PrecisionPlan plan;
        plan.at(reach.site) = parse_rounding(format);
        Recorder recorder(p);
        const AttentionBuffers changed = run(p.with(plan), p, &recorder);
        const std::string outputs = " " + std::string(reach.outputs) + " ";
        for (size_t n = 0; n < tensors_of(plain).size(); ++n) {
          const auto [tensor, before] = tensors_of(plain)[n];
          if (std::string_view(tensor) == "row_max" || std::string_view(tensor) == "row_sum" ||
              std::string_view(tensor) == "o_for_delta")
            continue;
          const bool reached = outputs.find(" " + std::string(tensor) + " ") != std::string::npos;
          EXPECT_EQ(!same_bits(before->values(), tensors_of(changed)[n].tensor->values()), reached) << tensor;
        }
        for (int s = 0; s < kSiteCount; ++s) {
          const Site site = static_cast<Site>(s);
          const SiteCount count = count_site(recorder, site, plan.at(site));
          EXPECT_GT(count.seen, 0) << "the observer was not called at " << name(site);
          EXPECT_EQ(count.changed > 0, site == reach.site) << name(site);
          EXPECT_EQ(count.wrong, 0) << name(site);
        }
      }
  }
}

TEST(AttentionSites, the_observer_sees_what_round_to_makes_at_every_site) {
  for (const char* case_name :
       {"odd_65", "grouped", "masked_rows", "ragged", "softcap", "ties_tail", "tiny_tiles"})
    for (const char* text :
         {"fp32", "flash2", "bf16_all", "fp8", "bf16_all,row_sum=e5m2/stochastic,dq=fp16/up",
          "fp32,scores=e4m3/saturate,shifted=e4m3", "bf16_all,accumulate=tensor_core,dv=e8m3/toward_zero"})
      for (Stabiliser stabiliser : {Stabiliser::none, Stabiliser::paper_capped, Stabiliser::zero_sum}) {
        const Problem p = make_problem(find_case(case_name));
        const PrecisionPlan plan = plan_of(text, stabiliser);
        SCOPED_TRACE(std::string(case_name) + " " + to_string(plan));
        Recorder recorder(p);
        const AttentionBuffers seen = run(p.with(plan), p, &recorder);
        for (int s = 0; s < kSiteCount; ++s) {
          const SiteCount count = count_site(recorder, static_cast<Site>(s), plan.at(static_cast<Site>(s)));
          EXPECT_EQ(count.wrong, 0) << name(static_cast<Site>(s));
        }
        expect_same_bits(seen, run(p.with(plan), p));  // being watched changes nothing
      }
}

// What belongs to one (batch, head, row, column) comes once in a forward and backward, whatever the threads. The sites
// row_sum and pv come once for each tile of keys. Masked scores come as -inf, their probabilities as 0.
TEST(AttentionSites, the_observer_sees_every_element_once) {
  const int threads = thread_count();
  for (const char* case_name : {"odd_65", "grouped", "masked_rows", "ragged", "tiny_tiles"})
    for (int count : {1, 8}) {
      SCOPED_TRACE(std::string(case_name) + ", threads " + std::to_string(count));
      set_thread_count(count);
      const Problem p = make_problem(find_case(case_name));
      Recorder recorder(p);
      run(p.with(parse_plan("bf16_all")), p, &recorder);
      int64_t again = 0, missing = 0, masked_wrong = 0;
      std::string first_again;
      for (int64_t b = 0; b < p.shape.B; ++b)
        for (int64_t h = 0; h < p.shape.H; ++h)
          for (int s = 0; s < kSiteCount; ++s) {
            const Site site = static_cast<Site>(s);
            if (site == Site::row_sum || site == Site::pv) continue;
            const bool shared = is_of_keys(site);
            const bool by_key_pair = site == Site::scores || site == Site::shifted || site == Site::probs ||
                                     site == Site::probs_bwd || site == Site::dprobs || site == Site::dscores;
            if (shared && h % (p.shape.H / p.shape.G) != 0) continue;  // the group's first head has it
            if (!recorder.has(site, b, h)) continue;
            const Recorder::Field& field = recorder.field(site, b, h);
            const int64_t rows = shared ? (p.key_lengths.empty() ? p.shape.N : p.key_lengths[size_of(b)])
                                        : (p.query_lengths.empty() ? p.shape.T : p.query_lengths[size_of(b)]);
            for (int64_t i = 0; i < field.rows; ++i)
              for (int64_t j = 0; j < field.columns; ++j) {
                const int32_t times = field.times[field.at(i, j)];
                const bool there = i < rows && (!by_key_pair || cases::sees(p, b, h, i, j));
                if (times > 1 && again++ == 0) first_again = std::string(name(site));
                missing += there && times == 0;
                if (there || times == 0 || i >= rows || !by_key_pair) continue;
                const bool is_score = site == Site::scores || site == Site::shifted;
                if (is_score) masked_wrong += field.after(i, j) != -kInfinity;
                if (site == Site::probs || site == Site::probs_bwd) masked_wrong += field.after(i, j) != 0;
              }
          }
      EXPECT_EQ(again, 0) << "first at " << first_again;
      EXPECT_EQ(missing, 0);
      EXPECT_EQ(masked_wrong, 0);
    }
  set_thread_count(threads);
}

// Every site holds what it says, of what the sites before it left: recomputed here from the observed values,
// to the bit, but for exp and log (2 ulp). Causal, one tile of keys.
class SiteChain {
 public:
  SiteChain(const Problem& p, const PrecisionPlan& plan) : p_(p), recorder_(p) {
    const AttentionProblem config = p.with(plan);
    out_.emplace(run(config, p, &recorder_));
    scale_ = problem_of(config, p.in).scale;
  }

  // One head of one batch entry; the keys' own sites with the first head of a group.
  void check_head(int64_t b, int64_t h) {
    b_ = b, h_ = h, g_ = h / group(), first_head_ = g_ * group();
    for (int64_t i = 0; i < T(); ++i) {
      check_forward(i);
      check_backward(i);
    }
    if (h == first_head_)
      for (int64_t j = 0; j < N(); ++j)
        for (int64_t d = 0; d < D(); ++d) check_key(j, d);
  }

  int64_t exp_off = 0, log_off = 0, wrong[kSiteCount] = {};

 private:
  using Field = Recorder::Field;
  int64_t T() const { return p_.shape.T; }
  int64_t N() const { return p_.shape.N; }
  int64_t D() const { return p_.shape.D; }
  int64_t group() const { return p_.shape.H / p_.shape.G; }
  int64_t keys(int64_t i) const { return std::min(N(), i + N() - T() + 1); }
  const Field& field(Site site) const { return recorder_.field(site, b_, h_); }
  const Field& key_field(Site site) const { return recorder_.field(site, b_, first_head_); }
  void expect(Site site, float computed, int64_t i, int64_t j = 0) {
    wrong[static_cast<int>(site)] +=
        std::bit_cast<uint32_t>(field(site).before(i, j)) != std::bit_cast<uint32_t>(computed);
  }

  void check_forward(int64_t i) {
    const Field &q = field(Site::q), &k = key_field(Site::k), &v = key_field(Site::v);
    for (int64_t d = 0; d < D(); ++d) {
      expect(Site::q, *p_.in.q.at(b_, h_, i, d), i, d);
      expect(Site::q_bwd, *p_.in.q.at(b_, h_, i, d), i, d);
      expect(Site::grad_output, *p_.grad_output.at(b_, h_, i, d), i, d);
      expect(Site::grad_output_for_dprobs, *p_.grad_output.at(b_, h_, i, d), i, d);
    }
    float m = -kInfinity, l = 0;
    for (int64_t j = 0; j < keys(i); ++j) {
      const auto key = [&](int64_t d) { return k.after(j, d); };
      const auto query = [&](int64_t d) { return q.after(i, d); };
      expect(Site::scores, fma_chain(D(), key, query) * scale_, i, j);
      m = std::max(m, field(Site::scores).after(i, j));
    }
    EXPECT_EQ(*out_->row_max.view().at(b_, h_, i), m);
    for (int64_t j = 0; j < keys(i); ++j) {
      expect(Site::shifted, field(Site::scores).after(i, j) - m, i, j);
      const float Pb = field(Site::probs).before(i, j);
      exp_off += ulps(Pb, std::exp(field(Site::shifted).after(i, j))) > 2;
      l += Pb;
    }
    expect(Site::row_sum, l, i);
    l = field(Site::row_sum).after(i);
    EXPECT_EQ(*out_->row_sum.view().at(b_, h_, i), l);
    log_off += ulps(*out_->lse.view().at(b_, h_, i), m + std::log(l)) > 2;
    for (int64_t d = 0; d < D(); ++d) {
      const auto value = [&](int64_t j) { return v.after(j, d); };
      const auto prob = [&](int64_t j) { return field(Site::probs).after(i, j); };
      expect(Site::pv, fma_chain(keys(i), value, prob), i, d);
      expect(Site::output, field(Site::pv).after(i, d) / l, i, d);
      expect(Site::output_for_delta, field(Site::pv).after(i, d) / l, i, d);
      EXPECT_EQ(*out_->o.view().at(b_, h_, i, d), field(Site::output).after(i, d));
      EXPECT_EQ(*out_->o_for_delta.view().at(b_, h_, i, d), field(Site::output_for_delta).after(i, d));
    }
  }

  void check_backward(int64_t i) {
    const Field &grad = field(Site::grad_output_for_dprobs), &k = key_field(Site::k_bwd),
                &v = key_field(Site::v_bwd);
    const auto gradient = [&](int64_t d) { return grad.after(i, d); };
    const auto output = [&](int64_t d) { return field(Site::output_for_delta).after(i, d); };
    expect(Site::delta, fma_chain(D(), gradient, output), i);
    const float delta = field(Site::delta).after(i), L = *out_->lse.view().at(b_, h_, i);
    EXPECT_EQ(*out_->delta.view().at(b_, h_, i), delta);
    for (int64_t j = 0; j < keys(i); ++j) {
      const float P = field(Site::probs_bwd).before(i, j);
      exp_off += ulps(P, std::exp(field(Site::scores).after(i, j) - L)) > 2;
      const auto value = [&](int64_t d) { return v.after(j, d); };
      expect(Site::dprobs, fma_chain(D(), value, gradient), i, j);
      expect(Site::dscores, (scale_ * P) * (field(Site::dprobs).after(i, j) - delta), i, j);
    }
    for (int64_t d = 0; d < D(); ++d) {
      const auto key = [&](int64_t j) { return k.after(j, d); };
      const auto dS = [&](int64_t j) { return field(Site::dscores).after(i, j); };
      expect(Site::dq, fma_chain(keys(i), key, dS), i, d);
      EXPECT_EQ(*out_->dq.view().at(b_, h_, i, d), field(Site::dq).after(i, d));
    }
  }

  // Heads of the group one after another, rows ascending; a row that does not see the key adds 0.
  void check_key(int64_t j, int64_t d) {
    expect(Site::k, *p_.in.k.at(b_, g_, j, d), j, d);
    expect(Site::v, *p_.in.v.at(b_, g_, j, d), j, d);
    expect(Site::k_bwd, *p_.in.k.at(b_, g_, j, d), j, d);
    expect(Site::v_bwd, *p_.in.v.at(b_, g_, j, d), j, d);
    float dk = 0, dv = 0;
    for (int64_t of = first_head_; of < first_head_ + group(); ++of)
      for (int64_t i = std::max<int64_t>(0, j - (N() - T())); i < T(); ++i) {
        const auto after = [&](Site site, int64_t column) {
          return recorder_.field(site, b_, of).after(i, column);
        };
        dk = std::fma(after(Site::dscores, j), after(Site::q_bwd, d), dk);
        dv = std::fma(after(Site::probs_bwd, j), after(Site::grad_output, d), dv);
      }
    expect(Site::dk, dk, j, d);
    expect(Site::dv, dv, j, d);
    EXPECT_EQ(*out_->dk.view().at(b_, g_, j, d), field(Site::dk).after(j, d));
    EXPECT_EQ(*out_->dv.view().at(b_, g_, j, d), field(Site::dv).after(j, d));
  }

  const Problem& p_;
  Recorder recorder_;
  std::optional<AttentionBuffers> out_;
  float scale_ = 0;
  int64_t b_ = 0, h_ = 0, g_ = 0, first_head_ = 0;
};

TEST(AttentionSites, each_follows_from_the_ones_before) {
  const Problem p =
      make_problem({{2, 4, 2, 21, 37, 24}, {.fill = Fill::fp32_normal, .causal = true, .tile_keys = 0}, ""});
  PrecisionPlan plan;
  for (int s = 0; s < kSiteCount; ++s)  // every site rounds, no two neighbours alike
    plan.at(static_cast<Site>(s)) = Rounding{Format{8, 6 + s % 5}};
  // The backward pass finds the forward's scores again.
  plan.at(Site::q_bwd) = plan.at(Site::q);
  plan.at(Site::k_bwd) = plan.at(Site::k);
  SiteChain chain(p, plan);
  for (int64_t b = 0; b < p.shape.B; ++b)
    for (int64_t h = 0; h < p.shape.H; ++h) chain.check_head(b, h);
  EXPECT_EQ(chain.exp_off, 0);
  EXPECT_EQ(chain.log_off, 0);
  for (int s = 0; s < kSiteCount; ++s) EXPECT_EQ(chain.wrong[s], 0) << name(static_cast<Site>(s));
}

// One head from the formulas alone: whole rows, scalars, std::exp, std::log. Shares only round_to with it.
struct NaiveHead {
  std::vector<float> o, lse, delta, dq, dk, dv;
};
NaiveHead naive_head(const PrecisionPlan& plan, const Problem& p, int64_t b, int64_t h) {
  const int64_t T = p.shape.T, N = p.shape.N, D = p.shape.D;
  const float a = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
  const auto rounded = [&](Site site, float x) { return round_to(plan.at(site), x); };
  NaiveHead out{std::vector<float>(size_of(T * D)), std::vector<float>(size_of(T)),
                std::vector<float>(size_of(T)),     std::vector<float>(size_of(T * D)),
                std::vector<float>(size_of(N * D)), std::vector<float>(size_of(N * D))};
  for (int64_t i = 0; i < T; ++i) {
    std::vector<float> S(size_of(N)), Pb(size_of(N)), for_delta(size_of(D));
    const auto q = [&](int64_t d) { return rounded(Site::q, *p.in.q.at(b, h, i, d)); };
    const auto grad = [&](int64_t d) { return rounded(Site::grad_output, *p.grad_output.at(b, h, i, d)); };
    const auto k = [&](int64_t j, int64_t d) { return rounded(Site::k, *p.in.k.at(b, h, j, d)); };
    const auto v = [&](int64_t j, int64_t d) { return rounded(Site::v, *p.in.v.at(b, h, j, d)); };
    float m = -kInfinity, l = 0;
    for (int64_t j = 0; j < N; ++j) {
      S[size_of(j)] = rounded(Site::scores, a * fma_chain(D, q, [&](int64_t d) { return k(j, d); }));
      m = std::max(m, S[size_of(j)]);
    }
    for (int64_t j = 0; j < N; ++j) {
      Pb[size_of(j)] = std::exp(rounded(Site::shifted, S[size_of(j)] - m));
      l += Pb[size_of(j)];
      Pb[size_of(j)] = rounded(Site::probs, Pb[size_of(j)]);
    }
    l = rounded(Site::row_sum, l);
    const float L = m + std::log(l);
    out.lse[size_of(i)] = L;
    float delta = 0;
    for (int64_t d = 0; d < D; ++d) {
      const float Ob = rounded(
          Site::pv, fma_chain(
                        N, [&](int64_t j) { return Pb[size_of(j)]; }, [&](int64_t j) { return v(j, d); }));
      out.o[size_of(i * D + d)] = rounded(Site::output, Ob / l);
      delta = std::fma(grad(d), rounded(Site::output_for_delta, Ob / l), delta);
    }
    delta = rounded(Site::delta, delta);
    out.delta[size_of(i)] = delta;
    for (int64_t j = 0; j < N; ++j) {
      const float P = std::exp(S[size_of(j)] - L);
      const float dP = rounded(Site::dprobs, fma_chain(D, grad, [&](int64_t d) { return v(j, d); }));
      const float dS = rounded(Site::dscores, a * P * (dP - delta));
      for (int64_t d = 0; d < D; ++d) {
        float &dq = out.dq[size_of(i * D + d)], &dk = out.dk[size_of(j * D + d)],
              &dv = out.dv[size_of(j * D + d)];
        dq = std::fma(dS, k(j, d), dq);
        dk = std::fma(dS, q(d), dk);
        dv = std::fma(rounded(Site::probs_bwd, P), grad(d), dv);
      }
    }
  }
  for (float& x : out.dq) x = rounded(Site::dq, x);
  for (float& x : out.dk) x = rounded(Site::dk, x);
  for (float& x : out.dv) x = rounded(Site::dv, x);
  return out;
}

// Scores tie exactly or lie 200 apart, so every exponential is 1 or 0; what the backward pass makes of
// exp(-log n) is rounded to bf16 before it is used.
TEST(AttentionSites, a_naive_head_has_the_same_bits) {
  for (const char* case_name : {"ties", "pairs"})
    for (const char* text :
         {"flash2", "bf16_all", "bf16_all,row_sum=e5m2,pv=e4m3", "flash2,delta=bf16,v=e4m3", "fp8,probs=e5m2",
          "bf16_all,output=e5m2,scores=fp16,shifted=fp16"}) {
      SCOPED_TRACE(std::string(case_name) + " " + text);
      Case one_tile = find_case(case_name);
      one_tile.tile_keys = 0;
      const Problem p = make_problem(one_tile);
      const PrecisionPlan plan = parse_plan(text);
      const AttentionBuffers got = run(p.with(plan), p);
      for (int64_t h = 0; h < p.shape.H; ++h) {
        const NaiveHead naive = naive_head(plan, p, 0, h);
        const auto expect_bits = [&](const char* tensor, const Tensor<float>& whole,
                                     const std::vector<float>& head) {
          const float* part = whole.values().data() + h * static_cast<int64_t>(head.size());
          EXPECT_TRUE(same_bits(std::vector<float>(part, part + head.size()), head))
              << tensor << " of head " << h;
        };
        expect_bits("o", got.o, naive.o);
        expect_bits("delta", got.delta, naive.delta);
        expect_bits("dq", got.dq, naive.dq);
        expect_bits("dk", got.dk, naive.dk);
        expect_bits("dv", got.dv, naive.dv);
        for (int64_t i = 0; i < p.shape.T; ++i)
          EXPECT_LE(ulps(*got.lse.view().at(0, h, i), naive.lse[size_of(i)]), 2);
      }
    }
}

// The paper's worked example: two tied scores, two values of one sign, O-bar rounded to bf16.
TEST(AttentionSites, the_papers_example) {
  Problem p = make_problem({{1, 1, 1, 1, 2, 1}, {.tile_keys = 0}, ""});
  *p.q().at(0, 0, 0) = 0;
  *p.v().at(0, 0, 0) = -2.4071154594421387f;
  *p.v().at(0, 0, 1) = -2.296875f;
  Recorder recorder(p);
  const AttentionBuffers out = run(p.with(parse_plan("bf16_all")), p, &recorder);
  const Recorder::Field& pv = recorder.field(Site::pv, 0, 0);
  EXPECT_EQ(pv.before(0), -4.703990459442139f);
  EXPECT_EQ(pv.after(0), -4.71875f);
  EXPECT_EQ(pv.after(0) - pv.before(0), -0.014759540557861328f);
  EXPECT_EQ(*out.o.view().at(0, 0, 0), -2.359375f);
  EXPECT_EQ(*out.ties.view().at(0, 0, 0), 2);
}

// consistent: P of the backward pass is the forward's Pb, rounded alike, over the sum of just those.
TEST(AttentionSites, consistent_uses_the_forwards_own_probabilities) {
  for (const char* text : {"flash2", "bf16_all", "fp8", "flash2,probs=e5m2/stochastic"})
    for (int64_t tile_keys : {0, 16}) {
      SCOPED_TRACE(std::string(text) + ", tile_keys " + std::to_string(tile_keys));
      const Problem p = make_problem(find_case("odd_65"));
      AttentionProblem config = p.with(plan_of(text, Stabiliser::consistent));
      config.tile_keys = tile_keys;
      Recorder recorder(p);
      const AttentionBuffers got = run(config, p, &recorder);
      for (int64_t h = 0; h < p.shape.H; ++h)
        for (int64_t i = 0; i < p.shape.T; ++i) {
          double sum = 0;
          const float l = *got.row_sum.view().at(0, h, i);
          for (int64_t j = 0; j <= i; ++j) {
            const float P = recorder.field(Site::probs_bwd, 0, h).before(i, j);
            const float Pb = recorder.field(Site::probs, 0, h).after(i, j);
            sum += P;
            if (tile_keys == 0) {
              EXPECT_EQ(P, Pb / l) << "row " << i << " key " << j;
            } else if (P != 0) {
              // The shift has moved since by whole numbers of log 2: a power of two between them.
              const double power = std::log2(double{Pb} / (double{P} * l));
              EXPECT_NEAR(power, std::round(power), 1e-6);
            }
          }
          EXPECT_NEAR(sum, 1, double(i + 2) * attention_bounds::kUnit);
        }
    }
}

TEST(AttentionSites, random_numbers_are_named_by_seed_step_layer_batch_and_head) {
  const Problem p = make_problem({{2, 2, 2, 32, 32, 16}, {}, ""});
  AttentionProblem config =
      p.with(parse_plan("fp32,output=e5m2/stochastic,output_for_delta=e5m2/stochastic"));
  const AttentionBuffers first = run(config, p);
  expect_same_bits(first, run(config, p));
  // The O for delta draws as O does: rounded alike, it is O.
  EXPECT_TRUE(same_bits(first.o.values(), first.o_for_delta.values()));
  const auto differs = [&](auto change) {
    AttentionProblem other = config;
    change(other);
    return !same_bits(first.o.values(), run(other, p).o.values());
  };
  EXPECT_TRUE(differs([](AttentionProblem& c) { c.plans[0].seed = 1; }));
  EXPECT_TRUE(differs([](AttentionProblem& c) { c.step = 1; }));
  EXPECT_TRUE(differs([](AttentionProblem& c) { c.layer = 1; }));
  // Equal inputs in every batch entry and head: rounded apart.
  Problem q = make_problem({{2, 2, 2, 32, 32, 16}, {}, ""});
  for (auto* memory : {&q.q_memory, &q.k_memory, &q.v_memory}) {
    const size_t head = memory->size() / 4;
    for (size_t n = head; n < memory->size(); ++n) (*memory)[n] = (*memory)[n % head];
  }
  const AttentionBuffers alike = run(config, q);
  for (int64_t head = 1; head < 4; ++head)
    EXPECT_FALSE(same_bits(part_of(alike.o, 0, 0, 32), part_of(alike.o, head / 2, head % 2, 32)));
}

// As SiteObserver promises: no two calls at once for one (batch, head, row) of queries, nor of keys.
TEST(AttentionSites, the_observer_is_called_for_a_row_from_one_thread_at_a_time) {
  class Guard : public SiteObserver {
   public:
    explicit Guard(const Case& c) : shape_(c), busy_(size_of(2 * c.B * c.H * std::max(c.T, c.N))) {}
    void observe(const SiteBlock& block) override {
      const bool by_key = is_of_keys(block.site);
      for (int64_t i = 0; i < block.rows; ++i) overlaps += busy_[index(by_key, block, i)].exchange(true);
      std::this_thread::yield();
      for (int64_t i = 0; i < block.rows; ++i) busy_[index(by_key, block, i)] = false;
    }
    std::atomic<int64_t> overlaps{0};

   private:
    size_t index(bool by_key, const SiteBlock& block, int64_t i) const {
      const int64_t head = (by_key * shape_.B + block.batch) * shape_.H + block.head;
      return size_of(head * std::max(shape_.T, shape_.N) + block.row + i);
    }
    Case shape_;
    std::vector<std::atomic<bool>> busy_;
  };
  const int threads = thread_count();
  set_thread_count(8);
  for (const char* case_name : {"odd_129", "grouped", "tiny_tiles"}) {
    Case c = find_case(case_name);
    c.tile_rows = 16;
    const Problem p = make_problem(c);
    Guard guard(c);
    run(p.with(parse_plan("bf16_all,stabiliser=zero_sum")), p, &guard);
    EXPECT_EQ(guard.overlaps, 0) << case_name;
  }
  set_thread_count(threads);
}

TEST(AttentionSites, the_observer_names_the_site_that_rounds_halves_away) {
  const Problem p = make_problem(find_case("pairs"));
  for (Site planted : {Site::pv, Site::output, Site::output_for_delta}) {
    const PrecisionPlan meant = parse_plan(planted == Site::pv ? "bf16_all" : "flash2");
    PrecisionPlan ran = meant;
    ran.at(planted).mode = RoundingMode::nearest_away;
    Recorder recorder(p);
    run(p.with(ran), p, &recorder);
    for (int s = 0; s < kSiteCount; ++s) {
      const Site site = static_cast<Site>(s);
      EXPECT_EQ(count_site(recorder, site, meant.at(site)).wrong > 0, site == planted)
          << name(site) << " with the fault at " << name(planted);
    }
  }
}

// --- Scales that are shared

// What a site's matrix of one head must become: round_block on its groups, of what was observed before the rounding.
// Entries that were not observed (no row of their tile sees them) are 0, as masked probabilities are.
class SharedSite {
 public:
  SharedSite(const Problem& p, const Recorder& recorder, Site site, const Rounding& rounding,
             int64_t tile_keys)
      : p_(p), recorder_(recorder), site_(site), rounding_(rounding), tile_keys_(tile_keys) {}

  // Values that are not what the definition makes of them.
  int64_t wrong(int64_t b, int64_t h) const {
    const Recorder::Field& field = recorder_.field(site_, b, h);
    std::vector<float> x = before(field);
    const bool tiled = is_made_by_tile(site_);
    const int64_t columns = field.columns, width = tiled ? tile_keys_ : columns;
    const bool by_tile =
        tiled || rounding_.shared.group == ScaleGroup::tile || rounding_.shared.outer == ScaleGroup::tile;
    const int64_t step = by_tile ? kScaleTileRows : field.rows;
    const float largest =
        rounding_.shared.group == ScaleGroup::tensor || rounding_.shared.outer == ScaleGroup::tensor
            ? largest_of_heads(b)
            : -1.0f;
    for (int64_t i = 0; i < field.rows; i += step)
      for (int64_t j = 0; j < columns; j += width)
        round_block(rounding_,
                    {x.data() + i * columns + j, std::min(step, field.rows - i), std::min(width, columns - j),
                     columns, 1},
                    largest);
    int64_t count = 0;
    for (size_t n = 0; n < x.size(); ++n) count += field.times[n] > 0 && !(x[n] == field.rounded[n]);
    return count;
  }

 private:
  static std::vector<float> before(const Recorder::Field& field) {
    std::vector<float> x = field.exact;
    for (size_t n = 0; n < x.size(); ++n)
      if (field.times[n] == 0) x[n] = 0;
    return x;
  }
  float largest_of_heads(int64_t b) const {
    float largest = 0;
    for (int64_t h = 0; h < p_.shape.H; ++h) {
      if (!recorder_.has(site_, b, h)) continue;  // a head that shares its keys
      std::vector<float> x = before(recorder_.field(site_, b, h));
      largest = std::max(largest, largest_finite({x.data(), 1, static_cast<int64_t>(x.size()), 0, 1}));
    }
    return largest;
  }

  const Problem& p_;
  const Recorder& recorder_;
  Site site_;
  Rounding rounding_;
  int64_t tile_keys_;
};

TEST(AttentionSites, shared_scales_are_those_of_their_groups) {
  const Problem p = make_problem({{2, 4, 2, 100, 130, 40}, {.fill = Fill::fp32_normal, .causal = true}, ""});
  for (const char* text : {"q=int8*tile",
                           "k=e4m3*block32@e8m0",
                           "v=e2m1*block16@e4m3*tensor",
                           "grad_output=e4m3*row",
                           "probs=int8*tile",
                           "probs=e2m1*block16@e4m3*row",
                           "probs_bwd=int8*row",
                           "dscores=int8*tile",
                           "dscores=e4m3*block32@e8m0_up",
                           "q=int4*head",
                           "k_bwd=hif8*tensor",
                           "v=int8*head,v_bwd=bf16",
                           "q=e3m2*block32@e8m0,grad_output=int8*tensor",
                           "q=int4*column",
                           "k=int4*column",
                           "v=e2m1*column16@e4m3*tensor",
                           "grad_output=e4m3*column32@e8m0_up",
                           "q=e2m1*column16@e4m3*column",
                           "q=int4*column64,k_bwd=e2m1*column32@e4m3*tile",
                           "probs=int8*column",
                           "dscores=e4m3*column32@e8m0",
                           "probs_bwd=e2m1*column16@e4m3*tile",
                           "grad_output=int8*column@e4m3*head"}) {
    SCOPED_TRACE(text);
    const PrecisionPlan plan = parse_plan(text);
    Recorder recorder(p);
    run(p.with(plan), p, &recorder);
    for (int s = 0; s < kSiteCount; ++s) {
      const Site site = static_cast<Site>(s);
      if (plan.at(site).shared == SharedScale{}) continue;
      const SharedSite shared(p, recorder, site, plan.at(site), 64);
      for (int64_t b = 0; b < 2; ++b)
        for (int64_t h = 0; h < 4; ++h)
          if (recorder.has(site, b, h)) EXPECT_EQ(shared.wrong(b, h), 0) << name(site) << " of head " << h;
      // The same with another group is another matrix: the check can fail.
      Rounding other = plan.at(site);
      other.shared = parse_shared_scale(other.shared.group == ScaleGroup::row ? "tile" : "row");
      EXPECT_GT(SharedSite(p, recorder, site, other, 64).wrong(0, 0), 0) << name(site);
    }
  }
}

// A pass reads its operands as if they had been rounded before: the forward pass q, k, v; the backward pass their second
// readings, with the forward's m and l.
TEST(AttentionSites, the_backward_pass_reads_its_own_operands) {
  const Problem p = make_problem({{1, 2, 2, 40, 40, 16}, {.fill = Fill::fp32_normal, .causal = true}, ""});
  const PrecisionPlan apart =
      parse_plan("flash2,q=bf16,k=bf16,v=bf16,q_bwd=e5m2,k_bwd=e4m3,v_bwd=e3m2,grad_output_for_dprobs=e5m2");
  const AttentionBuffers got = run(p.with(apart), p);
  const AttentionBuffers forward = run(p.with(parse_plan("flash2,q=bf16,k=bf16,v=bf16")), p);
  EXPECT_TRUE(same_bits(got.o.values(), forward.o.values()));
  EXPECT_TRUE(same_bits(got.lse.values(), forward.lse.values()));

  Problem rounded = make_problem({{1, 2, 2, 40, 40, 16}, {.fill = Fill::fp32_normal, .causal = true}, ""});
  const auto round_all = [](std::vector<float>& x, const char* format) {
    for (float& value : x) value = round_to(parse_rounding(format), value);
  };
  round_all(rounded.q_memory, "e5m2");
  round_all(rounded.k_memory, "e4m3");
  round_all(rounded.v_memory, "e3m2");
  AttentionBuffers backward = forward;
  const AttentionProblem plain = p.with(parse_plan("flash2"));
  attention_backward(plain, rounded.in, p.grad_output, backward.forward(), backward.backward());
  EXPECT_TRUE(same_bits(got.dv.values(), backward.dv.values()));
  round_all(rounded.grad_memory, "e5m2");
  attention_backward(plain, rounded.in, rounded.grad_output, backward.forward(), backward.backward());
  EXPECT_TRUE(same_bits(got.dq.values(), backward.dq.values()));
  EXPECT_TRUE(same_bits(got.dk.values(), backward.dk.values()));
  EXPECT_TRUE(same_bits(got.delta.values(), backward.delta.values()));
}

}  // namespace
}  // namespace evenkeel
