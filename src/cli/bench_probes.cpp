// `evenkeel bench probes`: what probes add to a step of `micro` on one thread, steps with and without in turn.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/threads.h"
#include "cli/bench.h"
#include "diagnosis/probe_recorder.h"
#include "numerics/random.h"
#include "training/backend.h"

namespace evenkeel::cli {
namespace {

constexpr int kRounds = 60;
constexpr int64_t kEvery = 50;                         // steps between full sets, in the figure below
constexpr double kMostCheap = 0.01, kMostFull = 0.05;  // of a step's time

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::lround(q * static_cast<double>(values.size() - 1)))];
}

// Random tokens: what is computed does not depend on them.
struct RandomBatch {
  RandomBatch(int64_t B, const Gpt2Config& c)
      : tokens(static_cast<size_t>(B * c.context)), targets(tokens.size()) {
    RandomStream draw({1, 0, 0});
    for (std::vector<int32_t>* list : {&tokens, &targets})
      for (int32_t& token : *list) token = static_cast<int32_t>(draw.below(c.vocabulary));
    batch = {B, c.context, tokens, targets};
  }
  std::vector<int32_t> tokens, targets;
  Batch batch{};
};

}  // namespace

int bench_probes(bool check, bool json) {
  const int threads_before = thread_count();
  set_thread_count(1);
  const Gpt2Config config = gpt2_preset("micro");
  const auto model = make_gpt2_cpu(config, 1);
  model->set_plan(ScopedPlan::parse("fp32,row_sum=e5m2"));
  const auto optimizer = make_optimizer(Backend::cpu, {}, model->table());
  const RandomBatch random(16, config);
  RunConfig run;
  run.model = config;
  run.probe_every = kEvery;
  ProbeRecorder recorder(run, "", 0);

  enum Kind { plain, cheap, full };
  const auto step = [&](Kind kind) {
    const auto began = std::chrono::steady_clock::now();
    const int64_t number = kind == full ? 0 : 1;  // of a step that gets the full set, or not
    StepContext context;
    if (kind != plain) recorder.prepare(number, context);
    model->zero_gradients();
    const double loss = model->forward_backward(random.batch, 1, context);
    if (kind != plain) {
      nlohmann::json line;
      recorder.see(number, loss, *model, line);
      line.dump();
    }
    optimizer->step(*model, /*lr=*/0);  // the same weights again
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  };
  std::vector<double> times, cheap_shares, full_shares;
  for (int round = -1; round < kRounds; ++round) {
    // Which comes first changes from round to round, so that neither always follows the full set.
    const Kind first = round % 2 == 0 ? plain : cheap;
    const double one = step(first), other = step(first == plain ? cheap : plain);
    const double without = first == plain ? one : other, with = first == plain ? other : one;
    const double whole = step(full);
    step(plain);              // the caches as they were
    if (round < 0) continue;  // warms up
    times.push_back(without);
    cheap_shares.push_back(with / without - 1);
    full_shares.push_back((whole / without - 1) / kEvery);
  }
  set_thread_count(threads_before);

  struct Figure {
    const char* name;
    const std::vector<double>& shares;
    double most;
    bool ok() const { return quantile(shares, 0.5) <= most; }
  };
  const Figure figures[] = {{"cheap set, every step", cheap_shares, kMostCheap},
                            {"full set, every 50th step", full_shares, kMostFull}};
  const bool ok = figures[0].ok() && figures[1].ok();
  if (json) {
    nlohmann::ordered_json out = {{"bench", "probes"}, {"threads", 1},
                                  {"rounds", kRounds}, {"step_ms", 1e3 * quantile(times, 0.5)},
                                  {"ok", ok},          {"results", nlohmann::ordered_json::array()}};
    for (const Figure& f : figures)
      out["results"].push_back({{"probes", f.name},
                                {"share", quantile(f.shares, 0.5)},
                                {"share_quartiles", {quantile(f.shares, 0.25), quantile(f.shares, 0.75)}},
                                {"most", f.most},
                                {"ok", f.ok()}});
    fmt::print("{}\n", out.dump(2));
  } else {
    fmt::print(
        "micro, 16 x 128 tokens, one thread: {:.1f} ms a step; medians of {} pairs, in brackets "
        "quartiles\n\n",
        1e3 * quantile(times, 0.5), kRounds);
    for (const Figure& f : figures)
      fmt::print("{:<28}{:>+7.2f} %  ({:+.2f}..{:+.2f})   at most {:.0f} %  {}\n", f.name,
                 100 * quantile(f.shares, 0.5), 100 * quantile(f.shares, 0.25),
                 100 * quantile(f.shares, 0.75), 100 * f.most, f.ok() ? "ok" : "MISS");
  }
  return check && !ok ? 1 : 0;
}

}  // namespace evenkeel::cli
