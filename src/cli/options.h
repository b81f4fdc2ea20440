// The command line: options declared once, used for parsing, help and errors alike. Unknown options are
// errors. Knows no command. A word that looks like a negative number is a value, not an option.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace evenkeel::cli {

class Options {
 public:
  // usage: "explain A + B [options]"; the description and the example are printed by --help.
  Options(std::string usage, std::string description, std::string example);

  // Declarations. The variable keeps its value where the option is not given. `name` is "--rows".
  void flag(std::string name, std::string help, bool& variable);
  void value(std::string name, std::string placeholder, std::string help, std::string& variable);
  void value(std::string name, std::string placeholder, std::string help, int64_t& variable, int64_t low,
             int64_t high);
  // `--guard` alone gives `without`, `--guard=warn` gives warn.
  void value_or(std::string name, std::string placeholder, std::string without, std::string help,
                std::string& variable);
  // May be given several times.
  void values(std::string name, std::string placeholder, std::string help,
              std::vector<std::string>& variable);
  // All words up to the next option: `--healthy a b c`.
  void lists(std::string name, std::string placeholder, std::string help, std::vector<std::string>& variable);
  // What is left; at least `least` and at most `most` words.
  void words(std::string placeholder, std::vector<std::string>& variable, size_t least, size_t most);

  // False: --help was asked for and printed. Throws std::invalid_argument on what does not fit.
  bool parse(int count, char** words);
  std::string help() const;

 private:
  struct Option {
    std::string name, placeholder, help;
    std::function<void(const std::string&)> set;  // empty placeholder: called without a value
    bool list = false;                            // takes more than one value
    std::optional<std::string> without = {};      // what the option alone means; its value comes behind a '='
  };
  Option* find(std::string_view name);

  std::string usage_, description_, example_, words_placeholder_;
  std::vector<Option> options_;
  std::vector<std::string>* words_ = nullptr;
  size_t least_ = 0, most_ = 0;
};

// "runs/a@3000": a run before one of its steps; nothing where the text is not of that kind.
struct RunStep {
  std::filesystem::path run;
  int64_t step;
};
std::optional<RunStep> parse_run_step(const std::string& text);

// Is standard output a terminal that wants colour (a terminal, and NO_COLOR is not set)?
bool use_colour();

// One function per command; each returns the exit code. argv[0] is the command's name.
int run_explain(int argc, char** argv);
int run_capture(int argc, char** argv);
int run_conform(int argc, char** argv);
int run_bench(int argc, char** argv);
int run_data(int argc, char** argv);
int run_demo(int argc, char** argv);
int run_indicators(int argc, char** argv);
int run_info(int argc, char** argv);
int run_isolate(int argc, char** argv);
int run_probe(int argc, char** argv);
int run_report(int argc, char** argv);
int run_sample(int argc, char** argv);
int run_train(int argc, char** argv);
int run_verdict(int argc, char** argv);
int run_watch(int argc, char** argv);

}  // namespace evenkeel::cli
