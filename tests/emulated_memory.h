// What the CUDA emulator needs to run kernels on the problems of attention_cases.h: how they are launched, and tensors of
// 16-bit numbers. Their memory is poisoned, and looked at afterwards where nobody may write.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "attention/attention_call.h"
#include "attention_cases.h"
#include "gpu/cuda/instructions.cuh"
#include "sanitized.h"

namespace evenkeel::emulated {

using cases::Problem;
using cuda_emulator::Order;

struct How {
  TensorType type = TensorType::bf16;
  bool sequences = false;  // all sequences' rows on one axis, without padding; needs lengths
  Order order = Order::ascending;
  int blocks_at_once = 1;
  uint32_t step = 0;
  bool small = false;  // kernels for less shared memory
  uint32_t seed = 0;   // of Order::random
  const Tensor<float>* grad_lse = nullptr;
  Tensor<float>* dsinks = nullptr;
};

// Both fixed orders, one block at a time; then so many random ones, with two blocks that can wait for each other.
// EVENKEEL_ORDERS=N asks for more, for a longer search. With a sanitizer one random order: it looks at memory, not at bits.
inline std::vector<How> several_orders(int seeds) {
  if (kSanitized) return {{.order = Order::random, .blocks_at_once = 2, .seed = 1}};
  if (const char* const asked = std::getenv("EVENKEEL_ORDERS")) seeds = std::atoi(asked);
  std::vector<How> all{{.order = Order::ascending}, {.order = Order::descending}};
  for (int n = 1; n <= seeds; ++n)
    all.push_back({.order = Order::random, .blocks_at_once = 2, .seed = static_cast<uint32_t>(n)});
  return all;
}
inline std::string name_of(const How& how) {
  if (how.order != Order::random)
    return how.order == Order::ascending ? "ascending order" : "descending order";
  return "the random order with seed " + std::to_string(how.seed);
}

struct Launch {
  const How& how;
  template <class Kernel, class Arguments>
  void run(int64_t blocks, const Arguments& arguments) {
    cuda_emulator::run({.blocks = static_cast<int>(blocks),
                        .threads = Kernel::kThreads,
                        .shared_bytes = Kernel::kSharedBytes,
                        .order = how.order,
                        .blocks_at_once = how.blocks_at_once,
                        .seed = how.seed},
                       [&] { Kernel::run(arguments); });
  }
};

// Memory whose bytes are 0xff (NaN in every format) at birth, aligned to 256, between guards: bytes that nobody may write, and
// beyond them addresses that end the program where they are read or written.
class Poisoned {
 public:
  explicit Poisoned(size_t bytes)
      : bytes_(bytes), open_((bytes + 2 * kGuard + kPage - 1) / kPage * kPage), all_(open_ + 2 * kForbidden) {
    void* const space = mmap(nullptr, all_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<uint8_t*>(space) + kForbidden;
    if (mprotect(memory_, open_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    std::memset(memory_, 0xff, open_);
    data_ = memory_ + (open_ - kGuard - bytes) / kGuard * kGuard;  // as near to the end as may be
  }
  ~Poisoned() { munmap(memory_ - kForbidden, all_); }
  Poisoned(const Poisoned&) = delete;
  Poisoned& operator=(const Poisoned&) = delete;
  void* data() { return data_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  void expect_guards(const char* name) const {
    for (const uint8_t* at = memory_; at < memory_ + open_; ++at)
      if ((at < data_ || at >= data_ + bytes_) && *at != 0xff) {
        ADD_FAILURE() << name << ": byte " << at - data_ << " of " << bytes_ << " was overwritten";
        return;
      }
  }

 private:
  // Forbidden: farther than a wrong row, head or batch of any tensor here leads. It takes addresses, no memory.
  static constexpr size_t kGuard = 256, kPage = 65536, kForbidden = size_t{1} << 28;
  size_t bytes_, open_, all_;
  uint8_t *memory_, *data_;
};

// A tensor of 16-bit numbers: (B, heads, rows, D), or all sequences' rows on one axis, (rows, heads, D).
class Operand {
 public:
  Operand(const How& how, const std::array<int64_t, 4>& shape, const std::vector<int32_t>& lengths)
      : how_(how), shape_(shape), lengths_(lengths) {
    offsets_.resize(lengths.size());
    std::exclusive_scan(lengths.begin(), lengths.end(), offsets_.begin(), 0);
    rows_ = how.sequences ? std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) : shape[2];
    const auto [B, heads, rows, D] = shape;
    stride_ = how.sequences ? std::array{int64_t{0}, D, heads * D, int64_t{1}} : contiguous_strides(shape);
    memory_ = std::make_unique<Poisoned>(
        static_cast<size_t>((how.sequences ? 1 : B) * heads * std::max<int64_t>(rows_, 1) * D) * 2);
  }
  void write(const View<const float>& values) {
    each([&](int64_t b, int64_t h, int64_t i, int64_t d, uint16_t& to) {
      const float x = *values.at(b, h, i, d);
      to = static_cast<uint16_t>(how_.type == TensorType::fp16 ? gpu::fp16_bits(x) : gpu::bf16_bits(x));
    });
  }
  // Rows that do not exist: 0, as in a padded tensor.
  void read(Tensor<float>& values) {
    values = Tensor<float>(shape_);
    each([&](int64_t b, int64_t h, int64_t i, int64_t d, uint16_t& from) {
      *values.view().at(b, h, i, d) =
          how_.type == TensorType::fp16 ? gpu::fp16_value(from) : gpu::bf16_value(from);
    });
  }
  DeviceTensor tensor() { return {memory_->data(), stride_}; }
  const std::vector<int32_t>& offsets() const { return offsets_; }
  int64_t all_rows() const { return rows_; }
  void expect_guards(const char* name) const { memory_->expect_guards(name); }

 private:
  template <class F>
  void each(F f) {
    for (int64_t b = 0; b < shape_[0]; ++b)
      for (int64_t h = 0; h < shape_[1]; ++h)
        for (int64_t i = 0; i < (how_.sequences ? lengths_[static_cast<size_t>(b)] : shape_[2]); ++i)
          for (int64_t d = 0; d < shape_[3]; ++d) {
            const int64_t row = how_.sequences ? offsets_[static_cast<size_t>(b)] + i : i;
            f(b, h, i, d, memory_->as<uint16_t>()[b * stride_[0] + h * stride_[1] + row * stride_[2] + d]);
          }
  }

  const How& how_;
  std::array<int64_t, 4> shape_, stride_;
  std::vector<int32_t> lengths_, offsets_;
  int64_t rows_ = 0;
  std::unique_ptr<Poisoned> memory_;
};

}  // namespace evenkeel::emulated
