// Between round_array.cpp, which decides, and round_array_kernels.cpp, which is compiled once per CPU target.
// Internal: nothing but round_array.cpp and its tests includes this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics/cpu.h"
#include "numerics/random.h"
#include "numerics/rounding.h"

namespace evenkeel {

// How the gap between neighbours of the format depends on a float's magnitude bits.
enum class RoundLoop {
  open,       // the same number of low bits is dropped everywhere, and what overflows becomes Inf by itself
  bounded,    // the same number, and the range is checked
  subnormal,  // below the smallest normal number more bits are dropped, one more per binade; range checked
};

// A Rounding as integers over FP32 bit patterns. "Magnitude": a float's bits without the sign; they order as
// the magnitudes do. A scale_exponent is gone: it moves first_normal and the limits.
struct RoundParameters {
  RoundLoop loop;
  RoundingMode mode;
  uint32_t discard;       // FP32 fraction bits below the format's last one: 0..22
  uint32_t first_normal;  // biased FP32 exponent of the smallest normal number: 1..254
  // Magnitude of the smallest subnormal, 2^-94 or more, and of its half. Only where loop is subnormal.
  uint32_t quantum, half_quantum;
  uint32_t max_finite;  // magnitude; 0x7f800000 where FP32 ends first
  // Magnitude given to a finite value beyond max_finite, by the value's sign, and to Inf.
  uint32_t overflow_positive, overflow_negative, infinity;
};

// target[i] = source[i] rounded, for i < count; the random bits are those of element first_element + i.
using RoundKernel = void(const RoundParameters& p, float* target, const float* source, size_t count,
                         const RandomKey& key, uint64_t first_element);
EVENKEEL_DECLARE_BY_TARGET(RoundKernel, round_kernel);

// round_array on a given target, for the test that all targets agree. REQUIRES: cpu <= cpu_target().
void round_array_on(CpuTarget cpu, const Rounding& r, float* target, const float* source, size_t count,
                    const RandomKey& key, uint64_t first_element);

}  // namespace evenkeel
