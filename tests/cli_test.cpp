// The command as a user meets it: exit codes, messages, nothing half-written. (explain has tests of its own.)
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "attention/precision_plan.h"
#include "base/json_text.h"
#include "base/text.h"
#include "records/schema.h"
#include "run_program.h"

namespace {

using evenkeel::nearest_name;
using evenkeel::parse_json;

struct Outcome {
  int code;
  std::string text;  // standard output and standard error together
};

Outcome run_program(const std::string& command) {
  const evenkeel::Output output = evenkeel::run_shell(command + " 2>&1");
  return {output.code, output.out};
}

Outcome run(const std::string& arguments, const std::string& redirect = " 2>&1") {
  const evenkeel::Output output =
      evenkeel::run_shell(std::string(EVENKEEL_PROGRAM) + " " + arguments + redirect);
  return {output.code, output.out};
}

using Json = nlohmann::json;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Every command and every part of one, with its options.
Json all_commands() { return parse_json(run("help --json", " 2>/dev/null").text)["commands"]; }

TEST(Cli, help_of_every_command_has_an_example) {
  EXPECT_EQ(run("--help").code, 0);
  EXPECT_EQ(run("").code, 2);
  for (const Json& row : all_commands()) {
    const std::string command = row["command"];
    const Outcome help = run(command + " --help");
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_TRUE(has(help.text, "example:\n  evenkeel " + command)) << help.text;
    for (const Json& option : row["options"])
      EXPECT_TRUE(has(help.text, "\n  " + option["name"].get<std::string>())) << help.text;
    if (command.find(' ') == std::string::npos) EXPECT_EQ(run("help " + command).text, help.text);
  }
  EXPECT_EQ(run("help").text, run("--help").text);
  const std::string bench = run("bench --help").text;
  for (const char* name : {"round", "attention", "train", "probes"})
    EXPECT_TRUE(has(bench, std::string("\n  ") + name)) << bench;
}

// An invalid request: exit code 2, and a message with what was found and what was expected.
TEST(Cli, bad_requests_say_what_was_expected_and_found) {
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
      {"bench train --gpu --preset gpt3", "'gpt3'", "llama-124m"},
      {"bench attention --gpu --preset gpt2", "--preset", "with bench train --gpu"},
      {"bench train --rounds 3", "--rounds", "bench train --gpu"},
      {"train --preset micro --data x --out y --backend gpu", "'gpu'", "auto, cpu, cuda"},
      {"train --preset micro --data x --out y --plan 'fp32; layer 3: keel=1'", "layer 3", "from 0 to 2"},
      {"bench attention --gpu --row 9", "--row 9", "from 1 to 7"},
      {"bench attention --gpu --plan bf17", "'bf17'", "flash2"},
      {"demo extra", "'extra'", "usage"},
      {"demo --plan nonsense", "'nonsense'", "bf16_all"},
      {"demo --plan fp32", "--plan", "--story"},
      {"demo --story --full", "--story", "expected no --quick, --full, --verbose, --text or --out"},
      {"demo --quick --full", "found both", "expected --quick or --full"},
      {"trian --steps 3", "'trian'", "did you mean train?"},
      {"conform --summery", "'--summery'", "did you mean --summary?"},
      {"data prepar", "'prepar'", "did you mean prepare?"},
      {"bench rounds", "'rounds'", "did you mean round?"},
      {"help trani", "'trani'", "did you mean train?"},
      {"completion fish", "'fish'", "expected one of bash"},
      {"help train --man", "COMMAND", "expected one of"},
      {"report ''", "empty word", "RUN"},
      {"conform --plan ''", "--plan", "found nothing"},
      {"data --json", "'--json'", "usage"},
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

TEST(Cli, two_dashes_end_the_options) {
  for (const char* command : {"verdict", "report", "watch", "sample", "forecast", "isolate"}) {
    const Outcome plain = run(std::string(command) + " /nowhere/run"),
                  dashes = run(std::string(command) + " -- /nowhere/run");
    EXPECT_EQ(plain.code, 3) << plain.text;
    EXPECT_EQ(dashes.code, plain.code) << command;
    EXPECT_EQ(dashes.text, plain.text) << command;
  }
  // Behind them a word is a word, whatever it looks like.
  const Outcome named = run("verdict -- --json");
  EXPECT_EQ(named.code, 3) << named.text;
  EXPECT_TRUE(has(named.text, "--json: expected a run's folder")) << named.text;
  EXPECT_EQ(run("verdict --").code, 2);
}

TEST(Cli, a_default_is_said_once) {
  const Json commands = all_commands();
  for (const Json& row : commands)
    for (const Json& option : row["options"]) {
      const std::string help = option["help"];
      const size_t at = help.rfind(" (default ");
      if (at == std::string::npos || !help.ends_with(')')) continue;
      const std::string standard = help.substr(at + 10, help.size() - at - 11);
      EXPECT_FALSE(has(help.substr(0, at), "(" + standard + ")")) << row["command"] << " " << help;
    }
}

TEST(Cli, an_unknown_cpu_target_is_no_target) {
  const Outcome bad = run_program("EVENKEEL_CPU=nonsense " EVENKEEL_PROGRAM " info");
  EXPECT_EQ(bad.code, 2) << bad.text;
  EXPECT_TRUE(has(bad.text, "EVENKEEL_CPU: expected baseline, avx2 or avx512, found 'nonsense'")) << bad.text;
  for (const char* good : {"baseline", "avx2", "avx512", ""})
    EXPECT_EQ(run_program(std::string("EVENKEEL_CPU=") + good + " " + EVENKEEL_PROGRAM + " info").code, 0);
}

TEST(Cli, every_command_takes_json_and_its_errors_are_json) {
  for (const Json& row : all_commands()) {
    const std::string command = row["command"];
    if (command == "data") continue;  // its parts do
    bool found = false;
    for (const Json& option : row["options"]) found = found || option["name"] == "--json";
    EXPECT_TRUE(found) << command;
    const Outcome refused = run(command + " --json --frobnicate", " 2>/dev/null");
    EXPECT_EQ(refused.code, 2) << command;
    const Json error = parse_json(refused.text)["error"];
    EXPECT_EQ(error["kind"], "usage") << command;
    EXPECT_TRUE(has(error["message"], "'--frobnicate'")) << command;
  }
  for (const char* arguments : {"report /nowhere --json", "verdict /nowhere --json", "watch /nowhere --json",
                                "sample /nowhere --json", "demo --text /nowhere --json"}) {
    const Outcome refused = run(arguments, " 2>/dev/null");
    EXPECT_EQ(refused.code, 3) << arguments;
    EXPECT_EQ(parse_json(refused.text)["error"]["kind"], "data") << arguments;
  }
  EXPECT_EQ(parse_json(run("frobnicate --json", " 2>/dev/null").text)["error"]["kind"], "usage");
}

// docs/reference.md's parts: every command, option, site, stabiliser, plan and record is in one of them.
TEST(Cli, the_reference_has_every_row_of_the_tables) {
  const std::string commands = run("help --markdown commands").text;
  const std::string options = run("help --markdown options").text;
  for (const Json& row : all_commands()) {
    const std::string name = row["command"];
    EXPECT_TRUE(has(options, "\n### " + name + "\n")) << name;
    if (name.find(' ') == std::string::npos) EXPECT_TRUE(has(commands, "| `" + name + "` | ")) << name;
    for (const Json& option : row["options"])
      EXPECT_TRUE(has(options, "| `" + option["name"].get<std::string>())) << name << " " << option["name"];
  }
  const std::string plan = run("help --markdown plan").text;
  for (const std::string_view name : evenkeel::kSiteNames)
    EXPECT_TRUE(has(plan, fmt::format("| `{}` | ", name))) << name;
  for (const std::string_view name : evenkeel::kStabiliserNames)
    EXPECT_TRUE(has(plan, fmt::format("| `{}` | ", name))) << name;
  for (const evenkeel::NamedPlan& row : evenkeel::kNamedPlans)
    EXPECT_TRUE(row.text.empty() || has(plan, fmt::format("| `{}` | `{}` |\n", row.name, row.text)))
        << row.name;
  const std::string records = run("help --markdown records").text;
  for (const std::string_view file : evenkeel::kRecordFileNames)
    EXPECT_TRUE(has(records, fmt::format("\n### {}\n", file)));
  for (const evenkeel::RecordField& field : evenkeel::kRecordFields)
    EXPECT_TRUE(has(
        records,
        fmt::format("{}{}` |", field.inside.empty() ? "`" : fmt::format("`{}.", field.inside), field.name)))
        << field.name;
  EXPECT_EQ(run("help --markdown nothing").code, 2);
}

// What bash makes of the script, as if a person had typed these words and pressed Tab.
TEST(Cli, bash_completes_commands_and_options) {
  if (run_program("bash -c true").code != 0) GTEST_SKIP() << "no bash here";
  const auto completed = [](const std::string& words) {
    return run_program("bash -c 'eval \"$(" + std::string(EVENKEEL_PROGRAM) +
                       " completion bash)\"; COMP_WORDS=(" + words +
                       "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _evenkeel; echo ${COMPREPLY[@]}'")
        .text;
  };
  EXPECT_EQ(completed("evenkeel tra"), "train\n");
  EXPECT_EQ(completed("evenkeel train --keel"), "--keel-ramp\n");
  EXPECT_EQ(completed("evenkeel data p"), "prepare\n");
  EXPECT_EQ(completed("evenkeel data prepare --val"), "--val-share\n");
  EXPECT_EQ(completed("evenkeel bench pro"), "probes\n");
  EXPECT_EQ(completed("evenkeel report runs/"), "\n");  // left to the names of files
  const std::string script = run("completion bash").text;
  for (const Json& row : all_commands())
    for (const Json& option : row["options"])
      EXPECT_TRUE(has(script, option["name"])) << row["command"] << " " << option["name"];
}

TEST(Cli, the_manual_page_has_every_option) {
  const std::string page = run("help --man").text;
  EXPECT_TRUE(page.starts_with(".TH EVENKEEL 1")) << page.substr(0, 80);
  const auto roff = [](std::string text) {
    for (size_t at = 0; (at = text.find('-', at)) != std::string::npos; at += 2) text.insert(at, 1, '\\');
    return text;
  };
  for (const Json& row : all_commands()) {
    EXPECT_TRUE(has(page, "\n.SS " + row["command"].get<std::string>() + "\n")) << row["command"];
    for (const Json& option : row["options"]) EXPECT_TRUE(has(page, roff(option["name"]))) << option["name"];
  }
  if (run_program("groff --version").code == 0)
    EXPECT_EQ(run("help --man", " | groff -man -ww -Tutf8 2>&1 >/dev/null").text, "");
}

TEST(Cli, a_folder_without_a_run_is_no_report) {
  const Outcome docs = run("report " + std::string(EVENKEEL_SOURCE_DIR) + "/docs -o /dev/null");
  EXPECT_EQ(docs.code, 3) << docs.text;
  EXPECT_TRUE(has(docs.text, "found neither config.toml nor metrics.jsonl")) << docs.text;
}

TEST(Cli, names_that_are_near_are_suggested) {
  const std::vector<std::string_view> names = {"train", "data", "report", "--rows"};
  EXPECT_EQ(nearest_name("trian", names), "train");     // a swap
  EXPECT_EQ(nearest_name("trin", names), "train");      // one missing
  EXPECT_EQ(nearest_name("repport", names), "report");  // one too many
  EXPECT_EQ(nearest_name("--rosw", names), "--rows");
  EXPECT_EQ(nearest_name("xyz", names), "");
  EXPECT_EQ(nearest_name("", names), "");
  EXPECT_EQ(nearest_name(std::string(100'000, 'a'), names), "");
}

TEST(Cli, conform_gives_json_and_its_verdict_as_exit_code) {
  const Outcome good =
      run("conform --plan flash2 --stabiliser zero_sum --case random --rows 64 --json", " 2>/dev/null");
  EXPECT_EQ(good.code, 0) << good.text;
  const auto json = parse_json(good.text);
  EXPECT_TRUE(json["plans"][0]["passes"]);
  EXPECT_EQ(json["plans"][0]["cases"][0]["case"], "random");
  const Outcome bad = run("conform --plan bf16_all --case sink --rows 64 --json", " 2>/dev/null");
  EXPECT_EQ(bad.code, 1);
  EXPECT_EQ(parse_json(bad.text)["plans"][0]["cases"][0]["verdict"], "NOISY");
}

TEST(Cli, conform_judges_the_kernel_of_a_library) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "minutes under a sanitizer; judge_test runs the same code";
#endif
  const std::string folder = testing::TempDir() + "evenkeel_conform_" + std::to_string(getpid());
  std::filesystem::create_directories(folder);
  const std::string library = "conform --quick --rows 64 --library " EVENKEEL_FORM_KERNEL;
  const Outcome good = run(library + " --badge " + folder + "/badge.svg", " 2>/dev/null");
  EXPECT_EQ(good.code, 0) << good.text;
  EXPECT_NE(good.text.find("not judged: sinks: yes"), std::string::npos) << good.text;
  EXPECT_TRUE(std::filesystem::exists(folder + "/badge.svg"));
  // Families of far scores: a right kernel passes; one whose exponent keeps the rounding of m log2 e does not.
  const std::string far = " --case far_one_key --case far_padding";
  const Outcome fused = run(library + far + " --json --symbol fused_kernel", " 2>/dev/null");
  EXPECT_EQ(fused.code, 1) << fused.text;
  const auto leaks = parse_json(fused.text);
  ASSERT_EQ(leaks["families"].size(), 2u) << fused.text;
  for (const auto& family : leaks["families"]) {
    EXPECT_EQ(family["verdict"], "WRONG, NOISY") << family["family"];
    EXPECT_NE(std::string(family["what_to_fix"]).find("rows that see one key"), std::string::npos);
  }
  const std::string wide = library + " --symbol wide_kernel";
  const Outcome bad =
      run(wide + far + " --json --failing " + folder + "/failing --junit " + folder + "/junit.xml",
          " 2>/dev/null");
  EXPECT_EQ(bad.code, 1) << bad.text;
  const auto json = parse_json(bad.text);
  EXPECT_EQ(json["forms"]["named"][0]["fault"], "the window is one key too wide (left)");
  ASSERT_EQ(json["families"].size(), 2u) << bad.text;
  for (const auto& family : json["families"]) EXPECT_EQ(family["verdict"], "ok") << family["family"];
  EXPECT_TRUE(std::filesystem::exists(folder + "/junit.xml"));
  EXPECT_EQ(run(wide + " --replay " + folder + "/failing", " 2>/dev/null").code, 1);
  EXPECT_EQ(run(library + " --replay " + folder + "/failing", " 2>/dev/null").code, 0);
  EXPECT_EQ(run(library + " --replay " EVENKEEL_SOURCE_DIR "/tests/captures/ties.safetensors", " 2>&1").code,
            0);
  std::ofstream(folder + "/empty").close();
  EXPECT_EQ(run(library + " --replay " + folder + "/empty", " 2>&1").code, 3);
  EXPECT_EQ(run(library + " --symbol nothing", " 2>&1").code, 3);
  EXPECT_EQ(run("conform --library " + folder + "/nothing.so", " 2>&1").code, 3);
  EXPECT_EQ(run("conform --replay " + folder + "/failing", " 2>&1").code, 2);
  std::filesystem::remove_all(folder);
}

// Whatever a kernel does to its process: a code that is not 0, and words that say where.
TEST(Cli, a_kernel_cannot_end_conform_without_words) {
  const std::string library = "conform --quick --rows 64 --case sink --library " EVENKEEL_FORM_KERNEL;
  for (const char* output : {"", " --json"}) {
    const Outcome exits = run(library + output + " --symbol exiting_kernel", " 2>&1");
    EXPECT_EQ(exits.code, 3) << exits.text;
    EXPECT_NE(exits.text.find("ended the process (exit code 0)"), std::string::npos) << exits.text;
    EXPECT_NE(exits.text.find("run exiting_kernel on the form B 1"), std::string::npos) << exits.text;
  }
#if !defined(__SANITIZE_ADDRESS__)
  const Outcome aborts = run(library + " --symbol aborting_kernel", " 2>&1; exit $?");
  EXPECT_EQ(aborts.code, 128 + SIGABRT) << aborts.text;
  EXPECT_NE(aborts.text.find("signal 6"), std::string::npos) << aborts.text;
  EXPECT_NE(aborts.text.find("run aborting_kernel on the family sink"), std::string::npos) << aborts.text;
#endif
}

TEST(Cli, an_unknown_family_is_named) {
  for (const char* kernel : {"", " --library " EVENKEEL_FORM_KERNEL}) {
    const Outcome found = run(std::string("conform --case sink --case nope") + kernel, " 2>&1");
    EXPECT_EQ(found.code, 2) << found.text;
    EXPECT_NE(found.text.find("'nope': expected one of random, "), std::string::npos) << found.text;
  }
}

// dlopen would wait for a writer. Nobody writes here: a program that opens it hangs, and the test with it.
TEST(Cli, a_library_that_is_no_file_is_refused) {
  const std::string folder = testing::TempDir() + "evenkeel_library_" + std::to_string(getpid());
  std::filesystem::create_directories(folder);
  ASSERT_EQ(mkfifo((folder + "/fifo").c_str(), 0600), 0);
  for (const std::string& path : {folder + "/fifo", folder, std::string("/dev/null")}) {
    const Outcome found = run("conform --library " + path, " 2>&1");
    EXPECT_EQ(found.code, 3) << found.text;
    EXPECT_NE(found.text.find("regular file"), std::string::npos) << found.text;
  }
  const Outcome replayed =
      run("conform --library " EVENKEEL_FORM_KERNEL " --replay " + folder + "/fifo", " 2>&1");
  EXPECT_EQ(replayed.code, 3) << replayed.text;
  std::filesystem::remove_all(folder);
}

TEST(Cli, no_colour_without_a_terminal) {
  for (const char* arguments :
       {"explain 1 + 2 --to bf16", "conform --plan fp32 --case one_row --rows 64", "info"})
    EXPECT_EQ(run(arguments).text.find('\033'), std::string::npos) << arguments;
}

TEST(Cli, a_full_disk_is_an_error) {
  if (std::FILE* full = std::fopen("/dev/full", "w")) {
    std::fclose(full);
    EXPECT_EQ(run("info", " > /dev/full 2>/dev/null").code, 3);
    EXPECT_EQ(run("explain 1 + 2", " > /dev/full 2>/dev/null").code, 3);
  } else {
    GTEST_SKIP() << "no /dev/full here";
  }
}

TEST(Cli, info_names_the_kernels) {
  const auto json = parse_json(run("info --json", " 2>/dev/null").text);
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
