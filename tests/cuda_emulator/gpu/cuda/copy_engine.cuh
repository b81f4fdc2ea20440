// Hopper's copy engine on the CPU: src/gpu/cuda/copy_engine.cuh by the definitions of its instructions. What is loaded arrives
// when a thread waits for it. What is stored is read when its thread waits for that, and written when it waits for that.
#pragma once

#include "gpu/cuda/barriers.cuh"
#include "gpu/cuda/tensor_map.h"

namespace evenkeel::gpu {

inline constexpr int kRowBytes = kBoxFeatures * 2;
inline uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

namespace emulated {

// A box of a tensor and its place in shared memory. The map is a copy: a kernel's arguments lie on the stack of the thread that
// asks for the box, and it may have ended when the box arrives.
struct Box {
  CUtensorMap map;
  uint8_t* shared;
  std::array<int, 4> at;  // feature, row, head, batch

  uint32_t bytes() const { return static_cast<uint32_t>(map.box_rows * kRowBytes); }
  // f(16 bits of shared memory, those of the tensor, or null: outside) over all elements.
  template <class F>
  void each(F f) const {
    const uint32_t start = shared_address(shared);
    for (int row = 0; row < map.box_rows; ++row)
      for (int feature = 0; feature < kBoxFeatures; ++feature) {
        const std::array<int64_t, 4> index = {at[3], at[2], at[1] + row, at[0] + feature};
        uint16_t* element = map.data;
        for (size_t axis = 0; axis < 4; ++axis) {
          if (index[axis] < 0 || index[axis] >= map.size[axis]) element = nullptr;
          if (element) element += index[axis] * (axis == 3 ? 1 : map.stride[axis]);
        }
        uint32_t address = start + static_cast<uint32_t>(row * kRowBytes + feature * 2);
        address ^= (address >> 7 & 7) << 4;
        f(reinterpret_cast<uint16_t*>(machine().shared_at(address, 2)), element);
      }
  }
};

inline Box box_at(const CUtensorMap& map, void* shared, int feature, int row, int head, int batch) {
  if (shared_address(shared) % 1024 != 0) machine().fail("a box that is not aligned to 1024 bytes");
  return {map, static_cast<uint8_t*>(shared), {feature, row, head, batch}};
}

// Plain bytes on their way from shared memory to `write`.
template <class Write>
void store_plain(const void* from, uint32_t bytes, Write write) {
  const auto* const first = static_cast<const uint8_t*>(from);
  machine().store_later({.read = [=] { return std::vector<uint8_t>(first, first + bytes); }, .write = write});
}

}  // namespace emulated

inline void prefetch_map(const CUtensorMap&) {}
// The target is unreadable until a thread waits for the copy.
inline void load_box(void* to, const CUtensorMap& map, uint64_t* barrier, int feature, int row, int head,
                     int batch) {
  machine().may_switch();
  ++machine().boxes_loaded;
  const emulated::Box box = emulated::box_at(map, to, feature, row, head, batch);
  std::memset(to, cuda_emulator::Machine::kUnwritten, box.bytes());
  emulated::bulk_copies().push_back({barrier, box.bytes(), [box] {
                                       box.each([](uint16_t* shared, const uint16_t* element) {
                                         *shared = element ? *element : uint16_t{0};
                                       });
                                     }});
}
inline void load_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  if (bytes % 16 != 0 || shared_address(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    machine().fail("a bulk copy that is not aligned to 16 bytes");
  machine().may_switch();
  std::memset(to, cuda_emulator::Machine::kUnwritten, bytes);
  emulated::bulk_copies().push_back({barrier, bytes, [=] { std::memcpy(to, from, bytes); }});
}

inline void store_fence() {}
inline void everywhere_fence() {}
inline void store_box(const CUtensorMap& map, const void* from, int feature, int row, int head, int batch) {
  const emulated::Box box = emulated::box_at(map, const_cast<void*>(from), feature, row, head, batch);
  machine().store_later({.read =
                             [box] {
                               std::vector<uint8_t> bytes(box.bytes());
                               auto* next = reinterpret_cast<uint16_t*>(bytes.data());
                               box.each([&](const uint16_t* shared, uint16_t*) { *next++ = *shared; });
                               return bytes;
                             },
                         .write =
                             [box](const std::vector<uint8_t>& bytes) {
                               const auto* next = reinterpret_cast<const uint16_t*>(bytes.data());
                               box.each([&](const uint16_t*, uint16_t* element) {
                                 if (element) *element = *next;
                                 ++next;
                               });
                             }});
}
inline void store_bytes(void* to, const void* from, uint32_t bytes) {
  emulated::store_plain(from, bytes,
                        [=](const std::vector<uint8_t>& read) { std::memcpy(to, read.data(), read.size()); });
}
inline void add_floats(float* to, const float* from, uint32_t bytes) {
  emulated::store_plain(from, bytes, [=](const std::vector<uint8_t>& read) {
    const auto* const part = reinterpret_cast<const float*>(read.data());
    for (uint32_t n = 0; n < bytes / sizeof(float); ++n) to[n] += part[n];
  });
}
inline void store_commit() { machine().commit_stores(); }
template <int kPending>
void store_wait_read() {
  machine().may_switch();
  machine().wait_for_stores(kPending, /*until_written=*/false);
}
template <int kPending>
void store_wait() {
  machine().may_switch();
  machine().wait_for_stores(kPending, /*until_written=*/true);
}

namespace emulated {

// Each lane holds two numbers of a row of each matrix (transposed: of a column).
template <bool kTransposed>
void store_matrices(void* to, const std::array<uint32_t, 4>& words) {
  struct Operand {
    uint8_t* row;
    std::array<uint32_t, 4> words;
  } mine{machine().shared_at(shared_address(to), 16), words};
  machine().meet(kTransposed ? "stmatrix.trans" : "stmatrix", mine, [](Operand** lanes) {
    for (size_t matrix = 0; matrix < 4; ++matrix)
      for (size_t lane = 0; lane < 32; ++lane)
        for (size_t half = 0; half < 2; ++half) {
          size_t row = lane / 4, column = lane % 4 * 2 + half;
          if (kTransposed) std::swap(row, column);
          const auto value = static_cast<uint16_t>(lanes[lane]->words[matrix] >> (16 * half));
          std::memcpy(lanes[8 * matrix + row]->row + 2 * column, &value, sizeof value);
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
