// Text from a checkpoint: the choice of a token, the library's call, the command.
#include "training/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_text.h"
#include "run_folder.h"
#include "run_program.h"
#include "training/trainer.h"

namespace evenkeel {
namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(ChooseToken, follows_temperature_and_top) {
  const std::vector<float> logits = {0.0f, 2.0f, 2.0f, std::log(3.0f)};
  RandomStream draw({1, 0, 0});
  EXPECT_EQ(choose_token(logits, {.temperature = 0}, draw), 1);  // the first of equals
  EXPECT_EQ(choose_token(logits, {.temperature = 5, .top = 1}, draw), 1);
  // Frequencies are those of softmax: exp(logit / T) over the `top` likeliest.
  constexpr int kDraws = 20000;
  std::vector<int> count(4);
  for (int n = 0; n < kDraws; ++n)
    ++count[static_cast<size_t>(choose_token(logits, {.temperature = 1}, draw))];
  const double sum = 1 + 2 * std::exp(2.0) + 3;
  for (size_t n = 0; n < 4; ++n) {
    const double p = std::exp(static_cast<double>(logits[n])) / sum;
    EXPECT_NEAR(count[n], kDraws * p, 5 * std::sqrt(kDraws * p * (1 - p))) << n;
  }
  std::vector<int> of_top(4);
  for (int n = 0; n < 1000; ++n)
    ++of_top[static_cast<size_t>(choose_token(logits, {.temperature = 1, .top = 2}, draw))];
  EXPECT_EQ(of_top[0] + of_top[3], 0);
}

TEST(ChooseToken, refuses_what_has_no_likeliest) {
  RandomStream draw({1, 0, 0});
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInf = std::numeric_limits<float>::infinity();
  for (const std::vector<float>& logits : {std::vector<float>{0, kNan, 1}, {kInf, 0}, {-kInf, -kInf}})
    for (const double temperature : {0.0, 1.0})
      EXPECT_THROW(choose_token(logits, {.temperature = temperature}, draw), DataError);
  EXPECT_EQ(choose_token(std::vector<float>{-kInf, 0}, {}, draw), 1);  // a masked token is never chosen
}

class SampleTest : public RunFolderTest {
 protected:
  void SetUp() override {
    RunFolderTest::SetUp();
    RunConfig c = tiny();
    c.schedule.steps = 40;
    const auto trainer = Trainer::start(folder / "run", c);
    while (!trainer->done()) trainer->step();
  }
  Output run(const std::string& words, const char* redirect = "2>/dev/null") const {
    return run_shell(
        fmt::format("cd '{}' && '{}' sample {} {}", folder.string(), EVENKEEL_PROGRAM, words, redirect));
  }
};

TEST_F(SampleTest, the_command_prints_what_the_library_generates) {
  const Sampler sampler(folder / "run");
  EXPECT_EQ(sampler.step(), 40);
  SampleOptions options;
  options.tokens = 30;
  std::string seen;
  const std::vector<int32_t> tokens =
      sampler.generate("the ", options, [&](const std::string& text) { seen += text; });
  ASSERT_EQ(tokens.size(), 30u);
  EXPECT_EQ(seen, sampler.text_of(tokens));
  EXPECT_EQ(sampler.generate("the ", options), tokens);  // the same seed, the same text
  options.seed = 2;
  EXPECT_NE(sampler.generate("the ", options), tokens);
  const Output text = run("run --prompt 'the ' --tokens 30");
  EXPECT_EQ(text.code, 0);
  EXPECT_EQ(text.out, "the " + seen + "\n");
}

TEST_F(SampleTest, options_and_json) {
  // The likeliest, said in two ways.
  const Output cold = run("run --prompt 'the ' --tokens 12 --temperature 0"),
               top = run("run --prompt 'the ' --tokens 12 --top 1 --seed 9");
  EXPECT_EQ(cold.code, 0);
  EXPECT_EQ(cold.out, top.out);
  const Output json = run("run --prompt '' --tokens 5 --json");
  ASSERT_EQ(json.code, 0) << json.out;
  const auto parsed = parse_json(json.out);
  EXPECT_EQ(parsed["tokens"].size(), 5u);
  EXPECT_EQ(parsed["step"], 40);
  // Longer than the context of 12: the window moves on.
  EXPECT_EQ(parse_json(run("run --tokens 40 --json").out)["tokens"].size(), 40u);
  const struct {
    const char *words, *part;
    int code;
  } bad[] = {{"", "expected RUN", 2},
             {"run --temperature -1", "a number from 0", 2},
             {"run --temperature hot", "a number", 2},
             {"run --temperature nan", "a number", 2},
             {"run --tokens 0", "from 1", 2},
             {"''", "empty word", 2},
             {"nowhere", "no config.toml", 3},
             {"run --tokenizer none.json", "none.json", 3}};
  for (const auto& [words, part, code] : bad) {
    const Output output = run(words, "2>&1");
    EXPECT_EQ(output.code, code) << words << "\n" << output.out;
    EXPECT_TRUE(has(output.out, part)) << words << "\n" << output.out;
  }
}

TEST_F(SampleTest, weights_that_are_not_finite_are_said_so) {
  RunConfig c = tiny();
  c.schedule.peak = 1e38;
  const auto trainer = Trainer::start(folder / "broken", c);
  while (!trainer->done()) trainer->step();
  ASSERT_TRUE(trainer->finding());
  const Output output = run("broken --tokens 3", "2>&1");
  EXPECT_EQ(output.code, 3) << output.out;
  EXPECT_TRUE(has(output.out, "expected finite logits")) << output.out;
}

}  // namespace
}  // namespace evenkeel
