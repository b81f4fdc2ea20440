// `evenkeel bench round`: the speed of round_array on one thread, every format and mode, as a ratio to memcpy
// of the same arrays. Each case is timed in turn with a memcpy of its own, round after round, so that
// whatever else the machine does touches both. The figures are medians over the rounds. Time is the thread's
// own CPU time: a thread that has to wait for its turn is not slow.
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench.h"
#include "numerics/cpu.h"
#include "numerics/round_array.h"

namespace evenkeel::cli {
// A namespace of its own: names as natural as the other benches have.
namespace round_bench {
namespace {

constexpr size_t kCount = size_t{4} << 20;  // 16 MiB each for source and target
constexpr int kRoundingRounds = 21;

struct Case {
  Rounding rounding;
  std::optional<double> target;  // none: measured, not judged
  std::vector<double> seconds, ratios;
};

// fp32 rounds nothing without saturate, and then only Inf: one row says it all.
std::vector<Case> cases() {
  std::vector<Case> list = {{parse_rounding("fp32/saturate"), {}, {}, {}}};
  for (const char* format : {"tf32", "bf16", "fp16", "e4m3", "e5m2", "e8m2", "e5m7"})
    for (std::string_view mode : kRoundingModeNames)
      list.push_back({parse_rounding(fmt::format("{}/{}", format, mode)), {}, {}, {}});
  list.push_back({parse_rounding("e4m3^8/saturate"), {}, {}, {}});
  // The targets are for CPUs with shifts by lane; the baseline is there to run at all.
  if (cpu_target() != CpuTarget::baseline)
    for (Case& c : list) c.target = c.rounding == Rounding{kBf16} ? 2.5 : 5.0;
  return list;
}

double thread_seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

template <class Action>
double seconds(const Action& action) {
  const double start = thread_seconds();
  action();
  return thread_seconds() - start;
}

double nanoseconds_each(double seconds_whole) { return seconds_whole * 1e9 / static_cast<double>(kCount); }

bool hit(const Case& c) { return !c.target || median(c.ratios) <= *c.target; }

void print_table(const std::vector<Case>& list, double copy) {
  fmt::print("round_array, one thread, {} Mi floats, out of place, kernels: {}\n", kCount >> 20,
             name(cpu_target()));
  fmt::print("memcpy {:.3f} ns an element; medians of {} rounds; spread: quartiles of the ratio\n\n",
             nanoseconds_each(copy), kRoundingRounds);
  fmt::print("{:<24}{:>12}{:>10}{:>16}{:>9}\n", "rounding", "ns/element", "x memcpy", "spread", "target");
  for (const Case& c : list) {
    std::string format = to_string(c.rounding);
    if (c.rounding.mode == RoundingMode::nearest_even && !c.rounding.saturate) format += "/nearest_even";
    const std::string spread =
        fmt::format("{:.2f}..{:.2f}", quantile(c.ratios, 0.25), quantile(c.ratios, 0.75));
    fmt::print("{:<24}{:>12.3f}{:>10.2f}{:>16}{:>9}  {}\n", format, nanoseconds_each(median(c.seconds)),
               median(c.ratios), spread, c.target ? fmt::format("{:.1f}", *c.target) : "-",
               !c.target ? ""
               : hit(c)  ? "ok"
                         : "MISS");
  }
}

void print_json(const std::vector<Case>& list, double copy, bool ok) {
  nlohmann::ordered_json out = {{"bench", "round"},
                                {"kernels", name(cpu_target())},
                                {"threads", 1},
                                {"elements", kCount},
                                {"rounds", kRoundingRounds},
                                {"memcpy_ns", nanoseconds_each(copy)},
                                {"ok", ok},
                                {"results", nlohmann::ordered_json::array()}};
  for (const Case& c : list)
    out["results"].push_back(
        {{"rounding", to_string(c.rounding)},
         {"format", to_string(c.rounding.format)},
         {"mode", kRoundingModeNames[static_cast<size_t>(c.rounding.mode)]},
         {"ns", nanoseconds_each(median(c.seconds))},
         {"ratio", median(c.ratios)},
         {"ratio_quartiles", {quantile(c.ratios, 0.25), quantile(c.ratios, 0.75)}},
         {"target", c.target ? nlohmann::ordered_json(*c.target) : nlohmann::ordered_json(nullptr)},
         {"ok", hit(c)}});
  fmt::print("{}\n", out.dump(2));
}

}  // namespace
}  // namespace round_bench

int bench_round(bool check, bool json) {
  using namespace round_bench;
  std::vector<Case> list = cases();
  std::vector<float> source(kCount), target(kCount);
  // 40 binades around 2^-8, both signs: every format meets its normals, subnormals, underflow and overflow.
  for (size_t i = 0; i < kCount; ++i)
    source[i] = std::ldexp(random_unit({1}, i) - 0.5f, static_cast<int>(random_bits({2}, i) % 40) - 28);

  std::vector<double> copies;
  for (int round = 0; round <= kRoundingRounds; ++round)
    for (Case& c : list) {
      const double copy = seconds([&] { std::memcpy(target.data(), source.data(), kCount * sizeof(float)); });
      const double own = seconds([&] { round_array(c.rounding, target.data(), source.data(), kCount, {3}); });
      if (round == 0) continue;  // warms up
      copies.push_back(copy);
      c.seconds.push_back(own);
      c.ratios.push_back(own / copy);
    }

  const double copy = median(copies);
  const bool ok = std::all_of(list.begin(), list.end(), hit);
  if (json)
    print_json(list, copy, ok);
  else
    print_table(list, copy);
  return check && !ok ? 1 : 0;
}

}  // namespace evenkeel::cli
