// The loops of round_array, compiled once per CPU target. Integer arithmetic on FP32 bit patterns, no branch
// on data, no floating-point operation that could round: the CPU's rounding direction and flush-to-zero do
// not matter.
//
// Rounding a magnitude to a multiple of 2^n of its pattern: add an increment in [0, 2^n), cut the low n bits.
// A carry out of the fraction goes into the exponent, which is what rounding up to a power of two means; from
// the largest finite pattern it makes Inf.
#include "numerics/round_array_kernels.h"

#include "numerics/simd.h"

namespace evenkeel::EVENKEEL_TARGET {
namespace {

constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u, kQuietBit = 0x00400000u,
                   kImplicitOne = 0x00800000u;

// Random numbers: philox() of random.h on kLanes counters at once, in two halves of 64-bit lanes.
using Wide = uint64_t __attribute__((vector_size(kLanes * 4)));

EK_INLINE Wide wide(uint32_t x) { return x + Wide{}; }

// Product of the low halves of the lanes; the high halves of a do not matter. 1 instruction.
EK_INLINE Wide multiply(Wide a, uint32_t b) {
#if defined(__AVX512F__)
  // The masked form: GCC 12 warns of its own header in the plain one. The same instruction.
  return (Wide)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)wide(b));
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)wide(b));
#elif defined(__SSE2__)
  return (Wide)_mm_mul_epu32((__m128i)a, (__m128i)wide(b));
#else
  return (a & 0xffffffffu) * b;
#endif
}

// Four words of kLanes / 2 counters. Only the low half of each lane is meant; the high halves hold what is
// left over from products, and never come down.
struct Counters {
  Wide word[4];
};

// 6 instructions a round (2 products, 2 shifts, 2 three-way exclusive ors where there are such, else 4).
EK_INLINE void philox_round(Counters& c, uint32_t key0, uint32_t key1) {
  const Wide product0 = multiply(c.word[0], kPhiloxMultiplier0);
  const Wide product1 = multiply(c.word[2], kPhiloxMultiplier1);
  c.word[0] = (product1 >> 32) ^ c.word[1] ^ wide(key0);
  c.word[1] = product1;
  c.word[2] = (product0 >> 32) ^ c.word[3] ^ wide(key1);
  c.word[3] = product0;
}

// Word w of the counters counter, counter + 1, ... counter + kLanes - 1, in lane order, to words[w].
// REQUIRES: counter is a multiple of kLanes, so that no lane carries into the high word.
EK_INLINE void random_words(const RandomKey& key, uint64_t counter, Uint words[4]) {
  Wide lane;
  for (int i = 0; i < kLanes / 2; ++i) lane[i] = static_cast<uint64_t>(2 * i);
  const Wide low = wide(static_cast<uint32_t>(counter)), high = wide(static_cast<uint32_t>(counter >> 32));
  Counters even{{low + lane, high, wide(key.tensor), wide(key.step)}};
  Counters odd{{low + lane + 1, high, wide(key.tensor), wide(key.step)}};
  uint32_t key0 = static_cast<uint32_t>(key.seed), key1 = static_cast<uint32_t>(key.seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    philox_round(even, key0, key1);
    philox_round(odd, key0, key1);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  for (int w = 0; w < 4; ++w) words[w] = (Uint)((even.word[w] & 0xffffffffu) | odd.word[w] << 32);
}

// All ones but the low n bits, per lane. Where n >= 32: some pattern.
EK_INLINE Uint ones_above(Uint n) {
#if defined(__AVX512F__)
  return (Uint)_mm512_maskz_sllv_epi32(0xffff, (__m512i)splat(~0u), (__m512i)n);
#elif defined(__AVX2__)
  return (Uint)_mm256_sllv_epi32((__m256i)splat(~0u), (__m256i)n);
#elif defined(__SSE2__)
  // SSE2 has no shift by lane: make the float -2^n and convert it, which is exact.
  return (Uint)to_int(float_of((((n & 31u) + 127u) << 23) | kSign));
#else
  return splat(~0u) << (n & 31u);
#endif
}

// v >> n per lane, 0 where n >= 32.
EK_INLINE Uint shift_right(Uint v, Uint n) {
#if defined(__AVX512F__)
  return (Uint)_mm512_maskz_srlv_epi32(0xffff, (__m512i)v, (__m512i)n);
#elif defined(__AVX2__)
  return (Uint)_mm256_srlv_epi32((__m256i)v, (__m256i)n);
#else
  return select(n < 32u, v >> (n & 31u), Uint{});
#endif
}

// All ones where x is negative.
EK_INLINE Uint negative_mask(Uint bits) { return (Uint)((Int)bits >> 31); }

// What to add to the magnitude before its low `shift` bits are cut; `kept` has ones where bits stay. Zero
// where shift is zero.
template <RoundingMode mode>
EK_INLINE Uint increment(Uint bits, Uint magnitude, Uint shift, Uint kept, Uint random) {
  switch (mode) {
    case RoundingMode::nearest_even: {
      // Half, less one where the last kept bit is even. Where 23 bits are cut that is the implicit one: odd.
      const Uint step = -kept, last = (magnitude | kImplicitOne) & step;
      return ((step >> 1) - ((last - 1) >> 31)) & ~kept;
    }
    case RoundingMode::nearest_away:
      return -kept >> 1;
    case RoundingMode::toward_zero:
      return Uint{};
    case RoundingMode::up:
      return ~kept & ~negative_mask(bits);
    case RoundingMode::down:
      return ~kept & negative_mask(bits);
    case RoundingMode::stochastic:
      // random < discarded 2^(32-shift) means floor(random / 2^(32-shift)) < discarded, as both are whole:
      // adding 2^shift - 1 - that floor carries just then.
      return shift_right(~random, 32u - shift);
  }
  return Uint{};
}

// All ones where a magnitude below the smallest subnormal goes up to it, else zero. exponent: its biased one.
template <RoundingMode mode>
EK_INLINE Uint small_goes_up(const RoundParameters& p, Uint bits, Uint magnitude, Uint exponent,
                             Uint random) {
  switch (mode) {
    case RoundingMode::nearest_even:
      return (Uint)((Int)magnitude > (Int)splat(p.half_quantum));
    case RoundingMode::nearest_away:
      return (Uint)((Int)magnitude >= (Int)splat(p.half_quantum));
    case RoundingMode::toward_zero:
      return Uint{};
    case RoundingMode::up:
      return (Uint)((Int)magnitude > 0) & ~negative_mask(bits);
    case RoundingMode::down:
      return (Uint)((Int)magnitude > 0) & negative_mask(bits);
    case RoundingMode::stochastic: {
      // The position between 0 and the quantum in units of 2^-32, rounded down: the significand as a 32-bit
      // fraction, shifted right by the number of binades below the quantum's own. FP32's subnormals have no
      // implicit one, but lie so far below that nothing is left of them.
      const Uint significand = magnitude << 8 | kSign;
      return (Uint)(random < shift_right(significand, p.discard + p.first_normal - 24u - exponent));
    }
  }
  return Uint{};
}

template <RoundLoop loop, RoundingMode mode>
EK_INLINE Float round_vector(const RoundParameters& p, Float x, Uint random) {
  const Uint bits = bits_of(x);
  const Uint magnitude = bits & ~kSign;
  Uint rounded;
  if constexpr (loop == RoundLoop::subnormal) {
    // Bits to cut: one more per binade below the smallest normal number; 23 at the quantum's binade. Lanes
    // below it compute nonsense here, and are then replaced.
    const Uint exponent = magnitude >> 23;
    const Int normal = splat((int32_t)p.discard), below = (Int)(p.discard + p.first_normal - exponent);
    const Uint shift = (Uint)(below > normal ? below : normal);
    const Uint kept = ones_above(shift);
    rounded = (magnitude + increment<mode>(bits, magnitude, shift, kept, random)) & kept;
    const Uint small = small_goes_up<mode>(p, bits, magnitude, exponent, random) & p.quantum;
    rounded = select((Int)magnitude < (Int)splat(p.quantum), small, rounded);
  } else {
    const Uint shift = splat(p.discard), kept = splat(~0u << p.discard);
    rounded = (magnitude + increment<mode>(bits, magnitude, shift, kept, random)) & kept;
  }
  if constexpr (loop != RoundLoop::open) {
    constexpr bool by_sign = mode == RoundingMode::up || mode == RoundingMode::down;
    const Uint overflow = by_sign
                              ? select((Int)bits < 0, splat(p.overflow_negative), splat(p.overflow_positive))
                              : splat(p.overflow_positive);
    // Signed comparison: patterns beyond 2^31 come from NaN alone, which is dealt with below.
    rounded = select((Int)rounded > (Int)splat(p.max_finite), overflow, rounded);
    // Elsewhere Inf goes where every overflow goes.
    if constexpr (by_sign || mode == RoundingMode::toward_zero)
      rounded = select(magnitude == kInfinity, splat(p.infinity), rounded);
  }
  rounded |= bits & kSign;
  return float_of(select((Int)magnitude > (Int)splat(kInfinity), bits | kQuietBit, rounded));
}

template <RoundLoop loop, RoundingMode mode>
void round_plain(const RoundParameters& parameters, float* target, const float* source, size_t count) {
  const RoundParameters p = parameters;  // a copy that no store through target can change
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store(target + i, round_vector<loop, mode>(p, load(source + i), Uint{}));
  if (i < count) {
    float rest[kLanes] = {};
    __builtin_memcpy(rest, source + i, (count - i) * sizeof(float));
    store(rest, round_vector<loop, mode>(p, load(rest), Uint{}));
    __builtin_memcpy(target + i, rest, (count - i) * sizeof(float));
  }
}

// 64 elements that share 16 counters: elements 64 group .. 64 group + 63 of the stream.
template <RoundLoop loop>
EK_INLINE void round_group(const RoundParameters& p, float* target, const float* source, const RandomKey& key,
                           uint64_t group) {
  for (uint64_t lane = 0; lane < kRandomLanes; lane += kLanes) {
    Uint words[4];
    random_words(key, group * kRandomLanes + lane, words);
    for (int w = 0; w < 4; ++w) {
      const uint64_t i = w * kRandomLanes + lane;
      store(target + i, round_vector<loop, RoundingMode::stochastic>(p, load(source + i), words[w]));
    }
  }
}

template <RoundLoop loop>
void round_stochastic(const RoundParameters& parameters, float* target, const float* source, size_t count,
                      const RandomKey& stream, uint64_t first_element) {
  const RoundParameters p = parameters;
  const RandomKey key = stream;
  while (count > 0) {
    const uint64_t offset = first_element % kRandomGroup;
    if (offset == 0)
      for (; count >= kRandomGroup; count -= kRandomGroup) {
        round_group<loop>(p, target, source, key, first_element / kRandomGroup);
        target += kRandomGroup;
        source += kRandomGroup;
        first_element += kRandomGroup;
      }
    // Part of a group, at the beginning or the end: in a group of its own, to the same positions.
    const size_t room = kRandomGroup - offset, part = count < room ? count : room;
    if (part == 0) break;
    float rest[kRandomGroup] = {};
    __builtin_memcpy(rest + offset, source, part * sizeof(float));
    round_group<loop>(p, rest, rest, key, first_element / kRandomGroup);
    __builtin_memcpy(target, rest + offset, part * sizeof(float));
    target += part;
    source += part;
    first_element += part;
    count -= part;
  }
}

template <RoundLoop loop>
void choose_mode(const RoundParameters& p, float* target, const float* source, size_t count,
                 const RandomKey& key, uint64_t first_element) {
  switch (p.mode) {
    case RoundingMode::nearest_even:
      return round_plain<loop, RoundingMode::nearest_even>(p, target, source, count);
    case RoundingMode::nearest_away:
      return round_plain<loop, RoundingMode::nearest_away>(p, target, source, count);
    case RoundingMode::toward_zero:
      return round_plain<loop, RoundingMode::toward_zero>(p, target, source, count);
    case RoundingMode::up:
      return round_plain<loop, RoundingMode::up>(p, target, source, count);
    case RoundingMode::down:
      return round_plain<loop, RoundingMode::down>(p, target, source, count);
    case RoundingMode::stochastic:
      return round_stochastic<loop>(p, target, source, count, key, first_element);
  }
}

}  // namespace

void round_kernel(const RoundParameters& p, float* target, const float* source, size_t count,
                  const RandomKey& key, uint64_t first_element) {
  switch (p.loop) {
    case RoundLoop::open:
      return choose_mode<RoundLoop::open>(p, target, source, count, key, first_element);
    case RoundLoop::bounded:
      return choose_mode<RoundLoop::bounded>(p, target, source, count, key, first_element);
    case RoundLoop::subnormal:
      return choose_mode<RoundLoop::subnormal>(p, target, source, count, key, first_element);
  }
}

}  // namespace evenkeel::EVENKEEL_TARGET
