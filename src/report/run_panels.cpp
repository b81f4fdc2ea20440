// Panels from what a run records of itself, step by step and head by head.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {
namespace {

constexpr size_t kPoints = 1200;        // of a curve that is one of few
constexpr size_t kPointsOfAll = 24000;  // of all heads' curves of a panel

size_t points_a_head(const RunRecords& run) {
  return std::clamp<size_t>(
      kPointsOfAll / static_cast<size_t>(std::max<int64_t>(1, run.metrics.layers * run.metrics.heads)), 60,
      400);
}

// One section for all panels that need probes, where the run has none. panels: their names.
std::string no_probes(const RunRecords& run, const std::string& panels) {
  std::string command = "evenkeel train";
  if (run.config) command += " --config " + shell_word(record_path(run.folder, RecordFile::config).string());
  return section("probes", "Not recorded", panels,
                 missing(fmt::format("{} has no full set of probes. They are made by", run.label),
                         command + " --probe-every 50 --out NEW_RUN"));
}

// Side by side, as many as there is room for; few are drawn larger.
std::string multiples(std::vector<Chart> charts, double room) {
  constexpr double kLeast = 244, kMost = 330, kGap = 22;
  const double width =
      std::clamp(room / static_cast<double>(std::max<size_t>(1, charts.size())) - kGap, kLeast, kMost);
  std::string text = fmt::format("<div class=\"multiples\" style=\"--least:{:.0f}px\">\n", 0.86 * width);
  for (Chart& chart : charts) {
    chart.width = width, chart.height = 0.73 * width;
    text += draw(chart);
  }
  return text + "</div>\n";
}

// The runs in the order of the page, the subject first.
std::vector<size_t> subject_first(const PageData& data) {
  std::vector<size_t> order = {data.subject};
  for (size_t n = 0; n < data.runs.size(); ++n)
    if (n != data.subject) order.push_back(n);
  return order;
}

bool has_head(const RunRecords& run, const PageData& data) {
  return data.layer >= 0 && data.layer < run.metrics.layers && data.head < run.metrics.heads;
}
int64_t head_of(const RunRecords& run, const PageData& data) {
  return data.layer * run.metrics.heads + data.head;
}

// --- Spectral norms

struct Kind {
  std::string_view suffix, name;
};
constexpr Kind kKinds[] = {
    {"attn.c_attn.weight[q]", "W_Q"},      {"attn.c_attn.weight[k]", "W_K"},
    {"attn.c_attn.weight[v]", "W_V"},      {"attn.c_proj.weight", "attention's projection"},
    {"mlp.c_fc.weight", "MLP, first"},     {"mlp.c_fc.weight[gate]", "MLP, gate"},
    {"mlp.c_fc.weight[up]", "MLP, first"}, {"mlp.c_proj.weight", "MLP, second"}};

// "h.3.attn.c_proj.weight" -> 3, "attn.c_proj.weight"
std::optional<std::pair<int64_t, std::string_view>> layer_and_kind(std::string_view weight) {
  if (!weight.starts_with("h.")) return {};
  int64_t layer = 0;
  const auto [end, error] = std::from_chars(weight.data() + 2, weight.data() + weight.size(), layer);
  if (error != std::errc() || end == weight.data() + weight.size() || *end != '.' || layer < 0 ||
      layer >= 4096)
    return {};
  return std::pair(layer, weight.substr(static_cast<size_t>(end + 1 - weight.data())));
}

std::string norms_panel(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  const Series& probed = run.metrics.probe_loss;  // a row a probed step
  std::string maps;
  for (const Kind& kind : kKinds) {
    HeatMap map;
    for (const auto& [weight, series] : run.metrics.norms) {
      const auto found = layer_and_kind(weight);
      if (!found || found->second != kind.suffix) continue;
      const auto layer = static_cast<size_t>(found->first);
      if (map.values.size() <= layer)
        map.values.resize(layer + 1, std::vector<double>(probed.steps.size(), kUnknown));
      for (size_t n = 0; n < probed.steps.size(); ++n)
        if (const auto norm = series.of_line(probed.lines[n]); !norm.empty()) map.values[layer][n] = norm[0];
    }
    if (map.values.empty()) continue;
    for (size_t layer = 0; layer < map.values.size(); ++layer) map.rows.push_back(std::to_string(layer));
    map.x.assign(probed.steps.begin(), probed.steps.end());
    map.id = fmt::format("norms-{}", &kind - kKinds);
    map.title = kind.name, map.x_label = "step", map.y_label = "layer", map.value_label = "spectral norm";
    map.description = fmt::format(
        "Spectral norm of {} by layer and step; lighter is larger, on a logarithmic scale.", kind.name);
    map.log_value = true, map.width = 372,
    map.row_height = std::clamp(84.0 / static_cast<double>(map.values.size()), 10.0, 26.0);
    maps += draw(map);
  }
  if (maps.empty()) return "";
  return section(
      "norms", "Spectral norms over layers and steps",
      fmt::format("The {} of every weight matrix of {}, a row a {}: a layer that drifts lights up alone.",
                  term("spectral norm"), escape(run.label), term("layer")),
      fmt::format("<div class=\"multiples wide\">\n{}</div>\n", maps));
}

// --- Small multiples: a chart a layer, a curve a head

std::vector<Chart> by_layer(const PageData& data, const RunRecords& run, const Series& series,
                            const std::string& id, bool is_subject) {
  std::vector<Chart> charts;
  const size_t points = points_a_head(run);
  for (int64_t layer = 0; layer < run.metrics.layers; ++layer) {
    Chart chart;
    chart.id = fmt::format("{}-{}", id, layer);
    chart.title = fmt::format("layer {}", layer);
    chart.small = true, chart.log_y = true;
    for (int64_t head = 0; head < run.metrics.heads; ++head) {
      Line line = thin(head_line(series, layer * run.metrics.heads + head), points);
      line.label = fmt::format("head {}", head);
      const bool looked_at = is_subject && layer == data.layer && head == data.head;
      line.style = looked_at ? "c0" : "quiet";
      // What is looked at lies on top.
      if (looked_at)
        chart.lines.push_back(std::move(line));
      else
        chart.lines.insert(chart.lines.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(
                                                     static_cast<size_t>(head), chart.lines.size())),
                           std::move(line));
    }
    if (is_subject && layer == data.layer)
      std::stable_partition(chart.lines.begin(), chart.lines.end(),
                            [](const Line& l) { return l.style == "quiet"; });
    charts.push_back(std::move(chart));
  }
  return charts;
}

std::string heads_panel(const PageData& data) {
  const RunRecords& run = data.runs[data.subject];
  const Series* const series = find_series(run, "norm_q");
  if (!series) return "";
  std::vector<Chart> charts = by_layer(data, run, *series, "wq", true);
  const auto range = common_range(charts);
  for (Chart& chart : charts) {
    chart.y_range = range;
    chart.y_label = "spectral norm of W_Q, log axis";
    chart.description = fmt::format(
        "Spectral norm of W_Q of each head of {} against steps, on a logarithmic axis common to all layers.",
        chart.title);
  }
  return section(
      "heads", "W_Q by head",
      fmt::format("{} of each {}'s {} against {}s, one log axis for all layers{}.",
                  term("spectral norm", "Spectral norm"), term("head"), term("W_Q"), term("step"),
                  data.head >= 0
                      ? fmt::format("; <span class=\"c0\">head {} of layer {}</span> is the one to watch",
                                    data.head, data.layer)
                      : ""),
      multiples(std::move(charts), 1056));
}

// --- Ties

// Of every step the largest over heads.
Line largest_line(const Series& series, double factor) {
  Line line;
  for (size_t n = 0; n < series.steps.size(); ++n) {
    double largest = kUnknown;
    for (const double value : series.row(n))
      if (!std::isnan(value) && !(value <= largest)) largest = value;
    line.x.push_back(static_cast<double>(series.steps[n])), line.y.push_back(factor * largest);
  }
  return line;
}

std::string ties_panel(const PageData& data) {
  Chart ties, loss;
  for (const size_t n : subject_first(data)) {
    const RunRecords& run = data.runs[n];
    const Series* const series = find_series(run, name(HeadFact::tied_rows));
    if (!series) continue;
    Line line = largest_line(*series, 100);
    line = binned(line, {}, 240);
    for (double& low : line.low) low = std::max(0.0, low);
    for (double& high : line.high) high = std::min(100.0, high);
    line.label = run.label, line.style = colour_of(data, n);
    ties.lines.push_back(std::move(line));
    Line losses{
        run.label, colour_of(data, n), {run.metrics.steps.begin(), run.metrics.steps.end()}, run.loss, {},
        {}};
    losses = binned(losses, {}, 240);
    losses.low.clear(), losses.high.clear();
    // The same steps as above, less the fall at the start.
    const size_t begun = losses.y.size() / 20;
    losses.x.erase(losses.x.begin(), losses.x.begin() + static_cast<std::ptrdiff_t>(begun));
    losses.y.erase(losses.y.begin(), losses.y.begin() + static_cast<std::ptrdiff_t>(begun));
    loss.lines.push_back(std::move(losses));
  }
  if (ties.lines.empty()) return "";
  double low = 0, high = 1;
  for (const Line& line : ties.lines)
    if (!line.x.empty()) high = std::max(high, line.x.back());
  ties.id = "ties-chart", ties.title = "Ties", ties.y_label = "rows with a tie, % (the head that has most)";
  ties.description =
      "Share of rows in which another score ties with the largest, of the head that has most, against "
      "steps; bands are twice the standard error.";
  ties.zero_y = true, ties.height = 210, ties.x_range = std::pair(low, high);
  loss.id = "ties-loss", loss.title = "Loss", loss.y_label = "loss, nats a token";
  loss.description = "The loss of the same runs on the same axis of steps.";
  loss.height = 190, loss.x_range = std::pair(low, high);
  return section(
      "ties", "Ties against loss",
      fmt::format("A {} is what scores of a coarse format end in: does it climb before the {} does?",
                  term("tie"), term("loss")),
      draw(ties) + draw(loss));
}

// --- The leak

// A head that looks at one key alone has almost no delta: shares below this carry no information.
constexpr double kLeastShare = 1e-9;

struct LeakCharts {
  Chart sums, running, share;

  void add(const RunRecords& run, int64_t head, const std::string& colour) {
    const auto add_line = [&](Chart& chart, Line line) {
      line.label = run.label, line.style = colour;
      chart.lines.push_back(std::move(line));
    };
    if (const Series* const series = find_series(run, "delta_error_running"))
      add_line(running, thin(head_line(*series, head), kPoints));
    const Series *const mean = find_series(run, name(HeadFact::leak_mean)),
                        *const error = find_series(run, name(HeadFact::leak_error)),
                        *const rms = find_series(run, name(HeadFact::leak_rms)),
                        *const delta = find_series(run, name(HeadFact::delta_rms));
    if (mean && error && mean->steps == error->steps)
      add_line(sums, thin(sum_line(head_line(*mean, head), head_line(*error, head)), kPoints));
    if (rms && delta && rms->steps == delta->steps) {
      Line line = head_line(*rms, head);
      const Line d = head_line(*delta, head);
      for (size_t k = 0; k < line.y.size(); ++k)
        line.y[k] = d.y[k] > 0 ? std::max(kLeastShare, line.y[k] / d.y[k]) : kUnknown;
      add_line(share, binned_logarithms(line, 240));
    }
  }

  // where: "layer 1 head 2"
  std::string drawn(const std::string& where) {
    for (Chart* const sum : {&sums, &running}) sum->zero_y = true, sum->guides = {{0, ""}};
    sums.height = 240, running.height = share.height = 220;
    share.log_y = true, share.guides = {{0x1p-23, "FP32's step, 2⁻²³"}};
    const auto named = [](Chart& chart, const char* id, const char* title, const char* y_label,
                          std::string description) -> std::string {
      if (chart.lines.empty()) return "";
      chart.id = id, chart.title = title, chart.y_label = y_label;
      chart.description = std::move(description);
      return draw(chart);
    };
    return named(sums, "leak-sum", "Running sum of the leak",
                 "running sum of the mean leak, with a 95 % band",
                 fmt::format("Sum over steps of the mean leak of {}, with the band that the rows' scatter "
                             "leaves; a curve that leaves zero is biased.",
                             where)) +
           named(running, "delta-running", "Running sum of delta's error",
                 "running sum of delta error over the probed steps",
                 fmt::format("Sum of delta's error of {} over the probed steps of each run.", where)) +
           named(share, "leak-size", "Leak over delta", "leak over delta, root mean squares, log axis",
                 fmt::format("How large the leak of {} is, as a share of delta, on a logarithmic axis.",
                             where));
  }

 private:
  // The sum of the means so far, and its band.
  static Line sum_line(const Line& means, const Line& errors) {
    Line line;
    double sum = 0, variance = 0;
    for (size_t k = 0; k < means.y.size(); ++k) {
      if (std::isfinite(means.y[k])) sum += means.y[k];
      if (std::isfinite(errors.y[k])) variance += errors.y[k] * errors.y[k];
      const double half = 1.96 * std::sqrt(variance);
      line.x.push_back(means.x[k]), line.y.push_back(sum);
      line.low.push_back(sum - half), line.high.push_back(sum + half);
    }
    return line;
  }
};

std::string leak_panel(const PageData& data) {
  LeakCharts charts;
  for (const size_t n : subject_first(data))
    if (has_head(data.runs[n], data))
      charts.add(data.runs[n], head_of(data.runs[n], data), colour_of(data, n));
  const std::string where =
      data.head >= 0 ? fmt::format("layer {} head {}", data.layer, data.head) : "the head of interest";
  const std::string content = charts.drawn(where);
  if (content.empty()) return "";
  return section(
      "leak", "The sum that should be zero",
      fmt::format("The {} and the {} of {}, in every run.", term("leak"), term("delta error"), where),
      content,
      fmt::format("<p>In exact arithmetic each {} of dS sums to zero. What is left drives the {}, whether it "
                  "has one sign (the curve walks away) or not "
                  "(it wanders).</p><p>Shaded: the {}.</p>",
                  term("row"), term("drift"), term("confidence band")));
}

// --- The offset

// A chart a layer of the subject; of another run only the layer of interest.
std::vector<Chart> offset_charts(const PageData& data, size_t n) {
  const RunRecords& run = data.runs[n];
  const bool is_subject = n == data.subject;
  const Series* const series = find_offset(run);
  if (!series) return {};
  const Series* const spread = find_series(run, "largest_row_spread");
  std::vector<Chart> charts = by_layer(data, run, *series, fmt::format("offset-{}", n), is_subject);
  const bool one_layer = !is_subject && has_head(run, data);
  if (one_layer) charts = {charts[static_cast<size_t>(data.layer)]};
  for (Chart& chart : charts) {
    const int64_t layer = one_layer ? data.layer : &chart - charts.data();
    for (int64_t head = 0; spread && head < run.metrics.heads; ++head) {
      const bool looked_at = is_subject && layer == data.layer && head == data.head;
      Line line = thin(head_line(*spread, layer * run.metrics.heads + head), points_a_head(run));
      line.label = fmt::format("spread, head {}", head);
      line.style = looked_at ? "c0 dashed" : "quiet dashed";
      line.named = looked_at;
      chart.lines.insert(looked_at ? chart.lines.end() : chart.lines.begin(), std::move(line));
    }
    if (!is_subject) {
      chart.title = fmt::format("{}, layer {}", run.label, layer);
      for (Line& line : chart.lines)
        if (line.label == fmt::format("head {}", data.head)) line.style = colour_of(data, n);
    }
    chart.y_label = find_series(run, name(HeadFact::offset)) ? "offset, log axis" : "log-sum-exp, log axis";
    chart.description = fmt::format(
        "{}: the offset of each head (solid) and the spread of its scores (dashed) against steps, on "
        "a logarithmic axis.",
        chart.title);
    chart.guides.push_back({limit_of(run), ""});
  }
  return charts;
}

}  // namespace

std::string offset_panel(const PageData& data) {
  std::vector<Chart> all;
  for (const size_t n : subject_first(data)) {
    std::vector<Chart> charts = offset_charts(data, n);
    std::move(charts.begin(), charts.end(), std::back_inserter(all));
  }
  std::string content;
  if (all.empty()) {
    content =
        missing("No scores by head are recorded. They are made by", "evenkeel train ... --facts-every 10");
  } else {
    const auto range = common_range(all);
    for (Chart& chart : all) chart.y_range = range;
    content = multiples(std::move(all), 800);
  }
  return section(
      "offset", "The offset of the scores",
      fmt::format("{} (solid) against {} (dashed), by head, on a log axis: softmax sees only the second.",
                  term("offset", "Offset"), term("spread")),
      content,
      fmt::format("<p>The rule is the limit of {}: {} times the median of the run's heads at its end, at "
                  "least {} and at most "
                  "{}. Where isolate has replayed the run in FP32, the verdict goes by that control's heads "
                  "instead.</p><p>Nothing pulls the {} back. Where it is far beyond the {}, the differences "
                  "that softmax needs are lost.</p>",
                  term("drift"), figure(kDriftTimes, 1), figure(kLowestDriftLimit, 3),
                  figure(kHighestDriftLimit, 3), term("offset"), term("spread")));
}

std::string run_panels(const PageData& data) {
  static constexpr std::pair<std::string (*)(const PageData&), const char*> kPanels[] = {
      {norms_panel, "spectral norms"},
      {heads_panel, "W_Q by head"},
      {ties_panel, "ties against loss"},
      {leak_panel, "the sum that should be zero"}};
  std::string drawn, absent;
  for (const auto& [panel, what] : kPanels) {
    const std::string one = panel(data);
    drawn += one;
    if (one.empty()) absent += fmt::format("{}{}", absent.empty() ? "What this page lacks: " : ", ", what);
  }
  return drawn + (absent.empty() ? "" : no_probes(data.runs[data.subject], absent + "."));
}

}  // namespace evenkeel
