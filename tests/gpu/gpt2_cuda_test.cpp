// GPT-2 on the GPU against the CPU's, which is the definition: loss, every tensor's gradient (its distance and the
// sign of it), facts, logits. Also the same bits twice, recorded or not, plans that change, sums over calls, NaN. Tests
// named small_* are also run under compute-sanitizer. The bench at the end runs only when asked for:
//   gpt2_cuda_test --gtest_also_run_disabled_tests --gtest_filter='*bench*'
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "base/error.h"
#include "base/sizes.h"
#include "gpt2_cuda_cases.h"
#include "gpu/device_memory.h"
#include "model/device_product.h"
#include "model/model.h"
#include "numerics/random.h"

namespace evenkeel {
namespace {

using namespace beside_cpu;
using beside_cpu::kBf16, beside_cpu::kFp32;  // precisions, not the formats of that name

// No folder can be made there, so that no product is timed: quicker, and as good.
const int kNoCache = setenv("XDG_CACHE_HOME", "/dev/null", 1);

class AsTheCpu : public testing::TestWithParam<Case> {};

TEST_P(AsTheCpu, loss_and_every_gradient) {
  const Case& c = GetParam();
  Pair pair(c.config, c.plan);
  const Tokens tokens(c.config, c.B, c.T);
  const Bounds bounds = bounds_of(c.config);
  constexpr float kLossScale = 0.5f;
  const double expected = pair.cpu->forward_backward(tokens.batch(), kLossScale, {});
  const double found = pair.cuda->forward_backward(tokens.batch(), kLossScale, {});
  EXPECT_NEAR(found, expected, bounds.loss * expected);
  compare_gradients(pair, tokens, kLossScale, bounds);
  EXPECT_NEAR(pair.cuda->loss(tokens.batch()), pair.cpu->loss(tokens.batch()), bounds.loss * expected);
  const std::span<const int32_t> some(tokens.tokens.data(), at(c.T));
  const Floats logits = pair.cuda->logits(some), cpu_logits = pair.cpu->logits(some);
  const Distance d(logits.data(), cpu_logits.data(), c.config.vocabulary);
  EXPECT_LE(d.relative, bounds.relative) << "logits";
}
INSTANTIATE_TEST_SUITE_P(ModelCuda, AsTheCpu, testing::ValuesIn(cases()),
                         [](const auto& with) { return std::string(with.param.name); });

// --- Facts

void compare_facts(const Case& c, int64_t fact_sequences = 0) {
  SCOPED_TRACE(c.name);
  Pair pair(c.config, c.plan);
  // Larger queries and keys, so that scores are of some size and signs of row means differ.
  Floats parameters = parameters_of(*pair.cpu);
  for (int64_t l = 0; l < c.config.layers; ++l) {
    const ParameterTensor* w = pair.cpu->table().find(fmt::format("h.{}.attn.c_attn.weight", l));
    for (int64_t n = 0; n < w->count(); ++n) parameters[at(w->offset + n)] *= 4;
  }
  pair.cpu->write_parameters(parameters);
  pair.cuda->write_parameters(parameters);
  const Tokens tokens(c.config, c.B, c.T);
  const StepContext all{.step = 3,
                        .score_facts = true,
                        .tie_facts = true,
                        .residual_facts = true,
                        .fact_sequences = fact_sequences};
  pair.cpu->forward_backward(tokens.batch(), 1, all);
  pair.cuda->forward_backward(tokens.batch(), 1, all);
  const bool fp32 = c.config.precision == kFp32;
  const double close = fp32 ? 1e-5 : 2e-2;
  for (size_t n = 0; n < pair.cpu->facts().size(); ++n) {
    const HeadFacts &expected = pair.cpu->facts()[n], &found = pair.cuda->facts()[n];
    EXPECT_NEAR(found.largest_score, expected.largest_score, close * std::fabs(expected.largest_score)) << n;
    EXPECT_NEAR(found.largest_row_mean, expected.largest_row_mean, close * expected.largest_row_mean + 1e-6)
        << n;
    EXPECT_NEAR(found.mean_lse, expected.mean_lse, close * expected.largest_lse) << n;
    EXPECT_NEAR(found.largest_lse, expected.largest_lse, close * expected.largest_lse) << n;
    EXPECT_NEAR(found.key_share, expected.key_share, close) << n;
    EXPECT_NEAR(found.tied_rows, expected.tied_rows, fp32 ? 0.02 : 0.1) << n;
    EXPECT_NEAR(found.delta_rms, expected.delta_rms, 5e-2 * expected.delta_rms) << n;
    if (!fp32) {
      EXPECT_NEAR(found.residual_rms, expected.residual_rms, 0.3 * expected.residual_rms) << n;
      EXPECT_NEAR(found.residual_mean, expected.residual_mean, 6 * expected.residual_error + 1e-12) << n;
    } else {
      EXPECT_LE(found.residual_rms, 1e-4 * found.delta_rms + 1e-9) << n;
    }
  }
  // Scores alone: attention is the fast one, the others are not there.
  pair.cuda->forward_backward(tokens.batch(), 1, {.step = 3, .score_facts = true});
  for (size_t n = 0; n < pair.cpu->facts().size(); ++n) {
    const HeadFacts &expected = pair.cpu->facts()[n], &found = pair.cuda->facts()[n];
    EXPECT_NEAR(found.largest_score, expected.largest_score, close * std::fabs(expected.largest_score)) << n;
    EXPECT_NEAR(found.mean_lse, expected.mean_lse, close * expected.largest_lse) << n;
    EXPECT_TRUE(std::isnan(found.tied_rows) && std::isnan(found.residual_rms)) << n;
  }
  pair.cuda->forward_backward(tokens.batch(), 1, {});
  EXPECT_TRUE(std::isnan(pair.cuda->facts()[0].largest_score));
}

TEST(ModelCuda, facts_as_the_cpu_has_them) {
  compare_facts({"fp32", config_of(kFp32, 2, 32), "fp32", 2, 70});
  compare_facts({"fp32, odd head", config_of(kFp32, 2, 20), "fp32", 1, 131});
  compare_facts({"bf16", config_of(kBf16, 2, 64), "bf16_all", 2, 150});
  compare_facts({"bf16, head size 128", config_of(kBf16, 1, 128), "flash2", 1, 37});
  compare_facts({"bf16, head size 20", config_of(kBf16, 2, 20), "flash2", 2, 65});
  compare_facts(
      {"qk_norm", changed(config_of(kBf16, 2, 64), [](auto& c) { c.qk_norm = true; }), "flash2", 2, 40});
  compare_facts({"softcap", changed(config_of(kFp32, 2, 32), [](auto& c) { c.softcap = 2; }), "fp32", 2, 40});
  compare_facts({"llama, fp32", like_llama(config_of(kFp32, 4, 32)), "fp32", 2, 70});
  compare_facts({"llama, bf16", like_llama(config_of(kBf16, 4, 64)), "flash2", 2, 150});
  compare_facts({"llama, any plan", like_llama(config_of(kBf16, 4, 64)), "bf16_all", 2, 150});
  compare_facts({"llama, head size 20", like_llama(config_of(kBf16, 4, 20)), "flash2", 2, 65});
  for (const int64_t sequences : {1, 2, 9}) {  // of 3; more than there are: all
    compare_facts({"some, fp32", config_of(kFp32, 2, 32), "fp32", 3, 70}, sequences);
    compare_facts({"some, any plan", config_of(kBf16, 2, 64), "bf16_all", 3, 150}, sequences);
    compare_facts({"some, aside", config_of(kBf16, 2, 64), "flash2", 3, 150}, sequences);
  }
}

// Where the Hopper kernels train, a pass of their own finds the facts; with a soft cap, which that one does not take, the
// any-plan kernels compute them aside. Either has what these find where they train.
TEST(ModelCuda, facts_told_aside_are_those_of_the_any_plan_kernels) {
  for (const bool softcap : {false, true}) {
    const ModelConfig plain = changed(config_of(kBf16, 2, 64), [](auto& c) { c.layers = 1; });
    const ModelConfig config = softcap ? changed(plain, [](auto& c) { c.softcap = 30; }) : plain;
    const Tokens tokens(config, 4, 150);
    for (const int64_t sequences : {1, 3, 0}) {
      SCOPED_TRACE(fmt::format("{} sequences{}", sequences, softcap ? ", soft cap" : ""));
      std::vector<HeadFacts> facts[2];
      for (const bool any_plan : {false, true}) {
        const auto model = make_model_cuda(config, 5);
        Floats parameters = parameters_of(*model);
        const ParameterTensor* w = model->table().find("h.0.attn.c_attn.weight");
        for (int64_t n = 0; n < w->count(); ++n) parameters[at(w->offset + n)] *= 8;
        model->write_parameters(parameters);
        if (any_plan) setenv("EVENKEEL_KERNELS", "any_plan", 1);
        model->set_plan(ScopedPlan::parse("flash2"));
        const StepContext context{.tie_facts = true, .residual_facts = true, .fact_sequences = sequences};
        for (int call = 0; call < 3; ++call) model->forward_backward(tokens.batch(), 1, context);
        facts[any_plan] = model->facts();
        unsetenv("EVENKEEL_KERNELS");
      }
      for (size_t h = 0; h < facts[0].size(); ++h) {
        const HeadFacts &aside = facts[0][h], &direct = facts[1][h];
        // q and k have the same bits. Sums in another order may move one row's score across the tolerance.
        EXPECT_NEAR(aside.tied_rows, direct.tied_rows, softcap ? 0 : 1.1 / 150) << h;
        // dO comes behind O, whose last bits differ: some numbers of dS are rounded the other way.
        EXPECT_NEAR(aside.delta_rms, direct.delta_rms, 1e-2 * direct.delta_rms) << h;
        EXPECT_NEAR(aside.residual_rms, direct.residual_rms, 0.2 * direct.residual_rms) << h;
        EXPECT_NEAR(aside.residual_mean, direct.residual_mean, 4 * direct.residual_error) << h;
        EXPECT_GT(aside.residual_rms, 0) << h;
        EXPECT_NEAR(aside.mean_lse, direct.mean_lse, 1e-3 * direct.largest_lse) << h;
      }
    }
  }
}

// Of some sequences of all layers, then of one layer; behind a recorded call, too.
TEST(ModelCuda, small_captures_as_the_cpu_has_them) {
  const ModelConfig plain = config_of(kFp32, 2, 32);
  for (const ModelConfig& config :
       {plain, changed(plain, [](auto& c) { c.qk_norm = true; }), like_llama(plain)}) {
    const auto cpu = make_model_cpu(config, 1), cuda = make_model_cuda(config, 1);
    const Tokens tokens(config, 3, 37);
    for (int64_t layer : {int64_t{-1}, config.layers - 1}) {
      const StepContext context{.capture_sequences = 2, .capture_layer = layer};
      for (int call = 0; call < 3; ++call) cuda->forward_backward(tokens.batch(), 1, {});
      for (const auto& model : {&cpu, &cuda}) (*model)->forward_backward(tokens.batch(), 1, context);
      for (int64_t l = 0; l < config.layers; ++l) {
        if (layer >= 0 && l != layer) {
          EXPECT_THROW(cuda->captured(l), DataError);
          continue;
        }
        const LayerCapture &expected = cpu->captured(l), &found = cuda->captured(l);
        EXPECT_EQ(found.plans.size(), expected.plans.size());
        for (auto tensor : {&LayerCapture::x, &LayerCapture::q, &LayerCapture::k, &LayerCapture::v,
                            &LayerCapture::o, &LayerCapture::d_o, &LayerCapture::lse}) {
          const std::vector<float>&a = (expected.*tensor).values(), &b = (found.*tensor).values();
          ASSERT_EQ(a.size(), b.size());
          ASSERT_FALSE(a.empty());
          double error = 0, size = 0;
          for (size_t n = 0; n < a.size(); ++n) {
            error += std::pow(static_cast<double>(a[n]) - b[n], 2);
            size += std::pow(static_cast<double>(a[n]), 2);
          }
          EXPECT_LE(std::sqrt(error / size), 1e-5);
        }
      }
    }
  }
}

TEST(ModelCuda, clips_queries_and_keys_as_the_cpu_does) {
  ModelConfig config = changed(config_of(kFp32, 2, 32), [](auto& c) { c.bias = true; });
  config.qk_clip = 1e-4f;
  Pair pair(config, "fp32");
  EXPECT_THROW(pair.cuda->apply_qk_clip(), std::invalid_argument);  // no facts yet
  const Tokens tokens(config, 2, 30);
  for (Model* model : {pair.cpu.get(), pair.cuda.get()}) {
    model->forward_backward(tokens.batch(), 1, {.score_facts = true});
    // Where biases outweigh tokens, all scores of a head may be negative: then there is nothing to clip.
    const auto above = std::count_if(model->facts().begin(), model->facts().end(),
                                     [&](const HeadFacts& f) { return f.largest_score > config.qk_clip; });
    EXPECT_GT(above, 0);
    EXPECT_LT(above, config.layers * config.heads) << "no head that is left alone";
    EXPECT_EQ(model->apply_qk_clip(), above);
  }
  Floats expected(at(pair.cpu->table().size())), found(expected);
  pair.cpu->read_parameters(expected);
  pair.cuda->read_parameters(found);
  for (size_t n = 0; n < found.size(); ++n)
    ASSERT_NEAR(found[n], expected[n], 2e-5 * std::fabs(expected[n])) << n;
}

// --- The same bits

TEST(ModelCuda, small_same_bits_twice_recorded_or_not) {
  for (const auto& [precision, plan] : {std::pair{kFp32, "fp32"}, {kBf16, "flash2"}, {kBf16, "bf16_all"}}) {
    const ModelConfig config = config_of(precision, 2, 64);
    const Tokens tokens(config, 3, 37);
    Floats first;
    double first_loss = 0;
    for (int instance = 0; instance < 2; ++instance) {
      const auto model = make_model_cuda(config, 5);
      model->set_plan(ScopedPlan::parse(plan));
      for (int call = 0; call < 4; ++call) {  // as it comes, while recording, recorded
        model->zero_gradients();
        const double loss = model->forward_backward(tokens.batch(), 1, {});
        const Floats gradients = gradients_of(*model);
        if (first.empty()) first = gradients, first_loss = loss;
        EXPECT_EQ(loss, first_loss) << plan << ", call " << call;
        EXPECT_TRUE(same_bits(gradients, first)) << plan << ", call " << call;
      }
    }
  }
}

// Facts of some or of all sequences: returned by the pass, found behind it, computed aside, or another way in each layer.
TEST(ModelCuda, small_facts_and_captures_change_no_bit_of_a_step) {
  const ModelConfig config = config_of(kBf16, 2, 64);
  const Tokens tokens(config, 3, 37);
  for (const char* plan :
       {"flash2", "flash2,stabiliser=dither", "flash2,stabiliser=zero_sum", "flash2,stabiliser=wide_output",
        "bf16_all,probs=bf16/stochastic", "flash2; layer 0: row_sum=bf16"}) {
    SCOPED_TRACE(plan);
    Floats expected;
    double expected_loss = 0;
    for (const int64_t sequences : {-1, 2, 0}) {  // -1: without facts
      const auto model = make_model_cuda(config, 5);
      model->set_plan(ScopedPlan::parse(plan));
      StepContext context{.step = 3};
      if (sequences >= 0) {
        context.tie_facts = context.residual_facts = true;
        context.fact_sequences = sequences;
      }
      for (int call = 0; call < 4; ++call) {  // as it comes, while recording, recorded; with captures
        context.capture_sequences = call == 3 && sequences >= 0 ? 2 : 0;
        model->zero_gradients();
        const double loss = model->forward_backward(tokens.batch(), 1, context);
        const Floats gradients = gradients_of(*model);
        if (expected.empty()) expected = gradients, expected_loss = loss;
        EXPECT_EQ(loss, expected_loss) << sequences << ", call " << call;
        EXPECT_TRUE(same_bits(gradients, expected)) << sequences << ", call " << call;
      }
      if (sequences < 0) continue;
      for (const HeadFacts& facts : model->facts())
        EXPECT_TRUE(facts.delta_rms > 0 && facts.tied_rows >= 0 && facts.tied_rows <= 1);
      EXPECT_EQ(model->captured(0).q.shape()[0], 2);
    }
  }
}

TEST(ModelCuda, small_other_sizes_in_between_change_nothing) {
  const ModelConfig config = config_of(kBf16, 2, 64);
  const auto model = make_model_cuda(config, 5);
  model->set_plan(ScopedPlan::parse("flash2"));
  const Tokens tokens(config, 2, 37), larger(config, 3, 64, 8), smaller(config, 1, 9, 9);
  Floats first;
  for (int round = 0; round < 3; ++round) {
    model->zero_gradients();
    const double loss = model->forward_backward(tokens.batch(), 1, {});
    if (first.empty()) first = gradients_of(*model);
    EXPECT_TRUE(same_bits(gradients_of(*model), first)) << round;
    EXPECT_NEAR(model->loss(tokens.batch()), loss, 1e-12);
    if (round > 0) model->forward_backward(larger.batch(), 1, {});
    model->forward_backward(smaller.batch(), 1, {.score_facts = true});
    EXPECT_EQ(model->logits(std::span(tokens.tokens).first(7)).size(), at(config.vocabulary));
  }
}

TEST(ModelCuda, calls_add_up) {
  const ModelConfig config = config_of(kFp32, 2, 32);
  const auto model = make_model_cuda(config, 5);
  const Tokens a(config, 2, 33), b(config, 2, 33, 8);
  const auto gradients_after = [&](std::initializer_list<const Tokens*> parts) {
    model->zero_gradients();
    for (const Tokens* part : parts) model->forward_backward(part->batch(), 0.5f, {});
    return gradients_of(*model);
  };
  const Floats of_a = gradients_after({&a}), of_b = gradients_after({&b}), both = gradients_after({&a, &b});
  for (const ParameterTensor& tensor : model->table().tensors()) {
    Floats sum(at(tensor.count()));
    for (size_t n = 0; n < sum.size(); ++n)
      sum[n] = of_a[at(tensor.offset) + n] + of_b[at(tensor.offset) + n];
    const Distance d(both.data() + tensor.offset, sum.data(), tensor.count());
    EXPECT_LE(d.relative, 1e-6) << tensor.name;
  }
}

TEST(ModelCuda, a_plan_holds_from_the_next_call_on) {
  const ModelConfig config = config_of(kBf16, 2, 64);
  const Tokens tokens(config, 2, 70);
  const char* plans[] = {"flash2", "bf16_all", "flash2; layer 1 head 0: row_sum=e5m2", "flash2,keel=1e-2"};
  std::vector<Floats> alone;
  for (const char* plan : plans) {
    const auto model = make_model_cuda(config, 5);
    model->set_plan(ScopedPlan::parse(plan));
    model->forward_backward(tokens.batch(), 1, {});
    alone.push_back(gradients_of(*model));
  }
  for (size_t n = 1; n < alone.size(); ++n) EXPECT_FALSE(same_bits(alone[n], alone[0])) << plans[n];
  const auto model = make_model_cuda(config, 5);
  for (int round = 0; round < 2; ++round)
    for (size_t n = 0; n < alone.size(); ++n) {
      model->set_plan(ScopedPlan::parse(plans[n]));
      for (int call = 0; call < 3; ++call) {
        model->zero_gradients();
        model->forward_backward(tokens.batch(), 1, {});
        EXPECT_TRUE(same_bits(gradients_of(*model), alone[n])) << plans[n] << ", call " << call;
      }
    }
}

TEST(ModelCuda, a_recorded_call_takes_its_step_and_parameters_anew) {
  const ModelConfig config = config_of(kBf16, 2, 64);
  const Tokens tokens(config, 2, 70);
  const auto model = make_model_cuda(config, 5);
  model->set_plan(ScopedPlan::parse("flash2,output=bf16/stochastic"));
  const auto gradients_at = [&](uint32_t step) {
    model->zero_gradients();
    model->forward_backward(tokens.batch(), 1, {.step = step});
    return gradients_of(*model);
  };
  const Floats one = gradients_at(1), two = gradients_at(2);
  EXPECT_FALSE(same_bits(one, two));
  EXPECT_TRUE(same_bits(gradients_at(1), one));
  EXPECT_TRUE(same_bits(gradients_at(2), two));
  Floats parameters(at(model->table().size()));
  model->read_parameters(parameters);
  const Floats before = parameters;
  for (float& p : parameters) p *= 1.5f;
  model->write_parameters(parameters);
  EXPECT_FALSE(same_bits(gradients_at(1), one));
  model->write_parameters(before);
  EXPECT_TRUE(same_bits(gradients_at(1), one));
}

// --- What must not crash

TEST(ModelCuda, small_nan_is_a_result) {
  for (const LinearPrecision precision : {kFp32, kBf16}) {
    const ModelConfig config = config_of(precision, 2, 64);
    const Tokens tokens(config, 2, 37);
    const auto model = make_model_cuda(config, 5);
    model->set_plan(ScopedPlan::parse(precision == kFp32 ? "fp32" : "flash2"));
    Floats parameters(at(model->table().size()));
    model->read_parameters(parameters);
    const Floats before = parameters;
    const double healthy = model->forward_backward(tokens.batch(), 1, {});
    const Floats gradients = gradients_of(*model);
    for (const float bad : {std::nanf(""), INFINITY}) {
      parameters[at(model->table().find("h.0.attn.c_attn.weight")->offset)] = bad;
      model->write_parameters(parameters);
      model->zero_gradients();
      const double loss = model->forward_backward(tokens.batch(), 1, {.score_facts = true});
      EXPECT_FALSE(std::isfinite(loss)) << bad;
      EXPECT_TRUE(std::isnan(model->facts()[0].mean_lse) || std::isinf(model->facts()[0].mean_lse));
    }
    model->write_parameters(before);
    // Nothing of the old gradients is read, neither by the first call nor by one that a graph was recorded of.
    for (int call = 0; call < 3; ++call) {
      model->zero_gradients();
      EXPECT_EQ(model->forward_backward(tokens.batch(), 1, {}), healthy);
      EXPECT_TRUE(gradients_of(*model) == gradients) << call;  // -0 is 0
    }
  }
}

TEST(ModelCuda, small_writes_what_it_would_add_to_zeros) {
  for (const bool tied : {true, false})
    for (const LinearPrecision precision : {kFp32, kBf16}) {
      ModelConfig config = config_of(precision, 2, 64);
      config.tied_embeddings = tied;
      const Tokens longer(config, 2, 37), tokens(config, 2, 21, 8);
      const auto model = make_model_cuda(config, 5);
      const auto pass = [&] {
        model->forward_backward(tokens.batch(), 1, {});
        return gradients_of(*model);
      };
      const Floats zeros(at(model->table().size()));
      model->write_gradients(zeros);
      const Floats added = pass();
      model->forward_backward(longer.batch(), 1, {});  // tokens and positions that `tokens` has not
      model->zero_gradients();
      EXPECT_TRUE(pass() == added) << tied;
      model->zero_gradients();
      EXPECT_TRUE(gradients_of(*model) == zeros) << tied;
    }
}

TEST(ModelCuda, small_bad_requests_are_refused) {
  const ModelConfig config = config_of(kBf16, 2, 64);
  const auto model = make_model_cuda(config, 5);
  const std::vector<int32_t> tokens(10, 3), bad(10, 101);
  EXPECT_THROW(model->forward_backward({2, 5, tokens, bad}, 1, {}), std::invalid_argument);
  EXPECT_THROW(model->forward_backward({2, 6, tokens, tokens}, 1, {}), std::invalid_argument);
  EXPECT_THROW(model->loss({1, 161, tokens, tokens}), std::invalid_argument);
  EXPECT_THROW(model->logits({}), std::invalid_argument);
  Floats too_short(5);
  EXPECT_THROW(model->read_parameters(too_short), std::invalid_argument);
  EXPECT_THROW(model->write_gradients(too_short), std::invalid_argument);
  EXPECT_THROW(make_model_cuda(config_of(kBf16, 1, 136), 1), std::invalid_argument);
  EXPECT_THROW(make_model_cuda(changed(config, [](auto& c) { c.tile_keys = 32; }), 1), std::invalid_argument);
  EXPECT_NE(model->stream(), nullptr);
}

TEST(ModelCuda, gradients_go_up_and_down) {
  const auto model = make_model_cuda(config_of(kBf16, 2, 64), 5);
  Floats values(at(model->table().size()));
  for (size_t n = 0; n < values.size(); ++n) values[n] = static_cast<float>(n);
  model->write_gradients(values);
  EXPECT_TRUE(same_bits(gradients_of(*model), values));
  model->zero_gradients();
  EXPECT_TRUE(same_bits(gradients_of(*model), Floats(values.size())));
}

// --- Speed

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void print_bench(const char* preset, const char* plan, int64_t B, int64_t T, int steps) {
  const ModelConfig config = model_preset(preset);
  const auto model = make_model_cuda(config, 1);
  model->set_plan(ScopedPlan::parse(plan));
  const Tokens tokens(config, B, T);
  const double tuning = seconds_of([&] { model->forward_backward(tokens.batch(), 1, {}); });
  const double recording = seconds_of([&] { model->forward_backward(tokens.batch(), 1, {}); });
  const auto per_step = [&](const StepContext& context) {
    for (int n = 0; n < 3; ++n) model->forward_backward(tokens.batch(), 1, context);
    return seconds_of([&] {
             for (int n = 0; n < steps; ++n) {
               model->zero_gradients();
               model->parameters_changed();
               model->forward_backward(tokens.batch(), 1, context);
             }
           }) /
           steps;
  };
  const double step = per_step({}), with_scores = per_step({.score_facts = true});
  const double flops = flops_per_token(config, T) * static_cast<double>(B * T);
  fmt::print(
      "\n{} {} x {}, {}: {:.3f} ms a step without the optimiser ({:.1f} steps/s, {:.0f} tokens/s, {:.0f} "
      "TFLOP/s)\n",
      preset, B, T, plan, step * 1e3, 1 / step, static_cast<double>(B * T) / step, flops / step * 1e-12);
  fmt::print("first call {:.2f} s, second {:.3f} s; with score facts {:.3f} ms, every tenth step {:+.2f} %\n",
             tuning, recording, with_scores * 1e3, (with_scores / step - 1) * 10);
  const std::vector<PhaseTime> phases = time_phases_cuda(*model, tokens.batch(), {.score_facts = true}, 5);
  double total = 0;
  for (const PhaseTime& p : phases) total += p.seconds;
  fmt::print("  {:<30}{:>9}{:>7}{:>7}{:>10}{:>8}\n", "phase", "ms", "%", "calls", "TFLOP/s", "TB/s");
  for (const PhaseTime& p : phases)
    fmt::print("  {:<30}{:>9.3f}{:>7.1f}{:>7}{:>10}{:>8}\n", p.name, p.seconds * 1e3, 100 * p.seconds / total,
               p.launches, p.flops > 0 ? fmt::format("{:.0f}", p.flops / p.seconds * 1e-12) : "",
               p.bytes > 0 ? fmt::format("{:.2f}", p.bytes / p.seconds * 1e-12) : "");
  fmt::print("  {:<30}{:>9.3f}\n", "sum", total * 1e3);
}

// Does a GELU win inside the product or beside it?
void print_gelu(int64_t N, int64_t C) {
  const DeviceStream stream;
  DeviceProducts products(stream.get());
  const auto bytes = [&](int64_t columns, size_t size) { return at(N * columns) * size; };
  const DeviceMemory x(bytes(C, 2)), w(at(4 * C * C) * 2), y(bytes(4 * C, 4)), aux(bytes(4 * C, 2));
  for (const DeviceMemory* m : {&x, &w, &y, &aux}) const_cast<DeviceMemory*>(m)->fill(0x3c);
  const auto time = [&](ProductEnd end, TensorType c_type, bool transposed) {
    DeviceProduct p{
        N,
        4 * C,
        C,
        TensorType::bf16,
        DeviceMatrix::rows_of(x.data(), C),
        transposed ? DeviceMatrix::transposed(w.data(), C) : DeviceMatrix::rows_of(w.data(), 4 * C),
        y.data(),
        4 * C,
        c_type};
    p.end = end;
    p.aux = aux.data();
    products.multiply(p);
    device_wait();
    constexpr int kRuns = 20;
    return seconds_of([&] {
             for (int n = 0; n < kRuns; ++n) products.multiply(p);
             device_wait();
           }) /
           kRuns * 1e3;
  };
  fmt::print(
      "\nproduct ({}, {}) x ({}, {}), ms: to bf16 {:.3f}, with GELU {:.3f}; transposed: to bf16 {:.3f}, to "
      "fp32 {:.3f}, with GELU's slope {:.3f}\n",
      N, C, C, 4 * C, time(ProductEnd::plain, TensorType::bf16, false),
      time(ProductEnd::gelu, TensorType::bf16, false), time(ProductEnd::plain, TensorType::bf16, true),
      time(ProductEnd::plain, TensorType::fp32, true), time(ProductEnd::gelu_slope, TensorType::bf16, true));
}

TEST(ModelCuda, DISABLED_bench) {
  unsetenv("XDG_CACHE_HOME");
  print_gelu(64 * 1024, 768);
  print_bench("gpt2", "flash2", 64, 1024, 20);
  print_bench("nano", "bf16_all", 32, 512, 100);
  print_bench("nano", "flash2", 32, 512, 100);
}

}  // namespace
}  // namespace evenkeel
