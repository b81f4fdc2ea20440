// Ranks on a GPU: sums in its memory, NCCL as far as one GPU goes, and training that no number of ranks changes.
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>

#include "attention/device_memory.h"
#include "base/error.h"
#include "base/whole_file.h"
#include "rank_cases.h"
#include "training/checkpoint.h"
#include "training/device_ranks.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

TEST(DeviceFloats, add_and_copy_as_the_host_does) {
  DeviceStream stream;
  const auto memory = make_device_memory(stream.get());
  for (int64_t count : {int64_t{1}, int64_t{255}, int64_t{257}, int64_t{3000001}}) {
    std::vector<float> left(static_cast<size_t>(count)), right(left.size()), found(left.size());
    for (size_t n = 0; n < left.size(); ++n) {
      left[n] = std::ldexp(static_cast<float>(n % 1013) - 500.3f, static_cast<int>(n % 61) - 40);
      right[n] = std::ldexp(static_cast<float>(n % 977) - 480.7f, static_cast<int>(n % 53) - 30);
    }
    left[0] = 1e-45f;  // subnormal
    right[0] = -0.0f;
    const auto a = memory->make(count), b = memory->make(count), c = memory->make(count);
    memory->from_host(a.get(), left.data(), count);
    memory->from_host(b.get(), right.data(), count);
    memory->copy(c.get(), b.get(), count);
    memory->add(c.get(), a.get(), count);
    memory->to_host(found.data(), c.get(), count);
    host_memory().add(right.data(), left.data(), count);
    EXPECT_EQ(std::memcmp(found.data(), right.data(), found.size() * sizeof(float)), 0) << count;
  }
}

TEST(Nccl, is_found_and_joins_a_job_of_one) {
  DeviceStream stream;
  Ranks alone;
  std::string why;
  const auto link = connect_nccl(alone, stream.get(), why);
  if (!link) GTEST_SKIP() << why;
  EXPECT_TRUE(why.starts_with("NCCL 2.")) << why;
  const auto memory = make_device_memory(stream.get());
  const auto from = memory->make(5), to = memory->make(5);
  const std::vector<float> values = {1, 2, 3, 4, 5};
  std::vector<float> found(5);
  memory->from_host(from.get(), values.data(), 5);
  link->exchange({{from.get(), 5}}, {{to.get(), 5}});
  memory->to_host(found.data(), to.get(), 5);
  EXPECT_EQ(found, values);
}

// Ranks that share the GPU, so that their sums go through the host; ranks with a GPU each use NCCL, where there are some.
TEST(RanksOnGpu, no_number_of_ranks_changes_a_bit) {
  const fs::path folder = fs::temp_directory_path() / fmt::format("evenkeel-ranks-gpu-{}", getpid());
  fs::create_directories(folder);
  {
    std::ofstream text(folder / "text.txt");
    for (int n = 0; n < 2000; ++n)
      text << "the " << (n % 7 == 0 ? "keel" : "sail") << " is " << n % 10 << ".\n";
  }
  std::string expected;
  for (int size : {1, 2, 4}) {
    const fs::path run = folder / fmt::format("run-{}", size);
    const std::vector<std::string> words = {
        EVENKEEL_PROGRAM, "train", "--preset", "micro",  "--data",  folder / "text.txt",
        "--backend",      "cuda",  "--plan",   "flash2", "--steps", "20",
        "--accumulate",   "4",     "--out",    run};
    const int port = free_port();
    std::vector<Process> ranks;
    for (int r = 0; r < size; ++r)
      ranks.emplace_back(words,
                         std::map<std::string, std::string>{{"RANK", std::to_string(r)},
                                                            {"WORLD_SIZE", std::to_string(size)},
                                                            {"MASTER_ADDR", "127.0.0.1"},
                                                            {"MASTER_PORT", std::to_string(port)}},
                         folder / fmt::format("rank-{}", r));
    for (Process& rank : ranks) ASSERT_EQ(rank.wait(), 0) << rank.err();
    if (size > 1) std::printf("%s", ranks[0].out().substr(0, 600).c_str());
    std::string found;
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
      found += read_whole_file(find_checkpoints(run / "checkpoints").back().folder / file, size_t{1} << 30);
    if (size == 1) expected = found;
    EXPECT_TRUE(found == expected) << size;
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace evenkeel
