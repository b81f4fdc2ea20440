// Facts of rows by Hopper's own pass: the leak is that of the dQ that trains, ties are as many as the CPU counts. They change
// no bit of the other outputs, and have the same bits twice. hopper_backward_test judges the same kernels alike without a GPU.
#include <gtest/gtest.h>

#include "attention/attention_call.h"
#include "fact_judge.h"
#include "gpu/device_memory.h"

namespace evenkeel {
namespace {

using cases::Case;
using cases::Problem;

// A contiguous tensor of BF16 numbers.
struct Operand {
  std::array<int64_t, 4> shape;
  DeviceMemory memory;

  Operand(const std::array<int64_t, 4>& sizes, const std::vector<float>& values) : shape(sizes) {
    std::vector<uint16_t> bits;
    for (const float x : values) bits.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16));
    memory = DeviceMemory(bits);
  }
  explicit Operand(const std::array<int64_t, 4>& sizes)
      : Operand(sizes, std::vector<float>(static_cast<size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]))) {}
  DeviceTensor tensor() const { return {memory.data(), contiguous_strides(shape)}; }
  std::vector<float> values() const {
    std::vector<float> to;
    for (const uint16_t x : memory.download<uint16_t>())
      to.push_back(std::bit_cast<float>(static_cast<uint32_t>(x) << 16));
    return to;
  }
};

// Both passes and the one for facts on the device.
struct Device {
  const AttentionCall call;
  Operand q, k, v, grad, o, dq, dk, dv;
  DeviceMemory saved, workspace, lse, delta, residual, ties;

  Device(const AttentionProblem& problem, const Problem& p)
      : call(resolve(problem, cuda_device())),
        q(p.in.q.shape, p.q_memory),
        k(p.in.k.shape, p.k_memory),
        v(p.in.v.shape, p.v_memory),
        grad(p.grad_output.shape, p.grad_memory),
        o(q.shape),
        dq(q.shape),
        dk(k.shape),
        dv(v.shape),
        saved(call.sizes().saved),
        workspace(call.sizes().workspace) {
    const auto bytes = static_cast<size_t>(problem.B * problem.H * problem.T) * 4;
    for (DeviceMemory* rows : {&lse, &delta, &residual, &ties}) *rows = DeviceMemory(bytes), rows->fill(0xff);
  }
  void run(bool facts) {
    const PassInputs in{q.tensor(), k.tensor(), v.tensor()};
    const ForwardPass forward{o.tensor(), lse.as<float>(), saved.data(), nullptr};
    BackwardPass backward{dq.tensor(), dk.tensor(), dv.tensor()};
    if (facts) backward.delta = delta.as<float>();
    call.forward(in, forward, workspace.data(), nullptr);
    call.backward(in, grad.tensor(), forward, backward, workspace.data(), nullptr);
    if (facts)
      call.facts(in, grad.tensor(), forward, {delta.as<float>(), residual.as<float>(), ties.as<int32_t>()},
                 nullptr);
  }
  fact_judge::Found found() const { return {residual.download<uint32_t>(), ties.download<int32_t>()}; }
  std::array<std::vector<float>, 5> outputs() const {
    return {o.values(), lse.download<float>(), dq.values(), dk.values(), dv.values()};
  }
};

void expect_facts(const Case& c, const std::string& plan, int64_t sequences = 0) {
  SCOPED_TRACE(plan);
  const Problem p = fact_judge::make_problem(c);
  AttentionProblem config = p.with(parse_plan(plan));
  config.fact_sequences = sequences;
  AttentionProblem problem = problem_of(config, p.in);
  problem.type = TensorType::bf16;
  const DeviceMemory rows(p.query_lengths), keys(p.key_lengths);
  if (c.ragged) {
    problem.mask.query_lengths = {rows.as<int32_t>(), p.query_lengths.size()};
    problem.mask.key_lengths = {keys.as<int32_t>(), p.key_lengths.size()};
  }
  Device with(problem, p), without(problem, p);
  ASSERT_TRUE(with.call.has_fact_pass());
  without.run(false);
  with.run(true);
  const fact_judge::Found found = with.found();
  AttentionBuffers got = attention_runs::run(config, p);
  got.lse.values() = with.lse.download<float>();
  got.delta.values() = with.delta.download<float>();
  got.dq.values() = with.dq.values();
  // A step of a sum on tensor cores: they truncate.
  fact_judge::judge(config, p, got, found, 0x1p-22, /*same_delta=*/false);
  const auto plain = without.outputs(), beside = with.outputs();
  for (size_t n = 0; n < plain.size(); ++n)
    EXPECT_TRUE(attention_runs::same_bits(plain[n], beside[n])) << "output " << n << " beside facts";
  with.run(true);
  const fact_judge::Found again = with.found();
  EXPECT_EQ(found.residual, again.residual);
  EXPECT_EQ(found.ties, again.ties);
}

class HopperFactsSmall : public testing::Test {
  void SetUp() override {
    AttentionProblem plain;
    plain.B = plain.H = plain.G = plain.T = plain.N = 1;
    plain.D = 64;
    plain.type = TensorType::bf16;
    plain.plans = {parse_plan("flash2")};
    if (!resolve(plain, cuda_device()).has_fact_pass())
      GTEST_SKIP() << "no such pass here: " << choose_kernel(plain, cuda_device()).why;
  }
};

TEST_F(HopperFactsSmall, masks_and_head_sizes) {
  expect_facts({{2, 2, 1, 300, 300, 64}, {.causal = true, .scale = 0.125f}, "causal"}, "flash2", 1);
  expect_facts({{1, 1, 1, 200, 300, 128}, {.causal = true, .scale = 0.125f}, "more keys"}, "flash2");
  expect_facts({{2, 2, 1, 130, 140, 96}, {.scale = 0.125f}, "full"}, "flash2", 1);
  expect_facts({{5, 1, 1, 90, 140, 128}, {.causal = true, .ragged = true, .scale = 0.125f}, "lengths"},
               "flash2", 4);
}

TEST_F(HopperFactsSmall, rules_of_heads) {
  for (const int64_t D : {64, 128})
    for (const char* rules :
         {"stabiliser=paper_capped", "stabiliser=dither", "stabiliser=consistent", "stabiliser=wide_output",
          "stabiliser=zero_sum", "keel=0.001", "stabiliser=consistent,keel=0.001", "tie_tolerance=0.25"})
      expect_facts({{1, 1, 1, 260, 260, D}, {.causal = true, .scale = 0.125f}, "rules"},
                   std::string("flash2,") + rules);
}

}  // namespace
}  // namespace evenkeel
