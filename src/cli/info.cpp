// `evenkeel info`: version, CPU features, which kernels will run and why.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "attention/attention_cuda.h"
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
  if (!device.present) return choices;
  for (const char* plan : kPlans) {
    CudaAttention problem;
    problem.B = problem.H = problem.G = 1;
    problem.T = problem.N = 1024;
    problem.D = 64;
    problem.causal = true;
    problem.plans = {parse_plan(plan)};
    choices.push_back({plan, choose_kernel(device, problem, /*with_facts=*/false)});
  }
  return choices;
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
      gpu["kernels"].push_back({{"plan", plan}, {"kernel", name(choice.kernel)}, {"why", choice.why}});
    const Json out = {{"version", EVENKEEL_VERSION},
                      {"threads", thread_count()},
                      {"kernels", target},
                      {"why", why},
                      {"gpu", gpu},
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
  for (const auto& [plan, choice] : choices)
    fmt::print("  {:<30} {}: {}\n", plan, name(choice.kernel), choice.why);
  fmt::print("training   {}: {}\n", name(training.backend), training.why);
  return 0;
}

}  // namespace evenkeel::cli
