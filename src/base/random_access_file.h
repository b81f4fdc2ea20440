// A regular file, read at any place. Whoever shortens or replaces it meanwhile causes a DataError at the next read of what
// is no longer there, where a mapping would end the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "base/whole_file.h"

namespace evenkeel {

class RandomAccessFile {
 public:
  explicit RandomAccessFile(const std::filesystem::path& path);
  RandomAccessFile(RandomAccessFile&&) noexcept = default;
  RandomAccessFile& operator=(RandomAccessFile&&) = delete;
  ~RandomAccessFile() { close(); }

  uint64_t size() const { return size_; }
  // Another text whenever the file is another or has been changed.
  const std::string& identity() const { return identity_; }
  // Thread-safe. REQUIRES: offset + count <= size().
  void read_at(uint64_t offset, size_t count, void* to) const;
  // Does not keep the file open from now on; it can still be read.
  void close();

 private:
  std::filesystem::path path_;
  uint64_t size_ = 0, device_ = 0, number_ = 0;
  std::string identity_;
  FileDescriptor file_;  // none: opened for each read, as a process may hold only so many open
};

}  // namespace evenkeel
