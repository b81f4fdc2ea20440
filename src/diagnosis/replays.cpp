#include "diagnosis/replays.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "records/record_json.h"

namespace evenkeel {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// That a logarithm is taken of: nothing is told by an offset below it.
constexpr double kSmallest = 1e-6;

// Gathers what a trial's steps tell. (L H) each.
class HealthWatcher : public StepWatcher {
 public:
  HealthWatcher(const Window& window, int64_t heads)
      : window_(window),
        log_offset_(static_cast<size_t>(heads)),
        residual_(log_offset_),
        delta_(log_offset_),
        mean_(log_offset_) {}

  void prepare(int64_t, StepContext& context) override {
    context.score_facts = context.residual_facts = true;
    context.fact_sequences = 1;
  }
  void see(int64_t step, double loss, Model& model, Json&) override {
    const std::vector<HeadFacts>& facts = model.facts();
    for (size_t n = 0; n < facts.size(); ++n) {
      const HeadFacts& f = facts[n];
      residual_[n] += f.residual_rms * f.residual_rms;
      delta_[n] += f.delta_rms * f.delta_rms;
      // The square of a mean is too large by its variance.
      mean_[n] += f.residual_mean * f.residual_mean - f.residual_error * f.residual_error;
    }
    step_loss_.push_back(loss);
    if (!late(step)) return;
    double offset = kSmallest, lse = kSmallest;
    for (size_t n = 0; n < facts.size(); ++n) {
      const double of_head = size_of(facts[n].largest_row_mean);
      log_offset_[n] += std::log(std::max(of_head, kSmallest));
      offset = std::max(offset, of_head);
      lse = std::max(lse, size_of(facts[n].largest_lse));
    }
    worst_offset_ += std::log(offset);
    worst_lse_ += std::log(lse);
    loss_ += loss;
    ++late_steps_;
  }
  void see_norm(int64_t step, double norm) {
    if (late(step)) log_norm_ += std::log(std::max(norm, kSmallest));
  }

  // whole: the window was run to its end.
  Health health(bool whole) const {
    Health h;
    h.step_loss = step_loss_;
    const auto share = [](double a, double b) { return b > 0 ? a / b : 0.0; };
    for (size_t n = 0; n < log_offset_.size(); ++n) {
      h.head_offset.push_back(whole ? std::exp(log_offset_[n] / late_steps_) : kInfinite);
      h.residual_share.push_back(std::sqrt(share(residual_[n], delta_[n])));
      h.residual_bias.push_back(std::clamp(share(mean_[n], residual_[n]), 0.0, 1.0));
    }
    h.offset = h.lse = h.loss = h.gradient_norm = kInfinite;
    if (!whole) return h;
    h.offset = std::exp(worst_offset_ / late_steps_);
    h.lse = std::exp(worst_lse_ / late_steps_);
    h.loss = loss_ / late_steps_;
    h.gradient_norm = std::exp(log_norm_ / late_steps_);
    return h;
  }

 private:
  static double size_of(float x) { return std::isnan(x) ? kInfinite : std::fabs(double{x}); }
  bool late(int64_t step) const {
    return step >= window_.end - std::max<int64_t>(1, (window_.end - window_.begin) / 4);
  }

  const Window window_;
  std::vector<double> log_offset_, residual_, delta_, mean_, step_loss_;
  double worst_offset_ = 0, worst_lse_ = 0, loss_ = 0, log_norm_ = 0, late_steps_ = 0;
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

const Trial& Replays::trial(const TrialSetup& setup, const Window& window) {
  const std::string key = key_of(setup, window);
  if (const auto found = places_.find(key); found != places_.end()) return trials_[found->second];
  require(window.begin >= 0 && window.begin < window.end,
          "[replays] expected a window of one step or more, got steps {} to {}", window.begin, window.end);
  if (static_cast<int64_t>(trials_.size()) >= options_.budget)
    throw BudgetSpent(fmt::format("{} replays are spent", options_.budget));
  const auto began = std::chrono::steady_clock::now();
  Replay replay(run_, window.begin, options_.backend, [&](RunConfig& config) {
    add_clauses(config, setup.clauses, window.begin);
    config.schedule.peak *= setup.lr_factor;
    config.schedule.floor *= setup.lr_factor;
    config.facts_every = 0;
  });
  Trainer& trainer = replay.trainer();
  replay.run_to(window.begin);
  HealthWatcher watcher(window, config_.model.layers * config_.model.heads);
  {
    const ScopedWatcher watched(trainer, watcher);
    while (trainer.next_step() < window.end && !trainer.done()) {
      const StepReport report = trainer.step();
      watcher.see_norm(report.step, report.gradient_norm);
      if (options_.progress) options_.progress(setup, report.step, window);
    }
  }
  const bool whole = trainer.next_step() >= window.end && !trainer.finding();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  places_[key] = trials_.size();
  trials_.push_back({setup, window, watcher.health(whole), seconds});
  ++fresh_;
  write_file();
  return trials_.back();
}

}  // namespace evenkeel
