// Configuration files: what is read is the same written and read again.
#include "base/toml.h"

#include "fuzz/fuzz.h"

using namespace evenkeel;

namespace {

void visit(const TomlTable& table);

void visit(const TomlValue& value) {
  fuzz::must(value.place().line > 0 && value.place().column > 0, "a value knows its place");
  if (const auto* table = value.get_if<TomlTable>()) visit(*table);
  if (const auto* array = value.get_if<TomlValue::Array>())
    for (const TomlValue& element : *array) visit(element);
}

void visit(const TomlTable& table) {
  for (const auto& entry : table.entries()) {
    fuzz::must(table.find(entry->key) == &entry->value, "a value is found by its key");
    visit(entry->value);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  TomlTable table;
  if (!fuzz::accepts([&] { table = parse_toml(fuzz::text_of(data, size), "c.toml"); })) return 0;
  fuzz::must(unused_keys(table).size() == table.size(), "nobody has asked for anything");
  visit(table);
  fuzz::must(unused_keys(table).empty(), "everything has been asked for");
  const std::string written = to_toml(table);
  const TomlTable again = parse_toml(written, "written");
  fuzz::must(same(again, table), "a table is the same written and read again");
  fuzz::must(to_toml(again) == written, "and is written the same");
  const TomlTable copy = table;
  fuzz::must(same(copy, table) && unused_keys(copy).empty(), "a copy is the same");
  return 0;
}
