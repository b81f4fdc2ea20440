// Captures: out of the model, through a file and back to the bit; replays; files that are not as they must be.
#include "diagnosis/capture.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/threads.h"
#include "capture_cases.h"
#include "diagnosis/probe_recorder.h"
#include "model_families.h"
#include "run_folder.h"
#include "training/replay.h"
#include "training/synth.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

class CaptureTest : public RunFolderTest {
 protected:
  RunConfig tiny() const {
    RunConfig c = RunFolderTest::tiny();
    c.model.layers = 2;
    c.plan = "fp32,row_sum=e5m2/stochastic";
    c.facts_every = 10;
    return c;
  }
};

class CaptureOfFamily : public OfFamily<CaptureTest> {
 protected:
  RunConfig tiny() const {
    RunConfig c = Base::tiny();
    c.model = GetParam().config(c.model);
    return c;
  }
};
INSTANTIATE_TEST_SUITE_P(Model, CaptureOfFamily, ::testing::ValuesIn(kFamilies), family_name);

// Compared as bits, so that NaN equals NaN.
bool same_bits(const Tensor<float>& a, const Tensor<float>& b) {
  return a.shape() == b.shape() &&
         std::ranges::equal(a.values(), b.values(), {}, std::bit_cast<uint32_t, float>,
                            std::bit_cast<uint32_t, float>);
}
void expect_same(const Capture& a, const Capture& b) {
  EXPECT_EQ(a.source, b.source);
  EXPECT_EQ(a.model, b.model);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.layer, b.layer);
  EXPECT_EQ(a.heads, b.heads);
  EXPECT_EQ(std::bit_cast<uint64_t>(a.loss), std::bit_cast<uint64_t>(b.loss));
  EXPECT_EQ(a.scale, b.scale);
  EXPECT_EQ(a.softcap, b.softcap);
  EXPECT_EQ(a.causal, b.causal);
  EXPECT_EQ(a.tile_keys, b.tile_keys);
  EXPECT_EQ(a.positions, b.positions);
  EXPECT_EQ(a.rotary_base, b.rotary_base);
  EXPECT_EQ(a.slopes, b.slopes);
  EXPECT_EQ(a.sinks, b.sinks);
  EXPECT_EQ(a.plans, b.plans);
  for (Tensor<float> Capture::*t : {&Capture::x, &Capture::q, &Capture::k, &Capture::v, &Capture::d_o,
                                    &Capture::w_q, &Capture::w_k, &Capture::w_v})
    EXPECT_TRUE(same_bits(a.*t, b.*t));
}

// Keeps one step's captures.
class Keeper : public StepWatcher {
 public:
  Keeper(int64_t step, int64_t sequences) : step_(step), sequences_(sequences) {}
  void prepare(int64_t step, StepContext& context) override {
    if (step == step_) context.capture_sequences = sequences_;
  }
  void see(int64_t step, double loss, Model& model, nlohmann::json&) override {
    if (step != step_) return;
    for (int64_t l = 0; l < model.config().layers; ++l) {
      kept.push_back(capture_of(model, l));
      kept.back().step = step;
      kept.back().loss = loss;
    }
  }
  std::vector<Capture> kept;

 private:
  const int64_t step_, sequences_;
};

TEST_F(CaptureTest, goes_through_a_file_to_the_bit) {
  Capture c = random_capture({2, 4, 2, 5, 3, 7}, "bf16_all,keel=1.2345e-7");
  c.plans[2] = parse_plan("fp32,row_sum=e5m2/stochastic,seed=9");
  c.scale = 0.1f, c.softcap = 30.5f, c.causal = false, c.tile_keys = 0, c.loss = 0.1;
  *c.q.view().at(0, 1, 2, 1) = std::numeric_limits<float>::quiet_NaN();
  *c.k.view().at(0, 1, 2, 1) = -std::numeric_limits<float>::infinity();
  c.positions = Positions::learned, c.rotary_base = 77.5f;
  write_capture(folder / "a", c);
  expect_same(read_capture(folder / "a"), c);
  c.softcap = 0, c.slopes = {0.1f, 0.25f, 1e-9f, 3}, c.sinks = {-0.1f, 1e20f, 0, 2};
  write_capture(folder / "a", c);
  expect_same(read_capture(folder / "a"), c);
  c.x = c.w_q = c.w_k = c.w_v = Tensor<float>();
  c.loss = std::numeric_limits<double>::quiet_NaN();
  write_capture(folder / "a", c);
  expect_same(read_capture(folder / "a"), c);
}

TEST_P(CaptureOfFamily, is_what_attention_read_in_the_model) {
  for (const bool more : {false, true})
    for (const int threads : {1, 3}) {
      set_thread_count(threads);
      ModelConfig config = tiny().model;
      config.qk_norm = config.sinks = more;
      if (more && !config.is_rotary()) config.positions = Positions::alibi;
      const auto model = make_model_cpu(config, 1);
      model->set_plan(ScopedPlan::parse("fp32,keel=1e-2; layer 1 head 1: row_sum=e5m2"));
      std::vector<int32_t> tokens(5 * 12), targets(5 * 12);
      for (size_t n = 0; n < tokens.size(); ++n)
        tokens[n] = static_cast<int32_t>(n * 37 % 256), targets[n] = tokens[n];
      StepContext context;
      context.capture_sequences = 9;  // more than there are
      context.residual_facts = true;
      EXPECT_THROW(model->captured(0), DataError);
      model->forward_backward({5, 12, tokens, targets}, 0.5f, context);
      std::vector<float> gradients(static_cast<size_t>(model->table().size())), parameters(gradients.size());
      model->read_gradients(gradients);
      model->read_parameters(parameters);
      for (int64_t l = 0; l < 2; ++l) {
        const Capture c = capture_of(*model, l);
        ASSERT_EQ(c.q.shape(), (std::array<int64_t, 4>{5, 2, 12, 8}));
        // Attention again on what was captured: O, L, the residual and W_Q's gradient are the model's.
        AttentionBuffers again(c.inputs(), true);
        attention_forward(c.attention_problem(), c.inputs(), again.forward());
        attention_backward(c.attention_problem(), c.inputs(), c.d_o.view(), again.forward(),
                           again.backward());
        EXPECT_TRUE(same_bits(again.o, model->captured(l).o));
        EXPECT_TRUE(same_bits(again.lse, model->captured(l).lse));
        for (int64_t h = 0; h < 2; ++h) {
          double squares = 0;
          for (int64_t b = 0; b < 5; ++b)
            for (int64_t t = 0; t < 12; ++t) squares += std::pow(*again.residual.view().at(b, h, t), 2);
          const double expected = model->facts()[static_cast<size_t>(l * 2 + h)].residual_rms;
          EXPECT_NEAR(std::sqrt(squares / 60), expected, 1e-12 * expected);
        }
        const ParameterTensor& w = *model->table().find(fmt::format("h.{}.attn.c_attn.weight", l));
        const int64_t last = config.key_head_count() - 1, all = config.qkv_width();
        for (int64_t row = 0; row < 16; ++row)
          for (int64_t d = 0; d < 8; ++d) {
            EXPECT_EQ(*c.w_k.view().at(0, last, row, d),
                      parameters[static_cast<size_t>(w.offset + row * all + 16 + last * 8 + d)]);
            if (config.has_own_qk()) continue;
            double sum = 0;
            for (int64_t b = 0; b < 5; ++b)
              for (int64_t t = 0; t < 12; ++t)
                sum += double{*c.x.view().at(b, 0, t, row)} * *again.dq.view().at(b, 1, t, d);
            EXPECT_NEAR(gradients[static_cast<size_t>(w.offset + row * all + 8 + d)], sum, 1e-7);
          }
      }
      context.capture_layer = 1;
      context.capture_sequences = 2;
      model->forward_backward({5, 12, tokens, targets}, 0.5f, context);
      EXPECT_THROW(model->captured(0), DataError);
      const Capture one = capture_of(*model, 1, {1});
      EXPECT_EQ(one.q.shape(), (std::array<int64_t, 4>{2, 1, 12, 8}));
      EXPECT_EQ(one.k.shape(), one.q.shape());
      const int64_t group = 1 / (2 / config.key_head_count());
      EXPECT_EQ(*one.k.view().at(1, 0, 5, 3), *model->captured(1).k.view().at(1, group, 5, 3));
      EXPECT_THROW(capture_of(*model, 1, {2}), std::invalid_argument);
      EXPECT_THROW(capture_of(*model, 1, {1, 0}), std::invalid_argument);
    }
  set_thread_count(1);
}

TEST_P(CaptureOfFamily, a_replay_captures_the_bits_of_the_run) {
  Keeper live(10, 3);
  std::vector<float> weights;
  {
    const auto trainer = Trainer::start(folder / "run", tiny());
    trainer->set_watcher(&live);
    while (!trainer->done()) trainer->step();
  }
  const auto before = fs::last_write_time(folder / "run" / "metrics.jsonl");
  for (const int64_t first : {8, 0}) {  // from the checkpoint, then from the beginning
    Replay replay(folder / "run", 10);
    EXPECT_EQ(replay.trainer().next_step(), first);
    Keeper again(10, 3);
    const ScopedWatcher watched(replay.trainer(), again);
    int64_t steps = 0;
    replay.run_to(11, [&] { ++steps; });
    EXPECT_EQ(steps, 11 - first);
    ASSERT_EQ(again.kept.size(), live.kept.size());
    for (size_t n = 0; n < live.kept.size(); ++n) expect_same(again.kept[n], live.kept[n]);
    fs::remove_all(folder / "run" / "checkpoints");
  }
  EXPECT_EQ(fs::last_write_time(folder / "run" / "metrics.jsonl"), before);
  // Another plan from there on gives another run.
  Replay other(folder / "run", 10, {}, [](RunConfig& c) { c.plan = "fp32"; });
  Keeper kept(10, 3);
  const ScopedWatcher watched(other.trainer(), kept);
  other.run_to(11);
  EXPECT_FALSE(same_bits(kept.kept[0].q, live.kept[0].q));
  EXPECT_THROW(Replay(folder / "run", 12), DataError);  // the run has steps 0 to 11
  EXPECT_THROW(Replay(folder / "none", 1), DataError);
  write_whole_file(folder / "text.txt", synthetic_text(1, 3999));
  EXPECT_THROW(Replay(folder / "run", 10), DataError);  // the data is another
}

TEST_F(CaptureTest, a_replay_looks_at_the_batches_of_its_stretch_alone) {
  const auto trainer = Trainer::start(folder / "run", tiny());
  while (!trainer->done()) trainer->step();  // steps 0 to 11
  const fs::path batches = folder / "run" / "batches.bin";
  std::string text = read_whole_file(batches, 1 << 20);
  text[text.size() - 8] ^= 1;  // of the last step
  write_whole_file(batches, text);
  EXPECT_THROW(Replay(folder / "run", 9), DataError);
  EXPECT_THROW(Replay(folder / "run", 9, {}, {}, 12), DataError);
  EXPECT_NO_THROW(Replay(folder / "run", 9, {}, {}, 11).run_to(11));
}

TEST_F(CaptureTest, a_watched_run_is_the_same_run_and_its_probes_find_the_planted_head) {
  RunConfig c = tiny();
  c.plan = "fp32; layer 1 head 1: row_sum=e5m2";
  c.probe_every = 3;
  const auto run = [&](const char* name, bool watched) {
    const auto trainer = Trainer::start(folder / name, c);
    ProbeRecorder probes(trainer->config(), folder / name, 0);
    std::optional<ScopedWatcher> watcher;
    if (watched) watcher.emplace(*trainer, probes);
    while (!trainer->done()) trainer->step();
    std::vector<float> weights(static_cast<size_t>(trainer->model().table().size()));
    trainer->model().read_parameters(weights);
    return weights;
  };
  EXPECT_EQ(run("plain", false), run("watched", true));

  const ProbeHistory history = read_probe_history(folder / "watched");
  EXPECT_EQ(history.steps, (std::vector<int64_t>{0, 3, 6, 9}));
  EXPECT_EQ(history.layers, 2);
  EXPECT_EQ(history.heads, 2);
  double running = 0;
  for (size_t n = 0; n < 4; ++n) {
    EXPECT_EQ(worst_head(history.probes[n]), 3);
    running += history.probes[n][3].delta_error_sum;
    EXPECT_NEAR(history.probes[n][3].delta_error_running, running, 1e-4 * std::fabs(running) + 1e-12);
  }
  EXPECT_EQ(history.norms.at("h.0.attn.c_attn.weight[q]").size(), 4u);
  EXPECT_GT(history.norms.at("wte.weight")[3], 0);
  // One that goes on takes its running sums from the record; later lines do not count.
  ProbeRecorder resumed(c, folder / "watched", 7);
  ModelConfig config = c.model;
  const auto model = make_model_cpu(config, 1);
  StepContext context;
  resumed.prepare(9, context);
  EXPECT_TRUE(context.tie_facts && context.residual_facts);
  EXPECT_EQ(context.capture_sequences, ProbeRecorder::kSequences);
  const std::vector<int32_t> tokens(12, 5);
  model->forward_backward({1, 12, tokens, tokens}, 1, context);
  nlohmann::json line;
  resumed.see(9, 0, *model, line);
  resumed.tell(9, line);
  const nlohmann::json& full = line["probe"];
  EXPECT_NEAR(full["delta_error_running"][1][1].get<double>() - full["delta_error_sum"][1][1].get<double>(),
              history.probes[2][3].delta_error_running,
              1e-4 * std::fabs(history.probes[2][3].delta_error_running) + 1e-12);
  EXPECT_TRUE(line.contains("leak_rms") && full["rows"] == 12 && full["step"] == 9);
  // On a GPU the CPU works beside it: the same probe, in the line before the next is due, or in the run's last.
  RunConfig device = c;
  device.backend = Backend::cuda;
  device.schedule.steps = 11;
  ProbeRecorder beside(device, folder / "watched", 7);
  std::vector<nlohmann::json> lines(11);
  for (int64_t step = 6; step < 11; ++step) {
    StepContext of_step;
    beside.prepare(step, of_step);
    EXPECT_EQ(of_step.capture_sequences > 0, step % 3 == 0);
    model->forward_backward({1, 12, tokens, tokens}, 1, of_step);
    beside.see(step, 0.5, *model, lines[static_cast<size_t>(step)]);
    EXPECT_EQ(lines[static_cast<size_t>(step)].contains("probe"), step == 8 || step == 10) << step;
  }
  EXPECT_EQ(lines[8]["probe"]["step"], 6);
  EXPECT_EQ(lines[10]["probe"]["step"], 9);
  EXPECT_EQ(lines[8]["probe"]["leak_share"], full["leak_share"]);  // the same weights and tokens
}

// Probes of a run that goes on are those of one that never stopped. Spectral norms begin from another vector there, and leaks
// between two probes come from the record: both have five digits, the last of which may differ.
TEST_F(CaptureTest, a_run_that_goes_on_has_the_same_probes) {
  RunConfig c = tiny();
  c.plan = "fp32; layer 1 head 1: row_sum=e5m2";
  c.probe_every = 5, c.checkpoint_every = 8;
  for (const char* name : {"whole", "stopped"}) {
    auto trainer = Trainer::start(folder / name, c);
    const auto run_to = [&](int64_t step) {
      ProbeRecorder probes(c, folder / name, trainer->next_step());
      const ScopedWatcher watched(*trainer, probes);
      while (trainer->next_step() < step) trainer->step();
    };
    run_to(name == std::string("whole") ? 12 : 8);
    if (trainer->done()) continue;
    trainer.reset();
    trainer = Trainer::resume(folder / name);
    ASSERT_EQ(trainer->next_step(), 8);
    run_to(12);
  }
  const ProbeHistory whole = read_probe_history(folder / "whole"),
                     stopped = read_probe_history(folder / "stopped");
  ASSERT_EQ(whole.steps, (std::vector<int64_t>{0, 5, 10}));
  ASSERT_EQ(stopped.steps, whole.steps);
  for (size_t n = 0; n < 3; ++n)
    for (size_t head = 0; head < 4; ++head)
      for (const ProbeField& field : kProbeFields) {
        const double want = whole.probes[n][head].*field.value, got = stopped.probes[n][head].*field.value;
        const bool is_near =
            field.name.starts_with("norm_") || field.name == "gradient_rank_1" || field.name == "leak_lag_1";
        if (std::isnan(want))
          EXPECT_TRUE(std::isnan(got)) << field.name;
        else
          EXPECT_NEAR(got, want, (is_near ? 1e-3 * std::max(1e-2, std::fabs(want)) : 0))
              << field.name << " of probe " << n;
      }
  EXPECT_FALSE(std::isnan(whole.probes[2][3].leak_lag_1));
  for (const auto& [weight, norms] : whole.norms)
    EXPECT_NEAR(stopped.norms.at(weight)[2], norms[2], 2e-5 * norms[2]) << weight;
}

TEST_F(CaptureTest, files_that_are_not_as_they_must_be_are_refused_with_words) {
  const Capture good = random_capture({2, 4, 2, 5, 3, 7}, "bf16_all");
  // Writes what write_capture would, with the metadata and the headers changed.
  using Change = std::function<void(std::map<std::string, std::string>&, std::vector<TensorHeader>&)>;
  const auto message = [&](const Change& change) -> std::string {
    const fs::path file = folder / "bad";
    write_capture(file, good);
    std::map<std::string, std::string> words;
    std::vector<TensorHeader> headers;
    {
      const Safetensors read(file);
      words = read.metadata();
      headers.assign(read.tensors().begin(), read.tensors().end());
    }
    change(words, headers);
    SafetensorsWriter writer(folder / "worse", headers, words);
    for (const TensorHeader& h : headers) writer.append(h.name, std::vector<std::byte>(byte_count(h)));
    writer.commit();
    try {
      read_capture(folder / "worse");
    } catch (const DataError& error) {
      return error.what();
    }
    return "";
  };
  const auto word = [&](const char* key, const char* value) {
    return message([&](auto& words, auto&) { words[key] = value; });
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_EQ(message([](auto&, auto&) {}), "");
  EXPECT_TRUE(has(word("evenkeel_capture", "2"), "expected a capture"));
  EXPECT_TRUE(has(message([](auto& words, auto&) { words.clear(); }), "expected a capture"));
  EXPECT_TRUE(has(message([](auto& words, auto&) { words.erase("step"); }), "'step'"));
  EXPECT_TRUE(has(word("step", "-1"), "whole numbers from 0"));
  EXPECT_TRUE(has(word("step", "3x"), "found '3x'"));
  EXPECT_TRUE(has(word("heads", "0,1"), "expected 4 heads"));
  EXPECT_TRUE(has(word("heads", "0,,1,2"), "found ''"));
  EXPECT_TRUE(has(word("loss", "low"), "expected a number"));
  EXPECT_TRUE(has(word("scale", "inf"), "finite scale"));
  EXPECT_TRUE(has(word("causal", "2"), "from 0 to 1"));
  EXPECT_TRUE(has(word("plans", "bf16_all; bf17; fp32; fp32"), "bf17"));
  EXPECT_TRUE(has(word("plans", "bf16_all"), "expected 4 heads and plans"));
  const auto shape = [&](size_t n, std::vector<uint64_t> to) {
    return message([&](auto&, auto& headers) {
      for (TensorHeader& h : headers)
        if (h.name == std::vector<std::string>{"q", "k", "x", "w_q"}[n]) h.shape = to;
    });
  };
  EXPECT_TRUE(has(shape(0, {2, 4, 5}), "expected 4 axes"));
  EXPECT_TRUE(has(shape(0, {2, 4, 6, 3}), "d_o: expected the shape"));
  EXPECT_TRUE(has(shape(0, {2, 0, 5, 3}), "sizes from 1"));
  EXPECT_TRUE(has(shape(1, {2, 3, 5, 3}), "v: expected the shape"));
  EXPECT_TRUE(has(shape(2, {2, 5, 8}), "w_q: expected the shape"));
  EXPECT_TRUE(has(shape(3, {4, 6, 3}), "w_q: expected the shape"));
  const auto without = [&](const char* name) {
    return message(
        [&](auto&, auto& headers) { std::erase_if(headers, [&](auto& h) { return h.name == name; }); });
  };
  EXPECT_TRUE(has(without("q"), "expected a tensor q"));
  EXPECT_TRUE(has(without("w_k"), "or none of them"));
  EXPECT_EQ(without("x"), "");
  EXPECT_TRUE(
      has(message([](auto&, auto& headers) { headers[0].type = element_type("I32"); }), "expected F32"));
  // Cut short anywhere.
  write_capture(folder / "whole", good);
  const std::string bytes = read_whole_file(folder / "whole", 1 << 20);
  for (size_t size = 0; size < bytes.size(); size += 97) {
    write_whole_file(folder / "short", std::string_view(bytes).substr(0, size));
    EXPECT_THROW(read_capture(folder / "short"), DataError) << size;
  }
}

}  // namespace
}  // namespace evenkeel
