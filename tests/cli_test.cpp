// The command as a user meets it: exit codes, messages, nothing half-written. (explain has tests of its own.)
#include <gtest/gtest.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "run_program.h"

namespace {

struct Outcome {
  int code;
  std::string text;  // standard output and standard error together
};

Outcome run(const std::string& arguments, const std::string& redirect = " 2>&1") {
  const evenkeel::Output output =
      evenkeel::run_shell(std::string(EVENKEEL_PROGRAM) + " " + arguments + redirect);
  return {output.code, output.out};
}

TEST(Cli, HelpOfEveryCommandHasAnExample) {
  EXPECT_EQ(run("--help").code, 0);
  EXPECT_EQ(run("").code, 2);
  for (const char* command : {"demo", "explain", "conform", "data", "train", "sample", "probe", "capture",
                              "watch", "bench", "info"}) {
    const Outcome help = run(std::string(command) + " --help");
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_NE(help.text.find("example:\n  evenkeel " + std::string(command)), std::string::npos) << help.text;
  }
}

// A request that cannot be meant: exit code 2, and a message with what was found and what was expected.
TEST(Cli, BadRequestsSayWhatWasExpectedAndFound) {
  const struct {
    const char *arguments, *found, *expected;
  } table[] = {
      {"frobnicate", "'frobnicate'", "expected one of demo"},
      {"conform --frobnicate", "'--frobnicate'", "expected one of --plan"},
      {"conform --plan bf17", "'bf17'", "fp32, flash2, bf16_all, fp8"},
      {"conform --plan flash2,row_sun=bf16", "'row_sun'", "row_sum"},
      {"conform --plan flash2,row_sum=bf17", "'bf17'", "eXmY"},
      {"conform --plan flash2,row_sum=bf16/upward", "'upward'", "nearest_even"},
      {"conform --plan flash2 --stabiliser magic", "'magic'", "zero_sum"},
      {"conform --plan flash2,keel=lots", "keel=lots", "a number"},
      {"conform --case nothing", "'nothing'", "ties_2_tail"},
      {"conform --rows minus", "minus", "a whole number"},
      {"conform --rows 1", "--rows 1", "from 64"},
      {"conform --rows", "--rows", "needs a value"},
      {"conform gpu", "'gpu'", "expected cpu"},
      {"conform --json=yes", "'yes'", "takes no value"},
      {"bench sleep", "'sleep'", "attention"},
      {"bench round --gpu", "bench round", "bench attention"},
      {"bench attention --quick", "--quick", "with bench attention --gpu"},
      {"bench train --gpu --row 1", "--row", "with bench attention --gpu"},
      {"train --preset micro --data x --out y --backend gpu", "'gpu'", "auto, cpu, cuda"},
      {"train --preset micro --data x --out y --plan 'fp32; layer 3: keel=1'", "layer 3", "from 0 to 2"},
      {"bench attention --gpu --row 6", "--row 6", "from 1 to 5"},
      {"bench attention --gpu --plan bf17", "'bf17'", "flash2"},
      {"demo extra", "'extra'", "usage"},
      {"demo --plan nonsense", "'nonsense'", "bf16_all"},
      {"demo --plan fp32", "--plan", "--story"},
      {"demo --story --quick", "--story", "no --quick"},
      {"watch", "RUN", "usage"},
      {"watch . --port 65536", "65536", "from 0 to 65535"},
      {"info --verbose", "'--verbose'", "--json"},
  };
  for (const auto& row : table) {
    const Outcome result = run(row.arguments);
    EXPECT_EQ(result.code, 2) << row.arguments << "\n" << result.text;
    EXPECT_NE(result.text.find(row.found), std::string::npos) << row.arguments << "\n" << result.text;
    EXPECT_NE(result.text.find(row.expected), std::string::npos) << row.arguments << "\n" << result.text;
  }
}

TEST(Cli, ConformGivesJsonAndItsVerdictAsExitCode) {
  const Outcome good =
      run("conform --plan flash2 --stabiliser zero_sum --case random --rows 64 --json", " 2>/dev/null");
  EXPECT_EQ(good.code, 0) << good.text;
  const auto json = nlohmann::json::parse(good.text);
  EXPECT_TRUE(json["plans"][0]["passes"]);
  EXPECT_EQ(json["plans"][0]["cases"][0]["case"], "random");
  const Outcome bad = run("conform --plan bf16_all --case sink --rows 64 --json", " 2>/dev/null");
  EXPECT_EQ(bad.code, 1);
  EXPECT_EQ(nlohmann::json::parse(bad.text)["plans"][0]["cases"][0]["verdict"], "NOISY");
}

TEST(Cli, NoColourWithoutATerminal) {
  for (const char* arguments :
       {"explain 1 + 2 --to bf16", "conform --plan fp32 --case one_row --rows 64", "info"})
    EXPECT_EQ(run(arguments).text.find('\033'), std::string::npos) << arguments;
}

TEST(Cli, AFullDiskIsAnError) {
  if (std::FILE* full = std::fopen("/dev/full", "w")) {
    std::fclose(full);
    EXPECT_EQ(run("info", " > /dev/full 2>/dev/null").code, 3);
    EXPECT_EQ(run("explain 1 + 2", " > /dev/full 2>/dev/null").code, 3);
  } else {
    GTEST_SKIP() << "no /dev/full here";
  }
}

TEST(Cli, InfoNamesTheKernels) {
  const auto json = nlohmann::json::parse(run("info --json", " 2>/dev/null").text);
  EXPECT_TRUE(json.contains("version"));
  EXPECT_TRUE(json["kernels"] == "avx512" || json["kernels"] == "avx2" || json["kernels"] == "baseline");
  // The GPU's kernels, or why there is none; in words too.
  if (json["gpu"]["present"]) {
    EXPECT_EQ(json["gpu"]["kernels"][0]["plan"], "flash2,stabiliser=consistent");
    EXPECT_FALSE(json["gpu"]["kernels"][1]["why"].get<std::string>().empty());
  } else {
    const std::string why = json["gpu"]["why"];
    EXPECT_NE(run("info").text.find("GPU        none: " + why), std::string::npos);
    for (const char* arguments : {"conform --gpu", "bench attention --gpu", "bench train --gpu"}) {
      const Outcome refused = run(arguments);
      EXPECT_EQ(refused.code, 3);
      EXPECT_NE(refused.text.find("no GPU: " + why), std::string::npos) << refused.text;
    }
  }
}

}  // namespace
