#include "diagnosis/verdict.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/text.h"
#include "diagnosis/isolate.h"
#include "diagnosis/next_command.h"
#include "numerics/median.h"
#include "records/metrics.h"
#include "records/record_json.h"
#include "records/schema.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr size_t kNeighbours = 20;  // steps on either side, that a step's loss is compared with
// Deviations of a step's loss that count as a jump: of normal noise, one in three million.
constexpr double kJump = 5;
constexpr size_t kFewestSpikes = 3;
// No run of docs/curves failed earlier (study_test.py): of fewer steps health says little, and offsets older than that say
// nothing of the end.
constexpr size_t kFewSteps = 300;
constexpr double kSmallestRise = 0.05;  // of the loss: smaller ones are another run's seed

// Steps whose loss is there. A run that goes on in a folder of its own has none before, and some write one step in ten.
std::vector<size_t> steps_with_loss(const std::vector<double>& loss) {
  std::vector<size_t> steps;
  for (size_t n = 0; n < loss.size(); ++n)
    if (!std::isnan(loss[n])) steps.push_back(n);
  return steps;
}

// What each step's loss is above the median of its neighbours on both sides, so that a loss that falls is no jump; NaN for
// the first few, where it falls too fast, and where there is none.
std::vector<double> jumps(const std::vector<double>& loss) {
  const std::vector<size_t> steps = steps_with_loss(loss);
  std::vector<double> above(loss.size(), kUnknown);
  for (size_t n = kNeighbours; n < steps.size(); ++n) {
    std::vector<double> neighbours;
    for (size_t m = n - kNeighbours; m < std::min(n + 1 + kNeighbours, steps.size()); ++m)
      if (m != n) neighbours.push_back(loss[steps[m]]);
    above[steps[n]] = loss[steps[n]] - median(std::move(neighbours));
  }
  return above;
}

double log_of(double x) { return std::log(std::max(x, 1e-300)); }

}  // namespace

RunRecord run_record(const Metrics& metrics, std::optional<Finding> finding, std::span<const RunEvent> events,
                     int64_t warmup) {
  RunRecord record;
  record.warmup = warmup;
  record.finding = std::move(finding);
  for (const RunEvent& event : events)
    if (event.is_guards_act()) record.mended.push_back(fmt::format("step {}: {}", event.step, event.words));
  record.loss = metrics.by_step(metrics.loss);
  record.gradient_norm = metrics.by_step(metrics.gradient_norm);
  record.layers = metrics.layers, record.heads = metrics.heads;
  for (size_t n = 0; n < metrics.loss.steps.size() && !record.not_finite; ++n)
    if (!std::isfinite(metrics.loss.values[n])) record.not_finite = metrics.loss.steps[n];
  for (size_t n = metrics.loss.steps.size(); n > 0 && !std::isfinite(metrics.loss.values[n - 1]); --n)
    record.never_finite = metrics.loss.steps[n - 1];
  record.notes = notes_of(metrics);
  record.damaged = metrics.file.fault_count > 0 || metrics.without_step > 0 || metrics.misshapen > 0;
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
  RunRecords other;
  if (const auto text = read_record(run, RecordFile::guard)) read_guard(*text, other);
  if (const auto text = read_record(run, RecordFile::config)) read_config(*text, other);
  RunRecord record = run_record(read_some_metrics(run), read_finding(run), other.events, other.warmup());
  record.notes.insert(record.notes.end(), other.notes.begin(), other.notes.end());
  return record;
}

double loss_noise(const std::vector<double>& loss) {
  std::vector<double> above = jumps(loss);
  std::erase_if(above, [](double x) { return !std::isfinite(x); });
  const double middle = median(above);
  for (double& x : above) x = std::fabs(x - middle);
  constexpr double kNormal = 1.4826;  // deviation of normal numbers over the median of their sizes
  return above.empty() ? kUnknown : kNormal * median(above);
}

namespace {

// Records of offsets by which heads are judged. Behind a NaN every head has one, which is no drift: only those before count.
size_t rows_to_judge(const RunRecord& record) {
  size_t rows = record.offset.size();
  const auto none_finite = [](const std::vector<double>& of_heads) {
    return std::none_of(of_heads.begin(), of_heads.end(), [](double x) { return std::isfinite(x); });
  };
  while (rows > 0 && record.never_finite &&
         (record.fact_steps[rows - 1] >= *record.never_finite || none_finite(record.offset[rows - 1])))
    --rows;
  return rows;
}

// An offset beyond the limit of drift at the end of the record. Drift spreads, so the head that has gone furthest need not
// be the first. Of those that have gone at least half as far (in logarithms), this is the first to leave for good.
std::optional<Symptom> find_offset(const RunRecord& record) {
  const size_t rows = rows_to_judge(record);
  if (rows == 0) return {};
  const std::vector<double>& last = record.offset[rows - 1];
  double worst = 0;
  for (const double value : last) worst = std::max(worst, std::isnan(value) ? HUGE_VAL : value);
  Symptom symptom;
  symptom.limit = limit_from_run(last);
  const double limit = symptom.limit.limit;
  if (!(worst > limit)) return {};
  // Never above the worst itself, so that there is such a head; the product of two large numbers would be infinite.
  const double far = std::min(worst, std::isinf(worst) ? worst : std::sqrt(worst) * std::sqrt(limit));
  size_t head = 0, since = rows;
  for (size_t n = 0; n < last.size(); ++n) {
    if (last[n] < far) continue;
    size_t first = rows - 1;
    while (first > 0 && !(record.offset[first - 1][n] <= limit)) --first;
    if (first < since) since = first, head = n;
  }
  symptom.kind = Symptom::Kind::offset;
  symptom.index = static_cast<int64_t>(head);
  symptom.layer = static_cast<int64_t>(head) / record.heads;
  symptom.head = static_cast<int64_t>(head) % record.heads;
  symptom.since = record.fact_steps[since];
  symptom.words = fmt::format(
      "layer {} head {}: {} above {:.0f} since step {}, {} at step {} ({})", symptom.layer, symptom.head,
      record.offset_is == "largest_lse" ? "log-sum-exp" : "offset", limit, symptom.since,
      whole_text(last[head]), record.fact_steps[rows - 1], in_words(symptom.limit));
  return symptom;
}

// "the largest offset is 12, drift is beyond 60 (...)", of heads that do not drift; empty where none is recorded.
std::string level_offsets(const RunRecord& record) {
  const size_t rows = rows_to_judge(record);
  if (rows == 0) return "";
  const std::vector<double>& last = record.offset[rows - 1];
  const DriftLimit limit = limit_from_run(last);
  return fmt::format("the largest {} at step {} is {:.1f}, drift is beyond {:.0f}",
                     record.offset_is == "largest_lse" ? "log-sum-exp" : "offset",
                     record.fact_steps[rows - 1], *std::max_element(last.begin(), last.end()), limit.limit);
}

// Are there offsets of few steps before `end`?
bool knows_offsets(const RunRecord& record, int64_t end) {
  const size_t rows = rows_to_judge(record);
  return rows > 0 && end - record.fact_steps[rows - 1] < static_cast<int64_t>(kFewSteps);
}

// The loss: means of as many steps as the trainer's own watch, against the best.
std::optional<Symptom> find_rise(const RunRecord& record, double noise) {
  const std::vector<double>& loss = record.loss;
  const std::vector<size_t> steps = steps_with_loss(loss);
  constexpr size_t kWindow = DivergenceWatch::kWindow;
  double best = std::numeric_limits<double>::infinity(), mean = 0;
  size_t best_at = 0;
  for (size_t n = 0; n < steps.size(); ++n) {
    mean += loss[steps[n]] / kWindow;
    if (n >= kWindow) mean -= loss[steps[n - kWindow]] / kWindow;
    if (n + 1 >= kWindow && mean < best) best = mean, best_at = steps[n];
  }
  const bool ended = record.finding.has_value();
  const bool risen = steps.size() > kWindow &&
                     mean > best + std::max(kSmallestRise * best, kJump * noise * std::sqrt(2.0 / kWindow));
  if (!ended && !risen && !record.not_finite) return {};
  Symptom symptom;
  symptom.kind = Symptom::Kind::loss;
  symptom.since = record.not_finite ? *record.not_finite : static_cast<int64_t>(best_at);
  symptom.loss = mean, symptom.best_loss = best;
  symptom.words =
      ended ? record.finding->words
      : record.not_finite
          ? fmt::format("the loss of step {} is not finite", *record.not_finite)
          : fmt::format("the mean loss of the last {} steps is {:.4f}, {:.4f} above its best (step {})",
                        kWindow, mean, mean - best, best_at);
  // No head drifts, or the offset would be the symptom.
  const bool not_finite = record.not_finite || (ended && record.finding->kind == "not_finite");
  if (const std::string level = level_offsets(record);
      not_finite && !level.empty() &&
      knows_offsets(record, record.not_finite ? *record.not_finite : record.finding->step))
    symptom.words += fmt::format(
        "; just before, no head drifted ({}), so drift is not what ended it; an overflow may be", level);
  return symptom;
}

// What "nothing is wrong" rests on.
void find_nothing(const RunRecord& record, Symptom& symptom) {
  // Losses that are too far apart are none (Metrics::by_step).
  const std::vector<size_t> recorded = steps_with_loss(record.loss);
  const size_t steps = recorded.empty() ? 0 : recorded.back() - recorded.front() + 1;
  const std::string level = level_offsets(record);
  symptom.has_losses = steps > 0, symptom.has_offsets = !level.empty();
  const int64_t last = std::max(recorded.empty() ? -1 : static_cast<int64_t>(recorded.back()),
                                record.fact_steps.empty() ? -1 : record.fact_steps.back());
  symptom.is_too_short = last < record.warmup;
  if (symptom.is_too_short && (symptom.has_losses || symptom.has_offsets)) {
    symptom.words =
        fmt::format("the run is too short: its records end at step {}, and its warm-up of {} steps does not",
                    last, record.warmup);
    symptom.certainty = "not sure: behind the warm-up it is known what is healthy";
    return;
  }
  symptom.words = fmt::format("{}{}", level.empty() ? "" : fmt::format("no head drifts ({}), ", level),
                              steps == 0 ? "too few losses are recorded to see a rise"
                                         : fmt::format("no rise of the loss and no jumps in {} step{}", steps,
                                                       steps == 1 ? "" : "s"));
  symptom.certainty =
      level.empty()
          ? "not sure: no offsets are recorded, and drift shows in them long before it shows in the "
            "loss (train --facts-every N)"
      : steps == 0 ? "not sure: too few losses are recorded"
      : steps < kFewSteps
          ? fmt::format("hardly sure: {} steps are few; no run of the study failed before step {}", steps,
                        kFewSteps)
      : !knows_offsets(record, static_cast<int64_t>(recorded.back()))
          ? fmt::format("not sure: no offsets are recorded behind step {}",
                        record.fact_steps[rows_to_judge(record) - 1])
          : "as sure as records are: nothing was replayed, and a later drift is forecast's to say";
  if (record.damaged) symptom.certainty += "; not all of the records could be read";
}

}  // namespace

Symptom find_symptom(const RunRecord& record) {
  if (const auto offset = find_offset(record)) return *offset;
  const double noise = loss_noise(record.loss);
  if (const auto rise = find_rise(record, noise)) return *rise;
  Symptom symptom;
  const std::vector<double> above = jumps(record.loss);
  for (size_t n = 0; n < above.size(); ++n)
    if (above[n] > kJump * noise && above[n] > kSmallestRise * record.loss[n])
      symptom.spikes.push_back(static_cast<int64_t>(n)), symptom.heights.push_back(above[n]);
  if (symptom.spikes.size() >= kFewestSpikes) {
    symptom.kind = Symptom::Kind::spikes;
    symptom.since = symptom.spikes.front();
    symptom.words = fmt::format(
        "the loss of {} single steps is more than {:.2f} ({:.0f} deviations) above their neighbours', first "
        "at step {}",
        symptom.spikes.size(), kJump * noise, kJump, symptom.since);
  } else {
    find_nothing(record, symptom);
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

double Evidence::outcome(const Trial& trial) const {
  if (measure != Measure::offset) return trial.health.loss;
  const auto head = static_cast<size_t>(symptom.index);
  const bool of_head = symptom.index >= 0 && head < trial.health.head_offset.size();
  return log_of(of_head ? trial.health.head_offset[head] : trial.health.offset);
}

Evidence::Level Evidence::level_of(const std::vector<const Trial*>& courses) const {
  double sum = 0, squares = 0, count = 0;
  for (const Trial* course : courses)
    if (course) sum += outcome(*course), ++count;
  const double mean = sum / count;
  for (const Trial* course : courses)
    if (course) squares += (outcome(*course) - mean) * (outcome(*course) - mean);
  return {mean, count > 1 ? std::sqrt(squares / (count - 1)) : 0};
}

Evidence::Level Evidence::bad_level() const {
  std::vector<const Trial*> courses = more_placebos;
  courses.insert(courses.end(), {recorded, placebo});
  return level_of(courses);
}

double Evidence::below_line(const Trial& trial) const {
  constexpr double kNotAtAll = -std::numeric_limits<double>::infinity();
  if (measure == Measure::offset && !(trial.health.offset <= limit.limit)) return kNotAtAll;
  const Level bad = bad_level(), good = level_of({control, control_placebo});
  const double here = outcome(trial);
  if (!std::isfinite(here)) return kNotAtAll;
  if (!std::isfinite(bad.mean)) return good.mean + std::max(1.0, std::fabs(good.mean)) - here;
  return std::min((bad.mean + good.mean) / 2, bad.mean - kSureSpreads * bad.spread) - here;
}

bool Evidence::heals_barely(const Trial& trial) const {
  const double below = below_line(trial), spread = bad_level().spread;
  return below > 0 && below < 2 * spread;
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

std::string sites_in_words(const std::vector<Site>& sites) {
  std::vector<std::string> names;
  for (const Site site : sites) names.emplace_back(name(site));
  return joined(names, " and ");
}

std::string figures(const Trial& t) {
  return fmt::format("offset {}, log-sum-exp {}, loss {:.4f}, gradient norm {:.3g}",
                     offset_text(t.health.offset), offset_text(t.health.lse), t.health.loss,
                     t.health.gradient_norm);
}

// What a replay gave, beside the recorded course and the control: "offset 201 (as recorded 950, control 171, limit 342)".
std::string compared(const Evidence& e, const Trial& t) {
  if (e.measure == Evidence::Measure::offset) {
    const double offset = std::exp(e.outcome(t)), limit = e.limit.limit;
    const bool drifts_elsewhere = offset <= limit && t.health.offset > limit;
    return fmt::format("offset {} (as recorded {}, control in FP32 {}, limit {}{})", whole_text(offset),
                       whole_text(std::exp(e.outcome(*e.recorded))),
                       whole_text(std::exp(e.outcome(*e.control))), whole_text(limit),
                       drifts_elsewhere ? "; another head has " + whole_text(t.health.offset) : "");
  }
  return fmt::format("loss {:.4f} (as recorded {:.4f}, control in FP32 {:.4f})", t.health.loss,
                     e.recorded->health.loss, e.control->health.loss);
}

// The stretch as recorded and in FP32, and where the limit comes from.
void add_control(const Evidence& e, const RunConfig& config, std::vector<std::string>& chain) {
  chain.push_back(
      fmt::format("steps {} to {} as recorded: {}", e.window.begin, e.window.end, figures(*e.recorded)));
  if (e.symptom.kind == Symptom::Kind::offset) {
    const auto n = static_cast<size_t>(e.symptom.layer * config.model.heads + e.symptom.head);
    if (n < e.recorded->health.head_offset.size())
      chain.back() += fmt::format("; layer {} head {}, where the symptom is: offset {}", e.symptom.layer,
                                  e.symptom.head, offset_text(e.recorded->health.head_offset[n]));
  }
  if (e.control)
    chain.push_back(fmt::format("control, all in FP32 on the same batches: {}; {}", figures(*e.control),
                                in_words(e.limit)));
}

// Everything that could be tried on the guilty heads and sites, with what it says.
void add_trials(const Evidence& e, const std::string& site, std::vector<std::string>& chain) {
  const auto add = [&](const Trial* trial, const std::string& what, const char* healed,
                       const char* not_healed) {
    if (trial)
      chain.push_back(
          fmt::format("{}: {}: {}", what, compared(e, *trial), e.heals(*trial) ? healed : not_healed));
  };
  const bool all_heal = e.zero_sum_all && e.heals(*e.zero_sum_all);
  add(e.cured, fmt::format("proof: {} there in FP32, nothing else changed", site), "heals", "does not heal");
  add(e.alone_guilty, fmt::format("proof the other way: only {} there rounded, all else in FP32", site),
      "healthy: something else takes part", "drifts: it is enough by itself");
  add(e.zero_sum, "remedy zero_sum on these heads (and the sham: the same rounding, its rows' sums kept)",
      "heals: the leak makes it drift, not the size of the error",
      all_heal         ? "does not heal: other heads leak, too"
      : e.zero_sum_all ? "does not heal"
                       : "does not heal: the leak is not the cause");
  add(e.zero_sum_all, "zero_sum on all heads", "heals: the leak makes it drift, and other heads leak, too",
      "does not heal: the leak is not the cause");
  add(e.wide_output, "equivalent: wide_output (O for delta in FP32)", "heals", "does not heal");
  add(e.consistent, "equivalent: consistent", "heals", "does not heal");
  add(e.wide_pv, "equivalent: the product PV in FP32", "heals", "does not heal");
  add(e.unbiased, "the same site rounded stochastically, without bias",
      "healthy within the window: bias takes part", "drifts too: noise is enough");
}

bool heals(const Evidence& e, const Trial* trial) { return trial && e.heals(*trial); }

// More replays of the same stretch: those that were made count.
std::string go_on_command(const Evidence& e, const std::filesystem::path& run, const RunConfig& config) {
  const int64_t steps = e.window.end - e.window.begin;
  return isolate_command(
      run, config.trainer,
      (steps > 0 && steps != kReplaySteps ? fmt::format(" --steps {}", steps) : "") + " --budget 80");
}

// With the smallest change that was seen to heal; on no evidence of one, with more replays.
std::string mending_command(const Evidence& e, const std::filesystem::path& run, const RunConfig& config) {
  std::vector<const Trial*> smallest_first;
  for (const VerdictPart remedy : kRemedies) smallest_first.push_back(trial_of(e, remedy));
  smallest_first.push_back(e.cured);
  for (const Trial* const trial : smallest_first)
    if (heals(e, trial)) return train_command(run, config, e.window.begin, trial->setup.clauses, "cured");
  return go_on_command(e, run, config);
}

// The heads, and what their rows of dS leak.
void add_heads(const Evidence& e, const std::string& where, int64_t H, std::vector<std::string>& chain) {
  const int64_t symptom = e.symptom.layer * H + e.symptom.head;
  const bool elsewhere = e.symptom.kind == Symptom::Kind::offset &&
                         std::find(e.guilty.begin(), e.guilty.end(), symptom) == e.guilty.end();
  chain.push_back(
      fmt::format("guilty: {}: the smallest set of heads whose FP32 heals{}", where,
                  elsewhere ? "; drift spreads, so the head with the symptom need not be among them" : ""));
  double bias = 0, share = 0;
  for (const int64_t head : e.guilty) {
    const auto n = static_cast<size_t>(head);
    bias = std::max(bias, e.recorded->health.residual_bias[n]);
    share = std::max(share, e.recorded->health.residual_share[n]);
  }
  chain.push_back(
      fmt::format("leak: rows of dS there miss their sum of zero by {:.2g} of delta (root mean squares; FP32 "
                  "leaves {:.1g}); of its squares {:.1f} % are bias, the rest is noise",
                  share, e.control->health.residual_share[static_cast<size_t>(e.guilty[0])], 100 * bias));
}

std::string words_of_rounding(const Evidence& e, Cause cause, const std::string& site,
                              const std::string& where) {
  if (cause == Cause::drift)
    return fmt::format(
        "Drift: rounding {} in {} makes rows of dS leak, and the leak makes the offset grow.{}{}", site,
        where,
        e.unbiased ? (e.heals(*e.unbiased) ? " The bias of the rounding drives it."
                                           : " Noise drives it as much as bias does.")
                   : "",
        heals(e, e.zero_sum) ? " stabiliser=zero_sum on these heads prevents it."
        : heals(e, e.zero_sum_all)
            ? " stabiliser=zero_sum on all heads prevents it; on these alone it does not."
            : "");
  return fmt::format("Rounding {} in {} harms this run, {}.", site, where,
                     e.measure == Evidence::Measure::offset ? "but not through a leak of dS"
                                                            : "and the offset plays no part in it");
}

// "placebo, other formats of dv: offset 278, 341 and 256 as recorded (373), 59 in FP32 (59): each stays on its side"
std::string placebos_in_words(const Evidence& e) {
  const bool by_offset = e.measure == Evidence::Measure::offset;
  const auto figure = [&](const Trial* t) {
    return by_offset ? offset_text(std::exp(e.outcome(*t))) : fmt::format("{:.4f}", e.outcome(*t));
  };
  std::vector<std::string> figures = {figure(e.placebo)};
  for (const Trial* trial : e.more_placebos) figures.push_back(figure(trial));
  return fmt::format(
      "placebo, other formats of dv: {} {} ({} as recorded), {} in FP32 ({}): each stays on its side",
      by_offset ? "offset" : "loss", joined(figures, ", "), figure(e.recorded), figure(e.control_placebo),
      figure(e.control));
}

Verdict judge_rounding(const Evidence& e, const std::filesystem::path& run, const RunConfig& config) {
  const int64_t H = config.model.heads;
  Verdict v;
  const bool through_the_sum = !e.zero_sum || heals(e, e.zero_sum) || heals(e, e.zero_sum_all);
  v.cause = e.measure == Evidence::Measure::offset && through_the_sum ? Cause::drift : Cause::other_rounding;
  v.next_command = mending_command(e, run, config);
  add_control(e, config, v.evidence);
  const char* const more = "the budget of replays was spent; a larger --budget goes on from here";
  if (e.guilty.empty()) {
    v.words = "FP32 attention heals this run, so rounding is the cause; where was not established.";
    v.certainty = fmt::format("not sure: {}", e.budget_spent ? more : "no smaller set of heads heals");
    return v;
  }
  const std::string where = heads_in_words(e.guilty, H);
  add_heads(e, where, H, v.evidence);
  if (e.sites.empty()) {
    v.words = fmt::format("Rounding in {} harms this run; which site was not established.", where);
    v.certainty =
        fmt::format("half sure: heads yes, site no{}", e.budget_spent ? std::string("; ") + more : "");
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
  if (e.placebo) v.evidence.push_back(placebos_in_words(e));
  add_trials(e, site, v.evidence);
  v.words = words_of_rounding(e, v.cause, fmt::format("{} ({})", site, joined(formats, ", ")), where);
  const bool both = heals(e, e.cured) && e.alone_guilty && !e.heals(*e.alone_guilty);
  v.certainty =
      both ? "sure: without this rounding the run heals, and with this rounding alone it drifts"
      : e.alone_guilty
          ? "fairly sure: without this rounding the run heals; by itself it does no harm within a window"
          : "fairly sure: without this rounding the run heals; the other direction was not tried";
  return v;
}

Verdict judge_corruption(const Evidence& e, const std::filesystem::path& run, const RunConfig& config) {
  Verdict v;
  const auto n = static_cast<size_t>(*e.not_repeated - e.window.begin);
  v.cause = Cause::corruption;
  v.words = fmt::format(
      "The run does not repeat: from the checkpoint of step {} the same batches give other numbers from step "
      "{} on. "
      "Likely cause: a memory or hardware fault, or files edited by hand.",
      e.window.begin, *e.not_repeated);
  v.evidence.push_back(fmt::format("loss of step {}: recorded {:.9g}, replayed {:.9g}", *e.not_repeated,
                                   e.recorded_loss, e.recorded->health.step_loss[n]));
  v.evidence.push_back(fmt::format("all {} steps before it in the window repeat to the last bit", n));
  v.certainty = "sure that it does not repeat; not what did it";
  v.next_command = train_command(run, config, e.window.begin, "", "again");
  return v;
}

Verdict judge_data(const BadSequences& d, int64_t step, const std::filesystem::path& run,
                   const RunConfig& config) {
  Verdict v;
  v.cause = Cause::data;
  v.words = fmt::format(
      "Data: the loss jumps on particular batches; what is hard in them lies in tokens {} to {} of the "
      "source.",
      d.first_token, d.end_token);
  v.evidence.push_back(fmt::format(
      "{} of the {} steps with the largest jumps hold a sequence that the model of step {} finds harder "
      "(loss {:.2f}) than any of ordinary steps (median {:.2f}); {} such sequences in all",
      d.steps_with, d.looked_at, step, d.loss, d.ordinary_loss, d.count));
  v.certainty = "fairly sure: hard text is not always bad text; look at it";
  // With another seed the batches are others; the text must be corrected by hand.
  v.next_command =
      train_command(run, config, 0, "", "other-batches", fmt::format(" --seed {}", config.seed + 1));
  return v;
}

// No stretch that can be replayed shows the symptom: whatever FP32 does there says nothing about it.
Verdict judge_unseen(const Evidence& e, const std::filesystem::path& run, const RunConfig& config,
                     int64_t every) {
  Verdict v;
  v.words = fmt::format(
      "Not established: the symptom shows from step {} on, and no stretch that can be replayed comes to "
      "it{}.",
      e.symptom.since,
      e.missing_checkpoint >= 0 ? fmt::format("; a checkpoint of step {} is missing", e.missing_checkpoint)
                                : "");
  add_control(e, config, v.evidence);
  if (e.symptom.kind == Symptom::Kind::offset)
    v.evidence.back() += fmt::format(", below the limit of {:.0f}: this stretch does not show the symptom",
                                     e.symptom.limit.limit);
  v.certainty =
      "not sure: nothing can be concluded from a stretch without the symptom. Train again with checkpoints "
      "that stay, then isolate that run";
  v.next_command = train_with_checkpoints_command(run, config, e.earlier_checkpoint, every);
  return v;
}

// What a guard did, and what of the records could not be read.
std::vector<std::string> records_in_words(const Evidence& e) {
  std::vector<std::string> words;
  for (const std::string& change : e.mended) words.push_back("guard, " + change);
  for (const std::string& note : e.notes) words.push_back("records: " + note);
  return words;
}

// FP32 does no better: the learning rate, or nothing that was tried.
Verdict judge_rest(const Evidence& e, const std::filesystem::path& run, const RunConfig& config) {
  Verdict v;
  if (e.chaotic)
    v.evidence.push_back(
        "placebo: changes that cannot matter alter the outcome as much as FP32 does, or nearly: this stretch "
        "is chaotic");
  if (e.control) add_control(e, config, v.evidence);
  if (e.slower) {
    v.evidence.push_back(fmt::format("FP32 at a quarter of the learning rate: {}", figures(*e.slower)));
    // FP32 must show the symptom as the recorded run does: a control that is merely not much better clears nobody.
    const bool fails_alike =
        e.symptom.kind != Symptom::Kind::offset || (e.control->health.offset > e.symptom.limit.limit &&
                                                    e.growth(*e.control) > e.growth(*e.recorded) / 2);
    const bool healed = e.symptom.kind == Symptom::Kind::offset
                            ? e.growth(*e.slower) < e.growth(*e.control) / 2
                            : e.slower->health.loss < e.control->health.loss - e.loss_tolerance;
    if (healed && fails_alike && !e.chaotic) {
      v.cause = Cause::learning_rate;
      v.words =
          "Learning rate: the run fails in FP32 too, and at a quarter of the learning rate it does not. "
          "Rounding is not to blame.";
      v.certainty = "sure that it is not rounding; fairly sure that it is the learning rate";
      std::string slower = fmt::format(" --lr {:.6g}", config.schedule.peak / 4);
      if (config.schedule.floor > 0)
        slower += fmt::format(" --set schedule.last_lr={:.6g}", config.schedule.floor / 4);
      v.next_command = train_command(run, config, e.window.begin, "", "slower", slower);
      return v;
    }
  }
  v.words =
      !e.control ? "Not established: the budget of replays was spent."
      : e.chaotic
          ? "Not established: where the run could be replayed, anything changes its course."
          : "Not established: all-FP32 attention does no better, so rounding in attention is not shown to "
            "be the cause; nor is anything else.";
  v.certainty = "not sure";
  v.next_command = !e.control ? go_on_command(e, run, config)
                   : e.chaotic
                       ? train_with_checkpoints_command(
                             run, config, 0, std::max<int64_t>(1, (e.window.end - e.window.begin) / 2))
                       : fmt::format("evenkeel report {} -o report.html", shell_word(run.string()));
  return v;
}

}  // namespace

std::string sentence_of_none(const Symptom& none) {
  if (none.is_healthy()) return fmt::format("Healthy, by its records: {}.", none.words);
  return none.has_losses || none.has_offsets
             ? fmt::format("Not established: {}.", none.words)
             : "Not established: no loss and no offset that could be judged is recorded.";
}

Verdict judge(const Evidence& e, const std::filesystem::path& run, const RunConfig& config) {
  Verdict v;
  if (e.symptom.kind == Symptom::Kind::none) {
    v.cause = e.symptom.is_healthy() ? Cause::healthy : Cause::not_established;
    v.words = sentence_of_none(e.symptom) + (e.mended.empty() ? "" : " A guard changed its plan on the way.");
    v.certainty = e.symptom.certainty;
    v.evidence = records_in_words(e);
    v.next_command = e.symptom.has_offsets ? "evenkeel forecast " + shell_word(run.string())
                                           : train_with_offsets_command(run, config);
    return v;
  }
  if (!e.recorded) {
    v.words = fmt::format("Something is wrong: {}. The cause was not established: no replay was made.",
                          e.symptom.words);
    v.certainty = "not sure";
    v.next_command = isolate_command(run, config.trainer);
  } else if (e.not_repeated) {
    v = judge_corruption(e, run, config);
  } else if (e.data && from_data(*e.data)) {
    v = judge_data(*e.data, e.window.begin, run, config);
  } else if (!e.shows_symptom) {
    v = judge_unseen(e, run, config, std::max<int64_t>(1, (e.window.end - e.window.begin) / 2));
  } else if (e.measure != Evidence::Measure::none && !e.chaotic) {
    v = judge_rounding(e, run, config);
  } else {
    v = judge_rest(e, run, config);
  }
  std::vector<std::string> evidence = records_in_words(e);
  evidence.insert(evidence.begin(), "symptom: " + e.symptom.words);
  v.evidence.insert(v.evidence.begin(), evidence.begin(), evidence.end());
  return v;
}

}  // namespace evenkeel
