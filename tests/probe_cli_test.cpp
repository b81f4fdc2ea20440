// `evenkeel probe` and `evenkeel capture` as a user runs them; the captures that come with the project; a PyTorch model's.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_text.h"
#include "base/whole_file.h"
#include "diagnosis/probes.h"
#include "run_program.h"
#include "training/synth.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const std::string kProgram = EVENKEEL_PROGRAM;
const fs::path kCaptures = fs::path(EVENKEEL_SOURCE_DIR) / "tests/captures";

class ProbeCliTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder = fs::temp_directory_path() / fmt::format("evenkeel-probe-cli-{}", getpid());
    fs::create_directories(folder);
    write_whole_file(folder / "text.txt", synthetic_text(/*seed=*/1, /*bytes=*/4000));
    const Output train =
        run("train --preset micro --data text.txt --plan 'fp32; layer 1 head 2: row_sum=e5m2' --steps 9 "
            "--set 'model.width = 16' --set 'model.context = 12' --sequences 4 --checkpoint-every 4 "
            "--probe-every 4 --threads 1 --out run");
    ASSERT_EQ(train.code, 0) << train.out;
  }
  static void TearDownTestSuite() { fs::remove_all(folder); }
  // out has both streams.
  static Output run(const std::string& words) {
    return run_shell(fmt::format("cd '{}' && '{}' {} 2>&1", folder.string(), kProgram, words));
  }
  static Json run_json(const std::string& words) {
    const Output output = run(words + " --json");
    EXPECT_EQ(output.code, 0) << output.out;
    return parse_json(output.out);
  }
  static fs::path folder;
};
fs::path ProbeCliTest::folder;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_F(ProbeCliTest, a_step_of_a_run_names_the_planted_head_and_has_the_history) {
  const Json found = run_json("probe run@6 --threads 1");
  ASSERT_EQ(found["captures"].size(), 3u);  // layers
  EXPECT_EQ(found["captures"][1]["heads"].size(), 4u);
  EXPECT_EQ(found["worst"]["capture"], 1);
  EXPECT_EQ(found["worst"]["head"], 2);
  EXPECT_TRUE(has(found["worst"]["words"], "layer 1 head 2: the rows of dS leak"));
  const Json& analysis = found["analysis"];
  EXPECT_EQ(analysis["delta_error"].size(), 12u);
  EXPECT_EQ(analysis["d_o"].size(), 4u);
  EXPECT_EQ(analysis["column_share"].size(), 16u);
  EXPECT_EQ(analysis["trace"]["site"], "row_sum");
  EXPECT_TRUE(analysis["trace"]["guilty"][0]["explanation"].contains("roundings"));
  const Json& history = found["histories"][0]["history"];
  EXPECT_EQ(history["steps"], (Json{0, 4, 8}));
  EXPECT_EQ(history["probes"]["norm_q"][2].size(), 3u);
  EXPECT_EQ(history["norms"]["wte.weight"].size(), 3u);

  const Output text = run("probe run@6 --threads 1");
  EXPECT_EQ(text.code, 0);
  for (const char* part : {"layer 2, step 6 of run", "* head 2: the rows of dS", "no leak",
                           "layer 1 head 2: the paper's analyses", "bit by bit", "3 probes, steps 0 to 8",
                           "layer 2 |W_Q|", "next: evenkeel isolate run\n"})
    EXPECT_TRUE(has(text.out, part)) << part << "\n" << text.out;
}

TEST_F(ProbeCliTest, a_capture_of_a_run_is_probed_to_the_same_numbers) {
  const Output written =
      run("capture run@6 --layer 1 --heads 1,2 --sequences 4 -o c.safetensors --threads 1");
  ASSERT_EQ(written.code, 0) << written.out;
  const Json from_file = run_json("probe c.safetensors"),
             from_run = run_json("probe run@6 --layer 1 --threads 1");
  ASSERT_EQ(from_file["captures"][0]["heads"].size(), 2u);
  EXPECT_EQ(from_file["captures"][0]["heads"][1], from_run["captures"][0]["heads"][2]);
  EXPECT_EQ(from_file["captures"][0]["loss"], from_run["captures"][0]["loss"]);
  const Json across = run_json("probe c.safetensors run@8 --threads 1")["across"];
  ASSERT_EQ(across.size(), 2u);  // of the heads that both have
  EXPECT_GT(across[0]["cosine"], 0.5);
}

TEST_F(ProbeCliTest, bad_requests_say_what_was_expected) {
  struct Case {
    const char *words, *part;
    int code;
  };
  for (const auto& [words, part, code] :
       {Case{"probe", "expected", 2}, Case{"probe nothing", "RUN@STEP", 2},
        Case{"probe run@x", "RUN@STEP", 2}, Case{"probe run@99", "expected a step below 9", 3},
        Case{"probe none@1", "no config.toml", 3}, Case{"probe text.txt", "text.txt", 3},
        Case{"probe run@6 --layer 7", "from 0 to 2", 2}, Case{"probe run@6 --head 9", "--head", 2},
        Case{"probe run@6 --row 12", "from 0 to 11", 2}, Case{"probe run@6 --site dq", "row_sum, pv", 2},
        Case{"capture run@6", "-o FILE", 2}, Case{"capture run@6 --heads 3,1 -o x", "ascending", 2},
        Case{"capture run@6 --heads 4 -o x", "from 0 to 3", 2}, Case{"capture run -o x", "RUN@STEP", 2},
        Case{"capture run@6 -o none/x", "none", 3}}) {
    const Output output = run(words);
    EXPECT_EQ(output.code, code) << words << ": " << output.out;
    EXPECT_TRUE(has(output.out, part)) << words << ": " << output.out;
  }
}

// A Monitor captures several layers of one step.
TEST_F(ProbeCliTest, the_steps_of_captures_are_named_once) {
  fs::create_directories(folder / "theirs/captures");
  write_whole_file(folder / "theirs/config.toml", "[run]\ntrainer = \"pytorch\"\n");
  for (const char* layer : {"0", "1"})
    ASSERT_EQ(
        run(fmt::format("capture run@6 --layer {0} -o theirs/captures/step-6-layer-{0}.safetensors", layer))
            .code,
        0);
  const Output output = run("probe theirs@5");
  EXPECT_EQ(output.code, 3) << output.out;
  EXPECT_TRUE(has(output.out, "found some of steps 6\n")) << output.out;
  EXPECT_EQ(run("probe theirs@6").code, 0);
}

// Both were taken from runs of `micro` (docs/experiments.md).
TEST_F(ProbeCliTest, the_captures_that_come_with_the_project) {
  const Capture derailing = read_capture(kCaptures / "derailing.safetensors");
  const std::vector<HeadProbe> probes = probe(derailing);
  EXPECT_EQ(worst_head(probes), 1);
  EXPECT_GT(probes[1].largest_row_mean, 300);
  EXPECT_GT(probes[1].leak_share, 2);
  EXPECT_GT(probes[1].gradient_rank_1, 0.95);
  const Capture ties = read_capture(kCaptures / "ties.safetensors");
  EXPECT_GT(probe(ties)[1].tied_rows, 0.05);
  uintmax_t bytes = 0;
  for (const fs::directory_entry& file : fs::directory_iterator(kCaptures)) bytes += file.file_size();
  EXPECT_LE(bytes, 2'000'000u);
  const Output text = run(fmt::format("probe '{}' --site pv", (kCaptures / "ties.safetensors").string()));
  EXPECT_EQ(text.code, 0);
  EXPECT_TRUE(has(text.out, "pv along the row")) << text.out;
}

TEST_F(ProbeCliTest, captures_of_pytorch_models_are_read) {
  const Output made = run_shell(fmt::format("python3 '{}/python/capture_torch.py' --self-test '{}' 2>&1",
                                            EVENKEEL_SOURCE_DIR, folder.string()));
  if (made.code == 77 || made.code == 127) GTEST_SKIP() << made.out;
  ASSERT_EQ(made.code, 0) << made.out;
  for (const auto& [file, heads, groups] :
       {std::tuple{"gpt2", 3, 3}, {"llama", 4, 2}, {"gpt2-head", 1, 1}, {"llama-head", 1, 1}}) {
    const Capture c = read_capture(folder / (std::string(file) + ".safetensors"));
    EXPECT_EQ(c.q.shape()[1], heads) << file;
    EXPECT_EQ(c.k.shape()[1], groups) << file;
    for (const HeadProbe& p : probe(c)) {
      EXPECT_TRUE(std::isfinite(p.gradient_share) && p.gradient_norm > 0) << file;
      EXPECT_GT(p.norm_q, 0) << file;
    }
    // q is x W_Q, but for GPT-2's bias (0 at the start) and Llama's rotation, which keeps lengths.
    for (int64_t t = 0; t < c.q.shape()[2]; ++t) {
      double found = 0, expected = 0;
      for (int64_t d = 0; d < c.q.shape()[3]; ++d) {
        double q = 0;
        for (int64_t f = 0; f < c.x.shape()[3]; ++f)
          q += double{*c.x.view().at(1, 0, t, f)} * *c.w_q.view().at(0, 0, f, d);
        expected += q * q;
        found += std::pow(*c.q.view().at(1, 0, t, d), 2);
      }
      EXPECT_NEAR(found, expected, 1e-4 * expected) << file << " " << t;
    }
  }
}

}  // namespace
}  // namespace evenkeel
