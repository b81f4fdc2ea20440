// Conformance of attention, judged by what matters to training: the sign of errors on hard inputs, and above all
// the leak rho_i = sum_j dS_ij / a. Exact softmax makes it 0 in every row, and nothing in training pulls back
// what it adds (docs/numerics.md derives the bounds). Before that the outputs must be right: wholly written,
// finite, and within the worst case of the plan's roundings from FP64 (conform_bounds.h).
#pragma once

#include <algorithm>
#include <bit>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/attention.h"
#include "numerics/error_stats.h"

namespace evenkeel {

// A family of hard inputs.
struct ConformCase {
  std::string_view name, description;
  int64_t rows_per_head, keys, head_size;  // T, N, D
  bool causal = false;
  int64_t tile_keys = 64;
  bool masked_rows = false;  // a quarter of the rows see no key
  int64_t rows_divisor = 1;  // structural cases run on fewer rows, and are not judged for bias
  bool feedback = false;  // dO is the gradient of a loss that saw the kernel's own O, rounding errors and all
  // Every row sees one key: the others are hidden (HUGE_VAL), or their scores lie at least so far below. Whatever the scores
  // are, P is 1, O is V and dS is 0. 0: rows see several.
  double one_key = 0;
  bool one_visible = false;  // a mask leaves one key of each head
  bool masked() const { return masked_rows || one_visible; }
};
const std::vector<ConformCase>& conform_cases();
// Those of the names, in their order. std::invalid_argument names the unknown one and all that are known.
std::vector<ConformCase> cases_named(const std::vector<std::string>& names);

// The inputs of `heads` heads of a case: bf16 numbers, the same for the same seed.
struct ConformInputs {
  // `constant_feature`: every key's last feature is kKeyConstant (in most cases it is so anyway). It adds a constant to
  // a row's scores, which softmax does not see, and makes dQ there kKeyConstant sum_j dS_ij: the residual of any
  // kernel, read off its public outputs.
  ConformInputs(const ConformCase& which, int64_t heads, uint64_t seed, bool constant_feature = false);
  AttentionInputs inputs() const;
  View<const float> grad_output() const;
  AttentionMask mask() const;
  // dO = O - target, the gradient of a squared error at the kernel's own O; the target is the exact O plus
  // noise.
  void set_feedback(const Tensor<float>& o, const Tensor<double>& exact_o, uint64_t seed);

  const ConformCase* which;
  Tensor<float> q, k, v, d_o;  // (1, heads, T or N, D)
  Tensor<uint8_t> visible;     // (1, heads, T, 1), (1, heads, 1, N) or empty
};

inline constexpr float kKeyConstant = 0.5f;

// A kernel under test. Every call writes every element of out.{o, dq, dk, dv}, and all of lse or nothing of it (with a keel:
// all of it). It also writes delta, residual and residual_floor, unless they are read off dQ (conform's constant_feature).
using ConformKernel = std::function<void(const AttentionProblem&, const AttentionInputs&,
                                         View<const float> grad_output, AttentionBuffers&)>;

// One plan on one case.
struct ConformResult {
  std::string_view case_name;
  int64_t rows = 0;
  // The residual, in units of delta's root mean square over the case.
  ErrorStats residual;
  double delta_rms = 0;
  // sqrt(mean of: what the plan's own rounding of dS must leave, and FP32 arithmetic), same units.
  double forced_rms = 0, arithmetic_rms = 0;
  double bias_floor = 0;  // a mean this small is FP32's own, same units
  // Errors against FP64, aggregated by row (key), in BF16 ulps of the row's largest true value
  // (of the tensor's root mean square where that is larger).
  ErrorStats o, delta, dq, dk, dv;
  double max_o = 0, max_delta = 0, max_dq = 0, max_dk = 0, max_dv = 0;  // largest absolute errors
  int64_t nonfinite = 0;                                                // values that are NaN or Inf
  int64_t unwritten = 0;  // values of O, L, dQ, dK, dV that are as they were before the call
  // Largest error over its bound (OutputBounds), by output; 0: not judged.
  double over_o = 0, over_lse = 0, over_dq = 0, over_dk = 0, over_dv = 0;
  int64_t one_key_rows = 0;  // rows that were judged as those that see one key (OneKeyBound)

  double noise_bound() const;  // on residual.rms()
  bool biased() const;         // |z| >= kBiasZ on at least kBiasRows rows, and above FP32's own arithmetic
  bool noisy() const { return residual.rms() > noise_bound(); }
  bool wrong() const { return std::max({over_o, over_lse, over_dq, over_dk, over_dv}) > 1; }
  // Outputs that are wrong, or none, have a leak that says nothing of rounding, nor of training.
  bool right() const { return rows > 0 && unwritten == 0 && nonfinite == 0 && !wrong(); }
  bool passes() const { return right() && !biased() && !noisy(); }
  // "ok"; "NOT WRITTEN"; "NOT FINITE"; or which of WRONG, BIASED and NOISY it is: "WRONG, NOISY". Static.
  const char* verdict() const;
  // What is wrong and what mends it, in a sentence; empty where it passes.
  std::string what_to_fix() const;
};
inline constexpr double kBiasZ = 4;
inline constexpr int64_t kBiasRows = 100'000;
// Sources other than the rounding of dS may add at most half of its variance.
inline constexpr double kNoiseVariance = 1.5;

struct ConformPlan {
  std::string name;
  PrecisionPlan plan;
  std::vector<ConformResult> results;  // one a case
  bool passes() const;                 // false where nothing was judged
};
// The plans that are judged where none is named.
std::vector<std::string> default_conform_plans();

// Runs every plan on every case with at least `rows` rows (fewer in structural cases). `advance` is called after
// every (plan, chunk of rows) pair, `conform_work` times in all. Throws std::invalid_argument where there is no plan, no
// case or no row to judge. constant_feature: the inputs have it, and the leak is read off dQ there.
void conform(std::vector<ConformPlan>& plans, const std::vector<ConformCase>& cases, int64_t rows,
             uint64_t seed, const ConformKernel& kernel, const std::function<void()>& advance,
             bool constant_feature = false);
int64_t conform_work(size_t plans, const std::vector<ConformCase>& cases, int64_t rows);

// What the outputs hold before each call: a NaN that no arithmetic makes, and one of BF16 too.
inline constexpr uint32_t kUnwritten = 0x7fe50000;
inline bool is_unwritten(float x) { return std::bit_cast<uint32_t>(x) == kUnwritten; }

// attention_forward and attention_backward of the CPU.
void conform_cpu_kernel(const AttentionProblem& config, const AttentionInputs& in,
                        View<const float> grad_output, AttentionBuffers& buffers);

}  // namespace evenkeel
