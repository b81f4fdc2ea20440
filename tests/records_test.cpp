// The records of a run: what is written is read, under new names and old ones, and reaches the page.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/whole_file.h"
#include "diagnosis/isolate.h"
#include "records/verdict_parts.h"
#include "report/page.h"
#include "run_folder.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

class RecordsTest : public RunFolderTest {};

// Every part of a verdict, from what isolate found through verdict.json to the page.
TEST_F(RecordsTest, every_part_of_a_verdict_is_on_the_page) {
  write_whole_file(folder / "config.toml", to_toml(to_toml_table(tiny())));
  Replays replays(folder, {});
  std::vector<Trial> trials(kVerdictPartCount);
  Isolation found;
  VerdictTrials& all = found.evidence;
  for (size_t n = 0; n < kVerdictPartCount; ++n) {
    trials[n].setup.what = kVerdictParts[n].name;
    // A figure that is nowhere else on the page; the recorded course is far from the control.
    trials[n].health.offset = 1111 + 37 * static_cast<double>(n);
    const_cast<const Trial*&>(trial_of(all, static_cast<VerdictPart>(n))) = &trials[n];
  }
  found.evidence.measure = Evidence::Measure::offset;
  found.verdict.words = "Something.";
  write_verdict(found, replays);
  const std::string html = page(std::vector<fs::path>{folder});
  for (size_t n = 0; n < kVerdictPartCount; ++n) {
    const std::string label(kVerdictParts[n].label);
    EXPECT_NE(html.find(">" + label + "<"), std::string::npos) << "the page does not show " << label;
    EXPECT_NE(html.find(fmt::format(">{:.0f} ·", trials[n].health.offset)), std::string::npos)
        << "the page does not show the figure of " << label;
  }
}

// The remedy of the page is the verdict's: zero_sum on all heads where that heals and zero_sum on few does not.
TEST_F(RecordsTest, the_page_names_the_remedy_that_heals) {
  using Json = nlohmann::json;
  const auto remedy_of = [&](const Json& parts) {
    write_whole_file(folder / "verdict.json",
                     Json{{"cause", "common_mode_drift"}, {"words", "Drift."}, {"parts", parts}}.dump());
    const std::string html = page(std::vector<fs::path>{folder});
    const size_t link = html.find("<span class=\"link\">remedy</span><span class=\"value\">");
    EXPECT_NE(link, std::string::npos);
    const size_t begin = html.find("value\">", link) + 7;
    return html.substr(begin, html.find('<', begin) - begin);
  };
  const auto part = [](const char* name, bool heals) {
    return Json{{"part", name}, {"offset", 5}, {"heals", heals}};
  };
  EXPECT_EQ(remedy_of(Json::array({part("zero_sum", true)})), "zero_sum");
  EXPECT_EQ(remedy_of(Json::array({part("zero_sum", false), part("zero_sum_all", true)})),
            "zero_sum on all heads");
  EXPECT_EQ(remedy_of(Json::array({part("zero_sum", false), part("wide_output", true)})), "wide_output");
  EXPECT_EQ(remedy_of(Json::array({part("zero_sum", false), part("wide_pv", true)})), "none of those tried");
  EXPECT_EQ(remedy_of(Json::array()), "–");
}

}  // namespace
}  // namespace evenkeel
