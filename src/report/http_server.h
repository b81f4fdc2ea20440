// A small HTTP/1.1 server in one thread: whole answers, and streams of events that all readers share (server-sent events).
// No client can harm another or the server: sizes, times and numbers are bounded, and nothing waits for anyone. Knows
// nothing of files: what a path means is its handler's affair.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/whole_file.h"
#include "report/http_request.h"

namespace evenkeel {

using HttpClock = std::chrono::steady_clock;

struct HttpAnswer {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::shared_ptr<const std::string> body = {};  // shared, so that a second reader costs no second copy
  std::string tag = {};  // of this version of the body (ETag); who has it gets 304. Empty: none
  bool stream = false;   // `body`, then whatever publish() is given, until someone hangs up
};

class HttpServer {
 public:
  struct Limits {
    size_t head_bytes = 8192;  // of a request
    size_t connections =
        64;  // at once; then the one whose time ends first must go; without one, the oldest stream
    size_t unread_bytes = 1 << 16;                // that a reader of a stream may leave unread
    std::chrono::milliseconds head{10'000};       // for a whole request, from the end of the one before
    std::chrono::milliseconds stall{30'000};      // for taking some of an answer
    std::chrono::milliseconds heartbeat{15'000};  // of a stream: shows who is gone
  };
  // In the thread of run(). Nothing: not yet, and asked again behind the next wake(). Asked for GET and HEAD alone.
  using Handler = std::function<std::optional<HttpAnswer>(const HttpRequest&, HttpClock::time_point arrived)>;

  // Listens when this returns. Port 0: any that is free. DataError where it cannot.
  HttpServer(const std::string& address, int port, const Limits& limits, Handler handler);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  std::string url() const;  // "http://127.0.0.1:5335/"
  int port() const { return port_; }
  bool loopback() const { return loopback_; }  // reached from this machine alone
  // Whether a request may name this host. A page of another site may have its own name point here and so ask as if it
  // were ours. So all names are refused except the one that this server was given, and the machine's own.
  bool accepts_host(const std::string& host) const;

  void run();   // until stop(); then every connection is closed
  void stop();  // from any thread or signal handler
  // From any thread: to every stream; and asks the handler again for what it could not answer yet.
  void publish(std::string event);
  void wake();
  size_t streams() const;  // how many read one, from any thread

 private:
  struct Connection;
  void accept_all(HttpClock::time_point now);
  void receive(Connection& connection);
  void take_requests(Connection& connection, HttpClock::time_point now);
  void take(const HttpParse& parse, Connection& connection, HttpClock::time_point now);
  void answer(Connection& connection, HttpClock::time_point now);
  void refuse(Connection& connection, int status, const std::string& why, HttpClock::time_point now);
  void send(Connection& connection, const HttpAnswer& answer, HttpClock::time_point now);
  void transmit(Connection& connection, HttpClock::time_point now);
  void deliver_events(HttpClock::time_point now);
  void pass_deadlines(HttpClock::time_point now);

  const Limits limits_;
  const Handler handler_;
  std::string address_;             // as a URL has it
  std::vector<std::string> names_;  // lower case: hosts that are not numbers and may be asked for
  int port_ = 0;
  bool loopback_ = false;
  FileDescriptor listener_, wake_read_, wake_write_;
  std::atomic<bool> stopping_ = false;
  HttpClock::time_point accept_after_{};  // out of descriptors: not before this
  std::vector<std::unique_ptr<Connection>> connections_;

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const std::string>> events_;  // not delivered yet
  size_t streams_ = 0;
};

}  // namespace evenkeel
