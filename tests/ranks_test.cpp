// Ranks as threads of this program: sums, agreement, and training that no number of ranks changes.
#include "training/ranks.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/stat.h>

#include <barrier>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/whole_file.h"
#include "model_families.h"
#include "numerics/random.h"
#include "rank_cases.h"
#include "run_folder.h"
#include "sanitized.h"
#include "training/trainer.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

Launch launch_in(const std::map<std::string, std::string>& environment) {
  return find_launch([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

TEST(Launch, is_read_from_the_environment_of_each_launcher) {
  EXPECT_EQ(launch_in({}).size, 1);
  EXPECT_EQ(launch_in({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "x"}}).size, 1);  // nobody launched anything

  Launch l = launch_in({{"OMPI_COMM_WORLD_SIZE", "4"},
                        {"OMPI_COMM_WORLD_RANK", "3"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});
  EXPECT_EQ(l.by, Launch::By::mpirun);
  EXPECT_EQ(l.rank, 3);
  EXPECT_EQ(l.size, 4);
  EXPECT_EQ(l.local_rank, 1);
  EXPECT_EQ(l.local_size, 2);

  std::map<std::string, std::string> torch = {{"RANK", "5"},        {"WORLD_SIZE", "8"},
                                              {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "4"},
                                              {"MASTER_ADDR", "h"}, {"MASTER_PORT", "29500"}};
  l = launch_in(torch);
  EXPECT_EQ(l.by, Launch::By::environment);
  EXPECT_EQ(l.rank, 5);
  EXPECT_EQ(l.size, 8);
  EXPECT_EQ(l.local_rank, 1);
  EXPECT_EQ(l.address, "h");
  EXPECT_EQ(l.port, 29500);
  torch["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(launch_in(torch).port, 29501);

  std::map<std::string, std::string> slurm = {{"SLURM_JOB_ID", "16385"},
                                              {"SLURM_NTASKS", "6"},
                                              {"SLURM_PROCID", "4"},
                                              {"SLURM_LOCALID", "1"},
                                              {"SLURM_STEP_TASKS_PER_NODE", "3(x2)"},
                                              {"SLURM_STEP_NODELIST", "node[07-08,11],other"}};
  EXPECT_EQ(launch_in(slurm).size, 1);  // a batch script, not a task of srun
  slurm["SLURM_STEP_ID"] = "0";
  l = launch_in(slurm);
  EXPECT_EQ(l.by, Launch::By::slurm);
  EXPECT_EQ(l.rank, 4);
  EXPECT_EQ(l.size, 6);
  EXPECT_EQ(l.local_size, 3);
  EXPECT_EQ(l.address, "node07");
  EXPECT_EQ(l.port, 32769);
  for (const auto& [list, first] : std::map<std::string, std::string>{
           {"one", "one"}, {"a,b", "a"}, {"n[3]", "n3"}, {"n[1,2]", "n1"}, {"n[", "n"}, {"", ""}}) {
    slurm["SLURM_STEP_NODELIST"] = list;
    EXPECT_EQ(launch_in(slurm).address, first) << list;
  }
}

TEST(Launch, takes_a_secret_from_the_environment_or_a_file) {
  std::map<std::string, std::string> variables = {{"WORLD_SIZE", "2"}, {"RANK", "0"}};
  EXPECT_EQ(launch_in(variables).secret, "");
  variables["EVENKEEL_SECRET"] = "sixteen letters.";
  EXPECT_EQ(launch_in(variables).secret, "sixteen letters.");
  for (const char* shorter : {"", "fifteen letters"}) {
    variables["EVENKEEL_SECRET"] = shorter;
    EXPECT_THROW(launch_in(variables), DataError);
  }
  variables.erase("EVENKEEL_SECRET");
  const ScratchFolder scratch("evenkeel-test");
  const fs::path file = scratch.path() / "secret";
  variables["EVENKEEL_SECRET_FILE"] = file;
  EXPECT_THROW(launch_in(variables), DataError);  // none there
  std::ofstream(file) << "a secret within a file\n";
  fs::permissions(file, fs::perms::owner_read);
  EXPECT_EQ(launch_in(variables).secret, "a secret within a file");
  fs::permissions(file, fs::perms::group_read, fs::perm_options::add);
  EXPECT_THROW(launch_in(variables), DataError);
  fs::remove(file);
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  EXPECT_THROW(launch_in(variables), DataError);
}

TEST(Launch, refuses_what_cannot_be_meant) {
  using Variables = std::map<std::string, std::string>;
  for (const Variables& bad :
       {Variables{{"WORLD_SIZE", "2"}}, Variables{{"WORLD_SIZE", "2"}, {"RANK", "2"}},
        Variables{{"WORLD_SIZE", "two"}, {"RANK", "0"}}, Variables{{"WORLD_SIZE", "0"}, {"RANK", "0"}},
        Variables{{"WORLD_SIZE", "2"}, {"RANK", "-1"}}, Variables{{"WORLD_SIZE", "2"}, {"RANK", "1 "}},
        Variables{{"WORLD_SIZE", "99999999999"}, {"RANK", "0"}},
        Variables{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_PORT", "70000"}},
        Variables{{"OMPI_COMM_WORLD_SIZE", "2"}}})
    EXPECT_THROW(launch_in(bad), DataError);
  Launch nowhere = launch_of(0, 2, 0);
  EXPECT_THROW(Ranks::join(nowhere, "test"), DataError);
  EXPECT_EQ(Ranks::join(Launch(), "test")->size(), 1);
}

struct NoLink final : Link {
  void exchange(const void*, void*, size_t) override {}
  void gather(const void*, void*, size_t) override {}
  void abort(const std::string&, int) noexcept override {}
};

TEST(Ranks, slices_cover_a_buffer_once) {
  for (int size : {1, 2, 3, 4, 8})
    for (int64_t count : {int64_t{1}, int64_t{8191}, int64_t{8192}, int64_t{8193}, int64_t{100000}}) {
      const Ranks ranks(launch_of(0, size, 1), std::make_unique<NoLink>());
      int64_t end = 0;
      for (int r = 0; r < size; ++r) {
        const Slice slice = ranks.slice(count, r);
        EXPECT_EQ(slice.begin, end);
        EXPECT_GE(slice.count(), 0);
        EXPECT_TRUE(slice.begin % Ranks::kSliceUnit == 0 || slice.begin == count);
        end = slice.end;
      }
      EXPECT_EQ(end, count);
    }
}

// The order of a sum: halves of halves.
float sum_by_halves(const std::vector<std::vector<float>>& values, size_t n, size_t first, size_t count) {
  if (count == 1) return values[first][n];
  return sum_by_halves(values, n, first, count / 2) +
         sum_by_halves(values, n, first + count / 2, count - count / 2);
}

// A stand-in for a device: the host's memory, and ranks that read from each other's.
struct FakeDevice final : FloatMemory {
  std::shared_ptr<float> make(int64_t count) override {
    auto made = host_memory().make(count);
    std::fill_n(made.get(), count, NAN);  // whatever is there must not matter
    return made;
  }
  void copy(float* to, const float* from, int64_t count) override { host_memory().copy(to, from, count); }
  void add(float* to, const float* left, int64_t count) override { host_memory().add(to, left, count); }
  void to_host(float*, const float*, int64_t) override { FAIL() << "not through the host"; }
  void from_host(float*, const float*, int64_t) override { FAIL() << "not through the host"; }
  bool on_device() const override { return true; }
};
struct Board {
  explicit Board(int size) : sent(static_cast<size_t>(size)), all(size) {}
  std::vector<std::vector<DeviceLink::Part>> sent;  // by rank
  std::barrier<> all;
};
struct FakeDeviceLink final : DeviceLink {
  FakeDeviceLink(Board& where, int rank) : board(where), own(static_cast<size_t>(rank)) {}
  void exchange(const std::vector<Part>& send, const std::vector<Part>& receive) override {
    board.sent[own] = send;
    board.all.arrive_and_wait();
    for (size_t r = 0; r < receive.size(); ++r) {
      const Part& from = board.sent[r][own];
      EXPECT_EQ(from.count, receive[r].count);
      if (from.data != receive[r].data) std::copy_n(from.data, from.count, receive[r].data);
    }
    board.all.arrive_and_wait();
  }
  Board& board;
  size_t own;
};

TEST(Ranks, add_by_halves_to_the_bit) {
  for (int size : {1, 2, 4, 8})
    for (int64_t count : {int64_t{1}, int64_t{63}, int64_t{8193}, int64_t{70000}, int64_t{1200001}}) {
      if (size > (kSanitized ? 2 : 4) && count > 100000) continue;
      std::vector<std::vector<float>> values(static_cast<size_t>(size));
      for (size_t r = 0; r < values.size(); ++r) {
        RandomStream draw({7, static_cast<uint32_t>(r), static_cast<uint32_t>(count)});
        for (int64_t n = 0; n < count; ++n)  // sizes so different that every order has its own bits
          values[r].push_back(
              static_cast<float>(std::ldexp(draw.unit() - 0.5, static_cast<int>(draw.unit() * 30))));
      }
      if (count > 60) {
        for (auto& row : values) row[60] = -0.0f;
        values.back()[61] = NAN;
        values.front()[62] = INFINITY;
      }
      std::vector<float> expected(static_cast<size_t>(count));
      for (size_t n = 0; n < expected.size(); ++n) expected[n] = sum_by_halves(values, n, 0, values.size());
      const auto same = [](const float* a, const float* b, int64_t n) {
        for (int64_t i = 0; i < n; ++i)
          if (std::memcmp(a + i, b + i, sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i])))
            return false;
        return true;
      };
      Board board(size);
      const auto thrown = run_ranks(size, [&](const std::shared_ptr<Ranks>& ranks) {
        const auto& own = values[static_cast<size_t>(ranks->rank())];
        std::vector<float> all = own, slice = own, shared = own, told = own;
        ranks->sum(host_memory(), all.data(), count);
        EXPECT_TRUE(same(all.data(), expected.data(), count)) << size << " " << count;
        ranks->sum_slices(host_memory(), slice.data(), count);
        for (int r = 0; r < size; ++r) {
          const Slice s = ranks->slice(count, r);
          const float* should = r == ranks->rank() ? expected.data() : own.data();
          EXPECT_TRUE(same(slice.data() + s.begin, should + s.begin, s.count()));
        }
        ranks->share_slices(host_memory(), shared.data(), count);
        for (int r = 0; r < size; ++r) {
          const Slice s = ranks->slice(count, r);
          EXPECT_TRUE(
              same(shared.data() + s.begin, values[static_cast<size_t>(r)].data() + s.begin, s.count()));
        }
        ranks->broadcast(told);
        EXPECT_TRUE(same(told.data(), values[0].data(), count));
        FakeDevice device;
        ranks->use_device_link(std::make_unique<FakeDeviceLink>(board, ranks->rank()));
        std::vector<float> on_device = own;
        ranks->sum(device, on_device.data(), count);
        EXPECT_TRUE(same(on_device.data(), expected.data(), count)) << size << " " << count;
      });
      for (const std::string& words : thrown) EXPECT_EQ(words, "");
    }
}

// Doubles travel as pairs of floats, some of which are signalling NaNs then: every bit arrives.
TEST(Ranks, share_rows_to_the_bit) {
  for (int size : {1, 2, 4})
    for (int64_t width : {int64_t{0}, int64_t{1}, int64_t{77}, int64_t{600000}}) {
      const auto bits = [](int64_t row, int64_t n) {
        return uint64_t{0x7f800001ff800001} + static_cast<uint64_t>(n * 5 + row) * 0x100000003;
      };
      Board board(size);
      const auto thrown = run_ranks(size, [&](const std::shared_ptr<Ranks>& ranks) {
        const auto check = [&](FloatMemory& memory) {
          std::vector<double> rows(static_cast<size_t>(size * width), -1.0);  // (size, width)
          for (int64_t n = 0; n < width; ++n)
            rows[static_cast<size_t>(ranks->rank() * width + n)] =
                std::bit_cast<double>(bits(ranks->rank(), n));
          ranks->share_rows(memory, reinterpret_cast<float*>(rows.data()), 2 * width);
          for (int64_t n = 0; n < size * width; ++n)
            ASSERT_EQ(std::bit_cast<uint64_t>(rows[static_cast<size_t>(n)]), bits(n / width, n % width)) << n;
        };
        check(host_memory());
        ranks->use_device_link(std::make_unique<FakeDeviceLink>(board, ranks->rank()));
        FakeDevice device;
        check(device);
      });
      for (const std::string& words : thrown) EXPECT_EQ(words, "") << size << " " << width;
    }
}

TEST(Ranks, gather_broadcast_and_agree) {
  const auto thrown = run_ranks(4, [](const std::shared_ptr<Ranks>& ranks) {
    const double own[] = {1.0 * ranks->rank(), 0.5};
    EXPECT_EQ(ranks->gather(own), (std::vector<double>{0, 0.5, 1, 0.5, 2, 0.5, 3, 0.5}));
    const std::string text(static_cast<size_t>(ranks->rank()), 'x');
    EXPECT_EQ(ranks->gather(text), (std::vector<std::string>{"", "x", "xx", "xxx"}));
    EXPECT_EQ(ranks->broadcast(ranks->first() ? "zero" : "other"), "zero");
    ranks->agree("words", "a\nb\n");
    ranks->agree("words", ranks->rank() == 2 ? "a\nbad\nc" : "a\nb\nc");
  });
  // Every rank finds it out, unless another's ending of the job reaches it first.
  for (const std::string& words : thrown)
    EXPECT_TRUE(words.ends_with(
        "words of all ranks must be the same: expected 'b' as on rank 0, found 'bad' on rank 2"))
        << words;
}

TEST(Ranks, one_that_fails_ends_the_others_with_its_cause) {
  for (int failing : {0, 2}) {
    const auto thrown = run_ranks(4, [&](const std::shared_ptr<Ranks>& ranks) {
      ranks->gather(std::string("here"));
      if (ranks->rank() == failing) throw DataError("the disk is full");
      for (;;) ranks->gather(std::string("still here"));
    });
    for (int r = 0; r < 4; ++r)
      EXPECT_EQ(thrown[static_cast<size_t>(r)],
                r == failing ? "the disk is full"
                             : fmt::format("rank {} ended the job: the disk is full", failing));
  }
}

TEST(Ranks, out_of_step_are_told_apart) {
  const auto thrown = run_ranks(2, [](const std::shared_ptr<Ranks>& ranks) {
    std::vector<float> values(100);
    if (ranks->first())
      ranks->sum(host_memory(), values.data(), 100);
    else
      ranks->gather(std::string("something else"));
  });
  EXPECT_NE(thrown[0].find("rank 1 is out of step"), std::string::npos) << thrown[0];
  EXPECT_NE(thrown[1].find("rank 0 ended the job"), std::string::npos) << thrown[1];
}

TEST(Ranks, of_another_version_or_number_are_refused) {
  const int port = free_port();
  std::string told[2];
  std::vector<std::thread> threads;
  for (int rank : {0, 1})
    threads.emplace_back([&, rank] {
      try {
        Ranks::join(launch_of(rank, 2, port), fmt::format("0.{}", rank));
      } catch (const DataError& error) {
        told[rank] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (int rank : {0, 1})
    EXPECT_EQ(told[rank],
              fmt::format("rank {}: the version of all ranks must be the same: expected '0.0' as on rank "
                          "0, found '0.1' on rank 1",
                          rank));

  const int other_port = free_port();
  threads.clear();
  for (int rank : {0, 1})
    threads.emplace_back([&, rank] {
      try {
        connect_tcp(launch_of(rank, 2 + rank, other_port));
      } catch (const DataError& error) {
        told[rank] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& words : told)
    EXPECT_NE(words.find("expected ranks 1 to 1 of 2, found rank 1 of 3"), std::string::npos) << words;
}

// --- training ---------------------------------------------------------------------------------------------------

class RanksTraining : public RunFolderTest {
 protected:
  RunConfig tiny() const {
    RunConfig c = RunFolderTest::tiny();
    c.model.width = 48;  // five slices
    c.validation = c.data;
    c.sequences = 8;
    c.accumulate = 4;
    c.plan = "fp32,row_sum=e5m2/stochastic";
    c.schedule.steps = 5;
    c.checkpoint_every = 2;
    c.facts_every = 2;
    c.validate_every = 2;
    c.validation_batches = 3;
    return c;
  }

  struct Run {
    std::vector<std::vector<float>> weights;  // of every rank
    std::vector<nlohmann::json> metrics;
    std::string checkpoint;  // the bytes of the newest
    std::vector<std::string> thrown;
    std::optional<Finding> finding[8];
  };
  // Starts where the folder is new, goes on otherwise; `steps` at most. meddle(rank, trainer) before the first.
  Run train(int size, const RunConfig& config, const fs::path& run, int64_t steps = 1000,
            const std::function<void(int, Trainer&)>& meddle = {}) const {
    const bool fresh = !fs::exists(run / "config.toml");
    Run result;
    result.weights.resize(static_cast<size_t>(size));
    result.thrown = run_ranks(size, [&](const std::shared_ptr<Ranks>& ranks) {
      // Only rank 0 needs the folder.
      const fs::path own = ranks->first() ? run : folder / "not to be seen";
      const auto trainer = fresh ? Trainer::start(own, config, ranks) : Trainer::resume(own, {}, ranks);
      if (meddle) meddle(ranks->rank(), *trainer);
      for (int64_t n = 0; n < steps && !trainer->done(); ++n) trainer->step();
      auto& weights = result.weights[static_cast<size_t>(ranks->rank())];
      weights.resize(static_cast<size_t>(trainer->model().table().size()));
      trainer->model().read_parameters(weights);
      result.finding[ranks->rank()] = trainer->finding();
    });
    EXPECT_FALSE(fs::exists(folder / "not to be seen"));
    if (!fs::exists(run / "metrics.jsonl")) return result;
    read_json_lines(run / "metrics.jsonl", [&](const JsonLine& line) {
      result.metrics.push_back(line.object);
      result.metrics.back().erase("tokens_per_second");
      result.metrics.back().erase("backend");  // said once a start
    });
    const auto checkpoints = find_checkpoints(run / "checkpoints");
    if (!checkpoints.empty())
      for (const char* file : {"model.safetensors", "optimizer.safetensors"})
        result.checkpoint += read_whole_file(checkpoints.back().folder / file, 1 << 26);
    return result;
  }
  static void expect_same(const Run& found, const Run& expected, const std::string& what) {
    for (const std::string& words : found.thrown) EXPECT_EQ(words, "") << what;
    for (const auto& weights : found.weights) EXPECT_EQ(weights, expected.weights[0]) << what;
    EXPECT_EQ(found.metrics, expected.metrics) << what;
    EXPECT_TRUE(found.checkpoint == expected.checkpoint) << what;
  }
};

class RanksOfFamily : public OfFamily<RanksTraining> {
 protected:
  RunConfig tiny() const {
    RunConfig c = Base::tiny();
    c.model = GetParam().config(c.model);
    return c;
  }
};
INSTANTIATE_TEST_SUITE_P(Model, RanksOfFamily, ::testing::ValuesIn(kFamilies), family_name);

TEST_P(RanksOfFamily, no_number_of_ranks_changes_a_bit) {
  struct Case {
    const char* name;
    std::function<void(RunConfig&)> set;
  };
  for (const Case& c : {Case{"adamw", [](RunConfig&) {}},
                        Case{"muon", [](RunConfig& r) { r.optimizer.kind = OptimizerKind::muon; }},
                        Case{"qk_clip",
                             [](RunConfig& r) {
                               r.model.qk_clip = 0.02f;
                               r.model.key_heads = 0;  // which qk_clip asks for
                               r.facts_every = 1;
                             }},
                        Case{"twelve parts", [](RunConfig& r) { r.sequences = r.accumulate = 12; }}}) {
    RunConfig config = tiny();
    c.set(config);
    const Run one = train(1, config, folder / fmt::format("{}-1", c.name));
    ASSERT_EQ(one.thrown[0], "");
    ASSERT_EQ(one.metrics.size(), 5u);
    EXPECT_TRUE(one.metrics[1].contains("validation_loss"));
    for (int size : {2, 4})
      expect_same(train(size, config, folder / fmt::format("{}-{}", c.name, size)), one,
                  fmt::format("{} {}", c.name, size));
    // The order is one among others: a test that could not see another one would be none.
    RunConfig other = config;
    other.accumulate = 2;
    if (config.accumulate == 4) {
      EXPECT_NE(train(1, other, folder / fmt::format("{}-other", c.name)).weights[0], one.weights[0]);
    }
  }
}

TEST_P(RanksOfFamily, sharded_states_give_the_same_bits_and_the_same_checkpoints) {
  RunConfig config = tiny();
  const Run one = train(1, config, folder / "one");
  config.shard_optimizer = true;
  for (int size : {1, 2, 4})
    expect_same(train(size, config, folder / fmt::format("sharded-{}", size)), one, fmt::format("{}", size));
  config.optimizer.kind = OptimizerKind::muon;
  EXPECT_NE(train(2, config, folder / "muon").thrown[1].find("expected adamw, got muon"), std::string::npos);
}

TEST_P(RanksOfFamily, a_run_goes_on_with_another_number_of_ranks) {
  for (const bool shard : {false, true}) {
    RunConfig config = tiny();
    config.shard_optimizer = shard;
    const Run one = train(1, config, folder / fmt::format("one-{}", shard));
    const fs::path run = folder / fmt::format("many-{}", shard);
    train(4, config, run, 3);  // one step behind the checkpoint is lost and done again
    train(1, config, run, 2);
    expect_same(train(2, config, run), one, fmt::format("shard {}", shard));
  }
}

TEST_F(RanksTraining, a_sharded_run_goes_on_unsharded_and_the_other_way_round) {
  for (const bool shard : {false, true}) {
    RunConfig config = tiny();
    config.shard_optimizer = shard;
    const Run one = train(1, config, folder / fmt::format("one-{}", shard));
    const fs::path run = folder / fmt::format("turned-{}", shard), settings = run / "config.toml";
    train(4, config, run, 3);
    write_whole_file(settings, with_shard_turned(read_whole_file(settings, 1 << 20)));
    expect_same(train(2, config, run), one, fmt::format("sharded first: {}", shard));
    RunConfig turned;
    read_run_config(settings, turned);
    EXPECT_EQ(turned.shard_optimizer, !shard);
  }
}

TEST_F(RanksTraining, fewer_parts_than_ranks_become_as_many_and_other_numbers_are_refused) {
  RunConfig config = tiny();
  const Run four = train(4, config, folder / "four");
  config.accumulate = 1;
  expect_same(train(4, config, folder / "default"), four, "accumulate = 1");
  // That is the run's number of parts from now on.
  for (const std::string& words : train(8, config, folder / "default").thrown)
    EXPECT_NE(words.find("divides the 4 parts of a step (accumulate), got 8 ranks"), std::string::npos)
        << words;
  config.accumulate = 6;
  config.sequences = 12;
  for (int size : {3, 4, 6})
    for (const std::string& words : train(size, config, folder / "odd").thrown)
      EXPECT_NE(words.find("expected a number of ranks that is a power of two and divides the 6 parts"),
                std::string::npos)
          << words;
  config.accumulate = 4;
  config.sequences = 6;
  for (const std::string& words : train(4, config, folder / "odd").thrown)
    EXPECT_NE(words.find("a multiple of the 4 parts of a step (--accumulate), found 6"), std::string::npos)
        << words;
  EXPECT_FALSE(fs::exists(folder / "odd"));
}

TEST_F(RanksTraining, one_ranks_nan_is_a_finding_on_all) {
  for (const bool shard : {false, true}) {
    RunConfig config = tiny();
    config.shard_optimizer = shard;
    const Run run =
        train(4, config, folder / fmt::format("run-{}", shard), 1000, [](int rank, Trainer& trainer) {
          if (rank != 2) return;
          std::vector<float> weights(static_cast<size_t>(trainer.model().table().size()));
          trainer.model().read_parameters(weights);
          weights[100] = NAN;
          trainer.model().write_parameters(weights);
        });
    for (int r = 0; r < 4; ++r) {
      ASSERT_TRUE(run.finding[r]) << r;
      EXPECT_EQ(run.finding[r]->kind, "not_finite");
      EXPECT_EQ(run.finding[r]->step, 0);
      EXPECT_EQ(run.thrown[static_cast<size_t>(r)], "");
    }
    EXPECT_TRUE(fs::exists(folder / fmt::format("run-{}", shard) / "findings.json"));
  }
}

TEST_F(RanksTraining, ranks_that_go_on_know_the_losses_before) {
  RunConfig config = tiny();
  config.schedule.steps = 400;
  config.schedule.peak = 5e-2;
  config.divergence = 1e-3;
  config.validate_every = 0;
  const Run one = train(1, config, folder / "one");
  ASSERT_TRUE(one.finding[0]);
  ASSERT_EQ(one.finding[0]->kind, "divergence");
  const int64_t before = one.finding[0]->step - 4;  // fewer steps than the watch's window
  ASSERT_GT(before, static_cast<int64_t>(DivergenceWatch::kWindow));
  train(2, config, folder / "many", before);
  const Run rest = train(4, config, folder / "many");
  expect_same(rest, one, "after a pause");
  for (int r = 0; r < 4; ++r) {
    ASSERT_TRUE(rest.finding[r]) << r;
    EXPECT_EQ(rest.finding[r]->words, one.finding[0]->words);
  }
}

TEST_F(RanksTraining, a_request_to_stop_reaches_all_in_the_same_step) {
  const auto thrown = run_ranks(4, [&](const std::shared_ptr<Ranks>& ranks) {
    const auto trainer = Trainer::start(folder / "run", tiny(), ranks);
    EXPECT_FALSE(trainer->step().stop);
    EXPECT_TRUE(trainer->step(ranks->rank() == 3).stop);
  });
  for (const std::string& words : thrown) EXPECT_EQ(words, "");
}

TEST_F(RanksTraining, unequal_settings_tokens_and_batches_are_refused) {
  // Two machines: the same relative paths, and in one of the files another content.
  const auto refusal = [&](const std::function<void(RunConfig&, int)>& set) {
    const auto thrown = run_ranks(2, [&](const std::shared_ptr<Ranks>& ranks) {
      const fs::path machine = folder / fmt::format("machine-{}", ranks->rank());
      fs::create_directories(machine);
      fs::copy_file(folder / "text.txt", machine / "text.txt", fs::copy_options::overwrite_existing);
      // A working folder of this thread's own.
      ASSERT_TRUE(unshare(CLONE_FS) == 0 && chdir(machine.c_str()) == 0);
      RunConfig config = tiny();
      config.data = config.validation = "text.txt";
      set(config, ranks->rank());
      Trainer::start(folder / "refused", config, ranks);
    });
    EXPECT_EQ(thrown[0], thrown[1]);
    return thrown[0];
  };
  EXPECT_EQ(refusal([](RunConfig&, int) {}), "");
  fs::remove_all(folder / "refused");
  EXPECT_EQ(
      refusal([](RunConfig& c, int rank) { c.schedule.peak = rank == 1 ? 0.5 : 0.25; }),
      "settings and tokens of all ranks must be the same: expected 'lr = 0.25' as on rank 0, found 'lr = "
      "0.5' on rank 1");
  EXPECT_NE(refusal([](RunConfig&, int rank) {
              if (rank == 0) return;
              std::fstream text("text.txt");
              text.seekp(2000);
              text << "a few other words";
            }).find("digest"),
            std::string::npos);
  EXPECT_NE(refusal([](RunConfig& c, int rank) {
              RunConfig other = c;
              other.seed = static_cast<uint64_t>(rank);
              const auto trainer = Trainer::start(fmt::format("recorded-{}", rank), other);
              while (!trainer->done()) trainer->step();
              c.batches = "batches.bin";
              fs::copy_file(fmt::format("recorded-{}/batches.bin", rank), c.batches);
            }).find("batches of digest"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(folder / "refused"));
}

}  // namespace
}  // namespace evenkeel
