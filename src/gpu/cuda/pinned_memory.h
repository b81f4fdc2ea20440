// Pinned memory of the host.
#pragma once

#include <cstddef>

#include "gpu/cuda/check.h"
#include "gpu/owned.h"

namespace evenkeel {

// Memory of the host that the device reads and writes by itself.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(size_t bytes) {
    check_cuda(cudaMallocHost(&piece_.place()->data, bytes), "taking pinned memory");
    piece_.place()->bytes = bytes;
  }
  template <class T>
  T* as(size_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<char*>(piece_.get().data) + offset);
  }
  size_t bytes() const { return piece_.get().bytes; }

 private:
  static void give_back(const MemoryPiece& piece) { cudaFreeHost(piece.data); }
  Owned<MemoryPiece, give_back> piece_;
};

}  // namespace evenkeel
