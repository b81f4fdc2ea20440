// The parts that replays play in a verdict: one row each. The replays are made by isolate. The file verdict.json lists them under these
// names, and the page shows every one that is there. A new row needs a trial in diagnosis/verdict.h; the page draws it as it is.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace evenkeel {

// In the order of the page: from what was recorded to the control.
enum class VerdictPart {
  recorded,
  placebo,
  alone_guilty,
  unbiased,
  wide_pv,
  wide_output,
  consistent,
  zero_sum,
  zero_sum_all,
  cured,
  control_placebo,
  slower,
  control,
};

struct VerdictPartRow {
  std::string_view name;   // in verdict.json, and in code
  std::string_view label;  // for people
  bool is_remedy = false;  // a stabiliser, which a run can be given
};
inline constexpr std::array<VerdictPartRow, 13> kVerdictParts = {{
    {"recorded", "as recorded"},
    {"placebo", "placebo: another format of dv"},
    {"alone_guilty", "only the guilty site rounded"},
    {"unbiased", "guilty site, stochastic rounding"},
    {"wide_pv", "PV in FP32"},
    {"wide_output", "wide_output", true},
    {"consistent", "consistent", true},
    {"zero_sum", "zero_sum", true},
    {"zero_sum_all", "zero_sum on all heads", true},
    {"cured", "guilty site in FP32"},
    {"control_placebo", "placebo of the control"},
    {"slower", "FP32, a quarter of the learning rate"},
    {"control", "control: all in FP32"},
}};
inline constexpr size_t kVerdictPartCount = kVerdictParts.size();

constexpr const VerdictPartRow& row_of(VerdictPart part) { return kVerdictParts[static_cast<size_t>(part)]; }
constexpr std::string_view name(VerdictPart part) { return row_of(part).name; }
constexpr std::optional<VerdictPart> verdict_part(std::string_view name) {
  for (size_t n = 0; n < kVerdictPartCount; ++n)
    if (kVerdictParts[n].name == name) return static_cast<VerdictPart>(n);
  return {};
}
static_assert(verdict_part("recorded") == VerdictPart::recorded &&
              verdict_part("zero_sum_all") == VerdictPart::zero_sum_all &&
              verdict_part("control") == VerdictPart::control);
static_assert(static_cast<size_t>(VerdictPart::control) + 1 == kVerdictPartCount);

}  // namespace evenkeel
