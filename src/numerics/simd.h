// Short vectors for the kernels, over GCC/Clang vector types: the compiler emits AVX-512, AVX2 or NEON code for
// the same source. A file that includes this is compiled once per target, with that target's flags and with
// EVENKEEL_TARGET naming a namespace of its own; cpu.h picks the best one at run time.
//
// Rules for such files: everything in the target's namespace (or static), and no inline function or template of
// any other header may be called, or the linker might keep the copy that only a newer CPU can run.
// Operations are lane by lane only, so that the vector width never changes a bit of any result.
#pragma once

#include <stdint.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef EVENKEEL_TARGET
#error "a file that includes numerics/simd.h is compiled per target: see EVENKEEL_TARGET in CMakeLists.txt"
#endif

namespace evenkeel::EVENKEEL_TARGET {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

using Float = float __attribute__((vector_size(kLanes * 4)));
using Uint = uint32_t __attribute__((vector_size(kLanes * 4)));
using Int = int32_t __attribute__((vector_size(kLanes * 4)));  // also the type of a comparison: 0 or -1

#define EK_INLINE static inline __attribute__((always_inline))

EK_INLINE Float load(const float* p) {
  Float v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
EK_INLINE void store(float* p, Float v) { __builtin_memcpy(p, &v, sizeof v); }
EK_INLINE Uint load(const uint32_t* p) {
  Uint v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
EK_INLINE void store(uint32_t* p, Uint v) { __builtin_memcpy(p, &v, sizeof v); }
EK_INLINE Float splat(float x) { return x - Float{}; }  // x - 0 keeps every x, -0 and NaN included
EK_INLINE Uint splat(uint32_t x) { return x + Uint{}; }
EK_INLINE Int splat(int32_t x) { return x + Int{}; }
EK_INLINE Uint bits_of(Float v) { return (Uint)v; }
EK_INLINE Float float_of(Uint v) { return (Float)v; }
EK_INLINE Float max(Float a, Float b) { return a > b ? a : b; }  // b where a is NaN
EK_INLINE Float select(Int mask, Float yes, Float no) { return mask ? yes : no; }
EK_INLINE Uint select(Int mask, Uint yes, Uint no) { return mask ? yes : no; }

// a * b + c with one rounding, on every target.
EK_INLINE Float fma(Float a, Float b, Float c) {
#if defined(__AVX512F__)
  return (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  Float r;
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

EK_INLINE Int to_int(Float v) { return __builtin_convertvector(v, Int); }  // toward zero
EK_INLINE Float to_float(Int v) { return __builtin_convertvector(v, Float); }

// Nearest whole number, ties to even. Adding and subtracting 1.5 * 2^23 leaves no room for a fraction.
// REQUIRES: |v| <= 2^22, and the default rounding direction.
EK_INLINE Float nearest(Float v) {
  const Float magic = splat(12582912.0f);
  return (v + magic) - magic;
}

}  // namespace evenkeel::EVENKEEL_TARGET
