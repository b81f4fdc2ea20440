// `evenkeel explain` as a user meets it: output, messages and exit codes; and the files of --mma.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/json_text.h"
#include "base/mma_files.h"
#include "numerics/tensor_core.h"
#include "run_program.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

class ExplainCommand : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("explain_cli_test_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return (folder_ / name).string();
  }

  // The arguments as a shell reads them.
  Output run(const std::string& arguments) {
    const std::string errors = (folder_ / "stderr").string();
    const std::string command =
        std::string("'") + EVENKEEL_PROGRAM + "' explain " + arguments + " 2>'" + errors + "'";
    Output output = run_shell(command);
    std::stringstream text;
    text << std::ifstream(errors).rdbuf();
    output.err = text.str();
    return output;
  }

  void expect_refused(const std::string& arguments, int code, const std::string& message) {
    const Output output = run(arguments);
    EXPECT_EQ(output.code, code) << arguments;
    EXPECT_EQ(output.out, "") << arguments;
    EXPECT_NE(output.err.find(message), std::string::npos) << arguments << "\n" << output.err;
  }

  fs::path folder_;
};

TEST_F(ExplainCommand, the_papers_example) {
  const Output output = run("-2.4071154594421387 + -2.296875 --to bf16");
  EXPECT_EQ(output.code, 0);
  EXPECT_EQ(output.err, "");
  for (const char* part :
       {"= -4.703990459442139, exactly", "a carry out", "stored: 0xC0968717 ",
        "-1.0010110 | 1 | 000011100010111", "sticky bit 1: at least one of the 15 bits",
        "stored: 0xC097 = -1.0010111 x 2^2 = -4.71875", "stored - exact = -0.014759540557861328"})
    EXPECT_NE(output.out.find(part), std::string::npos) << part << "\n" << output.out;
  EXPECT_EQ(output.out.find('\x1b'), std::string::npos);  // no colour: not a terminal
  // One quoted expression, which begins with a minus; and options in front.
  EXPECT_EQ(run("'-2.4071154594421387 + -2.296875' --to bf16").out, output.out);
  EXPECT_EQ(run("--to=bf16 '-2.4071154594421387+-2.296875'").out, output.out);
}

TEST_F(ExplainCommand, json) {
  const Output output = run("0xC01A0E2E + 0xC0130000 --to bf16 --json");
  EXPECT_EQ(output.code, 0);
  const Json json = parse_json(output.out);
  EXPECT_EQ(json["error"], -0.014759540557861328);
  EXPECT_EQ(json["result"]["code"], "0xC097");
}

TEST_F(ExplainCommand, operations_formats_and_modes) {
  const auto value = [&](const std::string& arguments) {
    const Output output = run(arguments + " --json");
    EXPECT_EQ(output.code, 0) << arguments << output.err;
    return parse_json(output.out)["value"];
  };
  EXPECT_EQ(value("3 x 0.5"), 1.5);
  EXPECT_EQ(value("3 '*' 0.5"), 1.5);
  EXPECT_EQ(value("'3 * 0.5 + 1'"), 2.5);
  EXPECT_EQ(value("1 + 2 + 3 + 4.5"), 10.5);
  EXPECT_EQ(value("-inf + 1"), "-inf");
  EXPECT_EQ(value("1.01 --to bf16"), 1.0078125);
  EXPECT_EQ(value("1.01 --to bf16 --mode up"), 1.015625);
  EXPECT_EQ(value("1 + 0x1p-20 --mode up"), 1 + 0x1p-20);
  EXPECT_EQ(value("1 + 0x1p-30 --mode up"), 1 + 0x1p-23);
  EXPECT_EQ(value("1 + 0x1p-30 --in fp32/up --to bf16"), 1.0);
  EXPECT_EQ(value("1 + 0x1p-30 --in bf16/up"), 1.0078125);
  EXPECT_EQ(value("100 + 400 --to e4m3/saturate"), 448);
  EXPECT_EQ(value("1 + 0x1p-9 --to bf16 --mode stochastic --seed 3"),
            value("1 + 0x1p-9 --to bf16 --mode stochastic --seed 3"));
  EXPECT_EQ(value("1 + 1 x 0x1p-12 + -1 --accumulate tensor_core"), 0x1p-12);
  EXPECT_EQ(value("1 + 1 x 0x1p-9 + -1 --mma e4m3"), 0x1p-9);
}

TEST_F(ExplainCommand, a_block_that_shares_a_scale) {
  const Output output = run("'254 3 -5, 0.9' --to 'int8*row'");
  EXPECT_EQ(output.code, 0) << output.err;
  for (const char* part : {"int8*row: x becomes scale * int8(x / scale)", "scale        2 = 254 / 127",
                           "0xFE", "sum of the errors 1.10000002"})
    EXPECT_NE(output.out.find(part), std::string::npos) << part << "\n" << output.out;
  const Json json = Json::parse(run("500 17 --to 'e4m3*block32@e8m0' --json").out);
  EXPECT_EQ(json["blocks"][0]["scale"], 1);
  EXPECT_EQ(json["blocks"][0]["values"][0]["becomes"], 448);
  EXPECT_EQ(json["blocks"][0]["values"][0]["saturated"], true);
  EXPECT_EQ(json["blocks"][0]["values"][1]["code"], "0x58");
  // The numbers are a column where columns have the scales: 17 of them are two blocks of column16.
  const Json column = Json::parse(run("7 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 3.5 --to 'int4*column16' --json").out);
  EXPECT_EQ(column["blocks"].size(), 2u);
  EXPECT_EQ(column["blocks"][0]["scale"], 1);
  EXPECT_EQ(column["blocks"][1]["scale"], 0.5);
  const Json two = Json::parse(run("6 3 0 --to 'e2m1*block16@e4m3*row' --json").out);
  EXPECT_NEAR(two["blocks"][0]["values"][1]["becomes"].get<double>(), 3, 1e-6);
  expect_refused("1 + 2 --to 'int8*row'", 2, "expected a number");
  expect_refused("1 inf --to 'int8*row'", 2, "expected finite numbers");
  expect_refused("1 2 --to 'int8*row/stochastic'", 2, "do not go with a shared scale");
}

TEST_F(ExplainCommand, help) {
  const Output output = run("--help");
  EXPECT_EQ(output.code, 0);
  EXPECT_NE(output.out.find("evenkeel explain -2.4071154594421387 + -2.296875 --to bf16"), std::string::npos);
  EXPECT_NE(output.out.find("h200"), std::string::npos);
}

TEST_F(ExplainCommand, refuses_with_two) {
  expect_refused("", 2, "expected an expression");
  expect_refused("1 +", 2, "expected a number, found the end at character 4 of '1 +'");
  expect_refused("1 + foo", 2, "found 'foo' at character 5");
  expect_refused("1 + 2 --to bf17", 2, "unknown format 'bf17': expected fp32, tf32, bf16");
  expect_refused("1 + 2 --in what", 2, "unknown format 'what'");
  expect_refused("1 + 2 --mode sideways", 2, "unknown rounding mode 'sideways': expected nearest_even");
  expect_refused("1 + 2 --to bf16/up --mode down", 2, "--mode down contradicts the mode in 'bf16/up'");
  expect_refused("1 + 2 --bogus", 2, "unknown option '--bogus'");
  expect_refused("1 + 2 --accumulate sideways", 2,
                 "unknown --accumulate 'sideways': expected fp32_sequential or tensor_core");
  expect_refused("1 + 2 --accumulate tensor_core --chip h300", 2,
                 "unknown chip 'h300': expected one of h200");
  expect_refused("1 + 2 --chip h200", 2, "--chip needs");
  expect_refused("1 + 2 --mma fp32", 2,
                 "unknown operand format 'fp32' for --mma: expected bf16, fp16, tf32, e4m3 or e5m2");
  expect_refused("1 + 2 --mma e4m3 --chip a100", 2, "no e4m3 tensor cores are known for a100");
  expect_refused("1 + 0.1 --mma bf16", 2, "0.1 is no number of bf16");
  expect_refused("1 + 2 --row 1", 2, "--file-a");
  expect_refused("--mma bf16", 2, "--file-a and --file-b");
  expect_refused("--mma bf16 --file-a x", 2, "--file-b");
  expect_refused("--file-a x --file-b y", 2, "--file-a needs --mma");
  expect_refused("1 --mma bf16 --file-a x --file-b y", 2, "unexpected '1'");
  expect_refused("--mma bf16 --file-a x --file-b y --to bf16", 2, "do not go with --file-a");
}

// --------------------------------------------------------------------------------------- files of products

constexpr char kOne[] = "3f800000", kTwo[] = "40000000";

TEST_F(ExplainCommand, multiplies_files) {
  const std::string a = write("a", "3f800000 40000000\n40400000 c0000000 \r\n\n");
  const std::string b = write("b", "40000000 40000000\n3F800000 3f800000");
  const std::string c = write("c", "00111111100000000000000000000000\n11000000000000000000000000000000\n");
  const std::string files = "--mma bf16 --file-a " + a + " --file-b " + b;
  const Output without = run(files), with = run(files + " --file-c " + c);
  EXPECT_EQ(without.code, 0) << without.err;
  EXPECT_EQ(without.out, "40c00000\n3f800000\n");
  EXPECT_EQ(with.out, "40e00000\nbf800000\n");
  EXPECT_EQ(run(files + " --chip a100").out, without.out);
  const Json json = parse_json(run(files + " --json").out);
  EXPECT_EQ(json["results"], parse_json(R"(["40c00000", "3f800000"])"));
  EXPECT_EQ(json["chip"], "h200");

  const Output row = run(files + " --row 2");
  EXPECT_EQ(row.code, 0);
  EXPECT_NE(row.out.find("3 x 1"), std::string::npos) << row.out;
  EXPECT_NE(row.out.find("0x3F800000 = 1"), std::string::npos) << row.out;
  EXPECT_EQ(parse_json(run(files + " --row 2 --json").out)["code"], "0x3F800000");
  expect_refused(files + " --row 3", 2, "--row 3: expected 1 to 2");
  expect_refused(files + " --row 0", 2, "--row 0");
}

TEST_F(ExplainCommand, refuses_bad_files_with_three) {
  const std::string good = write("good", "3f800000 40000000\n40400000 c0000000\n");
  const auto refused = [&](const std::string& b, const std::string& message,
                           const std::string& format = "bf16") {
    expect_refused("--mma " + format + " --file-a " + good + " --file-b " + b, 3, message);
  };
  refused((folder_ / "missing").string(), "No such file");
  refused(folder_.string(), "expected a file, found a folder");
  refused(write("empty", ""), "found an empty file");
  refused(write("blank", "\n\n"), "found an empty file");
  refused(write("short", "3f800000 40000000\n"), "short: expected 2 rows as in");
  refused(write("narrow", "3f800000\n3f800000\n"), "narrow: expected 2 words a row as in");
  refused(write("ragged", "3f800000 40000000\n40400000\n"),
          "ragged:2: expected 2 words as on line 1, found 1");
  refused(write("gap", "3f800000 40000000\n\n40400000 40400000\n"),
          "gap:2: expected 2 words as on line 1, found 0");
  refused(write("digits", "3f800000 40000000\n4040000g c0000000\n"),
          "digits:2: expected FP32 words of 8 hexadecimal digits, found '4040000g'");
  refused(write("prefix", "0x3f800000 40000000\n"), "prefix:1: expected FP32 words of 8 hexadecimal digits");
  refused(write("wide", "3f800000 3f800001\n40400000 c0000000\n"),
          "wide:1: expected numbers of bf16, found '3f800001'");
  refused(write("large", "3f800000 43f00000\n40400000 c0000000\n"),
          "large:1: expected numbers of e4m3, found '43f00000' (480)", "e4m3");
  const std::string files = "--mma bf16 --file-a " + good + " --file-b " + good + " --file-c ";
  const std::string word(32, '0');
  expect_refused(files + write("c1", word + "\n"), 3, "c1: expected 2 rows as in");
  expect_refused(files + write("c2", word + "\n" + word + "1\n"), 3,
                 "c2:2: expected an FP32 word of 32 binary digits");
  expect_refused(files + write("c3", word + "\n00000000000000000000000000000002\n"), 3,
                 "c3:2: expected an FP32 word");
  expect_refused(files + write("c4", kOne + std::string("\n") + kTwo), 3, "c4:1: expected an FP32 word");
}

TEST_F(ExplainCommand, real_files_come_out_as_the_h200_computed_them) {
  const fs::path vectors = fs::path(EVENKEEL_SOURCE_DIR) / "../shared/vectors/h200/bf16";
  if (!fs::exists(vectors / "d.txt")) GTEST_SKIP() << "real results are not here; looked in " << vectors;
  const Output output = run("--mma bf16 --file-a " + (vectors / "a.txt").string() + " --file-b " +
                            (vectors / "b.txt").string() + " --file-c " + (vectors / "c.txt").string());
  EXPECT_EQ(output.code, 0) << output.err;
  std::stringstream d;
  d << std::ifstream(vectors / "d.txt").rdbuf();
  std::string expected;
  for (const float x : parse_mma_words(d.str(), "d.txt")) {
    char word[16];
    std::snprintf(word, sizeof word, "%08x\n", std::bit_cast<uint32_t>(x));
    expected += word;
  }
  EXPECT_EQ(output.out, expected);
}

TEST(MmaFiles, reads_every_value_of_the_format) {
  for (const Format format : {kBf16, kFp16, kTf32, kE4m3, kE5m2}) {
    std::string text;
    std::vector<float> expected;
    for (uint32_t code = 0; code < 1u << code_bits(format); code += format == kTf32 ? 7 : 1) {
      char word[16];
      expected.push_back(decode(format, code));
      std::snprintf(word, sizeof word, "%08x\n", std::bit_cast<uint32_t>(expected.back()));
      text += word;
    }
    const MmaOperands operands = parse_mma_operands(text, "all", format);
    ASSERT_EQ(operands.rows, expected.size());
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_TRUE(operands.values[i] == expected[i] ||
                  (std::isnan(operands.values[i]) && std::isnan(expected[i])));
  }
  EXPECT_THROW(parse_mma_operands("7f800000", "infinity", kE4m3), DataError);
  EXPECT_NO_THROW(parse_mma_operands("7f800000", "infinity", kE5m2));
}

}  // namespace
}  // namespace evenkeel
