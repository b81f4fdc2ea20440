// Token files and their meta.json. The first byte picks which; its second bit puts the header of a good shard, of as
// many tokens as the next two bytes say, in front.
#include "training/token_file.h"

#include <cstring>

#include "fuzz/fuzz.h"

using namespace evenkeel;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string bytes(fuzz::text_of(data + 1, size - 1));
  if (data[0] & 1) {
    fuzz::accepts([&] {
      const TokenMeta meta = parse_token_meta(bytes, "meta.json");
      fuzz::must(meta.vocabulary > 0 && meta.vocabulary <= 65536, "a vocabulary that a uint16 can name");
      fuzz::must(meta.files.size() <= bytes.size(), "no more files than the text has bytes");
    });
    return 0;
  }
  if (data[0] & 2) {
    int32_t header[256] = {20240520, 1, 0};
    if (size > 2) header[2] = data[1] | data[2] << 8;
    bytes.insert(0, reinterpret_cast<const char*>(header), sizeof header);
  }
  fuzz::accepts([&] {
    const TokenLayout layout = token_layout(bytes, "t.bin");
    fuzz::must(layout.tokens > 0 && layout.first_byte >= 0, "there are tokens");
    fuzz::must(layout.first_byte + layout.tokens * 2 == static_cast<int64_t>(bytes.size()),
               "the tokens are what follows the header, and nothing else");
    fuzz::must((layout.kind == TokenKind::llmc) == (layout.first_byte == 1024), "a shard has a header");
  });
  return 0;
}
