// Attention on the CPU for any precision plan: checks, then tiles over threads. The same bits for any thread
// count and any tile_rows, because every sum's order is fixed by the keys' and rows' numbers alone.
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "attention/attention.h"
#include "attention/row_tile.h"
#include "base/error.h"
#include "base/threads.h"
#include "numerics/round_array.h"

namespace evenkeel {
namespace {

std::vector<HeadPlan> resolve_plans(const AttentionProblem& problem) {
  std::vector<HeadPlan> plans;
  for (int64_t h = 0; h < problem.H; ++h) plans.emplace_back(problem.plan(h));
  return plans;
}

int32_t magnitude_bits(float x) { return static_cast<int32_t>(std::bit_cast<uint32_t>(x) & 0x7fffffffu); }

// REQUIRES: shape checked. Looks only at rows that exist.
void check_finite(const char* name, const View<const float>& x, int64_t B, auto rows_of) {
  parallel_for(B * x.shape[1], [&](int64_t item, int) {
    const int64_t b = item / x.shape[1], h = item % x.shape[1];
    for (int64_t row = 0, rows = rows_of(b); row < rows; ++row) {
      const float* values = x.at(b, h, row);
      // Inf and NaN have the largest exponent: their magnitude bits are the largest. A maximum vectorises.
      int32_t largest = 0;
      if (x.stride[3] == 1)
        for (int64_t d = 0; d < x.shape[3]; ++d) largest = std::max(largest, magnitude_bits(values[d]));
      else
        for (int64_t d = 0; d < x.shape[3]; ++d)
          largest = std::max(largest, magnitude_bits(values[d * x.stride[3]]));
      const bool finite = largest < magnitude_bits(std::numeric_limits<float>::infinity());
      if (finite) continue;
      for (int64_t d = 0; d < x.shape[3]; ++d)
        require(
            std::isfinite(values[d * x.stride[3]]),
            "[attention] expected finite values in {}, found {} at (batch {}, head {}, row {}, feature {})",
            name, values[d * x.stride[3]], b, h, row, d);
    }
  });
}

void check_finite_inputs(const AttentionProblem& p, const AttentionInputs& in) {
  if (p.allow_nonfinite) return;
  const auto rows = [&](int64_t b) { return p.rows(b); };
  const auto keys = [&](int64_t b) { return p.keys(b); };
  check_finite("q", in.q, p.B, rows);
  check_finite("k", in.k, p.B, keys);
  check_finite("v", in.v, p.B, keys);
}

template <class T>
void check_view(const char* name, const View<T>& view, const std::array<int64_t, 4>& expected,
                bool optional = false) {
  if (optional && !view.present()) return;
  require(view.present(), "[attention] expected a tensor for {}, got none", name);
  require(view.shape == expected, "[attention] expected shape ({}, {}, {}, {}) for {}, got ({}, {}, {}, {})",
          expected[0], expected[1], expected[2], expected[3], name, view.shape[0], view.shape[1],
          view.shape[2], view.shape[3]);
}

// Sets rows [first, shape[2]) of (b, h) to a value.
template <class T>
void fill_rows(const View<T>& x, int64_t b, int64_t h, int64_t first, T value) {
  if (!x.present()) return;
  for (int64_t row = first; row < x.shape[2]; ++row)
    for (int64_t d = 0; d < x.shape[3]; ++d) *x.at(b, h, row, d) = value;
}

// A RowTile for each thread, made when first used.
class Tiles {
 public:
  explicit Tiles(const Call& call) : call_(call), tiles_(static_cast<size_t>(thread_count())) {}
  RowTile& of(int worker) {
    std::unique_ptr<RowTile>& tile = tiles_[static_cast<size_t>(worker)];
    if (!tile) tile = std::make_unique<RowTile>(call_);
    return *tile;
  }

 private:
  const Call& call_;
  std::vector<std::unique_ptr<RowTile>> tiles_;
};

// body(b, h, first row, worker) for every tile of rows that exists. Last rows first: under a causal mask they
// have the most keys, and the longest work should not start last.
void for_each_row_tile(const Call& call, const std::function<void(int64_t, int64_t, int64_t, int)>& body) {
  const AttentionProblem& p = call.problem;
  const int64_t step = call.tile_rows(), tiles = (p.T + step - 1) / step;
  parallel_for(p.B * p.H * tiles, [&](int64_t item, int worker) {
    const int64_t row = (tiles - 1 - item / (p.B * p.H)) * step, head = item % (p.B * p.H);
    const int64_t b = head / p.H;
    if (row < p.rows(b)) body(b, head % p.H, row, worker);
  });
}

// Rounds dK or dV of keys [key, key + keys) of one kv head and puts them in their place.
void write_key_gradient(const Call& call, Site site, const View<float>& to, int64_t b, int64_t g, int64_t key,
                        int64_t keys, float* sums) {
  const int64_t D = site == Site::dv ? call.problem.Dv : call.problem.D, stride = call.operands.stride(),
                group = call.problem.H / call.problem.G;
  // Heads of a group share dK and dV: their first head's plan rounds them.
  const PrecisionPlan& plan = call.plans[static_cast<size_t>(g * group)].plan;
  std::vector<float> exact;
  if (call.observer) exact.assign(sums, sums + keys * stride);
  for (int64_t j = 0; j < keys; ++j) {
    float* row = sums + j * stride;
    if (!is_identity(plan.at(site)))
      round_array(
          plan.at(site), row, row, static_cast<size_t>(D),
          stream_key(call.problem, plan, static_cast<uint32_t>(site)),
          static_cast<uint64_t>(
              (((call.problem.first_sequence + b) * call.problem.G + g) * call.problem.N + key + j) * D));
    for (int64_t d = 0; d < D; ++d) *to.at(b, g, key + j, d) = row[d];
  }
  if (call.observer)
    call.observer->observe({site, b, g * group, key, 0, keys, D, stride, 1, exact.data(), sums});
}

// P of the sink times (0 - delta), over all rows of a head.
void write_dsinks(const AttentionProblem& problem, const AttentionForward& saved,
                  const AttentionBackward& out) {
  for (int64_t h = 0; h < problem.H; ++h) {
    double sum = 0;
    for (int64_t b = 0; b < problem.B; ++b)
      for (int64_t i = 0; i < problem.rows(b); ++i)
        sum -= std::exp(double{problem.sinks[static_cast<size_t>(h)]} - double{*saved.lse.at(b, h, i)}) *
               double{*out.delta.at(b, h, i)};
    *out.dsinks.at(0, h, 0) = static_cast<float>(sum);
  }
}

void check_backward_views(const AttentionProblem& problem, const View<const float>& grad_output,
                          const AttentionForward& saved, const AttentionBackward& out) {
  const auto per_query = [&](int64_t size) { return std::array{problem.B, problem.H, problem.T, size}; };
  const auto per_key = [&](int64_t size) { return std::array{problem.B, problem.G, problem.N, size}; };
  const std::array<int64_t, 4> per_row = per_query(1);
  check_view("grad_output", grad_output, per_query(problem.Dv));
  check_view("o_for_delta", saved.o_for_delta, per_query(problem.Dv));
  check_view("lse", saved.lse, per_row);
  check_view("row_max", saved.row_max, per_row);
  check_view("row_sum", saved.row_sum, per_row);
  check_view("dq", out.dq, per_query(problem.D));
  check_view("dk", out.dk, per_key(problem.D));
  check_view("dv", out.dv, per_key(problem.Dv));
  check_view("delta", out.delta, per_row, true);
  check_view("grad_lse", out.grad_lse, per_row, true);
  check_view("dsinks", out.dsinks, {1, problem.H, 1, 1}, true);
  require(!out.dsinks.present() || (out.delta.present() && !problem.sinks.empty()),
          "[attention] expected sinks and a tensor for delta where dsinks is asked for");
  check_view("residual", out.residual, per_row, true);
  check_view("residual_floor", out.residual_floor, per_row, true);
}

}  // namespace

void attention_forward(const AttentionProblem& asked, const AttentionInputs& in, const AttentionForward& out,
                       SiteObserver* observer) {
  const AttentionProblem problem = problem_of(asked, in);
  const std::array<int64_t, 4> whole{problem.B, problem.H, problem.T, problem.Dv},
      per_row{problem.B, problem.H, problem.T, 1};
  check_view("o", out.o, whole);
  check_view("o_for_delta", out.o_for_delta, whole);
  check_view("lse", out.lse, per_row);
  check_view("row_max", out.row_max, per_row);
  check_view("row_sum", out.row_sum, per_row);
  check_view("ties", out.ties, per_row, /*optional=*/true);
  check_finite_inputs(problem, in);

  const std::vector<HeadPlan> plans = resolve_plans(problem);
  const Operands operands(problem, plans, in, {}, Pass::forward, observer);
  const Call call{problem, plans, in, operands, observer};
  Tiles tiles(call);
  for_each_row_tile(
      call, [&](int64_t b, int64_t h, int64_t row, int worker) { tiles.of(worker).forward(b, h, row, out); });
  for (int64_t b = 0; b < problem.B; ++b)
    for (int64_t h = 0; h < problem.H; ++h) {
      const int64_t rows = problem.rows(b);
      fill_rows(out.o, b, h, rows, 0.0f);
      fill_rows(out.o_for_delta, b, h, rows, 0.0f);
      fill_rows(out.lse, b, h, rows, RowShift::kNone);
      fill_rows(out.row_max, b, h, rows, RowShift::kNone);
      fill_rows(out.row_sum, b, h, rows, 0.0f);
      fill_rows(out.ties, b, h, rows, 0);
    }
}

void attention_backward(const AttentionProblem& asked, const AttentionInputs& in,
                        View<const float> grad_output, const AttentionForward& saved,
                        const AttentionBackward& out, SiteObserver* observer) {
  const AttentionProblem problem = problem_of(asked, in);
  check_backward_views(problem, grad_output, saved, out);
  check_finite_inputs(problem, in);
  if (!problem.allow_nonfinite)
    check_finite("grad_output", grad_output, problem.B, [&](int64_t b) { return problem.rows(b); });

  const std::vector<HeadPlan> plans = resolve_plans(problem);
  const Operands operands(problem, plans, in, grad_output, Pass::backward, observer);
  const Call call{problem, plans, in, operands, observer};
  Tiles tiles(call);
  const int64_t group = problem.H / problem.G, step_rows = call.tile_rows(), step_keys = call.tile_keys();
  const size_t stride = static_cast<size_t>(operands.stride());

  const bool by_heads = observer || problem.B * problem.G >= thread_count();
  std::vector<float> shared_delta(by_heads ? 0 : static_cast<size_t>(problem.B * problem.H * problem.T));
  float* const shared = by_heads ? nullptr : shared_delta.data();
  // The contributions of all rows and heads to keys [first, last) of kv head g, rows ascending, and, if
  // asked, dQ.
  const auto keys_of_head = [&](int64_t b, int64_t g, int64_t first, int64_t last, bool write_rows,
                                int worker) {
    const int64_t keys = std::min(last, problem.keys(b)) - first;
    if (keys < 0) return;
    std::vector<float> dk(static_cast<size_t>(keys) * stride), dv(static_cast<size_t>(keys) * stride);
    for (int64_t h = g * group; h < (g + 1) * group; ++h)
      for (int64_t row = 0; row < problem.rows(b); row += step_rows)
        tiles.of(worker).backward(
            b, h, row,
            {grad_output, saved, out, write_rows, shared, dk.data(), dv.data(), first, first + keys});
    write_key_gradient(call, Site::dk, out.dk, b, g, first, keys, dk.data());
    write_key_gradient(call, Site::dv, out.dv, b, g, first, keys, dv.data());
  };

  // With enough heads to go round, a thread takes a whole kv head: P and dP are found once for dQ, dK and dV
  // (five products). Else rows and keys are shared out apart, and each finds them for itself (seven). Same
  // sums, same order. An observer is called for one row from one thread at a time, so it has the first way.
  if (by_heads) {
    parallel_for(problem.B * problem.G, [&](int64_t item, int worker) {
      keys_of_head(item / problem.G, item % problem.G, 0, problem.N, /*write_rows=*/true, worker);
    });
  } else {
    for_each_row_tile(call, [&](int64_t b, int64_t h, int64_t row, int worker) {
      tiles.of(worker).backward(b, h, row, {grad_output, saved, out, true, shared});
    });
    const int64_t parts = (problem.N + step_keys - 1) / step_keys;
    parallel_for(problem.B * problem.G * parts, [&](int64_t item, int worker) {
      const int64_t head = item / parts, first = item % parts * step_keys;
      keys_of_head(head / problem.G, head % problem.G, first, first + step_keys, /*write_rows=*/false,
                   worker);
    });
  }
  for (int64_t b = 0; b < problem.B; ++b) {
    const int64_t rows = problem.rows(b), keys = problem.keys(b);
    for (int64_t h = 0; h < problem.H; ++h) {
      fill_rows(out.dq, b, h, rows, 0.0f);
      fill_rows(out.delta, b, h, rows, 0.0f);
      fill_rows(out.residual, b, h, rows, 0.0);
      fill_rows(out.residual_floor, b, h, rows, 0.0);
    }
    for (int64_t g = 0; g < problem.G; ++g) {
      fill_rows(out.dk, b, g, keys, 0.0f);
      fill_rows(out.dv, b, g, keys, 0.0f);
    }
  }
  if (out.dsinks.present()) write_dsinks(problem, saved, out);
}

}  // namespace evenkeel
