// Hopper's instructions as functions (copy engine, barriers, warpgroup products), and what the forward and the
// backward kernels share: tensor maps, sequences, what forward saves. sm_90a only. Internal to src/attention, but that
// src/model takes barriers and plain copies from here (sm_90 has them).
//
// Tiles in shared memory are stacks of boxes of 64 features: a box is [rows][64] BF16, a row 128 bytes, with the
// copy engine's 128-byte swizzle, aligned to 1024. A head size of 128 is two boxes. As an operand of a product a box
// is read either way: features summed over ("K-major"), or rows summed over ("transposed", MN-major).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/cuda/hopper_host.h"

#define EK_DEVICE __device__ __forceinline__

namespace evenkeel::hopper {

inline constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;
inline constexpr int kRowBytes = kBoxFeatures * 2;  // = the span of the swizzle
inline constexpr int kWarpgroup = 128;              // threads
inline constexpr int kWarpgroupRows = 64;           // of a product's accumulator

EK_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ------------------------------------------------------------------------------------------------ barriers
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

template <int kRegisters>
EK_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
EK_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---------------------------------------------------------------------------------------------- copy engine
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

// ------------------------------------------------------------------------------------------------- products
// Descriptor of an operand in shared memory with the 128-byte swizzle. K-major: `group_bytes` from one group of 8
// rows to the next (1024 in a box). Transposed: 1024 from 8 summed rows to the next, and `box_bytes` from one box
// of 64 features to the next.
EK_DEVICE uint64_t operand(const void* at, uint32_t box_bytes = 16, uint32_t group_bytes = 8 * kRowBytes) {
  return (static_cast<uint64_t>(shared_address(at) & 0x3FFFF) >> 4) |
         (static_cast<uint64_t>(box_bytes >> 4) << 16) | (static_cast<uint64_t>(group_bytes >> 4) << 32) |
         (uint64_t{1} << 62);
}
// An operand further on, in bytes: 32 for the next 16 features of a K-major box, 16 * kRowBytes for the next 16
// summed rows of a transposed one.
EK_DEVICE uint64_t advance(uint64_t operand,
                           uint32_t bytes) {  // the address never carries into the upper word
  return (operand & 0xffffffff00000000ull) | (static_cast<uint32_t>(operand) + (bytes >> 4));
}

EK_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
EK_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
EK_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses of an accumulator across the wait it stands behind.
template <int n>
EK_DEVICE void settle(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d (+)= A B over 16 summed terms; A is 64 x 16, B 16 x N. `add` false: d is overwritten. Accumulator: thread t of the
// warpgroup holds rows 16 (t / 32) + t % 32 / 4 + {0, 8} and columns 8 j + 2 (t % 4) + {0, 1}:
//   d[4 j + 2 r + c] is (row + 8 r, column + c).
template <int N>
struct Wgmma;
template <>
struct Wgmma<64> {
  // Both operands in shared memory.
  template <bool kTransposeA, bool kTransposeB>
  EK_DEVICE static void ss(float (&d)[32], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, %35, %36;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 1 : 0));
  }
  // A in registers: an accumulator packed to pairs is in the right order.
  template <bool kTransposeB>
  EK_DEVICE static void rs(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,
                           bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeB ? 1 : 0));
  }
};

template <>
struct Wgmma<128> {
  // Both operands in shared memory.
  template <bool kTransposeA, bool kTransposeB>
  EK_DEVICE static void ss(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, %67, %68;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 1 : 0));
  }
  // A in registers: an accumulator packed to pairs is in the right order.
  template <bool kTransposeB>
  EK_DEVICE static void rs(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,
                           bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeB ? 1 : 0));
  }
};

template <>
struct Wgmma<72> {
  // A in registers: an accumulator packed to pairs is in the right order.
  template <bool kTransposeB>
  EK_DEVICE static void rs(float (&d)[36], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,
                           bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %41, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35"
        "}, {%36, %37, %38, %39}, %40, p, 1, 1, %42;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeB ? 1 : 0));
  }
};

// --------------------------------------------------------------------------------------------------- numbers
EK_DEVICE float exp2_approx(float x) {  // 2 ulp; below 2^-126: 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two floats to BF16, nearest even; `low` in the lower half.
EK_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
EK_DEVICE float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
EK_DEVICE float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

// O for delta: its BF16 value and one byte more, 16 significand bits in all. The byte counts steps of 1 / 254 of a BF16
// ulp (half an ulp either way, rounded up or down, fits; with 256 steps it would not, and where O lies halfway between two
// BF16 numbers, as with two ties, cutting it off is a bias). It is rounded stochastically: rounded to nearest, what is
// smaller than its unit would always be lost (rows with four ties and a tail: a bias of 1e-6, z = -16; so: none).
inline constexpr uint32_t kResidueSteps = 254;
EK_DEVICE float with_residue(uint32_t bf16_bits, int residue) {
  // 2^16 / 254 units of the last place, to 2^-6 of one.
  constexpr int kStep = ((1 << 24) + static_cast<int>(kResidueSteps) / 2) / static_cast<int>(kResidueSteps);
  return __uint_as_float((bf16_bits << 16) + static_cast<uint32_t>((residue * kStep + 128) >> 8));
}

// 16 x 16 bytes-wide matrices of four 8 x 8 BF16 to shared memory, a row's 16 bytes by the lane that gives its address.
EK_DEVICE void store_matrices(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
// A 4 x 4 transposition of words between the four lanes of a quad: words of four 8-column blocks of an accumulator's row
// become four consecutive words of one block.
EK_DEVICE void quad_transpose(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = __shfl_xor_sync(~0u, upper ? x[i] : x[i + 2], 2);
    (upper ? x[i] : x[i + 2]) = received;
  }
}

// Byte offset of (row, 16-byte chunk) in a swizzled box.
EK_DEVICE uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// -------------------------------------------------------------------------------------------------- sequences
// Lengths and places of the sequences of a batch, as the kernels see them.
struct Sequences {
  const int32_t *query_lengths, *key_lengths, *query_offsets, *key_offsets;  // (B) or null
  int T, N;
};
struct Sequence {
  int rows, keys;              // that exist
  int first_row, first_key;    // on the row axis of the tensors
  int query_batch, key_batch;  // coordinate on the batch axis of the tensors
};
EK_DEVICE Sequence sequence(const Sequences& all, int b) {
  Sequence s;
  s.rows = all.query_lengths ? all.query_lengths[b] : all.T;
  s.keys = all.key_lengths ? all.key_lengths[b] : all.N;
  s.first_row = all.query_offsets ? all.query_offsets[b] : 0;
  s.first_key = all.key_offsets ? all.key_offsets[b] : 0;
  s.query_batch = all.query_offsets ? 0 : b;
  s.key_batch = all.key_offsets ? 0 : b;
  return s;
}
inline Sequences sequences(const CudaAttention& p) {
  return {p.query_lengths, p.key_lengths,         p.query_offsets,
          p.key_offsets,   static_cast<int>(p.T), static_cast<int>(p.N)};
}

}  // namespace evenkeel::hopper
