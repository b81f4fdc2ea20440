// Panels from a capture: one head at one step, down to the addition.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/json_text.h"
#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {
namespace {

std::vector<double> numbers_to(size_t n) {
  std::vector<double> x(n);
  for (size_t k = 0; k < n; ++k) x[k] = static_cast<double>(k);
  return x;
}

std::string no_capture(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  // A step that can be replayed and shows the trouble: the last recorded one.
  const int64_t step = run.has_steps() ? run.metrics.steps.back() : 0;
  const int64_t layer = std::max<int64_t>(0, data.layer), head = std::max<int64_t>(0, data.head);
  return missing(
      "No capture of this run is at hand. One shows where an error pushes, dO against the output's error, "
      "V's "
      "sign and the sum that goes wrong; it is made by",
      !run.setting("run", "trainer").empty()
          ? fmt::format("evenkeel.capture(model, tokens, {}, \"{}\")  # in Python, of a checkpoint", layer,
                        (run.folder / fmt::format("layer{}.safetensors", layer)).string())
          : fmt::format("evenkeel capture {} --layer {} --heads {} -o {}",
                        shell_word(fmt::format("{}@{}", run.folder.string(), step)), layer, head,
                        shell_word((run.folder / fmt::format("layer{}.safetensors", layer)).string())));
}

// A number a feature as stems from zero: where signs agree the eye sees it.
Line stems(const std::vector<double>& y, const std::string& label, const std::string& style) {
  Line line;
  line.label = label, line.style = style + " stem";
  for (size_t n = 0; n < y.size(); ++n) {
    const auto x = static_cast<double>(n);
    line.x.insert(line.x.end(), {x, x, x});
    line.y.insert(line.y.end(), {0, y[n], kUnknown});
  }
  return line;
}

// Room for the first and the last.
std::pair<double, double> around(size_t n) { return {-0.5, static_cast<double>(n) - 0.5}; }

std::string directions_panel(const PageData& data) {
  const std::string heading = "Where the error pushes: PK, X and (PK)ᵀX";
  const std::string lead = fmt::format(
      "{}, {} and their product {} at some tokens: alike rows and columns mean that errors add up instead of "
      "cancelling.",
      term("PK"), term("X"), term("(PK)ᵀX"));
  const HeadAnalysis& a = data.view->analysis;
  std::vector<std::string> tokens;
  for (const int64_t t : a.tokens) tokens.push_back(fmt::format("token {}", t));
  const auto rows = [&](const char* id, const char* title, const std::vector<std::vector<double>>& values,
                        const char* x_label, double width) {
    HeatMap map;
    map.id = id, map.title = title, map.x_label = x_label, map.y_label = "token", map.value_label = title;
    map.description =
        fmt::format("Rows of {} at {} tokens: a column of one colour is a feature in which they agree.",
                    title, values.size());
    map.rows = tokens, map.values = values, map.x = numbers_to(values.empty() ? 0 : values[0].size());
    map.is_signed = true, map.width = width, map.row_height = 18;
    return draw(map);
  };
  std::string content =
      "<div class=\"multiples wide\">\n" + rows("pk", "PK", a.pk, "feature of the head", 372);
  if (!a.similarity.empty()) {
    HeatMap map;
    map.id = "similarity", map.title = "cosine of (PK)ᵀX", map.x_label = "token", map.y_label = "token",
    map.value_label = "cosine";
    map.description = "Cosine between the matrices (PK)ᵀX of every two tokens: 1 where they push alike.";
    map.rows = tokens, map.values = a.similarity, map.x = numbers_to(a.tokens.size());
    map.is_signed = true, map.range = std::pair(-1.0, 1.0), map.width = 372, map.row_height = 18;
    content += draw(map);
  }
  content += "</div>\n";
  if (!a.x.empty()) {
    content += rows("x", "X", a.x, "input feature", 760);
    // The matrices of two tokens, one above the other.
    for (const size_t n : {size_t{0}, a.tokens.size() - 1}) {
      if (n >= a.x.size() || (n == 0 && a.tokens.size() == 1)) continue;
      HeatMap map;
      map.id = fmt::format("pkx-{}", n);
      map.title = fmt::format("(PK)ᵀX, token {}", a.tokens[n]);
      map.x_label = "input feature", map.y_label = "feature of the head", map.value_label = "(PK)ᵀX";
      map.description = "The matrix (PK)ᵀX of one token; compare its columns with the other token's.";
      for (const double p : a.pk[n]) {
        std::vector<double> row;
        for (const double x : a.x[n]) row.push_back(p * x);
        map.values.push_back(std::move(row));
      }
      map.x = numbers_to(a.x[n].size());
      map.is_signed = true,
      map.row_height = std::clamp(150.0 / static_cast<double>(map.values.size()), 1.5, 6.0);
      content += draw(map);
    }
  } else {
    content += missing("The capture has no x: X and (PK)ᵀX are not known.", "");
  }
  return section("directions", heading, lead, content,
                 fmt::format("<p>{}, step {}, layer {}, head {}; plan <code>{}</code>.</p><p>Mean cosine of "
                             "two tokens' matrices: {}. Share of the W_Q gradient "
                             "that leaks this way: {}.</p><p>{}</p>",
                             escape(data.view->file), count(data.view->step), data.view->layer,
                             data.view->head, escape(data.view->plan), figure(data.view->probe.similarity, 2),
                             figure(data.view->probe.leak_share, 2), escape(data.view->words)));
}

std::string features_panel(const PageData& data) {
  const std::string heading = "dO against the output's error, by feature";
  const std::string lead = fmt::format(
      "Where {} and the {} have the same sign in most {}s, their product has one sign, and so has the error "
      "of {}.",
      term("dO"), term("output error"), term("feature"), term("delta"));
  const HeadAnalysis& a = data.view->analysis;
  const auto chart = [&](const char* id, const char* title, const char* y_label, const std::vector<double>& y,
                         const char* style) {
    Chart c;
    c.id = id, c.title = title, c.y_label = y_label, c.x_label = "feature of the head";
    c.description = fmt::format("{} at row {} by feature.", title, a.row);
    c.zero_y = true, c.height = 150, c.lines = {stems(y, title, style)};
    c.x_range = around(y.size());
    c.guides.push_back({0, ""});
    return draw(c);
  };
  return section(
      "features", heading, lead,
      chart("d-o", "dO", "dO", a.d_o, "c1") +
          chart("o-error", "output error", "output as delta reads it, less exact", a.output_error, "c0") +
          chart("o-product", "product", "dO × output error", a.product, "c3"),
      fmt::format("<p>Sequence {}, row {}: where the error of delta is largest.</p><p>Signs agree in {} % of "
                  "the features with an error.</p>",
                  a.sequence, a.row, figure(100 * a.sign_agreement, 3)));
}

std::string sign_panel(const PageData& data) {
  const std::string heading = "V's sign";
  const std::string lead = fmt::format(
      "{} by feature and key: a row of one colour is a feature whose sums tend to be rounded one way.",
      term("V"));
  const CaptureView& view = *data.view;
  HeatMap map;
  map.id = "v-map", map.title = "V", map.x_label = "key", map.y_label = "feature", map.value_label = "v";
  map.description = "V of the analysed sequence, a row a feature, a column a key.";
  map.values = view.v, map.x = numbers_to(view.v.empty() ? 0 : view.v[0].size());
  map.is_signed = true,
  map.row_height = std::clamp(180.0 / static_cast<double>(std::max<size_t>(1, view.v.size())), 2.0, 10.0);
  Chart c;
  c.id = "v-sign", c.title = "one-signedness", c.y_label = "sum of v over sum of |v|: ±1 is one sign alone",
  c.x_label = "feature of the head";
  c.description = "How far each feature of V has one sign: plus or minus one where all keys agree.";
  c.zero_y = true, c.height = 150, c.lines = {stems(view.v_sign, "one-signedness", "c2")};
  c.x_range = around(view.v_sign.size());
  c.guides.push_back({0, ""});
  return section("sign", heading, lead, draw(map) + draw(c));
}

std::string bits_panel(const PageData& data) {
  const std::string heading = "The sum, and the addition that goes wrong";
  std::string content, aside;
  if (data.view && data.view->analysis.trace) {
    const SumTrace& trace = *data.view->analysis.trace;
    Chart c;
    c.id = "trace", c.title = "cumulative error", c.x_label = "key";
    c.y_label = trace.site == Site::row_sum ? "error of the row sum, as if it ended here"
                                            : "error of the sum, as if it ended here";
    c.description = "Error of the running sum along one row, rounded as if it ended at each key.";
    Line line{"error", "c0", numbers_to(trace.error.size()), trace.error, {}, {}};
    c.lines = {thin(line, 2000)};
    c.zero_y = true, c.height = 240, c.guides.push_back({0, ""});
    Lane lane{"guilty", "c0", {}};
    for (const SumTrace::Guilty& g : trace.guilty)
      lane.marks.push_back(
          {static_cast<double>(g.key), "guard",
           fmt::format("the addition of key {} moves the error by {}", g.key, figure(g.jump))});
    if (!lane.marks.empty()) c.lanes.push_back(std::move(lane));
    content += draw(c);
    aside = fmt::format("<p>Site <code>{}</code>, kept in <code>{}</code>{}; row {}.</p>",
                        escape(name(trace.site)), escape(to_string(trace.rounding)),
                        trace.feature >= 0 ? fmt::format(", feature {}", trace.feature) : "",
                        data.view->analysis.row);
  } else if (data.view) {
    content += missing("The plan of this head rounds none of the sums: there is no trace.", "");
  }
  if (const nlohmann::json explanation = worst_addition(data); explanation.is_object())
    content += "<h3>The addition that errs most, bit by bit</h3>\n" + bits_of(explanation);
  const std::string lead =
      data.view ? fmt::format(
                      "The error of the running sum ({} or {}) along the worst row; one addition of "
                      "it opened bit by bit.",
                      term("O-bar"), term("row sum"))
                : "One addition of the guilty head, opened bit by bit.";
  return section("bits", heading, lead, content, aside);
}

}  // namespace

nlohmann::json worst_addition(const PageData& data) {
  if (data.view && data.view->analysis.trace && !data.view->analysis.trace->guilty.empty())
    return try_parse_json(to_json(data.view->analysis.trace->guilty[0].explanation));
  const nlohmann::json* const bits = data.runs[data.subject].verdict_record().find("bits");
  return bits && bits->is_object() ? *bits : nlohmann::json();
}

std::string capture_panels(const PageData& data) {
  if (data.view) return directions_panel(data) + features_panel(data) + sign_panel(data) + bits_panel(data);
  return section("capture", "Inside one head", "", no_capture(data)) +
         (worst_addition(data).is_object() ? bits_panel(data) : "");
}

}  // namespace evenkeel
