// The loss: cross-entropy and its gradient.
#include "model/cuda/device_layers.h"

#include <algorithm>

#include "gpu/cuda/barriers.cuh"
#include "gpu/cuda/copy_engine.cuh"
#include "gpu/cuda/instructions.cuh"
#include "gpu/device.h"
#include "model/cuda/device_values.cuh"

namespace evenkeel::device {
namespace {

// exp(x - most). From BF16 logits: off by 2 units in the last place, and by |most| 2^-24 of itself (the rounding of
// most in powers of 2): far below BF16's 2^-9.
template <class T>
EK_DEVICE float exp_above(float x, float most) {
  if constexpr (sizeof(T) == 2)
    return exp2_approx(fmaf(x, kLog2E, -most * kLog2E));
  else
    return expf(x - most);
}

// Rows of any length, which are read twice. A block walks over rows; a thread has the same pieces of every row.
template <class T, bool kGradients, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads)
    cross_entropy_long_kernel(T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride,
                              float scale, float* losses) {
  constexpr int kWarps = kBlockThreads / kWarp, kStep = kBlockThreads * kPiece;
  constexpr float kLowest = -0x1p126f;  // of no logits at all; log2(e) times that is finite
  __shared__ float shared_most[2][kWarps], shared_sum[2][kWarps];
  const int columns = static_cast<int>(V), padded = static_cast<int>(stride);
  const int first = threadIdx.x * kPiece, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int slot = 0;
  for (int64_t row = blockIdx.x; row < N; row += gridDim.x, slot ^= 1) {
    const int target = targets[row];
    T* const x = logits + row * stride;

    // Each thread's largest value so far, and its sum of exp(x - largest).
    float most = kLowest, sum = 0;
#pragma unroll 2
    for (int c = first; c < columns; c += kStep) {
      float v[kPiece];
      load_some(x + c, v);
      if (c + kPiece > columns)
#pragma unroll
        for (int i = 0; i < kPiece; ++i) v[i] = c + i < columns ? v[i] : -INFINITY;
      float largest = v[0];
#pragma unroll
      for (int i = 1; i < kPiece; ++i) largest = fmaxf(largest, v[i]);
      if (largest > most) {
        sum *= exp_above<T>(most, largest);
        most = largest;
      }
#pragma unroll
      for (int i = 0; i < kPiece; ++i) sum += exp_above<T>(v[i], most);
    }
    // Of the warp, then of the block. The next row's go to the other slot, so that one barrier is enough.
    const float warp_most = warp_max(most), warp_total = warp_sum(sum * exp_above<T>(most, warp_most));
    if (lane == 0) shared_most[slot][warp] = warp_most, shared_sum[slot][warp] = warp_total;
    __syncthreads();
    const float other_most = lane < kWarps ? shared_most[slot][lane] : kLowest,
                other_sum = lane < kWarps ? shared_sum[slot][lane] : 0.0f;
    const float m = warp_max(other_most), total = warp_sum(other_sum * exp_above<T>(other_most, m));
    if (target / kPiece % kBlockThreads == threadIdx.x)  // it alone may still read this logit
      losses[row] = logf(total) + (m - to_float(x[target]));
    if constexpr (kGradients) {
      const float factor = scale / total;
#pragma unroll 2
      for (int c = first; c < padded; c += kStep) {
        float v[kPiece] = {};
        if (c < columns) {
          load_some(x + c, v);
#pragma unroll
          for (int i = 0; i < kPiece; ++i) {
            v[i] = exp_above<T>(v[i], m) * factor;
            if (c + i == target) v[i] -= scale;
            if (c + i >= columns) v[i] = 0;
          }
        }
        store_some(x + c, v);
      }
    }
  }
}

// --- A row in registers

// 16 bytes of a row: kWordValues<T> values.
using Word = uint4;
template <class T>
constexpr int kWordValues = sizeof(Word) / sizeof(T);

EK_DEVICE void values_of(const Word& word, float (&v)[4]) {
  v[0] = __uint_as_float(word.x), v[1] = __uint_as_float(word.y);
  v[2] = __uint_as_float(word.z), v[3] = __uint_as_float(word.w);
}
EK_DEVICE void values_of(const Word& word, float (&v)[8]) {
  unpack(word.x, v[0], v[1]);
  unpack(word.y, v[2], v[3]);
  unpack(word.z, v[4], v[5]);
  unpack(word.w, v[6], v[7]);
}

// Only the first `kept` values are left; the others become -infinity.
EK_DEVICE void hide_behind(Word& word, int kept, float) {
  const auto hide = [&](uint32_t& value, int place) { value = place < kept ? value : 0xff800000u; };
  hide(word.x, 0), hide(word.y, 1), hide(word.z, 2), hide(word.w, 3);
}
EK_DEVICE void hide_behind(Word& word, int kept, Bf16) {
  const auto hide = [&](uint32_t& two, int place) {
    if (place >= kept) two = (two & 0xffff0000u) | 0xff80u;
    if (place + 1 >= kept) two = (two & 0xffffu) | 0xff800000u;
  };
  hide(word.x, 0), hide(word.y, 2), hide(word.z, 4), hide(word.w, 6);
}

// The compiler no longer knows what is in them, and computes anew what it has computed from them.
template <int kWords>
EK_DEVICE void forget(Word (&words)[kWords]) {
#pragma unroll
  for (int n = 0; n < kWords; ++n)
    asm volatile("" : "+r"(words[n].x), "+r"(words[n].y), "+r"(words[n].z), "+r"(words[n].w));
}

// The largest value of words, without NaN: pairs of BF16 at a time.
template <int kWords>
EK_DEVICE float largest_of(const Word (&words)[kWords], float) {
  float most = -INFINITY;
#pragma unroll
  for (int n = 0; n < kWords; ++n) {
    float v[4];
    values_of(words[n], v);
    most = fmaxf(fmaxf(fmaxf(most, v[0]), fmaxf(v[1], v[2])), v[3]);
  }
  return most;
}
template <int kWords>
EK_DEVICE float largest_of(const Word (&words)[kWords], Bf16) {
  const auto two = [](const uint32_t& bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); };
  __nv_bfloat162 most = two(words[0].x);
#pragma unroll
  for (int n = 0; n < kWords; ++n)
    most = __hmax2(__hmax2(most, two(words[n].x)),
                   __hmax2(__hmax2(two(words[n].y), two(words[n].z)), two(words[n].w)));
  return fmaxf(__low2float(most), __high2float(most));
}

// Rows on their way into shared memory, slots of `bytes` (a multiple of 16): all threads make the same calls. Hopper's
// copy engine moves a row with no thread and no load unit busy; before it, every thread copies its own words.
template <int kSlots, int kBlockThreads>
class RowsAhead {
 public:
  __device__ RowsAhead(unsigned char* memory, int bytes) : memory_(memory), bytes_(bytes) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < kSlots; ++slot) barrier_init(barriers() + slot, 1);
      barrier_init_fence();
    }
    __syncthreads();
#endif
  }
  __device__ const unsigned char* slot(int slot) const { return memory_ + slot * bytes_; }
  // REQUIRES: every thread has read what it wants of the slot, and a barrier since. row: nullptr for none
  __device__ void fetch(const void* row, int slot) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x != 0 || !row) return;
    barrier_expect_bytes(barriers() + slot, static_cast<uint32_t>(bytes_));
    load_bytes(memory_ + slot * bytes_, row, static_cast<uint32_t>(bytes_), barriers() + slot);
#else
    if (row)
      for (int byte = threadIdx.x * sizeof(Word); byte < bytes_; byte += kBlockThreads * sizeof(Word))
        copy_16_async(shared_address(memory_ + slot * bytes_ + byte),
                      static_cast<const unsigned char*>(row) + byte, true);
    commit_copies();
#endif
  }
  // For the oldest fetch, which is the slot's; parity: of the number of fetches into it before.
  __device__ void wait(int slot, uint32_t parity) const {
#if __CUDA_ARCH__ >= 900
    barrier_wait(barriers() + slot, parity);
#else
    static_assert(kSlots == 2);
    wait_for_copies<1>();
#endif
  }

 private:
  static __device__ uint64_t* barriers() {
    __shared__ __align__(8) uint64_t shared[kSlots];
    return shared;
  }
  unsigned char* memory_;
  int bytes_;
};

// A block walks over rows. A thread has the same words of every row, in registers from the one read to the one write. It
// makes three passes over them (largest, sum, gradient) with no load between. Rows come through shared memory (2 x stride
// values), where the next two are already on their way. 3.9 TB/s of reading once and writing once on an H200.
// REQUIRES: stride <= kWords kBlockThreads values of a word.
template <class T, bool kGradients, int kBlockThreads, int kWords>
__global__ void __launch_bounds__(kBlockThreads)
    cross_entropy_kernel(T* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride, float scale,
                         float* losses) {
  constexpr int kWarps = kBlockThreads / kWarp, kValues = kWordValues<T>, kSlots = 2;
  extern __shared__ __align__(128) unsigned char row_bytes[];
  __shared__ float shared_most[kWarps], shared_sum[kWarps];
  const int columns = static_cast<int>(V), padded = static_cast<int>(stride);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto word_of = [](int n) { return n * kBlockThreads + static_cast<int>(threadIdx.x); };
  const auto row_at = [&](int64_t row) { return row < N ? logits + row * stride : nullptr; };

  const RowsAhead<kSlots, kBlockThreads> rows(row_bytes, padded * static_cast<int>(sizeof(T)));
  int slot = 0;
  uint32_t parity = 0;
  for (int n = 0; n < kSlots; ++n) rows.fetch(row_at(blockIdx.x + int64_t{n} * gridDim.x), n);

  int next_target = targets[blockIdx.x];
  for (int64_t row = blockIdx.x; row < N; row += gridDim.x) {
    const int target = next_target;
    const bool has_target = target / kValues % kBlockThreads == threadIdx.x;
    if (row + gridDim.x < N) next_target = targets[row + gridDim.x];
    T* const x = logits + row * stride;
    Word words[kWords];
    rows.wait(slot, parity);
    const unsigned char* const from = rows.slot(slot);
    // Without a branch: all are asked for before the first is used.
#pragma unroll
    for (int n = 0; n < kWords; ++n)
      words[n] = reinterpret_cast<const Word*>(from)[min(word_of(n), padded / kValues - 1)];
    const float at_target = has_target ? to_float(reinterpret_cast<const T*>(from)[target]) : 0.0f;
    // What lies from V on is no logit, and adds exp(-inf) = 0 to the sum.
#pragma unroll
    for (int n = 0; n < kWords; ++n)
      if (const int kept = columns - word_of(n) * kValues; kept < kValues) hide_behind(words[n], kept, T{});

    const float warp_most = warp_max(largest_of(words, T{}));
    if (lane == 0) shared_most[warp] = warp_most;
    __syncthreads();
    rows.fetch(row_at(row + kSlots * int64_t{gridDim.x}), slot);
    if (++slot == kSlots) slot = 0, parity ^= 1;
    const float m = warp_max(lane < kWarps ? shared_most[lane] : -INFINITY);

    float sum = 0;
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      float v[kValues];
      values_of(words[n], v);
      float of_word = 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) of_word += exp_above<T>(v[i], m);
      sum += of_word;
    }
    const float warp_total = warp_sum(sum);
    if (lane == 0) shared_sum[warp] = warp_total;
    __syncthreads();
    const float total = warp_sum(lane < kWarps ? shared_sum[lane] : 0.0f);
    if (has_target) losses[row] = logf(total) + (m - at_target);

    if constexpr (kGradients) {
      const float factor = scale / total;
      forget(words);  // its registers could not hold all exponentials
#pragma unroll
      for (int n = 0; n < kWords; ++n) {
        if (word_of(n) * kValues >= padded) break;
        float v[kValues];
        values_of(words[n], v);
#pragma unroll
        for (int i = 0; i < kValues; ++i) v[i] = exp_above<T>(v[i], m) * factor;
        if (const int kept = columns - word_of(n) * kValues; kept < kValues)  // zero, and not zero times NaN
#pragma unroll
          for (int i = 0; i < kValues; ++i) v[i] = i < kept ? v[i] : 0;
        store_some(x + word_of(n) * kValues, v);
      }
      if (has_target) store(x + target, exp_above<T>(at_target, m) * factor - scale);  // over its own word
    }
  }
}

constexpr int kLossThreads = 1024;
__global__ void __launch_bounds__(kLossThreads)
    mean_loss_kernel(const float* losses, int64_t N, double* mean) {
  __shared__ double shared[kLossThreads];
  double sum = 0;
#pragma unroll 8
  for (int64_t n = threadIdx.x; n < N; n += kLossThreads) sum += static_cast<double>(losses[n]);
  shared[threadIdx.x] = sum;
  for (int half = kLossThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *mean = shared[0] / static_cast<double>(N);
}

// Shared memory that a block may have besides a kilobyte of its own.
int64_t most_shared_bytes() {
  static const int64_t most = [] {
    int ordinal = 0, bytes = 0;
    check_cuda(cudaGetDevice(&ordinal), "asking for the device");
    check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal),
               "asking for the size of shared memory");
    return int64_t{bytes} - 1024;
  }();
  return most;
}

// As many blocks as run at once, or one a row where those are fewer.
template <class Kernel, class... Arguments>
void launch_over_rows(Kernel kernel, int64_t N, int threads, size_t shared_bytes, cudaStream_t stream,
                      Arguments... arguments) {
  allow_shared_memory(kernel, shared_bytes);
  int blocks = 0;  // of a multiprocessor
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
             "asking for a grid's size");
  kernel<<<grid(std::min<int64_t>(N, int64_t{blocks} * cuda_device().multiprocessors)), threads, shared_bytes,
           stream>>>(arguments...);
}

}  // namespace

void cross_entropy(void* logits, const int32_t* targets, int64_t N, int64_t V, int64_t stride,
                   TensorType type, bool gradients, float scale, float* losses, cudaStream_t stream) {
  with_type(type, [&]<class T>() {
    const auto launch = [&](auto kernel, int threads, int64_t shared_bytes) {
      launch_over_rows(kernel, N, threads, at(shared_bytes), stream, static_cast<T*>(logits), targets, N, V,
                       stride, scale, losses);
    };
    const int64_t shared_bytes = 2 * stride * static_cast<int64_t>(sizeof(T));
    // True: rows are short enough for so many words of so many threads.
    const auto in_registers = [&]<int kBlockThreads, int kWords>() {
      if (stride > kWords * kBlockThreads * kWordValues<T> || shared_bytes > most_shared_bytes())
        return false;
      launch(gradients ? cross_entropy_kernel<T, true, kBlockThreads, kWords>
                       : cross_entropy_kernel<T, false, kBlockThreads, kWords>,
             kBlockThreads, shared_bytes);
      return true;
    };
    // Small rows: several blocks a multiprocessor. 7 words of 1024 threads: 57,344 of BF16.
    if (in_registers.template operator()<256, 4>() || in_registers.template operator()<1024, 7>()) return;
    constexpr int kLongThreads = 1024;
    launch(gradients ? cross_entropy_long_kernel<T, true, kLongThreads>
                     : cross_entropy_long_kernel<T, false, kLongThreads>,
           kLongThreads, 0);
  });
  check_launch("the loss");
}

void mean_loss(const float* losses, int64_t N, double* mean, cudaStream_t stream) {
  mean_loss_kernel<<<1, kLossThreads, 0, stream>>>(losses, N, mean);
  check_launch("the mean loss");
}

}  // namespace evenkeel::device
