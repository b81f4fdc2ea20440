// Token files, shards, text as tokens, and the offsets of batches.
#include "training/token_file.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "training/row_reader.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

std::string uint16_bytes(const std::vector<uint16_t>& tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(uint16_t)};
}

std::string shard_bytes(const std::vector<uint16_t>& tokens, int32_t magic = 20240520, int32_t version = 1,
                        int32_t count = -1) {
  std::vector<int32_t> header(256);
  header[0] = magic;
  header[1] = version;
  header[2] = count < 0 ? static_cast<int32_t>(tokens.size()) : count;
  return std::string(reinterpret_cast<const char*>(header.data()), 1024) + uint16_bytes(tokens);
}

std::vector<int32_t> read_all(const TokenSource& source) {
  std::vector<int32_t> tokens(static_cast<size_t>(source.size()));
  source.read(0, source.size(), tokens.data());
  return tokens;
}

class TokenFiles : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("token_file_test_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return (folder_ / name).string();
  }

  static void expect_refused(const std::string& path, const std::string& message) {
    try {
      TokenSource::open(path);
      ADD_FAILURE() << path << " accepted; expected: " << message;
    } catch (const DataError& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  }

  fs::path folder_;
};

TEST_F(TokenFiles, nanogpt) {
  const TokenSource source = TokenSource::open(write("train.bin", uint16_bytes({5, 0, 65535, 7})));
  EXPECT_EQ(source.kind(), TokenKind::nanogpt);
  EXPECT_EQ(source.size(), 4);
  EXPECT_EQ(source.vocabulary(), 65536);
  EXPECT_EQ(read_all(source), (std::vector<int32_t>{5, 0, 65535, 7}));
}

TEST_F(TokenFiles, llmc_shards) {
  write("text_train_000001.bin", shard_bytes({4, 5}));
  write("text_train_000000.bin", shard_bytes({1, 2, 3}));
  write("text_val_000000.bin", shard_bytes({90, 91}));
  for (const std::string& path : {folder_.string(), (folder_ / "text_train_*.bin").string(),
                                  (folder_ / "*train_00000?.bin").string()}) {
    const TokenSource source = TokenSource::open(path);
    EXPECT_EQ(source.kind(), TokenKind::llmc);
    EXPECT_EQ(source.vocabulary(), 6);
    EXPECT_EQ(source.files().size(), 2u);
    EXPECT_EQ(read_all(source), (std::vector<int32_t>{1, 2, 3, 4, 5})) << path;
    int32_t middle[3];
    source.read(2, 3, middle);  // across the shards
    EXPECT_EQ(std::vector<int32_t>(middle, middle + 3), (std::vector<int32_t>{3, 4, 5}));
  }
  const auto validation = TokenSource::open_validation(folder_.string());
  ASSERT_TRUE(validation);
  EXPECT_EQ(read_all(*validation), (std::vector<int32_t>{90, 91}));
  EXPECT_FALSE(TokenSource::open_validation((folder_ / "text_train_000000.bin").string()));
  expect_refused((folder_ / "other_*.bin").string(), "no token file");
}

TEST_F(TokenFiles, val_is_a_word_of_the_name) {
  write("interval.bin", uint16_bytes({1}));
  write("val.bin", uint16_bytes({2}));
  EXPECT_EQ(read_all(TokenSource::open(folder_.string())), std::vector<int32_t>{1});
  EXPECT_EQ(read_all(*TokenSource::open_validation(folder_.string())), std::vector<int32_t>{2});
}

TEST_F(TokenFiles, says_what_is_wrong) {
  expect_refused((folder_ / "absent.bin").string(), "no such file");
  expect_refused((folder_ / "no" / "*.bin").string(), "cannot read");
  expect_refused(write("empty.bin", ""), "an empty file");
  expect_refused(write("odd.bin", "abc"), "odd number of bytes (3)");
  expect_refused(write("short.bin", shard_bytes({}).substr(0, 100)), "a header of 1024 bytes");
  expect_refused(write("version.bin", shard_bytes({1}, 20240520, 2)), "expected version 1");
  expect_refused(write("less.bin", shard_bytes({1, 2}, 20240520, 1, 3)),
                 "says 3 tokens, so expected 1030 bytes, found 1028");
  expect_refused(write("more.bin", shard_bytes({1, 2}, 20240520, 1, 1)), "says 1 tokens");
  expect_refused(write("none.bin", shard_bytes({}, 20240520, 1, 0)), "at least one token");
  expect_refused(write("huge.bin", shard_bytes({1}, 20240520, 1, 0x7FFFFFFF)), "says 2147483647 tokens");
  expect_refused(write("binary.txt", std::string("a\0b", 3)), "1 binary files");
  write("mixed/a.bin", uint16_bytes({1}));
  write("mixed/b.bin", shard_bytes({1}));
  expect_refused((folder_ / "mixed").string(), "as in");
}

TEST_F(TokenFiles, another_magic_is_tokens) {
  // Without the magic the header is tokens like any others: headerless files have no way to say so.
  EXPECT_EQ(TokenSource::open(write("x.bin", shard_bytes({1}, 20240521))).kind(), TokenKind::nanogpt);
}

TEST_F(TokenFiles, meta_gives_the_vocabulary_and_guards_it) {
  const std::string path = write("train.bin", uint16_bytes({1, 2, 3}));
  write("meta.json", R"({"vocabulary": 50, "files": {"train.bin": {"tokens": 3}}})");
  EXPECT_EQ(TokenSource::open(path).vocabulary(), 50);
  write("meta.json", R"({"vocabulary": 50, "files": {"other.bin": {"tokens": 3}}})");  // not about this file
  EXPECT_EQ(TokenSource::open(path).vocabulary(), 4);
  write("meta.json", R"({"vocabulary": 50, "files": {"train.bin": {"tokens": 4}}})");
  expect_refused(path, "prepare the folder again");
  write("meta.json", R"({"vocabulary": 3, "files": {"train.bin": {"tokens": 3}}})");
  const TokenSource source = TokenSource::open(path);
  int32_t tokens[3];
  source.read(0, 2, tokens);
  EXPECT_THROW(source.read(0, 3, tokens), DataError);
  for (const char* bad :
       {"", "[]", "{}", R"({"vocabulary": "50", "files": {}})", R"({"vocabulary": 0, "files": {}})",
        R"({"vocabulary": 5, "files": []})", R"({"vocabulary": 5, "files": {"a": 1}})",
        R"({"vocabulary": 70000, "files": {}})"}) {
    write("meta.json", bad);
    expect_refused(path, "meta.json: expected");
  }
}

TEST_F(TokenFiles, text_is_its_bytes) {
  write("text/b.txt", "second\n");
  write("text/a/deep.txt", "first\xFF");
  write("text/c.dat", std::string("\0binary", 7));
  write("text/.hidden", "hidden");
  write("text/.git/config", "hidden");
  write("text/empty.txt", "");
  fs::create_symlink("b.txt", folder_ / "text" / "link.txt");
  fs::create_symlink("..", folder_ / "text" / "loop");
  fs::create_symlink("endless", folder_ / "text" / "endless");
  write("text/runs/a/config.toml", "a run's own files are no text");
  write("text/runs/a/metrics.jsonl", "{}");
  fs::create_directories(folder_ / "text" / "runs" / "a" / "checkpoints");
  const TokenSource source = TokenSource::open((folder_ / "text").string());
  EXPECT_EQ(source.kind(), TokenKind::text);
  EXPECT_EQ(source.vocabulary(), 256);
  const std::vector<int32_t> tokens = read_all(source);
  EXPECT_EQ(std::string(tokens.begin(), tokens.end()), "first\xFFsecond\n");
  EXPECT_FALSE(TokenSource::open_validation((folder_ / "text").string()));
  const TextFiles files = find_text_files({(folder_ / "text").string()});
  EXPECT_EQ(files.files.size(), 3u);
  EXPECT_EQ(files.binary, 1);
  EXPECT_EQ(find_text_files({(folder_ / "text").string()}, (folder_ / "text" / "a").string()).files.size(),
            2u);
  // A file above the size of those that are copied is read where it lies; both ways give its bytes.
  const std::string large(200001, 'x');
  const TokenSource in_place = TokenSource::open(write("large.txt", large + "y"));
  EXPECT_EQ(in_place.size(), 200002);
  EXPECT_EQ(read_all(in_place).back(), 'y');
}

TEST_F(TokenFiles, rows_read_ahead_are_those_read_at_once) {
  std::string bytes;
  for (int n = 0; n < 4000; ++n) bytes += static_cast<char>(1 + n * 7 % 251);
  const std::string path = write("text.txt", bytes);
  const TokenSource source = TokenSource::open(path);
  RowReader reader(source, 15);
  const std::vector<int64_t> first = {0, 3984, 17}, second = {5, 5, 900};
  const auto expect_rows = [&](const std::vector<int64_t>& offsets) {
    const Batch batch = reader.take(offsets);
    ASSERT_EQ(batch.B, 3);
    ASSERT_EQ(batch.T, 15);
    for (int64_t row = 0; row < 3; ++row)
      for (int64_t t = 0; t < 15; ++t) {
        const int64_t at = offsets[static_cast<size_t>(row)] + t;
        EXPECT_EQ(batch.tokens[static_cast<size_t>(row * 15 + t)], 1 + at * 7 % 251);
        EXPECT_EQ(batch.targets[static_cast<size_t>(row * 15 + t)], 1 + (at + 1) * 7 % 251);
      }
  };
  expect_rows(first);  // none read ahead
  reader.read_ahead(second);
  expect_rows(second);
  reader.read_ahead(second);
  expect_rows(first);  // others than those read ahead
  reader.read_ahead({0, 0, 3985});
  expect_rows(first);  // what failed is not asked for
  // A row outside of the source: said when it is asked for, and the reader goes on.
  reader.read_ahead({0, 0, 3985});
  EXPECT_THROW(reader.take(std::vector<int64_t>{0, 0, 3985}), std::invalid_argument);
  expect_rows(second);
}

TEST_F(TokenFiles, a_file_that_is_shortened_or_replaced_is_refused_in_words) {
  const std::string path = write("large.txt", std::string(200000, 'x'));
  const TokenSource source = TokenSource::open(path);
  fs::resize_file(path, 1000);
  int32_t token = 0;
  source.read(999, 1, &token);
  EXPECT_EQ(token, 'x');
  try {
    source.read(1000, 1, &token);
    ADD_FAILURE() << "expected a refusal";
  } catch (const DataError& error) {
    EXPECT_NE(std::string(error.what()).find("it was shortened"), std::string::npos) << error.what();
  }
  RandomAccessFile file(path);
  file.close();  // as one of many: opened for each read
  file.read_at(0, 1, &token);
  fs::remove(path);
  write("large.txt", std::string(1000, 'y'));
  fs::rename(path, folder_ / "other");  // keeps its number, so that the next file has another
  write("large.txt", std::string(1000, 'y'));
  EXPECT_THROW(file.read_at(0, 1, &token), DataError);
}

TEST_F(TokenFiles, more_files_than_a_process_may_keep_open) {
  std::string expected;
  for (int n = 0; n < 300; ++n) {
    const std::string text(70000, static_cast<char>('a' + n % 26));
    write(fmt::format("many/{:03}.txt", n), text);
    expected += text;
  }
  const std::vector<int32_t> tokens = read_all(TokenSource::open((folder_ / "many").string()));
  EXPECT_TRUE(std::string(tokens.begin(), tokens.end()) == expected);
}

TEST_F(TokenFiles, a_digest_is_of_the_tokens_alone) {
  const std::string text(300000, 'a'), path = write("one/a.txt", text);
  const std::string digest = TokenSource::open(path).digest();
  EXPECT_EQ(digest.size(), 64u);
  write("two/a.txt", text.substr(0, 100000));
  write("two/b.txt", text.substr(100000));
  EXPECT_EQ(TokenSource::open((folder_ / "two").string()).digest(), digest);
  for (size_t at : {size_t{0}, size_t{150001}, text.size() - 1}) {
    std::string changed = text;
    changed[at] = 'b';
    write("one/a.txt", changed);
    EXPECT_NE(TokenSource::open(path).digest(), digest) << at;
  }
  write("one/a.txt", text);
  EXPECT_EQ(TokenSource::open(path).digest(), digest);
}

TEST_F(TokenFiles, paths_that_are_no_files) {
  const std::string pipe = (folder_ / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_refused(pipe, "expected a regular file");  // and does not wait for a writer
  expect_refused("/dev/null", "expected a regular file");
  fs::create_directories(folder_ / "nothing");
  expect_refused((folder_ / "nothing").string(), "expected text");
}

TEST_F(TokenFiles, reads_outside_are_refused) {
  const TokenSource source = TokenSource::open(write("t.bin", uint16_bytes({1, 2, 3})));
  int32_t token = 0;
  EXPECT_THROW(source.read(3, 1, &token), std::invalid_argument);
  EXPECT_THROW(source.read(-1, 1, &token), std::invalid_argument);
  EXPECT_THROW(source.read(1, INT64_MAX, &token), std::invalid_argument);
  EXPECT_THROW(source.read(0, -1, &token), std::invalid_argument);
  EXPECT_NO_THROW(source.read(3, 0, &token));
}

TEST_F(TokenFiles, many_threads_read) {
  std::vector<uint16_t> tokens(100000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i * 31);
  write("a.bin", uint16_bytes({tokens.begin(), tokens.begin() + 33333}));
  write("b.bin", uint16_bytes({tokens.begin() + 33333, tokens.end()}));
  const TokenSource source = TokenSource::open(folder_.string());
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::vector<int32_t> row(257);
      for (int64_t offset = t * 61; offset + 257 <= source.size(); offset += 509) {
        source.read(offset, 257, row.data());
        for (int64_t i = 0; i < 257; ++i) wrong[t] += row[i] != tokens[offset + i];
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4));
}

// -------------------------------------------------------------------------------------------- batches

std::vector<int64_t> offsets(uint64_t seed, int64_t step, int64_t rows, int64_t tokens, int64_t size) {
  std::vector<int64_t> out(static_cast<size_t>(rows));
  batch_offsets(seed, step, rows, tokens, size, out.data());
  return out;
}

TEST(BatchOffsets, are_a_function_of_seed_step_and_row) {
  const auto batch = offsets(1, 1000, 32, 129, 1000000);
  EXPECT_EQ(offsets(1, 1000, 32, 129, 1000000), batch);
  const auto longer = offsets(1, 1000, 64, 129, 1000000);
  EXPECT_EQ(std::vector<int64_t>(longer.begin(), longer.begin() + 32), batch);  // more rows keep the first
  EXPECT_NE(offsets(2, 1000, 32, 129, 1000000), batch);
  EXPECT_NE(offsets(1, 1001, 32, 129, 1000000), batch);
  // Recorded runs depend on these numbers.
  EXPECT_EQ(offsets(1, 0, 3, 129, 1000000), (std::vector<int64_t>{258916, 790888, 434948}));
}

TEST(BatchOffsets, cover_every_place_and_no_other) {
  std::vector<int64_t> seen(5);
  for (int64_t step = 0; step < 1000; ++step)
    for (int64_t offset : offsets(3, step, 10, 6, 10)) {
      ASSERT_GE(offset, 0);
      ASSERT_LE(offset, 4);
      ++seen[offset];
    }
  for (int64_t count : seen) EXPECT_NEAR(static_cast<double>(count), 2000, 200);  // five standard deviations
  EXPECT_EQ(offsets(3, 0, 4, 10, 10), std::vector<int64_t>(4, 0));
}

TEST(BatchOffsets, spread_over_sources_beyond_32_bits) {
  const int64_t size = int64_t{1} << 45;
  double mean = 0;
  bool odd = false;
  for (int64_t offset : offsets(4, 0, 4000, 1025, size)) {
    ASSERT_LE(offset, size - 1025);
    mean += static_cast<double>(offset) / static_cast<double>(size) / 4000;
    odd |= offset % 2 != 0;
  }
  EXPECT_NEAR(mean, 0.5, 0.025);
  EXPECT_TRUE(odd);
}

TEST(BatchOffsets, says_what_is_too_small) {
  int64_t out = 0;
  EXPECT_THROW(batch_offsets(1, 0, 1, 11, 10, &out), DataError);
  EXPECT_THROW(batch_offsets(1, -1, 1, 5, 10, &out), std::invalid_argument);
  EXPECT_THROW(batch_offsets(1, int64_t{1} << 32, 1, 5, 10, &out), std::invalid_argument);
  EXPECT_THROW(batch_offsets(1, 0, 1, 0, 10, &out), std::invalid_argument);
}

}  // namespace
}  // namespace evenkeel
