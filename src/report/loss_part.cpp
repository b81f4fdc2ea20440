// The loss of the runs on one axis, with what happened to each.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {
namespace {

constexpr size_t kLossPoints = 2000;  // of a curve of the loss

std::vector<double> doubles(const std::vector<int64_t>& steps) { return {steps.begin(), steps.end()}; }

// The mean over a window around each step, which does not lag as a running mean would.
std::vector<double> smoothed(const std::vector<double>& y) {
  const auto n = static_cast<std::ptrdiff_t>(y.size()), half = std::clamp<std::ptrdiff_t>(n / 80, 2, 60);
  std::vector<double> sums(y.size() + 1), counts(y.size() + 1), out(y.size());
  for (size_t k = 0; k < y.size(); ++k) {
    const bool good = std::isfinite(y[k]);
    sums[k + 1] = sums[k] + (good ? y[k] : 0), counts[k + 1] = counts[k] + good;
  }
  for (std::ptrdiff_t k = 0; k < n; ++k) {
    // The same on both sides, so that a slope at an end is no bend.
    const std::ptrdiff_t reach = std::min({half, k, n - 1 - k});
    const auto begin = static_cast<size_t>(k - reach), end = static_cast<size_t>(k + reach + 1);
    const double found = counts[end] - counts[begin];
    out[static_cast<size_t>(k)] =
        std::isfinite(y[static_cast<size_t>(k)]) && found > 0 ? (sums[end] - sums[begin]) / found : kUnknown;
  }
  return out;
}

const char* mark_style(RunEvent::Kind kind) {
  switch (kind) {
    case RunEvent::Kind::checkpoint:
      return "check";
    case RunEvent::Kind::plan_change:
      return "change";
    case RunEvent::Kind::finding:
      return "finding";
    default:
      return "guard";
  }
}

// Some checkpoints say as much as many do, and a change by the guard is drawn once.
Lane lane_of(const RunRecords& run, const std::string& style) {
  Lane lane{run.label, style, {}};
  constexpr size_t kMostCheckpoints = 60, kMostHairlines = 4;
  std::set<int64_t> by_guard;  // steps from which its changes hold
  size_t checkpoints = 0, told = 0, n = 0;
  for (const RunEvent& event : run.events) {
    if (event.kind == RunEvent::Kind::guard_remedy) by_guard.insert(event.step + 1);
    (event.kind == RunEvent::Kind::checkpoint ? checkpoints : told)++;
  }
  const size_t every = checkpoints / kMostCheckpoints + 1;
  for (const RunEvent& event : run.events) {
    if (event.kind == RunEvent::Kind::checkpoint && n++ % every != 0) continue;
    if (event.kind == RunEvent::Kind::plan_change && by_guard.contains(event.step)) continue;
    const bool grave = event.kind == RunEvent::Kind::finding || event.kind == RunEvent::Kind::guard_roll_back;
    lane.marks.push_back({static_cast<double>(event.step), mark_style(event.kind),
                          fmt::format("{} at step {}{}{}", name(event.kind), event.step,
                                      event.words.empty() ? "" : ": ", event.words),
                          grave || (event.kind != RunEvent::Kind::checkpoint && told <= kMostHairlines)});
  }
  return lane;
}

// What one run adds to the two charts: its curves and a lane of events. Returns the highest of its smoothed loss.
double add_run(const PageData& data, size_t n, Chart& loss, Chart& norm) {
  const RunRecords& run = data.runs[n];
  const std::string colour = colour_of(data, n);
  const size_t points = kLossPoints / std::max<size_t>(1, data.runs.size() / 4);
  const std::vector<double> x = doubles(run.metrics.steps);
  Line raw{run.label, colour + " raw", x, run.loss, {}, {}, false};
  Line mean{run.label, colour, x, smoothed(run.loss), {}, {}};
  // The fall of the first steps would flatten all that comes after.
  double highest = 0;
  for (size_t k = mean.y.size() / 25; k < mean.y.size(); ++k)
    if (std::isfinite(mean.y[k])) highest = std::max(highest, mean.y[k]);
  loss.lines.insert(loss.lines.begin() + static_cast<std::ptrdiff_t>(loss.lines.size() / 2),
                    thin(raw, points));
  loss.lines.push_back(thin(mean, points));
  std::vector<double> valid_x, valid_y;
  for (size_t k = 0; k < x.size(); ++k)
    if (std::isfinite(run.validation_loss[k]))
      valid_x.push_back(x[k]), valid_y.push_back(run.validation_loss[k]);
  if (!valid_x.empty())
    loss.lines.push_back(
        thin({run.label + ", validation", colour + " dashed", valid_x, valid_y, {}, {}}, points));
  norm.lines.push_back(thin({run.label, colour, x, smoothed(run.gradient_norm), {}, {}}, points));
  loss.lanes.push_back(lane_of(run, colour));
  if (const Symptom& symptom = data.symptoms[n]; symptom.kind != Symptom::Kind::none)
    loss.lanes.back().marks.push_back({static_cast<double>(symptom.since), "symptom",
                                       fmt::format("symptom since step {}: {}", symptom.since, symptom.words),
                                       true});
  return highest;
}

}  // namespace

std::string loss_part(const PageData& data) {
  Chart loss, norm;
  double highest = 0;
  bool any = false;
  for (size_t n = 0; n < data.runs.size(); ++n) {
    if (!data.runs[n].has_steps()) continue;
    any = true;
    highest = std::max(highest, add_run(data, n, loss, norm));
  }
  if (!any) return section("loss", "The loss", "", missing("No step is recorded yet.", ""));
  loss.id = "loss-chart", loss.title = "Loss", loss.y_label = "loss, nats a token";
  loss.description =
      "Loss of each run against steps: thin the single steps, bold the mean around each; below, a lane of "
      "events a run.";
  if (highest > 0) loss.highest = 1.03 * highest;
  loss.height = 380 + 27 * static_cast<double>(data.runs.size());
  norm.id = "gradient-chart", norm.title = "Gradient norm", norm.y_label = "gradient norm, log axis";
  norm.description = "Norm of the whole gradient of each run against steps, smoothed, on a logarithmic axis.";
  norm.log_y = true, norm.height = 200;
  std::string key;
  const std::pair<const char*, std::string> kMarks[] = {
      {"check", term("checkpoint")},
      {"change", "change of the " + term("precision plan", "plan")},
      {"guard", term("guard")},
      {"symptom", "symptom, since when"},
      {"finding", term("finding")}};
  for (const auto& [style, meaning] : kMarks)
    key += fmt::format("<li>{} {}</li>", legend_mark(style), meaning);
  const std::string aside = fmt::format(
      "<p>Thin: single steps. Bold: the mean around each.</p><ul class=\"marks\">{}</ul><p "
      "class=\"hint\">Drag to zoom, double-click to "
      "go back; arrow keys walk through the steps of a chart that has the focus.</p>",
      key);
  return section(
      "loss", "The loss",
      fmt::format("{} of the runs, on one axis, with what happened to each.", term("loss", "Loss")),
      draw(loss) + draw(norm), aside);
}

}  // namespace evenkeel
