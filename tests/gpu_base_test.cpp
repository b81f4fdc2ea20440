// What src/gpu does without a GPU: pieces of memory, libraries found at run time, refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "base/sizes.h"
#include "gpu/device.h"
#include "gpu/device_memory.h"
#include "gpu/shared_library.h"

namespace evenkeel {
namespace {

TEST(Sizes, round_up_to_whole_steps) {
  EXPECT_EQ(divide_up(0, 8), 0);
  EXPECT_EQ(divide_up(1, 8), 1);
  EXPECT_EQ(divide_up(8, 8), 1);
  EXPECT_EQ(divide_up(9, 8), 2);
  EXPECT_EQ(round_up(int64_t{257}, 256), 512);
  EXPECT_EQ(round_up(size_t{256}, size_t{256}), 256u);
}

// The same requests without memory and with it: as many bytes, in pieces that are aligned and do not overlap.
TEST(Carver, counts_what_it_later_hands_out) {
  struct Pieces {
    uint8_t* bytes;
    double* numbers;
    void* nothing;
    int32_t* last;
  };
  const auto carve = [](Carver& carver) {
    return Pieces{carver.take<uint8_t>(3), carver.take<double>(33), carver.take_bytes(0),
                  carver.take<int32_t>(1)};
  };
  Carver count(nullptr);
  const Pieces none = carve(count);
  EXPECT_EQ(none.bytes, nullptr);
  EXPECT_EQ(none.last, nullptr);
  EXPECT_EQ(count.used(), 256u + 512u + 256u);

  alignas(Carver::kAlignment) static uint8_t memory[1024];
  Carver carver(memory);
  const Pieces pieces = carve(carver);
  EXPECT_EQ(carver.used(), count.used());
  EXPECT_EQ(pieces.bytes, memory);
  EXPECT_EQ(reinterpret_cast<uint8_t*>(pieces.numbers), memory + 256);
  EXPECT_EQ(pieces.nothing, memory + 768);
  EXPECT_EQ(reinterpret_cast<uint8_t*>(pieces.last), memory + 768);
}

TEST(SharedLibrary, names_every_file_that_it_did_not_find) {
  SharedLibrary library{"libnone.so.13", "libnone.so.12"};
  double (*function)(double) = std::sin;
  library.find(function, "cos");
  EXPECT_EQ(function, nullptr);
  EXPECT_EQ(library.missing(), "no libnone.so.13, no libnone.so.12 where the system's loader looks");
}

TEST(SharedLibrary, takes_the_first_that_is_there_and_names_the_first_missing_function) {
  SharedLibrary library{"libnone.so.1", "libm.so.6"};
  EXPECT_EQ(library.missing(), "");
  double (*cosine)(double) = nullptr;
  library.find(cosine, "cos");
  ASSERT_NE(cosine, nullptr);
  EXPECT_EQ(cosine(0), 1);
  void (*absent)() = nullptr;
  library.find(absent, "no_such_function");
  library.find(absent, "nor_this_one");
  EXPECT_EQ(absent, nullptr);
  EXPECT_EQ(library.missing(), "libm.so.6 has no function no_such_function");
}

// Whatever the build: where there is no GPU, every way to ask for one says why.
TEST(Device, says_why_there_is_none) {
  const CudaDevice device = cuda_device();
  if (device.present) GTEST_SKIP() << device.name;
  EXPECT_NE(device.why, "");
  try {
    require_cuda_device();
    FAIL() << "expected DataError";
  } catch (const DataError& error) {
    EXPECT_EQ(std::string(error.what()), "no GPU: " + device.why);
  }
  EXPECT_THROW(DeviceMemory(16), DataError);
  EXPECT_THROW(DeviceStream(), DataError);
}

}  // namespace
}  // namespace evenkeel
