// Hopper's FP8 kernels without a GPU: who holds what in registers and shared memory, by enumeration. The quantiser of both
// passes, to the bit. The whole forward pass in the emulator, whose tensor cores add as an H200's do.
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

constexpr const char* kStabilisers[] = {"none", "zero_sum"};
AttentionProblem kernel_problem(const Problem& host, const char* stabiliser = "none") {
  return host.with(fp8_judge::kernel_plan(stabiliser));
}

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

fp8_judge::Found run(const Problem& host, const char* stabiliser, const How& how = {},
                     int multiprocessors = 3) {
  Memory memory(kernel_problem(host, stabiliser), host, how);
  evenkeel::emulated::Launch launch{how};
  forward_pass(memory.p, memory.inputs(), {memory.o.tensor(), memory.lse.as<float>()},
               memory.workspace.data(), multiprocessors, launch);
  memory.expect_guards();
  fp8_judge::Found found;
  memory.o.read(found.o);
  found.lse = Tensor<float>({memory.p.B, memory.p.H, memory.p.T, 1});
  std::memcpy(found.lse.values().data(), memory.lse.data(), found.lse.values().size() * sizeof(float));
  return found;
}
void judge(const std::string& name, const Problem& host) {
  for (const char* stabiliser : kStabilisers) {
    const fp8_judge::Found found = run(host, stabiliser);
    if (!kSanitized)
      fp8_judge::judge(name + ", " + stabiliser, kernel_problem(host, stabiliser), host, found);
  }
}

// --- The quantiser

// The scale of every largest magnitude that BF16 has, and its inverse, both exact.
TEST(HopperFp8Quantise, scales_are_those_of_the_rule) {
  const Rounding rounding = parse_plan(kHopperFp8Plan).at(Site::q);
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const TileScale by(bits);
    ASSERT_EQ(by.scale * by.inverse, 1) << bits;
    if (bits > 0) {  // zeros are zeros by any scale
      ASSERT_EQ(by.scale, block_scale(rounding, gpu::bf16_value(bits))) << bits;
    }
  }
}

// What is not a number or is infinite does not count for the scale; a tile of zeros; a tile of subnormal numbers; and one whose
// largest number is E4M3's largest times a power of two.
Problem hard_operands(const cases::Sizes& sizes, const cases::Options& options = {}) {
  Problem host = make_problem({sizes, options, ""});
  *host.v().at(0, 0, 0, 3) = std::numeric_limits<float>::quiet_NaN();
  *host.v().at(1, 0, 0, 1) = std::numeric_limits<float>::infinity();
  *host.k().at(0, 0, 0, 5) = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < std::min<int64_t>(sizes.T, kTileRows); ++i)
    for (int64_t d = 0; d < sizes.D; ++d) {
      *host.q().at(1, 0, i, d) = 0;
      *host.q().at(1, 1, i, d) *= 0x1p-130f;
      *host.q().at(1, 1, i, d) = cases::to_bf16(*host.q().at(1, 1, i, d));
    }
  *host.q().at(0, 0, 0, 0) = 7;
  return host;
}

TEST(HopperFp8Quantise, is_the_rounding_by_tiles_and_heads_to_the_bit) {
  for (const auto& [T, N, D] :
       {std::array<int64_t, 3>{70, 130, 64}, {64, 1, 128}, {3, 200, 40}, {130, 64, 96}}) {
    const Problem host = hard_operands({2, 2, 1, T, N, D});
    Memory memory(kernel_problem(host), host, {});
    const Layout layout = lay_out(memory.p, memory.workspace.data());
    evenkeel::emulated::Launch launch{{}};
    quantise_tiles(memory.p, memory.inputs(), layout, /*multiprocessors=*/1, launch);
    memory.expect_guards();
    EXPECT_EQ(*layout.counters.next_item(), 0u);
    EXPECT_EQ(fp8_judge::wrong_numbers(layout.k, host.in.k, N, false), 0) << D;
    EXPECT_EQ(fp8_judge::wrong_numbers(layout.v, host.in.v, N, true), 0) << D;
    // And the comparison sees a wrong byte.
    layout.v[image_bytes(kernel_head(D)) / 2] ^= 1;
    EXPECT_GT(fp8_judge::wrong_numbers(layout.v, host.in.v, N, true), 0) << D;
  }
}

// Every piece once, and values after the largest magnitudes that their scale waits for.
TEST(HopperFp8Quantise, pieces_of_keys_and_values) {
  for (const auto& [tiles, heads] : {std::array{2, 1}, {2, 700}, {600, 3}, {100, 12}, {512, 2}}) {
    std::set<std::pair<int, int>> met;
    std::vector<int> looked_at(static_cast<size_t>(heads));
    for (int number = 0; number < 3 * tiles * heads; ++number) {
      const KeyPiece piece(number, tiles, heads);
      ASSERT_TRUE(piece.tile >= 0 && piece.tile < tiles * heads) << number;
      ASSERT_TRUE(met.emplace(piece.kind, piece.tile).second) << number;
      int& found = looked_at[static_cast<size_t>(piece.tile / tiles)];
      if (piece.kind == KeyPiece::find_largest) ++found;
      if (piece.kind == KeyPiece::round_values) {
        ASSERT_EQ(found, tiles) << number;
      }
    }
    EXPECT_EQ(met.size(), static_cast<size_t>(3 * tiles * heads));
  }
}

// Few tiles, so that a block soon rounds values, while another one looks for their largest magnitude: each tile's is larger than
// those before it.
TEST(HopperFp8Quantise, blocks_that_run_in_any_order) {
  for (const int64_t N : {70, 128, 300}) {
    Problem host = make_problem({{1, 1, 1, 3, N, 40}, {}, ""});
    for (int64_t j = 0; j < N; ++j)
      for (int64_t d = 0; d < 40; ++d)
        *host.v().at(0, 0, j, d) *= static_cast<float>(1 << 3 * (j / kTileRows));
    std::vector<How> orders = evenkeel::emulated::several_orders(20);
    for (How& how : orders) how.blocks_at_once = 2 + static_cast<int>(how.seed % 5);
    for (const How& how : orders) {
      Memory memory(kernel_problem(host), host, how);
      const Layout layout = lay_out(memory.p, memory.workspace.data());
      evenkeel::emulated::Launch launch{how};
      quantise_tiles(memory.p, memory.inputs(), layout, /*multiprocessors=*/1, launch);
      ASSERT_EQ(fp8_judge::wrong_numbers(layout.k, host.in.k, N, false), 0) << N << ", " << name_of(how);
      ASSERT_EQ(fp8_judge::wrong_numbers(layout.v, host.in.v, N, true), 0) << N << ", " << name_of(how);
    }
  }
}

// A warp of the forward kernel rounds a tile, and nothing else runs.
template <int kHead>
struct RoundQueries {
  static constexpr int kThreads = gpu::kWarp;
  using Tile = QueryTile<kHead>;
  struct alignas(1024) Shared {
    uint8_t image[image_bytes(kHead)];
    typename Tile::Waiting waiting;
    float scale;
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
  struct Arguments {
    DeviceTensor q;
    int heads, tiles, T, D;
    uint8_t* target;  // as the quantiser lays out tiles of k
  };
  static void run(const Arguments& a) {
    auto& shared = *reinterpret_cast<Shared*>(gpu::dynamic_shared());
    const int index = static_cast<int>(blockIdx.x), head = index / a.tiles, row = index % a.tiles * kTileRows;
    const auto* const first = static_cast<const uint16_t*>(a.q.data) + head / a.heads * a.q.stride[0] +
                              head % a.heads * a.q.stride[1] + row * a.q.stride[2];
    Tile::round(first, a.q.stride[2], a.T - row, a.D, shared.waiting, shared.image, &shared.scale);
    __syncwarp();
    if (threadIdx.x != 0) return;
    const auto tile = static_cast<uint32_t>(index);
    std::memcpy(a.target + image_offset(tile, kHead), shared.image, sizeof shared.image);
    std::memcpy(a.target + scale_offset(tile, kHead), &shared.scale, sizeof shared.scale);
  }
};

TEST(HopperFp8Quantise, queries_of_the_forward_kernel_to_the_bit) {
  for (const auto& size : {std::array<int64_t, 2>{70, 64}, {64, 128}, {3, 40}, {200, 96}, {1, 128}}) {
    const int64_t T = size[0], D = size[1];
    Problem host = hard_operands({2, 2, 1, T, 1, D});
    *host.q().at(0, 1, T - 1, 2) = std::numeric_limits<float>::quiet_NaN();
    *host.q().at(0, 1, T - 1, 1) = -std::numeric_limits<float>::infinity();
    Memory memory(kernel_problem(host), host, {});
    const int64_t tiles = divide_up(T, kPairRows) * kPairTiles;
    evenkeel::emulated::Poisoned target(static_cast<size_t>(4 * tiles / kPairTiles) *
                                        pair_bytes(kernel_head(D)));
    evenkeel::emulated::Launch launch{{}};
    const auto with_head = [&]<int kHead>() {
      launch.run<RoundQueries<kHead>>(
          4 * tiles, typename RoundQueries<kHead>::Arguments{memory.q.tensor(), 2, static_cast<int>(tiles),
                                                             static_cast<int>(T), static_cast<int>(D),
                                                             target.as<uint8_t>()});
    };
    D <= 64 ? with_head.operator()<64>() : with_head.operator()<128>();
    EXPECT_EQ(fp8_judge::wrong_numbers(target.as<uint8_t>(), host.in.q, T, false), 0) << D;
    target.as<uint8_t>()[0] ^= 1;
    EXPECT_GT(fp8_judge::wrong_numbers(target.as<uint8_t>(), host.in.q, T, false), 0) << D;
  }
}

// What the backward pass reads: the same numbers in BF16, none of them rounded again; padded and packed.
TEST(HopperFp8Quantise, rows_in_bf16_are_the_same_numbers) {
  for (const bool packed : {false, true})
    for (const auto& [T, N, D] : {std::array<int64_t, 3>{140, 150, 64}, {70, 130, 40}, {130, 64, 128}}) {
      const Problem host = hard_operands({5, 2, 1, T, N, D}, {.causal = true, .ragged = true});
      const How how{.sequences = packed};
      Memory memory(kernel_problem(host), host, how);
      constexpr size_t kRest = 1000;
      evenkeel::emulated::Poisoned workspace(lay_out_backward(memory.p, nullptr, kRest).bytes);
      const BackwardLayout layout = lay_out_backward(memory.p, workspace.data(), kRest);
      evenkeel::emulated::Launch launch{how};
      quantise_rows(memory.p, memory.inputs(), layout, /*multiprocessors=*/1, launch);
      memory.expect_guards();
      workspace.expect_guards("workspace");
      for (size_t n = 0; n < kRest; ++n)
        ASSERT_EQ(static_cast<const uint8_t*>(layout.rest)[n], 0xff) << "written beside v, byte " << n;
      const auto wrong = [&](const DeviceTensor& rounded, const View<const float>& x,
                             const std::vector<int32_t>& offsets, const std::vector<int32_t>& lengths,
                             bool is_value) {
        return fp8_judge::wrong_rows(
            static_cast<const uint16_t*>(rounded.data), rounded.stride, x,
            [&](int64_t b) { return packed ? offsets[static_cast<size_t>(b)] : 0; },
            [&](int64_t b) { return int64_t{lengths[static_cast<size_t>(b)]}; }, is_value);
      };
      const auto& [q, k, v] = layout.rounded;
      EXPECT_EQ(wrong(q, host.in.q, memory.q.offsets(), host.query_lengths, false), 0) << D << packed;
      EXPECT_EQ(wrong(k, host.in.k, memory.k.offsets(), host.key_lengths, false), 0) << D << packed;
      EXPECT_EQ(wrong(v, host.in.v, memory.v.offsets(), host.key_lengths, true), 0) << D << packed;
      // And the comparison sees a wrong number.
      static_cast<uint16_t*>(v.data)[2] ^= 1;
      EXPECT_GT(wrong(v, host.in.v, memory.v.offsets(), host.key_lengths, true), 0) << D << packed;
    }
}

// --- The whole pass

bool same_bits(const Tensor<float>& a, const Tensor<float>& b) {
  return std::memcmp(a.values().data(), b.values().data(), a.values().size() * sizeof(float)) == 0;
}

// One tile of keys: the same scores, shift and probabilities as the CPU has, but for the last bit of an exponential. Then
// nearly every output is the CPU's to the bit; with a wrong layout none is.
TEST(HopperFp8, one_tile_is_the_cpus) {
  for (const int64_t D : {64, 128}) {
    const Problem host = make_problem({{1, 1, 1, 64, 64, D}, {}, ""});
    const fp8_judge::Found found = run(host, "none");
    AttentionBuffers cpu(host.in, false);
    attention_forward(kernel_problem(host), host.in, cpu.forward());
    int64_t differ = 0;
    for (size_t n = 0; n < found.o.values().size(); ++n) differ += found.o.values()[n] != cpu.o.values()[n];
    EXPECT_LT(differ, 64 * D / 50) << D;
    for (size_t n = 0; n < found.lse.values().size(); ++n)
      EXPECT_NEAR(found.lse.values()[n], cpu.lse.values()[n], 1e-4) << D << " " << n;
  }
}

// The tiles of q that the kernel rounds are those of its rows, with their scales: many items a block, lengths, packed sequences.
TEST(HopperFp8, every_row_has_its_query) {
  for (const int64_t D : {40, 128}) {
    const Problem host = fp8_judge::scores_are_queries({1, 2, 2, 400, 1, D});
    for (const How& how : evenkeel::emulated::several_orders(2))
      EXPECT_EQ(fp8_judge::wrong_scores(host, run(host, "none", how, 1).lse), 0) << D << ", " << name_of(how);
  }
  const Problem host = fp8_judge::scores_are_queries({5, 2, 2, 140, 9, 64}, {.ragged = true});
  for (const bool packed : {false, true})
    EXPECT_EQ(fp8_judge::wrong_scores(host, run(host, "none", {.sequences = packed}).lse), 0) << packed;
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
  for (const Case& c : kCases) judge(c.name, make_problem(c));
}

TEST(HopperFp8, hard_scores) {
  for (const Fill fill :
       {Fill::ties, Fill::ties_tail, Fill::max_zero, Fill::hundred, Fill::huge, Fill::offset})
    judge("fill " + std::to_string(static_cast<int>(fill)),
          make_problem({{1, 1, 1, 64, 48, 64}, {.fill = fill}, ""}));
}

// Lengths, padded and packed; and neither the order of warps nor the number of blocks changes a bit.
TEST(HopperFp8, sequences_and_the_same_bits) {
  const Problem host = make_problem({{5, 2, 1, 140, 150, 64}, {.causal = true, .ragged = true}, "ragged"});
  for (const char* stabiliser : kStabilisers) {
    const fp8_judge::Found padded = run(host, stabiliser);
    if (!kSanitized) fp8_judge::judge("ragged", kernel_problem(host, stabiliser), host, padded);
    for (const How& how : evenkeel::emulated::several_orders(2)) {
      const fp8_judge::Found found = run(host, stabiliser, how);
      EXPECT_TRUE(same_bits(padded.o, found.o)) << name_of(how);
      EXPECT_TRUE(same_bits(padded.lse, found.lse)) << name_of(how);
    }
    EXPECT_TRUE(same_bits(padded.o, run(host, stabiliser, {}, 1).o));
    EXPECT_TRUE(same_bits(padded.o, run(host, stabiliser, {.sequences = true}).o));
  }
}

// Scores that rise from the last keys to the first, which the kernel meets last: by little, and by more than an exponential can
// be. Rows without a key, and one NaN, which stays in its row.
TEST(HopperFp8, shifts_that_move) {
  for (const float rise : {0.3f, 1.0f, 3.0f, 60.0f}) {  // in 128 keys, in nats
    Problem host = make_problem({{1, 1, 1, 70, 640, 64}, {.scale = 0.125f}, ""});
    for (int64_t i = 0; i < 70; ++i) *host.q().at(0, 0, i, 0) = 8;
    for (int64_t j = 0; j < 640; ++j)
      *host.k().at(0, 0, j, 0) = cases::to_bf16(rise * static_cast<float>(4 - j / 128));
    judge("rise " + std::to_string(rise), host);
  }
  Problem host = make_problem({{1, 1, 1, 300, 200, 64}, {.causal = true}, ""});
  *host.q().at(0, 0, 150, 3) = std::numeric_limits<float>::quiet_NaN();
  for (const char* stabiliser : kStabilisers) {
    const fp8_judge::Found found = run(host, stabiliser);
    for (int64_t i = 0; i < 300; ++i) EXPECT_EQ(std::isnan(*found.lse.view().at(0, 0, i)), i == 150) << i;
  }
}

// Why P V leaves the tensor cores after every 64 keys: their 13 bits, truncated, shrink a long sum of values of one sign. Relative
// and signed, of O over 16,384 keys: what the rounding of P and v does, and what the sums of so many keys add to it.
TEST(HopperFp8, sums_of_13_bits_must_be_short) {
  constexpr size_t kKeys = 16384;
  constexpr int kRows = 8;
  constexpr float kScale = 128;  // the largest value is 2
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
    const float shift = *std::max_element(score.begin(), score.end()) - kProbsExponent;
    double exact = 0, l = 0, rounded = 0, rounded_l = 0;
    for (size_t j = 0; j < kKeys; ++j) {
      const float x = std::exp2(score[j] - shift), v = between_1_and_2(random);
      p[j] = round_to(e4m3, x), value[j] = round_to(e4m3, v * kScale);
      exact += double{x} * double{v}, l += double{x};
      rounded += double{p[j]} * double{value[j]} / kScale, rounded_l += double{p[j]};
    }
    const double error = rounded / rounded_l / (exact / l) - 1;
    rounding += error * error;
    for (size_t n = 0; n < kRuns.size(); ++n) {
      float o = 0;
      for (size_t j = 0; j < kKeys; j += kRuns[n])
        o += tensor_core_dot(h200, p.data() + j, value.data() + j, kRuns[n], 0.0f);
      truncation[n] += (double{o} / kScale / rounded - 1) / kRows;
    }
  }
  rounding = std::sqrt(rounding / kRows);
  std::printf("  O of %zu keys, values of one sign: rounding rms %.1e; sums of", kKeys, rounding);
  for (size_t n = 0; n < kRuns.size(); ++n) std::printf(" %zu keys %+.1e", kRuns[n], truncation[n]);
  std::printf("\n");
  EXPECT_LT(std::fabs(truncation[0]), rounding);
  EXPECT_LT(truncation[3], -0.1);
}

}  // namespace
}  // namespace evenkeel
