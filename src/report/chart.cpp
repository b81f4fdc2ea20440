#include "report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "report/html.h"

namespace evenkeel {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kTextWidth = 6.3;  // of a character, in the chart's units; a little too wide
constexpr double kBoldWidth = 7.4;

// Characters, not bytes.
double width_of(std::string_view text, double character = kTextWidth) {
  return character * static_cast<double>(std::count_if(text.begin(), text.end(), [](char c) {
           return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
         }));
}

// --- Axes

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

std::string tick_label(double value, double step) {
  if (std::fabs(value) < 1e-9 * step) return "0";
  const int decimals = std::clamp(static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 12);
  const double size = std::fabs(value);
  if (size >= 1e6 || (size > 0 && step < 1e-4)) {
    const int exponent = static_cast<int>(std::floor(std::log10(size) + 1e-12));
    const double lead = value / std::pow(10.0, exponent);
    const std::string text = fmt::format("{:.3g}", lead);
    return (text == "1" ? "" : (text.starts_with('-') ? "−" + text.substr(1) : text) + "·") +
           power_of_ten(exponent);
  }
  if (size >= 1e4 && std::fmod(size, 1000) == 0)
    return fmt::format("{}{}k", value < 0 ? "−" : "", size / 1000);
  const std::string text = fmt::format("{:.{}f}", size, decimals);
  return (value < 0 && text.find_first_not_of("0.") != std::string::npos ? "−" : "") + text;
}

std::vector<Tick> linear_ticks(double low, double high, int wanted) {
  const double raw = (high - low) / wanted;
  if (!(raw > 0) || !std::isfinite(raw)) return {{low, figure(low)}};
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  const double step = power * (raw / power < 1.5 ? 1 : raw / power < 3.5 ? 2 : raw / power < 7.5 ? 5 : 10);
  std::vector<Tick> ticks;
  for (double n = std::ceil(low / step - 1e-9); n * step <= high + 1e-9 * (high - low) && ticks.size() < 32;
       ++n)
    ticks.push_back({n * step, tick_label(n * step, step)});
  return ticks;
}

std::vector<Tick> log_ticks(double low, double high, int wanted) {
  std::vector<Tick> ticks;
  const int first = static_cast<int>(std::ceil(low - 1e-9)), last = static_cast<int>(std::floor(high + 1e-9));
  const int every = std::max(1, (last - first + wanted) / wanted);
  if (last - first >= 1 && high - low >= 1.5) {
    for (int e = first; e <= last; ++e)
      if ((e - first) % every == 0) ticks.push_back({static_cast<double>(e), power_of_ten(e)});
    return ticks;
  }
  // Less than two decades: 1, 2 and 5 of each.
  for (int e = first - 1; e <= last; ++e)
    for (const int digit : {1, 2, 5}) {
      const double place = e + std::log10(digit);
      if (place >= low - 1e-9 && place <= high + 1e-9)
        ticks.push_back({place, figure(digit * std::pow(10.0, e), 1)});
    }
  return ticks;
}

// In the axis's own numbers: exponents where it is logarithmic.
std::vector<Tick> ticks_of(const Axis& axis, int wanted) {
  return axis.log ? log_ticks(axis.low, axis.high, wanted) : linear_ticks(axis.low, axis.high, wanted);
}

struct Range {
  double low = kInfinity, high = -kInfinity;
  void add(double value) {
    constexpr double kFar = 1e300;  // beyond, an axis would have no length that is a number
    if (std::fabs(value) < kFar) low = std::min(low, value), high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

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

Axis axis_of(Range range, bool log, bool zero) {
  Axis axis;
  axis.log = log;
  if (zero) range.add(0);
  if (range.empty()) range = log ? Range{1, 10} : Range{0, 1};
  if (log) range.low = std::log10(range.low), range.high = std::log10(range.high);
  const double least =
      log ? 0.5 : std::max(1e-12, 1e-6 * std::max(std::fabs(range.low), std::fabs(range.high)));
  if (range.high - range.low < least) {
    const double more = (least - (range.high - range.low)) / 2;
    range.low -= more, range.high += more;
  }
  const double margin = 0.04 * (range.high - range.low);
  axis.low = zero && range.low == 0 ? 0 : range.low - margin;
  axis.high = range.high + margin;
  return axis;
}

// --- Paths

std::string plain(double value) { return fmt::format("{:.10g}", value); }

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

}  // namespace

double lane_room(const std::string& label) { return std::min(120.0, width_of(label)) + 14; }

namespace {

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

std::string head_of(const std::string& id, const std::string& title, const std::string& description,
                    double width, double height, const std::string& attributes) {
  return fmt::format(
      "<svg viewBox=\"0 0 {:.0f} {:.0f}\" style=\"max-width:{:.0f}px\" role=\"img\" "
      "aria-labelledby=\"{}-t {}-d\" {}>\n<title id=\"{}-t\">{}</title><desc id=\"{}-d\">{}</desc>\n",
      width, height, 1.25 * width, id, id, attributes, id, escape(title), id, escape(description));
}

std::string nothing(const std::string& title) {
  return fmt::format("<p class=\"missing\">{}: no number to draw.</p>\n", escape(title));
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

std::string draw(const Chart& chart) {
  Range x_range, y_range = y_range_of(chart);
  for (const Line& line : chart.lines)
    for (const double x : line.x) x_range.add(x);
  for (const Lane& lane : chart.lanes)
    for (const Mark& mark : lane.marks) x_range.add(mark.x);
  if (x_range.empty() || y_range.empty()) return nothing(chart.title);
  if (chart.x_range) x_range = {chart.x_range->first, chart.x_range->second};
  if (chart.y_range) y_range = {chart.y_range->first, chart.y_range->second};
  for (const Guide& guide : chart.guides)
    if (!chart.log_y || guide.y > 0) y_range.add(guide.y);
  if (x_range.high == x_range.low) x_range.high = x_range.low + 1;

  Plot plot{};
  plot.x = {x_range.low, x_range.high, false};
  plot.y = axis_of(y_range, chart.log_y, chart.zero_y);
  const std::vector<Tick> y_ticks = ticks_of(plot.y, chart.small ? 3 : 5),
                          x_ticks = ticks_of(plot.x, chart.small ? 3 : 7);
  double left = chart.small ? 16 : chart.least_left, right = chart.small ? 10 : 16;
  for (const Tick& tick : y_ticks) left = std::max(left, width_of(tick.label) + 12);
  for (const Lane& lane : chart.lanes) left = std::max(left, lane_room(lane.label));
  // One curve needs no name: the axis has it.
  const auto named_lines =
      std::count_if(chart.lines.begin(), chart.lines.end(), [](const Line& line) { return line.named; });
  const bool ends = !chart.small && named_lines > 1;
  for (const Line& line : chart.lines)
    if (line.named && ends) right = std::max(right, std::min(200.0, width_of(line.label, kBoldWidth)) + 14);
  constexpr double kLane = 17;
  const double lanes = kLane * static_cast<double>(chart.lanes.size()) + (chart.lanes.empty() ? 0 : 8);
  plot.left = left, plot.top = 24;
  plot.width = chart.width - left - right;
  plot.height = chart.height - plot.top - 34 - lanes;
  const double bottom = plot.top + plot.height;

  std::string svg =
      head_of(chart.id, chart.title, chart.description, chart.width, chart.height,
              fmt::format("class=\"chart{}\" id=\"{}\" data-x=\"{} {}\" data-y=\"{} {}\" data-log=\"{}\" "
                          "data-box=\"{:.1f} {:.1f} "
                          "{:.1f} {:.1f}\" data-xname=\"{}\" data-yname=\"{}\"",
                          chart.small ? " small" : "", chart.id, plain(plot.x.low), plain(plot.x.high),
                          fmt::format("{:.9g}", plot.y.low), fmt::format("{:.9g}", plot.y.high),
                          chart.log_y ? 1 : 0, plot.left, plot.top, plot.width, plot.height,
                          escape(chart.x_label), escape(chart.y_label)));
  svg += fmt::format(
      "<defs><clipPath id=\"{}-clip\"><rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
      "height=\"{:.1f}\"/></clipPath></defs>\n",
      chart.id, plot.left, plot.top - 3, plot.width + 2, plot.height + 3);
  // Axes: hairlines at the ticks of y, a line at the foot.
  svg += "<g class=\"axis y\"><g class=\"ticks\">";
  for (const Tick& tick : y_ticks) {
    const double y = plot.top + plot.height * (1 - (tick.value - plot.y.low) / (plot.y.high - plot.y.low));
    svg += fmt::format("<path d=\"M{:.1f} {:.1f}h{:.1f}\"/><text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
                       plot.left, y, plot.width, plot.left - 7, y + 3.8, tick.label);
  }
  svg += fmt::format("</g><text class=\"name\" x=\"{:.1f}\" y=\"12\">{}</text></g>\n",
                     chart.small ? 0 : plot.left, escape(chart.small ? chart.title : chart.y_label));
  svg +=
      fmt::format("<g class=\"axis x\"><path class=\"foot\" d=\"M{:.1f} {:.1f}h{:.1f}\"/><g class=\"ticks\">",
                  plot.left, bottom, plot.width);
  for (const Tick& tick : x_ticks)
    svg += fmt::format("<path d=\"M{0:.1f} {1:.1f}v4\"/><text x=\"{0:.1f}\" y=\"{2:.1f}\">{3}</text>",
                       plot.px(tick.value), bottom, bottom + 16, tick.label);
  svg += fmt::format("</g><text class=\"name\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text></g>\n",
                     plot.left + plot.width, bottom + 30, escape(chart.x_label));
  // Rules below the curves.
  for (const Guide& guide : chart.guides) {
    if (chart.log_y && guide.y <= 0) continue;
    const double y = plot.py(guide.y);
    if (!std::isfinite(y) || y < plot.top - 1 || y > bottom + 1) continue;
    svg += fmt::format("<g class=\"rule\" data-at=\"{}\"><path d=\"M{:.1f} {:.1f}h{:.1f}\"/>",
                       plot.grid(guide.y), plot.left, y, plot.width);
    if (!guide.label.empty())
      svg +=
          fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", plot.left + 4, y - 4, escape(guide.label));
    svg += "</g>\n";
  }
  svg += fmt::format(
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
  svg += "</g></g>\n";
  // Names at the ends.
  if (ends) {
    std::vector<double> wanted;
    std::vector<const Line*> named;
    for (const Line& line : chart.lines)
      if (line.named && !line.label.empty())
        if (const auto last = last_of(line, plot)) {
          named.push_back(&line);
          wanted.push_back(std::clamp(plot.py(*last), plot.top, bottom));
        }
    wanted = spread_out(std::move(wanted), 14, plot.top + 4, bottom - 2);
    svg += "<g class=\"ends\">";
    for (size_t n = 0; n < named.size(); ++n)
      svg += fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", named[n]->style,
                         plot.left + plot.width + 7, wanted[n] + 4, escape(named[n]->label));
    svg += "</g>\n";
  }
  // Lanes of events.
  if (!chart.lanes.empty()) {
    svg += "<g class=\"lanes\">";
    double y = bottom + 34 + 8;
    for (const Lane& lane : chart.lanes) {
      svg += fmt::format(
          "<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text><path class=\"lane\" d=\"M{:.1f} "
          "{:.1f}h{:.1f}\"/>",
          lane.style, plot.left - 7, y + 4, escape(lane.label), plot.left, y, plot.width);
      for (const Mark& mark : lane.marks)
        svg += fmt::format("<g class=\"event\" data-at=\"{}\" data-says=\"{}\">{}<title>{}</title></g>",
                           plain(mark.x), escape(mark.words), glyph(mark.style, plot.px(mark.x), y),
                           escape(mark.words));
      y += kLane;
    }
    svg += "</g>\n";
  }
  svg += "</svg>\n";
  return fmt::format("<figure class=\"drawing{}\"><div class=\"scroll\">{}</div>{}</figure>\n",
                     chart.small ? " small" : "", svg, chart.small ? "" : table_of(chart));
}

namespace {

constexpr int kLevels = 24;  // of colour

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

  const auto columns = static_cast<double>(map.x.size());
  double left = 8;
  for (const std::string& row : map.rows) left = std::max(left, std::min(190.0, width_of(row)) + 12);
  const double top = 22, width = map.width - left - 12,
               height = map.row_height * static_cast<double>(map.values.size());
  const double bottom = top + height;
  std::array<std::string, kLevels> cells;
  std::string values;
  for (size_t r = 0; r < map.values.size(); ++r) {
    for (size_t c = 0; c < map.x.size(); ++c) {
      const double value = map.values[r][c], s = scaled(value);
      values += fmt::format("{}{}", c == 0 ? (r == 0 ? "" : ";") : " ",
                            std::isfinite(value) ? fmt::format("{:.3g}", value) : "-");
      if (!std::isfinite(s)) continue;
      const int level =
          std::clamp(static_cast<int>((s - range.low) / (range.high - range.low) * kLevels), 0, kLevels - 1);
      cells[static_cast<size_t>(level)] += fmt::format("M{} {}h1v1h-1z", c, r);
    }
  }
  std::string xs;
  for (const double x : map.x) xs += (xs.empty() ? "" : " ") + plain(x);
  std::string names;
  for (const std::string& row : map.rows) names += (names.empty() ? "" : "\n") + row;

  std::string svg =
      head_of(map.id, map.title, map.description, map.width, bottom + 34,
              fmt::format("class=\"heat\" id=\"{}\" data-box=\"{:.1f} {:.1f} {:.1f} {:.1f}\" "
                          "data-cells=\"{}\" data-xs=\"{}\" "
                          "data-rows=\"{}\" data-xname=\"{}\" data-yname=\"{}\" data-vname=\"{}\"",
                          map.id, left, top, width, height, values, xs, escape(names), escape(map.x_label),
                          escape(map.y_label), escape(map.value_label)));
  svg += fmt::format("<text class=\"name\" x=\"0\" y=\"12\">{}</text>", escape(map.title));
  const char* const ramp = map.is_signed ? "d" : "q";
  svg += fmt::format("<g class=\"cells\" transform=\"translate({:.1f} {:.1f}) scale({:.7g} {:.7g})\">", left,
                     top, width / columns, map.row_height);
  for (size_t level = 0; level < cells.size(); ++level)
    if (!cells[level].empty())
      svg += fmt::format("<path class=\"{}{}\" d=\"{}\"/>", ramp, level, cells[level]);
  svg += "</g>\n<g class=\"axis y rows\">";
  // As many names of rows as there is room for.
  const size_t every = std::max<size_t>(1, static_cast<size_t>(std::ceil(11 / map.row_height)));
  for (size_t r = 0; r < map.rows.size(); r += every)
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", left - 6,
                       top + map.row_height * (static_cast<double>(r) + 0.5) + 3.8, escape(map.rows[r]));
  svg += "</g><g class=\"axis x\"><g class=\"ticks\">";
  const int wanted = std::max(2, static_cast<int>(width / 90));
  for (const Tick& tick : linear_ticks(map.x.front(), map.x.back(), wanted)) {
    // Between columns, where x does not advance evenly, the nearest.
    const auto place = std::lower_bound(map.x.begin(), map.x.end(), tick.value - 1e-9) - map.x.begin();
    const double x = left + width * (static_cast<double>(place) + 0.5) / columns;
    svg += fmt::format("<path d=\"M{0:.1f} {1:.1f}v4\"/><text x=\"{0:.1f}\" y=\"{2:.1f}\">{3}</text>", x,
                       bottom, bottom + 15, tick.label);
  }
  svg += fmt::format("</g><text class=\"name\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text></g>", left + width,
                     bottom + 29, escape(map.x_label));
  // The key: a strip of the colours with its ends.
  const double key = std::min(120.0, width / 3);
  const std::string ends[2] = {figure(map.log_value ? std::pow(10.0, range.low) : range.low, 2),
                               figure(map.log_value ? std::pow(10.0, range.high) : range.high, 2)};
  const double key_x = left + width - key - width_of(ends[1]) - 4;
  if (key_x - width_of(ends[0]) > width_of(map.title) + 8) {
    svg += fmt::format("<g class=\"key\"><text class=\"to\" x=\"{:.1f}\" y=\"12\">{}</text>", key_x - 5,
                       ends[0]);
    for (int level = 0; level < kLevels; ++level)
      svg += fmt::format("<rect class=\"{}{}\" x=\"{:.2f}\" y=\"4\" width=\"{:.2f}\" height=\"9\"/>", ramp,
                         level, key_x + key * level / kLevels, key / kLevels + 0.3);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"12\">{}</text></g>", key_x + key + 5, ends[1]);
  }
  svg += "</svg>\n";
  return fmt::format("<figure class=\"drawing\"><div class=\"scroll\">{}</div></figure>\n", svg);
}

std::string draw(const DotPlot& plot) {
  Range range;
  for (const Dot& dot : plot.dots)
    if (!plot.log_x || dot.value > 0) range.add(dot.value);
  for (const Guide& guide : plot.guides) range.add(guide.y);
  if (range.empty()) return nothing(plot.title);
  const Axis axis = axis_of(range, plot.log_x, !plot.log_x);
  double left = 16, right = 16;
  for (const Dot& dot : plot.dots) {
    left = std::max(left, std::min(300.0, width_of(dot.label, kBoldWidth)) + 14);
    right = std::max(right, std::min(170.0, width_of(dot.note)) + 14);
  }
  constexpr double kRow = 24, kTop = 26;
  const double width = plot.width - left - right,
               bottom = kTop + kRow * static_cast<double>(plot.dots.size());
  const auto px = [&](double value) {
    const double place = axis.place(value);
    return left + width * (std::isnan(place) ? 1 : std::clamp(place, 0.0, 1.0));
  };
  std::string svg = head_of(plot.id, plot.title, plot.description, plot.width, bottom + 36,
                            fmt::format("class=\"dots\" id=\"{}\"", plot.id));
  svg += "<g class=\"axis x\"><g class=\"ticks\">";
  for (const Tick& tick : ticks_of(axis, 6)) {
    const double x = left + width * (tick.value - axis.low) / (axis.high - axis.low);
    svg += fmt::format(
        "<path class=\"hair\" d=\"M{0:.1f} {1:.1f}V{2:.1f}\"/><text x=\"{0:.1f}\" y=\"{3:.1f}\">{4}</text>",
        x, kTop - 4, bottom, bottom + 16, tick.label);
  }
  svg += fmt::format("</g><text class=\"name\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text></g>", left + width,
                     bottom + 31, escape(plot.x_label));
  for (const Guide& guide : plot.guides)
    svg += fmt::format(
        "<g class=\"rule\"><path d=\"M{0:.1f} {1:.1f}V{2:.1f}\"/><text x=\"{3:.1f}\" "
        "y=\"{4:.1f}\">{5}</text></g>",
        px(guide.y), kTop - 4, bottom, px(guide.y) + 4, kTop - 8, escape(guide.label));
  for (size_t n = 0; n < plot.dots.size(); ++n) {
    const Dot& dot = plot.dots[n];
    const double y = kTop + kRow * (static_cast<double>(n) + 0.5);
    svg += fmt::format(
        "<g class=\"dot {0}\"><text class=\"label\" x=\"{1:.1f}\" y=\"{2:.1f}\">{3}</text>"
        "<path class=\"stem\" d=\"M{4:.1f} {5:.1f}H{6:.1f}\"/><circle cx=\"{6:.1f}\" cy=\"{5:.1f}\" "
        "r=\"4.5\"/>"
        "<text class=\"note\" x=\"{7:.1f}\" y=\"{2:.1f}\">{8}</text></g>\n",
        dot.style, left - 10, y + 4, escape(dot.label), left, y, px(dot.value), left + width + 10,
        escape(dot.note));
  }
  svg += "</svg>\n";
  return fmt::format("<figure class=\"drawing\"><div class=\"scroll\">{}</div></figure>\n", svg);
}

std::vector<size_t> thinned(std::span<const double> y, size_t most) {
  std::vector<size_t> kept;
  const size_t stretches = std::max<size_t>(1, most / 4);
  if (y.size() <= most) {
    for (size_t n = 0; n < y.size(); ++n) kept.push_back(n);
    return kept;
  }
  for (size_t s = 0; s < stretches; ++s) {
    const size_t begin = s * y.size() / stretches, end = (s + 1) * y.size() / stretches;
    size_t least = begin, largest = begin, bad = end;
    for (size_t n = begin; n < end; ++n) {
      if (!std::isfinite(y[n])) {
        bad = std::min(bad, n);
        continue;
      }
      if (!(y[n] >= y[least])) least = n;
      if (!(y[n] <= y[largest])) largest = n;
    }
    std::array<size_t, 5> some = {begin, least, largest, end - 1, bad < end ? bad : begin};
    std::sort(some.begin(), some.end());
    for (const size_t n : some)
      if (kept.empty() || n > kept.back()) kept.push_back(n);
  }
  return kept;
}

Line thin(const Line& line, size_t most) {
  if (line.y.size() <= most) return line;
  Line out = line;
  out.x.clear(), out.y.clear(), out.low.clear(), out.high.clear();
  for (const size_t n : thinned(line.y, most)) {
    out.x.push_back(line.x[n]), out.y.push_back(line.y[n]);
    if (!line.low.empty()) out.low.push_back(line.low[n]), out.high.push_back(line.high[n]);
  }
  return out;
}

Line binned_logarithms(const Line& line, size_t bins) {
  Line logarithms = line;
  for (double& y : logarithms.y) y = y > 0 ? std::log10(y) : std::numeric_limits<double>::quiet_NaN();
  Line out = binned(logarithms, {}, bins);
  for (std::vector<double>* values : {&out.y, &out.low, &out.high})
    for (double& value : *values) value = std::pow(10.0, value);
  return out;
}

Line binned(const Line& line, std::span<const double> error, size_t bins) {
  constexpr double kBand = 1.96;  // standard errors: 95 of 100 normal numbers
  Line out = line;
  out.x.clear(), out.y.clear(), out.low.clear(), out.high.clear();
  const size_t count_of = std::min(bins, line.y.size());
  for (size_t b = 0; b < count_of; ++b) {
    const size_t begin = b * line.y.size() / count_of, end = (b + 1) * line.y.size() / count_of;
    double sum = 0, squares = 0, variance = 0, place = 0;
    size_t n = 0;
    for (size_t k = begin; k < end; ++k) {
      if (!std::isfinite(line.y[k])) continue;
      sum += line.y[k], squares += line.y[k] * line.y[k], place += line.x[k], ++n;
      if (!error.empty() && std::isfinite(error[k])) variance += error[k] * error[k];
    }
    if (n == 0) continue;
    const auto m = static_cast<double>(n);
    const double mean = sum / m;
    const double of_rows = std::sqrt(variance) / m,
                 of_scatter = n > 1 ? std::sqrt(std::max(0.0, squares / m - mean * mean) / (m - 1)) : 0;
    const double half = kBand * (error.empty() ? of_scatter : std::max(of_rows, of_scatter));
    out.x.push_back(std::round(place / m)), out.y.push_back(mean);
    out.low.push_back(mean - half), out.high.push_back(mean + half);
  }
  return out;
}

}  // namespace evenkeel
