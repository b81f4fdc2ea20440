// Stochastic rounding: its probabilities, its mean, its independence of how the work is cut; and the random numbers under it,
// against their published vectors and Random123.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "base/threads.h"
#include "numerics/random.h"
#include "numerics/round_array.h"
#include "numerics/round_array_kernels.h"
#include "rounding_cases.h"

#if __has_include(<Random123/philox.h>)
#include <Random123/philox.h>
#define EVENKEEL_HAVE_RANDOM123
#endif

namespace evenkeel {
namespace {

using namespace rounding_cases;

// --- stochastic rounding

// All values of the topmost `count` bits of the random number, the rest zeros or ones: how often does x go
// up?
int64_t times_up(const Rounding& r, float x, int count, uint32_t rest) {
  const float down = round_to({r.format, RoundingMode::toward_zero, true, r.scale_exponent}, x);
  int64_t up = 0;
  for (uint32_t top = 0; top < 1u << count; ++top) {
    const uint32_t random = top << (32 - count) | (rest >> count);
    up += bits(round_to(r, x, random)) != bits(down);
  }
  return up;
}

TEST(Stochastic, probability_is_exact_for_dyadic_fractions) {
  for (uint32_t rest : {0u, 0xffffffffu}) {
    // BF16 drops 16 bits: all 2^16 random numbers that matter, for every 997th and the first and last
    // fractions.
    for (uint32_t base : {0x3f800000u, 0xc2c80000u, 0x00010000u, 0x00000000u, 0x7f7e0000u})
      for (uint32_t fraction : {0u, 1u, 2u, 0x7fffu, 0x8000u, 0x8001u, 0xfffeu, 0xffffu})
        EXPECT_EQ(times_up({kBf16, RoundingMode::stochastic}, from_bits(base | fraction), 16, rest),
                  fraction);
    const Rounding e4m3{kE4m3, RoundingMode::stochastic};
    // Normal: 20 bits dropped. 1.40625 lies 1/4 of the way from 1.375 to 1.5.
    EXPECT_EQ(times_up(e4m3, 1.40625f, 12, rest), 1 << 10);
    EXPECT_EQ(times_up(e4m3, from_bits(0x3f800000u | 12345), 20, rest), 12345);
    // Subnormal: 2^-9 apart.
    EXPECT_EQ(times_up(e4m3, -1.25f * 0x1p-9f, 10, rest), 1 << 8);
    EXPECT_EQ(times_up(e4m3, 5.5f * 0x1p-9f, 10, rest), 1 << 9);
    // Below the smallest subnormal, down to where the fraction has no bits left among the topmost ones.
    EXPECT_EQ(times_up(e4m3, 0x1p-10f, 10, rest), 1 << 9);
    EXPECT_EQ(times_up(e4m3, 0.75f * 0x1p-9f, 10, rest), 3 << 8);
    EXPECT_EQ(times_up(e4m3, 0x1p-19f, 12, rest), 4);
    // Between the largest number, 448, and the 480 there is not.
    EXPECT_EQ(times_up(e4m3, 456.0f, 10, rest), 1 << 8);
    // Scaled by 2^8: the smallest subnormal is 2^-17.
    EXPECT_EQ(times_up({kE4m3, RoundingMode::stochastic, false, 8}, 0x1p-18f, 10, rest), 1 << 9);
  }
  // Far below the quantum: random 0 alone goes up while 2^-32 of it is left, then nothing does.
  const Rounding r{kE4m3, RoundingMode::stochastic};
  EXPECT_EQ(round_to(r, 0x1p-41f, 0), 0x1p-9f);
  EXPECT_EQ(round_to(r, 0x1p-41f, 1), 0.0f);
  EXPECT_EQ(round_to(r, std::nextafter(0x1p-41f, 0.0f), 0), 0.0f);
}

// A value goes up where its fraction exceeds the random number, and not where it equals it. Fractions are
// made for the random numbers of a stream, since the chance to meet an equal one is 2^-32.
TEST(Stochastic, the_threshold_is_sharp) {
  const RandomKey key{2024};
  std::vector<float> sources[2], targets[2];  // [0] fraction equal to the random number, [1] the next one up
  for (const char* text : {"bf16", "tf32", "fp16", "e4m3", "e5m2", "e2m1"}) {
    const Format f = parse_format(text);
    const Rounding r{f, RoundingMode::stochastic};
    const int dropped = 23 - f.significand_bits;
    for (bool small : {false, true}) {
      if (small && f.exponent_bits == 8) continue;
      sources[0].clear(), sources[1].clear();
      const double quantum = min_subnormal(f);
      std::vector<bool> meant;
      for (uint64_t element = 0; element < 8192; ++element) {
        const uint32_t random = random_bits(key, element);
        // Between 1 and the next number, `dropped` bits of fraction. Or below the smallest subnormal, where
        // 32 bits count but a float holds 24 of them: those random numbers that begin with eight zeros.
        const bool fits = !small || random < 1u << 24;
        const uint32_t fraction = random >> (small ? 0 : 32 - dropped);
        for (uint32_t step : {0u, 1u})
          sources[step].push_back(
              !fits   ? 0.0f
              : small ? static_cast<float>((static_cast<double>(fraction) + step) * 0x1p-32 * quantum)
                      : from_bits(0x3f800000u + fraction + step));
        meant.push_back(fits && (small || fraction + 1 < 1u << dropped));
      }
      int64_t seen = 0;
      for (int step : {0, 1}) {
        targets[step].resize(sources[step].size());
        round_array(r, targets[step].data(), sources[step].data(), sources[step].size(), key);
      }
      const float down = small ? 0.0f : 1.0f, up = small ? min_subnormal(f) : 1 + epsilon(f);
      for (uint64_t element = 0; element < meant.size(); ++element) {
        if (!meant[element]) continue;
        ++seen;
        const uint32_t random = random_bits(key, element);
        ASSERT_EQ(round_to(r, sources[0][element], random), down) << text;
        ASSERT_EQ(round_to(r, sources[1][element], random), up) << text;
        ASSERT_EQ(targets[0][element], down) << text;
        ASSERT_EQ(targets[1][element], up) << text;
      }
      EXPECT_GT(seen, 10) << text;
    }
  }
}

// Formats whose smallest subnormal is so small that FP32's own subnormals are a visible part of it.
TEST(Stochastic, subnormals_of_fp32) {
  std::vector<float> source(100000), target(source.size());
  for (size_t i = 0; i < source.size(); ++i) source[i] = from_bits(random_bits({6}, i) & 0x807fffffu);
  const RandomKey key{77};
  Mismatches mismatches;
  for (const char* text :
       {"e8m20^-30", "e8m23^-24", "e8m23^-1", "bf16^-8", "bf16^8", "e7m23^32", "e7m23^10", "bf16"}) {
    Rounding r = parse_rounding(text);
    r.mode = RoundingMode::stochastic;
    round_array(r, target.data(), source.data(), source.size(), key);
    for (size_t i = 0; i < source.size(); ++i)
      mismatches.check_bits(r, source[i], round_to(r, source[i], random_bits(key, i)), target[i]);
  }
  EXPECT_NO_MISMATCH(mismatches);
}

TEST(Stochastic, mean_is_the_value) {
  constexpr int64_t kTimes = 1 << 16;
  std::vector<float> source(kTimes), target(kTimes);
  uint32_t tensor = 0;
  for (const char* text : {"bf16", "tf32", "fp16", "e4m3", "e5m2", "e8m2", "e5m7", "e4m3^8"})
    for (float x : {1.001f, -1.3f, 3.14159f, 0.1f, -0.017f, 0.0007f, -2e-5f, 100.7f}) {
      Rounding r = parse_rounding(text);
      r.mode = RoundingMode::stochastic;
      if (std::ldexp(std::fabs(x), r.scale_exponent) > max_finite(r.format)) continue;
      std::fill(source.begin(), source.end(), x);
      round_array(r, target.data(), source.data(), kTimes, RandomKey{99, 0, tensor++});
      Rounding cut = r;
      cut.mode = RoundingMode::toward_zero;
      const double down = round_to(cut, x),
                   gap = std::ldexp(ulp(r.format, std::ldexp(x, r.scale_exponent)), -r.scale_exponent);
      const double up = down + std::copysign(gap, x), position = std::fabs(x - down) / gap;
      double mean = 0;
      for (float y : target) {
        ASSERT_TRUE(y == down || y == up) << text << " " << x << " -> " << y;
        mean += (y - static_cast<double>(x)) / kTimes;
      }
      const double sigma = gap * std::sqrt(position * (1 - position) / kTimes);
      EXPECT_LE(std::fabs(mean), 4 * sigma) << text << " of " << x;
    }
}

// The same bits however the work is cut: chunks, alignment, threads, CPU targets; and across the end of the
// low word of the counter.
TEST(Stochastic, same_bits_however_the_work_is_cut) {
  constexpr size_t kCount = 20000;
  const RandomKey key{0x123456789abcdefull, 7, 8};
  std::vector<float> source(kCount);
  for (size_t i = 0; i < kCount; ++i)
    source[i] = std::ldexp(random_unit({4}, i) - 0.5f, static_cast<int>(random_bits({5}, i) % 40) - 25);
  const int threads_before = thread_count();
  for (const char* text :
       {"bf16/stochastic", "e4m3/stochastic", "fp16/stochastic/saturate", "fp32/stochastic"}) {
    const Rounding r = parse_rounding(text);
    // Elements 64 (2^28 - 1).. hold counters up to 2^32 - 1; the next group carries.
    for (uint64_t first : {uint64_t{0}, uint64_t{37}, (uint64_t{1} << 34) - 1000, (uint64_t{1} << 63) + 5}) {
      std::vector<float> expected(kCount);
      for (size_t i = 0; i < kCount; ++i) expected[i] = round_to(r, source[i], random_bits(key, first + i));
      const auto expect_equal = [&](const float* found, const std::string& how) {
        EXPECT_EQ(std::memcmp(found, expected.data(), kCount * sizeof(float)), 0) << text << " " << how;
      };
      std::vector<float> target(kCount + 16);
      round_array(r, target.data(), source.data(), kCount, key, first);
      expect_equal(target.data(), "whole");
      std::mt19937 generator(1);
      for (size_t begin = 0; begin < kCount;) {
        const size_t count = std::min<size_t>(generator() % 300, kCount - begin);
        round_array(r, target.data() + 1 + begin, source.data() + begin, count, key, first + begin);
        begin += count;
      }
      expect_equal(target.data() + 1, "in chunks, not aligned");
      for (int threads : {1, 2, 5}) {
        set_thread_count(threads);
        constexpr size_t kPiece = 777;
        std::fill(target.begin(), target.end(), 0.0f);
        parallel_for((kCount + kPiece - 1) / kPiece, [&](int64_t piece, int) {
          const size_t begin = static_cast<size_t>(piece) * kPiece;
          round_array(r, target.data() + begin, source.data() + begin, std::min(kPiece, kCount - begin), key,
                      first + begin);
        });
        expect_equal(target.data(), fmt::format("by {} threads", threads));
      }
      for (int cpu = 0; cpu <= static_cast<int>(cpu_target()); ++cpu) {
        std::fill(target.begin(), target.end(), 0.0f);
        round_array_on(static_cast<CpuTarget>(cpu), r, target.data(), source.data(), kCount, key, first);
        expect_equal(target.data(), name(static_cast<CpuTarget>(cpu)));
      }
    }
  }
  set_thread_count(threads_before);
}

// --- random numbers

// kat_vectors of the Random123 distribution, philox4x32 with 10 rounds.
TEST(Philox, known_answers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox({ones, ones, ones, ones}, ones, ones),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, agrees_with_random123) {
#if defined(EVENKEEL_HAVE_RANDOM123)
  std::mt19937_64 generator(17);
  for (int i = 0; i < 100000; ++i) {
    const auto word = [&] { return static_cast<uint32_t>(generator()); };
    const std::array<uint32_t, 4> counter = {word(), word(), word(), word()};
    const uint32_t key0 = word(), key1 = word();
    const r123::Philox4x32 theirs;
    const auto expected = theirs({{counter[0], counter[1], counter[2], counter[3]}}, {{key0, key1}});
    const auto found = philox(counter, key0, key1);
    for (size_t w = 0; w < 4; ++w) ASSERT_EQ(found[w], expected[w]);
  }
#else
  GTEST_SKIP() << "no Random123/philox.h at build time";
#endif
}

// The layout of a stream is a promise: records and GPU kernels rely on it.
TEST(Philox, elements_map_to_counters_and_words) {
  const RandomKey key{0x0123456789abcdefull, 55, 66};
  for (uint64_t element : {uint64_t{0}, uint64_t{15}, uint64_t{16}, uint64_t{63}, uint64_t{64},
                           uint64_t{1000}, (uint64_t{1} << 34) + 17}) {
    const uint64_t counter = 16 * (element / 64) + element % 16;
    const auto words = philox({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 66, 55},
                              0x89abcdefu, 0x01234567u);
    EXPECT_EQ(random_bits(key, element), words[element % 64 / 16]);
    const float unit = random_unit(key, element);
    EXPECT_GT(unit, 0.0f);
    EXPECT_LT(unit, 1.0f);
  }
}

}  // namespace
}  // namespace evenkeel
