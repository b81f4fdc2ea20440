// Ranks around rank 0, by TCP: a connection for data and one for alarms from every rank to rank 0. Whatever goes
// from rank to rank passes through rank 0: one address and one port for the whole job, and who is gone is known
// at once. It needs no library; between many ranks with large models, MPI is the faster way.
//
// All connections are authenticated by the job's secret (secure_channel.h). Strangers are dropped, and the ranks go on
// waiting for each other.
#include <arpa/inet.h>
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
#include "training/job_secret.h"
#include "training/ranks.h"
#include "training/secure_channel.h"

namespace evenkeel {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Result = SecureChannel::Result;

// How long ranks wait for each other at the start: EVENKEEL_JOIN_SECONDS.
constexpr int kJoinSeconds = 120;
// Between an alarm and the end of a process that does not come to its next exchange.
constexpr seconds kGrace(5);

// --- addresses ----------------------------------------------------------------------------------------------------

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
  Addresses(const std::string& name, int port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_ADDRCONFIG;
    error = ::getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &list);
  }
  ~Addresses() {
    if (list) ::freeaddrinfo(list);
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  // Whether none of them can be reached from another machine.
  bool only_this_machine() const {
    for (const addrinfo* address = list; address; address = address->ai_next)
      if (!is_loopback(*address->ai_addr)) return false;
    return list != nullptr;
  }
  static bool is_loopback(const sockaddr& address) {
    if (address.sa_family == AF_INET)
      return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == 127;
    return address.sa_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  }
  addrinfo* list = nullptr;
  int error = 0;
};

// Where rank 0 listens: only at the address that the others call, or at the one that was asked for.
const std::string& listening_address(const Launch& launch) {
  return launch.listen.empty() ? launch.address : launch.listen;
}

// Without a secret only ranks of one user on one machine come together.
std::string secret_of(const Launch& launch) {
  if (!launch.secret.empty()) return launch.secret;
  for (const std::string& name : {launch.address, listening_address(launch)}) {
    const Addresses addresses(name, launch.port);
    require_data(addresses.error == 0, "{}:{}: {}", name, launch.port, ::gai_strerror(addresses.error));
    require_data(
        addresses.only_this_machine(),
        "{}: expected a secret, as other machines can reach the ranks there: set EVENKEEL_SECRET to the "
        "same text of at least {} characters on every rank, or EVENKEEL_SECRET_FILE to a file with it "
        "(`openssl rand -hex 32` makes one); found none",
        name, kShortestSecret);
  }
  return secret_of_user();
}

// --- what is said -------------------------------------------------------------------------------------------------

// Answer to both calls of a rank once all are there, and every word on the alarm channel.
enum class Word : int32_t { welcome, refused, ended, abort };
struct Notice {
  Word word = Word::welcome;
  int32_t rank = 0;     // whose
  uint32_t length = 0;  // of the text that follows
};
constexpr size_t kLongestText = 4096;

void send_notice(SecureChannel& channel, Word word, int rank, const std::string& text = {}) {
  const Notice notice{word, rank, static_cast<uint32_t>(std::min(text.size(), kLongestText))};
  if (channel.send(std::as_bytes(std::span(&notice, 1))) == Result::done && notice.length > 0)
    channel.send(bytes_of(std::string_view(text).substr(0, notice.length)));
}

// receive(bytes) is how a frame comes.
template <class Receive>
Result receive_notice(const Receive& receive, Notice& notice, std::string& text) {
  Result result = receive(std::as_writable_bytes(std::span(&notice, 1)));
  if (result != Result::done || notice.length == 0) return result;
  text.resize(std::min<size_t>(notice.length, kLongestText));
  return receive(std::as_writable_bytes(std::span(text)));
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
    key_ = key_of_secret(secret_of(launch));
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
        for (SecureChannel& channel : alarm_)
          if (channel.valid()) send_notice(channel, Word::ended, rank_);
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
    if (rank_ != 0) return ask_first_rank(header, from, all, to, all);
    relay_.resize(all * static_cast<size_t>(size_));  // (from, to, bytes)
    std::memcpy(relay_.data(), from, all);
    for (int r = 1; r < size_; ++r) {
      receive_header(r, header);
      receive_from(r, relay_.data() + all * static_cast<size_t>(r), all);
    }
    std::vector<char> column(all);
    for (int r = 0; r < size_; ++r) {
      char* const rows = r == 0 ? to : column.data();
      for (size_t s = 0; s < static_cast<size_t>(size_); ++s)
        std::memcpy(rows + s * bytes, relay_.data() + s * all + static_cast<size_t>(r) * bytes, bytes);
      if (r > 0) send_to(r, rows, all);
    }
  }

  void gather(const void* send, void* receive, size_t bytes) override {
    if (bytes == 0) return;
    auto* to = static_cast<char*>(receive);
    const Header header = next(Verb::gather, bytes);
    const size_t all = bytes * static_cast<size_t>(size_);
    if (rank_ != 0) return ask_first_rank(header, send, bytes, to, all);
    std::memcpy(to, send, bytes);
    for (int r = 1; r < size_; ++r) {
      receive_header(r, header);
      receive_from(r, to + bytes * static_cast<size_t>(r), bytes);
    }
    for (int r = 1; r < size_; ++r) send_to(r, to, all);
  }

  void abort(const std::string& cause, int) noexcept override {
    std::lock_guard lock(mutex_);
    if (!cause_.empty()) return;  // everyone knows of another one
    cause_ = cause.empty() ? "no cause given" : cause;
    for (SecureChannel& channel : alarm_)
      if (channel.valid()) send_notice(channel, Word::abort, rank_, cause_);
  }

 private:
  void send_to(int rank, const void* bytes, size_t count) {
    const Bytes frame(static_cast<const std::byte*>(bytes), count);
    if (data_[static_cast<size_t>(rank)].send(frame) != Result::done) lost(rank);
  }
  void receive_from(int rank, void* bytes, size_t count) {
    const Result result =
        data_[static_cast<size_t>(rank)].receive(std::span(static_cast<std::byte*>(bytes), count));
    if (result == Result::gone) lost(rank);
    if (result == Result::done) return;
    abort(forged(rank), 3);  // the others end too, whoever catches this
    throw DataError(forged(rank));
  }
  static std::string forged(int rank) {
    return fmt::format(
        "authentication failed: what came from rank {} was altered on its way, or is not from it", rank);
  }

  Header next(Verb verb, size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      require_data(cause_.empty(), "{}", cause_);
    }
    return {verb, number_++, bytes};
  }

  // What every other rank does in a collective: sends its part, receives what the first rank makes of all.
  void ask_first_rank(const Header& header, const void* send, size_t bytes, void* receive, size_t all) {
    send_to(0, &header, sizeof header);
    send_to(0, send, bytes);
    receive_from(0, receive, all);
  }
  void receive_header(int rank, const Header& expected) {
    Header found{};
    receive_from(rank, &found, sizeof found);
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
        watched.push_back({alarm_[n].socket(), POLLIN, 0});
        ranks.push_back(static_cast<int>(n));  // not rank 0: n is 0, and so is the rank at the other end
      }
    for (;;) {
      if (::poll(watched.data(), watched.size(), -1) < 0) continue;  // EINTR
      if (watched[0].revents) return;
      for (size_t n = 1; n < watched.size(); ++n) {
        if (!watched[n].revents) continue;
        Notice notice;
        std::string text;
        const int rank = ranks[n - 1];
        SecureChannel& channel = alarm_[static_cast<size_t>(rank)];
        const Result result =
            receive_notice([&](auto bytes) { return channel.receive(bytes); }, notice, text);
        if (result == Result::done && notice.word == Word::ended) {
          watched[n].fd = -1;  // poll passes over it
          continue;
        }
        if (result == Result::gone)
          text = fmt::format("rank {} ended without a word: killed, crashed or out of memory", rank);
        else if (result != Result::done)
          text = forged(rank);
        else if (notice.rank == rank)  // rank 0 passes on what others said, already with its rank
          text = fmt::format("rank {} ended the job: {}", rank, text);
        if (raise_alarm(rank, text)) return;
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
          send_notice(alarm_[n], Word::abort, rank, cause_);
      for (const SecureChannel& channel : data_)
        if (channel.valid()) ::shutdown(channel.socket(), SHUT_RDWR);
      changed_.notify_all();
    }
    if (changed_.wait_for(lock, kGrace, [this] { return ended_; })) return true;
    // Files of a run are there whole or not at all, so that this is as harmless as kill -9.
    fmt::print(stderr, "evenkeel: {}\n", cause_);
    std::fflush(stderr);
    std::_Exit(3);
  }

  // --- the beginning

  FileDescriptor listen(const Launch& launch) {
    const Addresses addresses(listening_address(launch), launch.port);
    require_data(addresses.error == 0, "{}: {}", place_, ::gai_strerror(addresses.error));
    int error = 0;
    for (const addrinfo* address = addresses.list; address; address = address->ai_next) {
      FileDescriptor socket(
          ::socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, address->ai_protocol));
      if (!socket.valid()) continue;
      const int yes = 1;
      ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      if (::bind(socket.get(), address->ai_addr, address->ai_addrlen) == 0 &&
          ::listen(socket.get(), 2 * size_ + kMostStrangers) == 0) {
        listens_within_ = Addresses::is_loopback(*address->ai_addr);
        return socket;
      }
      error = errno;
    }
    throw DataError(fmt::format("{}: rank 0 cannot listen there: {}", place_, std::strerror(error)));
  }

  // Whoever calls and has proved nothing yet waits here, beside all others, and not for long.
  struct Waiting {
    Caller caller;
    Clock::time_point until;
  };
  static constexpr seconds kPatience{5};  // with a caller that says nothing
  static constexpr int kMostStrangers = 64;

  void receive_all_ranks(const Launch& launch, Clock::time_point deadline, int wait) {
    const FileDescriptor listener = listen(launch);
    std::vector<Waiting> callers;
    std::string refused;
    int missing = 2 * (size_ - 1), failed = 0;
    while (missing > 0 && refused.empty()) {
      if (Clock::now() >= deadline) {
        refused = absent_ranks(launch, wait, failed);
        break;
      }
      std::vector<pollfd> ready = {{listener.get(), POLLIN, 0}};
      Clock::time_point next = deadline;
      for (const Waiting& waiting : callers) {
        ready.push_back({waiting.caller.socket(), POLLIN, 0});
        next = std::min(next, waiting.until);
      }
      if (::poll(ready.data(), ready.size(), milliseconds_left(next)) < 0) continue;  // EINTR
      std::vector<Waiting> still;
      for (size_t n = 0; n < callers.size(); ++n) {
        const Caller::State state =
            ready[n + 1].revents ? callers[n].caller.advance(key_) : Caller::State::waiting;
        failed += state == Caller::State::failed;
        if (state == Caller::State::waiting && Clock::now() < callers[n].until)
          still.push_back(std::move(callers[n]));
        else if (state == Caller::State::proved && refused.empty() && seat(callers[n].caller, refused))
          --missing;
      }
      callers = std::move(still);
      if (!ready[0].revents) continue;
      FileDescriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket.valid()) continue;
      set_options(socket.get());
      // The one that has been silent longest makes room.
      if (callers.size() >= 2 * static_cast<size_t>(size_) + kMostStrangers) callers.erase(callers.begin());
      callers.push_back({Caller(std::move(socket)), Clock::now() + kPatience});
    }
    for (SecureChannel& channel : data_)
      if (channel.valid()) send_notice(channel, refused.empty() ? Word::welcome : Word::refused, 0, refused);
    require_data(refused.empty(), "{}", refused);
  }

  // A rank that knows the secret takes its place. False: there is none for it, and the job cannot be.
  bool seat(Caller& caller, std::string& refused) {
    const Hello hello = caller.hello();
    SecureChannel channel = caller.open(key_);
    if (hello.size != size_ || hello.rank <= 0 || hello.rank >= size_) {
      refused = fmt::format("{}: expected ranks 1 to {} of {}, found rank {} of {}", place_, size_ - 1, size_,
                            hello.rank, hello.size);
    } else {
      SecureChannel& place =
          (hello.channel == Channel::data ? data_ : alarm_)[static_cast<size_t>(hello.rank)];
      if (!place.valid()) {
        place = std::move(channel);
        return true;
      }
      refused = fmt::format("{}: expected each rank once, found rank {} twice", place_, hello.rank);
    }
    send_notice(channel, Word::refused, 0, refused);
    return false;
  }

  std::string absent_ranks(const Launch& launch, int wait, int failed) const {
    std::string absent;
    for (int r = 1; r < size_; ++r)
      if (!alarm_[static_cast<size_t>(r)].valid() || !data_[static_cast<size_t>(r)].valid())
        absent += fmt::format("{}{}", absent.empty() ? "" : ", ", r);
    std::string words = fmt::format("{}: expected {} ranks within {} seconds, without these: {}", place_,
                                    size_, wait, absent);
    if (failed > 0)
      words += fmt::format(
          "; authentication failed for {} who called: the secret must be the same on every rank", failed);
    if (listens_within_ && !Addresses(launch.address, launch.port).only_this_machine())
      words += "; rank 0 listens where other machines cannot reach it";
    return words;
  }

  // One attempt. On failure none, and why.
  static FileDescriptor connect(const Launch& launch, std::string& reason) {
    const Addresses addresses(launch.address, launch.port);
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

  // Calls until rank 0 answers: it may start later, or have had too many callers at once. Gives up when something comes
  // from `other`, a socket (-1: none).
  SecureChannel call(const Launch& launch, Channel channel, Clock::time_point deadline, int wait,
                     int other = -1) const {
    constexpr int kPause = 50;  // ms between attempts
    Hello hello = own_;
    hello.channel = channel;
    for (std::string reason;;) {
      FileDescriptor socket = connect(launch, reason);
      Result result = Result::gone;
      SecureChannel opened;
      if (socket.valid()) {
        reason = "the connection was closed";
        result = SecureChannel::call(std::move(socket), hello, key_, deadline + kGrace, opened);
      }
      if (result == Result::done) return opened;
      require_data(
          result != Result::forged,
          "rank {}: authentication failed at {}: rank 0 has another secret than this rank, or what they "
          "said was altered; EVENKEEL_SECRET must be the same on every rank",
          rank_, place_);
      require_data(result != Result::stranger, "rank {}: expected rank 0 of {} at {}, found something else",
                   rank_, size_, place_);
      pollfd word{other, POLLIN, 0};
      const bool told = ::poll(&word, 1, std::min(kPause, milliseconds_left(deadline))) > 0;
      require_data(!told && Clock::now() < deadline,
                   "rank {}: rank 0 did not answer at {} within {} seconds: {}", rank_, place_, wait, reason);
    }
  }

  void join(const Launch& launch, Clock::time_point deadline, int wait) {
    data_[0] = call(launch, Channel::data, deadline, wait);
    std::string no_alarm;
    try {
      alarm_[0] = call(launch, Channel::alarm, deadline, wait, data_[0].socket());
    } catch (const DataError& error) {  // rank 0 may have given up meanwhile; then its answer says why
      pollfd answer{data_[0].socket(), POLLIN, 0};
      if (::poll(&answer, 1, 0) <= 0) throw;
      no_alarm = error.what();
    }
    // Rank 0 says what it has to say at the end of its own patience at the latest.
    Notice notice;
    std::string text;
    const Result result = receive_notice(
        [&](auto bytes) { return data_[0].receive_until(deadline + kGrace, bytes); }, notice, text);
    require_data(result != Result::forged, "rank {}: {}", rank_, forged(0));
    require_data(result == Result::done,
                 "rank {}: expected rank 0 of {} at {}, found that it gave no answer{}", rank_, size_, place_,
                 no_alarm.empty() ? "" : ": " + no_alarm);
    require_data(notice.word == Word::welcome, "{}", text);
    require_data(alarm_[0].valid(), "{}", no_alarm);
  }

  const int rank_, size_;
  const std::string place_;  // address:port, for messages
  Hello own_;
  Digest key_{};         // of the job's secret
  uint32_t number_ = 0;  // of the next exchange
  // Rank 0: by rank, its own empty. Others: one, to rank 0.
  std::vector<SecureChannel> data_, alarm_;
  bool listens_within_ = false;  // rank 0: at an address of this machine alone
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
