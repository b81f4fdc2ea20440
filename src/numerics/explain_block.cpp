#include "numerics/explain_block.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "numerics/explain.h"
#include "numerics/round_block.h"

namespace evenkeel {
namespace {

// One number is enough for people; FP32 has no more than nine digits.
std::string nine(double x) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.9g", x);
  return buffer;
}

std::string right(const std::string& text, size_t width) {
  return std::string(text.size() < width ? width - text.size() : 0, ' ') + text;
}

std::string rule_words(const BlockExplanation& e, const BlockGroup& g) {
  const Format f = e.rounding.format;
  const std::string quotient = nine(g.largest) + " / " + nine(scale_target(f));
  switch (e.rounding.shared.rule) {
    case ScaleRule::fp32:
      return quotient +
             (f.tapered ? ", the largest number with all its bits of " : ", the largest number of ") +
             to_string(f);
    case ScaleRule::e4m3:
      return quotient + (e.outer == 1 ? "" : " / " + nine(e.outer)) + " rounded to e4m3" +
             (e.outer == 1 ? "" : ", times " + nine(e.outer));
    case ScaleRule::e8m0:
      return "2^(floor(log2 " + nine(g.largest) + ") - " + std::to_string(scale_target_exponent(f)) + ")";
    case ScaleRule::e8m0_up:
      return "the smallest power of two from " + quotient + " on";
  }
  return "";
}

}  // namespace

BlockExplanation explain_block(const Rounding& rounding, const std::vector<float>& values) {
  BlockExplanation e{rounding, 1, {}};
  std::vector<float> row = values;
  const auto count = static_cast<int64_t>(row.size());
  const bool down = is_down_column(rounding.shared.group);
  const ScaledMatrix m =
      down ? ScaledMatrix{row.data(), count, 1, 1, 1} : ScaledMatrix{row.data(), 1, count, count, 1};
  const std::vector<float> scales = find_scales(rounding, m);
  if (rounding.shared.outer != ScaleGroup::none) e.outer = outer_scale(rounding, largest_finite(m));
  const auto width =
      static_cast<size_t>(down ? group_rows(rounding.shared, count) : group_columns(rounding.shared, count));
  for (size_t first = 0; first < values.size(); first += width) {
    const size_t last = std::min(first + width, values.size());
    BlockGroup group;
    group.scale = scales[down ? first : first / width];
    group.largest = largest_finite({row.data() + first, 1, static_cast<int64_t>(last - first), 0, 1});
    for (size_t i = first; i < last; ++i) {
      BlockValue v;
      v.given = values[i];
      v.over_scale = group.scale == 0 ? 0.0f : v.given / group.scale;
      v.stored = round_to(element_rounding(rounding), v.over_scale);
      v.code = encode(rounding.format, v.stored);
      v.becomes = round_scaled(rounding, v.given, group.scale);
      v.error = static_cast<double>(v.becomes) - v.given;
      v.saturated = std::fabs(v.over_scale) > max_finite(rounding.format);
      group.error += v.error;
      group.values.push_back(v);
    }
    e.groups.push_back(std::move(group));
  }
  return e;
}

std::string to_text(const BlockExplanation& e) {
  const Format f = e.rounding.format;
  std::string text = to_string(e.rounding) + ": x becomes scale * " + to_string(f) + "(x / scale)\n";
  if (e.outer != 1)
    text += "outer scale  " + nine(e.outer) + ", in fp32: the largest magnitude / (" + nine(scale_target(f)) +
            " * " + nine(max_finite(kE4m3)) + ")\n";
  for (size_t n = 0; n < e.groups.size(); ++n) {
    const BlockGroup& g = e.groups[n];
    text += "\nblock " + std::to_string(n + 1) + " of " + std::to_string(e.groups.size()) + "   largest " +
            nine(g.largest) + "\nscale        " + nine(g.scale) + " = " + rule_words(e, g) + "\n";
    text += right("x", 16) + right("x / scale", 16) + right("stored", 16) + right("code", 8) +
            right("becomes", 16) + right("error", 16) + "\n";
    for (const BlockValue& v : g.values)
      text += right(nine(v.given), 16) + right(nine(v.over_scale), 16) + right(nine(v.stored), 16) +
              right(code_text(v.code, f), 8) + right(nine(v.becomes), 16) + right(nine(v.error), 16) +
              (v.saturated ? "  saturated" : "") + "\n";
    text += "sum of the errors " + nine(g.error) + "\n";
  }
  return text;
}

std::string to_json(const BlockExplanation& e) {
  std::string text = "{\"rounding\":\"" + to_string(e.rounding) + "\",\"outer_scale\":" + shortest(e.outer) +
                     ",\"blocks\":[";
  for (size_t n = 0; n < e.groups.size(); ++n) {
    const BlockGroup& g = e.groups[n];
    text += std::string(n == 0 ? "" : ",") + "{\"largest\":" + shortest(g.largest) +
            ",\"scale\":" + shortest(g.scale) + ",\"error\":" + shortest(g.error) + ",\"values\":[";
    for (size_t i = 0; i < g.values.size(); ++i) {
      const BlockValue& v = g.values[i];
      text += std::string(i == 0 ? "" : ",") + "{\"given\":" + shortest(v.given) +
              ",\"over_scale\":" + shortest(v.over_scale) + ",\"stored\":" + shortest(v.stored) +
              ",\"code\":\"" + code_text(v.code, e.rounding.format) +
              "\",\"becomes\":" + shortest(v.becomes) + ",\"error\":" + shortest(v.error) +
              ",\"saturated\":" + (v.saturated ? "true" : "false") + "}";
    }
    text += "]}";
  }
  return text + "]}";
}

}  // namespace evenkeel
