// The parts that replays play in a verdict: one row each. The replays are made by isolate. The file verdict.json lists them under these
// names, and the page shows every one that is there. A new row needs a trial in diagnosis/verdict.h; the page draws it as it is.
#pragma once

#include <algorithm>
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
  int remedy = 0;  // a stabiliser, which a run can be given: the place in which it is proposed, 1 first
};
inline constexpr std::array<VerdictPartRow, 13> kVerdictParts = {{
    {"recorded", "as recorded"},
    {"placebo", "placebo: another format of dv"},
    {"alone_guilty", "only the guilty site rounded"},
    {"unbiased", "guilty site, stochastic rounding"},
    {"wide_pv", "PV in FP32"},
    {"wide_output", "wide_output", 4},
    {"consistent", "consistent", 3},
    {"zero_sum", "zero_sum", 1},
    {"zero_sum_all", "zero_sum on all heads", 2},
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
// The remedies, the smallest change first: of those that heal, the first is proposed, on the page as in the next command.
inline constexpr auto kRemedies = [] {
  constexpr auto count = static_cast<size_t>(std::count_if(kVerdictParts.begin(), kVerdictParts.end(),
                                                           [](const auto& row) { return row.remedy > 0; }));
  std::array<VerdictPart, count> remedies{};
  for (size_t n = 0; n < kVerdictPartCount; ++n)
    if (kVerdictParts[n].remedy > 0)
      remedies.at(static_cast<size_t>(kVerdictParts[n].remedy - 1)) = static_cast<VerdictPart>(n);
  return remedies;
}();
static_assert(kRemedies[0] == VerdictPart::zero_sum && kRemedies.back() == VerdictPart::wide_output);
static_assert(verdict_part("recorded") == VerdictPart::recorded &&
              verdict_part("zero_sum_all") == VerdictPart::zero_sum_all &&
              verdict_part("control") == VerdictPart::control);
static_assert(static_cast<size_t>(VerdictPart::control) + 1 == kVerdictPartCount);

}  // namespace evenkeel
