// What the layers' kernels share: types, loads and stores of several values, passes over values. Internal to
// src/model.
#pragma once

#include "attention/attention_problem.h"
#include "base/sizes.h"
#include "gpu/cuda/device_function.cuh"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/warp.cuh"

namespace evenkeel::device {

using namespace gpu;

inline constexpr float kNormEpsilon = 1e-5f;  // GPT-2's, and Hugging Face's
inline constexpr int kThreads = 256;          // of a block, where nothing else is said
// Blocks of sums over rows that a multiprocessor runs at once (layer_norm.cu says why).
inline constexpr int kSumBlocksAtOnce = 3;

EK_DEVICE void store(float* p, float x) { *p = x; }
EK_DEVICE void store(Bf16* p, float x) { *p = __float2bfloat16_rn(x); }

// kCount values at p, which is aligned to them all (16 bytes at most a move).
template <int kCount>
EK_DEVICE void load_some(const float* p, float (&v)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const float4 four = *reinterpret_cast<const float4*>(p + n);
      v[n] = four.x, v[n + 1] = four.y, v[n + 2] = four.z, v[n + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) v[n] = p[n];
  }
}
template <int kCount>
EK_DEVICE void store_some(float* p, const float (&v)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int n = 0; n < kCount; n += 4)
      *reinterpret_cast<float4*>(p + n) = make_float4(v[n], v[n + 1], v[n + 2], v[n + 3]);
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) p[n] = v[n];
  }
}
EK_DEVICE void unpack(uint32_t two, float& low, float& high) {
  low = low_bf16(two);
  high = high_bf16(two);
}
template <int kCount>
EK_DEVICE void load_some(const Bf16* p, float (&v)[kCount]) {
  if constexpr (kCount == 8) {
    const uint4 eight = *reinterpret_cast<const uint4*>(p);
    unpack(eight.x, v[0], v[1]);
    unpack(eight.y, v[2], v[3]);
    unpack(eight.z, v[4], v[5]);
    unpack(eight.w, v[6], v[7]);
  } else if constexpr (kCount == 4) {
    const uint2 four = *reinterpret_cast<const uint2*>(p);
    unpack(four.x, v[0], v[1]);
    unpack(four.y, v[2], v[3]);
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) v[n] = to_float(p[n]);
  }
}
template <int kCount>
EK_DEVICE void store_some(Bf16* p, const float (&v)[kCount]) {
  if constexpr (kCount == 8) {
    *reinterpret_cast<uint4*>(p) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                              pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  } else if constexpr (kCount == 4) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) store(p + n, v[n]);
  }
}

// Calls launch.operator()<T>() with the element type that `type` names.
template <class Launch>
void with_type(TensorType type, Launch launch) {
  if (type == TensorType::bf16)
    launch.template operator()<Bf16>();
  else
    launch.template operator()<float>();
}

// Calls launch.operator()<kVector>(): four columns at a time where rows allow it.
template <class Launch>
void with_vector(int64_t C, Launch launch) {
  if (C % 4 == 0)
    launch.template operator()<4>();
  else
    launch.template operator()<1>();
}

// body.operator()<kCount>(n): kCount values from n on; eights, then what is left one by one.
inline constexpr int kPiece = 8;
template <class Body>
EK_DEVICE void for_each_piece(int64_t count, Body body) {
  const int64_t piece = blockIdx.x * int64_t{kThreads} + threadIdx.x, whole = count / kPiece;
  if (piece < whole)
    body.template operator()<kPiece>(piece * kPiece);
  else if (const int64_t n = whole * kPiece + (piece - whole); n < count)
    body.template operator()<1>(n);
}
inline unsigned piece_blocks(int64_t count) {
  return grid(divide_up(count / kPiece + count % kPiece, kThreads));
}

// y = x f(z), value by value.
template <class X, class Z, class Y, class F>
EK_DEVICE void multiply_pieces(const X* x, const Z* z, int64_t count, Y* y, F f) {
  for_each_piece(count, [&]<int kCount>(int64_t n) {
    float v[kCount], factor[kCount];
    load_some(x + n, v);
    load_some(z + n, factor);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] *= f(factor[i]);
    store_some(y + n, v);
  });
}

EK_DEVICE float sigmoid(float x) { return 1 / (1 + __expf(-x)); }

}  // namespace evenkeel::device
