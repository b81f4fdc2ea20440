// What verdict and its companions say of records alone: damaged ones, empty ones, numbers beyond all bounds; and the line to
// type next.
#include "diagnosis/verdict.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "base/json_text.h"
#include "base/whole_file.h"
#include "diagnosis/health.h"
#include "report/page.h"
#include "run_folder.h"
#include "run_program.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class VerdictTest : public RunFolderTest {
 protected:
  void SetUp() override {
    RunFolderTest::SetUp();
    run_ = folder / "a";
    fs::create_directories(run_);
    write("config.toml", to_toml(to_toml_table(tiny())));
  }
  void write(const char* name, const std::string& text) const { write_whole_file(run_ / name, text); }
  Output told(const std::string& command) const {
    return run_shell(fmt::format("{} {} {} 2>&1", EVENKEEL_PROGRAM, command, run_.string()));
  }
  // A verdict's last line but for what was replayed.
  static std::string next_of(const std::string& text) {
    const size_t at = text.find("\nnext: ");
    if (at == std::string::npos) return "";
    return text.substr(at + 7, text.find('\n', at + 7) - at - 7);
  }
  fs::path run_;
};

TEST_F(VerdictTest, nothing_that_could_be_judged_is_not_health) {
  for (const char* line : {"{\"step\":5}\n", "{\"step\":5,\"loss\":\"x\"}\n"}) {
    write("metrics.jsonl", line);
    fs::remove(run_ / "verdict.json");
    const std::string shown = page(std::vector<fs::path>{run_});
    EXPECT_FALSE(has(shown, "Healthy")) << line;
    EXPECT_FALSE(has(shown, ">healthy<")) << line;
    const Output found = told("verdict");
    EXPECT_EQ(found.code, 1) << found.out;
    EXPECT_TRUE(has(found.out, "verdict: not_established")) << found.out;
    EXPECT_FALSE(has(found.out, "ealthy")) << found.out;
    EXPECT_TRUE(has(next_of(found.out), "--facts-every 10")) << found.out;
  }
  EXPECT_TRUE(has(told("verdict").out, "1 field that should be a number")) << told("verdict").out;
}

TEST_F(VerdictTest, damage_is_said_beside_the_verdict) {
  write("metrics.jsonl", "{\"step\":0,\"loss\":2.5}\ngarbage\n{\"loss\":2}\n[1]\n{\"step\":1,\"lo");
  const Output found = told("verdict");
  EXPECT_TRUE(has(found.out, "2 of 4 lines cannot be read")) << found.out;
  EXPECT_TRUE(has(found.out, "1 line has no step")) << found.out;
  EXPECT_TRUE(has(found.out, "ends in the middle of a line")) << found.out;
  EXPECT_TRUE(has(found.out, "not all of the records could be read")) << found.out;
}

TEST_F(VerdictTest, records_of_which_nothing_can_be_read_are_an_error_of_every_diagnosis) {
  // Another run beside it, by which a forecast would be made.
  const fs::path other = folder / "other", run = folder / "run";
  for (const fs::path& one : {other, run}) {
    fs::create_directories(one);
    write_whole_file(one / "config.toml", to_toml(to_toml_table(tiny())));
  }
  std::string lines;
  for (int step = 0; step < 50; ++step)
    lines += fmt::format("{{\"step\": {}, \"loss\": 2.5, \"offset\": [[20, 18]]}}\n", step);
  write_whole_file(other / "metrics.jsonl", lines);
  const fs::path metrics = run / "metrics.jsonl", html = folder / "page.html";
  for (const char* kind : {"garbage", "empty", "pipe"}) {
    fs::remove(metrics);
    if (kind == std::string("pipe"))
      ASSERT_EQ(::mkfifo(metrics.c_str(), 0600), 0);
    else
      write_whole_file(metrics, kind == std::string("empty") ? "" : "\1garbage\n[1,2]\n");
    for (const std::string command : {"forecast", "verdict", "report"}) {
      const Output found = run_shell(fmt::format("{} {} {} {} 2>&1", EVENKEEL_PROGRAM, command, run.string(),
                                                 command == "report" ? "-o " + html.string() : ""));
      EXPECT_EQ(found.code, 3) << command << " of " << kind << ": " << found.out;
      EXPECT_TRUE(has(found.out, kind == std::string("pipe") ? "found a pipe" : "no record could be read"))
          << command << " of " << kind << ": " << found.out;
    }
    EXPECT_FALSE(fs::exists(html));
  }
  // Beside a run that can be read, the page says what it lacks.
  const Output both = run_shell(fmt::format("{} report {} {} -o {} 2>&1", EVENKEEL_PROGRAM, run.string(),
                                            other.string(), html.string()));
  EXPECT_EQ(both.code, 0) << both.out;
}

// sqrt(worst x limit) overflows from 2.7e306 on: no head had gone as far, and the record behind the last was read.
TEST(Symptom, of_offsets_beyond_all_bounds_is_the_head_that_has_them) {
  RunRecord record;
  record.layers = 1, record.heads = 2, record.offset_is = "offset";
  for (int64_t step = 0; step < 400; ++step) {
    record.loss.push_back(2.5);
    record.fact_steps.push_back(step);
    record.offset.push_back(step < 301 ? std::vector<double>{1, 1} : std::vector<double>{1e308, 1});
  }
  const Symptom found = find_symptom(record);
  EXPECT_EQ(found.kind, Symptom::Kind::offset);
  EXPECT_EQ(found.since, 301);
  EXPECT_EQ(found.head, 0);
  EXPECT_TRUE(has(found.words, "1e+308 at step 399")) << found.words;
  EXPECT_LT(found.words.size(), 250u) << found.words;
  for (std::vector<double>& row : record.offset) row = {row[1], NAN};  // a head that is not a number
  const Symptom other = find_symptom(record);
  EXPECT_EQ(other.kind, Symptom::Kind::offset);
  EXPECT_EQ(other.head, 1);
}

// --- The line to type next

Trial trial_of_offset(double offset, const std::string& clauses) {
  Trial t;
  t.setup.clauses = clauses;
  t.health.head_offset = {offset, 30};
  t.health.offset = std::max(offset, 30.0);
  t.health.residual_share = t.health.residual_bias = {0, 0};
  return t;
}

// Where several remedies heal, the page names the one that the next command has.
TEST_F(VerdictTest, the_remedy_of_the_page_is_that_of_the_next_command) {
  const Trial recorded = trial_of_offset(12420, ""), control = trial_of_offset(40, "");
  const std::vector<std::pair<VerdictPart, const Trial* VerdictTrials::*>> remedies = {
      {VerdictPart::zero_sum, &VerdictTrials::zero_sum},
      {VerdictPart::zero_sum_all, &VerdictTrials::zero_sum_all},
      {VerdictPart::wide_output, &VerdictTrials::wide_output},
      {VerdictPart::consistent, &VerdictTrials::consistent}};
  for (unsigned healing = 1; healing < 16; ++healing) {
    Evidence e;
    e.symptom.kind = Symptom::Kind::offset;
    e.symptom.layer = e.symptom.head = e.symptom.index = 0;
    e.recorded = e.placebo = e.alone_guilty = &recorded;
    e.control = e.control_placebo = e.cured = &control;
    e.measure = Evidence::Measure::offset;
    e.limit = {81, 10, true};
    e.guilty = {0}, e.sites = {Site::row_sum};
    std::vector<Trial> trials;
    trials.reserve(remedies.size());
    Json parts = Json::array();
    for (size_t n = 0; n < remedies.size(); ++n) {
      const bool heals = (healing >> n & 1) != 0;
      trials.push_back(
          trial_of_offset(heals ? 42 : 9000, fmt::format("clause-{}", row_of(remedies[n].first).label)));
      e.*remedies[n].second = &trials.back();
      parts.push_back(
          {{"part", name(remedies[n].first)}, {"offset", trials.back().health.offset}, {"heals", heals}});
    }
    RunConfig config = tiny();
    const std::string command = judge(e, "run", config).next_command;
    write("verdict.json", Json{{"cause", "drift"}, {"words", "Drift."}, {"parts", parts}}.dump());
    const std::string html = page(std::vector<fs::path>{run_});
    const std::string before = "<span class=\"link\">remedy</span><span class=\"value\">";
    const size_t at = html.find(before) + before.size();
    const std::string shown = html.substr(at, html.find('<', at) - at);
    EXPECT_TRUE(has(command, "clause-" + shown + "'")) << shown << "\n" << command;
  }
}

TEST_F(VerdictTest, a_run_that_ends_in_its_warm_up_is_not_healthy) {
  RunConfig config = tiny();
  config.schedule.warmup = 20;
  write("config.toml", to_toml(to_toml_table(config)));
  const auto write_steps = [&](int steps) {
    std::string text;
    for (int step = 0; step < steps; ++step)
      text += fmt::format("{{\"step\": {}, \"loss\": 2.5, \"offset\": [[20, 18]]}}\n", step);
    write("metrics.jsonl", text);
    fs::remove(run_ / "verdict.json");
  };
  write_steps(20);
  const std::string short_page = page(std::vector<fs::path>{run_});
  EXPECT_TRUE(has(short_page, ">not established<"));
  EXPECT_TRUE(has(short_page,
                  "the run is too short: its records end at step 19, and its warm-up of 20 steps does not"));
  EXPECT_FALSE(has(short_page, ">healthy<") || has(short_page, "Healthy,") || has(short_page, "nan"));
  EXPECT_TRUE(has(told("forecast").out, "too few records behind step 20")) << told("forecast").out;
  const Output found = told("verdict");
  EXPECT_EQ(found.code, 1) << found.out;
  EXPECT_TRUE(has(found.out, "verdict: not_established") && has(found.out, "the run is too short"))
      << found.out;
  write_steps(21);
  EXPECT_EQ(told("verdict").code, 0) << told("verdict").out;
  EXPECT_TRUE(has(page(std::vector<fs::path>{run_}), ">healthy<"));
}

TEST_F(VerdictTest, a_healthy_one_ends_with_a_command_that_runs) {
  const auto write_steps = [&](int steps, const char* offset) {
    std::string text;
    for (int step = 0; step < steps; ++step)
      text += fmt::format("{{\"step\": {}, \"loss\": 2.5{}}}\n", step, offset);
    write("metrics.jsonl", text);
  };
  const auto as_typed = [&](const std::string& command) {
    return fmt::format("cd {} && {} {} 2>&1", folder.string(), EVENKEEL_PROGRAM, command.substr(9));
  };
  write_steps(30, "");
  const std::string with_facts = next_of(told("verdict").out);
  EXPECT_EQ(
      with_facts,
      fmt::format("evenkeel train --config {0}/config.toml --facts-every 10 --out {0}-again", run_.string()));
  const Output trained = run_shell(as_typed(with_facts));
  EXPECT_EQ(trained.code, 0) << trained.out;
  fs::remove_all(run_.string() + "-again");
  write_steps(30, ", \"offset\": [[20, 18]]");
  const std::string forecast = next_of(told("verdict").out);
  EXPECT_EQ(forecast, "evenkeel forecast " + run_.string());
  const Output expected = run_shell(as_typed(forecast));
  EXPECT_EQ(expected.code, 0) << expected.out;
  // And the forecast of a run without a failure in sight: the page where it is over, the live view where it goes on.
  EXPECT_TRUE(has(expected.out, "next: evenkeel report " + run_.string())) << expected.out;
  write_steps(5, ", \"offset\": [[20, 18]]");
  EXPECT_TRUE(has(told("forecast").out, "next: evenkeel watch " + run_.string())) << told("forecast").out;
  const Output json = run_shell(fmt::format("{} forecast --json {}", EVENKEEL_PROGRAM, run_.string()));
  EXPECT_TRUE(has(json.out, "\"next\": \"evenkeel watch " + run_.string() + "\"")) << json.out;
}

// --- One definition of health

TEST_F(VerdictTest, what_drift_is_comes_from_the_numbers_that_define_it) {
  // The same words wherever it is defined; pages have marks around their numbers.
  const std::string words =
      fmt::format("stays above {:.0f} times its healthy level and doubles", kDriftTimes);
  EXPECT_TRUE(has(drift_in_words(), words)) << drift_in_words();
  for (const char* file :
       {"README.md", "docs/study.md", "docs/my_run_blew_up.md", "scripts/study_curves.py"}) {
    const std::string text = read_whole_file(fs::path(EVENKEEL_SOURCE_DIR) / file, 1 << 20);
    EXPECT_TRUE(has(std::regex_replace(text, std::regex("<!--[^>]*-->"), ""), words)) << file;
  }
  write("metrics.jsonl", "{\"step\": 0, \"loss\": 2.5, \"offset\": [[20, 18]]}\n");
  EXPECT_TRUE(has(page(std::vector<fs::path>{run_}), drift_in_words()));
}

}  // namespace
}  // namespace evenkeel
