// The operands of the any-plan kernels, rounded with shared scales by the CUDA code itself, run by the emulator: the CPU's
// bits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "gpu/cuda/instructions.cuh"

// Words of CUDA that these kernels use besides.
#define __global__
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
struct BlockSize {
  unsigned x;
};
inline BlockSize blockDim{64};
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __clz(int x) { return std::countl_zero(static_cast<uint32_t>(x)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
inline uint32_t max(uint32_t a, uint32_t b) { return std::max(a, b); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }
inline __nv_bfloat16 __float2bfloat16_rn(float) { return {}; }
inline uint32_t atomicMax(uint32_t* at, uint32_t value) {
  const uint32_t before = *at;
  *at = std::max(before, value);
  return before;
}

#include "attention/cpu_operands.h"
#include "attention/cuda/any_plan_prepare.cuh"
#include "attention_cases.h"
#include "attention_runs.h"

namespace evenkeel::any_plan {
namespace {

using attention_runs::Case;
using attention_runs::Fill;
using attention_runs::make_problem;

// The tensors of one pass, prepared by the kernels. Three parts hold every float of these sizes exactly.
class Prepared {
 public:
  Prepared(const AttentionProblem& problem, const HeadPlan& head, const AttentionInputs& in,
           View<const float> grad)
      : in_(in), grad_(grad) {
    p_.B = static_cast<int>(problem.B), p_.H = static_cast<int>(problem.H),
    p_.G = static_cast<int>(problem.G);
    p_.T = static_cast<int>(problem.T), p_.N = static_cast<int>(problem.N),
    p_.D = static_cast<int>(problem.D);
    p_.fp32 = true;
    p_.step = problem.step, p_.layer = problem.layer;
    for (int i = 0; i < kSiteCount; ++i) {
      const Rounding& r = head.plan.rounding[static_cast<size_t>(i)];
      plan_.site[i] = DeviceRounding::of(r.shared == SharedScale{} ? r : element_rounding(r));
    }
    for (Site site : {Site::q, Site::k, Site::v, Site::grad_output})
      plan_.shared[static_cast<int>(site)] = head.plan.at(site).shared;
    plan_.seed = head.plan.seed;
    plan_.centres_keys = head.centres_keys;
    plan_.parts_q = plan_.parts_k = plan_.parts_v = plan_.parts_grad = 3;
    p_.plans = &plan_;
    p_.plan_count = 1;
  }

  // (B, heads, rows, D)
  std::vector<float> operand(Site site) {
    const View<const float>& x = site == Site::q   ? in_.q
                                 : site == Site::k ? in_.k
                                 : site == Site::v ? in_.v
                                                   : grad_;
    Preparation task{};
    task.site = site;
    task.operand = static_cast<OperandOf>(site);
    task.source = x.data;
    std::copy_n(x.stride.begin(), 4, task.stride);
    task.heads = task.copies = static_cast<int>(x.shape[1]);
    task.rows = static_cast<int>(x.shape[2]);
    task.padded_D = static_cast<int>(round_up(x.shape[3], 8));
    const int64_t count = p_.B * int64_t{task.heads} * task.rows * task.padded_D,
                  rows = p_.B * task.heads * task.rows;
    std::vector<__nv_bfloat16> parts(static_cast<size_t>(3 * count));
    task.target = parts.data();
    task.part_stride = count;
    std::vector<uint32_t> memory(static_cast<size_t>(6 * rows));
    const int64_t columns = p_.B * task.heads * column_blocks_of(task) * p_.D;
    std::vector<uint32_t> of_columns(static_cast<size_t>(4 * columns));
    const auto table = [&](uint32_t* at, uint32_t* column) {
      return LargestTable{at, at + rows, at + 2 * rows, at + 2 * rows + rows / 2, column, column + columns};
    };
    task.plain = table(memory.data(), of_columns.data());
    task.centred = table(memory.data() + 3 * rows, of_columns.data() + 2 * columns);
    std::vector<float> mean(static_cast<size_t>(p_.B * p_.G * p_.D));
    if (site == Site::k && plan_.centres_keys) {
      launch(p_.B * p_.G * p_.D, [&] { mean_keys(p_, task, mean.data()); });
      p_.mean_key = mean.data();
      launch(rows, [&] { find_largest(p_, task, true); });
      launch(columns, [&] { find_largest_of_columns(p_, task, true); });
    }
    launch(rows, [&] { find_largest(p_, task, false); });
    launch(columns, [&] { find_largest_of_columns(p_, task, false); });
    launch(count, [&] { prepare_operand(p_, task); });
    std::vector<float> values;
    for (int64_t n = 0; n < count; ++n)
      if (n % task.padded_D < p_.D)
        values.push_back(part(parts, n) + part(parts, n + count) + part(parts, n + 2 * count));
    return values;
  }

 private:
  static float part(const std::vector<__nv_bfloat16>& parts, int64_t n) {
    return __bfloat162float(parts[static_cast<size_t>(n)]);
  }
  static void launch(int64_t threads, const std::function<void()>& kernel) {
    const auto block = static_cast<int64_t>(blockDim.x);
    cuda_emulator::run(
        {.blocks = static_cast<int>((threads + block - 1) / block), .threads = static_cast<int>(block)},
        kernel);
  }

  const AttentionInputs& in_;
  View<const float> grad_;
  DevicePlan plan_{};
  any_plan::Problem p_{};
};

// The same by the CPU implementation.
std::vector<float> on_cpu(const AttentionProblem& problem, const HeadPlan& head, const AttentionInputs& in,
                          View<const float> grad, Site site) {
  const std::vector<HeadPlan> plans(static_cast<size_t>(problem.H), head);
  const Operands operands(problem, plans, in, grad,
                          site == Site::grad_output ? Pass::backward : Pass::forward, nullptr);
  const View<const float>& x = site == Site::q   ? in.q
                               : site == Site::k ? in.k
                               : site == Site::v ? in.v
                                                 : grad;
  const int64_t heads = x.shape[1], rows = x.shape[2], D = x.shape[3];
  std::vector<float> values;
  for (int64_t b = 0; b < problem.B; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<float> matrix;
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < D; ++d)
          matrix.push_back(site == Site::k   ? operands.k(b, h * problem.H / problem.G, i)[d]
                           : site == Site::v ? operands.v(b, h * problem.H / problem.G, i)[d]
                                             : *x.at(b, h, i, d));
      if (site == Site::q || site == Site::grad_output)
        round_rows(head.plan.at(site), matrix.data(), rows, D, D, operands.largest(site, b, h),
                   stream_key(problem, head.plan, static_cast<uint32_t>(site)),
                   static_cast<uint64_t>((b * heads + h) * rows * D));
      values.insert(values.end(), matrix.begin(), matrix.end());
    }
  return values;
}

TEST(AnyPlanPrepare, SharedScalesAreTheCpusBits) {
  const cases::Problem tensors = make_problem({{2, 4, 2, 70, 80, 24}, {.fill = Fill::fp32_normal}, ""});
  int changed = 0;
  for (const char* text : {"e4m3*block16",
                           "int8*tile",
                           "int8*row/stochastic",
                           "e2m1*block16@e4m3*tensor",
                           "e2m1*block16@e4m3*row",
                           "e3m2*block32@e8m0",
                           "e4m3*tile@e8m0_up",
                           "int4*head",
                           "hif8*tensor/nearest_away",
                           "hif8/nearest_away",
                           "int8",
                           "e2m3*block16@e4m3*tile",
                           "e5m2*row@e4m3",
                           "int4*column",
                           "int8*column@e4m3*head",
                           "e4m3*column16@e8m0",
                           "int4*column32/stochastic",
                           "e3m2*column64@e8m0_up",
                           "e2m1*column16@e4m3*tensor",
                           "e2m1*column32@e4m3*column",
                           "e2m1*column16@e4m3*tile"})
    for (const char* keys : {"given", "centred"}) {
      std::string plan = "keys=" + std::string(keys) + ",seed=5";
      for (const char* site : {"q", "k", "v", "grad_output"}) plan += "," + std::string(site) + "=" + text;
      SCOPED_TRACE(plan);
      AttentionProblem problem = problem_of(tensors.with(parse_plan(plan)), tensors.in);
      problem.step = 7, problem.layer = 2;
      const HeadPlan head(problem.plans[0]);
      Prepared prepared(problem, head, tensors.in, tensors.grad_output);
      for (Site site : {Site::q, Site::k, Site::v, Site::grad_output}) {
        const std::vector<float> expected = on_cpu(problem, head, tensors.in, tensors.grad_output, site);
        const std::vector<float> found = prepared.operand(site);
        ASSERT_EQ(expected.size(), found.size());
        int64_t wrong = 0;
        for (size_t n = 0; n < found.size(); ++n) wrong += !(found[n] == expected[n]);
        EXPECT_EQ(wrong, 0) << name(site) << " of " << found.size();
        changed += expected[0] != *tensors.in.q.at(0, 0, 0, 0);
      }
    }
  EXPECT_GT(changed, 50);
}

}  // namespace
}  // namespace evenkeel::any_plan
