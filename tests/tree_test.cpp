// ARCHITECTURE.md's annotated tree (the fenced block after the heading "## The tree") and the files of the source folders
// are the same: no file without a phrase, no phrase without a file.
//
// A line of the block is names, then a phrase. Depth is indentation; a folder's name ends in '/'; several
// names on a line are siblings (gpt2.h gpt2.cpp, or gpt2.{h,cpp}). A folder with nothing below it in the
// block stands for what it holds, source files excepted: those have a line each.
//
// And how tests are named: a suite in PascalCase, a test as a sentence in snake_case.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

// "gpt2.{h,cpp}" -> gpt2.h, gpt2.cpp
std::vector<std::string> expand_braces(const std::string& word) {
  const size_t open = word.find('{'), close = word.find('}');
  if (open == std::string::npos || close == std::string::npos || close < open) return {word};
  std::vector<std::string> names;
  std::istringstream choices(word.substr(open + 1, close - open - 1));
  for (std::string choice; std::getline(choices, choice, ',');)
    names.push_back(word.substr(0, open) + choice + word.substr(close + 1));
  return names;
}

// Has the word the look of a file or folder: "format.h", ".gitignore", "src/"; not "bf16" or "e.g."?
bool looks_like_name(const std::string& word) {
  if (word.ends_with('/')) return true;
  const size_t dot = word.rfind('.');
  if (dot == std::string::npos || dot + 1 == word.size() ||
      word.find_first_of("()*`'\":;") != std::string::npos)
    return false;
  return std::isalpha(static_cast<unsigned char>(word[dot + 1])) || word[dot + 1] == '{';
}

// The lines of the block, or nothing where ARCHITECTURE.md has none.
std::optional<std::vector<std::string>> tree_block(const fs::path& page) {
  std::ifstream file(page);
  std::vector<std::string> block;
  enum { before_heading, before_fence, inside } state = before_heading;
  for (std::string line; std::getline(file, line);) {
    const bool fence = line.starts_with("```");
    if (state == before_heading) {
      if (line == "## The tree") state = before_fence;
    } else if (state == before_fence) {
      if (line.starts_with("## ")) return {};
      if (fence) state = inside;
    } else {
      if (fence) return block;
      block.push_back(line);
    }
  }
  return {};
}

struct Listing {
  std::set<std::string> files, folders;  // paths from the root; folders end in '/'
  std::set<std::string> leaf_folders;    // those with nothing below them in the block
};

Listing parse_block(const std::vector<std::string>& block, const fs::path& root) {
  Listing listing;
  std::vector<std::pair<size_t, std::string>> parents;  // indentation, path
  for (const std::string& line : block) {
    if (line.find_first_not_of(' ') == std::string::npos) continue;
    // Indentation in characters: blanks, or the lines that `tree` draws (not ASCII).
    size_t at = 0, indentation = 0;
    for (; at < line.size() && (line[at] == ' ' || static_cast<unsigned char>(line[at]) >= 0x80); ++at)
      if ((static_cast<unsigned char>(line[at]) & 0xc0) != 0x80) ++indentation;
    while (!parents.empty() && parents.back().first >= indentation) parents.pop_back();
    const std::string parent = parents.empty() ? "" : parents.back().second;
    std::istringstream words(line.substr(at));
    bool first = true;
    for (std::string word; words >> word; first = false) {
      // The first word is a name whatever its look (LICENSE, evenkeel); further ones must look like one.
      if (!first && !looks_like_name(word)) break;
      for (const std::string& name : expand_braces(word)) {
        const std::string path = parent + name;
        if (!name.ends_with('/')) {
          // A phrase may begin with a word such as config.toml: only a file that is there counts as a second
          // name.
          if (first || fs::exists(root / path)) listing.files.insert(path);
          continue;
        }
        listing.folders.insert(path);
        listing.leaf_folders.insert(path);
        if (first) parents.emplace_back(indentation, path);
      }
    }
    for (const auto& [depth, folder] : parents)
      if (depth < indentation) listing.leaf_folders.erase(folder);
  }
  return listing;
}

bool is_source(const fs::path& path) {
  static const std::set<std::string> kExtensions = {".h",   ".cpp", ".c",     ".cu",
                                                    ".cuh", ".py",  ".cmake", ".sh"};
  return kExtensions.contains(path.extension());
}

// One line of text for each difference.
std::vector<std::string> differences(const fs::path& root) {
  const auto block = tree_block(root / "ARCHITECTURE.md");
  if (!block) return {"ARCHITECTURE.md has no fenced block after the heading '## The tree'"};
  const Listing listing = parse_block(*block, root);
  std::vector<std::string> found;
  for (const char* top : {"cmake", "include", "python", "scripts", "src", "tests", "tools"}) {
    if (!fs::exists(root / top)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      const std::string path = fs::relative(entry.path(), root).generic_string();
      const std::string name = entry.path().filename();
      if (!entry.is_regular_file() || name.starts_with('.') || name.ends_with('~')) continue;
      bool covered = listing.files.contains(path);
      if (!covered && !is_source(entry.path()))
        for (const std::string& folder : listing.leaf_folders) covered |= path.starts_with(folder);
      if (!covered) found.push_back("not in ARCHITECTURE.md's tree: " + path);
    }
  }
  for (const std::string& path : listing.files)
    if (!fs::is_regular_file(root / path))
      found.push_back("in ARCHITECTURE.md's tree, but there is no such file: " + path);
  for (const std::string& path : listing.folders)
    if (!fs::is_directory(root / path))
      found.push_back("in ARCHITECTURE.md's tree, but there is no such folder: " + path);
  return found;
}

TEST(Tree, names_every_file_and_nothing_else) {
  for (const std::string& difference : differences(EVENKEEL_SOURCE_DIR)) ADD_FAILURE() << difference;
}

// The test of the test.
class PlantedTree : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* path :
         {"LICENSE", "src/cli.cpp", "src/numerics/format.h", "src/numerics/format.cpp", "src/numerics/simd.h",
          "tests/all_test.cpp", "tests/corpus/plan/seed", "tests/corpus/x"}) {
      fs::create_directories((root_ / path).parent_path());
      std::ofstream(root_ / path) << path;
    }
  }
  void TearDown() override { fs::remove_all(root_); }
  std::vector<std::string> with_block(const std::string& block) {
    std::ofstream(root_ / "ARCHITECTURE.md") << "# Title\n```\nsrc/\n```\n## The tree\n\nIn words.\n```text\n"
                                             << block << "```\n## More\n```\nnothing.h\n```\n";
    return differences(root_);
  }
  const fs::path root_ = fs::path(testing::TempDir()) / ("tree_test." + std::to_string(getpid()));
};

const char* const kBlock =
    "LICENSE\n"
    "src/                     the code\n"
    "  numerics/              [0] e.g. config.toml is no name here\n"
    "    format.h  format.cpp rows of data, config.toml\n"
    "    simd.h               config.toml comes first in this phrase\n"
    "\n"
    "  cli.cpp\n"
    "tests/\n"
    "  all_test.cpp           tests src/ and all\n"
    "  corpus/                seeds\n";

TEST_F(PlantedTree, that_agrees) {
  EXPECT_EQ(with_block(kBlock), std::vector<std::string>{});
  EXPECT_EQ(
      with_block("LICENSE\nsrc/\n├── cli.cpp  x\n└── numerics/\n    ├── format.{h,cpp}  x\n    └── simd.h\n"
                 "tests/\n  corpus/\n  all_test.cpp\n"),
      std::vector<std::string>{});
}

TEST_F(PlantedTree, that_lacks_a_file) {
  std::ofstream(root_ / "src/numerics/new.h") << "";
  EXPECT_EQ(with_block(kBlock),
            std::vector<std::string>{"not in ARCHITECTURE.md's tree: src/numerics/new.h"});
}

TEST_F(PlantedTree, whose_folder_does_not_stand_for_sources) {
  std::ofstream(root_ / "tests/corpus/new_fuzz.cpp") << "";
  EXPECT_EQ(with_block(kBlock),
            std::vector<std::string>{"not in ARCHITECTURE.md's tree: tests/corpus/new_fuzz.cpp"});
}

TEST_F(PlantedTree, that_names_what_is_not_there) {
  fs::remove(root_ / "src/cli.cpp");
  fs::remove(root_ / "src/numerics/simd.h");
  fs::remove_all(root_ / "tests/corpus");
  EXPECT_EQ(
      with_block(kBlock),
      (std::vector<std::string>{"in ARCHITECTURE.md's tree, but there is no such file: src/cli.cpp",
                                "in ARCHITECTURE.md's tree, but there is no such file: src/numerics/simd.h",
                                "in ARCHITECTURE.md's tree, but there is no such folder: tests/corpus/"}));
}

TEST_F(PlantedTree, without_a_block) {
  std::ofstream(root_ / "ARCHITECTURE.md") << "## The tree\n\n## More\n```\nsrc/\n```\n";
  EXPECT_EQ(differences(root_),
            std::vector<std::string>{"ARCHITECTURE.md has no fenced block after the heading '## The tree'"});
}

// --- Names of tests

// "Suite.name" of every test in the text of a source file.
std::vector<std::string> tests_in(const std::string& text) {
  static const std::regex kTest(R"((?:^|\n)TEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\))");
  std::vector<std::string> found;
  for (std::sregex_iterator at(text.begin(), text.end(), kTest), end; at != end; ++at)
    found.push_back((*at)[1].str() + "." + (*at)[2].str());
  return found;
}

bool is_well_named(const std::string& test) {
  static const std::regex kStyle(R"([A-Z][A-Za-z0-9]*\.(DISABLED_)?[a-z][a-z0-9]*(_[a-z0-9]+)*)");
  return std::regex_match(test, kStyle);
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::set<std::string> all_tests() {
  std::set<std::string> found;
  for (const fs::directory_entry& entry :
       fs::recursive_directory_iterator(fs::path(EVENKEEL_SOURCE_DIR) / "tests"))
    if (entry.path().extension() == ".cpp" || entry.path().extension() == ".h")
      for (const std::string& test : tests_in(text_of(entry.path()))) found.insert(test);
  return found;
}

TEST(TestNames, are_sentences_in_snake_case) {
  const std::set<std::string> tests = all_tests();
  EXPECT_GT(tests.size(), 1000u);
  for (const std::string& test : tests)
    EXPECT_TRUE(is_well_named(test)) << test << ": expected PascalCase.a_sentence_in_snake_case";
}

TEST(TestNames, of_another_style_are_found) {
  EXPECT_EQ(tests_in("TEST(A, b) {\n}\nTEST_F(Of,\n       two_lines) {\n// TEST(No, test)\n  \"TEST(No, "
                     "test)\"\nTEST_P(A,C) {"),
            (std::vector<std::string>{"A.b", "Of.two_lines", "A.C"}));
  for (const char* good : {"Cli.help", "Fp8.e4m3_and_bf16", "ModelCuda.DISABLED_bench"})
    EXPECT_TRUE(is_well_named(good)) << good;
  for (const char* bad : {"Cli.Help", "Cli.aNaN", "Cli.L_of_scores", "Cli.DISABLED_Bench", "cli.help",
                          "Cli.help_", "Cli.a__b", "My_Suite.a"})
    EXPECT_FALSE(is_well_named(bad)) << bad;
}

// The tests that run under compute-sanitizer are chosen by name: one that is not there would be left out in silence.
TEST(TestNames, of_the_small_tests_are_there) {
  const std::set<std::string> tests = all_tests();
  const std::string text = text_of(fs::path(EVENKEEL_SOURCE_DIR) / "tests" / "gpu" / "gpu_main.cpp");
  static const std::regex kName(R"([":]([A-Z]\w*\.\w+))");
  size_t named = 0;
  for (std::sregex_iterator at(text.begin(), text.end(), kName), end; at != end; ++at, ++named)
    EXPECT_TRUE(tests.contains((*at)[1].str())) << (*at)[1].str();
  EXPECT_GT(named, 0u);
}

}  // namespace
