#include "training/replay.h"

#include <algorithm>

#include "base/error.h"
#include "base/whole_file.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

// The newest at or before a step.
std::optional<Checkpoint> checkpoint_before(const fs::path& run, int64_t step) {
  std::optional<Checkpoint> newest;
  for (Checkpoint& checkpoint : find_checkpoints(run / "checkpoints"))
    if (checkpoint.step <= step) newest = std::move(checkpoint);
  return newest;
}

// A replay draws its batches as the run did. That the data is still the same is another matter.
void check_batches(const BatchRecord& record, const RunConfig& config, int64_t begin, int64_t end) {
  if (!config.batches.empty()) return;  // which came from a file that the run was given
  const int64_t tokens = TokenSource::open(config.data).size();
  require_data(tokens == record.shape().source_size,
               "{}: expected the {} tokens that the run recorded, found {}", config.data,
               record.shape().source_size, tokens);
  check_drawn(record, config.seed, begin, end);
}

}  // namespace

void branch_run(const fs::path& run, int64_t step, const fs::path& folder, const RunConfig& config) {
  validate(config);
  std::error_code error;
  require_data(!fs::exists(folder, error) || fs::is_empty(folder, error),
               "{}: expected a new or an empty folder for the branch, found files in it", folder.string());
  const std::vector<Checkpoint> checkpoints = find_checkpoints(run / "checkpoints");
  const auto from = std::find_if(checkpoints.begin(), checkpoints.end(),
                                 [&](const Checkpoint& c) { return c.step == step; });
  std::string steps;
  for (const Checkpoint& c : checkpoints) steps += fmt::format("{}{}", steps.empty() ? "" : ", ", c.step);
  require_data(from != checkpoints.end(), "{}: expected a checkpoint of step {}, found {}", run.string(),
               step, steps.empty() ? "none" : "those of " + steps);
  try {
    fs::create_directories(folder / "checkpoints");
    copy_batches(run / "batches.bin", folder / "batches.bin", step);  // its own may be of another seed
    // What it holds of later steps is cut off when the branch is resumed.
    fs::copy_file(record_path(run, RecordFile::metrics), record_path(folder, RecordFile::metrics));
    fs::copy(from->folder, folder / "checkpoints" / from->folder.filename(), fs::copy_options::recursive);
    // Last: a folder without it is no run.
    write_config_of_run(folder, config);
  } catch (const fs::filesystem_error& failure) {
    throw DataError(fmt::format("{}: cannot be made a branch of {}: {}", folder.string(), run.string(),
                                failure.code().message()));
  }
}

Replay::Replay(const fs::path& run, int64_t step, std::optional<Backend> backend,
               const std::function<void(RunConfig&)>& change, std::optional<int64_t> end)
    : scratch_("evenkeel-replay") {
  RunConfig config = config_of_own_run(run);
  const std::optional<Checkpoint> newest = checkpoint_before(run, step);
  const int64_t begin = newest ? newest->step : 0;
  const BatchRecord record(run / "batches.bin");
  require_data(step < record.steps(), "{}: expected a step below {}, which is how far the run came, got {}",
               run.string(), record.steps(), step);
  check_batches(record, config, begin, std::min(end.value_or(record.steps()), record.steps()));
  config.checkpoint_every = config.keep_every = config.validate_every = config.probe_every = 0;
  config.guard = GuardMode::off;
  config.divergence = 0;  // a replay goes where the run went
  if (change) change(config);
  const fs::path& folder = scratch_.path();
  try {
    fs::create_directories(folder / "checkpoints");
    copy_batches(run / "batches.bin", folder / "batches.bin", begin);
    if (newest)
      fs::create_directory_symlink(fs::absolute(newest->folder),
                                   folder / "checkpoints" / newest->folder.filename());
  } catch (const fs::filesystem_error& failure) {
    throw DataError(fmt::format("{}: cannot be made a replay of {}: {}", folder.string(), run.string(),
                                failure.code().message()));
  }
  write_config_of_run(folder, config);
  trainer_ = Trainer::resume(folder, backend);
}

void Replay::run_to(int64_t step, const std::function<void()>& done) {
  while (trainer_->next_step() < step) {
    require_data(!trainer_->done(), "expected a run that goes on to step {}, it ended at step {}{}", step,
                 trainer_->next_step(), trainer_->finding() ? ": " + trainer_->finding()->words : "");
    trainer_->step();
    if (done) done();
  }
}

}  // namespace evenkeel
