// GPT-2 against PyTorch, and its files against Hugging Face's transformers (python/check_model.py); whole training runs
// against PyTorch's (python/twin_torch.py). Skipped where a python3 with the package is not at hand; EVENKEEL_PYTHON names
// another one.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/json_lines.h"
#include "base/json_text.h"
#include "base/safetensors.h"
#include "base/whole_file.h"
#include "model/model_folder.h"
#include "numerics/random.h"
#include "training/checkpoint.h"
#include "training/trainer.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int kNoPackage = 77, kNoPython = 127;
constexpr size_t kLargest = 1 << 24;  // bytes of a file

class PyTorchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder = fs::temp_directory_path() / fmt::format("evenkeel-pytorch-{}-{}", getpid(), count++);
    fs::create_directories(folder / "ours");
  }
  void TearDown() override { fs::remove_all(folder); }

  // The exit code of a script of python/, by the first python3 that has what it needs; its words go to the test's output.
  // The models are tiny: a thread for each core, a GPU's driver and a hub of models would only take time.
  int run_script(const std::string& name, const std::vector<std::string>& arguments) const {
    constexpr const char* kPlain = "OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1";
    std::vector<std::string> candidates = {"python3", "/usr/bin/python3"};
    if (const char* asked = std::getenv("EVENKEEL_PYTHON")) candidates = {asked};
    // In the tree it was built from, or here.
    fs::path script = fs::path(EVENKEEL_SOURCE_DIR) / "python" / name;
    if (!fs::exists(script)) script = fs::absolute("python") / name;
    std::string quoted;
    for (const std::string& argument : arguments) quoted += fmt::format(" '{}'", argument);
    for (const std::string& python : candidates) {
      const std::string command = fmt::format("{} '{}' '{}'{} 2>&1", kPlain, python, script.string(), quoted);
      const int status = std::system(command.c_str());
      const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      if (code != kNoPackage && code != kNoPython) return code;
    }
    return kNoPackage;
  }
  int check_model(const std::string& verb, const std::vector<fs::path>& folders) const {
    std::vector<std::string> arguments = {verb};
    for (const fs::path& given : folders) arguments.push_back(given.string());
    return run_script("check_model.py", arguments);
  }

  fs::path folder;
  static inline int count = 0;
};

// Weights far from their start, so that no gain is 1 and no bias 0.
std::unique_ptr<Model> lively_model(const ModelConfig& config) {
  auto model = make_model_cpu(config, 5);
  std::vector<float> w(static_cast<size_t>(model->table().size()));
  model->read_parameters(w);
  for (const ParameterTensor& t : model->table().tensors()) {
    RandomStream draw({11, 0, static_cast<uint32_t>(t.offset)});
    for (int64_t n = t.offset; n < t.offset + t.count(); ++n)
      w[static_cast<size_t>(n)] += 0.1f * static_cast<float>(draw.normal());
  }
  model->write_parameters(w);
  return model;
}

ModelConfig small() {
  ModelConfig config = model_preset("micro");
  config.layers = 2, config.heads = 4, config.width = 36, config.context = 20, config.vocabulary = 41;
  return config;
}

TEST_F(PyTorchTest, loss_and_every_gradient) {
  // All at once: it is loading PyTorch that takes time. Beside each model's gradients lies a copy in which one value of the
  // last tensor is wrong by a ten-thousandth of the tensor's size: is the judge awake?
  std::vector<fs::path> right, wrong, all;
  std::vector<std::string> wrong_name;
  for (const bool plain : {false, true}) {
    ModelConfig config = small();
    config.bias = config.norm_bias = !plain;
    config.tied_embeddings = !plain;
    const auto model = lively_model(config);
    constexpr int64_t B = 3, T = 19;
    std::vector<int32_t> tokens, targets;
    RandomStream draw({12, 0, 0});
    for (int64_t n = 0; n < B * T; ++n) {
      tokens.push_back(static_cast<int32_t>(draw.unit() * 41));
      targets.push_back(static_cast<int32_t>(draw.unit() * 41));
    }
    model->zero_gradients();
    const double loss = model->forward_backward({B, T, tokens, targets}, 1, {});
    std::vector<float> gradients(static_cast<size_t>(model->table().size()));
    model->read_gradients(gradients);

    const auto rows = [&](const std::vector<int32_t>& values) {
      Json out = Json::array();
      for (int64_t b = 0; b < B; ++b)
        out.push_back(std::vector<int32_t>(values.begin() + b * T, values.begin() + (b + 1) * T));
      return out;
    };
    const auto write = [&](const fs::path& to, const std::vector<float>& values) {
      fs::create_directories(to);
      save_weights(to / "model.safetensors", *model);
      std::ofstream(to / "batch.json") << Json{
          {"heads", config.heads}, {"tokens", rows(tokens)}, {"targets", rows(targets)}, {"loss", loss}};
      std::vector<TensorHeader> headers;
      for (const ParameterTensor& t : model->table().tensors())
        headers.push_back({t.name, element_type("F32"), {t.shape.begin(), t.shape.end()}});
      SafetensorsWriter writer(to / "gradients.safetensors", headers);
      for (const ParameterTensor& t : model->table().tensors())
        writer.append(t.name, std::as_bytes(std::span(values).subspan(static_cast<size_t>(t.offset),
                                                                      static_cast<size_t>(t.count()))));
      writer.commit();
      all.push_back(to);
    };
    right.push_back(folder / fmt::format("right-{}", plain));
    write(right.back(), gradients);
    const ParameterTensor& last = model->table().tensors().back();
    double squares = 0;
    for (int64_t n = last.offset; n < last.offset + last.count(); ++n)
      squares += std::pow(gradients[static_cast<size_t>(n)], 2);
    gradients[static_cast<size_t>(last.offset)] += 1e-4f * static_cast<float>(std::sqrt(squares));
    wrong.push_back(folder / fmt::format("wrong-{}", plain));
    write(wrong.back(), gradients);
    wrong_name.push_back(last.name);
  }
  const int code = check_model("gradients", all);
  if (code == kNoPackage) GTEST_SKIP() << "no python3 with PyTorch";
  EXPECT_EQ(code, 1);  // of the wrong ones
  const auto faults = [](const fs::path& of) {
    return parse_json(read_whole_file(of / "faults.json", kLargest)).get<std::vector<std::string>>();
  };
  for (size_t n = 0; n < right.size(); ++n) {
    EXPECT_EQ(faults(right[n]), std::vector<std::string>{});
    ASSERT_EQ(faults(wrong[n]).size(), 1u);
    EXPECT_EQ(faults(wrong[n])[0].rfind(wrong_name[n] + ": ", 0), 0u) << faults(wrong[n])[0];
  }
}

// Rotary positions, RMS norms, SwiGLU, grouped queries, and the names and shapes of transformers: weights and gradients go
// out as folders, and PyTorch computes on them by transformers' definition. With a bias, without, with qk_norm, with heads
// wider than the stream.
TEST_F(PyTorchTest, loss_and_every_gradient_of_a_llama) {
  std::vector<fs::path> all;
  for (int form = 0; form < 4; ++form) {
    ModelConfig config = model_preset("llama-micro");
    config.layers = 2, config.heads = 4, config.width = 24, config.context = 20, config.vocabulary = 41;
    config.hidden = 40, config.rotary_base = 100;
    config.bias = form == 1;
    config.qk_norm = form >= 2;
    config.tied_embeddings = form % 2 == 0;
    if (form == 3) config.head_features = 10, config.key_heads = 1, config.norm_epsilon = 1e-6f;
    const auto model = lively_model(config);
    constexpr int64_t B = 3, T = 19;
    std::vector<std::vector<int32_t>> rows[2];
    std::vector<int32_t> flat[2];
    RandomStream draw({12, 0, 0});
    for (int part = 0; part < 2; ++part)
      for (int64_t b = 0; b < B; ++b) {
        rows[part].emplace_back();
        for (int64_t t = 0; t < T; ++t)
          rows[part][static_cast<size_t>(b)].push_back(static_cast<int32_t>(draw.below(41)));
        flat[part].insert(flat[part].end(), rows[part].back().begin(), rows[part].back().end());
      }
    model->zero_gradients();
    const double loss = model->forward_backward({B, T, flat[0], flat[1]}, 1, {});
    std::vector<float> weights(static_cast<size_t>(model->table().size())), gradients(weights.size());
    model->read_parameters(weights);
    model->read_gradients(gradients);
    // The last one with a fault: one value of W_Q's gradient, by a ten-thousandth of the tensor's size.
    if (form == 3) {
      const ParameterTensor& w = *model->table().find("h.1.attn.c_attn.weight");
      double squares = 0;
      for (int64_t n = w.offset; n < w.offset + w.count(); ++n)
        squares += std::pow(gradients[static_cast<size_t>(n)], 2);
      gradients[static_cast<size_t>(w.offset)] += 1e-4f * static_cast<float>(std::sqrt(squares));
    }
    const fs::path to = folder / fmt::format("llama-{}", form);
    fs::create_directories(to);
    save_model_folder(to / "model", config, weights);
    save_model_folder(to / "gradients", config, gradients);
    std::ofstream(to / "batch.json") << Json{{"tokens", rows[0]}, {"targets", rows[1]}, {"loss", loss}};
    all.push_back(to);
  }
  const int code = check_model("gradients", all);
  if (code == kNoPackage) GTEST_SKIP() << "no python3 with PyTorch";
  EXPECT_EQ(code, 1);  // of the last
  for (size_t n = 0; n < all.size(); ++n) {
    const auto faults =
        parse_json(read_whole_file(all[n] / "faults.json", kLargest)).get<std::vector<std::string>>();
    ASSERT_EQ(faults.size(), n < 3 ? 0u : 1u) << n << ": " << (faults.empty() ? "" : faults[0]);
    if (n < 3) continue;
    EXPECT_EQ(faults[0].rfind("model.layers.1.self_attn.q_proj.weight: ", 0), 0u) << faults[0];
  }
}

TEST_F(PyTorchTest, folders_of_transformers_and_back) {
  for (const char* type : {"gpt2", "llama", "qwen3"}) {
    const fs::path theirs = folder / type;
    const int code = check_model("make", {theirs});
    if (code == kNoPackage) GTEST_SKIP() << "no python3 with PyTorch and transformers that know " << type;
    ASSERT_EQ(code, 0) << type;
    const auto model = make_model_cpu(read_model_folder(theirs), 1);
    load_model_folder(theirs, *model);
    const Json kept = parse_json(read_whole_file(theirs / "logits.json", kLargest));
    const auto tokens = kept.at("tokens").get<std::vector<int32_t>>();
    for (size_t length = 1; length <= tokens.size(); ++length) {
      const auto expected = kept.at("logits").at(length - 1).get<std::vector<float>>();
      const std::vector<float> found = model->logits(std::span(tokens).first(length));
      ASSERT_EQ(found.size(), expected.size());
      for (size_t n = 0; n < found.size(); ++n)
        ASSERT_NEAR(found[n], expected[n], 2e-5) << type << " " << length << " " << n;
    }
    std::vector<float> weights(static_cast<size_t>(model->table().size()));
    model->read_parameters(weights);
    save_model_folder(theirs / "ours", model->config(), weights);
    EXPECT_EQ(check_model("load", {theirs}), 0) << type;
  }
}

// Optimiser, clipping, warm-up, weight decay, checkpoints and batches besides: from a checkpoint on, PyTorch's steps have
// our losses and gradient norms.
TEST_F(PyTorchTest, a_run_goes_on_in_pytorch) {
  RunConfig config;
  config.model = small();
  config.data = (folder / "tokens.bin").string();
  config.sequences = 3;
  config.plan = "fp32";
  config.optimizer.weight_decay = 0.1f;
  config.schedule.peak = 2e-2;
  config.schedule.warmup = 6;
  config.schedule.steps = 12;
  config.checkpoint_every = 4;
  config.checkpoints_kept = 3;
  config.facts_every = 4;
  {
    RandomStream draw({13, 0, 0});
    std::ofstream tokens(config.data, std::ios::binary);
    for (int n = 0; n < 600; ++n) {
      const auto token = static_cast<uint16_t>(draw.below(41));
      tokens.write(reinterpret_cast<const char*>(&token), sizeof token);
    }
  }
  const auto trainer = Trainer::start(folder / "run", config);
  while (!trainer->done()) trainer->step();
  // A record of 5 steps: the batches of the others are drawn by the seed once more.
  std::filesystem::copy_file(folder / "run/batches.bin", folder / "short.bin");
  std::filesystem::resize_file(folder / "short.bin", 32 + 5 * 3 * sizeof(int64_t));
  const int code = run_script(
      "twin_torch.py", {fmt::format("{}@4", (folder / "run").string()), "--device", "cpu", "--attention",
                        "fp32", "--every", "4", "--batches", (folder / "short.bin").string(), "--steps", "12",
                        "--out", (folder / "twin").string()});
  if (code == kNoPackage) GTEST_SKIP() << "no python3 with PyTorch and NumPy";
  ASSERT_EQ(code, 0);
  std::map<int64_t, Json> ours, theirs;
  for (const auto& side : {std::pair("run", &ours), std::pair("twin", &theirs)})
    read_json_lines(folder / side.first / "metrics.jsonl", [&](const JsonLine& line) {
      (*side.second)[line.object.at("step").get<int64_t>()] = line.object;
    });
  ASSERT_EQ(theirs.size(), 8u);
  for (const auto& [step, line] : theirs)
    for (const char* field : {"loss", "gradient_norm", "lr"}) {
      const double expected = line.at(field).get<double>();
      EXPECT_NEAR(ours.at(step).at(field).get<double>(), expected, 1e-5 * expected)
          << field << " of step " << step;
    }
  const auto score = [](const Json& line) { return line.at("largest_score").at(1).at(2).get<double>(); };
  EXPECT_NEAR(score(ours.at(8)), score(theirs.at(8)), 1e-5 * score(theirs.at(8)));
}

}  // namespace
}  // namespace evenkeel
