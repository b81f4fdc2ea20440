// The check of a pass before anything runs: tensors and buffers against the problem and what its family needs. The same
// words on the CPU and on a GPU; reads none of the memory.
#include <algorithm>
#include <cmath>

#include "attention/kernel_families.h"
#include "base/error.h"

namespace evenkeel {
namespace {

constexpr uintptr_t kAlignedBytes = 16;
constexpr int64_t kAlignedStride = 8;  // elements of bf16 in kAlignedBytes

using Sizes = std::array<int64_t, 4>;

std::string strides_of(const DeviceTensor& t) {
  return fmt::format("({}, {}, {}, {})", t.stride[0], t.stride[1], t.stride[2], t.stride[3]);
}

bool starts_at_multiple(const void* memory, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(memory) % bytes == 0;
}

// No two elements in one place: each stride steps over all that the smaller ones reach. That holds for every slice and
// permutation of a dense tensor; strides that interleave without meeting (2 and 3, of two entries each) are refused too.
bool are_apart(const DeviceTensor& t, const Sizes& sizes) {
  std::array<std::pair<double, double>, 4> axes;  // the stride's size, entries; exact for any memory there is
  for (size_t axis = 0; axis < 4; ++axis)
    axes[axis] = {std::fabs(static_cast<double>(t.stride[axis])), static_cast<double>(sizes[axis])};
  std::ranges::sort(axes);
  double reach = 0;
  for (const auto& [stride, entries] : axes) {
    if (entries <= 1) continue;
    if (stride <= reach) return false;
    reach += stride * (entries - 1);
  }
  return true;
}

// The tensors and buffers of one pass, all checked alike.
class PassCheck {
 public:
  PassCheck(const AttentionProblem& problem, const KernelFamily& family, const PassSizes& sizes)
      : p_(problem), family_(family), sizes_(sizes) {}

  // `size`: features, D or Dv.
  void query(const char* name, const DeviceTensor& t, int64_t size, bool written) const {
    tensor(name, t, {p_.B, p_.H, p_.T, size}, !p_.mask.query_offsets.empty(), written);
  }
  void key(const char* name, const DeviceTensor& t, int64_t size, bool written) const {
    tensor(name, t, {p_.B, p_.G, p_.N, size}, !p_.mask.key_offsets.empty(), written);
  }
  void inputs(const PassInputs& in) const {
    query("q", in.q, p_.D, /*written=*/false);
    key("k", in.k, p_.D, false);
    key("v", in.v, p_.Dv, false);
  }

  // (B, H, T), contiguous.
  template <class T>
  void rows(const char* name, const T* data) const {
    require(starts_at_multiple(data, alignof(T)),
            "[attention] expected {} at a multiple of its element's {} bytes", name, alignof(T));
  }
  template <class T>
  void fact(const char* name, const T* data) const {
    rows(name, data);
    // Which kernels run depends on whether facts are asked for. The CPU has one family, which always gives them.
    require(!data || p_.with_facts || !family_.on_gpu,
            "[attention] expected with_facts where {} is asked for", name);
  }
  void lse(const float* data) const {
    require(data != nullptr, "[attention] expected lse, got null");
    rows("lse", data);
  }

  void saved(const void* memory) const { buffer("saved", memory, sizes_.saved); }
  void buffers(const void* saved_memory, const void* workspace, const void* stream) const {
    saved(saved_memory);
    buffer("workspace", workspace, sizes_.workspace);
    require(family_.on_gpu || stream == nullptr, "[attention] expected no stream on the CPU, got one");
  }

 private:
  void tensor(const char* name, const DeviceTensor& t, const Sizes& sizes, bool packed, bool written) const {
    require(t.present(), "[attention] expected a tensor {}, got null", name);
    require(starts_at_multiple(t.data, element_bytes(p_.type)),
            "[attention] expected {} at a multiple of its element's {} bytes", name, element_bytes(p_.type));
    require(!packed || t.stride[0] == 0,
            "[attention] expected a batch stride of 0 for {}, which has offsets, got strides {}", name,
            strides_of(t));
    require(
        !written || are_apart(t, {packed ? 1 : sizes[0], sizes[1], sizes[2], sizes[3]}),
        "[attention] expected {}, which is written, without two elements in one place (each stride beyond "
        "all that the smaller ones reach), got strides {} for sizes ({}, {}, {}, {})",
        name, strides_of(t), sizes[0], sizes[1], sizes[2], sizes[3]);
    require(
        family_.limits.has(Feature::unaligned) || is_aligned(t, sizes),
        "[attention] expected {} at a multiple of 16 bytes, its last stride 1 and the others multiples of "
        "8 (as `aligned` promises; without that promise the any-plan kernels run), got strides {}",
        name, strides_of(t));
  }

  void buffer(const char* name, const void* memory, size_t bytes) const {
    require(bytes == 0 || memory != nullptr, "[attention] expected {} of {} bytes, got null", name, bytes);
    require(starts_at_multiple(memory, family_.limits.alignment),
            "[attention] expected {} at a multiple of {} bytes", name, family_.limits.alignment);
  }

  const AttentionProblem& p_;
  const KernelFamily& family_;
  const PassSizes& sizes_;
};

}  // namespace

bool is_aligned(const DeviceTensor& tensor, const std::array<int64_t, 4>& sizes) {
  if (!starts_at_multiple(tensor.data, kAlignedBytes)) return false;
  if (sizes[3] > 1 && tensor.stride[3] != 1) return false;
  for (size_t axis = 0; axis < 3; ++axis) {
    const int64_t stride = tensor.stride[axis];
    if (sizes[axis] > 1 && (stride % kAlignedStride != 0 || stride < 0 || (stride == 0 && axis > 0)))
      return false;
  }
  return true;
}

void check_forward(const AttentionProblem& problem, const KernelFamily& family, const PassSizes& sizes,
                   const PassInputs& in, const ForwardPass& out, const void* workspace, const void* stream) {
  const PassCheck check(problem, family, sizes);
  check.inputs(in);
  check.query("o", out.o, problem.Dv, /*written=*/true);
  check.lse(out.lse);
  check.fact("ties", out.ties);
  check.rows("largest_score", out.largest_score);
  check.rows("largest_row_mean", out.largest_row_mean);
  require((out.largest_score == nullptr) == (out.largest_row_mean == nullptr),
          "[attention] expected largest_score and largest_row_mean, or neither");
  require(
      !out.largest_score || (family.gives_score_facts && family.gives_score_facts(problem)),
      "[attention] {} do not find the largest score and row mean of this problem (gives_score_facts says so)",
      family.words);
  check.buffers(out.saved, workspace, stream);
}

void check_backward(const AttentionProblem& problem, const KernelFamily& family, const PassSizes& sizes,
                    const PassInputs& in, const DeviceTensor& grad_output, const ForwardPass& saved,
                    const BackwardPass& out, const void* workspace, const void* stream) {
  const PassCheck check(problem, family, sizes);
  check.inputs(in);
  check.query("grad_output", grad_output, problem.Dv, /*written=*/false);
  check.query("o", saved.o, problem.Dv, false);
  check.query("dq", out.dq, problem.D, /*written=*/true);
  // Facts alone: on a GPU, without both.
  if (!family.on_gpu || !problem.with_facts || out.dk.present() || out.dv.present()) {
    check.key("dk", out.dk, problem.D, true);
    check.key("dv", out.dv, problem.Dv, true);
  }
  check.lse(saved.lse);
  check.rows("grad_lse", out.grad_lse);
  require(!out.grad_lse || family.limits.has(Feature::grad_lse),
          "[attention] {} do not take a gradient of the log-sum-exp (grad_lse)", family.words);
  check.rows("dsinks", out.dsinks);
  require(!out.dsinks || !problem.sinks.empty(),
          "[attention] expected sinks where dsinks is asked for, got none");
  if (has_fact_pass(family, problem))
    check.rows("delta", out.delta);
  else
    check.fact("delta", out.delta);
  check.fact("residual", out.residual);
  check.fact("residual_floor", out.residual_floor);
  check.fact("delta_error", out.delta_error);
  check.buffers(saved.saved, workspace, stream);
}

void check_facts(const AttentionProblem& problem, const KernelFamily& family, const PassSizes& sizes,
                 const PassInputs& in, const DeviceTensor& grad_output, const ForwardPass& saved,
                 const FactPass& out) {
  const PassCheck check(problem, family, sizes);
  require(has_fact_pass(family, problem),
          "[attention] {} have no pass for facts of this problem's rows (has_fact_pass says so)",
          family.words);
  check.inputs(in);
  check.query("grad_output", grad_output, problem.Dv, /*written=*/false);
  check.lse(saved.lse);
  check.saved(saved.saved);
  require(out.delta && out.residual,
          "[attention] expected delta, as the backward pass gave it, and residual, got null");
  check.rows("delta", out.delta);
  check.rows("residual", out.residual);
  check.rows("ties", out.ties);
}

}  // namespace evenkeel
