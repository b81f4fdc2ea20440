// Hopper's copy engine on the CPU: as much of src/gpu/cuda/copy_engine.cuh as copies of plain bytes need.
#pragma once

#include "gpu/cuda/barriers.cuh"

namespace evenkeel::gpu {

// The target is unreadable until a thread waits for the copy.
inline void load_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  if (bytes % 16 != 0 || shared_address(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    machine().fail("a bulk copy that is not aligned to 16 bytes");
  std::memset(to, cuda_emulator::Machine::kUnwritten, bytes);
  emulated::bulk_copies().push_back({static_cast<uint8_t*>(to), from, bytes, barrier});
}

}  // namespace evenkeel::gpu
