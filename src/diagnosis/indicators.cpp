#include "diagnosis/indicators.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_lines.h"
#include "base/toml.h"
#include "diagnosis/probe_recorder.h"
#include "diagnosis/replays.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr size_t kRules = kRuleNames.size();

// --- what a line says of each indicator

// One line of metrics.jsonl, by head where it is.
class Line {
 public:
  Line(const Json& object, int64_t& L, int64_t& H, int64_t& misshapen)
      : object_(object), L_(L), H_(H), misshapen_(misshapen) {
    const auto found = object.find("probe");
    if (found != object.end() && found->is_object()) probe_ = &*found;
  }
  // (L H), of the step's own facts or else of its probe; empty where there is no such field, or none of that shape.
  std::vector<double> heads(const char* field) const {
    for (const Json* from : {&object_, probe_})
      if (from)
        if (const auto found = from->find(field); found != from->end()) {
          std::vector<double> values = from_heads(*found, L_, H_);
          misshapen_ += values.empty();
          return values;
        }
    return {};
  }
  // The same, size by size: NaN is as bad as an infinity where a number is always known.
  std::vector<double> known_heads(const char* field) const {
    std::vector<double> values = heads(field);
    for (double& value : values)
      if (std::isnan(value)) value = kInfinity;
    return values;
  }
  std::vector<double> number(const char* field) const {
    const auto found = object_.find(field);
    const std::optional<double> value = found == object_.end() ? std::nullopt : json_number(*found);
    if (!value) return {};
    return {std::isnan(*value) ? kInfinity : *value};
  }
  std::vector<double> ratio(const char* above, const char* below) const {
    std::vector<double> a = heads(above);
    const std::vector<double> b = heads(below);
    if (a.size() != b.size()) return {};
    for (size_t n = 0; n < a.size(); ++n) a[n] = a[n] == 0 ? 0 : a[n] / b[n];
    return a;
  }

 private:
  const Json& object_;
  const Json* probe_ = nullptr;
  int64_t &L_, &H_, &misshapen_;
};

// Sizes, (L H) or one of the whole run; residual_z keeps its sign. Empty: not recorded here. In the order of kIndicators.
using Read = std::vector<double> (*)(const Line&);
constexpr std::array<Read, kIndicators.size()> kReads = {
    [](const Line& line) { return line.known_heads("largest_lse"); },
    [](const Line& line) { return line.heads("largest_row_mean"); },
    [](const Line& line) { return line.heads("largest_score"); },
    [](const Line& line) { return line.ratio("residual_mean", "residual_error"); },
    [](const Line& line) { return line.ratio("residual_rms", "delta_rms"); },
    [](const Line& line) { return line.heads("leak_share"); },
    [](const Line& line) { return line.heads("delta_error_running"); },
    [](const Line& line) { return line.heads("tied_rows"); },
    [](const Line& line) { return line.heads("norm_q"); },
    [](const Line& line) { return line.heads("norm_k"); },
    [](const Line& line) {
      std::vector<double> values = line.heads("score_entropy");
      for (double& value : values) value = 1 / value;
      return values;
    },
    [](const Line& line) { return line.number("loss"); },
    [](const Line& line) { return line.number("gradient_norm"); },
};
constexpr size_t kLogSumExp = 0, kResidualZ = 3;
static_assert(kIndicators[kLogSumExp].name == "log_sum_exp" && kIndicators[kResidualZ].name == "residual_z");

double octaves(double size, double least) {
  // Not std::clamp: infinities are kHighestRung.
  return std::log2(std::min(std::max(std::fabs(size), least), std::exp2(kHighestRung)));
}

double median_of_sorted(const std::vector<double>& sorted) { return sorted[sorted.size() / 2]; }

// The last kTrail values, by age and by size.
class Trail {
 public:
  size_t size() const { return by_age_.size(); }
  void take(double value) {
    by_age_.push_back(value);
    by_size_.insert(std::ranges::upper_bound(by_size_, value), value);
    if (by_age_.size() <= kTrail) return;
    by_size_.erase(std::ranges::lower_bound(by_size_, by_age_.front()));
    by_age_.pop_front();
  }
  double median() const { return median_of_sorted(by_size_); }
  // Median of the distances from the median: the two sorted halves, merged from the middle outwards. O(size).
  double median_distance() const {
    const double middle = median();
    size_t low = by_size_.size() / 2, high = low;  // next below is low - 1, next above is high
    double distance = 0;
    for (size_t n = 0; n <= by_size_.size() / 2; ++n) {
      const double below = low > 0 ? middle - by_size_[low - 1] : kInfinity;
      const double above = high < by_size_.size() ? by_size_[high] - middle : kInfinity;
      distance = std::min(below, above);
      if (below < above)
        --low;
      else
        ++high;
    }
    return distance;
  }

 private:
  std::deque<double> by_age_;
  std::vector<double> by_size_;
};

// One indicator of one head on its way through a run.
class Series {
 public:
  Series(double least, bool has_sign, int64_t warmup)
      : least_(least),
        has_sign_(has_sign),
        warmup_(warmup),
        reference_end_(warmup + std::max(warmup, kReference)) {}

  // The rung by each rule, where it can be judged. REQUIRES: value is not NaN; steps ascend.
  std::array<std::optional<int>, kRules> take(int64_t step, double value) {
    // Signs cancel where there is no bias, so that one is a mean of the numbers themselves.
    const double largest = std::exp2(kHighestRung);
    mean_.take(step, has_sign_ ? std::clamp(value, -largest, largest) : octaves(value, least_));
    const double smooth = has_sign_ ? octaves(mean_.value(), least_) : mean_.value();
    std::array<std::optional<int>, kRules> rungs;
    if (step < warmup_) return rungs;
    const auto rung = [&](Rule rule) -> std::optional<int>& { return rungs[static_cast<size_t>(rule)]; };
    rung(Rule::level) = static_cast<int>(std::floor(smooth));
    if (step < reference_end_ || early_.empty())
      early_.insert(std::ranges::upper_bound(early_, smooth), smooth);
    else
      rung(Rule::growth) = static_cast<int>(std::floor(smooth - median_of_sorted(early_)));
    if (trail_.size() >= kFewestTrail) {
      constexpr double kNormal = 1.4826;  // deviation of normal numbers over the median of their distances
      const double spread = std::max(kNormal * trail_.median_distance(), kSmallestSpread);
      rung(Rule::deviation) =
          static_cast<int>(std::floor(octaves((smooth - trail_.median()) / spread, 0x1p-1)));
      if (smooth <= trail_.median()) rung(Rule::deviation) = -1;
    }
    trail_.take(smooth);
    return rungs;
  }

 private:
  double least_;
  bool has_sign_;
  int64_t warmup_, reference_end_;
  RunningMean mean_{HeadDrift::kFast};
  std::vector<double> early_;  // sorted
  Trail trail_;
};

// --- a run's settings

// All that a twin must share, as text: everything but the plan and what is recorded or kept on the way.
std::string shared_settings(RunConfig config) {
  const RunConfig none;
  config.plan = none.plan;
  config.changes.clear();
  config.keel_ramp = 0;
  config.schedule.steps = config.schedule.course == Course::constant ? 1 : config.schedule.steps;
  config.checkpoint_every = config.checkpoints_kept = config.keep_every = 0;
  config.validation.clear();
  config.validate_every = config.validation_batches = 0;
  config.facts_every = config.probe_every = 0;
  config.guard = GuardMode::off;
  config.backend = Backend::automatic;
  config.shard_optimizer = false;
  config.divergence = 0;
  return to_toml(to_toml_table(config));
}

std::optional<RunConfig> config_of(const fs::path& folder, std::vector<std::string>& notes) {
  std::error_code error;
  if (!fs::exists(folder / "config.toml", error)) {
    notes.push_back("no config.toml: taken to have no warm-up and no twin");
    return std::nullopt;
  }
  try {
    RunConfig config;
    read_run_config(folder / "config.toml", config);
    return config;
  } catch (const std::exception& problem) {
    notes.push_back(fmt::format("{}: taken to have no warm-up and no twin", problem.what()));
    return std::nullopt;
  }
}

}  // namespace

void RunningMean::take(int64_t step, double value) {
  ++count_;
  // Of values a step apart the new one has the weight 1 / look_back; the older ones fade so much a step.
  const double fading = std::pow(1 - 1 / look_back_, static_cast<double>(step - last_));
  value_ += std::max(1 / count_, 1 - fading) * (value - value_);
  last_ = step;
}

void HeadDrift::take(int64_t step, double lse, double residual, double delta) {
  // A log-sum-exp that is not finite is beyond every limit; logarithms below 1 tell nothing.
  const double size = std::isfinite(lse) ? lse : kInfinity;
  const double log_size = octaves(size, kIndicators[kLogSumExp].least) * std::log(2.0);
  fast_.take(step, log_size);
  slow_.take(step, log_size);
  if (!std::isfinite(residual) || !std::isfinite(delta)) return;
  residual_.take(step, residual * residual);
  delta_.take(step, delta * delta);
}

double HeadDrift::leak() const {
  return delta_.value() > 0 ? std::sqrt(residual_.value() / delta_.value()) : 0;
}

double drifted_beyond(const std::vector<HeadDrift>& heads) {
  std::vector<double> sizes;
  for (const HeadDrift& head : heads) sizes.push_back(head.size());
  return drifted_beyond(std::move(sizes), kTimesToMend);
}

IndicatorRun read_indicators(const fs::path& folder) {
  IndicatorRun run;
  run.folder = folder;
  run.config = config_of(folder, run.notes);
  if (run.config) {
    run.warmup = run.config->schedule.warmup;
    run.layers = run.config->model.layers, run.heads = run.config->model.heads;
  }

  std::array<std::vector<Series>, kIndicators.size()> series;  // by head, or one
  std::array<int64_t, kIndicators.size()> recorded = {};       // lines
  std::vector<HeadDrift> drift;
  int64_t lines = 0, last = -1, out_of_order = 0, misshapen = 0;
  const auto see = [&](const JsonLine& json_line) {
    const auto found = json_line.object.find("step");
    constexpr int64_t kMostSkipped = 1 << 24;  // a damaged number is no reason to ask for all memory
    if (found == json_line.object.end() || !found->is_number_integer() || found->get<int64_t>() <= last ||
        found->get<int64_t>() - last > kMostSkipped) {
      ++out_of_order;
      return;
    }
    const int64_t step = last = found->get<int64_t>();
    ++lines;
    const Line line(json_line.object, run.layers, run.heads, misshapen);
    const std::vector<double> loss = line.number("loss");
    run.loss.resize(static_cast<size_t>(step), kNotKnown);
    run.loss.push_back(loss.empty() ? kNotKnown : loss[0]);

    for (size_t i = 0; i < kIndicators.size(); ++i) {
      const std::vector<double> values = kReads[i](line);
      if (values.empty()) continue;
      ++recorded[i];
      if (series[i].empty())
        series[i].assign(values.size(), Series(kIndicators[i].least, i == kResidualZ, run.warmup));
      std::array<std::optional<Reached>, kRules> highest;
      for (size_t n = 0; n < values.size(); ++n) {
        if (std::isnan(values[n])) continue;
        const auto rungs = series[i][n].take(step, values[n]);
        const int64_t head = kIndicators[i].by_head ? static_cast<int64_t>(n) : -1;
        for (size_t r = 0; r < kRules; ++r)
          if (rungs[r] && (!highest[r] || *rungs[r] > highest[r]->rung)) highest[r] = {*rungs[r], step, head};
      }
      for (size_t r = 0; r < kRules; ++r) {
        if (!highest[r]) continue;
        std::vector<Reached>& reached = run.reached[i][r];
        if (reached.empty() || highest[r]->rung > reached.back().rung) reached.push_back(*highest[r]);
      }
    }

    const std::vector<double> lse = line.heads("largest_lse"), residual = line.heads("residual_rms"),
                              delta = line.heads("delta_rms");
    if (lse.empty() || residual.empty() || delta.empty()) return;
    drift.resize(lse.size());
    run.guard_judged = true;
    for (size_t n = 0; n < drift.size(); ++n) drift[n].take(step, lse[n], residual[n], delta[n]);
    const double limit = drifted_beyond(drift);
    for (size_t n = 0; n < drift.size(); ++n)
      if (!run.guard && drift[n].alarm(limit)) run.guard = {0, step, static_cast<int64_t>(n)};
  };
  const JsonLinesResult file = read_json_lines(folder / "metrics.jsonl", see);
  if (file.fault_count > 0)
    run.notes.push_back(fmt::format("{} damaged lines of {}, passed over; the first: {}", file.fault_count,
                                    file.lines, file.faults.front().message));
  if (file.torn_bytes > 0)
    run.notes.push_back(fmt::format("a torn last line of {} bytes, passed over", file.torn_bytes));
  if (out_of_order > 0)
    run.notes.push_back(
        fmt::format("{} lines without a step, or with one out of order, passed over", out_of_order));
  if (misshapen > 0)
    run.notes.push_back(
        fmt::format("{} fields that are not {} x {} numbers, passed over", misshapen, run.layers, run.heads));
  if (lines == 0) {
    run.notes.push_back("expected the lines of steps, found none");
    return run;
  }
  std::string missing;
  for (size_t i = 0; i < kIndicators.size(); ++i)
    if (recorded[i] == 0)
      missing +=
          fmt::format("{}{} ({})", missing.empty() ? "" : ", ", kIndicators[i].name, kIndicators[i].needs);
  if (!missing.empty())
    run.notes.push_back(fmt::format("not recorded (train --probe-every N records all): {}", missing));
  if (last < run.warmup)
    run.notes.push_back(
        fmt::format("ends at step {}, before its warm-up of {} does: nothing is judged", last, run.warmup));
  return run;
}

namespace {

// Means of the kLossWindow losses that end at each step; NaN before there are so many, infinite where one is not finite.
// What is not recorded is left out.
std::vector<double> window_means(const std::vector<double>& loss) {
  std::vector<double> means(loss.size(), kNotKnown);
  double sum = 0;
  int64_t count = 0, infinite = 0;
  const auto add = [&](double x, int sign) {
    if (std::isnan(x)) return;
    if (std::isinf(x)) {
      infinite += sign;
    } else {
      sum += sign * x;
      count += sign;
    }
  };
  constexpr auto kWindow = static_cast<size_t>(kLossWindow);
  for (size_t n = 0; n < loss.size(); ++n) {
    add(loss[n], 1);
    if (n >= kWindow) add(loss[n - kWindow], -1);
    if (infinite > 0)
      means[n] = kInfinity;
    else if (n + 1 >= kWindow && count > 0)
      means[n] = sum / static_cast<double>(count);
  }
  return means;
}

}  // namespace

std::optional<int64_t> loss_moved(const IndicatorRun& run, const Twins& twins) {
  const std::vector<double> mean = window_means(run.loss);
  std::vector<double> healthy;  // the highest of the twins' means; -infinity where none has one
  for (const IndicatorRun* twin : twins) {
    const std::vector<double> of_twin = window_means(twin->loss);
    healthy.resize(std::max(healthy.size(), of_twin.size()), -kInfinity);
    for (size_t n = 0; n < of_twin.size(); ++n)
      if (std::isfinite(of_twin[n])) healthy[n] = std::max(healthy[n], of_twin[n]);
  }
  double best = kInfinity;
  int64_t since = -1;  // the end of the first window of the stretch that is above
  const auto steps = static_cast<int64_t>(mean.size());
  for (int64_t n = 0; n < steps; ++n) {
    const auto at = static_cast<size_t>(n);
    if (std::isnan(mean[at])) continue;
    best = std::min(best, mean[at]);
    // Behind the twins' end there is only the run's own past.
    const double limit = at < healthy.size() && std::isfinite(healthy[at]) ? healthy[at] + kLossMoved
                                                                           : best * (1 + kLossMoved);
    const bool calm = n - kLossWindow + 1 >= run.warmup;  // the window lies behind the warm-up
    const bool above = std::isinf(mean[at]) || (calm && mean[at] > limit);
    if (!above)
      since = -1;
    else if (since < 0)
      since = n;
    if (since >= 0 && n - since >= kLossHold) break;
  }
  if (since < 0) return std::nullopt;
  // A window that is infinite is so by its last loss.
  const auto at = static_cast<size_t>(since);
  return std::isinf(mean[at]) ? since : std::max<int64_t>(0, since - kLossWindow + 1);
}

Twins find_twins(const IndicatorRun& run, const std::vector<IndicatorRun>& healthy) {
  Twins twins;
  if (!run.config) return twins;
  const std::string settings = shared_settings(*run.config);
  for (const IndicatorRun& other : healthy)
    if (&other != &run && other.config && shared_settings(*other.config) == settings) twins.push_back(&other);
  return twins;
}

std::string_view IndicatorScore::name() const {
  return indicator < kIndicators.size() ? kIndicators[indicator].name : "guard";
}

double IndicatorScore::merit() const {
  const auto share = [](int64_t part, int64_t whole) {
    return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  return share(in_time, moved) - share(false_alarms, healthy);
}

namespace {

// highest: rungs of n healthy runs, descending. A run with k others at its height or above speaks where none of these is
// among the m chosen of the n - 1 others: C(n - 1 - k, m) / C(n - 1, m), a product of m factors.
double half_alarms(const std::vector<int>& highest) {
  const size_t n = highest.size(), m = n / 2;
  if (m == 0) return 0;
  double sum = 0;
  for (const int rung : highest) {
    const auto others =
        static_cast<size_t>(std::ranges::count_if(highest, [&](int other) { return other >= rung; }) - 1);
    double chance = 1;
    for (size_t j = 0; j < m; ++j)
      chance *=
          n - 1 - j > others ? static_cast<double>(n - 1 - j - others) / static_cast<double>(n - 1 - j) : 0;
    sum += chance;
  }
  return sum / static_cast<double>(n);
}

}  // namespace

IndicatorTable judge_indicators(const std::vector<IndicatorRun>& healthy,
                                const std::vector<IndicatorRun>& derailing) {
  IndicatorTable table;
  for (const IndicatorRun& run : derailing) {
    table.twins.push_back(find_twins(run, healthy));
    table.moved.push_back(loss_moved(run, table.twins.back()));
  }
  for (const IndicatorRun& run : healthy)
    table.healthy_moved.push_back(loss_moved(run, find_twins(run, healthy)));

  const auto add = [&](IndicatorScore& score, const std::vector<bool>& judged) {
    for (size_t n = 0; n < derailing.size(); ++n) {
      score.judged += judged[n];
      score.moved += judged[n] && table.moved[n];
      if (score.spoke[n] && table.moved[n]) {
        score.leads.push_back(*table.moved[n] - score.spoke[n]->step);
        score.in_time += score.leads.back() > 0;
      }
    }
    if (score.judged + score.healthy == 0) return;
    std::ranges::sort(score.leads);
    table.scores.push_back(std::move(score));
  };

  std::vector<bool> judged;  // (derailing)
  IndicatorScore guard;
  guard.indicator = kIndicators.size();
  for (const IndicatorRun& run : derailing) {
    guard.spoke.push_back(run.guard);
    judged.push_back(run.guard_judged);
  }
  for (const IndicatorRun& run : healthy) {
    guard.healthy += run.guard_judged;
    guard.false_alarms += run.guard.has_value();
  }
  if (guard.healthy > 0)
    guard.half_alarms = static_cast<double>(guard.false_alarms) / static_cast<double>(guard.healthy);
  add(guard, judged);

  for (size_t i = 0; i < kIndicators.size(); ++i)
    for (size_t r = 0; r < kRules; ++r) {
      IndicatorScore score;
      score.indicator = i;
      score.rule = static_cast<Rule>(r);
      // Of the highest rungs of healthy runs: only one that stands alone at the top is above all others.
      std::vector<int> highest;
      for (const IndicatorRun& run : healthy)
        if (!run.reached[i][r].empty()) highest.push_back(run.reached[i][r].back().rung);
      std::ranges::sort(highest, std::greater<>());
      score.healthy = static_cast<int64_t>(highest.size());
      if (healthy.empty()) {
        if (score.rule != Rule::growth) continue;
        score.rung = kIndicators[i].growth;
      } else {
        if (highest.empty()) continue;
        score.rung = highest[0] + 1;
        score.false_alarms = highest.size() > 1 && highest[0] > highest[1] ? 1 : 0;
        score.half_alarms = half_alarms(highest);
      }
      judged.clear();
      for (const IndicatorRun& run : derailing) {
        const std::vector<Reached>& reached = run.reached[i][r];
        judged.push_back(!reached.empty());
        const auto first =
            std::ranges::find_if(reached, [&](const Reached& x) { return x.rung >= score.rung; });
        score.spoke.push_back(first == reached.end() ? std::nullopt : std::optional(*first));
      }
      add(score, judged);
    }
  return table;
}

std::vector<const IndicatorScore*> best_rules(const IndicatorTable& table) {
  std::vector<const IndicatorScore*> best;
  const auto median_lead = [](const IndicatorScore& s) {
    return s.leads.empty() ? std::numeric_limits<int64_t>::min() : s.leads[s.leads.size() / 2];
  };
  const auto better = [&](const IndicatorScore& a, const IndicatorScore& b) {
    return a.merit() != b.merit() ? a.merit() > b.merit() : median_lead(a) > median_lead(b);
  };
  for (const IndicatorScore& score : table.scores)
    if (best.empty() || best.back()->indicator != score.indicator)
      best.push_back(&score);
    else if (better(score, *best.back()))
      best.back() = &score;
  return best;
}

}  // namespace evenkeel
