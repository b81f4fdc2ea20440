// A form as the struct of the C interface, for callers of a kernel: the C interface and the command line. They
// know include/evenkeel.h; this file does not.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include "diagnosis/conform_judge.h"

namespace evenkeel {

// Form: evenkeel_conform_form. The codes are those of the header. words: what the kernel said of its error, or "".
template <class Form>
FormKernel kernel_by_struct(int32_t (*kernel)(void*, const Form*), void* context, int32_t bf16, int32_t fp16,
                            int32_t fp32, int32_t not_offered, std::function<std::string()> words = {}) {
  return [=](const ConformForm& form, const FormTensors& t) {
    Form f{};
    f.struct_size = sizeof f;
    f.B = form.B, f.H = form.H, f.G = form.G, f.T = form.T, f.N = form.N, f.D = form.D, f.Dv = form.Dv;
    f.type = form.type == FormType::bf16 ? bf16 : form.type == FormType::fp16 ? fp16 : fp32;
    f.causal = form.causal;
    f.window_left = form.window_left, f.window_right = form.window_right;
    f.scale = form.softmax_scale(), f.softcap = form.softcap;
    f.visible = t.visible, f.query_starts = t.query_starts, f.key_starts = t.key_starts;
    f.sinks = t.sinks, f.grad_lse = t.grad_lse;
    f.q = t.q, f.k = t.k, f.v = t.v, f.grad_output = t.grad_output;
    f.o = t.o, f.dq = t.dq, f.dk = t.dk, f.dv = t.dv, f.lse = t.lse, f.grad_sinks = t.grad_sinks;
    const int32_t status = kernel(context, &f);
    if (status == not_offered) return FormAnswer::not_offered;
    if (status != 0) {
      const std::string said = words ? words() : "";
      throw std::runtime_error(!said.empty() ? said
                                             : "the kernel returned " + std::to_string(status) +
                                                   ", expected 0 (done) or " + std::to_string(not_offered) +
                                                   " (not offered)");
    }
    return FormAnswer::done;
  };
}

}  // namespace evenkeel
