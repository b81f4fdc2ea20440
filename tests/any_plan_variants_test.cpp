// The any-plan kernels on the CPU, by the CUDA emulator: Variant::full, which rounds P and dS to small formats by itself, has
// the bits of Variant::any, and both have the CPU implementation's numbers.
#include <gtest/gtest.h>

#include "any_plan_words.h"
#include "attention/cuda/any_plan_backward_keys.cuh"
#include "attention/cuda/any_plan_backward_rows.cuh"
#include "attention/head_plan.h"
#include "attention_runs.h"

namespace evenkeel::any_plan {
namespace {

using attention_runs::make_problem;
constexpr int kD = 64;

std::vector<uint16_t> halves(const std::vector<float>& x) {
  std::vector<uint16_t> result;
  for (float value : x) result.push_back(static_cast<uint16_t>(gpu::bf16_bits(value)));
  return result;
}

// Both passes with one variant of the kernels, one plan for all heads, bf16 tensors as they are.
class Emulated {
 public:
  Emulated(const cases::Problem& host, const AttentionProblem& problem)
      : q(halves(host.q_memory)),
        k(halves(host.k_memory)),
        v(halves(host.v_memory)),
        grad(halves(host.grad_memory)),
        o(q.size()),
        dq(q.size()),
        dk(k.size()),
        dv(k.size()) {
    const HeadPlan head(problem.plans[0]);
    const auto rows = static_cast<size_t>(problem.B * problem.H * problem.T);
    for (auto* x : {&lse, &delta, &used_delta, &residual, &floor, &error}) x->resize(rows);
    row_values.resize(rows), ties.resize(rows);
    for (int i = 0; i < kSiteCount; ++i)
      plan_.site[i] = DeviceRounding::of(head.plan.rounding[static_cast<size_t>(i)]);
    plan_.seed = head.plan.seed;
    plan_.keel = head.plan.keel;
    plan_.shift = head.shift;
    plan_.sums_rounded = head.sums_rounded;
    plan_.max_first = head.max_first;
    plan_.probs_delta = head.probs_delta;
    plan_.parts_q = plan_.parts_k = plan_.parts_v = plan_.parts_grad = 1;
    plan_.parts_probs = plan_.parts_probs_bwd = plan_.parts_dscores = 1;
    p_.B = static_cast<int>(problem.B), p_.H = static_cast<int>(problem.H);
    p_.G = static_cast<int>(problem.G), p_.T = static_cast<int>(problem.T);
    p_.N = static_cast<int>(problem.N), p_.D = static_cast<int>(problem.D);
    p_.scale = problem.scale;
    p_.look_back = 1 << 29, p_.look_ahead = problem.mask.causal ? 0 : 1 << 29;
    p_.one_tile = problem.tile_keys == 0;
    p_.plans = &plan_, p_.plan_count = 1;
    p_.most_q = p_.most_k = p_.most_v = p_.most_grad = 1;
    p_.q = operand(q, p_.H, p_.T), p_.k = operand(k, p_.G, p_.N);
    p_.v = operand(v, p_.G, p_.N), p_.grad = operand(grad, p_.H, p_.T);
    p_.o = output(o, p_.H, p_.T), p_.dq = output(dq, p_.H, p_.T);
    p_.dk = output(dk, p_.G, p_.N), p_.dv = output(dv, p_.G, p_.N);
    p_.lse = lse.data(), p_.row_values = row_values.data(), p_.used_delta = used_delta.data();
    p_.fact_sequences = p_.B;
    p_.ties = ties.data(), p_.delta = delta.data(), p_.residual = residual.data();
    p_.residual_floor = floor.data(), p_.delta_error = error.data();
  }

  template <Variant kVariant>
  void run() {
    plan_.forward = plan_.backward = kVariant;
    using Forward = ForwardShape<kD, kVariant>;
    using Backward = BackwardShape<kD, kVariant>;
    launch(p_.B * p_.H, p_.T, Forward::shared_bytes(p_), [&](int head, int first, const int(&row)[2]) {
      ForwardRows<kD, kVariant, true>(p_, head, first, plan_, row, 0).run();
    });
    const auto rows = [&]<RowTask kTask>() {
      launch(
          p_.B * p_.H, p_.T, Backward::shared_bytes_rows(p_), [&](int head, int first, const int(&row)[2]) {
            static float block_delta[kOwnedRows];
            BackwardRows<kD, kVariant, kTask>(p_, head, first, plan_, row, gpu::dynamic_shared(), block_delta)
                .run();
          });
    };
    if (plan_.probs_delta) rows.template operator()<RowTask::zero_sum_delta>();
    rows.template operator()<RowTask::gradients_and_facts>();
    launch(p_.B * p_.G, p_.N, Backward::shared_bytes_keys(p_), [&](int head, int first, const int(&)[2]) {
      BackwardKeys<kD, kVariant>(p_, head, first, plan_, gpu::dynamic_shared()).run();
    });
  }

  bool same_bits(const Emulated& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
    };
    return same(o, other.o) && same(lse, other.lse) && same(dq, other.dq) && same(dk, other.dk) &&
           same(dv, other.dv) && same(ties, other.ties) && same(delta, other.delta) &&
           same(residual, other.residual) && same(floor, other.floor) && same(error, other.error);
  }

  std::vector<uint16_t> q, k, v, grad, o, dq, dk, dv;
  std::vector<float> lse, delta, used_delta, residual, floor, error;
  std::vector<float2> row_values;
  std::vector<int32_t> ties;

 private:
  Operand operand(const std::vector<uint16_t>& x, int heads, int rows) const {
    Operand result{};
    result.data = reinterpret_cast<const __nv_bfloat16*>(x.data());
    strides(result.stride, heads, rows);
    result.head_divisor = p_.H / heads;
    result.wide = true;
    return result;
  }
  Output output(std::vector<uint16_t>& x, int heads, int rows) const {
    Output result{x.data(), {}, nullptr, true};
    strides(result.stride, heads, rows);
    return result;
  }
  void strides(int64_t (&stride)[4], int heads, int rows) const {
    stride[0] = int64_t{heads} * rows * p_.D, stride[1] = int64_t{rows} * p_.D, stride[2] = p_.D;
    stride[3] = 1;
  }
  // A block of four warps for every 64 of a head's rows, or keys.
  static void launch(int heads, int rows, size_t shared_bytes, const auto& body) {
    const int tiles = (rows + kOwnedRows - 1) / kOwnedRows;
    cuda_emulator::run({.blocks = heads * tiles, .threads = 128, .shared_bytes = shared_bytes}, [&] {
      const int first = static_cast<int>(blockIdx.x) % tiles * kOwnedRows;
      const int row = first + static_cast<int>(threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4);
      const int both[2] = {row, row + 8};
      body(static_cast<int>(blockIdx.x) / tiles, first, both);
    });
  }

  DevicePlan plan_{};
  any_plan::Problem p_{};
};

// Root mean square of the difference, of the values'.
double difference(const std::vector<uint16_t>& found, const std::vector<float>& expected) {
  double error = 0, size = 0;
  for (size_t n = 0; n < found.size(); ++n) {
    error += std::pow(double{gpu::bf16_value(found[n])} - double{expected[n]}, 2);
    size += std::pow(double{expected[n]}, 2);
  }
  return std::sqrt(error / size);
}

TEST(AnyPlanVariants, full_has_the_bits_of_any) {
  cases::Problem p = make_problem({{1, 2, 1, 70, 100, kD}, {.causal = true}, "variants"}, 4);
  for (auto* memory : {&p.q_memory, &p.k_memory, &p.v_memory, &p.grad_memory})
    for (float& x : *memory) x = cases::to_bf16(x);
  for (const char* text : {"flash2,probs=e4m3^8/saturate",
                           "bf16_all,probs=e4m3^8/saturate,probs_bwd=e4m3^8/saturate,dscores=e5m2^4/saturate",
                           "flash2,probs=e4m3,probs_bwd=e5m2,dscores=e4m3,stabiliser=zero_sum",
                           "flash2,probs=int8^6,dscores=e5m2^4,keel=1e-2,stabiliser=consistent"})
    for (int64_t tile_keys : {64, 0}) {
      SCOPED_TRACE(text);
      AttentionProblem problem = problem_of(p.with(parse_plan(text)), p.in);
      problem.tile_keys = tile_keys;
      Emulated full(p, problem), any(p, problem);
      full.run<Variant::full>();
      any.run<Variant::any>();
      EXPECT_TRUE(full.same_bits(any));
      const AttentionBuffers cpu = attention_runs::run(problem, p);
      // Another order of sums moves a value across a boundary here and there.
      EXPECT_LT(difference(full.o, cpu.o.values()), 0.01);
      EXPECT_LT(difference(full.dq, cpu.dq.values()), 0.05);
      EXPECT_LT(difference(full.dk, cpu.dk.values()), 0.05);
      EXPECT_LT(difference(full.dv, cpu.dv.values()), 0.01);
    }
}

}  // namespace
}  // namespace evenkeel::any_plan
