#include "gpu/device_memory.h"

#include "gpu/cuda/clock.h"

namespace evenkeel {

DeviceMemory::DeviceMemory(size_t bytes) {
  if (bytes > 0) check_cuda(cudaMalloc(&piece_.place()->data, bytes), "taking device memory");
  piece_.place()->bytes = bytes;
}
void DeviceMemory::give_back(const MemoryPiece& piece) { cudaFree(piece.data); }
void DeviceMemory::upload(const void* from, size_t bytes, size_t offset) {
  device_wait();
  if (bytes == 0) return;
  check_cuda(cudaMemcpy(as<char>() + offset, from, bytes, cudaMemcpyHostToDevice), "copying to the device");
  // What comes from pageable memory may still be on its way, and streams of ours do not wait for it.
  device_wait();
}
void DeviceMemory::download(void* to, size_t bytes, size_t offset) const {
  device_wait();
  if (bytes == 0) return;
  check_cuda(cudaMemcpy(to, as<char>() + offset, bytes, cudaMemcpyDeviceToHost), "copying from the device");
}
void DeviceMemory::fill(uint8_t byte) {
  if (bytes() == 0) return;
  check_cuda(cudaMemset(data(), byte, bytes()), "filling device memory");
  device_wait();
}

DeviceStream::DeviceStream() {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  stream_ = stream;
}
DeviceStream::~DeviceStream() { cudaStreamDestroy(static_cast<cudaStream_t>(stream_)); }

void device_wait() { check_cuda(cudaDeviceSynchronize(), "running on the device"); }

double device_seconds(const std::function<void(void*)>& work) {
  const DeviceStream stream;
  const auto handle = static_cast<cudaStream_t>(stream.get());
  TimeMark begin, end;
  device_wait();
  begin.set(handle);
  work(stream.get());
  end.set(handle);
  end.wait();
  return end.seconds_since(begin);
}

}  // namespace evenkeel
