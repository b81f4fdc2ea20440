// Ranks over MPI, through a module that is loaded only when a launcher of MPI asks for it. A rank that dies is the
// launcher's to notice: mpirun ends the others and says which one it was.
#include <dlfcn.h>

#include <filesystem>

#include "base/error.h"
#include "training/mpi/mpi_module.h"
#include "training/ranks.h"

namespace evenkeel {
namespace {

const evenkeel_mpi& load_module() {
  // Beside the program; else where the system looks for libraries.
  constexpr const char* kFile = "libevenkeel_mpi.so";
  std::error_code error;
  const std::filesystem::path beside =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / kFile;
  // Global, as MPI's own plug-ins look for its symbols there. Never unloaded.
  constexpr int kHow = RTLD_NOW | RTLD_GLOBAL;
  void* module = ::dlopen(beside.c_str(), kHow);
  const std::string reason = module ? "" : ::dlerror();
  if (!module) module = ::dlopen(kFile, kHow);
  require_data(
      module,
      "mpirun asks for several ranks, and MPI is not to be had ({}): install libopenmpi-dev and build "
      "again, or name a meeting place (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT)",
      reason);
  const auto* found = static_cast<const evenkeel_mpi*>(::dlsym(module, EVENKEEL_MPI_SYMBOL));
  require_data(found && found->interface == EVENKEEL_MPI_INTERFACE,
               "{}: expected interface {}, found {}: it is of another build", kFile, EVENKEEL_MPI_INTERFACE,
               found ? found->interface : 0);
  return *found;
}

class MpiLink final : public Link {
 public:
  explicit MpiLink(const Launch& launch) : mpi_(load_module()) {
    int rank = 0, size = 0;
    mpi_.start(&rank, &size);
    require_data(rank == launch.rank && size == launch.size,
                 "expected rank {} of {} as mpirun says, found rank {} of {} in MPI: mpirun and {} are of "
                 "different MPIs",
                 launch.rank, launch.size, rank, size, "libevenkeel_mpi.so");
  }
  ~MpiLink() override { mpi_.finish(); }

  void exchange(const void* send, void* receive, size_t bytes) override {
    mpi_.exchange(send, receive, bytes);
  }
  void gather(const void* send, void* receive, size_t bytes) override { mpi_.gather(send, receive, bytes); }
  void abort(const std::string&, int code) noexcept override { mpi_.abort(code); }

 private:
  const evenkeel_mpi& mpi_;
};

}  // namespace

std::unique_ptr<Link> connect_mpi(const Launch& launch) { return std::make_unique<MpiLink>(launch); }

}  // namespace evenkeel
