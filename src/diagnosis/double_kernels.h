// The inner loops of the probes in FP64. Internal to src/diagnosis.
//
// The same bits on every CPU target. Nothing is fused, and sums of products are chains in the order of the summed index.
// A dot product is kDotLanes interleaved partial sums whatever the vector width, added up as a tree.
#pragma once

#include <stdint.h>

#include "numerics/cpu.h"

namespace evenkeel {

inline constexpr int kDotLanes = 16;

// c(i, j) += sum_k a(i, k) b(k, j), k ascending.
struct DoubleProduct {
  int64_t rows, columns, depth;
  const double* a;  // (rows, depth): a(i, k) = a[i * a_row + k * a_column]
  int64_t a_row, a_column;
  const double* b;  // (depth, columns), rows b_row apart
  int64_t b_row;
  double* c;  // (rows, columns), rows c_row apart
  int64_t c_row;
};

struct DoubleKernels {
  void (*multiply)(const DoubleProduct& p);
  double (*dot)(const double* x, const double* y, int64_t count);
  void (*add_scaled)(double* x, double factor, const double* y, int64_t count);  // x += factor y
  // (x, y) becomes (cosine x - sine y, sine x + cosine y).
  void (*rotate)(double* x, double* y, int64_t count, double cosine, double sine);
  // next += A^T A v in one pass over A (rows, columns), whose rows are `stride` apart; returns |A v|^2. v, next: (columns)
  double (*power_step)(const float* a, int64_t rows, int64_t columns, int64_t stride, const double* v,
                       double* next);
};

const DoubleKernels& double_kernels();  // of this machine's CPU target

EVENKEEL_DECLARE_BY_TARGET(const DoubleKernels, kDoubleKernels);

}  // namespace evenkeel
