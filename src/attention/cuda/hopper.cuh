// What the Hopper kernels share. sm_90a. Internal to src/attention.
#pragma once

#include "attention/cuda/hopper_host.h"
#include "attention/cuda/sequences.cuh"
#include "attention/cuda/wide_output.cuh"
#include "gpu/cuda/barriers.cuh"
#include "gpu/cuda/copy_engine.cuh"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/mma.cuh"
#include "gpu/cuda/warp.cuh"
#include "gpu/cuda/wgmma.cuh"

namespace evenkeel::hopper {

using namespace gpu;

}  // namespace evenkeel::hopper
