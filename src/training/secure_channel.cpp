#include "training/secure_channel.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "base/error.h"

namespace evenkeel {
namespace {

using Clock = std::chrono::steady_clock;
using Result = SecureChannel::Result;

static_assert(std::has_unique_object_representations_v<Hello>, "all of a Hello's bytes are sent and proved");

struct Challenge {
  char magic[8] = {'E', 'K', 'P', 'R', 'O', 'O', 'F', '2'};
  Digest random{};
};

template <class T>
Bytes bytes_of_object(const T& object) {
  return std::as_bytes(std::span(&object, 1));
}

Digest random_digest() {
  Digest random;
  for (size_t filled = 0; filled < random.size();) {
    const ssize_t got = ::getrandom(random.data() + filled, random.size() - filled, 0);
    if (got < 0 && errno == EINTR) continue;
    require_data(got > 0, "the system gives no random numbers: {}", std::strerror(errno));
    filled += static_cast<size_t>(got);
  }
  return random;
}

// What only one who knows the key can say of this connection. Hello and challenge have one size, so that purposes cannot
// be mistaken for each other.
Digest derive(const Digest& key, std::string_view purpose, const Hello& hello, const Digest& challenge) {
  Blake2b hash(key);
  hash.update(bytes_of_object(hello));
  hash.update(challenge);
  hash.update(bytes_of(purpose));
  return hash.finish();
}
Digest proof_of_caller(const Digest& key, const Hello& hello, const Digest& challenge) {
  return derive(key, "the caller knows", hello, challenge);
}
Digest proof_of_first(const Digest& key, const Hello& hello, const Digest& challenge) {
  return derive(key, "rank 0 knows", hello, challenge);
}

// --- bytes over sockets: false where the other end is gone or, with a deadline, silent

bool send_all(int socket, Bytes bytes, int flags = 0) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | flags);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(sent));
  }
  return true;
}

bool receive_all(int socket, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t received = ::recv(socket, bytes.data(), bytes.size(), 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(received));
  }
  return true;
}

bool receive_all_until(Clock::time_point deadline, int socket, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    pollfd ready{socket, POLLIN, 0};
    const int found = ::poll(&ready, 1, milliseconds_left(deadline));
    if (found < 0 && errno == EINTR) continue;
    if (found <= 0) return false;
    const ssize_t received = ::recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (received < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (received <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(received));
  }
  return true;
}

Digest tag_of(const Digest& key, uint64_t number, Bytes bytes) {
  Blake2b hash(key);
  hash.update(bytes_of_object(number));
  hash.update(digest_in_blocks(bytes));  // large frames on all threads
  return hash.finish();
}

}  // namespace

int milliseconds_left(Clock::time_point deadline) {
  return static_cast<int>(std::clamp<int64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count(), 0, 1 << 30));
}

Digest key_of_secret(const std::string& secret) {
  return authenticate(bytes_of("evenkeel: the secret of a job"), bytes_of(secret));
}

SecureChannel::SecureChannel(FileDescriptor socket, bool is_first, const Digest& key, const Hello& hello,
                             const Digest& challenge)
    : socket_(std::move(socket)),
      send_key_(derive(key, "frames to rank 0", hello, challenge)),
      receive_key_(derive(key, "frames from rank 0", hello, challenge)) {
  if (is_first) std::swap(send_key_, receive_key_);
}

Result SecureChannel::call(FileDescriptor socket, Hello hello, const Digest& key, Deadline deadline,
                           SecureChannel& channel) {
  hello.random = random_digest();
  Challenge challenge;
  if (!send_all(socket.get(), bytes_of_object(hello)) ||
      !receive_all_until(deadline, socket.get(), std::as_writable_bytes(std::span(&challenge, 1))))
    return Result::gone;
  if (std::memcmp(challenge.magic, Challenge().magic, sizeof challenge.magic) != 0) return Result::stranger;
  Digest proof;
  if (!send_all(socket.get(), proof_of_caller(key, hello, challenge.random)) ||
      !receive_all_until(deadline, socket.get(), proof))
    return Result::gone;
  if (!equal_in_constant_time(proof, proof_of_first(key, hello, challenge.random))) return Result::forged;
  channel = SecureChannel(std::move(socket), false, key, hello, challenge.random);
  return Result::done;
}

Result SecureChannel::send(Bytes bytes) {
  const Digest tag = tag_of(send_key_, sent_++, bytes);
  return send_all(socket_.get(), bytes, MSG_MORE) && send_all(socket_.get(), tag) ? Result::done
                                                                                  : Result::gone;
}

Result SecureChannel::receive(std::span<std::byte> bytes) {
  Digest tag;
  if (!receive_all(socket_.get(), bytes) || !receive_all(socket_.get(), tag)) return Result::gone;
  return equal_in_constant_time(tag, tag_of(receive_key_, received_++, bytes)) ? Result::done
                                                                               : Result::forged;
}

Result SecureChannel::receive_until(Deadline deadline, std::span<std::byte> bytes) {
  Digest tag;
  if (!receive_all_until(deadline, socket_.get(), bytes) || !receive_all_until(deadline, socket_.get(), tag))
    return Result::gone;
  return equal_in_constant_time(tag, tag_of(receive_key_, received_++, bytes)) ? Result::done
                                                                               : Result::forged;
}

bool Caller::take(void* to, size_t size, bool& gone) {
  while (taken_ < size) {
    const ssize_t got = ::recv(socket_.get(), static_cast<char*>(to) + taken_, size - taken_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      gone = got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
      return false;
    }
    taken_ += static_cast<size_t>(got);
  }
  taken_ = 0;
  return true;
}

Caller::State Caller::advance(const Digest& key) {
  bool gone = false;
  if (!challenged_) {
    if (!take(&hello_, sizeof hello_, gone)) return gone ? State::stranger : State::waiting;
    Challenge challenge;
    challenge.random = challenge_ = random_digest();
    if (std::memcmp(hello_.magic, Hello().magic, sizeof hello_.magic) != 0 ||
        !send_all(socket_.get(), bytes_of_object(challenge), MSG_DONTWAIT))
      return State::stranger;
    challenged_ = true;
  }
  if (!take(proof_.data(), proof_.size(), gone)) return gone ? State::failed : State::waiting;
  const bool knows = equal_in_constant_time(proof_, proof_of_caller(key, hello_, challenge_));
  const Digest answer = knows ? proof_of_first(key, hello_, challenge_) : Digest{};
  return send_all(socket_.get(), answer, MSG_DONTWAIT) && knows ? State::proved : State::failed;
}

}  // namespace evenkeel
