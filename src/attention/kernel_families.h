// The families of attention kernels, as rows of one table: what each takes, and how it is called. The table is the
// documentation of what runs where, and the only place that knows a limit. Plain C++, in every build.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "attention/attention_call.h"

namespace evenkeel {

// What a problem may ask for and not every family has. Not asked of a plan: `accumulate`, since products on a GPU add up
// as the chip's own tensor cores do.
enum class Feature : uint16_t {
  plans_by_head = 1 << 0,
  softcap = 1 << 1,
  negative_scale = 1 << 2,
  windows = 1 << 3,
  visible = 1 << 4,  // a mask of its own
  facts = 1 << 5,    // ties, delta, residual, ...
  unaligned = 1 << 6,
  packed = 1 << 7,
  device_step = 1 << 8,
  first_sequence = 1 << 9,
  any_tile_keys = 1 << 10,  // others than 64 and 0
  slopes = 1 << 11,
  sinks = 1 << 12,
  grad_lse = 1 << 13,    // of a pass, not of a problem: pass_check.cpp
  value_size = 1 << 14,  // Dv unlike D
};

struct FamilyLimits {
  uint16_t features;     // of Feature
  uint8_t types;         // bit n: TensorType n
  int64_t largest_head;  // 0: any head size; of Dv, too
  int64_t head_step;     // head sizes are multiples of this
  size_t alignment;      // of `saved` and the workspace, in bytes

  bool has(Feature feature) const { return (features & static_cast<uint16_t>(feature)) != 0; }
  bool has(TensorType type) const { return (types >> static_cast<int>(type) & 1) != 0; }
};

// What a family works out of a problem before any call: resolved plans, sizes.
struct FamilyPlan {
  virtual ~FamilyPlan() = default;
  PassSizes sizes;
};

// Does the problem have more than a causal or full mask: windows, a mask of its own, a soft cap, slopes, sinks?
inline bool has_forms(const AttentionProblem& p) {
  return p.mask.window_left >= 0 || (p.mask.window_right >= 0 && !p.mask.causal) || p.softcap != 0 ||
         p.mask.visible.present() || !p.slopes.empty() || !p.sinks.empty();
}

// Has the problem heads above 128, or values of another size? The fast kernels have tiles of their own for those.
inline bool has_large_heads(const AttentionProblem& p) { return p.D > 128 || p.Dv != p.D; }

// Few query rows for each key head, and many keys (decoding)? The Ampere class has kernels for that, whatever the head size and
// the form: they read each key once for all rows that see it. Not where heads differ, or ties are counted over all keys in order.
inline bool has_few_rows(const AttentionProblem& p) {
  constexpr int64_t kMostRows = 64, kLeastKeys = 512;  // four tiles of rows; two splits of the keys
  return p.T * (p.H / p.G) <= kMostRows && p.N >= kLeastKeys && p.plans.size() == 1 &&
         rules_of(p.plans[0].stabiliser).shift != ShiftRule::paper_capped;
}

struct KernelFamily {
  const char* name;   // "hopper"
  const char* words;  // "the Hopper kernels"
  bool on_gpu;
  FamilyLimits limits;
  // What the family does not take besides: of a device, of a plan, of features and sizes together; "" where it takes it. Null:
  // takes any.
  std::string (*device_not_taken)(const CudaDevice& device);
  std::string (*plan_not_taken)(const PrecisionPlan& plan, TensorType type);
  std::string (*shape_not_taken)(const AttentionProblem& problem);
  // Is the family tried for such a problem, on a device that it takes? Else it runs where it is asked for by name. Null: yes.
  bool (*chosen_for)(const AttentionProblem& problem, const CudaDevice& device);
  std::string (*reason)(const AttentionProblem& problem);  // why it runs, where no faster one was refused
  // Does its forward pass find the largest score and row mean of a problem that it takes? Null: no.
  bool (*gives_score_facts)(const AttentionProblem& problem);
  // Problems are complete here and the family takes them; tensors and buffers are checked.
  std::shared_ptr<const FamilyPlan> (*prepare)(const AttentionProblem& problem);
  void (*forward)(const AttentionProblem& problem, const FamilyPlan& plan, const PassInputs& in,
                  const ForwardPass& out, void* workspace, void* stream);
  void (*backward)(const AttentionProblem& problem, const FamilyPlan& plan, const PassInputs& in,
                   const DeviceTensor& grad_output, const ForwardPass& saved, const BackwardPass& out,
                   void* workspace, void* stream);
  // Facts of rows by a pass of its own (FactPass), of problems with facts of scores. Null: the family has none.
  void (*facts)(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                const ForwardPass& saved, const FactPass& out, void* stream);
};

// Of a problem that the family takes.
bool has_fact_pass(const KernelFamily& family, const AttentionProblem& problem);

std::string types_taken(const FamilyLimits& limits);  // "bf16, fp32"

// Fastest first. A family is added by a row (kernel_families.cpp).
std::span<const KernelFamily> kernel_families();

// What hopper_fp8 computes, as text of a plan.
inline constexpr std::string_view kHopperFp8Plan = "fp8_trains";
const KernelFamily& kernel_family(std::string_view name);  // std::invalid_argument where there is none

// As choose_kernel of attention_call.h, among the families that have `also`: what a pass will ask for, not the problem.
KernelChoice choose_kernel(const AttentionProblem& problem, const CudaDevice& device, Feature also);

// What the family does not take in a complete problem on this device, in words; "" where it takes all of it. The device is
// looked at by families of the GPU alone.
std::string not_taken(const KernelFamily& family, const AttentionProblem& problem, const CudaDevice& device);

// The check of a pass before anything runs: tensors and buffers of a complete problem.
void check_forward(const AttentionProblem& problem, const KernelFamily& family, const PassSizes& sizes,
                   const PassInputs& in, const ForwardPass& out, const void* workspace, const void* stream);
void check_backward(const AttentionProblem& problem, const KernelFamily& family, const PassSizes& sizes,
                    const PassInputs& in, const DeviceTensor& grad_output, const ForwardPass& saved,
                    const BackwardPass& out, const void* workspace, const void* stream);
void check_facts(const AttentionProblem& problem, const KernelFamily& family, const PassSizes& sizes,
                 const PassInputs& in, const DeviceTensor& grad_output, const ForwardPass& saved,
                 const FactPass& out);

}  // namespace evenkeel
