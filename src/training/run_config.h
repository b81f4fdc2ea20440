// Everything needed to repeat a training run: config.toml.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/toml.h"
#include "model/model.h"
#include "training/backend.h"
#include "training/optimizer.h"
#include "training/schedule.h"

namespace evenkeel {

// From `step` on, these clauses hold on top of what held before: "layer 1: stabiliser=zero_sum".
struct PlanChange {
  int64_t step;
  std::string clauses;
  friend bool operator==(const PlanChange&, const PlanChange&) = default;
};

// What watches a run for drift (diagnosis/guard.h): nothing; to tell; to tell and to act.
enum class GuardMode { off, warn, act };
inline constexpr std::string_view kGuardModeNames[] = {"off", "warn", "act"};

struct RunConfig {
  ModelConfig model;
  std::string
      weights;       // a folder of transformers whose weights the run starts with; empty: drawn by the seed
  std::string data;  // what TokenSource::open takes
  std::string
      data_digest;  // of its tokens: others are refused. In a run's folder: of those it was started with
  std::string validation;         // the same; empty: the validation files beside the data, if there are some
  std::string validation_digest;  // of its tokens, where the run validates
  std::string batches;     // another run's batches.bin: the same batches again; empty: drawn by the seed
  int64_t sequences = 16;  // a step, each of model.context tokens
  int64_t accumulate =
      1;  // parts in which a step is computed, by all ranks together; sequences is a multiple of it
  uint64_t seed = 1;  // of the initial weights and of the batches
  OptimizerConfig optimizer;
  Schedule schedule{.steps = 1000};                    // its `steps` are the run's
  std::string plan = "flash2,stabiliser=wide_output";  // ScopedPlan::parse
  std::vector<PlanChange> changes;                     // steps ascending
  // Steps over which a head's keel goes from what it was (0 at the start) to what the plan says, in a straight line;
  // 0: at once.
  int64_t keel_ramp = 0;
  int64_t checkpoint_every = 500;  // steps; 0: only at the end
  int64_t checkpoints_kept = 3;    // the newest so many; the prehistory of a spike is in them
  int64_t keep_every = 0;          // so many steps apart, checkpoints are written that stay for good; 0: none
  int64_t validate_every = 0, validation_batches = 8;  // 0: never
  int64_t facts_every = 10;                            // scores, log-sum-exp and row means by head; 0: never
  // Steps between full sets of probes (diagnosis/probes.h); the cheap ones are then recorded every step. 0: none.
  int64_t probe_every = 0;
  GuardMode guard = GuardMode::off;
  Backend backend = Backend::automatic;  // in a run's folder: the one that it runs on
  std::string
      trainer;  // who trains, where it is another program ("pytorch"): its own trainer replays such a run
  bool shard_optimizer = false;  // each rank holds its slice of the states alone (ZeRO-1)
  double divergence = 3;         // a loss so far above its best (means of 20 steps) ends the run; 0: never

  // The plan of a step: `plan`, the clauses of every change up to it, and those of a keel on its way.
  std::string plan_at(int64_t step) const;
};

// std::invalid_argument: the key, what was expected, what was found.
void validate(const RunConfig& config);

// One key of config.toml, as the command line and --help present it. walk() in run_config.cpp is the list.
struct Setting {
  std::string key;          // "schedule.lr"
  std::string option;       // "--lr"; empty: reached by its key alone
  std::string placeholder;  // of the option's value; empty: the option alone means true
  std::string alone;        // what the option means without a value; empty: it needs one
  std::string help;
  std::string expected;    // "a number"
  std::string standard;    // its default, as text
  bool repeats = false;    // each value is added to those before
  bool resumable = false;  // may differ where a run is resumed
};
const std::vector<Setting>& run_settings();  // in the order of config.toml

// Sets one key to a value as a person types it: "1e-3", "muon", "true"; text may be in quotes. The value is never read
// as TOML, so it cannot change another key. std::invalid_argument names the key, what was expected and what was found.
// An empty value and an unknown key are errors.
void set_run_setting(RunConfig& config, std::string_view key, std::string_view value);

// Sets what the table has and leaves the rest as it is; [model] preset = "nano" first. DataError on a value of
// another type and on unknown keys, with the place in the file.
void read_run_config(const TomlTable& table, RunConfig& config);
void read_run_config(const std::filesystem::path& file, RunConfig& config);
// All of it; reads back to the same.
TomlTable to_toml_table(const RunConfig& config);

// A run's own: config.toml in its folder. DataError where there is none that can be read.
RunConfig config_of_run(const std::filesystem::path& folder);
// The same of a run that our trainer can go on with or replay: DataError where another one recorded it, or where it is not valid.
RunConfig config_of_own_run(const std::filesystem::path& folder);
void write_config_of_run(const std::filesystem::path& folder, const RunConfig& config);

}  // namespace evenkeel
