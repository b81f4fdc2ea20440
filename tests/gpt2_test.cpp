// The whole model against a slow, obvious FP64 version and its finite differences, with every option; the
// same bits for any thread count; plans that reach their head alone; facts, clipping, initialisation, bad
// requests.
#include "model/gpt2.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <set>

#include "base/error.h"
#include "base/threads.h"
#include "numerics/random.h"
#include "numerics/round_array.h"

namespace evenkeel {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

size_t at(int64_t n) { return static_cast<size_t>(n); }

// --- The slow model

struct SlowFacts {
  double largest_score = -INFINITY, largest_row_mean = 0, sum_lse = 0, largest_lse = 0;
};

// Forward only, one value after another. Its parameters are the flat buffer of the table, in FP64.
class SlowGpt2 {
 public:
  explicit SlowGpt2(const Gpt2Config& config)
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
  const Gpt2Config config_;
  const ParameterTable table_;
  const Doubles* p_ = nullptr;

  const double* find(const std::string& name) const {
    const ParameterTensor* tensor = table_.find(name);
    return tensor ? p_->data() + tensor->offset : nullptr;
  }
  Doubles norm(const std::string& name, const Doubles& x) const {
    const double *gain = find(name + ".weight"), *bias = find(name + ".bias");
    double mean = 0, variance = 0;
    for (double v : x) mean += v / static_cast<double>(x.size());
    for (double v : x) variance += (v - mean) * (v - mean) / static_cast<double>(x.size());
    Doubles y;
    for (size_t c = 0; c < x.size(); ++c)
      y.push_back((x[c] - mean) / std::sqrt(variance + 1e-5) * gain[c] + (bias ? bias[c] : 0));
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
      x[d] *= gain[d] / std::sqrt(squares / static_cast<double>(config_.head_size()) + 1e-5);
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
    const int64_t C = config_.width, H = config_.heads, D = config_.head_size();
    std::vector<Doubles> x(at(T), Doubles(at(C)));
    for (int64_t t = 0; t < T; ++t)
      for (int64_t c = 0; c < C; ++c)
        x[at(t)][at(c)] = find("wte.weight")[tokens[t] * C + c] + find("wpe.weight")[t * C + c];
    for (int64_t l = 0; l < config_.layers; ++l) {
      const std::string layer = "h." + std::to_string(l) + ".";
      std::vector<Doubles> input, qkv;
      for (const Doubles& row : x) {
        input.push_back(norm(layer + "ln_1", row));
        qkv.push_back(linear(layer + "attn.c_attn", input.back(), 3 * C));
        for (int64_t h = 0; config_.qk_norm && h < H; ++h) {
          head_norm(&qkv.back()[at(h * D)], find(layer + "attn.q_norm.weight"));
          head_norm(&qkv.back()[at(C + h * D)], find(layer + "attn.k_norm.weight"));
        }
      }
      for (int64_t i = 0; i < T; ++i) {
        Doubles o(at(C));
        for (int64_t h = 0; h < H; ++h) {
          SlowFacts& fact = facts[at(l * H + h)];
          Doubles s;
          double sum = 0, mean = 0;
          for (int64_t j = 0; j <= i; ++j) {
            double score = 0;
            for (int64_t d = 0; d < D; ++d)
              score += qkv[at(i)][at(h * D + d)] * qkv[at(j)][at(C + h * D + d)];
            score /= std::sqrt(static_cast<double>(D));
            fact.largest_score = std::max(fact.largest_score, score);
            mean += score / static_cast<double>(i + 1);
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
              o[at(h * D + d)] += std::exp(s[at(j)] - lse) * qkv[at(j)][at(2 * C + h * D + d)];
        }
        if (config_.gated_attention) {
          const Doubles gate = linear(layer + "attn.c_gate", input[at(i)], C);
          for (size_t c = 0; c < o.size(); ++c) o[c] /= 1 + std::exp(-gate[c]);
        }
        add(x[at(i)], linear(layer + "attn.c_proj", o, C));
      }
      for (Doubles& row : x) {
        Doubles hidden = linear(layer + "mlp.c_fc", norm(layer + "ln_2", row), 4 * C);
        for (double& v : hidden)
          v = 0.5 * v * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (v + 0.044715 * v * v * v)));
        add(row, linear(layer + "mlp.c_proj", hidden, C));
      }
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

// --- Small models

Gpt2Config tiny() {
  Gpt2Config config;
  config.layers = 2, config.heads = 2, config.width = 12, config.context = 7, config.vocabulary = 11;
  config.precision = LinearPrecision::fp32;
  return config;
}

struct Tokens {
  std::vector<int32_t> tokens, targets;
  int64_t B, T;
  Tokens(const Gpt2Config& config, int64_t sequences, int64_t length, uint32_t which = 0)
      : B(sequences), T(length) {
    RandomStream stream({3, which, 0});
    for (int64_t n = 0; n < B * T; ++n) {
      tokens.push_back(static_cast<int32_t>(stream.below(config.vocabulary)));
      targets.push_back(static_cast<int32_t>(stream.below(config.vocabulary)));
    }
  }
  Batch batch() const { return {B, T, tokens, targets}; }
};

// All parameters random, biases and gains too, large enough that every one matters.
Floats lively_parameters(const ParameterTable& table) {
  Floats values(at(table.size()));
  RandomStream stream({5, 0, 0});
  for (const ParameterTensor& tensor : table.tensors())
    for (int64_t n = 0; n < tensor.count(); ++n)
      values[at(tensor.offset + n)] =
          static_cast<float>((tensor.init == ParameterInit::one ? 1.0 : 0.0) + 0.4 * stream.normal());
  return values;
}

std::unique_ptr<Gpt2> lively_model(const Gpt2Config& config) {
  auto model = make_gpt2_cpu(config, 1);
  model->write_parameters(lively_parameters(model->table()));
  return model;
}

Floats gradients_of(const Gpt2& model) {
  Floats gradients(at(model.table().size()));
  model.read_gradients(gradients);
  return gradients;
}
Floats parameters_of(const Gpt2& model) {
  Floats parameters(at(model.table().size()));
  model.read_parameters(parameters);
  return parameters;
}

struct Pass {
  double loss;
  Floats gradients;
};
Pass pass(Gpt2& model, const Batch& batch, const StepContext& context = {}, float loss_scale = 1) {
  model.zero_gradients();
  const double loss = model.forward_backward(batch, loss_scale, context);
  return {loss, gradients_of(model)};
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Option {
  const char* name;
  std::function<void(Gpt2Config&)> set;
  double keel = 0;
  int64_t B = 2, T = 5;
};

const Option kOptions[] = {
    {"plain", [](Gpt2Config&) {}},
    {"untied", [](Gpt2Config& c) { c.tied_embeddings = false; }},
    {"bias", [](Gpt2Config& c) { c.bias = true; }},
    {"norm_bias", [](Gpt2Config& c) { c.norm_bias = true; }},
    {"qk_norm", [](Gpt2Config& c) { c.qk_norm = true; }},
    {"gated_attention", [](Gpt2Config& c) { c.gated_attention = true; }},
    {"softcap", [](Gpt2Config& c) { c.softcap = 1.5f; }},
    {"keel", [](Gpt2Config&) {}, 0.3},
    {"everything",
     [](Gpt2Config& c) {
       c.bias = c.norm_bias = c.qk_norm = c.gated_attention = true;
       c.tied_embeddings = false;
       c.softcap = 2;
     },
     0.2},
    {"one token", [](Gpt2Config&) {}, 0, 3, 1},
    {"one layer, one head", [](Gpt2Config& c) { c.layers = c.heads = 1; }},
    {"odd sizes", [](Gpt2Config& c) { c.width = 20, c.heads = 5, c.vocabulary = 257, c.context = 9; }, 0, 1,
     9},
    {"head size 1", [](Gpt2Config& c) { c.width = c.heads = 3; }},
};

// Along a random direction within each tensor: touches every parameter of it. And at some single ones.
TEST(Gpt2, gradient_is_that_of_the_slow_model) {
  for (const Option& option : kOptions) {
    Gpt2Config config = tiny();
    option.set(config);
    const auto model = lively_model(config);
    PrecisionPlan plan = parse_plan("fp32");
    plan.keel = static_cast<float>(option.keel);
    model->set_plan(ScopedPlan(plan));
    const Tokens tokens(config, option.B, option.T);
    const Pass found = pass(*model, tokens.batch());

    SlowGpt2 slow(config);
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

TEST(Gpt2, logits_are_those_of_the_slow_model) {
  const Gpt2Config config = tiny();
  const auto model = lively_model(config);
  const Floats parameters = parameters_of(*model);
  const Tokens tokens(config, 1, 7);
  SlowGpt2 slow(config);
  for (size_t length : {1, 4, 7}) {
    const auto some = std::span(tokens.tokens).first(length);
    const Floats found = model->logits(some);
    const Doubles expected = slow.logits({parameters.begin(), parameters.end()}, some);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t v = 0; v < found.size(); ++v) EXPECT_NEAR(found[v], expected[v], 1e-5);
  }
}

// --- Bits

Gpt2Config busy() {
  Gpt2Config config = tiny();
  config.width = 40, config.heads = 4, config.context = 80, config.vocabulary = 130;
  config.bias = config.norm_bias = config.gated_attention = true;
  config.qk_norm = true;
  return config;
}

TEST(Gpt2, the_number_of_threads_changes_no_bit) {
  for (const LinearPrecision precision : {LinearPrecision::fp32, LinearPrecision::bf16})
    for (const char* plan : {"fp32", "bf16_all,row_sum=e5m2/stochastic,keel=1e-3"}) {
      Gpt2Config config = busy();
      config.precision = precision;
      const Tokens tokens(config, 3, 77);
      StepContext context;
      context.step = 4;
      context.score_facts = context.tie_facts = context.residual_facts = true;
      struct Result {
        Pass pass;
        Floats logits, parameters;
        std::vector<HeadFacts> facts;
      };
      const auto run = [&] {
        const auto model = make_gpt2_cpu(config, 9);
        model->set_plan(ScopedPlan::parse(plan));
        Result result{pass(*model, tokens.batch(), context), {}, parameters_of(*model), model->facts()};
        result.logits = model->logits(std::span(tokens.tokens).first(50));
        return result;
      };
      set_thread_count(1);
      const Result expected = run();
      for (const int threads : {2, 5}) {
        set_thread_count(threads);
        const Result found = run();
        EXPECT_EQ(found.pass.loss, expected.pass.loss);
        EXPECT_TRUE(same_bits(found.pass.gradients, expected.pass.gradients)) << plan;
        EXPECT_TRUE(same_bits(found.logits, expected.logits)) << plan;
        EXPECT_TRUE(same_bits(found.parameters, expected.parameters));
        EXPECT_TRUE(found.facts == expected.facts) << plan;
      }
      set_thread_count(1);
    }
}

// A batch goes through in parts, larger ones for more threads; here 4, 2 and 1, and a last one that is
// smaller.
TEST(Gpt2, the_parts_of_a_batch_change_no_bit) {
  for (const int64_t B : {32, 37}) {
    Gpt2Config config = busy();
    const Tokens tokens(config, B, 64);
    StepContext context;
    context.score_facts = context.tie_facts = context.residual_facts = true;
    const auto model = lively_model(config);
    // The second plan draws random numbers at every kind of place: operands, rows, gradients of keys, shifts.
    const char* plan = B == 32 ? "bf16_all,keel=1e-3"
                               : "bf16_all,q=e5m2/stochastic,k=e5m2/stochastic,row_sum=e5m2/stochastic,"
                                 "dk=e5m2/stochastic,stabiliser=dither";
    model->set_plan(ScopedPlan::parse(plan));
    set_thread_count(1);
    const Pass expected = pass(*model, tokens.batch(), context);
    const double loss = model->loss(tokens.batch());
    const std::vector<HeadFacts> facts = model->facts();
    EXPECT_EQ(loss, expected.loss);
    for (const int threads : {2, 4, 5}) {
      set_thread_count(threads);
      const Pass found = pass(*model, tokens.batch(), context);
      EXPECT_EQ(found.loss, expected.loss);
      EXPECT_TRUE(same_bits(found.gradients, expected.gradients)) << threads;
      EXPECT_TRUE(model->facts() == facts) << threads;
      EXPECT_EQ(model->loss(tokens.batch()), loss);
    }
    set_thread_count(1);
  }
}

// The gradients of two halves, each told where it lies in the step, are those of the whole.
TEST(Gpt2, the_first_sequence_names_the_random_numbers) {
  Gpt2Config config = tiny();
  const Tokens tokens(config, 4, 7);
  const auto model = lively_model(config);
  model->set_plan(ScopedPlan::parse("fp32,row_sum=e5m2/stochastic"));
  const auto half = [&](size_t n, int64_t first_sequence) {
    const auto rows = [&](const std::vector<int32_t>& all) { return std::span(all).subspan(n * 14, 14); };
    StepContext context;
    context.first_sequence = first_sequence;
    return pass(*model, Batch{2, 7, rows(tokens.tokens), rows(tokens.targets)}, context).loss;
  };
  const double whole = pass(*model, tokens.batch()).loss;
  EXPECT_NEAR((half(0, 0) + half(1, 2)) / 2, whole, 1e-12);
  EXPECT_GT(std::fabs((half(0, 0) + half(1, 0)) / 2 - whole), 1e-9);
}

TEST(Gpt2, the_step_names_the_random_numbers) {
  const Gpt2Config config = busy();
  const Tokens tokens(config, 2, 30);
  const auto model = lively_model(config);
  model->set_plan(ScopedPlan::parse("fp32,row_sum=e5m2/stochastic"));
  StepContext first, second;
  second.step = 1;
  const Pass a = pass(*model, tokens.batch(), first), b = pass(*model, tokens.batch(), second),
             c = pass(*model, tokens.batch(), first);
  EXPECT_TRUE(same_bits(a.gradients, c.gradients));
  EXPECT_FALSE(same_bits(a.gradients, b.gradients));
}

// Two layers that see the same x and add nothing to it: what their attention gives shows in c_proj's
// gradient.
TEST(Gpt2, layers_have_random_numbers_of_their_own) {
  const Gpt2Config config = busy();
  const Tokens tokens(config, 2, 30);
  const auto model = lively_model(config);
  Floats parameters = parameters_of(*model);
  const auto tensor = [&](int layer, const char* name) {
    const ParameterTensor& t = *model->table().find(fmt::format("h.{}.{}", layer, name));
    return std::span(parameters).subspan(at(t.offset), at(t.count()));
  };
  for (const char* name : {"attn.c_proj.weight", "attn.c_proj.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"})
    for (const int layer : {0, 1}) std::ranges::fill(tensor(layer, name), 0.0f);
  for (const char* name :
       {"ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.q_norm.weight",
        "attn.k_norm.weight", "attn.c_gate.weight", "attn.c_gate.bias"})
    std::ranges::copy(tensor(0, name), tensor(1, name).begin());
  model->write_parameters(parameters);
  const auto alike = [&](const char* plan) {
    model->set_plan(ScopedPlan::parse(plan));
    parameters = pass(*model, tokens.batch()).gradients;
    return std::ranges::equal(tensor(0, "attn.c_proj.weight"), tensor(1, "attn.c_proj.weight"));
  };
  EXPECT_TRUE(alike("fp32,row_sum=e5m2"));
  EXPECT_FALSE(alike("fp32,row_sum=e5m2/stochastic"));
}

// Rows of c_proj that are zero cut a head off: what its plan does shows in their own gradient and nowhere
// else.
TEST(Gpt2, a_plan_reaches_its_head_alone) {
  Gpt2Config config = tiny();
  config.layers = 3, config.heads = 3;
  const Tokens tokens(config, 2, 7);
  const int64_t C = config.width, D = config.head_size();
  for (int64_t layer = 0; layer < 3; ++layer)
    for (int64_t head = 0; head < 3; ++head) {
      const auto model = lively_model(config);
      Floats parameters = parameters_of(*model);
      const ParameterTensor& proj =
          *model->table().find("h." + std::to_string(layer) + ".attn.c_proj.weight");
      std::fill_n(parameters.begin() + proj.offset + head * D * C, D * C, 0.0f);
      model->write_parameters(parameters);
      const Pass before = pass(*model, tokens.batch());
      model->set_plan(
          ScopedPlan::parse(fmt::format("fp32; layer {} head {}: output=e5m2,scores=e5m2", layer, head)));
      const Pass after = pass(*model, tokens.batch());
      EXPECT_EQ(after.loss, before.loss);
      int64_t changed = 0;
      for (int64_t n = 0; n < model->table().size(); ++n) {
        const bool own = n >= proj.offset + head * D * C && n < proj.offset + (head + 1) * D * C;
        const bool differs = before.gradients[at(n)] != after.gradients[at(n)];
        changed += differs;
        ASSERT_TRUE(own || !differs) << "layer " << layer << " head " << head << ", parameter " << n;
      }
      EXPECT_GT(changed, D * C / 2);
      // The test of the test: the neighbour is not cut off, so its plan is felt.
      model->set_plan(
          ScopedPlan::parse(fmt::format("fp32; layer {} head {}: output=e5m2", layer, (head + 1) % 3)));
      EXPECT_NE(pass(*model, tokens.batch()).loss, before.loss);
      EXPECT_EQ(model->plan(layer, (head + 1) % 3).at(Site::output).format, kE5m2);
      EXPECT_EQ(model->plan(layer, head).at(Site::output).format, kFp32);
    }
}

// --- Precision

// A model whose matrices are BF16 already, but for lookups, has the same bits: so masters meet products
// rounded, and everything else unrounded.
TEST(Gpt2, bf16_products_see_rounded_masters) {
  for (const bool tied : {false, true}) {
    Gpt2Config config = busy();
    config.precision = LinearPrecision::bf16;
    config.tied_embeddings = tied;
    const Tokens tokens(config, 2, 30);
    const auto model = lively_model(config);
    const Pass before = pass(*model, tokens.batch());
    Floats parameters = parameters_of(*model);
    int64_t changed = 0;
    for (const ParameterTensor& tensor : model->table().tensors())
      if (tensor.muon || tensor.name == "lm_head.weight")
        for (int64_t n = tensor.offset; n < tensor.offset + tensor.count(); ++n) {
          const float rounded = round_to({kBf16}, parameters[at(n)]);
          changed += rounded != parameters[at(n)];
          parameters[at(n)] = rounded;
        }
    EXPECT_GT(changed, 1000);
    model->write_parameters(parameters);
    const Pass after = pass(*model, tokens.batch());
    EXPECT_EQ(after.loss, before.loss);
    EXPECT_TRUE(same_bits(after.gradients, before.gradients));
    // In place, told so: the next pass sees it.
    model->parameters()[model->table().find("h.0.mlp.c_fc.weight")->offset] += 1;
    model->parameters_changed();
    EXPECT_NE(pass(*model, tokens.batch()).loss, before.loss);
  }
}

// The bits of x's significand that are in use.
int significant_bits(double x) {
  int exponent;
  const auto whole = static_cast<int64_t>(std::ldexp(std::fabs(std::frexp(x, &exponent)), 53));
  return whole == 0 ? 0 : 53 - std::countr_zero(static_cast<uint64_t>(whole));
}

// One token: a weight's gradient is one product of an input and a gradient. Two numbers of 8 bits make one of
// 16, so where more are in use, one of them was not rounded. With heads of one feature, so are the score and
// delta. The gradient of a LayerNorm's bias is what its backward pass reads: 8 bits.
TEST(Gpt2, every_operand_of_a_bf16_product_is_rounded) {
  for (int form = 0; form < 8; ++form) {
    Gpt2Config config = tiny();
    config.heads = config.width;
    config.qk_norm = form & 1;
    config.gated_attention = form & 2;
    config.precision = form & 4 ? LinearPrecision::fp32 : LinearPrecision::bf16;
    config.tied_embeddings = false;
    config.norm_bias = true;
    const auto model = lively_model(config);
    const Tokens tokens(config, 1, 1);
    const auto check = [&](const std::string& what, int bits, int most = 16) {
      if (config.precision == LinearPrecision::bf16)
        EXPECT_LE(bits, most) << what << ", form " << form;
      else
        EXPECT_GT(bits, most) << what << ", form " << form << ": the test does not see it";
    };
    StepContext context;
    context.score_facts = context.residual_facts = true;
    pass(*model, tokens.batch(), context);
    int score = 0, delta = 0;
    for (const HeadFacts& fact : model->facts()) {
      score = std::max(score, significant_bits(fact.largest_score));
      delta = std::max(delta, significant_bits(fact.delta_rms));
    }
    check("q k", score);
    check("dO O", delta);
    // One key gives O = V and dV = dO, rounded before; so that they, dQ and dK have bits to lose: a shift and
    // a keel.
    model->set_plan(ScopedPlan::parse("fp32,stabiliser=dither,keel=0.3"));
    const Pass found = pass(*model, tokens.batch());
    for (const ParameterTensor& tensor : model->table().tensors()) {
      const bool norm_bias = tensor.name.ends_with(".bias");
      if (!tensor.muon && tensor.name != "lm_head.weight" && !norm_bias) continue;
      int most = 0;
      for (int64_t n = 0; n < tensor.count(); ++n)
        most = std::max(most, significant_bits(found.gradients[at(tensor.offset + n)]));
      check(tensor.name, most, norm_bias ? 8 : 16);
    }
  }
}

// Values that differ by less than half a step of BF16 are the same to what comes behind.
TEST(Gpt2, bf16_rounds_what_gelu_and_the_gate_read) {
  Gpt2Config config = busy();
  config.precision = LinearPrecision::bf16;
  const Tokens tokens(config, 2, 30);
  for (const char* layer : {"mlp.c_fc", "attn.c_gate"}) {
    const auto loss_with = [&](float bias) {
      const auto model = lively_model(config);
      Floats parameters = parameters_of(*model);
      for (const auto& [name, value] : {std::pair{".weight", 0.0f}, {".bias", bias}}) {
        const ParameterTensor& tensor = *model->table().find(std::string("h.0.") + layer + name);
        std::fill_n(parameters.begin() + tensor.offset, tensor.count(), value);
      }
      model->write_parameters(parameters);
      return model->loss(tokens.batch());
    };
    EXPECT_EQ(loss_with(1), loss_with(1 + 0.49f * 0x1p-7f)) << layer;
    EXPECT_NE(loss_with(1), loss_with(1 + 0.51f * 0x1p-7f)) << layer;
  }
}

// BF16 has 8 bits, so an operand is off by up to 2^-8 of itself; errors are independent and average out over
// a sum. A few layers stay within 2^-5 of the FP32 gradient, and what is left has no direction: along the
// gradient it is smaller still.
TEST(Gpt2, bf16_stays_near_fp32_and_without_bias) {
  Gpt2Config config = busy();
  config.precision = LinearPrecision::fp32;
  const Tokens tokens(config, 4, 60);
  const auto exact = make_gpt2_cpu(config, 2);
  config.precision = LinearPrecision::bf16;
  const auto rounded = make_gpt2_cpu(config, 2);
  ASSERT_TRUE(same_bits(parameters_of(*exact), parameters_of(*rounded)));
  const Pass a = pass(*exact, tokens.batch()), b = pass(*rounded, tokens.batch());
  EXPECT_NE(a.loss, b.loss);
  EXPECT_NEAR(a.loss, b.loss, 0x1p-10 * a.loss);
  double error = 0, norm = 0, along = 0, sum = 0;
  for (size_t n = 0; n < a.gradients.size(); ++n) {
    const double difference = double{b.gradients[n]} - a.gradients[n];
    error += difference * difference;
    norm += double{a.gradients[n]} * a.gradients[n];
    along += difference * a.gradients[n];
    sum += difference;
  }
  EXPECT_LT(std::sqrt(error / norm), 0x1p-5);
  EXPECT_GT(std::sqrt(error / norm), 0x1p-14) << "nothing was rounded";
  EXPECT_LT(std::fabs(along) / norm, 0x1p-9);
  EXPECT_LT(std::fabs(sum), 4 * std::sqrt(error)) << "errors of one sign";
}

// --- Training

TEST(Gpt2, thirty_steps_of_descent_lower_the_loss) {
  for (const char* plan : {"fp32", "flash2,stabiliser=consistent"}) {
    Gpt2Config config = tiny();
    config.precision = LinearPrecision::bf16;
    const Tokens tokens(config, 3, 7);
    const auto model = make_gpt2_cpu(config, 1);
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

TEST(Gpt2, gradients_add_up_over_parts_of_a_step) {
  Gpt2Config config = tiny();
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

TEST(Gpt2, batches_of_other_sizes_between_do_no_harm) {
  const Gpt2Config config = busy();
  const Tokens large(config, 3, 70), small(config, 1, 3);
  const auto model = lively_model(config);
  const Pass before = pass(*model, large.batch());
  pass(*model, small.batch());
  model->logits(std::span(large.tokens).first(9));
  const Pass after = pass(*model, large.batch());
  EXPECT_EQ(after.loss, before.loss);
  EXPECT_TRUE(same_bits(after.gradients, before.gradients));
}

TEST(Gpt2, a_model_of_nan_gives_nan) {
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

TEST(Gpt2, facts_are_those_of_the_slow_model) {
  Gpt2Config config = tiny();
  config.context = 70;  // more than one block of rows
  const auto model = lively_model(config);
  const Tokens tokens(config, 2, 70);
  StepContext context;
  context.score_facts = true;
  pass(*model, tokens.batch(), context);
  SlowGpt2 slow(config);
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
    EXPECT_TRUE(std::isnan(found.tied_rows) && std::isnan(found.residual_mean));  // not asked for
  }
  pass(*model, tokens.batch());
  EXPECT_TRUE(std::isnan(model->facts()[0].largest_score));
}

TEST(Gpt2, ties_and_residuals_on_request) {
  const Gpt2Config config = tiny();
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

TEST(Gpt2, facts_of_some_sequences_are_those_of_a_batch_of_these_and_change_no_bit) {
  Gpt2Config config = tiny();
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

TEST(Gpt2, qk_clip_brings_the_largest_score_to_its_limit) {
  for (const bool bias : {false, true}) {
    Gpt2Config config = tiny();
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

// --- Parameters

TEST(Gpt2, presets_have_their_sizes) {
  const auto count = [](const char* name, bool bias) {
    Gpt2Config config = gpt2_preset(name);
    config.bias = config.norm_bias = bias;
    return ParameterTable(config).parameter_count();
  };
  EXPECT_EQ(count("gpt2", true), 124439808);  // as published
  EXPECT_EQ(count("gpt2-medium", true), 354823168);
  EXPECT_EQ(count("nano", false), 12 * 6 * 384 * 384 + (8192 + 512) * 384 + 13 * 384);
  EXPECT_EQ(ParameterTable(gpt2_preset("micro")).parameter_count(),
            12 * 3 * 128 * 128 + (256 + 128) * 128 + 14 * 128);
  const Gpt2Config nano = gpt2_preset("nano");
  EXPECT_EQ(flops_per_token(nano, 512), 6.0 * (12 * 6 * 384 * 384 + 8192 * 384) + 12.0 * 6 * 384 * 512);
  Gpt2Config untied = nano;
  untied.tied_embeddings = false;
  EXPECT_EQ(flops_per_token(untied, 512), flops_per_token(nano, 512));
}

TEST(Gpt2, parameters_have_the_names_and_places_of_hugging_face) {
  Gpt2Config config = tiny();
  config.bias = config.norm_bias = true;
  const ParameterTable table(config);
  const std::map<std::string, std::vector<int64_t>> kLayer = {{"ln_1.weight", {12}},
                                                              {"ln_1.bias", {12}},
                                                              {"attn.c_attn.weight", {12, 36}},
                                                              {"attn.c_attn.bias", {36}},
                                                              {"attn.c_proj.weight", {12, 12}},
                                                              {"attn.c_proj.bias", {12}},
                                                              {"ln_2.weight", {12}},
                                                              {"ln_2.bias", {12}},
                                                              {"mlp.c_fc.weight", {12, 48}},
                                                              {"mlp.c_fc.bias", {48}},
                                                              {"mlp.c_proj.weight", {48, 12}},
                                                              {"mlp.c_proj.bias", {12}}};
  std::map<std::string, std::vector<int64_t>> expected = {
      {"wte.weight", {11, 12}}, {"wpe.weight", {7, 12}}, {"ln_f.weight", {12}}, {"ln_f.bias", {12}}};
  for (const auto& [name, shape] : kLayer)
    for (const char* layer : {"h.0.", "h.1."}) expected[layer + name] = shape;
  int64_t end = 0;
  ASSERT_EQ(table.tensors().size(), expected.size());
  for (const ParameterTensor& tensor : table.tensors()) {
    EXPECT_EQ(tensor.shape, expected[tensor.name]) << tensor.name;
    EXPECT_EQ(tensor.offset % 64, 0);
    EXPECT_GE(tensor.offset, end);
    end = tensor.offset + tensor.count();
    EXPECT_EQ(tensor.decay, tensor.shape.size() == 2) << tensor.name;
    EXPECT_EQ(tensor.muon, tensor.shape.size() == 2 && tensor.name.starts_with("h.")) << tensor.name;
    EXPECT_EQ(tensor.parts, tensor.name.ends_with("c_attn.weight") ? 3 : 1) << tensor.name;
  }
  EXPECT_GE(table.size(), end);
  EXPECT_EQ(table.find("h.2.ln_1.weight"), nullptr);
  // Behind wte there is room for whole rows, up to 64 of them.
  EXPECT_EQ(config.padded_vocabulary(), 64);
  EXPECT_EQ(table.find("wpe.weight")->offset, 64 * 12);
  config.vocabulary = 50257;
  EXPECT_EQ(config.padded_vocabulary(), 50304);
  config.vocabulary = 8192;
  EXPECT_EQ(config.padded_vocabulary(), 8192);
  config.tied_embeddings = false;
  const ParameterTable untied(config);
  EXPECT_EQ(untied.size(), untied.find("lm_head.weight")->offset + 8192 * 12);
}

TEST(Gpt2, initial_weights_are_those_of_gpt2) {
  const Gpt2Config config = gpt2_preset("micro");
  const ParameterTable table(config);
  Floats values(at(table.size()), 5.0f), again(values), other(values);
  initialise(config, table, 1, values);
  initialise(config, table, 1, again);
  initialise(config, table, 2, other);
  EXPECT_TRUE(same_bits(values, again));
  for (const ParameterTensor& tensor : table.tensors()) {
    double sum = 0, squares = 0, product = 0, fourth = 0, neighbours = 0;
    const double count = static_cast<double>(tensor.count());
    for (int64_t n = tensor.offset; n < tensor.offset + tensor.count(); ++n) {
      const double value = values[at(n)];
      sum += value;
      squares += value * value;
      fourth += std::pow(value, 4);
      product += value * other[at(n)];
      if (n > tensor.offset) neighbours += value * values[at(n - 1)];
    }
    const double deviation = tensor.name.ends_with("c_proj.weight") ? 0.02 / std::sqrt(6.0) : 0.02;
    if (tensor.shape.size() == 2) {
      EXPECT_NEAR(sum / count, 0, 4 * deviation / std::sqrt(count)) << tensor.name;
      EXPECT_NEAR(squares / count, deviation * deviation, 4 * deviation * deviation * std::sqrt(2 / count));
      EXPECT_NEAR(fourth / count / std::pow(deviation, 4), 3, 4 * std::sqrt(96 / count)) << "not normal";
      EXPECT_NEAR(product / count, 0, 4 * deviation * deviation / std::sqrt(count)) << "another seed, alike";
      EXPECT_NEAR(neighbours / count, 0, 4 * deviation * deviation / std::sqrt(count)) << tensor.name;
    } else {
      EXPECT_EQ(sum, tensor.name.ends_with("weight") ? count : 0) << tensor.name;
      EXPECT_EQ(squares, sum);
    }
  }
  // An option that adds tensors changes no other's numbers; no two tensors share theirs.
  Gpt2Config more = config;
  more.bias = more.gated_attention = true;
  more.tied_embeddings = false;
  const ParameterTable wide(more);
  Floats with_more(at(wide.size()));
  initialise(more, wide, 1, with_more);
  std::set<float> firsts;
  for (const ParameterTensor& tensor : wide.tensors()) {
    if (const ParameterTensor* old = table.find(tensor.name)) {
      EXPECT_TRUE(std::equal(with_more.begin() + tensor.offset,
                             with_more.begin() + tensor.offset + tensor.count(),
                             values.begin() + old->offset))
          << tensor.name;
    }
    if (tensor.shape.size() == 2) {
      EXPECT_TRUE(firsts.insert(with_more[at(tensor.offset)]).second) << tensor.name;
    }
  }
}

// --- Bad requests

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Gpt2, bad_configurations_say_what_was_expected) {
  const auto with = [](auto change) {
    return message_of([&] {
      Gpt2Config config = tiny();
      change(config);
      make_gpt2_cpu(config, 1);
    });
  };
  EXPECT_EQ(with([](auto& c) { c.layers = 0; }), "[model] expected layers from 1 to 4096, got 0");
  EXPECT_EQ(with([](auto& c) { c.heads = -1; }), "[model] expected heads from 1 to 4096, got -1");
  EXPECT_EQ(with([](auto& c) { c.heads = 5; }),
            "[model] expected a width that is a multiple of 5 heads, got 12");
  EXPECT_EQ(with([](auto& c) { c.vocabulary = int64_t{1} << 40; }),
            "[model] expected vocabulary from 1 to 16777216, got 1099511627776");
  EXPECT_EQ(with([](auto& c) { c.softcap = -1; }), "[model] expected softcap of 0 (off) or more, got -1");
  EXPECT_EQ(with([](auto& c) { c.qk_clip = NAN; }), "[model] expected qk_clip of 0 (off) or more, got nan");
  EXPECT_NE(with([](auto& c) { c.qk_clip = 1, c.qk_norm = true; }).find("got both"), std::string::npos);
  EXPECT_EQ(message_of([] { gpt2_preset("tiny"); }),
            "[model] expected a preset (micro, nano, gpt2, gpt2-medium), got 'tiny'");
  for (const std::string_view name : kGpt2Presets) validate(gpt2_preset(name));
}

TEST(Gpt2, bad_requests_change_nothing) {
  const Gpt2Config config = tiny();
  const auto model = lively_model(config);
  const Tokens good(config, 2, 5);
  const Pass before = pass(*model, good.batch());
  const Floats parameters = parameters_of(*model);
  Tokens bad(good);
  bad.tokens[7] = 11;
  EXPECT_EQ(message_of([&] { model->forward_backward(bad.batch(), 1, {}); }),
            "[model] expected tokens from 0 to 10, found 11 at place 2 of sequence 1");
  bad = good;
  bad.targets[0] = -1;
  EXPECT_EQ(message_of([&] { model->loss(bad.batch()); }),
            "[model] expected targets from 0 to 10, found -1 at place 0 of sequence 0");
  EXPECT_EQ(message_of([&] {
              model->loss({1, 8, good.tokens, good.targets});
            }),
            "[model] expected 1 to 7 tokens a sequence, got 8");
  EXPECT_EQ(message_of([&] {
              model->loss({2, 4, good.tokens, good.targets});
            }),
            "[model] expected 2 x 4 tokens, got 10");
  EXPECT_EQ(message_of([&] {
              model->loss({0, 4, {}, {}});
            }),
            "[model] expected at least one sequence, got 0");
  EXPECT_EQ(message_of([&] { model->logits({}); }), "[model] expected 1 to 7 tokens a sequence, got 0");
  Floats short_by_one(parameters.size() - 1);
  EXPECT_NE(message_of([&] { model->write_parameters(short_by_one); }).find("values, got"),
            std::string::npos);
  EXPECT_NE(message_of([&] { model->read_gradients(short_by_one); }).find("expected"), std::string::npos);
  EXPECT_NE(message_of([&] { model->plan(2, 0); }).find("expected a layer below 2"), std::string::npos);
  EXPECT_TRUE(same_bits(gradients_of(*model), before.gradients));
  EXPECT_TRUE(same_bits(parameters_of(*model), parameters));
  Gpt2Config capped = config;
  capped.softcap = 5;
  const auto other = make_gpt2_cpu(capped, 1);
  EXPECT_NE(message_of([&] {
              other->set_plan(ScopedPlan::parse("fp32; layer 1 head 0: stabiliser=centre_keys"));
            }).find("layer 1 head 0"),
            std::string::npos);
  EXPECT_EQ(other->plan(1, 0).stabiliser, Stabiliser::none);
}

}  // namespace
}  // namespace evenkeel
