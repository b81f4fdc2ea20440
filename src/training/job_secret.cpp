#include "training/job_secret.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/digest.h"
#include "base/error.h"
#include "base/whole_file.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWhatToSet =
    "set EVENKEEL_SECRET to the same text on every rank, or EVENKEEL_SECRET_FILE to a file with it (made by "
    "`openssl rand -hex 32`)";

std::string read_secret(const fs::path& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  require_data(file.valid(), "{}: the file of the ranks' secret cannot be opened: {}", path.string(),
               std::strerror(errno));
  struct stat status {};
  require_data(::fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode),
               "{}: expected a regular file with the ranks' secret, found something else", path.string());
  require_data((status.st_mode & (S_IRWXG | S_IRWXO)) == 0,
               "{}: expected a file that only its owner can read, as it holds the ranks' secret; found mode "
               "{:o} (chmod 600 corrects it)",
               path.string(), status.st_mode & 07777);
  char bytes[4096];
  const ssize_t got = ::read(file.get(), bytes, sizeof bytes);
  require_data(got >= 0 && got < static_cast<ssize_t>(sizeof bytes),
               "{}: expected a secret of less than {} bytes", path.string(), sizeof bytes);
  std::string secret(bytes, static_cast<size_t>(got));
  while (!secret.empty() && std::strchr(" \t\r\n", secret.back())) secret.pop_back();
  return secret;
}

fs::path folder_of_user() {
  for (const auto& [variable, below] : {std::pair{"XDG_CONFIG_HOME", ""}, {"HOME", ".config"}})
    if (const char* found = std::getenv(variable); found && *found == '/')
      return fs::path(found) / below / "evenkeel";
  throw DataError(fmt::format(
      "expected HOME, where the secret of ranks on one machine is kept, found none: {}", kWhatToSet));
}

}  // namespace

std::string secret_of_environment(const std::function<const char*(const char*)>& environment) {
  const char *text = environment("EVENKEEL_SECRET"), *file = environment("EVENKEEL_SECRET_FILE");
  if (!text && !file) return "";
  const std::string secret = text ? text : read_secret(file);
  require_data(secret.size() >= kShortestSecret,
               "{}: expected a secret of at least {} characters, found {}: `openssl rand -hex 32` makes one",
               text ? "EVENKEEL_SECRET" : file, kShortestSecret, secret.size());
  return secret;
}

std::string secret_of_user() {
  const fs::path folder = folder_of_user(), path = folder / "ranks.secret";
  std::error_code error;
  fs::create_directories(folder, error);
  if (!fs::exists(path, error)) {
    std::array<std::byte, 32> random;
    require_data(::getrandom(random.data(), random.size(), 0) == static_cast<ssize_t>(random.size()),
                 "the system gives no random numbers: {}", std::strerror(errno));
    // Under a name of its own first, and linked then: of several ranks that do this at once, one makes the secret.
    std::string temporary = (folder / ".ranks.secret-XXXXXX").string();
    const FileDescriptor file(::mkostemp(temporary.data(), O_CLOEXEC));  // of mode 600
    const std::string text = to_hex(random) + "\n";
    const bool written = file.valid() &&
                         ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
                         (::link(temporary.c_str(), path.c_str()) == 0 || errno == EEXIST);
    const int reason = errno;
    if (file.valid()) ::unlink(temporary.c_str());
    require_data(written, "{}: the secret of ranks on one machine cannot be kept there: {}; {}",
                 path.string(), std::strerror(reason), kWhatToSet);
  }
  std::string secret = read_secret(path);
  require_data(secret.size() >= kShortestSecret,
               "{}: expected a secret of at least {} characters, found {}: remove the file", path.string(),
               kShortestSecret, secret.size());
  return secret;
}

}  // namespace evenkeel
