// The kernels of the Ampere class on a stream of the device. Included by their .cu files alone.
#pragma once

#include "attention/cuda/ampere_passes.h"
#include "attention/family_calls.h"
#include "gpu/cuda/stream_launch.cuh"

namespace evenkeel::ampere {

inline StreamLaunch stream_launch(void* stream) {
  return {static_cast<cudaStream_t>(stream), "starting a kernel of the Ampere class"};
}

struct Plan : FamilyPlan {
  bool small = false;  // kernels for less shared memory
};

}  // namespace evenkeel::ampere
