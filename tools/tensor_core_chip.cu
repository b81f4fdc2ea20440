// Asks a Hopper chip: mma.sync and wgmma on millions of dot products made to be hard. Each result is compared bit
// for bit with the model in numerics/tensor_core.h, and with the wrong models that it could be mistaken for.
// Both instructions get the same operands (tensor_core_cases.h).
#include <fstream>
#include <map>
#include <mutex>

#include "base/threads.h"
#include "tensor_core_cases.h"

namespace evenkeel {
namespace {

constexpr const char* kUsage = R"(usage: tensor_core_chip [options]
Runs mma.sync and wgmma (bf16, fp16, tf32, e4m3, e5m2) on a Hopper GPU and compares every result with the
model.
  --batches N       batches of 262,144 cases for each format (32), and a quarter as many of chains
  --seed N          another seed gives other operands (1)
  --keep FOLDER     write 500 cases a format to FOLDER/FORMAT.txt
  --dry-run         no GPU: the model's second implementation, the trace, plays the chip
  --dry-run-wrong   no GPU: a chip with one alignment bit less; must be found out
exit: 0 all equal, 1 a result differs, 2 a wrong request, 3 no Hopper GPU or another failure)";

constexpr int kTiles = 512;    // of a batch
constexpr int kThreads = 128;  // 4 warps, 16 rows each: a warpgroup
// No result of an instruction: a place that was not written, two forms of wgmma that differ.
constexpr uint32_t kUnwritten = 0x7fbaddadu, kForkedResult = 0x7fbadf0fu;
constexpr int kKept = 500, kKeptChains = 100;
constexpr Format kFormats[] = {kBf16, kFp16, kTf32, kE4m3, kE5m2};

// ---------------------------------------------------------------------------------------------- the chip

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

#define MMA_SYNC(shape, type)                                                         \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type                \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

template <int kFormat>  // of kFormats
__device__ void mma_sync(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kFormat == 0) MMA_SYNC("m16n8k16", "bf16");
  if constexpr (kFormat == 1) MMA_SYNC("m16n8k16", "f16");
  if constexpr (kFormat == 2) MMA_SYNC("m16n8k8", "tf32");
  if constexpr (kFormat == 3) MMA_SYNC("m16n8k32", "e4m3");
  if constexpr (kFormat == 4) MMA_SYNC("m16n8k32", "e5m2");
}

// The predicate says that d is an addend too; then come the signs of a and b, and for 16 bits that nothing is
// transposed.
#define WGMMA(shape, type, operands, ...)                                                             \
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned." shape ".f32." type \
               "." type " {%0, %1, %2, %3}, " operands ";}"                                           \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                       \
               : __VA_ARGS__)
#define WGMMA_SHARED(shape, type, transpositions) \
  WGMMA(shape, type, "%4, %5, p, 1, 1" transpositions, "l"(a), "l"(b))
#define WGMMA_REGISTERS(shape, type, transposition)                                                  \
  WGMMA(shape, type, "{%4, %5, %6, %7}, %8, p, 1, 1" transposition, "r"(a[0]), "r"(a[1]), "r"(a[2]), \
        "r"(a[3]), "l"(b))

template <int kFormat>
__device__ void wgmma(float (&d)[4], uint64_t a, uint64_t b) {
  if constexpr (kFormat == 0) WGMMA_SHARED("m64n8k16", "bf16", ", 0, 0");
  if constexpr (kFormat == 1) WGMMA_SHARED("m64n8k16", "f16", ", 0, 0");
  if constexpr (kFormat == 2) WGMMA_SHARED("m64n8k8", "tf32", "");
  if constexpr (kFormat == 3) WGMMA_SHARED("m64n8k32", "e4m3", "");
  if constexpr (kFormat == 4) WGMMA_SHARED("m64n8k32", "e5m2", "");
}
template <int kFormat>
__device__ void wgmma(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kFormat == 0) WGMMA_REGISTERS("m64n8k16", "bf16", ", 0");
  if constexpr (kFormat == 1) WGMMA_REGISTERS("m64n8k16", "f16", ", 0");
  if constexpr (kFormat == 2) WGMMA_REGISTERS("m64n8k8", "tf32", "");
  if constexpr (kFormat == 3) WGMMA_REGISTERS("m64n8k32", "e4m3", "");
  if constexpr (kFormat == 4) WGMMA_REGISTERS("m64n8k32", "e5m2", "");
}

// Shared memory without swizzle: core matrices of 8 rows of 16 bytes, the two of a row's 32 bytes one after
// the other.
constexpr int kCoreBytes = 8 * 16, kCoreRowBytes = 2 * kCoreBytes;

__device__ int core_word(int row, int word) {
  return (row / 8 * kCoreRowBytes + word / 4 * kCoreBytes + row % 8 * 16) / 4 + word % 4;
}

__device__ uint64_t descriptor(const uint32_t* matrix) {
  const auto address = static_cast<uint64_t>(__cvta_generic_to_shared(matrix));
  const uint64_t along_k = kCoreBytes, along_rows = kCoreRowBytes;  // from one core matrix to the next
  return (address & 0x3ffff) >> 4 | along_k >> 4 << 16 | along_rows >> 4 << 32;
}

// a (tiles, kRows, kBlocks, kWords), b (tiles, kColumns, kBlocks, kWords), c and d (tiles, kRows, kColumns).
// One tile a thread block. A in registers and the sums lie alike for both instructions. wgmma is done twice,
// with A in shared memory and in registers; where the two differ, d is kForkedResult.
template <int kFormat, int kInstruction, int kBlocks>
__global__ void __launch_bounds__(kThreads)
    multiply(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  a += blockIdx.x * kRows * kBlocks * kWords;
  b += blockIdx.x * kColumns * kBlocks * kWords;
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const int row = warp * 16 + group;
  uint32_t a_part[kBlocks][4], b_part[kBlocks][2];
  for (int block = 0; block < kBlocks; ++block) {
    const uint32_t* upper = a + (row * kBlocks + block) * kWords + quad;
    const uint32_t* lower = upper + 8 * kBlocks * kWords;
    const uint32_t* column = b + (group * kBlocks + block) * kWords + quad;
    a_part[block][0] = upper[0], a_part[block][1] = lower[0];
    a_part[block][2] = upper[4], a_part[block][3] = lower[4];
    b_part[block][0] = column[0], b_part[block][1] = column[4];
  }
  const int corner = blockIdx.x * kCases + row * kColumns + 2 * quad, below = corner + 8 * kColumns;
  const int places[4] = {corner, corner + 1, below, below + 1};
  float sums[4], sums_again[4];
  for (int i = 0; i < 4; ++i) sums[i] = sums_again[i] = c[places[i]];
  if constexpr (kInstruction == kMmaSync) {
    for (int block = 0; block < kBlocks; ++block) mma_sync<kFormat>(sums, a_part[block], b_part[block]);
    for (int i = 0; i < 4; ++i) d[places[i]] = sums[i];
  } else {
    __shared__ alignas(128) uint32_t a_tile[kBlocks][kRows * kWords], b_tile[kBlocks][kColumns * kWords];
    for (int i = threadIdx.x; i < (kRows + kColumns) * kBlocks * kWords; i += kThreads) {
      const int line = i / (kBlocks * kWords), block = i / kWords % kBlocks, word = i % kWords;
      if (line < kRows)
        a_tile[block][core_word(line, word)] = a[i];
      else
        b_tile[block][core_word(line - kRows, word)] = b[i - kRows * kBlocks * kWords];
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      wgmma<kFormat>(sums, descriptor(a_tile[block]), descriptor(b_tile[block]));
      wgmma<kFormat>(sums_again, a_part[block], descriptor(b_tile[block]));
    }
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; ++i) {
      const bool forked = __float_as_uint(sums[i]) != __float_as_uint(sums_again[i]);
      d[places[i]] = forked ? __uint_as_float(kForkedResult) : sums[i];
    }
  }
}

template <int kFormat, int kInstruction>
void launch(int blocks, int tiles, const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  if (blocks == 1) multiply<kFormat, kInstruction, 1><<<tiles, kThreads>>>(a, b, c, d);
  if (blocks == 2) multiply<kFormat, kInstruction, 2><<<tiles, kThreads>>>(a, b, c, d);
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<uint32_t>& words) : bytes_(words.size() * 4) {
    check(cudaMalloc(&data_, bytes_), "cudaMalloc");
    check(cudaMemcpy(data_, words.data(), bytes_, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  }
  ~DeviceArray() { cudaFree(data_); }
  T* data() { return static_cast<T*>(data_); }
  void read(std::vector<uint32_t>& words) const {
    check(cudaMemcpy(words.data(), data_, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

void ask_chip(Batch& batch) {
  using Launch = void (*)(int, int, const uint32_t*, const uint32_t*, const float*, float*);
  static constexpr Launch kLaunches[][kInstructions] = {{launch<0, 0>, launch<0, 1>},
                                                        {launch<1, 0>, launch<1, 1>},
                                                        {launch<2, 0>, launch<2, 1>},
                                                        {launch<3, 0>, launch<3, 1>},
                                                        {launch<4, 0>, launch<4, 1>}};
  const auto format =
      std::find(std::begin(kFormats), std::end(kFormats), batch.format) - std::begin(kFormats);
  DeviceArray<uint32_t> a(batch.a), b(batch.b);
  DeviceArray<float> c(batch.c);
  for (int i = 0; i < kInstructions; ++i) {
    batch.results[i].assign(batch.c.size(), kUnwritten);
    DeviceArray<float> d(batch.results[i]);
    kLaunches[format][i](batch.blocks, batch.tiles, a.data(), b.data(), c.data(), d.data());
    check(cudaGetLastError(), "launch");
    check(cudaDeviceSynchronize(), "kernel");
    d.read(batch.results[i]);
  }
}

// ------------------------------------------------------------------------------------------ the verdicts

enum Mode { kChip, kDryRun, kDryRunWrong };

void compute(Mode mode, Batch& batch) {
  if (mode == kChip) return ask_chip(batch);
  for (int i = 0; i < kInstructions; ++i) {
    TensorCoreModel model = model_of(batch.format, static_cast<Instruction>(i));
    if (mode == kDryRunWrong) model = wrong_models(model).front().model;
    batch.results[i].resize(batch.c.size());
    parallel_for(batch.cases(), [&](int64_t index, int) {
      const ChipCase one = case_of(batch, index);
      const auto c = std::bit_cast<float>(one.c);
      batch.results[i][index] =
          std::bit_cast<uint32_t>(tensor_core_trace(model, element_values(batch.format, one.a),
                                                    element_values(batch.format, one.b), c)
                                      .result);
    });
  }
}

// Does an operand reach the place that we think? One factor is a single 1, so that the other comes out as it
// is.
void check_layout(Mode mode, Format format, uint64_t seed) {
  for (const int blocks : {1, 2}) {
    Batch batch(format, blocks, kTiles / 8);
    const int terms = batch.terms();
    std::vector<uint32_t> unit(terms);
    for (int64_t tile = 0; tile < batch.tiles; ++tile) {
      const auto lone_one = [&](int64_t line) {
        std::fill(unit.begin(), unit.end(), 0u);
        unit[line % terms] = encode(format, 1) << element_shift(format);
        return unit;
      };
      const bool a_is_unit = tile % 2;
      TileMaker(batch, {seed, uint32_t(tile), 99}).make(tile);
      for (int r = 0; a_is_unit && r < kRows; ++r)
        set_elements(batch, batch.a, tile * kRows + r, lone_one(tile * 4 + r));
      for (int c = 0; !a_is_unit && c < kColumns; ++c)
        set_elements(batch, batch.b, tile * kColumns + c, lone_one(tile * 4 + c));
    }
    std::fill(batch.c.begin(), batch.c.end(), 0u);
    compute(mode, batch);
    for (int64_t index = 0; index < batch.cases(); ++index) {
      const ChipCase one = case_of(batch, index);
      if (one.kind == kKindNames[kNanInf]) continue;
      const std::vector<float> a = element_values(format, one.a), b = element_values(format, one.b);
      const float expected =
          std::inner_product(a.begin(), a.end(), b.begin(), 0.0f);  // of one number and zeros
      for (int i = 0; i < kInstructions; ++i)
        if (std::bit_cast<float>(one.results[i]) != expected)
          throw std::runtime_error(
              "layout of " + to_string(format) + " " + std::string(kInstructionNames[i]) +
              " is not as thought: expected the number beside the lone 1 in\n" + to_line(format, one));
    }
  }
}

struct Tally {
  int64_t cases[2][kKinds] = {};  // one k-block, chains
  int64_t wrong[kInstructions][kKinds] = {};
  std::vector<int64_t> rivals_right[kInstructions];  // (wrong models)
};

struct Subject {
  TensorCoreModel model;
  std::vector<WrongModel> rivals;
};

void compare(const Batch& batch, const std::vector<Subject>& subjects, Tally& tally, int& complaints) {
  std::mutex mutex;
  parallel_for(batch.tiles, [&](int64_t tile, int) {
    Tally mine;
    for (int i = 0; i < kInstructions; ++i) mine.rivals_right[i].resize(subjects[i].rivals.size());
    const int terms = batch.terms();
    std::vector<float> rows[kRows + kColumns];  // of a, then columns of b
    for (int r = 0; r < kRows; ++r)
      rows[r] = element_values(batch.format, elements_of(batch, batch.a, tile * kRows + r));
    for (int c = 0; c < kColumns; ++c)
      rows[kRows + c] = element_values(batch.format, elements_of(batch, batch.b, tile * kColumns + c));
    for (int k = 0; k < kCases; ++k) {
      const float *a = rows[k / kColumns].data(), *b = rows[kRows + k % kColumns].data();
      const int64_t index = tile * kCases + k;
      const auto c = std::bit_cast<float>(batch.c[index]);
      const Kind kind = kind_of(batch.format, a, b, terms, c);
      ++mine.cases[batch.blocks - 1][kind];
      for (int i = 0; i < kInstructions; ++i) {
        const uint32_t result = batch.results[i][index];
        const auto right = [&](const TensorCoreModel& model) {
          return std::bit_cast<uint32_t>(tensor_core_dot(model, a, b, terms, c)) == result;
        };
        for (size_t r = 0; r < subjects[i].rivals.size(); ++r)
          mine.rivals_right[i][r] += right(subjects[i].rivals[r].model);
        if (right(subjects[i].model)) continue;
        ++mine.wrong[i][kind];
        std::lock_guard lock(mutex);
        if (complaints-- > 0) {
          const ChipCase one = case_of(batch, index);
          std::printf("differs: %s %s, model %08x: %s\n", to_string(batch.format).c_str(),
                      kInstructionNames[i].data(), model_result(subjects[i].model, one),
                      to_line(batch.format, one).c_str());
        }
      }
    }
    std::lock_guard lock(mutex);
    for (int kind = 0; kind < kKinds; ++kind) {
      tally.cases[batch.blocks - 1][kind] += mine.cases[batch.blocks - 1][kind];
      for (int i = 0; i < kInstructions; ++i) tally.wrong[i][kind] += mine.wrong[i][kind];
    }
    for (int i = 0; i < kInstructions; ++i)
      for (size_t r = 0; r < mine.rivals_right[i].size(); ++r)
        tally.rivals_right[i][r] += mine.rivals_right[i][r];
  });
}

// `count` cases of a batch: first some that tell each wrong model from the chip, then as many of each kind.
std::vector<std::string> keep(const Batch& batch, const std::vector<Subject>& subjects, int count) {
  std::map<int64_t, ChipCase> kept;  // by their index in the batch
  int64_t at = 0;
  const int64_t stride = 104729;  // a prime: neighbours in the search lie far apart
  const auto search = [&](auto&& wanted) {
    for (int64_t tries = batch.cases(); tries > 0; --tries) {
      at = (at + stride) % batch.cases();
      if (kept.contains(at)) continue;
      ChipCase one = case_of(batch, at);
      if (wanted(one)) return kept.emplace(at, std::move(one)), true;
    }
    return false;
  };
  for (int i = 0; i < kInstructions; ++i)
    for (const WrongModel& rival : subjects[i].rivals) {
      const auto told = [&](const ChipCase& one) { return model_result(rival.model, one) != one.results[i]; };
      int64_t wanted = count / 25;
      for (const auto& [index, one] : kept) wanted -= told(one);
      while (wanted-- > 0 && search(told)) continue;
    }
  bool present[kKinds];
  std::fill_n(present, kKinds, true);
  for (int kind = 0; kept.size() < size_t(count); kind = (kind + 1) % kKinds)
    present[kind] =
        present[kind] && search([&](const ChipCase& one) { return one.kind == kKindNames[kind]; });
  std::vector<std::string> lines;
  for (const auto& [index, one] : kept) lines.push_back(to_line(batch.format, one));
  return lines;
}

void print(Format format, const std::vector<Subject>& subjects, const Tally& tally) {
  const std::string name = to_string(format);
  int64_t total = 0;
  for (int kind = 0; kind < kKinds; ++kind) {
    const int64_t ones = tally.cases[0][kind], chains = tally.cases[1][kind];
    total += ones + chains;
    std::printf("%-5s %-11s %10lld + %9lld chained; differ: mma.sync %lld, wgmma %lld\n", name.c_str(),
                kKindNames[kind], (long long)ones, (long long)chains, (long long)tally.wrong[kMmaSync][kind],
                (long long)tally.wrong[kWgmma][kind]);
  }
  for (int i = 0; i < kInstructions; ++i) {
    const auto row = [&](const std::string& model, int64_t right) {
      std::printf("%-5s %-9s %-32s %10lld right, %9lld wrong of %lld\n", name.c_str(),
                  kInstructionNames[i].data(), model.c_str(), (long long)right, (long long)(total - right),
                  (long long)total);
    };
    row("the model", total - std::accumulate(tally.wrong[i], tally.wrong[i] + kKinds, int64_t{0}));
    for (size_t r = 0; r < subjects[i].rivals.size(); ++r)
      row(subjects[i].rivals[r].name, tally.rivals_right[i][r]);
  }
  std::fflush(stdout);
}

int run(Mode mode, int batches, uint64_t seed, const std::string& folder) {
  std::string chip = "dry run, no chip";
  if (mode == kChip) {
    cudaDeviceProp device{};
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0 ||
        cudaGetDeviceProperties(&device, 0) != cudaSuccess)
      throw std::runtime_error("no GPU here: expected a Hopper GPU (--dry-run does without)");
    if (device.major != 9)
      throw std::runtime_error("expected a Hopper GPU (compute capability 9.0), found " +
                               std::string(device.name));
    chip = device.name;
  }
  std::printf("%s, seed %llu\n", chip.c_str(), (unsigned long long)seed);
  int complaints = 10;
  bool equal = true;
  for (const Format format : kFormats) {
    check_layout(mode, format, seed);
    std::vector<Subject> subjects;
    Tally tally;
    for (int i = 0; i < kInstructions; ++i) {
      const TensorCoreModel& model = model_of(format, static_cast<Instruction>(i));
      subjects.push_back({model, wrong_models(model)});
      tally.rivals_right[i].resize(subjects[i].rivals.size());
    }
    std::vector<std::string> kept;
    const int chains = (batches + 3) / 4;
    for (int number = 0; number < batches + chains; ++number) {
      const bool chained = number >= batches;
      Batch batch(format, chained ? 2 : 1, kTiles);
      parallel_for(kTiles, [&](int64_t tile, int) {
        const auto stream = static_cast<uint32_t>(number * kTiles + tile);
        TileMaker(batch, {seed, stream, static_cast<uint32_t>(code_bits(format) * 8 + format.exponent_bits)})
            .make(tile);
      });
      compute(mode, batch);
      compare(batch, subjects, tally, complaints);
      if (folder.empty() || (number != 0 && number != batches)) continue;
      for (std::string& line : keep(batch, subjects, chained ? kKeptChains : kKept - kKeptChains))
        kept.push_back(std::move(line));
    }
    print(format, subjects, tally);
    for (const auto& wrong : tally.wrong) equal &= std::accumulate(wrong, wrong + kKinds, int64_t{0}) == 0;
    if (folder.empty()) continue;
    std::ofstream file(folder + "/" + to_string(format) + ".txt");
    file
        << "# " << to_string(format) << " on " << chip << ", tensor_core_chip --seed " << seed
        << "\n# kind, a, b (codes, term 0 first), addend, result of mma.sync, result of wgmma (FP32 words)\n";
    for (const std::string& line : kept) file << line << "\n";
    if (!file.flush()) throw std::runtime_error("cannot write " + folder + "/" + to_string(format) + ".txt");
  }
  std::printf("%s\n", equal ? "all equal" : "SOME DIFFER");
  return equal ? 0 : 1;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  using namespace evenkeel;
  Mode mode = kChip;
  long batches = 32, seed = 1;
  std::string folder;
  try {
    for (int i = 1; i < argc; ++i) {
      const std::string option = argv[i];
      const auto value = [&] {
        return std::string(++i < argc ? argv[i] : throw std::invalid_argument(option));
      };
      if (option == "--dry-run")
        mode = kDryRun;
      else if (option == "--dry-run-wrong")
        mode = kDryRunWrong;
      else if (option == "--batches")
        batches = std::stol(value());
      else if (option == "--seed")
        seed = std::stol(value());
      else if (option == "--keep")
        folder = value();
      else
        throw std::invalid_argument(option);
    }
    if (batches < 1 || batches > 1000) throw std::invalid_argument("--batches: expected 1 to 1000");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\nfound: %s\n", kUsage, error.what());
    return 2;
  }
  try {
    return run(mode, static_cast<int>(batches), static_cast<uint64_t>(seed), folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tensor_core_chip: %s\n", error.what());
    return 3;
  }
}
