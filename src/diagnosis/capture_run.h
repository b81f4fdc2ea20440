// Captures of a recorded run: a step is replayed from the nearest checkpoint, and what attention read there is kept. The
// run's folder is only read.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "diagnosis/capture.h"
#include "training/backend.h"

namespace evenkeel {

struct CaptureRequest {
  int64_t layer = -1;                   // -1: all
  std::vector<int64_t> heads = {};      // ascending; empty: all
  int64_t sequences = 4;                // of the step, the first so many
  int64_t rows = 0;                     // of each sequence, the first so many; 0: all
  std::optional<Backend> backend = {};  // none: where the run ran
  // Called before the first step of the replay and after each one.
  std::function<void(int64_t done, int64_t all)> progress = {};
};

// One capture a layer, in order. std::invalid_argument where the model has no such layer or head; DataError as Replay's.
std::vector<Capture> capture_run(const std::filesystem::path& run, int64_t step,
                                 const CaptureRequest& request);

}  // namespace evenkeel
