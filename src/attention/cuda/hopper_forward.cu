// The forward pass on Hopper: O = softmax(a Q K^T) V, tile by tile, never in memory. Heads with one plan are one launch, and
// each launch is the kernel that their plan alone would have.
#include <algorithm>

#include "attention/cuda/hopper_forward.cuh"

namespace evenkeel {

void hopper_forward(const AttentionProblem& problem, const FamilyPlan&, const PassInputs& in,
                    const ForwardPass& out, void* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  using namespace hopper;
  using namespace hopper::forward;
  ForwardArguments a{};
  static_cast<ScoreForms&>(a) = score_forms(problem);
  a.o = static_cast<uint16_t*>(out.o.data);
  for (int axis = 0; axis < 3; ++axis) a.o_stride[axis] = out.o.stride[axis];
  a.lse = out.lse;
  a.H = static_cast<int>(problem.H);
  a.heads_per_group = static_cast<int>(problem.H / problem.G);
  a.D = static_cast<int>(problem.D);
  a.device_step = problem.device_step;
  a.below_all = -1;
  a.largest_score = out.largest_score;
  a.largest_row_mean = out.largest_row_mean;
  const Saved saved = saved_layout(problem, out.saved);
  const auto launch =
      problem.type == TensorType::fp16 ? launch_forward<Fp16Pairs> : launch_forward<Bf16Pairs>;
  for (const HeadGroup& group : head_groups(problem, computed_alike)) {
    a.rules = group.rules;
    a.list = group.list;
    a.random = {group.rules.seed, problem.step, problem.layer * 64 + 63};
    a.saved = saved;
    if (!group.rules.wide) a.saved.residue = nullptr;
    a.heads = static_cast<int>(problem.B) * group.list.count;
    a.section_heads = heads_in_cache(problem, a.heads);
    if (a.largest_score)
      launch_forward_facts(problem, in, out, a, workspace, stream);
    else
      launch(problem, in, out, a, has_forms(problem), workspace, stream);
  }
}

}  // namespace evenkeel
