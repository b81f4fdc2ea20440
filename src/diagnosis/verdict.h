// What ails a run, in plain words: from its records and, where there are some, from trials (replays.h). A verdict names a
// cause only where the evidence shows it; everything else is "not established".
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "diagnosis/replays.h"
#include "records/events.h"
#include "records/metrics.h"
#include "records/run_records.h"
#include "records/verdict_parts.h"

namespace evenkeel {

// What a run wrote down about itself.
struct RunRecord {
  std::vector<double> loss, gradient_norm;  // (steps); NaN where a step is not recorded
  int64_t layers = 0, heads = 0;            // L, H; 0: no facts are recorded
  std::vector<int64_t> fact_steps;          // ascending
  std::vector<std::vector<double>> offset;  // (fact_steps, L H)
  std::string offset_is;                    // offset, or largest_lse where only that is recorded
  std::vector<std::vector<double>> leak;    // (steps with leaks, L H): leak over delta, root mean squares
  std::optional<int64_t> not_finite;        // the first step whose recorded loss is not
  std::optional<int64_t> never_finite;      // from this step on no recorded loss is, to the end
  std::optional<Finding> finding;           // what ended it
  std::vector<std::string> mended;          // "step 300: ...": what a guard changed
  std::vector<std::string> notes;           // what of the records could not be read, a sentence each
  bool damaged = false;  // some could not, and not only the last line of a run that is being written
  int64_t warmup = 0;    // steps: the healthy level of a run is known behind them
};
RunRecord run_record(const Metrics& metrics, std::optional<Finding> finding,
                     std::span<const RunEvent> events = {}, int64_t warmup = 0);
// Of a folder. DataError where no record can be read.
RunRecord read_run_record(const std::filesystem::path& run);

// Spread of a step's loss around the median of its neighbours, robustly (from the median of deviations).
double loss_noise(const std::vector<double>& loss);

struct Symptom {
  enum class Kind {
    none,
    offset,  // an offset is beyond the limit of drift (health.h)
    loss,    // the loss has risen, or was not finite
    spikes,  // single steps with a loss far above their neighbours'
  };
  Kind kind = Kind::none;
  int64_t since = 0;               // the step from which it holds; spikes: the first
  int64_t layer = -1, head = -1;   // offset: where it began
  int64_t index = -1;              // layer H + head
  DriftLimit limit;                // offset: from the run's own heads at its end
  double loss = 0, best_loss = 0;  // loss: means at the end and at the best step
  std::vector<int64_t> spikes;     // steps
  std::vector<double> heights;     // (spikes): of the loss above its neighbours'
  std::string words;               // none: what the records cover, and that nothing is wrong in them
  std::string certainty;           // none: how much that says
  // none: what could be judged. Without any of it there is no health either, for want of records.
  bool has_losses = true, has_offsets = true;
  bool is_too_short = false;  // none: the records end before the warm-up does

  bool is_healthy() const { return kind == Kind::none && (has_losses || has_offsets) && !is_too_short; }
};
Symptom find_symptom(const RunRecord& record);
// "Healthy, by its records: ...", or that nothing could be judged, of a symptom of kind none.
std::string sentence_of_none(const Symptom& none);

enum class Cause {
  healthy,
  drift,           // rows of dS leak, and the offset grows ("common_mode_drift" in older records)
  other_rounding,  // FP32 heals it, and the offset plays no part
  learning_rate,   // FP32 fails alike, a slower run does not
  data,            // particular batches
  corruption,  // the record does not follow from the checkpoint: a memory or hardware fault, or edited files
  not_established,
};
inline constexpr std::array<std::string_view, 7> kCauseNames = {
    "healthy", "drift", "other_rounding", "learning_rate", "data", "corruption", "not_established"};
constexpr std::string_view name(Cause cause) { return kCauseNames[static_cast<size_t>(cause)]; }

// Sequences of the steps whose loss jumped that a checkpoint's model, too, finds far harder than any of ordinary steps.
struct BadSequences {
  int64_t looked_at = 0;                   // steps whose loss jumped
  int64_t steps_with = 0;                  // of these, with such a sequence
  int64_t count = 0;                       // of sequences
  int64_t first_token = 0, end_token = 0;  // where in the source they lie
  double loss = 0, ordinary_loss = 0;      // medians
};

// Most of the steps that jump have such a sequence.
inline bool from_data(const BadSequences& bad) { return 2 * bad.steps_with > bad.looked_at; }

// The trials of a verdict, a member for each row of kVerdictParts; one that was not made is nullptr.
struct VerdictTrials {
  const Trial *recorded = nullptr, *control = nullptr;  // as recorded; all in FP32
  // A change that cannot matter (the format of dv), on the recorded plan and on the control: it shows what chance does.
  const Trial *placebo = nullptr, *control_placebo = nullptr;
  const Trial* cured = nullptr;         // the sites in FP32, nothing else changed
  const Trial* alone_guilty = nullptr;  // the sites as recorded, everything else in FP32
  const Trial* zero_sum = nullptr;      // the remedy; also the sham: the same rounding, its rows' sums kept
  // The same on all heads; tried where it does not heal on the guilty ones alone, since others may leak, too.
  const Trial* zero_sum_all = nullptr;
  const Trial *wide_output = nullptr, *consistent = nullptr, *wide_pv = nullptr, *unbiased = nullptr;
  const Trial* slower = nullptr;  // FP32 at a quarter of the learning rate
};
static_assert(
    sizeof(VerdictTrials) == kVerdictPartCount * sizeof(const Trial*),
    "a trial of a verdict needs a row in records/verdict_parts.h, or it is in no record and on no page");
// The member of a row.
const Trial* const& trial_of(const VerdictTrials& trials, VerdictPart part);

// Everything that isolate found.
struct Evidence : VerdictTrials {
  Symptom symptom;
  std::vector<std::string> mended, notes;  // as RunRecord has them
  Window window;
  std::optional<int64_t> not_repeated;  // the first step whose loss is not the recorded one
  double recorded_loss = 0;             // there
  double begin_offset = 0;              // recorded at the window's begin, largest over heads
  // The unchanged replay shows the recorded symptom: the symptom's head is beyond the limit, the loss has risen, a step
  // jumps. Nothing is concluded from a stretch that does not.
  bool shows_symptom = true;
  int64_t missing_checkpoint = -1;          // the step from which a replay would show it; -1: not known
  int64_t earlier_checkpoint = 0;           // the newest checkpoint before it; 0: the beginning
  DriftLimit limit;                         // of the stretch, from its FP32 control
  bool chaotic = false;                     // chance alone may do what FP32 does, or most sites do
  std::vector<const Trial*> more_placebos;  // further harmless changes of the recorded plan
  double loss_tolerance = 0;                // means over a window's last quarter differ by less by chance
  enum class Measure { none, offset, loss } measure = Measure::none;  // in which recorded and control differ
  std::vector<int64_t> layers,
      guilty;               // the smallest set of layers, then of heads (l H + h), whose FP32 heals
  std::vector<Site> sites;  // the smallest set of their sites; none: not found
  std::vector<Site> alone;  // every site that heals by itself
  std::optional<BadSequences> data;
  bool budget_spent = false;

  // log of how many times larger than at the begin; what a healthy head has counts as nothing.
  double growth(const Trial& trial) const;
  // What a trial is judged by: the logarithm of the offset of the symptom's head, where the symptom is an offset (other
  // heads have large offsets without drifting), of the largest otherwise; or the loss.
  double outcome(const Trial& trial) const;
  // The recorded course and its placebos differ by chance alone. A trial heals where its outcome is nearer to the control's
  // than to theirs, and kSureSpreads of their standard deviations below their mean; of offsets also within the limit.
  // REQUIRES: a measure.
  bool heals(const Trial& trial) const { return below_line(trial) > 0; }
  // By so little that a second replay should confirm it.
  bool heals_barely(const Trial& trial) const;
  // Of a harmless change fewer than one in 25 comes so far below the mean of four (Student's t, three degrees of freedom).
  static constexpr double kSureSpreads = 3;

 private:
  struct Level {
    double mean, spread;  // the standard deviation of one course; 0 of one alone
  };
  Level level_of(const std::vector<const Trial*>& courses) const;
  Level bad_level() const;
  double below_line(const Trial& trial) const;  // how far; > 0: heals
};

struct Verdict {
  Cause cause = Cause::not_established;
  std::string words;                  // one or two sentences
  std::vector<std::string> evidence;  // the chain, link by link, with figures
  std::string certainty;              // how sure, and why
  std::string next_command;           // what to type next
};
// run, config: for names, plans and commands.
Verdict judge(const Evidence& evidence, const std::filesystem::path& run, const RunConfig& config);

// "layer 0 head 1", "layer 2 heads 0, 3 and layer 3 head 1"; heads: l H + h, ascending.
std::string heads_in_words(const std::vector<int64_t>& heads, int64_t H);

}  // namespace evenkeel
