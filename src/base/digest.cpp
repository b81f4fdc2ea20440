#include "base/digest.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/threads.h"

namespace evenkeel {
namespace {

static_assert(std::endian::native == std::endian::little, "BLAKE2b reads little-endian words");

// The fractional parts of the square roots of the first eight primes, as SHA-512's.
constexpr uint64_t kStart[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

// The order of the message's words in each round; rounds 10 and 11 are 0 and 1 again.
constexpr uint8_t kOrder[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
constexpr int kRounds = 12;

inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x;
  d = std::rotr(d ^ a, 32);
  c += d;
  b = std::rotr(b ^ c, 24);
  a += b + y;
  d = std::rotr(d ^ a, 16);
  c += d;
  b = std::rotr(b ^ c, 63);
}

// A template, so that the order is known when it is compiled: twice as fast.
template <int round>
inline void mix_round(uint64_t (&v)[16], const uint64_t (&m)[16]) {
  constexpr const uint8_t(&o)[16] = kOrder[round % 10];
  mix(v[0], v[4], v[8], v[12], m[o[0]], m[o[1]]);
  mix(v[1], v[5], v[9], v[13], m[o[2]], m[o[3]]);
  mix(v[2], v[6], v[10], v[14], m[o[4]], m[o[5]]);
  mix(v[3], v[7], v[11], v[15], m[o[6]], m[o[7]]);
  mix(v[0], v[5], v[10], v[15], m[o[8]], m[o[9]]);
  mix(v[1], v[6], v[11], v[12], m[o[10]], m[o[11]]);
  mix(v[2], v[7], v[8], v[13], m[o[12]], m[o[13]]);
  mix(v[3], v[4], v[9], v[14], m[o[14]], m[o[15]]);
}

template <int... rounds>
inline void mix_all(uint64_t (&v)[16], const uint64_t (&m)[16], std::integer_sequence<int, rounds...>) {
  (mix_round<rounds>(v, m), ...);
}

}  // namespace

Blake2b::Blake2b(Bytes key, size_t size) {
  require(key.size() <= kLargest && size > 0 && size <= kLargest,
          "[digest] expected a key and a digest of at most {} bytes, got {} and {}", kLargest, key.size(),
          size);
  std::copy_n(kStart, 8, state_.begin());
  state_[0] ^= 0x01010000 ^ key.size() << 8 ^ size;
  if (key.empty()) return;
  std::array<std::byte, kBlock> padded{};
  std::copy(key.begin(), key.end(), padded.begin());
  update(padded);
}

void Blake2b::compress(const std::byte* blocks, size_t count, bool last) {
  for (; count > 0; --count, blocks += kBlock) {
    if (!last) length_ += kBlock;
    uint64_t m[16], v[16];
    std::memcpy(m, blocks, sizeof m);
    for (size_t n = 0; n < 8; ++n) {
      v[n] = state_[n];
      v[n + 8] = kStart[n];
    }
    v[12] ^= length_;
    if (last) v[14] = ~v[14];
    mix_all(v, m, std::make_integer_sequence<int, kRounds>());
    for (size_t n = 0; n < 8; ++n) state_[n] ^= v[n] ^ v[n + 8];
  }
}

void Blake2b::update(Bytes bytes) {
  if (filled_ + bytes.size() > kBlock) {  // then what is there is not the last
    const size_t taken = kBlock - filled_;
    std::copy_n(bytes.begin(), taken, block_.begin() + static_cast<std::ptrdiff_t>(filled_));
    compress(block_.data(), 1, false);
    bytes = bytes.subspan(taken);
    filled_ = 0;
    const size_t whole = bytes.empty() ? 0 : (bytes.size() - 1) / kBlock;
    compress(bytes.data(), whole, false);
    bytes = bytes.subspan(whole * kBlock);
  }
  std::copy(bytes.begin(), bytes.end(), block_.begin() + static_cast<std::ptrdiff_t>(filled_));
  filled_ += bytes.size();
}

std::array<std::byte, Blake2b::kLargest> Blake2b::finish_wide() {
  length_ += filled_;
  std::fill(block_.begin() + static_cast<std::ptrdiff_t>(filled_), block_.end(), std::byte{0});
  compress(block_.data(), 1, true);
  std::array<std::byte, kLargest> digest;
  std::memcpy(digest.data(), state_.data(), sizeof digest);
  return digest;
}

Digest Blake2b::finish() {
  const auto wide = finish_wide();
  Digest digest;
  std::copy_n(wide.begin(), digest.size(), digest.begin());
  return digest;
}

Digest digest_of(Bytes bytes) { return authenticate({}, bytes); }

Digest authenticate(Bytes key, Bytes bytes) {
  Blake2b hash(key);
  hash.update(bytes);
  return hash.finish();
}

bool equal_in_constant_time(Bytes a, Bytes b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char different = 0;  // volatile: no compiler may stop early
  for (size_t n = 0; n < a.size(); ++n) different = different | std::to_integer<unsigned char>(a[n] ^ b[n]);
  return different == 0;
}

namespace {

constexpr uint64_t kDigestBlock = uint64_t{1} << 18;  // bytes; changing it changes every digest

// digest_block(begin, count, worker): the digest of these bytes.
template <class DigestBlock>
Digest digest_of_blocks(uint64_t size, const DigestBlock& digest_block) {
  const uint64_t blocks = (size + kDigestBlock - 1) / kDigestBlock;
  std::vector<Digest> digests(static_cast<size_t>(blocks));
  const auto compute = [&](int64_t block, int worker) {
    const uint64_t begin = static_cast<uint64_t>(block) * kDigestBlock;
    digests[static_cast<size_t>(block)] =
        digest_block(begin, static_cast<size_t>(std::min(kDigestBlock, size - begin)), worker);
  };
  if (blocks == 1)
    compute(0, 0);
  else
    parallel_for(static_cast<int64_t>(blocks), compute);
  Blake2b hash(bytes_of("evenkeel blocks"));  // keyed, as a block's is not: none passes for the whole
  hash.update(std::as_bytes(std::span(&size, 1)));
  hash.update(std::as_bytes(std::span(digests)));
  return hash.finish();
}

}  // namespace

Digest digest_in_blocks(uint64_t size, const ReadBytes& read) {
  std::vector<std::vector<std::byte>> buffers(static_cast<size_t>(thread_count()));
  return digest_of_blocks(size, [&](uint64_t begin, size_t count, int worker) {
    std::vector<std::byte>& buffer = buffers[static_cast<size_t>(worker)];
    buffer.resize(count);
    read(begin, count, buffer.data());
    return digest_of(buffer);
  });
}

Digest digest_in_blocks(Bytes bytes) {
  return digest_of_blocks(bytes.size(), [&](uint64_t begin, size_t count, int) {
    return digest_of(bytes.subspan(static_cast<size_t>(begin), count));
  });
}

std::string to_hex(Bytes bytes) {
  std::string text;
  for (std::byte byte : bytes) text += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  return text;
}

}  // namespace evenkeel
