// Barriers in shared memory (sm_90) and named barriers of a block.
#pragma once

#include "gpu/cuda/device_function.cuh"

namespace evenkeel::gpu {

// An mbarrier counts arrivals (and, with expect_bytes, bytes of copies); each completion flips its parity.
EK_DEVICE void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// After barrier_init, before any other thread or the copy engine uses them; then __syncthreads.
EK_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
EK_DEVICE void barrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {  // arrives too
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
EK_DEVICE void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// As `arrivals` threads would.
EK_DEVICE void barrier_arrive(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// Waits until the phase of this parity has completed. A fresh barrier counts as having completed parity 1.
EK_DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Named barriers of the block: 0 is __syncthreads.
EK_DEVICE void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
EK_DEVICE void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A place in a ring of kStages buffers and the parity its barrier will have.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  EK_DEVICE void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace evenkeel::gpu
