// BLAKE2b (RFC 7693): one function for digests of files and, with a key, for authentication. Keyed, it is a sound message
// authentication code by itself. About 1 GB/s on one core.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/whole_file.h"

namespace evenkeel {

using Digest = std::array<std::byte, 32>;

class Blake2b {
 public:
  static constexpr size_t kLargest = 64;  // bytes of a key, and of a digest

  // REQUIRES: key.size() and size at most kLargest; size > 0.
  explicit Blake2b(Bytes key = {}, size_t size = sizeof(Digest));
  void update(Bytes bytes);
  // The first `size` bytes of the result. Ends this object's use.
  std::array<std::byte, kLargest> finish_wide();
  Digest finish();

 private:
  static constexpr size_t kBlock = 128;
  void compress(const std::byte* blocks, size_t count, bool last);

  std::array<uint64_t, 8> state_;
  uint64_t length_ = 0;                  // of what has been compressed; 2^64 bytes never come
  std::array<std::byte, kBlock> block_;  // not yet compressed: the last block is known only at the end
  size_t filled_ = 0;
};

Digest digest_of(Bytes bytes);
// Keyed: nobody without the key can make one, whatever else was authenticated with it.
Digest authenticate(Bytes key, Bytes bytes);
// Takes as long whatever differs, so that time reveals nothing about a secret.
bool equal_in_constant_time(Bytes a, Bytes b);

// A digest of the digests of blocks, which all threads compute; depends on the bytes alone. read(offset, count, to)
// delivers them.
using ReadBytes = std::function<void(uint64_t offset, size_t count, std::byte* to)>;
Digest digest_in_blocks(uint64_t size, const ReadBytes& read);
Digest digest_in_blocks(Bytes bytes);  // one block at most: on the calling thread alone

std::string to_hex(Bytes bytes);

}  // namespace evenkeel
