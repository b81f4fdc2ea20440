#include "training/schedule.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>

#include "base/error.h"
#include "numerics/names.h"

namespace evenkeel {

Course parse_course(std::string_view text) {
  const auto course = value_named<Course>(text, kCourseNames);
  require(course.has_value(), "[schedule] expected constant, cosine, linear or wsd, got '{}'", text);
  return *course;
}

double Schedule::at(int64_t step) const {
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (course == Course::constant) return peak;
  const int64_t decay = course == Course::wsd
                            ? static_cast<int64_t>(std::lround(decay_share * static_cast<double>(steps)))
                            : steps - warmup;
  const int64_t start = steps - decay;
  if (step < start) return peak;
  // From 0 at the start to 1 where the run is over.
  const double part =
      decay <= 0 ? 1 : std::min(1.0, static_cast<double>(step - start) / static_cast<double>(decay));
  const double height = course == Course::cosine ? (1 + std::cos(std::numbers::pi * part)) / 2 : 1 - part;
  return floor + (peak - floor) * height;
}

void validate(const Schedule& s) {
  require(std::isfinite(s.peak) && s.peak > 0, "[schedule] lr: expected a learning rate above 0, got {}",
          s.peak);
  require(s.floor >= 0 && s.floor <= s.peak,
          "[schedule] last_lr: expected a learning rate from 0 to {}, got {}", s.peak, s.floor);
  require(s.warmup >= 0, "[schedule] warmup: expected 0 or more steps, got {}", s.warmup);
  require(s.course == Course::constant || s.steps > s.warmup,
          "[schedule] steps: expected more than the {} of the warm-up for the course {}, got {}", s.warmup,
          name(s.course), s.steps);
  require(s.decay_share >= 0 && s.decay_share <= 1,
          "[schedule] decay_share: expected a share from 0 to 1, got {}", s.decay_share);
}

}  // namespace evenkeel
