// Files of JSON objects: every line is taken or reported, and what is taken is the same written and read
// again.
#include "base/json_lines.h"

#include <nlohmann/json.hpp>

#include "fuzz/fuzz.h"

using namespace evenkeel;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = fuzz::text_of(data, size);
  std::string written;
  size_t taken = 0, last = 0;
  const JsonLinesResult result = parse_json_lines(text, "f", [&](const JsonLine& line) {
    fuzz::must(line.object.is_object(), "a line is an object");
    fuzz::must(line.number > last && line.end <= text.size() && text[line.end - 1] == '\n',
               "a line knows its place");
    last = line.number;
    ++taken;
    written += line.object.dump() + "\n";
  });
  fuzz::must(result.lines == taken + result.fault_count, "every line is taken or reported");
  fuzz::must(result.whole_size + result.torn_bytes == text.size(), "every byte is of a line or torn off");
  std::string again;
  const JsonLinesResult second =
      parse_json_lines(written, "f", [&](const JsonLine& line) { again += line.object.dump() + "\n"; });
  fuzz::must(second.lines == taken && second.fault_count == 0 && again == written,
             "lines are the same written and read again");
  return 0;
}
