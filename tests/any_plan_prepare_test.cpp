// The operands of the any-plan kernels, rounded with shared scales by the CUDA code itself, run by the emulator: the CPU's
// bits. So are those of the quick way of rounding.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "any_plan_words.h"
#include "attention/cpu_operands.h"
#include "attention/cuda/any_plan_prepare.cuh"
#include "attention_cases.h"
#include "attention_runs.h"

namespace evenkeel::any_plan {
namespace {

using attention_runs::Case;
using attention_runs::Fill;
using attention_runs::make_problem;

// How the source lies in memory: read value by value, or in pieces of 16 bytes.
enum class Source { fp32, fp32_wide, bf16_wide };

// The tensors of one pass, prepared by the kernels. Three parts hold every float of these sizes exactly.
class Prepared {
 public:
  Prepared(const AttentionProblem& problem, const HeadPlan& head, const AttentionInputs& in,
           View<const float> grad, Source source)
      : in_(in), grad_(grad), source_(source) {
    p_.B = static_cast<int>(problem.B), p_.H = static_cast<int>(problem.H),
    p_.G = static_cast<int>(problem.G);
    p_.T = static_cast<int>(problem.T), p_.N = static_cast<int>(problem.N),
    p_.D = static_cast<int>(problem.D);
    p_.fp32 = source != Source::bf16_wide;
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
    std::vector<uint16_t> halves;  // of a contiguous tensor
    for (int64_t n = 0; n < x.shape[0] * x.stride[0]; ++n)
      halves.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(x.data[n]) >> 16));
    if (source_ == Source::bf16_wide) task.source = halves.data();
    std::copy_n(x.stride.begin(), 4, task.stride);
    task.heads = task.copies = static_cast<int>(x.shape[1]);
    task.rows = static_cast<int>(x.shape[2]);
    task.padded_D = static_cast<int>(round_up(x.shape[3], 8));
    task.row_threads = static_cast<int>(std::bit_ceil(static_cast<unsigned>(task.padded_D / kPiece)));
    task.wide = source_ != Source::fp32;
    const int64_t count = p_.B * int64_t{task.heads} * task.rows * task.padded_D,
                  rows = p_.B * task.heads * task.rows,
                  threads = p_.B * task.heads * round_up(task.rows * task.row_threads, blockDim.x);
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
      launch(threads, [&] { find_largest(p_, task, true); });
      launch(columns, [&] { find_largest_of_columns(p_, task, true); });
    }
    launch(threads, [&] { find_largest(p_, task, false); });
    launch(columns, [&] { find_largest_of_columns(p_, task, false); });
    if (is_down_column(plan_.shared[static_cast<int>(site)].group))
      launch(threads, [&] { prepare_operand<true>(p_, task); });
    else
      launch(threads, [&] { prepare_operand<false>(p_, task); });
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
  const Source source_;
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

class SharedScales : public ::testing::TestWithParam<Source> {};
INSTANTIATE_TEST_SUITE_P(AnyPlanPrepare, SharedScales,
                         ::testing::Values(Source::fp32, Source::fp32_wide, Source::bf16_wide));

TEST_P(SharedScales, are_the_cpus_bits) {
  cases::Problem tensors = make_problem({{2, 4, 2, 70, 80, 24}, {.fill = Fill::fp32_normal}, ""});
  if (GetParam() == Source::bf16_wide)
    for (auto* memory : {&tensors.q_memory, &tensors.k_memory, &tensors.v_memory, &tensors.grad_memory})
      for (float& x : *memory) x = cases::to_bf16(x);
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
      Prepared prepared(problem, head, tensors.in, tensors.grad_output, GetParam());
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

// Every sign, exponent and upper significand, and below them bits that make ties, and their neighbours.
TEST(AnyPlanRounding, is_the_definition) {
  std::vector<uint32_t> lower = {0, 0xffff};
  for (int bit = 0; bit < 16; bit += 3)
    for (uint32_t low : {(1u << bit) - 1, 1u << bit, (1u << bit) + 1}) lower.push_back(low);
  struct Row {
    const char* text;
    RoundKind kind;
  };
  for (const Row& row : {Row{"e4m3", RoundKind::nearest},
                         {"e4m3^8/saturate", RoundKind::nearest},
                         {"e5m2", RoundKind::nearest},
                         {"e5m2^22/saturate", RoundKind::nearest},
                         {"e2m1", RoundKind::nearest},
                         {"int8", RoundKind::nearest},
                         {"fp16", RoundKind::nearest},
                         {"e7m22/saturate", RoundKind::nearest},
                         {"e7m2^32", RoundKind::nearest},
                         {"e7m1^-32/saturate", RoundKind::nearest},
                         {"e8m2", RoundKind::any},
                         {"e5m23", RoundKind::any},
                         {"e4m3/nearest_away", RoundKind::any},
                         {"hif8", RoundKind::tapered}}) {
    const Rounding r = parse_rounding(row.text);
    const DeviceRounding device = DeviceRounding::of(r);
    EXPECT_EQ(device.kind, row.kind) << row.text;
    int64_t wrong = 0;
    for (uint32_t upper = 0; upper < 65536; upper += kSanitized ? 7 : 1)
      for (uint32_t low : lower) {
        const float x = std::bit_cast<float>(upper << 16 | low);
        wrong += std::bit_cast<uint32_t>(round_any(device, x, 0)) != std::bit_cast<uint32_t>(round_to(r, x));
      }
    EXPECT_EQ(wrong, 0) << row.text;
  }
}

}  // namespace
}  // namespace evenkeel::any_plan
