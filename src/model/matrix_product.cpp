#include "model/matrix_product.h"

#include <algorithm>
#include <vector>

#include "base/sizes.h"
#include "base/threads.h"
#include "model/model_kernels.h"
#include "numerics/cpu.h"

namespace evenkeel {

const ModelKernels& model_kernels() { return EVENKEEL_OF_TARGET(cpu_target(), kModelKernels); }

namespace {

// Rows a piece of work has. Every piece packs its panel of B again, so pieces are tall: as many as keep all
// threads busy to the end. It changes no bit.
int64_t rows_of_piece(int64_t rows, int64_t panels) {
  constexpr int64_t kPiecesPerThread = 4, kFewestRows = 48;
  const int64_t threads = thread_count();
  if (threads == 1) return rows;
  const int64_t pieces = divide_up(kPiecesPerThread * threads, panels);
  return std::max(kFewestRows, divide_up(divide_up(rows, pieces), 6) * 6);
}

}  // namespace

void multiply(const MatrixProduct& p) {
  if (p.rows == 0 || p.columns == 0) return;
  const ModelKernels& kernels = model_kernels();
  const int64_t width = kernels.panel_columns, panels = divide_up(p.columns, width);
  const int64_t height = rows_of_piece(p.rows, panels), pieces = divide_up(p.rows, height);
  parallel_for(panels * pieces, [&](int64_t item, int) {
    thread_local std::vector<float> panel;
    panel.resize(static_cast<size_t>(kProductBlock * width));
    const int64_t n = item / pieces * width, m = item % pieces * height;
    const int64_t columns = std::min(width, p.columns - n), rows = std::min(height, p.rows - m);
    float* c = p.c + m * p.c_stride + n;
    const float *bias = p.bias ? p.bias + n : nullptr, *base = p.base ? p.base + m * p.c_stride + n : nullptr;
    for (int64_t k = 0; k == 0 || k < p.depth; k += kProductBlock) {
      const int64_t depth = std::min(kProductBlock, p.depth - k);
      // Without depth there may be no operands.
      const float* const a = depth > 0 ? p.a.data + m * p.a.row + k * p.a.column : nullptr;
      const float* const b = depth > 0 ? p.b.data + k * p.b.row + n * p.b.column : nullptr;
      kernels.pack_panel(panel.data(), b, p.b.row, p.b.column, depth, columns);
      kernels.multiply_panel({rows, columns, depth, a, p.a.row, p.a.column, panel.data(), c, p.c_stride,
                              k == 0 ? bias : nullptr, k == 0 ? base : c, p.c_stride});
    }
  });
}

}  // namespace evenkeel
