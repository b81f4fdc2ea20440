// A maximum by atomics, which is the same in any order. sm_80.
#pragma once

#include "gpu/cuda/device_function.cuh"

namespace evenkeel::gpu {

// *target = max(*target, value). Before the first value, *target is -infinity or has all bits set. REQUIRES: value is no NaN.
EK_DEVICE void raise(float* target, float value) {
  value += 0.0f;  // -0 would have the bits of the lowest number
  if (value >= 0)
    atomicMax(reinterpret_cast<int*>(target), __float_as_int(value));
  else  // of two negative numbers the larger has the smaller bits; a positive one is smaller than both
    atomicMin(reinterpret_cast<unsigned*>(target), __float_as_uint(value));
}

}  // namespace evenkeel::gpu
