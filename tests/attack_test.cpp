// The program where its environment is broken or hostile: closed streams, too little memory.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

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

TEST_F(Attack, too_little_memory_is_said_in_words) {
  const Output output =
      run("ulimit -v 1000000; " + training("run", "--set model.width=8192 --set model.layers=16"));
  EXPECT_EQ(output.code, 3);
  EXPECT_NE(output.out.find("not enough memory"), std::string::npos) << output.out;
}

}  // namespace
}  // namespace evenkeel
