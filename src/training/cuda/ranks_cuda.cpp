// Ranks on GPUs: sums where the gradients lie, and NCCL between devices.
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/sizes.h"
#include "gpu/cuda/check.h"
#include "gpu/cuda/nccl.h"
#include "gpu/device_memory.h"
#include "training/cuda/ranks_kernels.h"
#include "training/device_ranks.h"

namespace evenkeel {
namespace {

size_t bytes_of(int64_t floats) { return at(floats) * sizeof(float); }

class StreamMemory final : public FloatMemory {
 public:
  explicit StreamMemory(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  std::shared_ptr<float> make(int64_t count) override {
    auto memory = std::make_shared<DeviceMemory>(bytes_of(count));
    return {memory, memory->as<float>()};
  }
  void copy(float* to, const float* from, int64_t count) override {
    move(to, from, count, cudaMemcpyDeviceToDevice);
  }
  void add(float* to, const float* left, int64_t count) override {
    add_floats(to, left, count, stream_);
    check_launch("adding gradients");
  }
  void to_host(float* host, const float* from, int64_t count) override {
    move(host, from, count, cudaMemcpyDeviceToHost);
    check_cuda(cudaStreamSynchronize(stream_), "reading gradients");
  }
  void from_host(float* to, const float* host, int64_t count) override {
    move(to, host, count, cudaMemcpyHostToDevice);
    check_cuda(cudaStreamSynchronize(stream_),
               "writing gradients");  // the host's buffer is used again at once
  }
  bool on_device() const override { return true; }

 private:
  void move(float* to, const float* from, int64_t count, cudaMemcpyKind kind) {
    check_cuda(cudaMemcpyAsync(to, from, bytes_of(count), kind, stream_), "copying gradients");
  }
  cudaStream_t stream_;
};

// --- NCCL ---------------------------------------------------------------------------------------------------------

class NcclLink final : public DeviceLink {
 public:
  NcclLink(const Nccl& nccl, const Nccl::Id& id, const Ranks& ranks, cudaStream_t stream)
      : nccl_(nccl), own_(ranks.rank()), stream_(stream) {
    check(nccl_.join(&communicator_, ranks.size(), id, ranks.rank()), "joining");
  }
  ~NcclLink() override {
    // Destroying waits for the others, who may be gone.
    if (broken_)
      nccl_.abort(communicator_);
    else
      nccl_.destroy(communicator_);
  }

  void exchange(const std::vector<Part>& send, const std::vector<Part>& receive) override {
    check(nccl_.begin_group(), "beginning an exchange");
    for (int r = 0; r < static_cast<int>(send.size()); ++r) {
      const Part &out = send[at(r)], &in = receive[at(r)];
      if (r == own_) continue;
      if (out.count > 0)
        check(nccl_.send(out.data, at(out.count), Nccl::kFloat32, r, communicator_, stream_), "sending");
      if (in.count > 0)
        check(nccl_.receive(in.data, at(in.count), Nccl::kFloat32, r, communicator_, stream_), "receiving");
    }
    check(nccl_.end_group(), "exchanging");
    const Part &out = send[at(own_)], &in = receive[at(own_)];
    if (out.data != in.data)
      check_cuda(cudaMemcpyAsync(in.data, out.data, bytes_of(out.count), cudaMemcpyDeviceToDevice, stream_),
                 "copying this rank's own slice");
  }

 private:
  void check(Nccl::Status status, const char* doing) {
    if (status == 0) return;
    broken_ = true;
    throw DataError(fmt::format("NCCL, {}: {}", doing, nccl_.words(status)));
  }

  const Nccl nccl_;
  const int own_;
  const cudaStream_t stream_;
  Nccl::Communicator communicator_ = nullptr;
  bool broken_ = false;
};

}  // namespace

void take_device(const Launch& launch) {
  int count = 0;
  if (launch.size == 1 || cudaGetDeviceCount(&count) != cudaSuccess || count < 1) return;
  check_cuda(cudaSetDevice(launch.local_rank % count), "taking the rank's device");
}

std::unique_ptr<FloatMemory> make_device_memory(void* stream) {
  return std::make_unique<StreamMemory>(stream);
}

std::unique_ptr<DeviceLink> connect_nccl(Ranks& ranks, void* stream, std::string& why) {
  Nccl nccl{};
  std::string fault = load_nccl(nccl);
  // Machine and bus: one GPU cannot be two ranks of NCCL.
  char machine[256] = {}, bus[32] = {};
  int device = 0;
  gethostname(machine, sizeof machine - 1);
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  check_cuda(cudaDeviceGetPCIBusId(bus, sizeof bus, device), "asking for the device's bus");
  std::vector<std::string> places = ranks.gather(fmt::format("{} {}", machine, bus));
  std::sort(places.begin(), places.end());
  if (const auto twice = std::adjacent_find(places.begin(), places.end()); twice != places.end())
    fault = fmt::format("two ranks share the GPU {}", *twice);
  Nccl::Id id{};
  if (fault.empty() && ranks.first() && nccl.unique_id(&id) != 0) fault = "NCCL gives no id";
  for (const std::string& of_rank : ranks.gather(fault))
    if (!of_rank.empty()) {
      why = "through the host: " + of_rank;
      return nullptr;
    }
  const std::string bytes = ranks.broadcast(std::string(id.bytes, sizeof id.bytes));
  std::copy_n(bytes.begin(), sizeof id.bytes, id.bytes);
  int version = 0;
  nccl.version(&version);
  why = fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  return std::make_unique<NcclLink>(nccl, id, ranks, static_cast<cudaStream_t>(stream));
}

}  // namespace evenkeel
