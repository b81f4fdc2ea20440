#include "base/whole_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <system_error>

#include "base/error.h"

namespace fs = std::filesystem;

namespace evenkeel {
namespace {

constexpr std::string_view kPartial = ".partial", kOld = ".old";

// The system's reason for what has just failed. Taken before anything else can change errno.
template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) {
  const int error = errno;
  throw DataError(fmt::format("{}: {}", fmt::format(what, std::forward<Args>(args)...),
                              std::generic_category().message(error)));
}

void check_path(const fs::path& path) {
  require(path.native().find('\0') == std::string::npos, "expected a path, found one with a NUL in it");
  const std::string name = path.filename().string();
  require(!name.empty() && name != "." && name != "..",
          "expected a path that ends in a name to write, found '{}'", path.string());
}

// Where a chain of symbolic links ends; that need not exist.
fs::path follow_links(const fs::path& path) {
  constexpr int kMostLinks = 40;  // as the kernel
  fs::path end = path;
  for (int links = 0; links <= kMostLinks; ++links) {
    std::error_code not_a_link;
    const fs::path target = fs::read_symlink(end, not_a_link);
    if (not_a_link) return end;
    end = end.parent_path() / target;  // target alone where it is absolute
  }
  throw DataError(
      fmt::format("{}: expected a file, found more than {} symbolic links", path.string(), kMostLinks));
}

const char* kind_of(mode_t mode) {
  return S_ISREG(mode)    ? "a regular file"
         : S_ISDIR(mode)  ? "a folder"
         : S_ISLNK(mode)  ? "a symbolic link"
         : S_ISFIFO(mode) ? "a pipe"
         : S_ISSOCK(mode) ? "a socket"
                          : "a device";
}

// What is to be replaced must be of the kind that replaces it, or a link that is not followed. Its mode, if it exists.
std::optional<mode_t> check_replaceable(const fs::path& path, mode_t kind, Links links) {
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return {};
    fail("{}: cannot look at it", path.string());
  }
  if (links == Links::replaced && S_ISLNK(status.st_mode)) return {};
  require_data((status.st_mode & S_IFMT) == kind, "{}: expected {} or nothing, found {}", path.string(),
               kind_of(kind), kind_of(status.st_mode));
  return status.st_mode & 0777;
}

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

// .NAME.PID-COUNT.partial, beside the path itself.
fs::path temporary_name(const fs::path& path, std::string_view suffix) {
  constexpr size_t kLongestName = 200;  // of 255, so that the rest fits
  static std::atomic<uint64_t> count = 0;
  return folder_of(path) / fmt::format(".{}.{}-{}{}", path.filename().string().substr(0, kLongestName),
                                       ::getpid(), count++, suffix);
}

// The NAME of a temporary name, or nothing if it is none.
std::optional<std::string> name_within(std::string_view temporary, std::string_view suffix) {
  if (!temporary.starts_with('.') || !temporary.ends_with(suffix)) return {};
  temporary.remove_prefix(1);
  temporary.remove_suffix(suffix.size());
  const size_t dot = temporary.rfind('.');
  if (dot == std::string_view::npos || dot == 0) return {};
  const std::string_view numbers = temporary.substr(dot + 1);
  const size_t dash = numbers.find('-');
  const auto are_digits = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  if (dash == std::string_view::npos || !are_digits(numbers.substr(0, dash)) ||
      !are_digits(numbers.substr(dash + 1)))
    return {};
  return std::string(temporary.substr(0, dot));
}

enum class Lock { taken, held_by_other, impossible };

Lock try_lock(const FileDescriptor& file) {
  if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) return Lock::taken;
  return errno == EWOULDBLOCK ? Lock::held_by_other : Lock::impossible;  // not every file system has locks
}

// False: remove_leftovers() came between making a file and locking it.
bool lock_new(const FileDescriptor& file) {
  struct stat status;
  return try_lock(file) != Lock::held_by_other && ::fstat(file.get(), &status) == 0 && status.st_nlink > 0;
}

// 0, or the error. A short write is gone on with, so that the reason why it was short comes to light.
int write_all(const FileDescriptor& file, uint64_t offset, Bytes bytes) {
  if (offset > static_cast<uint64_t>(INT64_MAX) - bytes.size()) return EFBIG;
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(file.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    if (written == 0) return EIO;
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
  return 0;
}

void sync(const FileDescriptor& file, const fs::path& path) {
  while (::fsync(file.get()) != 0) {
    if (errno == EINTR) continue;
    fail("{}: cannot bring it to the disk", path.string());
  }
}

void sync_folder(const fs::path& folder) {
  const FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened.valid()) fail("{}: cannot open the folder", folder.string());
  while (::fsync(opened.get()) != 0) {
    if (errno == EINTR) continue;
    if (errno == EINVAL) return;  // a file system without such a thing
    fail("{}: cannot bring the folder to the disk", folder.string());
  }
}

// Every file and folder below.
void sync_tree(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path& path = entry->path();
    const fs::file_type type = entry->symlink_status(error).type();
    if (type == fs::file_type::directory) {
      sync_tree(path);
    } else if (type == fs::file_type::regular) {
      const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
      if (!file.valid()) fail("{}: cannot open it", path.string());
      sync(file, path);
    }
  }
  require_data(!error, "{}: cannot list the folder: {}", folder.string(), error.message());
  sync_folder(folder);
}

void rename_or_fail(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    fail("{}: cannot give it its name (from {})", to.string(), from.filename().string());
}

void remove_quietly(const fs::path& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (valid()) ::close(number_);
}

WholeFileWriter::WholeFileWriter(const fs::path& path, Links links) {
  check_path(path);
  path_ = links == Links::followed ? follow_links(path) : path;
  const std::optional<mode_t> old_mode = check_replaceable(path_, S_IFREG, links);
  for (;;) {
    temporary_ = temporary_name(path_, kPartial);
    file_ = FileDescriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!file_.valid() && errno == EEXIST) continue;
    if (!file_.valid()) fail("{}: cannot make a file in its folder", path_.string());
    if (lock_new(file_)) break;
  }
  if (old_mode) ::fchmod(file_.get(), *old_mode);  // of no consequence where it is not ours to change
}

WholeFileWriter::~WholeFileWriter() {
  if (file_.valid()) ::unlink(temporary_.c_str());
}

void WholeFileWriter::append(Bytes bytes) {
  write_at(end_, bytes);
  end_ += bytes.size();
}

void WholeFileWriter::write_at(uint64_t offset, Bytes bytes) {
  require(file_.valid(), "{}: it has been committed, and takes no more", path_.string());
  if ((errno = write_all(file_, offset, bytes)) != 0)
    fail("{}: cannot write {} bytes at {}", path_.string(), bytes.size(), offset);
}

void WholeFileWriter::commit() {
  require(file_.valid(), "{}: it has been committed already", path_.string());
  sync(file_, path_);
  rename_or_fail(temporary_, path_);
  file_ = FileDescriptor();
  sync_folder(folder_of(path_));
}

void write_whole_file(const fs::path& path, Bytes bytes, Links links) {
  WholeFileWriter writer(path, links);
  writer.append(bytes);
  writer.commit();
}

namespace {

std::string read_all(const FileDescriptor& file, const fs::path& path, size_t limit) {
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail("{}: cannot look at it", path.string());
  require_data(!S_ISDIR(status.st_mode), "{}: expected a file, found a folder", path.string());

  constexpr size_t kPiece = size_t{1} << 16;
  // One more than there is, so that the end shows without growing. Sizes may lie (/proc) or change.
  const auto announced = static_cast<uint64_t>(std::max<off_t>(status.st_size, 0));
  std::string text(static_cast<size_t>(std::min<uint64_t>(announced, limit)) + 1, '\0');
  for (size_t size = 0;;) {
    const ssize_t got = ::read(file.get(), text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("{}: cannot read it", path.string());
    size += static_cast<size_t>(got);
    require_data(size <= limit, "{}: expected at most {} bytes, found more", path.string(), limit);
    if (got == 0) {
      text.resize(size);
      return text;
    }
    if (size == text.size()) text.resize(size + std::max(size, kPiece));
  }
}

}  // namespace

std::string read_whole_file(const fs::path& path, size_t limit) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) fail("{}: cannot open it", path.string());
  return read_all(file, path, limit);
}

std::string read_regular_file(const fs::path& path, size_t limit) {
  return read_all(open_regular_file(path), path, limit);
}

FileDescriptor open_regular_file(const fs::path& path) {
  // Without O_NONBLOCK, opening a pipe would wait for its writer.
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) fail("{}: cannot open it", path.string());
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail("{}: cannot look at it", path.string());
  require_data(S_ISREG(status.st_mode), "{}: expected a regular file, found {}", path.string(),
               kind_of(status.st_mode));
  return file;
}

MappedFile::MappedFile(const fs::path& path) {
  const FileDescriptor file = open_regular_file(path);
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail("{}: cannot look at it", path.string());
  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) return;  // nothing to map
  void* const start = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (start == MAP_FAILED) fail("{}: cannot map {} bytes", path.string(), size);
  bytes_ = {static_cast<const std::byte*>(start), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

WholeFolderWriter::WholeFolderWriter(const fs::path& path) {
  check_path(path);
  path_ = follow_links(path);
  check_replaceable(path_, S_IFDIR, Links::followed);
  for (;;) {
    temporary_ = temporary_name(path_, kPartial);
    if (::mkdir(temporary_.c_str(), 0777) != 0) {
      if (errno == EEXIST) continue;
      fail("{}: cannot make a folder in its folder", path_.string());
    }
    lock_ = FileDescriptor(::open(temporary_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (lock_.valid() && lock_new(lock_)) break;
    if (!lock_.valid() && errno != ENOENT) {
      const int error = errno;
      ::rmdir(temporary_.c_str());
      errno = error;
      fail("{}: cannot open the folder just made for it", path_.string());
    }
  }
}

WholeFolderWriter::~WholeFolderWriter() {
  if (lock_.valid()) remove_quietly(temporary_);
}

void WholeFolderWriter::commit() {
  require(lock_.valid(), "{}: it has been committed already", path_.string());
  sync_tree(temporary_);
  check_replaceable(path_, S_IFDIR, Links::followed);
  fs::path old;  // where the folder that is replaced has gone, if there was one
  FileDescriptor old_lock;
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    if (errno != ENOTEMPTY && errno != EEXIST) fail("{}: cannot give the folder its name", path_.string());
    if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) == 0) {
      old = temporary_;
    } else {
      if (errno != EINVAL && errno != ENOSYS) fail("{}: cannot replace the old folder", path_.string());
      old_lock = FileDescriptor(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      if (old_lock.valid()) try_lock(old_lock);
      const fs::path aside = temporary_name(path_, kOld);
      rename_or_fail(path_, aside);
      try {
        rename_or_fail(temporary_, path_);
      } catch (const DataError&) {
        ::rename(aside.c_str(), path_.c_str());
        throw;
      }
      old = aside;
    }
  }
  lock_ = FileDescriptor();
  sync_folder(folder_of(path_));
  if (!old.empty()) remove_quietly(old);
}

std::vector<fs::path> remove_leftovers(const fs::path& folder) {
  std::vector<fs::path> found, handled;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    found.push_back(entry->path());
  require_data(!error, "{}: cannot list the folder: {}", folder.string(), error.message());
  for (const fs::path& path : found) {
    const std::string temporary = path.filename().string();
    const std::optional<std::string> replaced = name_within(temporary, kOld);
    if (!replaced && !name_within(temporary, kPartial)) continue;
    std::error_code status_error;
    const fs::file_status status = fs::symlink_status(path, status_error);
    if (!fs::is_regular_file(status) && !fs::is_directory(status)) continue;  // none of ours
    // Some network file systems lock for writing only what is open for writing.
    const int access = fs::is_directory(status) ? O_RDONLY | O_DIRECTORY : O_RDWR;
    const FileDescriptor lock(::open(path.c_str(), access | O_CLOEXEC | O_NOFOLLOW));
    if (!lock.valid() || try_lock(lock) != Lock::taken) continue;
    if (replaced && fs::symlink_status(folder / *replaced, error).type() == fs::file_type::not_found)
      rename_or_fail(path, folder / *replaced);
    else if (fs::remove_all(path, error); error)
      throw DataError(fmt::format("{}: cannot remove it: {}", path.string(), error.message()));
    handled.push_back(path);
  }
  return handled;
}

void remove_whole_folder(const fs::path& folder) {
  const FileDescriptor lock(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (lock.valid()) try_lock(lock);
  const fs::path dying = temporary_name(folder, kPartial);
  if (::rename(folder.c_str(), dying.c_str()) != 0) return;
  try {
    sync_folder(folder_of(folder));  // before anything within goes, whatever ends the machine
  } catch (const DataError&) {
  }
  remove_quietly(dying);
}

ScratchFolder::ScratchFolder(std::string_view prefix) {
  std::error_code error;
  const fs::path parent = fs::temp_directory_path(error);
  require_data(!error, "TMPDIR: expected a folder for temporary files: {}", error.message());
  std::string name = (parent / fmt::format("{}-XXXXXX", prefix)).string();
  if (!::mkdtemp(name.data())) fail("{}: cannot make a folder for temporary files", parent.string());
  path_ = name;
}

ScratchFolder::~ScratchFolder() { remove_quietly(path_); }  // links are removed, not what they point to

void refuse_link(const fs::path& path, std::string_view expected) {
  std::error_code error;
  require_data(
      !fs::is_symlink(fs::symlink_status(path, error)),
      "{}: expected {} or nothing, found a symbolic link: a run is not written through links; only its "
      "whole folder may be one",
      path.string(), expected);
}

AppendFile::AppendFile(const fs::path& path) : path_(path) {
  check_path(path);
  refuse_link(path, "a regular file");
  file_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0666));
  if (!file_.valid()) fail("{}: cannot open it for writing", path.string());
  struct stat status;
  if (::fstat(file_.get(), &status) != 0) fail("{}: cannot look at it", path.string());
  require_data(S_ISREG(status.st_mode), "{}: expected a regular file or nothing, found {}", path.string(),
               kind_of(status.st_mode));
  require_data(try_lock(file_) != Lock::held_by_other,
               "{}: expected to be its only writer, found another at work", path.string());
  if (::fstat(file_.get(), &status) != 0) fail("{}: cannot look at it", path.string());  // alone now
  size_ = static_cast<uint64_t>(status.st_size);
  if (size_ == 0) sync_folder(folder_of(path));  // perhaps new: its name must outlast the machine, too
}

void AppendFile::append(std::string_view record) {
  if ((errno = write_all(file_, size_, bytes_of(record))) != 0) {
    const int error = errno;
    // Should this fail as well, the next record is written over what is left of this one.
    [[maybe_unused]] const int ignored = ::ftruncate(file_.get(), static_cast<off_t>(size_));
    errno = error;
    fail("{}: cannot append {} bytes", path_.string(), record.size());
  }
  size_ += record.size();
}

void AppendFile::sync() { evenkeel::sync(file_, path_); }

void AppendFile::truncate(uint64_t size) {
  require(size <= size_, "{}: expected at most its size of {} to be kept, found {}", path_.string(), size_,
          size);
  if (::ftruncate(file_.get(), static_cast<off_t>(size)) != 0)
    fail("{}: cannot shorten it to {} bytes", path_.string(), size);
  size_ = size;
}

std::string AppendFile::read_at(uint64_t offset, size_t size) const {
  std::string text(size, '\0');
  for (size_t done = 0; done < size;) {
    const ssize_t got =
        ::pread(file_.get(), text.data() + done, size - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("{}: cannot read it", path_.string());
    require_data(got > 0, "{}: expected {} bytes at {}, found the end after {}", path_.string(), size, offset,
                 done);
    done += static_cast<size_t>(got);
  }
  return text;
}

}  // namespace evenkeel
