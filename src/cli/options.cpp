#include "cli/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/error.h"
#include "base/text.h"

namespace evenkeel::cli {
namespace {

// Where parse() leaves its table while table_of() asks for it.
thread_local std::optional<CommandTable>* asked_table = nullptr;

// "-2.5", "-.5", "-inf" and "-2.4+-2.3" are values, not options.
bool looks_like_value(const std::string& word) {
  if (word.size() < 2 || word[0] != '-') return true;
  if (word[1] == '.' || (word[1] >= '0' && word[1] <= '9')) return true;
  return word == "-inf" || word == "-nan" || word.starts_with("-inf ") || word.starts_with("-nan ");
}

template <class T>
std::optional<T> parse_number(const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return {};
  return value;
}

std::string with_default(std::string help, const std::string& standard) {
  if (standard.empty() || help.find("default") != std::string::npos) return help;
  return fmt::format("{} (default {})", help, standard);
}

}  // namespace

std::string CommandTable::shown(const Option& option) {
  return option.name + (option.placeholder.empty() || option.alone ? "" : " ") + option.placeholder;
}

Options::Options(std::string usage, std::string description, std::string example) {
  table_.usage = std::move(usage);
  table_.description = std::move(description);
  table_.example = std::move(example);
}

void Options::add(CommandTable::Option option) { table_.options.push_back(std::move(option)); }

void Options::flag(std::string name, std::string help, bool& variable) {
  add({std::move(name), "", std::move(help), [&variable](const std::string&) { variable = true; }});
}

void Options::value(std::string name, std::string placeholder, std::string help, std::string& variable,
                    Empty empty) {
  add({.name = std::move(name),
       .placeholder = std::move(placeholder),
       .help = with_default(std::move(help), variable),
       .set = [&variable](const std::string& text) { variable = text; },
       .may_be_empty = empty == Empty::allowed});
}

void Options::value(std::string name, std::string placeholder, std::string help, int64_t& variable,
                    int64_t low, int64_t high) {
  const std::string option = name;
  const bool has_default = low <= variable && variable <= high;
  add({std::move(name), std::move(placeholder),
       with_default(std::move(help), has_default ? std::to_string(variable) : ""),
       [&variable, low, high, option](const std::string& text) {
         const auto parsed = parse_number<int64_t>(text);
         require(parsed && low <= *parsed && *parsed <= high, "{} {}: expected a whole number from {} to {}",
                 option, text, low, high);
         variable = *parsed;
       }});
}

void Options::value(std::string name, std::string placeholder, std::string help, double& variable, double low,
                    double high) {
  const std::string option = name;
  add({std::move(name), std::move(placeholder), with_default(std::move(help), fmt::format("{}", variable)),
       [&variable, low, high, option](const std::string& text) {
         const auto parsed = parse_number<double>(text);
         require(parsed && low <= *parsed && *parsed <= high, "{} {}: expected a number from {} to {}",
                 option, text, low, high);
         variable = *parsed;
       }});
}

void Options::values(std::string name, std::string placeholder, std::string help,
                     std::vector<std::string>& variable) {
  add({std::move(name), std::move(placeholder), std::move(help),
       [&variable](const std::string& text) { variable.push_back(text); }});
}

void Options::lists(std::string name, std::string placeholder, std::string help,
                    std::vector<std::string>& variable) {
  values(std::move(name), std::move(placeholder), std::move(help), variable);
  table_.options.back().list = true;
}

void Options::words(std::string placeholder, std::vector<std::string>& variable, size_t least, size_t most,
                    std::vector<std::string> choices) {
  table_.words = std::move(placeholder);
  table_.choices = std::move(choices);
  words_ = &variable;
  least_ = least;
  most_ = most;
}

const CommandTable::Option& Options::find(std::string_view name) const {
  std::vector<std::string> known;
  for (const CommandTable::Option& option : table_.options) {
    if (option.name == name) return option;
    known.push_back(option.name);
  }
  const std::string expected = known.empty() ? "usage: evenkeel " + table_.usage
                                             : fmt::format("expected one of {}", fmt::join(known, ", "));
  throw std::invalid_argument(
      fmt::format("unknown option '{}'{}: {}", shown(name), did_you_mean(name, known), expected));
}

void Options::take_word(const std::string& word) {
  require(words_ && found_ < most_, "unexpected '{}': usage: evenkeel {}", word, table_.usage);
  require(!word.empty(), "expected {}, found an empty word", table_.words);
  const std::vector<std::string>& choices = table_.choices;
  require(choices.empty() || std::find(choices.begin(), choices.end(), word) != choices.end(),
          "unknown '{}'{}: expected one of {}", shown(word), did_you_mean(word, choices),
          fmt::join(choices, ", "));
  words_->push_back(word);
  ++found_;
}

// Returns the place of the last word that belongs to the option.
int Options::take_option(int count, char** arguments, int at) {
  const std::string word = arguments[at];
  const size_t equals = word.find('=');
  const CommandTable::Option& option = find(word.substr(0, equals));
  const auto set = [&](const std::string& value) {
    require(!value.empty() || option.may_be_empty, "{}: expected {}, found nothing", option.name,
            option.placeholder);
    option.set(value);
  };
  require(!option.once || std::find(given_.begin(), given_.end(), option.name) == given_.end(),
          "{} {}: expected it once, found it twice", option.name, option.placeholder);
  given_.push_back(option.name);
  if (option.placeholder.empty()) {
    require(equals == std::string::npos, "{} takes no value, got '{}'", option.name,
            word.substr(std::min(equals, word.size() - 1) + 1));
    option.set("");
  } else if (equals != std::string::npos) {
    set(word.substr(equals + 1));
  } else if (option.alone) {
    set(*option.alone);
  } else {
    require(at + 1 < count, "{} needs a value: {}", option.name, option.placeholder);
    set(arguments[++at]);
    while (option.list && at + 1 < count && looks_like_value(arguments[at + 1])) set(arguments[++at]);
  }
  return at;
}

bool Options::parse(int count, char** arguments) {
  if (asked_table) {
    *asked_table = table_;
    return false;
  }
  bool only_words = false;  // behind "--"
  for (int at = 1; at < count; ++at) {
    const std::string word = arguments[at];
    if (only_words) {
      take_word(word);
      continue;
    }
    only_words = word == "--";
    if (only_words) continue;
    if (word == "--help" || word == "-h") {
      fmt::print("{}", help());
      return false;
    }
    if (looks_like_value(word))
      take_word(word);
    else
      at = take_option(count, arguments, at);
  }
  require(found_ >= least_, "expected {}: usage: evenkeel {}", table_.words, table_.usage);
  return true;
}

std::string Options::help() const {
  std::string text = fmt::format("usage: evenkeel {}\n\n{}\n\n", table_.usage, table_.description);
  if (!table_.options.empty()) text += "options:\n";
  for (const CommandTable::Option& option : table_.options)
    text += fmt::format("  {:<28}{}\n", CommandTable::shown(option), option.help);
  if (!table_.notes.empty()) text += "\n" + table_.notes;
  return text + fmt::format("\nexample:\n  evenkeel {}\n", table_.example);
}

CommandTable table_of(int (*run)(int, char**), std::vector<std::string> words) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  std::optional<CommandTable> table;
  asked_table = &table;
  run(static_cast<int>(arguments.size()), arguments.data());
  asked_table = nullptr;
  return table.value();
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& names) {
  const std::vector<std::string_view> known(names.begin(), names.end());
  const std::string_view near = nearest_name(word, known);
  return near.empty() ? "" : fmt::format(" (did you mean {}?)", near);
}

std::optional<RunStep> parse_run_step(const std::string& text) {
  const size_t at = text.rfind('@');
  if (at == std::string::npos || at == 0) return {};
  const auto step = parse_number<int64_t>(text.substr(at + 1));
  if (!step || *step < 0) return {};
  return RunStep{text.substr(0, at), *step};
}

bool use_colour() { return isatty(STDOUT_FILENO) && std::getenv("NO_COLOR") == nullptr; }

int print_error(const std::string& command, const std::exception& error, bool json) {
  const bool is_usage = dynamic_cast<const std::invalid_argument*>(&error) != nullptr;
  const bool is_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  const std::string message =
      is_memory
          ? "not enough memory; less is needed with a smaller problem, or where other programs leave more"
          : error.what();
  if (json)
    fmt::print("{}\n", nlohmann::ordered_json{{"error",
                                               {{"kind", is_usage    ? "usage"
                                                         : is_memory ? "memory"
                                                                     : "data"},
                                                {"message", message}}}}
                           .dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  else
    fmt::print(stderr, "{}: {}\n", command, message);
  std::fflush(json ? stdout : stderr);
  return is_usage ? 2 : 3;
}

}  // namespace evenkeel::cli
