// Counter-based random numbers: the same bits for any thread count, order and machine.
// Philox4x32-10: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace evenkeel {

// Names a stream: which run, which step of it, which tensor of the step.
struct RandomKey {
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t tensor = 0;

  friend constexpr bool operator==(const RandomKey&, const RandomKey&) = default;
};

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u,
                          kPhiloxWeyl1 = 0xBB67AE85u;  // golden ratio, sqrt(3) - 1
inline constexpr int kPhiloxRounds = 10;

constexpr std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * counter[0];
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// A call of philox gives four words. So that vectors of up to 16 lanes need no transposition, 64 consecutive
// elements share 16 consecutive counters: element e takes word (e % 64) / 16 of counter 16 (e / 64) + e % 16.
inline constexpr uint64_t kRandomGroup = 64, kRandomLanes = 16;

// 32 uniform bits for one element of a stream.
constexpr uint32_t random_bits(const RandomKey& key, uint64_t element) {
  const uint64_t counter = element / kRandomGroup * kRandomLanes + element % kRandomLanes;
  const auto words =
      philox({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), key.tensor, key.step},
             static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32));
  return words[element % kRandomGroup / kRandomLanes];
}

// Uniform in (0, 1): the middle of one of 2^23 equal cells, exact in float.
constexpr float random_unit(const RandomKey& key, uint64_t element) {
  return (static_cast<float>(random_bits(key, element) >> 9) + 0.5f) * 0x1p-23f;
}

// The elements of a stream one after another, as numbers of a distribution.
class RandomStream {
 public:
  explicit RandomStream(const RandomKey& key) : key_(key) {}
  double unit() { return random_unit(key_, element_++); }  // in (0, 1)
  double between(double low, double high) { return low + (high - low) * unit(); }
  int64_t below(int64_t count) {
    return std::min(count - 1, static_cast<int64_t>(unit() * static_cast<double>(count)));
  }
  double normal() {  // Box-Muller
    const double radius = std::sqrt(-2 * std::log(unit()));
    return radius * std::cos(2 * 3.14159265358979323846 * unit());
  }

 private:
  RandomKey key_;
  uint64_t element_ = 0;
};

}  // namespace evenkeel
