#include "base/whole_file.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <fstream>
#include <set>
#include <thread>

#include "base/error.h"
#include "failing_calls.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using failing_calls::Fault;
using failing_calls::run_apart;

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void put(const fs::path& path, std::string_view text) { std::ofstream(path, std::ios::binary) << text; }

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}
using Names = std::set<std::string>;

// The message of the DataError that the function must throw.
template <class Function>
std::string refusal(Function&& function) {
  try {
    function();
  } catch (const DataError& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}
#define EXPECT_SAYS(message, word) EXPECT_NE((message).find(word), std::string::npos) << (message)

class WholeFile : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override {
    failing_calls::disarm();
    failing_calls::no_exchange = false;
    fs::remove_all(folder_);
  }
  const fs::path folder_ = fs::path(testing::TempDir()) / ("whole_file_test." + std::to_string(getpid()));
  const fs::path file_ = folder_ / "file";
};

TEST_F(WholeFile, writes_reads_and_replaces) {
  for (const std::string& text : {std::string("first"), std::string(), std::string("a\0b", 3)}) {
    write_whole_file(file_, text);
    EXPECT_EQ(read_whole_file(file_, 100), text);
    EXPECT_EQ(MappedFile(file_).text(), text);
    EXPECT_EQ(names_in(folder_), Names{"file"});
  }
}

TEST_F(WholeFile, bytes_may_come_anywhere) {
  WholeFileWriter writer(file_);
  writer.write_at(6, bytes_of("world"));
  writer.append("hel");
  writer.append("lo");
  EXPECT_FALSE(fs::exists(file_));
  writer.commit();
  EXPECT_EQ(text_of(file_), std::string("hello\0world", 11));
  EXPECT_THROW(writer.append("x"), std::invalid_argument);
  EXPECT_THROW(writer.commit(), std::invalid_argument);
}

TEST_F(WholeFile, abandoned_writers_leave_nothing) {
  put(file_, "old");
  {
    WholeFileWriter writer(file_);
    writer.append("new");
    WholeFolderWriter folder(folder_ / "folder");
    put(folder.folder() / "x", "y");
  }
  EXPECT_EQ(text_of(file_), "old");
  EXPECT_EQ(names_in(folder_), Names{"file"});
}

TEST_F(WholeFile, keeps_the_mode_of_the_old_file) {
  put(file_, "old");
  fs::permissions(file_, fs::perms(0640));
  write_whole_file(file_, "new");
  EXPECT_EQ(fs::status(file_).permissions(), fs::perms(0640));
}

TEST_F(WholeFile, reading_has_a_limit) {
  put(file_, "12345");
  EXPECT_EQ(read_whole_file(file_, 5), "12345");
  EXPECT_SAYS(refusal([&] { read_whole_file(file_, 4); }), "expected at most 4 bytes");
  EXPECT_SAYS(refusal([] { read_whole_file("/dev/zero", 100'000); }), "expected at most 100000 bytes");
  EXPECT_FALSE(read_whole_file("/proc/self/status", 1 << 20).empty());  // which claims to have no size
  std::string large(1'000'000, 'x');
  put(file_, large);
  EXPECT_EQ(read_whole_file(file_, large.size()), large);
  EXPECT_SAYS(refusal([&] { read_whole_file(folder_, 5); }), "found a folder");
  EXPECT_SAYS(refusal([&] { read_whole_file(folder_ / "none", 5); }), "No such file");
}

TEST_F(WholeFile, only_regular_files_are_mapped) {
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_SAYS(refusal([&] { MappedFile{folder_ / "pipe"}; }), "found a pipe");
  EXPECT_SAYS(refusal([&] { MappedFile{folder_}; }), "found a folder");
  EXPECT_SAYS(refusal([&] { MappedFile{"/dev/zero"}; }), "found a device");
  put(file_, "abc");
  MappedFile first(file_), second(std::move(first));
  EXPECT_EQ(second.text(), "abc");
  EXPECT_TRUE(first.bytes().empty());  // NOLINT: what a move leaves is promised
}

TEST_F(WholeFile, nothing_but_a_file_is_replaced_by_a_file) {
  fs::create_directory(folder_ / "folder");
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_SAYS(refusal([&] { WholeFileWriter{folder_ / "folder"}; }), "found a folder");
  EXPECT_SAYS(refusal([&] { WholeFileWriter{folder_ / "pipe"}; }), "found a pipe");
  EXPECT_SAYS(refusal([&] { WholeFileWriter{"/dev/full"}; }), "found a device");
  EXPECT_SAYS(refusal([&] { AppendFile{"/dev/full"}; }), "found a device");
  EXPECT_SAYS(refusal([&] { AppendFile{folder_ / "pipe"}; }), "found a pipe");
  put(file_, "x");
  EXPECT_SAYS(refusal([&] { WholeFolderWriter{file_}; }), "found a regular file");
  EXPECT_SAYS(refusal([&] { WholeFileWriter{file_ / "below"}; }), "Not a directory");
  EXPECT_SAYS(refusal([&] { WholeFileWriter{folder_ / "none" / "file"}; }), "none/file");
  EXPECT_SAYS(refusal([&] { WholeFileWriter{folder_ / std::string(300, 'x')}; }), "too long");
  for (const fs::path& path :
       {fs::path(), folder_ / "", folder_ / ".", folder_ / "..", fs::path(std::string("a\0b", 3))})
    EXPECT_THROW(WholeFileWriter{path}, std::invalid_argument) << path;
  EXPECT_EQ(names_in(folder_), (Names{"file", "folder", "pipe"}));
}

TEST_F(WholeFile, links_are_followed_and_stay) {
  fs::create_directory(folder_ / "elsewhere");
  const fs::path target = folder_ / "elsewhere" / "target";
  fs::create_symlink("elsewhere/target", folder_ / "link");
  fs::create_symlink(folder_ / "link", folder_ / "link_to_link");
  write_whole_file(folder_ / "link_to_link", "through a dangling link");
  EXPECT_EQ(text_of(target), "through a dangling link");
  write_whole_file(folder_ / "link", "again");
  EXPECT_EQ(text_of(target), "again");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_TRUE(fs::is_symlink(folder_ / "link_to_link"));
  EXPECT_EQ(names_in(folder_ / "elsewhere"), Names{"target"});
  fs::create_symlink("loop", folder_ / "loop");
  EXPECT_SAYS(refusal([&] { WholeFileWriter{folder_ / "loop"}; }), "symbolic links");
}

// In a folder that may be somebody else's work a link leads nowhere.
TEST_F(WholeFile, links_in_records_are_replaced_or_refused) {
  const fs::path precious = folder_ / "precious", link = folder_ / "link";
  put(precious, "precious");
  for (const fs::path& target : {precious, folder_ / "nowhere", folder_}) {
    fs::create_symlink(target, link);
    EXPECT_SAYS(refusal([&] { AppendFile{link}; }),
                "link: expected a regular file or nothing, found a symbolic link");
    EXPECT_TRUE(fs::is_symlink(link));
    write_whole_file(link, "new", Links::replaced);
    EXPECT_FALSE(fs::is_symlink(link));
    EXPECT_EQ(text_of(link), "new");
    fs::remove(link);
  }
  EXPECT_EQ(text_of(precious), "precious");
  EXPECT_EQ(names_in(folder_), Names{"precious"});
}

TEST_F(WholeFile, a_read_only_folder_is_named) {
  fs::permissions(folder_, fs::perms(0500));
  const int result = run_apart([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return;  // root may write anywhere
    const std::string message = refusal([&] { write_whole_file(file_, "x"); });
    if (message.find(file_.string()) == std::string::npos) throw std::runtime_error(message);
    refusal([&] { AppendFile{file_}; });
    refusal([&] { WholeFolderWriter{file_}; });
    if (testing::Test::HasFailure()) throw std::runtime_error("not refused");
  });
  fs::permissions(folder_, fs::perms(0700));
  EXPECT_EQ(result, 0);
  EXPECT_TRUE(names_in(folder_).empty());
}

TEST_F(WholeFile, a_full_disk_leaves_the_old_file) {
  put(file_, "old");
  put(folder_ / "log", "line\n");
  // A file may be no longer than this; to go beyond is the same to the writer as a disk that is full.
  EXPECT_EQ(run_apart([&] {
              ::signal(SIGXFSZ, SIG_IGN);
              const rlimit limit{1000, 1000};
              ::setrlimit(RLIMIT_FSIZE, &limit);
              const std::string large(5000, 'x');
              if (refusal([&] {
                    write_whole_file(file_, large);
                  }).find("file: cannot write 5000 bytes at 0: ") == std::string::npos)
                throw std::runtime_error("the message");
              AppendFile log(folder_ / "log");
              refusal([&] { log.append(large); });
              log.append("another\n");
              if (testing::Test::HasFailure()) throw std::runtime_error("not refused");
            }),
            0);
  EXPECT_EQ(text_of(file_), "old");
  EXPECT_EQ(text_of(folder_ / "log"), "line\nanother\n");
  EXPECT_EQ(names_in(folder_), (Names{"file", "log"}));
}

TEST_F(WholeFile, a_tiny_file_system) {
  if (::mount("none", folder_.c_str(), "tmpfs", 0, "size=64k") != 0)
    GTEST_SKIP() << "mounting is not allowed here";
  struct Unmount {
    const fs::path& folder;
    ~Unmount() { ::umount(folder.c_str()); }
  } unmount{folder_};
  const std::string large(1'000'000, 'x');
  write_whole_file(file_, "old");
  EXPECT_SAYS(refusal([&] { write_whole_file(file_, large); }), "No space left on device");
  {
    AppendFile log(folder_ / "log");
    log.append("line\n");
    EXPECT_SAYS(refusal([&] { log.append(large); }), "No space left on device");
    log.append("another\n");
  }
  {
    WholeFolderWriter folder(folder_ / "folder");
    EXPECT_SAYS(refusal([&] { write_whole_file(folder.folder() / "x", large); }), "No space left on device");
  }
  EXPECT_EQ(text_of(file_), "old");
  EXPECT_EQ(text_of(folder_ / "log"), "line\nanother\n");
  EXPECT_EQ(names_in(folder_), (Names{"file", "log"}));
}

// Killed at each call in turn, half of a write done: the file is the old one or the new one. What is left over is found
// and removed, and writing works again.
TEST_F(WholeFile, killed_anywhere_the_file_is_old_or_new) {
  const std::string before(3000, 'o'), after(5000, 'n');
  bool saw_old = false, saw_new = false;
  int calls = 0;
  for (bool finished = false; !finished; ++calls) {
    put(file_, before);
    const int result = run_apart([&] {
      failing_calls::arm(Fault::kill, calls);
      WholeFileWriter writer(file_);
      writer.append(after.substr(0, 2000));
      writer.append(after.substr(2000));
      writer.commit();
    });
    ASSERT_TRUE(result == 0 || result == SIGKILL) << result;
    finished = result == 0;
    const std::string text = text_of(file_);
    ASSERT_TRUE(text == before || text == after) << "after call " << calls;
    (text == before ? saw_old : saw_new) = true;
    const size_t leftovers = names_in(folder_).size() - 1;
    EXPECT_LE(leftovers, 1u);
    EXPECT_EQ(remove_leftovers(folder_).size(), leftovers);
    EXPECT_EQ(names_in(folder_), Names{"file"});
  }
  EXPECT_TRUE(saw_old && saw_new);
  EXPECT_EQ(calls, 6);  // two writes, the file's sync, the rename, the folder's sync; and once to the end
}

// The same with calls that fail. Then there is nothing left over in the first place.
TEST_F(WholeFile, failing_anywhere_the_file_is_old_or_new) {
  for (const bool lasting : {false, true})
    for (int call = 0;; ++call) {
      put(file_, "old");
      failing_calls::arm(Fault::error, call, lasting ? ENOSPC : EIO, lasting);
      bool is_written = true;
      try {
        write_whole_file(file_, "new");
      } catch (const DataError& error) {
        is_written = false;
        EXPECT_SAYS(std::string(error.what()), folder_.string());
      }
      failing_calls::disarm();
      const std::string text = text_of(file_);
      EXPECT_TRUE(text == "new" || (text == "old" && !is_written)) << call;
      EXPECT_EQ(names_in(folder_), Names{"file"}) << call;
      if (is_written) break;
    }
}

void write_folder(const fs::path& path, const std::string& text) {
  WholeFolderWriter writer(path);
  write_whole_file(writer.folder() / "model", text);
  fs::create_directory(writer.folder() / "inner");
  write_whole_file(writer.folder() / "inner" / "optimizer", text);
  writer.commit();
}
// The same in haste: nobody kills this.
void put_folder(const fs::path& path, const std::string& text) {
  fs::remove_all(path);
  if (text.empty()) return;
  fs::create_directories(path / "inner");
  put(path / "model", text);
  put(path / "inner" / "optimizer", text);
}
// "" for no folder; "?" for one that is not whole.
std::string folder_text(const fs::path& path) {
  if (!fs::exists(path)) return "";
  const std::string text = text_of(path / "model");
  const bool whole =
      names_in(path) == Names{"inner", "model"} && names_in(path / "inner") == Names{"optimizer"};
  return whole && text_of(path / "inner" / "optimizer") == text ? text : "?";
}

TEST_F(WholeFile, a_folder_is_written_and_replaced) {
  const fs::path path = folder_ / "step-1";
  for (const bool no_exchange : {false, true})
    for (const char* text : {"one", "two", "three"}) {
      failing_calls::no_exchange = no_exchange;
      write_folder(path, text);
      EXPECT_EQ(folder_text(path), text);
      EXPECT_EQ(names_in(folder_), Names{"step-1"});
    }
  fs::create_directory(folder_ / "empty");
  write_folder(folder_ / "empty", "four");
  EXPECT_EQ(folder_text(folder_ / "empty"), "four");
}

// A machine that dies keeps what was synced in this order, and nothing else is certain: the bytes before the
// name, the name before anyone knows of it.
TEST_F(WholeFile, bytes_are_on_the_disk_before_their_name) {
  using Calls = std::vector<std::string>;
  const fs::path path = folder_ / "step-1";
  const auto calls = [] {  // but for those that remove: libraries differ in them
    std::erase(failing_calls::names, "unlinkat");
    return failing_calls::names;
  };
  failing_calls::record();
  write_whole_file(file_, "x");
  EXPECT_EQ(calls(), (Calls{"pwrite", "fsync", "rename", "fsync"}));
  const auto write_one = [&] {
    WholeFolderWriter writer(path);
    put(writer.folder() / "x", "y");
    failing_calls::record();
    writer.commit();
  };
  write_one();
  EXPECT_EQ(calls(), (Calls{"fsync", "fsync", "rename", "fsync"}));
  write_one();
  EXPECT_EQ(calls(), (Calls{"fsync", "fsync", "rename", "renameat2", "fsync"}));
  failing_calls::no_exchange = true;
  write_one();
  EXPECT_EQ(calls(), (Calls{"fsync", "fsync", "rename", "rename", "rename", "fsync"}));
  AppendFile log(folder_ / "log");
  failing_calls::record();
  log.append("line\n");
  log.sync();
  EXPECT_EQ(calls(), (Calls{"pwrite", "fsync"}));
}

TEST_F(WholeFile, killed_anywhere_the_folder_is_old_or_new) {
  const fs::path path = folder_ / "step-1";
  for (const bool no_exchange : {false, true})
    for (const std::string before : {"", "old"}) {
      bool saw_old = false, saw_new = false;
      int calls = 0;
      for (bool finished = false; !finished; ++calls) {
        put_folder(path, before);
        const int result = run_apart([&] {
          failing_calls::no_exchange = no_exchange;
          failing_calls::arm(Fault::kill, calls);
          write_folder(path, "new");
        });
        ASSERT_TRUE(result == 0 || result == SIGKILL) << result;
        finished = result == 0;
        // Where names cannot be exchanged, the old folder may lie under another name for a moment.
        const std::string at_once = folder_text(path);
        remove_leftovers(folder_);
        const std::string text = folder_text(path);
        ASSERT_TRUE(text == before || text == "new") << "after call " << calls << ": " << text;
        ASSERT_TRUE(at_once == text || (no_exchange && at_once.empty())) << at_once;
        (text == before ? saw_old : saw_new) = true;
        EXPECT_EQ(names_in(folder_), text.empty() ? Names{} : Names{"step-1"});
      }
      EXPECT_TRUE(saw_old && saw_new);
      EXPECT_GE(calls, 12);
    }
}

TEST_F(WholeFile, failing_anywhere_the_folder_is_old_or_new) {
  const fs::path path = folder_ / "step-1";
  for (const bool no_exchange : {false, true})
    for (const std::string before : {"", "old"})
      for (int call = 0;; ++call) {
        put_folder(path, before);
        failing_calls::no_exchange = no_exchange;
        failing_calls::arm(Fault::error, call, EIO);
        bool is_written = true;
        try {
          write_folder(path, "new");
        } catch (const std::runtime_error& error) {  // a DataError, or from within write_folder
          is_written = false;
          EXPECT_SAYS(std::string(error.what()), folder_.string());
        }
        const bool is_over = failing_calls::calls_made <= call;
        failing_calls::disarm();
        const std::string text = folder_text(path);
        EXPECT_TRUE(text == "new" || (text == before && !is_written)) << call << ": " << text;
        remove_leftovers(folder_);  // an old folder that could not be removed
        EXPECT_EQ(names_in(folder_), text.empty() ? Names{} : Names{"step-1"}) << call;
        if (is_over) break;
      }
}

TEST_F(WholeFile, killed_anywhere_a_removed_folder_is_whole_or_gone) {
  const fs::path path = folder_ / "step-1";
  int calls = 0;
  for (bool finished = false; !finished; ++calls) {
    put_folder(path, "old");
    const int result = run_apart([&] {
      failing_calls::arm(Fault::kill, calls);
      remove_whole_folder(path);
    });
    ASSERT_TRUE(result == 0 || result == SIGKILL) << result;
    finished = result == 0;
    const std::string text = folder_text(path);
    ASSERT_TRUE(text == "old" || text.empty()) << "after call " << calls << ": " << text;
    remove_leftovers(folder_);
    EXPECT_EQ(names_in(folder_), text.empty() ? Names{} : Names{"step-1"}) << "after call " << calls;
  }
  EXPECT_GE(calls, 3);
}

TEST_F(WholeFile, a_scratch_folder_is_private_and_goes) {
  fs::path path;
  {
    const ScratchFolder scratch("evenkeel-test"), other("evenkeel-test");
    path = scratch.path();
    EXPECT_NE(path, other.path());
    EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_all);
    put(path / "file", "text");
    fs::create_directory_symlink(folder_, path / "link");
  }
  EXPECT_FALSE(fs::exists(path));
  EXPECT_TRUE(fs::exists(folder_));
}

TEST_F(WholeFile, leftovers_of_the_living_stay) {
  put(folder_ / ".file.1-0.partial", "of a killed writer");
  fs::create_directories(folder_ / ".step-3.77-2.partial" / "inner");
  fs::create_directories(folder_ / ".step-4.77-2.old");  // step-4 itself is missing: it comes back
  fs::create_directories(folder_ / ".step-5.77-2.old");  // step-5 is there: it goes
  fs::create_directories(folder_ / "step-5");
  Names others = {"a.partial",     ".x.partial",   ".x.12.partial",
                  ".x.1-.partial", ".1-2.partial", ".x.1-2.partial.b"};
  for (const std::string& name : others) put(folder_ / name, "of someone else");
  fs::create_symlink("step-5", folder_ / ".link.1-1.partial");
  WholeFileWriter file(file_);
  file.append("alive");
  WholeFolderWriter folder(folder_ / "folder");
  EXPECT_EQ(remove_leftovers(folder_).size(), 4u);
  others.insert({"step-4", "step-5", ".link.1-1.partial"});
  file.commit();
  folder.commit();
  others.insert({"file", "folder"});
  EXPECT_EQ(names_in(folder_), others);
  EXPECT_EQ(text_of(file_), "alive");
  EXPECT_SAYS(refusal([&] { remove_leftovers(folder_ / "none"); }), "none: cannot list");
}

// Four writers of one path and one who tidies up, all at once: a reader only ever sees one whole file.
TEST_F(WholeFile, writers_of_one_path_do_not_meet) {
  put(file_, std::string(10'000, 'a'));
  std::vector<std::thread> writers;
  for (const char letter : {'a', 'b', 'c', 'd'})
    writers.emplace_back([&, letter] {
      for (int i = 0; i < 25; ++i) write_whole_file(file_, std::string(10'000, letter));
    });
  for (int i = 0; i < 100; ++i) {
    const std::string text = read_whole_file(file_, 1 << 20);
    EXPECT_EQ(text, std::string(10'000, text[0]));
    remove_leftovers(folder_);
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(names_in(folder_), Names{"file"});
}

TEST_F(WholeFile, an_append_file_has_one_writer) {
  AppendFile first(file_);
  first.append("one\n");
  EXPECT_SAYS(refusal([&] { AppendFile{file_}; }), "found another at work");
  EXPECT_EQ(first.read_at(1, 2), "ne");
  EXPECT_SAYS(refusal([&] { first.read_at(3, 5); }), "found the end");
  EXPECT_THROW(first.truncate(5), std::invalid_argument);
  first.truncate(2);
  first.append("ly\n");
  first.sync();
  EXPECT_EQ(text_of(file_), "only\n");
}

TEST_F(WholeFile, an_append_is_whole_or_not_at_all) {
  AppendFile file(file_);
  file.append("one\n");
  // The write fails after half of it; then the shortening fails as well.
  for (const bool lasting : {false, true}) {
    failing_calls::arm(Fault::error, 0, ENOSPC, lasting);
    EXPECT_SAYS(refusal([&] { file.append("a long line that does not fit\n"); }), "No space left on device");
    failing_calls::disarm();
    EXPECT_EQ(text_of(file_).size() > 4, lasting);
  }
  file.append("a line that does and is longer than half of the other\n");
  EXPECT_EQ(text_of(file_), "one\na line that does and is longer than half of the other\n");
}

}  // namespace
}  // namespace evenkeel
