#include "diagnosis/forecast.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "numerics/median.h"

namespace evenkeel {
namespace {

// What each half of the window has of the whole one's growth, at least: a jump is no growth.
constexpr double kSteady = 0.25;

// A line through points by least squares, and how sure its slope is.
struct Trend {
  double slope = 0, error = 0, end = 0;  // end: the line's value at the last point
};
// REQUIRES: three points at least, not all at one place.
Trend fit_trend(const std::vector<double>& x, const std::vector<double>& y) {
  const auto n = static_cast<double>(x.size());
  double mean_x = 0, mean_y = 0, xx = 0, xy = 0;
  for (size_t i = 0; i < x.size(); ++i) mean_x += x[i] / n, mean_y += y[i] / n;
  for (size_t i = 0; i < x.size(); ++i) {
    xx += (x[i] - mean_x) * (x[i] - mean_x);
    xy += (x[i] - mean_x) * (y[i] - mean_y);
  }
  Trend trend;
  trend.slope = xy / xx;
  trend.end = mean_y + trend.slope * (x.back() - mean_x);
  double squares = 0, neighbours = 0, before = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double residual = y[i] - mean_y - trend.slope * (x[i] - mean_x);
    squares += residual * residual;
    if (i > 0) neighbours += residual * before;
    before = residual;
  }
  // Neighbours err alike: (1 + r) / (1 - r) points say as much as one that stands alone.
  const double r = squares > 0 ? std::clamp(neighbours / squares, 0.0, 0.95) : 0;
  trend.error = std::sqrt(squares / std::max(1.0, n - 2) / xx * (1 + r) / (1 - r));
  return trend;
}

bool grows_steadily(const std::vector<double>& x, const std::vector<double>& y, double slope) {
  const auto middle = static_cast<std::ptrdiff_t>(x.size() / 2);
  if (middle < 3) return true;  // too few to tell
  const std::vector<double> first_x(x.begin(), x.begin() + middle), first_y(y.begin(), y.begin() + middle),
      second_x(x.begin() + middle, x.end()), second_y(y.begin() + middle, y.end());
  return fit_trend(first_x, first_y).slope >= kSteady * slope &&
         fit_trend(second_x, second_y).slope >= kSteady * slope;
}

int bits_of(const RunRecords& run) {
  const bool bf16 = run.setting("model", "precision") != "fp32";  // without settings: as most are trained
  const std::string plan = run.setting("attention", "plan");
  try {
    return query_key_bits(plan.empty() ? parse_plan("fp32") : ScopedPlan::parse(plan).at(0, 0), bf16);
  } catch (const std::exception&) {  // a plan of a newer program: what the linear layers give
    return query_key_bits(parse_plan("fp32"), bf16);
  }
}

double head_size(const RunRecords& run) {
  // A model may have its own; 0: the width over the heads.
  if (const auto own = run.whole_setting("model", "head_size"); own && *own > 0)
    return static_cast<double>(*own);
  const std::optional<int64_t> width = run.whole_setting("model", "width"),
                               heads = run.whole_setting("model", "heads");
  if (!width || !heads || *width == 0 || *heads == 0) return kUsualHeadSize;
  return static_cast<double>(*width) / static_cast<double>(*heads);
}

// Over heads and over the probes of the last window, medians both; NaN without probes there.
double median_leak_share(const RunRecords& run, const ForecastTerms& terms) {
  const auto found = run.metrics.probes.find("leak_share");
  if (found == run.metrics.probes.end() || found->second.empty()) return HeadForecast::kNone;
  const Series& shares = found->second;
  const auto last = static_cast<double>(shares.steps.back());
  const double window = last - kForecastWindow * (last - static_cast<double>(terms.begin));
  std::vector<double> of_probes;
  for (size_t n = 0; n < shares.steps.size(); ++n) {
    const auto step = static_cast<double>(shares.steps[n]);
    if (step < window || shares.steps[n] < terms.begin) continue;
    std::vector<double> of_heads;
    for (const double share : shares.row(n))
      if (!std::isnan(share)) of_heads.push_back(share);
    if (!of_heads.empty()) of_probes.push_back(median(std::move(of_heads)));
  }
  return median(std::move(of_probes));
}

}  // namespace

double harmful_offset(double size, int significand_bits) {
  const int bits = std::min(significand_bits, kBf16.significand_bits);
  return std::sqrt(std::max(1.0, size) / 2) * std::sqrt(24.0) * std::exp2(bits);
}

int query_key_bits(const PrecisionPlan& plan, bool bf16_linear) {
  int bits = bf16_linear ? kBf16.significand_bits : kFp32.significand_bits;
  for (const Site site : {Site::q, Site::k}) bits = std::min(bits, plan.at(site).format.significand_bits);
  return bits;
}

ForecastTerms forecast_terms(const RunRecords& run) {
  ForecastTerms terms;
  terms.begin = run.warmup();
  terms.settled = kForecastSettled * terms.begin;
  terms.last_step = run.whole_setting("schedule", "steps").value_or(0);
  for (const RunEvent& event : run.events)
    if (event.kind == RunEvent::Kind::plan_change || event.kind == RunEvent::Kind::guard_remedy)
      terms.begin = std::max(terms.begin, event.step);
  const int bits = bits_of(run);
  const double by_rounding = harmful_offset(head_size(run), bits);
  terms.harmful = std::max(by_rounding, kHighestDriftLimit);
  terms.bound =
      terms.harmful > by_rounding
          ? fmt::format("healthy runs of the study stayed below an offset of {:.0f}", terms.harmful)
      : bits <= kBf16.significand_bits
          ? fmt::format("at an offset of {:.0f}, queries and keys of {} stored bits move scores by one",
                        terms.harmful, bits)
          : fmt::format("at an offset of {:.0f}, the leak has taken over the gradient of W_Q and W_K",
                        terms.harmful);
  return terms;
}

void OffsetCourse::take(int64_t step, double offset) {
  last_ = {step, std::isfinite(offset) ? std::log(std::max(1.0, std::fabs(offset)))
                                       : std::numeric_limits<double>::infinity()};
  if (taken_++ % every_ != 0) return;
  points_.push_back(last_);
  if (points_.size() < kMost) return;
  for (size_t n = 0; 2 * n < points_.size(); ++n) points_[n] = points_[2 * n];
  points_.resize((points_.size() + 1) / 2);
  every_ *= 2;
}

HeadForecast OffsetCourse::forecast(const ForecastTerms& terms) const {
  HeadForecast found;
  if (points_.empty()) return found;
  const auto now = static_cast<double>(last_.step);
  // What is not finite is beyond every limit, however short the record is.
  if (std::isinf(last_.log_offset) || last_.log_offset > std::log(terms.harmful)) {
    found.outlook = Outlook::harmful;
    found.offset = std::exp(last_.log_offset);
    found.failure = now + kForecastHarmfulLeft * now;
    found.earliest = now;
    found.latest = now + kForecastHarmfulLatest * now;
  }
  const auto begin = static_cast<double>(terms.begin);
  const double window = now - kForecastWindow * (now - begin);
  std::vector<double> x, y, before;
  size_t records = 0;
  const auto add = [&](const Point& point) {
    const auto step = static_cast<double>(point.step);
    if (step < begin || std::isinf(point.log_offset)) return;
    ++records;
    if (step < window) {
      before.push_back(point.log_offset);
    } else {
      x.push_back(step);
      y.push_back(point.log_offset);
    }
  };
  for (const Point& point : points_) add(point);
  if (points_.back().step != last_.step) add(last_);
  if (records < kForecastLeastRecords || x.size() < 3 || before.empty() ||
      now - begin < kForecastLeastTime * begin)
    return found;
  const Trend trend = fit_trend(x, y);
  found.growth = trend.slope;
  found.growth_error = trend.error;
  if (found.outlook == Outlook::harmful) return found;
  const double error = kForecastSureness * trend.error,
               drifted = std::log(std::max(kForecastDrifted * terms.harmful, kHighestDriftLimit));
  const bool has_drifted = std::min(trend.end, last_.log_offset) > drifted && trend.slope >= -error,
             settled = last_.step >= terms.settled,
             drifts = settled && (trend.slope - error) * now > kForecastLeastPower &&
                      trend.end > std::log(kLowestDriftLimit) &&
                      trend.end > median(before) + std::log(kForecastRise) &&
                      grows_steadily(x, y, trend.slope);
  if (!settled && !has_drifted) return found;  // too short
  found.offset = std::exp(last_.log_offset);
  found.outlook = Outlook::no_drift;
  if (!drifts && !has_drifted) return found;
  found.outlook = Outlook::drift;
  found.failure = now + kForecastTimeLeft * now;
  found.earliest = now + kForecastEarliest * now;
  found.latest = now + kForecastLatest * now;
  return found;
}

void FailureWatch::see_offsets(int64_t step, std::span<const double> of_heads) {
  double largest = 0;
  for (const double offset : of_heads) {
    const double size = std::fabs(offset);
    largest = std::max(largest, std::isfinite(size) ? size : std::numeric_limits<double>::infinity());
  }
  if (std::isfinite(largest))
    offset_not_finite_.reset();
  else if (!offset_not_finite_)
    offset_not_finite_ = step;
  drifted_ = largest > limit_from_run({of_heads.begin(), of_heads.end()}).limit;
}

void FailureWatch::see_loss(int64_t step, double loss, double twins) {
  if (!std::isfinite(loss)) {
    if (!loss_not_finite_) loss_not_finite_ = step;
    return;
  }
  loss_not_finite_.reset();
  if (window_.size() < kFailureWindow)
    window_.push_back({loss, twins});
  else
    window_[losses_ % kFailureWindow] = {loss, twins};
  if (++losses_ < kFailureWindow) return;
  // Summed anew each time: one loss of 1e30 would spoil a running sum for good.
  mean_ = 0;
  double beside = 0;
  for (const Losses& one : window_) {
    mean_ += one.ours / static_cast<double>(kFailureWindow);
    beside += one.twins / static_cast<double>(kFailureWindow);
  }
  twin_ended_ = !std::isfinite(beside);
  if (!twin_ended_) twins_mean_ = beside;
  if (mean_ < best_) {
    best_ = mean_;
    if (beside_best()) rose_.reset();  // as good as ever
  }
  if (!rose_ && drifted_ && excess() > kFailureExcess) rose_ = step;
}

bool FailureWatch::beside_best() const {
  return std::isnan(twins_mean_) || (twin_ended_ && best_ < twins_mean_);
}

double FailureWatch::excess() const {
  const double reference = beside_best() ? best_ : twins_mean_;
  // Anyone's objective may be below zero; at zero no share of it is known.
  return reference == 0 ? 0 : (mean_ - reference) / std::fabs(reference);
}

std::optional<RunFailure> FailureWatch::failure() const {
  using Kind = RunFailure::Kind;
  const bool above = rose_ && excess() > kFailureExcess;
  const auto not_finite = loss_not_finite_ && offset_not_finite_
                              ? std::min(loss_not_finite_, offset_not_finite_)
                              : std::max(loss_not_finite_, offset_not_finite_);  // the one there is, or none
  if (loss_not_finite_ && !above)
    return RunFailure{Kind::loss_not_finite,    *loss_not_finite_, true, 0,
                      "its loss is not finite", not_finite};
  if (offset_not_finite_ && !above)
    return RunFailure{Kind::offset_not_finite,   *offset_not_finite_, true, 0,
                      "an offset is not finite", not_finite};
  if (!rose_) return {};
  return RunFailure{
      Kind::loss_rose,
      *rose_,
      above,
      excess(),
      fmt::format("the mean of the last {} losses is {:.3g} % above {}", kFailureWindow, 100 * excess(),
                  beside_best() ? "its best" : "that of the same run with a remedy") +
          (loss_not_finite_ ? fmt::format(", and no loss is finite since step {}", *loss_not_finite_) : ""),
      not_finite};
}

std::optional<RunFailure> find_failure(const RunRecords& run, const RunRecords* twin) {
  FailureWatch watch;
  const Series none;
  const Series& theirs = twin ? twin->metrics.loss : none;
  size_t beside = 0;
  const Series *offsets = run.metrics.by_head(name(HeadFact::offset)),
               *lse = run.metrics.by_head(name(HeadFact::largest_lse));
  const Series* const heads = offsets ? offsets : lse;
  size_t next = 0;
  for (size_t n = 0; n < run.metrics.loss.steps.size(); ++n) {
    const int64_t step = run.metrics.loss.steps[n];
    for (; heads && next < heads->steps.size() && heads->steps[next] <= step; ++next)
      watch.see_offsets(heads->steps[next], heads->row(next));
    while (beside < theirs.steps.size() && theirs.steps[beside] < step) ++beside;
    const bool has_twin = beside < theirs.steps.size() && theirs.steps[beside] == step;
    watch.see_loss(step, run.metrics.loss.values[n],
                   has_twin ? theirs.values[beside] : std::numeric_limits<double>::quiet_NaN());
  }
  for (; heads && next < heads->steps.size(); ++next) watch.see_offsets(heads->steps[next], heads->row(next));
  std::optional<RunFailure> found = watch.failure();
  if (run.finding && !(found && found->lasts))
    return RunFailure{RunFailure::Kind::ended, run.finding->step, true, 0, run.finding->words};
  return found;
}

RunForecast forecast(const RunRecords& run, const RunRecords* twin) {
  RunForecast found;
  found.terms = forecast_terms(run);
  found.steps = run.step_count();
  found.layers = run.metrics.layers, found.heads = run.metrics.heads;
  found.leak_share = median_leak_share(run, found.terms);
  found.failure = find_failure(run, twin);
  const Series* const offsets = run.metrics.by_head(name(HeadFact::offset));
  if (!offsets) return found;
  // Behind a NaN every head has one: which of them drifted is judged by the records before.
  const int64_t end = found.failure ? found.failure->not_finite_since.value_or(INT64_MAX) : INT64_MAX;
  std::vector<OffsetCourse> courses(offsets->width);
  for (size_t n = 0; n < offsets->steps.size() && offsets->steps[n] < end; ++n) {
    found.judged_at = offsets->steps[n];
    for (size_t h = 0; h < offsets->width; ++h) courses[h].take(offsets->steps[n], offsets->row(n)[h]);
  }
  for (const OffsetCourse& course : courses) found.of_heads.push_back(course.forecast(found.terms));
  for (size_t h = 0; h < courses.size(); ++h)
    if (found.of_heads[h].outlook >= Outlook::drift) found.at_risk.push_back(static_cast<int64_t>(h));
  std::ranges::stable_sort(found.at_risk, {}, [&](int64_t h) {
    const HeadForecast& head = found.of_heads[static_cast<size_t>(h)];
    return std::pair(head.failure, -head.offset);
  });
  // What has happened is not dated again.
  if (found.failure)
    for (HeadForecast& head : found.of_heads)
      head.failure = head.earliest = head.latest = HeadForecast::kNone;
  return found;
}

std::string in_words(const HeadForecast& head) {
  const std::string growth =
      std::isnan(head.growth)
          ? ""
          : fmt::format(", {:+.2g} ({:+.2g} to {:+.2g}) e-foldings in 1,000 steps", 1000 * head.growth,
                        1000 * (head.growth - kForecastSureness * head.growth_error),
                        1000 * (head.growth + kForecastSureness * head.growth_error));
  const std::string offset =
      std::isnan(head.offset) ? "" : fmt::format("offset {}{}", offset_text(head.offset), growth);
  switch (head.outlook) {
    case Outlook::too_short:
      return "too few records to say";
    case Outlook::no_drift:
      return "no failure in sight: " + offset;
    case Outlook::harmful:
    case Outlook::drift:
      return offset + (head.outlook == Outlook::harmful ? ", beyond the harmful offset" : "") +
             (std::isnan(head.failure) ? ""
                                       : fmt::format(": failure near step {:.0f} ({:.0f} to {:.0f})",
                                                     head.failure, head.earliest, head.latest));
  }
  return "";
}

std::string in_words(const RunFailure& failure) {
  const char* const about = failure.kind == RunFailure::Kind::loss_rose ? "about " : "";
  return failure.lasts
             ? fmt::format("the run has failed since {}step {}: {}", about, failure.since, failure.words)
             : fmt::format("the run failed at {}step {}, and its loss has come back since: {}", about,
                           failure.since, failure.words);
}

std::string in_words(const RunForecast& f) {
  if (f.of_heads.empty()) return f.failure ? in_words(*f.failure) : "no forecast: no offsets are recorded";
  const auto named = [&](int64_t h) { return fmt::format("layer {} head {}", h / f.heads, h % f.heads); };
  const std::string failed = f.failure ? in_words(*f.failure) + "; " : "";
  if (!f.at_risk.empty()) {
    const int64_t first = f.at_risk[0];
    const std::string others = f.at_risk.size() > 1 ? fmt::format("; {} heads {}", f.at_risk.size(),
                                                                  f.failure ? "have drifted" : "are at risk")
                                                    : "";
    return fmt::format("{}{}, {}; {}{}", failed, named(first),
                       in_words(f.of_heads[static_cast<size_t>(first)]), f.terms.bound, others);
  }
  // Offsets may end long before the failure: up to where nothing drifted is said with it.
  if (f.has_failed())
    return failed +
           (std::ranges::all_of(f.of_heads,
                                [](const HeadForecast& head) { return head.outlook == Outlook::too_short; })
                ? "too few offsets are recorded to say whether a head drifted"
                : fmt::format("no head drifted by step {}, the last with offsets", f.judged_at));
  int64_t largest = -1;
  for (size_t h = 0; h < f.of_heads.size(); ++h)
    if (f.of_heads[h].outlook == Outlook::no_drift &&
        (largest < 0 || f.of_heads[h].offset > f.of_heads[static_cast<size_t>(largest)].offset))
      largest = static_cast<int64_t>(h);
  if (largest < 0) return fmt::format("{}no forecast: too few records behind step {}", failed, f.terms.begin);
  const std::string risk =
      std::isnan(f.leak_share)
          ? ""
          : fmt::format(
                "; {}: the leak makes {:.2g} of W_Q's gradient in the median head (runs that failed "
                "had more than {})",
                f.leaks() ? "drift may come" : "no risk is seen", f.leak_share, kRiskyLeakShare);
  const std::string head = in_words(f.of_heads[static_cast<size_t>(largest)]);
  return fmt::format("{}no failure in sight at step {}: the largest of {} heads is {}, {}{}", failed, f.steps,
                     f.of_heads.size(), named(largest), head.substr(head.find(": ") + 2), risk);
}

}  // namespace evenkeel
