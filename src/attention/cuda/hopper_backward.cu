// The backward pass on Hopper, its host code: plans, memory, and the order of launches. Large heads have kernels of their own
// (hopper_backward_large.cuh) and what the Ampere class saves. For the others, first comes the delta of the heads
// with zero_sum. Then delta and the other facts of each row. Then dQ, dK and dV by one kernel, launched once for each kind of
// kv heads.
#include <stdexcept>

#include "attention/cuda/ampere_row_facts.h"
#include "attention/cuda/hopper_backward.cuh"
#include "base/sizes.h"
#include "gpu/cuda/launch.h"
#include "gpu/device_memory.h"

namespace evenkeel {
namespace hopper::backward {
namespace {

__global__ void fill_table_kernel(const __grid_constant__ TableRows rows) { FillTable::run(rows); }

constexpr int kernel_size(int64_t D) { return D <= 64 ? 64 : 128; }

struct Workspace {
  HeadRules* table;
  float *exact_delta, *log_sum;
};

// Did the forward pass add up its scores with fewer bits than this one, in FP8? Then L is not of the scores found here, and P
// adds up to one only if it is divided by its sum, which zero_sum's pass finds.
bool other_scores(const AttentionProblem& problem) {
  return std::any_of(problem.plans.begin(), problem.plans.end(),
                     [](const PrecisionPlan& plan) { return plan.at(Site::q).format == kE4m3; });
}
size_t lay_out(const AttentionProblem& problem, void* workspace, Backward& p, Workspace& work) {
  const int rows = kernel_size(problem.D) == 64 ? kTileRows<64> : kTileRows<128>;
  const int64_t heads = problem.B * problem.H;
  p.row_tiles = static_cast<int>(divide_up(problem.T, rows));
  p.key_tiles = static_cast<int>(divide_up(problem.N, kTileKeys));
  p.padded_rows = p.row_tiles * rows;
  Carver parts(workspace);
  p.next_item = parts.take<int>(kMostLaunches);
  p.turn = parts.take<int>(heads * p.row_tiles * 2);
  p.facts.shift = parts.take<float>(heads * p.padded_rows);
  p.facts.delta = parts.take<float>(heads * p.padded_rows);
  // Everything with a soft cap shares an instance that reads the inverses.
  const bool inverse =
      problem.softcap > 0 || any_head(problem, [](const HeadRules& rules) { return rules.consistent; });
  p.facts.inverse = inverse ? parts.take<float>(heads * p.padded_rows) : nullptr;
  const bool exact = any_head(problem, [](const HeadRules& rules) { return rules.exact_delta; });
  work.exact_delta = exact ? parts.take<float>(heads * problem.T) : nullptr;
  work.log_sum = exact && other_scores(problem) ? parts.take<float>(heads * problem.T) : nullptr;
  work.table = problem.plans.size() > 1 ? parts.take<HeadRules>(problem.H) : nullptr;
  p.dq_sum = parts.take<float>(heads * p.padded_rows * kernel_size(problem.D));
  return parts.used();
}

void copy_strides(int64_t (&to)[3], const DeviceTensor& tensor) {
  for (int axis = 0; axis < 3; ++axis) to[axis] = tensor.stride[static_cast<size_t>(axis)];
}

// Of the query heads [first, first + count).
Consistent consistent_heads(const AttentionProblem& problem, int64_t first, int64_t count) {
  int64_t consistent = 0;
  for (int64_t h = first; h < first + count; ++h) consistent += head_rules(problem.plan(h)).consistent;
  return consistent == 0       ? Consistent::no_head
         : consistent == count ? Consistent::every_head
                               : Consistent::by_head;
}

// All kv heads, in as few launches as there are kinds of them: query heads of one kv head add to the same dK and dV.
std::vector<KeyGroup> key_groups(const AttentionProblem& problem) {
  std::vector<KeyGroup> groups;
  if (problem.plans.size() == 1) {
    KeyGroup& only = groups.emplace_back(KeyGroup{consistent_heads(problem, 0, 1), {}});
    only.list.count = static_cast<int>(problem.G);
    only.list.all = true;
    return groups;
  }
  const int64_t heads = problem.H / problem.G;
  for (int64_t g = 0; g < problem.G; ++g) {
    const Consistent consistent = consistent_heads(problem, g * heads, heads);
    auto found = std::find_if(groups.begin(), groups.end(), [&](const KeyGroup& group) {
      return group.consistent == consistent && group.list.count < HeadList::kMost;
    });
    if (found == groups.end()) found = groups.insert(groups.end(), KeyGroup{consistent, {}});
    found->list.head[found->list.count++] = static_cast<uint16_t>(g);
  }
  if (groups.size() > kMostLaunches)
    throw std::invalid_argument("[attention] expected fewer kv heads with plans that differ");
  return groups;
}

}  // namespace
}  // namespace hopper::backward

std::shared_ptr<const FamilyPlan> hopper_prepare(const AttentionProblem& problem) {
  auto plan = std::make_shared<FamilyPlan>();
  if (has_large_heads(problem)) {
    plan->sizes = ampere::large_facts_sizes(problem);
    return plan;
  }
  hopper::backward::Backward p{};
  hopper::backward::Workspace work{};
  plan->sizes = {hopper::saved_layout(problem, nullptr).bytes,
                 hopper::backward::lay_out(problem, nullptr, p, work)};
  return plan;
}

void hopper_backward(const AttentionProblem& problem, const FamilyPlan&, const PassInputs& in,
                     const DeviceTensor& grad_output, const ForwardPass& saved, const BackwardPass& out,
                     void* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  using namespace hopper;
  using namespace hopper::backward;
  const bool fp16 = problem.type == TensorType::fp16;
  if (has_large_heads(problem))
    return (has_forms(problem)
                ? (fp16 ? launch_large_backward_forms<Fp16Pairs> : launch_large_backward_forms<Bf16Pairs>)
                : (fp16 ? launch_large_backward<Fp16Pairs> : launch_large_backward<Bf16Pairs>))(
        problem, in, grad_output, saved, out, workspace, stream);
  const Saved kept = saved_layout(problem, saved.saved);
  Backward p{};
  Workspace work{};
  static_cast<ScoreForms&>(p) = score_forms(problem);
  lay_out(problem, workspace, p, work);
  p.B = static_cast<int>(problem.B);
  p.H = static_cast<int>(problem.H);
  p.G = static_cast<int>(problem.G);
  p.D = static_cast<int>(problem.D);
  p.rules = head_rules(problem.plans[0]);
  p.table = work.table;
  p.grad_output = static_cast<const uint16_t*>(grad_output.data);
  p.o = static_cast<const uint16_t*>(saved.o.data);
  p.residue = kept.residue;
  p.lse = saved.lse;
  p.row_max = kept.row_max;
  p.row_sum = kept.row_sum;
  p.exact_delta = work.exact_delta;
  p.log_sum = work.log_sum;
  p.grad_lse = out.grad_lse;
  p.dsinks = out.dsinks;
  p.delta_out = out.delta;
  p.dq = static_cast<uint16_t*>(out.dq.data);
  p.dk = static_cast<uint16_t*>(out.dk.data);
  p.dv = static_cast<uint16_t*>(out.dv.data);
  copy_strides(p.grad_output_stride, grad_output);
  copy_strides(p.o_stride, saved.o);
  copy_strides(p.dq_stride, out.dq);
  copy_strides(p.dk_stride, out.dk);
  copy_strides(p.dv_stride, out.dv);
  if (work.table)
    fill_table(problem, work.table, [&](const TableRows& rows) {
      fill_table_kernel<<<1, FillTable::kThreads, 0, stream>>>(rows);
      check_launch("filling the table of heads' rules");
    });
  if (work.exact_delta)
    for (const HeadGroup& group : head_groups(
             problem, [](const HeadRules&a, const HeadRules&b) { return a.exact_delta == b.exact_delta; }))
      if (group.rules.exact_delta)
        exact_delta(problem, group, in, grad_output, saved.lse, work.exact_delta, work.log_sum, stream);
  (fp16 ? launch_backward<Fp16Pairs> : launch_backward<Bf16Pairs>)(problem, in, grad_output, p,
                                                                   key_groups(problem), stream);
}

}  // namespace evenkeel
