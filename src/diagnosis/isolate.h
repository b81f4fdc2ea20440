// From a recorded run to the rounding that makes it drift: the smallest change that restores health, found by replays of a
// stretch of the run on its own batches. Layers, then heads, then sites, each by delta debugging (Zeller and Hildebrandt,
// "Simplifying and isolating failure-inducing input", 2002) over "these in FP32". Then what the answer predicts: equivalent
// remedies, a sham, an unbiased rounding, and the guilty rounding all by itself. Nothing is concluded from a stretch whose
// unchanged replay does not show the recorded symptom: then the verdict says which checkpoint is missing.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "diagnosis/replays.h"
#include "diagnosis/verdict.h"
#include "numerics/explain.h"

namespace evenkeel {

inline constexpr int64_t kReplaySteps = 200;

struct IsolateOptions {
  int64_t steps = kReplaySteps;  // of a replay at most
  int64_t begin = -1;  // the step to replay from; -1: the checkpoint from which the symptom grows most
  std::function<void(const std::string&)> tell = {};  // each link of the chain as it is found
};

struct Isolation {
  Evidence evidence;
  Verdict verdict;
  std::optional<Explanation>
      bits;  // the addition of a guilty head whose rounding errs most, where it can be had
};
// REQUIRES: replays of a run whose records are there. DataError otherwise. Spends at most the replays' budget, and says
// so where that was not enough; kept trials make it go on where it stopped.
Isolation isolate(Replays& replays, const IsolateOptions& options);

// In one line, what isolate will lack in a run of this configuration, and which option gives it; empty: nothing.
std::string isolate_will_lack(const RunConfig& config);

// All of it for programs, and what RUN/verdict.json holds: the report reads that. Numbers that are not finite are strings,
// as in metrics.jsonl.
nlohmann::json to_json(const Isolation& found, const Replays& replays);
// RUN/verdict.json, where the report finds it: the same without the trials. DataError where it cannot be written.
void write_verdict(const Isolation& found, const Replays& replays);

// The smallest subset that still heals: no single unit can be left out. units: most suspect first; `heals` is true of
// all of them and false of none. About log2(units) calls for one guilty unit, one where it is the first.
std::vector<int64_t> smallest_cure(const std::vector<int64_t>& units,
                                   const std::function<bool(const std::vector<int64_t>&)>& heals);

}  // namespace evenkeel
