// The whole model against a slow, obvious FP64 version and its finite differences, with every option; descent; facts; clipping.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <functional>

#include "gpt2_cases.h"
#include "model/model.h"
#include "numerics/random.h"

namespace evenkeel {
namespace {

using namespace gpt2_cases;

// --- The slow model

static_assert(std::size(kNormNames) == 2 && std::size(kPositionNames) == 5 && std::size(kMlpNames) == 2,
              "a new kind of block: ARCHITECTURE.md, \"A block\"");

struct SlowFacts {
  double largest_score = -INFINITY, largest_row_mean = 0, sum_lse = 0, largest_lse = 0, key_share = 0;
};

// Forward only, one value after another. Its parameters are the flat buffer of the table, in FP64.
class SlowModel {
 public:
  explicit SlowModel(const ModelConfig& config)
      : config_(config), table_(config), facts(at(config.layers * config.heads)) {}

  // Mean cross-entropy, and keel times the mean over tokens of all heads' L^2.
  double loss(const Doubles& parameters, const Batch& batch, double keel = 0) {
    p_ = &parameters;
    double total = 0, penalty = 0;
    for (int64_t b = 0; b < batch.B; ++b) {
      const std::vector<Doubles> x = stream(batch.tokens.data() + b * batch.T, batch.T, penalty);
      for (int64_t t = 0; t < batch.T; ++t) {
        const Doubles logits = head(x[at(t)]);
        double sum = 0;
        for (double logit : logits) sum += std::exp(logit);
        total += std::log(sum) - logits[at(batch.targets[at(b * batch.T + t)])];
      }
    }
    return (total + keel * penalty) / static_cast<double>(batch.B * batch.T);
  }
  Doubles logits(const Doubles& parameters, std::span<const int32_t> tokens) {
    p_ = &parameters;
    double penalty = 0;
    return head(stream(tokens.data(), static_cast<int64_t>(tokens.size()), penalty).back());
  }

 private:
  const ModelConfig config_;
  const ParameterTable table_;
  const Doubles* p_ = nullptr;

  const double* find(const std::string& name) const {
    const ParameterTensor* tensor = table_.find(name);
    return tensor ? p_->data() + tensor->offset : nullptr;
  }
  Doubles norm(const std::string& name, const Doubles& x) const {
    const double *gain = find(name + ".weight"), *bias = find(name + ".bias");
    double mean = 0, variance = 0;
    if (config_.norm == NormKind::layer_norm)
      for (double v : x) mean += v / static_cast<double>(x.size());
    for (double v : x) variance += (v - mean) * (v - mean) / static_cast<double>(x.size());
    Doubles y;
    for (size_t c = 0; c < x.size(); ++c)
      y.push_back((x[c] - mean) / std::sqrt(variance + config_.norm_epsilon) * gain[c] +
                  (bias ? bias[c] : 0));
    return y;
  }
  Doubles linear(const std::string& name, const Doubles& x, int64_t out) const {
    const double *w = find(name + ".weight"), *bias = find(name + ".bias");
    Doubles y(at(out));
    for (size_t o = 0; o < y.size(); ++o) {
      y[o] = bias ? bias[o] : 0;
      for (size_t i = 0; i < x.size(); ++i) y[o] += x[i] * w[i * at(out) + o];
    }
    return y;
  }
  void head_norm(double* x, const double* gain) const {
    double squares = 0;
    for (int64_t d = 0; d < config_.head_size(); ++d) squares += x[d] * x[d];
    for (int64_t d = 0; d < config_.head_size(); ++d)
      x[d] *= gain[d] / std::sqrt(squares / static_cast<double>(config_.head_size()) + config_.norm_epsilon);
  }
  // Complex numbers times e^(i t theta).
  void turn(double* x, int64_t t) const {
    const int64_t D = config_.head_size();
    for (int64_t p = 0; p < D / 2; ++p) {
      const double angle =
          static_cast<double>(t) *
          std::pow(config_.rotary_base, -2.0 * static_cast<double>(p) / static_cast<double>(D));
      const bool neighbours = config_.positions == Positions::rotary_pairs;
      double &real = x[neighbours ? 2 * p : p], &imaginary = x[neighbours ? 2 * p + 1 : p + D / 2];
      const std::complex<double> turned = std::complex(real, imaginary) * std::polar(1.0, angle);
      real = turned.real(), imaginary = turned.imag();
    }
  }
  Doubles mlp(const std::string& name, const Doubles& x) const {
    Doubles hidden = linear(name + ".c_fc", x, config_.fc_width());
    const auto F = at(config_.hidden_width());
    for (size_t n = 0; n < F; ++n) {
      double& v = hidden[n];
      if (config_.mlp == MlpKind::swiglu)
        v = v / (1 + std::exp(-v)) * hidden[F + n];
      else
        v = 0.5 * v * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (v + 0.044715 * v * v * v)));
    }
    hidden.resize(F);
    return linear(name + ".c_proj", hidden, config_.width);
  }
  Doubles head(const Doubles& x) const {
    const double* w = find(config_.tied_embeddings ? "wte.weight" : "lm_head.weight");
    Doubles logits(at(config_.vocabulary));
    for (size_t v = 0; v < logits.size(); ++v)
      for (size_t c = 0; c < x.size(); ++c) logits[v] += x[c] * w[v * x.size() + c];
    return logits;
  }
  // One sequence up to the last LayerNorm; adds L^2 to the penalty.
  std::vector<Doubles> stream(const int32_t* tokens, int64_t T, double& penalty) {
    const int64_t C = config_.width, H = config_.heads, G = config_.key_head_count(), D = config_.head_size();
    const double* wpe = find("wpe.weight");
    std::vector<Doubles> x(at(T), Doubles(at(C)));
    for (int64_t t = 0; t < T; ++t)
      for (int64_t c = 0; c < C; ++c)
        x[at(t)][at(c)] = find("wte.weight")[tokens[t] * C + c] + (wpe ? wpe[t * C + c] : 0);
    for (int64_t l = 0; l < config_.layers; ++l) {
      const std::string layer = "h." + std::to_string(l) + ".";
      std::vector<Doubles> input, qkv;
      for (const Doubles& row : x) {
        input.push_back(norm(layer + "ln_1", row));
        qkv.push_back(linear(layer + "attn.c_attn", input.back(), (H + 2 * G) * D));
        for (int64_t h = 0; h < H + G; ++h) {  // heads of q, then of k
          double* const head = &qkv.back()[at(h * D)];
          if (config_.qk_norm)
            head_norm(head, find(layer + (h < H ? "attn.q_norm.weight" : "attn.k_norm.weight")));
          if (config_.is_rotary()) turn(head, static_cast<int64_t>(qkv.size()) - 1);
        }
      }
      for (int64_t h = 0; h < H; ++h) {  // the mean product of two keys, over their mean square
        double pairs = 0, squares = 0;
        for (int64_t i = 0; i < T; ++i)
          for (int64_t j = 0; j < T; ++j)
            for (int64_t d = 0, key = (H + h / (H / G)) * D; d < D; ++d) {
              pairs += qkv[at(i)][at(key + d)] * qkv[at(j)][at(key + d)];
              if (i == j) squares += qkv[at(i)][at(key + d)] * qkv[at(i)][at(key + d)];
            }
        facts[at(l * H + h)].key_share += pairs / (static_cast<double>(T) * squares);
      }
      for (int64_t i = 0; i < T; ++i) {
        Doubles o(at(H * D));
        for (int64_t h = 0; h < H; ++h) {
          const int64_t key = (H + h / (H / G)) * D, value = key + G * D;
          SlowFacts& fact = facts[at(l * H + h)];
          // Of ALiBi, as its paper has them for a power of two, and for three heads.
          const double slope = config_.positions != Positions::alibi ? 0
                               : H == 2                              ? (h == 0 ? 1.0 / 16 : 1.0 / 256)
                                        : std::vector{1.0 / 16, 1.0 / 256, 1.0 / 4}[at(h)];
          const double* const sinks = find(layer + "attn.sinks");
          Doubles s;
          double sum = sinks ? std::exp(sinks[h]) : 0, mean = 0;
          for (int64_t j = 0; j <= i; ++j) {
            double score = 0;
            for (int64_t d = 0; d < D; ++d) score += qkv[at(i)][at(h * D + d)] * qkv[at(j)][at(key + d)];
            score /= std::sqrt(static_cast<double>(D));
            fact.largest_score = std::max(fact.largest_score, score);
            mean += score / static_cast<double>(i + 1);
            score -= slope * static_cast<double>(i - j);
            if (config_.softcap > 0) score = config_.softcap * std::tanh(score / config_.softcap);
            s.push_back(score);
            sum += std::exp(score);
          }
          const double lse = std::log(sum);
          penalty += lse * lse;
          fact.largest_row_mean = std::max(fact.largest_row_mean, std::fabs(mean));
          fact.sum_lse += lse;
          fact.largest_lse = std::max(fact.largest_lse, std::fabs(lse));
          for (int64_t j = 0; j <= i; ++j)
            for (int64_t d = 0; d < D; ++d)
              o[at(h * D + d)] += std::exp(s[at(j)] - lse) * qkv[at(j)][at(value + d)];
        }
        if (config_.gated_attention) {
          const Doubles gate = linear(layer + "attn.c_gate", input[at(i)], H * D);
          for (size_t c = 0; c < o.size(); ++c) o[c] /= 1 + std::exp(-gate[c]);
        }
        add(x[at(i)], linear(layer + "attn.c_proj", o, C));
      }
      for (Doubles& row : x) add(row, mlp(layer + "mlp", norm(layer + "ln_2", row)));
    }
    for (Doubles& row : x) row = norm("ln_f", row);
    return x;
  }
  static void add(Doubles& x, const Doubles& y) {
    for (size_t c = 0; c < x.size(); ++c) x[c] += y[c];
  }

 public:
  std::vector<SlowFacts> facts;  // (L, H), over all calls
};

class EitherFamily : public ::testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Model, EitherFamily, ::testing::ValuesIn(kFamilies), family_name);

struct Option {
  const char* name;
  std::function<void(ModelConfig&)> set;
  double keel = 0;
  int64_t B = 2, T = 5;
};

const Option kOptions[] = {
    {"plain", [](ModelConfig&) {}},
    {"untied", [](ModelConfig& c) { c.tied_embeddings = false; }},
    {"bias", [](ModelConfig& c) { c.bias = true; }},
    {"norm_bias", [](ModelConfig& c) { c.norm_bias = true; }},
    {"qk_norm", [](ModelConfig& c) { c.qk_norm = true; }},
    {"gated_attention", [](ModelConfig& c) { c.gated_attention = true; }},
    {"softcap", [](ModelConfig& c) { c.softcap = 1.5f; }},
    {"keel", [](ModelConfig&) {}, 0.3},
    {"everything",
     [](ModelConfig& c) {
       c.bias = c.norm_bias = c.qk_norm = c.gated_attention = true;
       c.tied_embeddings = false;
       c.softcap = 2;
     },
     0.2},
    {"one token", [](ModelConfig&) {}, 0, 3, 1},
    {"one layer, one head", [](ModelConfig& c) { c.layers = c.heads = 1; }},
    {"odd sizes", [](ModelConfig& c) { c.width = 20, c.heads = 5, c.vocabulary = 257, c.context = 9; }, 0, 1,
     9},
    {"head size 1", [](ModelConfig& c) { c.width = c.heads = 3; }},
    {"rms_norm", [](ModelConfig& c) { c.norm = NormKind::rms_norm, c.norm_epsilon = 1e-3f; }},
    {"rotary", [](ModelConfig& c) { c.positions = Positions::rotary, c.rotary_base = 7; }},
    {"rotary_pairs", [](ModelConfig& c) { c.positions = Positions::rotary_pairs; }},
    {"no positions", [](ModelConfig& c) { c.positions = Positions::none; }},
    {"alibi", [](ModelConfig& c) { c.positions = Positions::alibi, c.heads = 3; }},
    {"sinks", [](ModelConfig& c) { c.sinks = true; }},
    {"sinks, keel", [](ModelConfig& c) { c.sinks = true, c.positions = Positions::alibi; }, 0.3},
    {"swiglu", [](ModelConfig& c) { c.mlp = MlpKind::swiglu, c.hidden = 10; }},
    {"hidden 5, biases", [](ModelConfig& c) { c.hidden = 5, c.mlp = MlpKind::swiglu, c.bias = true; }},
    {"grouped queries", [](ModelConfig& c) { c.heads = 6, c.key_heads = 2; }},
    {"heads wider than the stream", [](ModelConfig& c) { c.head_features = 10, c.key_heads = 1; }},
    {"llama", [](ModelConfig& c) { c = like_llama(c); }},
    {"llama, everything",
     [](ModelConfig& c) {
       c = like_llama(c);
       c.head_features = 4, c.key_heads = 2;
       c.bias = c.qk_norm = c.gated_attention = true;
       c.tied_embeddings = false;
       c.softcap = 2;
     },
     0.2},
};

// Along a random direction within each tensor: touches every parameter of it. And at some single ones.
TEST(Model, gradient_is_that_of_the_slow_model) {
  for (const Option& option : kOptions) {
    ModelConfig config = tiny();
    option.set(config);
    const auto model = lively_model(config);
    PrecisionPlan plan = parse_plan("fp32");
    plan.keel = static_cast<float>(option.keel);
    model->set_plan(ScopedPlan(plan));
    const Tokens tokens(config, option.B, option.T);
    const Pass found = pass(*model, tokens.batch());

    SlowModel slow(config);
    const Floats parameters = parameters_of(*model);
    const Doubles at_rest(parameters.begin(), parameters.end());
    ASSERT_NEAR(found.loss, slow.loss(at_rest, tokens.batch()), 3e-6 * found.loss) << option.name;
    ASSERT_EQ(found.loss, model->loss(tokens.batch())) << option.name;

    constexpr double kStep = 1e-5;
    const auto slope = [&](const Doubles& direction) {
      Doubles above(at_rest), below(at_rest);
      for (size_t n = 0; n < at_rest.size(); ++n) {
        above[n] += kStep * direction[n];
        below[n] -= kStep * direction[n];
      }
      const double keel = plan.keel;
      return (slow.loss(above, tokens.batch(), keel) - slow.loss(below, tokens.batch(), keel)) / (2 * kStep);
    };
    RandomStream stream({11, 0, 0});
    for (const ParameterTensor& tensor : model->table().tensors()) {
      double norm = 0;
      for (int64_t n = 0; n < tensor.count(); ++n)
        norm += std::pow(found.gradients[at(tensor.offset + n)], 2);
      norm = std::sqrt(norm);
      Doubles direction(at_rest.size());
      double expected = 0;
      for (int64_t n = 0; n < tensor.count(); ++n) {
        direction[at(tensor.offset + n)] = stream.normal();
        expected += direction[at(tensor.offset + n)] * found.gradients[at(tensor.offset + n)];
      }
      ASSERT_NEAR(expected, slope(direction), 2e-5 * norm + 2e-8) << option.name << ", " << tensor.name;
      for (int sample = 0; sample < 3; ++sample) {
        const int64_t n = tensor.offset + stream.below(tensor.count());
        Doubles one(at_rest.size());
        one[at(n)] = 1;
        ASSERT_NEAR(found.gradients[at(n)], slope(one), 2e-5 * norm + 2e-8)
            << option.name << ", " << tensor.name;
      }
      // With one token a softmax has one key: nothing reaches q and k.
      if (option.T > 1 || !tensor.name.ends_with("_norm.weight")) {
        EXPECT_GT(norm, 1e-6) << option.name << ", " << tensor.name << ": no gradient";
      }
    }
    // What lies between tensors stays zero.
    std::vector<bool> used(at_rest.size());
    for (const ParameterTensor& tensor : model->table().tensors())
      std::fill_n(used.begin() + tensor.offset, tensor.count(), true);
    for (size_t n = 0; n < used.size(); ++n) ASSERT_TRUE(used[n] || found.gradients[n] == 0);
  }
}

TEST_P(EitherFamily, logits_are_those_of_the_slow_model) {
  const ModelConfig config = GetParam().config(tiny());
  const auto model = lively_model(config);
  const Floats parameters = parameters_of(*model);
  const Tokens tokens(config, 1, 7);
  SlowModel slow(config);
  for (size_t length : {1, 4, 7}) {
    const auto some = std::span(tokens.tokens).first(length);
    const Floats found = model->logits(some);
    const Doubles expected = slow.logits({parameters.begin(), parameters.end()}, some);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t v = 0; v < found.size(); ++v) EXPECT_NEAR(found[v], expected[v], 1e-5);
  }
}

// --- Training

TEST_P(EitherFamily, thirty_steps_of_descent_lower_the_loss) {
  for (const char* plan : {"fp32", "flash2,stabiliser=consistent"}) {
    ModelConfig config = GetParam().config(tiny());
    config.precision = LinearPrecision::bf16;
    const Tokens tokens(config, 3, 7);
    const auto model = make_model_cpu(config, 1);
    model->set_plan(ScopedPlan::parse(plan));
    double first = 0, last = 0;
    for (uint32_t step = 0; step < 30; ++step) {
      model->zero_gradients();
      last = model->forward_backward(tokens.batch(), 1, {.step = step});
      if (step == 0) first = last;
      for (int64_t n = 0; n < model->table().size(); ++n)
        model->parameters()[n] -= 0.5f * model->gradients()[n];
      model->parameters_changed();
    }
    EXPECT_NEAR(first, std::log(11.0), 0.05);
    EXPECT_LT(last, first - 0.5) << plan;
  }
}

TEST(Model, gradients_add_up_over_parts_of_a_step) {
  ModelConfig config = tiny();
  config.tied_embeddings = false;  // a tied wte is added to twice a pass, so its halves round apart
  const Tokens tokens(config, 2, 5);
  const auto model = lively_model(config);
  model->set_plan(ScopedPlan::parse("fp32,keel=0.3"));  // a part of the loss, so scaled with it
  const Pass whole = pass(*model, tokens.batch());
  const Pass half = pass(*model, tokens.batch(), {}, 0.5f);
  EXPECT_EQ(half.loss, whole.loss);
  model->forward_backward(tokens.batch(), 0.5f, {});
  EXPECT_TRUE(same_bits(gradients_of(*model), whole.gradients));
  Floats written(whole.gradients);
  written[3] = 7;
  model->write_gradients(written);
  EXPECT_TRUE(same_bits(gradients_of(*model), written));
  model->zero_gradients();
  EXPECT_TRUE(same_bits(gradients_of(*model), Floats(written.size())));
}

TEST_P(EitherFamily, batches_of_other_sizes_between_do_no_harm) {
  const ModelConfig config = GetParam().config(busy());
  const Tokens large(config, 3, 70), small(config, 1, 3);
  const auto model = lively_model(config);
  const Pass before = pass(*model, large.batch());
  pass(*model, small.batch());
  model->logits(std::span(large.tokens).first(9));
  const Pass after = pass(*model, large.batch());
  EXPECT_EQ(after.loss, before.loss);
  EXPECT_TRUE(same_bits(after.gradients, before.gradients));
}

TEST(Model, a_model_of_nan_gives_nan) {
  const auto model = lively_model(tiny());
  Floats parameters = parameters_of(*model);
  parameters[at(model->table().find("h.0.attn.c_attn.weight")->offset)] = NAN;
  model->write_parameters(parameters);
  const Tokens tokens(tiny(), 2, 5);
  StepContext context;
  context.score_facts = context.tie_facts = context.residual_facts = true;
  EXPECT_TRUE(std::isnan(model->forward_backward(tokens.batch(), 1, context)));
}

// --- Facts

TEST_P(EitherFamily, facts_are_those_of_the_slow_model) {
  ModelConfig config = GetParam().config(tiny());
  config.context = 70;  // more than one block of rows
  const auto model = lively_model(config);
  const Tokens tokens(config, 2, 70);
  StepContext context;
  context.score_facts = true;
  pass(*model, tokens.batch(), context);
  SlowModel slow(config);
  const Floats parameters = parameters_of(*model);
  slow.loss({parameters.begin(), parameters.end()}, tokens.batch());
  ASSERT_EQ(model->facts().size(), slow.facts.size());
  for (size_t n = 0; n < slow.facts.size(); ++n) {
    const HeadFacts& found = model->facts()[n];
    EXPECT_NEAR(found.largest_score, slow.facts[n].largest_score, 1e-5 * slow.facts[n].largest_score);
    EXPECT_NEAR(found.largest_row_mean, slow.facts[n].largest_row_mean,
                1e-5 * slow.facts[n].largest_row_mean);
    EXPECT_NEAR(found.mean_lse, slow.facts[n].sum_lse / (2 * 70), 1e-5);
    EXPECT_NEAR(found.largest_lse, slow.facts[n].largest_lse, 1e-5 * slow.facts[n].largest_lse);
    EXPECT_NEAR(found.key_share, slow.facts[n].key_share / 2, 1e-5);              // of both sequences
    EXPECT_TRUE(std::isnan(found.tied_rows) && std::isnan(found.residual_mean));  // not asked for
  }
  pass(*model, tokens.batch());
  EXPECT_TRUE(std::isnan(model->facts()[0].largest_score) && std::isnan(model->facts()[0].key_share));
}

TEST(Model, ties_and_residuals_on_request) {
  const ModelConfig config = tiny();
  const Tokens tokens(config, 2, 7);
  const auto model = lively_model(config);
  StepContext context;
  context.tie_facts = context.residual_facts = true;
  const auto noise = [&](const char* plan) {
    model->set_plan(ScopedPlan::parse(plan));
    pass(*model, tokens.batch(), context);
    const HeadFacts& fact = model->facts()[0];
    EXPECT_LE(std::fabs(fact.residual_mean), fact.residual_rms);
    EXPECT_GT(fact.residual_error, 0);
    return fact.residual_rms / fact.delta_rms;
  };
  EXPECT_LT(noise("fp32"), 1e-5);
  EXPECT_GT(noise("fp32,row_sum=e5m2"), 1e-2);
  EXPECT_LT(noise("fp32,row_sum=e5m2,stabiliser=zero_sum"), 1e-5);
  EXPECT_LT(model->facts()[0].tied_rows, 0.5);
  // No queries: all scores are 0, and every row but the first of a sequence has ties.
  Floats parameters = parameters_of(*model);
  const ParameterTensor& qkv = *model->table().find("h.0.attn.c_attn.weight");
  for (int64_t row = 0; row < 12; ++row) std::fill_n(parameters.begin() + qkv.offset + row * 36, 12, 0.0f);
  model->write_parameters(parameters);
  pass(*model, tokens.batch(), context);
  EXPECT_FLOAT_EQ(model->facts()[0].tied_rows, 6.0f / 7);
}

TEST_P(EitherFamily, facts_of_some_sequences_are_those_of_a_batch_of_these_and_change_no_bit) {
  const ModelConfig config = GetParam().config(tiny());
  const Tokens tokens(config, 5, 7);
  const auto model = lively_model(config);
  model->set_plan(ScopedPlan::parse("bf16_all,row_sum=e5m2/stochastic"));
  StepContext all, some;
  all.tie_facts = all.residual_facts = some.tie_facts = some.residual_facts = true;
  some.fact_sequences = 2;
  const auto gradients = [&](const Batch& batch, float scale, const StepContext& context) {
    model->zero_gradients();
    model->forward_backward(batch, scale, context);
    Floats found(at(model->table().size()));
    model->read_gradients(found);
    return found;
  };
  const Floats expected = gradients(tokens.batch(), 1, all);
  const std::vector<HeadFacts> facts_of_all = model->facts();
  EXPECT_EQ(gradients(tokens.batch(), 1, some), expected);
  const std::vector<HeadFacts> found = model->facts();
  Batch first = tokens.batch();
  first.B = 2, first.tokens = first.tokens.first(2 * 7), first.targets = first.targets.first(2 * 7);
  gradients(first, 2.0f / 5, all);  // so that each row's gradient has the same scale
  for (size_t n = 0; n < found.size(); ++n) {
    EXPECT_EQ(found[n].mean_lse, facts_of_all[n].mean_lse);
    EXPECT_EQ(found[n].tied_rows, model->facts()[n].tied_rows);
    EXPECT_NEAR(found[n].residual_rms, model->facts()[n].residual_rms, 1e-5 * found[n].residual_rms);
    EXPECT_NEAR(found[n].delta_rms, model->facts()[n].delta_rms, 1e-5 * found[n].delta_rms);
  }
}

TEST(Model, qk_clip_brings_the_largest_score_to_its_limit) {
  for (const bool bias : {false, true}) {
    ModelConfig config = tiny();
    config.bias = bias;
    const Tokens tokens(config, 2, 7);
    StepContext context;
    context.score_facts = true;
    // A limit between the heads' largest scores.
    const auto unlimited = lively_model(config);
    pass(*unlimited, tokens.batch(), context);
    const float first = unlimited->facts()[0].largest_score, second = unlimited->facts()[1].largest_score;
    config.qk_clip = (first + second) / 2;
    const auto model = lively_model(config);
    EXPECT_THROW(model->apply_qk_clip(), std::invalid_argument);  // no facts yet
    pass(*model, tokens.batch(), context);
    const Floats before = parameters_of(*model);
    const int64_t clipped = model->apply_qk_clip();
    EXPECT_GE(clipped, 1);
    EXPECT_LT(clipped, 4);
    const int64_t head = first > second ? 0 : 1;  // the clipped one of layer 0
    const Floats after = parameters_of(*model);
    const ParameterTensor& qkv = *model->table().find("h.0.attn.c_attn.weight");
    for (int64_t row = 0; row < 12; ++row)
      for (int64_t c = 0; c < 36; ++c) {
        const bool scaled = c < 24 && c % 12 / 6 == head;
        const size_t n = at(qkv.offset + row * 36 + c);
        ASSERT_EQ(before[n] != after[n], scaled) << row << ", " << c;
      }
    pass(*model, tokens.batch(), context);
    EXPECT_NEAR(model->facts()[at(head)].largest_score, config.qk_clip, 1e-5 * config.qk_clip);
    EXPECT_EQ(model->facts()[at(1 - head)].largest_score, std::min(first, second));
  }
  EXPECT_THROW(lively_model(tiny())->apply_qk_clip(), std::invalid_argument);
}

}  // namespace
}  // namespace evenkeel
