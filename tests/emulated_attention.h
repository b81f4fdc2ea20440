// Kernels run by the CUDA emulator on the problems of attention_cases.h, through the host code that the GPU uses: the
// Ampere class, or other passes that keep the same facts between them. Memory is poisoned, and what nobody may write is
// looked at afterwards.
#pragma once

#include "attention/cuda/ampere_passes.h"
#include "attention_runs.h"
#include "emulated_memory.h"

namespace evenkeel::emulated {

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

}  // namespace evenkeel::emulated
