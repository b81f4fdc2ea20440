#include "numerics/round_block.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace evenkeel {
namespace {

// One scale for the whole matrix.
bool spans_matrix(ScaleGroup group) { return group >= ScaleGroup::tile; }

float largest_of_row(const ScaledMatrix& m, int64_t row, int64_t first, int64_t last) {
  float largest = 0;
  for (int64_t j = first; j < last; ++j) {
    const float size = std::fabs(m.x[row * m.row_stride + j * m.column_stride]);
    if (std::isfinite(size)) largest = std::max(largest, size);
  }
  return largest;
}

// Rows [first, last) of a column: of a row of the transposed matrix.
float largest_of_column(const ScaledMatrix& m, int64_t column, int64_t first, int64_t last) {
  return largest_of_row({m.x, m.columns, m.rows, m.column_stride, m.row_stride}, column, first, last);
}

// find_scales where columns have the scales: a scale for each value.
std::vector<float> find_column_scales(const Rounding& r, const ScaledMatrix& m, const LargestBeyond& beyond) {
  const SharedScale& shared = r.shared;
  const int64_t group = group_rows(shared, m.rows);
  std::vector<float> scales(static_cast<size_t>(m.rows * m.columns));
  for (int64_t j = 0; j < m.columns; ++j) {
    const auto largest = [&](ScaleGroup of, int64_t first, int64_t last) {
      if (spans_matrix(of)) return beyond.of_all;
      return of == ScaleGroup::column && beyond.of_columns ? beyond.of_columns[j]
                                                           : largest_of_column(m, j, first, last);
    };
    const float outer =
        shared.outer == ScaleGroup::none ? 1.0f : outer_scale(r, largest(shared.outer, 0, m.rows));
    for (int64_t first = 0; first < m.rows; first += group) {
      const int64_t last = std::min(first + group, m.rows);
      const float scale = block_scale(r, largest(shared.group, first, last), outer);
      for (int64_t i = first; i < last; ++i) scales[static_cast<size_t>(i * m.columns + j)] = scale;
    }
  }
  return scales;
}

// body(offset, scale) for every value, in the order of memory where one of the strides is 1.
template <class Body>
void for_each_scaled(const SharedScale& shared, const ScaledMatrix& m, const std::vector<float>& scales,
                     Body body) {
  const int64_t group = group_columns(shared, m.columns), per_row = scales_per_row(shared, m.columns);
  if (m.row_stride == 1) {
    for (int64_t j = 0; j < m.columns; ++j)
      for (int64_t i = 0; i < m.rows; ++i)
        body(i + j * m.column_stride, scales[static_cast<size_t>(i * per_row + j / group)]);
    return;
  }
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t first = 0; first < m.columns; first += group) {
      const float scale = scales[static_cast<size_t>(i * per_row + first / group)];
      for (int64_t j = first; j < std::min(first + group, m.columns); ++j)
        body(i * m.row_stride + j * m.column_stride, scale);
    }
}

}  // namespace

float block_scale(const Rounding& r, float largest, float outer) {
  if (largest == 0) return 0;
  switch (r.shared.rule) {
    case ScaleRule::fp32:
      return largest / scale_target(r.format);
    case ScaleRule::e4m3: {
      const Rounding e4m3{kE4m3, RoundingMode::nearest_even, /*saturate=*/true};
      return round_to(e4m3, largest / scale_target(r.format) / outer) * outer;
    }
    case ScaleRule::e8m0:
      return power_of_two(std::clamp(std::ilogb(largest) - scale_target_exponent(r.format), -127, 127));
    case ScaleRule::e8m0_up: {
      // 2^e scale_target >= largest, both sides exact in double.
      int e = std::ilogb(largest) - scale_target_exponent(r.format);
      while (std::ldexp(static_cast<double>(scale_target(r.format)), e) < largest) ++e;
      return power_of_two(std::clamp(e, -127, 127));
    }
  }
  return 0;
}

float outer_scale(const Rounding& r, float largest) {
  if (r.shared.outer == ScaleGroup::none || largest == 0) return 1;
  const float scale = largest / (scale_target(r.format) * max_finite(kE4m3));
  return scale == 0 ? min_subnormal(kFp32) : scale;
}

float round_scaled(const Rounding& r, float x, float scale, uint32_t random) {
  if (std::isnan(x)) return x;
  if (scale == 0) return std::copysign(0.0f, x);
  return round_to(element_rounding(r), x / scale, random) * scale;
}

float largest_finite(const ScaledMatrix& m) {
  float largest = 0;
  for (int64_t i = 0; i < m.rows; ++i) largest = std::max(largest, largest_of_row(m, i, 0, m.columns));
  return largest;
}

int64_t group_columns(const SharedScale& shared, int64_t columns) {
  return shared.group == ScaleGroup::block ? shared.block
         : is_down_column(shared.group)    ? 1
                                           : std::max<int64_t>(columns, 1);
}

int64_t group_rows(const SharedScale& shared, int64_t rows) {
  return shared.group == ScaleGroup::column_block ? shared.block : std::max<int64_t>(rows, 1);
}

int64_t scales_per_row(const SharedScale& shared, int64_t columns) {
  const int64_t group = group_columns(shared, columns);
  return (columns + group - 1) / group;
}

std::vector<float> find_scales(const Rounding& r, const ScaledMatrix& m, const LargestBeyond& known) {
  const SharedScale& shared = r.shared;
  LargestBeyond beyond = known;
  if ((spans_matrix(shared.group) || spans_matrix(shared.outer)) && beyond.of_all < 0)
    beyond.of_all = largest_finite(m);
  if (is_down_column(shared.group)) return find_column_scales(r, m, beyond);
  const int64_t group = group_columns(shared, m.columns), per_row = scales_per_row(shared, m.columns);
  std::vector<float> scales(static_cast<size_t>(m.rows * per_row));
  if (spans_matrix(shared.group)) {
    std::fill(scales.begin(), scales.end(), block_scale(r, beyond.of_all));
    return scales;
  }
  for (int64_t i = 0; i < m.rows; ++i) {
    float outer = 1;
    if (shared.outer != ScaleGroup::none)
      outer = outer_scale(r, spans_matrix(shared.outer) ? beyond.of_all : largest_of_row(m, i, 0, m.columns));
    for (int64_t first = 0; first < m.columns; first += group)
      scales[static_cast<size_t>(i * per_row + first / group)] =
          block_scale(r, largest_of_row(m, i, first, std::min(first + group, m.columns)), outer);
  }
  return scales;
}

void round_block(const Rounding& r, const ScaledMatrix& m, const LargestBeyond& beyond, const RandomKey& key,
                 uint64_t first_element) {
  const std::vector<float> scales = find_scales(r, m, beyond);
  const int64_t group = group_columns(r.shared, m.columns), per_row = scales_per_row(r.shared, m.columns);
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t j = 0; j < m.columns; ++j) {
      float& x = m.x[i * m.row_stride + j * m.column_stride];
      x = round_scaled(r, x, scales[static_cast<size_t>(i * per_row + j / group)],
                       random_bits(key, first_element + static_cast<uint64_t>(i * m.columns + j)));
    }
}

Rounding element_rounding(const Rounding& r) {
  Rounding element = r;
  element.shared = {};
  element.saturate = true;
  return element;
}

void divide_by_scales(const SharedScale& shared, const ScaledMatrix& m, const std::vector<float>& scales) {
  for_each_scaled(shared, m, scales, [&](int64_t at, float scale) {
    float& x = m.x[at];
    x = scale != 0 ? x / scale : std::isnan(x) ? x : std::copysign(0.0f, x);
  });
}

void multiply_by_scales(const SharedScale& shared, const ScaledMatrix& m, const std::vector<float>& scales) {
  for_each_scaled(shared, m, scales, [&](int64_t at, float scale) { m.x[at] *= scale; });
}

}  // namespace evenkeel
