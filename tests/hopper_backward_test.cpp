// Hopper's backward kernels without a GPU: in the emulator, with what the CPU's forward pass leaves. Every element is within the
// error bounds of FlashAttention-2's arithmetic, with the same bits in every order of warps and blocks. That tests who waits for
// whom: a copy arrives only when it is waited for, and a product reads its operands as late as it may.
#include <gtest/gtest.h>

#include "attention/cuda/hopper_backward_kernel.cuh"
#include "attention/cuda/row_facts.cuh"
#include "attention_bounds.h"
#include "attention_runs.h"
#include "base/sizes.h"
#include "emulated_memory.h"

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
    const HeadRules rules = head_rules(p.plans[0]);
    shift.assign(static_cast<size_t>(p.B * p.H * padded), RowFact{}.shift);
    inverse.assign(shift.size(), RowFact{}.inverse);
    delta.assign(shift.size(), RowFact{}.delta);
    for (int64_t b = 0; b < p.B; ++b)
      for (int64_t h = 0; h < p.H; ++h)
        for (int64_t i = 0; i < (host.query_lengths.empty() ? p.T : host.query_lengths[size_of(b)]); ++i) {
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
    if (problem.softcap > 0)
      run(backward_kernel<Pairs, D, Consistent::by_head, Form::capped>);
    else if (p.rules.consistent)
      run(backward_kernel<Pairs, D, Consistent::every_head, Form::plain>);
    else if (problem.mask.window_left >= 0 || problem.mask.window_right >= 0)
      run(backward_kernel<Pairs, D, Consistent::no_head, Form::banded>);
    else
      run(backward_kernel<Pairs, D, Consistent::no_head, Form::plain>);
  };
  cuda_emulator::run({.blocks = 2,
                      .threads = (1 + kConsumers) * gpu::kWarpgroup,
                      .shared_bytes = sizeof(SharedMemory<D>),
                      .order = how.order,
                      .blocks_at_once = how.blocks_at_once,
                      .seed = how.seed},
                     kernel);
}

// The CPU's outputs with dq, dk and dv of the kernel for head sizes up to D.
template <class Pairs, int D>
AttentionBuffers run(const AttentionProblem& config, const Problem& host, const How& how = {}) {
  AttentionBuffers out = attention_runs::run(config, host);
  const AttentionProblem problem = complete(problem_of(config, host.in));
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
  const auto map = [&](Operand& x, int64_t heads, int64_t rows, int box) {
    return gpu::tensor_map(x.tensor().data, {problem.B, heads, rows, problem.D}, x.tensor().stride, box);
  };
  start<Pairs, D>(problem, p,
                  {map(q, problem.H, problem.T, kTileRows<D>), map(k, problem.G, problem.N, kTileKeys),
                   map(v, problem.G, problem.N, kTileKeys), map(grad, problem.H, problem.T, kTileRows<D>)},
                  how);
  for (int b = 0; b < p.B; ++b)
    for (int h = 0; h < p.H; ++h)
      for (int row = 0; row < p.sequences.T; ++row)
        clear_unseen_row(p, Band(p, b), row, kTileRows<D>, kTileKeys,
                         p.dq + b * p.dq_stride[0] + h * p.dq_stride[1] + row * p.dq_stride[2]);
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
    kSmallHeads{{1, 2, 1, 150, 280, 64}, {.causal = true, .scale = 0.125f}, "head size 64"};

template <class Pairs, int D>
void expect_in_bounds(const Case& c, const std::string& plan) {
  const Problem p = make_problem(c);
  const AttentionProblem config = p.with(parse_plan(plan));
  std::vector<float> first;
  for (How how : evenkeel::emulated::several_orders(3)) {
    how.type = std::is_same_v<Pairs, Fp16Pairs> ? TensorType::fp16 : TensorType::bf16;
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

TEST(HopperBackward, causal) { expect_in_bounds<Bf16Pairs, 128>(kCausal, "flash2"); }
TEST(HopperBackward, grouped_heads) { expect_in_bounds<Bf16Pairs, 128>(kGroups, "flash2"); }
TEST(HopperBackward, a_window) { expect_in_bounds<Bf16Pairs, 128>(kWindow, "flash2"); }
TEST(HopperBackward, lengths) { expect_in_bounds<Bf16Pairs, 128>(kRagged, "flash2"); }
TEST(HopperBackward, soft_cap) { expect_in_bounds<Bf16Pairs, 128>(kSoftcap, "flash2"); }
TEST(HopperBackward, consistent) {
  expect_in_bounds<Bf16Pairs, 128>(kCausal, "flash2,stabiliser=consistent");
}
TEST(HopperBackward, fp16) {
  expect_in_bounds<Fp16Pairs, 128>(
      kSoftcap, "flash2,probs=fp16,output=fp16,probs_bwd=fp16,dscores=fp16,dq=fp16,dk=fp16,dv=fp16");
}
TEST(HopperBackward, head_size_64) { expect_in_bounds<Bf16Pairs, 64>(kSmallHeads, "flash2"); }

}  // namespace
}  // namespace evenkeel
