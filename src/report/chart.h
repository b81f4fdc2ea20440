// Charts as SVG. Curves are drawn in the numbers themselves (x as it is, y in kGrid parts of its axis) under one transform.
// The script zooms by changing that transform, and reads values back from the paths: the data is in the page once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace evenkeel {

inline constexpr int kGrid = 10000;  // a value is off by at most half a part

struct Line {
  std::string label;
  // Classes of page.css: c0 to c7 is a colour; raw, quiet and dashed are ways to draw it.
  std::string style;
  std::vector<double> x, y;       // x ascending; where y is not finite the curve has a gap
  std::vector<double> low, high;  // a confidence band around it, (x); or empty
  bool named = true;              // has a name at its end, and a value on hover
};

// Something that happened at x. Drawn in a lane below the curves.
struct Mark {
  double x = 0;
  std::string style;  // check, change, guard, finding, symptom
  std::string words;
  bool through = false;  // a hairline through the curves, too
};
struct Lane {
  std::string label, style;
  std::vector<Mark> marks;
};
struct Guide {  // a level that means something
  double y = 0;
  std::string label;
};

struct Chart {
  std::string id;                  // once in a page
  std::string title, description;  // the description is for whoever cannot see it, and says what to see
  std::string x_label = "step", y_label;
  bool log_y = false, zero_y = false;                         // zero_y: the axis has 0 on it
  std::optional<double> highest;                              // what is above leaves the chart
  std::optional<std::pair<double, double>> x_range, y_range;  // none: that of the lines
  double width = 760, height = 300;
  double least_left = 58;  // room for ticks: charts above one another have one axis
  std::vector<Line> lines;
  std::vector<Guide> guides;
  std::vector<Lane> lanes;
  bool small = false;  // one of many: fewer ticks, no table
};
std::string draw(const Chart& chart);
// The sign of a mark's style, by itself.
std::string legend_mark(const std::string& style);
// The range of y over all charts, so that small multiples have one axis; nothing where there is no number.
std::optional<std::pair<double, double>> common_range(std::span<const Chart> charts);

struct HeatMap {
  std::string id, title, description;
  std::string x_label, y_label, value_label;
  std::vector<std::string> rows;            // their names; may be empty
  std::vector<double> x;                    // (columns): what each stands for
  std::vector<std::vector<double>> values;  // (rows, columns)
  bool is_signed = false;                   // colours around 0
  bool log_value = false;
  double width = 760, row_height = 14;
  std::optional<std::pair<double, double>> range;  // of the colours; none: of the values
};
std::string draw(const HeatMap& map);

// One number a row, on a common axis, each with its name and figures.
struct Dot {
  std::string label, note, style;
  double value = 0;  // not finite: at the far end
};
struct DotPlot {
  std::string id, title, description, x_label;
  bool log_x = false;
  std::vector<Dot> dots;
  std::vector<Guide> guides;
  double width = 560;
};
std::string draw(const DotPlot& plot);

// At most about `most` points of a curve: of every stretch the first, the least, the largest and the last, so that no peak
// is lost. Indices, ascending.
std::vector<size_t> thinned(std::span<const double> y, size_t most);
Line thin(const Line& line, size_t most);

// The mean over stretches of about equal length, with a band of two standard errors from the rows' own (`error`: a standard
// error of each y; empty: from the scatter within the stretch).
Line binned(const Line& line, std::span<const double> error, size_t bins);
// The same for what is drawn on a logarithmic axis: means of logarithms.
Line binned_logarithms(const Line& line, size_t bins);

}  // namespace evenkeel
