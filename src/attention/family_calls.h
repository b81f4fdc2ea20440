// The families of kernels, as their table calls them: what the fields `prepare`, `forward` and `backward` of
// KernelFamily point at. In a build without CUDA those of the GPU throw, and say so. Internal to src/attention.
#pragma once

#include "attention/kernel_families.h"

namespace evenkeel {

#define EVENKEEL_FAMILY(family)                                                                              \
  std::shared_ptr<const FamilyPlan> family##_prepare(const AttentionProblem& problem);                       \
  void family##_forward(const AttentionProblem& problem, const FamilyPlan& plan, const PassInputs& in,       \
                        const ForwardPass& out, void* workspace, void* stream);                              \
  void family##_backward(const AttentionProblem& problem, const FamilyPlan& plan, const PassInputs& in,      \
                         const DeviceTensor& grad_output, const ForwardPass& saved, const BackwardPass& out, \
                         void* workspace, void* stream)
EVENKEEL_FAMILY(hopper);
EVENKEEL_FAMILY(hopper_fp8);
EVENKEEL_FAMILY(ampere);
EVENKEEL_FAMILY(any_plan);
EVENKEEL_FAMILY(cpu);
#undef EVENKEEL_FAMILY
void hopper_facts(const AttentionProblem& problem, const PassInputs& in, const DeviceTensor& grad_output,
                  const ForwardPass& saved, const FactPass& out, void* stream);

}  // namespace evenkeel
