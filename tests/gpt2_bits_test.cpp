// Which bits the model computes: the same for any thread count and any parts of a batch; plans that reach their head alone; what
// BF16 products round.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/threads.h"
#include "gpt2_cases.h"
#include "model/model.h"
#include "numerics/random.h"

namespace evenkeel {
namespace {

using namespace gpt2_cases;

class EitherFamily : public ::testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Model, EitherFamily, ::testing::ValuesIn(kFamilies), family_name);

// --- Bits

TEST_P(EitherFamily, the_number_of_threads_changes_no_bit) {
  for (const LinearPrecision precision : {LinearPrecision::fp32, LinearPrecision::bf16})
    for (const char* plan : {"fp32", "bf16_all,row_sum=e5m2/stochastic,keel=1e-3"}) {
      ModelConfig config = GetParam().config(busy());
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
        const auto model = make_model_cpu(config, 9);
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
TEST_P(EitherFamily, the_parts_of_a_batch_change_no_bit) {
  for (const int64_t B : {32, 37}) {
    ModelConfig config = GetParam().config(busy());
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

// The gradients of two halves, each given its place in the step, are those of the whole.
TEST_P(EitherFamily, the_first_sequence_names_the_random_numbers) {
  ModelConfig config = GetParam().config(tiny());
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

TEST_P(EitherFamily, the_step_names_the_random_numbers) {
  const ModelConfig config = GetParam().config(busy());
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
TEST(Model, layers_have_random_numbers_of_their_own) {
  const ModelConfig config = busy();
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
        "attn.k_norm.weight", "attn.sinks", "attn.c_gate.weight", "attn.c_gate.bias"})
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
TEST_P(EitherFamily, a_plan_reaches_its_head_alone) {
  ModelConfig config = tiny();
  config.layers = 3, config.heads = 3;
  config = GetParam().config(config);
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

// Every stabiliser, with and without keel, in every head: a step is repeated to the bit, is that of any number of
// threads, and stays near FP32's.
TEST_P(EitherFamily, every_stabiliser_repeats_its_bits_and_stays_near_fp32) {
  const ModelConfig config = GetParam().config(tiny());
  const Tokens tokens(config, 2, 7);
  const auto model = lively_model(config);
  const Pass exact = pass(*model, tokens.batch());
  double norm = 0;
  for (const float g : exact.gradients) norm += double{g} * g;
  ASSERT_GT(std::size(kStabiliserTable), 0u);
  for (const StabiliserRules& rules : kStabiliserTable) {
    model->set_plan(ScopedPlan::parse(fmt::format("flash2,stabiliser={}", rules.name)));
    const Pass once = pass(*model, tokens.batch());
    set_thread_count(3);
    const Pass again = pass(*model, tokens.batch());
    set_thread_count(1);
    EXPECT_EQ(once.loss, again.loss) << rules.name;
    EXPECT_TRUE(same_bits(once.gradients, again.gradients)) << rules.name;
    double error = 0;
    for (size_t n = 0; n < exact.gradients.size(); ++n)
      error += std::pow(double{once.gradients[n]} - exact.gradients[n], 2);
    EXPECT_GT(error, 0) << rules.name;
    EXPECT_LT(std::sqrt(error / norm), 0x1p-5) << rules.name;
  }
}

// --- Precision

// A model whose matrices are BF16 already, but for lookups, has the same bits: so masters meet products
// rounded, and everything else unrounded.
TEST_P(EitherFamily, bf16_products_see_rounded_masters) {
  for (const bool tied : {false, true}) {
    ModelConfig config = GetParam().config(busy());
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
    // In place, and announced: the next pass sees it.
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
TEST(Model, every_operand_of_a_bf16_product_is_rounded) {
  for (int form = 0; form < 8; ++form) {
    ModelConfig config = tiny();
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
TEST(Model, bf16_rounds_what_gelu_and_the_gate_read) {
  ModelConfig config = busy();
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
TEST_P(EitherFamily, bf16_stays_near_fp32_and_without_bias) {
  ModelConfig config = GetParam().config(busy());
  config.precision = LinearPrecision::fp32;
  const Tokens tokens(config, 4, 60);
  const auto exact = make_model_cpu(config, 2);
  config.precision = LinearPrecision::bf16;
  const auto rounded = make_model_cpu(config, 2);
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

}  // namespace
}  // namespace evenkeel
