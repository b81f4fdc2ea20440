// The choice among algorithms on a pretended machine, whose clock is what its runs have taken.
#include "model/quickest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace evenkeel {
namespace {

struct Machine {
  std::vector<double> seconds;                                          // of a run of each way, cold
  std::function<double(double)> slowness = [](double) { return 1.0; };  // at a time
  double time = 0;
  std::vector<int> runs = std::vector<int>(seconds.size());

  Stopwatch watch() {
    return {[this](size_t way, int count) {
              const double one = seconds[way] * slowness(time);
              if (one < 1e3) time += one * count;
              runs[way] += count;
              return one;
            },
            [this] { return time; }};
  }
};
constexpr double kRefused = std::numeric_limits<double>::infinity();

TEST(Quickest, is_found_wherever_it_stands) {
  for (size_t best = 0; best < 12; ++best) {
    Machine machine{std::vector<double>(12, 2e-3)};
    machine.seconds[best] = 1.9e-3;
    EXPECT_EQ(quickest(12, machine.watch()), best);
  }
}

// A way that is timed later is timed on a slower machine: 8 % slower at the end, where the ways differ by 2 %.
TEST(Quickest, is_found_on_a_machine_that_slows_down) {
  Machine machine{{1.04e-3, 1.02e-3, 1.06e-3, 1.00e-3}};
  machine.slowness = [](double time) { return 1 + std::min(0.08, 2 * time); };
  EXPECT_EQ(quickest(4, machine.watch()), 3u);
}

TEST(Quickest, one_interruption_is_not_held_against_it) {
  Machine machine{{1.1e-3, 1.0e-3}};
  int calls = 0;
  Stopwatch watch = machine.watch();
  const auto seconds = watch.seconds;
  watch.seconds = [&](size_t way, int count) {
    return seconds(way, count) * (++calls == 8 ? 100 : 1);
  };  // turn 2 of way 1
  EXPECT_EQ(quickest(2, watch), 1u);
}

// What a way took before the turns says who is in them, not who wins.
TEST(Quickest, the_first_impression_does_not_decide) {
  Machine machine{{1.1e-3, 1.0e-3}};
  int calls = 0;
  Stopwatch watch = machine.watch();
  const auto seconds = watch.seconds;
  watch.seconds = [&](size_t way, int count) {
    return seconds(way, count) * (++calls == 4 ? 3 : 1);
  };  // way 1, once its kernel is loaded
  EXPECT_EQ(quickest(2, watch), 1u);
}

TEST(Quickest, of_equal_ones_the_first) {
  Machine machine{std::vector<double>(9, 1e-4)};
  EXPECT_EQ(quickest(9, machine.watch()), 0u);
}

TEST(Quickest, those_that_are_refused_are_left_out) {
  Machine machine{{kRefused, 2e-3, kRefused, 1e-3}};
  EXPECT_EQ(quickest(4, machine.watch()), 3u);
  EXPECT_EQ(machine.runs[0], 1);
  Machine none{{kRefused, kRefused}};
  EXPECT_EQ(quickest(2, none.watch()), 0u);
}

// Products of 7 ms: twelve ways, then three rounds of four. Short ones: all 64.
TEST(Quickest, takes_no_longer_than_it_says) {
  Machine slow{std::vector<double>(64, 7e-3)};
  quickest(64, slow.watch());
  EXPECT_LT(slow.time, (12 * 2 + 3 * 4) * 7e-3 + 1e-9);
  Machine fast{std::vector<double>(64, 1e-4)};
  quickest(64, fast.watch());
  EXPECT_EQ(std::ranges::count(fast.runs, 0), 0);
  EXPECT_LT(fast.time, 60e-3 + 5e-3);
}

}  // namespace
}  // namespace evenkeel
