// Records of batches: the bytes are the file.
#include "training/batch_record.h"

#include "fuzz/fuzz.h"

using namespace evenkeel;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes = fuzz::text_of(data, size);
  fuzz::accepts([&] {
    const BatchRecord record(bytes, "batches.bin");
    fuzz::must(record.steps() >= 0 && record.shape().sequences > 0, "a record has a shape");
    // Every step is either refused or lies within the tokens.
    for (int64_t step = 0; step < std::min<int64_t>(record.steps(), 4); ++step) {
      const std::vector<int64_t> offsets = record.offsets(step);
      fuzz::must(static_cast<int64_t>(offsets.size()) == record.shape().sequences, "one offset a sequence");
    }
  });
  return 0;
}
