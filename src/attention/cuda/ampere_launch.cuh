// The kernels of the Ampere class on a stream of the device. Included by their .cu files alone.
#pragma once

#include "attention/cuda/ampere_passes.h"
#include "attention/family_calls.h"
#include "gpu/cuda/launch.h"

namespace evenkeel::ampere {

template <class Kernel, class Arguments>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksAtOnce)
    kernel_of(const __grid_constant__ Arguments arguments) {
  Kernel::run(arguments);
}

struct StreamLaunch {
  cudaStream_t stream;
  template <class Kernel, class Arguments>
  void run(int64_t blocks, const Arguments& arguments) {
    const auto kernel = kernel_of<Kernel, Arguments>;
    allow_shared_memory(kernel, Kernel::kSharedBytes);
    kernel<<<grid(blocks), Kernel::kThreads, Kernel::kSharedBytes, stream>>>(arguments);
    check_launch("starting a kernel of the Ampere class");
  }
};

struct Plan : FamilyPlan {
  bool small = false;  // kernels for less shared memory
};

}  // namespace evenkeel::ampere
