// `evenkeel forecast`: which heads drift, and when the run is expected to fail.
#include "diagnosis/forecast.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text.h"
#include "cli/options.h"
#include "diagnosis/history.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json to_json(const HistoryForecast& found) {
  Json alike = Json::array();
  for (const EarlierRun& one : found.alike)
    alike.push_back({{"run", one.folder.string()},
                     {"steps", one.steps},
                     {"failed", one.failed ? Json(*one.failed) : Json(nullptr)}});
  return {{"words", in_words(found)},
          {"failure", number(found.failure.value_or(HistoryForecast::kNone))},
          {"earliest", number(found.earliest())},
          {"latest", number(found.latest())},
          {"alike", alike},
          {"unlike", found.unlike}};
}

// The runs of --history: a run's folder, or a folder of runs. One that is named twice, or by a link, counts once.
std::vector<RunRecords> read_history(const std::vector<std::string>& folders) {
  std::vector<RunRecords> found;
  for (const std::string& word : folders) {
    require_data(std::filesystem::is_directory(word),
                 "--history {}: expected a run's folder or a folder of runs, found {}", word,
                 std::filesystem::exists(word) ? "something else" : "nothing there");
    std::vector<std::filesystem::path> runs = {word};
    if (!is_run_folder(word)) runs = runs_in(word);
    require_data(!runs.empty(), "--history {}: expected a run's folder or a folder of runs, found none in it",
                 word);
    for (const auto& run : runs) {
      std::error_code none;
      if (std::none_of(found.begin(), found.end(), [&](const RunRecords& one) {
            return std::filesystem::equivalent(one.folder, run, none);
          }))
        found.push_back(read_run(run));
    }
  }
  return found;
}

// Without --history: the runs beside a run.
class RunsBeside {
 public:
  const std::vector<RunRecords>& of(const RunRecords& run) {
    std::vector<std::filesystem::path> folders = comparable_beside(run);
    if (folders == folders_) return runs_;  // those of the run before
    folders_ = std::move(folders);
    runs_.clear();
    for (const auto& folder : folders_) runs_.push_back(read_run(folder));
    return runs_;
  }

 private:
  std::vector<std::filesystem::path> folders_;
  std::vector<RunRecords> runs_;
};

// Nothing is wrong so far: the page of a run that is over, the live view of one that may go on. Without offsets nobody knows,
// and verdict has the command that records them.
std::string command_of_health(const std::string& folder, const RunRecords& run, const RunForecast& found) {
  if (found.of_heads.empty() && run.config) return "evenkeel verdict " + shell_word(folder);
  const bool is_over = found.terms.last_step > 0 && run.step_count() >= found.terms.last_step;
  return is_over ? fmt::format("evenkeel report {} -o report.html", shell_word(folder))
                 : fmt::format("evenkeel watch {}", shell_word(folder));
}

// What to type next; empty where nothing would find out more.
std::string next_command(const std::string& folder, const RunRecords& run, const RunForecast& found,
                         const HistoryForecast* history) {
  if (found.fails() && run.config) return "evenkeel verdict " + shell_word(folder);  // which needs settings
  if (history && history->failure)
    for (const EarlierRun& one : history->alike)
      if (one.failed && static_cast<double>(*one.failed) == *history->failure)
        return "evenkeel verdict " + shell_word(one.folder.string());
  return found.fails() ? "" : command_of_health(folder, run, found);
}

Json to_json(const std::string& folder, const RunRecords& run, const RunForecast& found,
             const HistoryForecast* history) {
  Json heads = Json::array();
  for (size_t h = 0; h < found.of_heads.size(); ++h) {
    const HeadForecast& head = found.of_heads[h];
    heads.push_back({{"layer", static_cast<int64_t>(h) / found.heads},
                     {"head", static_cast<int64_t>(h) % found.heads},
                     {"outlook", name(head.outlook)},
                     {"offset", number(head.offset)},
                     {"growth", number(head.growth)},
                     {"growth_error", number(head.growth_error)},
                     {"failure", number(head.failure)},
                     {"earliest", number(head.earliest)},
                     {"latest", number(head.latest)}});
  }
  Json at_risk = Json::array();
  for (const int64_t h : found.at_risk) at_risk.push_back({h / found.heads, h % found.heads});
  Json failed = nullptr;
  if (const auto& failure = found.failure)
    failed = {{"since", failure->since},
              {"kind", name(failure->kind)},
              {"lasts", failure->lasts},
              {"excess", number(failure->excess)},
              {"words", failure->words}};
  const std::string next = next_command(folder, run, found, history);
  return {{"schema", 1},
          {"run", folder},
          {"steps", found.steps},
          {"fails", found.fails()},
          {"failed", failed},
          {"words", in_words(found)},
          {"harmful_offset", found.terms.harmful},
          {"bound", found.terms.bound},
          {"from_step", found.terms.begin},
          {"leak_share", number(found.leak_share)},
          {"leaks", found.leaks()},
          {"at_risk", at_risk},
          {"heads", heads},
          {"notes", run.notes},
          {"history", history ? to_json(*history) : Json(nullptr)},
          {"next", next.empty() ? Json(nullptr) : Json(next)}};
}

void print(const std::string& folder, const RunRecords& run, const RunForecast& found,
           const HistoryForecast* history, bool named, bool all) {
  fmt::print("{}: {}\n", folder, in_words(found));
  for (size_t h = 0; h < found.of_heads.size(); ++h)
    if (all || (found.of_heads[h].outlook >= Outlook::drift && found.at_risk.size() > 1))
      fmt::print("  layer {} head {}: {}\n", static_cast<int64_t>(h) / found.heads,
                 static_cast<int64_t>(h) % found.heads, in_words(found.of_heads[h]));
  // Nobody asked for what lies beside the run by chance.
  if (history && (named || !history->alike.empty())) {
    fmt::print("  history: {}\n", in_words(*history));
    for (const std::string& unlike : history->unlike)
      if (all || history->alike.empty()) fmt::print("    not compared with {}\n", unlike);
  }
  for (const std::string& note : run.notes) fmt::print("  {}\n", note);
  if (const std::string next = next_command(folder, run, found, history); !next.empty())
    fmt::print("  next: {}\n", next);
}

}  // namespace

int run_forecast(int argc, char** argv) {
  std::vector<std::string> words, earlier;
  bool all = false, alone = false, json = false;
  Options options(
      "forecast RUN... [options]",
      "When a run is expected to fail, from its recorded offsets. For every head that drifts: its growth, "
      "the step of\nfailure with an interval that holds in four of five cases, and what bounds it. Where no "
      "head drifts: \"no failure\nin sight\". A run whose records show that it has failed gets no date: "
      "\"has failed since\". It works while a run\ntrains. Earlier runs with the same plan and "
      "settings and any seed are asked, too: they know more than a run's own\nfirst half. They are those in "
      "the folder where "
      "the run lies, or those of --history. Exit code 1: a failure is\nexpected, or has happened and lasts.",
      "forecast runs/b --history runs old_runs");
  options.words("RUN", words, 1, 256);
  options.lists("--history", "FOLDER...", "earlier runs: their folders, or a folder of them", earlier);
  options.flag("--alone", "ask no earlier run", alone);
  options.flag("--all", "every head, not those at risk alone", all);
  options.flag("--json", "everything as JSON, an array of runs", json);
  if (!options.parse(argc, argv)) return 0;
  const bool named = !earlier.empty();
  require(!named || !alone, "forecast: expected --history or --alone, got both");
  bool fails = false;
  const std::vector<RunRecords> named_runs = read_history(earlier);
  RunsBeside beside;
  Json answer = Json::array();
  for (const std::string& word : words) {
    require_data(std::filesystem::is_directory(word), "{}: expected a run's folder, found {}", word,
                 std::filesystem::exists(word) ? "something else" : "nothing there");
    const RunRecords run = read_run(word);
    require_data(run.unreadable.empty(), "{}", run.unreadable);
    const std::vector<RunRecords>& history = named || alone ? named_runs : beside.of(run);
    const RunForecast found = forecast(run, twin_of(run, history));
    std::optional<HistoryForecast> of_others;
    if (!alone && !found.has_failed()) of_others = forecast_by_history(run, history);
    require_data(!found.of_heads.empty() || found.failure || (of_others && !of_others->alike.empty()),
                 "{}: expected recorded offsets (train --facts-every N, or the package's Monitor), found {}",
                 word, run.has_steps() ? "none in its metrics.jsonl" : "no recorded step");
    fails = fails || found.fails() || (of_others && of_others->failure);
    const HistoryForecast* const asked = of_others ? &*of_others : nullptr;
    if (json)
      answer.push_back(to_json(word, run, found, asked));
    else
      print(word, run, found, asked, named, all);
  }
  if (json) fmt::print("{}\n", answer.dump(2));
  return fails ? 1 : 0;
}

}  // namespace evenkeel::cli
