// Includes point one way: numerics < base < gpu < attention < model < records < training < diagnosis < report, and
// the front ends (cli, c_api) on top. Fails on a forbidden include and names the file, the line and the rule.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;
using Tree = std::map<std::string, std::string>;  // path from src/ -> text

constexpr std::array<std::string_view, 9> kLayers = {
    "numerics", "base", "gpu", "attention", "model", "records", "training", "diagnosis", "report"};
// What a layer must not know although it lies below.
const std::map<std::string_view, std::set<std::string_view>> kHidden = {
    {"records", {"gpu", "attention", "model"}}, {"report", {"gpu", "attention", "model", "training"}}};

const std::set<std::string_view> kCHeaders = {"assert.h", "complex.h",  "ctype.h",  "errno.h", "fenv.h",
                                              "float.h",  "inttypes.h", "limits.h", "math.h",  "signal.h",
                                              "stdarg.h", "stddef.h",   "stdint.h", "stdio.h", "stdlib.h",
                                              "string.h", "time.h"};
// Of the operating system; for base and up.
const std::set<std::string_view> kSystemHeaders = {"dirent.h",  "dlfcn.h",   "fcntl.h", "netdb.h",
                                                   "poll.h",    "pthread.h", "sched.h", "spawn.h",
                                                   "termios.h", "unistd.h"};
// Folders of <> includes; for base and up.
const std::set<std::string_view> kLibraries = {"fmt", "nlohmann", "sys", "arpa", "netinet"};

// Of CUDA, for the files of a layer's folder cuda/ alone: everything else is built without a toolkit, too.
const std::set<std::string_view> kCudaHeaders = {"cuda.h",         "cuda_runtime.h", "cuda_runtime_api.h",
                                                 "cudaTypedefs.h", "cuda_bf16.h",    "cuda_fp16.h",
                                                 "cuda_fp8.h",     "cublasLt.h"};

constexpr std::string_view kMpiFile = "training/mpi/mpi_module.c";

// "numerics" for numerics/format.h; "" for a file directly in src/.
std::string_view folder_of(std::string_view path) {
  const size_t slash = path.find('/');
  return slash == std::string_view::npos ? std::string_view{} : path.substr(0, slash);
}

std::optional<size_t> layer_of(std::string_view folder) {
  const auto found = std::find(kLayers.begin(), kLayers.end(), folder);
  if (found == kLayers.end()) return {};
  return static_cast<size_t>(found - kLayers.begin());
}

bool is_in_cuda_folder(std::string_view path) {
  return path.substr(folder_of(path).size()).starts_with("/cuda/");
}

bool is_front_end(std::string_view path) { return folder_of(path) == "cli" || folder_of(path).empty(); }

// The rule that file (path from src/) breaks by including `included`, or "".
std::string broken_rule(const Tree& tree, const std::string& file, const std::string& included, bool quoted) {
  const bool is_c_header = !quoted && kCHeaders.contains(included);
  const bool is_cpp_header = !quoted && included.find_first_of("./") == std::string::npos;
  if (file.ends_with("_kernels.cpp")) {
    const std::string own = file.substr(0, file.size() - 3) + "h";
    if (is_c_header || (quoted && (included == "numerics/simd.h" || included == own))) return "";
    return "a kernel file includes numerics/simd.h, its own " + own +
           " and plain C headers: anything else may bring inline code that only a newer CPU can run";
  }
  if (included == "mpi.h")
    return file == kMpiFile
               ? ""
               : "MPI's header is for " + std::string(kMpiFile) + ": all else starts without MPI";
  if (included == "immintrin.h") return file == "numerics/simd.h" ? "" : "intrinsics are for numerics/simd.h";
  if (is_c_header || is_cpp_header) return "";
  const bool is_cuda_file = is_in_cuda_folder(file);
  if (!quoted && kCudaHeaders.contains(included))
    return is_cuda_file ? "" : "CUDA's headers are for the folders cuda/";
  if (quoted && is_in_cuda_folder(included) && !is_cuda_file)
    return "what lies in a folder cuda/ is for such folders alone: its layer's own headers are the way";
  if (!quoted) {
    if (folder_of(file) == "numerics") return "numerics includes the standard library and numerics only";
    if (kSystemHeaders.contains(included) || kLibraries.contains(folder_of(included))) return "";
    if (tree.contains(included)) return "our own headers are included with quotes";
    return "not a library of this project: the standard library, POSIX, fmt and nlohmann are";
  }
  if (included == "evenkeel.h" && is_front_end(file)) return "";  // the C interface, in include/
  if (!tree.contains(included)) return "quoted includes are full paths from src/, and there is no such file";
  if (is_front_end(included))
    return folder_of(file) == "cli" && folder_of(included) == "cli" ? "" : "nobody includes a front end";
  if (is_front_end(file)) return "";
  const auto from = layer_of(folder_of(file)), to = layer_of(folder_of(included));
  if (!from || !to) return "the folder has no place in the order of layers: give it one in layering_test.cpp";
  if (*to > *from) return std::string(kLayers[*from]) + " lies below " + std::string(kLayers[*to]);
  if (is_in_cuda_folder(included) && folder_of(included) != folder_of(file) && folder_of(included) != "gpu")
    return "a folder cuda/ is its layer's own: other layers may include that of gpu alone";
  if (!is_cuda_file && (file.ends_with(".cu") || file.ends_with(".cuh")))
    return "CUDA sources lie in a folder cuda/";
  if (const auto hidden = kHidden.find(folder_of(file));
      hidden != kHidden.end() && hidden->second.contains(folder_of(included)))
    return std::string(hidden->first) + " must not know " + std::string(folder_of(included));
  return "";
}

struct Include {
  std::string path;
  bool quoted;
};

// What a line includes, if it does: #include "path" or <path>, blanks anywhere.
std::optional<Include> parse_include(std::string_view line) {
  const auto skip_blanks = [&line] {
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  };
  const auto skip = [&](std::string_view word) {
    skip_blanks();
    const bool found = line.starts_with(word);
    if (found) line.remove_prefix(word.size());
    return found;
  };
  if (!skip("#") || !skip("include")) return {};
  skip_blanks();
  const size_t end = line.find_first_of(">\"", 1);
  if (line.find_first_of("<\"") != 0 || end == std::string_view::npos) return {};
  return Include{std::string(line.substr(1, end - 1)), line[0] == '"'};
}

// One line of text for each forbidden include.
std::vector<std::string> violations(const Tree& tree) {
  std::vector<std::string> found;
  for (const auto& [file, text] : tree) {
    std::istringstream lines(text);
    std::string line;
    for (int number = 1; std::getline(lines, line); ++number) {
      const auto include = parse_include(line);
      if (!include) continue;
      const std::string rule = broken_rule(tree, file, include->path, include->quoted);
      if (!rule.empty())
        found.push_back("src/" + file + ":" + std::to_string(number) + ": includes " + include->path + ": " +
                        rule);
    }
  }
  return found;
}

Tree read_tree(const fs::path& src) {
  static const std::set<std::string> kExtensions = {".h", ".cpp", ".c", ".cu", ".cuh", ".inc"};
  Tree tree;
  for (const auto& entry : fs::recursive_directory_iterator(src)) {
    if (!entry.is_regular_file() || !kExtensions.contains(entry.path().extension())) continue;
    std::ifstream file(entry.path());
    tree[fs::relative(entry.path(), src).generic_string()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return tree;
}

TEST(Layering, no_forbidden_include_in_src) {
  const Tree tree = read_tree(fs::path(EVENKEEL_SOURCE_DIR) / "src");
  ASSERT_TRUE(tree.contains("numerics/format.h")) << "the test does not see the sources";
  for (const std::string& violation : violations(tree)) ADD_FAILURE() << violation;
}

// One reader and one writer for each file of a run's folder: outside src/records no source names one of them as a file,
// or reads lines of JSON. (A name inside a sentence for people is no file.)
std::vector<std::string> parsers_elsewhere(const Tree& tree) {
  std::vector<std::string> found;
  for (const auto& [file, text] : tree) {
    if (folder_of(file) == "records") continue;
    std::istringstream lines(text);
    std::string line;
    for (int number = 1; std::getline(lines, line); ++number) {
      const std::string code = line.substr(0, line.find("//"));
      const auto has = [&](std::string_view word) { return code.find(word) != std::string::npos; };
      bool named = false;
      for (const char* name :
           {"config.toml", "metrics.jsonl", "guard.jsonl", "findings.json", "isolate.json", "verdict.json"})
        named |= has('"' + std::string(name) + '"');
      if (folder_of(file) != "base")
        named |= has("read_json_lines(") || has("parse_json_lines(") || has("JsonLinesWriter") ||
                 has("son::parse(");  // base/json_text.h has it, compiled once
      if (named) found.push_back("src/" + file + ":" + std::to_string(number) + ": " + line);
    }
  }
  return found;
}

TEST(Layering, only_records_opens_the_files_of_a_run) {
  for (const std::string& place : parsers_elsewhere(read_tree(fs::path(EVENKEEL_SOURCE_DIR) / "src")))
    ADD_FAILURE() << place;
}

// The same for Python: python/evenkeel/_records.py alone names the two files as files or has older names of fields.
std::vector<std::string> python_parsers_elsewhere(const Tree& tree) {
  std::vector<std::string> found;
  for (const auto& [file, text] : tree) {
    if (file == "python/evenkeel/_records.py") continue;
    std::istringstream lines(text);
    std::string line;
    for (int number = 1; std::getline(lines, line); ++number)
      for (const char* word : {"\"metrics.jsonl\"", "'metrics.jsonl'", "largest_row_mean", "tomllib",
                               "\"config.toml\").read", "\"config.toml\").open"})
        if (line.find(word) != std::string::npos)
          found.push_back(file + ":" + std::to_string(number) + ": " + line);
  }
  return found;
}

// A kernel family is a row of its table: outside src/attention nobody asks for one by its name.
std::vector<std::string> families_named(const Tree& tree) {
  std::vector<std::string> found;
  for (const auto& [file, text] : tree)
    if (folder_of(file) != "attention" && text.find("kernel_family(\"") != std::string::npos)
      found.push_back(file);
  return found;
}

TEST(Layering, nobody_names_a_kernel_family) {
  for (const std::string& file : families_named(read_tree(fs::path(EVENKEEL_SOURCE_DIR) / "src")))
    ADD_FAILURE() << file;
  EXPECT_EQ(families_named({{"cli/bench.cpp", "kernel_family(\"hopper\").words"},
                            {"attention/attention_call.cpp", "kernel_family(\"hopper\")"}}),
            std::vector<std::string>{"cli/bench.cpp"});
}

// Every file of the folders that is Python, by its name or its first line.
Tree read_python(const fs::path& root) {
  Tree tree;
  for (const char* folder : {"python", "scripts"})
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (!entry.is_regular_file() || entry.path().extension() == ".pyc") continue;
      std::ifstream file(entry.path());
      std::string text{std::istreambuf_iterator<char>(file), {}};
      if (entry.path().extension() == ".py" || text.starts_with("#!/usr/bin/env python3"))
        tree[fs::relative(entry.path(), root).generic_string()] = std::move(text);
    }
  return tree;
}

TEST(Layering, only_one_module_of_python_opens_the_files_of_a_run) {
  const Tree tree = read_python(EVENKEEL_SOURCE_DIR);
  ASSERT_TRUE(tree.contains("scripts/rotary") && tree.contains("python/evenkeel/_records.py"))
      << "the test does not see the sources";
  for (const std::string& place : python_parsers_elsewhere(tree)) ADD_FAILURE() << place;
}

TEST(Layering, a_planted_parser_of_python_is_found) {
  const Tree tree = {
      {"scripts/one", "lines = open(run / \"metrics.jsonl\")\n\"\"\"RUN/metrics.jsonl has them\"\"\"\n"},
      {"python/two.py", "text = (run / \"config.toml\").read_text()\n"},
      {"python/three.py", "row[\"offset\"] = row.pop(\"largest_row_mean\")\n"},
      {"python/evenkeel/_records.py", "METRICS = \"metrics.jsonl\"\n"}};
  EXPECT_EQ(python_parsers_elsewhere(tree).size(), 3u);
}

TEST(Layering, a_planted_parser_is_found) {
  Tree tree = {
      {"training/trainer.cpp", "write(folder / \"metrics.jsonl\");\n// \"metrics.jsonl\" in a comment\n"},
      {"records/metrics.cpp", "read_json_lines(\"metrics.jsonl\");\n"},
      {"cli/train.cpp", "say(\"RUN/config.toml holds them all\");\n"},
      {"diagnosis/guard.cpp", "JsonLinesWriter writer(path);\n"},
      {"report/page.cpp", "const Json json = Json::parse(text);\n"},
      {"base/json_lines.cpp", "JsonLinesWriter::JsonLinesWriter() {}\n"}};
  EXPECT_EQ(parsers_elsewhere(tree).size(), 3u);
}

// Above src/model nobody knows an architecture by its name: every model is a description (model_config.h). Names of text
// formats (a tokenizer's files) and of presets, which the command measures, are no architectures.
std::vector<std::string> architectures_named(const Tree& tree) {
  static const std::set<std::string> kTextFormats = {"training/tokenizer.h", "training/tokenizer_files.cpp",
                                                     "training/pretokenize.h"};
  // Recorded runs have a model's name: a risk says which runs it is calibrated on.
  static const std::set<std::string> kRecordedRuns = {"diagnosis/risk.h", "diagnosis/risk.cpp"};
  static const std::set<std::string, std::less<>> kBelow = {"numerics", "base", "gpu", "attention", "model"};
  static const std::regex kArchitecture("gpt-?2|llama|qwen", std::regex::icase);
  static const std::regex kWords("//.*|\"([^\"\\\\]|\\\\.)*\"");  // comments and strings
  std::vector<std::string> found;
  for (const auto& [file, text] : tree) {
    if (kBelow.contains(folder_of(file)) || kTextFormats.contains(file) || kRecordedRuns.contains(file))
      continue;
    std::istringstream lines(text);
    std::string line;
    for (int number = 1; std::getline(lines, line); ++number) {
      const std::string seen = folder_of(file) == "cli" ? std::regex_replace(line, kWords, "") : line;
      if (std::regex_search(seen, kArchitecture))
        found.push_back("src/" + file + ":" + std::to_string(number) + ": " + line);
    }
  }
  return found;
}

TEST(Layering, nobody_above_the_model_names_an_architecture) {
  for (const std::string& place : architectures_named(read_tree(fs::path(EVENKEEL_SOURCE_DIR) / "src")))
    ADD_FAILURE() << place << "\n  expected code that asks ModelConfig or Model instead";
}

TEST(Layering, a_planted_architecture_is_found) {
  Tree tree = {{"training/trainer.cpp", "std::unique_ptr<Llama> model_;\n"},
               {"diagnosis/capture.cpp", "return \"GPT-2\";\n"},
               {"report/page.cpp", "// of GPT2\n"},
               {"cli/bench.cpp", "make(\"gpt2\");  // gpt2\nuse(qwen3);\n"},
               {"c_api.cpp", "#include \"model/llama.h\"\n"},
               {"model/model_config.cpp", "\"llama-micro\"\n"},
               {"training/tokenizer.h", "// GPT-2's vocab.bpe\n"}};
  EXPECT_EQ(architectures_named(tree).size(), 5u);
}

// Above src/attention a stabiliser is its rules (stabiliser.h): a comparison with a name misses the next one of the same rules.
std::vector<std::string> stabilisers_compared(const Tree& tree) {
  static const std::regex kComparison("[=!]=\\s*Stabiliser::|case Stabiliser::");
  std::vector<std::string> found;
  for (const auto& [file, text] : tree) {
    if (folder_of(file) == "attention") continue;
    std::istringstream lines(text);
    std::string line;
    for (int number = 1; std::getline(lines, line); ++number)
      if (std::regex_search(line, kComparison))
        found.push_back("src/" + file + ":" + std::to_string(number) + ": " + line);
  }
  return found;
}

TEST(Layering, stabilisers_are_read_by_their_rules) {
  for (const std::string& place : stabilisers_compared(read_tree(fs::path(EVENKEEL_SOURCE_DIR) / "src")))
    ADD_FAILURE() << place << "\n  expected code that asks rules_of(stabiliser) instead";
  EXPECT_EQ(stabilisers_compared({{"diagnosis/guard.cpp", "if (plan.stabiliser == Stabiliser::zero_sum)\n"},
                                  {"diagnosis/conform.cpp", "plan.stabiliser = Stabiliser::zero_sum;\n"},
                                  {"attention/plan.cpp", "return s == Stabiliser::none;\n"}})
                .size(),
            1u);
}

// The test of the test: a clean tree, into which one include at a time is planted.
Tree clean_tree() {
  return {
      {"numerics/simd.h", "#include <immintrin.h>\n#include <stdint.h>\n"},
      {"numerics/format.h", "#include <bit>\n#include <cmath>\n"},
      {"numerics/round_kernels.h", "#include <stdint.h>\n"},
      {"numerics/round_kernels.cpp", "#include \"numerics/round_kernels.h\"\n#include \"numerics/simd.h\"\n"},
      {"base/error.h", "#include <fmt/format.h>\n#include \"numerics/format.h\"\n"},
      {"gpu/memory.h", "#include \"base/error.h\"\n"},
      {"gpu/cuda/check.h", "#include <cuda_runtime_api.h>\n#include \"gpu/memory.h\"\n"},
      {"attention/plan.h", "#include \"base/error.h\"\n#include \"gpu/memory.h\"\n"},
      {"attention/cuda/kernels.h", "#include <cuda_runtime_api.h>\n#include \"attention/plan.h\"\n"},
      {"attention/cuda/tile.cuh", "#include <cuda_bf16.h>\n#include <cstdint>\n"},
      {"attention/cuda/tile.cu",
       "#include \"attention/cuda/kernels.h\"\n#include \"attention/cuda/tile.cuh\"\n"},
      {"model/gpt.h", "#include \"attention/plan.h\"\n"},
      {"model/cuda/gpt.cpp",
       "#include <cublasLt.h>\n#include \"gpu/cuda/check.h\"\n#include \"model/gpt.h\"\n"},
      {"records/schema.h", "#include \"base/error.h\"\n"},
      {"training/trainer.h", "#include \"model/gpt.h\"\n#include \"records/schema.h\"\n"},
      {"diagnosis/finding.h", "#include \"training/trainer.h\"\n"},
      {"report/page.h", "#include \"diagnosis/finding.h\"\n#include \"base/error.h\"\n"},
      {"cli/options.h", "#include <string>\n"},
      {"cli/main.cpp", "#include <unistd.h>\n#include \"cli/options.h\"\n#include \"report/page.h\"\n"},
      {"c_api.cpp", "#include \"evenkeel.h\"\n#include \"model/gpt.h\"\n"}};
}

TEST(Layering, a_clean_tree_is_clean) {
  for (const std::string& violation : violations(clean_tree())) ADD_FAILURE() << violation;
}

TEST(Layering, a_planted_include_is_found) {
  const std::pair<const char*, const char*> kPlanted[] = {
      {"numerics/format.h", "#include \"base/error.h\""},
      {"numerics/format.h", "#include <fmt/format.h>"},
      {"numerics/format.h", "#include <unistd.h>"},
      {"numerics/format.h", "#include <immintrin.h>"},
      {"numerics/format.h", "#include \"simd.h\""},              // not the full path
      {"numerics/format.h", "#include \"../numerics/simd.h\""},  // not the full path
      {"numerics/round_kernels.cpp", "#include \"numerics/format.h\""},
      {"numerics/round_kernels.cpp", "#include <vector>"},
      {"numerics/round_kernels.cpp", "#include <cmath>"},
      {"base/error.h", "  #  include \"attention/plan.h\"  // with blanks"},
      {"base/error.h", "#include <boost/any.hpp>"},
      {"base/error.h", "#include <mpfr.h>"},
      {"base/error.h", "#include <numerics/format.h>"},
      {"base/error.h", "#include \"gpu/memory.h\""},
      {"gpu/memory.h", "#include \"attention/plan.h\""},
      {"gpu/memory.h", "#include <cuda_runtime_api.h>"},
      {"gpu/memory.h", "#include \"gpu/cuda/check.h\""},
      {"gpu/cuda/check.h", "#include \"attention/plan.h\""},
      {"model/cuda/gpt.cpp", "#include \"attention/cuda/kernels.h\""},
      {"report/page.h", "#include \"gpu/memory.h\""},
      {"attention/plan.h", "#include \"model/gpt.h\""},
      {"attention/plan.h", "#include <cuda_runtime_api.h>"},
      {"attention/plan.h", "#include <cuda_bf16.h>"},
      {"attention/plan.h", "#include \"attention/cuda/kernels.h\""},
      {"attention/cuda/tile.cu", "#include <cub/cub.cuh>"},
      {"attention/cuda/tile.cu", "#include <cuda_bf16.hpp>"},
      {"attention/cuda/tile.cu", "#include \"tile.cuh\""},  // not the full path
      {"attention/cuda/tile.cuh", "#include \"model/gpt.h\""},
      {"diagnosis/finding.h", "#include <cuda.h>"},
      {"cli/main.cpp", "#include <cuda_runtime.h>"},
      {"cli/main.cpp", "#include \"attention/cuda/kernels.h\""},
      {"attention/stray.cu", "#include \"base/error.h\""},
      {"attention/cuda/tile.cu", "#include \"model/cuda/gpt.cpp\""},
      {"model/gpt.h", "#include <cublasLt.h>"},
      {"model/gpt.h", "#include \"attention/cuda/kernels.h\""},
      {"model/gpt.h", "#include \"training/trainer.h\""},
      {"training/trainer.h", "#include \"diagnosis/finding.h\""},
      {"diagnosis/finding.h", "#include \"report/page.h\""},
      {"diagnosis/finding.h", "#include \"cli/options.h\""},
      {"records/schema.h", "#include \"model/gpt.h\""},
      {"records/schema.h", "#include \"training/trainer.h\""},
      {"report/page.h", "#include \"attention/plan.h\""},
      {"report/page.h", "#include \"model/gpt.h\""},
      {"report/page.h", "#include \"training/trainer.h\""},
      {"report/page.h", "#include \"evenkeel.h\""},
      {"cli/main.cpp", "#include \"c_api.cpp\""},
      {"c_api.cpp", "#include \"cli/options.h\""},
      {"utilities/new_folder.h", "#include \"base/error.h\""},
  };
  for (const auto& [file, line] : kPlanted) {
    Tree tree = clean_tree();
    tree[file] += std::string(line) + "\n";
    const std::vector<std::string> found = violations(tree);
    ASSERT_EQ(found.size(), 1u) << file << ": " << line;
    EXPECT_NE(found[0].find(file), std::string::npos) << found[0];
  }
}

TEST(Layering, a_planted_file_is_found) {
  const fs::path src = fs::path(testing::TempDir()) / ("layering_test." + std::to_string(getpid()));
  fs::create_directories(src / "numerics");
  fs::create_directories(src / "attention");
  std::ofstream(src / "attention" / "plan.h") << "#pragma once\n";
  std::ofstream(src / "numerics" / "bad.cu") << "// a comment\n#include \"attention/plan.h\"\n";
  const std::vector<std::string> found = violations(read_tree(src));
  fs::remove_all(src);
  EXPECT_EQ(found, std::vector<std::string>{
                       "src/numerics/bad.cu:2: includes attention/plan.h: numerics lies below attention"});
}

}  // namespace
