#include "base/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <numeric>

#include "failing_calls.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The 8 bytes that say how long the header is, the header, the data.
std::string file_of(const std::string& header, const std::string& data = "", uint64_t length = UINT64_MAX) {
  if (length == UINT64_MAX) length = header.size();
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> 8 * i);
  return bytes + header + data;
}

std::string refusal(const std::string& bytes) {
  try {
    Safetensors(bytes_of(bytes), "f.safetensors");
  } catch (const DataError& error) {
    return error.what();
  }
  return "accepted";
}

class SafetensorsFile : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  const fs::path folder_ = fs::path(testing::TempDir()) / ("safetensors_test." + std::to_string(getpid()));
  const fs::path file_ = folder_ / "model.safetensors";
};

// Worked out by hand from the published format: the length 0xd8 = 216 in 8 bytes, lowest first. Then the header,
// filled up with spaces to a multiple of 8. Then the tensors, large elements first, then by name.
std::string golden() {
  return std::string("\xD8\0\0\0\0\0\0\0", 8) +
         R"({"__metadata__":{"format":"pt","step":"70"},)"
         R"("a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
         R"("b":{"dtype":"BF16","shape":[],"data_offsets":[16,18]},)"
         R"("m":{"dtype":"U8","shape":[3],"data_offsets":[18,21]}}       )" +
         std::string(
             "\x00\x00\x80\x3F"  // 1
             "\x00\x00\x00\xC0"  // -2
             "\x00\x00\x00\x3F"  // 0.5
             "\x00\x00\x80\x7F"  // infinity
             "\x80\x3F"          // 1
             "\x01\x02\xFF",
             21);
}
const std::vector<TensorHeader> kGoldenTensors = {
    {"m", element_type("U8"), {3}}, {"b", element_type("BF16"), {}}, {"a", element_type("F32"), {2, 2}}};
const std::map<std::string, std::string> kGoldenMetadata = {{"step", "70"}, {"format", "pt"}};

void write_golden(const fs::path& path) {
  SafetensorsWriter writer(path, kGoldenTensors, kGoldenMetadata);
  const float a[] = {1, -2, 0.5f, std::numeric_limits<float>::infinity()};
  const uint8_t m[] = {1, 2, 255};
  const uint16_t b = 0x3F80;
  writer.append("m", std::as_bytes(std::span(m)));
  writer.append("a", std::as_bytes(std::span(a, 1)));  // in pieces
  writer.append("b", std::as_bytes(std::span(&b, 1)));
  writer.append("a", {});
  writer.append("a", std::as_bytes(std::span(a).subspan(1)));
  writer.commit();
}

TEST_F(SafetensorsFile, writes_the_golden_bytes) {
  write_golden(file_);
  EXPECT_EQ(text_of(file_), golden());
  EXPECT_EQ((golden().size() - 21) % 8, 0u);
}

TEST_F(SafetensorsFile, reads_the_golden_bytes) {
  std::ofstream(file_, std::ios::binary) << golden();
  Safetensors opened(file_);
  const Safetensors read(std::move(opened));
  EXPECT_EQ(read.metadata(), kGoldenMetadata);
  ASSERT_EQ(read.tensors().size(), 3u);
  EXPECT_EQ(read.tensors()[0].name, "a");
  float a[4];
  read.at(kGoldenTensors[2]).copy_to(a, 4);
  EXPECT_EQ(std::vector<float>(a, a + 4),
            (std::vector<float>{1, -2, 0.5f, std::numeric_limits<float>::infinity()}));
  uint16_t b;
  read.at(kGoldenTensors[1]).copy_to(&b, 1);
  EXPECT_EQ(b, 0x3F80);
  EXPECT_EQ(read.find("c"), nullptr);
  EXPECT_EQ(read.find(""), nullptr);
  EXPECT_THROW(read.find("a")->copy_to(a, 3), std::invalid_argument);
  EXPECT_THROW(read.find("a")->copy_to(&b, 8), std::invalid_argument);
  const auto fault = [&](const TensorHeader& expected) {
    try {
      read.at(expected);
    } catch (const DataError& error) {
      return std::string(error.what()).substr(file_.string().size());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(fault({"z", element_type("F32"), {2}}),
            ": expected tensor 'z' (F32 [2]), found none of that name among 3");
  EXPECT_EQ(fault({"a", element_type("F32"), {4}}), ": expected tensor 'a' (F32 [4]), found F32 [2, 2]");
  EXPECT_EQ(fault({"m", element_type("I8"), {3}}), ": expected tensor 'm' (I8 [3]), found U8 [3]");
}

TEST_F(SafetensorsFile, every_type_goes_there_and_back) {
  std::vector<TensorHeader> headers;
  for (const ElementType& type : kElementTypes)
    headers.push_back({fmt::format("\xC3\xBC \"{}\"\n", type.name), type, {2, 1, 4}});
  headers.push_back({"", element_type("F32"), {}});
  headers.push_back({"none", element_type("I64"), {5, 0, UINT64_MAX / 8 / 64}});
  SafetensorsWriter writer(file_, headers);
  char next = 0;
  std::map<std::string, std::string> expected;
  for (const TensorHeader& header : headers) {
    std::string bytes(byte_count(header), '\0');
    std::iota(bytes.begin(), bytes.end(), next++);
    writer.append(header.name, bytes_of(bytes));
    expected[header.name] = bytes;
  }
  writer.commit();
  const Safetensors read(file_);
  ASSERT_EQ(read.tensors().size(), headers.size());
  for (const TensorHeader& header : headers) {
    const Bytes bytes = read.at(header).bytes;
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), expected[header.name]);
    const unsigned element_bytes = header.type.bits < 8 ? 1 : header.type.bits / 8u;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % element_bytes, 0u) << header.name;
  }
}

TEST_F(SafetensorsFile, no_tensors_at_all) {
  SafetensorsWriter(file_, {}).commit();
  EXPECT_EQ(text_of(file_), file_of("{}      "));
  EXPECT_TRUE(Safetensors(file_).tensors().empty());
  EXPECT_EQ(refusal(file_of("{}")), "accepted");
}

TEST_F(SafetensorsFile, an_unfinished_file_is_none) {
  std::ofstream(file_, std::ios::binary) << "old";
  {
    SafetensorsWriter writer(file_, {{"a", element_type("F32"), {4}}});
    writer.append("a", bytes_of("12345678"));
    EXPECT_THROW(writer.commit(), std::invalid_argument);
    EXPECT_THROW(writer.append("a", bytes_of("123456789")), std::invalid_argument);
    EXPECT_THROW(writer.append("b", {}), std::invalid_argument);
  }
  EXPECT_EQ(text_of(file_), "old");
}

TEST_F(SafetensorsFile, the_writer_refuses_what_no_reader_takes) {
  const auto refuses = [&](std::vector<TensorHeader> tensors,
                           std::map<std::string, std::string> metadata = {}) {
    EXPECT_THROW(SafetensorsWriter(file_, std::move(tensors), metadata), std::exception);
    EXPECT_TRUE(fs::is_empty(folder_));
  };
  const ElementType f32 = element_type("F32");
  refuses({{"a", f32, {}}, {"a", f32, {}}});
  refuses({{"__metadata__", f32, {}}});
  refuses({{std::string("a\0", 2), f32, {}}});
  refuses({{"\xFF", f32, {}}});
  refuses({{"a", {"F31", 31}, {}}});
  refuses({{"a", f32, {uint64_t{1} << 32, uint64_t{1} << 32}}});
  refuses({{"a", element_type("F4"), {3}}});
  refuses({}, {{"a", "\xFF"}});
  refuses({}, {{"\xFF", "a"}});
  refuses({}, {{"a", std::string(100'000'001, 'x')}});
  EXPECT_THROW(element_type("float"), std::invalid_argument);
}

// Killed or refused at each call: the checkpoint is the old one or the new one.
TEST_F(SafetensorsFile, killed_anywhere_the_file_is_old_or_new) {
  using failing_calls::Fault;
  for (const Fault fault : {Fault::kill, Fault::error})
    for (int call = 0;; ++call) {
      std::ofstream(file_, std::ios::binary) << "old";
      const int result = failing_calls::run_apart([&] {
        failing_calls::arm(fault, call, ENOSPC);
        write_golden(file_);
      });
      const std::string text = text_of(file_);
      ASSERT_TRUE(text == "old" || text == golden()) << call;
      if (result == 0) {
        EXPECT_EQ(text, golden());
        EXPECT_GE(call, 7);
        break;
      }
      EXPECT_EQ(result, fault == Fault::kill ? SIGKILL : -1);
    }
}

// Never more in memory than a piece: a sparse file far larger than the memory that is allowed.
TEST_F(SafetensorsFile, a_large_file_takes_no_memory) {
  const TensorHeader large{"large", element_type("U8"), {uint64_t{1} << 20, uint64_t{1} << 16}};  // 64 GiB
  EXPECT_EQ(byte_count(large), uint64_t{1} << 36);
  const std::string header =
      file_of(R"({"large":{"dtype":"U8","shape":[1048576,65536],"data_offsets":[0,68719476736]}})");
  std::ofstream(file_, std::ios::binary) << header;
  std::error_code error;
  fs::resize_file(file_, header.size() + byte_count(large), error);
  if (error) GTEST_SKIP() << "no file so large here";
  EXPECT_EQ(Safetensors(file_).at(large).bytes.size(), uint64_t{1} << 36);
}

const std::string kGood = R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})";

// A header of one tensor.
std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return fmt::format(R"({{"a":{{"dtype":{},"shape":{},"data_offsets":{}}}}})", dtype, shape, offsets);
}

struct FaultCase {
  std::string bytes, says;
};

void expect_refusals(const std::vector<FaultCase>& cases) {
  ASSERT_EQ(refusal(file_of("{" + kGood + "}", "xy")), "accepted");
  ASSERT_EQ(refusal(file_of("{" + kGood + "}  \n", "xy")), "accepted");
  for (const auto& [bytes, says] : cases) {
    const std::string message = refusal(bytes);
    EXPECT_NE(message.find(says), std::string::npos) << "expected: " << says << "\nfound: " << message;
    EXPECT_EQ(message.find("f.safetensors: expected"), 0u) << message;
    EXPECT_LT(message.size(), 300u) << message;
    for (const char c : message) EXPECT_TRUE(c >= ' ' && c <= '~') << message;
  }
}

TEST(SafetensorsFaults, of_the_frame_are_said) {
  expect_refusals({
      {"", "found 0 bytes"},
      {"1234567", "found 7 bytes"},
      {file_of(""), "begins with '{', found none"},
      {file_of("", "", 1), "a header of 1 bytes, found the end after 0"},
      {file_of("{}", "", 3), "a header of 3 bytes, found the end after 2"},
      {file_of("{}", "", 100'000'001), "at most 100000000 bytes, found one of 100000001"},
      {file_of("{}", "", uint64_t{1} << 63), "found one of 9223372036854775808"},
      {file_of("{}", "", UINT64_MAX - 1), "found one of 18446744073709551614"},
      {file_of(" {}"), "begins with '{', found ' '"},
      {file_of("[]"), "begins with '{', found '['"},
      {file_of("{}", "x"), "found 1 bytes behind the last"},
      {file_of("{" + kGood + "}", "xyz"), "found 1 bytes behind the last"},
      {file_of("{" + kGood + "}", "x"), "within the 1 bytes behind the header"},
  });
}

TEST(SafetensorsFaults, of_the_json_are_said) {
  expect_refusals({
      {file_of("{"), "header in JSON"},
      {file_of("{}}"), "header in JSON"},
      {file_of("{" + kGood + ",}", "xy"), "header in JSON"},
      {file_of(std::string("{}\0", 3)), "without NUL bytes, found one at 2"},
      {file_of("{" + kGood + std::string("\0}", 2), "xy"), "without NUL bytes"},
      {file_of("{\"\xFF\":{}}"), "header in JSON"},
      {file_of("{\"\\ud800\":{}}"), "header in JSON"},
      {file_of("{\"a\xED\xA0\x80\":{}}"), "header in JSON"},
      {file_of("{\"a\\u0000b\":{}}"), "without NUL, found 'a?b'"},
      {file_of("{" + kGood + "," + kGood + "}", "xy"), "found 'a' twice"},
      {file_of(R"({"__metadata__":{},"__metadata__":{}})"), "found '__metadata__' twice"},
      {file_of(R"({"__metadata__":{"x":"1","x":"2"}})"), "found 'x' twice"},
      {file_of(R"({"a":{"dtype":"U8","dtype":"U8"}})"), "found 'dtype' twice"},
      {file_of("{\"a\":" + std::string(100'000, '[')), "an object for 'a', found an array"},
      {file_of("{\"a\":{\"shape\":" + std::string(100'000, '[')), "whole numbers in the shape"},
  });
}

TEST(SafetensorsFaults, of_the_fields_are_said) {
  expect_refusals({
      {file_of(R"({"a":1})"), "an object for 'a', found 1"},
      {file_of(R"({"a":null})"), "found null"},
      {file_of(R"({"a":{}})"), "a dtype of tensor 'a', found none"},
      {file_of(R"({"a":{"dtype":"U8","data_offsets":[0,2]}})", "xy"), "a shape of tensor 'a', found none"},
      {file_of(R"({"a":{"dtype":"U8","shape":[2]}})", "xy"), "data_offsets of tensor 'a', found none"},
      {file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"b":1}})", "xy"), "found 'b'"},
      {file_of(tensor("\"U9\"", "[2]", "[0,2]"), "xy"), "a known dtype of tensor 'a', found 'U9'"},
      {file_of(tensor("\"u8\"", "[2]", "[0,2]"), "xy"), "found 'u8'"},
      {file_of(tensor("8", "[2]", "[0,2]"), "xy"), "the name of a dtype"},
      {file_of(tensor("[\"U8\"]", "[2]", "[0,2]"), "xy"), "the name of a dtype"},
      {file_of(tensor("\"U8\"", "2", "[0,2]"), "xy"), "an array for the shape"},
      {file_of(tensor("\"U8\"", "\"2\"", "[0,2]"), "xy"), "an array for the shape"},
      {file_of(tensor("\"U8\"", "[\"2\"]", "[0,2]"), "xy"), "whole numbers in the shape"},
      {file_of(tensor("\"U8\"", "[true]", "[0,2]"), "xy"), "whole numbers in the shape"},
      {file_of(tensor("\"U8\"", "[{}]", "[0,2]"), "xy"), "whole numbers in the shape"},
      {file_of(tensor("\"U8\"", "[-2]", "[0,2]"), "xy"), "found -2"},
      {file_of(tensor("\"U8\"", "[2.0]", "[0,2]"), "xy"), "found 2.0"},
      {file_of(tensor("\"U8\"", "[2]", "[0,2e0]"), "xy"), "whole numbers in the data_offsets"},
      {file_of(tensor("\"U8\"", "[18446744073709551616]", "[0,2]"), "xy"), "whole numbers"},
      {file_of(tensor("\"U8\"", "[2]", "[0]"), "xy"), "2 data_offsets of tensor 'a', found 1"},
      {file_of(tensor("\"U8\"", "[2]", "[0,2,2]"), "xy"), "found 3"},
      {file_of(R"({"__metadata__":{"x":1}})"), "a string for 'x' in __metadata__, found 1"},
      {file_of(R"({"__metadata__":{"x":["y"]}})"), "a string for 'x'"},
      {file_of(R"({"__metadata__":{"x":{}}})"), "a string for 'x'"},
      {file_of(R"({"__metadata__":"x"})"), "an object for '__metadata__'"},
  });
}

TEST(SafetensorsFaults, of_the_places_are_said) {
  const std::string max = "18446744073709551615";
  expect_refusals({
      {file_of(tensor("\"U8\"", "[2]", "[2,0]"), "xy"), "'a' (U8 [2]) at 2 where the one before ends at 0"},
      {file_of(tensor("\"U8\"", "[2]", "[1,3]"), "xyz"), "without gap"},
      {file_of(tensor("\"U8\"", "[2]", "[0," + max + "]"), "xy"), "go from 0 to " + max},
      {file_of(tensor("\"U8\"", "[2]", "[9223372036854775808,9223372036854775810]"), "xy"), "without gap"},
      {file_of(tensor("\"U8\"", "[" + max + "]", "[0," + max + "]"), "xy"), "go from 0 to " + max},
      {file_of(tensor("\"U8\"", "[3]", "[0,2]"), "xy"), "expected 3 bytes for 'a' (U8 [3]), found 2"},
      {file_of(tensor("\"F32\"", "[]", "[0,2]"), "xy"), "expected 4 bytes for 'a' (F32 []), found 2"},
      {file_of(tensor("\"F4\"", "[3]", "[0,1]"), "x"), "whole bytes"},
      {file_of(tensor("\"U8\"", "[4294967296,4294967296]", "[0,0]")), "below 2^61 bytes"},
      {file_of(tensor("\"U8\"", "[4294967296,4294967296,0]", "[0,0]")), "below 2^61 bytes"},
      {file_of(tensor("\"F64\"", "[2305843009213693952]", "[0,0]")), "below 2^61 bytes"},
      {file_of("{" + kGood + R"(,"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", "xyz"), "overlap"},
      {file_of("{" + kGood + R"(,"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "xy"), "overlap"},
      {file_of("{" + kGood + R"(,"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})", "xyzw"), "gap"},
  });
}

TEST(SafetensorsFaults, every_shorter_file_is_refused) {
  const std::string bytes = golden();
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_NE(refusal(bytes.substr(0, size)), "accepted") << size;
}

TEST(SafetensorsFaults, tensors_of_no_bytes_may_lie_anywhere_between) {
  EXPECT_EQ(refusal(file_of(R"({"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},)"
                            R"("c":{"dtype":"U8","shape":[0,7],"data_offsets":[0,0]},)"
                            R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
                            "xy")),
            "accepted");
}

}  // namespace
}  // namespace evenkeel
