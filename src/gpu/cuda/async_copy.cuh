// Asynchronous copies into shared memory by each thread (cp.async): sm_80 and up. A thread's copies since its last
// commit are a group.
#pragma once

#include "gpu/cuda/device_function.cuh"

namespace evenkeel::gpu {

// 16 bytes, or zeros where not `present`; 4 bytes. `target`: an address in shared memory.
EK_DEVICE void copy_16_async(uint32_t target, const void* source, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target), "l"(source),
               "r"(present ? 16 : 0));
}
EK_DEVICE void copy_4_async(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(target), "l"(source));
}
EK_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;\n"); }
// All groups but the newest kPending have arrived.
template <int kPending = 0>
EK_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace evenkeel::gpu
