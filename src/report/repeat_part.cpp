// How the runs were made, and the commands that make them again.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "diagnosis/next_command.h"
#include "report/html.h"
#include "report/panels.h"

namespace evenkeel {
namespace {

std::string value_text(const TomlValue& value) {
  if (const auto* text = value.get_if<std::string>()) return *text;
  if (const auto* n = value.get_if<int64_t>()) return std::to_string(*n);
  if (const auto* x = value.get_if<double>()) return fmt::format("{}", *x);
  if (const auto* b = value.get_if<bool>()) return *b ? "true" : "false";
  if (const auto* list = value.get_if<TomlValue::Array>()) return fmt::format("{} entries", list->size());
  return "a table";
}

// "table.key" -> value, in the file's order.
std::vector<std::pair<std::string, std::string>> settings_of(const RunRecords& run) {
  std::vector<std::pair<std::string, std::string>> all;
  if (!run.config) return all;
  for (const auto& entry : run.config->entries()) {
    if (const TomlTable* const table = entry->value.get_if<TomlTable>())
      for (const auto& inner : table->entries())
        all.emplace_back(entry->key + "." + inner->key, value_text(inner->value));
    else
      all.emplace_back(entry->key, value_text(entry->value));
  }
  return all;
}

}  // namespace

std::string repeat_part(const PageData& data) {
  std::vector<std::vector<std::pair<std::string, std::string>>> settings;
  std::vector<std::string> keys;
  for (const RunRecords& run : data.runs) {
    settings.push_back(settings_of(run));
    for (const auto& [key, value] : settings.back())
      if (std::find(keys.begin(), keys.end(), key) == keys.end() && keys.size() < 500) keys.push_back(key);
  }
  std::string different, same;
  for (const std::string& key : keys) {
    std::set<std::string> values;
    std::string row = fmt::format("<tr><th scope=\"row\">{}</th>", escape(key));
    for (const auto& of_run : settings) {
      const auto found =
          std::find_if(of_run.begin(), of_run.end(), [&](const auto& s) { return s.first == key; });
      const std::string value = found == of_run.end() ? "–" : found->second;
      values.insert(value);
      row += fmt::format("<td>{}</td>", escape(value));
    }
    (values.size() > 1 ? different : same) += row + "</tr>\n";
  }
  std::string head = "<thead><tr><th scope=\"col\">setting</th>";
  for (size_t n = 0; n < data.runs.size(); ++n)
    head +=
        fmt::format("<th scope=\"col\" class=\"{}\">{}</th>", colour_of(data, n), escape(data.runs[n].label));
  head += "</tr></thead>";
  std::string text;
  if (!different.empty())
    text += fmt::format(
        "<h3>What differs</h3><div class=\"scroll\"><table "
        "class=\"settings\">{}<tbody>\n{}</tbody></table></div>\n",
        head, different);
  if (!same.empty())
    text += fmt::format(
        "<details class=\"data\"{}><summary>{}</summary><div class=\"scroll\"><table "
        "class=\"settings\">{}<tbody>\n{}</tbody></table></div></details>\n",
        "", data.runs.size() > 1 ? "What is the same in all runs" : "All settings", head, same);
  if (keys.empty())
    text += missing("No config.toml could be read: how these runs were made is not known.", "");

  std::string commands, all_runs;
  for (const RunRecords& run : data.runs) {
    const std::string folder = shell_word(run.folder.string());
    all_runs += " " + folder;
    if (run.config && run.setting("run", "trainer").empty())  // another's training starts by its own program
      commands += fmt::format("evenkeel train --config {} --out {}\n",
                              shell_word(record_path(run.folder, RecordFile::config).string()),
                              shell_word(run.folder.string() + "-again"));
  }
  const RunRecords& run = data.runs[data.subject];
  if (data.symptoms[data.subject].kind != Symptom::Kind::none || run.verdict)
    commands += isolate_command(run.folder, run.setting("run", "trainer")) + "\n";
  if (data.view && run.setting("run", "trainer").empty())
    commands += fmt::format("evenkeel capture {} --layer {} --heads {} -o {}\n",
                            shell_word(fmt::format("{}@{}", run.folder.string(), data.view->step)),
                            data.view->layer, data.view->head, shell_word(data.view->file));
  commands += fmt::format("evenkeel report{} -o report.html\n", all_runs);
  text += fmt::format("<h3>Commands</h3><pre class=\"commands\" tabindex=\"0\"><code>{}</code></pre>\n",
                      escape(commands));
  return section("repeat", "Repeat it",
                 "A run repeats to the last bit from its own configuration, on the same backend; these are "
                 "the commands that made "
                 "what is on this page.",
                 text);
}

}  // namespace evenkeel
