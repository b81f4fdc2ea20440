#include "model/device_product.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "base/whole_file.h"
#include "gpu/cuda/clock.h"
#include "gpu/cuda/cublaslt.h"
#include "gpu/device.h"
#include "gpu/device_memory.h"
#include "model/quickest.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

// --- One product in cuBLASLt's words
// It thinks in columns. Our C by rows is its D = C^T by columns, so its A is our b and its B our a. Its m and n
// are our columns and rows. A bias for each of its m rows is one for each of our columns.

constexpr size_t kWorkspaceBytes = size_t{128} << 20;  // split sums of the largest weight gradients
constexpr int kCandidates = 64;

cudaDataType_t data_type(TensorType type) { return type == TensorType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }
uint32_t alignment_of(const void* pointer) {
  constexpr uintptr_t kMost = 256;  // more is of no use to any algorithm
  const auto address = reinterpret_cast<uintptr_t>(pointer) | kMost;
  return static_cast<uint32_t>(address & (~address + 1));
}

class Description {
 public:
  explicit Description(const DeviceProduct& p) : p_(p) {
    const CublasLt& blas = cublaslt();
    check_blas(blas.desc_create(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
    // Stored with unit column stride, our b (depth, columns) is already its A (m, k) by columns.
    set(CUBLASLT_MATMUL_DESC_TRANSA, int32_t{p.b.column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T});
    set(CUBLASLT_MATMUL_DESC_TRANSB, int32_t{p.a.column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T});
    uint32_t epilogue = p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (p.end == ProductEnd::gelu)
      epilogue = p.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    if (p.end == ProductEnd::gelu_slope) epilogue = CUBLASLT_EPILOGUE_DGELU;
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    if (p.bias) {
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t{data_type(p.c_type)});
    }
    if (p.end != ProductEnd::plain) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.c_stride);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, int32_t{data_type(p.c_type)});
      set_aux(p.aux);
    }
    a_ = operand_layout(p.b, p.columns, p.depth, p.b_batch);
    b_ = operand_layout(p.a, p.depth, p.rows, p.a_batch);
    c_ = layout(p.c_type, p.columns, p.rows, p.c_stride, p.c_batch);
  }
  ~Description() {
    const CublasLt& blas = cublaslt();
    if (a_) blas.layout_destroy(a_);
    if (b_) blas.layout_destroy(b_);
    if (c_) blas.layout_destroy(c_);
    if (desc_) blas.desc_destroy(desc_);
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  void set_aux(void* aux) { set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux); }

  // By cuBLASLt's own expectation, best first.
  std::vector<cublasLtMatmulAlgo_t> candidates(cublasLtHandle_t handle) const {
    const CublasLt& blas = cublaslt();
    cublasLtMatmulPreference_t preference = nullptr;
    check_blas(blas.preference_create(&preference), "asking for algorithms");
    const auto want = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
      check_blas(blas.preference_set(preference, what, &value, sizeof value), "asking for algorithms");
    };
    want(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes});
    // Parts of a split sum are added by a pass of their own, in order, in FP32: never as they come.
    want(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p_.b.data));
    want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p_.a.data));
    want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p_.base ? p_.base : p_.c));
    want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p_.c));
    std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found;
    int count = 0;
    const cublasStatus_t status =
        blas.heuristic(handle, desc_, a_, b_, c_, c_, preference, kCandidates, found.data(), &count);
    blas.preference_destroy(preference);
    check_blas(status == CUBLAS_STATUS_NOT_SUPPORTED ? CUBLAS_STATUS_SUCCESS : status,
               "asking for algorithms");
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int n = 0; n < count; ++n)
      if (found[static_cast<size_t>(n)].state == CUBLAS_STATUS_SUCCESS)
        algorithms.push_back(found[static_cast<size_t>(n)].algo);
    return algorithms;
  }

  bool takes(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm) const {
    cublasLtMatmulHeuristicResult_t result{};
    return cublaslt().check(handle, desc_, a_, b_, c_, c_, &algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= kWorkspaceBytes;
  }

  cublasStatus_t run(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm, void* target,
                     void* workspace, cudaStream_t stream) const {
    const float beta = p_.base ? p_.base_scale : 0.0f;
    return cublaslt().matmul(handle, desc_, &p_.scale, p_.b.data, a_, p_.a.data, b_, &beta,
                             p_.base ? p_.base : target, c_, target, c_, &algorithm, workspace,
                             kWorkspaceBytes, stream);
  }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t what, T value) {
    check_blas(cublaslt().desc_set(desc_, what, &value, sizeof value), "describing a product");
  }
  // (rows, columns) by columns.
  cublasLtMatrixLayout_t layout(TensorType type, int64_t rows, int64_t columns, int64_t stride,
                                int64_t batch_stride) const {
    cublasLtMatrixLayout_t made = nullptr;
    check_blas(cublaslt().layout_create(&made, data_type(type), static_cast<uint64_t>(rows),
                                        static_cast<uint64_t>(columns), stride),
               "describing a matrix");
    if (p_.batch > 1) {
      const auto count = static_cast<int32_t>(p_.batch);
      check_blas(cublaslt().layout_set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count),
                 "describing a batch");
      check_blas(cublaslt().layout_set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride,
                                       sizeof batch_stride),
                 "describing a batch");
    }
    return made;
  }
  // Our (columns, rows) is its (rows, columns): as it lies, or transposed.
  cublasLtMatrixLayout_t operand_layout(const DeviceMatrix& m, int64_t rows, int64_t columns,
                                        int64_t batch_stride) const {
    return m.column == 1 ? layout(p_.type, rows, columns, m.row, batch_stride)
                         : layout(p_.type, columns, rows, m.column, batch_stride);
  }

  const DeviceProduct p_;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
};

// --- Which algorithm

const char* name_of(TensorType type) { return type == TensorType::bf16 ? "bf16" : "fp32"; }

// All that the choice may depend on, in words; no tab, no line break.
std::string shape_key(const DeviceProduct& p, const std::string& machine) {
  const char* ends[] = {"plain", "gelu", "gelu_slope"};
  const auto matrix = [](const DeviceMatrix& m) {
    return fmt::format("({},{})@{}", m.row, m.column, alignment_of(m.data));
  };
  std::string key =
      fmt::format("{} | {}x{}x{} {} a{} b{} -> {} stride {}@{} {}{}{}", machine, p.rows, p.columns, p.depth,
                  name_of(p.type), matrix(p.a), matrix(p.b), name_of(p.c_type), p.c_stride, alignment_of(p.c),
                  ends[static_cast<int>(p.end)], p.bias ? " bias" : "",
                  !p.base         ? ""
                  : p.base == p.c ? " added"
                                  : fmt::format(" base@{}", alignment_of(p.base)));
  if (p.batch > 1) key += fmt::format(" batch {} ({},{},{})", p.batch, p.a_batch, p.b_batch, p.c_batch);
  return key;
}

// The file of choices: a line is a key, a tab and the algorithm's words in hexadecimal. A line that is not is
// passed over.
class ChoiceFile {
 public:
  using Choices = std::map<std::string, cublasLtMatmulAlgo_t>;

  static const ChoiceFile& of_user() {
    static const ChoiceFile file;
    return file;
  }

  // False where choices cannot be kept: then there must be none.
  bool usable() const { return usable_; }
  Choices read() const {
    Choices choices;
    std::error_code none;
    if (!fs::exists(path_, none)) return choices;
    constexpr size_t kLimit = size_t{64} << 20;
    std::istringstream lines(read_whole_file(path_, kLimit));
    for (std::string line; std::getline(lines, line);) {
      const size_t tab = line.find('\t');
      if (tab == std::string::npos) continue;
      std::istringstream words(line.substr(tab + 1));
      cublasLtMatmulAlgo_t algorithm{};
      size_t count = 0;
      for (uint64_t word; count < std::size(algorithm.data) && words >> std::hex >> word;)
        algorithm.data[count++] = word;
      if (count == std::size(algorithm.data)) choices[line.substr(0, tab)] = algorithm;
    }
    return choices;
  }
  // Of two processes that time one shape at once, the first to come here decides for both.
  // `refused`: an old choice that the library no longer takes.
  cublasLtMatmulAlgo_t keep(const std::string& key, const cublasLtMatmulAlgo_t& mine,
                            const std::optional<cublasLtMatmulAlgo_t>& refused) const {
    const Lock lock(lock_path_);
    Choices choices = read();
    const auto same = [](const cublasLtMatmulAlgo_t& a, const cublasLtMatmulAlgo_t& b) {
      return std::equal(std::begin(a.data), std::end(a.data), std::begin(b.data));
    };
    const auto found = choices.find(key);
    if (found != choices.end() && !(refused && same(found->second, *refused))) return found->second;
    choices[key] = mine;
    std::string text;
    for (const auto& [name, algorithm] : choices) {
      text += name + "\t";
      for (uint64_t word : algorithm.data) text += fmt::format("{:016x} ", word);
      text.back() = '\n';
    }
    write_whole_file(path_, text);
    return mine;
  }

 private:
  class Lock {
   public:
    explicit Lock(const fs::path& path) : file_(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644)) {
      require_data(file_.valid() && flock(file_.get(), LOCK_EX) == 0, "cannot lock {}: {}", path.string(),
                   std::strerror(errno));
    }

   private:
    FileDescriptor file_;  // closing it gives the lock back
  };

  ChoiceFile() {
    const auto variable = [](const char* name) {
      const char* value = std::getenv(name);
      return std::string(value ? value : "");
    };
    const std::string cache = variable("XDG_CACHE_HOME"), home = variable("HOME");
    if (cache.empty() && home.empty()) return;
    const fs::path folder = (cache.empty() ? fs::path(home) / ".cache" : fs::path(cache)) / "evenkeel";
    std::error_code failed;
    fs::create_directories(folder, failed);
    path_ = folder / "products.txt";
    lock_path_ = folder / "products.lock";
    if (failed) return;
    try {
      const Lock writable(lock_path_);
      read();
      usable_ = true;
    } catch (const DataError&) {
    }
  }

  fs::path path_, lock_path_;
  bool usable_ = false;
};

void check_product(const DeviceProduct& p) {
  require(p.rows >= 1 && p.columns >= 1 && p.depth >= 1 && p.batch >= 1,
          "[product] expected sizes of 1 or more, got {} x {} x {}, batch {}", p.rows, p.columns, p.depth,
          p.batch);
  const auto operand = [](const char* name, const DeviceMatrix& m, int64_t rows, int64_t columns) {
    require(m.data != nullptr, "[product] expected a matrix {}, got null", name);
    require((m.column == 1 && m.row >= columns) || (m.row == 1 && m.column >= rows),
            "[product] expected one stride of {} ({} x {}) to be 1 and the other to be as long as a line, "
            "got {} and {}",
            name, rows, columns, m.row, m.column);
  };
  operand("a", p.a, p.rows, p.depth);
  operand("b", p.b, p.depth, p.columns);
  require(p.c != nullptr && p.c_stride >= p.columns,
          "[product] expected c with a stride of at least {}, got {}", p.columns, p.c_stride);
  require(p.end == ProductEnd::plain || p.aux, "[product] expected aux with a GELU, got null");
  require(p.batch == 1 || (!p.bias && p.end == ProductEnd::plain),
          "[product] expected neither bias nor GELU in a batch of products");
}

}  // namespace

namespace {

std::mutex choosing;               // guards what follows, and DeviceProducts' choices
ProductChoices cost_of_choices{};  // of this process

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

ProductChoices product_choices() {
  const std::lock_guard lock(choosing);
  return cost_of_choices;
}

struct DeviceProducts::State {
  explicit State(void* given) : stream(static_cast<cudaStream_t>(given)), workspace(kWorkspaceBytes) {
    check_blas(cublaslt().create(&handle), "starting");
    const CudaDevice device = cuda_device();
    machine = fmt::format("{} {}.{} x{}, cuBLASLt {}", device.name, device.major, device.minor,
                          device.multiprocessors, cublaslt().get_version());
  }
  ~State() { cublaslt().destroy(handle); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Seconds for one of so many products.
  double time(const Description& description, const cublasLtMatmulAlgo_t& algorithm, void* target,
              int runs) const {
    TimeMark begin, end;
    begin.set(stream);
    for (int n = 0; n < runs; ++n)
      if (description.run(handle, algorithm, target, workspace.data(), stream) != CUBLAS_STATUS_SUCCESS)
        return std::numeric_limits<double>::infinity();
    end.set(stream);
    end.wait();
    return end.seconds_since(begin) / runs;
  }

  // A GPU that has idled runs faster than one in the middle of a step, which its power limits; and not every algorithm loses
  // as much. Once a process, with the first product that keeps all of the GPU busy.
  void warm_up(const Description& description, const DeviceProduct& p, const cublasLtMatmulAlgo_t& algorithm,
               void* target) const {
    constexpr double kBusy = 1e9, kWarm = 0.1;  // operations, seconds
    static std::once_flag warm;
    if (static_cast<double>(p.rows * p.batch) * static_cast<double>(p.columns * p.depth) < kBusy) return;
    std::call_once(warm, [&] {
      const double began = now();
      while (now() - began < kWarm && time(description, algorithm, target, 16) < 1) continue;
    });
  }

  cublasLtMatmulAlgo_t choose_by_time(const Description& given, const DeviceProduct& p,
                                      const std::vector<cublasLtMatmulAlgo_t>& candidates) const {
    if (candidates.size() == 1) return candidates[0];
    const double began = now();
    // Written beside: what is there already must not be added to, nor lost.
    const size_t bytes =
        static_cast<size_t>((p.batch - 1) * p.c_batch + p.rows * p.c_stride) * element_bytes(p.c_type);
    const DeviceMemory scratch(bytes), aux(p.end == ProductEnd::gelu ? bytes : 0);
    std::optional<Description> own;
    if (p.end == ProductEnd::gelu) {
      DeviceProduct beside = p;
      beside.aux = aux.data();
      own.emplace(beside);
    }
    const Description& description = own ? *own : given;
    warm_up(description, p, candidates[0], scratch.data());
    const size_t choice = quickest(
        candidates.size(),
        {[&](size_t way, int runs) { return time(description, candidates[way], scratch.data(), runs); },
         now});
    check_cuda(cudaStreamSynchronize(stream), "timing a product");
    ++cost_of_choices.count;
    cost_of_choices.seconds += now() - began;
    return candidates[choice];
  }

  cublasLtMatmulAlgo_t choose(const Description& description, const DeviceProduct& p,
                              const std::string& key) const {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &capture), "asking whether a graph is being captured");
    if (capture != cudaStreamCaptureStatusNone)
      throw std::logic_error("[product] a new shape while a graph is captured: " + key);
    const ChoiceFile& file = ChoiceFile::of_user();
    std::optional<cublasLtMatmulAlgo_t> refused;
    if (file.usable()) {
      const ChoiceFile::Choices kept = file.read();
      if (const auto found = kept.find(key); found != kept.end()) {
        if (description.takes(handle, found->second)) return found->second;
        refused = found->second;
      }
    }
    const std::vector<cublasLtMatmulAlgo_t> candidates = description.candidates(handle);
    require_data(!candidates.empty(), "cuBLASLt has no algorithm for this product: {}", key);
    if (!file.usable()) return candidates[0];
    return file.keep(key, choose_by_time(description, p, candidates), refused);
  }

  cudaStream_t stream;
  cublasLtHandle_t handle = nullptr;
  DeviceMemory workspace;
  std::string machine;
};

DeviceProducts::DeviceProducts(void* stream) : state_(std::make_unique<State>(stream)) {}
DeviceProducts::~DeviceProducts() = default;

void DeviceProducts::multiply(const DeviceProduct& p) {
  check_product(p);
  const Description description(p);
  static ChoiceFile::Choices known;  // of this process
  const std::string key = shape_key(p, state_->machine);
  cublasLtMatmulAlgo_t algorithm;
  {
    const std::lock_guard lock(choosing);
    auto found = known.find(key);
    if (found == known.end()) found = known.emplace(key, state_->choose(description, p, key)).first;
    algorithm = found->second;
  }
  check_blas(description.run(state_->handle, algorithm, p.c, state_->workspace.data(), state_->stream),
             key.c_str());
}

}  // namespace evenkeel
