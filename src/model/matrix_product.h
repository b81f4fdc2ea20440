// Matrix products on the CPU: FP32, all threads, the same bits for any number of them and on every CPU
// target.
#pragma once

#include <cstdint>

#include "model/matrix_view.h"

namespace evenkeel {

using Matrix = MatrixView<float>;

// Terms of a sum are added in blocks of so many. Each block is a chain of fused multiply-adds from 0 in the
// order of the summed index. Blocks are added up in order. Short blocks lose fewer bits than one long chain.
inline constexpr int64_t kProductBlock = 256;

// C = bias + base + A B.
struct MatrixProduct {
  int64_t rows, columns, depth;
  Matrix a;  // (rows, depth)
  Matrix b;  // (depth, columns)
  float* c;  // (rows, columns), stride c_stride
  int64_t c_stride;
  const float* bias = nullptr;  // (columns)
  const float* base = nullptr;  // (rows, columns), stride c_stride; c itself to add to it
};

// REQUIRES: sizes >= 0; c overlaps neither a nor b.
void multiply(const MatrixProduct& p);

}  // namespace evenkeel
