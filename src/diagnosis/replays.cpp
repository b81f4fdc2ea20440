#include "diagnosis/replays.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "diagnosis/next_command.h"
#include "records/record_json.h"
#include "training/head_facts.h"

namespace evenkeel {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// The least offset that a logarithm is taken of: smaller ones carry no information.
constexpr double kSmallest = 1e-6;

// Gathers the results of a trial's steps. (L H) each.
class HealthFigures {
 public:
  HealthFigures(const Window& window, int64_t heads)
      : window_(window),
        log_offset_(static_cast<size_t>(heads)),
        residual_(log_offset_),
        delta_(log_offset_),
        mean_(log_offset_) {}

  void take(const TrialStep& s) {
    for (size_t n = 0; n < s.leak_rms.size(); ++n) {
      residual_[n] += s.leak_rms[n] * s.leak_rms[n];
      delta_[n] += s.delta_rms[n] * s.delta_rms[n];
      // The square of a mean is too large by its variance.
      mean_[n] += s.leak_mean[n] * s.leak_mean[n] - s.leak_error[n] * s.leak_error[n];
    }
    step_loss_.push_back(s.loss);
    if (!late(s.step)) return;
    loss_ += s.loss;
    ++late_steps_;
    if (s.offset.empty()) return;
    double offset = kSmallest, lse = kSmallest;
    for (size_t n = 0; n < s.offset.size(); ++n) {
      const double of_head = size_of(s.offset[n]);
      log_offset_[n] += std::log(std::max(of_head, kSmallest));
      offset = std::max(offset, of_head);
      lse = std::max(lse, size_of(s.lse[n]));
    }
    worst_offset_ += std::log(offset);
    worst_lse_ += std::log(lse);
    ++late_facts_;
  }
  void take_norm(int64_t step, double norm) {
    if (late(step)) log_norm_ += std::log(std::max(norm, kSmallest));
  }
  bool has_late_facts() const { return late_facts_ > 0; }

  // whole: the window was run to its end.
  Health health(bool whole) const {
    Health h;
    h.step_loss = step_loss_;
    const auto share = [](double a, double b) { return b > 0 ? a / b : 0.0; };
    for (size_t n = 0; n < log_offset_.size(); ++n) {
      h.head_offset.push_back(whole ? std::exp(log_offset_[n] / late_facts_) : kInfinite);
      h.residual_share.push_back(std::sqrt(share(residual_[n], delta_[n])));
      h.residual_bias.push_back(std::clamp(share(mean_[n], residual_[n]), 0.0, 1.0));
    }
    h.offset = h.lse = h.loss = h.gradient_norm = kInfinite;
    if (!whole) return h;
    h.offset = std::exp(worst_offset_ / late_facts_);
    h.lse = std::exp(worst_lse_ / late_facts_);
    h.loss = loss_ / late_steps_;
    h.gradient_norm = std::exp(log_norm_ / late_steps_);
    return h;
  }

 private:
  static double size_of(double x) { return std::isnan(x) ? kInfinite : std::fabs(x); }
  bool late(int64_t step) const {
    return step >= window_.end - std::max<int64_t>(1, (window_.end - window_.begin) / 4);
  }

  const Window window_;
  std::vector<double> log_offset_, residual_, delta_, mean_, step_loss_;
  double worst_offset_ = 0, worst_lse_ = 0, loss_ = 0, log_norm_ = 0, late_steps_ = 0, late_facts_ = 0;
};

// The same from our own trainer.
class HealthWatcher : public StepWatcher {
 public:
  explicit HealthWatcher(HealthFigures& figures) : figures_(figures) {}

  void prepare(int64_t, StepContext& context) override {
    context.score_facts = context.residual_facts = true;
    context.fact_sequences = 1;
  }
  void see(int64_t step, double loss, Model& model, Json&) override {
    const auto of = [&](HeadFact fact) { return values_of(model.facts(), fact); };
    figures_.take({step, loss, 0, of(HeadFact::offset), of(HeadFact::largest_lse), of(HeadFact::leak_mean),
                   of(HeadFact::leak_error), of(HeadFact::leak_rms), of(HeadFact::delta_rms)});
  }

 private:
  HealthFigures& figures_;
};

// The trial's clauses on top of everything that the run's plan becomes within the window.
void add_clauses(RunConfig& config, const std::string& clauses, int64_t begin) {
  if (clauses.empty()) return;
  for (PlanChange& change : config.changes)
    if (change.step > begin) change.clauses += "; " + clauses;
  const auto place = std::find_if(config.changes.begin(), config.changes.end(),
                                  [&](const PlanChange& change) { return change.step > begin; });
  config.changes.insert(place, {begin, clauses});
}

std::string key_of(const TrialSetup& setup, const Window& window) {
  return fmt::format("{} {} {} {}", window.begin, window.end, setup.lr_factor, setup.clauses);
}

// What must be alike for kept results to hold.
std::string identity_of(const RunConfig& config) {
  RunConfig copy = config;
  copy.schedule.steps = 0;  // a run that was given more steps has the same past
  return to_toml(to_toml_table(copy));
}

}  // namespace

// Numbers that are not finite get their words where the file is written.
Json to_json(const Trial& t) {
  const Health& h = t.health;
  return {{"what", t.setup.what},
          {"clauses", t.setup.clauses},
          {"lr_factor", t.setup.lr_factor},
          {"begin", t.window.begin},
          {"end", t.window.end},
          {"seconds", t.seconds},
          {"offset", h.offset},
          {"lse", h.lse},
          {"loss", h.loss},
          {"gradient_norm", h.gradient_norm},
          {"head_offset", h.head_offset},
          {"leak_size", h.residual_share},
          {"leak_bias", h.residual_bias},
          {"step_loss", h.step_loss}};
}

namespace {

// std::invalid_argument where a field is not there.
Trial trial_from(const RecordObject& record) {
  const auto number = [&](const char* name) {
    const std::optional<double> found = record.number(name);
    if (!found) throw std::invalid_argument(fmt::format("expected a number {}", name));
    return *found;
  };
  const auto step = [&](const char* name) {
    const std::optional<int64_t> found = record.step(name);
    if (!found) throw std::invalid_argument(fmt::format("expected a step {}", name));
    return *found;
  };
  Trial t;
  t.setup = {record.text("what"), record.text("clauses"), number("lr_factor")};
  t.window = {step("begin"), step("end")};
  t.seconds = number("seconds");
  Health& h = t.health;
  h.offset = number("offset");
  h.lse = number("lse");
  h.loss = number("loss");
  h.gradient_norm = number("gradient_norm");
  h.head_offset = record.numbers("head_offset");
  h.residual_share = record.numbers("leak_size");
  h.residual_bias = record.numbers("leak_bias");
  h.step_loss = record.numbers("step_loss");
  return t;
}

}  // namespace

Replays::Replays(fs::path run, Options options)
    : run_(std::move(run)), options_(std::move(options)), config_(config_of_run(run_)) {
  read_file();
}

void Replays::read_file() {
  if (!options_.keep) return;
  constexpr size_t kLargest = 1 << 28;  // bytes
  const std::string file = record_path(run_, RecordFile::isolate).string();
  try {
    const std::optional<Json> json = read_json_record(run_, RecordFile::isolate, kLargest);
    if (!json) return;
    const RecordObject record(*json, RecordFile::isolate);
    if (!record.number("schema") || !record.find("config") || !record.find("trials"))
      throw std::invalid_argument("expected schema, config and trials");
    // Another plan or another backend since: those trials tell nothing of this run.
    if (record.number("schema") != kRecordSchema || record.text("config") != identity_of(config_)) return;
    for (const RecordObject& entry : record.objects("trials")) {
      Trial trial = trial_from(entry);
      const auto heads = static_cast<size_t>(config_.model.layers * config_.model.heads);
      if (trial.health.head_offset.size() != heads || trial.health.residual_share.size() != heads ||
          trial.health.residual_bias.size() != heads)
        throw std::invalid_argument(fmt::format("expected figures of {} heads", heads));
      places_[key_of(trial.setup, trial.window)] = trials_.size();
      trials_.push_back(std::move(trial));
    }
  } catch (const std::exception& fault) {
    throw DataError(
        fmt::format("{}: expected a record of trials, found something else ({}); take it away to begin anew",
                    file, fault.what()));
  }
}

void Replays::write_file() const {
  if (!options_.keep) return;
  Json trials = Json::array();
  for (const Trial& trial : trials_) trials.push_back(to_json(trial));
  write_json_record(run_, RecordFile::isolate,
                    {{"schema", kRecordSchema}, {"config", identity_of(config_)}, {"trials", trials}});
}

std::unique_ptr<Replay> Replays::at(int64_t step) const {
  auto replay = std::make_unique<Replay>(run_, step, options_.backend);
  replay->run_to(step);
  return replay;
}

std::vector<int64_t> Replays::checkpoints() const {
  if (is_elsewhere()) return options_.checkpoints;
  std::vector<int64_t> steps;
  for (const Checkpoint& c : find_checkpoints(run_ / "checkpoints")) steps.push_back(c.step);
  return steps;
}

Health Replays::run_here(const TrialSetup& setup, const Window& window) {
  require_data(config_.trainer.empty(),
               "{}: expected a run of evenkeel's own trainer, found one of {}, which alone can replay it: "
               "{}",
               run_.string(), config_.trainer, isolate_command(run_, config_.trainer));
  const auto change = [&](RunConfig& config) {
    add_clauses(config, setup.clauses, window.begin);
    config.schedule.peak *= setup.lr_factor;
    config.schedule.floor *= setup.lr_factor;
    config.facts_every = 0;
  };
  Replay replay(run_, window.begin, options_.backend, change, window.end);
  Trainer& trainer = replay.trainer();
  replay.run_to(window.begin);
  HealthFigures figures(window, config_.model.layers * config_.model.heads);
  HealthWatcher watcher(figures);
  {
    const ScopedWatcher watched(trainer, watcher);
    while (trainer.next_step() < window.end && !trainer.done()) {
      const StepReport report = trainer.step();
      figures.take_norm(report.step, report.gradient_norm);
      if (options_.progress) options_.progress(setup, report.step, window);
    }
  }
  return figures.health(trainer.next_step() >= window.end && !trainer.finding());
}

Health Replays::run_elsewhere(const TrialSetup& setup, const Window& window) {
  std::string plan = config_.plan_at(window.begin);
  if (!setup.clauses.empty()) plan += "; " + setup.clauses;
  HealthFigures figures(window, config_.model.layers * config_.model.heads);
  int64_t next = window.begin;
  bool finite = true;
  for (const TrialStep& step : options_.elsewhere(setup, window, plan)) {
    require_data(step.step == next, "expected step {} of a replay, found {}", next, step.step);
    ++next;
    finite &= std::isfinite(step.loss);
    figures.take(step);
    figures.take_norm(step.step, step.gradient_norm);
    if (options_.progress) options_.progress(setup, step.step, window);
  }
  const bool whole = finite && next == window.end;
  require_data(!finite || next == window.end, "expected a replay to step {}, it ended before step {}",
               window.end, next);
  require_data(!whole || figures.has_late_facts(),
               "expected offsets of every head in the last quarter of steps {} to {}, found none",
               window.begin, window.end);
  return figures.health(whole);
}

const Trial& Replays::trial(const TrialSetup& setup, const Window& window) {
  const std::string key = key_of(setup, window);
  if (const auto found = places_.find(key); found != places_.end()) return trials_[found->second];
  require(window.begin >= 0 && window.begin < window.end,
          "[replays] expected a window of one step or more, got steps {} to {}", window.begin, window.end);
  if (static_cast<int64_t>(trials_.size()) >= options_.budget)
    throw BudgetSpent(fmt::format("{} replays are spent", options_.budget));
  const auto began = std::chrono::steady_clock::now();
  Health health = is_elsewhere() ? run_elsewhere(setup, window) : run_here(setup, window);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  places_[key] = trials_.size();
  trials_.push_back({setup, window, std::move(health), seconds});
  ++fresh_;
  write_file();
  return trials_.back();
}

}  // namespace evenkeel
