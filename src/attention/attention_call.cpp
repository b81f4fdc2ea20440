#include "attention/attention_call.h"

#include <cstdlib>
#include <optional>

#include "attention/kernel_families.h"
#include "base/error.h"

namespace evenkeel {
namespace {

struct Chosen {
  const KernelFamily* family;
  std::string why;
};

// For tests and benches: this family of the GPU and no other, whatever the table would choose.
constexpr const char* kFamilyVariable = "EVENKEEL_KERNELS";

bool is_candidate(const KernelFamily& family, const AttentionProblem& problem, const CudaDevice& device) {
  const char* const asked = family.on_gpu ? std::getenv(kFamilyVariable) : nullptr;
  if (asked && *asked) return &kernel_family(asked) == &family;
  return !family.chosen_for || family.chosen_for(problem, device);
}

// What a pass asks for, and not the problem, in words.
constexpr const char* kGradLse = "a gradient of the log-sum-exp";

// The first family of the device that takes the problem and has the features `also`. REQUIRES: the problem is complete.
Chosen choose(const AttentionProblem& problem, bool on_gpu, const CudaDevice& device,
              std::optional<Feature> also = {}) {
  std::string refused;
  for (const KernelFamily& family : kernel_families()) {
    if (family.on_gpu != on_gpu || !is_candidate(family, problem, device)) continue;
    std::string what = not_taken(family, problem, device);
    if (what.empty() && also && !family.limits.has(*also)) what = kGradLse;
    if (what.empty()) return {&family, refused.empty() ? family.reason(problem) : refused};
    refused += fmt::format("{}{} do not take {}", refused.empty() ? "" : "; ", family.words, what);
  }
  throw std::invalid_argument(fmt::format(
      "[attention] expected a problem that some kernels of the {} take, got one that none does: {}",
      on_gpu ? "GPU" : "CPU", refused));
}

Chosen choose_on_gpu(const AttentionProblem& problem, const CudaDevice& device,
                     std::optional<Feature> also = {}) {
  require_usable(device);
  return choose(problem, /*on_gpu=*/true, device, also);
}

AttentionProblem taken_by(const KernelFamily& family, AttentionProblem problem) {
  const std::string what = not_taken(family, problem, family.on_gpu ? cuda_device() : CudaDevice{});
  require(what.empty(), "[attention] {} do not take {}", family.words, what);
  return problem;
}

}  // namespace

AttentionCall::AttentionCall(const KernelFamily& family, AttentionProblem complete, std::string why)
    : problem_(std::move(complete)),
      family_(&family),
      choice_{family.name, std::move(why)},
      plan_(family.prepare(problem_)) {}

AttentionCall::AttentionCall(const KernelFamily& family, const AttentionProblem& problem)
    : AttentionCall(family, taken_by(family, complete(problem)), "asked for") {}

const PassSizes& AttentionCall::sizes() const { return plan_->sizes; }

bool AttentionCall::could_give_facts() const { return family_->limits.has(Feature::facts); }

bool AttentionCall::gives_score_facts() const {
  return family_->gives_score_facts && family_->gives_score_facts(problem_);
}

bool AttentionCall::has_fact_pass() const { return evenkeel::has_fact_pass(*family_, problem_); }

void AttentionCall::forward(const PassInputs& in, const ForwardPass& out, void* workspace,
                            void* stream) const {
  check_forward(problem_, *family_, sizes(), in, out, workspace, stream);
  family_->forward(problem_, *plan_, in, out, workspace, stream);
}

void AttentionCall::backward(const PassInputs& in, const DeviceTensor& grad_output, const ForwardPass& saved,
                             const BackwardPass& out, void* workspace, void* stream) const {
  check_backward(problem_, *family_, sizes(), in, grad_output, saved, out, workspace, stream);
  family_->backward(problem_, *plan_, in, grad_output, saved, out, workspace, stream);
}

void AttentionCall::facts(const PassInputs& in, const DeviceTensor& grad_output, const ForwardPass& saved,
                          const FactPass& out, void* stream) const {
  check_facts(problem_, *family_, sizes(), in, grad_output, saved, out);
  family_->facts(problem_, in, grad_output, saved, out, stream);
}

AttentionCall resolve(const AttentionProblem& problem, const CudaDevice& device) {
  AttentionProblem whole = complete(problem);
  Chosen chosen = choose_on_gpu(whole, device);
  return {*chosen.family, std::move(whole), std::move(chosen.why)};
}

AttentionCall resolve(const AttentionProblem& problem, Cpu) {
  AttentionProblem whole = complete(problem);
  Chosen chosen = choose(whole, /*on_gpu=*/false, {});
  return {*chosen.family, std::move(whole), std::move(chosen.why)};
}

KernelChoice choose_kernel(const AttentionProblem& problem, const CudaDevice& device) {
  Chosen chosen = choose_on_gpu(complete(problem), device);
  return {chosen.family->name, std::move(chosen.why)};
}

KernelChoice choose_kernel(const AttentionProblem& problem, const CudaDevice& device, Feature also) {
  require(also == Feature::grad_lse, "[attention] expected the feature of a pass, grad_lse, got {}",
          static_cast<int>(also));
  Chosen chosen = choose_on_gpu(complete(problem), device, also);
  return {chosen.family->name, std::move(chosen.why)};
}

}  // namespace evenkeel
