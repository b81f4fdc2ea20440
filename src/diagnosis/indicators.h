// When would each indicator have raised an alarm, and how long before the loss moved? From the records of runs alone.
//
// An indicator is one number a head (or one a run) at every step where it is recorded. It is read in octaves, log2 of its
// size, smoothed by a running mean over kFast steps (RunningMean: what is recorded every 25 steps is barely smoothed).
// Three rules, the same for all, look only at the run's own past, from the end of its warm-up w on:
//   level      the smoothed size itself
//   growth     over its median in steps [w, w + max(w, kReference)), judged behind them
//   deviation  of the smoothed octaves from the median of their last kTrail records, in robust standard deviations
//              (1.4826 median |.|, at least kSmallestSpread), judged from kFewestTrail records on.
// Each is measured on the same ladder, the powers of two. An indicator raises its alarm at the first step at which some
// head comes to a rung: the lowest that no healthy run ever comes to. By construction that gives no false alarm on these
// runs. So every healthy run is also judged by the rung that the *others* give (left out). It is judged by what random
// halves of the others give, too, which shows how well so few runs determine a limit.
// Without healthy runs only growth is judged, at Indicator::growth.
// Numbers that are not finite come to every rung; NaN in a probe is "not known" and passed over.
//
// What must be in metrics.jsonl: `train --probe-every N`, nothing else. Every step then has loss, gradient_norm,
// largest_lse, tied_rows, leak_mean, leak_error, leak_rms and delta_rms; every N-th the others, in `probe`.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "diagnosis/forecast.h"
#include "records/metrics.h"
#include "training/run_config.h"

namespace evenkeel {

// A mean that looks back so many steps: exponential weights, over all values until there are as many; values may lie more
// than a step apart.
class RunningMean {
 public:
  explicit RunningMean(double look_back) : look_back_(look_back) {}
  void take(int64_t step, double value);
  double value() const { return value_; }
  double count() const { return count_; }  // of values taken, as far as it looks back

 private:
  double look_back_, value_ = 0, count_ = 0;
  int64_t last_ = 0;
};

// The guard's alarm (guard.h), one head. The log-sum-exp still rises. It is beyond a limit (mend_limit of all heads,
// health.h) or on a course that ends in failure (forecast.h). The rows of dS leak more than FP32 does.
class HeadDrift {
 public:
  // Leak over delta, root mean squares. FP32 leaves about its own step, 2^-23; BF16 somewhere near 2^-8: the middle.
  static constexpr double kLeak = 0x1p-16;
  static constexpr double kFast = 8, kSlow = 64;  // steps that the two running means look back

  // largest |log-sum-exp|; root mean squares of leak and delta, NaN where they are not known.
  void take(int64_t step, double lse, double leak, double delta);
  double log_lse() const { return fast_.value(); }
  double size() const { return std::exp(log_lse()); }
  // The forecast needs no limit that depends on the other heads, so it carries over from size to size.
  bool drifts(double limit, const ForecastTerms& terms) const {
    return fast_.value() > slow_.value() &&
           (size() > limit || (size() > kLowestDriftLimit && expected(terms).outlook >= Outlook::drift));
  }
  double leak() const;
  bool knows_leak() const { return delta_.count() > 0; }  // not every kernel returns it
  bool leaks() const { return leak() > kLeak; }
  bool alarm(double limit, const ForecastTerms& terms) const { return leaks() && drifts(limit, terms); }
  HeadForecast expected(const ForecastTerms& terms) const { return course_.forecast(terms); }

 private:
  RunningMean fast_{kFast}, slow_{kSlow};   // of log(largest |log-sum-exp|)
  RunningMean leak_{kSlow}, delta_{kSlow};  // of squares
  OffsetCourse course_;                     // of the log-sum-exp
};

double mend_limit(const std::vector<HeadDrift>& heads);

enum class Rule { level, growth, deviation };
inline constexpr std::array<std::string_view, 3> kRuleNames = {"level", "growth", "deviation"};
constexpr std::string_view name(Rule rule) { return kRuleNames[static_cast<size_t>(rule)]; }

inline constexpr int64_t kReference = 50;          // steps
inline constexpr size_t kTrail = 128;              // records
inline constexpr size_t kFewestTrail = 16;         // records
inline constexpr double kSmallestSpread = 0x1p-6;  // octaves: one per cent
inline constexpr int kHighestRung = 100;           // where what is not finite stands

// How an indicator's size is read from the records.
enum class Reading {
  size,           // the field
  known_size,     // the same, of a field that is always known: NaN counts as infinite
  inverse,        // 1 / the field
  ratio,          // the field over another
  signed_ratio,   // the same, smoothed with its sign
  loss,           // of the whole run
  gradient_norm,  // of the whole run
};
struct Indicator {
  std::string_view name;
  Reading reading;
  std::string_view field, over;  // of the records: a fact of every step, else a probe
  std::string_view meaning;
  double least;  // sizes below it count as it: they tell nothing
  int growth;    // the rung below which 18 small healthy runs stayed (docs/experiments.md)

  constexpr bool by_head() const { return reading != Reading::loss && reading != Reading::gradient_norm; }
};
inline constexpr std::array<Indicator, 13> kIndicators = {{
    {"log_sum_exp", Reading::known_size, "largest_lse", "", "largest |log-sum-exp|", 1, 3},
    {"offset", Reading::size, "offset", "", "largest |row mean of the scores|, which softmax cannot see", 1,
     4},
    {"largest_score", Reading::size, "largest_score", "", "largest score", 1, 5},
    {"leak_z", Reading::signed_ratio, "leak_mean", "leak_error",
     "bias of the rows' sums of dS, in standard errors of a step", 0x1p-3, 4},
    {"leak_size", Reading::ratio, "leak_rms", "delta_rms",
     "root mean square of the rows' sums of dS over delta's", 0x1p-24, 2},
    {"leak_share", Reading::size, "leak_share", "",
     "part of W_Q's gradient that these sums make, over the exact gradient", 0x1p-24, 6},
    {"delta_error", Reading::size, "delta_error_running", "", "|sum over the probed steps of delta's errors|",
     0x1p-60, 10},
    {"tied_rows", Reading::size, "tied_rows", "", "share of rows where another score ties with the largest",
     0x1p-10, 3},
    {"norm_q", Reading::size, "norm_q", "", "spectral norm of W_Q", 0x1p-6, 3},
    {"norm_k", Reading::size, "norm_k", "", "spectral norm of W_K", 0x1p-6, 3},
    {"score_entropy", Reading::inverse, "score_entropy", "", "1 / spectral entropy of Q K^T", 0x1p-6, 2},
    {"loss", Reading::loss, "loss", "", "the loss", 0x1p-10, 1},
    {"gradient_norm", Reading::gradient_norm, "gradient_norm", "", "norm of the whole gradient", 0x1p-20, 2},
}};
// The fields of metrics.jsonl that it is read from: "leak_mean, leak_error", "probe.norm_q".
std::string needs(const Indicator& indicator);

// A rung that a run came to for the first time. head: l H + h; -1: of the whole run.
struct Reached {
  int rung = 0;
  int64_t step = 0, head = -1;
  friend bool operator==(const Reached&, const Reached&) = default;
};

// A run, condensed to when each indicator came to each rung of its ladder.
struct IndicatorRun {
  std::filesystem::path folder;
  std::optional<RunConfig> config;
  int64_t warmup = 0, layers = 0, heads = 0;  // L, H; 0: nothing is recorded by head
  std::vector<double> loss;                   // (steps); NaN where a step is not recorded
  // Rungs and steps ascending; the first is where it stood when it was first judged, the last its highest.
  std::array<std::array<std::vector<Reached>, kRuleNames.size()>, kIndicators.size()> reached;
  bool guard_judged = false;
  std::optional<Reached> guard;    // its first alarm, in the warm-up too
  std::vector<std::string> notes;  // what is damaged or missing
};
// folder: with a metrics.jsonl in it. DataError where no record can be read; everything else that is wrong is a note.
IndicatorRun read_indicators(const std::filesystem::path& folder);
// The same of records that are read already; config: nothing where there is none.
IndicatorRun indicators_of(const std::filesystem::path& folder, const Metrics& metrics,
                           const std::optional<TomlTable>& config);

// The loss has moved where its mean over kLossWindow steps behind the warm-up lies more than kLossMoved above that of all
// its twins (healthy runs that differ in the plan alone: how far these lie apart is chance). Without twins it is compared
// with its own best. A loss that is not finite has moved, too. It must stay so for kLossHold steps or to the end. The answer
// is the *first* step of the first such window, so that the window's length does not lengthen the lead.
inline constexpr int64_t kLossWindow = 50, kLossHold = 200;  // steps
inline constexpr double kLossMoved = 0.05;
using Twins = std::vector<const IndicatorRun*>;
std::optional<int64_t> loss_moved(const IndicatorRun& run, const Twins& twins);
Twins find_twins(const IndicatorRun& run, const std::vector<IndicatorRun>& healthy);

// One indicator by one rule over all runs.
struct IndicatorScore {
  size_t indicator = 0;  // of kIndicators; kIndicators.size(): the guard, whose alarm has no rungs
  Rule rule = Rule::level;
  int rung = 0;                               // at which it raises its alarm
  std::vector<std::optional<Reached>> spoke;  // (failing runs)
  int64_t judged = 0, moved = 0;  // failing runs whose records allow it; of these, with a loss that moved
  int64_t healthy = 0;            // healthy runs whose records allow it
  int64_t false_alarms = 0;       // of these, in alarm at the rung that all others give
  double half_alarms = 0;  // share of these in alarm at the rung that half of the others give, on average
  // Over failing runs whose loss moved and that had an alarm: steps from the alarm to the loss, ascending.
  std::vector<int64_t> leads;
  int64_t in_time = 0;  // of these, before
  // Share of losses foreseen less share of false alarms (left out): 1 is perfect, 0 a coin. Youden's index.
  double merit() const;
  std::string_view name() const;
};
struct IndicatorTable {
  std::vector<std::optional<int64_t>> moved;          // (derailing)
  std::vector<Twins> twins;                           // (derailing)
  std::vector<std::optional<int64_t>> healthy_moved;  // (healthy): each against the others; should be none
  std::vector<IndicatorScore> scores;  // every indicator by every rule that could be judged; the guard first
};
IndicatorTable judge_indicators(const std::vector<IndicatorRun>& healthy,
                                const std::vector<IndicatorRun>& derailing);
// Of an indicator's rules the one with the most merit, then the largest median lead. One choice for all, made on the same
// runs; what the other rules gave is in the table.
std::vector<const IndicatorScore*> best_rules(const IndicatorTable& table);

}  // namespace evenkeel
