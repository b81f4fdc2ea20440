// One authenticated connection between rank 0 and another rank. First each end proves to the other that it knows the
// job's secret. Then every frame carries a tag over its bytes, its number and its direction. So none can be altered,
// repeated, left out or sent back unnoticed. Nothing is encrypted.
//
//   caller -> rank 0   Hello: who calls, and a random number
//   rank 0 -> caller   Challenge: another random number
//   caller -> rank 0   proof over both
//   rank 0 -> caller   its own proof; zeros where the caller's was wrong
//
// The caller proves first: a stranger who calls learns nothing that depends on the secret.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>

#include "base/digest.h"
#include "base/whole_file.h"

namespace evenkeel {

enum class Channel : int32_t { data, alarm };

struct Hello {
  char magic[8] = {'E', 'K', 'R', 'A', 'N', 'K', 'S', '2'};
  int32_t rank = 0, size = 0;
  Channel channel = Channel::data;
  int32_t unused = 0;
  Digest random{};
};

// For poll(): 0 when the deadline is over.
int milliseconds_left(std::chrono::steady_clock::time_point deadline);

// The key of a job, from its secret's text.
Digest key_of_secret(const std::string& secret);

class SecureChannel {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  // gone: the other end closed, or the time is over. forged: authentication failed. stranger: it uses another protocol.
  enum class Result { done, gone, forged, stranger };

  SecureChannel() = default;
  // Both ends of a connection that has been authenticated. hello and challenge made its keys.
  SecureChannel(FileDescriptor socket, bool is_first, const Digest& key, const Hello& hello,
                const Digest& challenge);
  // Calls rank 0 through a connected socket. `hello` gets its random number here. On Result::done, `channel` is open.
  static Result call(FileDescriptor socket, Hello hello, const Digest& key, Deadline deadline,
                     SecureChannel& channel);

  bool valid() const { return socket_.valid(); }
  int socket() const { return socket_.get(); }
  // A frame. Both ends know its size beforehand; no length is taken from the wire. One sender at a time, one receiver at a
  // time.
  Result send(Bytes bytes);
  Result receive(std::span<std::byte> bytes);
  Result receive_until(Deadline deadline, std::span<std::byte> bytes);

 private:
  FileDescriptor socket_;
  Digest send_key_{}, receive_key_{};
  uint64_t sent_ = 0, received_ = 0;  // frames
};

// Somebody who calls rank 0 and has proved nothing yet. Never waits: advance() takes what has come.
class Caller {
 public:
  explicit Caller(FileDescriptor socket) : socket_(std::move(socket)) {}
  int socket() const { return socket_.get(); }
  const Hello& hello() const { return hello_; }

  // stranger: it said no Hello. failed: it said one and did not prove that it knows the secret.
  enum class State { waiting, proved, stranger, failed };
  State advance(const Digest& key);
  // REQUIRES: the state is proved.
  SecureChannel open(const Digest& key) {
    return SecureChannel(std::move(socket_), true, key, hello_, challenge_);
  }

 private:
  // False: not all of it has come. Then `gone` says whether it ever can.
  bool take(void* to, size_t size, bool& gone);

  FileDescriptor socket_;
  Hello hello_;
  Digest challenge_{}, proof_{};
  size_t taken_ = 0;  // bytes of what comes next
  bool challenged_ = false;
};

}  // namespace evenkeel
