// `evenkeel train` as a user runs it: settings, --resume, --branch, --at, --json.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/json_text.h"
#include "base/safetensors.h"
#include "base/whole_file.h"
#include "records/metrics.h"
#include "run_folder.h"
#include "run_program.h"
#include "training/replay.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kTiny =
    "--preset micro --data text.txt --set model.layers=1 --set 'model.heads = 2' --set model.width=16 "
    "--set model.context=12 --sequences 2 --plan fp32 --threads 1 ";

class TrainCliTest : public RunFolderTest {
 protected:
  // out has both streams.
  Output run(const std::string& words) const {
    return run_shell(fmt::format("cd '{}' && '{}' {} 2>&1", folder.string(), EVENKEEL_PROGRAM, words));
  }
  Output train(const std::string& words) const { return run(fmt::format("train {}{}", kTiny, words)); }
  RunConfig config(const char* name) const { return config_of_run(folder / name); }
  std::string weights(const std::string& name, int64_t step) const {
    return read_whole_file(folder / name / fmt::format("checkpoints/step-{:08}/model.safetensors", step),
                           1 << 22);
  }
};

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_F(TrainCliTest, help_lists_every_setting_with_its_default) {
  const Output help = run("train --help");
  ASSERT_EQ(help.code, 0);
  for (const Setting& setting : run_settings()) {
    EXPECT_TRUE(has(help.out, "\n  " + setting.key)) << setting.key;
    if (!setting.option.empty()) EXPECT_TRUE(has(help.out, "\n  " + setting.option)) << setting.option;
    EXPECT_TRUE(has(help.out, fmt::format("(default {})", setting.standard))) << setting.key;
  }
}

TEST_F(TrainCliTest, a_bad_setting_exits_2_and_names_the_key) {
  const struct {
    const char *words, *key, *expected;
  } table[] = {
      {"--lr fast", "--lr", "a number"},
      {"--lr \"$(printf '1e-3\\nmodel.layers = 3')\"", "--lr", "a number"},
      {"--lr ''", "--lr", "found nothing"},
      {"--lr=", "--lr", "found nothing"},
      {"--lr -1", "lr", "above 0"},
      {"--plan ''", "--plan", "found nothing"},
      {"--steps ten", "--steps", "a whole number"},
      {"--steps 0", "--steps", "1 or more"},
      {"--set nonsense", "--set 'nonsense'", "KEY=VALUE"},
      {"--set =3", "--set", "KEY=VALUE"},
      {"--set schedule.lr=", "schedule.lr", "found nothing"},
      {"--set schedule.lrr=1", "schedule.lrr", "did you mean schedule.lr?"},
      {"--set model.layers=x", "model.layers", "a whole number"},
      {"--set model.layers=0", "layers", "from 1"},
      {"--set model.bias=1", "model.bias", "true or false"},
      {"--set optimizer.beta1=2", "beta1", "below 1"},
      {"--set run.checkpoints_kept=0", "run.checkpoints_kept", "1 or more"},
      {"--set \"$(printf 'schedule.lr=1e-3\\nmodel.layers = 3')\"", "schedule.lr", "a number"},
      {"--optimizer adam", "--optimizer", "adamw, muon"},
      {"--guard=never", "--guard", "off, warn, act"},
      {"--lrr 3", "'--lrr'", "did you mean --lr?"},
      {"--shard-optimizer=no", "--shard-optimizer", "takes no value"},
      {"--at 'layer 0: keel=1'", "--at", "a step, a space and clauses"},
      {"--set attention.plan=bf17", "'bf17'", "flash2"},
      {"--sequences 3 --accumulate 2", "--sequences", "a multiple of the 2 parts"},
  };
  for (const auto& [words, key, expected] : table) {
    const Output output = train(fmt::format("{} --out run", words));
    EXPECT_EQ(output.code, 2) << words << "\n" << output.out;
    EXPECT_TRUE(has(output.out, key)) << words << "\n" << output.out;
    EXPECT_TRUE(has(output.out, expected)) << words << "\n" << output.out;
    EXPECT_FALSE(fs::exists(folder / "run")) << words;
  }
  EXPECT_EQ(train("--config /nonexistent --out run").code, 3);
}

TEST_F(TrainCliTest, settings_come_from_preset_file_and_options_in_this_order) {
  write_whole_file(folder / "mine.toml", "[model]\nlayers = 2\n[schedule]\nsteps = 1\nlr = 0.5\n");
  ASSERT_EQ(run("train --config mine.toml --data text.txt --set model.width=16 --set model.context=12 "
                "--sequences 1 "
                "--lr 1e-4 --set schedule.lr=2e-4 --preset micro --threads 1 --out run")
                .code,
            0);
  EXPECT_EQ(config("run").model.layers, 2);
  EXPECT_EQ(config("run").model.heads, 4);  // the preset's
  EXPECT_EQ(config("run").schedule.peak, 2e-4);
  EXPECT_EQ(config("run").schedule.steps, 1);
}

TEST_F(TrainCliTest, resume_refuses_what_it_would_ignore) {
  ASSERT_EQ(train("--steps 2 --out run").code, 0);
  const std::string before = read_whole_file(folder / "run/config.toml", 1 << 20);
  const std::string words[] = {
      "--preset micro",    "--config /nonexistent", "--data text.txt",  "--validation x",
      "--batches x",       "--out other",           "--branch run@2",   "--plan fp32",
      "--at '1 keel=1'",   "--keel-ramp 1",         "--lr 1e-3",        "--warmup 1",
      "--schedule cosine", "--optimizer muon",      "--sequences 2",    "--accumulate 1",
      "--seed 2",          "--checkpoint-every 1",  "--facts-every 1",  "--probe-every 1",
      "--guard",           "--validate-every 1",    "--set nonsense=1", "--set schedule.lr=1",
      "--shard-optimizer"};
  for (const std::string& word : words) {
    const Output output = run(fmt::format("train --resume run {}", word));
    EXPECT_EQ(output.code, 2) << word << "\n" << output.out;
    EXPECT_TRUE(has(output.out, word.substr(0, word.find(' ')) + " does not go with --resume")) << output.out;
  }
  EXPECT_EQ(read_whole_file(folder / "run/config.toml", 1 << 20), before);
  EXPECT_TRUE(has(run("train --resume run --steps ten").out, "--steps"));
  EXPECT_EQ(run("train --resume run --backend cpu --threads 1").code, 0);
}

TEST_F(TrainCliTest, one_run_is_resumed_and_one_is_branched) {
  ASSERT_EQ(train("--steps 2 --out run").code, 0);
  for (const char* words :
       {"train --resume other --resume run", "train --branch other@2 --branch run@2 --out new"}) {
    const Output output = run(words);
    EXPECT_EQ(output.code, 2) << output.out;
    EXPECT_TRUE(has(output.out, "expected it once, found it twice")) << output.out;
  }
}

// Its own program trains it: there is nothing here to go on from.
TEST_F(TrainCliTest, the_folder_of_a_monitor_is_no_run_of_ours) {
  fs::create_directories(folder / "theirs");
  write_whole_file(
      folder / "theirs/config.toml",
      "[model]\nlayers = 1\nheads = 2\n\n[attention]\nplan = \"flash2\"\n\n[run]\ntrainer = \"pytorch\"\n");
  write_whole_file(folder / "theirs/metrics.jsonl", "{\"step\": 0, \"loss\": 2.5}\n");
  for (const char* words : {"train --resume theirs", "train --branch theirs@2 --out new", "sample theirs",
                            "export theirs -o model"}) {
    const Output output = run(words);
    EXPECT_EQ(output.code, 3) << words << "\n" << output.out;
    EXPECT_TRUE(has(output.out, "recorded by another trainer (pytorch)")) << output.out;
    EXPECT_TRUE(has(output.out, "no checkpoints")) << output.out;
  }
}

TEST_F(TrainCliTest, a_bad_value_in_a_run_is_named_with_its_file) {
  ASSERT_EQ(train("--steps 2 --out run").code, 0);
  std::string text = read_whole_file(folder / "run/config.toml", 1 << 20);
  text.replace(text.find("heads = 2"), 9, "heads = 3");  // which do not divide the width
  write_whole_file(folder / "run/config.toml", text);
  for (const char* words : {"train --resume run", "train --branch run@2 --steps 4 --out new", "probe run@1",
                            "sample run", "export run -o model", "verdict run"}) {
    const Output output = run(words);
    if (words == std::string("verdict run") && output.code <= 1) continue;  // it needs records alone
    EXPECT_EQ(output.code, 3) << words << "\n" << output.out;
    EXPECT_TRUE(has(output.out, "run/config.toml: ")) << words << "\n" << output.out;
  }
}

TEST_F(TrainCliTest, resume_with_more_steps_gives_the_bits_of_a_longer_run) {
  ASSERT_EQ(train("--steps 4 --warmup 2 --out short").code, 0);
  ASSERT_EQ(train("--steps 7 --warmup 2 --out long").code, 0);
  const Output more = run("train --resume short --steps 7 --threads 1");
  ASSERT_EQ(more.code, 0) << more.out;
  EXPECT_TRUE(has(more.out, "going on at step 4")) << more.out;
  EXPECT_TRUE(has(more.out, "done: 7 steps")) << more.out;
  EXPECT_EQ(weights("short", 7), weights("long", 7));
  EXPECT_EQ(config("short").schedule.steps, 7);
  const Output fewer = run("train --resume short --steps 6");
  EXPECT_EQ(fewer.code, 2);
  EXPECT_TRUE(has(fewer.out, "at least the 7 steps that are done")) << fewer.out;
}

// A falling course ends with the run: another end would have given the steps that are done other learning rates.
TEST_F(TrainCliTest, resume_does_not_bend_a_falling_course) {
  for (const char* course : {"cosine", "linear"}) {
    ASSERT_EQ(train(fmt::format("--steps 4 --schedule {} --out {}", course, course)).code, 0);
    const Output more = run(fmt::format("train --resume {} --steps 8", course));
    EXPECT_EQ(more.code, 2) << more.out;
    EXPECT_TRUE(has(more.out, "--steps") && has(more.out, course) && has(more.out, "--branch")) << more.out;
    EXPECT_EQ(config(course).schedule.steps, 4);
  }
  // wsd is flat until its decay: stopped before that, it may become longer.
  ASSERT_EQ(
      train("--steps 6 --schedule wsd --set schedule.decay_share=0.5 --checkpoint-every 2 --out wsd").code,
      0);
  for (const int64_t step : {4, 6}) fs::remove_all(folder / fmt::format("wsd/checkpoints/step-{:08}", step));
  ASSERT_EQ(run("train --resume wsd --steps 10 --threads 1").code, 0);
  ASSERT_EQ(train("--steps 10 --schedule wsd --set schedule.decay_share=0.5 --out straight").code, 0);
  EXPECT_EQ(weights("wsd", 10), weights("straight", 10));
}

TEST_F(TrainCliTest, a_branch_goes_on_from_the_checkpoint_with_other_settings) {
  ASSERT_EQ(train("--steps 6 --checkpoint-every 3 --out run").code, 0);
  // Nothing changed: the same bits.
  const Output same = run("train --branch run@3 --out same --threads 1");
  ASSERT_EQ(same.code, 0) << same.out;
  EXPECT_TRUE(has(same.out, "going on at step 3")) << same.out;
  EXPECT_EQ(weights("same", 6), weights("run", 6));
  // --at: the plan that a step has.
  ASSERT_EQ(run("train --branch run@3 --at '4 row_sum=e5m2' --out other --threads 1").code, 0);
  EXPECT_EQ(config("other").changes, (std::vector<PlanChange>{{4, "row_sum=e5m2"}}));
  EXPECT_EQ(config("other").plan_at(3), "fp32");
  EXPECT_EQ(config("other").plan_at(4), "fp32; row_sum=e5m2");
  EXPECT_NE(weights("other", 6), weights("run", 6));
  // Another seed: the batches before the branch are the run's, those behind it follow from the new seed.
  ASSERT_EQ(run("train --branch run@3 --seed 2 --out reseeded --threads 1").code, 0);
  EXPECT_NE(weights("reseeded", 6), weights("run", 6));
  EXPECT_EQ(run("train --resume reseeded").code, 0) << run("train --resume reseeded").out;
  // The same change in a run of its own, from the beginning.
  ASSERT_EQ(train("--steps 6 --checkpoint-every 3 --at '4 row_sum=e5m2' --out straight").code, 0);
  EXPECT_EQ(weights("straight", 3), weights("run", 3));
  EXPECT_EQ(weights("straight", 6), weights("other", 6));
  const struct {
    const char *words, *part;
    int code;
  } bad[] = {{"--branch run --out x", "RUN@STEP", 2},
             {"--branch run@2 --out x", "found those of 3, 6", 3},
             {"--branch run@6 --out x", "nothing is left to train; --steps N", 2},
             {"--branch none@3 --out x", "no config.toml", 3},
             {"--branch run@3 --out run", "new or an empty folder", 3},
             {"--branch run@3 --preset nano --out x", "--preset", 2},
             {"--branch run@3 --config text.txt --out x", "--config", 2},
             {"--branch run@3", "--out", 2},
             {"--branch run@3 --at '4 layer 7: keel=1' --out x", "layer 7", 2}};
  for (const auto& [words, part, code] : bad) {
    const Output output = run(fmt::format("train {} --threads 1", words));
    EXPECT_EQ(output.code, code) << words << "\n" << output.out;
    EXPECT_TRUE(has(output.out, part)) << words << "\n" << output.out;
    EXPECT_FALSE(fs::exists(folder / "x")) << words;
  }
}

// A run that isolate could not explain says so when it starts.
// Out as transformers keep it, and in again: a step at a negligible rate leaves the weights as they came.
TEST_F(TrainCliTest, a_model_goes_out_as_a_folder_and_a_run_starts_from_it) {
  constexpr const char* kRest = "--data text.txt --sequences 2 --plan fp32 --threads 1 --backend cpu ";
  const Output first =
      run(fmt::format("train --preset llama-micro --set model.layers=1 --set model.heads=2 --set "
                      "model.key_heads=1 --set model.width=16 "
                      "--set model.hidden=24 --set model.context=12 {}--steps 3 --out a",
                      kRest));
  ASSERT_EQ(first.code, 0) << first.out;
  const Output out = run("export a -o model");
  ASSERT_EQ(out.code, 0) << out.out;
  EXPECT_TRUE(has(out.out, "step 3") && has(out.out, "Llama")) << out.out;
  const Output second = run(fmt::format("train --weights model {}--steps 1 --lr 1e-30 --out b", kRest));
  ASSERT_EQ(second.code, 0) << second.out;
  const auto newest = [&](const char* name) {
    return load_checkpoint(find_checkpoints(folder / name / "checkpoints").back(),
                           ParameterTable(config(name).model))
        .parameters;
  };
  EXPECT_EQ(config("b").model.positions, Positions::rotary);
  EXPECT_EQ(config("b").model.key_head_count(), 1);
  EXPECT_EQ(newest("b"), newest("a"));
  // Sizes that were set beside it hold; weights that do not fit are refused, and so is a folder without a model.
  EXPECT_TRUE(
      has(run(fmt::format("train --weights model --set model.width=32 {}--steps 1 --out c", kRest)).out,
          "expected the shape"));
  const Output none = run(fmt::format("train --weights nothing {}--steps 1 --out d", kRest));
  EXPECT_EQ(none.code, 3);
  EXPECT_TRUE(has(none.out, "nothing/config.json")) << none.out;
  EXPECT_EQ(run("export a -o model").code, 3);
  EXPECT_TRUE(has(run("export a --step 2 -o other").out, "expected a checkpoint of step 2"));
}

TEST_F(TrainCliTest, says_which_checkpoints_will_be_missing) {
  const struct {
    const char *words, *note;
  } table[] = {{"--steps 202 --checkpoint-every 50", "only the newest 3 checkpoints stay, 50 steps apart"},
               {"--steps 202 --checkpoint-every 0", "no checkpoint is written before the end"},
               {"--steps 202 --checkpoint-every 0 --set run.keep_every=201",
                "checkpoints that stay are 201 steps apart"},
               {"--steps 202 --facts-every 0", "isolate will see no offsets of this run"},
               {"--steps 202 --checkpoint-every 0 --set run.keep_every=100", ""},
               {"--steps 4 --checkpoint-every 4 --set run.keep_every=3", ""}};
  int n = 0;
  for (const auto& [words, note] : table) {
    const Output output = train(fmt::format("{} --out run{}", words, n++));
    EXPECT_EQ(output.code, 0) << words << "\n" << output.out;
    EXPECT_EQ(has(output.out, "note: "), *note != 0) << words << "\n" << output.out;
    EXPECT_TRUE(has(output.out, note)) << words << "\n" << output.out;
  }
}

TEST_F(TrainCliTest, the_outcome_as_json) {
  const Output done = train("--steps 2 --out run --json");
  ASSERT_EQ(done.code, 0) << done.out;
  const Json json = parse_json(done.out);
  EXPECT_EQ(json["outcome"], "done");
  EXPECT_EQ(json["steps"], 2);
  EXPECT_EQ(json["finding"], nullptr);
  const Output found = train("--steps 9 --lr 1e38 --out broken --json");
  EXPECT_EQ(found.code, 1) << found.out;
  EXPECT_EQ(parse_json(found.out)["finding"]["kind"], "not_finite");
  const Output refused = train("--lr x --out other --json");
  EXPECT_EQ(refused.code, 2);
  EXPECT_EQ(parse_json(refused.out)["error"]["kind"], "usage");
}

// --- Files of the first version

// tests/old_run: a run of 6 steps, its capture, and its weights after the last step, as the first version wrote them.
class OldRunTest : public TrainCliTest {
 protected:
  void SetUp() override {
    TrainCliTest::SetUp();
    fs::copy(kKept, folder, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  }
  static inline const fs::path kKept = fs::path(EVENKEEL_SOURCE_DIR) / "tests/old_run";
};

// (step, loss) of the records, the last of each step.
std::map<int64_t, double> losses(const fs::path& run) {
  const Metrics metrics = read_metrics(run);
  std::map<int64_t, double> found;
  for (size_t n = 0; n < metrics.loss.steps.size(); ++n)
    found[metrics.loss.steps[n]] = metrics.loss.values[n];
  return found;
}

TEST_F(OldRunTest, is_resumed_to_the_same_bits) {
  const std::map<int64_t, double> recorded = losses(kKept / "run");
  ASSERT_EQ(recorded.size(), 6u);
  const Output resumed = run("train --resume run");
  ASSERT_EQ(resumed.code, 0) << resumed.out;
  EXPECT_TRUE(has(resumed.out, "step 4/6")) << resumed.out;  // not from the beginning
  EXPECT_FALSE(has(resumed.out, "step 3/6")) << resumed.out;
  EXPECT_EQ(losses(folder / "run"), recorded);
  const Safetensors expected(kKept / "after_step_6.safetensors"),
      found(folder / "run/checkpoints/step-00000006/model.safetensors");
  ASSERT_FALSE(expected.tensors().empty());
  for (const StoredTensor& tensor : expected.tensors()) {
    const StoredTensor* const same = found.find(tensor.name);
    ASSERT_TRUE(same) << tensor.name;
    EXPECT_TRUE(std::ranges::equal(same->bytes, tensor.bytes)) << tensor.name;
  }
}

TEST_F(OldRunTest, is_replayed_reported_and_its_capture_probed) {
  // Replayed: losses that are not the recorded ones would be an error.
  for (const char* what : {"probe run@3 --json", "probe capture.safetensors --json"}) {
    const Output probed = run(what);
    EXPECT_LE(probed.code, 1) << probed.out;
    EXPECT_TRUE(has(probed.out, "\"heads\"")) << probed.out;
  }
  const Output judged = run("verdict run");
  EXPECT_EQ(judged.code, 0) << judged.out;
  const Output reported = run("report run -o page.html");
  EXPECT_EQ(reported.code, 0) << reported.out;
  const std::string page = read_whole_file(folder / "page.html", 1 << 24);
  EXPECT_TRUE(has(page, "id=\"offset"));  // recorded under its old name
  // A capture made now from the old checkpoint has the numbers of the old capture.
  const Output captured = run("capture run@3 --layer 0 -o again.safetensors");
  ASSERT_EQ(captured.code, 0) << captured.out;
  const Safetensors expected(folder / "capture.safetensors"), found(folder / "again.safetensors");
  for (const char* name : {"q", "k", "v", "d_o"}) {
    ASSERT_TRUE(expected.find(name) && found.find(name)) << name;
    EXPECT_TRUE(std::ranges::equal(found.find(name)->bytes, expected.find(name)->bytes)) << name;
  }
}

}  // namespace
}  // namespace evenkeel
