// One attention problem with its tensors on the GPU, for the stopwatches in C++.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "attention/kernel_families.h"
#include "cli/bench.h"
#include "gpu/device_memory.h"
#include "numerics/random.h"

namespace evenkeel::cli {

// BF16, causal, without a plan.
inline AttentionProblem causal_problem(int64_t B, int64_t H, int64_t T, int64_t D) {
  AttentionProblem p;
  p.B = B;
  p.H = p.G = H;
  p.T = p.N = T;
  p.D = D;
  p.type = TensorType::bf16;
  p.mask.causal = true;
  return p;
}

// q, k, v, dO and everything that a pass writes, contiguous (B, H or G, T or N, D or Dv). REQUIRES: tensors of 16 bits.
class AttentionOnDevice {
 public:
  // With `score_facts`, forward also finds the largest score and row mean of each head.
  explicit AttentionOnDevice(const AttentionProblem& p, bool score_facts = false)
      : call_(resolve(p, cuda_device())) {
    if (score_facts) score_facts_ = DeviceMemory(std::vector<float>(2 * static_cast<size_t>(p.H), 0.0f));
    const PassSizes& sizes = call_.sizes();
    const auto rows = static_cast<size_t>(p.B * p.H * p.T);
    // Uniform with variance 1; a block that repeats at no multiple of a head is as good as fresh numbers here.
    std::vector<uint16_t> values(1'000'003);
    for (size_t n = 0; n < tensors_.size(); ++n) {
      const std::array<int64_t, 4> shape = shape_of(n);
      const auto elements = static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3]);
      tensors_[n] = DeviceMemory(elements * sizeof(uint16_t));
      if (n >= kInputs) continue;
      for (size_t i = 0; i < values.size(); ++i) {
        const float x = (random_unit({1, 0, static_cast<uint32_t>(n)}, i) - 0.5f) * std::sqrt(12.0f);
        values[i] = bits_of(x, p.type);
      }
      for (size_t first = 0; first < elements; first += values.size())
        tensors_[n].upload(values.data(), std::min(values.size(), elements - first) * sizeof(uint16_t),
                           first * sizeof(uint16_t));
    }
    for (DeviceMemory& memory : rows_) memory = DeviceMemory(rows * sizeof(float));
    saved_ = DeviceMemory(sizes.saved);
    workspace_ = DeviceMemory(sizes.workspace);
  }
  void forward(void* stream) const { call_.forward(inputs(), results(), workspace_.data(), stream); }
  void backward(void* stream) const {
    BackwardPass out{tensor(5), tensor(6), tensor(7)};
    if (has_facts()) {
      out.residual = rows_[2].as<float>();
      out.delta_error = rows_[3].as<float>();
    }
    call_.backward(inputs(), tensor(3), results(), out, workspace_.data(), stream);
  }
  const KernelChoice& choice() const { return call_.choice(); }

 private:
  // Numbers below 2 whose significand has 8 bits are the same in both formats but for the exponent's place.
  static uint16_t bits_of(float x, TensorType type) {
    const uint32_t bits = std::bit_cast<uint32_t>(round_to(Rounding{kBf16}, x));
    if (type != TensorType::fp16) return static_cast<uint16_t>(bits >> 16);
    const int exponent = static_cast<int>(bits >> 23 & 255) - 127 + 15;
    if (exponent < 1) return 0;
    return static_cast<uint16_t>((bits >> 16 & 0x8000) | static_cast<uint32_t>(exponent) << 10 |
                                 (bits >> 13 & 1023));
  }
  bool has_facts() const { return call_.problem().with_facts; }
  // Of tensor n: v, dO, o and dv have Dv; k, v, dk and dv have the keys' heads.
  std::array<int64_t, 4> shape_of(size_t n) const {
    const AttentionProblem& p = call_.problem();
    const int64_t features = (n >= 2 && n <= 4) || n == 7 ? p.Dv : p.D;
    if (n == 1 || n == 2 || n >= 6) return {p.B, p.G, p.N, features};
    return {p.B, p.H, p.T, features};
  }
  DeviceTensor tensor(size_t n) const { return {tensors_[n].data(), contiguous_strides(shape_of(n))}; }
  PassInputs inputs() const { return {tensor(0), tensor(1), tensor(2)}; }
  ForwardPass results() const {
    ForwardPass out{tensor(4), rows_[0].as<float>(), saved_.data(),
                    has_facts() ? rows_[1].as<int32_t>() : nullptr};
    if (score_facts_.bytes() == 0) return out;
    out.largest_score = score_facts_.as<float>();
    out.largest_row_mean = out.largest_score + call_.problem().H;
    return out;
  }

  AttentionCall call_;
  static constexpr size_t kInputs = 4;
  std::array<DeviceMemory, 8> tensors_;  // q, k, v, dO, o, dq, dk, dv
  std::array<DeviceMemory, 4> rows_;     // lse, ties, residual, delta_error
  DeviceMemory saved_, workspace_, score_facts_;
};

// Seconds of one pass: the mean of a few that follow one another without a gap.
template <class Pass>
double pass_seconds(Pass pass) {
  constexpr int kCalls = 4;
  return device_seconds([&](void* stream) {
           for (int call = 0; call < kCalls; ++call) pass(stream);
         }) /
         kCalls;
}
inline double forward_seconds(const AttentionOnDevice& attention) {
  return pass_seconds([&](void* stream) { attention.forward(stream); });
}
inline double backward_seconds(const AttentionOnDevice& attention) {
  return pass_seconds([&](void* stream) { attention.backward(stream); });
}

}  // namespace evenkeel::cli
