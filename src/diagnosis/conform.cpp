#include "diagnosis/conform.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <span>

#include "base/error.h"
#include "base/threads.h"
#include "diagnosis/conform_bounds.h"
#include "numerics/random.h"

namespace evenkeel {
namespace {

// --- Inputs
// Scores are set exactly by one-hot keys: with k_j = sqrt(D) e_j and a = 1 / sqrt(D), S_ij = q_ij. The last
// kOffsetFeatures features are the same in every key, so that q sets there what is common to a row's scores.
constexpr int64_t kHeadSize = 64, kOffsetFeatures = 16, kKeys = kHeadSize - kOffsetFeatures;

float bf16(double x) { return round_to(Rounding{kBf16}, static_cast<float>(x)); }

struct HeadInputs {
  float *q, *k, *v, *d_o;  // (T, D), (N, D), (N, D), (T, D)
  int64_t T, N, D;
};

void fill_normal(float* x, int64_t count, RandomStream& draw, double scale) {
  for (int64_t n = 0; n < count; ++n) x[n] = bf16(scale * draw.normal());
}

// V and dO as in the paper's guilty features: one sign throughout, so that delta has one sign and errors of O
// do too.
void fill_one_signed(HeadInputs h, RandomStream& draw) {
  for (int64_t n = 0; n < h.N * h.D; ++n) h.v[n] = bf16(-(1.5 + 0.6 * std::fabs(draw.normal())));
  for (int64_t n = 0; n < h.T * h.D; ++n) h.d_o[n] = bf16(-0.1 * std::fabs(draw.normal()));
}

void fill_one_hot_keys(HeadInputs h) {
  const auto length = static_cast<float>(std::sqrt(static_cast<double>(h.D)));
  std::fill_n(h.k, h.N * h.D, 0.0f);
  for (int64_t j = 0; j < h.N; ++j) {
    h.k[j * h.D + j] = length;
    for (int64_t d = kKeys; d < h.D; ++d) h.k[j * h.D + d] = length / kOffsetFeatures;
  }
}

// The row's scores: score(j) for every key, plus an offset common to them all.
template <class Score>
void set_scores(HeadInputs h, int64_t row, Score score, double offset = 0) {
  for (int64_t j = 0; j < h.N; ++j) h.q[row * h.D + j] = bf16(score(j));
  for (int64_t d = kKeys; d < h.D; ++d) h.q[row * h.D + d] = bf16(offset);
}

// `ties` scores at `top`, the others a tail below it (none: so far below that they vanish).
void set_ties(HeadInputs h, int64_t row, RandomStream& draw, int64_t ties, bool tail, double top,
              int64_t apart = 1) {
  std::vector<int64_t> chosen;
  while (static_cast<int64_t>(chosen.size()) < ties) {
    const int64_t key = draw.below(h.N);
    bool free = true;
    for (int64_t other : chosen) free &= apart > 1 ? key / apart != other / apart : key != other;
    if (free) chosen.push_back(key);
  }
  set_scores(h, row, [&](int64_t j) {
    const bool tied = std::find(chosen.begin(), chosen.end(), j) != chosen.end();
    return tied ? top : tail ? top - draw.between(10, 14) : top - 200;
  });
}

void fill_head(const ConformCase& which, HeadInputs h, RandomStream draw) {
  const std::string_view name = which.name;
  fill_normal(h.q, h.T * h.D, draw, 1);
  fill_normal(h.k, h.N * h.D, draw, 1);
  fill_normal(h.v, h.N * h.D, draw, 1);
  fill_normal(h.d_o, h.T * h.D, draw, 0.1);
  const auto rows = [&](auto set_row) {
    fill_one_hot_keys(h);
    for (int64_t row = 0; row < h.T; ++row) set_row(row);
  };
  if (name == "loss_feedback") {
    fill_one_signed(h, draw);
  } else if (name.starts_with("ties_")) {
    const bool tail = name.ends_with("_tail"), across = name.find("across") != std::string_view::npos;
    const int64_t ties = across ? 2 : name[5] - '0';
    fill_one_signed(h, draw);
    rows([&](int64_t row) {
      set_ties(h, row, draw, ties, tail, draw.between(1, 6), across ? which.tile_keys : 1);
    });
  } else if (name == "one_signed_v") {
    fill_one_signed(h, draw);
  } else if (name == "sink") {
    fill_one_signed(h, draw);
    rows([&](int64_t row) {
      const double top = draw.between(4, 9);
      set_scores(h, row, [&](int64_t j) { return j == 0 ? top : draw.normal() - 2; });
    });
  } else if (name == "row_max_zero") {
    fill_one_signed(h, draw);
    rows([&](int64_t row) { set_ties(h, row, draw, 2, /*tail=*/true, 0); });
  } else if (name == "tiny_scores") {
    rows([&](int64_t row) { set_scores(h, row, [&](int64_t) { return 1e-4 * draw.normal(); }); });
  } else if (name == "scores_100" || name == "scores_2500") {
    fill_one_signed(h, draw);
    const double size = name == "scores_100" ? 100 : 2500;
    rows([&](int64_t row) {
      const double centre = row % 2 == 0 ? size : -size;
      set_scores(h, row, [&](int64_t) { return centre + size / 100 * draw.normal(); });
    });
  } else if (name == "common_offset") {
    fill_one_signed(h, draw);
    rows([&](int64_t row) {
      set_scores(
          h, row, [&](int64_t) { return draw.normal(); }, draw.between(-300, 300));
    });
  } else if (name == "subnormal_v") {
    for (int64_t n = 0; n < h.N * h.D; ++n) h.v[n] = bf16(static_cast<double>(h.v[n]) * 0x1p-127);
    for (int64_t n = 0; n < h.T * h.D; ++n) h.d_o[n] *= 1024;  // so that dP is normal
  }
}

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

void compare(const Tensor<float>& found, const Tensor<double>& exact, ErrorStats& stats, double& max_error,
             int64_t& nonfinite) {
  const int64_t width = found.shape()[3], rows = static_cast<int64_t>(found.values().size()) / width;
  double squares = 0;
  for (double truth : exact.values()) squares += truth * truth;
  const double rms = std::sqrt(squares / static_cast<double>(exact.values().size()));
  for (int64_t row = 0; row < rows; ++row) {
    const float* values = found.values().data() + row * width;
    const double* truths = exact.values().data() + row * width;
    // Of the row's largest value, or of a usual one of the tensor where the row has next to nothing.
    double largest = rms;
    for (int64_t d = 0; d < width; ++d) largest = std::max(largest, std::fabs(truths[d]));
    const double unit = ulp(kBf16, static_cast<float>(largest));
    RowError error;
    for (int64_t d = 0; d < width; ++d) {
      if (!std::isfinite(values[d])) {
        ++nonfinite;
        continue;
      }
      const double difference = values[d] - truths[d];
      error.add(difference / unit, 1.0);
      max_error = std::max(max_error, std::fabs(difference));
    }
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

// What FP32 arithmetic leaves in a row even where nothing is rounded below FP32, relative to |dO| max|v|,
// which bounds |dP| and |delta|: 2^-24 for each of about 16 roundings on the way, and |L| 2^-24 of relative
// error in P through L.
double arithmetic_noise(double lse) { return 0x1p-24 * (16 + std::fabs(lse)); }
// And its systematic part: the last places of exp, of the products' order, of the division: a few units of
// 2^-24.
constexpr double kArithmeticBias = 4 * 0x1p-24;

// Every row's residual, delta and what arithmetic leaves, into the totals.
void add_residuals(const ConformInputs& inputs, const AttentionReference& exact,
                   const AttentionBuffers& found, Totals& totals, ConformResult& result) {
  const auto [B, H, T, D] = inputs.q.shape();
  const int64_t N = inputs.k.shape()[2];
  for (int64_t h = 0; h < H; ++h) {
    double v_norm = 0;
    for (int64_t j = 0; j < N; ++j) v_norm = std::max(v_norm, norm(inputs.v.view().at(0, h, j), D));
    for (int64_t i = 0; i < T; ++i) {
      const double lse = *exact.lse.view().at(0, h, i), delta = *exact.delta.view().at(0, h, i);
      if (!std::isfinite(lse)) continue;  // sees no key
      const double residual = *found.residual.view().at(0, h, i),
                   forced = *found.residual_floor.view().at(0, h, i);
      const double size = norm(inputs.d_o.view().at(0, h, i), D) * v_norm,
                   arithmetic = arithmetic_noise(lse) * size;
      ++result.rows;
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
void add_errors(const AttentionReference& exact, const AttentionBuffers& found, ConformResult& result) {
  struct Comparison {
    const Tensor<float>& found;
    const Tensor<double>& exact;
    ErrorStats& stats;
    double& max_error;
    int64_t nonfinite = 0;
  };
  std::array comparisons{Comparison{found.o, exact.o, result.o, result.max_o},
                         Comparison{found.delta, exact.delta, result.delta, result.max_delta},
                         Comparison{found.dq, exact.dq, result.dq, result.max_dq},
                         Comparison{found.dk, exact.dk, result.dk, result.max_dk},
                         Comparison{found.dv, exact.dv, result.dv, result.max_dv}};
  parallel_for(static_cast<int64_t>(comparisons.size()), [&](int64_t n, int) {
    Comparison& c = comparisons[static_cast<size_t>(n)];
    compare(c.found, c.exact, c.stats, c.max_error, c.nonfinite);
  });
  for (const Comparison& c : comparisons) result.nonfinite += c.nonfinite;
}

// --- Whole and right

bool is_unwritten(float x) { return std::bit_cast<uint32_t>(x) == kUnwritten; }

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
double largest_outside(const Tensor<float>& o, const AttentionReference& exact, const OutputScales& scales,
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

// Are the outputs wholly written, and within the worst case of the plan's roundings?
void check_outputs(const AttentionProblem& config, const ConformInputs& inputs, const OutputScales& scales,
                   const AttentionReference& exact, const AttentionBuffers& found, ConformResult& result) {
  for (const Tensor<float>* tensor : {&found.o, &found.dq, &found.dk, &found.dv})
    result.unwritten += std::count_if(tensor->values().begin(), tensor->values().end(), is_unwritten);
  const auto lse = std::count_if(found.lse.values().begin(), found.lse.values().end(), is_unwritten);
  const bool has_lse = lse < static_cast<int64_t>(found.lse.values().size());
  if (has_lse) result.unwritten += lse;
  const AttentionProblem shape = problem_of(config, inputs.inputs());
  // `exact` has no keel, which changes dQ and dK.
  const bool has_keel = config.plans[0].keel != 0;
  for (int64_t h = 0; h < shape.H; ++h) {
    const OutputBounds bounds = output_bounds(shape, scales, h);
    const auto raise = [](double& to, double over) { to = std::max(to, over); };
    raise(result.over_o, largest_over(found.o, exact.o, scales.o, bounds.o, h));
    raise(result.over_o, largest_outside(found.o, exact, scales, bounds.hull, h));
    raise(result.over_dv, largest_over(found.dv, exact.dv, scales.dv, bounds.dv, h));
    if (has_lse) raise(result.over_lse, largest_over_of_lse(found.lse, exact.lse, bounds.lse, h));
    if (has_keel) continue;
    raise(result.over_dq, largest_over(found.dq, exact.dq, scales.dq, bounds.dq, h));
    raise(result.over_dk, largest_over(found.dk, exact.dk, scales.dk, bounds.dk, h));
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

const std::vector<ConformCase>& conform_cases() {
  constexpr int64_t T = 64, D = kHeadSize, N = kKeys;
  static const std::vector<ConformCase> cases = {
      {"random", "q, k, v, dO normal", T, 64, D},
      {"one_signed_v", "the same, V and dO of one sign", T, 64, D},
      {"ties_2", "two keys share the maximum, nothing else counts", T, N, D},
      {"ties_2_tail", "two keys share the maximum, the others hold about 0.1 %", T, N, D},
      {"ties_3", "three", T, N, D},
      {"ties_3_tail", "three, with a tail", T, N, D},
      {"ties_4", "four", T, N, D},
      {"ties_4_tail", "four, with a tail", T, N, D},
      {"ties_5", "five", T, N, D},
      {"ties_5_tail", "five, with a tail", T, N, D},
      {"ties_6", "six", T, N, D},
      {"ties_6_tail", "six, with a tail", T, N, D},
      {"ties_7", "seven", T, N, D},
      {"ties_7_tail", "seven, with a tail", T, N, D},
      {"ties_8", "eight", T, N, D},
      {"ties_8_tail", "eight, with a tail", T, N, D},
      {"ties_across_tail", "two, in different tiles of 16 keys, with a tail", T, N, D, false, 16},
      {"sink", "key 0 holds nearly all of every row", T, N, D},
      {"row_max_zero", "two tied at a score of exactly 0, with a tail", T, N, D},
      {"tiny_scores", "scores near 1e-4", T, N, D},
      {"scores_100", "scores near +-100", T, N, D},
      {"scores_2500", "scores near +-2500", T, N, D},
      {"common_offset", "normal scores plus up to +-300 common to the row", T, N, D},
      {"subnormal_v", "values of V and O below 2^-126", T, 64, D},
      {"loss_feedback", "one-signed V; dO from a loss that saw this kernel's O", T, 64, D, false, 64, false,
       1, true},
      {"masked_rows", "a quarter of the rows see no key", T, 64, D, false, 64, true, 8},
      {"one_row", "T = 1", 1, 16, D, false, 64, false, 8},
      {"odd_rows", "T = 65, causal, tiles of 16 keys", 65, 65, D, true, 16, false, 8},
  };
  return cases;
}

ConformInputs::ConformInputs(const ConformCase& c, int64_t heads, uint64_t seed, bool constant_feature)
    : which(&c),
      q({1, heads, c.rows_per_head, c.head_size}),
      k({1, heads, c.keys, c.head_size}),
      v(k.shape()),
      d_o(q.shape()) {
  if (c.masked_rows) visible = Tensor<uint8_t>({1, heads, c.rows_per_head, 1});
  // A head's numbers depend on its own stream alone.
  parallel_for(heads, [&](int64_t h, int) {
    const HeadInputs head{q.view().at(0, h, 0), k.view().at(0, h, 0),
                          v.view().at(0, h, 0), d_o.view().at(0, h, 0),
                          c.rows_per_head,      c.keys,
                          c.head_size};
    fill_head(c, head, RandomStream(RandomKey{seed, 0, static_cast<uint32_t>(h)}));
    for (int64_t j = 0; constant_feature && j < c.keys; ++j)
      *k.view().at(0, h, j, c.head_size - 1) = kKeyConstant;
    if (c.masked_rows)
      for (int64_t i = 0; i < c.rows_per_head; ++i) *visible.view().at(0, h, i) = i % 4 != 0;
  });
}

AttentionInputs ConformInputs::inputs() const { return {q.view(), k.view(), v.view()}; }
View<const float> ConformInputs::grad_output() const { return d_o.view(); }
AttentionMask ConformInputs::mask() const {
  AttentionMask mask;
  mask.causal = which->causal;
  if (which->masked_rows) {
    mask.visible = visible.view();
    mask.visible.shape[3] = which->keys;
    mask.visible.stride[3] = 0;
  }
  return mask;
}

void ConformInputs::set_feedback(const Tensor<float>& o, const Tensor<double>& exact_o, uint64_t seed) {
  // Noise of 1/8 beside values of about 2: a model that predicts well, and errors of O (2^-9 of it) well
  // below that.
  RandomStream draw({seed, 1, 0});
  for (size_t n = 0; n < o.values().size(); ++n)
    d_o.values()[n] = bf16(o.values()[n] - (exact_o.values()[n] + 0.125 * draw.normal()));
}

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

// One chunk of a case: the same inputs for every plan.
struct Chunk {
  Chunk(const ConformCase& c, int64_t heads, uint64_t chunk_seed, uint32_t step, bool constant_feature)
      : seed(chunk_seed),
        inputs(c, heads, chunk_seed, constant_feature),
        found(inputs.inputs(), /*with_facts=*/true) {
    config.plans = {PrecisionPlan{}};
    config.mask = inputs.mask();
    config.tile_keys = c.tile_keys;
    config.step = step;
    find_truth();
  }

  void find_truth() {
    exact = attention_reference(config, inputs.inputs(), inputs.grad_output());
    scales = output_scales(config, inputs.inputs(), inputs.grad_output());
  }

  void judge(const PrecisionPlan& plan, const ConformKernel& kernel, Totals& totals, ConformResult& result) {
    config.plans = {plan};
    run_kernel(kernel, config, inputs, found);
    // A loss of numbers that are not finite has no gradient; judged as it is.
    const auto is_finite = [](float x) { return std::isfinite(x); };
    if (inputs.which->feedback && std::all_of(found.o.values().begin(), found.o.values().end(), is_finite)) {
      inputs.set_feedback(found.o, exact.o, seed);
      find_truth();
      run_kernel(kernel, config, inputs, found);
    }
    add_residuals(inputs, exact, found, totals, result);
    add_errors(exact, found, result);
    check_outputs(config, inputs, scales, exact, found, result);
  }

  const uint64_t seed;
  ConformInputs inputs;
  AttentionProblem config;
  AttentionReference exact;
  OutputScales scales;
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

void read_off_outputs(const AttentionProblem& given, const AttentionInputs& in, View<const float> grad_output,
                      AttentionBuffers& out) {
  const AttentionProblem shape = problem_of(given, in);
  for (int64_t b = 0; b < shape.B; ++b)
    for (int64_t g = 0; g < shape.G; ++g)
      for (int64_t j = 0; j < shape.N; ++j)
        require(*in.k.at(b, g, j, shape.D - 1) == kKeyConstant,
                "[conform] expected keys whose last feature is {}, got {}", kKeyConstant,
                *in.k.at(b, g, j, shape.D - 1));
  // delta as exact arithmetic has it, and what rounding dS must leave: from the CPU, which rounds nothing else here.
  AttentionProblem config = given;
  PrecisionPlan plan;
  plan.at(Site::dscores) = given.plans[0].at(Site::dscores);
  plan.stabiliser = Stabiliser::zero_sum;
  config.plans = {plan};
  AttentionBuffers cpu(in, /*with_facts=*/true);
  attention_forward(config, in, cpu.forward());
  attention_backward(config, in, grad_output, cpu.forward(), cpu.backward());
  out.delta = cpu.delta;
  out.residual_floor = cpu.residual_floor;
  for (int64_t b = 0; b < shape.B; ++b)
    for (int64_t h = 0; h < shape.H; ++h)
      for (int64_t i = 0; i < shape.T; ++i) {
        const double z = given.plans[0].keel, L = z == 0 ? 0 : *out.lse.view().at(b, h, i);
        const double keel = std::isfinite(L) ? 2 * z * L : 0;
        const double residual =
            *out.dq.view().at(b, h, i, shape.D - 1) / (static_cast<double>(kKeyConstant) * shape.scale) -
            keel;
        *out.residual.view().at(b, h, i) = residual;
        // sum P (dP - delta) = residual + keel's part, with sum P = 1.
        *out.delta.view().at(b, h, i) -= static_cast<float>(residual + keel);
      }
}

void conform_cpu_kernel(const AttentionProblem& config, const AttentionInputs& in,
                        View<const float> grad_output, AttentionBuffers& buffers) {
  attention_forward(config, in, buffers.forward());
  attention_backward(config, in, grad_output, buffers.forward(), buffers.backward());
}

}  // namespace evenkeel
