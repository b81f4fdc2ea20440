// Training by several processes, the ranks of one job: which of them this one is, and what they tell each other.
// Every rank makes the same calls in the same order. Sums have one order that the number of ranks does not
// change: a tree that halves again and again.
//
//   Launch   what the launcher's environment says: mpirun, torchrun and its like, Slurm
//   Link     moves bytes: connect_tcp (no library needed), connect_mpi (libevenkeel_mpi.so, loaded only then)
//   Ranks    what training asks for, on top of a Link
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "training/float_memory.h"

namespace evenkeel {

struct Launch {
  enum class By { nobody, mpirun, environment, slurm };
  By by = By::nobody;
  int rank = 0, size = 1;              // in the job
  int local_rank = 0, local_size = 1;  // on this machine
  std::string address;                 // where rank 0 can be reached; empty: not said
  int port = 0;
  std::string listen;  // where rank 0 listens; empty: at `address`
  std::string secret;  // job_secret.h; empty: none was set
};
// Of OMPI_COMM_WORLD_*; RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; SLURM_* (within
// srun); and EVENKEEL_SECRET, EVENKEEL_SECRET_FILE and EVENKEEL_LISTEN. `environment` is std::getenv. DataError on invalid
// numbers.
Launch find_launch(const std::function<const char*(const char*)>& environment);

// A DataError of these calls names the rank that ended the job, and its cause.
class Link {
 public:
  virtual ~Link() = default;
  // bytes [r] of send go to rank r; bytes [r] of receive come from rank r. send, receive: (size, bytes)
  virtual void exchange(const void* send, void* receive, size_t bytes) = 0;
  // Every rank's bytes to every rank. send: (bytes); receive: (size, bytes)
  virtual void gather(const void* send, void* receive, size_t bytes) = 0;
  // Ends the job on every rank, which say the cause and end with `code` or with 3. May not return.
  virtual void abort(const std::string& cause, int code) noexcept = 0;
};
// A star around rank 0. Ranks that end without a word are noticed at once (by a machine that is gone, in half a
// minute), also in the middle of a step. DataError where the ranks do not come together, or where what one of them
// receives is not what another one sent.
std::unique_ptr<Link> connect_tcp(const Launch& launch);
// DataError where libevenkeel_mpi.so is not there or does not load.
std::unique_ptr<Link> connect_mpi(const Launch& launch);

// Numbers [begin, end) of a flat buffer.
struct Slice {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
  friend bool operator==(const Slice&, const Slice&) = default;
};

// Between devices, without the host.
class DeviceLink {
 public:
  struct Part {
    float* data;
    int64_t count;
  };
  virtual ~DeviceLink() = default;
  // send[r] goes to rank r, receive[r] comes from rank r; (size) each. Queued, not waited for.
  virtual void exchange(const std::vector<Part>& send, const std::vector<Part>& receive) = 0;
};

class Ranks {
 public:
  Ranks() = default;  // one, alone
  Ranks(const Launch& launch, std::unique_ptr<Link> link);
  // The job that the launcher started; alone where there is none. All ranks must be of the same version.
  static std::shared_ptr<Ranks> join(const Launch& launch, const std::string& version);

  int rank() const { return launch_.rank; }
  int size() const { return launch_.size; }
  bool first() const { return launch_.rank == 0; }  // the one that writes the run's folder
  const Launch& launch() const { return launch_; }

  // DataError on every rank where a rank's text is not rank 0's; names both of the first line that differs.
  void agree(std::string_view what, const std::string& own);
  // Every rank's numbers, by rank; the same count on each. (size, own.size())
  std::vector<double> gather(std::span<const double> own);
  // Every rank's text, by rank.
  std::vector<std::string> gather(const std::string& own);
  // Rank 0's, on every rank.
  std::string broadcast(const std::string& own);
  void broadcast(std::span<float> values);

  // A flat buffer is cut into one slice a rank, at multiples of kSliceUnit; the last ones may be short or empty.
  static constexpr int64_t kSliceUnit = 8192;
  Slice slice(int64_t count, int rank) const;
  Slice slice(int64_t count) const { return slice(count, rank()); }
  // This rank's slice becomes the sum of all ranks' (a tree by halves); the rest is left as it is. buffer: (count)
  void sum_slices(FloatMemory& memory, float* buffer, int64_t count);
  // Every slice becomes what its own rank has there.
  void share_slices(FloatMemory& memory, float* buffer, int64_t count);
  // Every row becomes what its own rank has there: bits are moved, nothing is computed. rows: (size, width)
  void share_rows(FloatMemory& memory, float* rows, int64_t width);
  void sum(FloatMemory& memory, float* buffer, int64_t count) {
    sum_slices(memory, buffer, count);
    share_slices(memory, buffer, count);
  }

  // From now on, slices in device memory go this way; without it they go through the host. The bits are the same.
  void use_device_link(std::unique_ptr<DeviceLink> link);

  // This rank cannot go on: the others end too, and say so. For MPI it does not return.
  void abort(const std::string& cause, int code) noexcept;

 private:
  int64_t chunk() const;  // floats to each rank at once
  // Every slice goes to the rank that owns it; there, the slice becomes the sum of what came, or rank 0's.
  void exchange_slices(FloatMemory& memory, float* buffer, int64_t count, bool add);
  void sum_device_slices(FloatMemory& memory, float* buffer, int64_t count);
  void add_by_halves(FloatMemory& memory, float* rows, int64_t width) const;
  void share(FloatMemory& memory, float* buffer, const std::vector<Slice>& of_ranks);

  Launch launch_;
  std::unique_ptr<Link> link_;  // none: alone
  std::unique_ptr<DeviceLink> device_link_;
  std::shared_ptr<float> received_;  // on the device: one slice of every rank
  int64_t received_size_ = 0;
};

}  // namespace evenkeel
