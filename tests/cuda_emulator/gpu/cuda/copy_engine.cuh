// Hopper's copy engine on the CPU: src/gpu/cuda/copy_engine.cuh by its definitions. A load arrives when a thread waits for it,
// and a store reads its source when its thread waits for that: both as late as they may. One block at a time.
#pragma once

#include "gpu/cuda/barriers.cuh"
#include "gpu/cuda/tensor_map.h"

namespace evenkeel::gpu {

inline constexpr int kRowBytes = kBoxFeatures * 2;
inline uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

namespace emulated {

inline void expect_aligned(const void* shared, const void* device, uint32_t bytes) {
  if (bytes % 16 != 0 || shared_address(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(device) % 16 != 0)
    machine().fail("a bulk copy that is not aligned to 16 bytes");
}

// The target is unreadable until a thread waits for the copy.
inline void load_later(void* to, uint32_t bytes, uint64_t* barrier, std::function<void()> arrive) {
  std::memset(to, cuda_emulator::Machine::kUnwritten, bytes);
  bulk_copies().push_back({std::move(arrive), bytes, barrier});
}

struct BulkStores {
  std::vector<std::function<void()>> open, committed;
};
inline BulkStores& bulk_stores() {
  static std::array<BulkStores, 1024> of_thread;
  return of_thread[threadIdx.x];
}

}  // namespace emulated

inline void load_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  emulated::expect_aligned(to, from, bytes);
  emulated::load_later(to, bytes, barrier, [=] { std::memcpy(to, from, bytes); });
}
inline void load_box(void* to, const CUtensorMap& map, uint64_t* barrier, int feature, int row, int head,
                     int batch) {
  if (shared_address(to) % 1024 != 0) machine().fail("a box that is not aligned to 1024 bytes");
  const auto bytes = static_cast<uint32_t>(map.box_rows * kRowBytes);
  emulated::load_later(to, bytes, barrier, [=] {
    for (int i = 0; i < map.box_rows; ++i)
      for (int d = 0; d < kBoxFeatures; ++d) {
        const int64_t at[4] = {batch, head, row + i, feature + d};
        bool inside = true;
        int64_t offset = 0;
        for (size_t axis = 0; axis < 4; ++axis) {
          inside = inside && at[axis] >= 0 && at[axis] < map.size[axis];
          offset += at[axis] * map.stride[axis];
        }
        const uint16_t value = inside ? map.data[offset] : uint16_t{0};
        const auto line = static_cast<uint32_t>(i), byte = static_cast<uint32_t>(2 * d);
        std::memcpy(static_cast<uint8_t*>(to) + swizzled(line, byte / 16) + byte % 16, &value, sizeof value);
      }
  });
}

inline void store_fence() {}
inline void everywhere_fence() {}
inline void store_bytes(void* to, const void* from, uint32_t bytes) {
  emulated::expect_aligned(from, to, bytes);
  emulated::bulk_stores().open.push_back([=] { std::memcpy(to, from, bytes); });
}
inline void add_floats(float* to, const float* from, uint32_t bytes) {
  emulated::expect_aligned(from, to, bytes);
  emulated::bulk_stores().open.push_back([=] {
    for (uint32_t n = 0; n < bytes / sizeof(float); ++n) to[n] += from[n];
  });
}
inline void store_commit() {
  emulated::BulkStores& mine = emulated::bulk_stores();
  for (auto& store : mine.open) mine.committed.push_back(std::move(store));
  mine.open.clear();
}
template <int kPending>
void store_wait_read() {
  static_assert(kPending == 0);
  emulated::BulkStores& mine = emulated::bulk_stores();
  for (auto& store : mine.committed) store();
  mine.committed.clear();
}
template <int kPending>
void store_wait() {
  store_wait_read<kPending>();
}

namespace emulated {

template <bool kTransposed>
void store_matrices(void* to, const std::array<uint32_t, 4>& words) {
  struct Operand {
    uint8_t* row;
    std::array<uint32_t, 4> words;
  } mine{machine().shared_at(shared_address(to), 16), words};
  machine().meet(kTransposed ? "stmatrix.trans" : "stmatrix", mine, [](Operand** lanes) {
    for (size_t matrix = 0; matrix < 4; ++matrix)
      for (int lane = 0; lane < 32; ++lane)
        for (int half = 0; half < 2; ++half) {
          int row = lane / 4, column = lane % 4 * 2 + half;
          if (kTransposed) std::swap(row, column);
          const auto value = static_cast<uint16_t>(lanes[lane]->words[matrix] >> (16 * half));
          std::memcpy(lanes[8 * static_cast<int>(matrix) + row]->row + 2 * column, &value, sizeof value);
        }
  });
}

}  // namespace emulated

inline void store_matrices(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulated::store_matrices<false>(to, {a, b, c, d});
}
inline void store_matrices_transposed(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulated::store_matrices<true>(to, {a, b, c, d});
}

}  // namespace evenkeel::gpu
