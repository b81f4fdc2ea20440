// Formats and roundings as text, and the rounding of a number by whatever was accepted. The text is what
// comes before the first NUL; the four bytes after it are the number, the next four the random bits.
#include "numerics/rounding.h"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "fuzz/fuzz.h"

using namespace evenkeel;

namespace {

// But for NaNs, of which there is one, and for the sign of zeros, which not every format stores.
bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void check_rounding(const Rounding& r, float x, uint32_t random) {
  const float rounded = round_to(r, x, random);
  if (std::isnan(x)) {
    fuzz::must(std::isnan(rounded), "NaN stays NaN");
    return;
  }
  if (!std::isnan(rounded)) fuzz::must(std::signbit(rounded) == std::signbit(x), "the sign stays");
  if (x == 0) fuzz::must(rounded == 0, "zero stays zero");
  if (r.scale_exponent != 0) return;
  fuzz::must(same(decode(r.format, encode(r.format, rounded)), rounded),
             "the result is a number of the format");
  fuzz::must(same(round_to(r, rounded, ~random), rounded), "a number of the format is not rounded again");
  if (std::isfinite(x) && std::isfinite(rounded) && std::fabs(x) <= max_finite(r.format))
    fuzz::must(std::fabs(static_cast<double>(rounded) - x) <= ulp(r.format, x),
               "the error is within one step");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view all = fuzz::text_of(data, size);
  const std::string_view text = all.substr(0, all.find('\0'));
  uint32_t numbers[2] = {0x4019999a, 0x80000000};
  const std::string_view rest = all.substr(std::min(text.size() + 1, all.size()));
  if (!rest.empty()) std::memcpy(numbers, rest.data(), std::min(rest.size(), sizeof numbers));

  fuzz::accepts([&] {
    const Format format = parse_format(text);
    fuzz::must(parse_format(to_string(format)) == format,
               "a format is the same after to_string and parse_format");
  });
  fuzz::accepts([&] {
    const RoundingMode mode = parse_rounding_mode(text);
    fuzz::must(kRoundingModeNames[static_cast<size_t>(mode)] == text, "a mode is called by its name");
  });
  fuzz::accepts([&] {
    const Rounding rounding = parse_rounding(text);
    fuzz::must(parse_rounding(to_string(rounding)) == rounding,
               "a rounding is the same written and read again");
    fuzz::must(std::abs(rounding.scale_exponent) <= 32, "a scale is within its limits");
    check_rounding(rounding, std::bit_cast<float>(numbers[0]), numbers[1]);
  });
  return 0;
}
