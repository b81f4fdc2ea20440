// Random numbers for made-up inputs. Internal to src/diagnosis.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numbers>

#include "numerics/random.h"

namespace evenkeel {

// RandomStream's numbers, to the bit, without computing a block of them once a number; and numbers can be passed over.
class InputStream {
 public:
  explicit InputStream(const RandomKey& key) : key_(key) {}
  double unit() {  // in (0, 1)
    const uint64_t group = element_ / kRandomGroup;
    if (group != group_) fill(group);
    return (static_cast<float>(words_[element_++ % kRandomGroup] >> 9) + 0.5f) * 0x1p-23f;
  }
  double between(double low, double high) { return low + (high - low) * unit(); }
  int64_t below(int64_t count) {
    return std::min(count - 1, static_cast<int64_t>(unit() * static_cast<double>(count)));
  }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(unit()));
    return radius * std::cos(2 * std::numbers::pi * unit());
  }
  // Mean 0, variance 1, at most 3.5: nearly normal, at a fraction of the cost.
  double bell() { return (unit() + unit() + unit() + unit() - 2) * std::numbers::sqrt3; }
  void skip_normals(int64_t count) { element_ += 2 * static_cast<uint64_t>(count); }

 private:
  void fill(uint64_t group) {
    group_ = group;
    for (uint64_t lane = 0; lane < kRandomLanes; ++lane) {
      const uint64_t counter = group * kRandomLanes + lane;
      const auto words = philox(
          {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), key_.tensor, key_.step},
          static_cast<uint32_t>(key_.seed), static_cast<uint32_t>(key_.seed >> 32));
      for (uint64_t n = 0; n < words.size(); ++n) words_[n * kRandomLanes + lane] = words[n];
    }
  }

  const RandomKey key_;
  uint64_t element_ = 0, group_ = ~uint64_t{0};
  std::array<uint32_t, kRandomGroup> words_{};
};

}  // namespace evenkeel
