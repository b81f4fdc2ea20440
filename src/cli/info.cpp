// `evenkeel info`: version, CPU features, which kernels will run and why.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/threads.h"
#include "cli/options.h"
#include "numerics/cpu.h"

namespace evenkeel::cli {

int run_info(int argc, char** argv) {
  bool json = false;
  Options options("info [--json]", "Version, CPU features, and which kernels will run and why.", "info");
  options.flag("--json", "the same as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  const char* target = name(cpu_target());
  const char* why = cpu_target() == CpuTarget::avx512 ? "the CPU has AVX-512 F, BW, DQ and VL"
                    : cpu_target() == CpuTarget::avx2
                        ? "the CPU has AVX2 and FMA (and no AVX-512, or EVENKEEL_CPU asks for less)"
                        : "the CPU has no AVX2 and FMA, or EVENKEEL_CPU asks for less";
  if (json) {
    const nlohmann::ordered_json out = {{"version", EVENKEEL_VERSION},
                                        {"threads", thread_count()},
                                        {"kernels", target},
                                        {"why", why},
                                        {"gpu", "built without CUDA"}};
    fmt::print("{}\n", out.dump(2));
    return 0;
  }
  fmt::print(
      "evenkeel   {}\nthreads    {}\nkernels    {}: {}; the bits are the same with any\nGPU        built "
      "without CUDA\n",
      EVENKEEL_VERSION, thread_count(), target, why);
  return 0;
}

}  // namespace evenkeel::cli
