#include "report/http_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <climits>
#include <cstring>
#include <deque>

#include "base/error.h"
#include "base/text.h"

namespace evenkeel {
namespace {

using std::chrono::milliseconds;

// How long a refused client may continue to send: if closed at once, it would lose our answer together with its request.
constexpr milliseconds kFarewell(1000);

const char* reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 304:
      return "Not Modified";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 421:
      return "Misdirected Request";
    case 431:
      return "Request Header Fields Too Large";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Internal Server Error";
  }
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24) == 127;
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

std::string lower_case(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// An address, which nobody can have point elsewhere; 127.0.0.1.example is a name.
bool is_number(const std::string& host) {
  in6_addr unused;
  if (host.starts_with('[') && host.ends_with(']'))
    return ::inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), &unused) == 1;
  return ::inet_pton(AF_INET, host.c_str(), &unused) == 1;
}

// "W/" and lists, as caches send them.
bool has_tag(std::string_view if_none_match, const std::string& tag) {
  return !tag.empty() && if_none_match.find('"' + tag + '"') != std::string_view::npos;
}

}  // namespace

struct HttpServer::Connection {
  enum class State {
    reading,    // for a request
    pending,    // the handler has no answer yet
    answering,  // `out` is on its way
    streaming,  // `out`, and what is published
    draining,   // refused: listens until the client has hung up
    closed,
  };
  FileDescriptor socket;
  State state = State::reading;
  HttpClock::time_point deadline, arrived;
  std::string in;
  HttpRequest request;
  std::deque<std::shared_ptr<const std::string>> out;
  size_t sent = 0;  // of out.front()
  size_t waiting = 0;
  bool last = false;  // nothing more is answered on this connection

  void put(std::shared_ptr<const std::string> bytes) {
    if (!bytes || bytes->empty()) return;
    waiting += bytes->size();
    out.push_back(std::move(bytes));
  }
};

HttpServer::HttpServer(const std::string& address, int port, const Limits& limits, Handler handler)
    : limits_(limits), handler_(std::move(handler)) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  const int found = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, ::freeaddrinfo);
  require_data(found == 0 && list, "cannot listen at '{}': expected an address of this machine: {}",
               shown(address), ::gai_strerror(found));
  // "localhost" has two addresses; the older protocol is the one that every machine has.
  const addrinfo* chosen = list;
  for (const addrinfo* at = list; at; at = at->ai_next)
    if (at->ai_family == AF_INET) {
      chosen = at;
      break;
    }
  listener_ = FileDescriptor(::socket(chosen->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  if (listener_.valid()) ::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  const bool listens = listener_.valid() &&
                       ::bind(listener_.get(), chosen->ai_addr, chosen->ai_addrlen) == 0 &&
                       ::listen(listener_.get(), SOMAXCONN) == 0;
  const int why = errno;
  require_data(listens, "cannot listen at {} port {}: {}{}", shown(address), port, std::strerror(why),
               why == EADDRINUSE ? " (--port 0 takes any that is free)" : "");
  sockaddr_storage bound{};
  auto* const place = reinterpret_cast<sockaddr*>(&bound);
  socklen_t size = sizeof bound;
  char host[NI_MAXHOST] = "", service[NI_MAXSERV] = "";
  const bool told = ::getsockname(listener_.get(), place, &size) == 0 &&
                    ::getnameinfo(place, size, host, sizeof host, service, sizeof service,
                                  NI_NUMERICHOST | NI_NUMERICSERV) == 0;
  require_data(told, "cannot tell where the server listens");
  address_ = bound.ss_family == AF_INET6 ? fmt::format("[{}]", host) : host;
  port_ = std::atoi(service);
  loopback_ = is_loopback(place);
  char machine[HOST_NAME_MAX + 1] = "";
  ::gethostname(machine, HOST_NAME_MAX);
  names_ = {"localhost", lower_case(address), lower_case(machine)};
  int ends[2];
  const bool piped = ::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0;
  require_data(piped, "cannot make a pipe: {}", std::strerror(errno));
  wake_read_ = FileDescriptor(ends[0]);
  wake_write_ = FileDescriptor(ends[1]);
}

HttpServer::~HttpServer() = default;

bool HttpServer::accepts_host(const std::string& host) const {
  if (loopback_)
    return host.empty() || host == "localhost" || (is_number(host) && host.starts_with("127.")) ||
           host == "[::1]";
  return host.empty() || is_number(host) || std::find(names_.begin(), names_.end(), host) != names_.end();
}

std::string HttpServer::url() const { return fmt::format("http://{}:{}/", address_, port_); }

// Only what a signal handler may do. A pipe that is full wakes anyway.
void HttpServer::wake() {
  const int before = errno;
  [[maybe_unused]] const ssize_t count = ::write(wake_write_.get(), "", 1);
  errno = before;
}

void HttpServer::stop() {
  static_assert(std::atomic<bool>::is_always_lock_free);
  stopping_ = true;
  wake();
}

void HttpServer::publish(std::string event) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::make_shared<const std::string>(std::move(event)));
  }
  wake();
}

size_t HttpServer::streams() const {
  const std::lock_guard lock(mutex_);
  return streams_;
}

void HttpServer::run() {
  using State = Connection::State;
  for (;;) {
    const auto before = HttpClock::now();
    auto first_deadline = before + std::chrono::hours(1);
    std::vector<pollfd> watched = {{wake_read_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    if (before < accept_after_) {
      watched[1].fd = -1;
      first_deadline = accept_after_;
    }
    for (const auto& c : connections_) {
      // Whoever has not taken its answer is not listened to: requests in advance wait in the socket.
      const bool listens = c->state != State::answering && c->state != State::pending;
      watched.push_back(
          {c->socket.get(), static_cast<short>((listens ? POLLIN : 0) | (c->out.empty() ? 0 : POLLOUT)), 0});
      if (c->state != State::pending) first_deadline = std::min(first_deadline, c->deadline);
    }
    const auto left = std::chrono::ceil<milliseconds>(first_deadline - before).count();
    if (::poll(watched.data(), watched.size(), static_cast<int>(std::max<int64_t>(0, left))) < 0)
      continue;  // EINTR
    const auto now = HttpClock::now();

    char bytes[256];
    while (::read(wake_read_.get(), bytes, sizeof bytes) > 0) {
    }
    if (stopping_) {
      connections_.clear();
      return;
    }
    for (size_t n = 0; n < connections_.size(); ++n) {
      Connection& c = *connections_[n];
      const short happened = watched[n + 2].revents;
      if (happened & (POLLERR | POLLHUP | POLLNVAL)) {
        c.state = State::closed;
        continue;
      }
      if (happened & POLLIN) receive(c);
      if (happened & POLLOUT) transmit(c, now);
    }
    deliver_events(now);
    for (const auto& c : connections_) {
      if (c->state == State::pending) answer(*c, now);
      take_requests(*c, now);
    }
    pass_deadlines(now);
    std::erase_if(connections_, [](const auto& c) { return c->state == State::closed; });
    if (watched[1].revents & POLLIN) accept_all(now);
    const std::lock_guard lock(mutex_);
    streams_ = static_cast<size_t>(std::count_if(connections_.begin(), connections_.end(),
                                                 [](const auto& c) { return c->state == State::streaming; }));
  }
}

void HttpServer::accept_all(HttpClock::time_point now) {
  for (;;) {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // No descriptors, no memory: the client stays in the queue, and the loop must not turn round it.
      if (errno != EAGAIN) accept_after_ = now + milliseconds(100);
      return;
    }
    const int yes = 1;
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (connections_.size() >= limits_.connections) {
      auto longest = connections_.end(), oldest_stream = longest;
      for (auto at = connections_.begin(); at != connections_.end(); ++at) {
        const Connection& c = **at;
        if (c.state == Connection::State::streaming) {
          if (oldest_stream == connections_.end() || c.arrived < (*oldest_stream)->arrived)
            oldest_stream = at;
        } else if (c.state != Connection::State::pending) {
          if (longest == connections_.end() || c.deadline < (*longest)->deadline) longest = at;
        }
      }
      // A browser calls again when its stream ends; whoever only keeps seats taken loses them.
      if (longest == connections_.end()) longest = oldest_stream;
      if (longest == connections_.end()) {
        constexpr std::string_view kFull =
            "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        [[maybe_unused]] const ssize_t sent =
            ::send(socket.get(), kFull.data(), kFull.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        continue;
      }
      connections_.erase(longest);
    }
    auto connection = std::make_unique<Connection>();
    connection->socket = std::move(socket);
    connection->deadline = now + limits_.head;
    connections_.push_back(std::move(connection));
  }
}

void HttpServer::receive(Connection& c) {
  using State = Connection::State;
  char bytes[4096];
  const ssize_t count = ::recv(c.socket.get(), bytes, sizeof bytes, MSG_DONTWAIT);
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (count <= 0) {
    c.state = State::closed;
    return;
  }
  if (c.state != State::reading) return;  // a stream's reader has nothing to say, nor who was refused
  c.in.append(bytes, static_cast<size_t>(count));
}

// What has come, one request behind the other, as long as each answer is gone at once.
void HttpServer::take_requests(Connection& c, HttpClock::time_point now) {
  while (c.state == Connection::State::reading && !c.in.empty()) {
    const HttpParse parse = parse_http_request(c.in, limits_.head_bytes);
    if (parse.status == 0) return;
    take(parse, c, now);
  }
}

void HttpServer::take(const HttpParse& parse, Connection& c, HttpClock::time_point now) {
  if (parse.status != 200) return refuse(c, parse.status, parse.why, now);
  c.in.erase(0, parse.taken);
  c.request = parse.request;
  c.arrived = now;
  c.last = !c.request.keep_alive;
  if (c.request.method != "GET" && c.request.method != "HEAD")
    return refuse(c, 405, fmt::format("expected GET or HEAD, found {}", shown(c.request.method)), now);
  if (!accepts_host(c.request.host))
    return refuse(c, 421,
                  fmt::format("expected the host {}, found '{}'",
                              loopback_ ? "localhost" : "as an address, or as --address names it",
                              shown(c.request.host)),
                  now);
  answer(c, now);
}

void HttpServer::answer(Connection& c, HttpClock::time_point now) {
  std::optional<HttpAnswer> answer = handler_(c.request, c.arrived);
  if (!answer) {
    c.state = Connection::State::pending;
    return;
  }
  send(c, *answer, now);
}

void HttpServer::refuse(Connection& c, int status, const std::string& why, HttpClock::time_point now) {
  c.last = true;
  send(c, {.status = status, .body = std::make_shared<const std::string>(why + "\n")}, now);
}

void HttpServer::send(Connection& c, const HttpAnswer& answer, HttpClock::time_point now) {
  const bool unchanged = answer.status == 200 && has_tag(c.request.if_none_match, answer.tag);
  const int status = unchanged ? 304 : answer.status;
  const bool with_body = !unchanged && c.request.method != "HEAD", stream = answer.stream && with_body;
  // The page is a program of ours with text from elsewhere in it. It may run what it brings along and ask this server, and
  // nothing else, whatever slips through. With no-cache a browser keeps it, but asks about it each time.
  std::string head = fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nCache-Control: {}\r\nX-Content-Type-Options: nosniff\r\n"
      "Referrer-Policy: no-referrer\r\nContent-Security-Policy: default-src 'none'; style-src "
      "'unsafe-inline'; "
      "script-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
      "frame-ancestors 'none'\r\n",
      status, reason(status), answer.type, answer.stream ? "no-store" : "no-cache");
  if (status == 405) head += "Allow: GET, HEAD\r\n";
  if (!answer.tag.empty()) head += fmt::format("ETag: \"{}\"\r\n", answer.tag);
  if (!answer.stream && !unchanged)
    head += fmt::format("Content-Length: {}\r\n", answer.body ? answer.body->size() : 0);
  if (c.last || stream) head += "Connection: close\r\n";
  c.put(std::make_shared<const std::string>(head + "\r\n"));
  if (with_body) c.put(answer.body);
  c.state = stream ? Connection::State::streaming : Connection::State::answering;
  c.deadline = now + (stream ? limits_.heartbeat : limits_.stall);
  transmit(c, now);
}

void HttpServer::transmit(Connection& c, HttpClock::time_point now) {
  using State = Connection::State;
  if (c.state == State::closed) return;
  while (!c.out.empty()) {
    const std::string& bytes = *c.out.front();
    const ssize_t count =
        ::send(c.socket.get(), bytes.data() + c.sent, bytes.size() - c.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) {
      c.state = State::closed;
      return;
    }
    if (c.state == State::answering) c.deadline = now + limits_.stall;
    c.sent += static_cast<size_t>(count);
    c.waiting -= static_cast<size_t>(count);
    if (c.sent < bytes.size()) continue;
    c.out.pop_front();
    c.sent = 0;
  }
  if (c.state != State::answering) return;
  if (c.last) {
    ::shutdown(c.socket.get(), SHUT_WR);
    c.state = State::draining;
    c.deadline = now + kFarewell;
    return;
  }
  c.state = State::reading;
  c.request = {};
  c.deadline = now + limits_.head;
}

void HttpServer::deliver_events(HttpClock::time_point now) {
  std::vector<std::shared_ptr<const std::string>> events;
  {
    const std::lock_guard lock(mutex_);
    events.swap(events_);
  }
  if (events.empty()) return;
  for (const auto& c : connections_) {
    if (c->state != Connection::State::streaming) continue;
    for (const auto& event : events) c->put(event);
    c->deadline = now + limits_.heartbeat;
    transmit(*c, now);
    if (c->waiting > limits_.unread_bytes) c->state = Connection::State::closed;
  }
}

void HttpServer::pass_deadlines(HttpClock::time_point now) {
  using State = Connection::State;
  static const auto kHeartbeat =
      std::make_shared<const std::string>(":\n\n");  // a comment: readers pass over it
  for (const auto& c : connections_) {
    if (c->state == State::pending || c->deadline > now) continue;
    if (c->state == State::streaming) {
      c->put(kHeartbeat);
      c->deadline = now + limits_.heartbeat;
      transmit(*c, now);
      if (c->waiting > limits_.unread_bytes) c->state = State::closed;
    } else if (c->state == State::reading && !c->in.empty()) {
      refuse(*c, 408, "expected a whole request in time, found the beginning of one", now);
    } else {
      c->state = State::closed;
    }
  }
}

}  // namespace evenkeel
