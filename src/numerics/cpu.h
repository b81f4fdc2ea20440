// Which instruction set the kernels of this process use: decided once, here.
#pragma once

namespace evenkeel {

enum class CpuTarget { baseline, avx2, avx512 };

// The best target that this machine runs. EVENKEEL_CPU=baseline|avx2|avx512 in the environment asks for a
// lesser one (to compare: results do not change by a bit); a greater one is not given.
CpuTarget cpu_target();
// Is that a target's name, as EVENKEEL_CPU takes it? Empty counts as not set.
bool is_cpu_target(const char* text);
const char* name(CpuTarget target);

// What is compiled once for each target (sources named *_kernels.cpp) has its own namespace there: baseline, avx2,
// avx512. EVENKEEL_DECLARE_BY_TARGET(const ModelKernels, kModelKernels) declares a table in each of them, and
// EVENKEEL_OF_TARGET(cpu_target(), kModelKernels) is the one of a target.
#define EVENKEEL_DECLARE_BY_TARGET(Type, table) \
  namespace baseline {                          \
  extern Type table;                            \
  }                                             \
  namespace avx2 {                              \
  extern Type table;                            \
  }                                             \
  namespace avx512 {                            \
  extern Type table;                            \
  }                                             \
  static_assert(true)
#if defined(__x86_64__)
#define EVENKEEL_OF_TARGET(target, table) \
  ::evenkeel::of_target(target, baseline::table, avx2::table, avx512::table)
#else
#define EVENKEEL_OF_TARGET(target, table) (static_cast<void>(target), baseline::table)
#endif
template <class T>
T& of_target(CpuTarget target, T& baseline, T& avx2, T& avx512) {
  return target == CpuTarget::avx512 ? avx512 : target == CpuTarget::avx2 ? avx2 : baseline;
}

}  // namespace evenkeel
