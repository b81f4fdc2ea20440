#include "diagnosis/verdict.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "records/metrics.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kNeighbours = 20;  // steps on either side, that a step's loss is compared with
// Deviations of a step's loss that count as a jump: of normal noise, one in three million.
constexpr double kJump = 5;
constexpr size_t kFewestSpikes = 3;
constexpr double kSmallestRise = 0.05;  // of the loss: smaller ones are another run's seed

double median(std::vector<double> values) {
  if (values.empty()) return kUnknown;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// What each step's loss is above the median of its neighbours on both sides, so that a loss that falls is no jump; NaN for
// the first few, where it falls too fast.
std::vector<double> jumps(const std::vector<double>& loss) {
  std::vector<double> above(loss.size(), kUnknown);
  for (size_t n = kNeighbours; n < loss.size(); ++n) {
    const auto at = [&](size_t m) { return loss.begin() + static_cast<std::ptrdiff_t>(m); };
    std::vector<double> neighbours(at(n - kNeighbours), at(n));
    neighbours.insert(neighbours.end(), at(n + 1), at(std::min(n + 1 + kNeighbours, loss.size())));
    above[n] = loss[n] - median(std::move(neighbours));
  }
  return above;
}

double log_of(double x) { return std::log(std::max(x, 1e-300)); }

}  // namespace

RunRecord run_record(const Metrics& metrics, std::optional<Finding> finding) {
  RunRecord record;
  record.finding = std::move(finding);
  record.loss = metrics.by_step(metrics.loss);
  record.gradient_norm = metrics.by_step(metrics.gradient_norm);
  record.layers = metrics.layers, record.heads = metrics.heads;
  for (size_t n = 0; n < metrics.loss.steps.size() && !record.not_finite; ++n)
    if (!std::isfinite(metrics.loss.values[n])) record.not_finite = metrics.loss.steps[n];
  for (const HeadFact fact : {HeadFact::offset, HeadFact::largest_lse}) {
    const Series& series = metrics.of(fact);
    if (series.empty()) continue;
    record.offset_is = name(fact);
    record.fact_steps = series.steps;
    for (size_t n = 0; n < series.steps.size(); ++n)
      record.offset.emplace_back(series.row(n).begin(), series.row(n).end());
    break;
  }
  const Series &leaks = metrics.of(HeadFact::leak_rms), &deltas = metrics.of(HeadFact::delta_rms);
  for (size_t n = 0; n < leaks.steps.size(); ++n) {
    const std::span<const double> leak = leaks.row(n), delta = deltas.of_line(leaks.lines[n]);
    if (delta.empty()) continue;
    std::vector<double> share(leak.size());
    for (size_t h = 0; h < leak.size(); ++h) share[h] = delta[h] > 0 ? leak[h] / delta[h] : 0;
    record.leak.push_back(std::move(share));
  }
  return record;
}

RunRecord read_run_record(const fs::path& run) {
  return run_record(read_some_metrics(run), read_finding(run));
}

double loss_noise(const std::vector<double>& loss) {
  std::vector<double> above = jumps(loss);
  std::erase_if(above, [](double x) { return !std::isfinite(x); });
  const double middle = median(above);
  for (double& x : above) x = std::fabs(x - middle);
  constexpr double kNormal = 1.4826;  // deviation of normal numbers over the median of their sizes
  return above.empty() ? kUnknown : kNormal * median(above);
}

Symptom find_symptom(const RunRecord& record) {
  Symptom symptom;
  // The common mode, where an offset is beyond the limit (drifted_beyond) at the end. Drift spreads, so the head that has gone furthest need
  // not be the one it began with: of those that have gone at least half as far (in logarithms), the first to leave for
  // good.
  if (!record.offset.empty()) {
    const std::vector<double>& last = record.offset.back();
    double worst = 0;
    for (const double value : last) worst = std::max(worst, std::isnan(value) ? HUGE_VAL : value);
    const double limit = drifted_beyond(last, kTimesToName);
    if (worst > limit) {
      const double far = std::isinf(worst) ? worst : std::sqrt(worst * limit);
      size_t head = 0, since = record.offset.size();
      for (size_t n = 0; n < last.size(); ++n) {
        if (last[n] < far) continue;
        size_t first = record.offset.size() - 1;
        while (first > 0 && !(record.offset[first - 1][n] <= limit)) --first;
        if (first < since) since = first, head = n;
      }
      symptom.kind = Symptom::Kind::offset;
      symptom.layer = static_cast<int64_t>(head) / record.heads;
      symptom.head = static_cast<int64_t>(head) % record.heads;
      symptom.since = record.fact_steps[since];
      symptom.words = fmt::format(
          "layer {} head {}: {} above {:.0f} since step {}, {:.0f} at step {} (no softmax has a use for more "
          "than {:.0f})",
          symptom.layer, symptom.head, record.offset_is, limit, symptom.since, last[head],
          record.fact_steps.back(), kScoreUnit);
      return symptom;
    }
  }
  // The loss: means of as many steps as the trainer's own watch, against the best.
  const std::vector<double>& loss = record.loss;
  constexpr size_t kWindow = DivergenceWatch::kWindow;
  const double noise = loss_noise(loss);
  double best = std::numeric_limits<double>::infinity(), mean = 0;
  size_t best_at = 0;
  for (size_t n = 0; n < loss.size(); ++n) {
    mean += loss[n] / kWindow;
    if (n >= kWindow) mean -= loss[n - kWindow] / kWindow;
    if (n + 1 >= kWindow && mean < best) best = mean, best_at = n;
  }
  const bool ended = record.finding.has_value();
  const bool risen = loss.size() > kWindow &&
                     mean > best + std::max(kSmallestRise * best, kJump * noise * std::sqrt(2.0 / kWindow));
  if (ended || risen || record.not_finite) {
    symptom.kind = Symptom::Kind::loss;
    symptom.since = record.not_finite ? *record.not_finite : static_cast<int64_t>(best_at);
    symptom.words =
        ended ? record.finding->words
        : record.not_finite
            ? fmt::format("the loss of step {} is not finite", *record.not_finite)
            : fmt::format("the mean loss of the last {} steps is {:.4f}, {:.4f} above its best (step {})",
                          kWindow, mean, mean - best, best_at);
    return symptom;
  }
  const std::vector<double> above = jumps(loss);
  for (size_t n = 0; n < above.size(); ++n)
    if (above[n] > kJump * noise && above[n] > kSmallestRise * loss[n])
      symptom.spikes.push_back(static_cast<int64_t>(n)), symptom.heights.push_back(above[n]);
  if (symptom.spikes.size() >= kFewestSpikes) {
    symptom.kind = Symptom::Kind::spikes;
    symptom.since = symptom.spikes.front();
    symptom.words = fmt::format(
        "the loss of {} single steps is more than {:.2f} ({:.0f} deviations) above their neighbours', first "
        "at "
        "step {}",
        symptom.spikes.size(), kJump * noise, kJump, symptom.since);
  }
  return symptom;
}

const Trial* const& trial_of(const VerdictTrials& trials, VerdictPart part) {
  switch (part) {
    case VerdictPart::recorded:
      return trials.recorded;
    case VerdictPart::placebo:
      return trials.placebo;
    case VerdictPart::alone_guilty:
      return trials.alone_guilty;
    case VerdictPart::unbiased:
      return trials.unbiased;
    case VerdictPart::wide_pv:
      return trials.wide_pv;
    case VerdictPart::wide_output:
      return trials.wide_output;
    case VerdictPart::consistent:
      return trials.consistent;
    case VerdictPart::zero_sum:
      return trials.zero_sum;
    case VerdictPart::zero_sum_all:
      return trials.zero_sum_all;
    case VerdictPart::cured:
      return trials.cured;
    case VerdictPart::control_placebo:
      return trials.control_placebo;
    case VerdictPart::slower:
      return trials.slower;
    case VerdictPart::control:
      return trials.control;
  }
  throw std::logic_error("trial_of: a part without a trial");
}

double Evidence::growth(const Trial& trial) const {
  return log_of(std::max(trial.health.offset, kScoreUnit)) - log_of(std::max(begin_offset, kScoreUnit));
}

bool Evidence::heals(const Trial& trial) const {
  const bool by_offset = measure == Measure::offset;
  const auto value = [&](const Trial& t) { return by_offset ? log_of(t.health.offset) : t.health.loss; };
  // Each course twice, where there are placebos: half the chance in it.
  const auto level = [&](const Trial* one, const Trial* other) {
    return other ? (value(*one) + value(*other)) / 2 : value(*one);
  };
  const double bad = level(recorded, placebo), good = level(control, control_placebo),
               this_one = value(trial);
  if (!std::isfinite(bad)) return std::isfinite(this_one) && this_one < good + std::max(1.0, std::fabs(good));
  return this_one < (bad + good) / 2;
}

std::string heads_in_words(const std::vector<int64_t>& heads, int64_t H) {
  std::string text;
  for (size_t n = 0; n < heads.size();) {
    const int64_t layer = heads[n] / H;
    std::string list;
    size_t count = 0;
    for (; n < heads.size() && heads[n] / H == layer; ++n, ++count)
      list += (list.empty() ? "" : ", ") + std::to_string(heads[n] % H);
    text +=
        fmt::format("{}layer {} head{} {}", text.empty() ? "" : " and ", layer, count > 1 ? "s" : "", list);
  }
  return text;
}

namespace {

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::string sites_in_words(const std::vector<Site>& sites) {
  std::vector<std::string> names;
  for (const Site site : sites) names.emplace_back(name(site));
  return joined(names, " and ");
}

std::string figures(const Trial& t) {
  return fmt::format("offset {:.3g}, log-sum-exp {:.3g}, loss {:.4f}, gradient norm {:.3g}", t.health.offset,
                     t.health.lse, t.health.loss, t.health.gradient_norm);
}

// Everything that could be tried on the guilty heads and sites, with what it says.
void add_trials(const Evidence& e, std::vector<std::string>& chain) {
  const auto add = [&](const Trial* trial, const char* what, const char* healed, const char* not_healed) {
    if (trial)
      chain.push_back(
          fmt::format("{}: {}: {}", what, figures(*trial), e.heals(*trial) ? healed : not_healed));
  };
  add(e.cured, "proof: only that in FP32", "heals", "does not heal");
  add(e.alone_guilty, "proof the other way: only that rounded, all else in FP32",
      "stays healthy: something else takes part", "derails: it is enough by itself");
  add(e.zero_sum, "remedy zero_sum on these heads (and the sham: the same rounding, its rows' sums kept)",
      "heals: it is the broken sum that derails, not the size of the error",
      e.zero_sum_all ? "does not heal" : "does not heal: the sum is not what derails");
  add(e.zero_sum_all, "zero_sum on all heads",
      "heals: the broken sum derails, and other heads break theirs, too",
      "does not heal: the sum is not what derails");
  add(e.wide_output, "equivalent: wide_output (O for delta in FP32)", "heals", "does not heal");
  add(e.consistent, "equivalent: consistent", "heals", "does not heal");
  add(e.wide_pv, "equivalent: the product PV in FP32", "heals", "does not heal");
  add(e.unbiased, "the same site rounded stochastically, without bias",
      "does not, within the window: bias takes part", "derails too: noise is enough");
}

Verdict judge_rounding(const Evidence& e, const RunConfig& config) {
  const int64_t H = config.model.heads;
  Verdict v;
  const bool drift = e.measure == Evidence::Measure::offset;
  const auto heals = [&](const Trial* trial) { return trial && e.heals(*trial); };
  const bool through_the_sum = !e.zero_sum || heals(e.zero_sum) || heals(e.zero_sum_all);
  v.cause = drift && through_the_sum ? Cause::common_mode_drift : Cause::other_rounding;
  v.evidence.push_back(
      fmt::format("steps {} to {} as recorded: {}", e.window.begin, e.window.end, figures(*e.recorded)));
  v.evidence.push_back(fmt::format("control, all in FP32 on the same batches: {}", figures(*e.control)));
  if (e.guilty.empty()) {
    v.words = "FP32 attention heals this run, so rounding derails it; where was not established.";
    v.certainty = e.budget_spent
                      ? "not sure: the budget of replays was spent before the search ended; a larger "
                        "--budget goes on from here"
                      : "not sure: no smaller set of heads heals";
    return v;
  }
  const std::string where = heads_in_words(e.guilty, H);
  v.evidence.push_back(fmt::format("smallest set of heads whose FP32 heals: {}", where));
  double bias = 0, share = 0;
  for (const int64_t head : e.guilty) {
    const auto n = static_cast<size_t>(head);
    bias = std::max(bias, e.recorded->health.residual_bias[n]);
    share = std::max(share, e.recorded->health.residual_share[n]);
  }
  v.evidence.push_back(
      fmt::format("rows of dS there miss their sum of zero by {:.2g} of delta (root mean squares; FP32 "
                  "leaves {:.1g}); of its squares "
                  "{:.1f} % are bias, the rest is noise",
                  share, e.control->health.residual_share[static_cast<size_t>(e.guilty[0])], 100 * bias));
  if (e.sites.empty()) {
    v.words = fmt::format("Rounding in {} derails this run; which site was not established.", where);
    v.certainty = e.budget_spent
                      ? "half sure: heads yes, site no; the budget of replays was spent, a larger --budget "
                        "goes on from here"
                      : "half sure: heads yes, site no";
    return v;
  }
  const ScopedPlan plan = ScopedPlan::parse(config.plan_at(e.window.begin));
  const PrecisionPlan of_head = plan.at(static_cast<int>(e.guilty[0] / H), static_cast<int>(e.guilty[0] % H));
  std::vector<std::string> formats;
  for (const Site site : e.sites) formats.push_back(to_string(of_head.at(site)));
  const std::string site = sites_in_words(e.sites);
  v.evidence.push_back(
      fmt::format("smallest set of sites whose FP32 heals: {} (now {}){}", site, joined(formats, ", "),
                  e.alone.size() > 1 ? fmt::format("; each by itself: {}", sites_in_words(e.alone)) : ""));
  if (e.placebo)
    v.evidence.push_back(fmt::format(
        "placebo, another format of dv: offset {:.3g} as recorded, {:.3g} in FP32: each stays on its side",
        e.placebo->health.offset, e.control_placebo->health.offset));
  add_trials(e, v.evidence);
  if (v.cause == Cause::common_mode_drift)
    v.words = fmt::format(
        "Common-mode drift: rounding {} ({}) in {} breaks the zero sum of dS{}, and nothing pulls the "
        "scores' common "
        "part back.{}",
        site, joined(formats, ", "), where,
        e.unbiased ? (e.heals(*e.unbiased) ? ", with its bias" : ", by noise as much as by bias") : "",
        heals(e.zero_sum)       ? " stabiliser=zero_sum on these heads heals it."
        : heals(e.zero_sum_all) ? " stabiliser=zero_sum on all heads heals it; on these alone it does not."
                                : "");
  else
    v.words = fmt::format(
        "Rounding {} ({}) in {} derails this run, {}.", site, joined(formats, ", "), where,
        drift ? "but not through the zero sum of dS" : "and the scores' common part plays no part in it");
  const bool both = e.cured && e.heals(*e.cured) && e.alone_guilty && !e.heals(*e.alone_guilty);
  v.certainty = both ? "sure: to leave it out heals, and to leave only it in derails"
                : e.alone_guilty
                    ? "fairly sure: to leave it out heals; by itself it does not derail within a window"
                    : "fairly sure: to leave it out heals; the other way was not tried";
  return v;
}

}  // namespace

Verdict judge(const Evidence& e, const RunConfig& config) {
  Verdict v;
  if (e.symptom.kind == Symptom::Kind::none) {
    v.cause = Cause::healthy;
    v.words = "Healthy, by its records: no offset beyond need, no rise of the loss, no jumps.";
    v.certainty = "as sure as records are: nothing was replayed";
    return v;
  }
  const auto with_symptom = [&](Verdict found) {
    found.evidence.insert(found.evidence.begin(), "symptom: " + e.symptom.words);
    return found;
  };
  if (!e.recorded) {
    v.words = "Something is wrong; the cause was not established: no replay was made (`evenkeel isolate`).";
    v.certainty = "not sure";
    return with_symptom(v);
  }
  if (e.not_repeated) {
    const auto n = static_cast<size_t>(*e.not_repeated - e.window.begin);
    v.cause = Cause::corruption;
    v.words = fmt::format(
        "The run does not repeat: from the checkpoint of step {} the same batches give other numbers from "
        "step {} on. "
        "What ran then was not this program on this data: memory, hardware, or a hand in it.",
        e.window.begin, *e.not_repeated);
    v.evidence.push_back(fmt::format("loss of step {}: recorded {:.9g}, replayed {:.9g}", *e.not_repeated,
                                     e.recorded_loss, e.recorded->health.step_loss[n]));
    v.evidence.push_back(fmt::format("all {} steps before it in the window repeat to the last bit", n));
    v.certainty = "sure that it does not repeat; not what did it";
    return with_symptom(v);
  }
  if (e.data && from_data(*e.data)) {
    const BadSequences& d = *e.data;
    v.cause = Cause::data;
    v.words = fmt::format(
        "Data: the loss jumps on particular batches; what is hard in them lies in tokens {} to {} of the "
        "source.",
        d.first_token, d.end_token);
    v.evidence.push_back(
        fmt::format("{} of the {} steps with the largest jumps hold a sequence that the model of step {} "
                    "finds harder (loss {:.2f}) than "
                    "any of ordinary steps (median {:.2f}); {} such sequences in all",
                    d.steps_with, d.looked_at, e.window.begin, d.loss, d.ordinary_loss, d.count));
    v.certainty = "fairly sure: hard text is not always bad text; look at it";
    return with_symptom(v);
  }
  if (e.measure != Evidence::Measure::none && !e.chaotic) return with_symptom(judge_rounding(e, config));
  if (e.chaotic)
    v.evidence.push_back(
        "placebo: changes that cannot matter alter the outcome as much as FP32 does: this stretch is "
        "chaotic");
  if (e.control) {
    v.evidence.push_back(
        fmt::format("steps {} to {} as recorded: {}", e.window.begin, e.window.end, figures(*e.recorded)));
    v.evidence.push_back(fmt::format("control, all in FP32 on the same batches: {}", figures(*e.control)));
  }
  if (e.slower) {
    v.evidence.push_back(fmt::format("FP32 at a quarter of the learning rate: {}", figures(*e.slower)));
    // FP32 must fail as the recorded run does: a control that is merely not much better clears nobody.
    const bool fails_alike =
        e.symptom.kind != Symptom::Kind::offset ||
        (e.control->health.offset > kDriftedOffset && e.growth(*e.control) > e.growth(*e.recorded) / 2);
    const bool healed = e.symptom.kind == Symptom::Kind::offset
                            ? e.growth(*e.slower) < e.growth(*e.control) / 2
                            : e.slower->health.loss < e.control->health.loss - e.loss_tolerance;
    if (healed && fails_alike && !e.chaotic) {
      v.cause = Cause::learning_rate;
      v.words =
          "Learning rate: the run fails in FP32 too, and at a quarter of the learning rate it does not. "
          "Rounding is "
          "not to blame.";
      v.certainty = "sure that it is not rounding; fairly sure that it is the learning rate";
      return with_symptom(v);
    }
  }
  v.words =
      !e.control ? "Not established: the budget of replays was spent."
      : e.chaotic
          ? "Not established: where the run could be replayed, anything changes its course."
          : "Not established: all-FP32 attention does no better, so rounding in attention is not shown to "
            "be the cause; nor is anything else.";
  v.certainty = "not sure";
  return with_symptom(v);
}

}  // namespace evenkeel
