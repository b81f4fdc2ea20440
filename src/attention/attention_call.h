// An attention problem resolved for a device: which family of kernels runs it, and why; how much memory it needs; its
// plans, completed. Made once, used at every step. The families are rows of one table, which is also the documentation
// of what runs where. Plain C++: no CUDA header, and a build without CUDA has it too (its GPU calls throw, and say so).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "attention/attention_problem.h"
#include "gpu/device.h"

namespace evenkeel {

// --- What a pass reads and writes. Memory of the device that runs the problem.

// Strides in elements. A packed sequence of all batches has stride[0] = 0.
struct DeviceTensor {
  void* data = nullptr;
  std::array<int64_t, 4> stride{};  // (B, H or G, T or N, D)

  bool present() const { return data != nullptr; }
};

struct PassInputs {
  DeviceTensor q;  // (B, H, T, D)
  DeviceTensor k;  // (B, G, N, D)
  DeviceTensor v;  // (B, G, N, Dv)
};

struct ForwardPass {
  DeviceTensor o;           // (B, H, T, Dv)
  float* lse = nullptr;     // (B, H, T) contiguous: L
  void* saved = nullptr;    // PassSizes::saved bytes: what backward needs besides; opaque
  int32_t* ties = nullptr;  // (B, H, T), optional
  // Optional, both or none, (H): raised to a head's largest score, and to its largest |mean of the scores that a row sees|.
  // All bits are set before the first pass. Where AttentionCall::gives_score_facts.
  float *largest_score = nullptr, *largest_row_mean = nullptr;
};

struct BackwardPass {
  DeviceTensor dq;      // (B, H, T, D)
  DeviceTensor dk, dv;  // (B, G, N, D), (B, G, N, Dv); on a GPU with facts, both may be null: not computed
  // (B, H, T), optional: as used, keel included. Of all sequences where AttentionCall::has_fact_pass, which needs no with_facts.
  float* delta = nullptr;
  // Optional, (B, H, T): as in AttentionBackward, and delta_lp - delta_hp, where delta_hp = sum P dP / sum P.
  float *residual = nullptr, *residual_floor = nullptr, *delta_error = nullptr;
  // Optional: the gradient of L, (B, H, T), which is read; that of the problem's sinks, (H).
  const float* grad_lse = nullptr;
  float* dsinks = nullptr;
};

// A pass behind the other two, where AttentionCall::has_fact_pass: facts of the rows of the problem's first fact_sequences
// sequences; the rest is left as it is. Of the very dS that dQ and dK received.
struct FactPass {
  const float* delta =
      nullptr;                // (B, H, T): as backward gave it, where it had no gradient of the log-sum-exp
  float* residual = nullptr;  // (B, H, T): as in AttentionBackward, but in FP32
  int32_t* ties = nullptr;    // (B, H, T), optional
};

struct PassSizes {
  size_t saved =
      0;  // bytes from forward to backward: B H T times what depends on neither B, T nor N; all written
  size_t workspace = 0;  // bytes, enough for either pass; not kept between calls
};

// Does the tensor start at a multiple of 16 bytes, with a last stride of 1 and others that are multiples
// of 8? Hopper's copy engine needs that. The stride of an axis of one entry (of `sizes`) is not looked at,
// and 0 is a stride of the batch axis alone (a packed tensor).
bool is_aligned(const DeviceTensor& tensor, const std::array<int64_t, 4>& sizes);

// --- The call

struct Cpu {};  // as the device that a problem is resolved for

struct KernelChoice {
  std::string_view kernel;  // the family's name
  std::string why;  // in words: what the fast kernels take here, or the first thing that they do not take
};

struct KernelFamily;  // kernel_families.h
struct FamilyPlan;

class AttentionCall {
 public:
  // By this very family; std::invalid_argument where it does not take the problem. resolve chooses one.
  AttentionCall(const KernelFamily& family, const AttentionProblem& problem);

  const AttentionProblem& problem() const { return problem_; }  // complete
  const KernelChoice& choice() const { return choice_; }
  const PassSizes& sizes() const;
  // Could the same kernels give facts? Else facts need a call of their own, which other kernels run.
  bool could_give_facts() const;
  // Does forward find the largest score and row mean where it is asked? The other outputs' bits stay as they are.
  bool gives_score_facts() const;
  // Has the family a pass of its own for facts of rows? Then the same kernels train, with the same bits.
  bool has_fact_pass() const;
  // Of the random numbers: changes from step to step, and nothing of what was resolved depends on it.
  void set_step(uint32_t step) { problem_.step = step; }

  // Throw std::invalid_argument where a tensor or a buffer does not fit, DataError where CUDA reports an error. Never
  // allocate device memory, never synchronise. Two calls may run on two streams at once. The `stream` is a cudaStream_t;
  // null on the CPU, where a pass is done when it returns.
  void forward(const PassInputs& in, const ForwardPass& out, void* workspace, void* stream) const;
  void backward(const PassInputs& in, const DeviceTensor& grad_output, const ForwardPass& saved,
                const BackwardPass& out, void* workspace, void* stream) const;
  // Reads inputs, saved.lse and saved.saved as both passes left them; needs no workspace.
  void facts(const PassInputs& in, const DeviceTensor& grad_output, const ForwardPass& saved,
             const FactPass& out, void* stream) const;

 private:
  AttentionCall(const KernelFamily& family, AttentionProblem complete, std::string why);
  friend AttentionCall resolve(const AttentionProblem&, const CudaDevice&);
  friend AttentionCall resolve(const AttentionProblem&, Cpu);

  AttentionProblem problem_;
  const KernelFamily* family_;
  KernelChoice choice_;
  std::shared_ptr<const FamilyPlan> plan_;
};

// The fastest family of the device that takes the problem. Throw std::invalid_argument on what the definition does not
// allow or no family of the device takes, DataError where the device is absent or too old.
AttentionCall resolve(const AttentionProblem& problem, const CudaDevice& device);
AttentionCall resolve(const AttentionProblem& problem, Cpu);
// The choice alone, for a device that need not be at hand.
KernelChoice choose_kernel(const AttentionProblem& problem, const CudaDevice& device);

}  // namespace evenkeel
