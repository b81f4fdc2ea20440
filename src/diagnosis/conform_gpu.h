// The GPU's kernels under conform's judgement: host tensors go to the device, outputs come back. The residual is not
// an output of the fast kernels; it is read off dQ, so the inputs must have ConformInputs' constant feature.
#pragma once

#include <set>
#include <string>

#include "attention/attention_call.h"
#include "diagnosis/conform.h"
#include "gpu/device_memory.h"

namespace evenkeel {

class GpuConform {
 public:
  // Valid as long as this object.
  ConformKernel kernel();
  // "flash2,stabiliser=consistent: hopper (why)" for everything that ran so far.
  const std::set<std::string>& uses() const { return uses_; }

 private:
  void run(const AttentionProblem& config, const AttentionInputs& in, View<const float> grad_output,
           AttentionBuffers& out);

  DeviceMemory memory_;  // grows, and is used again by the next call
  std::set<std::string> uses_;
};

}  // namespace evenkeel
