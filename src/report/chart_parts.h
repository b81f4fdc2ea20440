// What all drawings are made of: axes, ticks, names that fit. For chart.cpp and chart_maps.cpp alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace evenkeel {

inline constexpr double kTextWidth = 7;  // of a character, in the chart's units; a little too wide
inline constexpr double kBoldWidth = 8.2;
double width_of(std::string_view text, double character = kTextWidth);
// The text, or its begin and its end around an ellipsis where it is wider than `room`.
std::string fitted(std::string_view text, double room, double character = kTextWidth);

struct Axis {
  double low = 0, high = 1;  // of a logarithmic one: exponents of ten
  bool log = false;

  double place(double value) const {  // 0 to 1 inside
    return ((log ? std::log10(value) : value) - low) / (high - low);
  }
};

struct Tick {
  double value;
  std::string label;
};
// In the axis's own numbers: exponents where it is logarithmic.
std::vector<Tick> ticks_of(const Axis& axis, int wanted);
std::vector<Tick> linear_ticks(double low, double high, int wanted);

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  void add(double value) {
    constexpr double kFar = 1e300;  // beyond, an axis would have no length that is a number
    if (std::fabs(value) < kFar) low = std::min(low, value), high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};
Axis axis_of(Range range, bool log, bool zero);

std::string plain(double value);
// The begin of a drawing: its size, its name and what to see in it for whoever cannot.
std::string head_of(const std::string& id, const std::string& title, const std::string& description,
                    double width, double height, const std::string& attributes);
// What stands in the place of a drawing without a number.
std::string nothing(const std::string& title);

}  // namespace evenkeel
