#include "diagnosis/drift_guard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "diagnosis/health.h"
#include "diagnosis/verdict.h"

namespace evenkeel {

DriftGuard::DriftGuard(const ScopedPlan& plan, int64_t layers, int64_t heads, bool bf16)
    : H_(heads), heads_(static_cast<size_t>(layers * heads)), drift_(heads_.size()) {
  for (size_t n = 0; n < heads_.size(); ++n) {
    const auto head = static_cast<int64_t>(n);
    const PrecisionPlan of_head = plan.at(static_cast<int>(head / H_), static_cast<int>(head % H_));
    heads_[n].remedied = rules_of(of_head.stabiliser).delta == DeltaRule::probs;
    heads_[n].useless = too_late(of_head, bf16);
  }
}

void DriftGuard::follow(int64_t step, const std::vector<double>& lse, const std::vector<double>& leak,
                        const std::vector<double>& delta) {
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  const bool known = !leak.empty() && !delta.empty();
  for (size_t n = 0; n < heads_.size(); ++n)
    drift_[n].take(step, lse[n], known ? leak[n] : kUnknown, known ? delta[n] : kUnknown);
  failure_.see_offsets(step, lse);
  limit_ = mend_limit(drift_);
  for (size_t n = 0; n < heads_.size(); ++n)
    if (drift_[n].size() <= limit_) heads_[n].last_good = step;
}

void DriftGuard::forget_remedies() {
  for (Head& head : heads_) head.at_remedy = std::numeric_limits<double>::infinity();
}

double DriftGuard::too_late(const PrecisionPlan& plan, bool bf16) {
  int bits = query_key_bits(plan, bf16);
  for (const Site site : {Site::scores, Site::shifted})
    bits = std::min(bits, plan.at(site).format.significand_bits);
  return kScoreUnit * std::exp2(bits);
}

DriftGuard::Alarms DriftGuard::find_alarms() {
  Alarms found;
  for (size_t n = 0; n < heads_.size(); ++n) {
    Head& head = heads_[n];
    const HeadDrift& drift = drift_[n];
    const auto number = static_cast<int64_t>(n);
    const bool grown = head.remedied && drift.log_lse() > head.at_remedy + std::log(2.0);
    if (!drift.drifts(limit_, terms_) || head.warned) continue;
    if (head.remedied ? !grown : !drift.leaks()) {
      // Without a leak there is nothing that the remedy could mend.
      if (head.remedied) continue;
      head.warned = true;
      found.others.push_back(number);
      continue;
    }
    found.leaking.push_back(number);
    found.last_good = std::min(found.last_good, head.last_good);
    if (grown)
      found.late = true, found.why = "it has grown twofold since it has the remedy";
    else if (drift.size() > head.useless)
      found.late = true, found.why = fmt::format("beyond {:.0f} its scores come in steps of more than {:.0f}",
                                                 head.useless, kScoreUnit);
  }
  return found;
}

std::string DriftGuard::figures(const std::vector<int64_t>& heads, size_t worst, const Means& means) const {
  const HeadForecast expected = drift_[worst].expected(terms_);
  const std::optional<RunFailure> failure = failure_.failure();
  const std::string when = failure ? fmt::format(" ({})", in_words(*failure))
                           : std::isnan(expected.failure)
                               ? ""
                               : fmt::format(" (near step {:.0f}, {:.0f} to {:.0f})", expected.failure,
                                             expected.earliest, expected.latest);
  const std::string leak =
      drift_[worst].knows_leak()
          ? fmt::format("rows of dS miss their zero sum by {:.1e} of delta", drift_[worst].leak())
          : "the sums of its rows of dS are not known";
  return fmt::format(
      "{}: log-sum-exp {:.0f} and rising; the guard acts beyond {:.0f} (half of the limit of drift, at least "
      "{:.0f}) or where a failure is forecast{}; {}{}",
      heads_in_words(heads, H_), drift_[worst].size(), limit_, kLowestDriftLimit, when, leak,
      means.more_figures ? means.more_figures(worst) : "");
}

std::optional<DriftGuard::Decision> DriftGuard::decide(int64_t step, const Means& means) {
  const Alarms alarms = find_alarms();
  Decision decision;
  decision.leaking = !alarms.leaking.empty();
  if (!decision.leaking && alarms.others.empty()) return {};
  decision.last_good = alarms.last_good;
  GuardEvent& event = decision.event;
  event.step = step;
  event.heads = decision.leaking ? alarms.leaking : alarms.others;
  const auto worst = static_cast<size_t>(
      *std::max_element(event.heads.begin(), event.heads.end(), [&](int64_t a, int64_t b) {
        return drift_[static_cast<size_t>(a)].log_lse() < drift_[static_cast<size_t>(b)].log_lse();
      }));
  event.words = figures(event.heads, worst, means);
  if (const auto failure = failure_.failure(); !decision.leaking && failure && failure->not_finite_since) {
    event.words = fmt::format("{}: {}", heads_in_words(event.heads, H_), in_words(*failure));
    return decision;  // every head looks so behind a NaN: that is no drift
  }
  if (!decision.leaking) {
    event.words +=
        drift_[worst].knows_leak()
            ? ": drift without a leak, which no stabiliser here prevents (learning rate?)"
            : ": whether it leaks is not known (no GPU kernel returns that with sinks or slopes), so "
              "nothing is changed; stabiliser=zero_sum prevents drift by a leak";
    return decision;
  }
  for (const int64_t head : alarms.leaking)
    event.clauses += fmt::format("{}layer {} head {}: {}", event.clauses.empty() ? "" : "; ", head / H_,
                                 head % H_, kGuardRemedy);
  const int64_t to = alarms.late && means.checkpoint_before ? means.checkpoint_before(alarms.last_good) : -1;
  if (!means.act) {
    event.words += "; would add to the plan: " + event.clauses;
  } else if (alarms.late && to >= 0) {
    event.kind = GuardEvent::Kind::roll_back;
    event.to = to;
    event.words +=
        fmt::format("; too late to heal ({}): back to step {}, with {}", alarms.why, to, event.clauses);
  } else if (alarms.late && heads_[worst].remedied) {
    event.words += fmt::format("; {}, and no checkpoint of before is left", alarms.why);
  } else {
    event.kind = GuardEvent::Kind::remedy;
    event.words += "; from the next step on " + event.clauses;
  }
  for (const int64_t number : alarms.leaking) {
    Head& head = heads_[static_cast<size_t>(number)];
    head.warned = event.kind == GuardEvent::Kind::warning;
    head.remedied = event.kind != GuardEvent::Kind::warning;
    head.at_remedy = drift_[static_cast<size_t>(number)].log_lse();
  }
  return decision;
}

}  // namespace evenkeel
