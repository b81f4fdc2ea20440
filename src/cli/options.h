// The command line: options declared once, used for parsing, help, completion, the manual page and errors alike.
// Unknown options and empty values are errors. Knows no command. A word that looks like a negative number is a value,
// not an option; behind "--" every word is one.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace evenkeel::cli {

// What --help says of a command, as data.
struct CommandTable {
  struct Option {
    std::string name, placeholder, help;          // no placeholder: the option takes no value
    std::function<void(const std::string&)> set;  // called with the value; without a placeholder, with ""
    bool list = false;                            // takes every word up to the next option
    bool may_be_empty = false;
    std::optional<std::string> alone = {};  // what the option alone means; its value comes behind a '='
    bool once = false;  // given again it is an error; of other options the last one counts
  };
  // "--rows N", "--guard[=act|warn]"
  static std::string shown(const Option& option);

  std::string usage;  // "explain EXPRESSION [options]"
  std::string description, example;
  std::vector<Option> options;
  std::string words;                 // what the words that are no options are
  std::vector<std::string> choices;  // what they may be; empty: anything
  std::string notes;                 // behind the options
};

class Options {
 public:
  enum class Empty { refused, allowed };

  // usage: "explain A + B [options]"; the description and the example are printed by --help.
  Options(std::string usage, std::string description, std::string example);

  // Declarations. The variable keeps its value where the option is not given; --help names that value as the default
  // where `help` says nothing of a default. `name` is "--rows".
  void flag(std::string name, std::string help, bool& variable);
  void value(std::string name, std::string placeholder, std::string help, std::string& variable,
             Empty empty = Empty::refused);
  void value(std::string name, std::string placeholder, std::string help, int64_t& variable, int64_t low,
             int64_t high);
  void value(std::string name, std::string placeholder, std::string help, double& variable, double low,
             double high);
  // May be given several times.
  void values(std::string name, std::string placeholder, std::string help,
              std::vector<std::string>& variable);
  // All words up to the next option: `--healthy a b c`.
  void lists(std::string name, std::string placeholder, std::string help, std::vector<std::string>& variable);
  // The option declared last names one thing: given twice, one of them would be dropped without a word.
  void once() { table_.options.back().once = true; }
  // Any other kind.
  void add(CommandTable::Option option);
  // What is left; at least `least` and at most `most` words, each one of `choices` where there are some.
  void words(std::string placeholder, std::vector<std::string>& variable, size_t least, size_t most,
             std::vector<std::string> choices = {});
  // Printed by --help behind the options.
  void notes(std::string text) { table_.notes = std::move(text); }

  // False: there is nothing more to do, since --help was asked for and printed, or the table was taken (below). Throws
  // std::invalid_argument on what does not fit.
  bool parse(int count, char** words);
  std::string help() const;
  // The options that were given, by name, in order.
  const std::vector<std::string>& given() const { return given_; }

 private:
  const CommandTable::Option& find(std::string_view name) const;
  void take_word(const std::string& word);
  int take_option(int count, char** arguments, int at);

  CommandTable table_;
  std::vector<std::string> given_;
  std::vector<std::string>* words_ = nullptr;
  size_t least_ = 0, most_ = 0, found_ = 0;
};

// The table of a command, from its own declarations: `run` is called with `words` (its name first) and gets no further
// than Options::parse. REQUIRES: it declares its options before it does anything else.
CommandTable table_of(int (*run)(int, char**), std::vector<std::string> words);

// " (did you mean --rows?)", or nothing where no name is near.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& names);

// "runs/a@3000": a run before one of its steps; nothing where the text is not of that kind.
struct RunStep {
  std::filesystem::path run;
  int64_t step;
};
std::optional<RunStep> parse_run_step(const std::string& text);

// Is standard output a terminal that wants colour (a terminal, and NO_COLOR is not set)?
bool use_colour();

// Says on standard error what went wrong or, where `json`, as {"error": {"kind", "message"}} on standard output. Returns
// the exit code.
int print_error(const std::string& command, const std::exception& error, bool json);

// One function per command; each returns the exit code. argv[0] is the command's name.
int run_explain(int argc, char** argv);
int run_capture(int argc, char** argv);
int run_completion(int argc, char** argv);
int run_conform(int argc, char** argv);
int run_bench(int argc, char** argv);
int run_data(int argc, char** argv);
int run_demo(int argc, char** argv);
int run_forecast(int argc, char** argv);
int run_help(int argc, char** argv);
int run_indicators(int argc, char** argv);
int run_info(int argc, char** argv);
int run_isolate(int argc, char** argv);
int run_probe(int argc, char** argv);
int run_report(int argc, char** argv);
int run_sample(int argc, char** argv);
int run_export(int argc, char** argv);
int run_train(int argc, char** argv);
int run_verdict(int argc, char** argv);
int run_watch(int argc, char** argv);

}  // namespace evenkeel::cli
