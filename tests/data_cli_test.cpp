// `evenkeel data` as a user meets it: files, output, messages and exit codes.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/json_text.h"
#include "base/threads.h"
#include "run_program.h"
#include "training/prepare.h"
#include "training/synth.h"
#include "training/token_file.h"
#include "training/tokenizer.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

class DataCommand : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("data_cli_test_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string at(const std::string& name) const { return (folder_ / name).string(); }

  std::string write(const std::string& name, const std::string& text) {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return at(name);
  }

  std::string read(const std::string& name) const {
    std::stringstream text;
    text << std::ifstream(folder_ / name, std::ios::binary).rdbuf();
    return text.str();
  }

  // In the folder of the test, so that names are short. The arguments as a shell reads them.
  Output run(const std::string& arguments) {
    const std::string command =
        "cd '" + folder_.string() + "' && '" + EVENKEEL_PROGRAM + "' data " + arguments + " 2>stderr";
    Output output = run_shell(command);
    output.err = read("stderr");
    return output;
  }

  void expect_refused(const std::string& arguments, int code, const std::string& message) {
    const Output output = run(arguments);
    EXPECT_EQ(output.code, code) << arguments << "\n" << output.err;
    EXPECT_NE(output.err.find(message), std::string::npos) << arguments << "\n" << output.err;
    EXPECT_TRUE(output.out.empty()) << output.out;
  }

  // The tokens of a file, decoded with the folder's tokenizer; documents end with <|endoftext|>.
  std::string decoded(const std::string& file) {
    const TokenSource source = TokenSource::open(at(file));
    std::vector<int32_t> tokens(static_cast<size_t>(source.size()));
    source.read(0, source.size(), tokens.data());
    const fs::path beside = fs::path(at(file)).parent_path() / "tokenizer.json";
    return Tokenizer::load(beside.string()).decode(tokens);
  }

  fs::path folder_;
};

TEST_F(DataCommand, help_has_an_example) {
  for (const char* what : {"", "prepare", "synth", "inspect"}) {
    const Output help = run(std::string(what) + " --help");
    EXPECT_EQ(help.code, 0);
    EXPECT_NE(help.out.find("example:\n  evenkeel data "), std::string::npos) << help.out;
  }
}

TEST_F(DataCommand, prepare_keeps_every_byte_in_order) {
  write("text/b.txt", "The second.\n");
  write("text/a/one.txt", "The first \xFF\xC3 <|endoftext|>\n");
  write("text/picture.png", std::string("\x89PNG\0\0", 6));
  write("text/empty.txt", "");
  write("more.txt", "named by itself");
  for (const char* tokenizer : {"bpe:300", "bytes"}) {
    const Output output =
        run("prepare --tokenizer " + std::string(tokenizer) + " --val-share 0 --out out text more.txt");
    ASSERT_EQ(output.code, 0) << output.err;
    EXPECT_NE(output.out.find("3 documents"), std::string::npos) << output.out;
    EXPECT_NE(output.out.find("1 binary files"), std::string::npos) << output.out;
    EXPECT_EQ(decoded("out/train.bin"),
              "The first \xFF\xC3 <|endoftext|>\n<|endoftext|>The second.\n<|endoftext|>named by "
              "itself<|endoftext|>");
    EXPECT_FALSE(fs::exists(at("out/val.bin")));
  }
  // Nothing but the files is left.
  for (const auto& entry : fs::directory_iterator(folder_ / "out"))
    EXPECT_TRUE(
        std::set<std::string>({"train.bin", "tokenizer.json", "meta.json"}).contains(entry.path().filename()))
        << entry.path();
}

TEST_F(DataCommand, the_same_text_gives_the_same_files) {
  // A file of several pieces and many small ones.
  write("text/large.txt", synthetic_text(1, 2'500'000));
  for (int i = 0; i < 150; ++i)
    write("text/small/" + std::to_string(i), synthetic_text(static_cast<uint64_t>(i), 500));
  const Output first = run("prepare --tokenizer bpe:600 --out one text --json");
  ASSERT_EQ(first.code, 0) << first.err;
  ASSERT_EQ(run("prepare --tokenizer one/tokenizer.json --out two text").code, 0);
  ASSERT_EQ(run("prepare --tokenizer bpe:600 --out two text --json").code, 0);  // over the old files
  for (const char* file : {"train.bin", "val.bin", "tokenizer.json", "meta.json"})
    EXPECT_EQ(read(std::string("one/") + file), read(std::string("two/") + file)) << file;

  const Json json = parse_json(first.out);
  EXPECT_EQ(json["vocabulary"], 600);
  EXPECT_EQ(json["train"]["tokens"].get<int64_t>(),
            static_cast<int64_t>(fs::file_size(at("one/train.bin")) / 2));
  EXPECT_EQ(json["validation"]["tokens"].get<int64_t>(),
            static_cast<int64_t>(fs::file_size(at("one/val.bin")) / 2));
  EXPECT_EQ(json["train"]["bytes"].get<int64_t>() + json["validation"]["bytes"].get<int64_t>(),
            2'500'000 + 150 * 500);
  EXPECT_NEAR(json["validation"]["bytes"].get<double>(), 25'750, 2000);  // the share, cut from the large one

  // The encoding of the whole is that of the pieces: large.txt is the first document.
  const Tokenizer tokenizer = Tokenizer::load(at("one/tokenizer.json"));
  const std::string train = decoded("one/train.bin");
  const std::string large = train.substr(0, train.find(kEndOfText));
  EXPECT_EQ(large, synthetic_text(1, static_cast<int64_t>(large.size())));
  const std::vector<int32_t> tokens = tokenizer.encode(large, large.size());
  std::vector<int32_t> written(tokens.size());
  const TokenSource source = TokenSource::open(at("one"));
  EXPECT_EQ(source.vocabulary(), 600);
  source.read(0, static_cast<int64_t>(written.size()), written.data());
  EXPECT_EQ(written, tokens);
}

TEST_F(DataCommand, validation_is_every_nth_document) {
  for (int i = 10; i < 30; ++i) write("text/" + std::to_string(i), "document " + std::to_string(i) + "\n");
  ASSERT_EQ(run("prepare --tokenizer bytes --val-share 0.1 --out out text").code, 0);
  EXPECT_EQ(decoded("out/val.bin"), "document 19\n<|endoftext|>document 29\n<|endoftext|>");
  EXPECT_EQ(decoded("out/train.bin").find("document 19"), std::string::npos);
  // An old val.bin does not outlive a call without one.
  ASSERT_EQ(run("prepare --tokenizer bytes --val-share 0 --out out text").code, 0);
  EXPECT_FALSE(fs::exists(at("out/val.bin")));
}

TEST_F(DataCommand, the_output_folder_is_no_input) {
  write("a.txt", "some text here");
  ASSERT_EQ(run("prepare --tokenizer bytes --val-share 0 --out out .").code, 0);
  const std::string before = read("out/train.bin");
  fs::remove(at("stderr"));
  ASSERT_EQ(run("prepare --tokenizer bytes --val-share 0 --out out a.txt out/..").code, 0);
  EXPECT_EQ(decoded("out/train.bin").find("vocab"), std::string::npos);
}

TEST_F(DataCommand, small_text_gives_fewer_tokens) {
  write("a.txt", "abab abab");
  const Output output = run("prepare --tokenizer bpe:8192 --val-share 0 --out out a.txt");
  EXPECT_EQ(output.code, 0);
  EXPECT_NE(output.out.find("of the 8192 asked for"), std::string::npos) << output.out;
}

TEST_F(DataCommand, synth) {
  ASSERT_EQ(run("synth --bytes 1500000 --seed 7 --out a.txt").code, 0);
  EXPECT_EQ(read("a.txt"), synthetic_text(7, 1500000));
  const Output json = run("synth --bytes 100 --out b.txt --json");
  EXPECT_EQ(parse_json(json.out)["bytes"], 100);
  EXPECT_EQ(read("b.txt"), synthetic_text(0, 100));
}

TEST_F(DataCommand, inspect) {
  write("text/a.txt", "to be or not to be\n");
  ASSERT_EQ(run("prepare --tokenizer bytes --val-share 0 --out out text").code, 0);
  const Output words = run("inspect out/train.bin --head 6");
  EXPECT_EQ(words.code, 0) << words.err;
  for (const char* expected : {"nanoGPT", "tokens     20\n", "vocabulary 257", "\"to be \"", "\" \""})
    EXPECT_NE(words.out.find(expected), std::string::npos) << expected << "\n" << words.out;
  const Json json = parse_json(run("inspect out --json --head 2").out);
  EXPECT_EQ(json["tokens"], 20);
  EXPECT_EQ(json["largest_token"], 256);
  EXPECT_EQ(json["frequent"][0], (Json{{"token", 32}, {"count", 5}, {"text", " "}}));
  EXPECT_EQ(json["text"], "to");
  // Text that no terminal should obey.
  write("escape.txt", "\033[31mred\x9B\xC2\x9B\r\n");
  const Output escaped = run("inspect escape.txt");
  EXPECT_NE(escaped.out.find("\\x1B[31mred\\x9B\\xC2\\x9B\\x0D\\n"), std::string::npos) << escaped.out;
  EXPECT_EQ(parse_json(run("inspect escape.txt --json").out)["kind"], "text (bytes)");
  // Without a tokenizer, numbers.
  write("plain/t.bin", std::string("\x05\0\x06\0", 4));
  EXPECT_NE(run("inspect plain").out.find("begins     5 6\n"), std::string::npos);
}

TEST_F(DataCommand, refuses_bad_requests) {
  write("a.txt", "text");
  write("odd.bin", "abc");
  write("t.bin", std::string("\xFF\xFF", 2));
  write("bad.json", "{}");
  write("none/binary", std::string("\0", 1));
  const struct {
    const char* arguments;
    int code;
    const char* message;
  } kCases[] = {
      {"", 2, "prepare, synth or inspect"},
      {"frobnicate", 2, "'frobnicate'"},
      {"prepare", 2, "expected files or folders"},
      {"prepare a.txt", 2, "--out"},
      {"prepare --out o a.txt --tokenizer bpe:12", 2, "from 257 to 65536"},
      {"prepare --out o a.txt --tokenizer bpe:65537", 2, "from 257 to 65536"},
      {"prepare --out o a.txt --tokenizer bpe:many", 2, "bpe:many"},
      {"prepare --out o a.txt --tokenizer ''", 2, "--tokenizer: expected T, found nothing"},
      {"prepare --out o a.txt --val-share 1", 2, "--val-share 1"},
      {"prepare --out o a.txt --val-share nan", 2, "--val-share nan"},
      {"prepare --out o a.txt --val-share x", 2, "--val-share x"},
      {"prepare --out o absent", 3, "absent: no such file"},
      {"prepare --out o a.txt --tokenizer absent.json", 3, "absent.json"},
      {"prepare --out o a.txt --tokenizer bad.json", 3, "'model'"},
      {"prepare --out o none", 3, "1 binary files"},
      {"prepare --out a.txt a.txt --tokenizer bytes", 3, "a.txt"},
      {"synth --bytes 5", 2, "--out"},
      {"synth --bytes 0 --out s", 2, "--bytes 0"},
      {"synth --bytes 5 --out absent/s", 3, "absent/s"},
      {"inspect", 2, "a token file"},
      {"inspect absent", 3, "absent: no such file"},
      {"inspect odd.bin", 3, "odd number of bytes"},
      {"inspect t.bin --tokenizer bytes", 3, "has token 65535"},
      {"inspect t.bin --tokenizer bpe:300", 2, "bpe:300"},
      {"inspect a.txt --head -1", 2, "--head -1"},
  };
  for (const auto& row : kCases) expect_refused(row.arguments, row.code, row.message);
  EXPECT_FALSE(fs::exists(at("o"))) << "a refused request leaves nothing";
  EXPECT_EQ(read("a.txt"), "text");
}

TEST_F(DataCommand, a_full_disk_leaves_the_old_files) {
  write("a.txt", synthetic_text(1, 100000));
  ASSERT_EQ(run("prepare --tokenizer bytes --out out a.txt").code, 0);
  const std::string before = read("out/train.bin");
  // A limit on the size of files stands for the disk.
  const Output output =
      run("--help >/dev/null; trap '' XFSZ; ulimit -f 16; '" + std::string(EVENKEEL_PROGRAM) +
          "' data prepare --tokenizer bpe:257 --out out a.txt");
  EXPECT_EQ(output.code, 3) << output.out;
  EXPECT_NE(output.err.find("train.bin"), std::string::npos) << output.err;
  EXPECT_EQ(read("out/train.bin"), before);
}

// A child that may take less memory than the text has bytes. (A file that is mapped to be read is no memory taken.) One
// thread: each has pieces of text at hand.
TEST_F(DataCommand, memory_does_not_grow_with_the_text) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers take memory of their own";
#endif
  constexpr int64_t kMegabyte = 1'000'000, kText = 64 * kMegabyte, kMemory = 40 * kMegabyte;
  const std::string block = synthetic_text(1, kMegabyte);
  {
    std::ofstream text(at("large.txt"), std::ios::binary);
    for (int64_t size = 0; size < kText; size += kMegabyte) text << block;
  }
  const pid_t child = fork();
  if (child == 0) {
    set_thread_count(1);
    const rlimit limit{kMemory, kMemory};
    if (setrlimit(RLIMIT_DATA, &limit) != 0) _exit(2);
    try {
      const Prepared done = prepare_tokens({{at("large.txt")}, "bpe:512", at("out")});
      _exit(done.train.bytes + done.validation.bytes == kText && done.vocabulary == 512 ? 0 : 3);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      _exit(1);
    }
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace evenkeel
