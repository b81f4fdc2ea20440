// Trials: a stretch of a recorded run again, on its own batches, with another plan or learning rate, and what became of
// it in figures. The run's folder is only read; results may be kept in a file, so that no trial is made twice.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "diagnosis/health.h"
#include "training/replay.h"

namespace evenkeel {

// The result of one step of a replay.
struct TrialStep {
  int64_t step = 0;
  double loss = 0, gradient_norm = 0;
  // (L H) each, or empty: not known.
  std::vector<double> offset, lse, leak_mean, leak_error, leak_rms, delta_rms;
};

// Steps [begin, end) of a run. A trial starts where the newest checkpoint at or before `begin` ends.
struct Window {
  int64_t begin = 0, end = 0;
  friend bool operator==(const Window&, const Window&) = default;
};

struct TrialSetup {
  std::string what;      // in words
  std::string clauses;   // on top of the run's plan from the window's begin on; empty: as recorded
  double lr_factor = 1;  // on the run's learning rate
};

// How a stretch of a run went. Figures "at the end" are means over the window's last quarter: logarithmic ones of
// offsets, log-sum-exps and gradient norms, which grow by factors. Infinite where a run ended in numbers that are not
// finite.
struct Health {
  double offset = 0;                   // largest row mean of the scores over all heads, at the end
  double lse = 0;                      // largest |log-sum-exp|, at the end
  double loss = 0;                     // at the end
  double gradient_norm = 0;            // at the end
  std::vector<double> head_offset;     // (L H): as offset, by head
  std::vector<double> residual_share;  // (L H): root mean squares of residual over delta's, all steps
  std::vector<double>
      residual_bias;  // (L H): share of the residual's squares that its mean over a step's rows makes
  std::vector<double> step_loss;  // (steps), every digit: a run that repeats has the recorded ones
};

struct Trial {
  TrialSetup setup;
  Window window;
  Health health;
  double seconds = 0;
};

// Thrown where another trial would be one too many.
class BudgetSpent : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

nlohmann::json to_json(const Trial& trial);

class Replays {
 public:
  struct Options {
    std::optional<Backend> backend = {};  // none: where the run ran
    int64_t budget = 40;                  // trials, those kept in the file among them
    bool keep = false;                    // results in the run's isolate.json, and those in it are used
    // For runs of another trainer (RunConfig::trainer), which makes the replays itself: the steps of the window with this
    // plan from its begin on. It stops where a loss is not finite.
    std::function<std::vector<TrialStep>(const TrialSetup&, const Window&, const std::string& plan)>
        elsewhere = {};
    std::vector<int64_t> checkpoints = {};  // of such a run: steps at which a replay can start, ascending
    bool exact = true;                      // its replays repeat losses to the bit
    // Behind every step of a trial: which of how many trials it is, and how far that one is.
    std::function<void(const TrialSetup&, int64_t step, const Window&)> progress = {};
  };
  // DataError where the folder is no run, or where its isolate.json is no record of trials.
  Replays(std::filesystem::path run, Options options);

  const std::filesystem::path& run() const { return run_; }
  const RunConfig& config() const { return config_; }  // the recorded run's
  const std::deque<Trial>& trials() const { return trials_; }
  int64_t budget() const { return options_.budget; }
  int64_t fresh_trials() const { return fresh_; }  // made by this object, not read from the file

  // The same setup in the same window: the kept result. BudgetSpent.
  const Trial& trial(const TrialSetup& setup, const Window& window);
  // The plan in force at a step.
  ScopedPlan plan_at(int64_t step) const { return ScopedPlan::parse(config_.plan_at(step)); }
  bool is_elsewhere() const { return static_cast<bool>(options_.elsewhere); }
  bool is_exact() const { return options_.exact; }
  std::vector<int64_t> checkpoints() const;  // steps at which a replay can start besides 0, ascending
  // A replay that stands before `step`, for a look at it; counts as none. REQUIRES: not elsewhere.
  std::unique_ptr<Replay> at(int64_t step) const;

 private:
  void read_file();
  void write_file() const;
  Health run_here(const TrialSetup& setup, const Window& window);
  Health run_elsewhere(const TrialSetup& setup, const Window& window);

  const std::filesystem::path run_;
  const Options options_;
  RunConfig config_;
  std::deque<Trial> trials_;              // a place stays where it is
  std::map<std::string, size_t> places_;  // in trials_, by window, clauses and learning rate
  int64_t fresh_ = 0;
};

}  // namespace evenkeel
