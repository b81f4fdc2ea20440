// Requests: whatever comes is taken, refused or waited for; the same in pieces; and a path is never one that leads
// elsewhere.
#include "report/http_request.h"

#include "base/text.h"
#include "fuzz/fuzz.h"

using namespace evenkeel;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kLongest = 512, kLongestInPieces = 100;
  const std::string_view text = fuzz::text_of(data, size);
  const HttpParse whole = parse_http_request(text, kLongest);
  fuzz::must(whole.status == 0 || whole.status == 200 || (whole.status >= 400 && whole.status < 600),
             "a status is one of HTTP's");
  fuzz::must((whole.status >= 400) == !whole.why.empty(),
             "a refusal has its reason, and nothing else has one");
  fuzz::must(whole.status != 0 || size < kLongest, "what is too long is not waited for");
  if (size <= kLongestInPieces) {
    // A server sees it grow: it is waited for, then taken or refused, and no more bytes change a request that was taken.
    size_t decided = size + 1;
    for (size_t length = 0; length <= size; ++length) {
      const HttpParse part = parse_http_request(text.substr(0, length), kLongest);
      if (part.status == 0) {
        fuzz::must(decided > size, "what was decided stays so");
        continue;
      }
      if (decided > size) decided = length;
      if (part.status == 200)
        fuzz::must(whole.status == 200 && whole.taken == part.taken && part.taken <= length &&
                       part.request.path == whole.request.path,
                   "a request is the same with more behind it");
    }
    fuzz::must(whole.status != 200 || decided == whole.taken, "a request is taken with its last byte");
  }
  if (whole.status != 200) return 0;
  const std::string& path = whole.request.path;
  fuzz::must(path.starts_with('/') && is_utf8(path), "a path is text that begins with a slash");
  fuzz::must((path + "/").find("/../") == std::string::npos &&
                 (path + "/").find("/./") == std::string::npos && path.find("//") == std::string::npos,
             "a path leads down");
  for (const char c : path)
    fuzz::must(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f && c != '\\',
               "a path has no control characters");
  return 0;
}
