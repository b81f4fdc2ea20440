// `evenkeel bench attention --gpu`: our kernels next to PyTorch's FlashAttention-2, cuDNN and, for larger heads, its
// memory-efficient attention, on the same tensors, in one process. The stopwatch is python/bench_attention.py, through the C interface. Here is what is measured, against
// which figures, and the verdict. Without PyTorch our kernels are timed alone, from C++.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "attention/kernel_families.h"
#include "base/error.h"
#include "base/json_text.h"
#include "cli/attention_on_device.h"
#include "cli/bench.h"
#include "cli/python_script.h"

namespace evenkeel::cli {
// A namespace of its own: names as natural as the other benches have.
namespace attention_gpu_bench {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// --- What there is to reach.
struct Rate {
  double forward, backward;  // TFLOP/s
  // Of both passes: forward is 1, backward 2.5 parts of the work.
  double both() const { return 3.5 / (1 / forward + 2.5 / backward); }
};
struct Row {
  int64_t B, H, T, D;  // causal
  Rate flash2, cudnn, flash3;
  double must, aim;  // forward + backward; 0: at least the best rival of the same run
  int64_t Dv = 0;    // of values; 0: D
  int64_t value_size() const { return Dv == 0 ? D : Dv; }
  // Forward: products of 2 T T D and 2 T T Dv, half of it masked. Backward: three and two such.
  double product_flops() const { return 2.0 * static_cast<double>(B * H * T * T) / 2; }
  double forward_flops() const { return product_flops() * static_cast<double>(D + value_size()); }
  double backward_flops() const { return product_flops() * static_cast<double>(3 * D + 2 * value_size()); }
  double flops() const { return forward_flops() + backward_flops(); }
  std::string name() const {
    return fmt::format("{},{},{},{}{}", B, H, T, D, Dv == 0 ? "" : fmt::format("/{}", Dv));
  }
};
// TFLOP/s on an H200, BF16, causal: PyTorch 2.11's FlashAttention-2 and cuDNN 9.19; FlashAttention-3 built from its own
// source with CUDA 13.0, its backward not deterministic.
constexpr Row kRows[] = {
    {64, 12, 1024, 64, {188, 139}, {314, 222}, {310, 304}, 290, 336},
    {8, 16, 4096, 64, {276, 213}, {415, 355}, {465, 470}, 400, 470},
    {32, 16, 1024, 128, {242, 159}, {438, 285}, {505, 352}, 345, 400},
    {8, 16, 4096, 128, {290, 253}, {540, 475}, {632, 503}, 470, 535},
    {2, 16, 16384, 128, {329, 303}, {637, 519}, {635, 588}, 530, 600},
    {4, 16, 4096, 256, {}, {}, {}, 0, 0},
    {4, 16, 4096, 192, {}, {}, {}, 0, 0, 128},
};
constexpr size_t kQuickRows[] = {0, 3};
constexpr double kRemedyPrice = 1.02;   // the default remedy against none, forward + backward, row 1
constexpr double kAnyPlanShare = 0.35;  // bf16_all against cuDNN, row 1
constexpr double kFactsPrice = 1.05;    // ties, residual and delta's error as outputs
// The FP8 kernels' forward pass against BF16's, the same stabiliser, at the row of the longest sequences.
constexpr size_t kFp8Row = 4;
constexpr double kFp8Ratio = 1.25;

// The default remedy: the cheapest of those that cure. consistent is stronger and dearer.
constexpr const char* kRemedyStabiliser = "wide_output";
constexpr double kTiedShares[] = {0, 0.05, 1};

// --- What is measured.
struct Contestant {
  std::string name, plan;  // no plan: a rival
  bool facts = false;
  bool is_rival() const { return plan.empty(); }
};
struct Group {
  enum Kind { speed, price_of_stabilisers, any_plan } kind;
  const Row* row;
  double tied = 0;  // share of rows whose largest score is shared
  std::vector<Contestant> contestants;
};
struct Timing {
  std::string name, kernel, why, error;
  std::vector<double> forward, backward;  // seconds a call, one a round

  bool ok() const { return error.empty() && !forward.empty(); }
  std::vector<double> both() const {
    std::vector<double> sums(forward.size());
    std::transform(forward.begin(), forward.end(), backward.begin(), sums.begin(), std::plus<>());
    return sums;
  }
};
using Timings = std::vector<std::vector<Timing>>;  // a list a group

constexpr const char* kFlash2 = "fa2";
constexpr const char* kCudnn = "cudnn";
constexpr const char* kEfficient = "efficient";
constexpr const char* kOurs = "evenkeel";
constexpr const char* kOursPlain = "evenkeel, no remedy";
constexpr const char* kOursConsistent = "evenkeel, consistent";
constexpr const char* kAnyPlan = "bf16_all";
constexpr const char* kAnyPlanFacts = "bf16_all, with facts";

bool takes(const KernelFamily& family, std::string_view plan) {
  return !family.plan_not_taken || family.plan_not_taken(parse_plan(plan), TensorType::bf16).empty();
}
// The GPU's fastest family for a plan, whatever the machine.
const KernelFamily& fastest_for(std::string_view plan) {
  return *std::ranges::find_if(kernel_families(), [&](const KernelFamily& family) {
    return family.on_gpu && takes(family, plan);  // the last takes any
  });
}

std::vector<Group> groups_for(const GpuBenchOptions& options) {
  std::vector<size_t> chosen;
  for (const std::string& text : options.rows) {
    require(text.size() == 1 && text[0] >= '1' && text[0] < static_cast<char>('1' + std::size(kRows)),
            "--row {}: expected a number from 1 to {}", text, std::size(kRows));
    chosen.push_back(static_cast<size_t>(text[0] - '1'));
  }
  const bool everything = chosen.empty() && !options.quick;
  if (chosen.empty() && options.quick) chosen.assign(std::begin(kQuickRows), std::end(kQuickRows));
  for (size_t n = 0; everything && n < std::size(kRows); ++n) chosen.push_back(n);

  const std::vector<Contestant> rivals = {{kFlash2, ""}, {kCudnn, ""}};
  std::vector<Group> groups;
  for (size_t n : chosen) {
    Group group{Group::speed, &kRows[n], 0, rivals};
    if (kRows[n].must == 0) group.contestants.push_back({kEfficient, ""});
    group.contestants.push_back({kOurs, fmt::format("flash2,stabiliser={}", kRemedyStabiliser)});
    group.contestants.push_back({kOursPlain, "flash2"});
    group.contestants.push_back({kOursConsistent, "flash2,stabiliser=consistent"});
    for (const std::string& plan : options.plans) {
      parse_plan(plan);
      group.contestants.push_back({plan, plan});
    }
    groups.push_back(std::move(group));
  }
  if (!everything) return groups;
  for (double tied : kTiedShares) {
    Group group{Group::price_of_stabilisers, &kRows[0], tied, {}};
    // Those that the fastest family of this plan takes.
    for (std::string_view stabiliser : kStabiliserNames)
      if (const std::string plan = fmt::format("flash2,stabiliser={}", stabiliser);
          takes(fastest_for("flash2"), plan))
        group.contestants.push_back({std::string(stabiliser), plan});
    groups.push_back(std::move(group));
  }
  Group any{Group::any_plan, &kRows[0], 0, {rivals[1]}};
  any.contestants.push_back({kAnyPlan, "bf16_all"});
  any.contestants.push_back({kAnyPlanFacts, "bf16_all", /*facts=*/true});
  groups.push_back(std::move(any));
  return groups;
}

// --- The stopwatch in Python.

// What a run of the script gave: its answer, or why there is none.
struct Answer {
  std::optional<Json> json;
  std::string why_not;
};

std::string quoted(const std::string& word) {
  std::string text = "'";
  for (char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

// A file that is gone when this is.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text) {
    const int file = mkstemp(path_.data());
    require_data(file >= 0, "cannot make a file {}", path_);
    close(file);
    std::ofstream(path_) << text;
  }
  ~TemporaryFile() { unlink(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_ = (fs::temp_directory_path() / "evenkeel-bench-XXXXXX").string();
};

Answer ask_python(const std::vector<Group>& groups, int64_t rounds, const std::string& layout) {
  constexpr int kNoPython = 127;
  const fs::path script = find_script("bench_attention.py"), library = program_folder() / "libevenkeel.so";
  if (script.empty()) return {{}, "python/bench_attention.py is not here"};
  if (!fs::exists(library)) return {{}, library.string() + " is not here"};
  Json request = {{"library", library.string()}, {"rounds", rounds}};
  for (const Group& group : groups) {
    const Row& row = *group.row;
    Json contestants = Json::array();
    for (const Contestant& c : group.contestants) {
      Json spec = {{"name", c.name}};
      if (!c.is_rival()) {
        spec["plan"] = c.plan;
        spec["facts"] = c.facts;
      }
      contestants.push_back(spec);
    }
    request["groups"].push_back({{"shape", {row.B, row.H, row.T, row.D}},
                                 {"value_size", row.value_size()},
                                 {"layout", layout},
                                 {"tied", group.tied},
                                 {"contestants", contestants}});
  }
  const TemporaryFile file(request.dump());
  const char* python = std::getenv("EVENKEEL_PYTHON");
  const std::string command = fmt::format("{} {} {}", quoted(python ? python : "python3"),
                                          quoted(script.string()), quoted(file.path()));
  std::FILE* pipe = popen(command.c_str(), "r");
  require_data(pipe != nullptr, "cannot run {}", command);
  std::string text;
  std::array<char, 4096> buffer;
  while (const size_t got = fread(buffer.data(), 1, buffer.size(), pipe)) text.append(buffer.data(), got);
  const int status = pclose(pipe);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (code == kNoPackage) return {{}, "no PyTorch with a GPU"};
  if (code == kNoPython) return {{}, "no python3"};
  require_data(code == 0, "{} failed with exit code {}", script.string(), code);
  return {parse_json(text), ""};
}

Timings timings_of(const Json& answer) {
  Timings timings;
  for (const Json& group : answer.at("groups")) {
    std::vector<Timing>& list = timings.emplace_back();
    for (const Json& t : group)
      list.push_back({t.at("name"), t.value("kernel", ""), t.value("why", ""), t.value("error", ""),
                      t.value("forward", std::vector<double>{}), t.value("backward", std::vector<double>{})});
  }
  return timings;
}

// --- The stopwatch in C++: ours alone.

AttentionProblem problem_of(const Row& row, const Contestant& c) {
  AttentionProblem p = causal_problem(row.B, row.H, row.T, row.D);
  p.Dv = row.Dv;
  p.plans = {parse_plan(c.plan)};
  p.with_facts = c.facts;
  return p;
}

Timings time_alone(const std::vector<Group>& groups, int64_t rounds) {
  Timings timings;
  for (const Group& group : groups) {
    std::vector<Timing>& list = timings.emplace_back();
    std::vector<std::unique_ptr<AttentionOnDevice>> running;
    for (const Contestant& c : group.contestants) {
      if (c.is_rival() || group.tied > 0) continue;
      Timing& timing = list.emplace_back();
      timing.name = c.name;
      try {
        running.push_back(std::make_unique<AttentionOnDevice>(problem_of(*group.row, c)));
        timing.kernel = running.back()->choice().kernel;
        timing.why = running.back()->choice().why;
        running.back()->forward(nullptr);
        running.back()->backward(nullptr);
        device_wait();
      } catch (const std::exception& error) {
        timing.error = error.what();
        if (running.size() < list.size()) running.push_back(nullptr);
      }
    }
    for (int64_t round = 0; round < rounds; ++round)
      for (size_t n = 0; n < list.size(); ++n) {
        if (!list[n].error.empty()) continue;
        list[n].forward.push_back(forward_seconds(*running[n]));
        list[n].backward.push_back(backward_seconds(*running[n]));
      }
  }
  return timings;
}

// One mask of the row of FP8: FP8 after BF16, as it is and with the sum kept.
struct Fp8Group {
  bool causal;
  std::vector<Timing> timings;
  std::string name() const { return fmt::format("{} {}", kRows[kFp8Row].name(), causal ? "causal" : "full"); }
  double forward_flops() const { return kRows[kFp8Row].forward_flops() * (causal ? 1 : 2); }
  double backward_flops() const { return kRows[kFp8Row].backward_flops() * (causal ? 1 : 2); }
};

// The quantiser included: in turns, so that all meet the same clocks.
Fp8Group time_fp8(bool causal, int64_t rounds) {
  Fp8Group group{causal, {}};
  std::vector<std::unique_ptr<AttentionOnDevice>> running;
  for (const char* stabiliser : {"none", "zero_sum"})
    for (const bool fp8 : {false, true}) {
      Timing& timing = group.timings.emplace_back();
      timing.name = fmt::format("{}, {}", fp8 ? "fp8" : "bf16", stabiliser);
      const std::string plan = fmt::format("{},stabiliser={}", fp8 ? kHopperFp8Plan : "flash2", stabiliser);
      AttentionProblem problem = problem_of(kRows[kFp8Row], {timing.name, plan});
      problem.mask.causal = causal;
      running.push_back(std::make_unique<AttentionOnDevice>(problem));
      timing.kernel = running.back()->choice().kernel;
      running.back()->forward(nullptr);
      running.back()->backward(nullptr);
      device_wait();
    }
  for (int64_t round = 0; round < rounds; ++round)
    for (size_t n = 0; n < running.size(); ++n) {
      group.timings[n].forward.push_back(forward_seconds(*running[n]));
      group.timings[n].backward.push_back(backward_seconds(*running[n]));
    }
  return group;
}

// --- Results.

const Timing* find(const std::vector<Timing>& list, std::string_view name) {
  for (const Timing& t : list)
    if (t.name == name && t.ok()) return &t;
  return nullptr;
}

Rate rate(const Row& row, const Timing& t) {
  return {row.forward_flops() / median(t.forward) * 1e-12, row.backward_flops() / median(t.backward) * 1e-12};
}
double both(const Row& row, const Timing& t) { return row.flops() / median(t.both()) * 1e-12; }

// A ratio and what it must be.
struct Verdict {
  std::string what;
  double value, target;
  bool at_least;
  bool ok() const { return at_least ? value >= target : value <= target; }
};

std::vector<Verdict> verdicts_of(const std::vector<Group>& groups, const Timings& timings) {
  std::vector<Verdict> verdicts;
  for (size_t n = 0; n < groups.size(); ++n) {
    const Group& group = groups[n];
    const Row& row = *group.row;
    const std::vector<Timing>& list = timings[n];
    // What was to be measured and was not counts as missed.
    const auto tflops = [&](const char* name) {
      const Timing* t = find(list, name);
      return t ? both(row, *t) : 0.0;
    };
    const auto price = [&](const char* dearer, const char* cheaper) {
      return tflops(dearer) > 0 ? tflops(cheaper) / tflops(dearer) : INFINITY;
    };
    const auto add = [&](const std::string& what, double value, double target, bool at_least) {
      verdicts.push_back({row.name() + " " + what, value, target, at_least});
    };
    if (group.kind == Group::speed && row.must > 0)
      add("against the must", tflops(kOurs) / row.must, 1, true);
    if (group.kind == Group::speed && row.must == 0)
      if (const double best = std::max({tflops(kFlash2), tflops(kCudnn), tflops(kEfficient)}); best > 0)
        add("against the best rival", tflops(kOurs) / best, 1, true);
    if (group.kind == Group::price_of_stabilisers && group.tied == 0)
      add(fmt::format("the price of {}", kRemedyStabiliser), price(kRemedyStabiliser, "none"), kRemedyPrice,
          false);
    if (group.kind == Group::any_plan) {
      if (const Timing* cudnn = find(list, kCudnn))
        add("bf16_all against cuDNN", tflops(kAnyPlan) / both(row, *cudnn), kAnyPlanShare, true);
      add("bf16_all, the price of facts", price(kAnyPlanFacts, kAnyPlan), kFactsPrice, false);
    }
  }
  return verdicts;
}

void add_fp8_verdicts(const Fp8Group& group, std::vector<Verdict>& verdicts) {
  const std::vector<Timing>& timings = group.timings;
  for (size_t n = 0; n + 1 < timings.size(); n += 2)
    verdicts.push_back({fmt::format("{} {}: forward against bf16", group.name(), timings[n + 1].name),
                        median(timings[n].forward) / median(timings[n + 1].forward), kFp8Ratio, true});
}

void print_fp8(const Fp8Group& group) {
  fmt::print("\n{:<32}{:>8}{:>10}{:>8}  {:<16}  {}\n", group.name() + ", FP8", "forward", "backward", "both",
             "10..90 % forward", "kernel");
  const double forward = group.forward_flops() * 1e-12, backward = group.backward_flops() * 1e-12;
  for (const Timing& t : group.timings)
    fmt::print(
        "  {:<30}{:>8.0f}{:>10.0f}{:>8.0f}  {:<16}  {}\n", t.name, forward / median(t.forward),
        backward / median(t.backward), (forward + backward) / median(t.both()),
        fmt::format("{:.0f}..{:.0f}", forward / quantile(t.forward, 0.9), forward / quantile(t.forward, 0.1)),
        t.kernel);
}

std::string title(const Group& group) {
  std::string text = fmt::format("{} causal", group.row->name());
  if (group.tied > 0) text += fmt::format(", {:.0f} % of the rows tied", 100 * group.tied);
  return text;
}

void print(const std::vector<Group>& groups, const Timings& timings) {
  for (size_t n = 0; n < groups.size(); ++n) {
    const Row& row = *groups[n].row;
    const std::vector<Timing>& list = timings[n];
    if (list.empty()) continue;
    fmt::print("\n{:<32}{:>8}{:>10}{:>10}  {:<16}{:>7}{:>8}{:>7}  {}\n", title(groups[n]), "forward",
               "backward", "both", "10..90 %", "x FA2", "x cuDNN", "x FA3", "kernel");
    const Timing *flash2 = find(list, kFlash2), *cudnn = find(list, kCudnn);
    for (const Timing& t : list) {
      if (!t.ok()) {
        fmt::print("  {:<30}failed: {}\n", t.name, t.error.empty() ? "no result" : t.error);
        continue;
      }
      const Rate r = rate(row, t);
      const double total = both(row, t);
      const auto tflops = [&](double seconds) { return row.flops() / seconds * 1e-12; };
      const auto ratio = [&](const Timing* rival) {
        return rival ? fmt::format("{:.2f}", total / both(row, *rival)) : "-";
      };
      fmt::print(
          "  {:<30}{:>8.0f}{:>10.0f}{:>10.0f}  {:<16}{:>7}{:>8}{:>7}  {}\n", t.name, r.forward, r.backward,
          total,
          fmt::format("{:.0f}..{:.0f}", tflops(quantile(t.both(), 0.9)), tflops(quantile(t.both(), 0.1))),
          ratio(flash2), ratio(cudnn), row.must > 0 ? fmt::format("{:.2f}", total / row.flash3.both()) : "-",
          t.kernel);
    }
    if (row.must > 0 && find(list, kOurs))
      fmt::print(
          "  {:<30}{:>8}{:>10}{:>10.0f}  FA3 then {:.0f} / {:.0f}, cuDNN then {:.0f} / {:.0f}; aim {:.0f}\n",
          "must", "", "", row.must, row.flash3.forward, row.flash3.backward, row.cudnn.forward,
          row.cudnn.backward, row.aim);
  }
}

Json to_json(const std::vector<Group>& groups, const Timings& timings, const std::vector<Verdict>& verdicts) {
  Json out = {{"schema", 1}, {"groups", Json::array()}, {"targets", Json::array()}};
  for (size_t n = 0; n < groups.size(); ++n) {
    const Row& row = *groups[n].row;
    Json list = Json::array();
    for (const Timing& t : timings[n]) {
      Json entry = {{"name", t.name}, {"kernel", t.kernel}, {"why", t.why}};
      if (t.ok()) {
        const Rate r = rate(row, t);
        entry["forward_tflops"] = r.forward;
        entry["backward_tflops"] = r.backward;
        entry["both_tflops"] = both(row, t);
        entry["forward_seconds"] = t.forward;
        entry["backward_seconds"] = t.backward;
      } else {
        entry["error"] = t.error;
      }
      list.push_back(entry);
    }
    out["groups"].push_back({{"shape", {row.B, row.H, row.T, row.D}},
                             {"value_size", row.value_size()},
                             {"tied", groups[n].tied},
                             {"must_tflops", row.must},
                             {"aim_tflops", row.aim},
                             {"fa3_tflops", {row.flash3.forward, row.flash3.backward}},
                             {"contestants", list}});
  }
  for (const Verdict& v : verdicts)
    out["targets"].push_back({{"what", v.what}, {"ratio", v.value}, {"target", v.target}, {"ok", v.ok()}});
  return out;
}

}  // namespace
}  // namespace attention_gpu_bench

int bench_attention_gpu(const GpuBenchOptions& options) {
  using namespace attention_gpu_bench;
  require(options.layout == "bthd" || options.layout == "bhtd", "--layout {}: expected bthd or bhtd",
          options.layout);
  const std::vector<Group> groups = groups_for(options);
  const CudaDevice device = cuda_device();
  require_data(device.present, "--gpu: no GPU: {}", device.why);
  if (options.forms) return bench_attention_forms(options);
  const int64_t rounds = options.rounds > 0 ? options.rounds : options.quick ? 7 : 15;
  const Answer answer = ask_python(groups, rounds, options.layout);
  const Timings timings = answer.json ? timings_of(*answer.json) : time_alone(groups, rounds);
  const std::string rivals = answer.json
                                 ? fmt::format("PyTorch {}, cuDNN {}", answer.json->value("torch", "?"),
                                               answer.json->value("cudnn", 0))
                                 : "no rival: " + answer.why_not;
  std::vector<Verdict> verdicts = verdicts_of(groups, timings);
  // Where the row of FP8 is measured, and the kernels run.
  const bool with_fp8 =
      fastest_for(kHopperFp8Plan).device_not_taken(device).empty() &&
      std::any_of(groups.begin(), groups.end(), [](const Group& g) { return g.row == &kRows[kFp8Row]; });
  std::vector<Fp8Group> fp8;
  if (with_fp8)
    for (const bool causal : {true, false}) fp8.push_back(time_fp8(causal, rounds));
  for (const Fp8Group& group : fp8) add_fp8_verdicts(group, verdicts);
  const bool ok = std::all_of(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.ok(); });
  if (options.json) {
    Json out = to_json(groups, timings, verdicts);
    out["device"] = device.name;
    out["rivals"] = rivals;
    for (const Fp8Group& group : fp8)
      for (const Timing& t : group.timings)
        out["fp8"].push_back({{"name", t.name},
                              {"causal", group.causal},
                              {"kernel", t.kernel},
                              {"forward_seconds", t.forward},
                              {"backward_seconds", t.backward}});
    fmt::print("{}\n", out.dump(2));
    return options.check && !ok ? 1 : 0;
  }
  fmt::print("attention on {}: BF16, causal, TFLOP/s (medians of {} rounds); {}\n", device.name, rounds,
             rivals);
  print(groups, timings);
  for (const Fp8Group& group : fp8) print_fp8(group);
  fmt::print("\n{:<56}{:>8}{:>10}\n", "", "ratio", "target");
  for (const Verdict& v : verdicts)
    fmt::print("{:<56}{:>8.3f}{:>10}  {}\n", v.what, v.value,
               fmt::format("{} {:.3f}", v.at_least ? ">=" : "<=", v.target), v.ok() ? "ok" : "MISS");
  fmt::print(
      "\nFLOPs: 4 B H T T D / 2 forward, 2.5 times that backward. x FA2, x cuDNN: of this run. x FA3, must, "
      "aim:\n"
      "from figures of an H200 with PyTorch 2.11, cuDNN 9.19, and FlashAttention-3 built from source.\n");
  return options.check && !ok ? 1 : 0;
}

}  // namespace evenkeel::cli
