// `evenkeel info`: version, CPU features, which kernels will run and why.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "attention/kernel_families.h"
#include "base/threads.h"
#include "cli/options.h"
#include "numerics/cpu.h"
#include "training/backend.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

// The default remedy, the stronger one, and the paper's arithmetic.
constexpr const char* kPlans[] = {"flash2,stabiliser=wide_output", "flash2,stabiliser=consistent",
                                  "bf16_all"};

struct PlanChoice {
  const char* plan;
  KernelChoice choice;
};

// What runs on the GPU for bf16 tensors of head size 64.
std::vector<PlanChoice> gpu_choices(const CudaDevice& device) {
  std::vector<PlanChoice> choices;
  if (!device.present || device.major < kLeastCudaMajor) return choices;
  for (const char* plan : kPlans) {
    AttentionProblem problem;
    problem.B = problem.H = problem.G = 1;
    problem.T = problem.N = 1024;
    problem.D = 64;
    problem.type = TensorType::bf16;
    problem.mask.causal = true;
    problem.plans = {parse_plan(plan)};
    choices.push_back({plan, choose_kernel(problem, device)});
  }
  return choices;
}

std::string head_sizes(const FamilyLimits& limits) {
  if (limits.largest_head == 0) return "any";
  return limits.head_step == 1
             ? fmt::format("up to {}", limits.largest_head)
             : fmt::format("multiples of {} up to {}", limits.head_step, limits.largest_head);
}

// The families of attention kernels in this library, and their limits.
Json families_as_json() {
  Json list = Json::array();
  for (const KernelFamily& family : kernel_families())
    list.push_back({{"name", family.name},
                    {"device", family.on_gpu ? "gpu" : "cpu"},
                    {"types", types_taken(family.limits)},
                    {"head_step", family.limits.head_step},
                    {"largest_head", family.limits.largest_head}});
  return list;
}

}  // namespace

int run_info(int argc, char** argv) {
  bool json = false;
  Options options("info [--json]", "Version, CPU features, GPU, and which kernels will run and why.", "info");
  options.flag("--json", "the same as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  const char* target = name(cpu_target());
  const char* why = cpu_target() == CpuTarget::avx512 ? "the CPU has AVX-512 F, BW, DQ and VL"
                    : cpu_target() == CpuTarget::avx2
                        ? "the CPU has AVX2 and FMA (and no AVX-512, or EVENKEEL_CPU asks for less)"
                        : "the CPU has no AVX2 and FMA, or EVENKEEL_CPU asks for less";
  const CudaDevice device = cuda_device();
  const std::string capability = fmt::format("{}.{}", device.major, device.minor);
  const std::vector<PlanChoice> choices = gpu_choices(device);
  const BackendChoice training = choose_backend(Backend::automatic, device);
  if (json) {
    Json gpu = {{"present", device.present}};
    if (device.present) {
      gpu["name"] = device.name;
      gpu["compute_capability"] = capability;
      gpu["multiprocessors"] = device.multiprocessors;
    } else {
      gpu["why"] = device.why;
    }
    for (const auto& [plan, choice] : choices)
      gpu["kernels"].push_back({{"plan", plan}, {"kernel", choice.kernel}, {"why", choice.why}});
    const Json out = {{"version", EVENKEEL_VERSION},
                      {"threads", thread_count()},
                      {"kernels", target},
                      {"why", why},
                      {"gpu", gpu},
                      {"attention_families", families_as_json()},
                      {"training", {{"backend", name(training.backend)}, {"why", training.why}}}};
    fmt::print("{}\n", out.dump(2));
    return 0;
  }
  fmt::print("evenkeel   {}\nthreads    {}\nkernels    {}: {}; the bits are the same with any\n",
             EVENKEEL_VERSION, thread_count(), target, why);
  if (device.present)
    fmt::print("GPU        {}, compute capability {}, {} multiprocessors\n", device.name, capability,
               device.multiprocessors);
  else
    fmt::print("GPU        none: {}\n", device.why);
  for (const auto& [plan, choice] : choices) fmt::print("  {:<30} {}: {}\n", plan, choice.kernel, choice.why);
  for (const KernelFamily& family : kernel_families())
    fmt::print("attention  {:<10} {}, {}, head sizes {}\n", family.name, family.on_gpu ? "GPU" : "CPU",
               types_taken(family.limits), head_sizes(family.limits));
  fmt::print("training   {}: {}\n", name(training.backend), training.why);
  return 0;
}

}  // namespace evenkeel::cli
