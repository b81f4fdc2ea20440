// The guard on runs that drift and runs that do not.
#include "diagnosis/guard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "diagnosis/verdict.h"
#include "isolation_cases.h"
#include "run_program.h"

namespace evenkeel {
namespace {

struct End {
  double offset = 0;  // of the last step
  std::vector<GuardEvent> events;
  std::vector<PlanChange> changes;
  int64_t steps_run = 0;
};

End run_to_the_end(GuardedRun& run) {
  End end;
  while (!run.trainer().done()) {
    run.step();
    ++end.steps_run;
  }
  for (const HeadFacts& f : run.trainer().model().facts())
    end.offset = std::max(end.offset, static_cast<double>(f.largest_row_mean));
  end.events = run.events();
  end.changes = run.trainer().config().changes;
  for (const GuardEvent& event : end.events)
    printf("  %ld: %s\n", static_cast<long>(event.step), event.words.c_str());
  printf("  offset %.0f after %ld steps\n", end.offset, static_cast<long>(end.steps_run));
  return end;
}

End guarded(const PlantedRun& planted) {
  GuardedRun run(planted.run(), Trainer::start(planted.run(), planted.config));
  return run_to_the_end(run);
}

// The run of `derail_test`, which passes 500.
PlantedRun& derailing(PlantedRun& planted) {
  planted.config.plan = "fp32,row_sum=e5m2";
  planted.config.schedule.steps = 401;  // facts of step 400 are the last
  planted.config.facts_every = 10;
  return planted;
}

TEST(Guard, keeps_a_derailing_run_healthy_and_a_replay_repeats_it) {
  SKIP_LONG_RUNS();
  PlantedRun planted;
  derailing(planted).config.guard = GuardMode::act;
  const End end = guarded(planted);
  EXPECT_LT(end.offset, 100);
  ASSERT_EQ(end.events.size(), 1u);
  EXPECT_EQ(end.events[0].kind, GuardEvent::Kind::remedy);
  EXPECT_EQ(end.events[0].heads, std::vector<int64_t>{1});  // layer 0 head 1, as isolate finds
  ASSERT_EQ(end.changes.size(), 1u);
  EXPECT_EQ(end.changes[0], (PlanChange{end.events[0].step + 1, end.events[0].clauses}));
  // On the record, in both files.
  int told = 0;
  read_json_lines(planted.run() / "metrics.jsonl",
                  [&](const JsonLine& line) { told += line.object.contains("guard"); });
  EXPECT_EQ(told, 1);
  int kept = 0;
  read_json_lines(planted.run() / "guard.jsonl", [&](const JsonLine&) { ++kept; });
  EXPECT_EQ(kept, 1);
  // Through the change, to the same bits.
  const RunRecord record = read_run_record(planted.run());
  const int64_t first = end.events[0].step - 10;
  Replay replay(planted.run(), first);
  replay.run_to(first);
  while (replay.trainer().next_step() < end.events[0].step + 10) {
    const StepReport report = replay.trainer().step();
    EXPECT_EQ(report.loss, record.loss[static_cast<size_t>(report.step)]);
  }
}

TEST(Guard, holds_a_llama_that_would_drift) {
  SKIP_LONG_RUNS();
  PlantedRun planted;
  derailing(planted).config.guard = GuardMode::act;
  planted.as_llama().config.schedule.steps = 301;  // unguarded, its offset passes 1,500: `derail_test`
  const End end = guarded(planted);
  EXPECT_LT(end.offset,
            532);  // this run's limit of drift; the guard acts at half of it, or earlier by forecast
  ASSERT_FALSE(end.events.empty());
  EXPECT_EQ(end.events[0].kind, GuardEvent::Kind::remedy);
}

TEST(Guard, only_tells_where_that_is_all_it_may) {
  SKIP_LONG_RUNS();
  PlantedRun planted;
  derailing(planted).config.guard = GuardMode::warn;
  const End end = guarded(planted);
  EXPECT_GT(end.offset, 500);
  ASSERT_EQ(end.events.size(), 1u);
  EXPECT_EQ(end.events[0].kind, GuardEvent::Kind::warning);
  EXPECT_TRUE(end.changes.empty());
  // What it would do is a command, and the command does it.
  const std::string& command = end.events[0].next_command;
  ASSERT_EQ(command.substr(0, 15), "evenkeel train ") << command;
  const Output mended = run_shell(EVENKEEL_PROGRAM + command.substr(8) + " --guard=off 2>&1");
  ASSERT_EQ(mended.code, 0) << command << "\n" << mended.out;
  double offset = 0;
  for (const double value : read_run_record(planted.run().string() + "-cured").offset.back())
    offset = std::max(offset, value);
  EXPECT_LT(offset, 100);
}

TEST(Guard, is_quiet_on_healthy_runs) {
  SKIP_LONG_RUNS();
  for (const char* plan : {"fp32", "bf16_all"}) {
    PlantedRun planted;
    planted.config.plan = plan;
    planted.config.guard = GuardMode::act;
    EXPECT_TRUE(guarded(planted).events.empty()) << plan;
  }
}

// A run that drifted without a guard and continues with one when its scores have no bits left: it must go back.
TEST(Guard, rolls_back_where_it_is_too_late) {
  SKIP_LONG_RUNS();
  PlantedRun planted;
  // Scores in two bits after step 150: all that is above 66 is too late there.
  planted.config.plan = "fp32,row_sum=e5m2";
  planted.config.changes = {{150, "scores=e8m2"}};
  planted.config.schedule.steps = 180;
  planted.train();
  // With more steps to go, and a guard.
  const std::filesystem::path file = planted.run() / "config.toml";
  RunConfig config;
  read_run_config(file, config);
  config.schedule.steps = 261;  // facts of step 260 are the last
  config.guard = GuardMode::act;
  write_whole_file(file, to_toml(to_toml_table(config)));
  GuardedRun run(planted.run(), Trainer::resume(planted.run()));
  EXPECT_EQ(run.trainer().next_step(), 180);
  const End end = run_to_the_end(run);
  ASSERT_FALSE(end.events.empty());
  EXPECT_EQ(end.events[0].kind, GuardEvent::Kind::roll_back);
  EXPECT_LT(end.events[0].to, 150);
  EXPECT_LT(end.offset, 100);
  EXPECT_EQ(run.trainer().next_step(), 261);
  EXPECT_GT(end.steps_run, 81);  // some were run twice
}

TEST(Guard, knows_when_scores_have_no_steps_left) {
  EXPECT_NEAR(DriftGuard::too_late(parse_plan("bf16_all"), false), 128 * kScoreUnit, 1e-9);
  EXPECT_NEAR(DriftGuard::too_late(parse_plan("fp32"), true), 128 * kScoreUnit, 1e-9);
  EXPECT_GT(DriftGuard::too_late(parse_plan("fp32"), false), 1e8);
}

// Log-sum-exps that grow, with leaks as a kernel gives them: large, those of FP32, or none at all.
TEST(Guard, says_whether_a_drift_leaks_or_that_it_does_not_know) {
  const auto event_with = [](double leak) {
    DriftGuard guard(ScopedPlan::parse("flash2"), 1, 2, /*bf16=*/true);
    std::optional<DriftGuard::Decision> decision;
    for (int64_t step = 0; step < 400 && !decision; step += 10) {
      const double lse = 20 * std::exp(0.01 * static_cast<double>(step));
      guard.follow(step, {lse, 10}, {leak, leak}, {1, 1});
      decision = guard.decide(step, {});
    }
    EXPECT_TRUE(decision.has_value());
    return decision ? decision->event : GuardEvent();
  };
  const GuardEvent leaking = event_with(1e-3), tight = event_with(1e-8),
                   unknown = event_with(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(leaking.kind, GuardEvent::Kind::remedy) << leaking.words;
  EXPECT_EQ(tight.kind, GuardEvent::Kind::warning);
  EXPECT_NE(tight.words.find("drift without a leak"), std::string::npos) << tight.words;
  EXPECT_EQ(unknown.kind, GuardEvent::Kind::warning);
  EXPECT_NE(unknown.words.find("whether it leaks is not known"), std::string::npos) << unknown.words;
  EXPECT_EQ(unknown.words.find("drift without a leak"), std::string::npos) << unknown.words;
}

TEST(Guard, is_asked_for_on_the_command_line) {
  const Output bad =
      run_shell(EVENKEEL_PROGRAM " train --preset micro --data x --out /nowhere/run --guard=maybe 2>&1");
  EXPECT_EQ(bad.code, 2);
  EXPECT_NE(bad.out.find("expected one of off, warn, act"), std::string::npos) << bad.out;
}

// Behind a NaN all heads look alike: that is no drift.
TEST(Guard, what_is_not_finite_is_no_drift) {
  DriftGuard rule(ScopedPlan::parse("flash2"), 1, 2, true);
  std::optional<DriftGuard::Decision> decision;
  for (int64_t step = 0; step < 200 && !decision; ++step) {
    const double lse = step < 150 ? 20.0 : std::nan("");
    rule.follow(step, {lse, lse}, {0, 0}, {1, 1});
    decision = rule.decide(step, {});
  }
  ASSERT_TRUE(decision);
  EXPECT_EQ(decision->event.words,
            "layer 0 heads 0, 1: the run has failed since step 150: an offset is not finite");
}

// A run that has failed is told so, and gets no date of a failure to come.
TEST(Guard, a_run_that_has_failed_gets_no_date) {
  for (const bool failed : {false, true}) {
    DriftGuard rule(ScopedPlan::parse("flash2"), 1, 2, true);
    rule.set_terms({.begin = 100, .harmful = 3547, .bound = {}, .last_step = 0});
    std::optional<DriftGuard::Decision> decision;
    for (int64_t step = 0; step < 3000 && !decision; ++step) {
      // It drifts without a leak to the guard's knowledge until step 2900, so that it is told of late.
      const double lse = 20 + std::exp(static_cast<double>(step) / 330);
      rule.follow(step, {20, lse}, {0, step < 2900 ? 0.0 : 1.0}, {1, 1});
      rule.see_loss(step, failed && step > 2500 ? 3 : 2);
      if (step >= 2990) decision = rule.decide(step, {});
    }
    ASSERT_TRUE(decision);
    const std::string& words = decision->event.words;
    EXPECT_EQ(words.find("(near step") != std::string::npos, !failed) << words;
    EXPECT_EQ(words.find("(the run has failed since about step 25") != std::string::npos, failed) << words;
  }
}

}  // namespace
}  // namespace evenkeel
