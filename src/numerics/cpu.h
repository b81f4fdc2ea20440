// Which instruction set the kernels of this process use: decided once, here.
#pragma once

namespace evenkeel {

enum class CpuTarget { baseline, avx2, avx512 };

// The best target that this machine runs. EVENKEEL_CPU=baseline|avx2|avx512 in the environment asks for a
// lesser one (to compare: results do not change by a bit); a greater one is not given.
CpuTarget cpu_target();
const char* name(CpuTarget target);

}  // namespace evenkeel
