// Files and folders that are there whole or not at all, whatever ends the writer: an error, a full disk,
// kill -9. What is being written lies under a temporary name beside its own and takes its own name at the
// end; until then the old one stays. Every failure is a DataError with the path and the system's reason.
//
// Temporary names begin with a dot and end in .partial (.old: the last step of replacing a folder, on file
// systems that cannot exchange two names). A writer holds a lock on what it writes. The lock distinguishes what a
// living writer works on from what a killed one left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace evenkeel {

using Bytes = std::span<const std::byte>;
inline Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int number) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~FileDescriptor();
  int get() const { return number_; }
  bool valid() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// What becomes of a symbolic link under the name that is written. A name that the user gave is followed: what the link
// points to is replaced, the link stays. In a folder that may be somebody else's work (a run's) the link itself is
// replaced, and what it points to stays as it is.
enum class Links { followed, replaced };

// Only regular files are replaced (never a device or a pipe). Two writers of one path do not meet; the last to commit wins.
class WholeFileWriter {
 public:
  explicit WholeFileWriter(const std::filesystem::path& path, Links links = Links::followed);
  ~WholeFileWriter();  // without commit(), all is as it was
  WholeFileWriter(const WholeFileWriter&) = delete;
  WholeFileWriter& operator=(const WholeFileWriter&) = delete;

  void append(Bytes bytes);
  void append(std::string_view text) { append(bytes_of(text)); }
  // Anywhere; what is never written is zero.
  void write_at(uint64_t offset, Bytes bytes);
  // On the disk and under its name when this returns.
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  FileDescriptor file_;
  uint64_t end_ = 0;  // of what append() wrote
};

void write_whole_file(const std::filesystem::path& path, Bytes bytes, Links links = Links::followed);
inline void write_whole_file(const std::filesystem::path& path, std::string_view text,
                             Links links = Links::followed) {
  write_whole_file(path, bytes_of(text), links);
}

// Also reads what has no size in advance, such as a pipe. Refuses more than `limit` bytes.
std::string read_whole_file(const std::filesystem::path& path, size_t limit);
// The same of a regular file alone: a pipe, which would keep its reader waiting, and a device are refused.
std::string read_regular_file(const std::filesystem::path& path, size_t limit);
// Open for reading, without waiting for anybody. DataError where it is no regular file.
FileDescriptor open_regular_file(const std::filesystem::path& path);

// A regular file as memory, read-only. Whoever shortens the file in place meanwhile kills the reader, which
// is why nothing here does so to a file that is mapped.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~MappedFile();

  Bytes bytes() const { return bytes_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

 private:
  Bytes bytes_;
};

// Write into folder() whatever the folder is to hold, then commit(). An old folder of that name is replaced,
// in one step where the file system can do so.
class WholeFolderWriter {
 public:
  explicit WholeFolderWriter(const std::filesystem::path& path);
  ~WholeFolderWriter();  // without commit(), all is as it was
  WholeFolderWriter(const WholeFolderWriter&) = delete;
  WholeFolderWriter& operator=(const WholeFolderWriter&) = delete;

  const std::filesystem::path& folder() const { return temporary_; }
  // Everything in it is on the disk, and the folder under its name, when this returns.
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  FileDescriptor lock_;
};

// Removes from the folder (not from folders within) what killed writers left, and gives an old folder back
// its name where a writer was killed before the new one had it. Returns what was removed or given back.
std::vector<std::filesystem::path> remove_leftovers(const std::filesystem::path& folder);

// Removes a folder under a temporary name: killed on the way, it leaves what remove_leftovers() finds, never half a
// folder under its own name. Failures are ignored.
void remove_whole_folder(const std::filesystem::path& folder);

// A new folder for scratch files, removed with all it holds when this ends. Its name cannot be guessed and only this
// user can enter it, so no other user can place links in it.
class ScratchFolder {
 public:
  // In the system's folder for temporary files ($TMPDIR); the name begins with `prefix`.
  explicit ScratchFolder(std::string_view prefix);
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// DataError where `path` is a symbolic link; expected: what may stand there ("a folder"). A run is not written through links:
// its folder may be somebody else's work, and a link may lead anywhere.
void refuse_link(const std::filesystem::path& path, std::string_view expected);

// A file that only grows, by whole records. One writer at a time; a second one is refused, and so is a symbolic link.
class AppendFile {
 public:
  explicit AppendFile(const std::filesystem::path& path);  // opens, or creates

  const std::filesystem::path& path() const { return path_; }
  uint64_t size() const { return size_; }
  // All of it or, with a DataError, nothing of it; then it may be tried again. Once it returns, the end of
  // the process no longer matters; only sync() outlasts the end of the machine.
  void append(std::string_view record);
  void sync();
  // REQUIRES: size <= this->size().
  void truncate(uint64_t size);
  // The `size` bytes at offset. REQUIRES: offset + size <= this->size().
  std::string read_at(uint64_t offset, size_t size) const;

 private:
  std::filesystem::path path_;
  FileDescriptor file_;
  uint64_t size_ = 0;
};

}  // namespace evenkeel
