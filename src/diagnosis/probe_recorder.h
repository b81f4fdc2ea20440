// Probes while a run trains: into the lines of its metrics.jsonl, and out of them again.
//   every step         mean_lse, largest_lse: over all rows of the step; tied_rows, leak_mean, leak_error,
//                      leak_rms, delta_rms: over its first fact_sequences sequences; (L, H) each. Where a
//                      step is computed in parts: of the first sequences of each.
//   every n-th step    probe: { step, loss, sequences, rows, <the names of kProbeFields>: (L, H) each,
//                      norms: { <weight>: number } } over the first rows of the step's first sequences: a batch is
//                      random, so any are as good. On a GPU the CPU does this while the next steps are trained. The
//                      probe is then in the line of a later step, before the next one is due. `step` is its own.
// Numbers have five digits. Of a run that goes on from a checkpoint, the first probe's leak_lag_1 is from recorded leaks, of
// five digits, and a spectral norm begins from another vector: there the last digit may be another than in a run that never
// stopped. Costs and what moves when: docs/experiments.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "diagnosis/probes.h"
#include "training/trainer.h"

namespace evenkeel {

// Autocorrelation of neighbours in a sequence of numbers, from running sums.
class LagOne {
 public:
  void take(double value);
  // NaN where it is not known: fewer than three numbers, all alike, or one that is not finite.
  double value() const;

 private:
  double first_ = 0, last_ = 0, sum_ = 0, squares_ = 0, products_ = 0;
  int64_t count_ = 0;
};

class ProbeRecorder : public StepWatcher {
 public:
  // What the full set looks at: two sequences at most, and so many rows in all (their cost is their square).
  static constexpr int64_t kSequences = 2, kRows = 256;
  static constexpr int64_t kFactSequences = 1;  // that the cheap set's ties and leaks are of
  // That work on a full set beside a GPU: a set of `nano` is 0.4 s of one core, and 50 of its steps are 0.27 s. The other
  // cores are left to the training.
  static constexpr int kBackgroundThreads = 4;

  // Full sets every config.probe_every steps. folder: of the run that goes on at next_step, for what adds up from step to
  // step; need not be there.
  ProbeRecorder(const RunConfig& config, const std::filesystem::path& folder, int64_t next_step);
  ~ProbeRecorder() override;

  void prepare(int64_t step, StepContext& context) override;
  void see(int64_t step, double loss, Model& model, nlohmann::json& line) override;
  void tell(int64_t step, nlohmann::json& line) override;

 private:
  // A full set's input, copied: the model goes on.
  struct Snapshot {
    int64_t step = 0;
    double loss = 0;
    std::vector<LayerCapture> layers;   // (L)
    std::shared_ptr<float> parameters;  // (table.size())
    std::vector<LagOne> leaks;          // (L, H)
  };
  bool full(int64_t step) const { return step % every_ == 0; }
  nlohmann::json full_set(const ParameterTable& table);  // of snapshot_

  const ModelConfig model_;
  const int64_t every_, steps_, sequences_, rows_;
  const bool background_;
  std::vector<HeadFacts> facts_;  // (L, H): of the step last seen
  Snapshot snapshot_;             // the worker's while pending_ is valid
  std::future<nlohmann::json> pending_;
  std::vector<HeadNorms> norms_;                      // (L, H)
  std::map<std::string, SpectralNorm> matrix_norms_;  // by the weight's name
  std::vector<double> delta_error_running_;           // (L, H)
  std::vector<LagOne> leaks_;  // (L, H): mean leaks of the steps since the last full set
};

// What a run's probes say over its steps.
struct ProbeHistory {
  std::vector<int64_t> steps;                        // probed ones
  std::vector<double> loss;                          // of these
  std::vector<std::vector<HeadProbe>> probes;        // (steps, L H)
  int64_t layers = 0, heads = 0;                     // L, H
  std::map<std::string, std::vector<double>> norms;  // by weight, (steps)
};
// Lines without probes, or with ones of another shape, are passed over.
ProbeHistory probe_history(const Metrics& metrics);
// Of a run's folder; DataError where its records cannot be read.
ProbeHistory read_probe_history(const std::filesystem::path& folder);

}  // namespace evenkeel
