// Hopper's copy engine (TMA) as functions: boxes of a tensor and plain bytes, between global and shared memory. sm_90.
#pragma once

#include "gpu/cuda/device_function.cuh"
#include "gpu/cuda/tensor_map.h"

namespace evenkeel::gpu {

// A tile in shared memory is a stack of boxes of 64 features: a box is [rows][64] BF16, a row 128 bytes, with the
// copy engine's 128-byte swizzle, aligned to 1024.
inline constexpr int kRowBytes = kBoxFeatures * 2;  // = the span of the swizzle
// Byte offset of (row, 16-byte chunk) in a swizzled box.
EK_DEVICE uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

EK_DEVICE void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}
// One box {feature, row, head, batch} into shared memory; rows and features outside the tensor come as zeros.
EK_DEVICE void load_box(void* to, const CUtensorMap& map, uint64_t* barrier, int feature, int row, int head,
                        int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(feature), "r"(row), "r"(head),
      "r"(batch)
      : "memory");
}
// Plain bytes, a multiple of 16, both sides aligned to 16.
EK_DEVICE void load_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// Stores are made by one thread after: every writer store_fence(), then a barrier. Rows outside are not written.
EK_DEVICE void store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for device memory too: between accesses of threads and of the copy engine, in either order.
EK_DEVICE void everywhere_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
EK_DEVICE void store_box(const CUtensorMap& map, const void* from, int feature, int row, int head,
                         int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(shared_address(from)), "r"(feature), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
EK_DEVICE void store_bytes(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
EK_DEVICE void add_floats(float* to, const float* from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
EK_DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the newest kPending groups: their source may be overwritten / their writes are done.
template <int kPending>
EK_DEVICE void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
EK_DEVICE void store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four matrices of 8 x 8 bf16 to shared memory, a row's 16 bytes by the lane that gives its address. sm_90.
EK_DEVICE void store_matrices(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
// The same of their transposes: a matrix's row in shared memory is its column in the registers.
EK_DEVICE void store_matrices_transposed(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

}  // namespace evenkeel::gpu
