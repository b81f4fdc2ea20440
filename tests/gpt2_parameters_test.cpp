// The model's parameters: presets, names and places, initial weights; folders of transformers; and bad requests.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/whole_file.h"
#include "gpt2_cases.h"
#include "model/model.h"
#include "model/model_folder.h"
#include "run_folder.h"

namespace evenkeel {
namespace {

using namespace gpt2_cases;
namespace fs = std::filesystem;

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
  // Attention: q and the projection of C^2, k and v of C G D; the MLP: three matrices.
  const auto llama = [](int64_t L, int64_t C, int64_t G, int64_t D, int64_t F, int64_t V) {
    return L * (2 * C * C + 2 * C * G * D + 3 * C * F + 2 * C) + V * C + C;
  };
  EXPECT_EQ(ParameterTable(model_preset("llama-micro")).parameter_count(), llama(3, 128, 2, 32, 384, 256));
  EXPECT_EQ(ParameterTable(model_preset("llama-nano")).parameter_count(), llama(6, 384, 2, 64, 1216, 8192));
  EXPECT_EQ(ParameterTable(model_preset("llama-124m")).parameter_count(), llama(12, 768, 4, 64, 2432, 50257));
  EXPECT_NEAR(static_cast<double>(ParameterTable(model_preset("llama-124m")).parameter_count()), 124e6, 1e6);
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
    EXPECT_EQ(tensor.parts.size(), tensor.name.ends_with("c_attn.weight") ? 3u
                                   : tensor.muon                          ? 1u
                                                                          : 0u)
        << tensor.name;
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
  EXPECT_EQ(with([](auto& c) { c.heads = 4, c.key_heads = 3; }),
            "[model] expected key_heads that divide the 4 heads, got 3");
  EXPECT_EQ(with([](auto& c) { c.positions = Positions::rotary, c.head_features = 5; }),
            "[model] expected an even head size for rotary positions, got 5");
  EXPECT_EQ(with([](auto& c) { c.norm = NormKind::rms_norm, c.norm_bias = true; }),
            "[model] expected no norm_bias with rms_norm, which has none, got one");
  EXPECT_EQ(with([](auto& c) { c.norm_epsilon = 1e-6f; }),
            "[model] expected a norm_epsilon of 1e-05 with layer_norm, got 1e-06");
  EXPECT_EQ(with([](auto& c) { c.rotary_base = 1; }), "[model] expected a rotary_base above 1, got 1");
  EXPECT_EQ(with([](auto& c) { c.key_heads = 1, c.qk_clip = 5; }),
            "[model] expected qk_clip only where each head has its own keys, got 1 key heads for 2 heads");
  EXPECT_EQ(with([](auto& c) { c.vocabulary = int64_t{1} << 40; }),
            "[model] expected vocabulary from 1 to 16777216, got 1099511627776");
  EXPECT_EQ(with([](auto& c) { c.softcap = -1; }), "[model] expected softcap of 0 (off) or more, got -1");
  EXPECT_EQ(with([](auto& c) { c.qk_clip = NAN; }), "[model] expected qk_clip of 0 (off) or more, got nan");
  EXPECT_NE(with([](auto& c) { c.qk_clip = 1, c.qk_norm = true; }).find("got both"), std::string::npos);
  EXPECT_EQ(message_of([] { model_preset("tiny"); }),
            "[model] expected a preset (micro, nano, gpt2, gpt2-medium, llama-micro, llama-nano, "
            "llama-124m), got 'tiny'");
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

// --- Folders of transformers

class ModelFolder : public RunFolderTest {
 protected:
  static Floats random_parameters(const ParameterTable& table) {
    Floats values(at(table.size()));
    RandomStream stream({9, 0, 0});
    for (const ParameterTensor& t : table.tensors())
      for (int64_t n = 0; n < t.count(); ++n) values[at(t.offset + n)] = static_cast<float>(stream.normal());
    return values;
  }
  static Floats loaded(const fs::path& from) {
    const auto model = make_model_cpu(read_model_folder(from), 1);
    load_model_folder(from, *model);
    return parameters_of(*model);
  }
  void write_config(const std::string& text) const {
    fs::create_directories(folder / "other");
    write_whole_file(folder / "other" / "config.json", text);
  }
  static std::string fault_of(const std::function<void()>& body) {
    try {
      body();
    } catch (const DataError& error) {
      return error.what();
    }
    return "";
  }
  std::string fault() const {
    return fault_of([&] { read_model_folder(folder / "other"); });
  }
};

TEST_F(ModelFolder, every_type_goes_out_and_comes_back_to_the_bit) {
  ModelConfig gpt2 = gpt2_cases::tiny(), llama = like_llama(gpt2), qwen;
  gpt2.bias = gpt2.norm_bias = true;
  llama.rotary_base = 500, llama.norm_epsilon = 3e-6f;
  qwen = llama;
  qwen.qk_norm = true, qwen.head_features = 10, qwen.tied_embeddings = false;
  int count = 0;
  for (ModelConfig config : {gpt2, llama, qwen}) {
    const fs::path to = folder / fmt::format("model-{}", count++);
    const Floats parameters = random_parameters(ParameterTable(config));
    save_model_folder(to, config, parameters);
    ModelConfig read = read_model_folder(to);
    // Written out in full: what the defaults would give.
    config.key_heads = config.norm == NormKind::rms_norm ? config.key_head_count() : 0;
    config.head_features = config.norm == NormKind::rms_norm ? config.head_size() : 0;
    config.hidden = config.hidden_width();
    EXPECT_EQ(read, config) << describe(read);
    EXPECT_TRUE(same_bits(loaded(to), parameters));
  }
}

// transformers' GPT-2 always has biases; a model without is one whose biases are zero.
TEST_F(ModelFolder, biases_that_a_model_lacks_are_zeros) {
  const ModelConfig config = gpt2_cases::tiny();
  const auto model = lively_model(config);
  save_model_folder(folder / "model", config, parameters_of(*model));
  const auto other = make_model_cpu(read_model_folder(folder / "model"), 1);
  load_model_folder(folder / "model", *other);
  EXPECT_GT(other->table().tensors().size(), model->table().tensors().size());
  const Tokens tokens(config, 2, 5);
  EXPECT_EQ(other->loss(tokens.batch()), model->loss(tokens.batch()));
}

TEST_F(ModelFolder, a_matrix_lies_as_transformers_keep_it) {
  const ModelConfig config = like_llama(gpt2_cases::tiny());
  const ParameterTable table(config);
  const Floats parameters = random_parameters(table);
  save_model_folder(folder / "model", config, parameters);
  const Safetensors file(folder / "model" / "model.safetensors");
  const ParameterTensor &qkv = *table.find("h.1.attn.c_attn.weight"),
                        &fc = *table.find("h.1.mlp.c_fc.weight");
  const auto value = [&](const char* name, uint64_t rows, uint64_t columns, size_t n) {
    Floats values(rows * columns);
    file.at({name, element_type("F32"), {rows, columns}}).copy_to(values.data(), values.size());
    return values[n];
  };
  // (out, in): row 3 of the keys' matrix, column 5.
  EXPECT_EQ(value("model.layers.1.self_attn.k_proj.weight", 6, 12, 3 * 12 + 5),
            parameters[at(qkv.offset + 5 * config.qkv_width() + 12 + 3)]);
  EXPECT_EQ(value("model.layers.1.mlp.up_proj.weight", 36, 12, 7 * 12 + 2),
            parameters[at(fc.offset + 2 * 72 + 36 + 7)]);
}

TEST_F(ModelFolder, shards_and_narrow_types_are_read) {
  const ModelConfig config = like_llama(gpt2_cases::tiny());
  Floats parameters = random_parameters(ParameterTable(config));
  for (float& value : parameters) value = round_to({kBf16}, value);
  save_model_folder(folder / "model", config, parameters);
  // The same in two shards of BF16, every other tensor in the second.
  const fs::path to = folder / "shards";
  fs::create_directories(to);
  fs::copy_file(folder / "model" / "config.json", to / "config.json");
  const Safetensors whole(folder / "model" / "model.safetensors");
  nlohmann::json map;
  for (size_t shard = 0; shard < 2; ++shard) {
    std::vector<TensorHeader> headers;
    for (size_t n = shard; n < whole.tensors().size(); n += 2) {
      headers.push_back(whole.tensors()[n]);
      headers.back().type = element_type("BF16");
      map[headers.back().name] = fmt::format("part-{}.safetensors", shard);
    }
    SafetensorsWriter writer(to / fmt::format("part-{}.safetensors", shard), headers);
    for (size_t n = shard; n < whole.tensors().size(); n += 2) {
      const StoredTensor& t = whole.tensors()[n];
      Floats values(t.bytes.size() / sizeof(float));
      t.copy_to(values.data(), values.size());
      std::vector<uint16_t> codes;
      for (const float value : values)
        codes.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
      writer.append(t.name, std::as_bytes(std::span(codes)));
    }
    writer.commit();
  }
  write_whole_file(to / "model.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
  EXPECT_TRUE(same_bits(loaded(to), parameters));
  fs::remove(to / "part-1.safetensors");
  EXPECT_THROW(loaded(to), DataError);
  map.begin().value() = "../part-0.safetensors";
  write_whole_file(to / "model.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
  EXPECT_NE(fault_of([&] { loaded(to); }).find("expected the name of a file in this folder"),
            std::string::npos);
}

TEST_F(ModelFolder, what_cannot_be_said_is_refused_in_words) {
  constexpr const char* kSizes =
      "\"num_hidden_layers\":1,\"num_attention_heads\":2,\"hidden_size\":8,\"intermediate_size\":8,"
      "\"max_position_embeddings\":4,\"vocab_size\":5";
  const auto with = [&](const std::string& more) {
    write_config("{\"model_type\":\"llama\"," + std::string(kSizes) + more + "}");
    return fault();
  };
  EXPECT_EQ(with(""), "");
  EXPECT_EQ(with(",\"rope_parameters\":{\"rope_theta\":5e5,\"rope_type\":\"default\"}"), "");
  EXPECT_EQ(read_model_folder(folder / "other").rotary_base, 5e5f);
  const auto says = [&](const std::string& more, const char* words) {
    const std::string found = with(more);
    EXPECT_NE(found.find(words), std::string::npos) << more << ": " << found;
  };
  says(",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8}",
       "rope_scaling: expected rotary positions as they are");
  says(",\"hidden_act\":\"gelu\"", "hidden_act: expected silu or swish, found gelu");
  says(",\"mlp_bias\":true", "mlp_bias: expected false, found true");
  says(",\"partial_rotary_factor\":0.5", "partial_rotary_factor: expected 1, found 0.5");
  says(",\"num_key_value_heads\":\"two\"",
       "num_key_value_heads: expected a whole number of 0 or more, found \"two\"");
  says(",\"num_key_value_heads\":3", "expected key_heads from 0 to 2, got 3");
  write_config("{\"model_type\":\"mamba\"}");
  EXPECT_NE(fault().find("model_type: expected one of gpt2, llama, qwen3, found mamba"), std::string::npos)
      << fault();
  write_config("{\"model_type\":\"gpt2\",\"activation_function\":\"relu\"}");
  EXPECT_NE(fault().find("expected gelu_new or gelu_pytorch_tanh, found relu"), std::string::npos) << fault();
  write_config("[1]");
  EXPECT_NE(fault().find("expected a JSON object"), std::string::npos) << fault();
  ModelConfig mixed = gpt2_cases::tiny();
  mixed.mlp = MlpKind::swiglu;
  EXPECT_EQ(
      message_of([&] { save_model_folder(folder / "no", mixed, Floats(at(ParameterTable(mixed).size()))); }),
      "[model] expected a model of type gpt2, llama, qwen3, got one with layer_norm with swiglu");
  EXPECT_FALSE(fs::exists(folder / "no"));
}

}  // namespace
}  // namespace evenkeel
