// `evenkeel demo`, whole: text, batches and sums are the same bits everywhere, so what it finds is, too.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "base/whole_file.h"
#include "isolation_cases.h"
#include "run_folder.h"
#include "run_program.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

class DemoTest : public RunFolderTest {};

TEST_F(DemoTest, finds_the_rounding_it_was_given_and_writes_the_page) {
  SKIP_LONG_RUNS();
  const std::string command = fmt::format("{} demo --out {}", EVENKEEL_PROGRAM, (folder / "demo").string());
  const Output demo = run_shell(command + " 2>&1");
  ASSERT_EQ(demo.code, 0) << demo.out;
  EXPECT_TRUE(demo.out.starts_with("This trains a small GPT-2 three times")) << demo.out;
  const size_t summary = demo.out.find("3. What happened");
  ASSERT_NE(summary, std::string::npos) << demo.out;
  const std::string lines = demo.out.substr(summary);
  EXPECT_NE(lines.find("cause:    row_sum of layer 0 head 1 (drift)\n"), std::string::npos) << lines;
  EXPECT_NE(lines.find("verdict:  Drift: rounding row_sum (e5m2) in layer 0 head 1"), std::string::npos)
      << lines;
  EXPECT_NE(lines.find("\nhow sure: sure"), std::string::npos) << lines;
  EXPECT_NE(demo.out.find("One addition of that sum: "), std::string::npos) << demo.out;
  // A story that fits on a screen.
  EXPECT_LE(std::count(demo.out.begin(), demo.out.end(), '\n'), 36) << demo.out;
  // docs/demo.svg shows this story (scripts/recording draws it). Its long lines are broken, and paths and times differ.
  const std::string drawing = read_whole_file(fs::path(EVENKEEL_SOURCE_DIR) / "docs/demo.svg", 5'000'000);
  std::istringstream shown(demo.out);
  int compared = 0;
  for (std::string line; std::getline(shown, line);) {
    const bool is_broken = line.size() > 100 && line.find("offset") == std::string::npos;
    if (line.empty() || is_broken) continue;
    if (line.starts_with("verdict:") || line.starts_with("time:") || line.starts_with("report:") ||
        line.starts_with("next:"))
      continue;
    EXPECT_NE(drawing.find(">" + line + "<"), std::string::npos) << "docs/demo.svg lacks " << line;
    ++compared;
  }
  EXPECT_GT(compared, 12) << demo.out;
  const std::string page = read_whole_file(folder / "demo/report.html", 5'000'000);
  for (const char* run : {"row_sum-e5m2", "zero_sum", "fp32"})
    EXPECT_NE(page.find(run), std::string::npos) << run;
  // A second one does not write over the first.
  EXPECT_EQ(run_shell(command + " 2>&1").code, 3);
  // The last line is a command that works.
  const size_t next = lines.rfind("next:     evenkeel ");
  ASSERT_NE(next, std::string::npos) << lines;
  const std::string words = lines.substr(next + 19, lines.find('\n', next) - next - 19);
  const Output mended = run_shell(fmt::format("{} {} --steps 110 2>&1", EVENKEEL_PROGRAM, words));
  EXPECT_EQ(mended.code, 0) << words << "\n" << mended.out;
}

}  // namespace
}  // namespace evenkeel
