#include "base/json_lines.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "failing_calls.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void put(const fs::path& path, std::string_view text) { std::ofstream(path, std::ios::binary) << text; }

class JsonLines : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override {
    failing_calls::disarm();
    fs::remove_all(folder_);
  }
  const fs::path folder_ = fs::path(testing::TempDir()) / ("json_lines_test." + std::to_string(getpid()));
  const fs::path file_ = folder_ / "metrics.jsonl";
};

TEST_F(JsonLines, one_object_a_line) {
  {
    JsonLinesWriter writer(file_);
    writer.write({{"step", 1}, {"loss", 0.5}, {"note", "a\nb"}});
    writer.write(json::object());
    EXPECT_EQ(text_of(file_), "{\"loss\":0.5,\"note\":\"a\\nb\",\"step\":1}\n{}\n");
  }
  std::vector<json> objects;
  std::vector<std::pair<size_t, uint64_t>> places;
  const JsonLinesResult result = read_json_lines(file_, [&](const JsonLine& line) {
    objects.push_back(line.object);
    places.emplace_back(line.number, line.end);
  });
  EXPECT_EQ(objects, (std::vector<json>{{{"step", 1}, {"loss", 0.5}, {"note", "a\nb"}}, json::object()}));
  EXPECT_EQ(places, (std::vector<std::pair<size_t, uint64_t>>{{1, 36}, {2, 39}}));
  EXPECT_EQ(result.lines, 2u);
  EXPECT_EQ(result.whole_size, 39u);
  EXPECT_EQ(result.fault_count + result.torn_bytes, 0u);
}

TEST_F(JsonLines, numbers_that_json_does_not_have) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  {
    JsonLinesWriter writer(file_);
    writer.write({{"a", {1.5, NAN, {{"b", kInfinity}}}}, {"c", -kInfinity}});
  }
  EXPECT_EQ(text_of(file_), "{\"a\":[1.5,\"NaN\",{\"b\":\"Infinity\"}],\"c\":\"-Infinity\"}\n");
  EXPECT_TRUE(std::isnan(json_number("NaN").value()));
  EXPECT_EQ(json_number("Infinity"), kInfinity);
  EXPECT_EQ(json_number("-Infinity"), -kInfinity);
  EXPECT_EQ(json_number(3), 3.0);
  EXPECT_EQ(json_number(nullptr), std::nullopt);
  EXPECT_EQ(json_number("3"), std::nullopt);
}

TEST_F(JsonLines, numbers_come_back_to_the_bit) {
  const double kValues[] = {0.1, 1e-310, -0.0, 1.7976931348623157e308, static_cast<double>(0.1f)};
  {
    JsonLinesWriter writer(file_);
    for (const double value : kValues) writer.write({{"x", value}});
  }
  size_t i = 0;
  read_json_lines(file_, [&](const JsonLine& line) {
    const double value = line.object["x"].get<double>();
    EXPECT_EQ(value, kValues[i]);
    EXPECT_EQ(std::signbit(value), std::signbit(kValues[i++]));
  });
  EXPECT_EQ(i, std::size(kValues));
}

TEST_F(JsonLines, the_writer_refuses_what_is_no_line) {
  JsonLinesWriter writer(file_);
  EXPECT_THROW(writer.write(3), std::invalid_argument);
  EXPECT_THROW(writer.write(json::array()), std::invalid_argument);
  EXPECT_THROW(writer.write({{"x", "\xFF"}}), std::invalid_argument);
  EXPECT_THROW(writer.write({{"\xFF", 1}}), std::invalid_argument);
  writer.write({{"x", 1}});
  EXPECT_EQ(text_of(file_), "{\"x\":1}\n");
  EXPECT_THROW(JsonLinesWriter(folder_ / "other", {.lines_a_flush = 0}), std::invalid_argument);
}

TEST_F(JsonLines, lines_may_be_gathered) {
  {
    JsonLinesWriter writer(file_, {.lines_a_flush = 3, .sync = true});
    for (int step = 0; step < 5; ++step) {
      writer.write({{"s", step}});
      EXPECT_EQ(text_of(file_).size(), (step + 1) / 3 * 3 * std::string("{\"s\":0}\n").size());
    }
    writer.sync();
    EXPECT_EQ(text_of(file_).size(), 40u);
    writer.write({{"s", 5}});
  }
  EXPECT_EQ(text_of(file_).size(), 48u);
}

TEST_F(JsonLines, a_torn_line_is_cut_off) {
  const std::string lines = "{\"a\":1}\n{\"a\":2}\n";
  const struct {
    std::string before;
    size_t torn;
  } kCases[] = {{"", 0},
                {"{", 1},
                {lines, 0},
                {lines + "{\"a\":", 5},
                {lines + "{\"a\":3}", 7},
                {lines + std::string(3'000'000, 'x'), 3'000'000}};
  for (const auto& [before, torn] : kCases) {
    put(file_, before);
    JsonLinesWriter writer(file_);
    EXPECT_EQ(writer.torn_bytes(), torn);
    writer.write({{"a", 9}});
    EXPECT_EQ(text_of(file_), before.substr(0, before.size() - torn) + "{\"a\":9}\n");
  }
}

TEST_F(JsonLines, a_run_goes_on_from_any_line) {
  put(file_, "{\"s\":0}\n{\"s\":1}\n{\"s\":2}\n{\"s");
  uint64_t keep = 0;
  const JsonLinesResult result = read_json_lines(file_, [&](const JsonLine& line) {
    if (line.object["s"] < 2) keep = line.end;
  });
  EXPECT_EQ(result.torn_bytes, 3u);
  for (const uint64_t bad : {uint64_t{3}, uint64_t{25}, uint64_t{27}, UINT64_MAX})
    EXPECT_THROW(JsonLinesWriter(file_, {.keep = bad}), DataError) << bad;
  EXPECT_EQ(text_of(file_).size(), 27u);  // nothing was touched
  { JsonLinesWriter(file_, {.keep = keep}).write({{"s", 7}}); }
  EXPECT_EQ(text_of(file_), "{\"s\":0}\n{\"s\":1}\n{\"s\":7}\n");
  { JsonLinesWriter(file_, {.keep = 0}).write({{"s", 8}}); }
  EXPECT_EQ(text_of(file_), "{\"s\":8}\n");
}

TEST_F(JsonLines, one_writer_at_a_time) {
  JsonLinesWriter first(file_);
  EXPECT_THROW(JsonLinesWriter second(file_), DataError);
}

TEST_F(JsonLines, a_full_disk_loses_no_line) {
  JsonLinesWriter writer(file_);
  writer.write({{"s", 0}});
  failing_calls::arm(failing_calls::Fault::error, 0, ENOSPC, /*lasts=*/true);
  EXPECT_THROW(writer.write({{"s", 1}}), DataError);
  EXPECT_THROW(writer.write({{"s", 2}}), DataError);
  failing_calls::disarm();
  writer.write({{"s", 3}});
  EXPECT_EQ(text_of(file_), "{\"s\":0}\n{\"s\":1}\n{\"s\":2}\n{\"s\":3}\n");
}

// Killed at each call, half of a write done; the next writer goes on. Only the line in flight is lost.
TEST_F(JsonLines, killed_anywhere_only_the_line_in_flight_is_lost) {
  int kills = 0;
  for (int call = 0;; ++call) {
    fs::remove(file_);
    const int result = failing_calls::run_apart([&] {
      failing_calls::arm(failing_calls::Fault::kill, call);
      JsonLinesWriter writer(file_, {.sync = true});
      for (int step = 0; step < 3; ++step) writer.write({{"step", step}, {"padding", std::string(100, 'x')}});
    });
    kills += result == SIGKILL;
    int next = 0;
    const auto check = [&](const JsonLine& line) { EXPECT_EQ(line.object["step"], next++); };
    JsonLinesResult read = read_json_lines(file_, check);
    EXPECT_EQ(read.fault_count, 0u);
    const int whole = next;
    { JsonLinesWriter(file_).write({{"step", whole}}); }
    next = 0;
    read = read_json_lines(file_, check);
    EXPECT_EQ(read.fault_count + read.torn_bytes, 0u);
    EXPECT_EQ(next, whole + 1);
    if (result == 0) {
      EXPECT_EQ(whole, 3);
      break;
    }
  }
  EXPECT_GE(kills, 6);  // a write and a sync a line
}

TEST_F(JsonLines, files_that_cannot_be_read) {
  EXPECT_THROW(read_json_lines(file_, [](const JsonLine&) {}), DataError);
  EXPECT_THROW(read_json_lines(folder_, [](const JsonLine&) {}), DataError);
  put(file_, "");
  EXPECT_EQ(read_json_lines(file_, [](const JsonLine&) { FAIL(); }).lines, 0u);
}

TEST_F(JsonLines, lines_across_pieces_of_the_file) {
  std::string text;
  for (int i = 0; i < 20; ++i)
    text += json{{"i", i}, {"x", std::string(100'000 + 1000 * i, 'y')}}.dump() + "\n";
  ASSERT_GT(text.size(), size_t{1} << 20);
  put(file_, text);
  int next = 0;
  const JsonLinesResult result =
      read_json_lines(file_, [&](const JsonLine& line) { EXPECT_EQ(line.object["i"], next++); });
  EXPECT_EQ(next, 20);
  EXPECT_EQ(result.whole_size, text.size());
}

TEST(JsonLinesFaults, each_is_said_with_its_line) {
  const std::string deep = std::string(63, '[') + std::string(63, ']');
  const struct {
    std::string line, says;
  } kCases[] = {
      {"", "found an empty line"},
      {"3", "found a number"},
      {"[]", "found an array"},
      {"{", "found '{': syntax error while parsing object key - unexpected end of input"},
      {"{}{}", "found '{}{}'"},
      {"{\"a\":1,}", "found '{\"a\":1,}'"},
      {"{\"a\":nan}", "found '{\"a\":nan}'"},
      {"{\"a\":\"\xFF\"}", "found '{\"a\":\"?\"}'"},
      {"\x1B[31m", "found '?[31m'"},
      {std::string("{}\0", 3), "found a NUL byte"},
      {"{\"a\":1,\"a\":2}", "each name of an object once, found 2 names for 1 values"},
      {"{\"b\":[{\"a\":1,\"c\":{\"a\":1},\"a\":2}]}",
       "each name of an object once, found 3 names for 2 values"},
      {"{\"a\":[" + deep + "]}", "nesting of at most 64, found more"},
      {std::string(100'000, '['), "nesting of at most 64, found more"},
      {"{\"a\":" + std::string(100'000, '{'), "found '{\"a\":{"},
  };
  std::string all = "{\"a\":1}\n";
  for (const auto& [line, says] : kCases) all += line + "\n";
  all += "{\"a\":" + deep + "}\r\n";
  std::vector<size_t> good;
  const JsonLinesResult result =
      parse_json_lines(all, "m.jsonl", [&](const JsonLine& line) { good.push_back(line.number); });
  EXPECT_EQ(good, (std::vector<size_t>{1, std::size(kCases) + 2}));
  ASSERT_EQ(result.faults.size(), std::size(kCases));
  for (size_t i = 0; i < std::size(kCases); ++i) {
    const auto& [line, message] = result.faults[i];
    EXPECT_EQ(line, i + 2);
    EXPECT_EQ(message.find("m.jsonl:" + std::to_string(i + 2) + ": expected "), 0u) << message;
    EXPECT_NE(message.find(kCases[i].says), std::string::npos) << message << "\nexpected: " << kCases[i].says;
    EXPECT_LT(message.size(), 300u);
  }
  EXPECT_EQ(result.whole_size, all.size());
}

TEST(JsonLinesFaults, messages_are_counted_beyond_a_hundred) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "x\n";
  const JsonLinesResult result = parse_json_lines(text + "{}", "f", [](const JsonLine&) { FAIL(); });
  EXPECT_EQ(result.fault_count, 1000u);
  EXPECT_EQ(result.faults.size(), 100u);
  EXPECT_EQ(result.torn_bytes, 2u);
}

TEST(JsonLinesFaults, an_endless_line_is_not_kept) {
  const JsonLinesResult result =
      parse_json_lines("{\"a\":\"" + std::string(70'000'000, 'x') + "\"}\n{}\n", "f",
                       [](const JsonLine& line) { EXPECT_EQ(line.number, 2u); });
  EXPECT_EQ(result.fault_count, 1u);
  EXPECT_EQ(result.faults[0].message, "f:1: expected at most 67108864 bytes, found 70000008");
}

}  // namespace
}  // namespace evenkeel
