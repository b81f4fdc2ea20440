// `evenkeel help` and `evenkeel completion`: what the tables of commands and options say, for people and for programs.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/reference.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPurpose =
    "Evenkeel finds, explains and prevents the training failures that rounding in attention causes.";
constexpr const char* kExitCodes =
    "exit codes: 0 ok, 1 finding or failed check, 2 usage, 3 data or environment";
constexpr const char* kJsonErrors =
    "With --json, an error is the object {\"error\": {\"kind\", \"message\"}} on standard output, with the "
    "same exit\n"
    "code; kind is usage, data or memory.";

std::vector<std::string> command_names() {
  std::vector<std::string> names;
  for (const Command& command : kCommands) names.emplace_back(command.name);
  return names;
}

// --- bash

std::string bash_case(const Page& page) {
  std::vector<std::string> options = {"--help"};
  for (const CommandTable::Option& option : page.table.options) options.push_back(option.name);
  return fmt::format("    '{} '*) words='{}' options='{}' ;;\n", page.name,
                     fmt::join(page.table.choices, " "), fmt::join(options, " "));
}

// Words that are no options are completed as names of files where the command does not list what they may be.
std::string bash_completion() {
  std::string cases;
  for (const Command& command : kCommands) {
    const std::vector<Page> pages = pages_of(command);
    for (size_t n = pages.size(); n-- > 0;) cases += bash_case(pages[n]);  // parts before the whole
  }
  return fmt::format(
      "# bash completion of evenkeel: eval \"$(evenkeel completion bash)\"\n"
      "_evenkeel() {{\n"
      "  local current=${{COMP_WORDS[COMP_CWORD]}} words='{}' options='--help --version'\n"
      "  local line=\"${{COMP_WORDS[1]}} \"\n"
      "  [ \"$COMP_CWORD\" -le 2 ] || line+=\"${{COMP_WORDS[2]}} \"\n"
      "  if [ \"$COMP_CWORD\" -gt 1 ]; then\n"
      "    words= options=\n"
      "    case \"$line\" in\n{}    esac\n"
      "  fi\n"
      "  case \"$current\" in -*) words=$options ;; esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
      "}}\n"
      "complete -o default -F _evenkeel evenkeel\n",
      fmt::join(command_names(), " "), cases);
}

// --- The manual page

std::string roff(std::string_view text) {
  std::string out;
  for (size_t n = 0; n < text.size(); ++n) {
    const char c = text[n];
    if ((n == 0 || text[n - 1] == '\n') && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\')
      out += "\\e";
    else if (c == '-')
      out += "\\-";
    else
      out += c;
  }
  return out;
}

std::string manual() {
  std::string text = fmt::format(
      ".TH EVENKEEL 1 \"\" \"evenkeel {}\"\n.SH NAME\nevenkeel \\- {}\n.SH SYNOPSIS\n"
      ".B evenkeel\nCOMMAND [options]\n.SH COMMANDS\n",
      EVENKEEL_VERSION, roff(kPurpose));
  for (const Command& command : kCommands)
    for (const Page& page : pages_of(command)) {
      const CommandTable& table = page.table;
      text += fmt::format(".SS {}\n.nf\nevenkeel {}\n.fi\n.PP\n{}\n", roff(page.name), roff(table.usage),
                          roff(table.description));
      for (const CommandTable::Option& option : table.options)
        text += fmt::format(".TP\n.B {}\n{}\n", roff(CommandTable::shown(option)), roff(option.help));
      if (!table.notes.empty()) text += fmt::format(".PP\n.nf\n{}.fi\n", roff(table.notes));
      text += fmt::format(".PP\nExample:\n.PP\n.nf\n  evenkeel {}\n.fi\n", roff(table.example));
    }
  return text + fmt::format(".SH EXIT STATUS\n{}\n.PP\n{}\n", roff(kExitCodes), roff(kJsonErrors));
}

// --- JSON

Json to_json(const Page& page) {
  Json options = Json::array();
  for (const CommandTable::Option& option : page.table.options)
    options.push_back({{"name", option.name}, {"value", option.placeholder}, {"help", option.help}});
  return {{"command", page.name},
          {"usage", page.table.usage},
          {"description", page.table.description},
          {"example", page.table.example},
          {"options", options}};
}

Json all_as_json() {
  Json commands = Json::array();
  for (const Command& command : kCommands)
    for (const Page& page : pages_of(command)) commands.push_back(to_json(page));
  return {{"schema", 1}, {"version", EVENKEEL_VERSION}, {"commands", commands}};
}

}  // namespace

void print_usage(std::FILE* to) {
  fmt::print(to, "{}\n\nusage: evenkeel COMMAND [options]\n\n", kPurpose);
  for (const Command& command : kCommands) fmt::print(to, "  {:<12}{}\n", command.name, command.summary);
  fmt::print(to,
             "\n`evenkeel COMMAND --help` shows options and an example. In the source tree, `./evenkeel "
             "test` runs every test.\n{}\n{}\n",
             kExitCodes, kJsonErrors);
}

int run_help(int argc, char** argv) {
  std::vector<std::string> words;
  std::string markdown;
  bool man = false, json = false;
  Options options(
      "help [COMMAND] [--man | --markdown PART | --json]",
      "The list of commands, or the options of one. All of it as a manual page or as JSON; parts of the "
      "reference in Markdown.",
      "help --man > evenkeel.1");
  options.words("COMMAND", words, 0, 1, command_names());
  options.flag("--man", "a manual page, for man(1)", man);
  options.value("--markdown", "PART", fmt::format("a part of docs/reference.md: {}", kReferenceParts),
                markdown);
  options.flag("--json", "every command with its options, as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  require(words.size() + man + !markdown.empty() + json <= 1,
          "expected one of COMMAND, --man, --markdown and --json");
  if (man)
    fmt::print("{}", manual());
  else if (!markdown.empty())
    fmt::print("{}", reference(markdown));
  else if (json)
    fmt::print("{}\n", all_as_json().dump(2));
  else if (words.empty())
    print_usage(stdout);
  for (const Command& command : kCommands)
    if (!words.empty() && words[0] == command.name) {
      std::string name = command.name, help = "--help";
      char* arguments[] = {name.data(), help.data()};
      return command.run(2, arguments);
    }
  return 0;
}

int run_completion(int argc, char** argv) {
  std::vector<std::string> words;
  bool json = false;
  Options options("completion bash", "A script that completes commands and options in a shell.",
                  "completion bash > ~/.local/share/bash-completion/completions/evenkeel");
  options.words("the shell, bash", words, 1, 1, {"bash"});
  options.flag("--json", "the script as a JSON string", json);
  if (!options.parse(argc, argv)) return 0;
  if (json)
    fmt::print("{}\n", Json{{"shell", words[0]}, {"script", bash_completion()}}.dump(2));
  else
    fmt::print("{}", bash_completion());
  return 0;
}

}  // namespace evenkeel::cli
