// The learning rate over a run: a linear warm-up, then one of four courses.
#pragma once

#include <cstdint>
#include <string_view>

namespace evenkeel {

enum class Course {
  constant,  // stays at its peak
  cosine,    // falls along half a cosine to the end
  linear,    // falls along a straight line to the end
  wsd,       // warm-up, stable, decay: at its peak, then a straight line over the last share of the steps
};
inline constexpr std::string_view kCourseNames[] = {"constant", "cosine", "linear", "wsd"};
constexpr std::string_view name(Course course) { return kCourseNames[static_cast<size_t>(course)]; }
Course parse_course(std::string_view text);  // std::invalid_argument lists the known ones

struct Schedule {
  Course course = Course::constant;
  double peak = 3e-4;        // largest learning rate
  double floor = 0;          // where a falling course ends
  int64_t warmup = 0;        // steps; the first of them runs at peak / warmup
  int64_t steps = 0;         // of the whole run: where a falling course ends
  double decay_share = 0.2;  // wsd: of all steps

  // Of step 0, 1, ... Behind the end: the floor.
  double at(int64_t step) const;
};
void validate(const Schedule& schedule);  // std::invalid_argument: what was expected, what was found

}  // namespace evenkeel
