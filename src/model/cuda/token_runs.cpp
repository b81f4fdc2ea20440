#include "model/cuda/token_runs.h"

#include <algorithm>

#include "base/sizes.h"
#include "gpu/device_memory.h"

namespace evenkeel::device {

void TokenRuns::sort(std::span<const int32_t> tokens) {
  const auto N = static_cast<int64_t>(tokens.size()), V = static_cast<int64_t>(end_.size());
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    places = carver.take<int32_t>(N);
    runs = carver.take<TokenRun>(most_runs(N, V));
    parts = carver.take<TokenParts>(most_split_tokens(N));
    return carver.used();
  };
  if (const size_t bytes = carve(nullptr); memory_.bytes() < bytes) memory_ = PinnedMemory(bytes);
  carve(memory_.as<void>());

  // A counting sort.
  constexpr int32_t kMost = kRunPlaces;
  std::fill(end_.begin(), end_.end(), 0);
  for (int32_t token : tokens) ++end_[at(token)];
  run_count = split_count = 0;
  int32_t first = 0, part = 0;
  for (int64_t token = 0; token < V; ++token) {
    const int32_t count = end_[at(token)];
    end_[at(token)] = first;
    if (count == 0) continue;
    const bool several = count > kMost;
    if (several) parts[split_count++] = {static_cast<int32_t>(token), part, divide_up(count, kMost)};
    for (int32_t done = 0; done < count; done += kMost)
      runs[run_count++] = {static_cast<int32_t>(token), first + done, std::min(count - done, kMost),
                           several ? part++ : -1};
    first += count;
  }
  for (int64_t n = 0; n < N; ++n) places[end_[at(tokens[at(n)])]++] = static_cast<int32_t>(n);
}

}  // namespace evenkeel::device
