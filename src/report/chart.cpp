#include "report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "report/chart_parts.h"
#include "report/html.h"

namespace evenkeel {
namespace {

constexpr double kLongestEnd = 200;       // room for a name, right of the curves
constexpr double kLane = 27, kFoot = 34;  // heights of a lane, and of what is below the curves

Range y_range_of(const Chart& chart) {
  Range range;
  const auto add = [&](double value) {
    if (!chart.log_y || value > 0) range.add(value);
  };
  for (const Line& line : chart.lines) {
    // A curve that is only there as the scatter behind a mean does not set the axis; nor does what leaves the chart.
    for (const double value : line.y)
      if (!chart.highest || value <= *chart.highest) add(value);
    for (const double value : line.low) add(value);
    for (const double value : line.high) add(value);
  }
  return range;
}

// "M0 9912l1 -4 1 -2M5 ...": absolute where a curve begins, relative behind.
class PathWriter {
 public:
  void gap() { open_ = false; }
  void to(double x, int64_t y) {
    if (!open_)
      text_ += fmt::format("M{} {}", plain(x), y), relative_ = false;
    else
      text_ += fmt::format("{}{} {}", relative_ ? " " : "l", plain(x - x_), y - y_), relative_ = true;
    open_ = true, x_ = x, y_ = y;
  }
  std::string text() const { return text_; }

 private:
  std::string text_;
  bool open_ = false, relative_ = false;
  double x_ = 0;
  int64_t y_ = 0;
};

struct Plot {
  double left, top, width, height;
  Axis x, y;

  double px(double value) const { return left + width * x.place(value); }
  double py(double value) const { return top + height * (1 - y.place(value)); }
  // From the top in parts of the axis; what is far outside stays near, so that no number is large.
  int64_t grid(double value) const {
    return static_cast<int64_t>(std::lround(kGrid * (1 - std::clamp(y.place(value), -3.0, 4.0))));
  }
  bool drawable(double value) const { return std::isfinite(value) && (!y.log || value > 0); }

  std::string path(const std::vector<double>& xs, const std::vector<double>& ys) const {
    PathWriter writer;
    for (size_t n = 0; n < xs.size(); ++n) {
      if (drawable(ys[n]))
        writer.to(xs[n] - x.low, grid(ys[n]));
      else
        writer.gap();
    }
    return writer.text();
  }
  std::string band(const Line& line) const {
    std::string text;
    for (size_t begin = 0; begin < line.x.size();) {
      size_t end = begin;
      const auto whole = [&](size_t n) { return drawable(line.high[n]) && std::isfinite(line.low[n]); };
      while (end < line.x.size() && whole(end)) ++end;
      if (end == begin) {
        ++begin;
        continue;
      }
      PathWriter writer;
      for (size_t n = begin; n < end; ++n) writer.to(line.x[n] - x.low, grid(line.high[n]));
      for (size_t n = end; n-- > begin;)
        writer.to(line.x[n] - x.low, drawable(line.low[n]) ? grid(line.low[n]) : kGrid);
      text += writer.text() + "z";
      begin = end;
    }
    return text;
  }
};

// Names at the ends of curves, moved apart so that none covers another. (wanted y, index) -> y
std::vector<double> spread_out(std::vector<double> wanted, double gap, double low, double high) {
  std::vector<size_t> order(wanted.size());
  for (size_t n = 0; n < order.size(); ++n) order[n] = n;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return wanted[a] < wanted[b]; });
  double next = low;
  for (const size_t n : order) wanted[n] = std::max(wanted[n], next), next = wanted[n] + gap;
  next = high;
  for (size_t k = order.size(); k-- > 0;) {
    double& y = wanted[order[k]];
    y = std::min(y, next), next = y - gap;
  }
  return wanted;
}

// The value at the end of a curve: where its name goes.
std::optional<double> last_of(const Line& line, const Plot& plot) {
  for (size_t n = line.y.size(); n-- > 0;)
    if (plot.drawable(line.y[n])) return line.y[n];
  return {};
}

// A table of what a chart shows, at a few places.
std::string table_of(const Chart& chart) {
  constexpr size_t kRows = 9;
  std::vector<const Line*> named;
  std::vector<double> xs;
  for (const Line& line : chart.lines)
    if (line.named && !line.x.empty()) named.push_back(&line);
  if (named.empty()) return "";
  for (const Line* line : named) xs.insert(xs.end(), line->x.begin(), line->x.end());
  std::sort(xs.begin(), xs.end());
  xs.erase(std::unique(xs.begin(), xs.end()), xs.end());
  std::string text = fmt::format(
      "<details class=\"data\"><summary>Figures</summary><div class=\"scroll\"><table>"
      "<caption>{}: {}</caption><thead><tr><th scope=\"col\">{}</th>",
      escape(chart.title), escape(chart.y_label), escape(chart.x_label));
  for (const Line* line : named) text += fmt::format("<th scope=\"col\">{}</th>", escape(line->label));
  text += "</tr></thead><tbody>\n";
  const size_t rows = std::min(kRows, xs.size());
  for (size_t r = 0; r < rows; ++r) {
    const double x = xs[rows == 1 ? 0 : r * (xs.size() - 1) / (rows - 1)];
    text += fmt::format("<tr><th scope=\"row\">{}</th>",
                        x == std::round(x) ? count(static_cast<int64_t>(x)) : figure(x, 6));
    for (const Line* line : named) {
      const auto next = std::lower_bound(line->x.begin(), line->x.end(), x);
      const bool beyond = next == line->x.end();
      const double y = beyond ? std::numeric_limits<double>::quiet_NaN()
                              : line->y[static_cast<size_t>(next - line->x.begin())];
      text += fmt::format("<td>{}</td>", beyond || std::isnan(y) ? "–" : figure(y, 4));
    }
    text += "</tr>\n";
  }
  return text + "</tbody></table></div></details>\n";
}

std::string glyph(const std::string& style, double x, double y) {
  // Shapes, not only colours, tell kinds apart.
  if (style == "guard")
    return fmt::format("<path class=\"mark guard\" d=\"M{:.1f} {:.1f}l5 9h-10z\"/>", x, y - 5);
  if (style == "change")
    return fmt::format("<path class=\"mark change\" d=\"M{:.1f} {:.1f}l5 5-5 5-5-5z\"/>", x, y - 5);
  if (style == "symptom")
    return fmt::format("<circle class=\"mark symptom\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\"/>", x, y);
  if (style == "finding")
    return fmt::format("<path class=\"mark finding\" d=\"M{:.1f} {:.1f}l8 8m0-8l-8 8\"/>", x - 4, y - 4);
  return fmt::format("<circle class=\"mark check\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.2\"/>", x, y);
}

// Where everything goes.
struct Layout {
  Plot plot{};
  std::vector<Tick> x_ticks, y_ticks;
  bool ends = false;  // curves have their names at their ends
  double bottom() const { return plot.top + plot.height; }
};

std::optional<Layout> layout_of(const Chart& chart) {
  Range x_range, y_range = y_range_of(chart);
  for (const Line& line : chart.lines)
    for (const double x : line.x) x_range.add(x);
  for (const Lane& lane : chart.lanes)
    for (const Mark& mark : lane.marks) x_range.add(mark.x);
  if (x_range.empty() || y_range.empty()) return {};
  if (chart.x_range) x_range = {chart.x_range->first, chart.x_range->second};
  if (chart.y_range) y_range = {chart.y_range->first, chart.y_range->second};
  for (const Guide& guide : chart.guides)
    if (!chart.log_y || guide.y > 0) y_range.add(guide.y);
  if (x_range.high == x_range.low) x_range.high = x_range.low + 1;

  Layout layout;
  Plot& plot = layout.plot;
  plot.x = {x_range.low, x_range.high, false};
  plot.y = axis_of(y_range, chart.log_y, chart.zero_y);
  layout.y_ticks = ticks_of(plot.y, chart.small ? 3 : 5);
  layout.x_ticks = ticks_of(plot.x, chart.small ? 3 : 7);
  double left = chart.small ? 16 : chart.least_left, right = chart.small ? 10 : 16;
  for (const Tick& tick : layout.y_ticks) left = std::max(left, width_of(tick.label) + 12);
  // Half of the last tick's label stands beyond the axis.
  if (!layout.x_ticks.empty()) right = std::max(right, width_of(layout.x_ticks.back().label) / 2 + 2);
  // One curve needs no name: the axis has it.
  const auto named_lines =
      std::count_if(chart.lines.begin(), chart.lines.end(), [](const Line& line) { return line.named; });
  layout.ends = !chart.small && named_lines > 1;
  for (const Line& line : chart.lines)
    if (line.named && layout.ends)
      right = std::max(right, std::min(kLongestEnd, width_of(line.label, kBoldWidth)) + 14);
  const double lanes = kLane * static_cast<double>(chart.lanes.size()) + (chart.lanes.empty() ? 0 : 8);
  plot.left = left, plot.top = 24;
  plot.width = chart.width - left - right;
  plot.height = chart.height - plot.top - kFoot - lanes;
  return layout;
}

// Hairlines at the ticks of y, a line at the foot.
std::string axes_of(const Chart& chart, const Layout& layout) {
  const Plot& plot = layout.plot;
  std::string svg = "<g class=\"axis y\"><g class=\"ticks\">";
  for (const Tick& tick : layout.y_ticks) {
    const double y = plot.top + plot.height * (1 - (tick.value - plot.y.low) / (plot.y.high - plot.y.low));
    svg += fmt::format("<path d=\"M{:.1f} {:.1f}h{:.1f}\"/><text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
                       plot.left, y, plot.width, plot.left - 7, y + 3.8, tick.label);
  }
  svg += fmt::format("</g><text class=\"name\" x=\"{:.1f}\" y=\"12\">{}</text></g>\n",
                     chart.small ? 0 : plot.left,
                     escape(chart.small ? fitted(chart.title, chart.width, kBoldWidth) : chart.y_label));
  svg +=
      fmt::format("<g class=\"axis x\"><path class=\"foot\" d=\"M{:.1f} {:.1f}h{:.1f}\"/><g class=\"ticks\">",
                  plot.left, layout.bottom(), plot.width);
  for (const Tick& tick : layout.x_ticks)
    svg += fmt::format("<path d=\"M{0:.1f} {1:.1f}v4\"/><text x=\"{0:.1f}\" y=\"{2:.1f}\">{3}</text>",
                       plot.px(tick.value), layout.bottom(), layout.bottom() + 16, tick.label);
  return svg + fmt::format("</g><text class=\"name\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text></g>\n",
                           plot.left + plot.width, layout.bottom() + 30, escape(chart.x_label));
}

// Levels that mean something, below the curves.
std::string rules_of(const Chart& chart, const Layout& layout) {
  const Plot& plot = layout.plot;
  std::string svg;
  for (const Guide& guide : chart.guides) {
    if (chart.log_y && guide.y <= 0) continue;
    const double y = plot.py(guide.y);
    if (!std::isfinite(y) || y < plot.top - 1 || y > layout.bottom() + 1) continue;
    svg += fmt::format("<g class=\"rule\" data-at=\"{}\"><path d=\"M{:.1f} {:.1f}h{:.1f}\"/>",
                       plot.grid(guide.y), plot.left, y, plot.width);
    if (!guide.label.empty())
      svg +=
          fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", plot.left + 4, y - 4, escape(guide.label));
    svg += "</g>\n";
  }
  return svg;
}

std::string curves_of(const Chart& chart, const Layout& layout) {
  const Plot& plot = layout.plot;
  std::string svg = fmt::format(
      "<g clip-path=\"url(#{}-clip)\"><g class=\"plot\" transform=\"matrix({:.8g} 0 0 {:.8g} {:.1f} "
      "{:.1f})\">\n",
      chart.id, plot.width / (plot.x.high - plot.x.low), plot.height / kGrid, plot.left, plot.top);
  for (const Lane& lane : chart.lanes)
    for (const Mark& mark : lane.marks)
      if (mark.through)
        svg += fmt::format("<path class=\"happened {}\" d=\"M{} 0V{}\"/>\n", escape(mark.style),
                           plain(mark.x - plot.x.low), kGrid);
  for (const Line& line : chart.lines)
    if (!line.low.empty())
      svg += fmt::format("<path class=\"band {}\" d=\"{}\"/>\n", line.style, plot.band(line));
  for (const Line& line : chart.lines) {
    const std::string path = plot.path(line.x, line.y);
    if (path.empty()) continue;
    svg += fmt::format("<path class=\"line {}\"{} d=\"{}\"/>\n", line.style,
                       line.named ? fmt::format(" data-name=\"{}\"", escape(line.label)) : "", path);
  }
  return svg + "</g></g>\n";
}

// Names at the ends of the curves.
std::string ends_of(const Chart& chart, const Layout& layout) {
  if (!layout.ends) return "";
  const Plot& plot = layout.plot;
  std::vector<double> wanted;
  std::vector<const Line*> named;
  for (const Line& line : chart.lines)
    if (line.named && !line.label.empty())
      if (const auto last = last_of(line, plot)) {
        named.push_back(&line);
        wanted.push_back(std::clamp(plot.py(*last), plot.top, layout.bottom()));
      }
  wanted = spread_out(std::move(wanted), 14, plot.top + 4, layout.bottom() - 2);
  std::string svg = "<g class=\"ends\">";
  for (size_t n = 0; n < named.size(); ++n)
    svg += fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", named[n]->style,
                       plot.left + plot.width + 7, wanted[n] + 4,
                       escape(fitted(named[n]->label, kLongestEnd, kBoldWidth)));
  return svg + "</g>\n";
}

// Events below the curves, a lane a run, its name above it: so it takes nothing of the width.
std::string lanes_of(const Chart& chart, const Layout& layout) {
  if (chart.lanes.empty()) return "";
  const Plot& plot = layout.plot;
  std::string svg = "<g class=\"lanes\">";
  double y = layout.bottom() + kFoot + 18;
  for (const Lane& lane : chart.lanes) {
    svg += fmt::format(
        "<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text><path class=\"lane\" d=\"M{:.1f} "
        "{:.1f}h{:.1f}\"/>",
        lane.style, plot.left, y - 8, escape(fitted(lane.label, plot.width)), plot.left, y, plot.width);
    for (const Mark& mark : lane.marks)
      svg += fmt::format("<g class=\"event\" data-at=\"{}\" data-says=\"{}\">{}<title>{}</title></g>",
                         plain(mark.x), escape(mark.words), glyph(mark.style, plot.px(mark.x), y),
                         escape(mark.words));
    y += kLane;
  }
  return svg + "</g>\n";
}

// The names again, above the chart, for screens on which those inside would be too small to read.
std::string legend_of(const Chart& chart, const Layout& layout) {
  if (!layout.ends) return "";
  std::string text = "<p class=\"legend\" aria-hidden=\"true\">";
  for (const Line& line : chart.lines)
    if (line.named && !line.label.empty())
      text += fmt::format("<span class=\"{}\">{}</span> ", line.style, escape(line.label));
  return text + "</p>\n";
}

}  // namespace

std::string legend_mark(const std::string& style) {
  return fmt::format("<svg viewBox=\"0 0 12 12\" aria-hidden=\"true\">{}</svg>", glyph(style, 6, 6));
}

std::optional<std::pair<double, double>> common_range(std::span<const Chart> charts) {
  Range range;
  for (const Chart& chart : charts) {
    const Range own = y_range_of(chart);
    if (!own.empty()) range.add(own.low), range.add(own.high);
  }
  if (range.empty()) return {};
  return std::pair(range.low, range.high);
}

// Labels of the y axis that are nearer to each other than this touch on a telephone, where their font is larger (page.css).
constexpr double kLeastGap = 20;
static bool is_low(const Layout& layout) {
  const size_t gaps = std::max<size_t>(layout.y_ticks.size(), 2) - 1;
  return layout.plot.height < kLeastGap * static_cast<double>(gaps);
}

std::string draw(const Chart& chart) {
  const std::optional<Layout> layout = layout_of(chart);
  if (!layout) return nothing(chart.title);
  const Plot& plot = layout->plot;
  std::string svg =
      head_of(chart.id, chart.title, chart.description, chart.width, chart.height,
              fmt::format("class=\"chart{}\" id=\"{}\" data-x=\"{} {}\" data-y=\"{} {}\" data-log=\"{}\" "
                          "data-box=\"{:.1f} {:.1f} "
                          "{:.1f} {:.1f}\" data-xname=\"{}\" data-yname=\"{}\"",
                          chart.small       ? " small"
                          : is_low(*layout) ? " low"
                                            : "",
                          chart.id, plain(plot.x.low), plain(plot.x.high), fmt::format("{:.9g}", plot.y.low),
                          fmt::format("{:.9g}", plot.y.high), chart.log_y ? 1 : 0, plot.left, plot.top,
                          plot.width, plot.height, escape(chart.x_label), escape(chart.y_label)));
  svg += fmt::format(
      "<defs><clipPath id=\"{}-clip\"><rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
      "height=\"{:.1f}\"/></clipPath></defs>\n",
      chart.id, plot.left, plot.top - 3, plot.width + 2, plot.height + 3);
  svg += axes_of(chart, *layout) + curves_of(chart, *layout) + rules_of(chart, *layout) +
         ends_of(chart, *layout) + lanes_of(chart, *layout) + "</svg>\n";
  return fmt::format("<figure class=\"drawing{}\">{}<div class=\"scroll\">{}</div>{}</figure>\n",
                     chart.small ? " small" : "", legend_of(chart, *layout), svg,
                     chart.small ? "" : table_of(chart));
}

}  // namespace evenkeel
