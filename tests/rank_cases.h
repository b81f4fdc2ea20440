// Jobs of several ranks for tests: as threads of this process, or as processes.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "training/ranks.h"

namespace evenkeel {

// A socket at a port of its own on the loopback address. Bound and not yet listening: nobody else gets the port.
struct BoundSocket {
  BoundSocket() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (bind(number, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        getsockname(number, reinterpret_cast<sockaddr*>(&address), &size) != 0)
      std::abort();
    port = ntohs(address.sin_port);
  }
  ~BoundSocket() { close(number); }
  BoundSocket(const BoundSocket&) = delete;
  BoundSocket& operator=(const BoundSocket&) = delete;
  int number = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int port = 0;
};
// Free a moment ago; the system hands out others before it comes back to this one.
inline int free_port() { return BoundSocket().port; }

// As a launcher makes it for each job. A test has one for all of its jobs.
inline const std::string& job_secret() {
  static const std::string secret = [] {
    std::random_device random;
    return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
  }();
  return secret;
}

inline Launch launch_of(int rank, int size, int port) {
  Launch launch;
  launch.by = Launch::By::environment;
  launch.rank = launch.local_rank = rank;
  launch.size = launch.local_size = size;
  launch.address = "127.0.0.1";
  launch.port = port;
  launch.secret = job_secret();
  return launch;
}

// body(ranks) on every rank, a thread each. What each of them threw: "" for nothing.
template <class Body>
std::vector<std::string> run_ranks(int size, const Body& body) {
  std::vector<std::string> thrown(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  const int port = free_port();
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      std::shared_ptr<Ranks> ranks;
      try {
        ranks = Ranks::join(launch_of(rank, size, port), "test");
        body(ranks);
      } catch (const std::exception& error) {
        thrown[static_cast<size_t>(rank)] = error.what();
        if (ranks) ranks->abort(error.what(), 3);
      }
    });
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

// A run's config.toml with the other setting of shard_optimizer.
inline std::string with_shard_turned(std::string settings) {
  const std::string on = "shard_optimizer = true", off = "shard_optimizer = false";
  const size_t found = settings.find(on);
  const std::string& before = found == std::string::npos ? off : on;
  return settings.replace(settings.find(before), before.size(), &before == &on ? off : on);
}

// A program of its own, with these words and these variables on top of the environment.
class Process {
 public:
  Process(const std::vector<std::string>& words, const std::map<std::string, std::string>& variables,
          const std::filesystem::path& output)
      : output_(output) {
    std::vector<char*> pointers;
    for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
    pointers.push_back(nullptr);
    const std::string out = output.string() + ".out", err = output.string() + ".err";
    pid_ = fork();
    if (pid_ != 0) return;
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    const int to = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666),
              errors = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (to < 0 || errors < 0 || dup2(to, STDOUT_FILENO) < 0 || dup2(errors, STDERR_FILENO) < 0) _exit(98);
    execvp(pointers[0], pointers.data());
    _exit(99);
  }
  Process(Process&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), code_(other.code_), output_(other.output_) {}
  Process& operator=(Process&&) = delete;
  ~Process() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      wait();
    }
  }

  pid_t pid() const { return pid_; }
  // The exit code, or minus the signal that ended it.
  int wait() {
    if (pid_ <= 0) return code_;
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  std::string out() const { return read(".out"); }
  std::string err() const { return read(".err"); }

 private:
  std::string read(const char* ending) const {
    std::string text;
    if (std::FILE* file = std::fopen((output_.string() + ending).c_str(), "r")) {
      char buffer[4096];
      for (size_t count; (count = fread(buffer, 1, sizeof buffer, file)) > 0;) text.append(buffer, count);
      std::fclose(file);
    }
    return text;
  }
  pid_t pid_ = -1;
  int code_ = -1;
  std::filesystem::path output_;
};

}  // namespace evenkeel
