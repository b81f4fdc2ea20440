#include "base/random_access_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace evenkeel {
namespace {

constexpr int kMostKeptOpen = 256;  // of the 1,024 that a process commonly may have
std::atomic<int> kept_open = 0;

struct stat status_of(const FileDescriptor& file, const std::filesystem::path& path) {
  struct stat status;
  require_data(::fstat(file.get(), &status) == 0, "{}: cannot look at it: {}", path.string(),
               std::strerror(errno));
  return status;
}

}  // namespace

RandomAccessFile::RandomAccessFile(const std::filesystem::path& path) : path_(path) {
  file_ = open_regular_file(path);
  const struct stat status = status_of(file_, path);
  size_ = static_cast<uint64_t>(status.st_size);
  device_ = status.st_dev;
  number_ = status.st_ino;
  identity_ = fmt::format("{} {} {} {}.{} {}.{}", device_, number_, size_, status.st_mtim.tv_sec,
                          status.st_mtim.tv_nsec, status.st_ctim.tv_sec, status.st_ctim.tv_nsec);
  if (kept_open.fetch_add(1) >= kMostKeptOpen) close();
}

void RandomAccessFile::close() {
  if (!file_.valid()) return;
  --kept_open;
  file_ = FileDescriptor();
}

void RandomAccessFile::read_at(uint64_t offset, size_t count, void* to) const {
  FileDescriptor reopened;
  if (!file_.valid()) {
    reopened = open_regular_file(path_);
    const struct stat status = status_of(reopened, path_);
    require_data(status.st_dev == device_ && status.st_ino == number_,
                 "{}: expected the file that was opened first, found another in its place", path_.string());
  }
  for (size_t done = 0; done < count;) {
    const ssize_t got = ::pread((file_.valid() ? file_ : reopened).get(), static_cast<char*>(to) + done,
                                count - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    require_data(got >= 0, "{}: cannot read it: {}", path_.string(), std::strerror(errno));
    require_data(got > 0,
                 "{}: expected {} bytes as when it was opened, found the end at {}: it was shortened",
                 path_.string(), size_, offset + done);
    done += static_cast<size_t>(got);
  }
}

}  // namespace evenkeel
