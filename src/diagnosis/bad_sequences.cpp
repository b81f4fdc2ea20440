#include "diagnosis/bad_sequences.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "training/token_file.h"

namespace evenkeel {
namespace {

constexpr size_t kSteps = 8;       // whose sequences are looked at, of either kind
constexpr double kDeviations = 5;  // above the median of ordinary ones: hard

std::vector<int64_t> worst_steps(const Symptom& symptom) {
  std::vector<size_t> order(symptom.spikes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return symptom.heights[a] > symptom.heights[b]; });
  std::vector<int64_t> worst;
  for (size_t n = 0; n < std::min(order.size(), kSteps); ++n) worst.push_back(symptom.spikes[order[n]]);
  return worst;
}

// That do not jump at all, evenly spread.
std::vector<int64_t> ordinary_steps(const Symptom& symptom, int64_t steps) {
  std::vector<int64_t> ordinary;
  for (size_t n = 0; n < kSteps; ++n) {
    int64_t step = steps * static_cast<int64_t>(n) / static_cast<int64_t>(kSteps);
    while (step < steps && std::binary_search(symptom.spikes.begin(), symptom.spikes.end(), step)) ++step;
    if (step < steps) ordinary.push_back(step);
  }
  return ordinary;
}

}  // namespace

BadSequences find_bad_sequences(const Replays& replays, const RunRecord& record, const Symptom& symptom,
                                int64_t begin) {
  BadSequences bad;
  const std::unique_ptr<Replay> replay = replays.at(begin);
  const TokenSource source = TokenSource::open(replays.config().data);
  const BatchRecord batches(replays.run() / "batches.bin");
  const int64_t T = replays.config().model.context;
  const auto losses_of = [&](int64_t step) {
    std::vector<std::pair<double, int64_t>> found;  // loss, offset
    std::vector<int32_t> tokens(static_cast<size_t>(T + 1));
    for (const int64_t offset : batches.offsets(step)) {
      source.read(offset, T + 1, tokens.data());
      const Batch batch{1, T, std::span(tokens).first(static_cast<size_t>(T)),
                        std::span(tokens).last(static_cast<size_t>(T))};
      found.emplace_back(replay->trainer().model().loss(batch), offset);
    }
    return found;
  };
  std::vector<double> usual, hard;
  for (const int64_t step : ordinary_steps(symptom, static_cast<int64_t>(record.loss.size())))
    for (const auto& [value, offset] : losses_of(step)) usual.push_back(value);
  if (usual.empty()) return bad;
  std::sort(usual.begin(), usual.end());
  bad.ordinary_loss = usual[usual.size() / 2];
  // Robustly: some of the ordinary steps may hold a little of what is looked for.
  std::vector<double> deviations;
  for (const double value : usual) deviations.push_back(std::fabs(value - bad.ordinary_loss));
  std::sort(deviations.begin(), deviations.end());
  constexpr double kNormal = 1.4826;  // deviation of normal numbers over the median of their sizes
  const double limit = bad.ordinary_loss + kDeviations * kNormal * deviations[deviations.size() / 2];
  const std::vector<int64_t> worst = worst_steps(symptom);
  bad.looked_at = static_cast<int64_t>(worst.size());
  bad.first_token = source.size();
  for (const int64_t step : worst) {
    bool with = false;
    for (const auto& [value, offset] : losses_of(step)) {
      if (!(value > limit)) continue;
      with = true;
      hard.push_back(value);
      bad.first_token = std::min(bad.first_token, offset);
      bad.end_token = std::max(bad.end_token, offset + T + 1);
    }
    bad.steps_with += with;
  }
  bad.count = static_cast<int64_t>(hard.size());
  if (hard.empty()) return bad;
  std::sort(hard.begin(), hard.end());
  bad.loss = hard[hard.size() / 2];
  return bad;
}

}  // namespace evenkeel
