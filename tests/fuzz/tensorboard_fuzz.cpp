// Event files as they are, and the same bytes as the data of a record with good checksums: the fuzzer seldom
// hits those.
#include "base/tensorboard.h"

#include <bit>

#include "fuzz/fuzz.h"

using namespace evenkeel;

namespace {

bool same(const TensorboardEvent& a, const TensorboardEvent& b) {
  const auto bits = [](double value) { return std::bit_cast<uint64_t>(value); };
  if (bits(a.wall_time) != bits(b.wall_time) || a.step != b.step || a.file_version != b.file_version ||
      a.restarts != b.restarts || a.scalars.size() != b.scalars.size())
    return false;
  for (size_t i = 0; i < a.scalars.size(); ++i)
    if (a.scalars[i].tag != b.scalars[i].tag ||
        std::bit_cast<uint32_t>(a.scalars[i].value) != std::bit_cast<uint32_t>(b.scalars[i].value))
      return false;
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes = fuzz::text_of(data, size);
  fuzz::must(crc32c(bytes) == crc32c_by_table(bytes), "the instruction and the table agree");
  fuzz::accepts([&] { parse_tensorboard(bytes, "f", [](const TensorboardEvent&) {}); });

  TensorboardEvent version;
  version.file_version = "brain.Event:2";
  const std::string first = encode_record(encode_event(version));
  TensorboardEvent event;
  if (!fuzz::accepts([&] {
        parse_tensorboard(first + encode_record(bytes), "f",
                          [&](const TensorboardEvent& read) { event = read; });
      }))
    return 0;
  TensorboardEvent again;
  parse_tensorboard(first + encode_record(encode_event(event)), "f",
                    [&](const TensorboardEvent& read) { again = read; });
  fuzz::must(same(event, again), "an event is the same written and read again");
  return 0;
}
