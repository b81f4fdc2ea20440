// The GPU's families of kernels in a build without CUDA: they say so. cmake/cuda.cmake chooses between this and cuda/.
#include "attention/family_calls.h"
#include "base/error.h"

namespace evenkeel {
namespace {

[[noreturn]] void refuse() { throw DataError("built without CUDA"); }

}  // namespace

std::shared_ptr<const FamilyPlan> hopper_prepare(const AttentionProblem&) { refuse(); }
void hopper_forward(const AttentionProblem&, const FamilyPlan&, const PassInputs&, const ForwardPass&, void*,
                    void*) {
  refuse();
}
void hopper_backward(const AttentionProblem&, const FamilyPlan&, const PassInputs&, const DeviceTensor&,
                     const ForwardPass&, const BackwardPass&, void*, void*) {
  refuse();
}
void hopper_facts(const AttentionProblem&, const PassInputs&, const DeviceTensor&, const ForwardPass&,
                  const FactPass&, void*) {
  refuse();
}
std::shared_ptr<const FamilyPlan> hopper_fp8_prepare(const AttentionProblem&) { refuse(); }
void hopper_fp8_forward(const AttentionProblem&, const FamilyPlan&, const PassInputs&, const ForwardPass&,
                        void*, void*) {
  refuse();
}
void hopper_fp8_backward(const AttentionProblem&, const FamilyPlan&, const PassInputs&, const DeviceTensor&,
                         const ForwardPass&, const BackwardPass&, void*, void*) {
  refuse();
}
std::shared_ptr<const FamilyPlan> ampere_prepare(const AttentionProblem&) { refuse(); }
void ampere_forward(const AttentionProblem&, const FamilyPlan&, const PassInputs&, const ForwardPass&, void*,
                    void*) {
  refuse();
}
void ampere_backward(const AttentionProblem&, const FamilyPlan&, const PassInputs&, const DeviceTensor&,
                     const ForwardPass&, const BackwardPass&, void*, void*) {
  refuse();
}
std::shared_ptr<const FamilyPlan> any_plan_prepare(const AttentionProblem&) { refuse(); }
void any_plan_forward(const AttentionProblem&, const FamilyPlan&, const PassInputs&, const ForwardPass&,
                      void*, void*) {
  refuse();
}
void any_plan_backward(const AttentionProblem&, const FamilyPlan&, const PassInputs&, const DeviceTensor&,
                       const ForwardPass&, const BackwardPass&, void*, void*) {
  refuse();
}

}  // namespace evenkeel
