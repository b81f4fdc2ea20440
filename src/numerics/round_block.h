// Rounding of blocks that share a scale: the slow, obvious definition, and the fast version in three steps around
// round_array, which is tested against it.
//
// A value x becomes s * round_to(format, x / s), saturating, where s is the scale of its group; both the division and the
// product are FP32's. A scale of 0 (a block of zeros, or of values too small for the scale's format) makes zeros. NaN and
// Inf do not count for the scale; NaN stays, Inf becomes the largest number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "numerics/random.h"
#include "numerics/rounding.h"

namespace evenkeel {

// A matrix of rows whose columns are the direction of ScaleGroup::block: (i, j) is x[i * row_stride + j * column_stride].
struct ScaledMatrix {
  float* x;
  int64_t rows, columns, row_stride, column_stride;
};

// The scale of a group by its rule. REQUIRES: r.shared has a group; largest is finite and not negative; outer > 0.
float block_scale(const Rounding& r, float largest, float outer = 1);
// The outer scale of all blocks whose largest magnitude is this; 1 where the rounding has none or all are 0.
float outer_scale(const Rounding& r, float largest);
// One value under its scale.
float round_scaled(const Rounding& r, float x, float scale, uint32_t random = 0);

// The largest finite magnitude.
float largest_finite(const ScaledMatrix& m);

// How many values along a row share a scale: the whole row but for blocks, and one where columns have the scales. And the
// numbers of scales of a row.
int64_t group_columns(const SharedScale& shared, int64_t columns);
int64_t scales_per_row(const SharedScale& shared, int64_t columns);
// How many values down a column share a scale, where columns have the scales.
int64_t group_rows(const SharedScale& shared, int64_t rows);

// Largest magnitudes of groups and outer groups of which the matrix is a part. Without them the matrix is all there is.
struct LargestBeyond {
  LargestBeyond(float largest_of_all = -1, const float* largest_of_columns = nullptr)
      : of_all(largest_of_all), of_columns(largest_of_columns) {}
  float of_all;             // of the tile, head or tensor; negative: not known
  const float* of_columns;  // (columns), of ScaleGroup::column
};

// The scales of every row, (rows, scales_per_row).
std::vector<float> find_scales(const Rounding& r, const ScaledMatrix& m, const LargestBeyond& beyond = {});

// The definition, one value after another. Stochastic: (i, j) draws number first_element + i * columns + j.
void round_block(const Rounding& r, const ScaledMatrix& m, const LargestBeyond& beyond = {},
                 const RandomKey& key = {}, uint64_t first_element = 0);

// The fast version: divide, round as element_rounding(r) says (round_array, with the caller's own random numbers), multiply.
Rounding element_rounding(const Rounding& r);
void divide_by_scales(const SharedScale& shared, const ScaledMatrix& m, const std::vector<float>& scales);
void multiply_by_scales(const SharedScale& shared, const ScaledMatrix& m, const std::vector<float>& scales);

}  // namespace evenkeel
