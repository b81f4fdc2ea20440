// The Ampere-class kernels on the GPU at hand, by name: every form that they take (windows, masks, soft caps, packed and
// ragged sequences, FP16, plans that differ by head) within the error bounds of FlashAttention-2's arithmetic, as
// ampere_test has it on the CPU; the same bits twice.
#include <gtest/gtest.h>

#include "attention/kernel_families.h"
#include "attention_bounds.h"
#include "gpu/device_memory.h"

namespace evenkeel {
namespace {

using cases::Case;
using cases::Fill;
using cases::make_problem;
using cases::Problem;

uint16_t to_bits(float x, TensorType type) {
  if (type == TensorType::bf16)
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(round_to(Rounding{kBf16}, x)) >> 16);
  const float rounded = round_to(Rounding{kFp16}, x), size = std::fabs(rounded);
  const uint32_t sign = std::signbit(rounded) ? 0x8000u : 0u;
  if (size < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::ldexp(size, 24)));
  const int exponent = std::ilogb(size);
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent + 15) << 10 |
                               (static_cast<uint32_t>(std::ldexp(size, 10 - exponent)) & 1023u));
}
float from_bits(uint16_t bits, TensorType type) {
  if (type == TensorType::bf16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                     : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return bits & 0x8000 ? -size : size;
}

// A contiguous (B, heads, rows, D) tensor on the device; NaN at birth.
struct Operand {
  Operand(const std::array<int64_t, 4>& shape_, TensorType type_)
      : shape(shape_),
        type(type_),
        memory(static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3]) * sizeof(uint16_t)) {
    memory.fill(0xff);
  }
  void write(const View<const float>& values) {
    std::vector<uint16_t> bits;
    for (int64_t b = 0; b < shape[0]; ++b)
      for (int64_t h = 0; h < shape[1]; ++h)
        for (int64_t i = 0; i < shape[2]; ++i)
          for (int64_t d = 0; d < shape[3]; ++d) bits.push_back(to_bits(*values.at(b, h, i, d), type));
    memory.upload(bits.data(), bits.size() * sizeof(uint16_t));
  }
  Tensor<float> read() const {
    Tensor<float> values(shape);
    const std::vector<uint16_t> bits = memory.download<uint16_t>();
    for (size_t n = 0; n < bits.size(); ++n) values.values()[n] = from_bits(bits[n], type);
    return values;
  }
  DeviceTensor tensor() const { return {memory.data(), contiguous_strides(shape)}; }

  std::array<int64_t, 4> shape;
  TensorType type;
  DeviceMemory memory;
};

AttentionBuffers run(const AttentionProblem& config, const Problem& host, TensorType type) {
  AttentionProblem p = problem_of(config, host.in);
  p.type = type;
  const std::array<int64_t, 4> per_query{p.B, p.H, p.T, p.D}, per_key{p.B, p.G, p.N, p.D};
  Operand q(per_query, type), o(per_query, type), grad(per_query, type), dq(per_query, type),
      k(per_key, type), v(per_key, type), dk(per_key, type), dv(per_key, type);
  q.write(host.in.q), k.write(host.in.k), v.write(host.in.v), grad.write(host.grad_output);
  const DeviceMemory query_lengths(host.query_lengths), key_lengths(host.key_lengths), visible(host.visible);
  if (!host.query_lengths.empty()) {
    p.mask.query_lengths = {query_lengths.as<const int32_t>(), host.query_lengths.size()};
    p.mask.key_lengths = {key_lengths.as<const int32_t>(), host.key_lengths.size()};
  }
  if (p.mask.visible.present()) p.mask.visible.data = visible.as<const uint8_t>();
  const AttentionCall call(kernel_family("ampere"), p);
  const DeviceMemory lse(static_cast<size_t>(p.B * p.H * p.T) * sizeof(float)), saved(call.sizes().saved),
      workspace(call.sizes().workspace);
  const PassInputs in{q.tensor(), k.tensor(), v.tensor()};
  const ForwardPass forward{o.tensor(), lse.as<float>(), saved.data(), nullptr};
  call.forward(in, forward, workspace.data(), nullptr);
  call.backward(in, grad.tensor(), forward, {dq.tensor(), dk.tensor(), dv.tensor()}, workspace.data(),
                nullptr);
  device_wait();
  AttentionBuffers out(host.in, /*with_facts=*/true);
  out.o = o.read(), out.dq = dq.read(), out.dk = dk.read(), out.dv = dv.read();
  out.lse.values() = lse.download<float>();
  return out;
}

PrecisionPlan plan_of(const std::string& stabiliser, TensorType type = TensorType::bf16) {
  std::string text = "flash2,accumulate=tensor_core,stabiliser=" + stabiliser;
  if (type == TensorType::fp16)
    text += ",probs=fp16,output=fp16,probs_bwd=fp16,dscores=fp16,dq=fp16,dk=fp16,dv=fp16";
  return parse_plan(text);
}
// The bounds know the O of delta as it is kept: see ampere_test.
AttentionProblem bounded(AttentionProblem config, TensorType type) {
  for (PrecisionPlan& plan : config.plans)
    if (rules_of(plan.stabiliser).output == OutputRule::wide)
      plan.at(Site::output_for_delta) = {type == TensorType::fp16 ? Format{5, 17} : Format{8, 14},
                                         RoundingMode::stochastic};
  return config;
}

void expect_in_bounds(const AttentionProblem& config, const Problem& p, const std::string& name,
                      TensorType type = TensorType::bf16) {
  AttentionBuffers got = run(config, p, type);
  const AttentionBuffers again = run(config, p, type);
  for (auto member : {&AttentionBuffers::o, &AttentionBuffers::lse, &AttentionBuffers::dq,
                      &AttentionBuffers::dk, &AttentionBuffers::dv})
    EXPECT_EQ((got.*member).values(), (again.*member).values()) << name;
  const AttentionReference exact = attention_reference(config, p.in, p.grad_output);
  for (size_t n = 0; n < exact.delta.values().size(); ++n)  // these kernels do not give delta
    got.delta.values()[n] = static_cast<float>(exact.delta.values()[n]);
  const AttentionProblem known = bounded(config, type);
  const auto r = ratios_of(known, p, attention_bounds::error_bounds(known, p), got, exact);
  const double largest = std::max({r.o, r.lse, r.dq, r.dk, r.dv});
  EXPECT_LE(largest, 1) << name << ": o " << r.o << ", lse " << r.lse << ", dq " << r.dq << ", dk " << r.dk
                        << ", dv " << r.dv;
  EXPECT_GT(std::max({r.o, r.dq, r.dk, r.dv, r.lse}), 0) << name;
}

bool is_taken(const Case& c) {
  return c.D % 8 == 0 && c.fill != Fill::fp32_normal && c.fill != Fill::subnormal && c.scale >= 0;
}

TEST(AmpereForms, every_common_case) {
  for (const Case& c : cases::kCases)
    if (is_taken(c)) {
      const Problem p = make_problem(c);
      expect_in_bounds(p.with(plan_of("wide_output")), p, c.name);
    }
}

const Case kLarge[] = {
    {{2, 4, 2, 300, 300, 64}, {.causal = true}, "causal_64"},
    {{2, 2, 1, 260, 400, 128}, {.causal = true, .scale = 0.125f}, "causal_128"},
    {{1, 2, 1, 200, 330, 40}, {.window_left = 30, .window_right = 10, .scale = 0.25f}, "window"},
    {{1, 2, 2, 400, 400, 128}, {.causal = true, .window_left = 60, .scale = 0.125f}, "window_causal"},
    {{5, 2, 1, 140, 150, 64}, {.causal = true, .ragged = true}, "ragged"},
    {{1, 2, 1, 150, 200, 64}, {.causal = true, .softcap = 3}, "softcap"},
};

TEST(AmpereForms, every_stabiliser_and_both_types) {
  for (const Case& c : kLarge)
    for (const char* stabiliser : {"none", "paper_capped", "dither", "wide_output", "consistent", "zero_sum"})
      for (TensorType type : {TensorType::bf16, TensorType::fp16}) {
        const Problem p = make_problem(c);
        expect_in_bounds(p.with(plan_of(stabiliser, type)), p,
                         std::string(c.name) + ", " + stabiliser + ", " + std::string(name(type)), type);
      }
}

TEST(AmpereForms, plans_that_differ_by_head) {
  const Problem p = make_problem({{2, 6, 3, 200, 200, 64}, {.causal = true}, "by_head"});
  std::vector<PrecisionPlan> plans;
  for (const char* stabiliser : {"none", "paper_capped", "dither", "wide_output", "consistent", "zero_sum"})
    plans.push_back(plan_of(stabiliser));
  plans[1].keel = 1e-2f;
  expect_in_bounds(p.with(plans), p, "by head");
}

}  // namespace
}  // namespace evenkeel
