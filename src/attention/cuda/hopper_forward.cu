// The forward pass on Hopper: O = softmax(a Q K^T) V, tile by tile, never in memory. Heads with one plan are one launch, and
// one more for far rows. Each is the kernel that their plan alone would have.
#include "attention/cuda/hopper_forward.cuh"

#include "attention/cuda/hopper_forward_block.cuh"

namespace evenkeel {

void hopper_forward(const AttentionProblem& problem, const FamilyPlan&, const PassInputs& in,
                    const ForwardPass& out, void* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  using namespace hopper;
  using namespace hopper::forward;
  const bool fp16 = problem.type == TensorType::fp16, forms = has_forms(problem);
  const std::vector<ForwardArguments> groups = forward_groups(problem, out);
  if (has_large_heads(problem) && forms)
    (fp16 ? launch_large_forward_forms<Fp16Pairs>
          : launch_large_forward_forms<Bf16Pairs>)(problem, in, out, groups, workspace, stream);
  else if (has_large_heads(problem))
    (fp16 ? launch_large_forward<Fp16Pairs> : launch_large_forward<Bf16Pairs>)(problem, in, out, groups,
                                                                               workspace, stream);
  else if (out.largest_score)
    launch_forward_facts(problem, in, out, groups, workspace, stream);
  else
    (fp16 ? launch_forward<Fp16Pairs> : launch_forward<Bf16Pairs>)(problem, in, out, groups, forms, workspace,
                                                                   stream);
}

}  // namespace evenkeel
