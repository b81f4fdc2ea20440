#include "model/quickest.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "numerics/median.h"

namespace evenkeel {
namespace {

constexpr double kBudget = 30e-3;  // seconds, of each part
constexpr size_t kAlways = 12, kFinalists = 4;
constexpr int kLeastRounds = 3, kMostRounds = 9, kMostRuns = 64;
constexpr double kTurn = 1e-3;  // seconds: so long that the clock's grain does not matter

struct Way {
  size_t index;
  double seconds;  // the first impression
  std::vector<double> turns = {};

  int runs() const { return static_cast<int>(std::clamp(kTurn / seconds, 1.0, double{kMostRuns})); }
};

}  // namespace

size_t quickest(size_t ways, const Stopwatch& watch) {
  std::vector<Way> found;
  double began = watch.now();
  for (size_t way = 0; way < ways && (way < kAlways || watch.now() - began < kBudget); ++way) {
    if (!std::isfinite(watch.seconds(way, 1))) continue;
    if (const double seconds = watch.seconds(way, 1); std::isfinite(seconds)) found.push_back({way, seconds});
  }
  if (found.empty()) return 0;
  std::ranges::stable_sort(found, {}, &Way::seconds);
  if (found.size() > kFinalists) found.erase(found.begin() + kFinalists, found.end());
  std::ranges::sort(found, {}, &Way::index);  // of equal ones the first
  began = watch.now();
  for (int round = 0; round < kMostRounds && (round < kLeastRounds || watch.now() - began < kBudget); ++round)
    for (Way& way : found) way.turns.push_back(watch.seconds(way.index, way.runs()));
  return std::ranges::min_element(found, {}, [](const Way& way) { return median(way.turns); })->index;
}

}  // namespace evenkeel
