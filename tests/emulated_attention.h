// The Ampere-class kernels run by the CUDA emulator on the problems of attention_cases.h, through the host code that the GPU
// uses. Memory is poisoned, and what nobody may write is looked at afterwards.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "attention/cuda/ampere_passes.h"
#include "attention_cases.h"
#include "attention_runs.h"

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
  const Tensor<float>* grad_lse = nullptr;
  Tensor<float>* dsinks = nullptr;
};

struct Launch {
  const How& how;
  template <class Kernel, class Arguments>
  void run(int64_t blocks, const Arguments& arguments) {
    cuda_emulator::run({.blocks = static_cast<int>(blocks),
                        .threads = Kernel::kThreads,
                        .shared_bytes = Kernel::kSharedBytes,
                        .order = how.order,
                        .blocks_at_once = how.blocks_at_once},
                       [&] { Kernel::run(arguments); });
  }
};

// Memory whose bytes are 0xff (NaN in every format) at birth, aligned to 256, between guards.
class Poisoned {
 public:
  explicit Poisoned(size_t bytes) : bytes_(bytes), memory_(bytes + 3 * kGuard, 0xff) {
    const auto start = reinterpret_cast<uintptr_t>(memory_.data());
    data_ = memory_.data() + kGuard - start % kGuard;
    if (static_cast<size_t>(data_ - memory_.data()) < 16) data_ += kGuard;
  }
  void* data() { return data_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  void expect_guards(const char* name) const {
    for (const uint8_t* at = memory_.data(); at < memory_.data() + memory_.size(); ++at)
      if ((at < data_ || at >= data_ + bytes_) && *at != 0xff) {
        ADD_FAILURE() << name << ": byte " << at - data_ << " of " << bytes_ << " was overwritten";
        return;
      }
  }

 private:
  static constexpr size_t kGuard = 256;
  size_t bytes_;
  std::vector<uint8_t> memory_;
  uint8_t* data_;
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

// Both passes. o, lse, delta, dq, dk, dv of the result are set.
inline AttentionBuffers run(const AttentionProblem& config, const Problem& host, const How& how = {}) {
  AttentionProblem p = problem_of(config, host.in);
  p.type = how.type;
  p.step = how.step;
  const std::array<int64_t, 4> per_query{p.B, p.H, p.T, p.D}, per_key{p.B, p.G, p.N, p.D};
  Operand q(how, per_query, host.query_lengths), o = Operand(how, per_query, host.query_lengths),
                                                 dq(how, per_query, host.query_lengths),
                                                 grad(how, per_query, host.query_lengths);
  Operand k(how, per_key, host.key_lengths), v(how, per_key, host.key_lengths),
      dk(how, per_key, host.key_lengths), dv(how, per_key, host.key_lengths);
  q.write(host.in.q), k.write(host.in.k), v.write(host.in.v), grad.write(host.grad_output);
  if (how.sequences) {
    p.mask.query_offsets = q.offsets(), p.mask.key_offsets = k.offsets();
    p.mask.query_rows = q.all_rows(), p.mask.key_rows = k.all_rows();
  }
  const PassSizes sizes = ampere::pass_sizes(p, how.small);
  const size_t row_bytes = static_cast<size_t>(p.B * p.H * p.T) * sizeof(float);
  Poisoned lse(row_bytes), delta(row_bytes), saved(sizes.saved), workspace(sizes.workspace);
  const PassInputs in{q.tensor(), k.tensor(), v.tensor()};
  const ForwardPass forward{o.tensor(), lse.as<float>(), saved.data(), nullptr};
  BackwardPass backward{dq.tensor(), dk.tensor(), dv.tensor()};
  backward.delta = delta.as<float>();
  backward.grad_lse = how.grad_lse ? how.grad_lse->values().data() : nullptr;
  backward.dsinks = how.dsinks ? how.dsinks->values().data() : nullptr;
  Launch launch{how};
  ampere::with_kernels_of(p, how.small, [&]<class Pairs, int kHead, bool kSmall>() {
    ampere::forward_pass<Pairs, kHead, kSmall>(p, in, forward, workspace.data(), launch);
    std::memset(workspace.data(), 0xff, sizes.workspace);  // not kept between calls
    ampere::backward_pass<Pairs, kHead, kSmall>(p, in, grad.tensor(), forward, backward, workspace.data(),
                                                launch);
  });
  AttentionBuffers out(host.in, /*with_facts=*/true);
  o.read(out.o), dq.read(out.dq), dk.read(out.dk), dv.read(out.dv);
  std::memcpy(out.lse.values().data(), lse.data(), row_bytes);
  std::memcpy(out.delta.values().data(), delta.data(), row_bytes);
  for (auto [name, operand] : {std::pair{"q", &q},
                               {"k", &k},
                               {"v", &v},
                               {"grad_output", &grad},
                               {"o", &o},
                               {"dq", &dq},
                               {"dk", &dk},
                               {"dv", &dv}})
    operand->expect_guards(name);
  lse.expect_guards("lse"), delta.expect_guards("delta"), saved.expect_guards("saved");
  workspace.expect_guards("workspace");
  return out;
}

}  // namespace evenkeel::emulated
