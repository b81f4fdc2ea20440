#include "diagnosis/history.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "base/toml.h"
#include "diagnosis/forecast.h"

namespace evenkeel {
namespace {

using ConfigKey = std::pair<std::string_view, std::string_view>;  // table, key

// What may differ between two runs of one kind: which numbers were drawn, where things lie, how long and what was recorded.
// Of [run], the guard alone changes what is trained.
bool may_differ(const RunRecords& run, const ConfigKey& setting) {
  constexpr std::array<ConfigKey, 5> kNotCompared = {{{"data", "train"},
                                                      {"data", "validation"},
                                                      {"data", "validation_digest"},
                                                      {"data", "batches"},
                                                      {"data", "seed"}}};
  if (setting.first == "run") return setting.second != "guard";
  // The length of a constant learning rate is only where it stops.
  if (setting == ConfigKey{"schedule", "steps"}) return run.setting("schedule", "course") == "constant";
  return std::find(kNotCompared.begin(), kNotCompared.end(), setting) != kNotCompared.end();
}

const TomlTable* table_of(const RunRecords& run, std::string_view name) {
  const TomlValue* const value = run.config ? run.config->find(name) : nullptr;
  return value ? value->get_if<TomlTable>() : nullptr;
}

// One value as config.toml would have it.
std::string text_of(const std::string& key, const TomlValue& value) {
  TomlTable one;
  one.add(key, value);
  std::string text = to_toml(one);
  text.erase(0, text.find('=') + 1);
  text.erase(0, text.find_first_not_of(' '));
  text.erase(text.find_last_not_of('\n') + 1);
  return text;
}

int64_t end_of(const EarlierRun& run) { return run.failed.value_or(run.steps); }

// "4,200 and 6,200", of at most four.
std::string steps_in_words(const std::vector<int64_t>& steps) {
  std::string words;
  const size_t shown = std::min<size_t>(steps.size(), 4);
  for (size_t n = 0; n < shown; ++n)
    words += fmt::format("{}{}", n == 0 ? "" : n + 1 == steps.size() ? " and " : ", ", steps[n]);
  return shown < steps.size() ? words + ", ..." : words;
}

// The first setting in which two runs differ, of those that `skipped` does not name; empty: none.
template <class Skipped>
std::string difference(const RunRecords& run, const RunRecords& earlier, Skipped skipped) {
  if (!run.config) return "the settings of the run itself are not known (no config.toml that can be read)";
  if (!earlier.config) return "its settings are not known (no config.toml that can be read)";
  for (const auto& entry : run.config->entries()) {
    const TomlTable *const ours = entry->value.get_if<TomlTable>(), *const theirs =
                                                                        table_of(earlier, entry->key);
    if (!ours || !theirs) continue;
    for (const auto& setting : ours->entries()) {
      const TomlValue* const other = theirs->find(setting->key);
      if (!other || skipped(ConfigKey{entry->key, setting->key})) continue;
      const std::string here = text_of(setting->key, setting->value), there = text_of(setting->key, *other);
      if (here == there) continue;
      // A list of changes of the plan is many lines of TOML, which a sentence cannot hold.
      constexpr size_t kInASentence = 120;
      return std::max(here.size(), there.size()) > kInASentence ||
                     (here + there).find('\n') != std::string::npos
                 ? fmt::format("{}.{} differs", entry->key, setting->key)
                 : fmt::format("{}.{} is {}, not {}", entry->key, setting->key, there, here);
    }
  }
  return "";
}

// A plan's text without its stabiliser, and whether it had one that keeps the rows' sums in every head. (docs/study.md: these runs
// are healthy.)
std::pair<std::string, bool> without_remedy(const std::string& plan) {
  std::string rest;
  if (plan.find(';') != std::string::npos || plan.find(':') != std::string::npos) return {plan, false};
  bool keeps_sum = plan == "fp32";
  for (size_t begin = 0; begin < plan.size();) {
    const size_t end = std::min(plan.find(',', begin), plan.size());
    const std::string_view clause = std::string_view(plan).substr(begin, end - begin);
    if (clause == "stabiliser=wide_output" || clause == "stabiliser=consistent" ||
        clause == "stabiliser=zero_sum")
      keeps_sum = true;
    else
      rest += (rest.empty() ? "" : ",") + std::string(clause);
    begin = end + 1;
  }
  return {rest, keeps_sum};
}

// Did a guard change what was trained?
bool was_mended(const RunRecords& run) {
  return std::any_of(run.events.begin(), run.events.end(), [](const RunEvent& event) {
    return event.kind == RunEvent::Kind::guard_remedy || event.kind == RunEvent::Kind::guard_roll_back;
  });
}

bool differ_in_plan_at_most(const RunRecords& run, const RunRecords& other) {
  return difference(run, other,
                    [&](const ConfigKey& setting) {
                      return setting == ConfigKey{"attention", "plan"} || may_differ(run, setting);
                    })
      .empty();
}

}  // namespace

std::string first_difference(const RunRecords& run, const RunRecords& earlier) {
  return difference(run, earlier, [&](const ConfigKey& setting) { return may_differ(run, setting); });
}

std::vector<std::filesystem::path> comparable_beside(const RunRecords& run) {
  std::error_code none;
  std::vector<std::filesystem::path> found =
      runs_in(std::filesystem::weakly_canonical(run.folder, none).parent_path());
  std::erase_if(found, [&](const std::filesystem::path& folder) {
    RunRecords settings;
    try {
      read_config(read_config_text(folder), settings);
    } catch (const DataError&) {
    }
    return !differ_in_plan_at_most(run, settings);
  });
  return found;
}

const RunRecords* twin_of(const RunRecords& run, std::span<const RunRecords> among) {
  const RunRecords* found = nullptr;
  std::pair<bool, int64_t> best;
  const auto [plan, is_healthy] = without_remedy(run.setting("attention", "plan"));
  const std::string seed = run.setting("data", "seed");
  if (is_healthy || seed.empty()) return nullptr;  // a Monitor records no seed
  for (const RunRecords& other : among) {
    const auto [others_plan, keeps_sum] = without_remedy(other.setting("attention", "plan"));
    if (!keeps_sum || other.setting("data", "seed") != seed) continue;
    if (!differ_in_plan_at_most(run, other)) continue;
    const std::pair<bool, int64_t> good = {others_plan == plan, other.step_count()};
    if (!found || good > best) found = &other, best = good;
  }
  return found;
}

HistoryForecast forecast_by_history(const RunRecords& run, std::span<const RunRecords> earlier) {
  HistoryForecast found;
  found.steps = run.step_count();
  for (const RunRecords& other : earlier) {
    std::error_code none;
    if (std::filesystem::equivalent(other.folder, run.folder, none)) continue;  // the run itself
    std::string unlike = first_difference(run, other);
    if (unlike.empty() && !other.has_steps()) unlike = "no recorded step";
    if (unlike.empty() && was_mended(other) && !was_mended(run)) unlike = "a guard changed its plan";
    const std::optional<RunFailure> failure =
        unlike.empty() ? find_failure(other, twin_of(other, earlier)) : std::nullopt;
    // Without offsets a loss that rose says nothing: it may have risen for any reason.
    if (unlike.empty() && !failure && !other.metrics.by_head(name(HeadFact::offset)) &&
        !other.metrics.by_head(name(HeadFact::largest_lse)))
      unlike = "no recorded offsets";
    if (!unlike.empty()) {
      found.unlike.push_back(fmt::format("{}: {}", other.folder.string(), unlike));
      continue;
    }
    found.alike.push_back(
        {other.folder, other.step_count(), failure ? std::optional(failure->since) : std::nullopt});
  }
  std::stable_sort(found.alike.begin(), found.alike.end(),
                   [](const EarlierRun& a, const EarlierRun& b) { return end_of(a) < end_of(b); });
  auto left = std::count_if(found.alike.begin(), found.alike.end(),
                            [&](const EarlierRun& one) { return end_of(one) > found.steps; });
  found.outlived = !found.alike.empty() && left == 0;
  double alive = 1;
  for (const EarlierRun& one : found.alike) {
    if (end_of(one) <= found.steps) continue;
    if (one.failed) alive *= 1 - 1 / static_cast<double>(left);
    --left;
    if (one.failed && alive <= 0.5) {
      found.failure = static_cast<double>(*one.failed);
      break;
    }
  }
  return found;
}

std::string in_words(const HistoryForecast& found) {
  if (found.alike.empty()) return "no earlier run has this plan and these settings";
  std::vector<int64_t> failures;
  int64_t longest = 0;
  for (const EarlierRun& one : found.alike) {
    if (one.failed)
      failures.push_back(*one.failed);
    else
      longest = std::max(longest, one.steps);
  }
  const auto count = found.alike.size();
  const std::string runs = count == 1
                               ? "the earlier run with this plan and these settings"
                               : fmt::format("{} earlier runs with this plan and these settings", count);
  if (failures.empty())
    return fmt::format("{} {} healthy, to step {}", runs, count == 1 ? "was" : "were", longest);
  const std::string what =
      fmt::format("{}{} failed, at step{} {}", count == 1 ? "" : fmt::format("{} of ", failures.size()), runs,
                  failures.size() == 1 ? "" : "s", steps_in_words(failures));
  if (found.failure)
    return fmt::format("{}: failure near step {:.0f} ({:.0f} to {:.0f})", what, *found.failure,
                       found.earliest(), found.latest());
  return what + (found.outlived ? fmt::format("; this one has lasted longer, {} steps", found.steps)
                                : "; most of those that came further than this one did not");
}

}  // namespace evenkeel
