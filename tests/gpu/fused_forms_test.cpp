// The fast families on the GPU at hand, each by its name. Every form that they take (windows, masks, soft caps, ragged
// sequences, slopes, sinks, a gradient of L, FP16, plans that differ by head) is within the error bounds of
// FlashAttention-2's arithmetic, as ampere_test has it on the CPU. Errors have no common sign. The bits are the same twice.
// Each head of a mixed problem has the bits of a problem with its plan alone.
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

struct Extras {
  const Tensor<float>* grad_lse = nullptr;
  Tensor<float>* dsinks = nullptr;
  std::vector<float>* score_facts = nullptr;  // (2, H): largest scores, largest row means
};

AttentionBuffers run(const char* family, const AttentionProblem& config, const Problem& host,
                     TensorType type = TensorType::bf16, const Extras& extras = {}) {
  AttentionProblem p = problem_of(config, host.in);
  p.type = type;
  const std::array<int64_t, 4> per_query{p.B, p.H, p.T, p.D}, per_key{p.B, p.G, p.N, p.D},
      per_output{p.B, p.H, p.T, p.Dv}, per_value{p.B, p.G, p.N, p.Dv};
  Operand q(per_query, type), o(per_output, type), grad(per_output, type), dq(per_query, type),
      k(per_key, type), v(per_value, type), dk(per_key, type), dv(per_value, type);
  q.write(host.in.q), k.write(host.in.k), v.write(host.in.v), grad.write(host.grad_output);
  const auto on_device = [](std::span<const float> x) {
    return DeviceMemory(std::vector(x.begin(), x.end()));
  };
  const DeviceMemory query_lengths(host.query_lengths), key_lengths(host.key_lengths), visible(host.visible),
      slopes = on_device(config.slopes), sinks = on_device(config.sinks),
      grad_lse = on_device(extras.grad_lse ? std::span<const float>(extras.grad_lse->values())
                                           : std::span<const float>{}),
      dsinks(static_cast<size_t>(p.H) * sizeof(float));
  if (!host.query_lengths.empty()) {
    p.mask.query_lengths = {query_lengths.as<const int32_t>(), host.query_lengths.size()};
    p.mask.key_lengths = {key_lengths.as<const int32_t>(), host.key_lengths.size()};
  }
  if (p.mask.visible.present()) p.mask.visible.data = visible.as<const uint8_t>();
  if (!p.slopes.empty()) p.slopes = {slopes.as<const float>(), p.slopes.size()};
  if (!p.sinks.empty()) p.sinks = {sinks.as<const float>(), p.sinks.size()};
  const AttentionCall call(kernel_family(family), p);
  DeviceMemory lse(static_cast<size_t>(p.B * p.H * p.T) * sizeof(float)), saved(call.sizes().saved),
      workspace(call.sizes().workspace);
  for (DeviceMemory* memory : {&lse, &saved, &workspace}) memory->fill(0xff);
  const PassInputs in{q.tensor(), k.tensor(), v.tensor()};
  ForwardPass forward{o.tensor(), lse.as<float>(), saved.data(), nullptr};
  BackwardPass backward{dq.tensor(), dk.tensor(), dv.tensor()};
  if (extras.grad_lse) backward.grad_lse = grad_lse.as<float>();
  if (extras.dsinks) backward.dsinks = dsinks.as<float>();
  DeviceMemory score_facts(2 * static_cast<size_t>(p.H) * sizeof(float));
  score_facts.fill(0xff);
  if (extras.score_facts) {
    EXPECT_TRUE(call.gives_score_facts());
    forward.largest_score = score_facts.as<float>();
    forward.largest_row_mean = forward.largest_score + p.H;
  }
  call.forward(in, forward, workspace.data(), nullptr);
  workspace.fill(0xff);
  call.backward(in, grad.tensor(), forward, backward, workspace.data(), nullptr);
  device_wait();
  AttentionBuffers out(host.in, /*with_facts=*/true);
  out.o = o.read(), out.dq = dq.read(), out.dk = dk.read(), out.dv = dv.read();
  out.lse.values() = lse.download<float>();
  if (extras.dsinks) extras.dsinks->values() = dsinks.download<float>();
  if (extras.score_facts) *extras.score_facts = score_facts.download<float>();
  return out;
}

PrecisionPlan plan_of(const std::string& stabiliser, TensorType type = TensorType::bf16) {
  std::string text = "flash2,accumulate=tensor_core,stabiliser=" + stabiliser;
  if (type == TensorType::fp16)
    text += ",probs=fp16,output=fp16,probs_bwd=fp16,dscores=fp16,dq=fp16,dk=fp16,dv=fp16";
  return parse_plan(text);
}
// These kernels have tiles of 32 to 128 keys, whatever tiles a case has on the CPU.
AttentionProblem tiled(AttentionProblem config) {
  config.tile_keys = 64;
  return config;
}
// The bounds know the O of delta as it is kept: see ampere_test.
AttentionProblem bounded(AttentionProblem config, TensorType type) {
  for (PrecisionPlan& plan : config.plans)
    if (rules_of(plan.stabiliser).output == OutputRule::wide)
      plan.at(Site::output_for_delta) = {type == TensorType::fp16 ? Format{5, 17} : Format{8, 14},
                                         RoundingMode::stochastic};
  return config;
}

// The mean of a tensor's errors and its standard error, one sample a row.
struct Sign {
  double mean = 0, standard_error = 0;
};
Sign sign_of(const Tensor<float>& got, const Tensor<double>& exact) {
  const auto width = static_cast<size_t>(got.shape()[3]), rows = got.values().size() / width;
  double sum = 0, squares = 0;
  for (size_t row = 0; row < rows; ++row) {
    double error = 0;
    for (size_t n = row * width; n < (row + 1) * width; ++n)
      error += (got.values()[n] - exact.values()[n]) / static_cast<double>(width);
    sum += error, squares += error * error;
  }
  const auto count = static_cast<double>(rows);
  const double mean = sum / count;
  return {mean, std::sqrt(std::max(0.0, squares / count - mean * mean) / count)};
}

// "" where the family runs on the GPU at hand.
std::string why_not_here(const char* family) {
  AttentionProblem plain;
  plain.B = plain.H = plain.G = plain.T = plain.N = 1;
  plain.D = plain.Dv = 64;
  plain.type = TensorType::bf16;
  plain.plans = {parse_plan("flash2")};
  return not_taken(kernel_family(family), plain, cuda_device());
}

class FusedForms : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const std::string why = why_not_here(GetParam()); !why.empty())
      GTEST_SKIP() << "the family does not run here: " << why;
  }

  void expect_in_bounds(const AttentionProblem& asked, const Problem& p, const std::string& name,
                        TensorType type = TensorType::bf16, bool without_sign = false) {
    const AttentionProblem config = tiled(asked);
    AttentionBuffers got = run(GetParam(), config, p, type);
    const AttentionBuffers again = run(GetParam(), config, p, type);
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
    EXPECT_GT(largest, 0) << name;
    if (!without_sign) return;
    const std::pair<Sign, const char*> signs[] = {{sign_of(got.o, exact.o), "o"},
                                                  {sign_of(got.dq, exact.dq), "dq"},
                                                  {sign_of(got.dk, exact.dk), "dk"},
                                                  {sign_of(got.dv, exact.dv), "dv"}};
    for (const auto& [sign, tensor] : signs)
      EXPECT_LE(std::fabs(sign.mean), 5 * sign.standard_error + 1e-9) << name << ": a bias of " << tensor;
  }
};
INSTANTIATE_TEST_SUITE_P(, FusedForms, testing::Values("hopper", "ampere"),
                         [](const auto& info) { return std::string(info.param); });

bool is_taken(const Case& c) {
  return c.D % 8 == 0 && c.fill != Fill::fp32_normal && c.fill != Fill::subnormal && c.scale >= 0;
}

TEST_P(FusedForms, every_common_case) {
  int count = 0;
  for (const Case& c : cases::kCases)
    if (is_taken(c)) {
      const Problem p = make_problem(c);
      expect_in_bounds(p.with(plan_of("wide_output")), p, c.name);
      ++count;
    }
  EXPECT_GT(count, 30);
}

constexpr const char* kStabilisers[] = {"none",        "paper_capped", "dither",
                                        "wide_output", "consistent",   "zero_sum"};

// Several tiles of rows and keys. Scales are powers of two: the kernels round dS before it is scaled.
const Case kLarge[] = {
    {{2, 4, 2, 300, 300, 64}, {.causal = true}, "causal_64"},
    {{2, 2, 1, 260, 400, 128}, {.causal = true, .scale = 0.125f}, "causal_128"},
    {{1, 2, 1, 200, 330, 40}, {.window_left = 30, .window_right = 10, .scale = 0.25f}, "window"},
    {{1, 2, 2, 400, 400, 128}, {.causal = true, .window_left = 60, .scale = 0.125f}, "window_causal"},
    {{5, 2, 1, 140, 150, 64}, {.causal = true, .ragged = true}, "ragged"},
    {{1, 2, 1, 150, 200, 64}, {.causal = true, .softcap = 3}, "softcap"},
};

TEST_P(FusedForms, every_stabiliser_and_both_types) {
  for (const Case& c : kLarge)
    for (const char* stabiliser : kStabilisers)
      for (TensorType type : {TensorType::bf16, TensorType::fp16}) {
        const Problem p = make_problem(c);
        expect_in_bounds(p.with(plan_of(stabiliser, type)), p,
                         std::string(c.name) + ", " + stabiliser + ", " + std::string(name(type)), type,
                         /*without_sign=*/true);
      }
}

// Does the family take it on the GPU at hand?
bool is_taken(const char* family, const AttentionProblem& config, const Problem& p, TensorType type) {
  AttentionProblem asked = problem_of(config, p.in);
  asked.type = type;
  return not_taken(kernel_family(family), asked, cuda_device()).empty();
}

TEST_P(FusedForms, larger_heads) {
  int taken = 0;
  const Case larger[] = {
      {{1, 2, 1, 200, 230, 256}, {.causal = true}, "causal_256"},
      {{1, 2, 2, 150, 200, 192}, {.causal = true, .scale = 0.0625f}, "causal_192"},
      {{1, 2, 1, 150, 250, 136}, {.window_left = 30, .window_right = 10, .scale = 0.125f}, "window_136"},
      {{1, 2, 1, 400, 300, 256}, {.causal = true, .window_left = 90, .scale = 0.0625f}, "window_256"},
      {{5, 2, 1, 100, 110, 256}, {.causal = true, .ragged = true}, "ragged_256"},
      {{1, 2, 1, 100, 150, 200}, {.causal = true, .softcap = 3, .scale = 0.125f}, "softcap_200"},
  };
  for (const Case& c : larger)
    for (const char* stabiliser : kStabilisers)
      for (TensorType type : {TensorType::bf16, TensorType::fp16}) {
        if (type == TensorType::fp16 && std::string_view(stabiliser) != "wide_output") continue;
        const Problem p = make_problem(c);
        const AttentionProblem config = p.with(plan_of(stabiliser, type));
        if (!is_taken(GetParam(), config, p, type)) continue;
        ++taken;
        expect_in_bounds(config, p, std::string(c.name) + ", " + stabiliser + ", " + std::string(name(type)),
                         type,
                         /*without_sign=*/true);
      }
  EXPECT_EQ(taken, 6 * 7);
}

// Values of another size than the keys have the bits of a problem filled up with zeros.
TEST_P(FusedForms, values_of_another_size) {
  int taken = 0;
  for (const cases::Narrowed& c : cases::kNarrowed)
    for (const char* stabiliser : {"wide_output", "consistent", "zero_sum"}) {
      const Problem wide = c.wide(), narrow = c.narrow();
      const AttentionProblem config = tiled(wide.with(plan_of(stabiliser)));
      if (!is_taken(GetParam(), config, narrow, TensorType::bf16)) continue;
      ++taken;
      attention_runs::expect_narrowed(run(GetParam(), config, wide), run(GetParam(), config, narrow), c.name);
    }
  EXPECT_EQ(taken, 4 * 3);
}

// Windows of every width around the tiles, one row, one key, more rows than keys, rows that see nothing.
TEST_P(FusedForms, windows_and_odd_sizes) {
  const Case odd[] = {
      {{1, 2, 1, 1, 300, 64}, {.window_left = 100, .window_right = 0}, "one_row"},
      {{1, 1, 1, 1, 300, 128}, {.causal = true, .window_left = 0, .scale = 0.125f}, "one_row_128"},
      {{1, 1, 1, 300, 1, 64}, {.window_left = 5, .window_right = 5}, "one_key"},
      {{1, 2, 2, 700, 700, 64}, {.window_left = 0, .window_right = 0}, "own_key"},
      {{1, 1, 1, 700, 700, 128}, {.window_left = 0, .window_right = 0, .scale = 0.125f}, "own_key_128"},
      {{1, 2, 2, 700, 700, 64}, {.causal = true, .window_left = 1}, "two_keys"},
      {{1, 2, 2, 1000, 1000, 64}, {.causal = true, .window_left = 127}, "tile"},
      {{1, 2, 2, 1000, 1000, 64}, {.causal = true, .window_left = 256}, "two_tiles"},
      {{1, 2, 1, 1100, 1100, 128}, {.causal = true, .window_left = 200, .scale = 0.125f}, "window_128"},
      {{1, 2, 1, 600, 900, 128}, {.window_left = 140, .window_right = 70, .scale = 0.125f}, "both_sides_128"},
      {{1, 2, 1, 900, 400, 64}, {.causal = true, .window_left = 90}, "rows_over_keys"},
      {{1, 2, 1, 300, 900, 64}, {.window_left = 3, .window_right = 300}, "keys_over_rows"},
      {{5, 2, 1, 400, 500, 64}, {.causal = true, .window_left = 70, .ragged = true}, "ragged_window"},
      {{2, 2, 1, 300, 290, 64}, {.causal = true, .hide = cases::Hide::rows}, "hidden_rows"},
      {{1, 2, 2, 290, 300, 128}, {.hide = cases::Hide::some, .scale = 0.125f}, "hidden_128"},
      {{1, 2, 2, 333, 333, 128}, {.causal = true, .softcap = 2, .scale = 0.125f}, "softcap_128"},
      {{1, 2, 1, 333, 333, 64}, {.causal = true, .window_left = 80, .softcap = 2}, "softcap_window"},
      {{3, 12, 12, 600, 600, 64}, {.causal = true, .window_left = 150}, "many_tiles"},
  };
  for (const Case& c : odd)
    for (const char* stabiliser : {"wide_output", "consistent", "zero_sum"}) {
      const Problem p = make_problem(c);
      expect_in_bounds(p.with(plan_of(stabiliser)), p, std::string(c.name) + ", " + stabiliser);
    }
}

// Few query rows and many keys (decoding): the Ampere class splits the keys, Hopper's kernels take them where they are asked for.
TEST_P(FusedForms, few_rows) {
  const Case few[] = {
      {{2, 8, 2, 1, 3000, 128}, {.causal = true, .scale = 0.125f}, "one_row"},
      {{1, 32, 4, 1, 5000, 64}, {}, "eight_heads_a_key_head"},
      {{1, 4, 1, 16, 1000, 64}, {.causal = true}, "sixteen_rows"},
      {{5, 4, 2, 8, 700, 64}, {.causal = true, .ragged = true}, "ragged"},
      {{1, 4, 1, 4, 2000, 128}, {.window_left = 600, .window_right = 5, .scale = 0.125f}, "window"},
      {{1, 4, 1, 4, 900, 256}, {.scale = 0.0625f}, "head_256"},
      {{1, 4, 1, 4, 600, 64}, {.causal = true, .softcap = 3}, "softcap"},
      {{2, 4, 2, 4, 600, 64}, {.hide = cases::Hide::rows}, "hidden_rows"},
  };
  for (const Case& c : few)
    for (const char* stabiliser : {"none", "wide_output", "consistent", "zero_sum"})
      for (TensorType type : {TensorType::bf16, TensorType::fp16}) {
        const Problem p = make_problem(c);
        const AttentionProblem config = p.with(plan_of(stabiliser, type));
        if (is_taken(GetParam(), config, p, type))
          expect_in_bounds(config, p, std::string(c.name) + ", " + stabiliser, type);
      }
}

// Within the bounds; and each head has the bits that it has alone.
TEST_P(FusedForms, plans_that_differ_by_head) {
  const Case mixed[] = {{{2, 6, 6, 300, 300, 64}, {.causal = true}, "by_head"},
                        {{2, 6, 3, 200, 200, 64}, {.causal = true}, "by_head_grouped"},
                        {{1, 6, 6, 290, 333, 128}, {.scale = 0.125f}, "by_head_128"},
                        {{1, 6, 6, 333, 333, 64}, {.causal = true, .window_left = 70}, "by_head_window"}};
  for (const Case& c : mixed)
    for (TensorType type : {TensorType::bf16, TensorType::fp16}) {
      const Problem p = make_problem(c);
      std::vector<PrecisionPlan> plans;
      for (const char* stabiliser : kStabilisers) plans.push_back(plan_of(stabiliser, type));
      plans[1].keel = 1e-2f;
      plans[3].keel = 2e-2f;
      plans[4].seed = 9;
      const std::string what = std::string(c.name) + ", " + std::string(name(type));
      expect_in_bounds(p.with(plans), p, what, type);
      const AttentionBuffers all = run(GetParam(), p.with(plans), p, type);
      for (size_t n = 0; n < plans.size(); ++n) {
        const AttentionBuffers alone = run(GetParam(), p.with(plans[n]), p, type);
        const auto h = static_cast<int64_t>(n);
        const auto expect_same = [&](auto member, bool of_keys) {
          if (of_keys && c.H != c.G) return;
          const Tensor<float>&ours = all.*member, &theirs = alone.*member;
          for (int64_t b = 0; b < c.B; ++b)
            for (int64_t i = 0; i < ours.shape()[2]; ++i)
              for (int64_t d = 0; d < ours.shape()[3]; ++d)
                ASSERT_EQ(*ours.view().at(b, h, i, d), *theirs.view().at(b, h, i, d))
                    << what << ", head " << h << " (" << kStabilisers[n] << "), row " << i;
        };
        expect_same(&AttentionBuffers::o, false);
        expect_same(&AttentionBuffers::lse, false);
        expect_same(&AttentionBuffers::dq, false);
        expect_same(&AttentionBuffers::dk, true);
        expect_same(&AttentionBuffers::dv, true);
      }
    }
}

// Root mean square errors at most 1.3 times those of the CPU with the same plan, and the CPU's are small.
void expect_near_the_cpu(const char* family, const Problem& p, const PrecisionPlan& plan, TensorType type) {
  const auto [B, H, T] = std::array{p.shape.B, p.shape.H, p.shape.T};
  std::vector<float> slopes, sinks;
  for (int64_t h = 0; h < H; ++h) {
    slopes.push_back(std::ldexp(1.0f, -2 - static_cast<int>(h)));
    sinks.push_back(1.5f - 2 * static_cast<float>(h));
  }
  Tensor<float> grad_lse({B, H, T, 1}), dsinks({1, H, 1, 1}), cpu_dsinks({1, H, 1, 1});
  cases::Draw draw(3, 9);
  for (float& x : grad_lse.values()) x = draw.normal();
  AttentionProblem config = tiled(p.with(plan));
  config.slopes = slopes, config.sinks = sinks;
  const AttentionReference exact = attention_reference(config, p.in, p.grad_output, grad_lse.view());
  AttentionBuffers cpu(p.in, /*with_facts=*/true);
  AttentionBackward backward = cpu.backward();
  backward.grad_lse = grad_lse.view(), backward.dsinks = cpu_dsinks.view();
  attention_forward(config, p.in, cpu.forward());
  attention_backward(config, p.in, p.grad_output, cpu.forward(), backward);
  const AttentionBuffers got = run(family, config, p, type, {&grad_lse, &dsinks});
  const auto compare = [&](const char* name, const Tensor<float>& x, const Tensor<float>& y,
                           const Tensor<double>& truth, double floor = 1e-13) {
    double ours = 0, theirs = 0, size = 0;
    for (size_t n = 0; n < truth.values().size(); ++n) {
      const double t = truth.values()[n];
      ours += (x.values()[n] - t) * (x.values()[n] - t);
      theirs += (y.values()[n] - t) * (y.values()[n] - t);
      size += t * t;
    }
    EXPECT_LE(ours, 1.69 * theirs + floor * size) << p.shape.name << ", " << to_string(plan) << ", " << name;
    EXPECT_LE(theirs, 1e-4 * size) << p.shape.name << ", " << name;
    EXPECT_GT(size, 0) << p.shape.name << ", " << name;
  };
  compare("o", got.o, cpu.o, exact.o);
  compare("lse", got.lse, cpu.lse, exact.lse);
  compare("dq", got.dq, cpu.dq, exact.dq);
  compare("dk", got.dk, cpu.dk, exact.dk);
  compare("dv", got.dv, cpu.dv, exact.dv);
  // One number a head: too few for the ratio of two mean squares. O is rounded to 8 bits, so delta is known to 2^-9 a row.
  compare("dsinks", dsinks, cpu_dsinks, exact.dsinks, 0x1p-18);
}

// Inputs that both types hold: BF16's have 8 significand bits and small exponents here.
TEST_P(FusedForms, slopes_sinks_and_the_gradient_of_the_log_sum) {
  const Case forms[] = {{{2, 2, 1, 190, 300, 64}, {.causal = true}, "causal_64"},
                        {{1, 2, 2, 150, 150, 128}, {.window_left = 70, .scale = 0.125f}, "window_128"}};
  for (const Case& c : forms)
    for (const char* stabiliser : {"none", "wide_output", "consistent", "zero_sum"})
      for (TensorType type : {TensorType::bf16, TensorType::fp16}) {
        PrecisionPlan plan = plan_of(stabiliser, type);
        plan.accumulate = Accumulate::fp32_sequential;
        plan.keel = 1e-2f;
        expect_near_the_cpu(GetParam(), make_problem(c), plan, type);
      }
}

// The largest score and row mean of each head, as FP64 has them; and they change no bit of the rest.
TEST(ScoreFacts, as_fp64_has_them) {
  if (const std::string why = why_not_here("hopper"); !why.empty()) GTEST_SKIP() << why;
  const Case shapes[] = {{{2, 4, 2, 300, 300, 64}, {.causal = true}, "causal_64"},
                         {{2, 2, 1, 260, 400, 128}, {.causal = true, .scale = 0.125f}, "causal_128"},
                         {{1, 2, 2, 130, 70, 64}, {.causal = true}, "rows_over_keys"},
                         {{5, 2, 1, 140, 150, 64}, {.causal = true, .ragged = true}, "ragged"},
                         {{3, 12, 12, 700, 700, 64}, {}, "full_many"},
                         {{1, 2, 2, 64, 48, 64}, {.fill = Fill::offset}, "offset"}};
  for (const Case& c : shapes)
    for (const char* stabiliser : {"none", "wide_output", "consistent", "paper_capped"}) {
      const Problem p = make_problem(c);
      const AttentionProblem config = problem_of(tiled(p.with(plan_of(stabiliser))), p.in);
      std::vector<float> found;
      const AttentionBuffers with = run("hopper", config, p, TensorType::bf16, {.score_facts = &found}),
                             without = run("hopper", config, p);
      for (auto member : {&AttentionBuffers::o, &AttentionBuffers::lse, &AttentionBuffers::dq})
        EXPECT_EQ((with.*member).values(), (without.*member).values()) << c.name;
      const double scale = complete(config).scale;
      for (int64_t h = 0; h < c.H; ++h) {
        double largest = -INFINITY, largest_mean = 0, size = 0;
        for (int64_t b = 0; b < c.B; ++b)
          for (int64_t i = 0; i < config.rows(b); ++i) {
            const auto [first, last] = config.key_range(b, i);
            double sum = 0;
            for (int64_t j = first; j < last; ++j) {
              double score = 0;
              for (int64_t d = 0; d < c.D; ++d)
                score += static_cast<double>(*p.in.q.at(b, h, i, d)) * *p.in.k.at(b, h / (c.H / c.G), j, d);
              sum += score * scale;
              largest = std::max(largest, score * scale);
              size = std::max(size, std::fabs(score * scale));
            }
            if (last > first)
              largest_mean = std::max(largest_mean, std::fabs(sum) / static_cast<double>(last - first));
          }
        const auto n = static_cast<size_t>(h);
        EXPECT_NEAR(found[n], largest, 1e-5 * size) << c.name << ", head " << h;
        EXPECT_NEAR(found[static_cast<size_t>(c.H) + n], largest_mean, 1e-5 * size)
            << c.name << ", head " << h;
        EXPECT_GT(size, 0);
      }
    }
}

// What the memory checker runs: each kernel once, with ends of rows, keys and features.
TEST_P(FusedForms, small_forms) {
  const Case forms[] = {{{1, 2, 1, 70, 90, 40}, {.causal = true, .scale = 0.25f}, "small_40"},
                        {{1, 1, 1, 70, 40, 104}, {.window_left = 20, .scale = 0.125f}, "small_104"},
                        {{5, 2, 1, 40, 50, 64}, {.ragged = true, .hide = cases::Hide::rows}, "small_ragged"}};
  for (const Case& c : forms)
    for (const char* stabiliser : {"wide_output", "consistent", "zero_sum"}) {
      const Problem p = make_problem(c);
      expect_in_bounds(p.with(plan_of(stabiliser)), p, std::string(c.name) + ", " + stabiliser);
    }
  PrecisionPlan plan = plan_of("wide_output", TensorType::fp16);
  plan.accumulate = Accumulate::fp32_sequential;
  expect_near_the_cpu(GetParam(), make_problem(forms[0]), plan, TensorType::fp16);
}

}  // namespace
}  // namespace evenkeel
