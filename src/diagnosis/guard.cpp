#include "diagnosis/guard.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "diagnosis/next_command.h"
#include "diagnosis/verdict.h"
#include "records/metrics.h"
#include "training/head_facts.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// The figures that the guard follows.
constexpr HeadFact kFollowed[] = {HeadFact::largest_lse, HeadFact::leak_rms, HeadFact::delta_rms};

}  // namespace

Guard::Guard(const RunConfig& config, const fs::path& folder, int64_t next_step, StepWatcher* inner)
    : config_(config), folder_(folder), inner_(inner), plan_(ScopedPlan::parse(config.plan_at(next_step))) {
  const int64_t H = config.model.heads;
  heads_.resize(static_cast<size_t>(config.model.layers * H));
  drift_.resize(heads_.size());
  for (size_t n = 0; n < heads_.size(); ++n) {
    const auto head = static_cast<int64_t>(n);
    heads_[n].remedied =
        plan_.at(static_cast<int>(head / H), static_cast<int>(head % H)).stabiliser == Stabiliser::zero_sum;
  }
  std::error_code error;
  if (next_step > 0 && fs::exists(record_path(folder, RecordFile::metrics), error)) {
    const Metrics before = read_metrics(folder, {config.model.layers, H});
    const auto of = [&](HeadFact fact, size_t line) {
      const std::span<const double> values = before.of(fact).of_line(line);
      return std::vector<double>(values.begin(), values.end());
    };
    for (size_t line = 0; line < before.steps.size() && before.steps[line] < next_step; ++line) {
      const std::vector<double> lse = of(HeadFact::largest_lse, line);
      // A run that had no guard has no leaks, and log-sum-exps only now and then.
      if (!lse.empty())
        follow(before.steps[line], lse, of(HeadFact::leak_rms, line), of(HeadFact::delta_rms, line));
    }
  }
  // A remedy of before is no reason to go back: so a run goes back once a head at most, and not round and round.
  for (Head& head : heads_) head.at_remedy = std::numeric_limits<double>::infinity();
}

void Guard::prepare(int64_t step, StepContext& context) {
  if (inner_) inner_->prepare(step, context);
  context.residual_facts = context.tie_facts = true;
  context.fact_sequences = ProbeRecorder::kFactSequences;
}

void Guard::see(int64_t step, double loss, Model& model, Json& line) {
  if (inner_) inner_->see(step, loss, model, line);
  for (const HeadFact fact : kFollowed)
    if (!line.contains(name(fact)))
      add_fact(line, fact, config_.model.layers, config_.model.heads, values_of(model.facts(), fact),
               /*every_digit=*/true);
  follow(step, values_of(model.facts(), HeadFact::largest_lse), values_of(model.facts(), HeadFact::leak_rms),
         values_of(model.facts(), HeadFact::delta_rms));
  decide(step, model);
  if (event_) line["guard"] = to_json(*event_, config_.model.heads);
}

void Guard::tell(int64_t step, Json& line) {
  if (inner_) inner_->tell(step, line);  // with fewer digits, where both tell
}

void Guard::follow(int64_t step, const std::vector<double>& lse, const std::vector<double>& residual,
                   const std::vector<double>& delta) {
  const bool known = !residual.empty() && !delta.empty();
  for (size_t n = 0; n < heads_.size(); ++n)
    drift_[n].take(step, lse[n], known ? residual[n] : kNotKnown, known ? delta[n] : kNotKnown);
  limit_ = mend_limit(drift_);
  for (size_t n = 0; n < heads_.size(); ++n)
    if (drift_[n].size() <= limit_) heads_[n].last_good = step;
}

double Guard::too_late(const PrecisionPlan& plan, LinearPrecision precision) {
  int bits = kFp32.significand_bits;
  for (const Site site : {Site::q, Site::k, Site::scores, Site::shifted})
    bits = std::min(bits, plan.at(site).format.significand_bits);
  if (precision == LinearPrecision::bf16) bits = std::min(bits, kBf16.significand_bits);
  return kScoreUnit * std::exp2(bits);
}

// The heads that are to be mended, and those that drift without a leak.
struct Guard::Alarms {
  std::vector<int64_t> leaking, others;
  bool late = false;
  std::string why;        // it is too late to mend them as they are
  int64_t last_good = 0;  // the last step at which none of the leaking heads was beyond the limit
};

Guard::Alarms Guard::find_alarms(const Model& model) {
  const int64_t H = config_.model.heads;
  Alarms found;
  found.last_good = std::numeric_limits<int64_t>::max();
  for (size_t n = 0; n < heads_.size(); ++n) {
    Head& head = heads_[n];
    const HeadDrift& drift = drift_[n];
    const auto number = static_cast<int64_t>(n);
    const double useless = too_late(model.plan(number / H, number % H), config_.model.precision);
    const bool grown = head.remedied && drift.log_lse() > head.at_remedy + std::log(2.0);
    if (!drift.drifts(limit_) || head.warned) continue;
    if (head.remedied ? !grown : !drift.alarm(limit_)) {
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
    else if (drift.size() > useless)
      found.late = true, found.why = fmt::format("beyond {:.0f} its scores come in steps of more than {:.0f}",
                                                 useless, kScoreUnit);
  }
  return found;
}

std::string Guard::figures(const std::vector<int64_t>& heads, size_t worst, const Model& model) const {
  const HeadFacts& facts = model.facts()[worst];
  return fmt::format(
      "{}: log-sum-exp {:.0f} and rising, beyond {:.0f}, where the guard acts (half of the limit of drift, "
      "at least "
      "{:.0f}); rows of dS miss their zero sum by {:.1e} of delta (z {:+.1f}), ties in {:.1f} % of the rows",
      heads_in_words(heads, config_.model.heads), drift_[worst].size(), limit_, kLowestDriftLimit,
      drift_[worst].leak(), facts.residual_error > 0 ? facts.residual_mean / facts.residual_error : 0.0,
      100.0 * facts.tied_rows);
}

int64_t Guard::checkpoint_before(int64_t step) const {
  int64_t newest = -1;
  for (const Checkpoint& c : find_checkpoints(folder_ / "checkpoints"))
    if (c.step <= step) newest = std::max(newest, c.step);
  return newest;
}

std::string Guard::command_with(const std::string& clauses, int64_t last_good) const {
  return train_command(folder_, config_, checkpoint_before(last_good), clauses, "mended");
}

void Guard::decide(int64_t step, const Model& model) {
  const int64_t H = config_.model.heads;
  const Alarms alarms = find_alarms(model);
  const bool leaking = !alarms.leaking.empty();
  if (!leaking && alarms.others.empty()) return;
  GuardEvent event;
  event.step = step;
  event.heads = leaking ? alarms.leaking : alarms.others;
  const auto worst = static_cast<size_t>(
      *std::max_element(event.heads.begin(), event.heads.end(), [&](int64_t a, int64_t b) {
        return drift_[static_cast<size_t>(a)].log_lse() < drift_[static_cast<size_t>(b)].log_lse();
      }));
  event.words = figures(event.heads, worst, model);
  if (!leaking) {
    event.words += ": drift without a leak, which no remedy here mends (learning rate?)";
    event.next_command = isolate_command(folder_);
    event_ = event;
    return;
  }
  for (const int64_t head : alarms.leaking)
    event.clauses +=
        fmt::format("{}layer {} head {}: {}", event.clauses.empty() ? "" : "; ", head / H, head % H, kRemedy);
  const int64_t to = alarms.late ? checkpoint_before(alarms.last_good) : -1;
  if (config_.guard != GuardMode::act) {
    event.words += "; would add to the plan: " + event.clauses;
    event.next_command = command_with(event.clauses, alarms.last_good);
  } else if (alarms.late && to >= 0) {
    event.kind = GuardEvent::Kind::roll_back;
    event.to = to;
    event.words +=
        fmt::format("; too late to heal ({}): back to step {}, with {}", alarms.why, to, event.clauses);
  } else if (alarms.late && heads_[worst].remedied) {
    event.words += fmt::format("; {}, and no checkpoint of before is left", alarms.why);
    event.next_command = command_with(event.clauses, alarms.last_good);
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
  event_ = event;
}

std::optional<GuardEvent> Guard::take() { return std::exchange(event_, std::nullopt); }

GuardedRun::GuardedRun(fs::path folder, std::unique_ptr<Trainer> trainer)
    : folder_(std::move(folder)), trainer_(std::move(trainer)) {
  watch();
}

GuardedRun::~GuardedRun() {
  if (trainer_) trainer_->set_watcher(nullptr);
}

void GuardedRun::watch() {
  const RunConfig& config = trainer_->config();
  StepWatcher* watcher = nullptr;
  if (config.probe_every > 0) watcher = &probes_.emplace(config, folder_, trainer_->next_step());
  if (config.guard != GuardMode::off)
    watcher = &guard_.emplace(config, folder_, trainer_->next_step(), watcher);
  trainer_->set_watcher(watcher);
}

StepReport GuardedRun::step(bool stop_asked) {
  const StepReport report = trainer_->step(stop_asked);
  if (!guard_) return report;
  const std::optional<GuardEvent> event = guard_->take();
  if (!event) return report;
  events_.push_back(*event);
  append_guard_event(folder_, *event, trainer_->config().model.heads);
  if (event->kind == GuardEvent::Kind::remedy && !trainer_->done()) trainer_->change_plan(event->clauses);
  if (event->kind == GuardEvent::Kind::roll_back) {
    const Backend backend = trainer_->config().backend;
    trainer_->set_watcher(nullptr);
    trainer_.reset();  // gives up the folder
    Trainer::roll_back(folder_, event->to, event->clauses);
    trainer_ = Trainer::resume(folder_, backend);
    watch();
  }
  return report;
}

}  // namespace evenkeel
