// The records of a run: what is written is read, under new names and old ones, and reaches the page.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/whole_file.h"
#include "diagnosis/guard.h"
#include "diagnosis/indicators.h"
#include "diagnosis/isolate.h"
#include "records/run_records.h"
#include "records/verdict_parts.h"
#include "report/html.h"
#include "report/page.h"
#include "run_folder.h"
#include "run_program.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(),
                 kInfinity = std::numeric_limits<double>::infinity();

class RecordsTest : public RunFolderTest {
 protected:
  void write(const char* file, std::string_view text) const { write_whole_file(folder / file, text); }
};

// Equal, with NaN equal to itself.
void expect_same(std::span<const double> a, std::span<const double> b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t n = 0; n < a.size(); ++n)
    EXPECT_TRUE(a[n] == b[n] || (std::isnan(a[n]) && std::isnan(b[n])))
        << what << ": " << a[n] << ", " << b[n];
}

// --- the table

// Python reads records without the library: its copy of the older names is this table's.
TEST(Schema, has_the_aliases_that_python_reads) {
  const std::string source =
      read_whole_file(fs::path(EVENKEEL_SOURCE_DIR) / "python/evenkeel/_records.py", 1 << 20);
  const std::string begin = "ALIASES = ";
  const size_t at = source.find(begin) + begin.size(), end = source.find("}}", at) + 2;
  Json expected = {{"", Json::object()}, {"probe", Json::object()}};
  for (const RecordField& field : kRecordFields)
    if (field.file == RecordFile::metrics && !field.aliases.empty())
      expected[std::string(field.inside)][std::string(field.aliases)] = field.name;
  EXPECT_EQ(Json::parse(source.substr(at, end - at), nullptr, /*allow_exceptions=*/false), expected);
}

TEST(Schema, names_each_field_once_and_says_what_it_is) {
  std::set<std::string> seen;
  for (const RecordField& field : kRecordFields) {
    const std::string where = fmt::format("{}: {}.", name(field.file), field.inside);
    EXPECT_FALSE(field.name.empty() || field.meaning.empty()) << where << field.name;
    EXPECT_TRUE(seen.insert(where + std::string(field.name)).second) << where << field.name;
    for (const std::string_view alias : {field.aliases})
      if (!alias.empty()) EXPECT_TRUE(seen.insert(where + std::string(alias)).second) << where << alias;
    EXPECT_EQ(find_field(field.file, field.inside, field.name), &field);
    if (!field.inside.empty())
      EXPECT_TRUE(std::any_of(kRecordFields.begin(), kRecordFields.end(), [&](const RecordField& f) {
        return f.file == field.file && f.name == field.inside;
      })) << where;
  }
  EXPECT_EQ(find_field(RecordFile::metrics, "", "residual_rms"),
            find_field(RecordFile::metrics, "", "leak_rms"));
  EXPECT_EQ(find_field(RecordFile::metrics, "", "nonsense"), nullptr);
}

TEST(Schema, has_the_probes_and_no_others) {
  std::vector<std::string_view> of_table, of_probes;
  for (const RecordField& field : kRecordFields)
    if (field.file == RecordFile::metrics && field.inside == "probe" && field.shape == FieldShape::per_head)
      of_table.push_back(field.name);
  for (const ProbeField& field : kProbeFields) of_probes.push_back(field.name);
  EXPECT_EQ(of_table, of_probes);
}

// The names that Python's Monitor writes beside the step, from its source.
TEST(Schema, has_the_facts_of_pythons_monitor) {
  const std::string text =
      read_whole_file(fs::path(EVENKEEL_SOURCE_DIR) / "python/evenkeel/_watch.py", 1 << 20);
  const size_t begin = text.find("\nFACTS = (");
  ASSERT_NE(begin, std::string::npos);
  const std::string list = text.substr(begin, text.find(')', begin) - begin);
  std::vector<std::string> names;
  for (size_t quote = list.find('"'); quote != std::string::npos;) {
    const size_t end = list.find('"', quote + 1);
    names.push_back(list.substr(quote + 1, end - quote - 1));
    quote = list.find('"', end + 1);
  }
  EXPECT_EQ(names, std::vector<std::string>(kHeadFactNames.begin(), kHeadFactNames.end()));
}

// --- metrics.jsonl

// Every field of a step, with numbers that JSON has no word for.
Json whole_line(int64_t step) {
  Json line = {{"step", step}};
  const double x = static_cast<double>(step);
  add_number(line, "loss", step == 2 ? kNan : 3 - 0.1 * x);
  add_number(line, "gradient_norm", step == 3 ? kInfinity : 1.5);
  add_number(line, "validation_loss", 4);
  for (size_t n = 0; n < kHeadFactCount; ++n) {
    const double y = x + 10 * static_cast<double>(n);
    add_fact(line, static_cast<HeadFact>(n), 1, 2, {y, step == 1 ? -kInfinity : step == 2 ? kNan : y + 0.5});
  }
  Json& probe = line["probe"] = {{"step", step}, {"loss", 1.0}, {"norms", {{"h.0.w", x}}}};
  for (const ProbeField& field : kProbeFields) probe[std::string(field.name)] = heads_json(1, 2, {x, x + 1});
  return line;
}

TEST_F(RecordsTest, what_is_written_is_read) {
  {
    MetricsWriter writer(folder);
    for (int64_t step = 0; step < 4; ++step) {
      EXPECT_EQ(unknown_names(whole_line(step), RecordFile::metrics), std::vector<std::string>());
      writer.write(whole_line(step));
    }
  }
  const Metrics metrics = read_metrics(folder);
  EXPECT_EQ(metrics.steps, (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(metrics.layers * 10 + metrics.heads, 12);
  EXPECT_EQ(metrics.misshapen + metrics.without_step + metrics.went_back, 0);
  expect_same(metrics.loss.values, std::vector<double>{3, 2.9, kNan, 2.7}, "loss");
  expect_same(metrics.gradient_norm.values, std::vector<double>{1.5, 1.5, 1.5, kInfinity}, "gradient_norm");
  expect_same(metrics.validation_loss.values, std::vector<double>{4, 4, 4, 4}, "validation_loss");
  for (size_t n = 0; n < kHeadFactCount; ++n) {
    const double y = 10 * static_cast<double>(n);
    expect_same(metrics.facts[n].values,
                std::vector<double>{y, y + 0.5, y + 1, -kInfinity, y + 2, kNan, y + 3, y + 3.5},
                std::string(kHeadFactNames[n]));
  }
  for (const ProbeField& field : kProbeFields) {
    ASSERT_TRUE(metrics.probes.contains(field.name)) << field.name;
    expect_same(metrics.probes.find(field.name)->second.values, std::vector<double>{0, 1, 1, 2, 2, 3, 3, 4},
                std::string(field.name));
  }
  expect_same(metrics.norms.at("h.0.w").values, std::vector<double>{0, 1, 2, 3}, "norms");
  EXPECT_EQ(metrics.ends.back(), fs::file_size(folder / "metrics.jsonl"));
}

// The same file under the names of the first version.
TEST_F(RecordsTest, old_names_are_read) {
  static const std::map<std::string, std::string> kOld = {
      {"offset", "largest_row_mean"}, {"leak_mean", "residual_mean"}, {"leak_error", "residual_error"},
      {"leak_rms", "residual_rms"},   {"leak_z", "residual_z"},       {"leak_size", "residual_share"}};
  std::string now, then;
  const auto renamed = [](const Json& object) {
    Json old = Json::object();
    for (const auto& [key, value] : object.items()) old[kOld.contains(key) ? kOld.at(key) : key] = value;
    return old;
  };
  for (int64_t step = 0; step < 4; ++step) {
    Json line = json_with_words(whole_line(step));
    now += line.dump() + "\n";
    line["probe"] = renamed(line["probe"]);
    then += renamed(line).dump() + "\n";
  }
  for (const auto& [name, old] : kOld) EXPECT_NE(then.find(old), std::string::npos) << name;
  EXPECT_EQ(now.find("residual"), std::string::npos);
  const Metrics a = parse_metrics(now), b = parse_metrics(then);
  for (size_t n = 0; n < kHeadFactCount; ++n)
    expect_same(a.facts[n].values, b.facts[n].values, std::string(kHeadFactNames[n]));
  ASSERT_EQ(a.probes.size(), b.probes.size());
  for (const auto& [probe, series] : a.probes) expect_same(series.values, b.probes.at(probe).values, probe);
}

// Trials that an older program kept are not made again.
TEST_F(RecordsTest, old_trials_are_read) {
  RunConfig config = tiny();
  write("config.toml", to_toml(to_toml_table(config)));
  config.schedule.steps = 0;  // a run that was given more steps has the same past
  const Json trial = {{"what", "as recorded"},
                      {"clauses", ""},
                      {"lr_factor", 1},
                      {"begin", 0},
                      {"end", 8},
                      {"seconds", 1.5},
                      {"offset", "Infinity"},
                      {"lse", 3},
                      {"loss", "NaN"},
                      {"gradient_norm", 1},
                      {"head_offset", {4, 5}},
                      {"residual_share", {0.25, 0.5}},
                      {"residual_bias", {0, 0.1}},
                      {"step_loss", {3, "NaN"}}};
  write("isolate.json",
        Json{{"schema", 1}, {"config", to_toml(to_toml_table(config))}, {"trials", {trial}}}.dump());
  Replays::Options options;
  options.keep = true;
  const Replays replays(folder, options);
  ASSERT_EQ(replays.trials().size(), 1u);
  const Health& health = replays.trials()[0].health;
  EXPECT_EQ(health.offset, kInfinity);
  EXPECT_TRUE(std::isnan(health.loss) && std::isnan(health.step_loss.at(1)));
  // Written again, they have the names of today, and the same numbers.
  const Json now = json_with_words(to_json(replays.trials()[0]));
  EXPECT_EQ(unknown_names(now, RecordFile::isolate, "trials"), std::vector<std::string>());
  EXPECT_EQ(now["leak_size"], (Json{0.25, 0.5}));
  EXPECT_EQ(now["leak_bias"], (Json{0.0, 0.1}));
}

TEST_F(RecordsTest, a_run_writes_only_what_the_table_has) {
  RunConfig config = tiny();
  config.schedule.steps = 6;
  config.probe_every = 3;
  config.guard = GuardMode::warn;
  GuardedRun run(folder / "run", Trainer::start(folder / "run", config));
  while (!run.trainer().done()) run.step();
  size_t lines = 0;
  read_json_lines(folder / "run" / "metrics.jsonl", [&](const JsonLine& line) {
    EXPECT_EQ(unknown_names(line.object, RecordFile::metrics), std::vector<std::string>());
    ++lines;
  });
  EXPECT_EQ(lines, 6u);
  GuardEvent event;
  event.heads = {1}, event.to = 3, event.kind = GuardEvent::Kind::roll_back;
  EXPECT_EQ(unknown_names(to_json(event, 2), RecordFile::guard), std::vector<std::string>());
  append_guard_event(folder / "run", event, 2);
  write_finding(folder / "run", {4, "divergence", "words"});
  const RunRecords records = read_run(folder / "run");
  ASSERT_TRUE(records.finding.has_value());
  EXPECT_EQ(records.finding->words, "words");
  EXPECT_TRUE(std::any_of(records.events.begin(), records.events.end(),
                          [](const RunEvent& e) { return e.kind == RunEvent::Kind::guard_roll_back; }));
  EXPECT_TRUE(records.notes.empty()) << records.notes[0];
}

// --- NaN, and nothing at all

TEST_F(RecordsTest, a_loss_that_is_not_a_number_is_recorded_however_it_is_written) {
  for (const char* loss : {"\"NaN\"", "NaN", "null", "-Infinity", "Infinity", "\"Infinity\""}) {
    std::string text;
    for (int step = 0; step < 300; ++step)
      text += fmt::format("{{\"step\": {}, \"loss\": {}}}\n", step, step < 150 ? "2.5" : loss);
    const Metrics metrics = parse_metrics(text);
    ASSERT_EQ(metrics.loss.values.size(), 300u) << loss;
    EXPECT_FALSE(std::isfinite(metrics.loss.values[200])) << loss;
    const RunRecord record = run_record(metrics, {});
    EXPECT_EQ(record.not_finite, 150) << loss;
    EXPECT_EQ(find_symptom(record).kind, Symptom::Kind::loss) << loss;
    const IndicatorRun run = indicators_of(folder, metrics, {});
    EXPECT_EQ(loss_moved(run, {}), 150) << loss;
  }
  // Behind a NaN every head has one: that is no drift. A head that drifted before it is.
  for (const bool drifts : {false, true}) {
    std::string text;
    for (int step = 0; step < 300; ++step)
      text += step < 150 ? fmt::format("{{\"step\": {}, \"loss\": 2.5, \"offset\": [[20, {}]]}}\n", step,
                                       drifts && step > 99 ? 900 : 20)
                         : fmt::format("{{\"step\": {}, \"loss\": NaN, \"offset\": [[NaN, NaN]]}}\n", step);
    const Symptom found = find_symptom(run_record(parse_metrics(text), {}));
    EXPECT_EQ(found.kind, drifts ? Symptom::Kind::offset : Symptom::Kind::loss) << found.words;
    EXPECT_EQ(found.since, drifts ? 100 : 150) << found.words;
    EXPECT_EQ(found.words.find("drift is not what ended it") != std::string::npos, !drifts) << found.words;
  }
  // A step whose loss is not recorded is another matter.
  const Metrics missing = parse_metrics("{\"step\": 0, \"loss\": 1}\n{\"step\": 1}\n");
  EXPECT_EQ(run_record(missing, {}).not_finite, std::nullopt);
}

// Health is as sure as what it rests on: how many steps, whether offsets are recorded, and what a guard did.
TEST_F(RecordsTest, a_healthy_verdict_says_what_it_rests_on) {
  write("config.toml", to_toml(to_toml_table(tiny())));
  const auto verdict_of = [&](int steps, const char* offset) {
    std::string text;
    for (int step = 0; step < steps; ++step)
      text += fmt::format("{{\"step\": {}, \"loss\": 2.5{}}}\n", step, offset);
    write("metrics.jsonl", text);
    const Output told = run_shell(EVENKEEL_PROGRAM " verdict " + folder.string() + " 2>&1");
    EXPECT_EQ(told.code, 0) << told.out;
    // The page of a run without a kept verdict has the same sentence.
    fs::remove(folder / "verdict.json");
    const std::string words = told.out.substr(told.out.find("Healthy, by its records"));
    EXPECT_NE(page(std::vector<fs::path>{folder}).find(words.substr(0, words.find('.'))), std::string::npos)
        << words;
    return told.out;
  };
  const auto has = [](const std::string& text, const char* words) {
    EXPECT_NE(text.find(words), std::string::npos) << words << "\nin\n" << text;
  };
  const char* const level = ", \"offset\": [[20, 18]]";
  has(verdict_of(30, level), "in 30 steps.");
  has(verdict_of(30, level), "hardly sure: 30 steps are few");
  has(verdict_of(1000, level), "the largest offset at step 999 is 20");
  has(verdict_of(1000, level), "as sure as records are");
  has(verdict_of(1000, ""), "not sure: no offsets are recorded");
  EXPECT_EQ(verdict_of(1000, level).find("guard"), std::string::npos);
  write("guard.jsonl",
        "{\"step\": 40, \"kind\": \"warning\", \"words\": \"look\"}\n"
        "{\"step\": 50, \"kind\": \"remedy\", \"words\": \"layer 0 head 1: zero_sum\"}\n");
  const std::string mended = verdict_of(1000, level);
  has(mended, "A guard changed its plan on the way.");
  has(mended, "guard, step 50: layer 0 head 1: zero_sum");
  EXPECT_EQ(mended.find("step 40"), std::string::npos) << mended;
}

// Offsets long before the end, losses that begin late or are too few, several runs: a sentence of health covers what is there.
TEST_F(RecordsTest, a_healthy_verdict_covers_what_is_recorded) {
  const std::string level = ", \"offset\": [[20, 18]]";
  const auto symptom_of = [&](int first, int end, int every, int offsets_until, const char* last = "") {
    std::string text;
    for (int step = first; step < end; step += every)
      text += fmt::format("{{\"step\": {}, \"loss\": 2.5{}}}\n", step, step < offsets_until ? level : "");
    return find_symptom(run_record(parse_metrics(text + last), {}));
  };
  const auto has = [](const std::string& text, const char* words) {
    EXPECT_NE(text.find(words), std::string::npos) << words << "\nin\n" << text;
  };
  has(symptom_of(5000, 5020, 1, 9999).certainty, "hardly sure: 20 steps are few");
  has(symptom_of(5000, 5020, 1, 9999).words, "in 20 steps");
  has(symptom_of(0, 300000, 1000, 300000).words, "too few losses are recorded");
  has(symptom_of(0, 300000, 1000, 300000).certainty, "not sure: too few losses");
  has(symptom_of(0, 3000, 1, 1).certainty, "not sure: no offsets are recorded behind step 0");
  // Old offsets do not acquit drift, and heads that came back had drifted.
  const char* const ended = "{\"step\": 3000, \"loss\": null}\n";
  EXPECT_EQ(symptom_of(0, 3000, 1, 1, ended).words.find("drift"), std::string::npos);
  has(symptom_of(0, 3000, 1, 2990, ended).words, "just before, no head drifted");
  // The page of several runs is as sure as each of them.
  std::vector<fs::path> runs;
  for (const char* name : {"long", "short"}) {
    runs.push_back(folder / name);
    fs::create_directories(runs.back());
    write_whole_file(runs.back() / "config.toml", to_toml(to_toml_table(tiny())));
    std::string text;
    for (int step = 0; step < (name == std::string("long") ? 1000 : 30); ++step)
      text += fmt::format("{{\"step\": {}, \"loss\": 2.5{}}}\n", step, level);
    write_whole_file(runs.back() / "metrics.jsonl", text);
  }
  const std::string shown = page(runs);
  has(shown, "All runs are healthy");
  has(shown, "hardly sure: 30 steps are few; no run of the study failed before step 300 (short)");
}

// A loss that rises or jumps is seen where only some steps are recorded, and where a run goes on in a folder of its own.
TEST_F(RecordsTest, losses_that_are_not_recorded_hide_no_symptom) {
  const auto kind_of = [](int first, int every, bool rises) {
    std::string text;
    for (int n = 0; n < 1000; ++n) {
      const double noise = 0.01 * (n * 37 % 11 - 5),
                   rise = rises ? std::max(0, n - 600) / 150.0 : n % 100 == 50;
      text += fmt::format("{{\"step\": {}, \"loss\": {}}}\n", first + n * every, 2.5 + noise + rise);
    }
    return find_symptom(run_record(parse_metrics(text), {})).kind;
  };
  for (const auto& [first, every] : {std::pair{0, 1}, {10000, 1}, {0, 5}}) {
    EXPECT_EQ(kind_of(first, every, true), Symptom::Kind::loss) << first << ", " << every;
    EXPECT_EQ(kind_of(first, every, false), Symptom::Kind::spikes) << first << ", " << every;
  }
}

TEST_F(RecordsTest, no_record_is_an_error_and_a_loss_that_is_not_finite_a_finding) {
  write("config.toml", to_toml(to_toml_table(tiny())));
  const auto verdict = [&] { return run_shell(EVENKEEL_PROGRAM " verdict " + folder.string() + " 2>&1"); };
  const std::string no_loss = "{\"step\": 0}\n";
  for (const std::string& text : {std::string("garbage\n"), std::string(), std::string("{\"loss\": 1}\n"),
                                  std::string("{\"step\": 0, \"lo")}) {
    write("metrics.jsonl", text);
    const Output none = verdict();
    EXPECT_EQ(none.code, 3) << text << none.out;
    EXPECT_NE(none.out.find("no record could be read"), std::string::npos) << none.out;
  }
  std::string bare;
  for (int step = 0; step < 30; ++step) bare += fmt::format("{{\"step\": {}, \"loss\": NaN}}\n", step);
  write("metrics.jsonl", bare);
  const Output not_finite = verdict();
  EXPECT_EQ(not_finite.code, 1) << not_finite.out;
  EXPECT_NE(not_finite.out.find("the loss of step 0 is not finite"), std::string::npos) << not_finite.out;
  // The page says the same, and shows no mean of the losses that are numbers.
  write("metrics.jsonl", "{\"step\": 0, \"loss\": 2.5}\n{\"step\": 1, \"loss\": null}\n");
  const std::string html = page(std::vector<fs::path>{folder});
  EXPECT_NE(html.find("the loss of step 1 is not finite"), std::string::npos);
  EXPECT_NE(html.find("<dd>not finite</dd>"), std::string::npos);
}

TEST_F(RecordsTest, pipes_and_devices_are_refused_and_nobody_waits) {
  for (const char* file : {"config.toml", "metrics.jsonl"}) {
    const fs::path run = folder / file;
    fs::create_directories(run);
    write_whole_file(run / "config.toml", to_toml(to_toml_table(tiny())));
    write_whole_file(run / "metrics.jsonl", "{\"step\": 0, \"loss\": 1}\n");
    for (const bool pipe : {true, false}) {
      fs::remove(run / file);
      if (pipe)
        ASSERT_EQ(::mkfifo((run / file).c_str(), 0600), 0);
      else
        fs::create_symlink("/dev/zero", run / file);
      const Output told = run_shell(EVENKEEL_PROGRAM " verdict " + run.string() + " 2>&1");
      EXPECT_EQ(told.code, 3) << told.out;
      EXPECT_NE(told.out.find(pipe ? "found a pipe" : "found a device"), std::string::npos) << told.out;
      const RunRecords records = read_run(run);
      ASSERT_FALSE(records.notes.empty());
      EXPECT_NE(records.notes[0].find("expected a regular file"), std::string::npos) << records.notes[0];
    }
  }
}

// Every part of a verdict, from what isolate found through verdict.json to the page.
TEST_F(RecordsTest, every_part_of_a_verdict_is_on_the_page) {
  write_whole_file(folder / "config.toml", to_toml(to_toml_table(tiny())));
  Replays replays(folder, {});
  std::vector<Trial> trials(kVerdictPartCount);
  Isolation found;
  VerdictTrials& all = found.evidence;
  for (size_t n = 0; n < kVerdictPartCount; ++n) {
    trials[n].setup.what = kVerdictParts[n].name;
    // A figure that is nowhere else on the page; the recorded course is far from the control.
    trials[n].health.offset = 1111 + 37 * static_cast<double>(n);
    const_cast<const Trial*&>(trial_of(all, static_cast<VerdictPart>(n))) = &trials[n];
  }
  found.evidence.measure = Evidence::Measure::offset;
  found.verdict.words = "Something.";
  write_verdict(found, replays);
  EXPECT_EQ(unknown_names(to_json(found, replays), RecordFile::verdict), std::vector<std::string>());
  const std::string html = page(std::vector<fs::path>{folder});
  for (size_t n = 0; n < kVerdictPartCount; ++n) {
    const std::string label(kVerdictParts[n].label);
    EXPECT_NE(html.find(">" + label + "<"), std::string::npos) << "the page does not show " << label;
    EXPECT_NE(html.find(fmt::format(">{:.0f} ·", trials[n].health.offset)), std::string::npos)
        << "the page does not show the figure of " << label;
  }
}

// The remedy of the page is the verdict's: zero_sum on all heads where that heals and zero_sum on few does not.
TEST_F(RecordsTest, the_page_names_the_remedy_that_heals) {
  const auto remedy_of = [&](const Json& parts) {
    write_whole_file(folder / "verdict.json",
                     Json{{"cause", "common_mode_drift"}, {"words", "Drift."}, {"parts", parts}}.dump());
    const std::string html = page(std::vector<fs::path>{folder});
    const size_t link = html.find("<span class=\"link\">remedy</span><span class=\"value\">");
    EXPECT_NE(link, std::string::npos);
    const size_t begin = html.find("value\">", link) + 7;
    return html.substr(begin, html.find('<', begin) - begin);
  };
  const auto part = [](const char* name, bool heals) {
    return Json{{"part", name}, {"offset", 5}, {"heals", heals}};
  };
  EXPECT_EQ(remedy_of(Json::array({part("zero_sum", true)})), "zero_sum");
  EXPECT_EQ(remedy_of(Json::array({part("zero_sum", false), part("zero_sum_all", true)})),
            "zero_sum on all heads");
  EXPECT_EQ(remedy_of(Json::array({part("zero_sum", false), part("wide_output", true)})), "wide_output");
  EXPECT_EQ(remedy_of(Json::array({part("zero_sum", false), part("wide_pv", true)})), "none of those tried");
  EXPECT_EQ(remedy_of(Json::array()), "–");
}

// --- names and counts on the page

class PageTest : public RunFolderTest {
 protected:
  // A run of some steps in a folder of this name.
  fs::path run(const std::string& name, int steps) const {
    std::string text;
    for (int step = 0; step < steps; ++step)
      text += fmt::format("{{\"step\": {}, \"loss\": {}, \"offset\": [[5, 7]]}}\n", step, 3 - 0.01 * step);
    fs::create_directories(folder / name);
    write_whole_file(folder / name / "metrics.jsonl", text);
    return folder / name;
  }
  static bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }
};

// Names that are longer than their place are shortened there, and whole in the legend.
TEST_F(PageTest, long_names_are_not_cut_off) {
  const std::string first = "a-run-" + std::string(60, 'x') + "-seed-1",
                    second = "a-run-" + std::string(60, 'x') + "-seed-2";
  const std::string html = page(std::vector<fs::path>{run(first, 30), run(second, 30)});
  const auto inside = [&](const char* begin) {
    const size_t at = html.find(begin, html.find("id=\"loss-chart\""));
    return html.substr(at, html.find("</g>\n", at) - at);
  };
  for (const char* part : {"<g class=\"lanes\">", "<g class=\"ends\">"}) {
    EXPECT_FALSE(has(inside(part), ">" + first + "<")) << part;
    EXPECT_TRUE(has(inside(part), "…")) << part;
    EXPECT_TRUE(has(inside(part), "-seed-1<") && has(inside(part), "-seed-2<")) << part;
  }
  EXPECT_TRUE(has(html, "<p class=\"legend\" aria-hidden=\"true\"><span class=\"c0\">" + first + "</span>"));
}

TEST_F(PageTest, marks_that_turn_text_around_are_shown_as_what_they_are) {
  EXPECT_EQ(escape("a\u202Eb\u2066c\u200Fd\u061Ce"), "a[U+202E]b[U+2066]c[U+200F]d[U+061C]e");
  EXPECT_EQ(escape("\u2026 \u2070 \u200D שלום"), "\u2026 \u2070 \u200D שלום");  // letters turn by themselves
  const fs::path turned = run("run\u202E", 5);
  write_whole_file(turned / "findings.json", "{\"findings\":[{\"step\":1,\"words\":\"\u202Eevil\"}]}");
  const std::string html = page(std::vector<fs::path>{turned});
  EXPECT_FALSE(has(html, "\u202E"));
  EXPECT_TRUE(has(html, "[U+202E]evil"));
}

TEST_F(PageTest, counts_steps_once) {
  const std::string html = page(std::vector<fs::path>{run("a", 40)});
  EXPECT_TRUE(has(html, "<dd>40</dd>"));
  EXPECT_TRUE(has(html, "<td>40</td>"));
  EXPECT_FALSE(has(html, ">41<"));
}

}  // namespace
}  // namespace evenkeel
