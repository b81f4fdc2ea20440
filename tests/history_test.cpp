// `evenkeel forecast --history`: what earlier runs with the same plan and settings say of a run.
#include "diagnosis/history.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/json_text.h"
#include "base/whole_file.h"
#include "run_program.h"

namespace evenkeel {
namespace {

class History : public testing::Test {
 protected:
  History() : home_(std::filesystem::temp_directory_path() / fmt::format("evenkeel-history-{}", getpid())) {
    std::filesystem::create_directories(home_);
  }
  ~History() override { std::filesystem::remove_all(home_); }

  static std::string config(int seed, const std::string& plan, const std::string& more = "") {
    return fmt::format(
        "[model]\nlayers = 1\nheads = 1\n[data]\ntrain = \"/texts/{}\"\ndigest = \"abc\"\nseed = {}\n"
        "[schedule]\ncourse = \"constant\"\nlr = 0.003\nwarmup = 100\nsteps = {}\n"
        "[attention]\nplan = \"{}\"\nchanges = []\n[run]\nfacts_every = {}\nguard = \"off\"\n{}",
        seed, seed, 1000 * seed, plan, 10 + seed, more);
  }
  // A run of so many steps; it drifts and its loss rises by half at `failed`, where that is not 0.
  std::filesystem::path add(const std::string& name, int64_t steps, int64_t failed,
                            const std::string& config) {
    const std::filesystem::path folder = home_ / name;
    std::filesystem::create_directories(folder);
    std::string text;
    for (int64_t step = 0; step < steps; ++step)
      text += fmt::format("{{\"step\":{},\"loss\":{},\"offset\":[[{}]]}}\n", step,
                          failed && step >= failed ? 3.0 : 2.0, failed && step >= failed - 300 ? 5000 : 20);
    write_whole_file(folder / "metrics.jsonl", text);
    if (!config.empty()) write_whole_file(folder / "config.toml", config);
    return folder;
  }
  HistoryForecast ask(const std::filesystem::path& run) const {
    std::vector<RunRecords> earlier;
    for (const auto& folder : runs_in(home_)) earlier.push_back(read_run(folder));
    return forecast_by_history(read_run(run), earlier);
  }
  Output command(const std::string& words) const {
    return run_shell(fmt::format("cd {} && {} forecast {} 2>&1", home_.string(), EVENKEEL_PROGRAM, words));
  }

  std::filesystem::path home_;
};

TEST_F(History, the_earlier_runs_date_the_failure) {
  const auto run = add("now", 800, 0, config(1, "flash2"));
  EXPECT_TRUE(ask(run).alike.empty());
  EXPECT_FALSE(ask(run).failure);  // nothing is known
  add("a", 3000, 2000, config(2, "flash2"));
  const HistoryForecast one = ask(run);
  ASSERT_EQ(one.alike.size(), 1u);
  ASSERT_TRUE(one.failure);
  EXPECT_NEAR(*one.failure, 2000, 60);  // the mean of 200 losses is 5 % higher some steps later
  EXPECT_NEAR(one.earliest() * one.latest(), *one.failure * *one.failure, 1);
  // Of three, the one in the middle; one that is healthy to its end counts as lasting longer than that.
  add("b", 5000, 4000, config(3, "flash2"));
  add("c", 2500, 0, config(4, "flash2"));
  const HistoryForecast three = ask(run);
  EXPECT_NEAR(*three.failure, 4000, 60) << in_words(three);
  EXPECT_EQ(three.alike.size(), 3u);
  // What ended before the run's present step says nothing: 1,500 is not expected of a run at step 1,600.
  add("d", 2000, 1500, config(5, "flash2"));
  const auto older = add("older", 1600, 0, config(6, "flash2"));
  std::filesystem::remove_all(run);
  const HistoryForecast later = ask(older);
  EXPECT_NEAR(*later.failure, 4000, 60) << in_words(later);
}

TEST_F(History, healthy_runs_and_runs_that_are_outlived) {
  const auto run = add("now", 800, 0, config(1, "flash2"));
  add("a", 3000, 0, config(2, "flash2"));
  add("b", 4000, 0, config(3, "flash2"));
  HistoryForecast found = ask(run);
  EXPECT_FALSE(found.failure);
  EXPECT_EQ(in_words(found), "2 earlier runs with this plan and these settings were healthy, to step 4000");
  // One failure of three that came further: two thirds live on.
  add("c", 3000, 2000, config(4, "flash2"));
  found = ask(run);
  EXPECT_FALSE(found.failure) << in_words(found);
  for (const char* name : {"a", "b", "c"}) std::filesystem::remove_all(home_ / name);
  add("d", 700, 600, config(5, "flash2"));
  found = ask(run);
  EXPECT_TRUE(found.outlived);
  EXPECT_FALSE(found.failure);
  EXPECT_NE(in_words(found).find("this one has lasted longer, 800 steps"), std::string::npos);
  add("e", 500, 0, config(6, "flash2"));  // healthy, and ended before
  EXPECT_NE(in_words(ask(run)).find("this one has lasted longer, 800 steps"), std::string::npos);
}

TEST_F(History, failure_is_judged_beside_the_twin) {
  // A loss that stops falling, while that of the twin falls on: by itself it shows nothing.
  const auto write = [&](const std::string& name, const std::string& text, bool stops) {
    const auto folder = add(name, 1, 0, text);
    std::string lines;
    for (int64_t step = 0; step < 1600; ++step)
      lines += fmt::format("{{\"step\":{},\"loss\":{},\"offset\":[[{}]]}}\n", step,
                           stops && step > 1000 ? 3.0 : 4.0 - 1e-3 * static_cast<double>(step),
                           stops && step > 900 ? 5000 : 20);
    write_whole_file(folder / "metrics.jsonl", lines);
    return folder;
  };
  const auto run = add("now", 800, 0, config(1, "flash2"));
  write("a", config(2, "flash2"), true);
  EXPECT_FALSE(ask(run).failure);
  write("twin", config(2, "flash2,stabiliser=wide_output"), false);
  const HistoryForecast beside = ask(run);
  ASSERT_TRUE(beside.failure);
  // The means of 200 losses part from step 1,000 on; the twin's is 5 % below after some 230 steps.
  EXPECT_NEAR(*beside.failure, 1230, 40);
  // A remedy of another plan does, another seed or learning rate does not.
  write("twin", config(2, "bf16_all,stabiliser=zero_sum"), false);
  EXPECT_TRUE(ask(run).failure);
  write("twin", config(3, "flash2,stabiliser=wide_output"), false);
  EXPECT_FALSE(ask(run).failure);
  std::string slower = config(2, "flash2,stabiliser=wide_output");
  slower.replace(slower.find("0.003"), 5, "0.001");
  write("twin", slower, false);
  EXPECT_FALSE(ask(run).failure);
}

TEST_F(History, only_runs_of_the_same_plan_and_settings_count) {
  const auto run = add("now", 800, 0, config(1, "flash2"));
  add("plan", 3000, 2000, config(2, "flash2,stabiliser=zero_sum"));
  std::string faster = config(3, "flash2");
  faster.replace(faster.find("0.003"), 5, "0.006");
  add("rate", 3000, 2000, faster);
  std::string text = config(4, "flash2");
  text.replace(text.find("abc"), 3, "abd");
  add("text", 3000, 2000, text);
  add("empty", 0, 0, config(5, "flash2"));
  std::string guarded = config(6, "flash2");
  guarded.replace(guarded.find("\"off\""), 5, "\"on\"");
  add("guarded", 3000, 0, guarded);
  const HistoryForecast found = ask(run);
  EXPECT_TRUE(found.alike.empty()) << in_words(found);
  ASSERT_EQ(found.unlike.size(), 5u);
  const auto says = [&](const std::string& name, const std::string& words) {
    return std::any_of(found.unlike.begin(), found.unlike.end(),
                       [&](const std::string& one) { return one == (home_ / name).string() + ": " + words; });
  };
  EXPECT_TRUE(says("plan", "attention.plan is \"flash2,stabiliser=zero_sum\", not \"flash2\""));
  EXPECT_TRUE(says("rate", "schedule.lr is 0.006, not 0.003"));
  EXPECT_TRUE(says("text", "data.digest is \"abd\", not \"abc\""));
  EXPECT_TRUE(says("empty", "no recorded step"));
  EXPECT_TRUE(says("guarded", "run.guard is \"on\", not \"off\""));
  // Changes of the plan on the way are too long for a sentence.
  std::string changed = config(9, "flash2");
  changed.replace(changed.find("changes = []"), 12,
                  "changes = [{step = 300, plan = \"layer 0 head 1: stabiliser=zero_sum\"}, "
                  "{step = 400, plan = \"layer 1 head 0: stabiliser=zero_sum\"}]");
  EXPECT_EQ(first_difference(read_run(run), read_run(add("changed", 10, 0, changed))),
            "attention.changes differs");
  // A falling learning rate has another course where it ends elsewhere.
  const auto falling = [&](int seed) {
    std::string config_text = config(seed, "flash2");
    config_text.replace(config_text.find("constant"), 8, "cosine");
    return config_text;
  };
  EXPECT_EQ(first_difference(read_run(add("x", 10, 0, falling(7))), read_run(add("y", 10, 0, falling(8)))),
            "schedule.steps is 8000, not 7000");
}

TEST_F(History, the_command) {
  add("now", 800, 0, config(1, "flash2"));
  add("runs/a", 3000, 2000, config(2, "flash2"));
  add("runs/b", 3000, 0, config(3, "bf16_all"));
  const Output found = command("now --history runs");
  EXPECT_EQ(found.code, 1) << found.out;
  EXPECT_NE(found.out.find("history: the earlier run with this plan and these settings failed, at step 20"),
            std::string::npos)
      << found.out;
  EXPECT_NE(found.out.find("next: evenkeel verdict runs/a"), std::string::npos) << found.out;
  EXPECT_EQ(parse_json(command("now --json --history runs").out)[0]["next"], "evenkeel verdict runs/a");
  const nlohmann::json json = parse_json(command("now --json --history runs/b runs/a").out)[0];
  EXPECT_EQ(json["history"]["alike"].size(), 1u);
  EXPECT_EQ(json["history"]["unlike"].size(), 1u);
  EXPECT_NEAR(json["history"]["failure"].get<double>(), 2000, 60);
  // Unlike runs alone, the run itself, nothing there, a file, no runs, an empty list.
  EXPECT_EQ(command("now --history runs/b").code, 0);
  EXPECT_NE(command("now --history runs/b").out.find("not compared with runs/b: attention.plan"),
            std::string::npos);
  EXPECT_NE(command("now --history now").out.find("no earlier run has this plan"), std::string::npos);
  EXPECT_EQ(command("now --history nowhere").code, 3);
  EXPECT_EQ(command("now --history now/metrics.jsonl").code, 3);
  std::filesystem::create_directories(home_ / "none");
  EXPECT_EQ(command("now --history none").code, 3);
  EXPECT_EQ(command("now --history").code, 2);
  // A run that has failed needs no history.
  EXPECT_EQ(command("runs/a --history runs").out.find("history:"), std::string::npos);
  EXPECT_TRUE(parse_json(command("runs/a --json --history runs").out)[0]["history"].is_null());
  EXPECT_TRUE(parse_json(command("now --json --alone").out)[0]["history"].is_null());
  // One that came back does.
  const auto back = add("back", 3000, 2000, config(7, "flash2"));
  std::string lines;
  for (int64_t step = 3000; step < 3400; ++step)
    lines += fmt::format("{{\"step\":{},\"loss\":2.05,\"offset\":[[20]]}}\n", step);
  write_whole_file(back / "metrics.jsonl", read_whole_file(back / "metrics.jsonl", size_t{1} << 20) + lines);
  add("runs/c", 6000, 5000, config(8, "flash2"));
  const Output again = command("back --history runs");
  EXPECT_NE(again.out.find("its loss has come back since"), std::string::npos) << again.out;
  EXPECT_NE(again.out.find("failure near step 50"), std::string::npos) << again.out;
}

// Without --history: the runs in the same folder, if one is alike.
TEST_F(History, the_runs_beside_it_are_asked) {
  add("runs/now", 800, 0, config(1, "flash2"));
  add("runs/other", 3000, 2000, config(2, "bf16_all"));
  const Output unlike = command("runs/now");
  EXPECT_EQ(unlike.code, 0) << unlike.out;
  EXPECT_EQ(unlike.out.find("other"), std::string::npos) << unlike.out;
  EXPECT_EQ(unlike.out.find("history"), std::string::npos) << unlike.out;
  add("runs/a", 3000, 2000, config(2, "flash2"));
  std::filesystem::create_directories(home_ / "runs/damaged");
  write_whole_file(home_ / "runs/damaged/config.toml", "[[[");
  write_whole_file(home_ / "runs/damaged/metrics.jsonl", "garbage");
  const std::string said = "history: the earlier run with this plan and these settings failed, at step 20";
  const Output alike = command("runs/now");
  EXPECT_EQ(alike.code, 1) << alike.out;
  EXPECT_NE(alike.out.find(said), std::string::npos) << alike.out;
  // From within the folder, too; both of two runs; and not where nobody shall be asked.
  EXPECT_NE(command("runs/a/../now").out.find(said), std::string::npos);
  EXPECT_EQ(parse_json(command("runs/now runs/a --json").out)[0]["history"]["alike"].size(), 1u);
  const Output alone = command("runs/now --alone");
  EXPECT_EQ(alone.code, 0) << alone.out;
  EXPECT_EQ(alone.out.find("history"), std::string::npos) << alone.out;
  EXPECT_EQ(command("runs/now --alone --history runs").code, 2);
}

TEST_F(History, a_run_that_is_named_twice_counts_once) {
  add("now", 800, 0, config(1, "flash2"));
  add("runs/a", 3000, 2000, config(2, "flash2"));
  add("runs/b", 3000, 0, config(3, "flash2"));
  add("runs/c", 3000, 0, config(4, "flash2"));
  std::filesystem::create_directory_symlink("a", home_ / "runs/latest");
  const Output found = command("now --history runs runs/a");
  EXPECT_EQ(found.code, 0) << found.out;
  EXPECT_NE(found.out.find("1 of 3 earlier runs"), std::string::npos) << found.out;
}

// What is not known to be alike, or not known to be healthy, says nothing.
TEST_F(History, what_is_not_recorded_is_no_evidence) {
  const auto run = add("now", 800, 0, config(1, "flash2"));
  add("no_config", 3000, 2000, "");
  add("broken", 3000, 2000, "[model\nbroken");
  std::string lines;
  for (int64_t step = 0; step < 3000; ++step)
    lines += fmt::format("{{\"step\":{},\"loss\":{}}}\n", step, step < 2000 ? 2 : 7);
  write_whole_file(add("no_offsets", 1, 0, config(2, "flash2")) / "metrics.jsonl", lines);
  const auto mended = add("mended", 3000, 0, config(3, "flash2"));
  write_whole_file(mended / "guard.jsonl",
                   "{\"step\":900,\"kind\":\"remedy\",\"heads\":[[0,0]],\"plan\":\"stabiliser=zero_sum\","
                   "\"words\":\"drift\"}\n");
  HistoryForecast found = ask(run);
  EXPECT_TRUE(found.alike.empty()) << in_words(found);
  EXPECT_EQ(found.unlike.size(), 4u);
  std::filesystem::remove(run / "config.toml");
  add("a", 3000, 2000, config(4, "flash2"));
  EXPECT_TRUE(ask(run).alike.empty());
}

TEST_F(History, a_twin_has_the_same_seed_and_a_remedy_in_every_head) {
  const std::string no_seed =
      "[model]\nlayers = 1\nheads = 1\n[attention]\nplan = \"{}\"\n[run]\ntrainer = \"pytorch\"\n";
  const auto of_monitor = [&](const char* plan) { return fmt::format(fmt::runtime(no_seed), plan); };
  std::vector<RunRecords> among = {
      read_run(add("wide", 10, 0, config(2, "flash2,stabiliser=wide_output"))),
      read_run(add("head", 900, 0, config(2, "flash2; head 0: stabiliser=zero_sum"))),
      read_run(add("scoped", 900, 0, config(2, "layer 0: pv=bf16,stabiliser=zero_sum"))),
      read_run(add("torch", 900, 0, of_monitor("flash2,stabiliser=zero_sum")))};
  const RunRecords* const found = twin_of(read_run(add("a", 10, 0, config(2, "flash2"))), among);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->folder.filename(), "wide");
  EXPECT_FALSE(twin_of(read_run(add("b", 10, 0, of_monitor("flash2"))), among));
  EXPECT_FALSE(twin_of(read_run(add("c", 10, 0, "")), among));
}

// The run itself is judged beside its twin, too.
TEST_F(History, the_runs_own_twin) {
  std::string stops, falls;
  for (int64_t step = 0; step < 1600; ++step) {
    const double loss = 4.0 - 1e-3 * static_cast<double>(step);
    stops += fmt::format("{{\"step\":{},\"loss\":{},\"offset\":[[{}]]}}\n", step, std::max(3.0, loss),
                         step > 900 ? 5000 : 20);
    falls += fmt::format("{{\"step\":{},\"loss\":{},\"offset\":[[20]]}}\n", step, loss);
  }
  write_whole_file(add("now", 1, 0, config(1, "flash2")) / "metrics.jsonl", stops);
  write_whole_file(add("runs/twin", 1, 0, config(1, "flash2,stabiliser=zero_sum")) / "metrics.jsonl", falls);
  EXPECT_EQ(command("now").out.find("has failed"), std::string::npos) << command("now").out;
  const Output found = command("now --history runs");
  EXPECT_NE(found.out.find("has failed since about step 12"), std::string::npos) << found.out;
  EXPECT_NE(found.out.find("above that of the same run with a remedy"), std::string::npos) << found.out;
}

}  // namespace
}  // namespace evenkeel
