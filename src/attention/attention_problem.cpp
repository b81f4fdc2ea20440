#include "attention/attention_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace evenkeel {
namespace {

void check_sizes(const AttentionProblem& p) {
  const std::pair<const char*, int64_t> sizes[] = {{"B", p.B}, {"H", p.H}, {"G", p.G},
                                                   {"T", p.T}, {"N", p.N}, {"D", p.D}};
  for (const auto& [name, size] : sizes)
    require(size >= 1 && size <= std::numeric_limits<int32_t>::max(),
            "[attention] expected {} from 1 to 2^31 - 1, got {}", name, size);
  require(p.Dv >= 0 && p.Dv <= std::numeric_limits<int32_t>::max(),
          "[attention] expected Dv from 1 to 2^31 - 1, or 0 for D, got {}", p.Dv);
  int64_t elements = 1;
  for (int64_t size : {p.B, p.H, std::max(p.T, p.N), std::max(p.D, p.Dv)})
    require(!__builtin_mul_overflow(elements, size, &elements) && elements < int64_t{1} << 48,
            "[attention] expected fewer than 2^48 elements a tensor, got B {}, H {}, T {}, N {}, D {}, Dv {}",
            p.B, p.H, p.T, p.N, p.D, p.Dv);
  require(p.H % p.G == 0,
          "[attention] expected query heads in whole groups for {} key/value heads, got {} query heads", p.G,
          p.H);
}

bool rounds_nothing(const PrecisionPlan& plan) {
  return plan.stabiliser == Stabiliser::none && plan.keys == KeyRule::given &&
         plan.queries == QueryRule::given &&
         std::all_of(plan.rounding.begin(), plan.rounding.end(),
                     [](const Rounding& r) { return is_identity(r); });
}

}  // namespace

bool takes_softcap(const PrecisionPlan& plan) {
  return rules_of(plan.stabiliser).keys != KeyRule::centred && plan.keys != KeyRule::centred;
}

namespace {

void check_plans(const AttentionProblem& p) {
  const auto plans = static_cast<int64_t>(p.plans.size());
  require(plans == 1 || plans == p.H, "[attention] expected 1 plan or one for each of {} query heads, got {}",
          p.H, plans);
  for (int64_t h = 0; h < plans; ++h) {
    const PrecisionPlan& plan = p.plan(h);
    require(
        !(p.softcap > 0 && !takes_softcap(plan)),
        "[attention] {} cannot go with softcap: a soft-capped softmax sees a constant added to a row; got "
        "softcap {} on head {}",
        plan.keys == KeyRule::centred ? "keys=centred" : name(plan.stabiliser), p.softcap, h);
    require(p.type != TensorType::fp64 || rounds_nothing(plan),
            "[attention] expected a plan that rounds nothing with fp64 tensors, such as \"fp32\", got \"{}\"",
            to_string(plan));
  }
}

void check_by_head(const AttentionProblem& p) {
  for (auto [what, numbers] : {std::pair{"slopes", p.slopes}, {"sinks", p.sinks}})
    require(numbers.empty() || static_cast<int64_t>(numbers.size()) == p.H,
            "[attention] expected {} with one number for each of {} query heads, got {}", what, p.H,
            numbers.size());
  require(p.slopes.empty() || p.softcap == 0, "[attention] expected no slopes with softcap, got softcap {}",
          p.softcap);
  for (const PrecisionPlan& plan : p.plans)
    require(p.sinks.empty() ||
                (rules_of(plan.stabiliser).keys != KeyRule::centred && plan.keys != KeyRule::centred),
            "[attention] {} cannot go with sinks: a row's sink would have to move with its keys",
            plan.keys == KeyRule::centred ? "keys=centred" : name(plan.stabiliser));
}

void check_counts(const char* what, std::span<const int32_t> numbers, int64_t B) {
  const auto count = static_cast<int64_t>(numbers.size());
  require(count == 0 || count == B,
          "[attention] expected {} with one number for each of {} sequences, got {}", what, B, count);
}

void check_mask(const AttentionProblem& p) {
  const AttentionMask& mask = p.mask;
  const auto check_axis = [&](const char* axis, const char* all, std::span<const int32_t> lengths,
                              std::span<const int32_t> offsets, int64_t rows) {
    check_counts(fmt::format("{}_lengths", axis).c_str(), lengths, p.B);
    check_counts(fmt::format("{}_offsets", axis).c_str(), offsets, p.B);
    require(offsets.empty() || !lengths.empty(),
            "[attention] expected {0}_lengths with {0}_offsets, got none", axis);
    require(offsets.empty() || rows >= 1,
            "[attention] expected {0}_rows, the {1} of all sequences, with {0}_offsets, got {2}", axis, all,
            rows);
  };
  check_axis("query", "rows", mask.query_lengths, mask.query_offsets, mask.query_rows);
  check_axis("key", "keys", mask.key_lengths, mask.key_offsets, mask.key_rows);
  if (!mask.visible.present()) return;
  const auto& s = mask.visible.shape;
  require(s == std::array{p.B, p.H, p.T, p.N},
          "[attention] expected a mask of shape (B, H, T, N) = ({}, {}, {}, {}), got ({}, {}, {}, {})", p.B,
          p.H, p.T, p.N, s[0], s[1], s[2], s[3]);
}

}  // namespace

void check(const AttentionProblem& p) {
  check_sizes(p);
  require(std::isfinite(p.scale), "[attention] expected a finite scale, got {}", p.scale);
  require(std::isfinite(p.softcap) && p.softcap >= 0,
          "[attention] expected a finite softcap of 0 (off) or more, got {}", p.softcap);
  check_plans(p);
  check_by_head(p);
  check_mask(p);
  require(p.tile_rows >= 1, "[attention] expected tile_rows of 1 or more, got {}", p.tile_rows);
  require(p.tile_keys >= 0, "[attention] expected tile_keys of 0 (all keys) or more, got {}", p.tile_keys);
  require(p.first_sequence >= 0, "[attention] expected a first sequence of 0 or more, got {}",
          p.first_sequence);
  require(p.fact_sequences >= 0 && p.fact_sequences <= p.B,
          "[attention] expected fact_sequences from 0 (all) to {}, got {}", p.B, p.fact_sequences);
}

AttentionProblem complete(AttentionProblem p) {
  check(p);
  if (p.Dv == 0) p.Dv = p.D;
  if (p.fact_sequences == 0) p.fact_sequences = p.B;
  if (p.scale == 0) p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(p.D)));
  if (std::all_of(p.plans.begin(), p.plans.end(), [&](const auto& plan) { return plan == p.plans[0]; }))
    p.plans.resize(1);
  return p;
}

std::pair<int64_t, int64_t> AttentionProblem::key_range(int64_t b, int64_t i) const {
  const int64_t row_count = rows(b), key_count = keys(b);
  if (i >= row_count) return {0, 0};
  const int64_t position = i + key_count - row_count;  // < key_count; negative where rows outnumber keys
  int64_t first = 0, last = key_count;
  if (mask.causal) last = std::min(last, position + 1);
  // Compared before they are added: a window may be as wide as int64_t allows.
  if (mask.window_left >= 0 && mask.window_left < position) first = position - mask.window_left;
  if (mask.window_right >= 0 && mask.window_right < key_count - position)
    last = std::min(last, position + mask.window_right + 1);
  return {first, std::max(first, last)};
}

}  // namespace evenkeel
