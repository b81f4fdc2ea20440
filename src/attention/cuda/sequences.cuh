// Lengths and places of the sequences of a batch, as the fast kernels see them. Internal to src/attention.
#pragma once

#include "attention/attention_problem.h"
#include "gpu/cuda/device_function.cuh"

namespace evenkeel {

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

}  // namespace evenkeel
