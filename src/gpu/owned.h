// What must be given back, owned by one.
#pragma once

#include <cstddef>
#include <utility>

namespace evenkeel {

// A handle, given back by kGiveBack unless it is T{}.
template <class T, auto kGiveBack>
class Owned {
 public:
  Owned() = default;
  explicit Owned(T made) : value_(made) {}
  Owned(Owned&& other) noexcept : value_(std::exchange(other.value_, T{})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Owned() {
    if (value_ != T{}) kGiveBack(value_);
  }
  const T& get() const { return value_; }
  T* place() { return &value_; }  // where a call that makes one writes it

 private:
  T value_{};
};

// Memory of some kind.
struct MemoryPiece {
  void* data = nullptr;
  size_t bytes = 0;
  bool operator==(const MemoryPiece&) const = default;
};

}  // namespace evenkeel
