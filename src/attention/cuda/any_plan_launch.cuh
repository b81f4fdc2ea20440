// How the any-plan kernels are started. Their instances are compiled in files of their own, which take minutes and are
// compiled side by side: any_plan_forward.cu, any_plan_backward_rows.cu, any_plan_backward_keys.cu.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/cuda/any_plan_problem.cuh"
#include "base/sizes.h"
#include "gpu/cuda/launch.h"

namespace evenkeel::any_plan {

struct Launcher {
  // One block of `threads` for every `block_rows` of the `rows` of `heads`.
  template <class Kernel>
  void launch(Kernel kernel, int64_t heads, int64_t rows, int block_rows, int threads, size_t shared_bytes,
              const char* doing) const {
    allow_shared_memory(kernel, shared_bytes);
    const int64_t blocks = heads * divide_up(rows, block_rows);
    kernel<<<grid(blocks), threads, shared_bytes, stream>>>(p);
    check_launch(doing);
  }

  // Does the condition hold for a plan of the table?
  bool any(auto condition) const { return std::any_of(plans.begin(), plans.end(), condition); }

  // Calls run.operator()<kD, kVariant>() with the smallest kD that holds a head, for each variant that
  // `variant_of` a plan of the table names.
  template <class Run>
  void for_variants(Variant DevicePlan::*variant_of, Run run) const {
    const auto of_size = [&]<int kD>() {
      const auto of_variant = [&]<Variant kVariant>() {
        if (any([&](const DevicePlan& d) { return d.*variant_of == kVariant; }))
          run.template operator()<kD, kVariant>();
      };
      of_variant.template operator()<Variant::quick>();
      of_variant.template operator()<Variant::full>();
      of_variant.template operator()<Variant::any>();
    };
    if (p.D <= 64)
      of_size.template operator()<64>();
    else
      of_size.template operator()<128>();
  }

  const Problem& p;
  const std::vector<DevicePlan>& plans;  // on the host: those of p.plans
  cudaStream_t stream;
};

void launch_forward(const Launcher& launcher);
void launch_backward_rows(const Launcher& launcher);  // delta, dQ, facts
void launch_backward_keys(const Launcher& launcher);  // then dK and dV

}  // namespace evenkeel::any_plan
