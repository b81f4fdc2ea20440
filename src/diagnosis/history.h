// What earlier runs say of a run: those with the same plan and settings, of any seed. Before anything drifts, a run's own
// records hardly tell whether and when it will fail (docs/study.md, "What bounds it"); what such a run did tells both.
//
// Earlier runs that are still healthy at their end count as lasting longer than that. Of those that lasted longer than the run
// has so far, the share that is alive at a later step is Kaplan and Meier's product: times 1 - 1/n at each failure, of n that
// are left. Whether one has failed is judged beside its healthy twin where that is among the earlier runs, else by its own losses
// (forecast.h). The failure is expected where that share falls to a half; where it never does, none is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "records/run_records.h"

namespace evenkeel {

// The step of failure is within this factor of the expected one in five of six failing runs of docs/curves that have such an
// earlier run (scripts/study --forecast).
inline constexpr double kHistoryFactor = 1.5;

struct EarlierRun {
  std::filesystem::path folder;
  int64_t steps = 0;              // that it made
  std::optional<int64_t> failed;  // the step from which its records show a failure (forecast.h)
};

struct HistoryForecast {
  std::vector<EarlierRun> alike;    // same plan and settings, in the order of failure or end
  std::vector<std::string> unlike;  // the others: "runs/b: schedule.lr is 0.003, not 0.006"
  int64_t steps = 0;                // of the run itself
  std::optional<double> failure;    // the expected step
  bool outlived = false;            // no run alike came further than this one
  double earliest() const {
    return failure ? std::max(static_cast<double>(steps), *failure / kHistoryFactor) : kNone;
  }
  double latest() const { return failure.value_or(kNone) * kHistoryFactor; }
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
};

// The first setting in which two runs differ, in words; empty where they differ in seeds, places and the length alone. Settings
// that one of them does not record are not compared; where a whole config.toml cannot be read, nothing is known to be the same.
std::string first_difference(const RunRecords& run, const RunRecords& earlier);

// The runs in the folder where this one lies, itself included, that may say something of it: by their config.toml they differ in the
// plan at most, as runs alike and twins do. The records of others need not be read.
std::vector<std::filesystem::path> comparable_beside(const RunRecords& run);

// The healthy twin of a run: the same recorded seed and settings, with a remedy everywhere. Of several, one of the same plan, then
// the longest; null: none.
const RunRecords* twin_of(const RunRecords& run, std::span<const RunRecords> among);

HistoryForecast forecast_by_history(const RunRecords& run, std::span<const RunRecords> earlier);

// "2 of 3 earlier runs with this plan and these settings failed, at steps 4,200 and 6,200: failure near step 4,200 (2,800 to 6,300)"
std::string in_words(const HistoryForecast& found);

}  // namespace evenkeel
