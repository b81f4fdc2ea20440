// What sums over parts and ranks need of the memory that a backend computes in: the host's here,
// a device's in device_ranks.h.
#pragma once

#include <cstdint>
#include <memory>

namespace evenkeel {

class FloatMemory {
 public:
  virtual ~FloatMemory() = default;
  virtual std::shared_ptr<float> make(int64_t count) = 0;  // (count), of any content
  virtual void copy(float* to, const float* from, int64_t count) = 0;
  virtual void add(float* to, const float* left, int64_t count) = 0;  // to = left + to
  virtual void to_host(float* host, const float* from, int64_t count) = 0;
  virtual void from_host(float* to, const float* host, int64_t count) = 0;
  virtual bool on_device() const { return false; }
};

FloatMemory& host_memory();

}  // namespace evenkeel
