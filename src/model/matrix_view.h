// A matrix in someone else's memory, of the host or of a device.
#pragma once

#include <cstdint>

namespace evenkeel {

// Value (i, j) is data[i * row + j * column]. One of the strides is 1. Views of different values are different types: one of
// device memory (of void, which only a kernel reads) does not pass for one of the host's.
template <class Value>
struct MatrixView {
  const Value* data;
  int64_t row, column;  // strides in elements

  static MatrixView rows_of(const Value* data, int64_t columns) { return {data, columns, 1}; }
  static MatrixView transposed(const Value* data, int64_t columns) { return {data, 1, columns}; }
};

}  // namespace evenkeel
