// Ranks around rank 0, by TCP: a connection for data and one for alarms from every rank to rank 0. Whatever goes
// from rank to rank passes through rank 0: one address and one port for the whole job, and who is gone is known
// at once. It needs no library; between many ranks with large models, MPI is the faster way.
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/whole_file.h"
#include "training/ranks.h"

namespace evenkeel {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

// How long ranks wait for each other at the start: EVENKEEL_JOIN_SECONDS.
constexpr int kJoinSeconds = 120;
// Between an alarm and the end of a process that does not come to its next exchange.
constexpr seconds kGrace(5);

int milliseconds_left(Clock::time_point deadline) {
  return static_cast<int>(std::clamp<int64_t>(
      std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count(), 0, 1 << 30));
}

// --- bytes over sockets: false where the other side is gone -------------------------------------------------------

bool send_all(int socket, const void* bytes, size_t count) {
  for (auto* at = static_cast<const char*>(bytes); count > 0;) {
    const ssize_t sent = ::send(socket, at, count, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    count -= static_cast<size_t>(sent);
  }
  return true;
}

bool receive_all(int socket, void* bytes, size_t count) {
  for (auto* at = static_cast<char*>(bytes); count > 0;) {
    const ssize_t received = ::recv(socket, at, count, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) return false;
    at += received;
    count -= static_cast<size_t>(received);
  }
  return true;
}

// The same, but not for ever.
bool receive_all_until(Clock::time_point deadline, int socket, void* bytes, size_t count) {
  for (auto* at = static_cast<char*>(bytes); count > 0;) {
    pollfd ready{socket, POLLIN, 0};
    const int found = ::poll(&ready, 1, milliseconds_left(deadline));
    if (found < 0 && errno == EINTR) continue;
    if (found <= 0) return false;
    const ssize_t received = ::recv(socket, at, count, MSG_DONTWAIT);
    if (received < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (received <= 0) return false;
    at += received;
    count -= static_cast<size_t>(received);
  }
  return true;
}

void set_options(int socket) {
  const auto set = [socket](int level, int option, int value) {
    ::setsockopt(socket, level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  // A machine that is gone says nothing: asked after 10 seconds of silence, three times, 5 seconds apart.
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

struct Addresses {
  // nullptr: every address of this machine.
  Addresses(const char* name, int port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = name ? AI_ADDRCONFIG : AI_PASSIVE;
    error = ::getaddrinfo(name, std::to_string(port).c_str(), &hints, &list);
  }
  ~Addresses() {
    if (list) ::freeaddrinfo(list);
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  addrinfo* list = nullptr;
  int error = 0;
};

// --- what is said -------------------------------------------------------------------------------------------------

enum class Channel : int32_t { data, alarm };

struct Hello {
  char magic[8] = {'E', 'K', 'R', 'A', 'N', 'K', 'S', '1'};
  int32_t rank = 0, size = 0;
  Channel channel = Channel::data;

  bool is_ours() const { return std::memcmp(magic, Hello().magic, sizeof magic) == 0; }
};

// Answer to both Hellos once all are there, and every word on the alarm channel.
enum class Word : int32_t { welcome, refused, ended, abort };
struct Notice {
  char magic[8] = {'E', 'K', 'N', 'O', 'T', 'I', 'C', 'E'};
  Word word = Word::welcome;
  int32_t rank = 0;     // whose
  uint32_t length = 0;  // of the text that follows
  uint32_t unused = 0;
};
constexpr size_t kLongestText = 4096;

bool send_notice(int socket, Word word, int rank, const std::string& text = {}) {
  Notice notice;
  notice.word = word;
  notice.rank = rank;
  notice.length = static_cast<uint32_t>(std::min(text.size(), kLongestText));
  std::string bytes(reinterpret_cast<const char*>(&notice), sizeof notice);
  bytes.append(text, 0, notice.length);
  return send_all(socket, bytes.data(), bytes.size());
}

// Before every exchange: ranks that do different things must not take each other's bytes.
enum class Verb : uint32_t { exchange = 1, gather };
struct Header {
  Verb verb;
  uint32_t number;  // of the exchange
  uint64_t bytes;
  friend bool operator==(const Header&, const Header&) = default;
};

// ------------------------------------------------------------------------------------------------------------------

class TcpLink final : public Link {
 public:
  explicit TcpLink(const Launch& launch)
      : rank_(launch.rank), size_(launch.size), place_(fmt::format("{}:{}", launch.address, launch.port)) {
    own_.rank = rank_;
    own_.size = size_;
    int wait = kJoinSeconds;
    if (const char* text = std::getenv("EVENKEEL_JOIN_SECONDS")) wait = std::clamp(std::atoi(text), 1, 86400);
    const Clock::time_point deadline = Clock::now() + seconds(wait);
    data_.resize(static_cast<size_t>(rank_ == 0 ? size_ : 1));
    alarm_.resize(data_.size());
    if (rank_ == 0)
      receive_all_ranks(launch, deadline, wait);
    else
      join(launch, deadline, wait);
    int ends[2];
    const bool piped = ::pipe(ends) == 0;  // by itself: arguments have no order, and errno is one
    require_data(piped, "cannot make a pipe: {}", std::strerror(errno));
    wake_read_ = FileDescriptor(ends[0]);
    wake_write_ = FileDescriptor(ends[1]);
    watcher_ = std::thread([this] { watch(); });
  }

  ~TcpLink() override {
    {
      std::lock_guard lock(mutex_);
      if (cause_.empty())
        for (const FileDescriptor& socket : alarm_)
          if (socket.valid()) send_notice(socket.get(), Word::ended, rank_);
      ended_ = true;
    }
    changed_.notify_all();
    while (::write(wake_write_.get(), "", 1) < 0 && errno == EINTR) {
    }
    watcher_.join();
  }

  void exchange(const void* send, void* receive, size_t bytes) override {
    if (bytes == 0) return;
    const auto* from = static_cast<const char*>(send);
    auto* to = static_cast<char*>(receive);
    const Header header = next(Verb::exchange, bytes);
    const size_t all = bytes * static_cast<size_t>(size_);
    if (rank_ != 0) {
      if (!send_all(data_[0].get(), &header, sizeof header) || !send_all(data_[0].get(), from, all) ||
          !receive_all(data_[0].get(), to, all))
        lost(0);
      return;
    }
    relay_.resize(all * static_cast<size_t>(size_));  // (from, to, bytes)
    std::memcpy(relay_.data(), from, all);
    for (int r = 1; r < size_; ++r) {
      receive_header(r, header);
      if (!receive_all(data(r), relay_.data() + all * static_cast<size_t>(r), all)) lost(r);
    }
    std::vector<char> column(all);
    for (int r = 0; r < size_; ++r) {
      char* const rows = r == 0 ? to : column.data();
      for (size_t s = 0; s < static_cast<size_t>(size_); ++s)
        std::memcpy(rows + s * bytes, relay_.data() + s * all + static_cast<size_t>(r) * bytes, bytes);
      if (r > 0 && !send_all(data(r), rows, all)) lost(r);
    }
  }

  void gather(const void* send, void* receive, size_t bytes) override {
    if (bytes == 0) return;
    auto* to = static_cast<char*>(receive);
    const Header header = next(Verb::gather, bytes);
    const size_t all = bytes * static_cast<size_t>(size_);
    if (rank_ != 0) {
      if (!send_all(data_[0].get(), &header, sizeof header) || !send_all(data_[0].get(), send, bytes) ||
          !receive_all(data_[0].get(), to, all))
        lost(0);
      return;
    }
    std::memcpy(to, send, bytes);
    for (int r = 1; r < size_; ++r) {
      receive_header(r, header);
      if (!receive_all(data(r), to + bytes * static_cast<size_t>(r), bytes)) lost(r);
    }
    for (int r = 1; r < size_; ++r)
      if (!send_all(data(r), to, all)) lost(r);
  }

  void abort(const std::string& cause, int) noexcept override {
    std::lock_guard lock(mutex_);
    if (!cause_.empty()) return;  // everyone knows of another one
    cause_ = cause.empty() ? "no cause given" : cause;
    for (const FileDescriptor& socket : alarm_)
      if (socket.valid()) send_notice(socket.get(), Word::abort, rank_, cause_);
  }

 private:
  int data(int rank) const { return data_[static_cast<size_t>(rank)].get(); }

  Header next(Verb verb, size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      require_data(cause_.empty(), "{}", cause_);
    }
    return {verb, number_++, bytes};
  }

  void receive_header(int rank, const Header& expected) {
    Header found{};
    if (!receive_all(data(rank), &found, sizeof found)) lost(rank);
    require_data(found == expected,
                 "[ranks] rank {} is out of step: expected exchange {} of kind {} and {} bytes, found {} of "
                 "kind {} and {}",
                 rank, expected.number, static_cast<uint32_t>(expected.verb), expected.bytes, found.number,
                 static_cast<uint32_t>(found.verb), found.bytes);
  }

  // The connection of a rank is gone: the alarm channel has the reason, or will have it in a moment.
  [[noreturn]] void lost(int rank) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kGrace, [this] { return !cause_.empty(); });
    throw DataError(cause_.empty() ? fmt::format("rank {} left the job before its end", rank) : cause_);
  }

  // --- alarms

  // Ends when this object does, or ends the process: a rank in the middle of a long step is not waited for.
  void watch() {
    std::vector<int> ranks;  // of the entries of `watched` behind the first
    std::vector<pollfd> watched = {{wake_read_.get(), POLLIN, 0}};
    for (size_t n = 0; n < alarm_.size(); ++n)
      if (alarm_[n].valid()) {
        watched.push_back({alarm_[n].get(), POLLIN, 0});
        ranks.push_back(static_cast<int>(n));  // not rank 0: n is 0, and so is the rank at the other end
      }
    for (;;) {
      if (::poll(watched.data(), watched.size(), -1) < 0) continue;  // EINTR
      if (watched[0].revents) return;
      for (size_t n = 1; n < watched.size(); ++n) {
        if (!watched[n].revents) continue;
        Notice notice;
        const int rank = ranks[n - 1];
        if (!receive_all(watched[n].fd, &notice, sizeof notice) ||
            std::memcmp(notice.magic, Notice().magic, sizeof notice.magic) != 0) {
          if (raise_alarm(
                  rank, fmt::format("rank {} ended without a word: killed, crashed or out of memory", rank)))
            return;
        } else if (notice.word == Word::ended) {
          watched[n].fd = -1;  // poll passes over it
        } else {
          std::string text(std::min<size_t>(notice.length, kLongestText), '\0');
          receive_all(watched[n].fd, text.data(), text.size());
          // Rank 0 passes on what others said, already with its rank.
          if (raise_alarm(rank,
                          notice.rank == rank ? fmt::format("rank {} ended the job: {}", rank, text) : text))
            return;
        }
      }
    }
  }

  // True: this object is being destroyed, and all is in order.
  bool raise_alarm(int rank, const std::string& cause) {
    std::unique_lock lock(mutex_);
    if (ended_) return true;
    if (cause_.empty()) {
      cause_ = cause;
      for (size_t n = 0; n < alarm_.size(); ++n)
        if (rank_ == 0 && alarm_[n].valid() && static_cast<int>(n) != rank)
          send_notice(alarm_[n].get(), Word::abort, rank, cause_);
      for (const FileDescriptor& socket : data_)
        if (socket.valid()) ::shutdown(socket.get(), SHUT_RDWR);
      changed_.notify_all();
    }
    if (changed_.wait_for(lock, kGrace, [this] { return ended_; })) return true;
    // Files of a run are there whole or not at all, so that this is as harmless as kill -9.
    fmt::print(stderr, "evenkeel: {}\n", cause_);
    std::fflush(stderr);
    std::_Exit(3);
  }

  // --- the beginning

  // A machine's own name may stand for its loopback address, where others cannot reach it: only who asks for
  // loopback gets no more.
  FileDescriptor listen(const Launch& launch) const {
    const std::string& name = launch.address;
    const bool loopback = name == "localhost" || name.starts_with("127.") || name == "::1";
    const Addresses addresses(loopback ? name.c_str() : nullptr, launch.port);
    require_data(addresses.error == 0, "{}: {}", place_, ::gai_strerror(addresses.error));
    int error = 0;
    for (const addrinfo* address = addresses.list; address; address = address->ai_next) {
      FileDescriptor socket(
          ::socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, address->ai_protocol));
      if (!socket.valid()) continue;
      const int yes = 1;
      ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      if (::bind(socket.get(), address->ai_addr, address->ai_addrlen) == 0 &&
          ::listen(socket.get(), 2 * size_) == 0)
        return socket;
      error = errno;
    }
    throw DataError(fmt::format("{}: rank 0 cannot listen there: {}", place_, std::strerror(error)));
  }

  void receive_all_ranks(const Launch& launch, Clock::time_point deadline, int wait) {
    const FileDescriptor listener = listen(launch);
    std::string refused;
    for (int missing = 2 * (size_ - 1); missing > 0 && refused.empty();) {
      pollfd ready{listener.get(), POLLIN, 0};
      const int found = ::poll(&ready, 1, milliseconds_left(deadline));
      if (found < 0 && errno == EINTR) continue;
      if (found <= 0) {
        std::string absent;
        for (int r = 1; r < size_; ++r)
          if (!alarm_[static_cast<size_t>(r)].valid() || !data_[static_cast<size_t>(r)].valid())
            absent += fmt::format("{}{}", absent.empty() ? "" : ", ", r);
        refused = fmt::format("{}: expected {} ranks within {} seconds, without these: {}", place_, size_,
                              wait, absent);
        break;
      }
      FileDescriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket.valid()) continue;
      set_options(socket.get());
      Hello hello;
      constexpr seconds kPatience(5);  // with a stranger that says nothing
      if (!receive_all_until(std::min(deadline, Clock::now() + kPatience), socket.get(), &hello,
                             sizeof hello) ||
          !hello.is_ours())
        continue;
      if (hello.size != size_ || hello.rank <= 0 || hello.rank >= size_)
        refused = fmt::format("{}: expected ranks 1 to {} of {}, found rank {} of {}", place_, size_ - 1,
                              size_, hello.rank, hello.size);
      else {
        auto& sockets = hello.channel == Channel::data ? data_ : alarm_;
        FileDescriptor& place = sockets[static_cast<size_t>(hello.rank)];
        if (!place.valid()) {
          place = std::move(socket);
          --missing;
          continue;
        }
        refused = fmt::format("{}: expected each rank once, found rank {} twice", place_, hello.rank);
      }
      send_notice(socket.get(), Word::refused, 0, refused);
    }
    for (const FileDescriptor& socket : data_)
      if (socket.valid())
        send_notice(socket.get(), refused.empty() ? Word::welcome : Word::refused, 0, refused);
    require_data(refused.empty(), "{}", refused);
  }

  // One attempt. On failure none, and why.
  static FileDescriptor connect(const Launch& launch, std::string& reason) {
    const Addresses addresses(launch.address.c_str(), launch.port);
    if (addresses.error != 0) reason = ::gai_strerror(addresses.error);
    for (const addrinfo* address = addresses.list; address; address = address->ai_next) {
      FileDescriptor socket(
          ::socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, address->ai_protocol));
      if (socket.valid() && ::connect(socket.get(), address->ai_addr, address->ai_addrlen) == 0) {
        set_options(socket.get());
        return socket;
      }
      reason = std::strerror(errno);
    }
    return {};
  }

  void join(const Launch& launch, Clock::time_point deadline, int wait) {
    constexpr int kPause = 50;  // ms between attempts: rank 0 may start later
    std::string reason;
    while (!(data_[0] = connect(launch, reason)).valid()) {
      require_data(Clock::now() < deadline, "rank {}: rank 0 did not answer at {} within {} seconds: {}",
                   rank_, place_, wait, reason);
      ::poll(nullptr, 0, std::min(kPause, milliseconds_left(deadline)));
    }
    send_all(data_[0].get(), &own_, sizeof own_);
    // Fails where rank 0 has given up meanwhile; then the answer to the first one says why.
    alarm_[0] = connect(launch, reason);
    own_.channel = Channel::alarm;
    if (alarm_[0].valid()) send_all(alarm_[0].get(), &own_, sizeof own_);
    // Rank 0 says what it has to say at the end of its own patience at the latest.
    Notice notice;
    const bool answered = receive_all_until(deadline + kGrace, data_[0].get(), &notice, sizeof notice);
    require_data(answered && std::memcmp(notice.magic, Notice().magic, sizeof notice.magic) == 0,
                 "rank {}: expected rank 0 of {} at {}, found {}", rank_, size_, place_,
                 answered ? "something else" : "that it gave no answer");
    std::string text(std::min<size_t>(notice.length, kLongestText), '\0');
    receive_all_until(deadline + kGrace, data_[0].get(), text.data(), text.size());
    require_data(notice.word == Word::welcome, "{}", text);
  }

  const int rank_, size_;
  const std::string place_;  // address:port, for messages
  Hello own_;
  uint32_t number_ = 0;  // of the next exchange
  // Rank 0: by rank, its own empty. Others: one, to rank 0.
  std::vector<FileDescriptor> data_, alarm_;
  std::vector<char> relay_;

  std::thread watcher_;
  FileDescriptor wake_read_, wake_write_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string cause_;   // why the job ends; empty: it does not
  bool ended_ = false;  // this object's
};

}  // namespace

std::unique_ptr<Link> connect_tcp(const Launch& launch) { return std::make_unique<TcpLink>(launch); }

}  // namespace evenkeel
