// The centre of the project: the named rounding sites of attention, and plans that give each a format.
// The same names everywhere: C++, CUDA, command line, records, findings, report, Python.
// Free of tensors and threads.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/stabiliser.h"
#include "numerics/rounding.h"

namespace evenkeel {

// Notation of one row: S scores, m shift, Pb = exp(S - m), l row sum, Ob = Pb V, O = Ob / l, L = m + log l;
// dO the gradient of O, P = exp(S - L), dP = dO V^T, delta = dO . O, dS = a P (dP - delta).
enum class Site {
  q,  // the operands as the products read them: fp32 in every named plan but fp8
  k,
  v,
  grad_output,       // dO
  scores,            // S, scaled (and soft-capped)
  shifted,           // S - m
  probs,             // Pb as operand of Pb V
  row_sum,           // l, after each tile
  pv,                // Ob, after each tile
  output,            // O
  output_for_delta,  // the O that delta uses
  delta,             // delta
  probs_bwd,         // P as operand of dV
  dprobs,            // dP
  dscores,           // dS as operand of dQ and dK
  dq,
  dk,
  dv,
};
inline constexpr int kSiteCount = 18;
// clang-format off
inline constexpr std::array<std::string_view, kSiteCount> kSiteNames = {
    "q", "k", "v", "grad_output", "scores", "shifted", "probs", "row_sum", "pv", "output", "output_for_delta",
    "delta", "probs_bwd", "dprobs", "dscores", "dq", "dk", "dv"};
// clang-format on
Site parse_site(std::string_view text);
constexpr std::string_view name(Site site) { return kSiteNames[static_cast<size_t>(site)]; }

Stabiliser parse_stabiliser(std::string_view text);  // the table: stabiliser.h

// How the products add up.
enum class Accumulate {
  fp32_sequential,  // one fused multiply-add after another, in the order of the summed index
  tensor_core,      // blocks of products aligned and truncated as Hopper's tensor cores do:
                    // numerics/tensor_core.h
};
inline constexpr std::array<std::string_view, 2> kAccumulateNames = {"fp32_sequential", "tensor_core"};
constexpr std::string_view name(Accumulate a) { return kAccumulateNames[static_cast<size_t>(a)]; }

// Everything that decides the bits of one head's attention, besides its inputs and the tile sizes.
struct PrecisionPlan {
  std::array<Rounding, kSiteCount> rounding{};  // fp32 at every site
  Stabiliser stabiliser = Stabiliser::none;
  Accumulate accumulate = Accumulate::fp32_sequential;
  float keel = 0;               // z of the attention z-loss z L^2 per row; 0 is off
  float beta = 2;               // paper, paper_capped: factor on a positive tied maximum
  float cap = 8;                // paper_capped: largest shift, in nats
  float tie_tolerance = 1e-3f;  // scores this close to the maximum tie with it
  uint64_t seed = 0;            // of stochastic sites, dither and the capped shift

  const Rounding& at(Site site) const { return rounding[static_cast<size_t>(site)]; }
  Rounding& at(Site site) { return rounding[static_cast<size_t>(site)]; }
  friend bool operator==(const PrecisionPlan&, const PrecisionPlan&) = default;
};

// Plans with names.
//   fp32      nothing is rounded below FP32
//   flash2    what FlashAttention-2 does: probs, output, probs_bwd, dscores, dq, dk, dv in bf16, the rest fp32
//   bf16_all  the paper's published arithmetic: flash2, and scores, shifted, row_sum, pv, dprobs in bf16
//   fp8       FlashAttention-3 style: e4m3 operands (probs scaled by 2^8), bf16 outputs and gradients
inline constexpr std::array<std::string_view, 4> kPlanNames = {"fp32", "flash2", "bf16_all", "fp8"};

// A comma-separated list, read from the left: plan names and key=value. Keys: a site (value: parse_rounding),
// stabiliser, accumulate, keel, beta, cap, tie_tolerance, seed. The first item may be a plan's name; setting
// `output` sets output_for_delta too, unless that is set by itself.
//   bf16_all,row_sum=fp32    flash2,stabiliser=zero_sum,keel=1e-3    fp32,row_sum=e5m2/stochastic
// Throws std::invalid_argument naming what was found and what is known.
PrecisionPlan parse_plan(std::string_view text);
// The shortest text that parse_plan turns back into the plan.
std::string to_string(const PrecisionPlan& plan);

// Plans by layer and head: clauses separated by ';', later ones win.
//   bf16_all; layer 1 head 3,7: output_for_delta=fp32; layer 2: stabiliser=zero_sum
// A scope is `layer LIST`, `head LIST` or both; LIST is numbers and ranges, as in 0,2-4. Layers and heads
// count from 0. A clause without a scope holds everywhere; a scoped clause changes what came before it.
class ScopedPlan {
 public:
  ScopedPlan() = default;
  explicit ScopedPlan(const PrecisionPlan& everywhere) : base_(everywhere) {}
  static ScopedPlan parse(std::string_view text);

  PrecisionPlan at(int layer, int head) const;
  bool is_scoped() const { return !clauses_.empty(); }
  // std::invalid_argument where a clause names a layer or a head that a model of these sizes does not have.
  void check_scopes(int64_t layers, int64_t heads) const;

 private:
  struct Clause {
    std::vector<std::pair<int, int>> layers, heads;  // inclusive ranges; empty: all
    std::string changes;                             // for parse_changes
  };
  PrecisionPlan base_;
  std::vector<Clause> clauses_;
};

}  // namespace evenkeel
