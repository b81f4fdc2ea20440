// The guard: watches the cheap probes of a run that trains, and stabilises the heads that drift before the loss moves.
//
// A head is in alarm (HeadDrift of indicators.h, which judges recorded runs by the same) where all of this holds.
//   Its log-sum-exp, which any drift of the offset moves, is half way to the limit of drift (mend_limit of health.h), or
//   on a course that ends in failure (forecast.h: that carries over from size to size).
//   It still rises over the last steps.
//   The rows of its dS leak more than FP32 does (kLeak): drift without a leak is not caused by rounding.
// On alarm (act) just these heads get the remedy from the next step on, as a change of the plan. Where that is too late,
// the run goes back to its last good checkpoint, with the remedy on. It is too late in two cases.
//   At this log-sum-exp, the plan's format has scores in steps larger than all that a softmax can use.
//   A head has the remedy and its offset has doubled since.
// Every event goes into guard.jsonl in the run's folder and, unless it is rolled back, into the step's line of metrics.jsonl.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "diagnosis/drift_guard.h"
#include "diagnosis/probe_recorder.h"
#include "diagnosis/replays.h"
#include "records/events.h"
#include "training/trainer.h"

namespace evenkeel {

class Guard : public StepWatcher {
 public:
  // folder: of the run that goes on at next_step; what it has recorded before is taken up. inner: whoever watches too.
  Guard(const RunConfig& config, const std::filesystem::path& folder, int64_t next_step,
        StepWatcher* inner = nullptr);

  void prepare(int64_t step, StepContext& context) override;
  void see(int64_t step, double loss, Model& model, nlohmann::json& line) override;
  void tell(int64_t step, nlohmann::json& line) override;
  // What the last step called for; taken, it is gone.
  std::optional<GuardEvent> take();

 private:
  void decide(int64_t step, const Model& model);
  // The newest checkpoint at or before a step; -1: none.
  int64_t checkpoint_before(int64_t step) const;
  std::string command_with(const std::string& clauses, int64_t last_good) const;

  const RunConfig config_;
  const std::filesystem::path folder_;
  StepWatcher* const inner_;
  DriftGuard rule_;
  std::optional<GuardEvent> event_;
};

// A run with its probes and, where its configuration asks for one, its guard; `step` does what the guard calls for.
class GuardedRun {
 public:
  GuardedRun(std::filesystem::path folder, std::unique_ptr<Trainer> trainer);
  ~GuardedRun();
  // Not kept across a step: a roll-back makes another.
  Trainer& trainer() { return *trainer_; }
  StepReport step(bool stop_asked = false);
  const std::vector<GuardEvent>& events() const { return events_; }  // since this object was made

 private:
  void watch();

  const std::filesystem::path folder_;
  std::unique_ptr<Trainer> trainer_;
  std::optional<ProbeRecorder> probes_;
  std::optional<Guard> guard_;
  std::vector<GuardEvent> events_;
};

}  // namespace evenkeel
