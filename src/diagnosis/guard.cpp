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
    : config_(config),
      folder_(folder),
      inner_(inner),
      rule_(ScopedPlan::parse(config.plan_at(next_step)), config.model.layers, config.model.heads,
            config.model.precision == LinearPrecision::bf16) {
  const bool bf16 = config.model.precision == LinearPrecision::bf16;
  const PrecisionPlan first = ScopedPlan::parse(config.plan_at(next_step)).at(0, 0);
  rule_.set_terms(
      {.begin = config.schedule.warmup,
       .harmful = harmful_offset(static_cast<double>(config.model.head_size()), query_key_bits(first, bf16)),
       .bound = {},
       .last_step = config.schedule.steps});
  std::error_code error;
  if (next_step > 0 && fs::exists(record_path(folder, RecordFile::metrics), error)) {
    const Metrics before = read_metrics(folder, {config.model.layers, config.model.heads});
    const auto of = [&](HeadFact fact, size_t line) {
      const std::span<const double> values = before.of(fact).of_line(line);
      return std::vector<double>(values.begin(), values.end());
    };
    for (size_t line = 0; line < before.steps.size() && before.steps[line] < next_step; ++line) {
      const std::vector<double> lse = of(HeadFact::largest_lse, line);
      // A run that had no guard has no leaks, and log-sum-exps only now and then.
      if (!lse.empty())
        rule_.follow(before.steps[line], lse, of(HeadFact::leak_rms, line), of(HeadFact::delta_rms, line));
      if (const auto loss = before.loss.of_line(line); !loss.empty())
        rule_.see_loss(before.steps[line], loss[0]);
    }
  }
  rule_.forget_remedies();
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
  rule_.follow(step, values_of(model.facts(), HeadFact::largest_lse),
               values_of(model.facts(), HeadFact::leak_rms), values_of(model.facts(), HeadFact::delta_rms));
  rule_.see_loss(step, loss);
  decide(step, model);
  if (event_) line["guard"] = to_json(*event_, config_.model.heads);
}

void Guard::tell(int64_t step, Json& line) {
  if (inner_) inner_->tell(step, line);  // with fewer digits, where both tell
}

int64_t Guard::checkpoint_before(int64_t step) const {
  int64_t newest = -1;
  for (const Checkpoint& c : find_checkpoints(folder_ / "checkpoints"))
    if (c.step <= step) newest = std::max(newest, c.step);
  return newest;
}

std::string Guard::command_with(const std::string& clauses, int64_t last_good) const {
  return train_command(folder_, config_, checkpoint_before(last_good), clauses, "cured");
}

void Guard::decide(int64_t step, const Model& model) {
  DriftGuard::Means means;
  means.act = config_.guard == GuardMode::act;
  means.checkpoint_before = [&](int64_t before) { return checkpoint_before(before); };
  means.more_figures = [&](size_t worst) {
    const HeadFacts& facts = model.facts()[worst];
    return fmt::format(" (z {:+.1f}), ties in {:.1f} % of the rows",
                       facts.residual_error > 0 ? facts.residual_mean / facts.residual_error : 0.0,
                       100.0 * facts.tied_rows);
  };
  std::optional<DriftGuard::Decision> decision = rule_.decide(step, means);
  if (!decision) return;
  GuardEvent& event = decision->event;
  if (!decision->leaking)
    event.next_command = isolate_command(folder_);
  else if (event.kind == GuardEvent::Kind::warning)
    event.next_command = command_with(event.clauses, decision->last_good);
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
