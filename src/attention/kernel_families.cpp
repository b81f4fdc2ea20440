#include "attention/kernel_families.h"

#include <algorithm>
#include <bit>
#include <initializer_list>

#include "attention/family_calls.h"
#include "base/error.h"
#include "base/threads.h"
#include "numerics/cpu.h"

namespace evenkeel {
namespace {

// --- The rows

constexpr uint16_t features(std::initializer_list<Feature> list) {
  uint16_t bits = 0;
  for (Feature feature : list) bits |= static_cast<uint16_t>(feature);
  return bits;
}
constexpr uint8_t types(std::initializer_list<TensorType> list) {
  uint8_t bits = 0;
  for (TensorType type : list) bits |= static_cast<uint8_t>(1u << static_cast<int>(type));
  return bits;
}

constexpr uint16_t kEveryShape =
    features({Feature::plans_by_head, Feature::softcap, Feature::negative_scale, Feature::windows,
              Feature::visible, Feature::facts, Feature::unaligned});

// Of the fast kernels.
constexpr uint16_t kFusedForms =
    features({Feature::plans_by_head, Feature::softcap, Feature::windows, Feature::visible, Feature::packed,
              Feature::device_step, Feature::slopes, Feature::sinks, Feature::grad_lse});

std::string hopper_device_not_taken(const CudaDevice& device) {
  if (device.major == 9 && device.minor == 0) return "";
  return fmt::format("compute capability {}.{} (they are built for exactly 9.0)", device.major, device.minor);
}

// What a plan may ask and no kernels of a GPU have yet: they must not compute something else instead.
std::string any_plan_plan_not_taken(const PrecisionPlan& plan, TensorType) {
  if (plan.queries != QueryRule::given)
    return fmt::format("queries={} (queries less their mean run on the CPU)", name(plan.queries));
  for (Site site : {Site::probs, Site::probs_bwd, Site::dscores})
    if (plan.at(site).shared != SharedScale{})
      return fmt::format("{}={} (scales that blocks of P or dS share run on the CPU)", name(site),
                         to_string(plan.at(site)));
  if (plan.at(Site::grad_output_for_dprobs) != plan.at(Site::grad_output))
    return fmt::format("grad_output_for_dprobs={} beside grad_output={} (the CPU takes both)",
                       to_string(plan.at(Site::grad_output_for_dprobs)),
                       to_string(plan.at(Site::grad_output)));
  if (plan.accumulate == Accumulate::tensor_core && (plan.promote != 0 || plan.chip != kDefaultChip))
    return fmt::format("sums of another chip or with promotion, as in \"{}\" (they run on the CPU)",
                       to_string(plan));
  // The chip adds FP8 products with 13 bits; these kernels multiply everything as BF16.
  if (plan.accumulate == Accumulate::tensor_core)
    for (Site site : {Site::q, Site::k, Site::v, Site::probs, Site::grad_output, Site::probs_bwd,
                      Site::dscores, Site::q_bwd, Site::k_bwd, Site::v_bwd})
      if (plan.at(site).format == kE4m3 || plan.at(site).format == kE5m2)
        return fmt::format("{}={} with accumulate={} (the chip's sums of FP8 products run on the CPU)",
                           name(site), to_string(plan.at(site)), plan.chip);
  return "";
}

// flash2 in the format of the tensors.
PrecisionPlan fused_plan(TensorType type) {
  PrecisionPlan plan = parse_plan("flash2");
  if (type == TensorType::fp16)
    for (Rounding& rounding : plan.rounding)
      if (!is_identity(rounding)) rounding.format = kFp16;
  return plan;
}

// What the fast kernels compute: flash2's sites with one of the fast stabilisers.
std::string fused_plan_not_taken(const PrecisionPlan& plan, TensorType type) {
  if (std::string what = any_plan_plan_not_taken(plan, type); !what.empty()) return what;
  if (plan.keys != KeyRule::given) return fmt::format("keys={}", name(plan.keys));
  const StabiliserRules& rules = rules_of(plan.stabiliser);
  // They sum rounded probabilities only with shifts by powers of two, and exact ones only with the others.
  const bool known = rules.sum == SumRule::rounded_probs
                         ? rules.shift == ShiftRule::power_of_two && rules.output == OutputRule::wide &&
                               rules.delta == DeltaRule::output
                         : rules.shift != ShiftRule::power_of_two && rules.shift != ShiftRule::paper;
  if (!known || rules.output == OutputRule::stochastic || rules.keys != KeyRule::given)
    return fmt::format("the stabiliser {}", rules.name);
  const PrecisionPlan flash2 = fused_plan(type);
  const int wide_bits = flash2.at(Site::output).format.significand_bits + 8;
  for (int n = 0; n < kSiteCount; ++n) {
    const auto site = static_cast<Site>(n);
    if (plan.at(site) == flash2.at(site)) continue;
    // The O of delta is kept with 8 significand bits more, rounded without bias: what is asked for, or nearly.
    const Rounding wide{Format{flash2.at(Site::output).format.exponent_bits, wide_bits}};
    if (site == Site::output_for_delta && rules.output == OutputRule::wide &&
        (is_identity(plan.at(site)) || plan.at(site) == wide ||
         plan.at(site) == Rounding{wide.format, RoundingMode::stochastic}))
      continue;
    return fmt::format("{}={} (flash2 has {})", name(site), to_string(plan.at(site)),
                       to_string(flash2.at(site)));
  }
  return "";
}

// With forms, large heads have tiles of 256 features alone. Where keys and values have at most 128 each, more than half of that
// would be zeros. The Ampere class leaves those out, and is no slower by the figures of docs/kernels.md.
std::string hopper_shape_not_taken(const AttentionProblem& p) {
  if (!has_large_heads(p) || !has_forms(p) || std::max(p.D, p.Dv) > 128) return "";
  return fmt::format("more than a causal or full mask with values of head size {} and keys of {}", p.Dv, p.D);
}

// "head size 192 and 128 of values"
std::string head_words(const AttentionProblem& p) {
  return fmt::format("head size {}{}", p.D, p.Dv == p.D ? "" : fmt::format(" and {} of values", p.Dv));
}

std::string hopper_reason(const AttentionProblem& p) {
  std::string stabilisers;
  bool wide = false;
  for (const PrecisionPlan& plan : p.plans) {
    const StabiliserRules& rules = rules_of(plan.stabiliser);
    wide |= rules.output == OutputRule::wide;
    if (stabilisers.find(rules.name) == std::string::npos)
      stabilisers += (stabilisers.empty() ? "" : ", ") + std::string(rules.name);
  }
  // One byte more than the tensors have, and the leading bit, which is not stored.
  return fmt::format("{}, {}, flash2 with stabiliser {} on compute capability 9.0{}{}", name(p.type),
                     head_words(p), stabilisers, p.plans.size() > 1 ? ", by head" : "",
                     wide ? fmt::format("; the O of delta has {} significand bits, rounded stochastically",
                                        fused_plan(p.type).at(Site::output).format.significand_bits + 9)
                          : "");
}

// Their tiles have 128 rows and more.
bool hopper_chosen_for(const AttentionProblem& p, const CudaDevice&) { return !has_few_rows(p); }

bool hopper_gives_score_facts(const AttentionProblem& p) {
  return p.type == TensorType::bf16 && !has_forms(p) && !has_large_heads(p);
}

// kHopperFp8Plan. The forward pass's sums go to FP32 after all features of a score and every 128 keys of O: h200/4.
std::string hopper_fp8_plan_not_taken(const PrecisionPlan& plan, TensorType) {
  if (plan.queries != QueryRule::given) return fmt::format("queries={}", name(plan.queries));
  if (plan.keys != KeyRule::given) return fmt::format("keys={}", name(plan.keys));
  // P is rounded to 4 bits, forward alone. So a delta from O, however wide, does not fit the P of the backward pass; and
  // that finds the rounded P only where it adds up scores as the FP8 tensor cores do. What fits is zero_sum.
  if (plan.stabiliser != Stabiliser::none && plan.stabiliser != Stabiliser::zero_sum)
    return fmt::format("the stabiliser {} (they have none and zero_sum)", name(plan.stabiliser));
  constexpr int kPromote = 4;
  if (plan.accumulate == Accumulate::tensor_core && (plan.chip != kDefaultChip || plan.promote != kPromote))
    return fmt::format("sums as in \"{}\" (theirs are accumulate={}/{})", to_string(plan), kDefaultChip,
                       kPromote);
  const PrecisionPlan fp8 = parse_plan(kHopperFp8Plan);
  for (int n = 0; n < kSiteCount; ++n)
    if (const auto site = static_cast<Site>(n); plan.at(site) != fp8.at(site))
      return fmt::format("{}={} ({} has {})", name(site), to_string(plan.at(site)), kHopperFp8Plan,
                         to_string(fp8.at(site)));
  return "";
}

// Who does not ask for 8 bits is not told why these kernels do not run.
bool hopper_fp8_chosen_for(const AttentionProblem& p, const CudaDevice&) {
  return std::any_of(p.plans.begin(), p.plans.end(),
                     [](const PrecisionPlan& plan) { return plan.at(Site::q).format == kE4m3; });
}

std::string hopper_fp8_reason(const AttentionProblem& p) {
  return fmt::format("bf16, head size {}, {} with stabiliser {} on compute capability 9.0{}", p.D,
                     kHopperFp8Plan, name(p.plans[0].stabiliser), p.plans.size() > 1 ? ", by head" : "");
}

std::string ampere_reason(const AttentionProblem& p) {
  return fmt::format("{}, {}, flash2's sites on compute capability 8.0 or newer{}", name(p.type),
                     head_words(p), has_few_rows(p) ? "; few query rows, keys split over blocks" : "");
}

// By machine code of their own, and on 12.0 by PTX. On Hopper they come after its own kernels, which are faster, and take what
// those do not. Elsewhere nobody has tried them.
bool ampere_chosen_for(const AttentionProblem&, const CudaDevice& device) {
  return (device.major == 8 && device.minor != 7) || (device.major == 9 && device.minor == 0) ||
         (device.major == 12 && device.minor == 0);
}

std::string any_plan_device_not_taken(const CudaDevice& device) {
  if (device.major >= kLeastCudaMajor) return "";
  return fmt::format("compute capability {}.{} ({}.0 or newer is taken)", device.major, device.minor,
                     kLeastCudaMajor);
}

std::string any_plan_reason(const AttentionProblem& p) {
  return fmt::format("{}, head size {}: any plan", name(p.type), p.D);
}

std::string cpu_reason(const AttentionProblem&) {
  return fmt::format("device is the CPU: {} kernels, {} threads", name(cpu_target()), thread_count());
}

constexpr size_t kGpuAlignment = 256;
// Tiles have 64 or 128 features, those of the fast kernels up to 256; smaller heads are filled with zeros.
constexpr int64_t kLargestGpuHead = 128, kLargestFusedHead = 256;

constexpr KernelFamily kFamilies[] = {
    // kHopperFp8Plan: forward by wgmma of E4M3, backward by hopper's kernels on the same numbers.
    {"hopper_fp8",
     "the Hopper FP8 kernels",
     /*on_gpu=*/true,
     {features({Feature::plans_by_head, Feature::packed, Feature::device_step, Feature::grad_lse}),
      types({TensorType::bf16}), kLargestGpuHead, /*head_step=*/8, kGpuAlignment},
     hopper_device_not_taken,
     hopper_fp8_plan_not_taken,
     nullptr,
     hopper_fp8_chosen_for,
     hopper_fp8_reason,
     nullptr,
     hopper_fp8_prepare,
     hopper_fp8_forward,
     hopper_fp8_backward,
     nullptr},
    // flash2's sites with one of the fast stabilisers (TMA, wgmma).
    {"hopper",
     "the Hopper kernels",
     /*on_gpu=*/true,
     {kFusedForms | features({Feature::value_size}), types({TensorType::bf16, TensorType::fp16}),
      kLargestFusedHead, /*head_step=*/8, kGpuAlignment},
     hopper_device_not_taken,
     fused_plan_not_taken,
     hopper_shape_not_taken,
     hopper_chosen_for,
     hopper_reason,
     hopper_gives_score_facts,
     hopper_prepare,
     hopper_forward,
     hopper_backward,
     hopper_facts},
    // hopper's plans and forms by mma.sync; every form with every head size.
    {"ampere",
     "the Ampere-class kernels",
     /*on_gpu=*/true,
     {kFusedForms | features({Feature::value_size}), types({TensorType::bf16, TensorType::fp16}),
      kLargestFusedHead, /*head_step=*/8, kGpuAlignment},
     any_plan_device_not_taken,
     fused_plan_not_taken,
     nullptr,
     ampere_chosen_for,
     ampere_reason,
     nullptr,
     ampere_prepare,
     ampere_forward,
     ampere_backward,
     nullptr},
    // Any plan, any stabiliser (mma.sync on bf16).
    {"any_plan",
     "the any-plan kernels",
     /*on_gpu=*/true,
     {kEveryShape | features({Feature::packed, Feature::device_step}),
      types({TensorType::bf16, TensorType::fp32}), kLargestGpuHead, /*head_step=*/1, kGpuAlignment},
     any_plan_device_not_taken,
     any_plan_plan_not_taken,
     nullptr,
     nullptr,
     any_plan_reason,
     nullptr,
     any_plan_prepare,
     any_plan_forward,
     any_plan_backward,
     nullptr},
    // Any plan; fp64 is the definition itself, which rounds nothing.
    {"cpu",
     "the CPU kernels",
     /*on_gpu=*/false,
     {kEveryShape | features({Feature::first_sequence, Feature::any_tile_keys, Feature::slopes,
                              Feature::sinks, Feature::grad_lse, Feature::value_size}),
      types({TensorType::fp32, TensorType::fp64}), /*largest_head=*/0, /*head_step=*/1, alignof(float)},
     nullptr,
     nullptr,
     nullptr,
     nullptr,
     cpu_reason,
     nullptr,
     cpu_prepare,
     cpu_forward,
     cpu_backward,
     nullptr},
};

// --- What a problem asks for

struct FeatureAsked {
  Feature feature;
  bool (*asked)(const AttentionProblem&);
  const char* words;
};
using P = const AttentionProblem&;
constexpr FeatureAsked kFeatures[] = {
    {Feature::plans_by_head, [](P p) { return p.plans.size() > 1; }, "plans that differ between heads"},
    {Feature::softcap, [](P p) { return p.softcap != 0; }, "softcap"},
    // Where masked scores are -inf before they are scaled.
    {Feature::negative_scale, [](P p) { return p.scale < 0; }, "a negative scale"},
    {Feature::windows, [](P p) { return p.mask.window_left >= 0 || p.mask.window_right >= 0; },
     "a sliding window"},
    {Feature::visible, [](P p) { return p.mask.visible.present(); }, "a mask of its own"},
    {Feature::facts, [](P p) { return p.with_facts; }, "ties, residuals or delta as outputs"},
    {Feature::unaligned, [](P p) { return !p.aligned; }, "tensors that are not 16-byte aligned"},
    {Feature::packed, [](P p) { return !p.mask.query_offsets.empty() || !p.mask.key_offsets.empty(); },
     "packed sequences (query_offsets or key_offsets); pad them"},
    {Feature::device_step, [](P p) { return p.device_step != nullptr; },
     "device_step; put the step into `step`"},
    {Feature::first_sequence, [](P p) { return p.first_sequence != 0; },
     "a first sequence other than 0 of the random numbers"},
    {Feature::any_tile_keys, [](P p) { return p.tile_keys != 0 && p.tile_keys != 64; },
     "tile_keys other than 64, or 0 for all keys in one tile"},
    {Feature::slopes, [](P p) { return !p.slopes.empty(); }, "slopes by distance (ALiBi)"},
    {Feature::sinks, [](P p) { return !p.sinks.empty(); }, "sinks"},
    {Feature::value_size, [](P p) { return p.Dv != p.D; },
     "values of another head size (Dv); fill them with zeros"},
};

}  // namespace

std::string types_taken(const FamilyLimits& limits) {
  std::string text;
  for (size_t n = 0; n < kTensorTypeNames.size(); ++n)
    if (limits.has(static_cast<TensorType>(n)))
      text += (text.empty() ? "" : ", ") + std::string(kTensorTypeNames[n]);
  return text;
}

std::span<const KernelFamily> kernel_families() { return kFamilies; }

// Its tiles have the shapes of the instance with facts of scores.
bool has_fact_pass(const KernelFamily& family, const AttentionProblem& problem) {
  return family.facts && family.gives_score_facts(problem);
}

const KernelFamily& kernel_family(std::string_view name) {
  for (const KernelFamily& family : kFamilies)
    if (family.name == name) return family;
  throw std::invalid_argument(fmt::format("[attention] unknown family of kernels '{}'", name));
}

std::string not_taken(const KernelFamily& family, const AttentionProblem& p, const CudaDevice& device) {
  const FamilyLimits& limits = family.limits;
  if (family.device_not_taken)
    if (std::string what = family.device_not_taken(device); !what.empty()) return what;
  if (!limits.has(p.type))
    return fmt::format("{} tensors ({} {} taken)", name(p.type), types_taken(limits),
                       std::has_single_bit(limits.types) ? "is" : "are");
  for (int64_t size : {p.D, p.Dv})
    if ((limits.largest_head != 0 && size > limits.largest_head) || size % limits.head_step != 0)
      return fmt::format("head size {} ({} up to {} is taken)", size,
                         limits.head_step == 1 ? "any" : fmt::format("a multiple of {}", limits.head_step),
                         limits.largest_head);
  if (family.plan_not_taken)
    for (const PrecisionPlan& plan : p.plans)
      if (std::string what = family.plan_not_taken(plan, p.type); !what.empty()) return what;
  for (const FeatureAsked& f : kFeatures)
    if (f.asked(p) && !limits.has(f.feature)) return f.words;
  return family.shape_not_taken ? family.shape_not_taken(p) : "";
}

}  // namespace evenkeel
