// Run folders: whatever their files hold, there is a page, and text of theirs stays text. The first byte says which file
// the rest is; each is read on top of a small sound run.
#include "records/run_records.h"

#include "fuzz/fuzz.h"
#include "report/panels.h"

using namespace evenkeel;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text = fuzz::text_of(data + 1, size - 1);
  RunRecords run;
  run.folder = run.label = "run";
  const std::string sound = "{\"step\":0,\"loss\":3,\"offset\":[[1,2]],\"tied_rows\":[[0,1]]}\n";
  take_metrics(parse_metrics(sound), run);
  switch (data[0]) {
    case 'g':
      read_guard(text, run);
      break;
    case 'f':
      read_findings(text, run);
      break;
    case 'c':
      read_config(text, run);
      break;
    case 'v':
      read_verdict(text, run);
      break;
    default:
      take_metrics(parse_metrics(sound + std::string(text)), run);
  }
  std::vector<RunRecords> runs(1, std::move(run));
  const std::string body = body_of(page_data(std::move(runs)));
  fuzz::must(body.find("<script") == std::string::npos, "text of a run is escaped");
  for (const char c : body)
    fuzz::must(static_cast<unsigned char>(c) >= 0x20 || c == '\n' || c == '\t', "no control character");
  return 0;
}
