// The failure at its smallest, and its cures: one head, a few hundred steps, seconds. Forecasts of planted courses.
#include "diagnosis/drift.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "base/json_text.h"
#include "base/threads.h"
#include "base/toml.h"
#include "base/whole_file.h"
#include "diagnosis/forecast.h"
#include "numerics/rounding.h"
#include "run_program.h"
#include "sanitized.h"

namespace evenkeel {
namespace {

constexpr int64_t kSteps = kSanitized ? 60 : 900;

DriftPoint end_of(const char* plan, uint64_t seed = 1, int64_t steps = kSteps) {
  DriftSettings settings;
  settings.steps = steps;
  settings.points = 10;
  settings.seed = seed;
  return run_drift(parse_plan(plan), settings).back();
}

TEST(Drift, a_rounded_row_sum_derails_and_the_sum_cures) {
  if (kSteps < 900) GTEST_SKIP() << "too few steps under a sanitizer";
  for (uint64_t seed : {1, 2}) {
    const double healthy = end_of("fp32", seed).offset;
    EXPECT_LT(healthy, 15);
    EXPECT_GT(end_of("fp32,row_sum=e5m2", seed).offset, 100);
    EXPECT_GT(end_of("fp32,row_sum=e5m2/stochastic", seed).offset, 100);
    EXPECT_LT(end_of("fp32,row_sum=e5m2,stabiliser=zero_sum", seed).offset, 15);
    EXPECT_LT(end_of("fp32,row_sum=e5m2,keel=1e-3", seed).offset, 20);
  }
}

// The same error in delta hurts only where the loss has seen it too, or where it has one sign of itself.
TEST(Drift, the_loss_makes_the_bias) {
  if (kSteps < 900) GTEST_SKIP() << "too few steps under a sanitizer";
  EXPECT_GT(end_of("fp32,output=e8m2/stochastic").offset, 100);
  EXPECT_LT(end_of("fp32,output=e8m2/stochastic,output_for_delta=fp32").offset, 20);
  EXPECT_LT(end_of("fp32,output_for_delta=e8m2/stochastic").offset, 20);
  EXPECT_LT(end_of("fp32,output=e8m2,output_for_delta=e8m2/stochastic").offset, 20);
  EXPECT_GT(end_of("fp32,output_for_delta=e8m2/toward_zero", 1, 2500).offset, 100);
}

TEST(Drift, repeats_to_the_bit_for_any_thread_count) {
  const int threads = thread_count();
  set_thread_count(1);
  const DriftPoint one = end_of("bf16_all,row_sum=e5m2/stochastic");
  set_thread_count(3);
  const DriftPoint three = end_of("bf16_all,row_sum=e5m2/stochastic");
  set_thread_count(threads);
  EXPECT_EQ(one.loss, three.loss);
  EXPECT_EQ(one.offset, three.offset);
}

// --- Forecasts

constexpr int64_t kWarmup = 100, kEvery = 10;
ForecastTerms terms() { return {kWarmup, harmful_offset(64, 7), "", 0}; }

// Every record errs by up to a tenth, as real ones do.
double jitter(int64_t step) {
  return 0.9 + 0.2 * static_cast<double>((static_cast<uint64_t>(step) * 0x9E3779B97F4A7C15) >> 40) / 0x1p24;
}
HeadForecast of_course(int64_t steps, const std::function<double(int64_t)>& offset) {
  OffsetCourse course;
  for (int64_t step = 0; step < steps; step += kEvery) course.take(step, offset(step) * jitter(step));
  return course.forecast(terms());
}
double saturating(int64_t step) {
  return 40 + 150 * (1 - std::exp(-static_cast<double>(step) / 1500));  // a healthy layer of nano
}
double growing(int64_t step) { return 20 + std::exp((static_cast<double>(step) - 1200) / 400); }

TEST(Forecast, healthy_courses_have_none) {
  for (int64_t steps = 200; steps < 9000; steps += 100) {
    EXPECT_LT(of_course(steps, saturating).outlook, Outlook::drift) << steps;
    EXPECT_LT(of_course(steps, [](int64_t) { return 90.0; }).outlook, Outlook::drift) << steps;
    // From a peak downwards.
    EXPECT_LT(of_course(steps, [](int64_t s) { return 800 / (1 + static_cast<double>(s) / 500); }).outlook,
              Outlook::drift)
        << steps;
  }
  EXPECT_EQ(of_course(3000, saturating).outlook, Outlook::no_drift);
  for (int64_t steps = 1010; steps < 3000; steps += 10)  // a jump is no growth
    EXPECT_LT(of_course(steps, [](int64_t s) { return s < 1000 ? 40.0 : 300.0; }).outlook, Outlook::drift)
        << steps;
}

TEST(Forecast, a_growing_offset_is_forecast_before_it_harms) {
  // Harmful (3547) at step 1200 + 400 ln 3527 = 4467. The loss suffers at ten times that: near step 5400.
  constexpr double kFailure = 5400;
  int64_t first = 0;
  for (int64_t steps = 300; steps < 4300; steps += 100) {
    const HeadForecast found = of_course(steps, growing);
    ASSERT_NE(found.outlook, Outlook::harmful) << steps;
    if (found.outlook != Outlook::drift) {
      EXPECT_EQ(first, 0) << "once forecast, always: " << steps;
      continue;
    }
    if (first == 0) first = steps;
    EXPECT_GT(found.growth, 0.4 / 400) << steps;  // a part of the offset does not grow
    EXPECT_LT(found.growth, 1.1 / 400) << steps;
    EXPECT_LT(found.earliest, kFailure) << steps;
    EXPECT_GT(found.latest, kFailure) << steps;
    EXPECT_GT(found.failure, kFailure / 1.5) << steps;
    EXPECT_LT(found.failure, kFailure * 1.5) << steps;
  }
  EXPECT_GT(first, 0);
  EXPECT_LT(first, 3100);  // a lead of 1,400 steps at least
  const HeadForecast beyond = of_course(4700, growing);
  EXPECT_EQ(beyond.outlook, Outlook::harmful);
  EXPECT_GT(beyond.offset, 3547);
}

// Some drifts rest half way: GPT-2 124M stood at 4,870 for 9,000 steps before it failed.
TEST(Forecast, a_large_offset_is_drift_though_it_rests) {
  const auto resting = [](double level) {
    return [=](int64_t s) { return std::min(level, 10 * std::exp(static_cast<double>(s) / 100)); };
  };
  for (int64_t steps = 1500; steps < 6000; steps += 100) {
    const HeadForecast found = of_course(steps, resting(1200));
    EXPECT_EQ(found.outlook, Outlook::drift) << steps;
    EXPECT_NEAR(found.failure, 1.5 * static_cast<double>(steps), 0.03 * static_cast<double>(steps));
    // The largest offset of a healthy run, and of runs that were unharmed.
    for (const double level : {435.0, 733.0})
      EXPECT_LT(of_course(steps, resting(level)).outlook, Outlook::drift) << steps;
    // A remedy at step 1000: it falls.
    EXPECT_LT(of_course(steps,
                        [](int64_t s) {
                          return s < 1000 ? 3000.0 : 3000 * std::exp((1000 - static_cast<double>(s)) / 4000);
                        })
                  .outlook,
              Outlook::drift)
        << steps;
  }
  // Before the first growth has settled, too; without a warm-up; with one record beyond alone it is not.
  OffsetCourse early;
  ForecastTerms patient = terms();
  patient.settled = 3 * kWarmup;
  for (int64_t step = 0; step < 250; step += kEvery)
    early.take(step, (step < 100 ? 30 : 1500) * jitter(step));
  EXPECT_EQ(early.forecast(patient).outlook, Outlook::drift);
  patient.begin = 0;
  EXPECT_EQ(early.forecast(patient).outlook, Outlook::drift);
  EXPECT_LT(of_course(2000, [](int64_t s) { return s < 1990 ? 30.0 : 2000.0; }).outlook, Outlook::drift);
}

// All of a healthy model's layers grow at first: 9, 87, 264 at steps 200, 600, 1,000 of GPT-2 124M, warm-up 500.
TEST(Forecast, the_first_growth_is_no_drift) {
  OffsetCourse course;
  ForecastTerms patient{500, harmful_offset(64, 7), "", 0, kForecastSettled * 500}, hasty = patient;
  hasty.settled = 0;
  bool alarmed = false;
  for (int64_t step = 0; step < 6000; step += 25) {
    course.take(step, 1 + 320 / (1 + std::exp((800 - static_cast<double>(step)) / 130)) * jitter(step));
    alarmed |= course.forecast(hasty).outlook == Outlook::drift;
    EXPECT_LT(course.forecast(patient).outlook, Outlook::drift) << step;
  }
  EXPECT_TRUE(alarmed);  // the course is one that needs it
}

TEST(Forecast, nothing_is_said_of_nothing) {
  EXPECT_EQ(OffsetCourse().forecast(terms()).outlook, Outlook::too_short);
  EXPECT_EQ(of_course(kEvery, saturating).outlook, Outlook::too_short);   // one record
  EXPECT_EQ(of_course(kWarmup, saturating).outlook, Outlook::too_short);  // none behind the warm-up
  EXPECT_EQ(of_course(2000, [](int64_t) { return 0.0; }).outlook, Outlook::no_drift);
  const HeadForecast wrong = of_course(2000, [](int64_t s) { return s < 1900 ? 20 : std::nan(""); });
  EXPECT_EQ(wrong.outlook, Outlook::harmful);
  EXPECT_EQ(of_course(2000, [](int64_t) { return std::nan(""); }).outlook, Outlook::harmful);
  // One that was not a number on the way is no reason for an alarm.
  EXPECT_EQ(of_course(2000, [](int64_t s) { return s == 1500 ? std::nan("") : 20.0; }).outlook,
            Outlook::no_drift);
  EXPECT_EQ(forecast(RunRecords{}).of_heads.size(), 0u);
  EXPECT_EQ(in_words(forecast(RunRecords{})), "no forecast: no offsets are recorded");
}

TEST(Forecast, long_records_are_thinned_and_say_the_same) {
  OffsetCourse dense, sparse;
  for (int64_t step = 0; step < 4000; ++step) {
    dense.take(step, growing(step));
    if (step % 25 == 0 || step == 3999) sparse.take(step, growing(step));
  }
  const HeadForecast a = dense.forecast(terms()), b = sparse.forecast(terms());
  EXPECT_EQ(a.outlook, Outlook::drift);
  EXPECT_EQ(b.outlook, Outlook::drift);
  EXPECT_NEAR(a.failure, b.failure, 0.02 * b.failure);
}

TEST(Forecast, where_rounding_harms) {
  EXPECT_NEAR(harmful_offset(64, kBf16.significand_bits), 3547, 1);
  EXPECT_NEAR(harmful_offset(128, kBf16.significand_bits), 3547 * std::sqrt(2), 2);
  EXPECT_EQ(harmful_offset(64, kFp32.significand_bits), harmful_offset(64, kBf16.significand_bits));
  EXPECT_NEAR(harmful_offset(64, 3), 3547.0 / 16, 1);  // e4m3
  // By its definition: features of about one size, each of q and k rounded to BF16, that add up to the harmful score.
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> mantissa(1, 2);
  const Rounding bf16{kBf16};
  double squares = 0;
  constexpr int kTrials = 4000;
  for (int n = 0; n < kTrials; ++n) {
    double score = 0, error = 0;
    for (int d = 0; d < 64; ++d) {
      const auto q = static_cast<float>(mantissa(random)), k = static_cast<float>(mantissa(random));
      score += double{q} * k;
      error += double{round_to(bf16, q)} * round_to(bf16, k) - double{q} * k;
    }
    const double moved = error * harmful_offset(64, 7) / score;
    squares += moved * moved;
  }
  EXPECT_NEAR(std::sqrt(squares / kTrials), 1, 0.1);
}

// A model whose heads have a size of their own: not the width over the heads.
TEST(Forecast, takes_the_head_size_that_the_model_has) {
  const auto harmful = [](const std::string& more) {
    RunRecords run;
    run.config = parse_toml("[model]\nwidth = 256\nheads = 4\n" + more, "config.toml");
    return forecast_terms(run).harmful;
  };
  const int bits = kBf16.significand_bits;
  EXPECT_EQ(harmful(""), harmful_offset(64, bits));
  EXPECT_EQ(harmful("head_size = 0\n"), harmful_offset(64, bits));
  EXPECT_EQ(harmful("head_size = 128\n"), harmful_offset(128, bits));
}

// Healthy runs with keys of one stored bit came to an offset of 51, where rounding alone would move scores by one.
TEST(Forecast, no_format_makes_a_healthy_offset_harmful) {
  RunRecords run;
  run.config = parse_toml("[attention]\nplan = \"nvfp4\"\n[model]\nwidth = 128\nheads = 4\n", "config.toml");
  const ForecastTerms found = forecast_terms(run);
  EXPECT_EQ(found.harmful, kHighestDriftLimit);
  EXPECT_LT(harmful_offset(32, 1), 51);
  EXPECT_NE(found.bound.find("532"), std::string::npos) << found.bound;
}

// --- Runs that have failed

nlohmann::json parsed_curves(const std::filesystem::path& path) {
  std::string text = read_whole_file(path, size_t{1} << 26);
  for (size_t at = text.find("NaN"); at != std::string::npos; at = text.find("NaN", at))  // Python's
    text.replace(at, 3, "null");
  return parse_json(text);
}
double number_of(const nlohmann::json& value) {
  return value.is_number() ? value.get<double>() : std::nan("");
}

// A packed run as it was recorded, as far as that is kept: every step has the mean loss of its group.
std::optional<RunFailure> failure_of(const nlohmann::json& packed, int64_t to = 1 << 30) {
  FailureWatch watch;
  size_t next = 0;
  int64_t step = packed.contains("torch") ? 1 : 0;
  for (size_t group = 0; group < packed["steps"].size(); ++group)
    for (; step <= packed["steps"][group].get<int64_t>() && step < to; ++step) {
      for (; next < packed["fact_steps"].size() && packed["fact_steps"][next].get<int64_t>() <= step;
           ++next) {
        std::vector<double> of_layers;
        for (const auto& offset : packed["offset"][next]) of_layers.push_back(number_of(offset));
        watch.see_offsets(packed["fact_steps"][next].get<int64_t>(), of_layers);
      }
      watch.see_loss(step, number_of(packed["loss"][group]));
    }
  return watch.failure();
}

// Against the study's own definition, which compares with a healthy twin.
TEST(Failure, of_recorded_runs) {
  const std::filesystem::path docs = std::filesystem::path(EVENKEEL_SOURCE_DIR) / "docs";
  std::map<std::string, nlohmann::json> runs;
  for (const auto& file : std::filesystem::directory_iterator(docs / "curves")) {
    const nlohmann::json curves = parsed_curves(file.path());
    for (const auto& [name, packed] : curves.items()) runs[name] = packed;
  }
  const nlohmann::json judged = parsed_curves(docs / "forecast.json");
  std::vector<double> late;  // of the failures that show: by the run's own records over by its twin
  for (const auto& [name, life] : judged["failing"].items()) {
    const int64_t truth = life["failure"];
    const auto found = failure_of(runs.at(name));
    if (!found) continue;
    late.push_back(static_cast<double>(found->since) / static_cast<double>(truth));
    // The study judges by whole windows, so its step is the end of one.
    const int64_t before = std::min<int64_t>(truth * 9 / 10, truth - static_cast<int64_t>(kFailureWindow));
    EXPECT_FALSE(failure_of(runs.at(name), before)) << name << ": failed before step " << before;
  }
  std::ranges::sort(late);
  EXPECT_GE(4 * late.size(), 3 * judged["failing"].size()) << late.size();
  EXPECT_NEAR(late[late.size() / 2], 1, 0.1);
  size_t others = 0;
  for (const auto& [name, run] : judged["others"].items()) {  // healthy, or drift without a failure
    // One explodes: its gradient's norm is not finite at its end. That is no health, and no drift that the study judges.
    if (!std::isfinite(number_of(runs.at(name)["gradient_norm"].back()))) continue;
    ++others;
    // Behind the last whole window the study judges nothing: one run drifts and its loss rises only there.
    const int64_t window = kFailureWindow, judged_until = run["steps"].get<int64_t>() / window * window;
    EXPECT_FALSE(failure_of(runs.at(name), judged_until)) << name;
  }
  EXPECT_GT(others, 100u);
}

// Losses of 4 that fall by a hundredth in a thousand steps, and then what is planted.
struct Planted {
  std::function<double(int64_t)> loss, offset;
  std::optional<RunFailure> found(int64_t steps) const {
    FailureWatch watch;
    for (int64_t step = 0; step < steps; ++step) {
      if (step % kEvery == 0) watch.see_offsets(step, std::vector<double>{20, 30, 25, offset(step)});
      watch.see_loss(step, loss(step) * (1 + 0.5 * (jitter(step) - 1)));
    }
    return watch.failure();
  }
};
double falling(int64_t step) { return 4 - 1e-5 * static_cast<double>(step); }

TEST(Failure, is_drift_and_a_loss_that_rose) {
  const auto drifting = [](int64_t s) { return s < 1000 ? 30.0 : 5000.0; };
  const auto level = [](int64_t) { return 30.0; };
  const auto risen = [](int64_t s) { return falling(s) * (s < 2000 ? 1 : 1.2); };
  EXPECT_FALSE((Planted{falling, drifting}.found(4000)));
  EXPECT_FALSE((Planted{risen, level}.found(4000))) << "a loss that rises without drift has another cause";
  const auto found = Planted{risen, drifting}.found(4000);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kind, RunFailure::Kind::loss_rose);
  EXPECT_GT(found->since, 2000);
  EXPECT_LT(found->since, 2000 + 200);
  EXPECT_TRUE(found->lasts);
  EXPECT_NEAR(found->excess, 0.2, 0.01);
  EXPECT_NE(in_words(*found).find("has failed since about step 20"), std::string::npos) << in_words(*found);
  // By less than 5 %; for less than fifty steps; from the first step on, when there is nothing to compare with.
  EXPECT_FALSE((Planted{[](int64_t s) { return falling(s) * (s < 2000 ? 1 : 1.04); }, drifting}.found(4000)));
  EXPECT_FALSE(
      (Planted{[](int64_t s) { return falling(s) * (s / 40 == 50 ? 1.2 : 1); }, drifting}.found(4000)));
  EXPECT_FALSE((Planted{risen, drifting}.found(kFailureWindow / 2)));
  // It comes back half way, and wholly.
  const auto back = [&](double to) {
    return Planted{[=](int64_t s) { return falling(s) * (s < 2000   ? 1
                                                         : s < 3000 ? 1.2
                                                                    : to); }, drifting}
        .found(4000);
  };
  ASSERT_TRUE(back(1.02));
  EXPECT_FALSE(back(1.02)->lasts);
  EXPECT_EQ(back(1.02)->since, found->since);
  EXPECT_FALSE(back(0.9));
}

// Anyone's objective may be below zero, or zero.
TEST(Failure, of_losses_below_zero) {
  const auto drifting = [](int64_t s) { return s < 1000 ? 30.0 : 5000.0; };
  const auto below = [](int64_t s) { return -falling(8000 - s); };  // falls from -3.92 on
  EXPECT_FALSE((Planted{below, drifting}.found(4000)));
  const auto found =
      Planted{[&](int64_t s) { return below(s) + (s < 2000 ? 0 : 0.8); }, drifting}.found(4000);
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->lasts);
  EXPECT_NEAR(found->excess, 0.2, 0.02);
  EXPECT_FALSE((Planted{[](int64_t) { return 0.0; }, drifting}.found(4000)));
}

TEST(Failure, beside_a_twin_that_ends) {
  const auto found = [](int64_t twin_ends, double rises_to) {
    FailureWatch watch;
    for (int64_t step = 0; step < 3000; ++step) {
      const double healthy = 4 - 0.001 * static_cast<double>(std::min<int64_t>(step, 2000));
      if (step % kEvery == 0)
        watch.see_offsets(step, std::vector<double>{20, 30, step < 1000 ? 30.0 : 5000.0});
      watch.see_loss(step, step < 2200 ? healthy : rises_to, step < twin_ends ? healthy : std::nan(""));
    }
    return watch.failure();
  };
  // Behind its end the run's own best counts where that is lower: an early end must not hide a failure.
  for (const int64_t ends : {0, 100, 300, 2100, 3000}) {
    ASSERT_TRUE(found(ends, 3.0)) << ends;
    EXPECT_NEAR(static_cast<double>(found(ends, 3.0)->since), 2220, 20) << ends;
    EXPECT_FALSE(found(ends, 2.0)) << ends;
  }
}

TEST(Failure, of_what_is_not_a_number) {
  const auto level = [](int64_t) { return 30.0; };
  const auto since = [](double bad, int64_t from, int64_t to = 1 << 30) {
    return [=](int64_t s) { return s >= from && s < to ? bad : 30.0; };
  };
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    const auto loss = Planted{since(bad, 50), level}.found(60);
    ASSERT_TRUE(loss);
    EXPECT_EQ(loss->kind, RunFailure::Kind::loss_not_finite);
    EXPECT_EQ(loss->since, 50);
    const auto offset = Planted{falling, since(bad, 50)}.found(60);
    ASSERT_TRUE(offset);
    EXPECT_EQ(offset->kind, RunFailure::Kind::offset_not_finite);
    EXPECT_EQ(offset->since, 50);
    // A step that was left out is no failure.
    EXPECT_FALSE((Planted{since(bad, 50, 51), level}.found(60)));
    EXPECT_FALSE((Planted{falling, since(bad, 20, 21)}.found(60)));
  }
  EXPECT_TRUE((Planted{since(1e308, 1000), since(5000, 900)}.found(2000)));  // their sum is infinite
  EXPECT_FALSE((Planted{falling, level}.found(1)));
  EXPECT_FALSE(FailureWatch().failure());
  EXPECT_FALSE(find_failure(RunRecords{}));
  RunRecords ended;
  ended.finding = Finding{70, "divergence", "the loss has doubled"};
  const RunForecast found = forecast(ended);
  EXPECT_TRUE(found.fails());
  EXPECT_EQ(in_words(found), "the run has failed since step 70: the loss has doubled");
}

class ForecastCommand : public testing::Test {
 protected:
  ForecastCommand()
      : folder_(std::filesystem::temp_directory_path() / fmt::format("evenkeel-forecast-{}", getpid())) {
    std::filesystem::create_directories(folder_);
  }
  ~ForecastCommand() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& text) { write_whole_file(folder_ / "metrics.jsonl", text); }
  static std::string lines(
      int64_t steps, const std::function<double(int64_t)>& offset,
      const std::function<std::string(int64_t)>& loss = [](int64_t) { return "2.0"; }) {
    std::string text;
    for (int64_t step = 0; step < steps; step += kEvery)
      text += fmt::format("{{\"step\":{},\"loss\":{},\"offset\":[[20.0,30.0],[{},25.0]]}}\n", step,
                          loss(step), offset(step) * jitter(step));
    return text;
  }
  Output run(const std::string& options = "") {
    return run_shell(fmt::format("{} forecast {} {} 2>&1", EVENKEEL_PROGRAM, folder_.string(), options));
  }
  std::filesystem::path folder_;
};

TEST_F(ForecastCommand, says_which_head_and_when) {
  write(lines(3500, growing) + "{\"step\": 3500, \"offs");  // killed while it wrote
  const Output found = run();
  EXPECT_EQ(found.code, 1) << found.out;
  EXPECT_NE(found.out.find("layer 1 head 0"), std::string::npos) << found.out;
  EXPECT_NE(found.out.find("failure near step"), std::string::npos) << found.out;
  const auto json = parse_json(run("--json").out);
  ASSERT_EQ(json.size(), 1u);
  EXPECT_TRUE(json[0]["fails"]);
  EXPECT_EQ(json[0]["at_risk"], nlohmann::json({{1, 0}}));
  EXPECT_EQ(json[0]["heads"][0]["outlook"], "no_drift");
  EXPECT_EQ(json[0]["heads"].size(), 4u);
}

TEST_F(ForecastCommand, a_run_that_has_failed_gets_no_date) {
  write(lines(9000, growing, [](int64_t s) { return s < 5400 ? "2.0" : "2.6"; }));
  const Output found = run("--all");
  EXPECT_EQ(found.code, 1) << found.out;
  EXPECT_NE(found.out.find("has failed since about step 5"), std::string::npos) << found.out;
  EXPECT_NE(found.out.find("layer 1 head 0, offset"), std::string::npos) << found.out;
  EXPECT_EQ(found.out.find("failure near step"), std::string::npos) << found.out;
  EXPECT_EQ(found.out.find("next: "), std::string::npos) << "verdict needs a config.toml: " << found.out;
  write_whole_file(folder_ / "config.toml", "[model]\nlayers = 2\nheads = 2\n");
  EXPECT_NE(run().out.find("next: evenkeel verdict "), std::string::npos) << run().out;
  EXPECT_EQ(parse_json(run("--json").out)[0]["next"], "evenkeel verdict " + folder_.string());
  std::filesystem::remove(folder_ / "config.toml");
  const auto json = parse_json(run("--json").out)[0];
  EXPECT_TRUE(json["next"].is_null()) << json["next"];
  EXPECT_TRUE(json["fails"]);
  EXPECT_EQ(json["failed"]["kind"], "loss_rose");
  EXPECT_TRUE(json["failed"]["lasts"]);
  EXPECT_EQ(json["at_risk"], nlohmann::json({{1, 0}}));
  for (const auto& head : json["heads"]) EXPECT_TRUE(head["failure"].is_null()) << head.dump();
  // NaN losses, though no head drifts; and without any offsets.
  write(lines(3500, saturating, [](int64_t s) { return s < 3000 ? "2.0" : "\"NaN\""; }));
  const Output not_finite = run();
  EXPECT_EQ(not_finite.code, 1) << not_finite.out;
  EXPECT_NE(not_finite.out.find(fmt::format("has failed since step 3000: its loss is not finite; no head "
                                            "drifted by step {}, the last with offsets",
                                            3000 - kEvery)),
            std::string::npos)
      << not_finite.out;
  // Offsets that end long before say so; a single one says nothing.
  const auto offsets_until = [&](int64_t end) {
    std::string text;
    for (int64_t step = 0; step < 3500; step += kEvery)
      text += fmt::format("{{\"step\":{},\"loss\":{}{}}}\n", step, step < 3000 ? "2.0" : "\"NaN\"",
                          step < end ? ",\"offset\":[[20,20],[20,20]]" : "");
    write(text);
    return run().out;
  };
  EXPECT_NE(offsets_until(1000).find(fmt::format("no head drifted by step {},", 1000 - kEvery)),
            std::string::npos)
      << run().out;
  EXPECT_NE(offsets_until(1).find("not finite; too few offsets are recorded to say"), std::string::npos)
      << run().out;
  // Behind a NaN every offset is one: the heads are judged by what came before.
  const auto nan_behind = [&](const std::function<double(int64_t)>& offset) {
    std::string text = lines(4000, offset);
    for (int64_t step = 4000; step < 4100; step += kEvery)
      text += fmt::format(
          "{{\"step\":{},\"loss\":\"NaN\",\"offset\":[[\"NaN\",\"NaN\"],[\"NaN\",\"NaN\"]]}}\n", step);
    write(text);
    return run("--all").out;
  };
  EXPECT_NE(
      nan_behind(saturating).find("has failed since step 4000: its loss is not finite; no head drifted"),
      std::string::npos)
      << run().out;
  EXPECT_NE(nan_behind(growing).find("not finite; layer 1 head 0, offset "), std::string::npos) << run().out;
  EXPECT_EQ(run("--all").out.find("offset inf"), std::string::npos) << run().out;
  // The usual course: the loss rises, then everything is NaN; the offsets one record before the loss.
  std::string text = lines(6500, growing, [](int64_t s) { return s < 3000 ? "2.0" : "2.6"; });
  for (int64_t step = 6500; step < 6700; step += kEvery)
    text += fmt::format("{{\"step\":{},\"loss\":{},\"offset\":[[\"NaN\",\"NaN\"],[\"NaN\",\"NaN\"]]}}\n",
                        step, step == 6500 ? "2.6" : "\"NaN\"");
  write(text);
  const Output risen = run("--all");
  EXPECT_NE(
      risen.out.find("% above its best, and no loss is finite since step 6510; layer 1 head 0, offset "),
      std::string::npos)
      << risen.out;
  EXPECT_EQ(risen.out.find("offset inf"), std::string::npos) << risen.out;
  EXPECT_EQ(parse_json(run("--json").out)[0]["at_risk"], nlohmann::json({{1, 0}}));
  write("{\"step\":0,\"loss\":2.0}\n{\"step\":1,\"loss\":\"NaN\"}\n");
  EXPECT_EQ(run().code, 1);
  EXPECT_NE(run().out.find("has failed since step 1"), std::string::npos) << run().out;
}

TEST_F(ForecastCommand, is_quiet_on_health) {
  write(lines(3500, saturating));
  const Output found = run();
  EXPECT_EQ(found.code, 0) << found.out;
  EXPECT_NE(found.out.find("no failure in sight at step 3491"), std::string::npos) << found.out;
}

TEST_F(ForecastCommand, a_changed_plan_begins_anew) {
  write(lines(3500, growing));
  write_whole_file(folder_ / "config.toml",
                   "[attention]\nplan = \"flash2\"\nchanges = [{ step = 3400, plan = "
                   "\"stabiliser=zero_sum\" }]\n");
  const Output found = run();
  EXPECT_EQ(found.code, 0) << found.out;
  EXPECT_NE(found.out.find("too few records"), std::string::npos) << found.out;
}

TEST_F(ForecastCommand, refuses_what_has_no_records) {
  EXPECT_EQ(run().code, 3);  // an empty folder
  write("");
  EXPECT_EQ(run().code, 3);
  write("{\"step\":0,\"loss\":2.0}\n");
  const Output none = run();
  EXPECT_EQ(none.code, 3);
  EXPECT_NE(none.out.find("expected recorded offsets"), std::string::npos) << none.out;
  write(lines(kEvery, saturating));  // one record
  EXPECT_EQ(run().code, 0);
  write("\0\1garbage\n[1,2]\n{}\n");
  EXPECT_EQ(run().code, 3);
  EXPECT_EQ(run_shell(EVENKEEL_PROGRAM " forecast /nowhere/run 2>&1").code, 3);
  EXPECT_EQ(run_shell(EVENKEEL_PROGRAM " forecast 2>&1").code, 2);
}

}  // namespace
}  // namespace evenkeel
