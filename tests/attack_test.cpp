// The program where its environment is broken or hostile: closed streams, too little memory, data and checkpoints that
// change behind its back, pipes and devices in place of files.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "base/json_lines.h"
#include "base/whole_file.h"
#include "run_folder.h"
#include "run_program.h"
#include "training/batch_record.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

class Attack : public RunFolderTest {
 protected:
  // The program's words for a tiny run; `more` as a shell reads it.
  std::string training(const std::string& run, const std::string& more = "") const {
    return fmt::format(
        "{} train --preset micro --data {} --set model.layers=1 --set model.heads=2 --set model.width=16 "
        "--set "
        "model.context=12 --sequences 2 --threads 1 --steps 8 --checkpoint-every 4 --out {} {}",
        EVENKEEL_PROGRAM, (folder / "text.txt").string(), (folder / run).string(), more);
  }
  // Exit code and all that was printed.
  static Output run(const std::string& command) { return run_shell("{ " + command + "; } 2>&1"); }
};

TEST_F(Attack, closed_standard_streams_are_not_written_into_the_run) {
  int number = 0;
  for (const char* closed : {"<&- >&- 2>&-", ">&-", "2>&-", "<&-", ">&- 2>&-"}) {
    const std::string name = fmt::format("run-{}", number++);
    EXPECT_EQ(run_shell(training(name, closed)).code, 0) << closed;
    EXPECT_EQ(BatchRecord(folder / name / "batches.bin").steps(), 8) << closed;
    int steps = 0;
    const auto result = read_json_lines(folder / name / "metrics.jsonl", [&](const JsonLine& line) {
      EXPECT_EQ(line.object.at("step"), steps++);
    });
    EXPECT_EQ(steps, 8) << closed;
    EXPECT_EQ(result.fault_count, 0u) << closed;
  }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SKIP_WITH_SANITIZERS() GTEST_SKIP() << "sanitizers need more memory than this test allows"
#else
#define SKIP_WITH_SANITIZERS() (void)0
#endif

TEST_F(Attack, too_little_memory_is_said_in_words) {
  SKIP_WITH_SANITIZERS();
  const Output output =
      run("ulimit -v 1000000; " + training("run", "--set model.width=8192 --set model.layers=16"));
  EXPECT_EQ(output.code, 3);
  EXPECT_NE(output.out.find("not enough memory"), std::string::npos) << output.out;
}

TEST_F(Attack, threads_that_cannot_start_are_said_in_words) {
  SKIP_WITH_SANITIZERS();
  const Output output = run("ulimit -v 1500000; " + training("run", "--threads 512"));
  EXPECT_EQ(output.code, 3);
  EXPECT_NE(output.out.find("--threads N sets fewer"), std::string::npos) << output.out;
}

// What is advised can be typed. A thread's stack of 8 GB does not fit into 6 GB of addresses, whatever the command needs.
TEST_F(Attack, a_command_without_threads_does_not_advise_them) {
  SKIP_WITH_SANITIZERS();
  if (run("ulimit -s 8000000").code != 0) GTEST_SKIP() << "stacks of 8 GB may not be asked for here";
  const Output output =
      run(fmt::format("ulimit -s 8000000; ulimit -v 6000000; {} conform --quick", EVENKEEL_PROGRAM));
  if (std::thread::hardware_concurrency() == 1) GTEST_SKIP() << "one core: no thread is started";
  EXPECT_EQ(output.code, 3) << output.out;
  EXPECT_EQ(output.out.find("--threads"), std::string::npos) << output.out;
  EXPECT_NE(output.out.find("taskset"), std::string::npos) << output.out;
}

// 32 MB beyond the program itself, which may hold the GPU's kernels: enough to start, not to judge. One core, so no stacks.
TEST_F(Attack, a_command_without_a_model_does_not_advise_a_smaller_one) {
  SKIP_WITH_SANITIZERS();
  if (run("taskset -c 0 true").code != 0) GTEST_SKIP() << "the first core is not for this process";
  const auto kilobytes = fs::file_size(EVENKEEL_PROGRAM) / 1024 + 32000;
  const Output output =
      run(fmt::format("ulimit -v {}; taskset -c 0 {} conform --quick", kilobytes, EVENKEEL_PROGRAM));
  EXPECT_EQ(output.code, 3) << output.out;
  EXPECT_NE(output.out.find("not enough memory"), std::string::npos) << output.out;
  EXPECT_EQ(output.out.find("smaller model"), std::string::npos) << output.out;
}

TEST_F(Attack, a_pipe_or_a_device_as_configuration_is_refused) {
  ASSERT_EQ(run(training("run")).code, 0);
  const fs::path config = folder / "run" / "config.toml";
  const std::string resume = fmt::format("{} train --resume {}", EVENKEEL_PROGRAM, (folder / "run").string()),
                    sample =
                        fmt::format("{} sample {} --tokens 1", EVENKEEL_PROGRAM, (folder / "run").string());
  fs::remove(config);
  ASSERT_EQ(mkfifo(config.c_str(), 0600), 0);
  for (const std::string& command : {resume, sample}) {
    const Output output = run(command);
    EXPECT_EQ(output.code, 3);
    EXPECT_NE(output.out.find("expected a regular file, found a pipe"), std::string::npos) << output.out;
  }
  fs::remove(config);
  fs::create_symlink("/dev/zero", config);
  EXPECT_NE(run(resume).out.find("expected a regular file, found a device"), std::string::npos);
}

TEST_F(Attack, data_that_changed_is_refused) {
  std::string text = read_whole_file(folder / "text.txt", 1 << 20);
  ASSERT_EQ(run(training("run", "--steps 16")).code, 0);
  // The run must not be over, or nothing would be read.
  const fs::path config = folder / "run" / "config.toml";
  std::string settings = read_whole_file(config, 1 << 20);
  settings.replace(settings.find("steps = 16"), 10, "steps = 20");
  write_whole_file(config, settings);
  text[text.size() / 2] ^= 1;
  write_whole_file(folder / "text.txt", text);
  for (const char* command : {"train --resume", "probe"}) {
    const Output output = run(fmt::format("{} {} {}{}", EVENKEEL_PROGRAM, command, (folder / "run").string(),
                                          command == std::string("probe") ? "@6" : ""));
    EXPECT_EQ(output.code, 3) << output.out;
    EXPECT_NE(output.out.find("the data has changed since"), std::string::npos) << output.out;
  }
  text[text.size() / 2] ^= 1;
  write_whole_file(folder / "text.txt", text);
  EXPECT_EQ(run(fmt::format("{} train --resume {}", EVENKEEL_PROGRAM, (folder / "run").string())).code, 0);
  // As a run of an older version: nothing to verify by, and that is said.
  settings = read_whole_file(config, 1 << 20);
  const size_t digest = settings.find("digest = ");
  ASSERT_NE(digest, std::string::npos);
  settings.erase(digest, settings.find('\n', digest) + 1 - digest);
  write_whole_file(config, settings);
  const Output old = run(fmt::format("{} train --resume {}", EVENKEEL_PROGRAM, (folder / "run").string()));
  EXPECT_EQ(old.code, 0) << old.out;
  EXPECT_NE(old.out.find("note: its config.toml has no data.digest"), std::string::npos) << old.out;
}

TEST_F(Attack, validation_data_that_changed_is_refused) {
  std::string text = read_whole_file(folder / "text.txt", 1 << 20);
  write_whole_file(folder / "other.txt", text);
  const std::string validation =
      fmt::format("--validate-every 8 --validation {}", (folder / "other.txt").string());
  ASSERT_EQ(run(training("run", "--steps 8 " + validation)).code, 0);
  const auto more = [&] {
    return run(fmt::format("{} train --resume {} --steps 16", EVENKEEL_PROGRAM, (folder / "run").string()));
  };
  text[text.size() / 2] ^= 1;
  write_whole_file(folder / "other.txt", text);
  const Output changed = more();
  EXPECT_EQ(changed.code, 3) << changed.out;
  EXPECT_NE(changed.out.find("data.validation_digest"), std::string::npos) << changed.out;
  EXPECT_NE(changed.out.find("other.txt"), std::string::npos) << changed.out;
  text[text.size() / 2] ^= 1;
  write_whole_file(folder / "other.txt", text);
  EXPECT_EQ(more().code, 0);
}

TEST_F(Attack, a_flipped_bit_of_a_checkpoint_is_refused_by_name) {
  ASSERT_EQ(run(training("run", "--steps 8 --checkpoint-every 8")).code, 0);
  const fs::path checkpoint = folder / "run" / "checkpoints" / "step-00000008";
  const std::string at = (folder / "run").string();
  const std::string resume = fmt::format("{} train --resume {}", EVENKEEL_PROGRAM, at),
                    sample = fmt::format("{} sample {} --tokens 1", EVENKEEL_PROGRAM, at);
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    const std::string bytes = read_whole_file(checkpoint / name, 1 << 26);
    std::string flipped = bytes;
    flipped[flipped.size() - 5] ^= 4;
    write_whole_file(checkpoint / name, flipped);
    for (const std::string& command : {resume, sample}) {
      if (command == sample && name == std::string("optimizer.safetensors"))
        continue;  // which it does not read
      const Output output = run(command);
      EXPECT_EQ(output.code, 3) << output.out;
      EXPECT_NE(output.out.find(fmt::format("{}: expected the checksum", (checkpoint / name).string())),
                std::string::npos)
          << output.out;
    }
    write_whole_file(checkpoint / name, bytes);
  }
  EXPECT_EQ(run(resume).code, 0);
  fs::remove(checkpoint / "checksums.txt");  // as an older version wrote it
  for (const std::string& command : {resume, sample}) {
    const Output output = run(command);
    EXPECT_EQ(output.code, 0) << output.out;
    EXPECT_NE(output.out.find("has no checksums"), std::string::npos) << output.out;
  }
}

// An absent file is an older version's; one without a line is what a power cut leaves, and checks nothing.
TEST_F(Attack, checksums_that_say_nothing_are_refused) {
  ASSERT_EQ(run(training("run", "--steps 8 --checkpoint-every 8")).code, 0);
  const fs::path checkpoint = folder / "run" / "checkpoints" / "step-00000008",
                 checksums = checkpoint / "checksums.txt";
  const std::string resume = fmt::format("{} train --resume {}", EVENKEEL_PROGRAM, (folder / "run").string()),
                    good = read_whole_file(checksums, 1 << 20);
  std::string weights = read_whole_file(checkpoint / "model.safetensors", 1 << 26);
  weights[weights.size() - 5] ^= 4;
  write_whole_file(checkpoint / "model.safetensors", weights);
  for (const std::string& text :
       {std::string(), std::string("\n"), std::string("garbage\n"), good.substr(0, 70), good + "more\n",
        "z" + good.substr(1), good.substr(0, good.find('\n') + 1)}) {
    write_whole_file(checksums, text);
    const Output output = run(resume);
    EXPECT_EQ(output.code, 3) << text << output.out;
    EXPECT_NE(output.out.find(checksums.filename().string()), std::string::npos) << output.out;
  }
  fs::remove(checksums);
  fs::create_symlink("nowhere", checksums);
  EXPECT_EQ(run(resume).code, 3);
}

// Where the sequences of each step began follows from the seed: a record of others is damaged.
TEST_F(Attack, overwritten_batches_are_noticed) {
  ASSERT_EQ(run(training("run", "--steps 8 --checkpoint-every 4")).code, 0);
  const std::string at = (folder / "run").string();
  const fs::path batches = folder / "run" / "batches.bin";
  const std::string good = read_whole_file(batches, 1 << 20);
  const std::string commands[] = {fmt::format("{} probe {}@6", EVENKEEL_PROGRAM, at),
                                  fmt::format("{} capture {}@6 --layer 0 -o {}", EVENKEEL_PROGRAM, at,
                                              (folder / "c.safetensors").string())};
  for (const std::string& command : commands) EXPECT_EQ(run(command).code, 0) << run(command).out;
  std::string bad = good;
  for (size_t n = 32 + 2 * 8 * 6; n < bad.size(); n += 8) bad[n] ^= 1;  // from step 6 on
  write_whole_file(batches, bad);
  const std::string resume = fmt::format("{} train --resume {} --steps 12", EVENKEEL_PROGRAM, at);
  const std::string metrics = read_whole_file(folder / "run" / "metrics.jsonl", 1 << 20);
  for (const std::string& command : {commands[0], commands[1], resume}) {
    const Output output = run(command);
    EXPECT_EQ(output.code, 3) << output.out;
    for (const char* words :
         {"batches.bin: step 6: expected a sequence from token ", "data.seed = 1", "--branch"})
      EXPECT_NE(output.out.find(words), std::string::npos) << output.out;
  }
  EXPECT_EQ(read_whole_file(batches, 1 << 20), bad);  // refused before anything is cut off
  EXPECT_EQ(read_whole_file(folder / "run" / "metrics.jsonl", 1 << 20), metrics);
  write_whole_file(batches, good);
  for (const std::string& command : {commands[0], commands[1], resume}) EXPECT_EQ(run(command).code, 0);
}

// A run's folder may come from somebody else: what its links lead to is not written.
TEST_F(Attack, records_are_not_written_through_links) {
  ASSERT_EQ(run(training("run", "--steps 8")).code, 0);
  const fs::path at = folder / "run", precious = folder / "precious";
  const std::string resume = fmt::format("{} train --resume {} --steps 12", EVENKEEL_PROGRAM, at.string());
  const auto is_whole = [&](const fs::path& file, const std::string& text) {
    EXPECT_EQ(read_whole_file(file, 1 << 26), text) << file;
  };
  const std::string words = " or nothing, found a symbolic link: a run is not written through links";
  write_whole_file(precious, "precious\n");
  for (const char* command : {"verdict", "isolate"}) {
    fs::remove(at / "verdict.json");
    fs::create_symlink("../precious", at / "verdict.json");
    EXPECT_EQ(run(fmt::format("{} {} {}", EVENKEEL_PROGRAM, command, at.string())).code, 0);
    is_whole(precious, "precious\n");
    EXPECT_FALSE(fs::is_symlink(at / "verdict.json")) << command;
  }
  for (const char* name : {"metrics.jsonl", "batches.bin"}) {
    const std::string text = read_whole_file(at / name, 1 << 26);
    fs::rename(at / name, folder / "moved");
    fs::create_symlink("../moved", at / name);
    const Output output = run(resume);
    EXPECT_EQ(output.code, 3) << output.out;
    EXPECT_NE(output.out.find((at / name).string() + ": expected a regular file" + words), std::string::npos)
        << output.out;
    is_whole(folder / "moved", text);
    fs::remove(at / name);
    fs::rename(folder / "moved", at / name);
  }
  // config.toml is replaced, and its text kept. Old checkpoints elsewhere are not removed.
  const std::string config = read_whole_file(at / "config.toml", 1 << 20);
  fs::rename(at / "config.toml", folder / "moved");
  fs::create_symlink("../moved", at / "config.toml");
  fs::rename(at / "checkpoints", folder / "elsewhere");
  fs::create_directory_symlink("../elsewhere", at / "checkpoints");
  const Output output = run(resume);
  EXPECT_EQ(output.code, 3) << output.out;
  EXPECT_NE(output.out.find((at / "checkpoints").string() + ": expected a folder" + words), std::string::npos)
      << output.out;
  fs::remove(at / "checkpoints");
  fs::rename(folder / "elsewhere", at / "checkpoints");
  EXPECT_EQ(run(resume).code, 0) << run(resume).out;
  is_whole(folder / "moved", config);
}

TEST_F(Attack, operands_without_end_are_refused) {
  SKIP_WITH_SANITIZERS();
  const Output output = run(fmt::format(
      "ulimit -v 4000000; {} explain --mma bf16 --file-a /dev/zero --file-b /dev/zero", EVENKEEL_PROGRAM));
  EXPECT_EQ(output.code, 3);
  EXPECT_NE(output.out.find("/dev/zero: expected at most"), std::string::npos) << output.out;
}

TEST_F(Attack, a_run_within_its_own_data_can_be_resumed) {
  std::string command = training("runs/a", "--steps 16");
  const std::string data = (folder / "text.txt").string();
  command.replace(command.find(data), data.size(), folder.string());
  ASSERT_EQ(run(command).code, 0);
  const Output output =
      run(fmt::format("{} train --resume {}", EVENKEEL_PROGRAM, (folder / "runs" / "a").string()));
  EXPECT_EQ(output.code, 0) << output.out;
}

TEST_F(Attack, data_shortened_while_a_run_trains_is_said_in_words) {
  {
    std::ofstream text(folder / "text.txt");
    for (int n = 0; n < 20000; ++n) text << "the keel is " << n << ".\n";
  }
  const std::string metrics = (folder / "run" / "metrics.jsonl").string();
  // Waits for the first steps, then shortens the text under the run's feet.
  const Output output = run(fmt::format("{} --steps 1000000 & while ! [ -s {} ]; do :; done; : > {}; wait $!",
                                        training("run"), metrics, (folder / "text.txt").string()));
  EXPECT_EQ(output.code, 3) << output.out;
  EXPECT_NE(output.out.find("it was shortened"), std::string::npos) << output.out;
}

}  // namespace
}  // namespace evenkeel
