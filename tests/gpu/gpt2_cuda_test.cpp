// GPT-2 on the GPU against the CPU's, which is the definition: loss, every tensor's gradient (its distance and the
// sign of it), facts, logits. Also the same bits twice, recorded or not, plans that change, sums over calls, NaN. Tests
// named *Small* are also run under compute-sanitizer. The bench at the end runs only when asked for:
//   gpt2_cuda_test --gtest_also_run_disabled_tests --gtest_filter='*Bench*'
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "../model_families.h"
#include "base/error.h"
#include "base/sizes.h"
#include "gpu/device_memory.h"
#include "model/cuda/device_layers.h"
#include "model/device_product.h"
#include "model/model.h"
#include "numerics/random.h"

namespace evenkeel {
namespace {

using Floats = std::vector<float>;

// No folder can be made there, so that no product is timed: quicker, and as good.
const int kNoCache = setenv("XDG_CACHE_HOME", "/dev/null", 1);

struct Case {
  const char* name;
  ModelConfig config;
  const char* plan;
  int64_t B = 3, T = 37;

  friend std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }
};

ModelConfig config_of(LinearPrecision precision, int64_t heads, int64_t head_size) {
  ModelConfig config;
  config.layers = 2, config.heads = heads, config.width = heads * head_size;
  config.context = 160, config.vocabulary = 101;
  config.precision = precision;
  return config;
}
ModelConfig changed(ModelConfig config, void (*change)(ModelConfig&)) {
  change(config);
  return config;
}
constexpr auto kFp32 = LinearPrecision::fp32, kBf16 = LinearPrecision::bf16;

struct Tokens {
  Tokens(const ModelConfig& config, int64_t b, int64_t t, uint32_t seed = 7) : B(b), T(t) {
    RandomStream draw({1, 0, seed});
    // Half of the places are one token's, so that its row has many terms.
    for (int64_t n = 0; n < B * T; ++n) {
      tokens.push_back(draw.unit() < 0.5 ? 5 % static_cast<int32_t>(config.vocabulary)
                                         : static_cast<int32_t>(draw.below(config.vocabulary)));
      targets.push_back(static_cast<int32_t>(draw.below(config.vocabulary)));
    }
  }
  Batch batch() const { return {B, T, tokens, targets}; }
  int64_t B, T;
  std::vector<int32_t> tokens, targets;
};

// Initial parameters, but with gains and biases of all sizes.
Floats parameters_of(const Model& model) {
  Floats values(at(model.table().size()));
  model.read_parameters(values);
  for (const ParameterTensor& tensor : model.table().tensors()) {
    RandomStream draw({3, 0, static_cast<uint32_t>(tensor.offset)});
    const double size = tensor.shape.size() == 1 ? 0.2 : 0.04;
    for (int64_t n = 0; n < tensor.count(); ++n)
      values[at(tensor.offset + n)] += static_cast<float>(size * draw.normal());
  }
  return values;
}

Floats gradients_of(const Model& model) {
  Floats values(at(model.table().size()));
  model.read_gradients(values);
  return values;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Two models of the same parameters and plan.
struct Pair {
  explicit Pair(const ModelConfig& config, const char* plan_text)
      : cpu(make_model_cpu(config, 11)),
        cuda(make_model_cuda(config, 11)),
        plan(ScopedPlan::parse(plan_text)) {
    Floats initial_cpu(at(cpu->table().size())), initial_cuda(initial_cpu);
    cpu->read_parameters(initial_cpu);
    cuda->read_parameters(initial_cuda);
    EXPECT_TRUE(same_bits(initial_cpu, initial_cuda)) << "initial parameters differ";
    const Floats parameters = parameters_of(*cpu);
    for (Model* model : {cpu.get(), cuda.get()}) {
      model->write_parameters(parameters);
      model->set_plan(plan);
    }
  }
  std::unique_ptr<Model> cpu, cuda;
  const ScopedPlan plan;
};

// The distance between two gradients of one tensor, relative to its length; and its part along the gradient,
// which has a sign: what is lost or gained in every step.
struct Distance {
  Distance(const float* found, const float* expected, int64_t count) {
    double squares = 0, difference = 0, dot = 0;
    for (int64_t n = 0; n < count; ++n) {
      const double e = static_cast<double>(expected[n]), d = static_cast<double>(found[n]) - e;
      squares += e * e, difference += d * d, dot += d * e;
    }
    relative = std::sqrt(difference / squares);
    along = dot / squares;
  }
  double relative, along;
};

// Of FP32: attention's split products leave a few units of 2^-21, in some twenty places on the way. Of BF16:
// roundings at 2^-9 that fall differently where sums differ in their last bits, in as many places; logits are BF16
// on the GPU.
struct Bounds {
  double loss, relative, along;
};
Bounds bounds_of(const ModelConfig& config) {
  return config.precision == kFp32 ? Bounds{2e-6, 2e-5, 1e-5} : Bounds{2e-3, 2e-2, 5e-3};
}
// Where the terms of a gradient cancel (gains of qk_norm do: ten times as much as others), every rounding before it
// counts for more. So the FP32 bound of a tensor is at least what its gradient moves on the CPU when every parameter
// changes at random by 2^-17 of itself. That is a few 2^-21 times the root of twenty.
constexpr double kChange = 0x1p-17;

// Returns the CPU's gradients at the changed parameters.
Floats changed_gradients(const Pair& pair, const Tokens& tokens, float loss_scale) {
  const auto model = make_model_cpu(pair.cpu->config(), 11);
  Floats parameters(at(model->table().size()));
  pair.cpu->read_parameters(parameters);
  RandomStream draw({9, 0, 1});
  for (float& p : parameters) p *= static_cast<float>(1 + kChange * draw.normal());
  model->write_parameters(parameters);
  model->set_plan(pair.plan);
  model->forward_backward(tokens.batch(), loss_scale, {});
  return gradients_of(*model);
}

void compare_gradients(const Pair& pair, const Tokens& tokens, float loss_scale, const Bounds& bounds) {
  const Floats expected = gradients_of(*pair.cpu), found = gradients_of(*pair.cuda);
  const bool fp32 = pair.cpu->config().precision == kFp32;
  const Floats moved = fp32 ? changed_gradients(pair, tokens, loss_scale) : expected;
  for (const ParameterTensor& tensor : pair.cpu->table().tensors()) {
    const auto distance = [&](const Floats& gradients) {
      return Distance(gradients.data() + tensor.offset, expected.data() + tensor.offset, tensor.count());
    };
    const Distance d = distance(found);
    EXPECT_LE(d.relative, std::max(bounds.relative, distance(moved).relative)) << tensor.name;
    // Of an error of this size in any direction, 1 / sqrt(n) lies along a gradient of n values: of the two of a sink's, most.
    const double chance = bounds.relative / std::sqrt(static_cast<double>(tensor.count()));
    EXPECT_LE(std::fabs(d.along), std::max(bounds.along, chance))
        << tensor.name << " (signed: " << d.along << ")";
  }
  // What lies between tensors stays zero.
  for (size_t n = 0; n + 1 < pair.cpu->table().tensors().size(); ++n) {
    const ParameterTensor &tensor = pair.cpu->table().tensors()[n],
                          &next = pair.cpu->table().tensors()[n + 1];
    for (int64_t gap = tensor.offset + tensor.count(); gap < next.offset; ++gap)
      ASSERT_EQ(found[at(gap)], 0) << "behind " << tensor.name;
  }
}

std::vector<Case> cases() {
  const auto plain32 = config_of(kFp32, 2, 32), plain16 = config_of(kBf16, 2, 64);
  return {
      {"fp32", plain32, "fp32"},
      {"fp32_norm_bias", changed(plain32, [](auto& c) { c.norm_bias = true; }), "fp32"},
      {"fp32_bias_untied",
       changed(plain32, [](auto& c) { c.bias = c.norm_bias = true, c.tied_embeddings = false; }), "fp32"},
      {"fp32_qk_norm_gate", changed(plain32, [](auto& c) { c.qk_norm = c.gated_attention = c.bias = true; }),
       "fp32"},
      {"fp32_softcap_keel", changed(plain32, [](auto& c) { c.softcap = 5; }), "fp32,keel=1e-2"},
      {"fp32_head_128", config_of(kFp32, 1, 128), "fp32"},
      {"fp32_odd_width", config_of(kFp32, 1, 17), "fp32", 2, 19},
      {"fp32_one_token", plain32, "fp32", 1, 1},
      {"fp32_wide", changed(config_of(kFp32, 9, 128), [](auto& c) { c.layers = 1; }), "fp32", 1, 5},
      {"bf16", plain16, "flash2"},
      {"bf16_long", plain16, "flash2", 2, 130},
      {"bf16_zero_sum", plain16, "flash2,stabiliser=zero_sum"},
      {"bf16_all", plain16, "bf16_all", 2, 130},
      {"bf16_bias_untied",
       changed(plain16, [](auto& c) { c.bias = c.norm_bias = true, c.tied_embeddings = false; }), "flash2"},
      {"bf16_qk_norm", changed(plain16, [](auto& c) { c.qk_norm = true; }), "flash2"},
      {"bf16_gate", changed(plain16, [](auto& c) { c.gated_attention = c.bias = true; }), "flash2"},
      {"bf16_softcap", changed(plain16, [](auto& c) { c.softcap = 5; }), "flash2"},
      {"bf16_keel", plain16, "flash2,keel=1e-2"},
      {"bf16_plans", plain16,
       "flash2; layer 1 head 0: stabiliser=zero_sum; layer 0 head 1: row_sum=bf16; layer 1 head 1: "
       "keel=1e-2"},
      {"bf16_head_32", config_of(kBf16, 3, 32), "flash2"},
      {"bf16_head_96", config_of(kBf16, 1, 96), "flash2", 1, 70},
      {"bf16_head_128", config_of(kBf16, 1, 128), "flash2", 2, 33},
      {"bf16_head_20", config_of(kBf16, 3, 20), "flash2"},
      {"bf16_one_token", plain16, "flash2", 1, 1},
      // More rows than blocks at once, and every way of the cross-entropy: small rows, rows that fit into shared
      // memory twice (9001), rows that do not.
      {"bf16_many_rows", plain16, "flash2", 20, 150},
      {"fp32_vocabulary_9001", changed(plain32, [](auto& c) { c.vocabulary = 9001; }), "fp32", 4, 100},
      {"bf16_vocabulary_9001", changed(plain16, [](auto& c) { c.vocabulary = 9001; }), "flash2", 4, 100},
      {"fp32_vocabulary_30001", changed(plain32, [](auto& c) { c.vocabulary = 30001; }), "fp32", 4, 100},
      {"bf16_vocabulary_60001", changed(plain16, [](auto& c) { c.vocabulary = 60001; }), "flash2", 4, 100},
      // The other block, whole and part by part.
      {"fp32_rms_norm", changed(plain32, [](auto& c) { c.norm = NormKind::rms_norm; }), "fp32"},
      {"fp32_rotary", changed(plain32, [](auto& c) { c.positions = Positions::rotary; }), "fp32"},
      {"fp32_rotary_pairs", changed(plain32, [](auto& c) { c.positions = Positions::rotary_pairs; }), "fp32"},
      {"fp32_no_positions", changed(plain32, [](auto& c) { c.positions = Positions::none; }), "fp32"},
      {"fp32_swiglu_bias", changed(plain32, [](auto& c) { c.mlp = MlpKind::swiglu, c.bias = true; }), "fp32"},
      {"fp32_hidden_50", changed(plain32, [](auto& c) { c.hidden = 50; }), "fp32"},
      {"fp32_grouped", changed(config_of(kFp32, 4, 32), [](auto& c) { c.key_heads = 2; }), "fp32"},
      {"fp32_head_size_apart", changed(plain32, [](auto& c) { c.head_features = 40, c.key_heads = 1; }),
       "fp32"},
      {"fp32_llama", like_llama(config_of(kFp32, 4, 32)), "fp32"},
      {"fp32_llama_odd", like_llama(config_of(kFp32, 3, 6)), "fp32", 2, 19},
      {"fp32_llama_wide", changed(like_llama(config_of(kFp32, 9, 128)), [](auto& c) { c.layers = 1; }),
       "fp32", 1, 5},
      {"fp32_qwen", changed(like_llama(config_of(kFp32, 4, 32)), [](auto& c) { c.qk_norm = true; }), "fp32"},
      {"bf16_alibi", changed(plain16, [](auto& c) { c.positions = Positions::alibi; }), "flash2", 2, 130},
      {"bf16_sinks", changed(plain16, [](auto& c) { c.sinks = true; }), "flash2,stabiliser=wide_output", 2,
       130},
      {"bf16_llama_sinks", changed(like_llama(config_of(kBf16, 4, 64)), [](auto& c) { c.sinks = true; }),
       "flash2,stabiliser=zero_sum,keel=1e-2", 2, 130},
      {"bf16_llama", like_llama(config_of(kBf16, 4, 64)), "flash2", 2, 130},
      {"bf16_llama_wide_output", like_llama(config_of(kBf16, 4, 64)), "flash2,stabiliser=wide_output", 2,
       130},
      {"bf16_llama_all", like_llama(config_of(kBf16, 4, 64)), "bf16_all", 2, 130},
      {"bf16_llama_pairs",
       changed(like_llama(plain16), [](auto& c) { c.positions = Positions::rotary_pairs; }), "flash2"},
      {"bf16_llama_head_20", like_llama(config_of(kBf16, 4, 20)), "flash2"},
      {"bf16_qwen", changed(like_llama(config_of(kBf16, 4, 64)), [](auto& c) { c.qk_norm = true; }),
       "flash2"},
  };
}

class AsTheCpu : public testing::TestWithParam<Case> {};

TEST_P(AsTheCpu, LossAndEveryGradient) {
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

TEST(ModelCuda, FactsAsTheCpuHasThem) {
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

// Where the Hopper kernels train, the any-plan kernels compute the facts in a pass of their own: the same facts as where these
// kernels train.
TEST(ModelCuda, FactsToldAsideAreTheAnyPlanKernels) {
  const ModelConfig config = changed(config_of(kBf16, 2, 64), [](auto& c) { c.layers = 1; });
  const Tokens tokens(config, 4, 150);
  for (const int64_t sequences : {1, 3, 0}) {
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
      EXPECT_EQ(aside.tied_rows, direct.tied_rows) << h;  // q and k have the same bits
      // dO comes behind O, whose last bits differ: some numbers of dS are rounded the other way.
      EXPECT_NEAR(aside.delta_rms, direct.delta_rms, 1e-2 * direct.delta_rms) << h;
      EXPECT_NEAR(aside.residual_rms, direct.residual_rms, 0.2 * direct.residual_rms) << h;
      EXPECT_NEAR(aside.residual_mean, direct.residual_mean, 4 * direct.residual_error) << h;
      EXPECT_GT(aside.residual_rms, 0) << h;
      EXPECT_NEAR(aside.mean_lse, direct.mean_lse, 1e-3 * direct.largest_lse) << h;
    }
  }
}

// Of some sequences of all layers, then of one layer; behind a recorded call, too.
TEST(ModelCuda, SmallCapturesAsTheCpuHasThem) {
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

TEST(ModelCuda, ClipsQueriesAndKeysAsTheCpuDoes) {
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

TEST(ModelCuda, SmallSameBitsTwiceRecordedOrNot) {
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

// Facts of some or of all sequences: returned by the pass, computed separately, or one way in each layer.
TEST(ModelCuda, SmallFactsAndCapturesChangeNoBitOfAStep) {
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

TEST(ModelCuda, SmallOtherSizesInBetweenChangeNothing) {
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

TEST(ModelCuda, CallsAddUp) {
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

TEST(ModelCuda, APlanHoldsFromTheNextCallOn) {
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

TEST(ModelCuda, ARecordedCallTakesItsStepAndParametersAnew) {
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

TEST(ModelCuda, SmallNaNIsAResult) {
  for (const LinearPrecision precision : {kFp32, kBf16}) {
    const ModelConfig config = config_of(precision, 2, 64);
    const Tokens tokens(config, 2, 37);
    const auto model = make_model_cuda(config, 5);
    model->set_plan(ScopedPlan::parse(precision == kFp32 ? "fp32" : "flash2"));
    Floats parameters(at(model->table().size()));
    model->read_parameters(parameters);
    const Floats before = parameters;
    const double healthy = model->forward_backward(tokens.batch(), 1, {});
    for (const float bad : {std::nanf(""), INFINITY}) {
      parameters[at(model->table().find("h.0.attn.c_attn.weight")->offset)] = bad;
      model->write_parameters(parameters);
      const double loss = model->forward_backward(tokens.batch(), 1, {.score_facts = true});
      EXPECT_FALSE(std::isfinite(loss)) << bad;
      EXPECT_TRUE(std::isnan(model->facts()[0].mean_lse) || std::isinf(model->facts()[0].mean_lse));
    }
    model->write_parameters(before);
    EXPECT_EQ(model->forward_backward(tokens.batch(), 1, {}), healthy);
  }
}

TEST(ModelCuda, SmallBadRequestsAreRefused) {
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

TEST(ModelCuda, GradientsGoUpAndDown) {
  const auto model = make_model_cuda(config_of(kBf16, 2, 64), 5);
  Floats values(at(model->table().size()));
  for (size_t n = 0; n < values.size(); ++n) values[n] = static_cast<float>(n);
  model->write_gradients(values);
  EXPECT_TRUE(same_bits(gradients_of(*model), values));
  model->zero_gradients();
  EXPECT_TRUE(same_bits(gradients_of(*model), Floats(values.size())));
}

// --- The loss, row by row

uint16_t bf16_of(float x) {  // of values that BF16 has
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}
float of_bf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// N rows of V logits that BF16 has, `stride` apart, what lies between of any content; and what they should become, by
// sums in FP64.
struct LossRows {
  LossRows(int64_t n, int64_t v)
      : N(n),
        V(v),
        stride((v + 7) / 8 * 8 + (v % 2) * 8),
        logits(at(n * stride), 99.0f),
        softmax(logits.size()) {
    RandomStream draw({5, 1, static_cast<uint32_t>(v)});
    for (int64_t row = 0; row < N; ++row) {
      const double middle = 40 * draw.unit() - 20, size = 0.2 + 4 * draw.unit();
      float* const x = logits.data() + row * stride;
      for (int64_t c = 0; c < V; ++c)
        x[c] = of_bf16(bf16_of(static_cast<float>(middle + size * draw.normal())));
      targets.push_back(row == 0       ? 0
                        : row == N - 1 ? static_cast<int32_t>(V - 1)
                                       : static_cast<int32_t>(draw.below(static_cast<uint64_t>(V))));
      const double most = *std::max_element(x, x + V);
      double sum = 0;
      for (int64_t c = 0; c < V; ++c) sum += std::exp(x[c] - most);
      for (int64_t c = 0; c < V; ++c)
        softmax[at(row * stride + c)] = static_cast<float>(std::exp(x[c] - most) / sum);
      losses.push_back(std::log(sum) + most - x[targets.back()]);
    }
  }
  int64_t N, V, stride;
  Floats logits, softmax;  // (N, stride)
  std::vector<int32_t> targets;
  std::vector<double> losses;
};

struct LossResult {
  Floats losses, gradients;  // (N), (N, stride)
};
LossResult loss_of(const LossRows& rows, TensorType type, bool gradients, float scale) {
  const DeviceStream stream;
  const DeviceMemory targets(rows.targets);
  DeviceMemory losses(at(rows.N) * sizeof(float)), logits;
  std::vector<uint16_t> halves;
  if (type == TensorType::bf16) {
    for (float x : rows.logits) halves.push_back(bf16_of(x));
    logits = DeviceMemory(halves);
  } else {
    logits = DeviceMemory(rows.logits);
  }
  device::cross_entropy(logits.data(), targets.as<int32_t>(), rows.N, rows.V, rows.stride, type, gradients,
                        scale, losses.as<float>(), static_cast<cudaStream_t>(stream.get()));
  LossResult result{losses.download<float>(), {}};
  if (type == TensorType::bf16)
    for (uint16_t x : logits.download<uint16_t>()) result.gradients.push_back(of_bf16(x));
  else
    result.gradients = logits.download<float>();
  return result;
}

// Every loss, every gradient within its rounding, no drift of the roundings, zeros behind.
void expect_losses(const LossRows& rows, TensorType type) {
  const float scale = 0.37f / static_cast<float>(rows.N);
  const LossResult found = loss_of(rows, type, true, scale);
  // Exponents up to some 40 in FP32 are good to 40 2^-23, and so are exponentials; BF16 rounds by 2^-8 at most.
  constexpr double kError = 0x1p-16;
  const double rounding = kError + (type == TensorType::bf16 ? 0x1p-8 : 0);
  double drift = 0;
  for (int64_t row = 0; row < rows.N; ++row) {
    ASSERT_NEAR(found.losses[at(row)], rows.losses[at(row)], kError * (1 + std::fabs(rows.losses[at(row)])))
        << row;
    double of_row = 0;
    for (int64_t c = 0; c < rows.stride; ++c) {
      const bool target = c == rows.targets[at(row)];
      const double p = rows.softmax[at(row * rows.stride + c)], expected = (p - (target ? 1 : 0)) * scale,
                   value = found.gradients[at(row * rows.stride + c)];
      ASSERT_NEAR(value, expected, rounding * std::fabs(expected) + (target ? kError * scale : 0))
          << "row " << row << ", column " << c;
      if (c < rows.V && !target) of_row += (value - expected) / expected;
    }
    drift += of_row / static_cast<double>(rows.V * rows.N);
  }
  // Equal logits of a row round alike: as if it had some twenty values.
  const double values = static_cast<double>(std::min<int64_t>(rows.V, 20) * rows.N);
  EXPECT_LT(std::fabs(drift), 6 * rounding / std::sqrt(3 * values) + kError);
  // The same losses without gradients, and the logits are left as they are.
  const LossResult alone = loss_of(rows, type, false, scale);
  for (size_t n = 0; n < alone.losses.size(); ++n)
    ASSERT_NEAR(alone.losses[n], rows.losses[n], kError * (1 + std::fabs(rows.losses[n]))) << n;
  EXPECT_TRUE(same_bits(alone.gradients, rows.logits));
}

TEST(CrossEntropy, SmallRowsAreTheDefinition) {
  for (TensorType type : {TensorType::bf16, TensorType::fp32})
    for (const auto& [N, V] :
         {std::pair<int64_t, int64_t>{1, 1}, {5, 2}, {3, 7}, {2, 8}, {9, 101}, {3, 8192}, {3, 8193}}) {
      SCOPED_TRACE(V);
      expect_losses(LossRows(N, V), type);
    }
}

// So many rows that a block walks over several; rows of GPT-2's vocabulary, as long as registers allow, and longer.
TEST(CrossEntropy, LongRowsAreTheDefinition) {
  for (const auto& [N, V] : {std::pair<int64_t, int64_t>{6000, 1000},
                             {300, 28672},
                             {400, 50257},
                             {140, 57344},
                             {140, 57345},
                             {3, 120001}}) {
    const LossRows rows(N, V);
    for (TensorType type : {TensorType::bf16, TensorType::fp32}) {
      SCOPED_TRACE(V);
      expect_losses(rows, type);
    }
  }
}

TEST(CrossEntropy, SmallNaNStaysInItsRow) {
  for (int64_t V : {int64_t{101}, int64_t{50257}}) {
    LossRows rows(3, V);
    const LossResult before = loss_of(rows, TensorType::bf16, true, 0.25f);
    rows.logits[at(rows.stride + V / 2)] = NAN;
    const LossResult found = loss_of(rows, TensorType::bf16, true, 0.25f);
    EXPECT_TRUE(std::isnan(found.losses[1]));
    for (int64_t row : {int64_t{0}, int64_t{2}}) {
      EXPECT_EQ(found.losses[at(row)], before.losses[at(row)]);
      for (int64_t n = row * rows.stride; n < (row + 1) * rows.stride; ++n)
        ASSERT_EQ(found.gradients[at(n)], before.gradients[at(n)]);
    }
    for (int64_t c = 0; c < rows.stride; ++c) {
      const float value = found.gradients[at(rows.stride + c)];
      ASSERT_TRUE(c < V ? std::isnan(value) : value == 0) << c;
    }
  }
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

// The best and the middle of some runs; rows of V, padded to `stride`.
void print_loss(int64_t N, int64_t V, int64_t stride) {
  constexpr int64_t kDrawn = 1024;  // different rows
  constexpr int kRuns = 21;
  std::vector<uint16_t> drawn(at(kDrawn * stride));
  RandomStream draw({5, 2, 1});
  for (uint16_t& x : drawn) x = bf16_of(static_cast<float>(2 * draw.normal()));
  std::vector<int32_t> targets;
  for (int64_t n = 0; n < N; ++n)
    targets.push_back(static_cast<int32_t>(draw.below(static_cast<uint64_t>(V))));
  const size_t bytes = at(N * stride) * 2, part = drawn.size() * 2;
  DeviceMemory given(bytes), logits(bytes), losses(at(N) * sizeof(float));
  const DeviceMemory on_device(targets);
  for (size_t offset = 0; offset < bytes; offset += part)
    given.upload(drawn.data(), std::min(part, bytes - offset), offset);
  std::vector<double> seconds;
  for (int run = 0; run < kRuns; ++run) {
    ASSERT_EQ(cudaMemcpy(logits.data(), given.data(), bytes, cudaMemcpyDeviceToDevice), cudaSuccess);
    seconds.push_back(device_seconds([&](void* stream) {
      device::cross_entropy(logits.data(), on_device.as<int32_t>(), N, V, stride, TensorType::bf16, true,
                            1.0f / static_cast<float>(N), losses.as<float>(),
                            static_cast<cudaStream_t>(stream));
    }));
  }
  std::sort(seconds.begin(), seconds.end());
  fmt::print(
      "\nloss and gradient of {} x {} BF16 logits (rows of {}): {:.3f} ms at best, {:.3f} in the middle, "
      "{:.2f} TB/s\n",
      N, V, stride, seconds.front() * 1e3, seconds[kRuns / 2] * 1e3,
      2 * static_cast<double>(bytes) / seconds[kRuns / 2] * 1e-12);
}

TEST(CrossEntropy, DISABLED_Bench) {
  print_loss(32 * 512, 8192, 8192);
  print_loss(64 * 1024, 50257, 50304);
}

TEST(ModelCuda, DISABLED_Bench) {
  unsetenv("XDG_CACHE_HOME");
  print_gelu(64 * 1024, 768);
  print_bench("gpt2", "flash2", 64, 1024, 20);
  print_bench("nano", "bf16_all", 32, 512, 100);
  print_bench("nano", "flash2", 32, 512, 100);
}

}  // namespace
}  // namespace evenkeel
