// Any plan on any GPU from sm_80 on: resolves the plans, lays out the memory, prepares the operands.
#include <algorithm>
#include <bit>

#include "attention/cuda/any_plan_launch.cuh"
#include "attention/cuda/any_plan_prepare.cuh"
#include "attention/family_calls.h"
#include "attention/head_plan.h"
#include "gpu/device_memory.h"
#include "numerics/round_block.h"

namespace evenkeel {
namespace {

using namespace any_plan;

constexpr int kUnbounded = 1 << 29;  // a window wider than any sequence

// bf16 parts that hold every number of the rounding's format.
uint8_t parts_of(const Rounding& r) { return static_cast<uint8_t>((r.format.significand_bits + 1 + 7) / 8); }

// Does nothing to bf16 numbers?
bool keeps_bf16(const Rounding& r) {
  return r.format.exponent_bits == kBf16.exponent_bits &&
         r.format.significand_bits >= kBf16.significand_bits && r.format.has_infinity && !r.saturate &&
         r.scale_exponent == 0;
}
bool is_bf16_number(const Rounding& r) { return parts_of(r) == 1; }

// bf16 parts of a prepared operand: under a scale that is no power of two a number may have all of FP32's bits.
uint8_t operand_parts(const Rounding& r, bool wider_than_bf16) {
  const SharedScale& shared = r.shared;
  if (shared == SharedScale{}) return wider_than_bf16 ? parts_of(r) : 1;
  const bool power = shared.rule == ScaleRule::e8m0 || shared.rule == ScaleRule::e8m0_up;
  return power ? parts_of(r) : parts_of(Rounding{});
}

// What the backward pass reads, in the places of what the forward pass reads.
PrecisionPlan backward_readings(PrecisionPlan plan) {
  for (const SecondReading& row : kSecondReadings)
    if (row.first <= Site::v) plan.at(row.first) = plan.at(row.site);
  return plan;
}

// The quickest kernels that round as the loops of this plan do.
Variant variant_of_formats(const DevicePlan& d) {
  const auto kind = [&](Site site) { return d.site[static_cast<int>(site)].kind; };
  for (Site site : {Site::scores, Site::shifted, Site::row_sum, Site::pv, Site::dprobs})
    if (kind(site) > RoundKind::bf16) return Variant::any;
  if (std::max({d.parts_probs, d.parts_probs_bwd, d.parts_dscores}) > 1) return Variant::any;
  const auto [least, most] = std::minmax({kind(Site::probs), kind(Site::probs_bwd), kind(Site::dscores)});
  return least < RoundKind::bf16 || most > RoundKind::nearest ? Variant::any
         : most == RoundKind::nearest                         ? Variant::full
                                                              : Variant::quick;
}

struct Resolved : FamilyPlan {
  explicit Resolved(const AttentionProblem& problem) {
    const auto heads = static_cast<int64_t>(problem.plans.size()), group = problem.H / problem.G;
    for (const PrecisionPlan& plan : problem.plans) {
      plans.emplace_back(plan);
      rows.push_back(row_of(problem, plan, plans.back(), plans.back().plan));
      backward_rows.push_back(row_of(problem, plan, plans.back(), backward_readings(plans.back().plan)));
    }
    for (std::vector<DevicePlan>* table : {&rows, &backward_rows})
      for (int64_t h = 0; heads > 1 && h < heads; ++h)
        for (int64_t other = 0; other < group; ++other)
          (*table)[static_cast<size_t>(h)].backward =
              std::max((*table)[static_cast<size_t>(h)].backward,
                       (*table)[static_cast<size_t>(h / group * group + other)].backward);
    for (int64_t h = 0; h < heads; ++h)
      reads_alike =
          reads_alike && read_keys_alike(plans[static_cast<size_t>(heads == 1 ? 0 : h / group * group)],
                                         plans[static_cast<size_t>(h)]);
  }

  // One row of a pass's table: `reads` is the head's plan with what this pass reads.
  DevicePlan row_of(const AttentionProblem& problem, const PrecisionPlan& plan, const HeadPlan& head,
                    const PrecisionPlan& reads) {
    const bool fp32 = problem.type == TensorType::fp32;
    const auto at = [&](Site site) { return reads.at(site); };
    DevicePlan d{};
    for (int i = 0; i < kSiteCount; ++i) {
      const Rounding& r = reads.rounding[static_cast<size_t>(i)];
      d.site[i] = DeviceRounding::of(r.shared == SharedScale{} ? r : element_rounding(r));
    }
    for (Site site : {Site::q, Site::k, Site::v, Site::grad_output}) {
      d.shared[static_cast<int>(site)] = at(site).shared;
      shares |= at(site).shared != SharedScale{};
      shares_columns |= is_down_column(at(site).shared.group);
    }
    d.seed = plan.seed;
    d.keel = plan.keel;
    d.shift = head.shift;
    d.sums_rounded = head.sums_rounded;
    d.max_first = head.max_first;
    d.wide_output = head.wide_output;
    d.shadow = head.shadow;
    d.probs_delta = head.probs_delta;
    d.centres_keys = head.centres_keys;
    // `o` holds what delta uses if it is the same rounding of the same numbers, and storing it rounds no
    // more.
    d.saves_output = head.wide_output || at(Site::output) != at(Site::output_for_delta) ||
                     !(fp32 || is_bf16_number(at(Site::output)));
    const bool centres = head.centres_keys;
    d.parts_q = operand_parts(at(Site::q), fp32);
    d.parts_k = operand_parts(at(Site::k), fp32 || centres);
    d.parts_v = operand_parts(at(Site::v), fp32);
    d.parts_grad = operand_parts(at(Site::grad_output), fp32);
    d.parts_probs = parts_of(at(Site::probs));
    d.parts_probs_bwd = parts_of(at(Site::probs_bwd));
    d.parts_dscores = parts_of(at(Site::dscores));
    // centre_keys' keys are not bf16 numbers, and its L needs the mean key: left to `any`.
    const bool plain = !fp32 && problem.softcap == 0 && !problem.mask.visible.present() && !centres &&
                       std::max({d.parts_q, d.parts_k, d.parts_v, d.parts_grad}) == 1;
    const Variant formats = plain ? variant_of_formats(d) : Variant::any;
    const bool full = head.shadow || head.sums_rounded || problem.tile_keys == 0 ||
                      counts_ties(head.shift.rule) || head.power_shift();
    d.forward = std::max(formats, full ? Variant::full : Variant::quick);
    d.backward = std::max(formats, head.sums_rounded ? Variant::full : Variant::quick);
    centres_keys |= centres;
    saves_output |= d.saves_output;
    packs_q |= fp32 || !keeps_bf16(at(Site::q));
    packs_k |= fp32 || centres || !keeps_bf16(at(Site::k));
    packs_v |= fp32 || !keeps_bf16(at(Site::v));
    packs_grad |= fp32 || !keeps_bf16(at(Site::grad_output));
    return d;
  }

  int most(uint8_t DevicePlan::*parts) const {
    int most = 1;
    for (const auto* table : {&rows, &backward_rows})
      for (const DevicePlan& d : *table) most = std::max<int>(most, d.*parts);
    return most;
  }
  bool any(auto condition) const { return std::any_of(rows.begin(), rows.end(), condition); }

  std::vector<DevicePlan> rows, backward_rows;  // one, or one a head
  std::vector<HeadPlan> plans;
  bool centres_keys = false, saves_output = false, reads_alike = true;
  bool shares = false, shares_columns = false;                                 // scales, at some operand
  bool packs_q = false, packs_k = false, packs_v = false, packs_grad = false;  // into parts, beforehand
};

// One behind the other, with nothing between.
struct Saved {
  Saved(const AttentionProblem& problem, const Resolved& resolved, void* memory) {
    const int64_t rows = problem.B * problem.H * problem.T;
    row_values = static_cast<float2*>(memory);
    bytes = static_cast<size_t>(rows) * sizeof(float2);
    if (!resolved.saves_output) return;
    o_for_delta = reinterpret_cast<float*>(static_cast<uint8_t*>(memory) + bytes);
    bytes += static_cast<size_t>(rows * problem.D) * sizeof(float);
  }
  float2* row_values;            // (B, H, T)
  float* o_for_delta = nullptr;  // (B, H, T, D)
  size_t bytes;
};

struct Workspace {
  Workspace(const AttentionProblem& problem, const Resolved& resolved, void* memory) {
    Carver carver(memory);
    plans = carver.take<DevicePlan>(static_cast<int64_t>(resolved.rows.size()));
    used_delta = carver.take<float>(problem.B * problem.H * problem.T);
    if (resolved.centres_keys) mean_key = carver.take<float>(problem.B * problem.G * problem.D);
    padded_D = round_up(problem.D, 8);
    kv_copies = resolved.reads_alike ? problem.G : problem.H;
    const int64_t rows = problem.B * problem.H * problem.T * padded_D,
                  keys = problem.B * kv_copies * problem.N * padded_D;
    if (resolved.packs_q) q = carver.take<__nv_bfloat16>(rows * resolved.most(&DevicePlan::parts_q));
    if (resolved.packs_k) k = carver.take<__nv_bfloat16>(keys * resolved.most(&DevicePlan::parts_k));
    if (resolved.packs_v) v = carver.take<__nv_bfloat16>(keys * resolved.most(&DevicePlan::parts_v));
    if (resolved.shares) {
      const int64_t most_rows = std::max(problem.H * problem.T, problem.G * problem.N);
      largest_count = problem.B * (2 * most_rows + 2 * std::max(problem.H, problem.G) + 1);
      if (resolved.shares_columns) {
        const auto blocks = [](int64_t rows) { return divide_up(rows, kColumnRows) + 1; };  // and the column
        largest_count +=
            problem.B * problem.D * std::max(problem.H * blocks(problem.T), problem.G * blocks(problem.N));
      }
      largest = carver.take<uint32_t>(2 * largest_count);
    }
    if (resolved.packs_grad) grad = carver.take<__nv_bfloat16>(rows * resolved.most(&DevicePlan::parts_grad));
    bytes = carver.used();
  }
  DevicePlan* plans;
  float *used_delta, *mean_key = nullptr;
  uint32_t* largest = nullptr;  // two tables of the operand at hand
  int64_t largest_count =
      0;  // of one: rows, at most as many tiles, heads, sequences; columns and their blocks
  __nv_bfloat16 *q = nullptr, *k = nullptr, *v = nullptr, *grad = nullptr;
  int64_t padded_D, kv_copies;
  size_t bytes;
};

// One pass: its problem as the kernels see it, its operands prepared.
class Pass {
 public:
  Pass(const AttentionProblem& problem, const FamilyPlan& plan, const PassInputs& in,
       const DeviceTensor* grad_output, const ForwardPass& forward, void* memory, cudaStream_t stream)
      : resolved_(static_cast<const Resolved&>(plan)),
        problem_(problem),
        work_(problem, resolved_, memory),
        stream_(stream) {
    if (grad_output) resolved_.rows = resolved_.backward_rows;
    const Saved saved(problem, resolved_, forward.saved);
    p.B = static_cast<int>(problem.B);
    p.H = static_cast<int>(problem.H);
    p.G = static_cast<int>(problem.G);
    p.T = static_cast<int>(problem.T);
    p.N = static_cast<int>(problem.N);
    p.D = static_cast<int>(problem.D);
    p.fp32 = problem.type == TensorType::fp32;
    p.scale = problem.scale;
    p.softcap = problem.softcap;
    const auto reach = [](int64_t window) {
      return window < 0 ? kUnbounded : static_cast<int>(std::min<int64_t>(window, kUnbounded));
    };
    p.look_back = reach(problem.mask.window_left);
    p.look_ahead = problem.mask.causal ? 0 : reach(problem.mask.window_right);
    p.query_lengths = problem.mask.query_lengths.data();
    p.key_lengths = problem.mask.key_lengths.data();
    p.visible = problem.mask.visible.data;
    std::copy_n(problem.mask.visible.stride.begin(), 4, p.visible_stride);
    p.one_tile = problem.tile_keys == 0;
    p.fact_sequences = static_cast<int>(problem.fact_sequences);
    p.step = problem.step;
    p.layer = problem.layer;
    p.device_step = problem.device_step;
    p.plans = work_.plans;
    p.plan_count = static_cast<int>(resolved_.rows.size());
    p.most_q = resolved_.most(&DevicePlan::parts_q);
    p.most_k = resolved_.most(&DevicePlan::parts_k);
    p.most_v = resolved_.most(&DevicePlan::parts_v);
    p.most_grad = resolved_.most(&DevicePlan::parts_grad);
    p.o = output(forward.o, problem.mask.query_offsets.data());
    p.lse = forward.lse;
    p.row_values = saved.row_values;
    p.o_for_delta = saved.o_for_delta;
    p.mean_key = work_.mean_key;
    p.used_delta = work_.used_delta;

    const bool wide = (work_.q || is_wide(in.q, problem.D)) && (work_.k || is_wide(in.k, problem.D)) &&
                      (work_.v || is_wide(in.v, problem.D)) &&
                      (!grad_output || work_.grad || is_wide(*grad_output, problem.D));
    if (!wide)
      for (DevicePlan& row : resolved_.rows) row.forward = row.backward = Variant::any;
    for (size_t first = 0; first < resolved_.rows.size(); first += kPlansAtOnce) {
      PlanRows rows;
      const size_t count = std::min<size_t>(kPlansAtOnce, resolved_.rows.size() - first);
      std::copy_n(resolved_.rows.begin() + static_cast<int64_t>(first), count, rows.row);
      fill_plans<<<1, kPlansAtOnce, 0, stream_>>>(rows, work_.plans + first, static_cast<int>(count));
      check_launch("filling the table of plans");
    }
    p.q = operand(Site::q, in.q, problem.mask.query_offsets.data(), work_.q);
    p.k = operand(Site::k, in.k, problem.mask.key_offsets.data(), work_.k);
    p.v = operand(Site::v, in.v, problem.mask.key_offsets.data(), work_.v);
    if (grad_output)
      p.grad = operand(Site::grad_output, *grad_output, problem.mask.query_offsets.data(), work_.grad);
  }

  static bool is_wide(const DeviceTensor& x, int64_t D) {
    return D % 8 == 0 && x.stride[3] == 1 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
           x.stride[0] % 8 == 0 && x.stride[1] % 8 == 0 && x.stride[2] % 8 == 0;
  }
  Output output(const DeviceTensor& x, const int32_t* offsets) const {
    Output result{x.data, {}, offsets, is_wide(x, problem_.D)};
    std::copy_n(x.stride.begin(), 4, result.stride);
    return result;
  }
  Launcher launcher() const { return {p, resolved_.rows, stream_}; }

  Problem p{};

 private:
  Operand operand(Site site, const DeviceTensor& x, const int32_t* offsets, __nv_bfloat16* parts) {
    const bool of_keys = site == Site::k || site == Site::v;
    const int64_t heads = of_keys ? problem_.G : problem_.H, rows = of_keys ? problem_.N : problem_.T;
    Operand result{};
    if (!parts) {
      result.data = static_cast<const __nv_bfloat16*>(x.data);
      std::copy_n(x.stride.begin(), 4, result.stride);
      result.offsets = offsets;
      result.head_divisor = static_cast<int>(problem_.H / heads);
      result.wide = is_wide(x, problem_.D);
      return result;
    }
    const int64_t copies = of_keys ? work_.kv_copies : problem_.H;
    Preparation task{};
    task.site = site;
    task.operand = static_cast<OperandOf>(site);
    task.source = x.data;
    std::copy_n(x.stride.begin(), 4, task.stride);
    task.offsets = offsets;
    task.heads = static_cast<int>(heads);
    task.copies = static_cast<int>(copies);
    task.rows = static_cast<int>(rows);
    task.padded_D = static_cast<int>(work_.padded_D);
    task.row_threads = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(work_.padded_D / kPiece)));
    task.wide = is_wide(x, problem_.D);
    task.target = parts;
    task.part_stride = problem_.B * copies * rows * work_.padded_D;
    constexpr int kThreads = 256;
    if (site == Site::k && resolved_.centres_keys) {
      const int count = p.B * p.G * p.D;
      mean_keys<<<divide_up(count, kThreads), kThreads, 0, stream_>>>(p, task, work_.mean_key);
      check_launch("averaging keys");
    }
    if (resolved_.any([&](const DevicePlan& d) {
          const SharedScale& shared = d.shared[static_cast<int>(task.operand)];
          return shared.group > ScaleGroup::block || shared.outer > ScaleGroup::block;
        }))
      find_largest_values(task);
    const int64_t blocks = p.B * copies * divide_up(rows * task.row_threads, kThreads);
    (resolved_.shares_columns ? prepare_operand<true>
                              : prepare_operand<false>)<<<grid(blocks), kThreads, 0, stream_>>>(p, task);
    check_launch("preparing an operand");
    result.data = parts;
    result.part_stride = task.part_stride;
    result.stride[0] = copies * rows * work_.padded_D;
    result.stride[1] = rows * work_.padded_D;
    result.stride[2] = work_.padded_D;
    result.stride[3] = 1;
    result.head_divisor = static_cast<int>(problem_.H / copies);
    result.wide = true;
    return result;
  }

  void find_largest_values(Preparation& task) {
    check_cuda(cudaMemsetAsync(work_.largest, 0,
                               static_cast<size_t>(2 * work_.largest_count) * sizeof(uint32_t), stream_),
               "clearing the table of largest values");
    const auto table = [&](uint32_t* memory) {
      const int64_t heads = int64_t{p.B} * task.heads, of_rows = heads * task.rows,
                    tiles = heads * divide_up(task.rows, kScaleTileRows);
      uint32_t* const of_head = memory + of_rows + tiles;
      uint32_t* const columns = of_head + heads + p.B;
      return LargestTable{memory,  memory + of_rows,
                          of_head, of_head + heads,
                          columns, columns + heads * divide_up(task.rows, kColumnRows) * p.D};
    };
    task.plain = table(work_.largest);
    task.centred = table(work_.largest + work_.largest_count);
    constexpr int kThreads = 256;
    const int64_t blocks = int64_t{p.B} * task.heads * divide_up(task.rows * task.row_threads, kThreads);
    for (const bool centred : {false, true}) {
      if (centred && !(task.site == Site::k && resolved_.centres_keys)) continue;
      any_plan::find_largest<<<grid(blocks), kThreads, 0, stream_>>>(p, task, centred);
      check_launch("finding the largest values of an operand");
      if (!resolved_.shares_columns) continue;
      const int64_t blocks_of_columns = int64_t{p.B} * task.heads * divide_up(task.rows, kColumnRows) * p.D;
      find_largest_of_columns<<<grid(divide_up(blocks_of_columns, kThreads)), kThreads, 0, stream_>>>(
          p, task, centred);
      check_launch("finding the largest values of an operand's columns");
    }
  }

  Resolved resolved_;  // a copy: tensors that are not wide change its variants
  const AttentionProblem& problem_;
  Workspace work_;
  cudaStream_t stream_;
};

}  // namespace

std::shared_ptr<const FamilyPlan> any_plan_prepare(const AttentionProblem& problem) {
  auto resolved = std::make_shared<Resolved>(problem);
  resolved->sizes = {Saved(problem, *resolved, nullptr).bytes, Workspace(problem, *resolved, nullptr).bytes};
  return resolved;
}

void any_plan_forward(const AttentionProblem& problem, const FamilyPlan& plan, const PassInputs& in,
                      const ForwardPass& out, void* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  Pass pass(problem, plan, in, nullptr, out, workspace, stream);
  pass.p.ties = out.ties;
  launch_forward(pass.launcher());
}

void any_plan_backward(const AttentionProblem& problem, const FamilyPlan& plan, const PassInputs& in,
                       const DeviceTensor& grad_output, const ForwardPass& saved, const BackwardPass& out,
                       void* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  Pass pass(problem, plan, in, &grad_output, saved, workspace, stream);
  pass.p.dq = pass.output(out.dq, problem.mask.query_offsets.data());
  pass.p.dk = pass.output(out.dk, problem.mask.key_offsets.data());
  pass.p.dv = pass.output(out.dv, problem.mask.key_offsets.data());
  pass.p.delta = out.delta;
  pass.p.residual = out.residual;
  pass.p.residual_floor = out.residual_floor;
  pass.p.delta_error = out.delta_error;
  launch_backward_rows(pass.launcher());
  if (pass.p.dk.data) launch_backward_keys(pass.launcher());
}

}  // namespace evenkeel
