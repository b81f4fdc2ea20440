// Four-dimensional tensors in attention's one order of axes: (batch, head, row, column).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace evenkeel {

// A window on someone else's memory: shape and strides in elements. A stride of 0 repeats (broadcasts) an
// axis.
template <class T>
struct View {
  T* data = nullptr;
  std::array<int64_t, 4> shape{};   // (B, H, T, D)
  std::array<int64_t, 4> stride{};  // in elements

  bool present() const { return data != nullptr; }
  T* at(int64_t b, int64_t h, int64_t row, int64_t column = 0) const {
    return data + b * stride[0] + h * stride[1] + row * stride[2] + column * stride[3];
  }
  int64_t count() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  operator View<const T>() const { return {data, shape, stride}; }  // NOLINT: a view of const is always safe
};

constexpr std::array<int64_t, 4> contiguous_strides(const std::array<int64_t, 4>& shape) {
  return {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
}

template <class T>
View<T> contiguous_view(T* data, const std::array<int64_t, 4>& shape) {
  return {data, shape, contiguous_strides(shape)};
}

// Owns its memory, contiguous, zero at birth.
template <class T>
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(const std::array<int64_t, 4>& shape)
      : shape_(shape), values_(static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3])) {}

  View<T> view() { return contiguous_view(values_.data(), shape_); }
  View<const T> view() const { return contiguous_view(values_.data(), shape_); }
  std::vector<T>& values() { return values_; }
  const std::vector<T>& values() const { return values_; }
  const std::array<int64_t, 4>& shape() const { return shape_; }

 private:
  std::array<int64_t, 4> shape_{};
  std::vector<T> values_;
};

}  // namespace evenkeel
