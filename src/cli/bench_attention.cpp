// `evenkeel bench attention`: the CPU's attention against the machine's own peak and against the same
// attention unfused over OpenBLAS. Ratios from one run: the contestants take turns, and each ratio is of
// medians.
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>

#include "attention/attention.h"
#include "attention/attention_kernels.h"
#include "base/progress.h"
#include "base/threads.h"
#include "cli/bench.h"
#include "gpu/shared_library.h"
#include "numerics/cpu.h"
#include "numerics/round_array.h"
#include "training/backend.h"

namespace evenkeel::cli {
// A namespace of its own: names as natural as the other benches have.
namespace attention_bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_of(const std::function<void()>& work) {
  const Clock::time_point start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// OpenBLAS, opened at run time so that the program does not need it.
class OpenBlas {
 public:
  OpenBlas() {
    SharedLibrary library({"libopenblas.so.0", "libopenblas.so"});
    library.find(sgemm_, "cblas_sgemm");
    void (*set_threads)(int) = nullptr;
    library.find(set_threads, "openblas_set_num_threads");
    if (set_threads) set_threads(thread_count());
  }
  bool present() const { return sgemm_ != nullptr; }
  // C = alpha op(A) op(B) + beta C, row-major.
  void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
            int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) const {
    constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;
    sgemm_(kRowMajor, transpose_a ? kTransposed : kPlain, transpose_b ? kTransposed : kPlain,
           static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), alpha, a, static_cast<int>(lda), b,
           static_cast<int>(ldb), beta, c, static_cast<int>(ldc));
  }

 private:
  using Sgemm = void(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*,
                     int);
  Sgemm* sgemm_ = nullptr;
};

struct Problem {
  int64_t H, T, D;
  Tensor<float> q, k, v, d_o;  // (1, H, T, D)
  AttentionInputs inputs() const { return {q.view(), k.view(), v.view()}; }
  // Forward 4 H T^2 D, halved by the causal mask; backward 2.5 times that.
  double flops() const { return 3.5 * 4 * static_cast<double>(H * T * T * D) / 2; }
};

Problem make_problem(int64_t H, int64_t T, int64_t D) {
  Problem p{H,
            T,
            D,
            Tensor<float>({1, H, T, D}),
            Tensor<float>({1, H, T, D}),
            Tensor<float>({1, H, T, D}),
            Tensor<float>({1, H, T, D})};
  uint32_t tensor = 0;
  for (Tensor<float>* x : {&p.q, &p.k, &p.v, &p.d_o}) {
    for (size_t n = 0; n < x->values().size(); ++n)  // uniform with variance 1
      x->values()[n] = (random_unit({1, 0, tensor}, n) - 0.5f) * std::sqrt(12.0f);
    round_array(Rounding{kBf16}, x->values().data(), x->values().data(), x->values().size());
    ++tensor;
  }
  return p;
}

// What people write without a fused kernel: whole T x T matrices, products by BLAS (all cores), passes over
// rows in between (all cores, vectorised by the compiler but for exp, which is ours). FP32, causal.
class Unfused {
 public:
  Unfused(const OpenBlas& blas, const Problem& p)
      : blas_(blas),
        p_(p),
        s_(size(p.T * p.T)),
        dp_(s_.size()),
        o_(p.q.shape()),
        dq_(p.q.shape()),
        dk_(p.q.shape()),
        dv_(p.q.shape()),
        zeros_(size(p.T)),
        sums_(size(thread_count() * p.T)) {}

  void run() {
    const int64_t T = p_.T, D = p_.D;
    const float scale = 1 / std::sqrt(static_cast<float>(D));
    for (int64_t h = 0; h < p_.H; ++h) {
      const float *q = p_.q.view().at(0, h, 0), *k = p_.k.view().at(0, h, 0), *v = p_.v.view().at(0, h, 0),
                  *d_o = p_.d_o.view().at(0, h, 0);
      float* o = o_.view().at(0, h, 0);
      blas_.gemm(false, true, T, T, D, scale, q, D, k, D, 0, s_.data(), T);
      rows([&](int64_t i, float* s, float*, int worker) { softmax(s, i, worker); });
      blas_.gemm(false, false, T, D, T, 1, s_.data(), T, v, D, 0, o, D);
      blas_.gemm(true, false, T, D, T, 1, s_.data(), T, d_o, D, 0, dv_.view().at(0, h, 0), D);
      blas_.gemm(false, true, T, T, D, 1, d_o, D, v, D, 0, dp_.data(), T);
      rows([&](int64_t i, float* s, float* dp, int) {
        float delta = 0;
        for (int64_t d = 0; d < D; ++d) delta += o[i * D + d] * d_o[i * D + d];
        for (int64_t j = 0; j <= i; ++j) dp[j] = scale * s[j] * (dp[j] - delta);
        std::fill(dp + i + 1, dp + T, 0.0f);
      });
      blas_.gemm(false, false, T, D, T, 1, dp_.data(), T, k, D, 0, dq_.view().at(0, h, 0), D);
      blas_.gemm(true, false, T, D, T, 1, dp_.data(), T, q, D, 0, dk_.view().at(0, h, 0), D);
    }
  }
  const Tensor<float>& dq() const { return dq_; }

 private:
  static size_t size(int64_t n) { return static_cast<size_t>(n); }
  void rows(const std::function<void(int64_t, float*, float*, int)>& row) {
    constexpr int64_t kRows = 64;
    parallel_for((p_.T + kRows - 1) / kRows, [&](int64_t part, int worker) {
      for (int64_t i = part * kRows; i < std::min(p_.T, (part + 1) * kRows); ++i)
        row(i, s_.data() + i * p_.T, dp_.data() + i * p_.T, worker);
    });
  }
  // One row in place; exp by our kernel, which takes columns in steps of 16.
  void softmax(float* s, int64_t i, int worker) {
    float max = s[0];
    for (int64_t j = 1; j <= i; ++j) max = std::max(max, s[j]);
    for (int64_t j = 0; j <= i; ++j) s[j] -= max;
    std::fill(s + i + 1, s + p_.T, -INFINITY);
    attention_kernels().exp_shifted(s, 1, p_.T, p_.T, zeros_.data(), sums_.data() + worker * p_.T);
    float sum = 0;
    for (int64_t j = 0; j <= i; ++j) sum += s[j];
    for (int64_t j = 0; j <= i; ++j) s[j] /= sum;
  }

  const OpenBlas& blas_;
  const Problem& p_;
  std::vector<float> s_, dp_;  // (T, T)
  Tensor<float> o_, dq_, dk_, dv_;
  std::vector<float> zeros_;  // (T)
  std::vector<float> sums_;   // (threads, T): written by the exponential, read by nobody
};

struct Entry {
  std::string name;
  std::function<void()> run;
  std::vector<double> seconds;
};

int64_t resident_kib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

struct Line {
  std::string what;
  double value, target;
  bool at_least;
  bool ok() const { return at_least ? value >= target : value <= target; }
};

struct Measured {
  double flops = 0;  // of one run of an entry
  double peak = 0;   // FMA operations a second: the best round, since a disturbed one is no peak
  size_t rounds = 0;
  std::vector<Entry> entries;
  std::vector<Line> lines;
  std::vector<std::pair<int64_t, int64_t>> memory;  // (T, KiB beyond inputs and outputs)
  bool has_blas = false;

  double share(const Entry& entry) const { return flops / median(entry.seconds) / peak; }
};

// What one head needs beyond inputs and outputs, at T and at 4 T. To be called first, while the process is small.
std::vector<std::pair<int64_t, int64_t>> measure_memory() {
  std::vector<std::pair<int64_t, int64_t>> memory;
  for (int64_t T : {4096, 16384}) {
    const Problem p = make_problem(1, T, 64);
    AttentionProblem config;
    config.plans = {parse_plan("bf16_all")};
    config.mask.causal = true;
    AttentionBuffers buffers(p.inputs(), false);
    const int64_t before = resident_kib();
    attention_forward(config, p.inputs(), buffers.forward());
    attention_backward(config, p.inputs(), p.d_o.view(), buffers.forward(), buffers.backward());
    memory.emplace_back(T, resident_kib() - before);
  }
  return memory;
}

void print_json(const Measured& m) {
  nlohmann::ordered_json out = {{"cpu_target", name(cpu_target())},
                                {"threads", thread_count()},
                                {"shape", {1, 12, 1024, 64}},
                                {"peak_gflops", m.peak / 1e9}};
  for (const Entry& entry : m.entries)
    out["runs"].push_back({{"name", entry.name},
                           {"ms", median(entry.seconds) * 1e3},
                           {"gflops", m.flops / median(entry.seconds) / 1e9},
                           {"share_of_peak", m.share(entry)}});
  for (const Line& line : m.lines)
    out["targets"].push_back(
        {{"what", line.what}, {"ratio", line.value}, {"target", line.target}, {"ok", line.ok()}});
  for (auto [T, kib] : m.memory) out["memory"].push_back({{"T", T}, {"kib", kib}});
  fmt::print("{}\n", out.dump(2));
}

void print_text(const Measured& m) {
  fmt::print(
      "attention on the CPU: B=1 H=12 T=1024 D=64 causal, forward + backward, {} threads, {} kernels\n",
      thread_count(), name(cpu_target()));
  fmt::print("fused multiply-add peak, all threads: {:.0f} GFLOP/s (best of {} rounds)\n\n", m.peak / 1e9,
             m.rounds);
  fmt::print("{:<34}{:>9}{:>18}{:>10}{:>10}\n", "", "ms", "fastest..slowest", "GFLOP/s", "of peak");
  for (const Entry& entry : m.entries) {
    const auto [least, most] = std::minmax_element(entry.seconds.begin(), entry.seconds.end());
    fmt::print("{:<34}{:>9.2f}{:>18}{:>10.1f}{:>9.1f}%\n", entry.name, median(entry.seconds) * 1e3,
               fmt::format("{:.2f}..{:.2f}", *least * 1e3, *most * 1e3),
               m.flops / median(entry.seconds) / 1e9, 100 * m.share(entry));
  }
  fmt::print("\nmemory beyond inputs and outputs, one head, bf16_all:");
  for (auto [T, kib] : m.memory)
    fmt::print("  T={}: {:.1f} MiB (T x T floats would be {:.0f})", T, kib / 1024.0, T * T / 262144.0);
  fmt::print("\n\n{:<48}{:>8}{:>10}\n", "", "ratio", "target");
  for (const Line& line : m.lines)
    fmt::print("{:<48}{:>8.2f}{:>10}  {}\n", line.what, line.value,
               fmt::format("{} {:.2f}", line.at_least ? ">=" : "<=", line.target), line.ok() ? "ok" : "MISS");
  if (!m.has_blas)
    fmt::print("OpenBLAS is not installed (Debian: libopenblas0-pthread): the third ratio is left out\n");
}

}  // namespace
}  // namespace attention_bench

int bench_attention(bool check, bool json) {
  using namespace attention_bench;
  Measured m;
  m.memory = measure_memory();
  const Problem p = make_problem(12, 1024, 64);
  AttentionBuffers buffers(p.inputs(), false);
  std::vector<Entry>& entries = m.entries;
  m.flops = p.flops();
  for (const char* plan : {"fp32", "flash2", "bf16_all", "bf16_all,stabiliser=consistent",
                           "bf16_all,stabiliser=zero_sum", "fp8"}) {
    AttentionProblem config;
    config.plans = {parse_plan(plan)};
    config.mask.causal = true;
    entries.push_back({plan,
                       [&p, &buffers, config] {
                         attention_forward(config, p.inputs(), buffers.forward());
                         attention_backward(config, p.inputs(), p.d_o.view(), buffers.forward(),
                                            buffers.backward());
                       },
                       {}});
  }
  const OpenBlas blas;
  Unfused unfused(blas, p);
  if (blas.present()) entries.push_back({"fp32, unfused over OpenBLAS", [&] { unfused.run(); }, {}});
  // OpenBLAS's threads spin for a while after a call and would take the next contestant's time: let them go to sleep.
  const auto settle = [&] {
    if (blas.present()) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  };

  constexpr int kRounds = 15;
  std::vector<double> peaks;
  {
    Progress progress("bench attention", kRounds);
    for (int round = 0; round < kRounds; ++round) {
      peaks.push_back(fma_flops_round());
      for (Entry& entry : entries) {
        const double seconds = seconds_of(entry.run);
        if (round > 0) entry.seconds.push_back(seconds);  // the first warms up
      }
      settle();
      progress.advance();
    }
  }
  m.peak = *std::max_element(peaks.begin(), peaks.end());
  m.rounds = peaks.size();
  m.has_blas = blas.present();
  m.lines = {{"plan fp32, share of the FMA peak", m.share(entries[0]), 0.50, true},
             {"plan bf16_all, share of the FMA peak", m.share(entries[2]), 0.25, true}};
  if (m.has_blas)
    m.lines.push_back({"plan fp32 against unfused over OpenBLAS",
                       median(entries.back().seconds) / median(entries[0].seconds), 2.0, true});
  if (json)
    print_json(m);
  else
    print_text(m);
  const bool ok = std::all_of(m.lines.begin(), m.lines.end(), [](const Line& line) { return line.ok(); });
  return check && !ok ? 1 : 0;
}

}  // namespace evenkeel::cli
