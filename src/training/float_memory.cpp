#include "training/float_memory.h"

#include <algorithm>
#include <new>

#include "base/threads.h"

namespace evenkeel {
namespace {

class HostMemory final : public FloatMemory {
 public:
  std::shared_ptr<float> make(int64_t count) override {
    return {new float[static_cast<size_t>(count)], std::default_delete<float[]>()};
  }
  void copy(float* to, const float* from, int64_t count) override {
    in_blocks(count, [=](int64_t first, int64_t last) { std::copy(from + first, from + last, to + first); });
  }
  void add(float* to, const float* left, int64_t count) override {
    in_blocks(count, [=](int64_t first, int64_t last) {
      for (int64_t n = first; n < last; ++n) to[n] = left[n] + to[n];
    });
  }
  void to_host(float* host, const float* from, int64_t count) override { copy(host, from, count); }
  void from_host(float* to, const float* host, int64_t count) override { copy(to, host, count); }

 private:
  template <class Body>
  static void in_blocks(int64_t count, const Body& body) {
    constexpr int64_t kBlock = 1 << 16;  // floats of a task: enough to be worth its start
    parallel_for((count + kBlock - 1) / kBlock,
                 [&](int64_t block, int) { body(block * kBlock, std::min(count, (block + 1) * kBlock)); });
  }
};

}  // namespace

FloatMemory& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace evenkeel
