// Barriers in shared memory and named barriers of a block on the CPU: src/gpu/cuda/barriers.cuh by its definitions.
#pragma once

#include <functional>
#include <vector>

#include "gpu/cuda/device_function.cuh"

namespace evenkeel::gpu {

namespace emulated {

struct Barrier {
  int32_t bytes = 0;  // of copies that have not arrived
  uint8_t arrivals = 0, missing = 0;
  uint8_t parity = 0;  // of the phase that is not complete
  uint8_t unused = 0;

  void advance() {
    if (missing > 0 || bytes != 0) return;
    parity ^= 1;
    missing = arrivals;
  }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));
inline Barrier& barrier_at(uint64_t* at) { return *reinterpret_cast<Barrier*>(at); }

// Copies of the copy engine arrive when a thread waits for them, not before.
struct BulkCopy {
  uint64_t* barrier;
  uint32_t bytes;
  std::function<void()> copy;
};
inline std::vector<BulkCopy>& bulk_copies() {
  static std::vector<BulkCopy> copies;
  return copies;
}
inline void arrive_copies(uint64_t* barrier) {
  std::vector<BulkCopy>& copies = bulk_copies();
  for (size_t n = 0; n < copies.size();) {
    if (copies[n].barrier != barrier) {
      ++n;
      continue;
    }
    copies[n].copy();
    barrier_at(barrier).bytes -= static_cast<int32_t>(copies[n].bytes);
    copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(n));
  }
  barrier_at(barrier).advance();
}

inline cuda_emulator::Machine::NamedBarrier& arrive_named(int id, int threads) {
  auto& barrier = machine().named_barrier(id);
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  return barrier;
}

}  // namespace emulated

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  std::erase_if(emulated::bulk_copies(), [&](const auto& copy) { return copy.barrier == barrier; });
  emulated::barrier_at(barrier) = {0, static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals)};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint64_t* barrier, uint32_t arrivals = 1) {
  emulated::Barrier& b = emulated::barrier_at(barrier);
  if (b.missing < arrivals) machine().fail("more arrivals at a barrier than it counts");
  b.missing = static_cast<uint8_t>(b.missing - arrivals);
  b.advance();
  machine().may_switch();
}
inline void barrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  emulated::barrier_at(barrier).bytes += static_cast<int32_t>(bytes);
  barrier_arrive(barrier);
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (true) {
    if (emulated::barrier_at(barrier).parity == parity && !machine().copy_is_late())
      emulated::arrive_copies(barrier);
    if (emulated::barrier_at(barrier).parity != parity) break;
    machine().let_others_run();
  }
  machine().may_switch();
}
inline void named_sync(int id, int threads) {
  const auto& barrier = emulated::arrive_named(id, threads);
  const int generation = barrier.arrived == 0 ? barrier.generation - 1 : barrier.generation;
  while (barrier.generation == generation) machine().let_others_run();
  machine().may_switch();
}
inline void named_arrive(int id, int threads) {
  emulated::arrive_named(id, threads);
  machine().may_switch();
}

// As on the device.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace evenkeel::gpu
