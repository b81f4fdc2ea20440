#include "report/chart_parts.h"

#include <fmt/format.h>

#include "report/html.h"

namespace evenkeel {

namespace {

// Where each character of UTF-8 text begins.
std::vector<size_t> characters(std::string_view text) {
  std::vector<size_t> begins;
  for (size_t n = 0; n < text.size(); ++n)
    if ((static_cast<unsigned char>(text[n]) & 0xc0) != 0x80) begins.push_back(n);
  return begins;
}

}  // namespace

double width_of(std::string_view text, double character) {
  return character * static_cast<double>(characters(text).size());
}

std::string fitted(std::string_view text, double room, double character) {
  const std::vector<size_t> begins = characters(text);
  const auto fit = static_cast<size_t>(std::max(3.0, room / character));
  if (begins.size() <= fit) return std::string(text);
  const size_t kept = fit - 1, tail = kept / 2, head = kept - tail;
  return std::string(text.substr(0, begins[head])) + "…" +
         std::string(text.substr(begins[begins.size() - tail]));
}

namespace {

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

}  // namespace

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

std::vector<Tick> ticks_of(const Axis& axis, int wanted) {
  return axis.log ? log_ticks(axis.low, axis.high, wanted) : linear_ticks(axis.low, axis.high, wanted);
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

std::string plain(double value) { return fmt::format("{:.10g}", value); }

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

}  // namespace evenkeel
