#include "base/tensorboard.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>

#include "base/error.h"
#include "base/text.h"

namespace evenkeel {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kFileVersion = "brain.Event:2";

// The field numbers of TensorBoard's messages, and how a field's value is laid out (protocol buffers).
enum EventField { kWallTime = 1, kStep = 2, kVersion = 3, kSummary = 5, kSessionLog = 7 };
enum SummaryField { kValue = 1 };
enum ValueField { kTag = 1, kSimpleValue = 2 };
enum SessionLogField { kStatus = 1 };
constexpr uint64_t kStatusStart = 1;
enum WireType : uint64_t { kVarint = 0, kEightBytes = 1, kLengthAndBytes = 2, kFourBytes = 5 };

template <class T>
std::string raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// Seven bits a byte, the lowest first; the top bit says that more follow.
std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

std::string key(int field, WireType layout) { return varint(static_cast<uint64_t>(field) << 3 | layout); }

std::string with_length(int field, std::string_view bytes) {
  return (key(field, kLengthAndBytes) + varint(bytes.size())).append(bytes);
}

// Reads one message, field by field.
class MessageReader {
 public:
  explicit MessageReader(std::string_view message) : rest_(message) {}

  // False at the end. Afterwards `field` and one of `number` (varint, four or eight bytes) and `bytes`.
  bool next() {
    if (rest_.empty()) return false;
    const uint64_t found = take_varint();
    field = found >> 3;
    layout = found & 7;
    require_data(field > 0 && field < uint64_t{1} << 29, "expected a field's number, found {}", field);
    switch (layout) {
      case kVarint:
        number = take_varint();
        break;
      case kEightBytes:
        number = take_raw<uint64_t>();
        break;
      case kFourBytes:
        number = take_raw<uint32_t>();
        break;
      case kLengthAndBytes:
        bytes = take(take_varint());
        break;
      default:
        throw DataError(fmt::format("expected a field's layout, found {}", layout));
    }
    return true;
  }

  // A field that we know, laid out otherwise than it must be, is a fault; one that we do not know is skipped.
  bool is(int wanted, WireType wanted_layout) const {
    if (field != static_cast<uint64_t>(wanted)) return false;
    require_data(layout == wanted_layout, "expected field {} in layout {}, found {}", field,
                 static_cast<uint64_t>(wanted_layout), layout);
    return true;
  }

  uint64_t field = 0, layout = 0, number = 0;
  std::string_view bytes;

 private:
  std::string_view take(uint64_t size) {
    require_data(size <= rest_.size(), "expected {} more bytes of a message, found {}", size, rest_.size());
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  template <class T>
  T take_raw() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  uint64_t take_varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<uint8_t>(take(1)[0]);
      require_data(shift < 63 || byte <= 1, "expected a number of at most 64 bits, found more");
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    throw DataError("expected a number of at most 64 bits, found more");
  }

  std::string_view rest_;
};

void add_value(std::string_view bytes, TensorboardEvent& event) {
  std::string_view tag;
  std::optional<float> value;
  for (MessageReader field(bytes); field.next();) {
    if (field.is(kTag, kLengthAndBytes)) tag = field.bytes;
    if (field.is(kSimpleValue, kFourBytes)) value = std::bit_cast<float>(static_cast<uint32_t>(field.number));
  }
  if (value) {
    require_data(is_utf8(tag), "expected a tag in UTF-8, found '{}'", shown(tag));
    event.scalars.push_back({std::string(tag), *value});
  } else {
    ++event.other_values;
  }
}

TensorboardEvent decode_event(std::string_view bytes) {
  TensorboardEvent event;
  for (MessageReader field(bytes); field.next();) {
    if (field.is(kWallTime, kEightBytes)) event.wall_time = std::bit_cast<double>(field.number);
    if (field.is(kStep, kVarint)) event.step = static_cast<int64_t>(field.number);
    if (field.is(kVersion, kLengthAndBytes)) event.file_version = field.bytes;
    if (field.is(kSummary, kLengthAndBytes))
      for (MessageReader value(field.bytes); value.next();)
        if (value.is(kValue, kLengthAndBytes)) add_value(value.bytes, event);
    if (field.is(kSessionLog, kLengthAndBytes))
      for (MessageReader status(field.bytes); status.next();)
        if (status.is(kStatus, kVarint)) event.restarts = status.number == kStatusStart;
  }
  return event;
}

constexpr uint32_t kCastagnoli = 0x82F63B78;  // the polynomial, its lowest power in the highest bit

constexpr std::array<uint32_t, 256> kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kCastagnoli : 0);
    table[byte] = crc;
  }
  return table;
}();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_by_instruction(std::string_view bytes) {
  uint64_t crc = ~uint32_t{0};
  for (; bytes.size() >= sizeof(uint64_t); bytes.remove_prefix(sizeof(uint64_t))) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), sizeof word);
    crc = __builtin_ia32_crc32di(crc, word);
  }
  auto last = static_cast<uint32_t>(crc);
  for (const char c : bytes) last = __builtin_ia32_crc32qi(last, static_cast<unsigned char>(c));
  return ~last;
}
#endif

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::filesystem::path new_event_file(const std::filesystem::path& folder) {
  static std::atomic<int> count = 0;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require_data(!error, "{}: cannot make the folder: {}", folder.string(), error.message());
  char host[256] = "";
  if (::gethostname(host, sizeof host - 1) != 0 || host[0] == '\0') std::strcpy(host, "localhost");
  for (;;) {
    const auto path = folder / fmt::format("events.out.tfevents.{:010}.{}.{}.{}", static_cast<int64_t>(now()),
                                           host, ::getpid(), count++);
    if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) return path;
  }
}

}  // namespace

uint32_t crc32c_by_table(std::string_view bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char c : bytes) crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~crc;
}

uint32_t crc32c(std::string_view bytes) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return crc32c_by_instruction(bytes);
#endif
  return crc32c_by_table(bytes);
}

std::string encode_record(std::string_view data) {
  const std::string length = raw(static_cast<uint64_t>(data.size()));
  return (length + raw(masked_crc(crc32c(length)))).append(data) + raw(masked_crc(crc32c(data)));
}

std::string encode_event(const TensorboardEvent& event) {
  std::string bytes = key(kWallTime, kEightBytes) + raw(event.wall_time);
  if (event.step != 0) bytes += key(kStep, kVarint) + varint(static_cast<uint64_t>(event.step));
  if (!event.file_version.empty()) bytes += with_length(kVersion, event.file_version);
  if (event.restarts) bytes += with_length(kSessionLog, key(kStatus, kVarint) + varint(kStatusStart));
  std::string summary;
  for (const auto& [tag, value] : event.scalars)
    summary += with_length(kValue, with_length(kTag, tag) + key(kSimpleValue, kFourBytes) + raw(value));
  if (!summary.empty()) bytes += with_length(kSummary, summary);
  return bytes;
}

TensorboardWriter::TensorboardWriter(const std::filesystem::path& folder, std::optional<int64_t> restart_step)
    : file_(new_event_file(folder)) {
  TensorboardEvent first;
  first.wall_time = now();
  first.file_version = kFileVersion;
  file_.append(encode_record(encode_event(first)));
  if (!restart_step) return;
  require(*restart_step >= 0, "[tensorboard] expected a step of 0 or more, found {}", *restart_step);
  TensorboardEvent restart;
  restart.wall_time = first.wall_time;
  restart.step = *restart_step;
  restart.restarts = true;
  file_.append(encode_record(encode_event(restart)));
}

void TensorboardWriter::write(int64_t step, std::span<const Scalar> scalars, double wall_time) {
  require(step >= 0, "[tensorboard] expected a step of 0 or more, found {}", step);
  for (const Scalar& scalar : scalars)
    require(is_utf8(scalar.tag), "[tensorboard] expected tags in UTF-8, found '{}'", shown(scalar.tag));
  TensorboardEvent event;
  event.wall_time = wall_time;
  event.step = step;
  event.scalars.assign(scalars.begin(), scalars.end());
  file_.append(encode_record(encode_event(event)));
}

void TensorboardWriter::write(int64_t step, std::span<const Scalar> scalars) { write(step, scalars, now()); }

TensorboardResult parse_tensorboard(std::string_view bytes, const std::string& file,
                                    const std::function<void(const TensorboardEvent&)>& take) {
  TensorboardResult result;
  constexpr size_t kHead = sizeof(uint64_t) + sizeof(uint32_t), kTail = sizeof(uint32_t);
  for (size_t offset = 0; offset < bytes.size();) {
    const std::string_view rest = bytes.substr(offset);
    const auto crc_at = [&](size_t at) {
      uint32_t crc;
      std::memcpy(&crc, rest.data() + at, sizeof crc);
      return crc;
    };
    const auto check = [&](std::string_view of, size_t at, const char* what) {
      require_data(masked_crc(crc32c(of)) == crc_at(at),
                   "{}: expected the checksum {:08x} of the {} of the record at offset {}, found {:08x}",
                   file, masked_crc(crc32c(of)), what, offset, crc_at(at));
    };
    if (rest.size() >= kHead) check(rest.substr(0, sizeof(uint64_t)), sizeof(uint64_t), "length");
    uint64_t length = 0;
    if (rest.size() >= kHead) std::memcpy(&length, rest.data(), sizeof length);
    if (rest.size() < kHead + kTail || length > rest.size() - kHead - kTail) {
      result.torn_bytes = rest.size();
      break;
    }
    const std::string_view data = rest.substr(kHead, length);
    check(data, kHead + length, "data");
    TensorboardEvent event;
    try {
      event = decode_event(data);
      require_data(result.events > 0 || event.file_version.starts_with("brain.Event:"),
                   "expected the version of the file first, found '{}'", shown(event.file_version));
    } catch (const DataError& error) {
      throw DataError(fmt::format("{}: in the record at offset {}: {}", file, offset, error.what()));
    }
    ++result.events;
    take(event);
    offset += kHead + length + kTail;
  }
  return result;
}

TensorboardResult read_tensorboard(const std::filesystem::path& path,
                                   const std::function<void(const TensorboardEvent&)>& take) {
  // Read, not mapped: a writer that meets a full disk shortens its file.
  constexpr size_t kLargest = size_t{1} << 32;
  return parse_tensorboard(read_whole_file(path, kLargest), path.string(), take);
}

}  // namespace evenkeel
