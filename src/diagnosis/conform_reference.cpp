// Kernels of ours as the judge over forms takes them: the CPU's, and the definition.
#include <algorithm>
#include <limits>

#include "diagnosis/conform.h"
#include "diagnosis/conform_judge.h"

namespace evenkeel {

FormKernel cpu_form_kernel(const PrecisionPlan& plan) {
  return [plan](const ConformForm& form, const FormTensors& t) {
    if (form.sinks || form.grad_lse || form.packed || form.type == FormType::fp16 ||
        (form.softcap > 0 && !takes_softcap(plan)))
      return FormAnswer::not_offered;
    const AttentionInputs in{contiguous_view(t.q, {form.B, form.H, form.T, form.D}),
                             contiguous_view(t.k, {form.B, form.G, form.N, form.D}),
                             contiguous_view(t.v, {form.B, form.G, form.N, form.Dv})};
    AttentionProblem problem;
    problem.plans = {plan_for(plan, form.type)};
    problem.scale = form.scale, problem.softcap = form.softcap;
    problem.mask.causal = form.causal;
    problem.mask.window_left = form.window_left, problem.mask.window_right = form.window_right;
    problem.allow_nonfinite = true;
    if (t.visible) problem.mask.visible = contiguous_view(t.visible, {form.B, form.H, form.T, form.N});
    AttentionBuffers out(in, /*with_facts=*/false);
    conform_cpu_kernel(problem, in, contiguous_view(t.grad_output, {form.B, form.H, form.T, form.Dv}), out);
    const auto copy = [](const Tensor<float>& from, float* to) {
      std::copy(from.values().begin(), from.values().end(), to);
    };
    copy(out.o, t.o), copy(out.lse, t.lse), copy(out.dq, t.dq), copy(out.dk, t.dk), copy(out.dv, t.dv);
    return FormAnswer::done;
  };
}

FormKernel definition_form_kernel() {
  return [](const ConformForm& form, const FormTensors& t) {
    const FormInputs in(form);
    if (form.values == FormValues::nan) {  // the products would spread it; the definition does not
      FormInputs clean(form);
      clean.v[0] = 0;
      const AttentionTruth truth = clean.truth(PrecisionPlan{});
      for (size_t n = 0; n < truth.o.values().size(); ++n) t.o[n] = static_cast<float>(truth.o.values()[n]);
      constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
      for (int64_t i = 0; i < form.H / form.G * form.T; ++i) t.o[i * form.Dv] = kNan;
      // What a NaN makes of the gradients is not judged.
      std::fill_n(t.dq, in.q.size(), kNan), std::fill_n(t.dk, in.k.size(), kNan);
      std::fill_n(t.dv, in.v.size(), 0.0f);
      return FormAnswer::done;
    }
    const AttentionTruth truth = in.truth(PrecisionPlan{});
    const auto write = [](const Tensor<double>& from, float* to, const Rounding& r) {
      for (size_t n = 0; n < from.values().size(); ++n)
        to[n] = round_to(r, static_cast<float>(from.values()[n]));
    };
    const Rounding r = rounding_of(form.type);
    write(truth.o, t.o, r), write(truth.dq, t.dq, r), write(truth.dk, t.dk, r), write(truth.dv, t.dv, r);
    write(truth.lse, t.lse, Rounding{});
    if (t.grad_sinks) write(truth.grad_sink, t.grad_sinks, Rounding{});
    return FormAnswer::done;
  };
}

}  // namespace evenkeel
