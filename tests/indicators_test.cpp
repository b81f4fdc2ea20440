// Indicators over made-up records: alarms are raised at exactly the steps where signs were planted; damage is reported.
#include "diagnosis/indicators.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_lines.h"
#include "base/json_text.h"
#include "base/whole_file.h"
#include "diagnosis/replays.h"
#include "diagnosis/verdict.h"
#include "numerics/random.h"
#include "run_program.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kWarmup = 60, kProbeEvery = 25, kL = 2, kH = 3;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

size_t index_of(std::string_view indicator) {
  for (size_t i = 0; i < kIndicators.size(); ++i)
    if (kIndicators[i].name == indicator) return i;
  ADD_FAILURE() << indicator;
  return 0;
}

Json by_head(double value) { return Json::array({{value, value, value}, {value, value, value}}); }

// The record of a run in which nothing ever happens.
Json calm_line(int64_t step) {
  Json line = {{"step", step}, {"loss", 2.0}, {"gradient_norm", 1.0}};
  line["largest_lse"] = by_head(12);
  line["tied_rows"] = by_head(0.02);
  line["leak_mean"] = by_head(0);
  line["leak_error"] = by_head(1e-6);
  line["leak_rms"] = by_head(1e-3);
  line["delta_rms"] = by_head(1);
  if (step % kProbeEvery != 0) return line;
  Json& probe = line["probe"] = Json::object();
  probe["offset"] = by_head(5);
  probe["largest_score"] = by_head(9);
  probe["leak_share"] = by_head(0.01);
  probe["delta_error_running"] = by_head(-1e-3);
  probe["norm_q"] = probe["norm_k"] = by_head(1.5);
  probe["score_entropy"] = by_head(0.8);
  return line;
}

class Records : public testing::Test {
 protected:
  Records() : folder_(fs::temp_directory_path() / fmt::format("evenkeel-indicators-{}", getpid())) {
    fs::remove_all(folder_);
  }
  ~Records() override {
    std::error_code error;
    fs::remove_all(folder_, error);
  }

  // A run of `steps` calm lines, each changed by `plant`.
  IndicatorRun run(const std::string& name, int64_t steps,
                   const std::function<void(int64_t, Json&)>& plant = {}, const std::string& plan = "fp32",
                   uint64_t seed = 1) {
    const fs::path run = folder_ / name;
    fs::create_directories(run);
    RunConfig config;
    config.model = model_preset("micro");
    config.model.layers = kL;
    config.model.heads = kH;
    config.model.width = 12;
    config.schedule.warmup = kWarmup;
    config.schedule.steps = steps;
    config.plan = plan;
    config.seed = seed;
    write_whole_file(run / "config.toml", to_toml(to_toml_table(config)));
    JsonLinesWriter metrics(run / "metrics.jsonl");
    for (int64_t step = 0; step < steps; ++step) {
      Json line = calm_line(step);
      if (plant) plant(step, line);
      metrics.write(line);
    }
    metrics.flush();
    return read_indicators(run);
  }
  // The first step at or above a rung; -1: never.
  static int64_t first(const IndicatorRun& run, std::string_view indicator, Rule rule, int rung) {
    for (const Reached& reached : run.reached[index_of(indicator)][static_cast<size_t>(rule)])
      if (reached.rung >= rung) return reached.step;
    return -1;
  }
  static const IndicatorScore& score(const IndicatorTable& table, std::string_view indicator, Rule rule) {
    for (const IndicatorScore& s : table.scores)
      if (s.name() == indicator && s.rule == rule) return s;
    throw std::runtime_error("no such score");
  }

  fs::path folder_;
};

TEST(RunningMean, is_the_mean_until_it_is_full_and_then_fades) {
  RunningMean mean(8);
  for (int64_t n = 0; n < 8; ++n) {
    mean.take(n, static_cast<double>(n));
    EXPECT_DOUBLE_EQ(mean.value(), static_cast<double>(n) / 2);
  }
  mean.take(8, 3.5 + 8);
  EXPECT_DOUBLE_EQ(mean.value(), 4.5);  // an eighth of the way
  // Three steps at once are as three steps with the same value.
  RunningMean other = mean;
  for (int64_t n = 9; n < 12; ++n) mean.take(n, 1);
  other.take(11, 1);
  EXPECT_NEAR(mean.value(), other.value(), 1e-12);
}

TEST_F(Records, a_calm_run_stands_where_it_stands) {
  const IndicatorRun calm = run("calm", 300);
  EXPECT_TRUE(calm.notes.empty()) << calm.notes[0];
  EXPECT_FALSE(calm.guard);
  EXPECT_FALSE(loss_moved(calm, {}));
  for (size_t i = 0; i < kIndicators.size(); ++i)
    for (size_t r = 0; r < kRuleNames.size(); ++r) {
      if (r == 2 && needs(kIndicators[i]).starts_with("probe.")) continue;  // too few records to deviate from
      const std::vector<Reached>& reached = calm.reached[i][r];
      if (r == 2 && reached.empty()) continue;
      ASSERT_EQ(reached.size(), 1u) << kIndicators[i].name << ' ' << kRuleNames[r];
      EXPECT_EQ(reached[0].head, kIndicators[i].by_head() ? 0 : -1);
      if (r > 0) {
        EXPECT_EQ(reached[0].rung, r == 1 ? 0 : -1) << kIndicators[i].name;
      }
    }
  const auto level = [&](const char* name) { return calm.reached[index_of(name)][0][0].rung; };
  EXPECT_EQ(level("log_sum_exp"), 3);  // 12
  EXPECT_EQ(level("leak_size"), -10);
  EXPECT_EQ(level("score_entropy"), 0);  // 1 / 0.8
  EXPECT_EQ(level("leak_z"), -3);        // none: the least
  EXPECT_EQ(level("delta_error"), -10);  // by size
  EXPECT_EQ(level("loss"), 1);
  // Nothing is judged before the warm-up ends, growth not before it has a reference.
  EXPECT_EQ(calm.reached[index_of("log_sum_exp")][0][0].step, kWarmup);
  EXPECT_EQ(calm.reached[index_of("norm_q")][0][0].step, 75);
  EXPECT_EQ(calm.reached[index_of("log_sum_exp")][1][0].step, 2 * kWarmup);
  EXPECT_EQ(calm.reached[index_of("log_sum_exp")][2][0].step, kWarmup + 16);
}

// A jump of octaves is halved by the running mean in a known number of steps.
TEST_F(Records, a_jump_is_told_at_its_step_by_every_rule_and_with_its_head) {
  const IndicatorRun jump = run("jump", 400, [](int64_t step, Json& line) {
    if (step >= 200) line["largest_lse"][1][2] = 12 * std::exp2(10);
  });
  // Octaves above 12 after k steps: 10 (1 - (7/8)^k).
  const auto steps_to = [](double octaves) {
    return static_cast<int64_t>(std::ceil(std::log(1 - octaves / 10) / std::log(0.875)));
  };
  for (int rung = 1; rung <= 9; ++rung)
    EXPECT_EQ(first(jump, "log_sum_exp", Rule::growth, rung), 199 + steps_to(rung)) << rung;
  EXPECT_EQ(first(jump, "log_sum_exp", Rule::level, 8), 199 + steps_to(8 - std::log2(12.0)));
  // The trail is constant, so its spread is the least: 1.25 octaves are 80 deviations.
  EXPECT_EQ(first(jump, "log_sum_exp", Rule::deviation, 6), 200);
  EXPECT_EQ(first(jump, "log_sum_exp", Rule::deviation, 7), 201);  // 2.34 octaves: 150
  EXPECT_EQ(jump.reached[0][1].back().head, 1 * kH + 2);
  // The others say nothing.
  EXPECT_EQ(first(jump, "tied_rows", Rule::growth, 1), -1);
  EXPECT_EQ(first(jump, "loss", Rule::growth, 1), -1);
}

// The rules once more, as the header has them, by sorting everything anew at every step.
TEST_F(Records, a_walk_is_judged_as_by_the_slow_definition) {
  constexpr int64_t kSteps = 500;
  std::vector<double> walk(kSteps);
  double at = 5;
  for (int64_t n = 0; n < kSteps; ++n) {
    at += 0.3 * (random_unit({7, 0, 0}, static_cast<uint64_t>(n)) - 0.48);
    walk[static_cast<size_t>(n)] = at + random_unit({7, 0, 1}, static_cast<uint64_t>(n));
  }
  const IndicatorRun found = run("walk", kSteps, [&](int64_t step, Json& line) {
    line["largest_lse"][0][1] = 16 + std::exp2(walk[static_cast<size_t>(step)]);  // above the others
  });
  const auto upper_median = [](std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
  };
  std::array<std::vector<Reached>, 3> expected;
  std::vector<double> smooth;  // behind the warm-up
  double mean = 0;
  for (int64_t n = 0; n < kSteps; ++n) {
    const double x = std::log2(16 + std::exp2(walk[static_cast<size_t>(n)]));
    mean += (x - mean) / static_cast<double>(std::min<int64_t>(n + 1, 8));
    if (n < kWarmup) continue;
    const auto reach = [&](size_t rule, double height) {
      const int rung = static_cast<int>(std::floor(height));
      if (expected[rule].empty() || rung > expected[rule].back().rung) expected[rule].push_back({rung, n, 1});
    };
    reach(0, mean);
    if (n >= 2 * kWarmup) reach(1, mean - upper_median({smooth.begin(), smooth.begin() + kWarmup}));
    if (smooth.size() >= 16) {
      const std::vector<double> trail(
          smooth.end() - static_cast<int64_t>(std::min<size_t>(smooth.size(), 128)), smooth.end());
      const double middle = upper_median(trail);
      std::vector<double> distances;
      for (const double y : trail) distances.push_back(std::fabs(y - middle));
      const double z = (mean - middle) / std::max(1.4826 * upper_median(distances), 0x1p-6);
      reach(2, z > 0.5 ? std::log2(z) : -1);
    }
    smooth.push_back(mean);
  }
  // The other heads stand still, so they count only where this one falls: heads of first rungs may be theirs.
  for (size_t rule = 0; rule < 3; ++rule) {
    ASSERT_GT(expected[rule].size(), 1u) << rule;
    std::vector<Reached> rising = found.reached[0][rule];
    std::erase_if(rising, [](const Reached& r) { return r.head != 1; });
    std::erase_if(expected[rule], [&](const Reached& r) { return r.rung < rising.front().rung; });
    EXPECT_EQ(rising.size(), expected[rule].size()) << rule;
    EXPECT_EQ(rising, expected[rule]) << rule;
  }
}

// One octave for 120 records, then four more: of the last 128 records most know only the higher place.
TEST_F(Records, deviation_forgets_what_lies_behind_its_trail) {
  const IndicatorRun climbing = run("climbing", 600, [](int64_t step, Json& line) {
    line["tied_rows"] = by_head(step < 400 ? 0.02 : step < 520 ? 0.04 : 0.64);
  });
  // 128 deviations of 2^-6 octaves are two octaves: 4 (1 - (7/8)^6) is the first beyond. From 0.02 it would be the third.
  EXPECT_EQ(first(climbing, "tied_rows", Rule::deviation, 7), 525);
}

TEST_F(Records, what_is_probed_now_and_then_is_told_at_its_probe) {
  const IndicatorRun probed = run("probed", 800, [](int64_t step, Json& line) {
    if (step < 610 || !line.contains("probe")) return;
    line["probe"]["norm_q"][0][1] = 13.0;
    line["probe"]["score_entropy"][1][0] = 0.0;  // all in one direction
    line["probe"]["delta_error_running"][1][1] = -1e-1;
  });
  EXPECT_EQ(first(probed, "norm_q", Rule::growth, 3), 625);  // 8.7 fold, hardly smoothed
  EXPECT_EQ(first(probed, "norm_q", Rule::deviation, 6), 625);
  EXPECT_EQ(first(probed, "score_entropy", Rule::level, kHighestRung / 2), 625);
  EXPECT_EQ(first(probed, "delta_error", Rule::growth, 6), 625);
  EXPECT_EQ(first(probed, "norm_k", Rule::growth, 1), -1);
}

TEST_F(Records, bias_needs_one_sign) {
  const auto planted = [&](const char* name, bool one_sign) {
    return run(name, 400, [=](int64_t step, Json& line) {
      if (step >= 200) line["leak_mean"][0][0] = one_sign || step % 2 == 0 ? -6e-6 : 6e-6;
    });
  };
  const IndicatorRun bias = planted("bias", true), noise = planted("noise", false);
  // 6 (1 - (7/8)^k) from 4 on: k = 9
  EXPECT_EQ(first(bias, "leak_z", Rule::level, 2), 208);
  EXPECT_EQ(first(noise, "leak_z", Rule::level, 0), -1);
}

TEST_F(Records, numbers_that_are_not_finite_speak_what_is_not_known_does_not) {
  const IndicatorRun broken = run("broken", 300, [](int64_t step, Json& line) {
    if (step >= 150) line["largest_lse"][0][0] = kNan;
    if (step == 175) line["probe"]["leak_share"][0][0] = kNan;
    if (step >= 160) line["gradient_norm"] = std::numeric_limits<double>::infinity();
    if (step >= 170) line["loss"] = kNan;
  });
  EXPECT_EQ(first(broken, "log_sum_exp", Rule::growth, 10), 150);  // an eighth of the way to 2^100
  EXPECT_EQ(first(broken, "gradient_norm", Rule::growth, 10), 160);
  EXPECT_EQ(first(broken, "leak_share", Rule::growth, 1), -1);
  EXPECT_EQ(loss_moved(broken, {}), 170);
  ASSERT_TRUE(broken.guard);
  EXPECT_EQ(broken.guard->step, 150);
}

// The run's own heads say how far is far, between two limits that hold for all; an FP32 control has no upper one.
TEST(Health, the_limit_is_so_many_times_the_median_head) {
  EXPECT_EQ(limit_from_run({}).limit, kLowestDriftLimit);
  EXPECT_EQ(limit_from_run({1, 1, 1}).limit, kLowestDriftLimit);
  EXPECT_EQ(limit_from_run({1e9, 30, 1}).limit, 240);
  EXPECT_EQ(limit_from_run({1e9, 30, 20, 1}).limit, 160);  // the lower of two
  EXPECT_EQ(limit_from_run({1e9, 1e9, 1}).limit, kHighestDriftLimit);
  EXPECT_EQ(limit_from_run({NAN, NAN, 1}).limit, kHighestDriftLimit);  // not known is far
  EXPECT_EQ(limit_from_control({1, 1, 1}).limit, kLowestDriftLimit);
  EXPECT_EQ(limit_from_control({10, 20, 30}).limit, 160);
  EXPECT_EQ(limit_from_control({10, 20, 171}).limit, 342);  // the control is healthy
  EXPECT_EQ(limit_from_control({200, 200, 200}).limit, 1600);
}
TEST(Health, the_limit_is_said_with_its_source) {
  EXPECT_EQ(in_words(limit_from_control({10, 20, 30})),
            "limit 160: 8 times 20, the median head of the FP32 control");
  EXPECT_EQ(in_words(limit_from_control({10, 20, 171})),
            "limit 342: twice the largest head of the FP32 control");
  EXPECT_NE(in_words(limit_from_run({1, 1, 1})).find("no smaller offset is called drift"), std::string::npos);
  EXPECT_NE(in_words(limit_from_run({1e3, 1e3, 1e3})).find("the highest without"), std::string::npos);
}
// The guard acts half way to the limit, and never below the lowest one.
TEST(Health, the_guard_acts_before_the_limit) {
  EXPECT_EQ(mend_limit(std::vector<double>()), kLowestDriftLimit);
  EXPECT_EQ(mend_limit({1, 1, 1}), kLowestDriftLimit);
  EXPECT_EQ(mend_limit({1, 30, 1e9}), 120);
  EXPECT_EQ(mend_limit({1e9, 30, 20, 1}), 80);
  EXPECT_EQ(mend_limit({1e9, 1e9, 1}), kHighestDriftLimit / 2);
  EXPECT_EQ(mend_limit({NAN, NAN, 1}), kHighestDriftLimit / 2);
}

// Offsets of a healthy model of 13.8 M parameters (median 18, largest 117), and of one whose head 5 has left them behind.
TEST(Drift, a_verdict_names_a_head_that_has_left_the_others_behind) {
  const auto symptom_of = [](double farthest) {
    RunRecord record;
    record.layers = 2, record.heads = 3;
    record.offset_is = "offset";
    for (int64_t step = 0; step < 40; step += 10) {
      record.fact_steps.push_back(step);
      record.offset.push_back({10, 18, 18, 40, 18, step < 20 ? 30.0 : farthest});
    }
    return find_symptom(record);
  };
  EXPECT_EQ(symptom_of(117).kind, Symptom::Kind::none);
  EXPECT_EQ(symptom_of(8 * 18).kind, Symptom::Kind::none);
  const Symptom found = symptom_of(8 * 18 + 1);
  EXPECT_EQ(found.kind, Symptom::Kind::offset);
  EXPECT_EQ(found.layer, 1);
  EXPECT_EQ(found.head, 2);
  EXPECT_EQ(found.since, 20);
}

// One head of six against four times the median, between 67 and 266.
TEST_F(Records, the_guards_limit_rises_with_the_other_heads) {
  const auto spoken_at = [&](const char* name, double others, double farthest) {
    return run(name, 300,
               [=](int64_t step, Json& line) {
                 line["leak_rms"] = by_head(1e-2);
                 line["largest_lse"] = by_head(others);
                 if (step >= 100) line["largest_lse"][1][0] = farthest;
               })
        .guard.has_value();
  };
  EXPECT_TRUE(spoken_at("far_of_few", 12, 100));
  EXPECT_FALSE(spoken_at("near_of_many", 40, 150));
  EXPECT_TRUE(spoken_at("far_of_many", 40, 170));
  EXPECT_TRUE(spoken_at("beyond_all", 200, 280));
  EXPECT_FALSE(spoken_at("below_all", 200, 250));
}

TEST_F(Records, the_guards_alarm_is_its_own) {
  const auto drifting = [&](const char* name, double leak) {
    return run(name, 300, [=](int64_t step, Json& line) {
      line["leak_rms"] = by_head(leak);
      if (step >= 100) line["largest_lse"][1][0] = 4 * kLowestDriftLimit;
    });
  };
  const IndicatorRun leaking = drifting("leaking", 1e-2), tight = drifting("tight", 1e-7);
  ASSERT_TRUE(leaking.guard);
  // From 12 to 4 limits; the limit is passed when the mean of the logarithms is on it.
  const double way = std::log(kLowestDriftLimit / 12) / std::log(4 * kLowestDriftLimit / 12);
  const auto k = static_cast<int64_t>(std::ceil(std::log(1 - way) / std::log(0.875)));
  EXPECT_EQ(*leaking.guard, (Reached{0, 99 + k, 1 * kH}));
  EXPECT_TRUE(tight.guard_judged);
  EXPECT_FALSE(tight.guard);
}

TEST_F(Records, the_loss_moves_against_all_twins_from_the_first_step_of_the_window) {
  const auto with_loss = [&](const char* name, const std::function<double(int64_t)>& loss,
                             uint64_t seed = 1) {
    return run(
        name, 600, [=](int64_t step, Json& line) { line["loss"] = loss(step); }, name, seed);
  };
  std::vector<IndicatorRun> healthy;
  healthy.push_back(with_loss("fp32", [](int64_t) { return 2.0; }));
  healthy.push_back(with_loss("flash2", [](int64_t) { return 2.1; }));
  healthy.push_back(with_loss(
      "bf16_all", [](int64_t) { return 9.0; }, 2));  // of another seed: no twin
  // 1 higher from step 300 on: a window holds more than 0.15 from its eighth such step on.
  const IndicatorRun up = with_loss("fp8", [](int64_t step) { return step >= 300 ? 3.0 : 2.0; });
  const Twins twins = find_twins(up, healthy);
  ASSERT_EQ(twins, (Twins{&healthy[0], &healthy[1]}));
  EXPECT_EQ(loss_moved(up, twins), 300 + 8 - 50);
  EXPECT_EQ(loss_moved(up, {&healthy[0]}), 300 + 3 - 50);
  EXPECT_EQ(loss_moved(up, {}), 300 + 6 - 50);  // 5 % of its best, 2
  EXPECT_FALSE(loss_moved(healthy[0], find_twins(healthy[0], healthy)));
  EXPECT_EQ(find_twins(healthy[0], healthy), Twins{&healthy[1]});
  // A bump of less than kLossHold steps is none; at the end of a run it is.
  EXPECT_FALSE(loss_moved(
      with_loss("fp32,dv=bf16", [](int64_t n) { return n >= 300 && n < 400 ? 3.0 : 2.0; }), twins));
  EXPECT_TRUE(loss_moved(with_loss("fp32,dv=fp16", [](int64_t n) { return n >= 550 ? 3.0 : 2.0; }), twins));
}

TEST_F(Records, rungs_are_those_that_no_healthy_run_comes_to_and_each_is_judged_by_the_others) {
  const auto grown = [&](const std::string& name, double factor, double loss = 2.0) {
    return run(name, 700, [=](int64_t step, Json& line) {
      if (step >= 300) line["tied_rows"][0][1] = 0.02 * factor;
      if (step >= 500) line["loss"] = loss;
    });
  };
  std::vector<IndicatorRun> healthy, derailing;
  healthy.push_back(grown("a", 1));
  healthy.push_back(grown("b", 1.5));
  healthy.push_back(grown("c", 3));  // the only one above 2
  derailing.push_back(grown("d", 12, 3.0));
  derailing.push_back(grown("e", 3.5, 3.0));
  IndicatorTable table = judge_indicators(healthy, derailing);
  const IndicatorScore& ties = score(table, "tied_rows", Rule::growth);
  EXPECT_EQ(ties.rung, 2);  // fourfold
  EXPECT_EQ(ties.healthy, 3);
  EXPECT_EQ(ties.false_alarms, 1);
  // Of three, half of the others is one: c raises an alarm whichever it is; a and b are on the same rung, so never.
  EXPECT_DOUBLE_EQ(ties.half_alarms, 1.0 / 3);
  EXPECT_EQ(ties.judged, 2);
  EXPECT_EQ(ties.moved, 2);
  EXPECT_DOUBLE_EQ(ties.merit(), 1.0 / 2 - 1.0 / 3);
  ASSERT_TRUE(ties.spoke[0]);
  EXPECT_FALSE(ties.spoke[1]);
  // Twelvefold is 3.58 octaves: two of them after 7 steps.
  EXPECT_EQ(*ties.spoke[0], (Reached{2, 306, 1}));
  ASSERT_TRUE(table.moved[0]);
  EXPECT_EQ(*table.moved[0], 500 + 3 - 50);
  EXPECT_EQ(ties.leads, std::vector<int64_t>{453 - 306});
  EXPECT_EQ(ties.in_time, 1);
  const IndicatorScore& loss = score(table, "loss", Rule::deviation);
  ASSERT_TRUE(loss.spoke[0]);
  EXPECT_EQ(loss.leads, (std::vector<int64_t>{-47, -47}));  // at step 500: too late
  EXPECT_EQ(loss.in_time, 0);
  EXPECT_EQ(loss.false_alarms, 0);

  // With a second run as high as the highest, nobody is alone up there.
  healthy.push_back(grown("f", 3.2));
  table = judge_indicators(healthy, derailing);
  EXPECT_EQ(score(table, "tied_rows", Rule::growth).false_alarms, 0);
  // Two of four, and two of three others chosen: c is alone up there if f is not chosen, one time in three.
  EXPECT_DOUBLE_EQ(score(table, "tied_rows", Rule::growth).half_alarms, 2 * (1.0 / 3) / 4);
  // One row of each indicator, and the guard's.
  EXPECT_EQ(best_rules(table).size(), 1 + kIndicators.size());
  // Without healthy runs: what has grown more than it usually does.
  table = judge_indicators({}, derailing);
  EXPECT_EQ(score(table, "tied_rows", Rule::growth).rung, kIndicators[index_of("tied_rows")].growth);
  EXPECT_THROW(score(table, "tied_rows", Rule::level), std::runtime_error);
  EXPECT_EQ(score(table, "tied_rows", Rule::growth).healthy, 0);
}

TEST_F(Records, damage_is_told_and_passed_over) {
  const auto told = [](const IndicatorRun& run, const std::string& words) {
    for (const std::string& note : run.notes)
      if (note.find(words) != std::string::npos) return true;
    return false;
  };
  const IndicatorRun whole = run("whole", 300, [](int64_t step, Json& line) {
    if (step >= 200) line["tied_rows"][1][1] = 0.5;
  });
  // Line 100 broken, the last one torn, one step twice, one field of another shape.
  const fs::path damaged = folder_ / "damaged";
  fs::create_directories(damaged);
  fs::copy_file(folder_ / "whole/config.toml", damaged / "config.toml");
  std::string text;
  const std::string source = read_whole_file(folder_ / "whole/metrics.jsonl", 1 << 24);
  int64_t number = 0;
  for (size_t at = 0; at < source.size(); ++number) {
    const size_t end = source.find('\n', at) + 1;
    std::string line = source.substr(at, end - at);
    if (number == 100) line = "{\"step\": 100, \"loss\": \n";
    if (number == 150) line += line;
    if (number == 160) {
      Json json = parse_json(line);
      json["tied_rows"] = Json::array({{1.0}});
      line = json.dump() + "\n";
    }
    if (number == 299) line.resize(20);
    text += line;
    at = end;
  }
  write_whole_file(damaged / "metrics.jsonl", text);
  const IndicatorRun run_of_it = read_indicators(damaged);
  EXPECT_TRUE(told(run_of_it, "1 damaged lines of 300"));
  EXPECT_TRUE(told(run_of_it, "torn last line of 20 bytes"));
  EXPECT_TRUE(told(run_of_it, "went back 1 times"));
  EXPECT_TRUE(told(run_of_it, "1 fields that are not numbers, or not 2 x 3 of them"));
  EXPECT_EQ(run_of_it.notes.size(), 4u);
  EXPECT_EQ(run_of_it.reached[index_of("tied_rows")], whole.reached[index_of("tied_rows")]);

  const IndicatorRun bare = run("bare", 200, [](int64_t step, Json& line) {
    line = {{"step", step}, {"loss", "quite good"}};
  });
  EXPECT_TRUE(told(bare, "log_sum_exp (largest_lse)"));
  EXPECT_TRUE(told(bare, "loss (loss)"));
  EXPECT_TRUE(judge_indicators({bare}, {bare}).scores.empty());

  const IndicatorRun one = run("one", 1);
  EXPECT_TRUE(told(one, "before its warm-up"));
  EXPECT_FALSE(loss_moved(one, {&one}));
  EXPECT_EQ(judge_indicators({one}, {one}).scores.size(), 1u);  // the guard, silent

  // Where nothing can be read, nothing is said of the loss.
  const std::string good = read_whole_file(folder_ / "one/metrics.jsonl", 1 << 20);
  for (const char* nothing : {"", "garbage\n", "{\"step\": 9000000000000000000}\n{\"step\": -4}\n"}) {
    write_whole_file(folder_ / "one/metrics.jsonl", std::string_view(nothing));
    EXPECT_THROW(read_indicators(folder_ / "one"), DataError) << nothing;
  }
  write_whole_file(folder_ / "one/metrics.jsonl", good + "{\"step\": -4}\n");
  EXPECT_TRUE(told(read_indicators(folder_ / "one"), "1 lines without a step"));
  write_whole_file(folder_ / "one/config.toml", std::string("what ="));
  EXPECT_TRUE(told(read_indicators(folder_ / "one"), "config.toml"));
  fs::remove(folder_ / "one/config.toml");
  EXPECT_TRUE(told(read_indicators(folder_ / "one"), "no config.toml"));
  EXPECT_THROW(read_indicators(folder_ / "nowhere"), DataError);
}

TEST_F(Records, the_command_prints_tables_and_json) {
  const auto plant = [](int64_t step, Json& line) {
    if (step >= 200) line["largest_lse"][1][2] = 1e4;
    if (step >= 300) line["loss"] = 4.0;
  };
  run("a", 400);
  run("b", 400, {}, "flash2");
  run("c", 400, plant, "bf16_all");
  const std::string program = fmt::format("cd {} && {} indicators ", folder_.string(), EVENKEEL_PROGRAM);
  const Output table = run_shell(program + "--healthy a b --failing c");
  EXPECT_EQ(table.code, 0);
  EXPECT_NE(table.out.find("2 healthy runs, 1 failing ones; the loss of 1 of these moved"),
            std::string::npos);
  EXPECT_NE(table.out.find("c: 400 steps; the loss moved at step 252 (against 2 healthy twins)"),
            std::string::npos)
      << table.out;
  const Output json = run_shell(program + "--failing c --json --healthy a b");
  ASSERT_EQ(json.code, 0);
  const Json all = parse_json(json.out);
  EXPECT_EQ(all["derailing"][0]["twins"], Json({"a", "b"}));
  bool found = false;
  for (const Json& row : all["indicators"])
    if (row["indicator"] == "log_sum_exp" && row["rule"] == "level") {
      found = true;
      EXPECT_EQ(row["speaks_at"], 16.0);
      EXPECT_EQ(row["spoke"][0], Json({{"step", 200}, {"layer", 1}, {"head", 2}}));
      EXPECT_EQ(row["leads"], Json::array({52}));
    }
  EXPECT_TRUE(found);
  const Output alone = run_shell(program + "c");
  EXPECT_EQ(alone.code, 0);
  EXPECT_NE(alone.out.find("against its own best"), std::string::npos);
  EXPECT_EQ(run_shell(program + "2>&1").code, 2);
  EXPECT_EQ(run_shell(program + "--healthy 2>&1").code, 2);
  const Output nowhere = run_shell(program + "nowhere 2>&1");
  EXPECT_EQ(nowhere.code, 3);
  EXPECT_NE(nowhere.out.find("nowhere"), std::string::npos);
}

}  // namespace
}  // namespace evenkeel
