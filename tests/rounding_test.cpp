// Rounding against judges that share no code with it: MPFR, the host code of the CUDA headers, the CPU's own FP16
// conversion. Exhaustive where the domain is small.
//
// EVENKEEL_SLOW=1 adds the tests over all 2^32 floats: about 75 minutes of one core, on all cores.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpfr.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/threads.h"
#include "numerics/error_stats.h"
#include "numerics/format.h"
#include "numerics/random.h"
#include "numerics/round_array.h"
#include "numerics/round_array_kernels.h"
#include "rounding_cases.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp6.h>
#include <cuda_fp8.h>
#endif

namespace evenkeel {
namespace {
using namespace rounding_cases;

// --- oracle

// The definition with MPFR: scale so that the gap between neighbours is 1, round to a whole number, scale
// back. Takes nothing from the code under test but the fields of Rounding. Not thread-safe: one per thread.
class Oracle {
 public:
  Oracle() {
    mpfr_init2(x_, 64);
    mpfr_init2(limit_, 64);
  }
  ~Oracle() {
    mpfr_clear(x_);
    mpfr_clear(limit_);
  }
  Oracle(const Oracle&) = delete;

  // x may be any double: also what no float holds. REQUIRES: r.mode is deterministic.
  float round(const Rounding& r, double x) {
    const Format f = r.format;
    set_limit(f);
    if (std::isnan(x)) return std::numeric_limits<float>::quiet_NaN();
    if (std::isinf(x)) return beyond(r, x < 0);
    mpfr_set_d(x_, x, MPFR_RNDN);
    if (mpfr_zero_p(x_)) return static_cast<float>(x);
    mpfr_mul_2si(x_, x_, r.scale_exponent, MPFR_RNDN);
    const int gap = gap_at(f, static_cast<int>(mpfr_get_exp(x_)) - 1);
    mpfr_mul_2si(x_, x_, -gap, MPFR_RNDN);
    switch (r.mode) {
      case RoundingMode::nearest_even:
        mpfr_roundeven(x_, x_);
        break;
      case RoundingMode::nearest_away:
        mpfr_round(x_, x_);
        break;
      case RoundingMode::toward_zero:
        mpfr_trunc(x_, x_);
        break;
      case RoundingMode::up:
        mpfr_ceil(x_, x_);
        break;
      case RoundingMode::down:
        mpfr_floor(x_, x_);
        break;
      case RoundingMode::stochastic:
        ADD_FAILURE() << "no oracle";
        break;
    }
    mpfr_mul_2si(x_, x_, gap, MPFR_RNDN);
    if (mpfr_cmpabs(x_, limit_) > 0) {
      const bool negative = mpfr_signbit(x_) != 0;
      const bool inward = r.mode == RoundingMode::toward_zero || (r.mode == RoundingMode::up && negative) ||
                          (r.mode == RoundingMode::down && !negative);
      return inward ? largest(r, negative) : beyond(r, negative);
    }
    mpfr_mul_2si(x_, x_, -r.scale_exponent, MPFR_RNDN);
    return mpfr_get_flt(x_, MPFR_RNDN);
  }

 private:
  void set_limit(Format f) {
    const int m = f.significand_bits;
    if (f.tapered) {
      mpfr_set_ui(limit_, 32768, MPFR_RNDN);
    } else if (f.exponent_bits == 0) {
      mpfr_set_ui(limit_, (1u << m) - 1, MPFR_RNDN);
    } else {
      const int bias = (1 << (f.exponent_bits - 1)) - 1, high = f.has_infinity ? bias : bias + 1;
      // All significand bits one; the last of them zero where that code is the NaN.
      mpfr_set_ui_2exp(limit_, (2u << m) - (f.has_infinity || !f.has_nan ? 1 : 2), high - m, MPFR_RNDN);
    }
  }
  static int gap_at(Format f, int leading) {
    if (f.exponent_bits == 0) return std::max(leading - f.significand_bits, 0);
    if (!f.tapered) return std::max(leading, 2 - (1 << (f.exponent_bits - 1))) - f.significand_bits;
    const int e = std::max(leading, -22), size = std::abs(e);
    return e - (size <= 3 ? 3 : size <= 7 ? 2 : size <= 15 || e > 0 ? 1 : 0);
  }
  float largest(const Rounding& r, bool negative) {
    mpfr_mul_2si(x_, limit_, -r.scale_exponent, MPFR_RNDN);
    const float value = mpfr_get_flt(x_, MPFR_RNDN);
    return negative ? -value : value;
  }
  float beyond(const Rounding& r, bool negative) {
    if (r.saturate || (!r.format.has_infinity && !r.format.has_nan)) return largest(r, negative);
    if (!r.format.has_infinity) return std::numeric_limits<float>::quiet_NaN();
    return negative ? -kInf : kInf;
  }

  mpfr_t x_, limit_;
};

bool slow_tests() {
  const char* wish = std::getenv("EVENKEEL_SLOW");
  return wish && std::string(wish) == "1";
}
#define SKIP_UNLESS_SLOW() \
  if (!slow_tests()) GTEST_SKIP() << "over all 2^32 floats: set EVENKEEL_SLOW=1 to run it"

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// --- properties

RoundingMode mirrored(RoundingMode mode) {
  if (mode == RoundingMode::up) return RoundingMode::down;
  if (mode == RoundingMode::down) return RoundingMode::up;
  return mode;
}

TEST(Properties, idempotent_symmetric_and_within_the_error_bound) {
  Mismatches idempotent, symmetric, bounded, representable;
  for (Format f : formats())
    for (RoundingMode mode : kAllModes) {
      const Rounding r{f, mode}, mirror{f, mirrored(mode)};
      const bool nearest = mode == RoundingMode::nearest_even || mode == RoundingMode::nearest_away;
      uint32_t random = 1;
      for (float x : stratified_sample()) {
        if (std::isnan(x)) continue;
        random = random * 1664525u + 1013904223u;
        const float y = round_to(r, x, random);
        symmetric.check_bits(
            mirror, -x, std::isnan(y) ? y : -y,
            std::isnan(y) ? std::copysign(round_to(mirror, -x, random), y) : round_to(mirror, -x, random));
        if (std::isnan(y) || std::isinf(y)) continue;  // overflow has its own rules: the oracle judges them
        idempotent.check_bits(r, y, y, round_to(r, y, ~random));
        representable.check(y == decode(f, encode(f, y)), r, x, y, decode(f, encode(f, y)));
        // Where x is tiny beside the gap the difference is not exact in double, so that "< gap" may read "=
        // gap".
        const double error = std::fabs(static_cast<double>(y) - x), gap = ulp(f, x);
        if (std::fabs(x) <= max_finite(f)) bounded.check(error <= (nearest ? gap / 2 : gap), r, x, x, y);
      }
    }
  EXPECT_NO_MISMATCH(idempotent);
  EXPECT_NO_MISMATCH(symmetric);
  EXPECT_NO_MISMATCH(bounded);
  EXPECT_NO_MISMATCH(representable);
}

TEST(Properties, monotonic) {
  Mismatches mismatches;
  for (Format f : formats())
    for (RoundingMode mode : kAllModes) {
      const Rounding r{f, mode, /*saturate=*/true};
      std::vector<float> sorted = sample_for(r);
      std::erase_if(sorted, [](float x) { return std::isnan(x); });
      std::sort(sorted.begin(), sorted.end());
      // The same random bits for all: then stochastic rounding is monotonic too, on either side of zero.
      for (size_t i = 1; i < sorted.size(); ++i) {
        const float a = round_to(r, sorted[i - 1], 0x9e3779b9u), b = round_to(r, sorted[i], 0x9e3779b9u);
        mismatches.check(a <= b, r, sorted[i], a, b);
      }
    }
  EXPECT_NO_MISMATCH(mismatches);
}

TEST(Properties, nan_stays_quiet_and_zero_keeps_its_sign) {
  for (Format f : formats())
    for (RoundingMode mode : kAllModes)
      for (bool saturate : {false, true}) {
        const Rounding r{f, mode, saturate};
        for (uint32_t nan : {0x7f800001u, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu, 0xff812345u}) {
          EXPECT_EQ(bits(round_to(r, from_bits(nan))), nan | 0x00400000u);
          float array[3] = {from_bits(nan), 0.0f, -0.0f};
          round_array(r, array, array, 3);
          EXPECT_EQ(bits(array[0]), nan | 0x00400000u);
          EXPECT_EQ(bits(array[1]), 0u);
          EXPECT_EQ(bits(array[2]), 0x80000000u);
        }
      }
}

// --- the MPFR oracle

void compare_with_oracle(const Rounding& base, Mismatches& mismatches) {
  Oracle oracle;
  const std::vector<float> sample = sample_for(base);
  std::vector<float> rounded(sample.size());
  for (bool saturate : {false, true}) {
    Rounding r = base;
    r.saturate = saturate;
    round_array(r, rounded.data(), sample.data(), sample.size());
    for (size_t i = 0; i < sample.size(); ++i) {
      const float expected = oracle.round(r, sample[i]);
      const float found = round_to(r, sample[i]);
      mismatches.check_same(r, sample[i], expected, found);
      mismatches.check_bits(r, sample[i], found, rounded[i]);
    }
  }
}

TEST(Mpfr, every_format_and_deterministic_mode) {
  Mismatches mismatches;
  for (Format f : formats())
    for (RoundingMode mode : kDeterministic) compare_with_oracle({f, mode}, mismatches);
  EXPECT_NO_MISMATCH(mismatches);
  RecordProperty("cases", std::to_string(mismatches.cases));
}

// Scales that leave FP32's normal range are among them, and absurd ones: the array version must notice.
TEST(Mpfr, scaled_roundings) {
  Mismatches mismatches;
  for (const char* text :
       {"e4m3^8", "e4m3^-8", "e5m2^3", "e5m2^-32", "fp16^32", "fp16^-7", "e7m23^32", "e7m1^32", "bf16^8",
        "bf16^-8", "fp32^-3", "fp32^5", "tf32^1", "e8m8^-8", "e2m1^31"})
    for (RoundingMode mode : kDeterministic) {
      Rounding r = parse_rounding(text);
      r.mode = mode;
      compare_with_oracle(r, mismatches);
    }
  for (RoundingMode mode : kDeterministic)
    for (const Rounding& r : {Rounding{kBf16, mode, false, -60}, Rounding{kFp32, mode, false, -100},
                              Rounding{kE5m2, mode, false, 112}, Rounding{kE4m3, mode, false, -110},
                              Rounding{kFp16, mode, false, 130}, Rounding{kE4m3, mode, false, -119}})
      compare_with_oracle(r, mismatches);
  EXPECT_NO_MISMATCH(mismatches);
  RecordProperty("cases", std::to_string(mismatches.cases));
}

// The oracle judged in its turn: MPFR's own emulation of IEEE formats, with its exponent range and
// mpfr_subnormalize, gives the same floats in the four modes it has.
TEST(Mpfr, oracle_agrees_with_mpfr_subnormalize) {
  const std::pair<RoundingMode, mpfr_rnd_t> modes[] = {{RoundingMode::nearest_even, MPFR_RNDN},
                                                       {RoundingMode::toward_zero, MPFR_RNDZ},
                                                       {RoundingMode::up, MPFR_RNDU},
                                                       {RoundingMode::down, MPFR_RNDD}};
  const mpfr_exp_t widest_min = mpfr_get_emin(), widest_max = mpfr_get_emax();
  Mismatches mismatches;
  Oracle oracle;
  for (Format f : formats()) {
    if (!f.has_infinity || f.tapered) continue;
    const int half_range = 1 << (f.exponent_bits - 1);
    mpfr_t x, y;
    mpfr_init2(x, 24);
    mpfr_init2(y, f.significand_bits + 1);
    for (const auto& [mode, direction] : modes)
      for (float value : sample_for({f})) {
        if (std::isnan(value)) continue;
        mpfr_set_flt(x, value, MPFR_RNDN);
        int inexact = mpfr_set(y, x, direction);
        // MPFR writes numbers as [1/2, 1) 2^e: one more than the exponents of IEEE 754.
        mpfr_set_emin(2 - half_range - f.significand_bits + 1);
        mpfr_set_emax(half_range - 1 + 1);
        inexact = mpfr_check_range(y, inexact, direction);
        mpfr_subnormalize(y, inexact, direction);
        mpfr_set_emin(widest_min);
        mpfr_set_emax(widest_max);
        const Rounding r{f, mode};
        mismatches.check_same(r, value, mpfr_get_flt(y, MPFR_RNDN), oracle.round(r, value));
      }
    mpfr_clear(x);
    mpfr_clear(y);
  }
  EXPECT_NO_MISMATCH(mismatches);
}

// --- round_array is round_to

// Every format there can be (both kinds of topmost exponent), every mode, on every CPU target of this
// machine.
TEST(RoundArray, is_round_to_on_every_cpu_target) {
  std::mt19937_64 generator(3);
  std::vector<float> sample;
  for (size_t i = 0; i < stratified_sample().size(); i += 1 + generator() % 17)
    sample.push_back(stratified_sample()[i]);
  std::vector<float> expected(sample.size()), rounded(sample.size());
  Mismatches mismatches;
  for (int e = 2; e <= 8; ++e)
    for (int m = 1; m <= 23; ++m)
      for (bool has_infinity : {true, false})
        for (RoundingMode mode : kAllModes) {
          if (e == 8 && !has_infinity) continue;  // FP32 does not hold its largest numbers
          const Rounding r{
              {e, m, has_infinity}, mode, generator() % 2 == 0, static_cast<int>(generator() % 65) - 32};
          for (int scale : {0, r.scale_exponent}) {
            Rounding scaled = r;
            scaled.scale_exponent = scale;
            const RandomKey key{generator(), static_cast<uint32_t>(generator()),
                                static_cast<uint32_t>(generator())};
            const uint64_t first = generator() % (uint64_t{1} << 40);
            for (size_t i = 0; i < sample.size(); ++i)
              expected[i] = round_to(scaled, sample[i], random_bits(key, first + i));
            for (int cpu = 0; cpu <= static_cast<int>(cpu_target()); ++cpu) {
              round_array_on(static_cast<CpuTarget>(cpu), scaled, rounded.data(), sample.data(),
                             sample.size(), key, first);
              for (size_t i = 0; i < sample.size(); ++i)
                mismatches.check_bits(scaled, sample[i], expected[i], rounded[i]);
            }
          }
        }
  EXPECT_NO_MISMATCH(mismatches);
  RecordProperty("cases", std::to_string(mismatches.cases));
}

// Any beginning, length, alignment, in place or not; nothing beyond the ends is written.
TEST(RoundArray, any_length_and_alignment) {
  constexpr float kGuard = 12345.678f;
  std::vector<float> source(400), target(400);
  for (size_t i = 0; i < source.size(); ++i) source[i] = random_unit({5}, i) * 100 - 50;
  const RandomKey key{11, 22, 33};
  for (const char* text : {"bf16", "e4m3", "bf16/stochastic", "e4m3/stochastic", "bf16^8/stochastic"}) {
    const Rounding r = parse_rounding(text);
    for (uint64_t first : {0, 1, 63, 64, 100})
      for (size_t offset : {0, 1, 3})
        for (size_t count : {0, 1, 3, 4, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 300}) {
          std::fill(target.begin(), target.end(), kGuard);
          round_array(r, target.data() + offset, source.data() + 2 * offset, count, key, first);
          for (size_t i = 0; i < target.size(); ++i) {
            const bool inside = i >= offset && i < offset + count;
            const float expected =
                inside ? round_to(r, source[i + offset], random_bits(key, first + i - offset)) : kGuard;
            ASSERT_EQ(bits(target[i]), bits(expected)) << text << " count " << count << " first " << first;
          }
          std::vector<float> in_place = source;
          round_array(r, in_place.data() + 2 * offset, in_place.data() + 2 * offset, count, key, first);
          for (size_t i = 0; i < count; ++i)
            ASSERT_EQ(bits(in_place[2 * offset + i]), bits(target[offset + i])) << text;
        }
  }
}

// --- all 2^32 floats

// round_array of every float, chunk by chunk on all threads, handed to judge(source, target, first, count,
// mismatches).
using Judge = std::function<void(const float*, const float*, uint64_t, int64_t, Mismatches&)>;
void judge_all_floats(const Rounding& r, const RandomKey& key, const Judge& judge) {
  constexpr int64_t kChunk = int64_t{1} << 20, kChunks = int64_t{1} << 12;
  const auto start = std::chrono::steady_clock::now();
  std::mutex mutex;
  Mismatches all;
  parallel_for(kChunks, [&](int64_t chunk, int) {
    const auto first = static_cast<uint64_t>(chunk * kChunk);
    std::vector<float> source(kChunk), target(kChunk);
    for (int64_t i = 0; i < kChunk; ++i) source[i] = from_bits(static_cast<uint32_t>(first + i));
    round_array(r, target.data(), source.data(), kChunk, key, first);
    Mismatches mine;
    judge(source.data(), target.data(), first, kChunk, mine);
    std::lock_guard lock(mutex);
    if (all.count == 0) all.first = mine.first;
    all.count += mine.count;
    all.cases += mine.cases;
  });
  EXPECT_NO_MISMATCH(all);
  EXPECT_EQ(all.cases, int64_t{1} << 32);
  fmt::print("  {:<28}{:.0f} s\n", to_string(r), seconds_since(start));
  std::fflush(stdout);
}

// 42 cases, about 1.5 minutes of one core each.
TEST(AllFloats, round_array_is_round_to_slow) {
  SKIP_UNLESS_SLOW();
  const RandomKey key{42};
  for (const NamedFormat& row : kNamedFormats)
    for (RoundingMode mode : kAllModes)
      for (bool saturate : {false, true}) {
        if (saturate && mode != RoundingMode::nearest_even)
          continue;  // it changes overflow alone: once per format
        const Rounding r{row.format, mode, saturate};
        judge_all_floats(
            r, key,
            [&](const float* source, const float* target, uint64_t first, int64_t count, Mismatches& m) {
              for (int64_t i = 0; i < count; ++i) {
                const bool random = mode == RoundingMode::stochastic;
                const float expected = round_to(r, source[i], random ? random_bits(key, first + i) : 0);
                m.check_bits(r, source[i], expected, target[i]);
              }
            });
      }
}

// 2 cases, about 6 minutes of one core each.
TEST(AllFloats, round_array_is_mpfr_slow) {
  SKIP_UNLESS_SLOW();
  ASSERT_TRUE(mpfr_buildopt_tls_p()) << "this MPFR is not thread-safe";
  for (Format f : {kBf16, kE4m3}) {
    const Rounding r{f};
    judge_all_floats(r, {},
                     [&](const float* source, const float* target, uint64_t, int64_t count, Mismatches& m) {
                       Oracle oracle;
                       for (int64_t i = 0; i < count; ++i)
                         m.check_same(r, source[i], oracle.round(r, source[i]), target[i]);
                     });
  }
}

// --- other people's conversions

#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
void compare_codes(const Rounding& r, const std::function<uint32_t(float)>& theirs) {
  Mismatches mismatches;
  for (float x : sample_for(r)) mismatches.check_same(r, x, decode(r.format, theirs(x)), round_to(r, x));
  EXPECT_NO_MISMATCH(mismatches);
  EXPECT_GT(mismatches.cases, kSanitized ? 15000 : 50000);
}
#endif

TEST(Cuda, fp8_host_conversions) {
#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
  for (bool saturate : {false, true}) {
    const auto limit = saturate ? __NV_SATFINITE : __NV_NOSAT;
    compare_codes({kE4m3, RoundingMode::nearest_even, saturate},
                  [=](float x) { return __nv_cvt_float_to_fp8(x, limit, __NV_E4M3); });
    compare_codes({kE5m2, RoundingMode::nearest_even, saturate},
                  [=](float x) { return __nv_cvt_float_to_fp8(x, limit, __NV_E5M2); });
  }
#else
  GTEST_SKIP() << "no cuda_fp8.h at build time";
#endif
}

// Theirs has no NaN to give: it makes a NaN the largest number, ours keeps it.
TEST(Cuda, fp6_and_fp4_host_conversions) {
#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
  const auto compare = [](Format f, const std::function<uint32_t(float)>& theirs) {
    Mismatches mismatches;
    const Rounding r{f};
    for (float x : sample_for(r))
      if (!std::isnan(x)) mismatches.check_same(r, x, decode(f, theirs(x)), round_to(r, x));
    EXPECT_NO_MISMATCH(mismatches);
    EXPECT_GT(mismatches.cases, kSanitized ? 15000 : 50000);
  };
  compare(kE2m3, [](float x) { return __nv_cvt_float_to_fp6(x, __NV_E2M3, cudaRoundNearest); });
  compare(kE3m2, [](float x) { return __nv_cvt_float_to_fp6(x, __NV_E3M2, cudaRoundNearest); });
  compare(kE2m1, [](float x) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); });
#else
  GTEST_SKIP() << "no cuda_fp4.h at build time";
#endif
}

TEST(Cuda, fp16_host_conversions) {
#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
  const auto code = [](__half h) -> uint32_t { return static_cast<__half_raw>(h).x; };
  compare_codes({kFp16, RoundingMode::nearest_even}, [=](float x) { return code(__float2half_rn(x)); });
  compare_codes({kFp16, RoundingMode::toward_zero}, [=](float x) { return code(__float2half_rz(x)); });
  compare_codes({kFp16, RoundingMode::up}, [=](float x) { return code(__float2half_ru(x)); });
  compare_codes({kFp16, RoundingMode::down}, [=](float x) { return code(__float2half_rd(x)); });
#else
  GTEST_SKIP() << "no cuda_fp16.h at build time";
#endif
}

TEST(Cuda, bf16_host_conversions) {
#if defined(EVENKEEL_HAVE_CUDA_HEADERS)
  const auto code = [](__nv_bfloat16 h) -> uint32_t { return static_cast<__nv_bfloat16_raw>(h).x; };
  compare_codes({kBf16, RoundingMode::nearest_even}, [=](float x) { return code(__float2bfloat16_rn(x)); });
  compare_codes({kBf16, RoundingMode::toward_zero}, [=](float x) { return code(__float2bfloat16_rz(x)); });
  compare_codes({kBf16, RoundingMode::up}, [=](float x) { return code(__float2bfloat16_ru(x)); });
  compare_codes({kBf16, RoundingMode::down}, [=](float x) { return code(__float2bfloat16_rd(x)); });
#else
  GTEST_SKIP() << "no cuda_bf16.h at build time";
#endif
}

#if defined(__x86_64__)
template <int direction>
__attribute__((target("f16c"))) uint32_t hardware_half(float x) {
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), direction))) & 0xffffu;
}
#endif

TEST(Hardware, f16c_conversions) {
#if defined(__x86_64__)
  // Clang 14 has no question for F16C; whatever has AVX2 has it.
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "this CPU has no F16C";
  const std::pair<RoundingMode, uint32_t (*)(float)> modes[] = {
      {RoundingMode::nearest_even, hardware_half<_MM_FROUND_TO_NEAREST_INT>},
      {RoundingMode::toward_zero, hardware_half<_MM_FROUND_TO_ZERO>},
      {RoundingMode::up, hardware_half<_MM_FROUND_TO_POS_INF>},
      {RoundingMode::down, hardware_half<_MM_FROUND_TO_NEG_INF>}};
  Mismatches mismatches;
  for (const auto& [mode, convert] : modes) {
    const Rounding r{kFp16, mode};
    for (float x : sample_for(r)) mismatches.check_same(r, x, decode(kFp16, convert(x)), round_to(r, x));
    // And every 251st float there is (with a sanitizer every 2,510th).
    for (uint64_t b = 0; b < uint64_t{1} << 32; b += kSanitized ? 2510 : 251) {
      const float x = from_bits(static_cast<uint32_t>(b));
      mismatches.check_same(r, x, decode(kFp16, convert(x)), round_to(r, x));
    }
  }
  EXPECT_NO_MISMATCH(mismatches);
#else
  GTEST_SKIP() << "F16C is of x86-64";
#endif
}

// --- the planted fault

// What a hasty kernel does: add half of the last place, cut. Ties go away from zero instead of to even.
float half_up_bf16(float x) { return from_bits((bits(x) + 0x8000u) & 0xffff0000u); }

// The one criterion that sees it is the sign. On sums of two BF16 numbers half of all roundings are ties (the
// sum of two 8-bit significands has 9 bits), half-up errs by as much as nearest-even, just always the same
// way.
TEST(PlantedFault, only_the_signed_mean_sees_half_up) {
  struct Judged {
    ErrorStats errors;
    double nmse = 0;
  };
  const auto judge = [](const std::function<float(float)>& round) {
    Judged judged;
    double energy = 0, squares = 0;
    for (uint64_t i = 0; i < 200000; ++i) {
      // Two negative BF16 numbers of one binade, as the products P V of a value column with one sign.
      const float a = -round_to({kBf16, RoundingMode::toward_zero}, 1 + random_unit({1}, i));
      const float b = -round_to({kBf16, RoundingMode::toward_zero}, 1 + random_unit({2}, i));
      const float sum = a + b;  // exact in FP32
      const double error = static_cast<double>(round(sum)) - sum;
      judged.errors.add(error, ulp(kBf16, sum));
      squares += error * error;
      energy += static_cast<double>(sum) * sum;
    }
    judged.nmse = squares / energy;
    return judged;
  };
  const auto unbiased = [](const ErrorStats& e) { return std::fabs(e.mean()) <= 4 * e.standard_error(); };

  const Judged even = judge([](float x) { return round_to({kBf16}, x); });
  const Judged faulty = judge(half_up_bf16);
  const Judged away = judge([](float x) { return round_to({kBf16, RoundingMode::nearest_away}, x); });

  // The usual criteria cannot tell them apart: equal to the last bit.
  EXPECT_EQ(even.errors.max_abs(), faulty.errors.max_abs());
  EXPECT_EQ(even.errors.max_ulp(), 0.5);
  EXPECT_EQ(faulty.errors.max_ulp(), 0.5);
  EXPECT_EQ(even.nmse, faulty.nmse);
  EXPECT_EQ(even.errors.rms(), faulty.errors.rms());
  // The signed mean can.
  EXPECT_TRUE(unbiased(even.errors)) << "z = " << even.errors.z();
  EXPECT_FALSE(unbiased(faulty.errors)) << "z = " << faulty.errors.z();
  EXPECT_FALSE(unbiased(away.errors)) << "z = " << away.errors.z();
  EXPECT_LT(faulty.errors.z(), -100);
  // Half of the sums are ties, each half a place off, all downward: a quarter of a place in the mean.
  EXPECT_NEAR(faulty.errors.mean(), -0.25 * 0x1p-6, 0.01 * 0x1p-6);
  // And so can the sign test: every tie goes down.
  EXPECT_EQ(faulty.errors.positive_rows(), 0);
  EXPECT_LT(std::fabs(even.errors.sign_z()), 4);
}

// --- double rounding

// Rounding twice is not rounding once: the first rounding lands on a tie of the second and hides the side it
// came from. Results of FP64 must not pass through FP32, nor those of FP32 through BF16, on their way to FP8.
TEST(DoubleRounding, differs_from_direct_in_known_cases) {
  Oracle oracle;
  const Rounding e4m3{kE4m3}, bf16{kBf16};
  // 1.0625 is the tie between 1 and 1.125; 1 is even.
  const double above_tie = 1.0625 + 0x1p-30;
  EXPECT_EQ(oracle.round(e4m3, above_tie), 1.125f);                // once
  EXPECT_EQ(round_to(e4m3, static_cast<float>(above_tie)), 1.0f);  // by way of FP32
  const float single = 1.0625f + 0x1p-12f;
  EXPECT_EQ(round_to(e4m3, single), 1.125f);                               // once
  EXPECT_EQ(round_to(e4m3, round_to(bf16, single)), 1.0f);                 // by way of BF16
  EXPECT_EQ(round_to(e4m3, round_to({kFp16}, 1.0625f + 0x1p-13f)), 1.0f);  // by way of FP16
  EXPECT_EQ(round_to(e4m3, 1.0625f + 0x1p-13f), 1.125f);
  // The paper's sum: FP32 holds it exactly, so that BF16 is the only rounding.
  const float sum = from_bits(0xc01a0e2eu) + from_bits(0xc0130000u);
  EXPECT_EQ(bits(sum), 0xc0968717u);
  EXPECT_EQ(bits(round_to(bf16, sum)), 0xc0970000u);
}

}  // namespace
}  // namespace evenkeel
