#include "diagnosis/conform.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include "base/error.h"
#include "base/threads.h"
#include "diagnosis/attention_truth.h"

namespace evenkeel {
namespace {

// --- Judgement

constexpr int64_t kRowsAChunk = 6400;

// Rows are run in chunks of whole heads, so that memory does not grow with their number.
struct Chunks {
  int64_t count, heads;
  Chunks(const ConformCase& which, int64_t rows) {
    const int64_t wanted = std::max<int64_t>(1, rows / which.rows_divisor),
                  size = std::min(wanted, kRowsAChunk);
    count = (wanted + size - 1) / size;
    heads = (size + which.rows_per_head - 1) / which.rows_per_head;
  }
};

// terms: how large the terms of the output's sums are, for outputs that are nothing but zeros; or null.
void compare(const Tensor<float>& found, const Tensor<double>& exact, const Tensor<double>* terms,
             ErrorStats& stats, double& max_error, int64_t& nonfinite) {
  const int64_t width = found.shape()[3], rows = static_cast<int64_t>(found.values().size()) / width;
  double squares = 0;
  for (double truth : exact.values()) squares += truth * truth;
  const double rms = std::sqrt(squares / static_cast<double>(exact.values().size()));
  const double usual = terms ? *std::ranges::max_element(terms->values()) : 0;
  for (int64_t row = 0; row < rows; ++row) {
    const float* values = found.values().data() + row * width;
    const double* truths = exact.values().data() + row * width;
    // Of the row's largest value, or of a usual one of the tensor where the row has next to nothing.
    double largest = rms;
    for (int64_t d = 0; d < width; ++d) largest = std::max(largest, std::fabs(truths[d]));
    if (largest == 0 && terms) largest = usual;
    const double units = 1 / double{ulp(kBf16, static_cast<float>(largest))};  // a power of two: exact
    RowError error;
    for (int64_t d = 0; d < width; ++d) {
      if (!std::isfinite(values[d])) {
        ++nonfinite;
        continue;
      }
      const double difference = (values[d] - truths[d]) * units;
      error.sum += difference;
      error.squares += difference * difference;
      error.max_abs = std::max(error.max_abs, std::fabs(difference));
      ++error.count;
    }
    error.max_ulp = error.max_abs;  // they are in ulps
    max_error = std::max(max_error, error.max_abs / units);
    stats.add(error);
  }
}

// Sums over the rows of a case, before they are put in units of delta's root mean square.
struct Totals {
  std::vector<double> residuals;
  double delta_squares = 0, forced_squares = 0, arithmetic_squares = 0, size_squares = 0;
};

double norm(const float* x, int64_t count) {
  double squares = 0;
  for (int64_t d = 0; d < count; ++d) squares += static_cast<double>(x[d]) * x[d];
  return std::sqrt(squares);
}

// What FP32 arithmetic leaves in a row even where nothing is rounded below FP32. Relative to |dO| max|v|, which
// bounds |dP| and |delta|, it is 2^-24 for each of about 16 roundings on the way, and |L| 2^-24 of relative
// error in P through L.
double arithmetic_noise(double lse) { return 0x1p-24 * (16 + std::fabs(lse)); }
// And its systematic part: the last places of exp, of the products' order, of the division: a few units of
// 2^-24.
constexpr double kArithmeticBias = 4 * 0x1p-24;

// Heads of a family whose rows see one key: what the plan leaves there. None where its scores may be so far off that other
// keys come into sight, and in other families.
using OneKeyHeads = std::vector<std::optional<OneKeyBound>>;

OneKeyHeads one_key_heads(const AttentionProblem& config, const ConformInputs& inputs,
                          const AttentionTruth& exact) {
  const AttentionProblem shape = problem_of(config, inputs.inputs());
  OneKeyHeads heads(static_cast<size_t>(shape.H));
  if (inputs.which->one_key == 0) return heads;
  parallel_for(shape.H, [&](int64_t h, int) {
    // Of both scores, the largest and the next.
    const double apart = inputs.which->one_key - 2 * output_bounds(shape, exact.scales, h).score;
    if (apart > 2 * kNear)
      heads[static_cast<size_t>(h)] =
          one_key_bound(shape, {inputs.v.view().at(0, h, 0), static_cast<size_t>(shape.N * shape.D)});
  });
  return heads;
}

// sum_d |dO| |O| of a row. Where a row sees one key, O is its V.
double output_size(const ConformInputs& inputs, const AttentionTruth& exact, int64_t head, int64_t row) {
  const float* const d_o = inputs.d_o.view().at(0, head, row);
  const double* const o = exact.o.view().at(0, head, row);
  double sum = 0;
  for (int64_t d = 0; d < exact.o.shape()[3]; ++d) sum += std::fabs(double{d_o[d]} * o[d]);
  return sum;
}

// Every row's residual, delta and what arithmetic leaves, into the totals.
void add_residuals(const ConformInputs& inputs, const AttentionTruth& exact, const AttentionBuffers& found,
                   const OneKeyHeads& one_key, Totals& totals, ConformResult& result) {
  const auto [B, H, T, D] = inputs.q.shape();
  const int64_t N = inputs.k.shape()[2];
  for (int64_t h = 0; h < H; ++h) {
    double v_norm = 0;
    for (int64_t j = 0; j < N; ++j) v_norm = std::max(v_norm, norm(inputs.v.view().at(0, h, j), D));
    for (int64_t i = 0; i < T; ++i) {
      const double lse = *exact.lse.view().at(0, h, i), delta = *exact.delta.view().at(0, h, i);
      if (!std::isfinite(lse)) continue;  // sees no key
      const std::optional<OneKeyBound>& one = one_key[static_cast<size_t>(h)];
      const double residual = *found.residual.view().at(0, h, i),
                   forced = one ? one->leak * output_size(inputs, exact, h, i)
                                : *found.residual_floor.view().at(0, h, i);
      const double size = norm(inputs.d_o.view().at(0, h, i), D) * v_norm,
                   arithmetic = arithmetic_noise(one ? 0 : lse) * size;
      ++result.rows;
      result.one_key_rows += one.has_value();
      if (!std::isfinite(residual)) {
        ++result.nonfinite;
        continue;
      }
      totals.residuals.push_back(residual);
      totals.delta_squares += delta * delta;
      totals.forced_squares += forced * forced;
      totals.arithmetic_squares += arithmetic * arithmetic;
      totals.size_squares += size * size;
    }
  }
}

// Errors of the outputs against FP64, as statistics.
void add_errors(const AttentionTruth& exact, const AttentionBuffers& found, ConformResult& result) {
  struct Comparison {
    const Tensor<float>& found;
    const Tensor<double>& exact;
    ErrorStats& stats;
    double& max_error;
    const Tensor<double>* terms = nullptr;
    int64_t nonfinite = 0;
  };
  const OutputScales& scales = exact.scales;
  std::array comparisons{Comparison{found.o, exact.o, result.o, result.max_o},
                         Comparison{found.delta, exact.delta, result.delta, result.max_delta},
                         Comparison{found.dq, exact.dq, result.dq, result.max_dq, &scales.dq[1]},
                         Comparison{found.dk, exact.dk, result.dk, result.max_dk, &scales.dk[1]},
                         Comparison{found.dv, exact.dv, result.dv, result.max_dv}};
  parallel_for(static_cast<int64_t>(comparisons.size()), [&](int64_t n, int) {
    Comparison& c = comparisons[static_cast<size_t>(n)];
    compare(c.found, c.exact, c.terms, c.stats, c.max_error, c.nonfinite);
  });
  for (const Comparison& c : comparisons) result.nonfinite += c.nonfinite;
}

// --- Whole and right

void poison(AttentionBuffers& buffers) {
  for (Tensor<float>* tensor :
       {&buffers.o, &buffers.lse, &buffers.dq, &buffers.dk, &buffers.dv, &buffers.delta})
    std::fill(tensor->values().begin(), tensor->values().end(), std::bit_cast<float>(kUnwritten));
  for (Tensor<double>* tensor : {&buffers.residual, &buffers.residual_floor})
    std::fill(tensor->values().begin(), tensor->values().end(), std::numeric_limits<double>::quiet_NaN());
}

// The kernel on outputs that hold nothing of an earlier call.
void run_kernel(const ConformKernel& kernel, const AttentionProblem& config, const ConformInputs& inputs,
                AttentionBuffers& found) {
  poison(found);
  kernel(config, inputs.inputs(), inputs.grad_output(), found);
}

// Largest error over its bound, of one head's rows of a tensor. What is not finite is counted elsewhere.
double largest_over(const Tensor<float>& found, const Tensor<double>& exact,
                    std::span<const Tensor<double>> scales, std::span<const double> relative, double absolute,
                    int64_t head) {
  double over = 0;
  const auto [B, H, rows, width] = found.shape();
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < width; ++d) {
      const double error =
          std::fabs(double{*found.view().at(0, head, i, d)} - *exact.view().at(0, head, i, d));
      double allowed = absolute;
      for (size_t n = 0; n < scales.size(); ++n) allowed += relative[n] * *scales[n].view().at(0, head, i, d);
      if (error > 0) over = std::max(over, error / allowed);
    }
  return over;
}
double largest_over(const Tensor<float>& found, const Tensor<double>& exact, const Tensor<double>& scale,
                    OutputBounds::Bound bound, int64_t head) {
  return largest_over(found, exact, {&scale, 1}, {&bound.relative, 1}, bound.absolute, head);
}
double largest_over(const Tensor<float>& found, const Tensor<double>& exact,
                    const std::array<Tensor<double>, 3>& scales, const OutputBounds::GradientBound& bound,
                    int64_t head) {
  return largest_over(found, exact, scales, bound.relative, bound.absolute, head);
}

// The same of O's distance from the range of V's rows.
double largest_outside(const Tensor<float>& o, const AttentionTruth& exact, const OutputScales& scales,
                       double allowed, int64_t head) {
  double over = 0;
  const auto [B, H, rows, width] = o.shape();
  for (int64_t i = 0; i < rows; ++i) {
    if (!std::isfinite(*exact.lse.view().at(0, head, i))) continue;  // sees no key
    for (int64_t d = 0; d < width; ++d) {
      const double value = *o.view().at(0, head, i, d);
      const double outside = std::max(*scales.v_low.view().at(0, head, 0, d) - value,
                                      value - *scales.v_high.view().at(0, head, 0, d));
      if (outside > 0) over = std::max(over, outside / allowed);
    }
  }
  return over;
}

double largest_over_of_lse(const Tensor<float>& found, const Tensor<double>& exact, OutputBounds::Bound bound,
                           int64_t head) {
  double over = 0;
  for (int64_t i = 0; i < found.shape()[2]; ++i) {
    const double truth = *exact.view().at(0, head, i), value = *found.view().at(0, head, i);
    if (truth == value) continue;  // also of a row that sees no key: -inf
    const double error = std::fabs(value - truth) / (bound.relative * std::fabs(truth) + bound.absolute);
    over = std::max(over, std::isnan(error) ? HUGE_VAL : error);
  }
  return over;
}

// Rows that see one key: O is V, and dS, which is 0, is at most what is left of dP - delta. Twice that, since P of the
// backward pass may be off by what rounding L leaves. Errors over their bounds of O, dQ and dK.
std::array<double, 3> over_one_key(const AttentionProblem& shape, const ConformInputs& inputs,
                                   const AttentionTruth& exact, const AttentionBuffers& found,
                                   const OutputBounds& bounds, const OneKeyBound& one, int64_t head) {
  std::array<double, 3> over = {};
  const auto raise = [](double& to, double error, double allowed) {
    if (std::fabs(error) > 0) to = std::max(to, std::fabs(error) / allowed);
  };
  std::vector<double> of_keys(static_cast<size_t>(shape.D)), of_rows = of_keys;
  for (int64_t j = 0; j < shape.N; ++j)
    for (int64_t d = 0; d < shape.D; ++d) {
      double& largest = of_keys[static_cast<size_t>(d)];
      largest = std::max(largest, std::fabs(double{*inputs.k.view().at(0, head, j, d)}));
    }
  for (int64_t i = 0; i < shape.T; ++i) {
    const double ds = 2 * std::fabs(double{shape.scale}) * (one.leak + one.arithmetic) *
                      output_size(inputs, exact, head, i);
    for (int64_t d = 0; d < shape.D; ++d) {
      const double v = *exact.o.view().at(0, head, i, d);
      raise(over[0], *found.o.view().at(0, head, i, d) - v,
            (one.output + one.arithmetic) * std::fabs(v) + bounds.o.absolute);
      raise(over[1], *found.dq.view().at(0, head, i, d),
            ds * of_keys[static_cast<size_t>(d)] + bounds.dq.absolute);
      of_rows[static_cast<size_t>(d)] += ds * std::fabs(double{*inputs.q.view().at(0, head, i, d)});
    }
  }
  for (int64_t j = 0; j < shape.N; ++j)
    for (int64_t d = 0; d < shape.D; ++d)
      raise(over[2], *found.dk.view().at(0, head, j, d),
            of_rows[static_cast<size_t>(d)] + bounds.dk.absolute);
  return over;
}

// Are the outputs wholly written, and within the worst case of the plan's roundings?
void check_outputs(const AttentionProblem& config, const ConformInputs& inputs, const AttentionTruth& exact,
                   const AttentionBuffers& found, const OneKeyHeads& one_key, ConformResult& result) {
  const OutputScales& scales = exact.scales;
  for (const Tensor<float>* tensor : {&found.o, &found.dq, &found.dk, &found.dv})
    result.unwritten += std::count_if(tensor->values().begin(), tensor->values().end(), is_unwritten);
  const auto lse = std::count_if(found.lse.values().begin(), found.lse.values().end(), is_unwritten);
  const bool has_lse = lse < static_cast<int64_t>(found.lse.values().size());
  if (has_lse) result.unwritten += lse;
  const AttentionProblem shape = problem_of(config, inputs.inputs());
  // `exact` has no keel, which changes dQ and dK.
  const bool has_keel = config.plans[0].keel != 0;
  struct Over {
    double o = 0, lse = 0, dq = 0, dk = 0, dv = 0;
  };
  std::vector<Over> of_heads(static_cast<size_t>(shape.H));
  parallel_for(shape.H, [&](int64_t h, int) {
    const OutputBounds bounds = output_bounds(shape, scales, h);
    Over& over = of_heads[static_cast<size_t>(h)];
    over.o = std::max(largest_over(found.o, exact.o, scales.o, bounds.o, h),
                      largest_outside(found.o, exact, scales, bounds.hull, h));
    over.dv = largest_over(found.dv, exact.dv, scales.dv, bounds.dv, h);
    if (has_lse) over.lse = largest_over_of_lse(found.lse, exact.lse, bounds.lse, h);
    std::array<double, 3> alone = {};
    if (const auto& one = one_key[static_cast<size_t>(h)])
      alone = over_one_key(shape, inputs, exact, found, bounds, *one, h);
    over.o = std::max(over.o, alone[0]);
    if (has_keel) return;
    over.dq = std::max(alone[1], largest_over(found.dq, exact.dq, scales.dq, bounds.dq, h));
    over.dk = std::max(alone[2], largest_over(found.dk, exact.dk, scales.dk, bounds.dk, h));
  });
  const auto raise = [](double& to, double over) { to = std::max(to, over); };
  for (const Over& over : of_heads) {
    raise(result.over_o, over.o), raise(result.over_lse, over.lse), raise(result.over_dq, over.dq);
    raise(result.over_dk, over.dk), raise(result.over_dv, over.dv);
  }
}

void finish(const Totals& totals, ConformResult& result) {
  const auto rows = static_cast<double>(std::max<size_t>(1, totals.residuals.size()));
  result.delta_rms = std::sqrt(totals.delta_squares / rows);
  const double unit = result.delta_rms > 0 ? result.delta_rms : 1;
  for (double residual : totals.residuals) result.residual.add(residual / unit);
  result.forced_rms = std::sqrt(totals.forced_squares / rows) / unit;
  result.arithmetic_rms = std::sqrt(totals.arithmetic_squares / rows) / unit;
  result.bias_floor = kArithmeticBias * std::sqrt(totals.size_squares / rows) / unit;
}

}  // namespace

double ConformResult::noise_bound() const {
  return std::sqrt(kNoiseVariance * forced_rms * forced_rms + arithmetic_rms * arithmetic_rms);
}

bool ConformResult::biased() const {
  return rows >= kBiasRows && std::fabs(residual.z()) >= kBiasZ && std::fabs(residual.mean()) > bias_floor;
}

const char* ConformResult::verdict() const {
  if (unwritten > 0) return "NOT WRITTEN";
  if (nonfinite > 0) return "NOT FINITE";
  static constexpr const char* kWords[] = {"ok",    "NOISY",        "BIASED",        "BIASED, NOISY",
                                           "WRONG", "WRONG, NOISY", "WRONG, BIASED", "WRONG, BIASED, NOISY"};
  return kWords[4 * wrong() + 2 * biased() + noisy()];
}

std::string ConformResult::what_to_fix() const {
  if (unwritten > 0)
    return fmt::format(
        "{} values of O, L, dQ, dK or dV were not written: the kernel must write every element in every call",
        unwritten);
  if (nonfinite > 0)
    return fmt::format(
        "{} values are NaN or infinite: look for an overflow of exp, a division by an empty row's sum, or a "
        "mask",
        nonfinite);
  if (wrong()) {
    const std::pair<double, const char*> outputs[] = {
        {over_o, "O"}, {over_lse, "L"}, {over_dq, "dQ"}, {over_dk, "dK"}, {over_dv, "dV"}};
    const auto [over, output] = *std::max_element(std::begin(outputs), std::end(outputs));
    if (one_key_rows > 0)
      return fmt::format(
          "{} is {:.3g} times as far from FP64 as the plan's roundings allow in rows that see one key, where "
          "P is 1, O "
          "is V and dS is 0: if nearer scores pass, P of the largest score is not 1. An exponent such as "
          "fma(S, c, -m c) keeps the rounding of m c: subtract before the product, or add what was lost",
          output, over);
    return fmt::format(
        "{} is {:.3g} times as far from FP64 as the plan's roundings allow: look for a wrong scale, mask or "
        "index, or name the plan that the kernel really has",
        output, over);
  }
  if (biased() || noisy())
    return fmt::format(
        "rows of dS do not sum to zero ({}): compute delta from an O with 8 more bits (stabiliser "
        "wide_output), "
        "from the forward's own probabilities (consistent), or as sum P dP / sum P (zero_sum)",
        biased() ? "with one sign" : "by more than rounding dS leaves");
  return "";
}

bool ConformPlan::passes() const {
  return !results.empty() &&
         std::all_of(results.begin(), results.end(), [](const ConformResult& r) { return r.passes(); });
}

std::vector<std::string> default_conform_plans() {
  return {"bf16_all",
          "flash2,row_sum=bf16",
          "flash2",
          "flash2,stabiliser=paper_capped",
          "flash2,stabiliser=wide_output",
          "flash2,stabiliser=consistent",
          "flash2,stabiliser=zero_sum",
          "bf16_all,stabiliser=consistent",
          "bf16_all,stabiliser=zero_sum",
          "fp32"};
}

int64_t conform_work(size_t plans, const std::vector<ConformCase>& cases, int64_t rows) {
  int64_t work = 0;
  for (const ConformCase& c : cases) work += Chunks(c, rows).count * static_cast<int64_t>(plans);
  return work;
}

namespace {

// What rounding dS must leave in each row's sum, by the CPU, which rounds nothing else here.
Tensor<double> forced_by_cpu(const AttentionProblem& given, const AttentionInputs& in,
                             View<const float> grad_output) {
  AttentionProblem config = given;
  PrecisionPlan plan;
  plan.at(Site::dscores) = given.plans[0].at(Site::dscores);
  plan.stabiliser = Stabiliser::zero_sum;
  config.plans = {plan};
  AttentionBuffers cpu(in, /*with_facts=*/true);
  conform_cpu_kernel(config, in, grad_output, cpu);
  return cpu.residual_floor;
}

// One chunk of a case: the same inputs for every plan.
struct Chunk {
  Chunk(const ConformCase& c, int64_t heads, uint64_t chunk_seed, uint32_t step, bool with_constant_feature)
      : seed(chunk_seed),
        constant_feature(with_constant_feature),
        inputs(c, heads, chunk_seed, with_constant_feature),
        found(inputs.inputs(), /*with_facts=*/true) {
    config.plans = {PrecisionPlan{}};
    config.mask = inputs.mask();
    config.tile_keys = c.tile_keys;
    config.step = step;
  }

  // Of the inputs as they are, and of the format of dS where what it leaves is asked for.
  void find_truth(const Rounding& dscores) {
    TruthOptions options;
    if (constant_feature) options.dscores = dscores;
    exact = attention_truth(config, inputs.inputs(), inputs.grad_output(), options);
    known = options.dscores;
  }

  void judge(const PrecisionPlan& plan, const ConformKernel& kernel, Totals& totals, ConformResult& result) {
    const Rounding& dscores = plan.at(Site::dscores);
    config.plans = {plan};
    if (!known || (constant_feature && *known != dscores)) find_truth(dscores);
    run_kernel(kernel, config, inputs, found);
    // A loss of numbers that are not finite has no gradient; judged as it is.
    const auto is_finite = [](float x) { return std::isfinite(x); };
    if (inputs.which->feedback && std::all_of(found.o.values().begin(), found.o.values().end(), is_finite)) {
      inputs.set_feedback(found.o, exact.o, seed);
      find_truth(dscores);
      run_kernel(kernel, config, inputs, found);
    }
    if (constant_feature) read_off();
    const OneKeyHeads one_key = one_key_heads(config, inputs, exact);
    add_residuals(inputs, exact, found, one_key, totals, result);
    add_errors(exact, found, result);
    check_outputs(config, inputs, exact, found, one_key, result);
  }

  // The leak, off dQ at the keys' constant feature; what rounding dS must leave of it; and delta as they imply it.
  void read_off() {
    const PrecisionPlan& plan = config.plans[0];
    const AttentionProblem shape = problem_of(config, inputs.inputs());
    found.residual_floor = plan.at(Site::dscores).shared == SharedScale{}
                               ? exact.forced
                               : forced_by_cpu(config, inputs.inputs(), inputs.grad_output());
    for (int64_t h = 0; h < shape.H; ++h)
      for (int64_t i = 0; i < shape.T; ++i) {
        const double L = plan.keel == 0 ? 0 : *found.lse.view().at(0, h, i);
        const double keel = std::isfinite(L) ? 2 * double{plan.keel} * L : 0;
        const double residual =
            *found.dq.view().at(0, h, i, shape.D - 1) / (double{kKeyConstant} * shape.scale) - keel;
        *found.residual.view().at(0, h, i) = residual;
        // sum P (dP - delta) = residual + keel's part, with sum P = 1.
        *found.delta.view().at(0, h, i) =
            static_cast<float>(*exact.delta.view().at(0, h, i) - residual - keel);
      }
  }

  const uint64_t seed;
  const bool constant_feature;
  ConformInputs inputs;
  AttentionProblem config;
  AttentionTruth exact;
  std::optional<Rounding> known;  // what `exact` was asked for
  AttentionBuffers found;
};

}  // namespace

void conform(std::vector<ConformPlan>& plans, const std::vector<ConformCase>& cases, int64_t rows,
             uint64_t seed, const ConformKernel& kernel, const std::function<void()>& advance,
             bool constant_feature) {
  require(
      !plans.empty() && !cases.empty() && rows > 0,
      "[conform] expected a plan, a family of inputs and a row to judge, got {} plans, {} families, {} rows",
      plans.size(), cases.size(), rows);
  for (ConformPlan& plan : plans) plan.results.clear();
  for (const ConformCase& c : cases) {
    std::vector<Totals> totals(plans.size());
    for (ConformPlan& plan : plans) plan.results.emplace_back().case_name = c.name;
    const Chunks chunks(c, rows);
    for (int64_t n = 0; n < chunks.count; ++n) {
      // Other inputs in every chunk, and fresh random numbers for stochastic sites and shifts.
      Chunk chunk(c, chunks.heads, seed * 1'000'003 + static_cast<uint64_t>(n), static_cast<uint32_t>(n),
                  constant_feature);
      for (size_t p = 0; p < plans.size(); ++p) {
        chunk.judge(plans[p].plan, kernel, totals[p], plans[p].results.back());
        if (advance) advance();
      }
    }
    for (size_t p = 0; p < plans.size(); ++p) finish(totals[p], plans[p].results.back());
  }
}

void conform_cpu_kernel(const AttentionProblem& config, const AttentionInputs& in,
                        View<const float> grad_output, AttentionBuffers& buffers) {
  attention_forward(config, in, buffers.forward());
  attention_backward(config, in, grad_output, buffers.forward(), buffers.backward());
}

}  // namespace evenkeel
