// Kernels that are types (run, kThreads, kBlocksAtOnce, kSharedBytes) on a stream of the device. The emulator of the tests has
// a launcher of its own for them. Included by .cu files alone.
#pragma once

#include "gpu/cuda/launch.h"

namespace evenkeel {

template <class Kernel, class Arguments>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksAtOnce)
    kernel_of(const __grid_constant__ Arguments arguments) {
  Kernel::run(arguments);
}

struct StreamLaunch {
  cudaStream_t stream;
  const char* what;  // of an error: "starting a kernel of ..."
  template <class Kernel, class Arguments>
  void run(int64_t blocks, const Arguments& arguments) {
    const auto kernel = kernel_of<Kernel, Arguments>;
    allow_shared_memory(kernel, Kernel::kSharedBytes);
    kernel<<<grid(blocks), Kernel::kThreads, Kernel::kSharedBytes, stream>>>(arguments);
    check_launch(what);
  }
};

}  // namespace evenkeel
