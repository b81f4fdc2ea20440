// Maps of colours, and dots on a common axis.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "report/chart.h"
#include "report/chart_parts.h"
#include "report/html.h"

namespace evenkeel {
namespace {

constexpr int kLevels = 24;          // of colour
constexpr double kLongestRow = 190;  // name of a row

// At most so many columns: of every stretch the value of the largest size.
void narrow(HeatMap& map, size_t most) {
  if (map.x.size() <= most) return;
  HeatMap out = map;
  out.x.clear();
  for (std::vector<double>& row : out.values) row.clear();
  for (size_t n = 0; n < most; ++n) {
    const size_t begin = n * map.x.size() / most, end = (n + 1) * map.x.size() / most;
    out.x.push_back(map.x[begin]);
    for (size_t r = 0; r < map.values.size(); ++r) {
      double best = map.values[r][begin];
      for (size_t k = begin; k < end; ++k)
        if (std::isnan(best) || std::fabs(map.values[r][k]) > std::fabs(best)) best = map.values[r][k];
      out.values[r].push_back(best);
    }
  }
  map = std::move(out);
}

// The colours of a map: a path a level, in units of cells; and all values, for the script.
struct Cells {
  std::array<std::string, kLevels> paths;
  std::string values;
};
template <class Scaled>
Cells cells_of(const HeatMap& map, const Range& range, Scaled scaled) {
  Cells cells;
  for (size_t r = 0; r < map.values.size(); ++r)
    for (size_t c = 0; c < map.x.size(); ++c) {
      const double value = map.values[r][c], s = scaled(value);
      cells.values += fmt::format("{}{}", c == 0 ? (r == 0 ? "" : ";") : " ",
                                  std::isfinite(value) ? fmt::format("{:.3g}", value) : "-");
      if (!std::isfinite(s)) continue;
      const int level =
          std::clamp(static_cast<int>((s - range.low) / (range.high - range.low) * kLevels), 0, kLevels - 1);
      cells.paths[static_cast<size_t>(level)] += fmt::format("M{} {}h1v1h-1z", c, r);
    }
  return cells;
}

struct Box {
  double left, top, width, height;
  double bottom() const { return top + height; }
};

// Names of rows, as many as there is room for, and ticks of columns.
std::string axes_of(const HeatMap& map, const Box& box) {
  std::string svg = "<g class=\"axis y rows\">";
  const size_t every = std::max<size_t>(1, static_cast<size_t>(std::ceil(11 / map.row_height)));
  for (size_t r = 0; r < map.rows.size(); r += every)
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", box.left - 6,
                       box.top + map.row_height * (static_cast<double>(r) + 0.5) + 3.8,
                       escape(fitted(map.rows[r], kLongestRow)));
  svg += "</g><g class=\"axis x\"><g class=\"ticks\">";
  const int wanted = std::max(2, static_cast<int>(box.width / 90));
  for (const Tick& tick : linear_ticks(map.x.front(), map.x.back(), wanted)) {
    // Between columns, where x does not advance evenly, the nearest.
    const auto place = std::lower_bound(map.x.begin(), map.x.end(), tick.value - 1e-9) - map.x.begin();
    const double x =
        box.left + box.width * (static_cast<double>(place) + 0.5) / static_cast<double>(map.x.size());
    svg += fmt::format("<path d=\"M{0:.1f} {1:.1f}v4\"/><text x=\"{0:.1f}\" y=\"{2:.1f}\">{3}</text>", x,
                       box.bottom(), box.bottom() + 15, tick.label);
  }
  return svg + fmt::format("</g><text class=\"name\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text></g>",
                           box.left + box.width, box.bottom() + 29, escape(map.x_label));
}

// A strip of the colours with its ends, where it fits beside the title.
std::string key_of(const HeatMap& map, const Box& box, const Range& range, const char* ramp) {
  const double key = std::min(120.0, box.width / 3);
  const std::string ends[2] = {figure(map.log_value ? std::pow(10.0, range.low) : range.low, 2),
                               figure(map.log_value ? std::pow(10.0, range.high) : range.high, 2)};
  const double key_x = box.left + box.width - key - width_of(ends[1]) - 4;
  if (key_x - width_of(ends[0]) <= width_of(map.title) + 8) return "";
  std::string svg =
      fmt::format("<g class=\"key\"><text class=\"to\" x=\"{:.1f}\" y=\"12\">{}</text>", key_x - 5, ends[0]);
  for (int level = 0; level < kLevels; ++level)
    svg += fmt::format("<rect class=\"{}{}\" x=\"{:.2f}\" y=\"4\" width=\"{:.2f}\" height=\"9\"/>", ramp,
                       level, key_x + key * level / kLevels, key / kLevels + 0.3);
  return svg + fmt::format("<text x=\"{:.1f}\" y=\"12\">{}</text></g>", key_x + key + 5, ends[1]);
}

}  // namespace

std::string draw(const HeatMap& whole) {
  HeatMap map = whole;
  constexpr size_t kMostCells = 8192;
  if (map.values.empty() || map.x.empty()) return nothing(map.title);
  narrow(map, std::max<size_t>(16, kMostCells / map.values.size()));
  Range range;
  const auto scaled = [&](double value) { return map.log_value ? std::log10(value) : value; };
  for (const auto& row : map.values)
    for (const double value : row)
      if (!map.log_value || value > 0) range.add(scaled(value));
  if (range.empty()) return nothing(map.title);
  if (map.range) range = {scaled(map.range->first), scaled(map.range->second)};
  if (map.is_signed) {
    const double size = std::max({std::fabs(range.low), std::fabs(range.high), 1e-30});
    range = {-size, size};
  }
  if (range.high == range.low) range.high = range.low + 1;

  double left = 8;
  for (const std::string& row : map.rows) left = std::max(left, std::min(kLongestRow, width_of(row)) + 12);
  const Box box{left, 22, map.width - left - 12, map.row_height * static_cast<double>(map.values.size())};
  const Cells cells = cells_of(map, range, scaled);
  std::string xs, names;
  for (const double x : map.x) xs += (xs.empty() ? "" : " ") + plain(x);
  for (const std::string& row : map.rows) names += (names.empty() ? "" : "\n") + row;
  std::string svg =
      head_of(map.id, map.title, map.description, map.width, box.bottom() + 34,
              fmt::format("class=\"heat\" id=\"{}\" data-box=\"{:.1f} {:.1f} {:.1f} {:.1f}\" "
                          "data-cells=\"{}\" data-xs=\"{}\" "
                          "data-rows=\"{}\" data-xname=\"{}\" data-yname=\"{}\" data-vname=\"{}\"",
                          map.id, box.left, box.top, box.width, box.height, cells.values, xs, escape(names),
                          escape(map.x_label), escape(map.y_label), escape(map.value_label)));
  svg += fmt::format("<text class=\"name\" x=\"0\" y=\"12\">{}</text>", escape(map.title));
  const char* const ramp = map.is_signed ? "d" : "q";
  svg += fmt::format("<g class=\"cells\" transform=\"translate({:.1f} {:.1f}) scale({:.7g} {:.7g})\">",
                     box.left, box.top, box.width / static_cast<double>(map.x.size()), map.row_height);
  for (size_t level = 0; level < cells.paths.size(); ++level)
    if (!cells.paths[level].empty())
      svg += fmt::format("<path class=\"{}{}\" d=\"{}\"/>", ramp, level, cells.paths[level]);
  svg += "</g>\n" + axes_of(map, box) + key_of(map, box, range, ramp) + "</svg>\n";
  return fmt::format("<figure class=\"drawing\"><div class=\"scroll\">{}</div></figure>\n", svg);
}

std::string draw(const DotPlot& plot) {
  Range range;
  for (const Dot& dot : plot.dots)
    if (!plot.log_x || dot.value > 0) range.add(dot.value);
  for (const Guide& guide : plot.guides) range.add(guide.y);
  if (range.empty()) return nothing(plot.title);
  const Axis axis = axis_of(range, plot.log_x, !plot.log_x);
  // Names and figures stand above their stems, so that they take nothing of the width: the same on a telephone.
  constexpr double kRow = 34, kTop = 26, kSide = 16;
  const double width = plot.width - 2 * kSide, bottom = kTop + kRow * static_cast<double>(plot.dots.size());
  const auto px = [&](double value) {
    const double place = axis.place(value);
    return kSide + width * (std::isnan(place) ? 1 : std::clamp(place, 0.0, 1.0));
  };
  std::string svg = head_of(plot.id, plot.title, plot.description, plot.width, bottom + 36,
                            fmt::format("class=\"dots\" id=\"{}\"", plot.id));
  svg += "<g class=\"axis x\"><g class=\"ticks\">";
  for (const Tick& tick : ticks_of(axis, 5)) {
    const double x = kSide + width * (tick.value - axis.low) / (axis.high - axis.low);
    svg += fmt::format(
        "<path class=\"hair\" d=\"M{0:.1f} {1:.1f}V{2:.1f}\"/><text x=\"{0:.1f}\" y=\"{3:.1f}\">{4}</text>",
        x, kTop - 4, bottom, bottom + 16, tick.label);
  }
  svg += fmt::format("</g><text class=\"name\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text></g>", kSide + width,
                     bottom + 31, escape(plot.x_label));
  for (const Guide& guide : plot.guides) {
    // On the side of the rule where there is room.
    const bool left_of = px(guide.y) + width_of(guide.label) + 6 > plot.width;
    svg += fmt::format(
        "<g class=\"rule\"><path d=\"M{0:.1f} {1:.1f}V{2:.1f}\"/><text{6} x=\"{3:.1f}\" "
        "y=\"{4:.1f}\">{5}</text></g>",
        px(guide.y), kTop - 4, bottom, px(guide.y) + (left_of ? -4 : 4), kTop - 8, escape(guide.label),
        left_of ? " class=\"to\"" : "");
  }
  for (size_t n = 0; n < plot.dots.size(); ++n) {
    const Dot& dot = plot.dots[n];
    const double y = kTop + kRow * static_cast<double>(n), room = width - width_of(dot.note) - 12;
    svg += fmt::format(
        "<g class=\"dot {0}\"><text class=\"label\" x=\"{1:.1f}\" y=\"{2:.1f}\">{3}</text>"
        "<text class=\"note\" x=\"{4:.1f}\" y=\"{2:.1f}\">{5}</text>"
        "<path class=\"stem\" d=\"M{1:.1f} {6:.1f}H{7:.1f}\"/><circle cx=\"{7:.1f}\" cy=\"{6:.1f}\" "
        "r=\"4.5\"/></g>\n",
        dot.style, kSide, y + 14, escape(fitted(dot.label, room, kBoldWidth)), kSide + width,
        escape(dot.note), y + 25, px(dot.value));
  }
  svg += "</svg>\n";
  return fmt::format("<figure class=\"drawing\"><div class=\"scroll\">{}</div></figure>\n", svg);
}

}  // namespace evenkeel
