// Kernels run by the CUDA emulator on the problems of attention_cases.h, through the host code that the GPU uses: the
// Ampere class, or other passes that keep the same facts between them. Memory is poisoned, and what nobody may write is
// looked at afterwards.
#pragma once

#include "attention/cuda/ampere_passes.h"
#include "attention_runs.h"
#include "emulated_memory.h"

namespace evenkeel::emulated {

// flash2 with this type's formats. The O of delta is kept with 8 bits more than the type has, rounded stochastically, in
// steps of 1 / 254 ulp: nearly e8m15.
inline PrecisionPlan plan_of(const std::string& stabiliser, TensorType type = TensorType::bf16) {
  std::string text = "flash2,stabiliser=" + stabiliser;
  if (type == TensorType::fp16)
    text += ",probs=fp16,output=fp16,probs_bwd=fp16,dscores=fp16,dq=fp16,dk=fp16,dv=fp16";
  if (stabiliser == "wide_output" || stabiliser == "consistent")
    text += type == TensorType::fp16 ? ",output_for_delta=e5m17/stochastic"
                                     : ",output_for_delta=e8m14/stochastic";
  return parse_plan(text);
}

// The passes of the Ampere class.
template <class Launch = Launch>
struct AmperePasses {
  const How& how;
  PassSizes sizes(const AttentionProblem& p) const { return ampere::pass_sizes(p, how.small); }
  void forward(const AttentionProblem& p, const PassInputs& in, const ForwardPass& out,
               void* workspace) const {
    Launch launch{how};
    ampere::with_kernels_of(p, how.small, [&]<class Pairs, int kHead, bool kSmall>() {
      ampere::forward_pass<Pairs, kHead, kSmall>(p, in, out, workspace, launch);
    });
  }
  void backward(const AttentionProblem& p, const PassInputs& in, const DeviceTensor& grad_output,
                const ForwardPass& saved, const BackwardPass& out, void* workspace) const {
    Launch launch{how};
    ampere::with_kernels_of(p, how.small, [&]<class Pairs, int kHead, bool kSmall>() {
      ampere::backward_pass<Pairs, kHead, kSmall>(p, in, grad_output, saved, out, workspace, launch);
    });
  }
};

// Both passes. o, lse, delta, dq, dk, dv of the result are set.
template <class Passes>
AttentionBuffers run_passes(const AttentionProblem& config, const Problem& host, const How& how,
                            const Passes& passes) {
  AttentionProblem p = problem_of(config, host.in);
  p.type = how.type;
  p.step = how.step;
  const auto per_query = [&](int64_t size) {
    return Operand(how, {p.B, p.H, p.T, size}, host.query_lengths);
  };
  const auto per_key = [&](int64_t size) { return Operand(how, {p.B, p.G, p.N, size}, host.key_lengths); };
  Operand q = per_query(p.D), dq = per_query(p.D), o = per_query(p.Dv), grad = per_query(p.Dv);
  Operand k = per_key(p.D), dk = per_key(p.D), v = per_key(p.Dv), dv = per_key(p.Dv);
  q.write(host.in.q), k.write(host.in.k), v.write(host.in.v), grad.write(host.grad_output);
  if (how.sequences) {
    p.mask.query_offsets = q.offsets(), p.mask.key_offsets = k.offsets();
    p.mask.query_rows = q.all_rows(), p.mask.key_rows = k.all_rows();
  }
  const PassSizes sizes = passes.sizes(p);
  const size_t row_bytes = static_cast<size_t>(p.B * p.H * p.T) * sizeof(float);
  Poisoned lse(row_bytes), delta(row_bytes), saved(sizes.saved), workspace(sizes.workspace);
  const PassInputs in{q.tensor(), k.tensor(), v.tensor()};
  const ForwardPass forward{o.tensor(), lse.as<float>(), saved.data(), nullptr};
  BackwardPass backward{dq.tensor(), dk.tensor(), dv.tensor()};
  backward.delta = delta.as<float>();
  backward.grad_lse = how.grad_lse ? how.grad_lse->values().data() : nullptr;
  backward.dsinks = how.dsinks ? how.dsinks->values().data() : nullptr;
  passes.forward(p, in, forward, workspace.data());
  std::memset(workspace.data(), 0xff, sizes.workspace);  // not kept between calls
  passes.backward(p, in, grad.tensor(), forward, backward, workspace.data());
  AttentionBuffers out(host.in, /*with_facts=*/true);
  o.read(out.o), dq.read(out.dq), dk.read(out.dk), dv.read(out.dv);
  std::memcpy(out.lse.values().data(), lse.data(), row_bytes);
  std::memcpy(out.delta.values().data(), delta.data(), row_bytes);
  for (auto [name, operand] : {std::pair{"q", &q},
                               {"k", &k},
                               {"v", &v},
                               {"grad_output", &grad},
                               {"o", &o},
                               {"dq", &dq},
                               {"dk", &dk},
                               {"dv", &dv}})
    operand->expect_guards(name);
  lse.expect_guards("lse"), delta.expect_guards("delta"), saved.expect_guards("saved");
  workspace.expect_guards("workspace");
  return out;
}
inline AttentionBuffers run(const AttentionProblem& config, const Problem& host, const How& how = {}) {
  return run_passes(config, host, how, AmperePasses<>{how});
}

// With slopes by distance, sinks and a gradient of L: errors at most 1.3 times those of the CPU with the same plan, root mean
// square; and the CPU's are small. run(config, how): the passes to be judged.
template <class Run>
void expect_as_near_as_the_cpu(const Problem& p, PrecisionPlan plan, const std::string& name, Run run) {
  const std::vector<float> slopes = {0.25f, 0.03125f}, sinks = {1.5f, -0.5f};
  Tensor<float> grad_lse({p.shape.B, p.shape.H, p.shape.T, 1});
  cases::Draw draw(3, 9);
  for (float& x : grad_lse.values()) x = draw.normal();
  plan.at(Site::output_for_delta) = Rounding{};  // as the CPU has it
  plan.keel = 1e-2f;
  AttentionProblem config = p.with(plan);
  config.slopes = slopes, config.sinks = sinks;
  const AttentionReference exact = attention_reference(config, p.in, p.grad_output, grad_lse.view());
  AttentionBuffers cpu(p.in, /*with_facts=*/true);
  Tensor<float> cpu_dsinks({1, 2, 1, 1}), dsinks({1, 2, 1, 1});
  AttentionBackward backward = cpu.backward();
  backward.grad_lse = grad_lse.view(), backward.dsinks = cpu_dsinks.view();
  attention_forward(config, p.in, cpu.forward());
  attention_backward(config, p.in, p.grad_output, cpu.forward(), backward);
  const AttentionBuffers got = run(config, How{.grad_lse = &grad_lse, .dsinks = &dsinks});
  const auto compare = [&](const char* what, const Tensor<float>& x, const Tensor<float>& y,
                           const Tensor<double>& truth) {
    double ours = 0, theirs = 0, size = 0;
    for (size_t n = 0; n < truth.values().size(); ++n) {
      const double t = truth.values()[n];
      ours += (x.values()[n] - t) * (x.values()[n] - t), theirs += (y.values()[n] - t) * (y.values()[n] - t);
      size += t * t;
    }
    EXPECT_LE(ours, 1.69 * theirs + 1e-13 * size) << name << ", " << what;
    EXPECT_LE(theirs, 1e-4 * size) << name << ", " << what;
    EXPECT_GT(size, 0);
  };
  compare("o", got.o, cpu.o, exact.o);
  compare("lse", got.lse, cpu.lse, exact.lse);
  compare("dq", got.dq, cpu.dq, exact.dq);
  compare("dk", got.dk, cpu.dk, exact.dk);
  compare("dv", got.dv, cpu.dv, exact.dv);
  compare("dsinks", dsinks, cpu_dsinks, exact.dsinks);
}

}  // namespace evenkeel::emulated
