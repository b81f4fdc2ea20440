// The places of a batch's tokens, sorted by token and cut into runs for token_backward, in pinned memory. Internal to
// src/model.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gpu/cuda/pinned_memory.h"
#include "model/cuda/device_layers.h"

namespace evenkeel::device {

class TokenRuns {
 public:
  explicit TokenRuns(int64_t vocabulary) : end_(static_cast<size_t>(vocabulary)) {}

  // Valid until the next call. REQUIRES: nothing of the last one is still on its way to the device.
  void sort(std::span<const int32_t> tokens);

  int32_t* places = nullptr;    // (N): ascending within a token
  TokenRun* runs = nullptr;     // (run_count)
  TokenParts* parts = nullptr;  // (split_count): tokens of several runs
  int64_t run_count = 0, split_count = 0;

 private:
  std::vector<int32_t> end_;  // (V): where a token's places end
  PinnedMemory memory_;
};

}  // namespace evenkeel::device
