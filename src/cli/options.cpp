#include "cli/options.h"

#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace evenkeel::cli {
namespace {

// "-2.5", "-.5", "-inf" and "-2.4+-2.3" are values, not options.
bool looks_like_value(const std::string& word) {
  if (word.size() < 2 || word[0] != '-') return true;
  if (word[1] == '.' || (word[1] >= '0' && word[1] <= '9')) return true;
  return word == "-inf" || word == "-nan" || word.starts_with("-inf ") || word.starts_with("-nan ");
}

}  // namespace

Options::Options(std::string usage, std::string description, std::string example)
    : usage_(std::move(usage)), description_(std::move(description)), example_(std::move(example)) {}

void Options::flag(std::string name, std::string help, bool& variable) {
  options_.push_back(
      {std::move(name), "", std::move(help), [&variable](const std::string&) { variable = true; }});
}

void Options::value(std::string name, std::string placeholder, std::string help, std::string& variable) {
  options_.push_back({std::move(name), std::move(placeholder), std::move(help),
                      [&variable](const std::string& text) { variable = text; }});
}

void Options::value(std::string name, std::string placeholder, std::string help, int64_t& variable,
                    int64_t low, int64_t high) {
  const std::string option = name;
  options_.push_back({std::move(name), std::move(placeholder), std::move(help),
                      [&variable, low, high, option](const std::string& text) {
                        int64_t parsed = 0;
                        const char* end = text.data() + text.size();
                        const auto [stop, error] = std::from_chars(text.data(), end, parsed);
                        if (error != std::errc() || stop != end || parsed < low || parsed > high)
                          throw std::invalid_argument(fmt::format(
                              "{} {}: expected a whole number from {} to {}", option, text, low, high));
                        variable = parsed;
                      }});
}

void Options::value_or(std::string name, std::string placeholder, std::string without, std::string help,
                       std::string& variable) {
  options_.push_back({std::move(name), std::move(placeholder), std::move(help),
                      [&variable](const std::string& text) { variable = text; }, false, std::move(without)});
}

void Options::values(std::string name, std::string placeholder, std::string help,
                     std::vector<std::string>& variable) {
  options_.push_back({std::move(name), std::move(placeholder), std::move(help),
                      [&variable](const std::string& text) { variable.push_back(text); }});
}

void Options::lists(std::string name, std::string placeholder, std::string help,
                    std::vector<std::string>& variable) {
  values(std::move(name), std::move(placeholder), std::move(help), variable);
  options_.back().list = true;
}

void Options::words(std::string placeholder, std::vector<std::string>& variable, size_t least, size_t most) {
  words_placeholder_ = std::move(placeholder);
  words_ = &variable;
  least_ = least;
  most_ = most;
}

Options::Option* Options::find(std::string_view name) {
  for (Option& option : options_)
    if (option.name == name) return &option;
  return nullptr;
}

bool Options::parse(int count, char** arguments) {
  size_t found = 0;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    if (word == "--help" || word == "-h") {
      fmt::print("{}", help());
      return false;
    }
    if (looks_like_value(word)) {
      if (!words_ || found == most_)
        throw std::invalid_argument(fmt::format("unexpected '{}': usage: evenkeel {}", word, usage_));
      words_->push_back(word);
      ++found;
      continue;
    }
    const size_t equals = word.find('=');
    Option* option = find(word.substr(0, equals));
    if (!option) {
      std::string known;
      for (const Option& o : options_) known += (known.empty() ? "" : ", ") + o.name;
      throw std::invalid_argument(
          fmt::format("unknown option '{}': expected one of {}", word.substr(0, equals), known));
    }
    if (option->placeholder.empty()) {
      if (equals != std::string::npos)
        throw std::invalid_argument(
            fmt::format("{} takes no value, got '{}'", option->name, word.substr(equals + 1)));
      option->set("");
    } else if (equals != std::string::npos) {
      option->set(word.substr(equals + 1));
    } else if (option->without) {
      option->set(*option->without);
    } else {
      if (i + 1 == count)
        throw std::invalid_argument(fmt::format("{} needs a value: {}", option->name, option->placeholder));
      option->set(arguments[++i]);
      while (option->list && i + 1 < count && looks_like_value(arguments[i + 1])) option->set(arguments[++i]);
    }
  }
  if (found < least_)
    throw std::invalid_argument(fmt::format("expected {}: usage: evenkeel {}", words_placeholder_, usage_));
  return true;
}

std::string Options::help() const {
  std::string text = fmt::format("usage: evenkeel {}\n\n{}\n\n", usage_, description_);
  if (!options_.empty()) text += "options:\n";
  for (const Option& option : options_)
    text += fmt::format(
        "  {:<28}{}\n",
        option.name + (option.placeholder.empty() || option.without ? "" : " ") + option.placeholder,
        option.help);
  return text + fmt::format("\nexample:\n  evenkeel {}\n", example_);
}

std::optional<RunStep> parse_run_step(const std::string& text) {
  const size_t at = text.rfind('@');
  if (at == std::string::npos || at == 0) return {};
  int64_t step = 0;
  const char *begin = text.data() + at + 1, *end = text.data() + text.size();
  const auto [last, error] = std::from_chars(begin, end, step);
  if (error != std::errc() || last != end || step < 0) return {};
  return RunStep{text.substr(0, at), step};
}

bool use_colour() { return isatty(STDOUT_FILENO) && std::getenv("NO_COLOR") == nullptr; }

}  // namespace evenkeel::cli
