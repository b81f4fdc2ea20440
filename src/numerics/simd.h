// Short vectors for the kernels, over GCC/Clang vector types: the compiler emits AVX-512, AVX2 or NEON code for
// the same source. A file that includes this is compiled once per target, with that target's flags. There
// EVENKEEL_TARGET names a namespace of its own. The best one is picked by cpu.h at run time.
//
// Rules for such files: everything is in the target's namespace (or static). No inline function or template of
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

// --- Products: a block of kRows x kVectors accumulators lives in registers. 16 registers (AVX2): 6 x 2 + 3. 32 registers
// (AVX-512): 6 x 4 + 5.
inline constexpr int kProductRows = 6;
inline constexpr int kProductVectors = kLanes == 16 ? 4 : 2;

// One step: a column of A, its values `a_row` apart, times a row of B.
template <int kRows, int kVectors>
EK_INLINE void add_outer_product(Float (&sum)[kRows][kVectors], const float* a, int64_t a_row,
                                 const Float (&row)[kVectors]) {
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    const Float factor = splat(a[m * a_row]);
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) sum[m][n] = fma(factor, row[n], sum[m][n]);
  }
}

// body.operator()<kRows>(m) for rows [m, m + kRows): whole blocks, then what is left.
template <class Body>
EK_INLINE void for_each_block(int64_t rows, Body body) {
  int64_t m = 0;
  for (; rows - m >= kProductRows; m += kProductRows) body.template operator()<kProductRows>(m);
  switch (rows - m) {
    case 5:
      return body.template operator()<5>(m);
    case 4:
      return body.template operator()<4>(m);
    case 3:
      return body.template operator()<3>(m);
    case 2:
      return body.template operator()<2>(m);
    case 1:
      return body.template operator()<1>(m);
    default:
      return;
  }
}

EK_INLINE Int to_int(Float v) { return __builtin_convertvector(v, Int); }  // toward zero
EK_INLINE Float to_float(Int v) { return __builtin_convertvector(v, Float); }

// Nearest whole number, ties to even. Adding and subtracting 1.5 * 2^23 leaves no room for a fraction.
// REQUIRES: |v| <= 2^22, and the default rounding direction.
EK_INLINE Float nearest(Float v) {
  const Float magic = splat(12582912.0f);
  return (v + magic) - magic;
}

// ---------------------------------------------------------------------------------------------- exp(x) = 2^n
// exp(r), n = nearest(x / log 2), r = x - n log 2 in [-log(2)/2, log(2)/2]. Here log 2 is a sum of two floats, used
// with fused multiply-adds, so r is good to 2^-25 for |n| < 2^22. The Taylor polynomial of exp(r) has degree 7:
// the remainder is below 0.3466^8 / 8! = 2^-27.5. Error below 1 ulp (checked against MPFR); exp(0) = 1
// exactly.
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLog2High = 0x1.62e43p-1f, kLog2Low = -0x1.05c61p-29f;  // log 2 = high + low to 2^-53

EK_INLINE Float exp_reduced(Float r) {
  Float p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  return fma(p, r, splat(1.0f));
}

// x 2^n for a whole n in [-252, 254], rounded once where the result is below the normal range.
EK_INLINE Float scale_by_power(Float x, Float n) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_scalef_ps(-1, (__m512)x, (__m512)n);
#else
  // Two factors: neither leaves the normal range, so the first product is exact.
  const Int whole = to_int(n), half = whole >> 1;
  const Float first = float_of((Uint)((half + 127) << 23)),
              second = float_of((Uint)((whole - half + 127) << 23));
  return x * first * second;
#endif
}

// NaN passes both: the instructions (and the comparisons) give their second operand where one is NaN.
EK_INLINE Float clamp(Float x, Float low, Float high) {
#if defined(__AVX512F__)
  x = (Float)_mm512_maskz_max_ps(-1, (__m512)low, (__m512)x);
  return (Float)_mm512_maskz_min_ps(-1, (__m512)high, (__m512)x);
#elif defined(__AVX2__)
  x = (Float)_mm256_max_ps((__m256)low, (__m256)x);
  return (Float)_mm256_min_ps((__m256)high, (__m256)x);
#else
  x = select(low > x, low, x);
  return select(high < x, high, x);
#endif
}

// exp of anything: 0 below -104, Inf above 88.7. exp(128) and exp(-128) are far beyond both ends.
EK_INLINE Float exp(Float x) {
  x = clamp(x, splat(-128.0f), splat(128.0f));
  const Float n = nearest(x * splat(kLog2E));
  Float r = fma(n, splat(-kLog2High), x);
  r = fma(n, splat(-kLog2Low), r);
  return scale_by_power(exp_reduced(r), n);
}

// target[c][r] = source[r][c]. Blocks of 4 x 4 in vectors of four, whatever the target: about one instruction a value.
static inline void transpose(float* target, int64_t target_stride, const float* source, int64_t source_stride,
                             int64_t rows, int64_t columns) {
  using Four = float __attribute__((vector_size(16)));
  const auto low = [](Four x, Four y) { return __builtin_shufflevector(x, y, 0, 4, 1, 5); };
  const auto high = [](Four x, Four y) { return __builtin_shufflevector(x, y, 2, 6, 3, 7); };
  const auto first = [](Four x, Four y) { return __builtin_shufflevector(x, y, 0, 1, 4, 5); };
  const auto last = [](Four x, Four y) { return __builtin_shufflevector(x, y, 2, 3, 6, 7); };
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) {
      Four in[4];
      for (int n = 0; n < 4; ++n)
        __builtin_memcpy(&in[n], source + (r + n) * source_stride + c, sizeof in[n]);
      const Four a = low(in[0], in[1]), b = low(in[2], in[3]);
      const Four d = high(in[0], in[1]), e = high(in[2], in[3]);
      const Four out[4] = {first(a, b), last(a, b), first(d, e), last(d, e)};
      for (int n = 0; n < 4; ++n)
        __builtin_memcpy(target + (c + n) * target_stride + r, &out[n], sizeof out[n]);
    }
    for (; c < columns; ++c)
      for (int n = 0; n < 4; ++n) target[c * target_stride + r + n] = source[(r + n) * source_stride + c];
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) target[c * target_stride + r] = source[r * source_stride + c];
}

}  // namespace evenkeel::EVENKEEL_TARGET
