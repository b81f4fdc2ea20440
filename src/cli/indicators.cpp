// `evenkeel indicators`: which indicator raises an alarm, when, how long before the loss moves, and how often falsely.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/options.h"
#include "diagnosis/indicators.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::json;

std::vector<IndicatorRun> read_runs(const std::vector<std::string>& folders) {
  std::vector<IndicatorRun> runs;
  for (const std::string& folder : folders) {
    runs.push_back(read_indicators(folder));
    for (const std::string& note : runs.back().notes) fmt::print(stderr, "{}: {}\n", folder, note);
  }
  return runs;
}

bool is_guard(const IndicatorScore& score) { return score.indicator == kIndicators.size(); }

std::string rule_of(const IndicatorScore& score) {
  return is_guard(score) ? "its own" : std::string(name(score.rule));
}

std::string speaks_at(const IndicatorScore& score) {
  if (is_guard(score)) return "-";
  const double height = std::exp2(score.rung);
  switch (score.rule) {
    case Rule::level:
      return fmt::format("{:.3g}", height);
    case Rule::growth:
      return fmt::format("x {:.3g}", height);
    case Rule::deviation:
      break;
  }
  return fmt::format("{:.3g} sd", height);
}

std::string where(const Reached& reached, const IndicatorRun& run) {
  if (reached.head < 0) return "";
  return fmt::format(", layer {} head {}", reached.head / run.heads, reached.head % run.heads);
}

void print_table(const std::vector<const IndicatorScore*>& rows) {
  constexpr auto kRow = "{:<15}{:<11}{:>11}{:>8}{:>9}   {:<28}{:<16}{}\n";
  fmt::print(kRow, "indicator", "rule", "limit", "alarms", "in time", "lead: median (least..most)",
             "false: left out", "half out");
  for (const IndicatorScore* score : rows) {
    const std::vector<int64_t>& leads = score->leads;
    const auto spoke = std::ranges::count_if(score->spoke, [](const auto& s) { return s.has_value(); });
    fmt::print(kRow, score->name(), rule_of(*score), speaks_at(*score),
               fmt::format("{}/{}", spoke, score->judged), fmt::format("{}/{}", score->in_time, score->moved),
               leads.empty()
                   ? "-"
                   : fmt::format("{} ({}..{})", leads[leads.size() / 2], leads.front(), leads.back()),
               score->healthy == 0 ? "-" : fmt::format("{} of {}", score->false_alarms, score->healthy),
               score->healthy == 0 ? "-" : fmt::format("{:.0f} %", 100 * score->half_alarms));
  }
}

void print_run(size_t n, const IndicatorRun& run, const IndicatorTable& table,
               const std::vector<const IndicatorScore*>& rows) {
  const std::string against =
      table.twins[n].empty() ? "its own best" : fmt::format("{} healthy twins", table.twins[n].size());
  fmt::print("\n{}: {} steps; the loss {} (against {})\n", run.folder.string(), run.loss.size(),
             table.moved[n] ? fmt::format("moved at step {}", *table.moved[n]) : "has not moved", against);
  for (const IndicatorScore* score : rows) {
    const std::optional<Reached>& spoke = score->spoke[n];
    fmt::print("  {:<15}{:<11}{:>11}  ", score->name(), rule_of(*score), speaks_at(*score));
    if (!spoke)
      fmt::print("silent\n");
    else
      fmt::print("step {}{}{}\n", spoke->step,
                 table.moved[n] ? fmt::format(" (lead {})", *table.moved[n] - spoke->step) : "",
                 where(*spoke, run));
  }
}

Json step_or_null(const std::optional<int64_t>& step) { return step ? Json(*step) : Json(nullptr); }

Json twins_of(const Twins& twins) {
  Json folders = Json::array();
  for (const IndicatorRun* twin : twins) folders.push_back(twin->folder.string());
  return folders;
}

void print_json(const std::vector<IndicatorRun>& healthy, const std::vector<IndicatorRun>& derailing,
                const IndicatorTable& table, const std::vector<const IndicatorScore*>& best) {
  Json of_healthy = Json::array(), of_derailing = Json::array(), indicators = Json::array();
  for (size_t n = 0; n < healthy.size(); ++n)
    of_healthy.push_back({{"run", healthy[n].folder.string()},
                          {"loss_moved", step_or_null(table.healthy_moved[n])},
                          {"notes", healthy[n].notes}});
  for (size_t n = 0; n < derailing.size(); ++n)
    of_derailing.push_back({{"run", derailing[n].folder.string()},
                            {"steps", derailing[n].loss.size()},
                            {"loss_moved", step_or_null(table.moved[n])},
                            {"twins", twins_of(table.twins[n])},
                            {"notes", derailing[n].notes}});
  for (const IndicatorScore& score : table.scores) {
    Json spoke = Json::array();
    for (size_t n = 0; n < derailing.size(); ++n) {
      spoke.push_back(nullptr);
      if (!score.spoke[n]) continue;
      spoke.back() = {{"step", score.spoke[n]->step}};
      if (score.spoke[n]->head < 0) continue;
      spoke.back()["layer"] = score.spoke[n]->head / derailing[n].heads;
      spoke.back()["head"] = score.spoke[n]->head % derailing[n].heads;
    }
    indicators.push_back({{"indicator", score.name()},
                          {"rule", is_guard(score) ? Json(nullptr) : Json(name(score.rule))},
                          {"speaks_at", is_guard(score) ? Json(nullptr) : Json(std::exp2(score.rung))},
                          {"best_rule", std::ranges::find(best, &score) != best.end()},
                          {"judged", score.judged},
                          {"spoke", spoke},
                          {"leads", score.leads},
                          {"moved", score.moved},
                          {"in_time", score.in_time},
                          {"healthy", score.healthy},
                          {"false_alarms_left_out", score.false_alarms},
                          {"false_alarms_half_out", score.half_alarms}});
  }
  fmt::print("{}\n",
             Json{{"healthy", of_healthy}, {"derailing", of_derailing}, {"indicators", indicators}}.dump(2));
}

}  // namespace

int run_indicators(int argc, char** argv) {
  std::vector<std::string> healthy_folders, folders;
  bool each = false, all_rules = false, json = false;
  Options options(
      "indicators RUN... | indicators --healthy RUN... --failing RUN...",
      "Shows when each indicator would have raised an alarm, from the records of runs (train --probe-every "
      "N), "
      "and\n"
      "how long before the loss moved. All indicators have the same rules. An alarm is raised beyond the "
      "level "
      "that\n"
      "any healthy run reached. False alarms: each healthy run is judged by the limit that all others give, "
      "and "
      "by\n"
      "the limit that half of the others give on average. The loss is compared with healthy runs of the "
      "same\n"
      "settings and seed that differ in the plan alone. Without such runs it is compared with its own best. "
      "Without\n"
      "any healthy run, an alarm is raised where an indicator grows more than in small healthy runs of ours.",
      "indicators --healthy study/healthy-* --failing study/derailing-*");
  options.words("RUN", folders, 0, static_cast<size_t>(-1));
  options.lists("--healthy", "RUN...", "folders of runs that stayed healthy", healthy_folders);
  options.lists("--failing", "RUN...", "folders of runs that failed, or are to be looked at", folders);
  options.flag("--each", "the alarms of every failing run, with layer and head", each);
  options.flag("--all-rules", "every rule's row, not just the best one's", all_rules);
  options.flag("--json", "everything as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  require(!folders.empty(), "expected a run to look at: {}", "indicators RUN");

  const std::vector<IndicatorRun> healthy = read_runs(healthy_folders), derailing = read_runs(folders);
  const IndicatorTable table = judge_indicators(healthy, derailing);
  const std::vector<const IndicatorScore*> best = best_rules(table);
  if (json) {
    print_json(healthy, derailing, table, best);
    return 0;
  }
  std::vector<const IndicatorScore*> rows = best;
  if (all_rules) {
    rows.clear();
    for (const IndicatorScore& score : table.scores) rows.push_back(&score);
  }
  const auto moved = std::ranges::count_if(table.moved, [](const auto& m) { return m.has_value(); });
  if (derailing.size() > 1 || !healthy.empty()) {
    fmt::print("{} healthy runs, {} failing ones; the loss of {} of these moved\n", healthy.size(),
               derailing.size(), moved);
    for (size_t n = 0; n < healthy.size(); ++n)
      if (table.healthy_moved[n])
        fmt::print("not so healthy: the loss of {} moved at step {}\n", healthy[n].folder.string(),
                   *table.healthy_moved[n]);
    print_table(rows);
  }
  if (each || derailing.size() == 1)
    for (size_t n = 0; n < derailing.size(); ++n) print_run(n, derailing[n], table, rows);
  return 0;
}

}  // namespace evenkeel::cli
