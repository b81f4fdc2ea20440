// Training runs on a tiny model: records, exact repetition, endings.
#include "training/trainer.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/threads.h"
#include "model_families.h"
#include "run_folder.h"
#include "training/replay.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

class TrainerTest : public RunFolderTest {
 protected:
  std::vector<float> run_to_end(const fs::path& run, const RunConfig& c) const {
    const auto trainer = Trainer::start(run, c);
    while (!trainer->done()) trainer->step();
    return weights(*trainer);
  }
  static std::vector<float> weights(Trainer& t) {
    std::vector<float> w(static_cast<size_t>(t.model().table().size()));
    t.model().read_parameters(w);
    return w;
  }
  static std::vector<nlohmann::json> metrics(const fs::path& run) {
    std::vector<nlohmann::json> lines;
    const auto result =
        read_json_lines(run / "metrics.jsonl", [&](const JsonLine& l) { lines.push_back(l.object); });
    EXPECT_EQ(result.fault_count, 0u);
    return lines;
  }
};

TEST_F(TrainerTest, learns_and_records_every_step) {
  RunConfig c = tiny();
  c.schedule.steps = 60;
  run_to_end(folder / "run", c);
  const auto lines = metrics(folder / "run");
  ASSERT_EQ(lines.size(), 60u);
  for (size_t n = 0; n < lines.size(); ++n) {
    EXPECT_EQ(lines[n]["step"], n);
    EXPECT_TRUE(lines[n]["loss"].is_number());
    EXPECT_GT(lines[n]["gradient_norm"], 0);
    EXPECT_EQ(lines[n].contains("largest_score"), n % 3 == 0);
    if (n % 3 == 0) {
      EXPECT_EQ(lines[n]["offset"].size(), 1u);     // layers
      EXPECT_EQ(lines[n]["offset"][0].size(), 2u);  // heads
    }
  }
  EXPECT_LT(lines.back()["loss"].get<double>(), lines.front()["loss"].get<double>() - 1);
  const BatchRecord batches(folder / "run" / "batches.bin");
  EXPECT_EQ(batches.steps(), 60);
  std::vector<Checkpoint> kept = find_checkpoints(folder / "run" / "checkpoints");
  ASSERT_EQ(kept.size(), 3u);  // the ring
  EXPECT_EQ(kept.back().step, 60);
  EXPECT_EQ(kept.front().step, 52);
  // TensorBoard's file has the same losses.
  for (const auto& entry : fs::directory_iterator(folder / "run")) {
    if (!entry.path().filename().string().starts_with("events.")) continue;
    size_t seen = 0;
    read_tensorboard(entry.path(), [&](const TensorboardEvent& e) {
      for (const Scalar& s : e.scalars)
        if (s.tag == "train/loss") {
          EXPECT_FLOAT_EQ(s.value, lines[static_cast<size_t>(e.step)]["loss"].get<float>());
          ++seen;
        }
    });
    EXPECT_EQ(seen, lines.size());
  }
}

TEST_F(TrainerTest, a_watcher_has_told_its_last_line_before_it_goes) {
  struct Teller : StepWatcher {
    void prepare(int64_t, StepContext&) override {}
    void see(int64_t, double, Model&, nlohmann::json&) override {}
    void tell(int64_t step, nlohmann::json& line) override { line["told"] = told = step; }
    int64_t told = -1;
  };
  {
    const auto trainer = Trainer::start(folder / "run", tiny());
    for (int64_t step = 0; step < 10; ++step) {
      Teller teller;
      {
        const ScopedWatcher watched(*trainer, teller);
        trainer->step();
      }
      EXPECT_EQ(teller.told, step);
    }
    trainer->step();  // with nobody there
  }
  const auto lines = metrics(folder / "run");
  ASSERT_EQ(lines.size(), 11u);
  for (size_t n = 0; n < 10; ++n) EXPECT_EQ(lines[n].at("told"), n);
  EXPECT_FALSE(lines[10].contains("told"));
}

// Another user may have made folders and links under any name that can be guessed.
TEST_F(TrainerTest, a_replay_writes_through_nobody_elses_links) {
  run_to_end(folder / "run", tiny());
  const fs::path temporary = folder / "tmp", victim = folder / "victim";
  std::ofstream(victim) << "precious";
  for (int n = 0; n < 100; ++n) {
    const fs::path guess = temporary / fmt::format("evenkeel-replay-{}-{}", getpid(), n);
    fs::create_directories(guess);
    for (const char* name : {"config.toml", "metrics.jsonl", "batches.bin"})
      fs::create_symlink(victim, guess / name);
  }
  const char* const before = std::getenv("TMPDIR");
  const std::string kept = before ? before : "";
  setenv("TMPDIR", temporary.c_str(), 1);
  const auto count = [&] {
    return std::distance(fs::directory_iterator(temporary), fs::directory_iterator());
  };
  {
    Replay replay(folder / "run", 5);
    replay.run_to(6);
    EXPECT_EQ(count(), 101);
  }
  EXPECT_EQ(count(), 100);
  EXPECT_EQ(read_whole_file(victim, 100), "precious");
  before ? setenv("TMPDIR", kept.c_str(), 1) : unsetenv("TMPDIR");
}

TEST_F(TrainerTest, a_checkpoint_is_not_written_through_a_link) {
  const auto trainer = Trainer::start(folder / "run", tiny());
  trainer->step();
  fs::create_directories(folder / "elsewhere");
  fs::create_directory_symlink(folder / "elsewhere", folder / "run" / "checkpoints" / "step-00000001");
  try {
    trainer->save();
    ADD_FAILURE() << "it was";
  } catch (const DataError& error) {
    const std::string words = error.what();
    EXPECT_NE(words.find("step-00000001: expected a folder or nothing, found a symbolic link: a run is not "
                         "written through links"),
              std::string::npos)
        << words;
  }
  EXPECT_TRUE(fs::is_empty(folder / "elsewhere"));
}

class TrainerOfFamily : public OfFamily<TrainerTest> {
 protected:
  RunConfig tiny() const {
    RunConfig c = Base::tiny();
    c.model = GetParam().config(c.model);
    return c;
  }
};
INSTANTIATE_TEST_SUITE_P(Model, TrainerOfFamily, ::testing::ValuesIn(kFamilies), family_name);

TEST_P(TrainerOfFamily, the_same_bits_on_any_number_of_threads_and_from_recorded_batches) {
  const std::vector<float> once = run_to_end(folder / "a", tiny());
  const int threads = thread_count();
  set_thread_count(3);
  EXPECT_EQ(run_to_end(folder / "b", tiny()), once);
  set_thread_count(threads);
  RunConfig other = tiny();
  other.batches = (folder / "a" / "batches.bin").string();
  EXPECT_EQ(run_to_end(folder / "c", other), once);
  other.batches.clear();
  other.seed = 2;
  EXPECT_NE(run_to_end(folder / "d", other), once);
}

TEST_P(TrainerOfFamily, going_on_from_a_checkpoint_gives_the_bits_of_a_run_that_never_stopped) {
  for (OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon}) {
    RunConfig c = tiny();
    c.optimizer.kind = kind;
    c.plan = "fp32,row_sum=e5m2/stochastic";  // random numbers, too
    const fs::path whole = folder / fmt::format("whole-{}", name(kind)),
                   parts = folder / fmt::format("parts-{}", name(kind));
    const std::vector<float> expected = run_to_end(whole, c);
    {
      const auto trainer = Trainer::start(parts, c);
      for (int n = 0; n < 6; ++n) trainer->step();  // two behind the checkpoint: they are lost and done again
    }
    const auto trainer = Trainer::resume(parts);
    EXPECT_EQ(trainer->next_step(), 4);
    while (!trainer->done()) trainer->step();
    EXPECT_EQ(weights(*trainer), expected) << name(kind);
    const auto a = metrics(whole), b = metrics(parts);
    ASSERT_EQ(a.size(), b.size());
    for (size_t n = 0; n < a.size(); ++n) EXPECT_EQ(a[n]["loss"], b[n]["loss"]) << n;
    EXPECT_EQ(read_whole_file(whole / "batches.bin", 1 << 20),
              read_whole_file(parts / "batches.bin", 1 << 20));
  }
}

// kill -9 after one to five steps, again and again, until the run is done. (What a kill in the middle of a write
// leaves is whole_file_test's and json_lines_test's.) The victim is this program again, which runs the test below.
TEST_F(TrainerTest, survives_being_killed) {
  RunConfig c = tiny();
  c.checkpoint_every = 2;
  const std::vector<float> expected = run_to_end(folder / "whole", c);
  const fs::path run = folder / "killed";
  Trainer::start(run, c);
  int kills = 0, status = 0;
  do {
    ASSERT_LT(kills, 50);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      setenv("EVENKEEL_TEST_VICTIM", run.c_str(), 1);
      setenv("EVENKEEL_TEST_STEPS", std::to_string(1 + kills % 5).c_str(), 1);
      execl("/proc/self/exe", "trainer_test", "--gtest_filter=Victim.*", "--gtest_brief=1", nullptr);
      _exit(9);
    }
    waitpid(child, &status, 0);
    kills += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  } while (!WIFEXITED(status));
  ASSERT_EQ(WEXITSTATUS(status), 0);
  EXPECT_GE(kills, 3);
  const auto trainer = Trainer::resume(run);
  EXPECT_TRUE(trainer->done());
  EXPECT_EQ(weights(*trainer), expected);
}
TEST(Victim, trains_for_some_steps_and_is_killed) {
  const char *run = getenv("EVENKEEL_TEST_VICTIM"), *steps = getenv("EVENKEEL_TEST_STEPS");
  if (!run || !steps) GTEST_SKIP() << "only for survives_being_killed";
  const auto trainer = Trainer::resume(run);
  for (int n = 0; n < atoi(steps) && !trainer->done(); ++n) trainer->step();
  if (!trainer->done()) raise(SIGKILL);
}

TEST_F(TrainerTest, a_second_trainer_is_refused_and_so_is_a_folder_in_use) {
  const auto first = Trainer::start(folder / "run", tiny());
  first->step();
  EXPECT_THROW(Trainer::resume(folder / "run"), DataError);
  EXPECT_THROW(Trainer::start(folder / "run", tiny()), DataError);
  first->step();
  EXPECT_THROW(Trainer::resume(folder / "nothing"), DataError);
}

TEST_F(TrainerTest, a_change_of_plan_holds_from_its_step_on) {
  RunConfig c = tiny();
  const auto plain = run_to_end(folder / "a", c);
  c.changes = {{5, "layer 0 head 1: row_sum=e5m2"}};
  EXPECT_EQ(c.plan_at(4), "fp32");
  EXPECT_EQ(c.plan_at(5), "fp32; layer 0 head 1: row_sum=e5m2");
  EXPECT_NE(run_to_end(folder / "b", c), plain);
  const auto a = metrics(folder / "a"), b = metrics(folder / "b");
  for (size_t n = 0; n < 5; ++n) EXPECT_EQ(a[n]["loss"], b[n]["loss"]);
  EXPECT_NE(a[11]["loss"], b[11]["loss"]);
}

TEST_F(TrainerTest, a_branch_is_the_run_until_it_goes_another_way) {
  RunConfig c = tiny();  // a checkpoint every 4 steps
  const auto plain = run_to_end(folder / "a", c);
  branch_run(folder / "a", 4, folder / "same", c);
  const auto same = Trainer::resume(folder / "same");
  EXPECT_EQ(same->next_step(), 4);
  while (!same->done()) same->step();
  EXPECT_EQ(weights(*same), plain);
  EXPECT_EQ(metrics(folder / "same").size(), metrics(folder / "a").size());

  c.changes = {{5, "layer 0 head 1: row_sum=e5m2"}};
  const auto changed = run_to_end(folder / "changed", c);
  branch_run(folder / "a", 4, folder / "other", c);
  const auto other = Trainer::resume(folder / "other");
  while (!other->done()) other->step();
  EXPECT_EQ(weights(*other), changed);

  EXPECT_THROW(branch_run(folder / "a", 5, folder / "none", c), DataError);
  EXPECT_FALSE(fs::exists(folder / "none"));
  EXPECT_THROW(branch_run(folder / "a", 4, folder / "other", c), DataError);
  EXPECT_THROW(branch_run(folder / "nowhere", 4, folder / "none", c), DataError);
}

TEST_F(TrainerTest, divergence_is_a_finding_and_ends_the_run_in_order) {
  RunConfig c = tiny();
  c.schedule.steps = 400;
  c.schedule.peak = 1e3;
  c.optimizer.clip = 0;
  c.divergence = 0.5;
  const auto trainer = Trainer::start(folder / "run", c);
  while (!trainer->done()) trainer->step();
  ASSERT_TRUE(trainer->finding());
  EXPECT_LT(trainer->next_step(), 400);
  EXPECT_TRUE(fs::exists(folder / "run" / "findings.json"));
  EXPECT_EQ(find_checkpoints(folder / "run" / "checkpoints").back().step, trainer->next_step());
}

TEST(DivergenceWatch, sees_a_rise_and_what_is_not_finite_and_is_quiet_otherwise) {
  DivergenceWatch watch(0.5);
  for (int64_t step = 0; step < 500; ++step)
    EXPECT_FALSE(watch.see(step, 3 - 0.002 * static_cast<double>(step) + 0.3 * (step % 2)));
  int64_t step = 500;
  while (step < 600 && !watch.see(step, 3.5)) ++step;
  EXPECT_LT(step, 510);
  EXPECT_EQ(watch.see(step, NAN)->kind, "not_finite");
  DivergenceWatch off(0);
  for (int64_t n = 0; n < 100; ++n) EXPECT_FALSE(off.see(n, static_cast<double>(n)));
}

TEST_F(TrainerTest, configurations_go_to_toml_and_back) {
  RunConfig c = tiny();
  c.changes = {{3, "stabiliser=zero_sum"}, {9, "layer 1 head 0,2: output=fp32"}};
  c.optimizer.kind = OptimizerKind::muon;
  c.optimizer.weight_decay = 0.1f;
  c.schedule.course = Course::wsd;
  c.model.precision = LinearPrecision::bf16;
  c.backend = Backend::cuda;
  c.keel_ramp = 7;
  RunConfig back;
  read_run_config(parse_toml(to_toml(to_toml_table(c)), "config.toml"), back);
  EXPECT_TRUE(same(to_toml_table(c), to_toml_table(back)));
  EXPECT_EQ(back.model, c.model);
  EXPECT_EQ(back.changes, c.changes);
  EXPECT_EQ(back.optimizer.weight_decay, 0.1f);
  EXPECT_EQ(back.backend, Backend::cuda);
  EXPECT_EQ(back.keel_ramp, 7);
  EXPECT_THROW(read_run_config(parse_toml("[model]\nhesds = 3\n", "x.toml"), back), DataError);
  EXPECT_THROW(read_run_config(parse_toml("[optimizer]\nkind = 'adam'\n", "x.toml"), back), DataError);
  EXPECT_THROW(read_run_config(parse_toml("[data]\nseed = -1\n", "x.toml"), back), DataError);
  c.sequences = 3;
  c.accumulate = 2;
  EXPECT_THROW(validate(c), std::invalid_argument);
}

float keel_at(const RunConfig& c, int64_t step, int layer = 0, int head = 0) {
  return ScopedPlan::parse(c.plan_at(step)).at(layer, head).keel;
}

TEST_F(TrainerTest, keel_rises_in_a_straight_line) {
  RunConfig c = tiny();
  c.plan = "fp32,keel=1e-3";
  EXPECT_EQ(c.plan_at(0), "fp32,keel=1e-3");  // at once
  c.keel_ramp = 10;
  validate(c);
  EXPECT_FLOAT_EQ(keel_at(c, 0), 1e-4f);
  EXPECT_FLOAT_EQ(keel_at(c, 4), 5e-4f);
  EXPECT_EQ(c.plan_at(9), "fp32,keel=1e-3");
  // From a change on: from where it was, down as well as up, and in the middle of another ramp.
  c.changes = {{5, "keel=0"}, {100, "head 1: keel=2e-3"}, {104, "stabiliser=zero_sum"}};
  EXPECT_FLOAT_EQ(keel_at(c, 4), 5e-4f);
  EXPECT_FLOAT_EQ(keel_at(c, 5), 4.5e-4f);
  EXPECT_EQ(keel_at(c, 14), 0);
  EXPECT_EQ(keel_at(c, 99, 0, 1), 0);
  for (int64_t step = 100; step < 115; ++step) {
    EXPECT_EQ(keel_at(c, step, 0, 0), 0) << step;
    EXPECT_FLOAT_EQ(keel_at(c, step, 0, 1), 2e-4f * static_cast<float>(std::min<int64_t>(step - 99, 10)))
        << step;
  }
  EXPECT_EQ(ScopedPlan::parse(c.plan_at(105)).at(0, 1).stabiliser, Stabiliser::zero_sum);
  c.keel_ramp = -1;
  EXPECT_THROW(validate(c), std::invalid_argument);
}

TEST_F(TrainerTest, a_ramp_is_at_work_and_ends_where_the_plan_says) {
  RunConfig c = tiny();
  c.plan = "fp32,keel=0.5";
  const auto at_once = run_to_end(folder / "a", c);
  c.keel_ramp = 1;  // full from the first step on
  EXPECT_EQ(run_to_end(folder / "b", c), at_once);
  c.keel_ramp = 6;
  EXPECT_NE(run_to_end(folder / "c", c), at_once);
  const auto trainer = Trainer::resume(folder / "c");
  EXPECT_EQ(trainer->model().plan(0, 0).keel, 0.5f);
}

TEST_F(TrainerTest, plans_for_layers_and_heads_that_are_not_there_are_refused) {
  RunConfig c = tiny();  // 1 layer, 2 heads
  c.plan = "fp32; layer 0 head 1: row_sum=bf16";
  validate(c);
  for (const char* plan :
       {"fp32; layer 1: row_sum=bf16", "fp32; head 0,2: row_sum=bf16", "fp32; layer 0-3: keel=1"}) {
    c.plan = plan;
    EXPECT_THROW(validate(c), std::invalid_argument) << plan;
  }
  c.plan = "fp32";
  c.changes = {{3, "layer 7: stabiliser=zero_sum"}};
  EXPECT_THROW(validate(c), std::invalid_argument);
  const auto model = make_model_cpu(c.model, 1);
  EXPECT_THROW(model->set_plan(ScopedPlan::parse("fp32; layer 1: keel=1")), std::invalid_argument);
}

TEST(Backend, is_chosen_once_with_a_reason) {
  CudaDevice none, old, good;
  none.why = "no driver";
  old.present = good.present = true;
  old.name = "NVIDIA T4";
  old.major = 7, old.minor = 5;
  good.name = "NVIDIA H200";
  good.major = 9;
  EXPECT_EQ(choose_backend(Backend::automatic, good).backend, Backend::cuda);
  EXPECT_EQ(choose_backend(Backend::cpu, good).backend, Backend::cpu);
  EXPECT_EQ(choose_backend(Backend::automatic, none).backend, Backend::cpu);
  EXPECT_EQ(choose_backend(Backend::automatic, none).why, "no GPU: no driver");
  EXPECT_EQ(choose_backend(Backend::automatic, old).backend, Backend::cpu);
  EXPECT_NE(choose_backend(Backend::automatic, old).why.find("7.5"), std::string::npos);
  EXPECT_THROW(choose_backend(Backend::cuda, none), DataError);
  EXPECT_THROW(choose_backend(Backend::cuda, old), DataError);
  EXPECT_EQ(parse_backend("auto"), Backend::automatic);
  EXPECT_THROW(parse_backend("gpu"), std::invalid_argument);
  EXPECT_EQ(peak_flops(Backend::cuda, good, LinearPrecision::bf16), 989.5e12);
  EXPECT_FALSE(peak_flops(Backend::cuda, good, LinearPrecision::fp32));
  EXPECT_FALSE(peak_flops(Backend::cuda, old, LinearPrecision::bf16));
  EXPECT_GT(peak_flops(Backend::cpu, none, LinearPrecision::fp32), 0);
}

TEST_F(TrainerTest, the_backend_is_recorded_and_another_one_must_be_asked_for) {
  RunConfig c = tiny();
  c.backend = Backend::cpu;
  { Trainer::start(folder / "run", c)->step(); }
  const fs::path file = folder / "run" / "config.toml";
  std::string text = read_whole_file(file, 1 << 20);
  const size_t found = text.find("backend = \"cpu\"");
  ASSERT_NE(found, std::string::npos) << text;
  EXPECT_EQ(metrics(folder / "run")[0]["backend"], "cpu");
  if (cuda_device().present) GTEST_SKIP() << "the rest is about machines without a GPU";
  // As a run that a GPU began.
  text.replace(found, std::string_view("backend = \"cpu\"").size(), "backend = \"cuda\"");
  std::ofstream(file) << text;
  EXPECT_THROW(Trainer::resume(folder / "run"), DataError);
  EXPECT_THROW(Trainer::resume(folder / "run", Backend::cuda), DataError);
  EXPECT_EQ(Trainer::resume(folder / "run", Backend::cpu)->config().backend, Backend::cpu);
  EXPECT_EQ(Trainer::resume(folder / "run")->config().backend, Backend::cpu);  // the folder's from then on
}

TEST_F(TrainerTest, accumulated_parts_are_one_step) {
  RunConfig c = tiny();
  c.schedule.steps = 3;
  const auto whole = run_to_end(folder / "a", c);
  c.accumulate = 4;
  const auto parts = run_to_end(folder / "b", c);
  // Sums in another order: equal to FP32's precision, through AdamW's division.
  for (size_t n = 0; n < whole.size(); ++n) ASSERT_NEAR(whole[n], parts[n], 2e-3) << n;
}

TEST_F(TrainerTest, weights_go_to_hugging_face_names_and_back) {
  const RunConfig c = tiny();
  const auto trainer = Trainer::start(folder / "run", c);
  trainer->step();
  save_weights(folder / "w.safetensors", trainer->model());
  const auto other = make_model_cpu(c.model, 77);
  load_weights(folder / "w.safetensors", *other);
  std::vector<float> w(static_cast<size_t>(other->table().size()));
  other->read_parameters(w);
  EXPECT_EQ(w, weights(*trainer));
  ModelConfig wider = c.model;
  wider.width = 32;
  const auto wrong = make_model_cpu(wider, 1);
  EXPECT_THROW(load_weights(folder / "w.safetensors", *wrong), DataError);
}

TEST_F(TrainerTest, bad_data_is_refused_with_words) {
  RunConfig c = tiny();
  c.data = (folder / "missing.txt").string();
  EXPECT_THROW(Trainer::start(folder / "a", c), DataError);
  c = tiny();
  c.model.vocabulary = 100;
  EXPECT_THROW(Trainer::start(folder / "b", c), DataError);
  std::ofstream(folder / "short.txt") << "short";
  c = tiny();
  c.data = (folder / "short.txt").string();
  EXPECT_THROW(Trainer::start(folder / "c", c), DataError);
  std::ofstream(folder / "bad.bin") << "EKBATCH1 and nothing good";
  EXPECT_THROW(BatchRecord(folder / "bad.bin"), DataError);
}

}  // namespace
}  // namespace evenkeel
