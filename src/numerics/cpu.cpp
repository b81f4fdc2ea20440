#include "numerics/cpu.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace evenkeel {

const char* name(CpuTarget target) {
  switch (target) {
    case CpuTarget::avx512:
      return "avx512";
    case CpuTarget::avx2:
      return "avx2";
    case CpuTarget::baseline:
      break;
  }
  return "baseline";
}

bool is_cpu_target(const char* text) {
  if (*text == '\0') return true;
  for (const CpuTarget target : {CpuTarget::baseline, CpuTarget::avx2, CpuTarget::avx512})
    if (std::strcmp(text, name(target)) == 0) return true;
  return false;
}

CpuTarget cpu_target() {
  static const CpuTarget chosen = [] {
    CpuTarget best = CpuTarget::baseline;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = CpuTarget::avx2;
    if (best == CpuTarget::avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      best = CpuTarget::avx512;
#endif
    if (const char* asked = std::getenv("EVENKEEL_CPU"))
      for (CpuTarget lesser : {CpuTarget::baseline, CpuTarget::avx2})
        if (std::strcmp(asked, name(lesser)) == 0 && lesser < best) best = lesser;
    return best;
  }();
  return chosen;
}

}  // namespace evenkeel
