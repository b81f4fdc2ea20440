// What the Hopper kernels share: sequences, the residue of O, words of an accumulator. sm_90a. Internal to
// src/attention.
#pragma once

#include "attention/cuda/hopper_host.h"
#include "gpu/cuda/barriers.cuh"
#include "gpu/cuda/copy_engine.cuh"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/mma.cuh"
#include "gpu/cuda/wgmma.cuh"

namespace evenkeel::hopper {

using namespace gpu;

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
inline Sequences sequences(const AttentionProblem& p) {
  return {p.mask.query_lengths.data(), p.mask.key_lengths.data(), p.mask.query_offsets.data(),
          p.mask.key_offsets.data(),   static_cast<int>(p.T),     static_cast<int>(p.N)};
}

}  // namespace evenkeel::hopper
