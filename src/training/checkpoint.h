// Checkpoints: a folder step-N with model.safetensors, optimizer.safetensors and checksums.txt (a digest and a name a
// line), written whole or not at all. Weights have the names and shapes of the model's ParameterTable.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "model/model.h"
#include "training/optimizer.h"

namespace evenkeel {

struct Checkpoint {
  int64_t step;  // steps done: the next one is this
  std::filesystem::path folder;
};
// Those in the folder, by step. Leftovers of killed writers are none.
std::vector<Checkpoint> find_checkpoints(const std::filesystem::path& folder);

// All that a run needs to continue, besides its configuration and the number of its step.
struct TrainingState {
  std::vector<float> parameters, first, second;  // (table.size()) each; of the optimiser: first and second
  int64_t applied = 0;                           // steps of the optimiser
  bool verified = false;                         // by checksums, which checkpoints of older versions lack
};
void save_checkpoint(const std::filesystem::path& folder, int64_t step, const ParameterTable& table,
                     const TrainingState& state);
// DataError: what in the files does not fit the model, or is not as it was written.
TrainingState load_checkpoint(const Checkpoint& checkpoint, const ParameterTable& table);

// Weights alone, from any file with the table's names (with or without "transformer." before them); F32, F16 and
// BF16. What the file has besides (masks) is passed over; what the model needs and is not there is a DataError. So is
// a checkpoint's file that is not as it was written. False: there is no checksum to verify it by.
bool load_weights(const std::filesystem::path& file, Model& model);
void save_weights(const std::filesystem::path& file, const Model& model);

}  // namespace evenkeel
