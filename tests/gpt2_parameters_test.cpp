// The model's parameters: presets, names and places, initial weights; and bad requests.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "gpt2_cases.h"
#include "model/model.h"

namespace evenkeel {
namespace {

using namespace gpt2_cases;

// --- Parameters

TEST(Model, presets_have_their_sizes) {
  const auto count = [](const char* name, bool bias) {
    ModelConfig config = model_preset(name);
    config.bias = config.norm_bias = bias;
    return ParameterTable(config).parameter_count();
  };
  EXPECT_EQ(count("gpt2", true), 124439808);  // as published
  EXPECT_EQ(count("gpt2-medium", true), 354823168);
  EXPECT_EQ(count("nano", false), 12 * 6 * 384 * 384 + (8192 + 512) * 384 + 13 * 384);
  EXPECT_EQ(ParameterTable(model_preset("micro")).parameter_count(),
            12 * 3 * 128 * 128 + (256 + 128) * 128 + 14 * 128);
  const ModelConfig nano = model_preset("nano");
  EXPECT_EQ(flops_per_token(nano, 512), 6.0 * (12 * 6 * 384 * 384 + 8192 * 384) + 12.0 * 6 * 384 * 512);
  ModelConfig untied = nano;
  untied.tied_embeddings = false;
  EXPECT_EQ(flops_per_token(untied, 512), flops_per_token(nano, 512));
}

TEST(Model, parameters_have_the_names_and_places_of_hugging_face) {
  ModelConfig config = tiny();
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

TEST(Model, initial_weights_are_those_of_gpt2) {
  const ModelConfig config = model_preset("micro");
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
  ModelConfig more = config;
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

TEST(Model, bad_configurations_say_what_was_expected) {
  const auto with = [](auto change) {
    return message_of([&] {
      ModelConfig config = tiny();
      change(config);
      make_model_cpu(config, 1);
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
  EXPECT_EQ(message_of([] { model_preset("tiny"); }),
            "[model] expected a preset (micro, nano, gpt2, gpt2-medium), got 'tiny'");
  for (const std::string_view name : kModelPresets) validate(model_preset(name));
}

TEST(Model, bad_requests_change_nothing) {
  const ModelConfig config = tiny();
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
  ModelConfig capped = config;
  capped.softcap = 5;
  const auto other = make_model_cpu(capped, 1);
  EXPECT_NE(message_of([&] {
              other->set_plan(ScopedPlan::parse("fp32; layer 1 head 0: stabiliser=centre_keys"));
            }).find("layer 1: [attention] centre_keys cannot go with softcap"),
            std::string::npos);
  EXPECT_EQ(other->plan(1, 0).stabiliser, Stabiliser::none);
}

}  // namespace
}  // namespace evenkeel
