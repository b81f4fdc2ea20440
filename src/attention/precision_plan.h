// The centre of the project: the named rounding sites of attention, and plans that give each a format.
// The same names everywhere: C++, CUDA, command line, records, findings, report, Python.
// Free of tensors and threads.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "attention/stabiliser.h"
#include "numerics/rounding.h"
#include "numerics/tensor_core.h"

namespace evenkeel {

// Notation of one row: S scores, m shift, Pb = exp(S - m), l row sum, Ob = Pb V, O = Ob / l, L = m + log l. Backward: dO
// is the gradient of O, P = exp(S - L), dP = dO V^T, delta = dO . O, dS = a P (dP - delta).
enum class Site {
  q,  // the operands as the products of the forward pass read them
  k,
  v,
  grad_output,       // dO as operand of dV
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
  // Later sites stand at the end: a site's number names its random numbers.
  q_bwd,  // q, k, v as the products of the backward pass read them
  k_bwd,
  v_bwd,
  grad_output_for_dprobs,  // dO as operand of dP, and of delta
};
inline constexpr int kSiteCount = 22;
// clang-format off
inline constexpr std::array<std::string_view, kSiteCount> kSiteNames = {
    "q", "k", "v", "grad_output", "scores", "shifted", "probs", "row_sum", "pv", "output", "output_for_delta",
    "delta", "probs_bwd", "dprobs", "dscores", "dq", "dk", "dv", "q_bwd", "k_bwd", "v_bwd", "grad_output_for_dprobs"};
// clang-format on
Site parse_site(std::string_view text);
constexpr std::string_view name(Site site) { return kSiteNames[static_cast<size_t>(site)]; }

// Sites that are a second reading of one value. They take the format of the first where a text sets that, unless they
// are set by themselves. They draw its random numbers, so that both readings rounded alike are the same numbers.
struct SecondReading {
  Site site, first;
};
inline constexpr SecondReading kSecondReadings[] = {{Site::output_for_delta, Site::output},
                                                    {Site::q_bwd, Site::q},
                                                    {Site::k_bwd, Site::k},
                                                    {Site::v_bwd, Site::v},
                                                    {Site::grad_output_for_dprobs, Site::grad_output}};
constexpr Site first_reading(Site site) {
  for (const SecondReading& row : kSecondReadings)
    if (row.site == site) return row.first;
  return site;
}

// Where scales may be shared (numerics/shared_scale.h): the operands of products. P and dS are made tile by tile, so that
// no more than a tile can share.
constexpr bool is_operand(Site site) {
  return first_reading(site) <= Site::grad_output || site == Site::probs || site == Site::probs_bwd ||
         site == Site::dscores;
}
constexpr bool is_made_by_tile(Site site) {
  return site == Site::probs || site == Site::probs_bwd || site == Site::dscores;
}

Stabiliser parse_stabiliser(std::string_view text);  // the table: stabiliser.h

// How the products add up.
enum class Accumulate {
  fp32_sequential,  // one fused multiply-add after another, in the order of the summed index
  tensor_core,  // blocks of products aligned and truncated as a chip's tensor cores do: numerics/tensor_core.h
};
inline constexpr std::array<std::string_view, 2> kAccumulateNames = {"fp32_sequential", "tensor_core"};
constexpr std::string_view name(Accumulate a) { return kAccumulateNames[static_cast<size_t>(a)]; }

inline constexpr std::array<std::string_view, 2> kKeyRuleNames = {"given", "centred"};
constexpr std::string_view name(KeyRule rule) { return kKeyRuleNames[static_cast<size_t>(rule)]; }

// Q-smoothing, arXiv 2411.10958: each query less the mean m of its tile is what site q rounds. The scores get a m . k_j back
// in FP32, with k_j before its rounding (centred where keys are). So centring changes no score but for rounding.
enum class QueryRule : uint8_t {
  given,
  centred,  // by tiles of kScaleTileRows rows (paper: 128)
};
inline constexpr std::array<std::string_view, 2> kQueryRuleNames = {"given", "centred"};
constexpr std::string_view name(QueryRule rule) { return kQueryRuleNames[static_cast<size_t>(rule)]; }

// Everything that decides the bits of one head's attention, besides its inputs and the tile sizes.
struct PrecisionPlan {
  std::array<Rounding, kSiteCount> rounding{};  // fp32 at every site
  Stabiliser stabiliser = Stabiliser::none;
  Accumulate accumulate = Accumulate::fp32_sequential;
  std::string_view chip = kDefaultChip;  // tensor_core: whose, of kTensorCoreModels
  // tensor_core: after so many blocks the sum goes to an FP32 sum outside the tensor core and starts again from 0, as FP8
  // kernels do against its 13 bits; 0: never. Sums over keys and rows do so at the end of every tile (of kScaleTileRows
  // rows), too.
  int promote = 0;
  KeyRule keys = KeyRule::given;  // centred: K-smoothing, whatever the stabiliser
  QueryRule queries = QueryRule::given;
  float keel = 0;               // z of the attention z-loss z L^2 per row; 0 is off
  float beta = 2;               // paper, paper_capped: factor on a positive tied maximum
  float cap = 8;                // paper_capped: largest shift, in nats
  float tie_tolerance = 1e-3f;  // scores this close to the maximum tie with it
  uint64_t seed = 0;            // of stochastic sites, dither and the capped shift

  const Rounding& at(Site site) const { return rounding[static_cast<size_t>(site)]; }
  Rounding& at(Site site) { return rounding[static_cast<size_t>(site)]; }
  friend bool operator==(const PrecisionPlan&, const PrecisionPlan&) = default;
};

// Plans with names, as changes of what stands before them in the table. The systems of papers: what a paper leaves open
// or does not have is marked "ours". Their backward passes read what the forward pass read where nothing is said, and
// everything that is not an operand is as in flash2: ours. Blocks run along the row at every site (a tensor core needs
// them along the summed index, which for v, and for dS and dO in dK and dV, is the column, as in v=e4m3*column32): ours.
struct NamedPlan {
  std::string_view name, text;
};
inline constexpr NamedPlan kNamedPlans[] = {
    // Nothing is rounded below FP32.
    {"fp32", ""},
    // What FlashAttention-2 does.
    {"flash2", "probs=bf16,output=bf16,probs_bwd=bf16,dscores=bf16,dq=bf16,dk=bf16,dv=bf16"},
    // The published arithmetic of arXiv 2510.04212.
    {"bf16_all", "flash2,scores=bf16,shifted=bf16,row_sum=bf16,pv=bf16,dprobs=bf16"},
    // FlashAttention-3 without its scales: E4M3 operands, probs times 2^8.
    {"fp8", "flash2,q=e4m3/saturate,k=e4m3/saturate,v=e4m3/saturate,probs=e4m3^8/saturate,grad_output=bf16"},
    // FlashAttention-3, arXiv 2407.08608: a scale for each block of q, k and v (its code: each head); exp times 2^8 (its
    // code). Left out: the rotation by a random Hadamard matrix, which changes no score but for rounding. It has no FP8
    // backward: BF16 is ours. Its sums: add accumulate=h200.
    {"fp8_fa3", "flash2,q=e4m3*tile,k=e4m3*tile,v=e4m3*tile,probs=e4m3^8/saturate,grad_output=bf16"},
    // What the FP8 kernels of Hopper train with, ours: fp8_fa3 with scales that are powers of two, so that the rounded q, k
    // and v are BF16 numbers, which the products of a BF16 backward pass read; v's scale is a head's, as in FlashAttention-3's
    // code, so that the tensor cores can add more than one tile of keys.
    {"fp8_trains", "fp8_fa3,q=e4m3*tile@e8m0_up,k=e4m3*tile@e8m0_up,v=e4m3*head@e8m0_up"},
    // DeepSeek-V3, arXiv 2412.19437: E4M3 in all products, a scale in FP32 for 128 neighbours. The paper keeps attention
    // in BF16: its rule for linear layers at attention's operands is ours. Its sums, every 128 products to FP32: add
    // accumulate=h200/4.
    {"fp8_deepseek",
     "flash2,q=e4m3*block128,k=e4m3*block128,v=e4m3*block128,grad_output=e4m3*block128,probs=e4m3*block128,"
     "probs_bwd=e4m3*block128,dscores=e4m3*block128"},
    // OCP MX 1.0 with the scales rounded up and E4M3 for gradients too, as arXiv 2506.08027 trains. At attention's
    // operands: ours.
    {"mxfp8",
     "flash2,q=e4m3*block32@e8m0_up,k=e4m3*block32@e8m0_up,v=e4m3*block32@e8m0_up,"
     "grad_output=e4m3*block32@e8m0_up,probs=e4m3*block32@e8m0_up,probs_bwd=e4m3*block32@e8m0_up,"
     "dscores=e4m3*block32@e8m0_up"},
    // NVFP4 q, k, v and P, found again in a backward pass that is BF16 otherwise: Attn-QAT, arXiv 2603.00040. SageAttention3
    // (2505.11594) adds keys=centred,queries=centred; its code has no scale of a tensor, and v=e2m1*column16@e4m3.
    {"nvfp4",
     "flash2,q=e2m1*block16@e4m3*tensor,k=e2m1*block16@e4m3*tensor,v=e2m1*block16@e4m3*tensor,"
     "probs=e2m1*block16@e4m3*row,probs_bwd=e2m1*block16@e4m3*row,grad_output=bf16"},
    // SageBwd, arXiv 2603.02170: six of the seven products in INT8, a scale a block (P: a row), keys less their mean; dP
    // in 16 bits. BF16 for the paper's FP16, which loses gradients this small: ours.
    {"sage_int8",
     "flash2,q=int8*tile,k=int8*tile,v=int8*tile,probs=int8*row,probs_bwd=int8*tile,dscores=int8*tile,"
     "grad_output=int8*tile,v_bwd=bf16,grad_output_for_dprobs=bf16,keys=centred"},
    // TurboAttention, arXiv 2412.08585: INT8 by blocks for q, k, v and P, exponents in FP16. Left out: the table of its
    // exponential, and the KV cache below 8 bits. Scales by 127 (paper: 119) and a BF16 backward pass: ours.
    {"turbo", "flash2,q=int8*tile,k=int8*tile,v=int8*tile,probs=int8*tile,shifted=fp16,grad_output=bf16"},
    // HiFloat8, arXiv 2409.16626: every operand, ties away from zero. The paper scales the loss, adaptively; a power of
    // two for dO and for each tile of dS is ours.
    {"hifloat8",
     "flash2,q=hif8/nearest_away,k=hif8/nearest_away,v=hif8/nearest_away,probs=hif8/nearest_away,"
     "probs_bwd=hif8/nearest_away,grad_output=hif8*tensor@e8m0_up/nearest_away,"
     "dscores=hif8*tile@e8m0_up/nearest_away"},
    // PASA, arXiv 2503.01873: everything of the forward pass in FP16, keys less a mean. The mean of all keys (paper: of a
    // block, 0.98 of it) and a BF16 backward pass: ours.
    {"pasa_fp16",
     "flash2,q=fp16,k=fp16,v=fp16,scores=fp16,shifted=fp16,probs=fp16,row_sum=fp16,pv=fp16,output=fp16,"
     "grad_output=bf16,keys=centred"},
};
inline constexpr auto kPlanNames = [] {
  std::array<std::string_view, std::size(kNamedPlans)> names{};
  for (size_t n = 0; n < names.size(); ++n) names[n] = kNamedPlans[n].name;
  return names;
}();

// A comma-separated list, read from the left: plan names and key=value. Keys: a site (value: parse_rounding),
// stabiliser, accumulate (fp32_sequential, or a chip of numerics/tensor_core.h, as h200 or, with a promotion to FP32
// every 4 blocks, h200/4), keys and queries (given, centred), keel, beta, cap, tie_tolerance, seed. A plan's name
// gives every site its format, and keys where the plan has a rule for them; second readings follow the first (kSecondReadings).
//   bf16_all,row_sum=fp32    flash2,q=e4m3*block32    flash2,stabiliser=zero_sum,keel=1e-3    fp32,row_sum=e5m2/stochastic
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
