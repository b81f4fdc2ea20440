// The page: what it holds, that it is one document whatever the runs hold, and that its curves are the recorded numbers.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/json_text.h"
#include "base/whole_file.h"
#include "html_check.h"
#include "records/run_records.h"
#include "report/chart.h"
#include "report/html.h"
#include "report/page.h"
#include "run_program.h"
#include "sanitized.h"
#include "training/synth.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
size_t times(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// --- The check of a document

void expect_sound(const std::string& html) {
  const Document doc = check(html);
  for (const std::string& fault : doc.faults) ADD_FAILURE() << fault;
  EXPECT_FALSE(has(html, "http:") || has(html, "https:") || has(html, "@import"))
      << "the page must need nothing else";
}

TEST(ReportCheck, finds_what_is_wrong) {
  EXPECT_TRUE(check("<p id=\"a\">x &amp; <a href=\"#a\">y</a></p><br>").faults.empty());
  for (const char* bad : {"<p>x", "<p></b></p>", "<p a=b></p>", "<p a=\"<\"></p>", "a & b",
                          "<p id=\"a\"></p><p id=\"a\"></p>", "1 < 2", "<a href=\"#none\">x</a>",
                          "<p onclick=\"x\"></p>", "<p a=\"1\" a=\"2\"></p>", "<script>x", "<img src=\"a\">"})
    EXPECT_FALSE(check(bad).faults.empty()) << bad;
}

// The curve of the path with this mark as page.js reads it: (x, y). svg begins in its chart's tag.
std::vector<std::pair<double, double>> read_curve(const std::string& svg, const std::string& mark) {
  const auto attribute = [&](const std::string& key, size_t from) {
    const size_t begin = svg.find(" " + key + "=\"", from) + key.size() + 3;
    return svg.substr(begin, svg.find('"', begin) - begin);
  };
  double x0 = 0, x1 = 0, y0 = 0, y1 = 0;
  std::istringstream(attribute("data-x", 0)) >> x0 >> x1;
  std::istringstream(attribute("data-y", 0)) >> y0 >> y1;
  const bool log = attribute("data-log", 0) == "1";
  const std::string d = attribute("d", svg.find(mark));
  std::vector<std::pair<double, double>> points;
  double x = 0, y = 0;
  for (size_t n = 0; n < d.size();) {
    const bool absolute = d[n] == 'M';
    const size_t end = std::min(d.find_first_of("Ml", n + 1), d.size());
    std::istringstream values(d.substr(n + 1, end - n - 1));
    for (double a = 0, b = 0; values >> a >> b;) {
      x = absolute ? a : x + a, y = absolute ? b : y + b;
      const double value = y1 - y / kGrid * (y1 - y0);
      points.emplace_back(x + x0, log ? std::pow(10.0, value) : value);
    }
    n = end;
  }
  return points;
}

// --- Runs made by hand

class ReportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    static int count_of = 0;
    folder_ = fs::temp_directory_path() / fmt::format("evenkeel-report-{}-{}", getpid(), count_of++);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path make(const std::string& name, const std::map<std::string, std::string>& files) const {
    const fs::path run = folder_ / name;
    fs::create_directories(run);
    for (const auto& [file, text] : files) {
      fs::create_directories((run / file).parent_path());
      std::ofstream(run / file, std::ios::binary) << text;
    }
    return run;
  }
  static std::string page_of(const std::vector<fs::path>& runs, const PageOptions& options = {}) {
    const std::string html = page(runs, options);
    expect_sound(html);
    return html;
  }
  fs::path folder_;
};

// (L, H) of one value.
Json heads(int64_t L, int64_t H, double value) {
  Json out = Json::array();
  for (int64_t l = 0; l < L; ++l) out.push_back(std::vector<double>(static_cast<size_t>(H), value));
  return out;
}

Json line_of(int64_t step, int64_t L, int64_t H, double offset, bool probe) {
  Json line = {{"step", step}, {"loss", 3 - 1e-3 * static_cast<double>(step % 1000)}, {"gradient_norm", 0.5}};
  if (step == 0) line["schema"] = 1;
  for (const char* fact : {"mean_lse", "largest_lse", "largest_score", "offset"})
    line[fact] = heads(L, H, offset);
  line["tied_rows"] = heads(L, H, 0.01);
  line["leak_mean"] = heads(L, H, 1e-6), line["leak_error"] = heads(L, H, 1e-6);
  line["leak_rms"] = heads(L, H, 1e-4), line["delta_rms"] = heads(L, H, 1e-3);
  line["offset"][1][0] = 10 * offset;  // the head of interest, beyond 8 times the median
  if (probe) {
    Json p = {{"sequences", 2}, {"rows", 128}};
    for (const char* field : {"norm_q", "largest_row_spread", "delta_error_running", "leak_size"})
      p[field] = heads(L, H, 1 + 1e-3 * offset);
    for (int64_t l = 0; l < L; ++l)
      for (const char* weight : {"attn.c_attn.weight[q]", "attn.c_attn.weight[k]", "mlp.c_fc.weight"})
        p["norms"][fmt::format("h.{}.{}", l, weight)] = 1.0 + static_cast<double>(l);
    line["probe"] = p;
  }
  return line;
}

std::string metrics(int64_t steps, int64_t L = 3, int64_t H = 2, double offset = 100) {
  std::string text;
  for (int64_t step = 0; step < steps; ++step)
    text += line_of(step, L, H, offset, step % 5 == 0).dump() + "\n";
  return text;
}

const char* const kConfig =
    "[model]\nlayers = 3\n\n[attention]\nplan = \"fp32,row_sum=e5m2\"\nchanges = [{ step = 7, plan = \"layer "
    "1: stabiliser=zero_sum\" }]\n\n"
    "[schedule]\nsteps = 50\n";

// A verdict of the records alone is no replay: the page does not ask for more of them.
TEST_F(ReportTest, a_larger_budget_is_for_runs_that_were_replayed) {
  const fs::path run = make("a", {{"metrics.jsonl", metrics(30)},
                                  {"config.toml", kConfig},
                                  {"verdict.json", "{\"cause\":\"not_established\",\"words\":\"x\"}"}});
  const std::string html = page_of({run});
  EXPECT_TRUE(has(html, "The links that are open are found by replays of the run"));
  EXPECT_FALSE(has(html, "--budget 80"));
}

// Our own trainer can neither replay nor repeat another's training.
TEST_F(ReportTest, of_another_trainer_has_commands_that_run) {
  const fs::path run = make("a", {{"metrics.jsonl", metrics(30)},
                                  {"config.toml", std::string(kConfig) + "[run]\ntrainer = \"pytorch\"\n"}});
  const std::string html = page_of({run});
  EXPECT_TRUE(has(html, "python -m evenkeel isolate MODULE:FUNCTION " + run.string()));
  for (const char* const own : {"evenkeel isolate ", "evenkeel train --config ", "evenkeel capture "})
    EXPECT_FALSE(has(html, own + run.string())) << own;
}

TEST_F(ReportTest, has_every_panel_in_the_order_of_the_story) {
  const fs::path a = make("a", {{"metrics.jsonl", metrics(30)},
                                {"config.toml", kConfig},
                                {"checkpoints/step-10/x", ""}}),
                 b = make("b", {{"metrics.jsonl", metrics(30, 3, 2, 2)},
                                {"config.toml", "[attention]\nplan = \"fp32\"\n"}});
  const std::string html = page_of({a, b});
  size_t last = 0;
  for (const char* part : {"class=\"verdict\"", "<section id=\"offset\"", "id=\"loss\"", "id=\"chain\"",
                           "id=\"norms\"", "id=\"heads\"", "id=\"ties\"", "id=\"leak\"", "id=\"capture\"",
                           "id=\"remedies\"", "id=\"lead\"", "id=\"repeat\"", "id=\"words\""}) {
    const size_t at = html.find(part);
    ASSERT_NE(at, std::string::npos) << part;
    EXPECT_GT(at, last) << part;
    last = at;
  }
  // The one that ails is what the page is about; its worst head is the one to watch.
  EXPECT_TRUE(has(html, "Something is wrong in a: layer 1 head 0"));
  EXPECT_TRUE(has(html, "head 0 of layer 1"));
  EXPECT_TRUE(has(html, "evenkeel isolate " + a.string()));
  // Events, settings that differ, commands.
  EXPECT_TRUE(has(html, "plan change at step 7: layer 1: stabiliser=zero_sum"));
  EXPECT_TRUE(has(html, "checkpoint at step 10"));
  EXPECT_TRUE(has(html, "symptom since step 0"));
  EXPECT_TRUE(has(html, "attention.plan"));
  EXPECT_TRUE(has(html, "evenkeel train --config " + (a / "config.toml").string()));
  // What no capture shows is said once, with how to get it.
  EXPECT_EQ(times(html, "No capture of this run"), 1u);
  EXPECT_EQ(times(html, "evenkeel capture"), 1u);
  // The offset, the main signal, is the first drawing.
  EXPECT_LT(html.find("id=\"offset-0-0\""), html.find("id=\"loss-chart\""));
}

TEST_F(ReportTest, panels_without_probes_are_named_once) {
  std::string text;
  for (int64_t step = 0; step < 30; ++step) text += line_of(step, 3, 2, 100, false).dump() + "\n";
  const std::string html = page_of({make("a", {{"metrics.jsonl", text}, {"config.toml", kConfig}})});
  EXPECT_EQ(times(html, "has no full set of probes"), 1u);
  EXPECT_TRUE(has(html, "What this page lacks: spectral norms, W_Q by head."));
  EXPECT_FALSE(has(html, "<section id=\"norms\""));
  EXPECT_TRUE(has(html, "<section id=\"ties\""));  // of facts, which are there
}

TEST_F(ReportTest, a_verdict_fills_the_chain) {
  const Json verdict = {
      {"schema", 1},
      {"cause", "drift"},
      {"words", "Drift: rounding row_sum. zero_sum prevents it."},
      {"certainty", "sure"},
      {"evidence", {"first link", "second link"}},
      {"heads", {{{"layer", 2}, {"head", 1}}}},
      {"sites", {"row_sum"}},
      {"formats", {"e5m2"}},
      {"begin", 10},
      {"end", 20},
      {"parts",
       {{{"part", "recorded"}, {"offset", 4000}, {"heals", false}},
        {{"part", "control"}, {"offset", 7}, {"heals", true}},
        {{"part", "cured"}, {"offset", 8}, {"heals", true}},
        {{"part", "alone_guilty"}, {"offset", "Infinity"}, {"heals", false}},
        {{"part", "zero_sum"}, {"offset", 9}, {"heals", true}}}},
      {"bits",
       {{"expression", "-2.4 + -2.3"},
        {"exact", -4.7},
        {"exact_digits", "10.0101"},
        {"exact_negative", true},
        {"carry_out", true},
        {"value", -4.75},
        {"error", -0.05},
        {"error_steps", -0.4},
        {"aligned", {{{"name", "a"}, {"negative", true}, {"shift", 0}, {"digits", "1.0011"}}}},
        {"roundings",
         {{{"rounding", "bf16"},
           {"kept", "1.00"},
           {"cut", "101"},
           {"direction", "up"},
           {"value", -4.75}}}}}}};
  const fs::path a = make("a", {{"metrics.jsonl", metrics(30)}, {"verdict.json", verdict.dump()}});
  const std::string html = page_of({a});
  EXPECT_TRUE(has(html, "<h1>Drift: rounding row_sum.</h1>"));
  EXPECT_TRUE(has(html, "How sure? Sure."));
  EXPECT_TRUE(has(html, "both ways"));
  EXPECT_TRUE(has(html, "head 1 of layer 2"));  // the verdict's head, not the largest
  EXPECT_TRUE(has(html, "second link"));
  EXPECT_TRUE(has(html, "not finite · does not heal"));
  EXPECT_TRUE(has(html, "<b class=\"round\">1</b>"));
  EXPECT_TRUE(has(html, "a carry leaves the point"));
}

TEST_F(ReportTest, what_the_guard_did_stands_at_the_top) {
  const auto event = [](int step, const char* kind) {
    return fmt::format("{{\"step\":{},\"kind\":\"{}\",\"words\":\"w\"}}\n", step, kind);
  };
  const fs::path warned =
      make("warned", {{"metrics.jsonl", metrics(30)}, {"guard.jsonl", event(3, "warning")}});
  EXPECT_FALSE(has(page_of({warned}), "guarded\">"));
  const fs::path guarded =
      make("guarded", {{"metrics.jsonl", metrics(30)},
                       {"guard.jsonl", event(3, "remedy") + event(7, "warning") + event(9, "roll_back")}});
  const std::string html = page_of({warned, guarded});
  EXPECT_TRUE(has(html, "switched zero_sum on in drifting heads of"));
  EXPECT_TRUE(has(html, "guarded</span> at steps 3, 9; returns to a checkpoint: 1.</p>"));
}

TEST_F(ReportTest, the_plans_that_the_guard_changed_are_shown) {
  const auto event = [](int step, const char* kind, const char* heads, const std::string& plan,
                        const char* more = "") {
    return fmt::format("{{\"step\":{},\"kind\":\"{}\",\"heads\":{},\"plan\":\"{}\",\"words\":\"w\"{}}}\n",
                       step, kind, heads, plan, more);
  };
  const std::string first = "layer 1 head 0: stabiliser=zero_sum", both = "layer 0: stabiliser=zero_sum",
                    again = "layer 1 head 0: stabiliser=consistent";
  // Our trainer's changes stand in config.toml, too.
  const fs::path run =
      make("guarded",
           {{"config.toml",
             "[attention]\nplan = \"flash2\"\n[[attention.changes]]\nstep = 4\nplan = \"" + first + "\"\n"},
            {"metrics.jsonl", metrics(30)},
            {"guard.jsonl", event(3, "remedy", "[[1,0]]", first) + event(5, "warning", "[[0,1]]", both) +
                                event(9, "remedy", "[[0,0],[0,1]]", both) +
                                event(20, "roll_back", "[[1,0]]", again, ",\"to\":16")}});
  const std::string html = page_of({run});
  const auto row = [](const char* step, const char* heads, const char* from, const char* to) {
    return fmt::format("<td>{}</td><td>{}</td><td class=\"plan\">{}</td><td class=\"plan\">{}</td></tr>",
                       step, heads, from, to);
  };
  EXPECT_TRUE(has(html, "<section id=\"guard\"")) << html;
  EXPECT_TRUE(has(html, row("4", "head 0 of layer 1", "flash2", "flash2,stabiliser=zero_sum"))) << html;
  EXPECT_TRUE(
      has(html, row("10", "head 0 of layer 0, head 1 of layer 0", "flash2", "flash2,stabiliser=zero_sum")));
  EXPECT_TRUE(has(
      html, row("16", "head 0 of layer 1", "flash2,stabiliser=zero_sum", "flash2,stabiliser=consistent")));
  EXPECT_FALSE(has(html, "<td>6</td>"));  // a warning changes nothing
  const fs::path unknown =
      make("unknown", {{"metrics.jsonl", metrics(30)},
                       {"config.toml", "[attention]\nplan = \"no plan\"\n"},
                       {"guard.jsonl", event(3, "remedy", "[[1,0],[-1,0],7,[1]]", first)}});
  EXPECT_TRUE(has(page_of({unknown}), row("4", "head 0 of layer 1", "not known", first.c_str())));
  const fs::path warned = make(
      "warned", {{"metrics.jsonl", metrics(30)}, {"guard.jsonl", event(3, "warning", "[[1,0]]", first)}});
  EXPECT_FALSE(has(page_of({warned}), "<section id=\"guard\""));
}

TEST_F(ReportTest, what_runs_say_is_text_and_nothing_else) {
  const std::string evil = "</script><script>alert(1)</script>\"'<img src=x>&\x01\xff";
  const auto quoted = [](const std::string& text) {
    return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  const std::string name = "<script>alert(1)<", words = quoted(evil);
  Json line = line_of(0, 3, 2, 100, true);
  line["probe"]["norms"]["h.0.<script>alert(1)</script>"] = 1;
  const fs::path run =
      make(name,
           {{"metrics.jsonl", line.dump() + "\n" + metrics(30)},
            {"config.toml",
             "[attention]\nplan = \"<script>alert(1)</script>\"\n[\"<script>\"]\n\"<b>\" = \"<i>\"\n"},
            {"guard.jsonl", "{\"step\":3,\"kind\":\"warning\",\"words\":" + words + "}\n"},
            {"findings.json", "{\"findings\":[{\"step\":4,\"kind\":" + words + ",\"words\":" + words + "}]}"},
            {"verdict.json", "{\"cause\":\"" + std::string("x<script>") + "\",\"words\":" + words +
                                 ",\"certainty\":" + words + ",\"evidence\":[" + words + "],\"sites\":[" +
                                 words + "],\"formats\":[" + words + "],\"bits\":{\"expression\":" + words +
                                 ",\"roundings\":[{\"rounding\":" + words +
                                 ",\"kept\":\"1.0<script>\",\"cut\":\"<script>\"}]}}"},
            {"<script>.safetensors", "none"}});
  const std::string html = page_of({run});
  EXPECT_FALSE(has(html, "<script>alert"));
  EXPECT_FALSE(has(html, "<img"));
  EXPECT_TRUE(has(html, "&lt;script&gt;alert(1)"));
  EXPECT_FALSE(has(html, "\x01"));
  EXPECT_EQ(std::count(html.begin(), html.end(), '\xff'), 0);
}

struct DamagedFolder {
  std::string name;
  std::map<std::string, std::string> files;
  std::string says;
};

std::vector<DamagedFolder> damaged_folders() {
  const std::string good = metrics(20);
  std::string out_of_order;
  for (const int64_t step : {0, 1, 2, 9, 4, 5}) out_of_order += line_of(step, 3, 2, 1, true).dump() + "\n";
  const std::string deep = std::string(5000, '[') + std::string(5000, ']');
  return {
      {"empty", {}, "metrics.jsonl is missing"},
      {"no-line", {{"metrics.jsonl", ""}}, "holds no step yet"},
      {"torn", {{"metrics.jsonl", good + "{\"step\":20,\"lo"}}, "ends in the middle of a line"},
      {"middle",
       {{"metrics.jsonl",
         good.substr(0, good.size() / 2 - 7) + std::string("\0\xfe{garbage\n", 11) + metrics(3)}},
       "cannot be read and is left out"},
      {"newer",
       {{"metrics.jsonl", "{\"step\":0,\"schema\":99,\"loss\":3}\n"}},
       "is of schema 99, which is newer"},
      {"order", {{"metrics.jsonl", out_of_order}}, ""},
      {"shapes",
       {{"metrics.jsonl", good + "{\"step\":20,\"loss\":\"NaN\",\"offset\":[[1]],\"probe\":{\"norm_"
                                 "q\":3,\"norms\":[1]}}\n"}},
       ""},
      {"nan",
       {{"metrics.jsonl",
         "{\"step\":0,\"loss\":\"NaN\",\"gradient_norm\":\"Infinity\"}\n{\"step\":1,\"loss\":\"Infinity\"}"
         "\n"}},
       ""},
      {"far",
       {{"metrics.jsonl",
         good +
             "{\"step\":1099511627776,\"loss\":1}\n{\"step\":-4,\"loss\":1}\n{\"step\":1e300,\"loss\":1}\n"}},
       ""},
      {"one", {{"metrics.jsonl", "{\"step\":5,\"loss\":1.5,\"offset\":[[0]]}\n"}}, ""},
      {"findings",
       {{"metrics.jsonl", good}, {"findings.json", "{"}},
       "findings.json is there, but it is no JSON object"},
      {"findings-2",
       {{"metrics.jsonl", good},
        {"findings.json",
         "{\"schema\":7,\"findings\":[3,{\"step\":\"x\"},{\"step\":3,\"kind\":4,\"words\":[]}]}"}},
       "findings.json is of schema 7"},
      {"config", {{"metrics.jsonl", good}, {"config.toml", "plan = ["}}, "config.toml cannot be read"},
      {"config-2", {{"metrics.jsonl", good}, {"config.toml", "attention = 3\nmodel = [1]\n"}}, ""},
      {"verdict",
       {{"metrics.jsonl", good}, {"verdict.json", deep}},
       "verdict.json is there, but it is no JSON object"},
      {"verdict-2",
       {{"metrics.jsonl", good},
        {"verdict.json",
         "{\"heads\":[{\"layer\":1e30,\"head\":-1}],\"parts\":[1,{}],\"bits\":[],\"sites\":{}}"}},
       ""},
      {"verdict-3",
       {{"metrics.jsonl", good},
        {"verdict.json", "{\"heads\":[{\"layer\":99,\"head\":99}],\"bits\":{\"aligned\":[{\"digits\":\"" +
                             std::string(4000, '1') + "\"}]}}"}},
       ""},
      {"guard",
       {{"metrics.jsonl", good}, {"guard.jsonl", "{\"step\":3}\nxx\n"}},
       "guard.jsonl: 1 of 2 lines"},
      {"capture",
       {{"metrics.jsonl", good}, {"layer1.safetensors", "no capture"}},
       "a capture cannot be read"},
  };
}

TEST_F(ReportTest, damaged_and_unfinished_folders_are_shown_as_far_as_they_go) {
  for (const DamagedFolder& c : damaged_folders()) {
    SCOPED_TRACE(c.name);
    const fs::path run = make(c.name, c.files);
    const std::string html = page_of({run});
    EXPECT_TRUE(has(html, c.says)) << check(html).text.substr(0, 2000);
    EXPECT_LT(html.size(), 2'000'000u);
  }
  // What is there is shown: the good lines of the damaged file, by their number.
  const RunRecords middle = read_run(folder_ / "middle");
  EXPECT_EQ(middle.metrics.steps.size(), 3u);  // the run went back to step 0
  const RunRecords order = read_run(folder_ / "order");
  EXPECT_EQ(order.metrics.steps, (std::vector<int64_t>{0, 1, 2, 4, 5}));
  EXPECT_EQ(order.metrics.of(HeadFact::offset).steps, order.metrics.steps);
  EXPECT_EQ(order.metrics.probe_loss.steps, order.metrics.steps);
  const RunRecords shapes = read_run(folder_ / "shapes");
  EXPECT_EQ(shapes.metrics.steps.size(), 21u);
  EXPECT_EQ(shapes.metrics.of(HeadFact::offset).steps.size(), 20u);
  // A folder that is not there, beside one that is.
  const std::string html = page_of({folder_ / "none", folder_ / "torn"});
  EXPECT_TRUE(has(html, "there is no such folder"));
  EXPECT_TRUE(has(html, "class=\"line"));
}

TEST(RunRecords, a_probe_is_of_its_own_step) {
  const Metrics metrics = parse_metrics(
      "{\"step\":48,\"loss\":1}\n"
      "{\"step\":49,\"loss\":1,\"probe\":{\"step\":0,\"entropy\":[[1]],\"norms\":{\"a\":1}}}\n"
      "{\"step\":99,\"loss\":1,\"probe\":{\"step\":50,\"entropy\":[[2]]}}\n"
      "{\"step\":149,\"loss\":1,\"probe\":{\"step\":7,\"entropy\":[[3]]}}\n"     // before the last one
      "{\"step\":199,\"loss\":1,\"probe\":{\"step\":1000,\"entropy\":[[4]]}}\n"  // of the future
      "{\"step\":249,\"loss\":1,\"probe\":{\"entropy\":[[5]]}}\n");
  EXPECT_EQ(metrics.probes.at("entropy").steps, (std::vector<int64_t>{0, 50, 51, 199, 249}));
  EXPECT_EQ(metrics.norms.at("a").steps.front(), 0);
}

TEST_F(ReportTest, runs_of_one_name_are_told_apart) {
  const fs::path a = make("x/run", {{"metrics.jsonl", metrics(5)}}),
                 b = make("y/run", {{"metrics.jsonl", metrics(5)}});
  const std::string html = page_of({a, b});
  EXPECT_TRUE(has(html, escape(a.string())));
  EXPECT_TRUE(has(html, escape(b.string())));
}

TEST_F(ReportTest, the_live_page_is_the_same_with_a_script_more) {
  const std::vector<fs::path> runs = {make("a", {{"metrics.jsonl", metrics(10)}})};
  const std::string still = page_of(runs), live = page_of(runs, {.live = true}), body = page_body(runs);
  EXPECT_TRUE(has(still, body));
  EXPECT_TRUE(has(live, body));
  EXPECT_TRUE(has(still, "<main id=\"page\">"));
  EXPECT_EQ(std::count(still.begin(), still.end(), '\n') < std::count(live.begin(), live.end(), '\n'), true);
}

TEST_F(ReportTest, a_long_run_stays_small_and_keeps_its_peak) {
  // Many steps, 6 layers of 6 heads; a single step far above all others.
  constexpr int64_t kSteps = kSanitized ? 4'000 : 20'000, kPeak = 3'456;
  std::string text;
  for (int64_t step = 0; step < kSteps; ++step) {
    const bool facts = step % 20 == 0;
    Json line = facts ? line_of(step, 6, 6, 5 + 1e-3 * static_cast<double>(step), step % 100 == 0)
                      : Json{{"step", step}};
    line["loss"] = step == kPeak ? 9.5 : 2 + std::sin(static_cast<double>(step) * 0.7) * 0.3;
    line["gradient_norm"] = 1 + 0.5 * std::cos(static_cast<double>(step));
    text += line.dump() + "\n";
  }
  const fs::path a = make("a", {{"metrics.jsonl", text}, {"config.toml", kConfig}}),
                 b = make("b", {{"metrics.jsonl", text}}), c = make("c", {{"metrics.jsonl", text}});
  const std::string html = page_of({a, b, c});
  EXPECT_LT(html.size(), 5'000'000u);
  EXPECT_GT(html.size(), 100'000u);
  // The thin curve of single steps still has the step.
  const auto points = read_curve(html.substr(html.find("id=\"loss-chart\"")), "class=\"line c0 raw\"");
  EXPECT_TRUE(std::any_of(points.begin(), points.end(),
                          [](const auto& p) { return p.first == kPeak && p.second > 3; }));
  EXPECT_LT(points.size(), 3000u);
}

// --- Curves

TEST(ReportChart, a_curve_reads_back_as_the_numbers_it_was_drawn_from) {
  std::mt19937 random(1);
  std::lognormal_distribution<double> numbers(0, 4);
  for (const bool log : {false, true}) {
    Chart chart;
    chart.id = "c", chart.title = "t", chart.log_y = log;
    Line line{"one", "c0", {}, {}, {}, {}};
    for (int n = 0; n < 500; ++n)
      line.x.push_back(1000 + 3 * n), line.y.push_back(n % 50 == 7 ? std::nan("") : numbers(random));
    chart.lines = {line};
    const std::string svg = draw(chart);
    EXPECT_TRUE(check(svg).faults.empty());
    const auto points = read_curve(svg, "data-name=\"one\"");
    ASSERT_EQ(points.size(), 490u);
    const double largest = *std::max_element(line.y.begin(), line.y.end(),
                                             [](double a, double b) { return !(a >= b) && !std::isnan(b); });
    size_t n = 0;
    for (size_t k = 0; k < line.x.size(); ++k) {
      if (std::isnan(line.y[k])) continue;
      EXPECT_NEAR(points[n].first, line.x[k], 1e-2);
      // Half a part of the axis: of its length, or of its decades.
      if (log)
        EXPECT_NEAR(std::log10(points[n].second), std::log10(line.y[k]), 20.0 / kGrid);
      else
        EXPECT_NEAR(points[n].second, line.y[k], 1.1 * largest / kGrid);
      ++n;
    }
  }
}

// On a telephone every second label of a crowded y axis is left out (page.css).
TEST(ReportChart, labels_that_would_touch_are_marked) {
  for (const double height : {200.0, 400.0}) {
    Chart chart;
    chart.id = "c", chart.title = "t", chart.height = height;
    chart.lines = {{"a", "c0", {1, 2}, {1.6, 3.2}, {}, {}}};
    const std::string svg = draw(chart);
    std::vector<double> heights;
    const std::string ticks = svg.substr(svg.find("axis y"), svg.find("axis x") - svg.find("axis y"));
    for (size_t at = ticks.find(" y=\""); at != std::string::npos; at = ticks.find(" y=\"", at + 1))
      heights.push_back(std::stod(ticks.substr(at + 4)));
    ASSERT_GT(heights.size(), 3u);  // the last is the axis's name
    EXPECT_EQ(has(svg, "class=\"chart low\""), std::fabs(heights[0] - heights[1]) < 20) << height;
    EXPECT_EQ(has(svg, "class=\"chart low\""), height == 200) << std::fabs(heights[0] - heights[1]);
  }
}

TEST(ReportChart, nothing_to_draw_is_said) {
  Chart chart;
  chart.id = "c", chart.title = "empty & so";
  EXPECT_TRUE(has(draw(chart), "empty &amp; so: no number to draw"));
  chart.lines = {{"a", "c0", {1, 2}, {std::nan(""), INFINITY}, {}, {}}};
  EXPECT_TRUE(has(draw(chart), "no number to draw"));
  chart.log_y = true;
  chart.lines[0].y = {0, -1};
  EXPECT_TRUE(has(draw(chart), "no number to draw"));
  EXPECT_TRUE(has(draw(HeatMap{}), "no number to draw"));
  EXPECT_TRUE(has(draw(DotPlot{}), "no number to draw"));
}

TEST(ReportChart, extreme_numbers_are_drawn) {
  for (const bool log : {false, true})
    for (const auto& y : std::vector<std::vector<double>>{
             {1, 1}, {0, 0}, {1e-300, 1e300}, {-1e308, 1e308}, {5e-324, 1}, {3}}) {
      Chart chart;
      chart.id = "c", chart.log_y = log;
      chart.lines = {{"a", "c0", {}, y, {}, {}}};
      for (size_t n = 0; n < y.size(); ++n) chart.lines[0].x.push_back(static_cast<double>(n));
      const std::string svg = draw(chart);
      EXPECT_TRUE(check(svg).faults.empty());
      EXPECT_FALSE(has(svg, "nan") || has(svg, "inf")) << svg;
    }
}

TEST(ReportChart, thinning_keeps_the_least_the_largest_and_the_ends) {
  std::mt19937 random(2);
  std::normal_distribution<double> numbers;
  for (const size_t size : {1u, 2u, 7u, 100u, 4000u, 4001u, 20000u}) {
    std::vector<double> y(size);
    for (double& v : y) v = numbers(random);
    for (const size_t most : {1u, 4u, 100u, 4000u}) {
      const std::vector<size_t> kept = thinned(y, most);
      EXPECT_LE(kept.size(), std::max<size_t>(5, most + most / 4));
      EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end()));
      EXPECT_EQ(std::set<size_t>(kept.begin(), kept.end()).size(), kept.size());
      for (const auto extreme : {std::min_element(y.begin(), y.end()), std::max_element(y.begin(), y.end())})
        EXPECT_TRUE(std::binary_search(kept.begin(), kept.end(), static_cast<size_t>(extreme - y.begin())))
            << size << " " << most;
      EXPECT_EQ(kept.front(), 0u);
      EXPECT_EQ(kept.back(), size - 1);
    }
  }
  // A gap stays a gap.
  std::vector<double> y(1000, 1.0);
  y[500] = std::nan("");
  const std::vector<size_t> kept = thinned(y, 40);
  EXPECT_TRUE(std::binary_search(kept.begin(), kept.end(), 500u));
}

TEST(ReportChart, a_band_is_two_standard_errors_of_the_mean) {
  Line line{"a", "c0", {}, {}, {}, {}};
  std::vector<double> error;
  for (int n = 0; n < 100; ++n) line.x.push_back(n), line.y.push_back(5), error.push_back(0.2);
  const Line mean = binned(line, error, 1);
  ASSERT_EQ(mean.y.size(), 1u);
  EXPECT_DOUBLE_EQ(mean.y[0], 5);
  EXPECT_NEAR(mean.high[0] - mean.y[0], 1.96 * 0.2 / 10, 1e-12);  // 100 independent errors
  for (int n = 0; n < 100; ++n) line.y[static_cast<size_t>(n)] = n % 2 ? 4 : 6;
  const Line scattered = binned(line, {}, 1);
  EXPECT_NEAR(scattered.high[0] - scattered.y[0], 1.96 * 1 / std::sqrt(99.0), 1e-12);
  const Line geometric = binned_logarithms({"a", "c0", {0, 1, 2}, {1, 100, -3}, {}, {}}, 1);
  EXPECT_NEAR(geometric.y[0], 10, 1e-9);
}

// --- Text

TEST(ReportText, escapes) {
  EXPECT_EQ(escape("a<b>&\"'c"), "a&lt;b&gt;&amp;&quot;&#39;c");
  EXPECT_EQ(escape("é\n"), "é\n");
  EXPECT_EQ(escape(std::string("a\0b", 3)), "a\uFFFDb");
  EXPECT_EQ(escape("a\xffz"), "a\uFFFDz");
  EXPECT_EQ(escape("\xe2\x82"), "\uFFFD\uFFFD");  // cut off in a character
}

TEST(ReportText, figures) {
  EXPECT_EQ(figure(0), "0");
  EXPECT_EQ(figure(6902.4, 4), "6902");
  EXPECT_EQ(figure(20000, 6), "20,000.0");
  EXPECT_EQ(figure(-0.02153, 3), "−0.0215");
  EXPECT_EQ(figure(3.4e-6, 2), "3.4 × 10⁻⁶");
  EXPECT_EQ(figure(9.996e7, 3), "1.00 × 10⁸");
  EXPECT_EQ(figure(INFINITY), "not finite");
  EXPECT_EQ(count(1234567), "1,234,567");
  EXPECT_EQ(count(-1234), "−1234");
  EXPECT_THROW(term("no such word"), std::logic_error);
}

// --- The command

TEST_F(ReportTest, the_command_on_a_real_run) {
  write_whole_file(folder_ / "text.txt", synthetic_text(/*seed=*/1, /*bytes=*/4000));
  const auto run = [&](const std::string& words) {
    return run_shell(fmt::format("cd '{}' && '{}' {} 2>&1", folder_.string(), EVENKEEL_PROGRAM, words));
  };
  Output out =
      run("train --preset micro --data text.txt --plan 'fp32; layer 1 head 2: row_sum=e5m2' --steps 9 --set "
          "'model.width = 16' --set "
          "'model.context = 12' --sequences 4 --checkpoint-every 4 --probe-every 4 --threads 1 --out run");
  ASSERT_EQ(out.code, 0) << out.out;
  out = run("capture run@6 --layer 1 --sequences 4 -o run/c.safetensors --threads 1");
  ASSERT_EQ(out.code, 0) << out.out;
  out = run("report run -o page.html --json");
  ASSERT_EQ(out.code, 0) << out.out;
  const Json told = parse_json(out.out);
  const std::string html = read_whole_file(folder_ / "page.html", 1 << 24);
  EXPECT_EQ(told["bytes"], html.size());
  expect_sound(html);
  for (const char* part : {"id=\"loss-chart\"", "id=\"norms-0\"", "id=\"wq-1\"", "id=\"ties-chart\"",
                           "id=\"leak-sum\"", "id=\"offset-0-1\"", "id=\"pk\"", "id=\"x\"", "id=\"pkx-0\"",
                           "id=\"d-o\"", "id=\"v-map\"", "id=\"trace\"", "class=\"addition\""})
    EXPECT_TRUE(has(html, part)) << part;
  EXPECT_FALSE(has(html, "no number to draw"));
  // The chain's link "bits" is the addition that it points to, of the capture, though the verdict has another.
  write_whole_file(
      folder_ / "run/verdict.json",
      R"({"cause":"drift","words":"Drift.","heads":[{"layer":1,"head":2}],"bits":{"error":123}})");
  ASSERT_EQ(run("report run -o page.html").code, 0);
  const std::string chain = read_whole_file(folder_ / "page.html", 1 << 24),
                    mark = "bits</span><span class=\"value\">";
  ASSERT_TRUE(has(chain, mark));
  const size_t at = chain.find(mark) + mark.size();
  EXPECT_TRUE(has(chain, "an error of " + chain.substr(at, chain.find('<', at) - at)));
  // A capture of elsewhere.
  out = run(fmt::format("report run -o page.html --capture '{}'",
                        (fs::path(EVENKEEL_SOURCE_DIR) / "tests/captures/ties.safetensors").string()));
  EXPECT_EQ(out.code, 0) << out.out;
  EXPECT_TRUE(has(read_whole_file(folder_ / "page.html", 1 << 24), "ties.safetensors"));

  EXPECT_EQ(run("report").code, 2);
  EXPECT_EQ(run("report run --nothing").code, 2);
  out = run("report nowhere");
  EXPECT_EQ(out.code, 3);
  EXPECT_TRUE(has(out.out, "nowhere: expected a run's folder, found nothing")) << out.out;
  out = run("report run -o /nowhere/page.html");
  EXPECT_EQ(out.code, 3) << out.out;
  EXPECT_EQ(run("report --help").code, 0);
}

}  // namespace
}  // namespace evenkeel
