#include "attention/attention_kernels.h"

#include "numerics/simd.h"

namespace evenkeel::EVENKEEL_TARGET {
namespace {

// --- Products

// Not inlined: alone, the compiler keeps all accumulators in registers.
template <int kRows, int kVectors>
__attribute__((noinline)) void multiply_block(int64_t depth, const float* __restrict__ a, int64_t a_row,
                                              int64_t a_column, const float* __restrict__ b, int64_t b_stride,
                                              float* __restrict__ c, int64_t c_stride, bool accumulate,
                                              float scale) {
  Float sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) sum[m][n] = accumulate ? load(c + m * c_stride + n * kLanes) : Float{};
  for (int64_t k = 0; k < depth; ++k) {
    Float row[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) row[n] = load(b + k * b_stride + n * kLanes);
    add_outer_product(sum, a + k * a_column, a_row, row);
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n)
      store(c + m * c_stride + n * kLanes, accumulate ? sum[m][n] : sum[m][n] * splat(scale));
}

template <int kVectors>
void multiply_panel(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_column,
                    const float* b, int64_t b_stride, float* c, int64_t c_stride, bool accumulate,
                    float scale) {
  for_each_block(rows, [&]<int kRows>(int64_t m) {
    multiply_block<kRows, kVectors>(depth, a + m * a_row, a_row, a_column, b, b_stride, c + m * c_stride,
                                    c_stride, accumulate, scale);
  });
}

void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row, int64_t a_column,
              const float* b, int64_t b_stride, float* c, int64_t c_stride, bool accumulate, float scale) {
  int64_t n = 0;
  const auto panel = [&]<int kVectors>() {
    multiply_panel<kVectors>(rows, depth, a, a_row, a_column, b + n, b_stride, c + n, c_stride, accumulate,
                             scale);
    n += kVectors * kLanes;
  };
  while (columns - n >= kProductVectors * kLanes) panel.template operator()<kProductVectors>();
  if constexpr (kProductVectors > 2) {
    if (columns - n >= 3 * kLanes) panel.template operator()<3>();
    if (columns - n >= 2 * kLanes) panel.template operator()<2>();
  }
  if (columns - n >= kLanes) panel.template operator()<1>();
}

// --- Exponential
EK_INLINE Float nearest_any(Float v) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_roundscale_ps(-1, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (Float)_mm256_round_ps((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  Float r;
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_rintf(v[i]);
  return r;
#endif
}

// exp(x) 2^-power. n and r depend on x alone, so the power only moves the exponent.
EK_INLINE Float exp_scaled(Float x, Float power) {
  // Below 2^-200 of the scale everything is 0, -inf too.
  x = select((power - splat(200.0f)) * splat(kLog2High) > x, (power - splat(200.0f)) * splat(kLog2High), x);
  const Float n = nearest_any(x * splat(kLog2E));
  Float r = fma(n, splat(-kLog2High), x);
  r = fma(n, splat(-kLog2Low), r);
  return scale_by_power(exp_reduced(r), clamp(n - power, splat(-220.0f), splat(220.0f)));
}

// --- Passes over a tile
// -----------------------------------------------------------------------------------------

// body(offset of the vector in the tile, column) for every vector, rows ascending within a column.
template <class Body>
EK_INLINE void for_each_vector(int64_t rows, int64_t columns, int64_t stride, Body body) {
  for (int64_t j = 0; j < rows; ++j)
    for (int64_t i = 0; i < columns; i += kLanes) body(j * stride + i, i);
}

void column_max(const float* x, int64_t rows, int64_t columns, int64_t stride, float* running) {
  for (int64_t i = 0; i < columns; i += kLanes) {
    Float best = load(running + i);
    for (int64_t j = 0; j < rows; ++j) best = max(load(x + j * stride + i), best);
    store(running + i, best);
  }
}

void exp_shifted(float* x, int64_t rows, int64_t columns, int64_t stride, const float* shift, float* sum) {
  for (int64_t i = 0; i < columns; i += kLanes) {
    const Float m = load(shift + i);
    Float total = load(sum + i);
    for (int64_t j = 0; j < rows; ++j) {
      const Float p = exp(load(x + j * stride + i) - m);
      store(x + j * stride + i, p);
      total += p;
    }
    store(sum + i, total);
  }
}

void exp_scaled(float* x, int64_t rows, int64_t columns, int64_t stride, const float* power) {
  for_each_vector(rows, columns, stride,
                  [&](int64_t at, int64_t i) { store(x + at, exp_scaled(load(x + at), load(power + i))); });
}

void subtract(float* x, int64_t rows, int64_t columns, int64_t stride, const float* shift) {
  for_each_vector(rows, columns, stride,
                  [&](int64_t at, int64_t i) { store(x + at, load(x + at) - load(shift + i)); });
}

void column_sum(const float* x, int64_t rows, int64_t columns, int64_t stride, float* sum) {
  for (int64_t i = 0; i < columns; i += kLanes) {
    Float total = load(sum + i);
    for (int64_t j = 0; j < rows; ++j) total += load(x + j * stride + i);
    store(sum + i, total);
  }
}

void scale_columns(float* x, int64_t rows, int64_t columns, int64_t stride, const float* factor) {
  for_each_vector(rows, columns, stride,
                  [&](int64_t at, int64_t i) { store(x + at, load(x + at) * load(factor + i)); });
}

void divide_columns(float* out, const float* x, int64_t rows, int64_t columns, int64_t stride,
                    const float* divisor) {
  for_each_vector(rows, columns, stride,
                  [&](int64_t at, int64_t i) { store(out + at, load(x + at) / load(divisor + i)); });
}

void column_dot(const float* x, const float* y, int64_t rows, int64_t columns, int64_t stride, float* sum) {
  for (int64_t i = 0; i < columns; i += kLanes) {
    Float total = load(sum + i);
    for (int64_t j = 0; j < rows; ++j) total = fma(load(x + j * stride + i), load(y + j * stride + i), total);
    store(sum + i, total);
  }
}

void score_gradient(const float* p, float* dp, int64_t rows, int64_t columns, int64_t stride,
                    const float* delta, float scale) {
  const Float a = splat(scale);
  for_each_vector(rows, columns, stride, [&](int64_t at, int64_t i) {
    store(dp + at, (a * load(p + at)) * (load(dp + at) - load(delta + i)));
  });
}

int64_t fma_rounds(int64_t rounds, float* sink) {
  constexpr int kChains = 12;  // covers the latency (4 cycles) of two units with some to spare
  Float chain[kChains];
  for (int c = 0; c < kChains; ++c) chain[c] = splat(*sink + static_cast<float>(c));
  const Float factor = splat(0.999f), add = splat(0.001f);
  for (int64_t r = 0; r < rounds; ++r)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chain[c] = fma(chain[c], factor, add);
  Float total{};
  for (int c = 0; c < kChains; ++c) total += chain[c];
  *sink = total[0];
  return rounds * kChains * kLanes;
}

}  // namespace

extern const AttentionKernels kAttentionKernels;
const AttentionKernels kAttentionKernels = {multiply,   column_max,     exp_shifted,   exp_scaled,
                                            subtract,   column_sum,     scale_columns, divide_columns,
                                            column_dot, score_gradient, transpose,     fma_rounds};

}  // namespace evenkeel::EVENKEEL_TARGET
