#include "cli/child_process.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/error.h"

namespace evenkeel::cli {
namespace {

// In memory that both processes share. A child that dies writes nothing more, so its parent reads whole words.
struct Notes {
  std::atomic<bool> returned = false;
  char doing[320] = {};
};
Notes* notes = nullptr;

Notes* shared_notes() {
  void* const memory =
      mmap(nullptr, sizeof(Notes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require_data(memory != MAP_FAILED, "no memory for a child process: {}", std::strerror(errno));
  return new (memory) Notes;
}

int status_of(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0)
    require_data(errno == EINTR, "a child process cannot be waited for: {}", std::strerror(errno));
  return status;
}

// As if this process had made the error; its own core would show nothing.
[[noreturn]] void end_by(int signal) {
  const rlimit no_core{};
  setrlimit(RLIMIT_CORE, &no_core);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
  std::exit(128 + signal);  // a signal that ends nobody
}

}  // namespace

void doing(std::string_view what) {
  if (!notes) return;
  const size_t length = std::min(what.size(), sizeof notes->doing - 1);
  std::memcpy(notes->doing, what.data(), length);
  notes->doing[length] = 0;
}

int in_child_process(const std::function<int()>& work) {
  notes = shared_notes();
  std::fflush(nullptr);  // or both would print it
  const pid_t child = fork();
  require_data(child >= 0, "a child process cannot be started: {}", std::strerror(errno));
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct Returned {
      ~Returned() { notes->returned = true; }  // by an exception too, which has words of its own
    } returned;
    return work();
  }
  const int status = status_of(child);
  if (WIFSIGNALED(status)) {
    fmt::print(stderr, "evenkeel conform: ended by signal {} ({}) when asked to {}\n", WTERMSIG(status),
               strsignal(WTERMSIG(status)), notes->doing);
    end_by(WTERMSIG(status));
  }
  require_data(notes->returned,
               "expected a return, found a call that ended the process (exit code {}) when asked to {}",
               WEXITSTATUS(status), notes->doing);
  return WEXITSTATUS(status);
}

}  // namespace evenkeel::cli
