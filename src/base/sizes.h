// Arithmetic of sizes and places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace evenkeel {

// A size or an index as the standard containers want it. REQUIRES: n >= 0.
constexpr size_t at(int64_t n) { return static_cast<size_t>(n); }

// value / step, rounded up, and the next multiple of step. REQUIRES: value >= 0, step > 0.
template <class Value, class Step>
constexpr std::common_type_t<Value, Step> divide_up(Value value, Step step) {
  return (value + step - 1) / step;
}
template <class Value, class Step>
constexpr std::common_type_t<Value, Step> round_up(Value value, Step step) {
  return divide_up(value, step) * step;
}

}  // namespace evenkeel
