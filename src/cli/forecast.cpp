// `evenkeel forecast`: which heads drift, and when the run is expected to fail.
#include "diagnosis/forecast.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/options.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json to_json(const std::string& folder, const RunForecast& found, const std::vector<std::string>& notes) {
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
  return {{"schema", 1},
          {"run", folder},
          {"steps", found.steps},
          {"fails", found.fails()},
          {"words", in_words(found)},
          {"harmful_offset", found.terms.harmful},
          {"bound", found.terms.bound},
          {"from_step", found.terms.begin},
          {"leak_share", number(found.leak_share)},
          {"leaks", found.leaks()},
          {"at_risk", at_risk},
          {"heads", heads},
          {"notes", notes}};
}

void print(const std::string& folder, const RunForecast& found, const std::vector<std::string>& notes,
           bool all) {
  fmt::print("{}: {}\n", folder, in_words(found));
  for (size_t h = 0; h < found.of_heads.size(); ++h)
    if (all || (found.of_heads[h].outlook >= Outlook::drift && found.at_risk.size() > 1))
      fmt::print("  layer {} head {}: {}\n", static_cast<int64_t>(h) / found.heads,
                 static_cast<int64_t>(h) % found.heads, in_words(found.of_heads[h]));
  for (const std::string& note : notes) fmt::print("  {}\n", note);
}

}  // namespace

int run_forecast(int argc, char** argv) {
  std::vector<std::string> words;
  bool all = false, json = false;
  Options options(
      "forecast RUN... [options]",
      "When a run is expected to fail, from its recorded offsets. For every head that drifts: its growth, "
      "the "
      "step of\nfailure with an interval that holds in four of five cases, and what bounds it. Where no head "
      "drifts: \"no failure\nin sight\". It works while a run trains. Exit code 1: a failure is expected.",
      "forecast runs/a");
  options.words("RUN", words, 1, 256);
  options.flag("--all", "every head, not those at risk alone", all);
  options.flag("--json", "everything as JSON, an array of runs", json);
  if (!options.parse(argc, argv)) return 0;
  bool fails = false;
  Json answer = Json::array();
  for (const std::string& word : words) {
    require_data(std::filesystem::is_directory(word), "{}: expected a run's folder, found {}", word,
                 std::filesystem::exists(word) ? "something else" : "nothing there");
    const RunRecords run = read_run(word);
    const RunForecast found = forecast(run);
    require_data(!found.of_heads.empty(),
                 "{}: expected recorded offsets (train --facts-every N, or the package's Monitor), found {}",
                 word, run.has_steps() ? "none in its metrics.jsonl" : "no recorded step");
    fails = fails || found.fails();
    if (json)
      answer.push_back(to_json(word, found, run.notes));
    else
      print(word, found, run.notes, all);
  }
  if (json) fmt::print("{}\n", answer.dump(2));
  return fails ? 1 : 0;
}

}  // namespace evenkeel::cli
