#include "numerics/round_array.h"

#include <array>
#include <bit>

#include "numerics/round_array_kernels.h"

namespace evenkeel {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u, kQuietNan = 0x7fc00000u;

// Magnitude bits of 2^e. REQUIRES: -149 <= e <= 127.
uint32_t power_bits(int e) { return std::bit_cast<uint32_t>(power_of_two(e)); }

// False: the kernels cannot do it, round_to must. Of what parse_rounding makes, these are an 8-bit exponent
// with a scale, and a 7-bit one scaled up so far that its smallest subnormal lies below 2^-94.
bool set_parameters(const Rounding& r, RoundParameters& p) {
  const Format f = r.format;
  const int m = f.significand_bits, scale = r.scale_exponent;
  if (f.tapered || scale < -256 || scale > 256 || max_exponent(f) > 127) return false;
  const int first = min_exponent(f) - scale + 127;  // biased, of the smallest normal number
  const int top = max_exponent(f) - scale;          // unbiased, of the largest
  if (first < 1 || first > 254 || top < -126 || (top > 127 && !f.has_infinity)) return false;

  p.mode = r.mode;
  p.discard = static_cast<uint32_t>(23 - m);
  p.first_normal = static_cast<uint32_t>(first);
  if (first > 1) {
    // Stochastic: from here on FP32's subnormals are below 2^-32 of the smallest subnormal, and never go up.
    const int quantum = first - m - 127;  // exponent of the smallest subnormal
    if (quantum < -94) return false;
    p.quantum = power_bits(quantum);
    p.half_quantum = power_bits(quantum - 1);
  }

  // Where the format's range ends beyond FP32's, both Inf and the largest number come out as FP32's Inf.
  const uint32_t largest =
      top > 127 ? kInfinity : std::bit_cast<uint32_t>(max_finite(f)) - (static_cast<uint32_t>(scale) << 23);
  const uint32_t overflow = saturates(r) ? largest : f.has_infinity ? kInfinity : kQuietNan;
  p.max_finite = largest;
  // Directed modes stop at the largest number on the side they round to.
  const bool zero = r.mode == RoundingMode::toward_zero;
  p.overflow_positive = zero || r.mode == RoundingMode::down ? largest : overflow;
  p.overflow_negative = zero || r.mode == RoundingMode::up ? largest : overflow;
  p.infinity = overflow;

  if (first > 1) {
    p.loop = RoundLoop::subnormal;
  } else {
    // The encoding is linear across FP32's subnormals: rounding up beyond the largest number makes Inf.
    p.loop = overflow == kInfinity && max_exponent(f) == 127 ? RoundLoop::open : RoundLoop::bounded;
    // Nothing is dropped: no mode matters, and no random number need be made.
    if (p.discard == 0) p.mode = RoundingMode::toward_zero;
  }
  return true;
}

// HiFloat8 to nearest: how many low bits of a float with this exponent field are cut. From the quantum's binade upward.
constexpr auto kTaperedCut = [] {
  std::array<uint8_t, 256> cut{};
  for (int field = kTaperedLeast + 127; field < 255; ++field)
    cut[static_cast<size_t>(field)] = static_cast<uint8_t>(gap_exponent(kHif8, field - 127) + 150 - field);
  return cut;
}();

// False: round_to must.
bool round_tapered(const Rounding& r, float* target, const float* source, size_t count) {
  const bool even = r.mode == RoundingMode::nearest_even;
  if (!r.format.tapered || r.scale_exponent != 0 || !(even || r.mode == RoundingMode::nearest_away))
    return false;
  const uint32_t quantum = power_bits(kTaperedLeast), half = power_bits(kTaperedLeast - 1);
  const uint32_t largest = std::bit_cast<uint32_t>(max_finite(r.format)),
                 beyond = saturates(r) ? largest : kInfinity;
  for (size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(source[i]);
    const uint32_t sign = bits & 0x80000000u, magnitude = bits ^ sign;
    uint32_t rounded;
    if (magnitude > kInfinity) {
      rounded = magnitude | 0x00400000u;
    } else if (magnitude < quantum) {
      rounded = magnitude > half || (magnitude == half && !even) ? quantum : 0;
    } else {
      const uint32_t cut = kTaperedCut[magnitude >> 23], step = 1u << cut;
      const bool odd =
          ((magnitude | 0x00800000u) & step) != 0;  // the leading one is the last bit where 23 are cut
      rounded = (magnitude + (step >> 1) - (even && !odd)) & ~(step - 1);
      if (rounded > largest) rounded = beyond;
    }
    target[i] = std::bit_cast<float>(rounded | sign);
  }
  return true;
}

void round_with(RoundKernel& kernel, const Rounding& r, float* target, const float* source, size_t count,
                const RandomKey& key, uint64_t first_element) {
  RoundParameters p;
  if (set_parameters(r, p)) {
    kernel(p, target, source, count, key, first_element);
    return;
  }
  if (round_tapered(r, target, source, count)) return;
  const bool stochastic = r.mode == RoundingMode::stochastic;
  for (size_t i = 0; i < count; ++i)
    target[i] = round_to(r, source[i], stochastic ? random_bits(key, first_element + i) : 0);
}

}  // namespace

void round_array(const Rounding& r, float* target, const float* source, size_t count, const RandomKey& key,
                 uint64_t first_element) {
  static RoundKernel& kernel = EVENKEEL_OF_TARGET(cpu_target(), round_kernel);
  round_with(kernel, r, target, source, count, key, first_element);
}

void round_array_on(CpuTarget cpu, const Rounding& r, float* target, const float* source, size_t count,
                    const RandomKey& key, uint64_t first_element) {
  round_with(EVENKEEL_OF_TARGET(cpu, round_kernel), r, target, source, count, key, first_element);
}

}  // namespace evenkeel
