// The main function of the tests that need a GPU: says so and leaves with 77 (skipped) where there is none.
// With EVENKEEL_SMALL=1 only tests on small shapes run, for compute-sanitizer, under which everything is slow.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "gpu/device.h"

namespace {

constexpr const char* kSmall =
    "*Small*:*.small_*:AnyPlan.every_stabiliser_and_head_size_within_the_bound:"
    "AnyPlan.packed_sequences_as_padded_ones:"
    "AnyPlan.facts_as_the_cpu_has_them";
constexpr int kSkipped = 77;

int skipped(const std::string& why) {
  fmt::print("skipped: {}\n", why);
  return kSkipped;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const evenkeel::CudaDevice device = evenkeel::cuda_device();
  if (!device.present) return skipped(fmt::format("no GPU ({})", device.why));
  fmt::print("on {}, compute capability {}.{}\n", device.name, device.major, device.minor);
  if (std::getenv("EVENKEEL_SMALL")) testing::GTEST_FLAG(filter) = kSmall;
  const int code = RUN_ALL_TESTS();
  return testing::UnitTest::GetInstance()->test_to_run_count() == 0 ? skipped("it has no such test") : code;
}
