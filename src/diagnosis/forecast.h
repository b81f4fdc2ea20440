// When will a run fail? From the course of its heads' offsets alone, by a model with few numbers.
//
// A head *drifts* where its offset c grows too fast, too far and too steadily to be training.
//   A line is fitted to ln c over the last kWindow of the steps t since the run's warm-up. It grows by g a step, and
//   (g - kSureness errors of g) t > kLeastPower: faster than t^2. Healthy offsets grow, too, but ever more slowly.
//   Then c > kLowestDriftLimit (health.h), c > kRise times the median before that window, and both its halves grow: no jump.
// It also drifts where c is beyond kDrifted of the harmful offset and does not surely fall: many runs rest there for a while.
//   Healthy runs of ours stayed below an eighth. Two runs that were unharmed came to a fifth (docs/study.md).
// It *fails* some time after its offset has come to the harmful one, where rounding q and k moves scores by about one
// (harmful_offset). When? The growth does not say: runs speed up, or rest for as long again as they have lasted. Dates by
// the growth were no better than a constant (docs/study.md), so the time left is
//   kTimeLeft t
// and lies within (kEarliest, kLatest) t in four of five cases. Beyond the harmful offset it is kHarmfulLeft t, and
// (0, kHarmfulLatest) t in nine of ten cases. All numbers are fitted to the failing runs of
// docs/curves; `scripts/study --forecast` judges them run by run, each by numbers fitted to the others.
//
// A run that *has failed* gets no date. The definition of failure compares with a healthy twin, which a run's records do not
// have. They show a failure in three ways:
//   A head is beyond the limit of drift (health.h), and the mean of kFailureWindow losses is more than kFailureExcess above the
//   best such mean before.
//   The loss, or an offset, is not finite to the end of the record.
//   A finding ended the run.
// A healthy loss falls, so this comes later than beside a twin, and a loss that only stops falling shows nothing. Where there is
// a twin (the same seed, batches and settings, with a remedy; --history finds it), the mean is compared with its mean. Behind the
// twin's end it is compared with the lower of the twin's last mean and the run's own best. On the runs of docs/curves three of
// four failures show, at the step that the twin gives in the median, and no healthy run has one (drift_test).
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/precision_plan.h"
#include "diagnosis/health.h"
#include "records/run_records.h"

namespace evenkeel {

inline constexpr double kForecastWindow = 0.4;    // of the steps since the warm-up
inline constexpr double kForecastSureness = 2;    // standard errors
inline constexpr double kForecastLeastPower = 2;  // of t
inline constexpr double kForecastRise = 2;
// Of the harmful offset, and kHighestDriftLimit (health.h) at least.
inline constexpr double kForecastDrifted = 0.25;
// Of t: the median of the failing runs at their first forecast, and tenth to ninetieth percentile.
inline constexpr double kForecastTimeLeft = 0.5, kForecastEarliest = 0.1, kForecastLatest = 1.5;
inline constexpr double kForecastHarmfulLeft = 0.15, kForecastHarmfulLatest = 0.5;
inline constexpr size_t kForecastLeastRecords = 8;  // of a head, behind the warm-up
inline constexpr double kForecastLeastTime = 0.5;   // of the steps to `begin`, behind it
// Warm-ups. Offsets of healthy runs grow fast so long: with 124 M parameters every layer's did, to step 1,200 after a warm-up of 500.
inline constexpr int64_t kForecastSettled = 3;
// Before anything drifts, the leak's share of W_Q's gradient (probes.h), in the median head over the last window, says
// whether something can. It was above this in every probed run that drifted. It does not say when, nor that it must. Where
// the loss has not seen the error (delta's O alone is rounded), as large a share did not drift (docs/study.md).
inline constexpr double kRiskyLeakShare = 0.1;

inline constexpr double kUsualHeadSize = 64;  // where it is not known

inline constexpr size_t kFailureWindow = 200;   // losses: the study's unit, where every step has one
inline constexpr double kFailureExcess = 0.05;  // of the loss

// Rounding to m stored bits errs by 2^-m / sqrt(24) of a value, root mean square. Let `size` features make the score c.
// Errors of q_d and k_d then add up to sqrt(2) times that of c / sqrt(size). At the harmful offset they move c by one.
// Formats finer than BF16 do not raise it: there the leak takes over the gradient at much the same offsets (docs/study.md).
double harmful_offset(double size, int significand_bits);
// Stored bits of q and k as attention reads them.
int query_key_bits(const PrecisionPlan& plan, bool bf16_linear);

// What a forecast takes from a run's settings; defaults where they are not known.
struct ForecastTerms {
  int64_t begin = 0;      // step: offsets before it say nothing (warm-up, another plan)
  double harmful = 0;     // offset, kHighestDriftLimit at least: coarser formats did no harm below it
  std::string bound;      // what makes it harmful, in words
  int64_t last_step = 0;  // planned steps; 0: not known
  // No growth is drift before this step. 0 for the guard, which asks for a leak besides and must not be late.
  int64_t settled = 0;
};
ForecastTerms forecast_terms(const RunRecords& run);

enum class Outlook {
  too_short,  // too few records to say
  no_drift,
  drift,    // failure is expected
  harmful,  // the offset has passed the harmful one, or is not a number
};
inline constexpr std::string_view kOutlookNames[] = {"too_short", "no_drift", "drift", "harmful"};
constexpr std::string_view name(Outlook outlook) { return kOutlookNames[static_cast<size_t>(outlook)]; }

struct HeadForecast {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  Outlook outlook = Outlook::too_short;
  double offset = kNone;                                     // now: the last recorded
  double growth = kNone, growth_error = kNone;               // e-foldings a step
  double failure = kNone, earliest = kNone, latest = kNone;  // steps; of drift and harmful
};

// One head's offsets over a run's steps: kMost of them at most, evenly spread, whatever is taken.
class OffsetCourse {
 public:
  static constexpr size_t kMost = 512;
  // Steps ascending. What is not a number counts as infinite.
  void take(int64_t step, double offset);
  HeadForecast forecast(const ForecastTerms& terms) const;

 private:
  struct Point {
    int64_t step;
    double log_offset;  // of at least 1: less says nothing
  };
  std::vector<Point> points_;
  Point last_ = {-1, 0};           // the latest, kept or not
  int64_t every_ = 1, taken_ = 0;  // every so-many-th is kept
};

struct RunFailure {
  enum class Kind { loss_rose, loss_not_finite, offset_not_finite, ended };
  Kind kind = Kind::loss_rose;
  int64_t since = 0;  // the step at which the records first show it
  bool lasts = true;  // false: the mean loss has come back to within kFailureExcess of its best
  double excess = 0;  // loss_rose: of the mean loss above its best now, as a share
  std::string words;  // what shows it
  std::optional<int64_t> not_finite_since = {};  // to the end of the record no loss is, or some offset is not
};
inline constexpr std::string_view kFailureNames[] = {"loss_rose", "loss_not_finite", "offset_not_finite",
                                                     "ended"};
constexpr std::string_view name(RunFailure::Kind kind) { return kFailureNames[static_cast<size_t>(kind)]; }

// Whether a run has failed, by the records so far. Steps ascend; of one step the offsets come first.
class FailureWatch {
 public:
  // (L H) offsets, or log-sum-exps where these alone are known.
  void see_offsets(int64_t step, std::span<const double> of_heads);
  // twins: the loss of the healthy twin at that step, NaN where there is none.
  void see_loss(int64_t step, double loss, double twins = std::numeric_limits<double>::quiet_NaN());
  std::optional<RunFailure> failure() const;

 private:
  struct Losses {
    double ours, twins;
  };
  bool beside_best() const;  // is the mean loss compared with its own best, not with the twin's?
  double excess() const;     // of the mean loss above what it is compared with, as a share of that

  std::vector<Losses> window_;  // of the last kFailureWindow steps with a finite loss, a ring
  size_t losses_ = 0;           // finite ones
  double mean_ = 0, best_ = std::numeric_limits<double>::infinity();
  double twins_mean_ = std::numeric_limits<double>::quiet_NaN();  // the last there was; NaN: no twin
  bool twin_ended_ = false;  // it has no loss for some step of the window
  bool drifted_ = false;     // at the latest recorded offsets
  std::optional<int64_t> rose_, loss_not_finite_, offset_not_finite_;  // since
};
// By the records of a run, and of its twin where there is one; nothing where they show no failure.
std::optional<RunFailure> find_failure(const RunRecords& run, const RunRecords* twin = nullptr);

struct RunForecast {
  ForecastTerms terms;
  int64_t steps = 0, layers = 0, heads = 0;  // recorded steps; L, H
  std::vector<HeadForecast> of_heads;        // (L H); empty: no offsets are recorded
  int64_t judged_at = -1;                    // the last step whose offsets they are of
  std::vector<int64_t> at_risk;              // heads that drift or are beyond, the soonest first
  double leak_share = HeadForecast::kNone;   // of the median head; NaN: not probed
  std::optional<RunFailure> failure;         // has happened: then no head has a date
  bool has_failed() const { return failure && failure->lasts; }
  bool fails() const { return !at_risk.empty() || has_failed(); }
  bool leaks() const { return leak_share > kRiskyLeakShare; }
};
// twin: the same run with a remedy, where there is one (history.h finds it).
RunForecast forecast(const RunRecords& run, const RunRecords* twin = nullptr);
// A sentence or two without a full stop: that the run has failed, or what is expected of the head that comes first.
std::string in_words(const RunForecast& forecast);
// "layer 1 head 3: offset 310, 2.3 (1.9 to 2.7) e-foldings in 1,000 steps, failure near step 4,300 (3,400 to 8,500)"
std::string in_words(const HeadForecast& head);
// "the run has failed since about step 4,300: the mean of the last 200 losses is 12 % above its best"
std::string in_words(const RunFailure& failure);

}  // namespace evenkeel
