// A client of HTTP servers for tests: plain blocking sockets, so that any bytes can be sent, whole or in pieces.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "base/whole_file.h"

namespace evenkeel {

struct HttpReply {
  int status = 0;  // 0: the server hung up without one
  std::string head, body;
  std::string field(const std::string& name) const {
    const size_t at = head.find("\r\n" + name + ": ");
    if (at == std::string::npos) return "";
    const size_t begin = at + name.size() + 4;
    return head.substr(begin, head.find("\r\n", begin) - begin);
  }
};

class HttpClient {
 public:
  explicit HttpClient(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected = ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }

  void say(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;  // the server has hung up; what it said can still be read
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
  }
  void get(const std::string& path, const std::string& more = "") {
    say("GET " + path + " HTTP/1.1\r\nHost: localhost\r\n" + more + "\r\n");
  }
  // Up to and with `end`, or until the server hangs up.
  std::string hear_until(std::string_view end) {
    size_t at;
    while ((at = heard_.find(end)) == std::string::npos)
      if (!hear_more()) return std::exchange(heard_, "");
    return take(at + end.size());
  }
  HttpReply reply(bool with_body = true) {
    HttpReply reply;
    reply.head = hear_until("\r\n\r\n");
    if (reply.head.starts_with("HTTP/1.1 ")) reply.status = std::atoi(reply.head.c_str() + 9);
    const std::string length = reply.field("Content-Length");
    if (!with_body || length.empty()) return reply;
    const auto size = static_cast<size_t>(std::atoll(length.c_str()));
    while (heard_.size() < size && hear_more()) {
    }
    reply.body = take(std::min(size, heard_.size()));
    return reply;
  }
  // The server has hung up, with nothing more to be read.
  bool hears_the_end() {
    while (hear_more()) {
    }
    return heard_.empty();
  }
  void hang_up() { socket_ = FileDescriptor(); }
  int socket() const { return socket_.get(); }

  bool connected = false;

 private:
  bool hear_more() {
    char bytes[65536];
    const ssize_t count = ::recv(socket_.get(), bytes, sizeof bytes, 0);
    if (count <= 0) return false;
    heard_.append(bytes, static_cast<size_t>(count));
    return true;
  }
  std::string take(size_t size) {
    std::string taken = heard_.substr(0, size);
    heard_.erase(0, size);
    return taken;
  }

  FileDescriptor socket_;
  std::string heard_;  // and not taken yet
};

inline HttpReply http_get(int port, const std::string& path, const std::string& more = "") {
  HttpClient client(port);
  client.get(path, more);
  return client.reply();
}

}  // namespace evenkeel
