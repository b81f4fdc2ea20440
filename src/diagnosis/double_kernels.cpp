#include "diagnosis/double_kernels.h"

#include "numerics/simd.h"

namespace evenkeel::EVENKEEL_TARGET {
namespace {

constexpr int kWide = kLanes / 2;  // doubles of a vector
using Double = double __attribute__((vector_size(kWide * 8)));
using HalfFloat = float __attribute__((vector_size(kWide * 4)));

EK_INLINE Double load_doubles(const double* p) {
  Double v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
EK_INLINE Double load_doubles(const float* p) {
  HalfFloat v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Double);
}
EK_INLINE void store_doubles(double* p, Double v) { __builtin_memcpy(p, &v, sizeof v); }

// --- Products
// kRows x kVectors accumulators in registers.
constexpr int kBlockRows = 4, kBlockVectors = 2;
constexpr int64_t kPanel = kBlockVectors * kWide;

template <int kRows>
EK_INLINE void block_product(const DoubleProduct& p, int64_t i, int64_t j) {
  Double sum[kRows][kBlockVectors];
  double* const c = p.c + i * p.c_row + j;
  const double* const a = p.depth > 0 ? p.a + i * p.a_row : nullptr;  // without depth there may be no operand
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kBlockVectors; ++n) sum[m][n] = load_doubles(c + m * p.c_row + n * kWide);
  for (int64_t k = 0; k < p.depth; ++k) {
    Double row[kBlockVectors];
#pragma GCC unroll 2
    for (int n = 0; n < kBlockVectors; ++n) row[n] = load_doubles(p.b + k * p.b_row + j + n * kWide);
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < kBlockVectors; ++n) sum[m][n] += a[m * p.a_row + k * p.a_column] * row[n];
  }
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kBlockVectors; ++n) store_doubles(c + m * p.c_row + n * kWide, sum[m][n]);
}

// A panel of b stays in the cache while all rows of a meet it.
void multiply(const DoubleProduct& p) {
  int64_t j = 0;
  for (; j + kPanel <= p.columns; j += kPanel) {
    int64_t i = 0;
    for (; i + kBlockRows <= p.rows; i += kBlockRows) block_product<kBlockRows>(p, i, j);
    for (; i < p.rows; ++i) block_product<1>(p, i, j);
  }
  for (; j < p.columns; ++j)
    for (int64_t i = 0; i < p.rows; ++i) {
      double sum = p.c[i * p.c_row + j];
      for (int64_t k = 0; k < p.depth; ++k) sum += p.a[i * p.a_row + k * p.a_column] * p.b[k * p.b_row + j];
      p.c[i * p.c_row + j] = sum;
    }
}

// --- Vectors

struct Lanes {
  Double part[kDotLanes / kWide] = {};

  template <class X>
  inline __attribute__((always_inline)) void add(const X* x, const double* y, int64_t j) {
#pragma GCC unroll 8
    for (int n = 0; n < kDotLanes / kWide; ++n)
      part[n] += load_doubles(x + j + n * kWide) * load_doubles(y + j + n * kWide);
  }
  template <class X>
  inline __attribute__((always_inline)) void add_rest(const X* x, const double* y, int64_t j, int64_t count) {
    if (j == count) return;
    double some_x[kDotLanes] = {}, some_y[kDotLanes] = {};
    for (int64_t n = j; n < count; ++n) some_x[n - j] = static_cast<double>(x[n]), some_y[n - j] = y[n];
    add(some_x, some_y, 0);
  }
  inline __attribute__((always_inline)) double sum() const {
    double values[kDotLanes];
    for (int n = 0; n < kDotLanes / kWide; ++n) store_doubles(values + n * kWide, part[n]);
    for (int half = kDotLanes / 2; half > 0; half /= 2)
      for (int n = 0; n < half; ++n) values[n] += values[n + half];
    return values[0];
  }
};

double dot(const double* x, const double* y, int64_t count) {
  Lanes lanes;
  int64_t j = 0;
  for (; j + kDotLanes <= count; j += kDotLanes) lanes.add(x, y, j);
  lanes.add_rest(x, y, j, count);
  return lanes.sum();
}

void add_scaled(double* x, double factor, const double* y, int64_t count) {
  int64_t j = 0;
  for (; j + kWide <= count; j += kWide)
    store_doubles(x + j, load_doubles(x + j) + factor * load_doubles(y + j));
  for (; j < count; ++j) x[j] += factor * y[j];
}

void rotate(double* x, double* y, int64_t count, double cosine, double sine) {
  int64_t j = 0;
  for (; j + kWide <= count; j += kWide) {
    const Double a = load_doubles(x + j), b = load_doubles(y + j);
    store_doubles(x + j, cosine * a - sine * b);
    store_doubles(y + j, sine * a + cosine * b);
  }
  for (; j < count; ++j) {
    const double a = x[j], b = y[j];
    x[j] = cosine * a - sine * b;
    y[j] = sine * a + cosine * b;
  }
}

// kRows rows of A at a time: v and next are read once for all of them.
template <int kRows>
EK_INLINE double power_rows(const float* a, int64_t columns, int64_t stride, const double* v, double* next) {
  Lanes lanes[kRows];
  int64_t j = 0;
  for (; j + kDotLanes <= columns; j += kDotLanes)
    for (int m = 0; m < kRows; ++m) lanes[m].add(a + m * stride, v, j);
  double image[kRows], squares = 0;
  for (int m = 0; m < kRows; ++m) {
    lanes[m].add_rest(a + m * stride, v, j, columns);
    image[m] = lanes[m].sum();
    squares += image[m] * image[m];
  }
  for (j = 0; j + kWide <= columns; j += kWide) {
    Double sum = load_doubles(next + j);
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) sum += image[m] * load_doubles(a + m * stride + j);
    store_doubles(next + j, sum);
  }
  for (; j < columns; ++j)
    for (int m = 0; m < kRows; ++m) next[j] += image[m] * static_cast<double>(a[m * stride + j]);
  return squares;
}

double power_step(const float* a, int64_t rows, int64_t columns, int64_t stride, const double* v,
                  double* next) {
  constexpr int kAtOnce = 4;
  double squares = 0;
  int64_t i = 0;
  for (; i + kAtOnce <= rows; i += kAtOnce)
    squares += power_rows<kAtOnce>(a + i * stride, columns, stride, v, next);
  for (; i < rows; ++i) squares += power_rows<1>(a + i * stride, columns, stride, v, next);
  return squares;
}

}  // namespace

extern const DoubleKernels kDoubleKernels;
const DoubleKernels kDoubleKernels = {multiply, dot, add_scaled, rotate, power_step};

}  // namespace evenkeel::EVENKEEL_TARGET
