#include "training/ranks.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "training/job_secret.h"

namespace evenkeel {
namespace {

class Environment {
 public:
  explicit Environment(const std::function<const char*(const char*)>& get) : get_(get) {}
  bool has(const char* name) const { return get_(name) != nullptr; }
  std::string text(const char* name) const {
    const char* found = get_(name);
    return found ? found : "";
  }
  int number(const char* name, int low, int high, int otherwise = -1) const {
    const char* found = get_(name);
    if (!found && otherwise >= 0) return otherwise;
    require_data(found, "expected {} beside the launcher's other variables, found none", name);
    const std::string_view digits = found;
    int value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    require_data(
        error == std::errc() && end == digits.data() + digits.size() && value >= low && value <= high,
        "{}={}: expected a number from {} to {}", name, digits, low, high);
    return value;
  }

 private:
  const std::function<const char*(const char*)>& get_;
};

constexpr int kMostRanks = 1 << 16, kMostPorts = (1 << 16) - 1;

// "node[03-07,9],other" -> "node03": Slurm's way to write a list of machines.
std::string first_machine(const std::string& list) {
  const size_t bracket = list.find_first_of("[,");
  if (bracket == std::string::npos || list[bracket] == ',') return list.substr(0, bracket);
  const size_t end = list.find_first_of("-,]", bracket);
  return list.substr(0, bracket) +
         list.substr(bracket + 1, end == std::string::npos ? end : end - bracket - 1);
}

// "4(x2),3" -> 4: how many tasks Slurm gives a machine; of the first, as all but the last have the same.
int first_count(const std::string& list, int otherwise) {
  int value = 0;
  const auto [end, error] = std::from_chars(list.data(), list.data() + list.size(), value);
  return error == std::errc() && value > 0 ? value : otherwise;
}

}  // namespace

Launch find_launch(const std::function<const char*(const char*)>& get) {
  const Environment environment(get);
  Launch launch;
  if (environment.has("OMPI_COMM_WORLD_SIZE")) {
    launch.by = Launch::By::mpirun;
    launch.size = environment.number("OMPI_COMM_WORLD_SIZE", 1, kMostRanks);
    launch.rank = environment.number("OMPI_COMM_WORLD_RANK", 0, launch.size - 1);
    launch.local_size = environment.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, launch.size, 1);
    launch.local_rank = environment.number("OMPI_COMM_WORLD_LOCAL_RANK", 0, launch.local_size - 1, 0);
  } else if (environment.has("WORLD_SIZE")) {
    launch.by = Launch::By::environment;
    launch.size = environment.number("WORLD_SIZE", 1, kMostRanks);
    launch.rank = environment.number("RANK", 0, launch.size - 1);
    launch.local_size = environment.number("LOCAL_WORLD_SIZE", 1, launch.size, launch.size);
    launch.local_rank = environment.number("LOCAL_RANK", 0, launch.local_size - 1,
                                           std::min(launch.rank, launch.local_size - 1));
  } else if (environment.has("SLURM_STEP_ID")) {  // a task of srun; a batch script alone has none
    launch.by = Launch::By::slurm;
    launch.size = environment.number(
        environment.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", 1, kMostRanks, 1);
    launch.rank = environment.number("SLURM_PROCID", 0, launch.size - 1, launch.size == 1 ? 0 : -1);
    launch.local_size = std::min(launch.size, first_count(environment.text("SLURM_STEP_TASKS_PER_NODE"), 1));
    launch.local_rank = environment.number("SLURM_LOCALID", 0, kMostRanks, 0);
    const std::string list = environment.text("SLURM_STEP_NODELIST");
    launch.address = first_machine(list.empty() ? environment.text("SLURM_NODELIST") : list);
    // The same on every rank, and another one for another job: from the upper half, where no service lives.
    constexpr int kFirst = 1 << 15, kPorts = 1 << 14;
    launch.port = kFirst + environment.number("SLURM_JOB_ID", 0, 1 << 30, 0) % kPorts;
  }
  if (launch.by == Launch::By::nobody) return launch;
  launch.secret = secret_of_environment(get);
  launch.listen = environment.text("EVENKEEL_LISTEN");
  if (environment.has("MASTER_ADDR")) launch.address = environment.text("MASTER_ADDR");
  if (environment.has("MASTER_PORT")) {
    launch.port = environment.number("MASTER_PORT", 1, kMostPorts);
    // torchrun itself listens at the port that it names; the next one is ours.
    if (environment.text("TORCHELASTIC_USE_AGENT_STORE") == "True" && launch.port < kMostPorts) ++launch.port;
  }
  return launch;
}

Ranks::Ranks(const Launch& launch, std::unique_ptr<Link> link) : launch_(launch), link_(std::move(link)) {
  require(launch.size == 1 || link_, "[ranks] expected a link between {} ranks, got none", launch.size);
}

std::shared_ptr<Ranks> Ranks::join(const Launch& launch, const std::string& version) {
  if (launch.size == 1) return std::make_shared<Ranks>();
  const bool reachable = !launch.address.empty() && launch.port > 0;
  if (launch.by != Launch::By::mpirun) {
    require_data(reachable,
                 "expected MASTER_ADDR and MASTER_PORT, where {} ranks can meet, found address '{}' and "
                 "port {}",
                 launch.size, launch.address, launch.port);
  }
  std::unique_ptr<Link> link;
  if (launch.by == Launch::By::mpirun) try {
      link = connect_mpi(launch);
    } catch (const DataError&) {
      if (!reachable) throw;
    }
  if (!link) link = connect_tcp(launch);
  auto ranks = std::make_shared<Ranks>(launch, std::move(link));
  try {
    ranks->agree("the version", version);
  } catch (const DataError& error) {  // whoever calls has no ranks yet to name this one by
    throw DataError(fmt::format("rank {}: {}", launch.rank, error.what()));
  }
  return ranks;
}

void Ranks::agree(std::string_view what, const std::string& own) {
  const std::vector<std::string> all = gather(own);
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const std::string& text) { return text != all[0]; });
  if (other == all.end()) return;
  const auto [expected, found] = std::mismatch(all[0].begin(), all[0].end(), other->begin(), other->end());
  const auto line = [](const std::string& text, std::string::const_iterator at) {
    const auto offset = static_cast<size_t>(at - text.begin());
    const size_t before = offset == 0 ? std::string::npos : text.rfind('\n', offset - 1);
    const size_t begin = before == std::string::npos ? 0 : before + 1;
    return text.substr(begin, text.find('\n', offset) - begin);
  };
  throw DataError(
      fmt::format("{} of all ranks must be the same: expected '{}' as on rank 0, found '{}' on rank {}", what,
                  line(all[0], expected), line(*other, found), other - all.begin()));
}

std::vector<double> Ranks::gather(std::span<const double> own) {
  std::vector<double> all(own.size() * static_cast<size_t>(size()));
  if (link_)
    link_->gather(own.data(), all.data(), own.size_bytes());
  else
    std::copy(own.begin(), own.end(), all.begin());
  return all;
}

std::vector<std::string> Ranks::gather(const std::string& own) {
  const double own_length = static_cast<double>(own.size());
  const std::vector<double> lengths = gather(std::span(&own_length, 1));
  const auto longest = static_cast<size_t>(*std::max_element(lengths.begin(), lengths.end()));
  std::string padded = own, all(longest * lengths.size(), '\0');
  padded.resize(longest);
  if (link_)
    link_->gather(padded.data(), all.data(), longest);
  else
    all = padded;
  std::vector<std::string> texts;
  for (size_t r = 0; r < lengths.size(); ++r)
    texts.push_back(all.substr(r * longest, static_cast<size_t>(lengths[r])));
  return texts;
}

std::string Ranks::broadcast(const std::string& own) { return gather(first() ? own : std::string())[0]; }

Slice Ranks::slice(int64_t count, int rank) const {
  const int64_t units = (count + kSliceUnit - 1) / kSliceUnit,
                width = (units + size() - 1) / size() * kSliceUnit;
  return {std::min(count, rank * width), std::min(count, (rank + 1) * width)};
}

// Rank 0 of a star holds a chunk for every pair of ranks: 4 MiB a rank at most.
int64_t Ranks::chunk() const { return std::max<int64_t>(1024, (int64_t{1} << 20) / size()); }

namespace {
// The part of a slice from its `at`-th number on, `step` of them at most.
Slice part_of(const Slice& slice, int64_t at, int64_t step) {
  return {std::min(slice.begin + at, slice.end), std::min(slice.begin + at + step, slice.end)};
}
}  // namespace

// The first of `rows`, (size, width), becomes their sum: (0 + 1) + (2 + 3), the upper levels of the tree over parts
// whose lower ones the trainer adds.
void Ranks::add_by_halves(FloatMemory& memory, float* rows, int64_t width) const {
  for (int apart = 1; apart < size(); apart *= 2)
    for (int r = 0; r + apart < size(); r += 2 * apart)
      memory.add(rows + r * width, rows + (r + apart) * width, width);
}

void Ranks::exchange_slices(FloatMemory& memory, float* buffer, int64_t count, bool add) {
  if (!link_) return;
  const int64_t width = slice(count, 0).count(), step = std::min(chunk(), width);
  std::vector<float> send(static_cast<size_t>(size() * step)), received(send.size());  // (size, step)
  for (int64_t at = 0; at < width; at += step) {
    for (int r = 0; r < size(); ++r) {
      const Slice part = part_of(slice(count, r), at, step);
      memory.to_host(send.data() + r * step, buffer + part.begin, part.count());
    }
    link_->exchange(send.data(), received.data(), static_cast<size_t>(step) * sizeof(float));
    if (add) add_by_halves(host_memory(), received.data(), step);
    const Slice own = part_of(slice(count), at, step);
    memory.from_host(buffer + own.begin, received.data(), own.count());
  }
}

void Ranks::sum_slices(FloatMemory& memory, float* buffer, int64_t count) {
  if (device_link_ && memory.on_device())
    sum_device_slices(memory, buffer, count);
  else
    exchange_slices(memory, buffer, count, /*add=*/true);
}

void Ranks::sum_device_slices(FloatMemory& memory, float* buffer, int64_t count) {
  const Slice own = slice(count);
  const int64_t width = slice(count, 0).count();
  if (received_size_ < size() * width) {
    received_ = memory.make(size() * width);
    received_size_ = size() * width;
  }
  std::vector<DeviceLink::Part> send, receive;
  for (int r = 0; r < size(); ++r) {
    const Slice of_rank = slice(count, r);
    send.push_back({buffer + of_rank.begin, of_rank.count()});
    receive.push_back({received_.get() + r * width, own.count()});
  }
  device_link_->exchange(send, receive);
  add_by_halves(memory, received_.get(), width);  // behind a short slice's end: of any content, and not used
  memory.copy(buffer + own.begin, received_.get(), own.count());
}

void Ranks::share_slices(FloatMemory& memory, float* buffer, int64_t count) {
  std::vector<Slice> of_ranks;
  for (int r = 0; r < size(); ++r) of_ranks.push_back(slice(count, r));
  share(memory, buffer, of_ranks);
}

void Ranks::share_rows(FloatMemory& memory, float* rows, int64_t width) {
  std::vector<Slice> of_ranks;
  for (int r = 0; r < size(); ++r) of_ranks.push_back({r * width, (r + 1) * width});
  share(memory, rows, of_ranks);
}

// of_ranks: (size); none is longer than the first.
void Ranks::share(FloatMemory& memory, float* buffer, const std::vector<Slice>& of_ranks) {
  if (!link_) return;
  const Slice& mine = of_ranks[static_cast<size_t>(rank())];
  if (device_link_ && memory.on_device()) {
    const std::vector<DeviceLink::Part> send(of_ranks.size(), {buffer + mine.begin, mine.count()});
    std::vector<DeviceLink::Part> receive;
    for (const Slice& slice : of_ranks) receive.push_back({buffer + slice.begin, slice.count()});
    device_link_->exchange(send, receive);
    return;
  }
  const int64_t width = of_ranks[0].count(), step = std::min(chunk(), width);
  std::vector<float> send(static_cast<size_t>(step)), received(static_cast<size_t>(size() * step));
  for (int64_t at = 0; at < width; at += step) {
    const Slice own = part_of(mine, at, step);
    memory.to_host(send.data(), buffer + own.begin, own.count());
    link_->gather(send.data(), received.data(), static_cast<size_t>(step) * sizeof(float));
    for (int r = 0; r < size(); ++r) {
      const Slice part = part_of(of_ranks[static_cast<size_t>(r)], at, step);
      if (r != rank()) memory.from_host(buffer + part.begin, received.data() + r * step, part.count());
    }
  }
}

void Ranks::broadcast(std::span<float> values) {
  // Every slice of rank 0 to the rank that owns it, and from there to all.
  const auto count = static_cast<int64_t>(values.size());
  exchange_slices(host_memory(), values.data(), count, /*add=*/false);
  share_slices(host_memory(), values.data(), count);
}

void Ranks::use_device_link(std::unique_ptr<DeviceLink> link) {
  device_link_ = std::move(link);
  received_.reset();
  received_size_ = 0;
}

void Ranks::abort(const std::string& cause, int code) noexcept {
  if (link_) link_->abort(cause, code);
}

}  // namespace evenkeel
