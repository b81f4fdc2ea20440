#include "base/tensorboard.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "base/error.h"
#include "failing_calls.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <size_t kSize>
std::string bytes(const char (&literal)[kSize]) {
  return {literal, kSize - 1};
}

std::vector<TensorboardEvent> events_of(const std::string& file, size_t* torn = nullptr) {
  std::vector<TensorboardEvent> events;
  const TensorboardResult result =
      parse_tensorboard(file, "events", [&](const TensorboardEvent& event) { events.push_back(event); });
  EXPECT_EQ(result.events, events.size());
  if (torn) *torn = result.torn_bytes;
  return events;
}

std::string refusal(const std::string& file) {
  try {
    parse_tensorboard(file, "events", [](const TensorboardEvent&) {});
  } catch (const DataError& error) {
    return error.what();
  }
  return "accepted";
}

class Tensorboard : public ::testing::Test {
 protected:
  void TearDown() override {
    failing_calls::disarm();
    fs::remove_all(folder_);
  }
  const fs::path folder_ = fs::path(testing::TempDir()) / ("tensorboard_test." + std::to_string(getpid()));
};

// RFC 3720, appendix B.4, and the usual check value.
TEST(Crc32c, published_values) {
  std::string rising, falling;
  for (int i = 0; i < 32; ++i) {
    rising += static_cast<char>(i);
    falling += static_cast<char>(31 - i);
  }
  const struct {
    std::string data;
    uint32_t crc;
  } kCases[] = {{"", 0},
                {"123456789", 0xE3069283},
                {std::string(32, '\0'), 0x8A9136AA},
                {std::string(32, '\xFF'), 0x62A8AB43},
                {rising, 0x46DD794E},
                {falling, 0x113FDB5C}};
  for (const auto& [data, crc] : kCases) {
    EXPECT_EQ(crc32c(data), crc);
    EXPECT_EQ(crc32c_by_table(data), crc);
  }
}

TEST(Crc32c, instruction_and_table_agree) {
  std::string data;
  for (uint32_t i = 0, random = 1; i < 300; ++i, random = random * 1664525 + 1013904223)
    data += static_cast<char>(random >> 24);
  for (size_t start = 0; start < 9; ++start)
    for (size_t size = 0; start + size <= data.size(); ++size) {
      const std::string_view part = std::string_view(data).substr(start, size);
      ASSERT_EQ(crc32c(part), crc32c_by_table(part));
    }
}

// By hand, from the published descriptions of records, of protocol buffers, of event.proto and summary.proto.
//   `wall_time`, field 1 as 8 bytes: 09, then 1.5 = 3FF8000000000000.
//   `file_version`, field 3 as bytes: 1A, 0D = 13 of them.
//   `step`, field 2 as varint: 10, 300 = AC 02 (0101100 with more to come, 10).
//   `summary`, field 5 as bytes: 2A; in it value, field 1: 0A; in it tag, field 1: 0A, and simple_value,
//   field 2 as 4 bytes: 15, 0.5 = 3F000000
const std::string kVersionEvent = bytes(
    "\x09\x00\x00\x00\x00\x00\x00\xF8\x3F\x1A\x0D"
    "brain.Event:2");
const std::string kScalarEvent = bytes(
    "\x09\x00\x00\x00\x00\x00\x00\xF8\x3F\x10\xAC\x02\x2A\x1B"
    "\x0A\x0B\x0A\x04"
    "loss"
    "\x15\x00\x00\x00\x3F"
    "\x0A\x0C\x0A\x05"
    "a/b\xC3\xA9"
    "\x15\x00\x00\xC0\x7F");

TEST(TensorboardBytes, events_are_as_worked_out_by_hand) {
  TensorboardEvent version;
  version.wall_time = 1.5;
  version.file_version = "brain.Event:2";
  EXPECT_EQ(encode_event(version), kVersionEvent);
  TensorboardEvent scalars;
  scalars.wall_time = 1.5;
  scalars.step = 300;
  scalars.scalars = {{"loss", 0.5f}, {"a/b\xC3\xA9", std::numeric_limits<float>::quiet_NaN()}};
  EXPECT_EQ(encode_event(scalars), kScalarEvent);
  TensorboardEvent restart;
  restart.wall_time = 1.5;
  restart.step = 1;
  restart.restarts = true;  // session_log, field 7 as bytes: 3A; in it status, field 1: 08, START = 1
  EXPECT_EQ(encode_event(restart), bytes("\x09\x00\x00\x00\x00\x00\x00\xF8\x3F\x10\x01\x3A\x02\x08\x01"));
}

// "123456789" has the checksum E3069283; turned right by 15 bits that is 2507C60D, and A282EAD8 more is
// C78AB0E5.
TEST(TensorboardBytes, records_are_as_worked_out_by_hand) {
  static_assert(masked_crc(0xE3069283) == 0xC78AB0E5);
  const std::string record = encode_record("123456789");
  ASSERT_EQ(record.size(), 8u + 4 + 9 + 4);
  EXPECT_EQ(record.substr(0, 8), bytes("\x09\0\0\0\0\0\0\0"));
  EXPECT_EQ(record.substr(12, 9), "123456789");
  EXPECT_EQ(record.substr(21), bytes("\xE5\xB0\x8A\xC7"));
}

TEST_F(Tensorboard, writes_what_the_reader_reads) {
  fs::path path;
  {
    TensorboardWriter writer(folder_ / "a" / "b");
    path = writer.path();
    const Scalar kScalars[] = {
        {"loss", 2.5f}, {"grad/norm", std::numeric_limits<float>::infinity()}, {"", -0.0f}};
    writer.write(0, kScalars, 1234.5);
    writer.write(int64_t{1} << 40, std::span(kScalars).first(1));
    writer.write(INT64_MAX, {}, 0);
    writer.sync();
    EXPECT_THROW(writer.write(-1, {}, 0), std::invalid_argument);
    const Scalar kBad[] = {{"\xFF", 1}};
    EXPECT_THROW(writer.write(1, kBad, 0), std::invalid_argument);
  }
  EXPECT_EQ(path.filename().string().find("events.out.tfevents."), 0u);
  std::vector<TensorboardEvent> events;
  const TensorboardResult result =
      read_tensorboard(path, [&](const TensorboardEvent& event) { events.push_back(event); });
  EXPECT_EQ(result.torn_bytes, 0u);
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].file_version, "brain.Event:2");
  EXPECT_GT(events[0].wall_time, 1.7e9);
  EXPECT_EQ(events[1].wall_time, 1234.5);
  EXPECT_EQ(events[1].step, 0);
  ASSERT_EQ(events[1].scalars.size(), 3u);
  EXPECT_EQ(events[1].scalars[0].tag, "loss");
  EXPECT_EQ(events[1].scalars[0].value, 2.5f);
  EXPECT_EQ(events[1].scalars[1].value, std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::signbit(events[1].scalars[2].value));
  EXPECT_EQ(events[2].step, int64_t{1} << 40);
  EXPECT_GE(events[2].wall_time, events[0].wall_time);
  EXPECT_EQ(events[3].step, INT64_MAX);
  EXPECT_FALSE(events[3].restarts);
}

// Where a number takes a byte more, and lengths with it.
TEST(TensorboardBytes, numbers_of_every_length) {
  TensorboardEvent event;
  event.step = 128;  // 0000000 with more to come, 1
  EXPECT_EQ(encode_event(event), bytes("\x09\0\0\0\0\0\0\0\0\x10\x80\x01"));
  std::string file = encode_record(kVersionEvent);
  std::vector<int64_t> steps;
  for (int bits = 0; bits < 63; ++bits)
    for (const int64_t step : {(int64_t{1} << bits) - 1, int64_t{1} << bits}) {
      event.step = step;
      event.scalars = {{std::string(static_cast<size_t>(step < 40'000 ? step : 0), 'x'), 1}};
      file += encode_record(encode_event(event));
      steps.push_back(step);
    }
  const auto events = events_of(file);
  ASSERT_EQ(events.size(), steps.size() + 1);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(events[i + 1].step, steps[i]);
    EXPECT_EQ(events[i + 1].scalars.at(0).tag.size(), static_cast<size_t>(steps[i] < 40'000 ? steps[i] : 0));
  }
}

TEST_F(Tensorboard, a_restart_is_said_and_files_do_not_meet) {
  const TensorboardWriter first(folder_), second(folder_, 500);
  EXPECT_NE(first.path(), second.path());
  const std::vector<TensorboardEvent> events = events_of(text_of(second.path()));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_TRUE(events[1].restarts);
  EXPECT_EQ(events[1].step, 500);
  EXPECT_THROW(TensorboardWriter(folder_, -1), std::invalid_argument);
  std::ofstream(folder_ / "file") << "x";
  EXPECT_THROW(TensorboardWriter{folder_ / "file"}, DataError);
}

TEST_F(Tensorboard, a_full_disk_leaves_whole_events) {
  TensorboardWriter writer(folder_);
  const Scalar kScalars[] = {{"loss", 1}};
  writer.write(1, kScalars, 1);
  failing_calls::arm(failing_calls::Fault::error, 0, ENOSPC);
  EXPECT_THROW(writer.write(2, kScalars, 2), DataError);
  failing_calls::disarm();
  writer.write(3, kScalars, 3);
  size_t torn = 0;
  const auto events = events_of(text_of(writer.path()), &torn);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[2].step, 3);
  EXPECT_EQ(torn, 0u);
}

TEST(TensorboardReader, a_torn_record_is_reported_apart) {
  const std::string first = encode_record(kVersionEvent), second = encode_record(kScalarEvent);
  for (size_t size = 0; size < second.size(); ++size) {
    size_t torn = 0;
    EXPECT_EQ(events_of(first + second.substr(0, size), &torn).size(), 1u);
    EXPECT_EQ(torn, size);
  }
  EXPECT_EQ(events_of(first + second).size(), 2u);
  EXPECT_TRUE(events_of("").empty());
}

TEST(TensorboardReader, every_flipped_bit_is_found) {
  const std::string first = encode_record(kVersionEvent), second = encode_record(kScalarEvent);
  for (size_t i = 0; i < second.size(); ++i)
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = second;
      flipped[i] = static_cast<char>(flipped[i] ^ 1 << bit);
      const std::string message = refusal(first + flipped);
      EXPECT_NE(message.find("events: expected the checksum "), std::string::npos) << message;
      EXPECT_NE(message.find(" of the record at offset 40, found "), std::string::npos) << message;
    }
}

TEST(TensorboardReader, messages_that_are_none) {
  const std::string first = encode_record(kVersionEvent);
  const struct {
    std::string data, says;
  } kCases[] = {
      {bytes("\x09\x00"), "expected 8 more bytes of a message, found 1"},
      {bytes("\x10\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x02"), "at most 64 bits"},
      {bytes("\x10\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF"), "at most 64 bits"},
      {bytes("\x10\xFF"), "expected 1 more bytes of a message, found 0"},
      {bytes("\x2A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01"), "expected 18446744073709551615 more bytes"},
      {bytes("\x2A\x05\x0A\x7F"), "expected 5 more bytes"},
      {bytes("\x2A\x02\x0A\x7F"), "expected 127 more bytes"},
      {bytes("\x00\x00"), "a field's number, found 0"},
      {bytes("\xF8\xFF\xFF\xFF\xFF\xFF\x01\x00"), "a field's number"},
      {bytes("\x0B"), "a field's layout, found 3"},
      {bytes("\x0F"), "a field's layout, found 7"},
      {bytes("\x11\x00\x00\x00\x00\x00\x00\x00\x00"), "field 2 in layout 0, found 1"},
      {bytes("\x2A\x0A\x0A\x08\x0A\x01\xFF\x15\x00\x00\x00\x00"), "a tag in UTF-8, found '?'"},
  };
  for (const auto& [data, says] : kCases) {
    const std::string message = refusal(first + encode_record(data));
    EXPECT_NE(message.find("events: in the record at offset 40: expected"), std::string::npos) << message;
    EXPECT_NE(message.find(says), std::string::npos) << message;
  }
  EXPECT_NE(refusal(encode_record(kScalarEvent)).find("expected the version of the file first"),
            std::string::npos);
  EXPECT_NE(refusal("a text, and no event file at all").find("checksum"), std::string::npos);
}

TEST(TensorboardReader, what_it_does_not_know_is_passed_over) {
  // field 100 in each layout, and a summary of a value without a scalar
  const std::string unknown = bytes(
      "\xA0\x06\x01"
      "\xA1\x06\x00\x00\x00\x00\x00\x00\x00\x00"
      "\xA2\x06\x01x"
      "\xA5\x06\x00\x00\x00\x00"
      "\x2A\x06\x0A\x04\x0A\x02hi");
  const auto events = events_of(encode_record(kVersionEvent) + encode_record(unknown + kScalarEvent));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].scalars.size(), 2u);
  EXPECT_EQ(events[1].other_values, 1u);
}

}  // namespace
}  // namespace evenkeel
