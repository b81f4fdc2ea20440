// The guard's rule, free of trainers: figures of every head in, step by step; what is to be done out. Guard (guard.h) feeds
// it from our own trainer, evenkeel_guard_* of the C interface from anyone's. guard.h says when a head is in alarm and when
// it is too late.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "attention/precision_plan.h"
#include "diagnosis/indicators.h"
#include "records/events.h"

namespace evenkeel {

inline constexpr const char* kGuardRemedy = "stabiliser=zero_sum";

class DriftGuard {
 public:
  // Heads whose plan sums to zero by construction count as remedied. bf16: q and k come from BF16 products.
  DriftGuard(const ScopedPlan& plan, int64_t layers, int64_t heads, bool bf16);

  // Where failures are forecast as well (forecast.h). Without terms they are not: the end of the warm-up must be known.
  void set_terms(const ForecastTerms& terms) { terms_ = terms; }
  // A step's figures, (L H) each: largest |log-sum-exp|; root mean squares of leak and delta, both empty where they are not
  // known. Steps ascend.
  void follow(int64_t step, const std::vector<double>& lse, const std::vector<double>& leak,
              const std::vector<double>& delta);
  // The loss of the same step, behind its figures: a run that has failed gets no date of failure.
  void see_loss(int64_t step, double loss) { failure_.see_loss(step, loss); }
  // Remedies of before are no reason to go back: so a run goes back once a head at most, and not round and round.
  void forget_remedies();

  struct Decision {
    GuardEvent event;       // next_command is the caller's
    bool leaking = true;    // false: drift that no remedy here mends
    int64_t last_good = 0;  // the last step at which none of the leaking heads was beyond the limit
  };
  struct Means {
    bool act = true;                                            // false: only to tell
    std::function<int64_t(int64_t)> checkpoint_before = {};     // the newest at or before a step; -1: none
    std::function<std::string(size_t head)> more_figures = {};  // of the worst head, behind the others
  };
  // What the figures so far call for at `step`; nothing where nothing is to be done. The caller does it.
  std::optional<Decision> decide(int64_t step, const Means& means);

  // The log-sum-exp from which scores of this plan come in steps of kScoreUnit: nothing is left to learn from.
  static double too_late(const PrecisionPlan& plan, bool bf16);

 private:
  struct Head {
    bool remedied = false;   // its plan sums to zero by construction
    double at_remedy = 0;    // its log_lse when it got the remedy
    bool warned = false;     // one warning a head is enough
    int64_t last_good = -1;  // the last step at which it was not beyond the limit
    double useless = 0;      // too_late of its plan
  };
  struct Alarms {
    std::vector<int64_t> leaking, others;  // heads that get zero_sum; those that drift without a leak
    bool late = false;
    std::string why;  // it is too late to continue from here
    int64_t last_good = std::numeric_limits<int64_t>::max();
  };
  Alarms find_alarms();
  std::string figures(const std::vector<int64_t>& heads, size_t worst, const Means& means) const;

  const int64_t H_;
  std::vector<Head> heads_;       // (L H)
  std::vector<HeadDrift> drift_;  // (L H)
  double limit_ = 0;              // mend_limit of them
  FailureWatch failure_;
  ForecastTerms terms_{.begin = std::numeric_limits<int64_t>::max(),
                       .harmful = std::numeric_limits<double>::infinity(),
                       .bound = {},
                       .last_step = 0};
};

}  // namespace evenkeel
