// Sources stay in pieces that a person can hold: no function above 80 lines (120 in GPU kernels, *.cu and *.cuh), no file
// above 700 lines. Prints the offenders.
//
// A function's lines run from the first line of its head to its closing brace, lambdas inside it included. C, C++ and
// CUDA are measured by matching braces, after comments, literals and preprocessor lines are blanked; Python, JavaScript
// and shell by indentation, which their authors keep.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;

constexpr size_t kMostLinesOfFile = 700, kMostLinesOfFunction = 80, kMostLinesOfKernel = 120;

struct Function {
  std::string name;
  size_t first_line;  // from 1
  size_t lines;
};

struct Measured {
  std::vector<Function> functions;
  std::string fault;  // not empty: the text cannot be measured, and why
};

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

// --- C, C++ and CUDA

// Past the literal that starts at `at`, R"tag(...)tag" included.
size_t end_of_literal(std::string_view text, size_t at) {
  if (text[at] == '"' && at > 0 && text[at - 1] == 'R') {
    const size_t open = text.find('(', at);
    const std::string close = ")" + std::string(text.substr(at + 1, open - at - 1)) + "\"";
    const size_t end = text.find(close, open);
    return end == std::string_view::npos ? text.size() : end + close.size();
  }
  const char quote = text[at];
  size_t end = at + 1;
  while (end < text.size() && text[end] != quote) end += text[end] == '\\' ? 2 : 1;
  return std::min(end + 1, text.size());
}

size_t end_of_comment(std::string_view text, size_t at) {
  const bool block = text[at + 1] == '*';
  const size_t end = text.find(block ? "*/" : "\n", at + 2);
  return end == std::string_view::npos ? text.size() : end + (block ? 2 : 0);
}

size_t end_of_directive(std::string_view text, size_t at) {
  size_t end = text.find('\n', at);
  while (end != std::string_view::npos && text[end - 1] == '\\') end = text.find('\n', end + 1);
  return std::min(end, text.size());
}

// The code alone: comments, literals and preprocessor lines are blanks, newlines stay. 1'000 is no literal.
std::string code_of(std::string_view text) {
  std::string code(text);
  bool at_line_start = true;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    size_t end = i + 1;
    if (c == '/' && i + 1 < text.size() && (text[i + 1] == '/' || text[i + 1] == '*'))
      end = end_of_comment(text, i);
    else if (c == '#' && at_line_start)
      end = end_of_directive(text, i);
    else if (c == '"' || (c == '\'' && (i == 0 || !std::isalnum(static_cast<unsigned char>(text[i - 1])))))
      end = end_of_literal(text, i);
    if (end > i + 1)
      std::replace_if(
          code.begin() + static_cast<long>(i), code.begin() + static_cast<long>(end),
          [](char x) { return x != '\n'; }, ' ');
    at_line_start = c == '\n' || (at_line_start && (c == ' ' || c == '\t'));
    i = end;
  }
  return code;
}

// What a brace outside parentheses opens, by the text before it.
enum class Opens { scope, function, data };
Opens opened_by(const std::string& head) {
  static const std::regex scope(
      R"(^\s*(template\s*<[^()]*>\s*)?(inline |static |constexpr |typedef |export )*(namespace|class|struct|union|enum|extern)\b)");
  const size_t close = head.rfind(')');
  const size_t last = head.find_last_not_of(" \n\t");
  if (std::regex_search(head, scope) && (last == std::string::npos || head[last] != ')')) return Opens::scope;
  if (close == std::string::npos) return Opens::data;
  return head.find('=', close) == std::string::npos ? Opens::function : Opens::data;
}

std::string name_of(const std::string& head) {
  // The first word before a parenthesis that is no attribute; of TEST(Suite, Name) all of it.
  static const std::regex test(R"(\b(TEST\w*)\s*\(\s*(\w+),\s*(\w+))");
  static const std::regex call(R"(([~\w:]+|operator\W+)\s*\()");
  static const std::set<std::string> attributes = {"__launch_bounds__", "alignas",  "__attribute__",
                                                   "requires",          "noexcept", "decltype"};
  static const std::regex lambda(R"((\w+)\s*=\s*\[)");
  std::smatch found;
  if (std::regex_search(head, found, test)) return found[2].str() + "." + found[3].str();
  if (std::regex_search(head, found, lambda)) return found[1].str();
  for (auto it = std::sregex_iterator(head.begin(), head.end(), call); it != std::sregex_iterator(); ++it)
    if (!attributes.contains((*it)[1].str())) return (*it)[1].str();
  return "(unnamed)";
}

// One past the brace that closes the one at `open`.
size_t end_of_block(const std::string& code, size_t open) {
  size_t depth = 0;
  for (size_t i = open; i < code.size(); ++i) {
    if (code[i] == '{') ++depth;
    if (code[i] == '}' && --depth == 0) return i + 1;
  }
  return std::string::npos;
}

Measured measure_braces(std::string_view text) {
  const std::string code = code_of(text);
  const auto line_at = [&code](size_t i) {
    return 1 + static_cast<size_t>(std::count(code.begin(), code.begin() + static_cast<long>(i), '\n'));
  };
  Measured measured;
  size_t scopes = 0, parentheses = 0, head_start = 0;
  for (size_t i = 0; i < code.size(); ++i) {
    const char c = code[i];
    if (c == '(') ++parentheses;
    if (c == ')' && parentheses > 0) --parentheses;
    if (parentheses > 0) continue;
    if (c == ';') head_start = i + 1;
    if (c == '}') {
      if (scopes == 0) return {{}, "line " + std::to_string(line_at(i)) + " closes a brace that none opened"};
      --scopes;
      head_start = i + 1;
    }
    if (c != '{') continue;
    const std::string head = code.substr(head_start, i - head_start);
    const Opens what = opened_by(head);
    if (what == Opens::scope) {
      ++scopes;
      head_start = i + 1;
      continue;
    }
    const size_t end = end_of_block(code, i);
    if (end == std::string::npos)
      return {{}, "the brace of line " + std::to_string(line_at(i)) + " is never closed"};
    const size_t next = code.find_first_not_of(" \t\n", end);
    // A member initialised in braces is part of the head: Name() : member{1}, ... {
    const bool head_goes_on = next != std::string::npos && (code[next] == ',' || code[next] == '{');
    if (what == Opens::function && !head_goes_on) {
      const size_t first = line_at(code.find_first_not_of(" \t\n", head_start));
      measured.functions.push_back({name_of(head), first, line_at(end - 1) - first + 1});
      head_start = end;
    }
    i = end - 1;
  }
  if (scopes != 0) measured.fault = "a brace is never closed";
  return measured;
}

// --- Python, JavaScript and shell

size_t indentation_of(const std::string& line) { return std::min(line.find_first_not_of(' '), line.size()); }

// From `def` to the last line that is indented deeper; a head may close its parentheses at its own indentation.
Measured measure_python(std::string_view text) {
  static const std::regex def(R"(^ *(async )?def +(\w+))");
  const std::vector<std::string> lines = lines_of(text);
  Measured measured;
  for (size_t i = 0; i < lines.size(); ++i) {
    std::smatch found;
    if (!std::regex_search(lines[i], found, def)) continue;
    size_t last = i;
    for (size_t k = i + 1; k < lines.size(); ++k) {
      const size_t indentation = indentation_of(lines[k]);
      if (indentation == lines[k].size()) continue;  // blank
      if (indentation <= indentation_of(lines[i]) && lines[k][indentation] != ')') break;
      last = k;
    }
    measured.functions.push_back({found[2].str(), i + 1, last - i + 1});
  }
  return measured;
}

// From `function f(`, `const f = (...) => {` or shell's `f() {` to the next line at the same indentation that starts with
// a closing brace.
Measured measure_closing_lines(std::string_view text) {
  static const std::regex head(
      R"(^ *(?:(?:async )?function +(\w+) *\(|const (\w+) = .*=> \{$|(\w+)\(\) [{(]$|(?:test|before|after)\((.*)=> \{$))");
  const std::vector<std::string> lines = lines_of(text);
  Measured measured;
  for (size_t i = 0; i < lines.size(); ++i) {
    std::smatch found;
    if (!std::regex_search(lines[i], found, head) || lines[i].ends_with('}')) continue;
    std::string name;
    for (size_t group = 1; group < found.size(); ++group) name += found[group].str();
    size_t last = i + 1;
    while (last < lines.size() && !(indentation_of(lines[last]) == indentation_of(lines[i]) &&
                                    lines[last].find_first_of("})") == indentation_of(lines[last])))
      ++last;
    if (last == lines.size()) return {{}, "line " + std::to_string(i + 1) + ": " + name + " is never closed"};
    measured.functions.push_back({name, i + 1, last - i + 1});
  }
  return measured;
}

// --- The rule

Measured measure(const fs::path& path, std::string_view text) {
  const std::string kind = path.extension().string();
  if (std::set<std::string>{".h", ".c", ".cpp", ".cu", ".cuh"}.contains(kind)) return measure_braces(text);
  if (kind == ".py" ||
      (kind.empty() && text.starts_with("#!") && text.substr(0, 40).find("python") != text.npos))
    return measure_python(text);
  return measure_closing_lines(text);
}

struct Offence {
  std::string what;     // "FILE" or "FILE: FUNCTION"
  std::string details;  // the size and the limit
};

std::vector<Offence> offences_of(const fs::path& path, std::string_view text) {
  std::vector<Offence> offences;
  const size_t lines = lines_of(text).size();
  if (lines > kMostLinesOfFile)
    offences.push_back(
        {path.string(), std::to_string(lines) + " lines, at most " + std::to_string(kMostLinesOfFile)});
  const Measured measured = measure(path, text);
  if (!measured.fault.empty()) offences.push_back({path.string(), "cannot be measured: " + measured.fault});
  const bool gpu = path.extension() == ".cu" || path.extension() == ".cuh";
  const size_t most = gpu ? kMostLinesOfKernel : kMostLinesOfFunction;
  for (const Function& f : measured.functions)
    if (f.lines > most)
      offences.push_back({path.string() + ": " + f.name, std::to_string(f.lines) + " lines from line " +
                                                             std::to_string(f.first_line) + ", at most " +
                                                             std::to_string(most)});
  return offences;
}

bool is_source(const fs::path& path) {
  static const std::set<std::string> kinds = {".h",  ".c",  ".cpp", ".cu",  ".cuh",   ".py",
                                              ".js", ".sh", ".mjs", ".css", ".cmake", ""};
  return kinds.contains(path.extension().string());
}

std::vector<fs::path> sources_of(const fs::path& root) {
  std::vector<fs::path> sources = {"evenkeel", "CMakeLists.txt"};
  for (const char* folder : {"src", "include", "tests", "tools", "python", "scripts", "cmake"})
    for (auto it = fs::recursive_directory_iterator(root / folder); it != fs::recursive_directory_iterator();
         ++it) {
      const std::string name = it->path().filename().string();
      if (it->is_directory() && (name == "corpus" || name == "vectors" || name == "__pycache__"))
        it.disable_recursion_pending();  // data
      else if (it->is_regular_file() && is_source(it->path()))
        sources.push_back(fs::relative(it->path(), root));
    }
  std::sort(sources.begin(), sources.end());
  return sources;
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Size, functions_and_files_are_within_the_limits) {
  const fs::path root = EVENKEEL_SOURCE_DIR;
  const std::vector<fs::path> sources = sources_of(root);
  ASSERT_GT(sources.size(), 100u);
  for (const fs::path& path : sources)
    for (const Offence& offence : offences_of(path, read(root / path)))
      ADD_FAILURE() << offence.what << ": " << offence.details;
}

// --- The test of the test: planted offenders, and what must not be mistaken for one

std::string repeated(size_t times, const std::string& line) {
  std::string text;
  for (size_t i = 0; i < times; ++i) text += line;
  return text;
}

// "name:lines" of each function, in order.
std::vector<std::string> sizes(const Measured& measured) {
  EXPECT_EQ(measured.fault, "");
  std::vector<std::string> sizes;
  for (const Function& f : measured.functions) sizes.push_back(f.name + ":" + std::to_string(f.lines));
  return sizes;
}

using Sizes = std::vector<std::string>;

TEST(Size, a_long_function_is_found) {
  for (const auto& [file, most] : std::vector<std::pair<std::string, size_t>>{{"a.cpp", 80}, {"a.cu", 120}}) {
    const auto body = [](size_t lines) { return "int f() {\n" + repeated(lines - 2, "  g();\n") + "}\n"; };
    EXPECT_TRUE(offences_of(file, body(most)).empty());
    const std::vector<Offence> offences = offences_of(file, body(most + 1));
    ASSERT_EQ(offences.size(), 1u);
    EXPECT_EQ(offences[0].what, file + ": f");
  }
  EXPECT_EQ(offences_of("a.py", "def f():\n" + repeated(80, "    g()\n")).size(), 1u);
  EXPECT_EQ(offences_of("a.sh", "f() {\n" + repeated(79, "  g\n") + "}\n").size(), 1u);
  EXPECT_EQ(offences_of("a.js", "function f() {\n" + repeated(79, "  g();\n") + "}\n").size(), 1u);
}

TEST(Size, a_long_file_is_found) {
  EXPECT_TRUE(offences_of("a.h", repeated(700, "int x;\n")).empty());
  EXPECT_EQ(offences_of("a.h", repeated(701, "int x;\n")).size(), 1u);
}

TEST(Size, braces_that_do_not_match_are_a_fault) {
  EXPECT_EQ(offences_of("a.cpp", "int f() {\n").size(), 1u);
  EXPECT_EQ(offences_of("a.cpp", "}\n").size(), 1u);
  EXPECT_EQ(offences_of("a.cpp", "namespace a {\n").size(), 1u);
}

TEST(Size, functions_are_found_wherever_they_stand) {
  EXPECT_EQ(
      sizes(measure_braces("namespace a {\nstruct B {\n  int f() const {\n    return 1;\n  }\n};\n}\n")),
      Sizes{"f:3"});
  EXPECT_EQ(sizes(measure_braces("template <class T>\nvoid f(T x = {})\n{\n}\n")), Sizes{"f:4"});
  EXPECT_EQ(sizes(measure_braces("A::A(int x)\n    : a_{x},\n      b_(2) {\n  g();\n}\n")), Sizes{"A::A:5"});
  EXPECT_EQ(sizes(measure_braces("A::A(int x) : a_{x} {\n  g();\n}\nint h() {\n}\n")),
            (Sizes{"A::A:3", "h:2"}));
  EXPECT_EQ(sizes(measure_braces("TEST(Suite, Name) {\n  g([] {\n    h();\n  });\n}\n")),
            Sizes{"Suite.Name:5"});
  EXPECT_EQ(sizes(measure_braces("__global__ void __launch_bounds__(128)\n    kernel(int x) {\n}\n")),
            Sizes{"kernel:3"});
  EXPECT_EQ(sizes(measure_braces("auto f(int x) -> std::vector<int> {\n}\n")), Sizes{"f:2"});
  EXPECT_EQ(sizes(measure_braces("const auto f = [](int x) {\n  return x;\n};\n")), Sizes{"f:3"});
  EXPECT_EQ(sizes(measure_braces("bool operator==(A a, A b) {\n}\n")), Sizes{"operator==:2"});
}

TEST(Size, data_and_text_are_no_functions) {
  EXPECT_EQ(sizes(measure_braces("const int k[] = {\n  1,\n  2};\n")), Sizes{});
  EXPECT_EQ(
      sizes(measure_braces("const T k = make(3, {\n  1,\n  2});\nstruct alignas(16) A {\n  int x{};\n};\n")),
      Sizes{});
  EXPECT_EQ(sizes(measure_braces("enum class A {\n  b,\n};\nextern \"C\" {\nint f();\n}\n")), Sizes{});
  EXPECT_EQ(sizes(measure_braces("const char* s = \"int f() {\";  // g() {\n/* h() {\n*/\nchar c = '{';\n")),
            Sizes{});
  EXPECT_EQ(
      sizes(measure_braces("const char* s = R\"x(f() { \" )x\";\n#define F() {\\\n  {\nint n = 1'000;\n")),
      Sizes{});
}

TEST(Size, indentation_ends_a_function) {
  EXPECT_EQ(
      sizes(measure_python(
          "class A:\n    def f(\n        self,\n    ):\n        x()\n\n    def g(self):\n        y()\n")),
      (Sizes{"f:4", "g:2"}));
  EXPECT_EQ(sizes(measure_closing_lines("f() {\n  if x; then\n    y\n  fi\n}\ng() { x; }\n")), Sizes{"f:5"});
  EXPECT_EQ(sizes(measure_closing_lines("  const f = (a) => {\n    g();\n  };\n")), Sizes{"f:3"});
}

}  // namespace
