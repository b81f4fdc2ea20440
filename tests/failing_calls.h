// Makes the calls by which files are changed fail or kill: the definitions here take the place of the C
// library's. For one source file of a test program. Calls that the library makes within itself are untouched.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace evenkeel::failing_calls {

enum class Fault { none, error, kill };

inline Fault fault = Fault::none;
inline int calls_before = 0;      // that still work
inline int error_number = 0;      // of Fault::error
inline bool lasting = false;      // every later call fails, too: a disk stays full
inline bool no_exchange = false;  // renameat2 is not of this file system
inline int calls_made = 0;
inline bool is_recording = false;
inline std::vector<std::string> names;  // of the calls since record()

inline void kill_self() { ::kill(::getpid(), SIGKILL); }

// True: this call is the one that fails, with errno set. Does not return where it kills.
inline bool fails(
    const char* name, const std::function<void()>& halfway = [] {}) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const int call = calls_made++;
  if (is_recording) names.emplace_back(name);
  if (fault == Fault::none || call < calls_before || (call > calls_before && !lasting)) return false;
  halfway();
  if (fault == Fault::kill) kill_self();
  errno = error_number;
  return true;
}

inline void arm(Fault kind, int after, int error = 0, bool lasts = false) {
  fault = kind;
  calls_before = after;
  error_number = error;
  lasting = lasts;
  calls_made = 0;
}
inline void disarm() {
  fault = Fault::none;
  is_recording = false;
}
inline void record() {
  is_recording = true;
  names.clear();
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

// Runs the function in a process of its own. 0: it returned; SIGKILL: it was killed; -1: anything else.
inline int run_apart(const std::function<void()>& function) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      function();
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) return WTERMSIG(status);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -1;
}

}  // namespace evenkeel::failing_calls

extern "C" {

ssize_t pwrite(int file, const void* bytes, size_t size, off_t offset) {
  using namespace evenkeel::failing_calls;
  static auto* const call = real<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  if (fails("pwrite", [&] { call(file, bytes, size / 2, offset); })) return -1;
  return call(file, bytes, size, offset);
}

int fsync(int file) {
  using namespace evenkeel::failing_calls;
  static auto* const call = real<int(int)>("fsync");
  return fails("fsync") ? -1 : call(file);
}

int ftruncate(int file, off_t size) noexcept {
  using namespace evenkeel::failing_calls;
  static auto* const call = real<int(int, off_t)>("ftruncate");
  return fails("ftruncate") ? -1 : call(file, size);
}

int rename(const char* from, const char* to) noexcept {
  using namespace evenkeel::failing_calls;
  static auto* const call = real<int(const char*, const char*)>("rename");
  return fails("rename") ? -1 : call(from, to);
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  using namespace evenkeel::failing_calls;
  static auto* const call = real<int(int, const char*, int, const char*, unsigned)>("renameat2");
  if (no_exchange) {
    errno = EINVAL;
    return -1;
  }
  return fails("renameat2") ? -1 : call(from_folder, from, to_folder, to, flags);
}

int mkdir(const char* path, mode_t mode) noexcept {
  using namespace evenkeel::failing_calls;
  static auto* const call = real<int(const char*, mode_t)>("mkdir");
  return fails("mkdir") ? -1 : call(path, mode);
}

// By which std::filesystem removes.
int unlinkat(int folder, const char* path, int flags) noexcept {
  using namespace evenkeel::failing_calls;
  static auto* const call = real<int(int, const char*, int)>("unlinkat");
  return fails("unlinkat") ? -1 : call(folder, path, flags);
}

}  // extern "C"
