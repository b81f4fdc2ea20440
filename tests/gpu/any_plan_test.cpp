// The any-plan kernels against the CPU implementation, which is their definition.
//
// Bit for bit where sums are exact in any order (exact_problem says why); elsewhere within what another order
// of addition may change (Bound), and without a common sign.
#include <gtest/gtest.h>

#include "any_plan_bound.h"
#include "any_plan_runs.h"

namespace evenkeel {
namespace {

using cases::Case;
using cases::Draw;
using cases::find_case;
using cases::make_problem;

class AnyPlan : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const CudaDevice device = cuda_device(); !device.present) GTEST_SKIP() << "no GPU: " << device.why;
  }
};

// --- Exact problems
//
// Every row has two keys that count, the larger score s and s - gap with gap in [0, 3], and 126 keys at -128,
// whose probability is exactly 0. The larger comes first, or both are in one tile. A maximum that rises in a later
// tile would scale O-bar by a factor of 24 bits, and what is added then would be rounded (by tensor cores:
// truncated). Keys are one-hot, so a score is one product; V and dO are whole multiples of 1/8. Then,
// whatever the order of addition,
//   scores      one product of 8 and 5 bits: exact
//   l           one addition (or one a tile): the same rounding
//   Pb V        two products of at most 11 and 4 bits, near each other: exact, if probs has at most 11 bits
//   dP          whole multiples of 1/64 below 2^9: exact
//   delta       the GPU adds features in the CPU's order
//   dQ          one product: exact, if dscores has at most 19 bits or the key is a power of two
//   dV          P of at most 11 bits, at least 2^-6, a few rows a key: exact
//   dK          dS a multiple of 2^-9 (e4m3), q of 2^-4, sums below 2^11: exact for dscores=e4m3
// The polynomial of exp is the same, so P, dS and every rounding agree to the bit, and in the stochastic modes
// the random bits too. The log may differ by an ulp: L is compared so, and that ulp of P vanishes in e4m3.
struct Exact {
  cases::Problem problem;
  AttentionProblem config;
};
Exact exact_problem(float key, bool causal = false, int64_t T = 48, int64_t N = 128, int64_t G = 2,
                    bool one_tile = false) {
  const Case shape{{2, 2, G, T, N, 128}, {.causal = causal, .scale = 0.125f}, "exact"};
  Exact result{make_problem(shape, 7), {}};
  cases::Problem& p = result.problem;
  Draw draw(11, 0);
  for (float& v : p.v_memory) v = 0.125f * static_cast<float>(draw.below(31) - 15);
  for (float& g : p.grad_memory) g = 0.125f * static_cast<float>(draw.below(31) - 15);
  for (int64_t n = 0; n < p.shape.B * G * N * 128; ++n)
    p.k_memory[static_cast<size_t>(n)] = n % 128 == n / 128 % N ? key : 0;
  for (int64_t row = 0; row < p.shape.B * p.shape.H * T; ++row) {
    float* q = &p.q_memory[static_cast<size_t>(row * 128)];
    // Among 24 keys spread over both tiles; with causal, among those that are seen.
    const int64_t seen = causal ? row % T + N - T + 1 : N, step = std::max<int64_t>(1, seen / 24);
    int64_t first = draw.below(std::min<int64_t>(24, seen)) * step,
            second = draw.below(std::min<int64_t>(24, seen)) * step;
    if (first > second) std::swap(first, second);
    if (one_tile && first / 64 != second / 64) first = 64;
    const float top = static_cast<float>(draw.below(97) - 48) / 16;
    for (int64_t d = 0; d < 128; ++d) q[d] = -128;
    q[second] = to_bf16(top - (draw.below(3) == 0 ? 0.0f : static_cast<float>(draw.below(49)) / 16));
    q[first] = top;
  }
  make_bf16(p);
  result.config = p.config;
  result.config.tile_keys = 64;
  result.config.layer = 3;
  result.config.step = 5;
  return result;
}

struct ExactCase {
  std::string plan;
  bool dk_is_exact = true;
};

void expect_same_bits(const Exact& exact, const ExactCase& c) {
  SCOPED_TRACE(c.plan);
  AttentionProblem config = exact.config;
  config.plans = {parse_plan(c.plan)};
  for (TensorType type : {TensorType::bf16, TensorType::fp32}) {
    SCOPED_TRACE(type == TensorType::fp32 ? "fp32" : "bf16");
    const Results gpu = run_gpu(exact.problem, config, {.type = type}),
                  cpu = run_cpu(exact.problem, config, type);
    EXPECT_EQ(first_difference(gpu.o, cpu.o), "") << "o";
    EXPECT_TRUE(within_an_ulp(gpu.lse, cpu.lse)) << first_difference(gpu.lse, cpu.lse);
    EXPECT_EQ(first_difference(gpu.delta, cpu.delta), "") << "delta";
    EXPECT_EQ(first_difference(gpu.dq, cpu.dq), "") << "dq";
    EXPECT_EQ(first_difference(gpu.dv, cpu.dv), "") << "dv";
    EXPECT_TRUE(!c.dk_is_exact || first_difference(gpu.dk, cpu.dk).empty())
        << "dk " << first_difference(gpu.dk, cpu.dk);
    EXPECT_EQ(gpu.ties, cpu.ties);
  }
}

// What every exact plan begins with.
constexpr const char* kExactBase = "fp32,probs=e4m3,probs_bwd=e4m3,dscores=e4m3";

TEST_F(AnyPlan, same_bits_as_the_cpu_with_each_site_rounded_in_turn) {
  const Exact plain = exact_problem(8.5f, false, 48, 128, 2, /*one_tile=*/true),
              power = exact_problem(8.0f, false, 48, 128, 2, /*one_tile=*/true);
  const std::string base = kExactBase;
  for (int i = 0; i < kSiteCount; ++i) {
    const Site site = static_cast<Site>(i);
    if (site == Site::grad_output_for_dprobs) continue;  // follows grad_output: another one is refused
    for (const char* rounding :
         {"bf16", "fp16", "e5m2", "e4m3", "e5m2/stochastic", "e4m3^1/saturate", "e5m2/toward_zero", "e5m2/up",
          "tf32/stochastic", "e6m2/nearest_away", "hif8/nearest_away"}) {
      const std::string_view text = rounding;
      // Exactness as stated above: dS in e4m3 with any key, else a key that is a power of two, and no dK.
      const bool dscores = site == Site::dscores, in_e4m3 = text.substr(0, 4) == "e4m3";
      const ExactCase c{base + "," + std::string(name(site)) + "=" + rounding, !dscores || in_e4m3};
      expect_same_bits(dscores && !in_e4m3 ? power : plain, c);
      if (HasFailure()) return;
    }
  }
}

// Each rounding must show: the CPU's outputs change with every site that the test above rounds.
TEST_F(AnyPlan, every_site_shows_in_the_exact_problem) {
  const Exact exact = exact_problem(8.5f);
  AttentionProblem config = exact.config;
  config.plans = {parse_plan(kExactBase)};
  const Results plain = run_gpu(exact.problem, config, {.type = TensorType::fp32});
  for (int i = 0; i < kSiteCount; ++i) {
    const Site site = static_cast<Site>(i);
    if (site == Site::grad_output_for_dprobs) continue;
    config.plans = {parse_plan(std::string(kExactBase) + "," + std::string(name(site)) + "=e5m2")};
    EXPECT_FALSE(run_gpu(exact.problem, config, {.type = TensorType::fp32}).same_bits(plain)) << name(site);
  }
}

// Scales by powers of two keep the problem exact. (Other scales: any_plan_prepare_test, without a GPU.)
TEST_F(AnyPlan, same_bits_with_shared_scales_and_formats_below_eight_bits) {
  const Exact exact = exact_problem(8.5f, false, 70, 128, 2, /*one_tile=*/true);
  for (const char* site : {"q", "k", "v", "grad_output", "q_bwd", "k_bwd", "v_bwd"})
    for (const char* rounding : {"e4m3*tile@e8m0_up", "e4m3*block32@e8m0", "int8*row@e8m0_up",
                                 "e2m3*head@e8m0", "e3m2*tensor@e8m0_up", "hif8/nearest_away", "int8",
                                 "e4m3*column@e8m0_up", "int8*column32@e8m0_up"}) {
      expect_same_bits(exact, {std::string(kExactBase) + "," + site + "=" + rounding});
      if (HasFailure()) return;
    }
}

TEST_F(AnyPlan, same_bits_with_stabilisers_masks_and_one_tile) {
  // Not zero_sum (its delta is a sum of two rounded products, which the CPU fuses) and not centre_keys (its
  // keys are not one-hot): they are in the bounded tests.
  const std::string base = kExactBase;
  for (const char* stabiliser :
       {"none", "paper", "paper_capped", "dither", "stochastic_output", "wide_output", "consistent"})
    for (const char* more :
         {"", ",shifted=bf16", ",pv=bf16,row_sum=bf16,output=bf16", ",keel=0.0625,delta=bf16",
          ",scores=bf16,shifted=bf16,probs=bf16,probs_bwd=bf16,dprobs=bf16,output=bf16,row_sum=bf16"})
      for (bool causal : {false, true})
        for (int64_t tile_keys : {64, 0}) {
          SCOPED_TRACE(causal ? "causal" : "full");
          SCOPED_TRACE(tile_keys);
          // The paper's shifts move when a tie is complete: for them, both keys in one tile.
          Exact exact = exact_problem(8.5f, causal, /*T=*/70, /*N=*/128, /*G=*/causal ? 1 : 2,
                                      /*one_tile=*/std::string_view(stabiliser).substr(0, 5) == "paper");
          exact.config.tile_keys = tile_keys;
          expect_same_bits(exact, {base + ",stabiliser=" + stabiliser + more});
          if (HasFailure()) return;
        }
}

// --- Bounded problems: any_plan_bound.h says how far the two may be apart.
struct Deviation {
  double worst = 0;  // of the bound
  double rms = 0;    // of the values' rms
  double signed_mean = 0,
         signed_error = 0;  // of (gpu - cpu) sign(cpu), in units of the values' mean size; its standard error
};
Deviation compare(const std::vector<float>& gpu, const std::vector<float>& cpu,
                  const std::vector<double>& bound) {
  Deviation result;
  double squares = 0, values = 0, sizes = 0, sum = 0;
  for (size_t n = 0; n < gpu.size(); ++n) {
    const bool both_infinite = gpu[n] == cpu[n] || (!std::isfinite(gpu[n]) && !std::isfinite(cpu[n]));
    const double error = both_infinite ? 0.0 : static_cast<double>(gpu[n]) - static_cast<double>(cpu[n]);
    if (std::isnan(error)) {
      result.worst = INFINITY;
      return result;
    }
    if (error != 0) result.worst = std::max(result.worst, std::abs(error) / bound[n]);
    const double signed_one = cpu[n] < 0 ? -error : error;
    squares += error * error, sum += signed_one;
    if (std::isfinite(cpu[n])) values += static_cast<double>(cpu[n]) * cpu[n], sizes += std::abs(cpu[n]);
  }
  const auto count = static_cast<double>(gpu.size());
  if (values > 0) {
    result.rms = std::sqrt(squares / values);
    result.signed_mean = sum / sizes;
    result.signed_error = std::sqrt(squares / count) / std::sqrt(count) * count / sizes;
  }
  return result;
}

double g_worst = 0;  // of all bounds, for the record

void expect_within_bound(const cases::Problem& p, const AttentionProblem& config, TensorType type,
                         bool with_rms = true) {
  const Results gpu = run_gpu(p, config, {.type = type}), cpu = run_cpu(p, config, type);
  const Bound bound(p, config, type == TensorType::bf16);
  const auto check = [&](const char* what, const std::vector<float>& x, const std::vector<float>& y,
                         const std::vector<double>& b) {
    const Deviation d = compare(x, y, b);
    g_worst = std::max(g_worst, d.worst);
    EXPECT_LE(d.worst, 1.0) << what << ": " << first_difference(x, y);
    if (!with_rms) return;
    // A step of bf16 here and there: far below bf16's own noise of 2^-9. And no common sign beyond four
    // standard errors and what truncation leaves (a unit of FP32 for each block of 16 products).
    EXPECT_LE(d.rms, 0x1p-9) << what;
    EXPECT_LE(std::abs(d.signed_mean), 4 * d.signed_error + 64 * 0x1p-23) << what << ": mean signed error";
  };
  check("o", gpu.o, cpu.o, bound.o);
  check("lse", gpu.lse, cpu.lse, bound.lse);
  check("dq", gpu.dq, cpu.dq, bound.dq);
  check("dk", gpu.dk, cpu.dk, bound.dk);
  check("dv", gpu.dv, cpu.dv, bound.dv);
  check("delta", gpu.delta, cpu.delta, bound.delta);
  const Deviation residual = compare(gpu.residual, cpu.residual, bound.residual);
  EXPECT_LE(residual.worst, 1.0) << "residual: " << first_difference(gpu.residual, cpu.residual);
}

AttentionProblem at_tile(const cases::Problem& p, const std::string& plan) {
  AttentionProblem config = p.with(parse_plan(plan));
  config.tile_keys = p.config.tile_keys == 0 ? 0 : 64;
  return config;
}

TEST_F(AnyPlan, every_case_within_the_accumulation_bound) {
  for (const Case& c : cases::kCases) {
    // Rows of equal scores or of a few bits: what is left of a sum that cancels has no size to compare with.
    const bool plain = c.fill == cases::Fill::normal || c.fill == cases::Fill::fp32_normal;
    for (const char* plan : {"fp32", "flash2", "bf16_all", "fp8"})
      for (TensorType type : {TensorType::fp32, TensorType::bf16}) {
        if (c.fill == cases::Fill::subnormal && type == TensorType::bf16)
          continue;  // bf16 keeps nothing of it
        SCOPED_TRACE(c.name);
        SCOPED_TRACE(plan);
        SCOPED_TRACE(type == TensorType::fp32 ? "fp32" : "bf16");
        cases::Problem p = make_problem(c);
        if (type == TensorType::bf16) make_bf16(p);
        expect_within_bound(p, at_tile(p, plan), type, plain && c.N >= 30 && std::string_view(plan) != "fp8");
        if (HasFailure()) return;
      }
  }
  std::printf("worst error, of its bound: %.3g\n", g_worst);
}

const Case kSizes[] = {
    {{1, 2, 2, 100, 150, 32}, {.causal = true}, "D32"},
    {{1, 2, 1, 140, 140, 64}, {.causal = true}, "D64"},
    {{1, 2, 2, 40, 130, 96}, {}, "D96"},
    {{1, 2, 1, 70, 130, 128}, {.causal = true}, "D128"},
    {{1, 2, 2, 77, 150, 64}, {.window_left = 70}, "window"},
    {{1, 2, 2, 200, 20, 64}, {.causal = true}, "more_rows"},
    {{5, 2, 1, 50, 70, 64}, {.causal = true, .ragged = true}, "ragged"},
};

TEST_F(AnyPlan, every_stabiliser_and_head_size_within_the_bound) {
  for (const Case& c : kSizes)
    for (std::string_view stabiliser : kStabiliserNames)
      for (const char* plan :
           {"bf16_all", "flash2", "fp32,row_sum=e5m2", "flash2,keel=1e-2,scores=fp16,dprobs=tf32"})
        for (TensorType type : {TensorType::bf16, TensorType::fp32}) {
          if (type == TensorType::fp32 && std::string_view(plan) != "flash2") continue;
          SCOPED_TRACE(c.name);
          SCOPED_TRACE(std::string(plan) + "," + std::string(stabiliser));
          cases::Problem p = make_problem(c, 3);
          if (type == TensorType::bf16) make_bf16(p);
          expect_within_bound(p, at_tile(p, std::string(plan) + ",stabiliser=" + std::string(stabiliser)),
                              type,
                              /*with_rms=*/false);
          if (HasFailure()) return;
        }
}

// --- The GPU against itself

TEST_F(AnyPlan, heads_with_their_own_plans_as_if_alone) {
  cases::Problem p = make_problem({{2, 6, 2, 100, 140, 64}, {.causal = true}, "mixed"}, 5);
  make_bf16(p);
  const std::vector<std::string> texts = {"flash2",
                                          "bf16_all",
                                          "bf16_all,stabiliser=wide_output",
                                          "fp32,row_sum=e5m2",
                                          "flash2,stabiliser=zero_sum",
                                          "flash2,q=e4m3,k=e5m2/stochastic,seed=4"};
  std::vector<PrecisionPlan> plans;
  for (const std::string& text : texts) plans.push_back(parse_plan(text));
  AttentionProblem config = p.with(plans);
  config.tile_keys = 64;
  const Results mixed = run_gpu(p, config);
  const int64_t rows = 100 * 64;
  for (size_t h = 0; h < plans.size(); ++h) {
    config.plans = {plans[h]};
    const Results alone = run_gpu(p, config);
    for (int64_t b = 0; b < 2; ++b) {
      const auto at = static_cast<size_t>((b * 6 + static_cast<int64_t>(h)) * rows);
      EXPECT_EQ(std::memcmp(&mixed.o[at], &alone.o[at], rows * sizeof(float)), 0) << texts[h];
      EXPECT_EQ(std::memcmp(&mixed.dq[at], &alone.dq[at], rows * sizeof(float)), 0) << texts[h];
    }
  }
  config.plans = plans;
  expect_within_bound(p, config, TensorType::bf16, false);
}

// Misaligned tensors that nothing is prepared of run on the slowest kernels: the same bits as the quick ones.
TEST_F(AnyPlan, same_bits_twice_without_facts_misaligned_and_with_the_step_in_memory) {
  for (const char* plan :
       {"bf16_all", "flash2,stabiliser=zero_sum", "fp32,row_sum=e5m2/stochastic", "fp8",
        "flash2,probs=e4m3^8/saturate,probs_bwd=e4m3^8/saturate,dscores=e5m2^22/saturate,stabiliser=zero_sum",
        "flash2,probs=e4m3^8/saturate,probs_bwd=e4m3,dscores=e5m2^8,stabiliser=consistent",
        "flash2,stabiliser=consistent", "bf16_all,stabiliser=consistent", "flash2,stabiliser=dither"}) {
    SCOPED_TRACE(plan);
    cases::Problem p = make_problem({{2, 2, 1, 150, 150, 64}, {.causal = true}, "twice"}, 9);
    make_bf16(p);
    AttentionProblem config = at_tile(p, plan);
    config.step = 77;
    const Results once = run_gpu(p, config);
    EXPECT_TRUE(run_gpu(p, config).same_bits(once));
    EXPECT_TRUE(run_gpu(p, config, {.step_in_memory = true}).same_bits(once));
    const auto without_facts = [&](Results results) {
      results.ties = once.ties, results.delta = once.delta, results.residual = once.residual;
      results.residual_floor = once.residual_floor, results.delta_error = once.delta_error;
      return results;
    };
    EXPECT_TRUE(without_facts(run_gpu(p, config, {.facts = false})).same_bits(once));
    // Facts of the first sequence alone: the same ones, and of the other whatever was there.
    const Results some = run_gpu(p, config, {.fact_sequences = 1});
    EXPECT_TRUE(without_facts(some).same_bits(once));
    const auto alike = [&](const auto& found, const auto& all) {
      const size_t half = all.size() / 2;
      return std::memcmp(found.data(), all.data(), half * sizeof all[0]) == 0 &&
             std::memcmp(found.data() + half, all.data() + half, half * sizeof all[0]) != 0;
    };
    EXPECT_TRUE(alike(some.ties, once.ties) && alike(some.delta, once.delta));
    EXPECT_TRUE(alike(some.residual, once.residual) && alike(some.residual_floor, once.residual_floor));
    EXPECT_TRUE(alike(some.delta_error, once.delta_error));
    // Misaligned rows are taken by the kernel for anything, whose facts are summed in another order.
    EXPECT_TRUE(without_facts(run_gpu(p, config, {.misaligned = 1})).same_bits(once));
  }
}

TEST_F(AnyPlan, packed_sequences_as_padded_ones) {
  cases::Problem p = make_problem({{5, 2, 1, 90, 150, 64}, {.causal = true, .ragged = true}, "ragged"}, 4);
  make_bf16(p);
  for (const char* plan : {"bf16_all", "fp32,k=e5m2/stochastic", "flash2,stabiliser=consistent"}) {
    SCOPED_TRACE(plan);
    AttentionProblem config = at_tile(p, plan);
    const Results padded = run_gpu(p, config);
    AttentionProblem a = cuda_problem(p, config, TensorType::bf16);
    const std::vector<int32_t>&rows = p.query_lengths, &keys = p.key_lengths;
    std::vector<int32_t> row_starts, key_starts;
    int64_t all_rows = 0, all_keys = 0;
    for (size_t b = 0; b < rows.size(); ++b) {
      row_starts.push_back(static_cast<int32_t>(all_rows)),
          key_starts.push_back(static_cast<int32_t>(all_keys));
      all_rows += rows[b], all_keys += keys[b];
    }
    // (all rows, heads, D)
    const auto pack = [&](const View<const float>& x, const std::vector<int32_t>& lengths, int64_t total) {
      std::vector<float> values(static_cast<size_t>(total * x.shape[1] * 64));
      size_t at = 0;
      for (int64_t b = 0; b < 5; ++b)
        for (int64_t i = 0; i < lengths[static_cast<size_t>(b)]; ++i)
          for (int64_t h = 0; h < x.shape[1]; ++h)
            for (int64_t d = 0; d < 64; ++d) values[at++] = *x.at(b, h, i, d);
      return encode(values.data(), values.size(), TensorType::bf16);
    };
    const auto upload = [](const auto& x) {
      return std::make_unique<DeviceBytes>(x.data(), x.size() * sizeof x[0]);
    };
    const auto q = upload(pack(p.in.q, rows, all_rows)), k = upload(pack(p.in.k, keys, all_keys)),
               v = upload(pack(p.in.v, keys, all_keys)), grad = upload(pack(p.grad_output, rows, all_rows));
    const auto row_lengths = upload(rows), key_lengths = upload(keys), query_offsets = upload(row_starts),
               key_offsets = upload(key_starts);
    const auto numbers = [](const auto& memory) {
      return std::span<const int32_t>(memory->template as<int32_t>(), 5);
    };
    a.mask.query_lengths = numbers(row_lengths), a.mask.key_lengths = numbers(key_lengths);
    a.mask.query_offsets = numbers(query_offsets), a.mask.key_offsets = numbers(key_offsets);
    a.mask.query_rows = all_rows, a.mask.key_rows = all_keys;
    const size_t query_bytes = static_cast<size_t>(all_rows) * 2 * 64 * 2,
                 key_bytes = static_cast<size_t>(all_keys) * 64 * 2;
    DeviceBytes o(query_bytes), dq(query_bytes), dk(key_bytes), dv(key_bytes), lse(5 * 2 * 90 * 4);
    const AttentionCall call(kernel_family("any_plan"), a);
    const PassSizes& sizes = call.sizes();
    DeviceBytes saved(sizes.saved), workspace(sizes.workspace);
    const auto tensor = [](const DeviceBytes& x, int64_t heads) {
      return DeviceTensor{x.as<void>(), {0, 64, heads * 64, 1}};
    };
    const ForwardPass forward{tensor(o, 2), lse.as<float>(), saved.as<void>()};
    const PassInputs in{tensor(*q, 2), tensor(*k, 1), tensor(*v, 1)};
    call.forward(in, forward, workspace.as<void>(), nullptr);
    call.backward(in, tensor(*grad, 2), forward, {tensor(dq, 2), tensor(dk, 1), tensor(dv, 1)},
                  workspace.as<void>(), nullptr);
    check_cuda(cudaDeviceSynchronize(), "packed sequences");
    const auto expect = [&](const char* what, const DeviceBytes& packed, const std::vector<float>& expected,
                            int64_t heads, const std::vector<int32_t>& lengths, int64_t longest) {
      const std::vector<float> values = decode(packed.read<uint8_t>(), TensorType::bf16);
      size_t at = 0, different = 0;
      for (int64_t b = 0; b < 5; ++b)
        for (int64_t i = 0; i < lengths[static_cast<size_t>(b)]; ++i)
          for (int64_t h = 0; h < heads; ++h)
            for (int64_t d = 0; d < 64; ++d, ++at)
              different += std::bit_cast<uint32_t>(values[at]) !=
                           std::bit_cast<uint32_t>(
                               expected[static_cast<size_t>(((b * heads + h) * longest + i) * 64 + d)]);
      EXPECT_EQ(different, 0u) << what;
    };
    expect("o", o, padded.o, 2, rows, 90);
    expect("dq", dq, padded.dq, 2, rows, 90);
    expect("dk", dk, padded.dk, 1, keys, 150);
    expect("dv", dv, padded.dv, 1, keys, 150);
    EXPECT_EQ(first_difference(lse.read<float>(), padded.lse), "");
  }
}

TEST_F(AnyPlan, facts_as_the_cpu_has_them) {
  for (const char* plan :
       {"bf16_all", "flash2", "fp32", "flash2,stabiliser=consistent", "flash2,keel=1e-2"}) {
    SCOPED_TRACE(plan);
    cases::Problem p = make_problem({{1, 2, 2, 128, 128, 64}, {.causal = true}, "facts"}, 6);
    make_bf16(p);
    const AttentionProblem config = at_tile(p, plan);
    const Results gpu = run_gpu(p, config), cpu = run_cpu(p, config, TensorType::bf16);
    double difference = 0, size = 0, floor_difference = 0, floor_size = 0;
    int32_t other_ties = 0;
    for (size_t n = 0; n < gpu.residual.size(); ++n) {
      difference += std::pow(gpu.residual[n] - cpu.residual[n], 2), size += std::pow(cpu.residual[n], 2);
      floor_difference += std::pow(gpu.residual_floor[n] - cpu.residual_floor[n], 2);
      floor_size += std::pow(cpu.residual_floor[n], 2);
      other_ties += gpu.ties[n] != cpu.ties[n];
      // By their definitions: the residual before dS is rounded is sum P (delta_hp - delta_lp).
      const double slack = 8 * static_cast<double>(gpu.residual_floor[n]) + 0x1p-17;
      EXPECT_NEAR(gpu.residual[n], -gpu.delta_error[n], slack + 0.02 * std::abs(gpu.residual[n]));
    }
    // FP32's residual is nothing but the order of its sums.
    const bool has_residual =
        std::string_view(plan) != "fp32" && std::string_view(plan) != "flash2,stabiliser=consistent";
    EXPECT_TRUE(!has_residual || std::sqrt(difference / size) <= 0.25) << std::sqrt(difference / size);
    EXPECT_LE(std::sqrt(floor_difference / floor_size), 0.01);
    EXPECT_LE(other_ties, 1);  // a score at the tolerance's edge
  }
}

TEST_F(AnyPlan, nan_and_infinity_come_through_and_nothing_hangs) {
  for (const char* plan :
       {"bf16_all", "fp32", "flash2,stabiliser=consistent", "flash2,stabiliser=paper_capped"}) {
    SCOPED_TRACE(plan);
    cases::Problem p = make_problem({{1, 2, 2, 70, 130, 64}, {}, "nan"}, 2);
    make_bf16(p);
    p.q_memory[5 * 64 + 3] = NAN;
    const Results gpu = run_gpu(p, at_tile(p, plan));
    for (size_t d = 0; d < 64; ++d) {
      EXPECT_TRUE(std::isnan(gpu.o[5 * 64 + d]));
      EXPECT_TRUE(std::isnan(gpu.dq[5 * 64 + d]));
      EXPECT_TRUE(std::isfinite(gpu.o[6 * 64 + d]));
    }
    p.k_memory[0] = INFINITY;
    run_gpu(p, at_tile(p, plan));
  }
}

TEST_F(AnyPlan, captured_in_a_graph) {
  cases::Problem p = make_problem({{1, 2, 2, 70, 70, 64}, {.causal = true}, "graph"}, 8);
  make_bf16(p);
  const AttentionProblem config = at_tile(p, "bf16_all");
  const Results plain = run_gpu(p, config);
  AttentionProblem a = cuda_problem(p, config, TensorType::bf16);
  const auto upload = [](const std::vector<float>& x) {
    const std::vector<uint8_t> bytes = encode(x.data(), x.size(), TensorType::bf16);
    return std::make_unique<DeviceBytes>(bytes.data(), bytes.size());
  };
  const auto q = upload(p.q_memory), k = upload(p.k_memory), v = upload(p.v_memory);
  const AttentionCall call(kernel_family("any_plan"), a);
  const PassSizes& sizes = call.sizes();
  DeviceBytes saved(sizes.saved), workspace(sizes.workspace), o(2 * 70 * 64 * 2), lse(2 * 70 * 4);
  const auto tensor = [](const DeviceBytes& x) {
    return DeviceTensor{x.as<void>(), contiguous_strides({1, 2, 70, 64})};
  };
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  check_cuda(cudaStreamCreate(&stream), "a stream");
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capturing");
  call.forward({tensor(*q), tensor(*k), tensor(*v)}, {tensor(o), lse.as<float>(), saved.as<void>()},
               workspace.as<void>(), stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "capturing");
  check_cuda(cudaGraphInstantiate(&ready, graph, 0), "a graph");
  check_cuda(cudaGraphLaunch(ready, stream), "a graph");
  check_cuda(cudaStreamSynchronize(stream), "a graph");
  EXPECT_EQ(first_difference(decode(o.read<uint8_t>(), TensorType::bf16), plain.o), "");
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace evenkeel
