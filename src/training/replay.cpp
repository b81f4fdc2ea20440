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

// Batches follow from the seed (or from a file that the run was given), so a replay draws them as the run did. A record of
// others is damaged, or of other settings. That the data is still the same is another matter. begin: where the replay starts;
// before, a branch has the batches of the run that it came from.
void check_batches(const fs::path& run, const RunConfig& config, int64_t begin, int64_t step) {
  const BatchRecord record(run / "batches.bin");
  require_data(step < record.steps(), "{}: expected a step below {}, which is how far the run came, got {}",
               run.string(), record.steps(), step);
  if (!config.batches.empty()) return;
  const int64_t tokens = TokenSource::open(config.data).size();
  require_data(tokens == record.shape().source_size,
               "{}: expected the {} tokens that the run recorded, found {}", config.data,
               record.shape().source_size, tokens);
  const BatchShape& shape = record.shape();
  std::vector<int64_t> drawn(static_cast<size_t>(shape.sequences));
  for (int64_t n = begin; n < record.steps(); ++n) {
    batch_offsets(config.seed, n, shape.sequences, shape.tokens, shape.source_size, drawn.data());
    const std::vector<int64_t> recorded = record.offsets(n);
    const auto [expected, found] = std::mismatch(drawn.begin(), drawn.end(), recorded.begin());
    if (expected != drawn.end())
      throw DataError(
          fmt::format("{}: step {}: expected a sequence from token {}, as data.seed = {} of its config.toml "
                      "draws it, found "
                      "one from {}: one of the two files was damaged or changed after the step",
                      (run / "batches.bin").string(), n, *expected, config.seed, *found));
  }
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
    // What they hold of later steps is cut off when the branch is resumed.
    fs::copy_file(run / "batches.bin", folder / "batches.bin");
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
               const std::function<void(RunConfig&)>& change)
    : scratch_("evenkeel-replay") {
  RunConfig config = config_of_own_run(run);
  const std::optional<Checkpoint> newest = checkpoint_before(run, step);
  check_batches(run, config, newest ? newest->step : 0, step);
  config.checkpoint_every = config.keep_every = config.validate_every = config.probe_every = 0;
  config.guard = GuardMode::off;
  config.divergence = 0;  // a replay goes where the run went
  if (change) change(config);
  const fs::path& folder = scratch_.path();
  try {
    fs::create_directories(folder / "checkpoints");
    fs::copy_file(run / "batches.bin",
                  folder / "batches.bin");  // its steps before the checkpoint are needed
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
