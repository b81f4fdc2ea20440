// Ranks as processes of the program, started as launchers do: the same bits, and every way to end.
#include <gtest/gtest.h>
#include <ifaddrs.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/whole_file.h"
#include "rank_cases.h"
#include "run_program.h"
#include "training/secure_channel.h"
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
  Process rank_of(int rank, int size, int port, const Words& words, Variables more = {},
                  const std::string& output = "") const {
    more["RANK"] = std::to_string(rank);
    more["WORLD_SIZE"] = std::to_string(size);
    more.emplace("MASTER_ADDR", "127.0.0.1");
    more["MASTER_PORT"] = std::to_string(port);
    more.emplace("EVENKEEL_SECRET", job_secret());
    return Process(words, more, folder / (output.empty() ? fmt::format("rank-{}", rank) : output));
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
      EXPECT_EQ(ranks[static_cast<size_t>(r)].out(), "");  // rank 0 prints for all
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
    EXPECT_NE(
        ranks[0].out().find(fmt::format("stopped after step {}; continue with: evenkeel train --resume {}",
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

// --- the secret

int connect_to(const std::string& address, int port) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, address.c_str(), &to.sin_addr);
  const int number = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(number, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0) return number;
  close(number);
  return -1;
}
int connect_when_it_listens(int port) {
  for (int number;;)
    if ((number = connect_to("127.0.0.1", port)) >= 0) return number;
}

// Stands between rank 1 and rank 0 and passes on every byte, but for one that it alters: byte `at` of what goes up (to
// rank 0) or down on the `which`-th connection.
class AlteringProxy {
 public:
  AlteringProxy(int port_of_first, int which, bool up, size_t at) {
    listen(door_.number, 8);
    thread_ = std::thread([=, this] {
      for (int n = 0;;) {
        const int caller = accept(door_.number, nullptr, nullptr);
        if (caller < 0) return;
        const int first = connect_to("127.0.0.1", port_of_first);
        if (first < 0) {  // not there yet, or gone
          close(caller);
          continue;
        }
        for (const bool goes_up : {true, false})
          streams_.emplace_back([=] {
            pass(goes_up ? caller : first, goes_up ? first : caller, n == which && goes_up == up, at);
          });
        ++n;
      }
    });
  }
  ~AlteringProxy() {
    shutdown(door_.number, SHUT_RDWR);
    thread_.join();
    for (std::thread& stream : streams_) stream.join();
  }
  int port() const { return door_.port; }

 private:
  static void pass(int from, int to, bool alters, size_t at) {
    char bytes[4096];
    size_t seen = 0;
    for (ssize_t count; (count = read(from, bytes, sizeof bytes)) > 0; seen += static_cast<size_t>(count)) {
      if (alters && at >= seen && at < seen + static_cast<size_t>(count)) bytes[at - seen] ^= 0x10;
      for (ssize_t sent = 0, now; sent < count; sent += now)
        if ((now = send(to, bytes + sent, static_cast<size_t>(count - sent), MSG_NOSIGNAL)) <= 0) break;
    }
    shutdown(to, SHUT_WR);
  }
  BoundSocket door_;
  std::vector<std::thread> streams_;
  std::thread thread_;
};

TEST_F(RanksCli, one_altered_byte_ends_the_job_on_both_ranks) {
  struct Alteration {
    const char* what;
    int connection;
    bool up;
    size_t at;
  };
  constexpr size_t kHello = sizeof(Hello), kProof = sizeof(Digest);
  const Alteration alterations[] = {
      {"a rank's number as it calls", 0, true, 8},    {"its proof", 0, true, kHello + 3},
      {"rank 0's challenge", 0, false, 12},           {"a header", 0, true, kHello + kProof + 4},
      {"numbers for rank 0", 0, true, 20000},         {"numbers from rank 0", 0, false, 20001},
      {"the hello of the alarm channel", 1, true, 20}};
  // All at once: where ranks do not come together, rank 0 goes on waiting until its time is over.
  std::vector<std::unique_ptr<AlteringProxy>> proxies;
  std::vector<Process> ranks;
  for (const Alteration& a : alterations) {
    const int port = free_port();
    const Words words = training(fmt::format("run-{}", proxies.size()), 30);
    proxies.push_back(std::make_unique<AlteringProxy>(port, a.connection, a.up, a.at));
    for (int r = 0; r < 2; ++r) {
      Variables variables = {{"EVENKEEL_JOIN_SECONDS", "20"}};
      const std::string output = fmt::format("rank-{}-{}", r, proxies.size());
      ranks.push_back(rank_of(r, 2, r == 0 ? port : proxies.back()->port(), words, variables, output));
    }
  }
  for (size_t n = 0; n < ranks.size(); ++n) {
    Process& rank = ranks[n];
    const char* const what = alterations[n / 2].what;
    EXPECT_EQ(rank.wait(), 3) << what << rank.out();
    EXPECT_NE(rank.err().find("authentication failed"), std::string::npos) << what << ": " << rank.err();
    EXPECT_EQ((rank.out() + rank.err()).find(job_secret()), std::string::npos);
  }
}

TEST_F(RanksCli, a_proxy_that_alters_nothing_is_no_harm) {
  const int port = free_port();
  AlteringProxy proxy(port, -1, true, 0);
  std::vector<Process> ranks;
  ranks.push_back(rank_of(0, 2, port, training("run", 5)));
  ranks.push_back(rank_of(1, 2, proxy.port(), training("run", 5)));
  expect_codes(ranks, 0);
}

TEST_F(RanksCli, strangers_take_no_seat_and_end_no_job) {
  const int port = free_port();
  Process first = rank_of(0, 2, port, training("run", 5));
  std::vector<int> strangers;
  Hello hello;  // as rank 1 would say it
  hello.rank = 1;
  hello.size = 2;
  const std::string as_rank_1(reinterpret_cast<const char*>(&hello), sizeof hello);
  hello.rank = 7;
  hello.size = 9;
  const std::string as_rank_7(reinterpret_cast<const char*>(&hello), sizeof hello);
  for (const std::string& words : {std::string(), as_rank_1.substr(0, 20), as_rank_1, as_rank_1, as_rank_7,
                                   as_rank_1 + std::string(sizeof(Digest), '\0'), std::string(5000, 'x')}) {
    strangers.push_back(connect_when_it_listens(port));
    EXPECT_GE(send(strangers.back(), words.data(), words.size(), MSG_NOSIGNAL), 0);
  }
  for (int n = 0; n < 100; ++n)
    strangers.push_back(connect_when_it_listens(port));  // and more, who are silent
  Process second = rank_of(1, 2, port, training("run", 5));
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  for (int stranger : strangers) close(stranger);
}

TEST_F(RanksCli, a_rank_with_another_secret_is_told_so_and_takes_no_seat) {
  const int port = free_port();
  const std::string other = "another secret of some length";
  Process first = rank_of(0, 2, port, training("run", 5), {{"EVENKEEL_JOIN_SECONDS", "5"}});
  Process second = rank_of(1, 2, port, training("run", 5), {{"EVENKEEL_SECRET", other}});
  EXPECT_EQ(second.wait(), 3);
  EXPECT_NE(second.err().find("rank 1: authentication failed"), std::string::npos) << second.err();
  EXPECT_NE(second.err().find("EVENKEEL_SECRET must be the same on every rank"), std::string::npos);
  EXPECT_EQ(first.wait(), 3);
  EXPECT_NE(first.err().find("without these: 1; authentication failed for 1 who called"), std::string::npos)
      << first.err();
  for (const Process* rank : {&first, &second})
    for (const std::string& secret : {job_secret(), other})
      EXPECT_EQ((rank->out() + rank->err()).find(secret), std::string::npos);
  EXPECT_FALSE(fs::exists(folder / "run"));
}

TEST_F(RanksCli, without_a_secret_only_ranks_of_one_machine_come_together) {
  const std::string before = "unset EVENKEEL_SECRET; exec \"$@\"";
  const auto without = [&](Words words) {
    words.insert(words.begin(), {"sh", "-c", before, "sh"});
    return words;
  };
  // 192.0.2.1 is of a network that is nobody's.
  Process far = rank_of(0, 2, free_port(), without(training("far", 5)), {{"MASTER_ADDR", "192.0.2.1"}});
  EXPECT_EQ(far.wait(), 3);
  EXPECT_NE(far.err().find("expected a secret"), std::string::npos) << far.err();
  EXPECT_NE(far.err().find("EVENKEEL_SECRET"), std::string::npos) << far.err();
  Process open = rank_of(0, 2, free_port(), without(training("open", 5)), {{"EVENKEEL_LISTEN", "0.0.0.0"}});
  EXPECT_EQ(open.wait(), 3);
  EXPECT_NE(open.err().find("0.0.0.0: expected a secret"), std::string::npos) << open.err();

  std::vector<Process> ranks =
      job(2, without(training("near", 5)), {{"XDG_CONFIG_HOME", folder / "settings"}});
  expect_codes(ranks, 0);
  const fs::path file = folder / "settings" / "evenkeel" / "ranks.secret";
  EXPECT_EQ(fs::status(file).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_GE(read_whole_file(file, 1000).size(), 64u);
  EXPECT_EQ(std::distance(fs::directory_iterator(file.parent_path()), fs::directory_iterator()), 1);
  fs::permissions(file, fs::perms::others_read, fs::perm_options::add);
  Process careless =
      rank_of(0, 2, free_port(), without(training("near-2", 5)), {{"XDG_CONFIG_HOME", folder / "settings"}});
  EXPECT_EQ(careless.wait(), 3);
  EXPECT_NE(careless.err().find("chmod 600"), std::string::npos) << careless.err();
}

TEST_F(RanksCli, rank_0_listens_only_where_it_is_called) {
  std::string address;  // of this machine, but not loopback
  ifaddrs* list = nullptr;
  ASSERT_EQ(getifaddrs(&list), 0);
  for (const ifaddrs* at = list; at; at = at->ifa_next) {
    if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET) continue;
    char text[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr, text, sizeof text);
    if (!std::string(text).starts_with("127.")) address = text;
  }
  freeifaddrs(list);
  if (address.empty()) GTEST_SKIP() << "this machine has no address but loopback";
  const int port = free_port();
  Process first = rank_of(0, 2, port, training("run", 5), {{"MASTER_ADDR", address}});
  int door = -1;
  while ((door = connect_to(address, port)) < 0) {
  }
  close(door);
  EXPECT_LT(connect_to("127.0.0.1", port), 0);
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
