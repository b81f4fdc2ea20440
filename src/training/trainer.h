// A training run and its folder:
//   config.toml                  everything needed to repeat it
//   metrics.jsonl                one object a step
//   events.out.tfevents.*        the same for TensorBoard
//   batches.bin                  where every batch came from
//   checkpoints/step-N/          a ring of recent ones, and every keep_every-th
//   findings.json                what ended the run before its time
// Whatever kills the process loses at most the steps since the last checkpoint; going on from there gives the same bits
// as a run that was never stopped.
//
// Several ranks (ranks.h) train as one. A step is computed in `accumulate` parts, and each rank has an equal share of
// them. Their gradients are added by a tree that halves the parts again and again. So 1, 2, 4, ... ranks give the
// same bits, and a run can continue with any of these numbers. Rank 0 alone writes the folder; the others need not see it.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/tensorboard.h"
#include "base/threads.h"
#include "records/events.h"
#include "records/metrics.h"
#include "training/batch_record.h"
#include "training/checkpoint.h"
#include "training/ranks.h"
#include "training/row_reader.h"
#include "training/run_config.h"
#include "training/token_file.h"

namespace evenkeel {

struct StepReport {
  int64_t step = 0;
  double loss = 0, gradient_norm = 0, lr = 0;
  double seconds = 0;
  bool applied = true;  // false: the gradient was not finite
  bool stop = false;    // a rank was asked to stop
  std::optional<double> validation_loss;
};

// Watches the loss: means over a window of steps, against the best of them so far.
class DivergenceWatch {
 public:
  static constexpr size_t kWindow = 20;
  explicit DivergenceWatch(double rise) : rise_(rise) {}
  // The next step's loss; a finding where the run has gone wrong.
  std::optional<Finding> see(int64_t step, double loss);

 private:
  double rise_, best_ = 0;
  std::vector<double> window_;  // the last kWindow losses, a ring
  size_t seen_ = 0;
};

// Whoever watches a run from within. The trainer knows no more of it than this.
class StepWatcher {
 public:
  virtual ~StepWatcher() = default;
  // Before a step: what the model shall tell besides.
  virtual void prepare(int64_t step, StepContext& context) = 0;
  // On rank 0, between the gradients and the update, so that weights, facts and captures belong to one another. What is
  // added to `line` becomes part of the step's line in metrics.jsonl.
  virtual void see(int64_t step, double loss, Model& model, nlohmann::json& line) = 0;
  // The same line, later and perhaps on another thread, before the next step is seen: what costs time and needs no model.
  virtual void tell(int64_t, nlohmann::json&) {}
};

class Trainer {
 public:
  // A new run in a folder that is not there or is empty; DataError where there is a run. Fewer parts than ranks
  // become as many. Without ranks: alone.
  static std::unique_ptr<Trainer> start(const std::filesystem::path& folder, const RunConfig& config,
                                        std::shared_ptr<Ranks> ranks = nullptr);
  // Continues from the newest checkpoint (from the beginning, if there is none) with the folder's own configuration.
  // Another backend gives other bits, so it must be asked for. The folder keeps it from then on. `steps` is another length
  // of the run, likewise kept. Throws std::invalid_argument where fewer are asked for than are done, or where a
  // step that is done would have had another learning rate (replays of it would give other bits).
  static std::unique_ptr<Trainer> resume(const std::filesystem::path& folder,
                                         std::optional<Backend> backend = {},
                                         std::shared_ptr<Ranks> ranks = nullptr,
                                         std::optional<int64_t> steps = {});
  ~Trainer();

  const RunConfig& config() const { return config_; }
  Model& model() { return *model_; }
  const std::string& backend_why() const { return backend_why_; }  // why config().backend is what it is
  int64_t next_step() const { return next_step_; }
  bool done() const { return finding_ || next_step_ >= config_.schedule.steps; }
  const std::optional<Finding>& finding() const { return finding_; }
  const std::string& way_of_sums() const { return way_of_sums_; }  // between ranks, in words
  // For the user who resumed the run, once: what could not be verified.
  const std::vector<std::string>& notes() const { return notes_; }

  // From the next step on; nullptr: nobody. The watcher outlives the trainer or is taken away before.
  void set_watcher(StepWatcher* watcher);

  // These clauses on top of the plan from the next step on. Part of config.toml when this returns, so that whoever resumes
  // or replays the run repeats it. Alone only: other ranks would not know.
  void change_plan(const std::string& clauses);
  // Makes a run stand before `step` again, from where it continues with `clauses` on top of its plan: later checkpoints are
  // removed, records are cut off when it is resumed. DataError where there is no checkpoint of that step; REQUIRES: no
  // trainer has the folder.
  static void roll_back(const std::filesystem::path& folder, int64_t step, const std::string& clauses);

  // One step: batch, gradients, update, records; a checkpoint where one is due. The report's `stop` is true on all
  // ranks where one of them was asked. Its line is written while the next step is computed. It is there before that one
  // is seen, before a checkpoint, and when the run is over. Where it cannot be written, the next step throws.
  StepReport step(bool stop_asked = false);
  void save();  // saves a checkpoint of the current step unless one exists

 private:
  Trainer(const std::filesystem::path& folder, const RunConfig& config, std::string backend_why, bool fresh,
          std::shared_ptr<Ranks> ranks);
  void follow_plan();
  std::vector<int64_t> offsets_of(int64_t step) const;
  FloatMemory& memory() { return device_memory_ ? *device_memory_ : host_memory(); }
  std::string description() const;
  void check_data(bool fresh);
  // The same for one source, by the setting that has its digest.
  void check_tokens(bool fresh, const TokenSource& tokens, const std::string& path, const char* setting,
                    std::string& digest);
  void go_on();
  void check_batches(const BatchShape& shape) const;
  TrainingState collect_state();
  void compute_gradients(const std::vector<int64_t>& offsets, const StepContext& context, StepReport& report);
  void add_parts(const std::vector<int64_t>& offsets, const StepContext& context, int64_t first,
                 int64_t count, std::vector<double>& told);
  void read_ahead(const std::vector<int64_t>& offsets, int64_t part);
  double validation_loss();
  // line: what the watcher had to say; facts: empty where scores were not asked for.
  void record(const StepReport& report, const std::vector<HeadFacts>& facts, nlohmann::json line);

  const std::shared_ptr<Ranks> ranks_;
  const std::filesystem::path folder_;
  RunConfig config_;  // change_plan adds to it, nothing else changes
  const std::string backend_why_;
  std::string way_of_sums_ = "through the host";
  std::vector<std::string> notes_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  TokenSource tokens_;
  RowReader reader_;  // of tokens_
  std::optional<TokenSource> validation_;
  std::optional<BatchRecord> given_batches_;
  DivergenceWatch watch_;
  int64_t next_step_ = 0, saved_step_ = -1;
  std::string plan_;  // in force
  bool backend_recorded_ = false;
  std::optional<Finding> finding_;
  std::unique_ptr<FloatMemory> device_memory_;  // where the model's flat buffers lie; none: on the host
  std::vector<std::shared_ptr<float>>
      waiting_;  // sums of parts, one for each level of the tree: (table.size())
  // Rank 0's alone.
  uint64_t kept_metrics_ = 0;  // bytes, where a run goes on
  StepWatcher* watcher_ = nullptr;
  std::unique_ptr<MetricsWriter> metrics_;
  std::unique_ptr<TensorboardWriter> events_;
  std::unique_ptr<BatchRecorder> batches_;
  Background recording_;  // uses metrics_, events_ and watcher_
};

// A watcher for as long as this lives, for one that does not outlive its trainer: its last line may still be on its way.
class ScopedWatcher {
 public:
  ScopedWatcher(Trainer& trainer, StepWatcher& watcher) : trainer_(trainer) { trainer.set_watcher(&watcher); }
  ~ScopedWatcher() { trainer_.set_watcher(nullptr); }
  ScopedWatcher(const ScopedWatcher&) = delete;
  ScopedWatcher& operator=(const ScopedWatcher&) = delete;

 private:
  Trainer& trainer_;
};

}  // namespace evenkeel
