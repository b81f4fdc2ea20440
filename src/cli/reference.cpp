#include "cli/reference.h"

#include <fmt/format.h>

#include <array>
#include <span>
#include <sstream>

#include "attention/precision_plan.h"
#include "base/error.h"
#include "records/schema.h"

namespace evenkeel::cli {
namespace {

std::vector<std::string> parts_of(const Command& command) {
  std::istringstream stream(command.parts);
  std::vector<std::string> parts;
  for (std::string part; stream >> part;) parts.push_back(part);
  return parts;
}

// A cell of a Markdown table: one line, with its bars escaped.
std::string cell(std::string_view raw) {
  std::string out;
  for (const char c : raw) out += c == '|' ? std::string("\\|") : std::string(1, c == '\n' ? ' ' : c);
  return out;
}
// A description in Markdown: its indented lines, "  name  words", are a list.
std::string prose(const std::string& raw) {
  std::string out;
  std::istringstream lines(raw);
  bool in_list = false;
  for (std::string line; std::getline(lines, line);) {
    const size_t words = line.find_first_not_of(' ', line.find("  ", 2));
    const bool is_item = line.starts_with("  ") && words != std::string::npos;
    if (is_item != in_list && !out.ends_with("\n\n")) out += '\n';
    in_list = is_item;
    out += is_item ? fmt::format("- `{}`: {}\n", line.substr(2, line.find(' ', 2) - 2), line.substr(words))
                   : line + "\n";
  }
  return out;
}
std::string code(std::string_view raw) { return raw.empty() ? std::string() : "`" + cell(raw) + "`"; }

std::string commands() {
  std::string text = "| command | what it does | example |\n|---|---|---|\n";
  for (const Command& command : kCommands)
    text += fmt::format("| `{}` | {} | {} |\n", command.name, cell(command.summary),
                        code("evenkeel " + table_of(command.run, {command.name}).example));
  return text;
}

std::string options() {
  std::string text;
  for (const Command& command : kCommands)
    for (const Page& page : pages_of(command)) {
      text += fmt::format("\n### {}\n\n```\nevenkeel {}\n```\n\n{}", page.name, page.table.usage,
                          prose(page.table.description));
      if (!page.table.options.empty()) text += "\n| option | meaning |\n|---|---|\n";
      for (const CommandTable::Option& option : page.table.options)
        text += fmt::format("| {} | {} |\n", code(CommandTable::shown(option)), cell(option.help));
      if (!page.table.notes.empty()) text += fmt::format("\n```\n{}```\n", page.table.notes);
    }
  return text + "\n";
}

// --- Plans

// In the order of Site.
constexpr std::array<std::string_view, kSiteCount> kSiteMeanings = {
    "q, as the products of the forward pass read it",
    "k, likewise",
    "v, likewise",
    "dO, as operand of dV",
    "S: the scores, scaled and soft-capped",
    "S - m, where m is the largest score of the row (or another shift)",
    "exp(S - m), as operand of PV",
    "l: the sum of exp(S - m), after each tile of keys",
    "O-bar: exp(S - m) V, after each tile of keys",
    "O = O-bar / l",
    "the O that delta uses",
    "delta = dO . O",
    "P, as operand of dV",
    "dP = dO V^T",
    "dS, as operand of dQ and dK",
    "the gradient of q",
    "the gradient of k",
    "the gradient of v",
    "q, as the products of the backward pass read it",
    "k, likewise",
    "v, likewise",
    "dO, as operand of dP and of delta",
};
static_assert(!kSiteMeanings.back().empty());

// In the order of each rule's enumeration.
constexpr std::string_view kShiftMeanings[] = {"",
                                               "m may lag behind the largest score",
                                               "m = beta times a tied maximum (arXiv 2510.04212)",
                                               "the same, bounded by cap and never 0",
                                               "m plus a random part of log 2",
                                               "m rounded up to a multiple of log 2"};
constexpr std::string_view kSumMeanings[] = {"", "l sums the rounded P; backward uses the same P"};
constexpr std::string_view kOutputMeanings[] = {"", "O is rounded stochastically",
                                                "delta uses O before it is rounded"};
constexpr std::string_view kDeltaMeanings[] = {"", "delta = sum P dP / sum P"};
constexpr std::string_view kKeyMeanings[] = {"", "the mean key is subtracted from every key"};

std::string in_words(const StabiliserRules& rules) {
  std::string text;
  const auto add = [&](std::span<const std::string_view> meanings, auto rule) {
    const auto n = static_cast<size_t>(rule);
    require(n < meanings.size(), "expected words for every rule of a stabiliser, found none for {}",
            rules.name);
    if (!meanings[n].empty()) text += fmt::format("{}{}", text.empty() ? "" : "; ", meanings[n]);
  };
  add(kShiftMeanings, rules.shift);
  add(kSumMeanings, rules.sum);
  add(kOutputMeanings, rules.output);
  add(kDeltaMeanings, rules.delta);
  add(kKeyMeanings, rules.keys);
  return text.empty() ? "nothing" : text;
}

std::string plan() {
  std::string text = "| site | the value that is rounded there |\n|---|---|\n";
  for (size_t n = 0; n < kSiteNames.size(); ++n)
    text += fmt::format("| {} | {} |\n", code(kSiteNames[n]), cell(kSiteMeanings[n]));
  text += "\n| stabiliser | what it changes |\n|---|---|\n";
  for (const StabiliserRules& rules : kStabiliserTable)
    text += fmt::format("| {} | {} |\n", code(rules.name), cell(in_words(rules)));
  text += "\n| plan | text |\n|---|---|\n";
  for (const NamedPlan& row : kNamedPlans)
    text += fmt::format("| {} | {} |\n", code(row.name),
                        row.text.empty() ? "nothing is rounded below FP32" : code(row.text));
  return text;
}

// --- Records

constexpr std::array<std::string_view, 6> kFileMeanings = {
    "the settings, everything needed to repeat the run",
    "one object per step",
    "one object per event of the guard",
    "what ended the run early",
    "every replay that was made",
    "what `isolate` found"};
static_assert(kFileMeanings.size() == kRecordFileNames.size());

// In the order of FieldShape.
constexpr std::string_view kShapeNames[] = {"number",
                                            "text",
                                            "true or false",
                                            "list of numbers",
                                            "list of texts",
                                            "list of lists, (L, H)",
                                            "list of L H numbers",
                                            "object",
                                            "list of objects"};

std::string records() {
  std::string text;
  for (size_t n = 0; n < kRecordFileNames.size(); ++n) {
    text += fmt::format(
        "\n### {}\n\nHolds {}.\n\n| field | shape | unit | meaning | older names |\n|---|---|---|---|---|\n",
        kRecordFileNames[n], kFileMeanings[n]);
    for (const RecordField& field : kRecordFields) {
      if (static_cast<size_t>(field.file) != n) continue;
      const std::string name =
          fmt::format("{}{}{}", field.inside, field.inside.empty() ? "" : ".", field.name);
      text += fmt::format("| {} | {} | {} | {} | {} |\n", code(name),
                          kShapeNames[static_cast<size_t>(field.shape)], cell(field.unit),
                          cell(field.meaning), code(field.aliases));
    }
  }
  return text + "\n";
}

}  // namespace

std::vector<Page> pages_of(const Command& command) {
  std::vector<Page> pages = {{command.name, table_of(command.run, {command.name})}};
  for (const std::string& part : parts_of(command))
    pages.push_back({fmt::format("{} {}", command.name, part), table_of(command.run, {command.name, part})});
  return pages;
}

std::string reference(std::string_view part) {
  if (part == "commands") return commands();
  if (part == "options") return options();
  if (part == "plan") return plan();
  if (part == "records") return records();
  throw std::invalid_argument(fmt::format("--markdown {}: expected one of {}", part, kReferenceParts));
}

}  // namespace evenkeel::cli
