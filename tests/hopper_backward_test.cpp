// Hopper's backward kernels without a GPU: in the emulator, with what the CPU's forward pass leaves. Every element is within the
// error bounds of FlashAttention-2's arithmetic, with the same bits in every order of warps and blocks. That tests who waits for
// whom: a copy arrives only when it is waited for, and a product reads its operands as late as it may.
// Behind it the pass for facts of rows: a row's leak is the one that is read off this kernel's own dQ.
#include <gtest/gtest.h>

#include "attention/cuda/hopper_backward_kernel.cuh"
#include "attention/cuda/hopper_delta.cuh"
#include "attention/cuda/hopper_fact_pass.cuh"
#include "attention/cuda/row_facts.cuh"
#include "attention_bounds.h"
#include "attention_runs.h"
#include "base/sizes.h"
#include "emulated_memory.h"
#include "fact_judge.h"

namespace evenkeel {
namespace {

using namespace hopper::backward;
using cases::Case;
using cases::make_problem;
using cases::Problem;
using evenkeel::emulated::How;
using evenkeel::emulated::Operand;
using evenkeel::emulated::Order;
using evenkeel::emulated::Poisoned;

// Facts of the rows, from those of the CPU's passes.
template <int D>
struct Facts {
  std::vector<float> shift, inverse, delta;

  Facts(const AttentionProblem& p, const Problem& host, const AttentionBuffers& cpu) {
    const int64_t padded = divide_up(p.T, kTileRows<D>) * kTileRows<D>;
    shift.assign(static_cast<size_t>(p.B * p.H * padded), RowFact{}.shift);
    inverse.assign(shift.size(), RowFact{}.inverse);
    delta.assign(shift.size(), RowFact{}.delta);
    for (int64_t b = 0; b < p.B; ++b)
      for (int64_t h = 0; h < p.H; ++h)
        for (int64_t i = 0; i < (host.query_lengths.empty() ? p.T : host.query_lengths[size_of(b)]); ++i) {
          const HeadRules rules = head_rules(p.plan(h));
          const float lse = *cpu.lse.view().at(b, h, i);
          if (std::isinf(lse)) continue;
          const size_t at = size_of((b * p.H + h) * padded + row_slot(static_cast<int>(i)));
          shift[at] = rules.consistent ? *cpu.row_max.view().at(b, h, i) : lse * gpu::kLog2E;
          inverse[at] = rules.consistent ? 1 / *cpu.row_sum.view().at(b, h, i) : 0;
          delta[at] = *cpu.delta.view().at(b, h, i);
        }
  }
  static size_t size_of(int64_t n) { return static_cast<size_t>(n); }
};

void set_strides(int64_t (&to)[3], const DeviceTensor& tensor) { std::copy_n(tensor.stride.begin(), 3, to); }

template <class Pairs, int D>
void start(const AttentionProblem& problem, const Backward& p, const std::array<CUtensorMap, 4>& maps,
           const How& how) {
  const auto kernel = [&] {
    const auto run = [&](auto body) { body(p, maps[0], maps[1], maps[2], maps[3]); };
    const auto with_form = [&]<Form kForm>() {
      if (p.table)
        run(backward_kernel<Pairs, D, Consistent::by_head, kForm>);
      else if (p.rules.consistent)
        run(backward_kernel<Pairs, D, Consistent::every_head, kForm>);
      else
        run(backward_kernel<Pairs, D, Consistent::no_head, kForm>);
    };
    if (problem.softcap > 0)
      run(backward_kernel<Pairs, D, Consistent::by_head, Form::capped>);
    else if (has_forms(problem))
      with_form.template operator()<Form::banded>();
    else
      with_form.template operator()<Form::plain>();
  };
  cuda_emulator::run({.blocks = 2,
                      .threads = (1 + kConsumers) * gpu::kWarpgroup,
                      .shared_bytes = sizeof(SharedMemory<D>),
                      .order = how.order,
                      .blocks_at_once = how.blocks_at_once,
                      .seed = how.seed},
                     kernel);
}

// By the pass for facts of rows.
fact_judge::Found find_facts(const AttentionProblem& problem, AttentionBuffers& cpu, const PassInputs& in,
                             const DeviceTensor& grad_output, const How& how, bool with_ties) {
  using namespace hopper::facts;
  std::vector<uint8_t> memory(hopper::saved_layout(problem, nullptr).bytes);
  const hopper::Saved saved = hopper::saved_layout(problem, memory.data());
  if (saved.row_max) {
    std::ranges::copy(cpu.row_max.values(), saved.row_max);
    std::ranges::copy(cpu.row_sum.values(), saved.row_sum);
  }
  const ForwardPass forward{{}, cpu.lse.values().data(), memory.data(), nullptr};
  const size_t rows = cpu.lse.values().size();
  Poisoned residual(rows * 4), ties(rows * 4);
  const FactPass out{cpu.delta.values().data(), residual.as<float>(),
                     with_ties ? ties.as<int32_t>() : nullptr};
  with_block_of(problem, [&]<class Block>() {
    const BlockMaps maps(problem, in, grad_output);
    for_fact_groups(problem, forward, out, [&](const FactArguments& a, int blocks) {
      cuda_emulator::run({.blocks = blocks,
                          .threads = Block::kThreads,
                          .shared_bytes = Block::kSharedBytes,
                          .order = how.order,
                          .blocks_at_once = how.blocks_at_once,
                          .seed = how.seed},
                         [&] { Block::run(maps.q, maps.k, maps.v, maps.grad_output, a); });
    });
  });
  residual.expect_guards("residual"), ties.expect_guards("ties");
  return {{residual.as<uint32_t>(), residual.as<uint32_t>() + rows},
          {ties.as<int32_t>(), ties.as<int32_t>() + rows}};
}

// The same bits in every order, and of the leak without ties, too.
fact_judge::Found find_facts(const AttentionProblem& problem, AttentionBuffers& cpu, const PassInputs& in,
                             const DeviceTensor& grad_output) {
  fact_judge::Found found = find_facts(problem, cpu, in, grad_output, {}, /*with_ties=*/false);
  for (const int32_t untouched : found.ties) EXPECT_EQ(static_cast<uint32_t>(untouched), fact_judge::kPoison);
  for (const How& how : evenkeel::emulated::several_orders(2)) {
    fact_judge::Found other = find_facts(problem, cpu, in, grad_output, how, /*with_ties=*/true);
    EXPECT_EQ(found.residual, other.residual) << "other bits in " << name_of(how);
    if (how.order == Order::ascending || kSanitized) found.ties = other.ties;
    EXPECT_EQ(found.ties, other.ties) << "other ties in " << name_of(how);
  }
  return found;
}

// The CPU's outputs with dq, dk and dv of the kernel for head sizes up to D.
template <class Pairs, int D>
AttentionBuffers run(const AttentionProblem& config, const Problem& host, const How& how = {},
                     fact_judge::Found* found = nullptr) {
  AttentionBuffers out = attention_runs::run(config, host);
  AttentionProblem problem = complete(problem_of(config, host.in));
  Facts<D> facts(problem, host, out);
  const auto operand = [&](int64_t heads, int64_t rows, const std::vector<int32_t>& lengths) {
    return Operand(how, {problem.B, heads, rows, problem.D}, lengths);
  };
  Operand q = operand(problem.H, problem.T, host.query_lengths),
          grad = operand(problem.H, problem.T, host.query_lengths),
          dq = operand(problem.H, problem.T, host.query_lengths),
          k = operand(problem.G, problem.N, host.key_lengths),
          v = operand(problem.G, problem.N, host.key_lengths),
          dk = operand(problem.G, problem.N, host.key_lengths),
          dv = operand(problem.G, problem.N, host.key_lengths);
  q.write(host.in.q), k.write(host.in.k), v.write(host.in.v), grad.write(host.grad_output);
  if (how.sequences) {
    problem.mask.query_offsets = q.offsets(), problem.mask.key_offsets = k.offsets();
    problem.mask.query_rows = q.all_rows(), problem.mask.key_rows = k.all_rows();
  }

  Backward p{};
  static_cast<ScoreForms&>(p) = score_forms(problem);
  p.B = static_cast<int>(problem.B);
  p.H = static_cast<int>(problem.H);
  p.G = static_cast<int>(problem.G);
  p.D = static_cast<int>(problem.D);
  p.row_tiles = static_cast<int>(divide_up(problem.T, kTileRows<D>));
  p.key_tiles = static_cast<int>(divide_up(problem.N, kTileKeys));
  p.padded_rows = p.row_tiles * kTileRows<D>;
  p.rules = head_rules(problem.plans[0]);
  std::vector<HeadRules> table;
  if (problem.plans.size() > 1) {
    for (const PrecisionPlan& plan : problem.plans) table.push_back(head_rules(plan));
    p.table = table.data();
  }
  p.facts = {facts.shift.data(), facts.inverse.data(), facts.delta.data()};
  std::vector<int> turns(static_cast<size_t>(p.B * p.H * p.row_tiles * 2));
  Poisoned sums(static_cast<size_t>(p.B * p.H * p.padded_rows * D) * sizeof(float));
  int next_item = 0;
  p.turn = turns.data();
  p.dq_sum = sums.template as<float>();
  p.next_item = &next_item;
  p.list.count = p.G;
  p.list.all = true;
  p.dq = static_cast<uint16_t*>(dq.tensor().data);
  p.dk = static_cast<uint16_t*>(dk.tensor().data);
  p.dv = static_cast<uint16_t*>(dv.tensor().data);
  set_strides(p.dq_stride, dq.tensor()), set_strides(p.dk_stride, dk.tensor()),
      set_strides(p.dv_stride, dv.tensor());
  start<Pairs, D>(
      problem, p,
      {hopper::query_map(problem, q.tensor(), kTileRows<D>), hopper::key_map(problem, k.tensor(), kTileKeys),
       hopper::key_map(problem, v.tensor(), kTileKeys),
       hopper::query_map(problem, grad.tensor(), kTileRows<D>)},
      how);
  for (int b = 0; b < p.B; ++b)
    for (int h = 0; h < p.H; ++h)
      for (int row = 0; row < p.sequences.T; ++row) {
        const Sequence s = sequence(p.sequences, b);
        clear_unseen_row(p, Band(p, b), row, kTileRows<D>, kTileKeys,
                         p.dq + s.query_batch * p.dq_stride[0] + h * p.dq_stride[1] +
                             (s.first_row + row) * p.dq_stride[2]);
      }
  if (found) *found = find_facts(problem, out, {q.tensor(), k.tensor(), v.tensor()}, grad.tensor());
  dq.read(out.dq), dk.read(out.dk), dv.read(out.dv);
  for (auto [name, x] : {std::pair{"dq", &dq}, {"dk", &dk}, {"dv", &dv}}) x->expect_guards(name);
  sums.expect_guards("sums of dq");
  return out;
}

// Tiles are 128 keys x 64 rows (128 with head sizes up to 64). Scales are powers of two: the kernels round dS before it is scaled.
const Case kCausal{{1, 1, 1, 200, 300, 128}, {.causal = true, .scale = 0.125f}, "causal"},
    kGroups{{2, 2, 1, 130, 140, 96}, {.scale = 0.125f}, "groups"},
    kWindow{{1, 1, 1, 260, 260, 128}, {.causal = true, .window_left = 70, .scale = 0.125f}, "window"},
    kRagged{{5, 1, 1, 90, 140, 128}, {.causal = true, .ragged = true, .scale = 0.125f}, "ragged"},
    kSoftcap{{1, 1, 1, 70, 130, 128}, {.causal = true, .softcap = 3, .scale = 0.125f}, "softcap"},
    kSmallHeads{{1, 2, 1, 150, 280, 64}, {.causal = true, .scale = 0.125f}, "head size 64"},
    kSmallGroups{{1, 4, 2, 130, 260, 48}, {.scale = 0.125f}, "groups of small heads"},
    kSmallWindow{{1, 1, 1, 400, 400, 64}, {.causal = true, .window_left = 140, .scale = 0.125f}, "window"},
    kSmallRagged{{5, 1, 1, 140, 280, 64}, {.causal = true, .ragged = true, .scale = 0.125f}, "ragged"},
    kSmallSoftcap{{1, 1, 1, 130, 260, 64}, {.softcap = 3, .scale = 0.125f}, "softcap"};
const std::string kFp16Plan =
    "flash2,probs=fp16,output=fp16,probs_bwd=fp16,dscores=fp16,dq=fp16,dk=fp16,dv=fp16";

template <class Pairs, int D>
void expect_in_bounds(const Case& c, const std::vector<PrecisionPlan>& plans, bool packed = false) {
  const Problem p = make_problem(c);
  const AttentionProblem config = p.with(plans);
  std::vector<float> first;
  for (How how : evenkeel::emulated::several_orders(3)) {
    how.type = std::is_same_v<Pairs, Fp16Pairs> ? TensorType::fp16 : TensorType::bf16;
    how.sequences = packed;
    const AttentionBuffers got = run<Pairs, D>(config, p, how);
    std::vector<float> all;
    for (const Tensor<float>* x : {&got.dq, &got.dk, &got.dv})
      all.insert(all.end(), x->values().begin(), x->values().end());
    if (kSanitized) continue;
    if (first.empty()) {
      first = all;
      const attention_bounds::Ratios r = ratios_of(config, p, attention_bounds::error_bounds(config, p), got,
                                                   attention_reference(config, p.in, p.grad_output));
      EXPECT_LE(r.largest(), 1) << c.name << ": delta " << r.delta << ", dq " << r.dq << ", dk " << r.dk
                                << ", dv " << r.dv;
    } else {
      EXPECT_TRUE(attention_runs::same_bits(first, all)) << c.name << ": other bits in " << name_of(how);
    }
  }
}
template <class Pairs, int D>
void expect_in_bounds(const Case& c, const std::string& plan, bool packed = false) {
  expect_in_bounds<Pairs, D>(c, std::vector{parse_plan(plan)}, packed);
}
// Heads that differ, of one key head and of several.
std::vector<PrecisionPlan> plans_by_head(int heads) {
  std::vector<PrecisionPlan> plans;
  for (int h = 0; h < heads; ++h)
    plans.push_back(parse_plan(h % 3 == 1 ? "flash2,stabiliser=consistent" : "flash2"));
  return plans;
}

TEST(HopperBackward, causal) { expect_in_bounds<Bf16Pairs, 128>(kCausal, "flash2"); }
TEST(HopperBackward, grouped_heads) { expect_in_bounds<Bf16Pairs, 128>(kGroups, "flash2"); }
TEST(HopperBackward, a_window) { expect_in_bounds<Bf16Pairs, 128>(kWindow, "flash2"); }
TEST(HopperBackward, lengths) { expect_in_bounds<Bf16Pairs, 128>(kRagged, "flash2"); }
TEST(HopperBackward, soft_cap) { expect_in_bounds<Bf16Pairs, 128>(kSoftcap, "flash2"); }
TEST(HopperBackward, consistent) {
  expect_in_bounds<Bf16Pairs, 128>(kCausal, "flash2,stabiliser=consistent");
}
TEST(HopperBackward, fp16) { expect_in_bounds<Fp16Pairs, 128>(kSoftcap, kFp16Plan); }
TEST(HopperBackward, plans_by_head) { expect_in_bounds<Bf16Pairs, 128>(kGroups, plans_by_head(2)); }

TEST(HopperBackwardSmallHeads, causal) { expect_in_bounds<Bf16Pairs, 64>(kSmallHeads, "flash2"); }
TEST(HopperBackwardSmallHeads, grouped_heads) { expect_in_bounds<Bf16Pairs, 64>(kSmallGroups, "flash2"); }
TEST(HopperBackwardSmallHeads, a_window) { expect_in_bounds<Bf16Pairs, 64>(kSmallWindow, "flash2"); }
TEST(HopperBackwardSmallHeads, lengths) { expect_in_bounds<Bf16Pairs, 64>(kSmallRagged, "flash2"); }
TEST(HopperBackwardSmallHeads, packed_sequences) {
  expect_in_bounds<Bf16Pairs, 64>(kSmallRagged, "flash2", /*packed=*/true);
}
TEST(HopperBackwardSmallHeads, soft_cap) { expect_in_bounds<Bf16Pairs, 64>(kSmallSoftcap, "flash2"); }
TEST(HopperBackwardSmallHeads, consistent) {
  expect_in_bounds<Bf16Pairs, 64>(kSmallWindow, "flash2,stabiliser=consistent");
}
TEST(HopperBackwardSmallHeads, fp16) { expect_in_bounds<Fp16Pairs, 64>(kSmallHeads, kFp16Plan); }
TEST(HopperBackwardSmallHeads, plans_by_head) {
  expect_in_bounds<Bf16Pairs, 64>(kSmallGroups, plans_by_head(4));
}

// --- zero_sum's delta

// By its pass, with L of the CPU.
template <class Pairs, int D, bool kForms>
std::vector<float> find_delta(const AttentionProblem& config, const Problem& host,
                              const AttentionBuffers& cpu, const How& how) {
  using T = hopper::delta::Tiles<D>;
  AttentionProblem problem = complete(problem_of(config, host.in));
  EXPECT_EQ(has_forms(problem), kForms);
  const auto operand = [&](int64_t heads, int64_t rows, const std::vector<int32_t>& lengths) {
    return Operand(how, {problem.B, heads, rows, problem.D}, lengths);
  };
  Operand q = operand(problem.H, problem.T, host.query_lengths),
          grad = operand(problem.H, problem.T, host.query_lengths),
          k = operand(problem.G, problem.N, host.key_lengths),
          v = operand(problem.G, problem.N, host.key_lengths);
  q.write(host.in.q), k.write(host.in.k), v.write(host.in.v), grad.write(host.grad_output);
  const CUtensorMap q_map = hopper::query_map(problem, q.tensor(), T::kRows),
                    k_map = hopper::key_map(problem, k.tensor(), T::kKeys),
                    v_map = hopper::key_map(problem, v.tensor(), T::kKeys),
                    grad_map = hopper::query_map(problem, grad.tensor(), T::kRows);
  Poisoned delta(cpu.lse.values().size() * sizeof(float));
  for (const hopper::HeadGroup& group :
       hopper::head_groups(problem, [](const auto&, const auto&) { return true; })) {
    hopper::delta::DeltaArguments a = hopper::delta::arguments_of(problem, group, cpu.lse.values().data(),
                                                                  delta.as<float>(), /*log_sum=*/nullptr);
    a.tiles_per_head = static_cast<int>(divide_up(problem.T, T::kRows));
    cuda_emulator::run(
        {.blocks = 2,
         .threads = T::kThreads,
         .shared_bytes = T::kSharedBytes,
         .order = how.order,
         .blocks_at_once = how.blocks_at_once,
         .seed = how.seed},
        [&] { hopper::delta::delta_rows<Pairs, D, kForms>(q_map, k_map, v_map, grad_map, a); });
  }
  delta.expect_guards("delta");
  return {delta.as<float>(), delta.as<float>() + cpu.delta.values().size()};
}

// Within the bounds of a delta that this plan finds in FP32, and the same bits in every order.
template <class Pairs, int D, bool kForms>
void expect_delta(const Case& c) {
  const Problem p = make_problem(c);
  const AttentionProblem config = p.with(parse_plan("flash2,stabiliser=zero_sum"));
  AttentionBuffers got = attention_runs::run(config, p);
  std::vector<float> first;
  for (const How& how : evenkeel::emulated::several_orders(4)) {
    const std::vector<float> delta = find_delta<Pairs, D, kForms>(config, p, got, how);
    if (kSanitized) continue;
    if (first.empty()) {
      first = delta;
      got.delta.values() = delta;
      const attention_bounds::Ratios r = ratios_of(config, p, attention_bounds::error_bounds(config, p), got,
                                                   attention_reference(config, p.in, p.grad_output));
      EXPECT_LE(r.delta, 1) << c.name;
    } else {
      EXPECT_TRUE(attention_runs::same_bits(first, delta)) << c.name << ": other bits in " << name_of(how);
    }
  }
}

TEST(HopperDelta, masks_and_head_sizes) {
  expect_delta<Bf16Pairs, 64, false>(kSmallHeads);
  expect_delta<Bf16Pairs, 128, false>(kCausal);
  expect_delta<Bf16Pairs, 128, false>(kGroups);
}
TEST(HopperDelta, lengths) { expect_delta<Bf16Pairs, 128, false>(kRagged); }
// Warpgroups that have no rows pass on more key tiles than there are places for, without their lanes meeting in a product.
TEST(HopperDelta, few_rows) {
  expect_delta<Bf16Pairs, 64, false>({{1, 2, 1, 70, 1200, 64}, {.scale = 0.125f}, "few rows"});
  expect_delta<Bf16Pairs, 128, false>({{1, 2, 1, 70, 1000, 128}, {.scale = 0.125f}, "few rows"});
}
TEST(HopperDelta, windows) {
  expect_delta<Bf16Pairs, 128, true>(
      {{1, 1, 1, 520, 520, 128}, {.causal = true, .window_left = 20, .scale = 0.125f}, "a narrow window"});
}

// --- Facts of rows

// sequences: that facts are of; 0: all.
template <int D>
void expect_facts(const Case& c, const std::string& plan, int64_t sequences = 0, bool packed = false) {
  SCOPED_TRACE(plan);
  const Problem p = fact_judge::make_problem(c);
  AttentionProblem config = p.with(parse_plan(plan));
  config.fact_sequences = sequences;
  fact_judge::Found found;
  const AttentionBuffers got = run<Bf16Pairs, D>(config, p, {.sequences = packed}, &found);
  if (!kSanitized) fact_judge::judge(config, p, got, found, 0x1p-24, /*same_delta=*/true);
}

// Heads of one plan are one launch: each head has the facts that it has alone.
TEST(HopperFacts, plans_that_differ_by_head) {
  const Problem p =
      fact_judge::make_problem({{1, 3, 3, 100, 100, 64}, {.causal = true, .scale = 0.125f}, "heads"});
  const PrecisionPlan consistent = parse_plan("flash2,stabiliser=consistent,keel=0.001"),
                      none = parse_plan("flash2,tie_tolerance=0.25");
  const auto facts_with = [&](const std::vector<PrecisionPlan>& plans) {
    const AttentionProblem config = p.with(plans);
    AttentionBuffers cpu = attention_runs::run(config, p);
    const How how;
    Operand q(how, p.in.q.shape, {}), k(how, p.in.k.shape, {}), v(how, p.in.v.shape, {}),
        grad(how, p.in.q.shape, {});
    q.write(p.in.q), k.write(p.in.k), v.write(p.in.v), grad.write(p.grad_output);
    return find_facts(complete(problem_of(config, p.in)), cpu, {q.tensor(), k.tensor(), v.tensor()},
                      grad.tensor(), how, /*with_ties=*/true);
  };
  const fact_judge::Found mixed = facts_with({consistent, none, consistent}),
                          alone[] = {facts_with({none}), facts_with({consistent})};
  EXPECT_NE(alone[0].residual, alone[1].residual);
  for (size_t at = 0; at < mixed.residual.size(); ++at) {
    const fact_judge::Found& own = alone[at / 100 == 1 ? 0 : 1];
    ASSERT_EQ(mixed.residual[at], own.residual[at]) << at;
    ASSERT_EQ(mixed.ties[at], own.ties[at]) << at;
  }
}

TEST(HopperFacts, masks_and_head_sizes) {
  expect_facts<64>(kSmallHeads, "flash2");
  expect_facts<128>(kCausal, "flash2");
}
TEST(HopperFacts, of_the_first_sequences) { expect_facts<128>(kGroups, "flash2", 1); }
TEST(HopperFacts, lengths) { expect_facts<128>(kRagged, "flash2", 4); }
TEST(HopperFacts, packed_sequences) { expect_facts<128>(kRagged, "flash2", 0, true); }
TEST(HopperFacts, rules_of_heads) {
  for (const char* plan :
       {"flash2,stabiliser=consistent", "flash2,stabiliser=wide_output", "flash2,stabiliser=zero_sum",
        "flash2,keel=0.001", "flash2,stabiliser=consistent,keel=0.001", "flash2,tie_tolerance=0.25"})
    expect_facts<64>({{1, 1, 1, 130, 150, 64}, {.causal = true, .scale = 0.125f}, "rules"}, plan);
}

}  // namespace
}  // namespace evenkeel
