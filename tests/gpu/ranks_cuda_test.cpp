// Ranks on a GPU: sums in its memory, NCCL as far as one GPU goes, and training that no number of ranks changes.
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_lines.h"
#include "base/whole_file.h"
#include "gpu/device_memory.h"
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
class RanksOnGpu : public testing::Test {
 protected:
  RanksOnGpu() {
    fs::create_directories(folder);
    std::ofstream text(folder / "text.txt");
    for (int n = 0; n < 2000; ++n)
      text << "the " << (n % 7 == 0 ? "keel" : "sail") << " is " << n % 10 << ".\n";
  }
  ~RanksOnGpu() override { fs::remove_all(folder); }

  // A job of so many ranks, to its end. What rank 0 said.
  std::string run_job(int size, const std::vector<std::string>& words) const {
    std::vector<std::string> command = {EVENKEEL_PROGRAM, "train"};
    command.insert(command.end(), words.begin(), words.end());
    const int port = free_port();
    std::vector<Process> ranks;
    for (int r = 0; r < size; ++r)
      ranks.emplace_back(command,
                         std::map<std::string, std::string>{{"RANK", std::to_string(r)},
                                                            {"WORLD_SIZE", std::to_string(size)},
                                                            {"MASTER_ADDR", "127.0.0.1"},
                                                            {"EVENKEEL_SECRET", job_secret()},
                                                            {"MASTER_PORT", std::to_string(port)}},
                         folder / fmt::format("rank-{}", r));
    for (Process& rank : ranks) EXPECT_EQ(rank.wait(), 0) << rank.err();
    return ranks[0].out().substr(0, 600);
  }
  std::vector<std::string> training(const fs::path& run) const {
    return {"--preset", "micro",   "--data", folder / "text.txt", "--backend", "cuda",  "--plan",
            "flash2",   "--steps", "20",     "--accumulate",      "4",         "--out", run};
  }
  // The newest checkpoint's bytes, and every step's loss and norm of the gradient.
  static std::string result(const fs::path& run) {
    std::string found;
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
      found += read_whole_file(find_checkpoints(run / "checkpoints").back().folder / file, size_t{1} << 30);
    read_json_lines(run / "metrics.jsonl", [&](const JsonLine& line) {
      found += fmt::format("{} {} {}\n", line.object.at("step").dump(), line.object.at("loss").dump(),
                           line.object.at("gradient_norm").dump());
    });
    return found;
  }

  const fs::path folder = fs::temp_directory_path() / fmt::format("evenkeel-ranks-gpu-{}", getpid());
};

TEST_F(RanksOnGpu, no_number_of_ranks_changes_a_bit_sharded_or_not) {
  std::string expected;
  for (const bool shard : {false, true})
    for (int size : {1, 2, 4}) {
      const fs::path run = folder / fmt::format("run-{}-{}", size, shard);
      std::vector<std::string> words = training(run);
      if (shard) words.push_back("--shard-optimizer");
      const std::string said = run_job(size, words);
      if (size > 1) {
        std::printf("%s", said.c_str());
        EXPECT_EQ(said.find("optimiser states sharded") != std::string::npos, shard);
      }
      const std::string found = result(run);
      if (expected.empty()) expected = found;
      EXPECT_TRUE(found == expected) << size << " ranks, sharded: " << shard;
    }
}

// The second half again, from the checkpoint in the middle, with the other setting and another number of ranks.
TEST_F(RanksOnGpu, a_sharded_run_goes_on_unsharded_and_the_other_way_round) {
  for (const bool shard : {false, true}) {
    const fs::path run = folder / fmt::format("turned-{}", shard), settings = run / "config.toml";
    std::vector<std::string> words = training(run);
    words.insert(words.end(), {"--checkpoint-every", "10"});
    if (shard) words.push_back("--shard-optimizer");
    run_job(2, words);
    const std::string expected = result(run);
    const std::vector<Checkpoint> checkpoints = find_checkpoints(run / "checkpoints");
    ASSERT_EQ(checkpoints.size(), 2u);
    fs::remove_all(checkpoints.back().folder);
    write_whole_file(settings, with_shard_turned(read_whole_file(settings, 1 << 20)));
    const std::string said = run_job(4, {"--resume", run});
    EXPECT_NE(said.find("going on at step 10"), std::string::npos) << said;
    EXPECT_EQ(said.find("optimiser states sharded") != std::string::npos, !shard) << said;
    EXPECT_TRUE(result(run) == expected) << "sharded first: " << shard;
  }
}

}  // namespace
}  // namespace evenkeel
