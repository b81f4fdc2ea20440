#include "diagnosis/health.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace evenkeel {
namespace {

// Of two the lower one; 0 of none.
double lower_median(std::vector<double> values) {
  if (values.empty()) return 0;
  for (double& value : values)
    if (std::isnan(value)) value = std::numeric_limits<double>::infinity();
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

DriftLimit limit_from_run(const std::vector<double>& of_heads) {
  const double level = lower_median(of_heads);
  return {std::clamp(kDriftTimes * level, kLowestDriftLimit, kHighestDriftLimit), level, false};
}

DriftLimit limit_from_control(const std::vector<double>& of_heads) {
  const double level = lower_median(of_heads);
  double limit = std::max(kDriftTimes * level, kLowestDriftLimit);
  for (const double offset : of_heads)
    if (std::isfinite(offset)) limit = std::max(limit, 2 * offset);
  return {limit, level, true};
}

std::string in_words(const DriftLimit& l) {
  const char* const whose = l.of_control ? "the median head of the FP32 control" : "this run's median head";
  const double times = kDriftTimes * l.level;
  if (l.limit == times)
    return fmt::format("limit {}: {:.0f} times {:.3g}, {}", whole_text(l.limit), kDriftTimes, l.level, whose);
  if (l.limit < times)
    return fmt::format("limit {:.0f}: the highest without an FP32 control; {} has {:.3g}", l.limit, whose,
                       l.level);
  if (l.limit == kLowestDriftLimit)
    return fmt::format("limit {:.0f}: no smaller offset is called drift; {} has {:.3g}", l.limit, whose,
                       l.level);
  return fmt::format("limit {}: twice the largest head of the FP32 control", whole_text(l.limit));
}

std::string offset_text(double offset) {
  return offset >= 1e3 && offset < 1e6 ? fmt::format("{:.0f}", offset) : fmt::format("{:.3g}", offset);
}

std::string whole_text(double offset) {
  return offset < 1e6 ? fmt::format("{:.0f}", offset) : fmt::format("{:.3g}", offset);
}

std::string drift_in_words() {
  return fmt::format(
      "The offset of a head stays above {:.0f} times its healthy level and doubles. "
      "A diagnosis does not wait for the doubling.",
      kDriftTimes);
}

double mend_limit(const std::vector<double>& of_heads) {
  return std::max(limit_from_run(of_heads).limit / 2, kLowestDriftLimit);
}

}  // namespace evenkeel
