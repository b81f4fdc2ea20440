// Ranks as processes of the program, started as launchers do: the same bits, and every way to end.
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/whole_file.h"
#include "rank_cases.h"
#include "run_program.h"
#include "training/trainer.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

class RanksCli : public ::testing::Test {
 protected:
  void SetUp() override {
    folder = fs::temp_directory_path() / fmt::format("evenkeel-ranks-cli-{}-{}", getpid(), count++);
    fs::create_directories(folder);
    std::ofstream text(folder / "text.txt");
    for (int n = 0; n < 400; ++n)
      text << "the " << (n % 7 == 0 ? "keel" : "sail") << " is " << n % 10 << ".\n";
  }
  void TearDown() override { fs::remove_all(folder); }

  Words training(const std::string& run, int steps) const {
    return {EVENKEEL_PROGRAM,
            "train",
            "--preset",
            "micro",
            "--data",
            folder / "text.txt",
            "--set",
            "model.layers = 1",
            "--set",
            "model.width = 16",
            "--set",
            "model.heads = 2",
            "--set",
            "model.context = 12",
            "--sequences",
            "8",
            "--accumulate",
            "4",
            "--plan",
            "fp32",
            "--steps",
            std::to_string(steps),
            "--checkpoint-every",
            "20",
            "--threads",
            "1",
            "--out",
            folder / run};
  }
  Words going_on(const std::string& run) const {
    return {EVENKEEL_PROGRAM, "train", "--threads", "1", "--resume", folder / run};
  }

  using Variables = std::map<std::string, std::string>;
  Process rank_of(int rank, int size, int port, const Words& words, Variables more = {}) const {
    more["RANK"] = std::to_string(rank);
    more["WORLD_SIZE"] = std::to_string(size);
    more["MASTER_ADDR"] = "127.0.0.1";
    more["MASTER_PORT"] = std::to_string(port);
    return Process(words, more, folder / fmt::format("rank-{}", rank));
  }
  std::vector<Process> job(int size, const Words& words, const Variables& more = {}) const {
    std::vector<Process> ranks;
    const int port = free_port();
    for (int r = 0; r < size; ++r) ranks.push_back(rank_of(r, size, port, words, more));
    return ranks;
  }
  static void expect_codes(std::vector<Process>& ranks, int code) {
    for (size_t r = 0; r < ranks.size(); ++r)
      EXPECT_EQ(ranks[r].wait(), code) << r << "\n" << ranks[r].out() << ranks[r].err();
  }

  // All that must not depend on who computed it: metrics but for speed and backend, batches, the newest checkpoint.
  std::string result(const std::string& run) const {
    std::string text;
    read_json_lines(folder / run / "metrics.jsonl", [&](const JsonLine& line) {
      nlohmann::json object = line.object;
      object.erase("tokens_per_second");
      object.erase("backend");  // said once a start
      text += object.dump() + "\n";
    });
    text += read_whole_file(folder / run / "batches.bin", 1 << 26);
    const auto checkpoints = find_checkpoints(folder / run / "checkpoints");
    EXPECT_FALSE(checkpoints.empty());
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
      text += read_whole_file(checkpoints.back().folder / file, 1 << 26);
    return text;
  }
  std::string result_of_one(int steps) const {
    Process one(training("one", steps), {}, folder / "alone");
    EXPECT_EQ(one.wait(), 0) << one.err();
    return result("one");
  }

  // Returns once the run has a checkpoint: from then on it is in the middle of its steps.
  void await_checkpoint(const std::string& run) const {
    while (find_checkpoints(folder / run / "checkpoints").empty()) std::this_thread::yield();
  }
  // No file of a run under a temporary name.
  void expect_nothing_half_written(const std::string& run) const {
    for (const auto& entry : fs::recursive_directory_iterator(folder / run))
      EXPECT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path();
  }

  fs::path folder;
  static inline int count = 0;
};

constexpr int kEndless = 1000000;  // steps of a run that is ended from outside

TEST_F(RanksCli, started_by_environment_variables_give_the_same_bits) {
  const std::string expected = result_of_one(30);
  for (int size : {1, 2, 4}) {
    const std::string run = fmt::format("run-{}", size);
    std::vector<Process> ranks = job(size, training(run, 30));
    expect_codes(ranks, 0);
    EXPECT_TRUE(result(run) == expected) << size;
    for (int r = 1; r < size; ++r)
      EXPECT_EQ(ranks[static_cast<size_t>(r)].out(), "");  // rank 0 speaks for all
  }
  Words sharded = training("sharded", 30);
  sharded.push_back("--shard-optimizer");
  std::vector<Process> ranks = job(4, sharded);
  expect_codes(ranks, 0);
  EXPECT_NE(ranks[0].out().find(
                "4 ranks, 1 of the 4 parts of a step each; sums through the host; optimiser states sharded"),
            std::string::npos);
  EXPECT_TRUE(result("sharded") == expected);
}

// --- endings

TEST_F(RanksCli, a_killed_rank_ends_the_job_and_the_run_goes_on_with_another_number) {
  for (size_t victim : {size_t{0}, size_t{2}}) {
    const std::string run = fmt::format("run-{}", victim);
    std::vector<Process> ranks = job(4, training(run, kEndless));
    await_checkpoint(run);
    kill(ranks[victim].pid(), SIGKILL);
    for (size_t r = 0; r < ranks.size(); ++r) {
      EXPECT_EQ(ranks[r].wait(), r == victim ? -SIGKILL : 3);
      if (r == victim) continue;
      EXPECT_EQ(ranks[r].err(),
                fmt::format("evenkeel train: rank {}: rank {} ended without a word: killed, crashed or out "
                            "of memory\n",
                            r, victim));
    }
    if (victim == 0)
      continue;  // whose files a kill may have caught half written; the next start removes them
    expect_nothing_half_written(run);
  }
  // To an end that can be compared.
  const std::string run = "run-2";
  const auto steps = find_checkpoints(folder / run / "checkpoints").back().step + 10;
  std::string config = read_whole_file(folder / run / "config.toml", 1 << 20);
  const std::string before = fmt::format("steps = {}", kEndless);
  ASSERT_NE(config.find(before), std::string::npos);
  config.replace(config.find(before), before.size(), fmt::format("steps = {}", steps));
  write_whole_file(folder / run / "config.toml", config);
  std::vector<Process> ranks = job(2, going_on(run));
  expect_codes(ranks, 0);
  EXPECT_TRUE(result(run) == result_of_one(static_cast<int>(steps)));
}

TEST_F(RanksCli, a_rank_that_fails_ends_the_job_with_its_cause) {
  const int port = free_port();
  std::vector<Process> ranks;
  for (int r = 0; r < 4; ++r) {
    Words words = training("run", 30);
    if (r == 2)
      std::replace(words.begin(), words.end(), (folder / "text.txt").string(), std::string("/no/such"));
    ranks.push_back(rank_of(r, 4, port, words));
  }
  expect_codes(ranks, 3);
  for (size_t r = 0; r < 4; ++r) {
    EXPECT_NE(ranks[r].err().find(fmt::format("rank {}: ", r)), std::string::npos);
    EXPECT_EQ(ranks[r].err().find("rank 2 ended the job: ") == std::string::npos, r == 2) << ranks[r].err();
    EXPECT_NE(ranks[r].err().find("/no/such"), std::string::npos) << ranks[r].err();
  }
  EXPECT_FALSE(fs::exists(folder / "run"));
}

TEST_F(RanksCli, a_request_to_stop_at_one_rank_saves_and_ends_all) {
  for (size_t asked : {size_t{0}, size_t{3}}) {
    const std::string run = fmt::format("run-{}", asked);
    std::vector<Process> ranks = job(4, training(run, kEndless));
    await_checkpoint(run);
    kill(ranks[asked].pid(), asked == 0 ? SIGINT : SIGTERM);
    expect_codes(ranks, 0);
    const int64_t step = find_checkpoints(folder / run / "checkpoints").back().step;
    EXPECT_NE(ranks[0].out().find(fmt::format("stopped after step {}; go on with: evenkeel train --resume {}",
                                              step, (folder / run).string())),
              std::string::npos)
        << ranks[0].out();
    expect_nothing_half_written(run);
  }
}

TEST_F(RanksCli, a_missing_rank_is_named) {
  const int port = free_port();
  std::vector<Process> ranks;
  for (int r = 0; r < 3; ++r)
    ranks.push_back(rank_of(r, 4, port, training("run", 5), {{"EVENKEEL_JOIN_SECONDS", "1"}}));
  expect_codes(ranks, 3);
  for (const Process& rank : ranks)
    EXPECT_NE(rank.err().find("expected 4 ranks within 1 seconds, without these: 3"), std::string::npos)
        << rank.err();
  EXPECT_FALSE(fs::exists(folder / "run"));

  Process alone = rank_of(1, 2, port, training("run", 5), {{"EVENKEEL_JOIN_SECONDS", "1"}});
  EXPECT_EQ(alone.wait(), 3);
  EXPECT_NE(alone.err().find(fmt::format("rank 0 did not answer at 127.0.0.1:{} within 1 seconds", port)),
            std::string::npos)
      << alone.err();
}

TEST_F(RanksCli, a_taken_port_is_named_and_what_listens_there_is_not_trusted) {
  const BoundSocket taken;
  ASSERT_EQ(listen(taken.number, 8), 0);
  Process first = rank_of(0, 2, taken.port, training("run", 5));
  EXPECT_EQ(first.wait(), 3);
  EXPECT_NE(first.err().find(
                fmt::format("127.0.0.1:{}: rank 0 cannot listen there: Address already in use", taken.port)),
            std::string::npos)
      << first.err();
  // The other rank meets a stranger, who answers in another language.
  Process second = rank_of(1, 2, taken.port, training("run", 5));
  const int stranger = accept(taken.number, nullptr, nullptr);
  const std::string answer(200, 'H');
  ASSERT_EQ(write(stranger, answer.data(), answer.size()), static_cast<ssize_t>(answer.size()));
  EXPECT_EQ(second.wait(), 3);
  EXPECT_NE(second.err().find("expected rank 0 of 2"), std::string::npos) << second.err();
  EXPECT_NE(second.err().find("found something else"), std::string::npos) << second.err();
  close(stranger);
}

TEST_F(RanksCli, strangers_at_the_door_are_passed_over) {
  const int port = free_port();
  Process first = rank_of(0, 2, port, training("run", 5));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  for (const char* words : {"", "GET / HTTP/1.1\r\nHost: a\r\n\r\nand more than a greeting has"}) {
    int stranger = -1;
    do {  // until rank 0 listens
      if (stranger >= 0) close(stranger);
      stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    } while (connect(stranger, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0);
    EXPECT_EQ(write(stranger, words, strlen(words)), static_cast<ssize_t>(strlen(words)));
    close(stranger);
  }
  Process second = rank_of(1, 2, port, training("run", 5));
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
}

// A rank in the middle of something long is not waited for: it ends by itself when another one dies. The ranks are
// this program again, which runs the test below.
TEST_F(RanksCli, a_rank_that_never_comes_to_its_next_exchange_ends_too) {
  const Words words = {"/proc/self/exe", "--gtest_filter=Sleeper.*", "--gtest_brief=1"};
  std::vector<Process> ranks = job(2, words, {{"EVENKEEL_TEST_SLEEPER", (folder / "asleep").string()}});
  while (!fs::exists(folder / "asleep")) std::this_thread::yield();
  kill(ranks[0].pid(), SIGKILL);
  EXPECT_EQ(ranks[1].wait(), 3);
  EXPECT_NE(ranks[1].err().find("evenkeel: rank 0 ended without a word"), std::string::npos)
      << ranks[1].err();
}
TEST(Sleeper, joins_and_sleeps) {
  const char* file = getenv("EVENKEEL_TEST_SLEEPER");
  if (!file) GTEST_SKIP() << "only for a_rank_that_never_comes_to_its_next_exchange_ends_too";
  const auto ranks = Ranks::join(find_launch([](const char* name) { return std::getenv(name); }), "test");
  if (ranks->rank() == 1) std::ofstream(file) << "asleep";
  for (;;) pause();
}

// --- mpirun, where it and the module are

class RanksMpi : public RanksCli {
 protected:
  void SetUp() override {
    RanksCli::SetUp();
    if (!fs::exists(fs::path(EVENKEEL_PROGRAM).parent_path() / "libevenkeel_mpi.so"))
      GTEST_SKIP() << "built without MPI";
    if (run_shell("command -v mpirun").code != 0) GTEST_SKIP() << "no mpirun";
  }
  Process mpirun(int size, const Words& words) const {
    Words all = {"mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
                 "-n",     std::to_string(size)};
    all.insert(all.end(), words.begin(), words.end());
    return Process(all, {}, folder / "mpirun");
  }
};

TEST_F(RanksMpi, started_by_mpirun_give_the_same_bits) {
  const std::string expected = result_of_one(30);
  for (int size : {1, 2, 4}) {
    Process job = mpirun(size, training(fmt::format("run-{}", size), 30));
    EXPECT_EQ(job.wait(), 0) << job.err();
    EXPECT_TRUE(result(fmt::format("run-{}", size)) == expected) << size;
  }
}

TEST_F(RanksMpi, a_rank_that_dies_or_fails_ends_the_job) {
  // A shell between mpirun and the program knows which rank it is.
  Words words = {"sh", "-c", "echo $$ >\"$0-$OMPI_COMM_WORLD_RANK\"; exec \"$@\"", folder / "pid"};
  const Words program = training("run", kEndless);
  words.insert(words.end(), program.begin(), program.end());
  Process killed = mpirun(4, words);
  await_checkpoint("run");
  kill(std::stoi(read_whole_file(folder / "pid-2", 100)), SIGKILL);
  EXPECT_NE(killed.wait(), 0);
  EXPECT_NE(killed.err().find("rank 2"), std::string::npos) << killed.err();
  fs::remove_all(folder / "run");

  words[2] = "[ $OMPI_COMM_WORLD_RANK != 2 ] || set -- \"$@\" --seed 77; exec \"$@\"";
  Process failed = mpirun(4, words);
  EXPECT_EQ(failed.wait(), 3) << failed.err();
  EXPECT_NE(failed.err().find("expected 'seed = 1' as on rank 0, found 'seed = 77' on rank 2"),
            std::string::npos)
      << failed.err();
  EXPECT_FALSE(fs::exists(folder / "run"));
}

TEST_F(RanksCli, mpirun_without_the_module_says_what_to_do) {
  // The program alone in a folder, where no module lies beside it.
  fs::copy_file(EVENKEEL_PROGRAM, folder / "evenkeel");
  Words words = training("run", 5);
  words[0] = folder / "evenkeel";
  Process rank(words, {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "0"}}, folder / "alone");
  EXPECT_EQ(rank.wait(), 3);
  EXPECT_NE(rank.err().find("install libopenmpi-dev and build again, or name a meeting place"),
            std::string::npos)
      << rank.err();
}

}  // namespace
}  // namespace evenkeel
