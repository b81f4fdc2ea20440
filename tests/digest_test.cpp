// BLAKE2b against the vectors of RFC 7693 and of its authors.
#include "base/digest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/threads.h"

namespace evenkeel {
namespace {

std::vector<std::byte> counting(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t n = 0; n < size; ++n) bytes[n] = static_cast<std::byte>(n);
  return bytes;
}

std::string wide(Bytes key, Bytes text) {
  Blake2b hash(key, Blake2b::kLargest);
  hash.update(text);
  return to_hex(hash.finish_wide());
}

TEST(Blake2b, has_the_published_values) {
  EXPECT_EQ(wide({}, bytes_of("abc")),  // RFC 7693, appendix A
            "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
            "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923");
  // The authors' table: keys 00 01 02 ..., texts 00 01 02 ...
  const std::vector<std::byte> key = counting(64);
  EXPECT_EQ(wide(key, {}),
            "10ebb67700b1868efb4417987acf4690ae9d972fb7a590c2f02871799aaa4786"
            "b5e996e8f0f4eb981fc214b005f42d2ff4233499391653df7aefcbc13fc51568");
  EXPECT_EQ(wide(key, counting(1)),
            "961f6dd1e4dd30f63901690c512e78e4b45e4742ed197c3c5e45c549fd25f2e4"
            "187b0bc9fe30492b16b0d0bc4ef9b0f34c7003fac09a5ef1532e69430234cebd");
  EXPECT_EQ(wide(key, counting(255)),
            "142709d62e28fcccd0af97fad0f8465b971e82201dc51070faa0372aa43e9248"
            "4be1c1e73ba10906d5d1853db6a4106e0a7bf9800d373d6dee2d46d62ef2a461");
}

// RFC 7693, appendix E: one value over digests of several sizes, with and without keys.
TEST(Blake2b, passes_the_self_test_of_its_rfc) {
  const auto sequence = [](size_t length, uint32_t seed) {
    std::vector<std::byte> bytes(length);
    uint32_t a = 0xDEAD4BAD * seed, b = 1;
    for (std::byte& byte : bytes) {
      const uint32_t t = a + b;
      a = b;
      b = t;
      byte = static_cast<std::byte>(t >> 24);
    }
    return bytes;
  };
  Blake2b all;
  for (size_t size : {20, 32, 48, 64})
    for (size_t length : {0, 3, 128, 129, 255, 1024}) {
      const auto text = sequence(length, static_cast<uint32_t>(length)),
                 key = sequence(size, static_cast<uint32_t>(size));
      for (const Bytes& used : {Bytes(), Bytes(key)}) {
        Blake2b hash(used, size);
        hash.update(text);
        const auto digest = hash.finish_wide();
        all.update(std::span(digest).first(size));
      }
    }
  EXPECT_EQ(to_hex(all.finish()), "c23a7800d98123bd10f506c61e29da5603d763b8bbad2e737f5e765a7bccd475");
}

TEST(Blake2b, does_not_depend_on_the_pieces) {
  const std::vector<std::byte> text = counting(1000);
  const Digest whole = digest_of(text);
  for (size_t piece : {1, 7, 127, 128, 129, 256, 999}) {
    Blake2b hash;
    for (size_t at = 0; at < text.size(); at += piece)
      hash.update(std::span(text).subspan(at, std::min(piece, text.size() - at)));
    EXPECT_EQ(hash.finish(), whole) << piece;
  }
}

TEST(Digest, in_blocks_depends_on_every_byte_and_on_nothing_else) {
  const int before = thread_count();
  for (size_t size : {size_t{0}, size_t{1}, size_t{1} << 18, (size_t{1} << 18) + 1, size_t{1} << 20}) {
    std::vector<std::byte> text = counting(size);
    set_thread_count(1);
    const Digest expected = digest_in_blocks(text);
    set_thread_count(3);
    EXPECT_EQ(digest_in_blocks(text), expected) << size;
    EXPECT_EQ(digest_in_blocks(size, [&](uint64_t offset, size_t count,
                                         std::byte* to) { std::memcpy(to, text.data() + offset, count); }),
              expected)
        << size;
    for (size_t at : {size_t{0}, size / 2, size - 1}) {
      if (at >= size) continue;
      text[at] ^= std::byte{0x10};
      EXPECT_NE(digest_in_blocks(text), expected) << size << " at " << at;
      text[at] ^= std::byte{0x10};
    }
    text.push_back(std::byte{0});
    EXPECT_NE(digest_in_blocks(text), expected) << size;
  }
  set_thread_count(before);
}

TEST(Digest, comparison_sees_every_byte) {
  const std::vector<std::byte> a = counting(32);
  EXPECT_TRUE(equal_in_constant_time(a, counting(32)));
  EXPECT_FALSE(equal_in_constant_time(a, counting(31)));
  for (size_t n = 0; n < a.size(); ++n) {
    std::vector<std::byte> b = a;
    b[n] ^= std::byte{0x80};
    EXPECT_FALSE(equal_in_constant_time(a, b)) << n;
  }
}

}  // namespace
}  // namespace evenkeel
