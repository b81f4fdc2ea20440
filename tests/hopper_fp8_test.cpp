// Hopper's FP8 forward pass without a GPU: who holds what in registers and shared memory, by enumeration. The quantiser, to the
// bit. The whole pass in the emulator, whose tensor cores add as an H200's do.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "attention/cuda/hopper_fp8_pass.h"
#include "emulated_memory.h"
#include "fp8_judge.h"

namespace evenkeel {
namespace {

using namespace hopper_fp8;
using cases::Case;
using cases::Fill;
using cases::make_problem;
using cases::Problem;
using cuda_emulator::KernelFault;
using evenkeel::emulated::How;
using evenkeel::emulated::Order;

constexpr const char* kStabilisers[] = {"none", "consistent"};

// --- Layouts

// Each thread's scores (d[4 j + 2 r + c] is row + 8 r, key 8 j + 2 q + c), packed as Worker::pack does, are the bytes that
// the instruction reads as the left operand. The term that it takes a byte for is where v has that key.
TEST(HopperFp8Layout, probabilities_need_not_be_moved_between_threads) {
  std::set<std::pair<int, int>> met;  // (row, key)
  for (int thread = 0; thread < 128; ++thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4, quad = thread % 4;
    for (int word = 0; word < 8; ++word)
      for (int byte = 0; byte < 4; ++byte) {
        // The accumulator's element that pack() takes for this byte, and whose it is.
        const int first = word / 2 * 8 + word % 2 * 2, i = first + byte / 2 * 4 + byte % 2;
        const int score_row = row + i / 2 % 2 * 8, key = i / 4 * 8 + quad * 2 + i % 2;
        // The row and the summed term that the instruction takes the byte for: four words a step of 32 terms.
        const int register_ = word % 4, operand_row = row + register_ % 2 * 8;
        const int term = word / 4 * 32 + register_ / 2 * 16 + quad * 4 + byte;
        EXPECT_EQ(score_row, operand_row);
        EXPECT_EQ(value_slot(key), term) << "key " << key;
        EXPECT_TRUE(met.emplace(score_row, key).second);
      }
  }
  EXPECT_EQ(met.size(), 64u * 64u);
}

TEST(HopperFp8Layout, tiles_are_swizzled_as_the_tensor_cores_read_them) {
  for (const int width : {64, 128}) {
    std::set<uint32_t> offsets;
    for (int line = 0; line < 128; ++line)
      for (int byte = 0; byte < width; ++byte) {
        // The instruction's own rule, by bits of the address: bits 4.. are changed by bits 7..
        const auto plain = static_cast<uint32_t>(line * width + byte);
        const uint32_t swizzled = plain ^ (plain >> 7 & (width == 128 ? 7u : 3u)) << 4;
        EXPECT_EQ(tile_offset(line, byte, width), swizzled);
        EXPECT_TRUE(offsets.insert(tile_offset(line, byte, width)).second);
      }
    // 16 bytes of 8 lines fill all banks.
    for (int line = 0; line < 128; line += 8)
      for (int piece = 0; piece < width / 16; ++piece) {
        std::set<uint32_t> banks;
        for (int n = 0; n < 8; ++n) banks.insert(tile_offset(line + n, piece * 16, width) / 16 % 8);
        EXPECT_EQ(banks.size(), 8u);
      }
  }
}

// --- The problem in the emulator's memory

struct Memory {
  Memory(const AttentionProblem& config, const Problem& host, const How& how)
      : p(complete([&] {
          AttentionProblem asked = problem_of(config, host.in);
          asked.type = TensorType::bf16;
          return asked;
        }())),
        q(how, {p.B, p.H, p.T, p.D}, host.query_lengths),
        o(how, {p.B, p.H, p.T, p.D}, host.query_lengths),
        k(how, {p.B, p.G, p.N, p.D}, host.key_lengths),
        v(how, {p.B, p.G, p.N, p.D}, host.key_lengths),
        lse(static_cast<size_t>(p.B * p.H * p.T) * sizeof(float)),
        workspace(lay_out(p, nullptr).bytes) {
    q.write(host.in.q), k.write(host.in.k), v.write(host.in.v);
    if (how.sequences) {
      p.mask.query_offsets = q.offsets(), p.mask.key_offsets = k.offsets();
      p.mask.query_rows = q.all_rows(), p.mask.key_rows = k.all_rows();
    }
  }
  PassInputs inputs() { return {q.tensor(), k.tensor(), v.tensor()}; }
  void expect_guards() {
    q.expect_guards("q"), k.expect_guards("k"), v.expect_guards("v"), o.expect_guards("o");
    lse.expect_guards("lse"), workspace.expect_guards("workspace");
  }

  AttentionProblem p;
  evenkeel::emulated::Operand q, o, k, v;
  evenkeel::emulated::Poisoned lse, workspace;
};

struct Result {
  Tensor<float> o, lse;
};
Result run(const AttentionProblem& config, const Problem& host, const How& how = {},
           int multiprocessors = 3) {
  Memory memory(config, host, how);
  evenkeel::emulated::Launch launch{how};
  forward_pass(memory.p, memory.inputs(), {memory.o.tensor(), memory.lse.as<float>()},
               memory.workspace.data(), multiprocessors, launch);
  memory.expect_guards();
  Result result;
  memory.o.read(result.o);
  result.lse = Tensor<float>({memory.p.B, memory.p.H, memory.p.T, 1});
  std::memcpy(result.lse.values().data(), memory.lse.data(), result.lse.values().size() * sizeof(float));
  return result;
}

// --- The quantiser

TEST(HopperFp8Quantise, is_the_rounding_by_tiles_and_heads_to_the_bit) {
  for (const auto& [T, N, D] :
       {std::array<int64_t, 3>{70, 130, 64}, {64, 1, 128}, {3, 200, 40}, {130, 64, 96}}) {
    Problem host = make_problem({{2, 2, 1, T, N, D}, {}, ""});
    // What is not a number or is infinite does not count for the scale; a tile of zeros; a tile of subnormal numbers.
    *host.v().at(0, 0, 0, 3) = std::numeric_limits<float>::quiet_NaN();
    *host.k().at(0, 0, 0, 5) = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < std::min<int64_t>(T, kTileRows); ++i)
      for (int64_t d = 0; d < D; ++d) {
        *host.q().at(1, 0, i, d) = 0;
        *host.q().at(1, 1, i, d) *= 0x1p-130f;
        *host.q().at(1, 1, i, d) = cases::to_bf16(*host.q().at(1, 1, i, d));
      }
    Memory memory(host.with(fp8_judge::kernel_plan("none")), host, {});
    const Layout layout = lay_out(memory.p, memory.workspace.data());
    const QuantiseArguments arguments = quantise_arguments(memory.p, memory.inputs(), layout);
    const int64_t blocks = memory.p.B * (memory.p.H * arguments.q.tiles + 2 * memory.p.G * arguments.k.tiles);
    evenkeel::emulated::Launch launch{{}};
    const int64_t value_blocks = memory.p.B * memory.p.G * arguments.v.tiles;
    if (kernel_head(D) == 64) {
      launch.run<Quantise<64>>(blocks, arguments);
      launch.run<QuantiseValues<64>>(value_blocks, arguments);
    } else {
      launch.run<Quantise<128>>(blocks, arguments);
      launch.run<QuantiseValues<128>>(value_blocks, arguments);
    }
    memory.expect_guards();
    EXPECT_EQ(*layout.next_item, 0u);
    EXPECT_EQ(fp8_judge::wrong_numbers(layout.q, host.in.q, T, false), 0) << D;
    EXPECT_EQ(fp8_judge::wrong_numbers(layout.k, host.in.k, N, false), 0) << D;
    EXPECT_EQ(fp8_judge::wrong_numbers(layout.v, host.in.v, N, true), 0) << D;
    // And the comparison sees a wrong byte.
    layout.v[image_bytes(kernel_head(D)) / 2] ^= 1;
    EXPECT_GT(fp8_judge::wrong_numbers(layout.v, host.in.v, N, true), 0) << D;
  }
}

// The quotient without a division, to the bit: every BF16 number of 25 binades below the largest, for all 128 significands of the
// largest, at both ends of the range and in its middle. What lies further below is zero in E4M3 by either. Powers of two
// change nothing in between: no intermediate result leaves the normal numbers.
TEST(HopperFp8Quantise, quotients_without_division_are_exact) {
  using Quantiser = Quantise<128>;
  int64_t wrong = 0, compared = 0, wrong_by_inverse = 0;
  for (const float binade : {Quantiser::kLeastQuick, 1.0f, 0x1p127f})
    for (int m = 0; m < 128; ++m) {
      const float scale = Quantiser::scale_of(binade * (1 + static_cast<float>(m) * 0x1p-7f));
      const float inverse = 1.0f / scale;
      for (int e = 0; e < 25; ++e)
        for (int n = 0; n < 128; ++n) {
          const float number = std::ldexp(binade * (1 + static_cast<float>(n) * 0x1p-7f), -e);
          wrong += Quantiser::quotient(number, scale, inverse) != number / scale;
          wrong_by_inverse += number * inverse != number / scale;
          ++compared;
        }
    }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(compared, 3 * 128 * 25 * 128);
  EXPECT_GT(wrong_by_inverse, 0);  // it is not a plain product
  // Further below the largest: zero, with the number's sign.
  for (const float number : {0x1p-133f, 0x1p-126f, 0x1p-106f, -0x1p-106f, 0.0f, -0.0f}) {
    const float scale = Quantiser::scale_of(Quantiser::kLeastQuick);
    EXPECT_EQ(gpu::pack_e4m3(Quantiser::quotient(number, scale, 1.0f / scale), 0, 0, 0),
              gpu::pack_e4m3(number / scale, 0, 0, 0))
        << number;
  }
}

// --- The whole pass

bool same_bits(const Tensor<float>& a, const Tensor<float>& b) {
  return std::memcmp(a.values().data(), b.values().data(), a.values().size() * sizeof(float)) == 0;
}

// One tile of keys and scales that are powers of two: the same scores, shift and probabilities as the CPU has, but for the
// last bit of an exponential. Then nearly every output is the CPU's to the bit; with a wrong layout none is.
TEST(HopperFp8, one_tile_is_the_cpus) {
  for (const int64_t D : {64, 128})
    for (const char* stabiliser : kStabilisers) {
      Problem host = make_problem({{1, 1, 1, 64, 64, D}, {}, ""});
      for (View<float> x : {host.q(), host.k(), host.v()}) {
        for (int64_t i = 0; i < 64; ++i)
          for (int64_t d = 0; d < D; ++d) *x.at(0, 0, i, d) = std::clamp(*x.at(0, 0, i, d), -3.5f, 3.5f);
        *x.at(0, 0, 7, 9) = 3.5f;  // 448 times 2^-7
      }
      const AttentionProblem config = host.with(fp8_judge::kernel_plan(stabiliser));
      const Result found = run(config, host);
      AttentionBuffers cpu(host.in, false);
      attention_forward(config, host.in, cpu.forward());
      int64_t differ = 0;
      for (size_t n = 0; n < found.o.values().size(); ++n) differ += found.o.values()[n] != cpu.o.values()[n];
      EXPECT_LT(differ, 64 * D / 50) << D << " " << stabiliser;
      for (size_t n = 0; n < found.lse.values().size(); ++n)
        EXPECT_NEAR(found.lse.values()[n], cpu.lse.values()[n], 1e-4) << D << " " << stabiliser << " " << n;
    }
}

TEST(HopperFp8, errors_are_those_of_the_plan) {
  const Case kCases[] = {
      {{1, 2, 1, 70, 200, 128}, {}, "full"},
      {{1, 1, 1, 200, 200, 128}, {.causal = true}, "causal"},
      {{1, 2, 2, 200, 200, 64}, {.causal = true}, "causal, head size 64"},
      {{1, 1, 1, 100, 30, 64}, {.causal = true}, "rows without keys"},
      {{1, 1, 1, 30, 100, 96}, {.causal = true}, "more keys than rows, head size 96"},
      {{1, 1, 1, 65, 65, 40}, {}, "head size 40"},
      {{1, 1, 1, 64, 130, 128}, {.fill = Fill::one_signed}, "values of one sign"},
  };
  for (const Case& c : kCases)
    for (const char* stabiliser : kStabilisers) {
      const Problem host = make_problem(c);
      const AttentionProblem config = host.with(fp8_judge::kernel_plan(stabiliser));
      const Result found = run(config, host);
      fp8_judge::judge(std::string(c.name) + ", " + stabiliser, config, host.in, found.o, found.lse);
    }
}

TEST(HopperFp8, hard_scores) {
  for (const Fill fill :
       {Fill::ties, Fill::ties_tail, Fill::max_zero, Fill::hundred, Fill::huge, Fill::offset})
    for (const char* stabiliser : kStabilisers) {
      const Problem host = make_problem({{1, 1, 1, 64, 48, 64}, {.fill = fill}, ""});
      const AttentionProblem config = host.with(fp8_judge::kernel_plan(stabiliser));
      const Result found = run(config, host);
      fp8_judge::judge("fill " + std::to_string(static_cast<int>(fill)) + ", " + stabiliser, config, host.in,
                       found.o, found.lse);
    }
}

// Lengths, padded and packed; and neither the order of warps nor the number of blocks changes a bit.
TEST(HopperFp8, sequences_and_the_same_bits) {
  const Problem host = make_problem({{5, 2, 1, 140, 150, 64}, {.causal = true, .ragged = true}, "ragged"});
  const AttentionProblem config = host.with(fp8_judge::kernel_plan("consistent"));
  const Result padded = run(config, host);
  fp8_judge::judge("ragged", config, host.in, padded.o, padded.lse);
  const Result descending = run(config, host, {.order = Order::descending});
  EXPECT_TRUE(same_bits(padded.o, descending.o));
  EXPECT_TRUE(same_bits(padded.lse, descending.lse));
  const Result one_block = run(config, host, {}, 1);
  EXPECT_TRUE(same_bits(padded.o, one_block.o));
  const Result packed = run(config, host, {.sequences = true});
  EXPECT_TRUE(same_bits(padded.o, packed.o));
}

// Why P V leaves the tensor cores after every 64 keys: their 13 bits, truncated, shrink a long sum of values of one sign. Relative
// and signed, of O over 16,384 keys: what the rounding of P and v does, and what the sums of so many keys add to it.
TEST(HopperFp8, sums_of_13_bits_must_be_short) {
  constexpr size_t kKeys = 16384;
  constexpr int kRows = 8;
  constexpr std::array<size_t, 4> kRuns = {64, 128, 1024, kKeys};
  const TensorCoreModel& h200 = find_tensor_core_model(kE4m3);
  const Rounding e4m3{kE4m3, RoundingMode::nearest_even, /*saturate=*/true};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> between_1_and_2(1, 2);
  double rounding = 0, truncation[kRuns.size()] = {};
  for (int row = 0; row < kRows; ++row) {
    std::vector<float> score(kKeys), p(kKeys), value(kKeys);
    for (float& x : score) x = normal(random) * gpu::kLog2E;
    const float shift = std::ceil(*std::max_element(score.begin(), score.end())) - kProbsExponent;
    double exact = 0, l = 0, rounded = 0, rounded_l = 0;
    for (size_t j = 0; j < kKeys; ++j) {
      const float x = std::exp2(score[j] - shift), v = between_1_and_2(random);
      p[j] = round_to(e4m3, x), value[j] = round_to(e4m3, v * 224);  // 2 is the largest
      exact += double{x} * double{v}, l += double{x};
      rounded += double{p[j]} * double{value[j]} / 224, rounded_l += double{p[j]};
    }
    const double error = rounded / rounded_l / (exact / l) - 1;
    rounding += error * error;
    for (size_t n = 0; n < kRuns.size(); ++n) {
      float o = 0;
      for (size_t j = 0; j < kKeys; j += kRuns[n])
        o += tensor_core_dot(h200, p.data() + j, value.data() + j, kRuns[n], 0.0f);
      truncation[n] += (double{o} / 224 / rounded - 1) / kRows;
    }
  }
  rounding = std::sqrt(rounding / kRows);
  std::printf("  O of %zu keys, values of one sign: rounding rms %.1e; sums of", kKeys, rounding);
  for (size_t n = 0; n < kRuns.size(); ++n) std::printf(" %zu keys %+.1e", kRuns[n], truncation[n]);
  std::printf("\n");
  EXPECT_LT(std::fabs(truncation[0]), rounding);
  EXPECT_LT(truncation[3], -0.1);
}

// Values that are all alike: O is that value, exactly, where l is the sum of the rounded probabilities, however many keys
// there are. With sums of exact probabilities it is not.
TEST(HopperFp8, consistent_keeps_the_sum) {
  for (const char* stabiliser : kStabilisers) {
    Problem host = make_problem({{1, 1, 1, 64, 300, 64}, {}, ""});
    for (int64_t j = 0; j < 300; ++j)
      for (int64_t d = 0; d < 64; ++d) *host.v().at(0, 0, j, d) = 1.75f;  // a scale of 2^-8: no rounding of v
    const Result found = run(host.with(fp8_judge::kernel_plan(stabiliser)), host);
    double worst = 0;
    for (float x : found.o.values()) worst = std::max(worst, std::fabs(double{x} - 1.75));
    if (std::string_view(stabiliser) == "consistent")
      EXPECT_LE(worst, 1.75 * 0x1p-8);
    else
      EXPECT_GT(worst, 0);
  }
}

}  // namespace
}  // namespace evenkeel
