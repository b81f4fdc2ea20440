// Device memory, pieces of it, streams and a clock. Plain C++, in every build; without CUDA every call throws
// DataError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/sizes.h"
#include "gpu/owned.h"

namespace evenkeel {

// Owns bytes on the current device, aligned to 256.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes);
  template <class T>
  explicit DeviceMemory(const std::vector<T>& values) : DeviceMemory(values.size() * sizeof(T)) {
    upload(values.data(), bytes());
  }

  void* data() const { return piece_.get().data; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }
  size_t bytes() const { return piece_.get().bytes; }

  // Both wait for all work of the device first. REQUIRES: the range lies inside.
  void upload(const void* from, size_t bytes, size_t offset = 0);
  void download(void* to, size_t bytes, size_t offset = 0) const;
  template <class T>
  std::vector<T> download() const {
    std::vector<T> values(bytes() / sizeof(T));
    download(values.data(), values.size() * sizeof(T));
    return values;
  }
  void fill(uint8_t byte);

 private:
  static void give_back(const MemoryPiece& piece);
  Owned<MemoryPiece, give_back> piece_;
};

// Hands out aligned pieces of one allocation; without memory it only counts. The same requests twice, the first time
// without: how much to take, then where everything lies.
class Carver {
 public:
  static constexpr size_t kAlignment = 256;  // of every piece, in bytes
  explicit Carver(void* memory) : memory_(static_cast<char*>(memory)) {}
  void* take_bytes(size_t bytes) {
    void* piece = memory_ ? memory_ + used_ : nullptr;
    used_ += round_up(bytes, kAlignment);
    return piece;
  }
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(at(count) * sizeof(T)));
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

// A stream beside the default one, which it does not wait for.
class DeviceStream {
 public:
  DeviceStream();
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  void* get() const { return stream_; }  // a cudaStream_t

 private:
  void* stream_ = nullptr;
};

// Waits for all work of the device; throws DataError with CUDA's words where some of it failed.
void device_wait();

// Seconds that the device takes for what `work` puts on the stream, by its own clock.
double device_seconds(const std::function<void(void* stream)>& work);

}  // namespace evenkeel
