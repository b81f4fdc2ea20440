// A run again, from one of its checkpoints. A replay is a run of its own, in a temporary folder, and
// gives the same bits. A branch is a run that stays, with a change from there on. The original's folder is only read.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "base/whole_file.h"
#include "training/trainer.h"

namespace evenkeel {

// Makes `folder`, which must be new or empty, a run that stands where `run` stood before `step`. It has the records of
// the steps before, and `config` for those to come. Trainer::resume continues it. DataError where `run` has no
// checkpoint of that very step.
void branch_run(const std::filesystem::path& run, int64_t step, const std::filesystem::path& folder,
                const RunConfig& config);

class Replay {
 public:
  // Stands before a step at or before `step`: where the newest checkpoint that is early enough ends, or at the
  // beginning. `change` may alter the run's configuration (its plan, say). DataError where the folder is no run, where
  // the run never came to that step, or where its data no longer gives the batches that it recorded for the steps before
  // `end` (by default: for all of them).
  Replay(const std::filesystem::path& run, int64_t step, std::optional<Backend> backend = {},
         const std::function<void(RunConfig&)>& change = {}, std::optional<int64_t> end = {});
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  Trainer& trainer() { return *trainer_; }
  // Runs every step before `step`; `done` is called behind each. DataError where the run ends before.
  void run_to(int64_t step, const std::function<void()>& done = {});

 private:
  ScratchFolder scratch_;  // outlives the trainer, which writes there
  std::unique_ptr<Trainer> trainer_;
};

}  // namespace evenkeel
