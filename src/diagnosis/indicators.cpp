#include "diagnosis/indicators.h"

#include <algorithm>
#include <cmath>
#include <deque>

#include "base/error.h"
#include "base/toml.h"
#include "diagnosis/health.h"
#include "diagnosis/probes.h"
#include "records/record_json.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr size_t kRules = kRuleNames.size();

// --- what a line says of each indicator

// One line of the records, by head where it is.
class Line {
 public:
  Line(const Metrics& metrics, size_t number) : metrics_(metrics), number_(number) {}
  // (L H), of the step's own facts or else of its probe; empty where neither is recorded.
  std::vector<double> heads(std::string_view field) const {
    for (size_t n = 0; n < kHeadFactCount; ++n)
      if (kHeadFactNames[n] == field)
        if (const auto values = metrics_.facts[n].of_line(number_); !values.empty())
          return {values.begin(), values.end()};
    const auto probe = metrics_.probes.find(field);
    if (probe == metrics_.probes.end()) return {};
    const std::span<const double> values = probe->second.of_line(number_);
    return {values.begin(), values.end()};
  }
  // NaN is as bad as an infinity where a number is always known.
  std::vector<double> number(const Series& series) const {
    const std::span<const double> value = series.of_line(number_);
    if (value.empty()) return {};
    return {std::isnan(value[0]) ? kInfinity : value[0]};
  }
  const Metrics& metrics() const { return metrics_; }

 private:
  const Metrics& metrics_;
  const size_t number_;
};

// Sizes, (L H) or one of the whole run; a ratio keeps its sign. Empty: not recorded here.
std::vector<double> read_indicator(const Indicator& indicator, const Line& line) {
  switch (indicator.reading) {
    case Reading::loss:
      return line.number(line.metrics().loss);
    case Reading::gradient_norm:
      return line.number(line.metrics().gradient_norm);
    case Reading::size:
      return line.heads(indicator.field);
    case Reading::known_size: {
      std::vector<double> values = line.heads(indicator.field);
      for (double& value : values)
        if (std::isnan(value)) value = kInfinity;
      return values;
    }
    case Reading::inverse: {
      std::vector<double> values = line.heads(indicator.field);
      for (double& value : values) value = 1 / value;
      return values;
    }
    case Reading::ratio:
    case Reading::signed_ratio: {
      std::vector<double> a = line.heads(indicator.field);
      const std::vector<double> b = line.heads(indicator.over);
      if (a.size() != b.size()) return {};
      for (size_t n = 0; n < a.size(); ++n) a[n] = a[n] == 0 ? 0 : a[n] / b[n];
      return a;
    }
  }
  return {};
}

constexpr size_t kLogSumExp = 0;
static_assert(kIndicators[kLogSumExp].name == "log_sum_exp");

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
class SeriesOfHead {
 public:
  SeriesOfHead(double least, bool has_sign, int64_t warmup)
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

// read: gives the run's settings, nothing where there are none.
template <class Read>
std::optional<RunConfig> config_of(Read read, std::vector<std::string>& notes) {
  try {
    const std::optional<TomlTable> table = read();
    if (!table) {
      notes.push_back("no config.toml: taken to have no warm-up and no twin");
      return std::nullopt;
    }
    RunConfig config;
    read_run_config(*table, config);
    return config;
  } catch (const std::exception& problem) {
    notes.push_back(fmt::format("{}: taken to have no warm-up and no twin", problem.what()));
    return std::nullopt;
  }
}

// Every indicator of every head on its way through a run.
class IndicatorReader {
 public:
  explicit IndicatorReader(IndicatorRun& run) : run_(run) {}

  void see(int64_t step, const Line& line) {
    for (size_t i = 0; i < kIndicators.size(); ++i) {
      const std::vector<double> values = read_indicator(kIndicators[i], line);
      if (values.empty()) continue;
      ++recorded_[i];
      if (series_[i].empty())
        series_[i].assign(
            values.size(),
            SeriesOfHead(kIndicators[i].least, kIndicators[i].reading == Reading::signed_ratio, run_.warmup));
      see_indicator(i, step, values);
    }
    see_guard(step, line);
  }

  std::string not_recorded() const {
    std::string missing;
    for (size_t i = 0; i < kIndicators.size(); ++i)
      if (recorded_[i] == 0)
        missing +=
            fmt::format("{}{} ({})", missing.empty() ? "" : ", ", kIndicators[i].name, needs(kIndicators[i]));
    return missing;
  }

 private:
  void see_indicator(size_t i, int64_t step, const std::vector<double>& values) {
    std::array<std::optional<Reached>, kRules> highest;
    for (size_t n = 0; n < values.size(); ++n) {
      if (std::isnan(values[n])) continue;
      const auto rungs = series_[i][n].take(step, values[n]);
      const int64_t head = kIndicators[i].by_head() ? static_cast<int64_t>(n) : -1;
      for (size_t r = 0; r < kRules; ++r)
        if (rungs[r] && (!highest[r] || *rungs[r] > highest[r]->rung)) highest[r] = {*rungs[r], step, head};
    }
    for (size_t r = 0; r < kRules; ++r) {
      if (!highest[r]) continue;
      std::vector<Reached>& reached = run_.reached[i][r];
      if (reached.empty() || highest[r]->rung > reached.back().rung) reached.push_back(*highest[r]);
    }
  }

  void see_guard(int64_t step, const Line& line) {
    const std::vector<double> lse = line.heads(name(HeadFact::largest_lse)),
                              leak = line.heads(name(HeadFact::leak_rms)),
                              delta = line.heads(name(HeadFact::delta_rms));
    if (lse.empty() || leak.empty() || delta.empty()) return;
    drift_.resize(lse.size());
    run_.guard_judged = true;
    for (size_t n = 0; n < drift_.size(); ++n) drift_[n].take(step, lse[n], leak[n], delta[n]);
    const double limit = mend_limit(drift_);
    const ForecastTerms terms{.begin = run_.warmup,
                              .harmful = harmful_offset(kUsualHeadSize, kBf16.significand_bits),
                              .bound = {},
                              .last_step = 0};
    for (size_t n = 0; n < drift_.size(); ++n)
      if (!run_.guard && drift_[n].alarm(limit, terms)) run_.guard = {0, step, static_cast<int64_t>(n)};
  }

  IndicatorRun& run_;
  std::array<std::vector<SeriesOfHead>, kIndicators.size()> series_;  // by head, or one
  std::array<int64_t, kIndicators.size()> recorded_ = {};             // lines
  std::vector<HeadDrift> drift_;
};

void note_damage(const Metrics& metrics, std::vector<std::string>& notes) {
  const JsonLinesResult& file = metrics.file;
  if (file.fault_count > 0)
    notes.push_back(fmt::format("{} damaged lines of {}, passed over; the first: {}", file.fault_count,
                                file.lines, file.faults.front().message));
  if (file.torn_bytes > 0)
    notes.push_back(fmt::format("a torn last line of {} bytes, passed over", file.torn_bytes));
  if (metrics.without_step > 0)
    notes.push_back(
        fmt::format("{} lines without a step that a run can be at, passed over", metrics.without_step));
  if (metrics.went_back > 0)
    notes.push_back(
        fmt::format("the run went back {} times: what it recorded before is replaced", metrics.went_back));
  if (metrics.misshapen > 0)
    notes.push_back(fmt::format("{} fields that are not numbers, or not {} x {} of them, passed over",
                                metrics.misshapen, metrics.layers, metrics.heads));
}

}  // namespace

void RunningMean::take(int64_t step, double value) {
  ++count_;
  // Of values a step apart the new one has the weight 1 / look_back; the older ones fade so much a step.
  const double fading = std::pow(1 - 1 / look_back_, static_cast<double>(step - last_));
  value_ += std::max(1 / count_, 1 - fading) * (value - value_);
  last_ = step;
}

void HeadDrift::take(int64_t step, double lse, double leak, double delta) {
  // A log-sum-exp that is not finite is beyond every limit; logarithms below 1 tell nothing.
  const double size = std::isfinite(lse) ? lse : kInfinity;
  const double log_size = octaves(size, kIndicators[kLogSumExp].least) * std::log(2.0);
  fast_.take(step, log_size);
  slow_.take(step, log_size);
  course_.take(step, lse);
  if (!std::isfinite(leak) || !std::isfinite(delta)) return;
  leak_.take(step, leak * leak);
  delta_.take(step, delta * delta);
}

double HeadDrift::leak() const { return delta_.value() > 0 ? std::sqrt(leak_.value() / delta_.value()) : 0; }

double mend_limit(const std::vector<HeadDrift>& heads) {
  std::vector<double> sizes;
  for (const HeadDrift& head : heads) sizes.push_back(head.size());
  return mend_limit(sizes);
}

std::string needs(const Indicator& indicator) {
  const auto is_fact = [](std::string_view field) {
    return std::find(kHeadFactNames.begin(), kHeadFactNames.end(), field) != kHeadFactNames.end();
  };
  std::string text =
      (!indicator.by_head() || is_fact(indicator.field) ? "" : "probe.") + std::string(indicator.field);
  if (!indicator.over.empty()) text += ", " + std::string(indicator.over);
  return text;
}

namespace {

IndicatorRun read_all(const fs::path& folder, const Metrics& metrics, std::optional<RunConfig> config,
                      std::vector<std::string> notes) {
  IndicatorRun run;
  run.folder = folder;
  run.notes = std::move(notes);
  run.config = std::move(config);
  if (run.config) run.warmup = run.config->schedule.warmup;
  run.layers = metrics.layers, run.heads = metrics.heads;
  run.loss = metrics.by_step(metrics.loss);
  // Recorded and not a number: as bad as an infinity.
  for (size_t n = 0; n < metrics.loss.steps.size() && !run.loss.empty(); ++n)
    if (std::isnan(metrics.loss.values[n])) run.loss[static_cast<size_t>(metrics.loss.steps[n])] = kInfinity;
  IndicatorReader reader(run);
  for (size_t n = 0; n < metrics.steps.size(); ++n) reader.see(metrics.steps[n], Line(metrics, n));
  note_damage(metrics, run.notes);
  if (metrics.empty()) {
    run.notes.push_back("expected the lines of steps, found none");
    return run;
  }
  if (const std::string missing = reader.not_recorded(); !missing.empty())
    run.notes.push_back(fmt::format("not recorded (train --probe-every N records all): {}", missing));
  if (const int64_t last = metrics.steps.back(); last < run.warmup)
    run.notes.push_back(
        fmt::format("ends at step {}, before its warm-up of {} does: nothing is judged", last, run.warmup));
  return run;
}

}  // namespace

IndicatorRun indicators_of(const fs::path& folder, const Metrics& metrics,
                           const std::optional<TomlTable>& config) {
  std::vector<std::string> notes;
  std::optional<RunConfig> settings = config_of([&] { return config; }, notes);
  return read_all(folder, metrics, std::move(settings), std::move(notes));
}

IndicatorRun read_indicators(const fs::path& folder) {
  std::vector<std::string> notes;
  std::optional<RunConfig> config = config_of(
      [&]() -> std::optional<TomlTable> {
        const std::optional<std::string> text = read_record(folder, RecordFile::config);
        if (!text) return {};
        return parse_toml(*text, record_path(folder, RecordFile::config).string());
      },
      notes);
  const HeadShape shape = config ? HeadShape{config->model.layers, config->model.heads} : HeadShape{};
  const Metrics metrics = read_some_metrics(folder, shape);
  return read_all(folder, metrics, std::move(config), std::move(notes));
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

// highest: rungs of n healthy runs, descending. A run with k others at its height or above raises an alarm where none of
// these k is among the m chosen of the n - 1 others. The probability is C(n - 1 - k, m) / C(n - 1, m), a product of m factors.
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
