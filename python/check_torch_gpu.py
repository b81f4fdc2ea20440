#!/usr/bin/env python3
"""The PyTorch package on a GPU: every promise that a CPU and an old PyTorch cannot show. A table comes last.

    check_torch_gpu.py [--only SECTION,...] [--families all|some] [--rows N] [--sequences N]

Sections: kernels, opcheck, compile, graph, streams, transformers, doors, registry, models, instruments, integrations, examples, speed, conform.
Where it is asked for, also profile: what differs between the kernels of a GPT-2 step with our attention and with cuDNN's. Each stands alone:
a failure in one is reported with its last lines and does not hide the others. Exit codes: 0 all passed, 1 a failure, 77 no PyTorch with a GPU.
"""
import argparse
import collections
import contextlib
import functools
import io
import itertools
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings

# PyTorch's cache of compiled code does not know which attention kernel was chosen: `speed` would time one kernel under two names.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
try:
    import torch
    import torch._dynamo.utils
    import torch.nn.functional as F

    torch.zeros(1, device="cuda")
except Exception as error:  # whatever keeps PyTorch from a GPU
    print(f"no PyTorch with a GPU: {error}", file=sys.stderr)
    sys.exit(77)

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "examples")]

import evenkeel  # noqa: E402
from evenkeel import _ops  # noqa: E402
from evenkeel._records import read_steps  # noqa: E402
import check_torch_doors  # noqa: E402
from train_nano import Gpt  # noqa: E402

torch.set_num_threads(1)  # the judge has threads of its own, which would wait for torch's
BF16 = torch.bfloat16
SOME_FAMILIES = ["random", "one_signed_v", "ties_2", "ties_2_tail", "ties_4_tail", "ties_8_tail", "sink", "row_max_zero",
                 "scores_100", "common_offset", "subnormal_v", "loss_feedback"]


def tensors(B, H, G, T, N, D, dtype=BF16, seed=1, packed=False, D_v=None):
    """q, k, v that need gradients, and dO. packed: views of one (B, T, 3 H D) tensor, as GPT-2 has them."""
    D_v = D if D_v is None else D_v
    draw = torch.Generator("cuda").manual_seed(seed)
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype, generator=draw)
    if packed:
        parts = make(B, T, 3 * H * D).split(H * D, dim=2)
        q, k, v = (t.view(B, T, H, D).transpose(1, 2).detach().requires_grad_() for t in parts)
    else:
        q, k, v = (t.requires_grad_() for t in (make(B, H, T, D), make(B, G, N, D), make(B, G, N, D_v)))
    return q, k, v, make(B, H, T, D_v)


def exact(q, k, v, d_o, visible=None):
    """o, dq, dk, dv in FP32 by the formula."""
    q, k, v = (t.detach().float().requires_grad_() for t in (q, k, v))
    wide = lambda t: t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)
    s = q @ wide(k).transpose(-1, -2) * q.shape[-1] ** -0.5
    if visible is not None:
        s = s.masked_fill(~visible, float("-inf"))
    o = s.softmax(-1) @ wide(v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), d_o.float())]


def results(q, k, v, d_o, **options):
    """At step 0 unless another is asked for: the same random draws in every call."""
    o = evenkeel.attention(q, k, v, **{"step": 0, **options})
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), d_o)]


def apart(found, expected):
    """The largest ||found - expected|| / ||expected|| of the pairs."""
    return max(((f.float() - e.float()).norm() / e.float().norm()).item() for f, e in zip(found, expected))


def must(condition, words):
    if not condition:
        raise AssertionError(words)


# --- sections: each returns a line for the table


def kernels(_):
    """Right results for every kind of tensor, and the kernel that is promised."""
    q, k, v, _ = tensors(2, 12, 12, 1024, 1024, 64, packed=True)
    name, why = evenkeel.kernel_choice(q, k, v, is_causal=True)
    print(f"  GPT-2's shape: {name} ({why})")
    worst = 0.0
    cases = [(dict(B=2, H=12, G=12, T=1024, N=1024, D=64, packed=True), True),
             (dict(B=1, H=4, G=2, T=257, N=257, D=128), True), (dict(B=2, H=3, G=3, T=65, N=33, D=40), False),
             (dict(B=2, H=3, G=1, T=31, N=77, D=20), False), (dict(B=1, H=2, G=2, T=1, N=5, D=64), False),
             (dict(B=2, H=4, G=2, T=300, N=300, D=64, dtype=torch.float16), True),
             (dict(B=1, H=2, G=2, T=77, N=190, D=128, dtype=torch.float16), False),
             (dict(B=2, H=4, G=2, T=300, N=300, D=256), True), (dict(B=1, H=4, G=4, T=300, N=300, D=192, D_v=128), True),
             (dict(B=1, H=2, G=1, T=130, N=190, D=64, D_v=40, dtype=torch.float16), False),
             (dict(B=1, H=2, G=2, T=70, N=130, D=72, D_v=200), False),
             (dict(B=1, H=2, G=2, T=70, N=70, D=64, dtype=torch.float32), True),
             (dict(B=3, H=4, G=4, T=96, N=96, D=32, dtype=torch.float32, packed=True), True)]
    for case, causal in cases:
        q, k, v, d_o = tensors(**case)
        T, N = q.shape[2], k.shape[2]
        visible = torch.ones(T, N, dtype=torch.bool, device="cuda").tril() if causal else None
        error = apart(results(q, k, v, d_o, is_causal=causal), exact(q, k, v, d_o, visible))
        limit = 1e-5 if q.dtype == torch.float32 else 1e-2
        print(f"  {case}, causal {causal}: {error:.1e}")
        must(error < limit, f"expected an error below {limit}, found {error} for {case}")
        worst = max(worst, error)
    # Through PyTorch's own door.
    q, k, v, d_o = tensors(1, 4, 4, 300, 300, 192, D_v=128)
    with evenkeel.patched(strict=True):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    must(apart([o], [F.scaled_dot_product_attention(q, k, v, is_causal=True)]) < 1e-2, "head sizes 192 and 128 by the door")
    found = [call for call in evenkeel.coverage() if call["door"] == "scaled_dot_product_attention"]
    must(found and found[-1]["kernel"] == "ampere", f"expected the Ampere-class kernels for head size 192, found {found}")
    # Strides that the fast kernels do not read, a mask, a gradient that is one number everywhere.
    q, k, v, d_o = tensors(2, 4, 4, 96, 96, 64)
    odd = [torch.empty(t.shape[:3] + (65,), device="cuda", dtype=BF16)[..., 1:].copy_(t.detach()).requires_grad_()
           for t in (q, k, v)]
    plain = results(q, k, v, d_o, is_causal=True)
    must(all(torch.equal(a, b) for a, b in zip(results(*odd, d_o, is_causal=True), plain)), "odd strides: other bits")
    must(all(torch.equal(a, b) for a, b in zip(results(q, k, v, d_o, is_causal=True), plain)), "twice: other bits")
    visible = torch.rand(2, 1, 96, 96, device="cuda") < 0.7
    visible[..., 0] = True
    error = apart(results(q, k, v, d_o, attn_mask=visible), exact(q, k, v, d_o, visible))
    must(error < 1e-2, f"a mask: {error}")
    evenkeel.attention(q, k, v).sum().backward()
    must(bool(torch.isfinite(q.grad).all()), "a gradient that is one number everywhere")
    for bad, words in ((tensors(1, 1, 1, 8, 8, 20, dtype=torch.float16)[:3], "20"), ((q.double(), k.double(), v.double()), "float64"),
                       ((q, k.cpu(), v), "cpu"), (tensors(1, 1, 1, 8, 8, 264)[:3], "264"), ((q[0], k, v), "4 axes")):
        try:
            evenkeel.attention(*bad)
        except (TypeError, ValueError) as error:
            must("evenkeel.attention: " in str(error) and "expected" in str(error) and words in str(error), str(error))
        else:
            raise AssertionError(f"expected an exception with {words}")
    must(name == "hopper" or torch.cuda.get_device_capability() != (9, 0), f"expected the Hopper kernels, found {why}")
    return f"{len(cases)} shapes, worst error {worst:.1e}; strides, mask, determinism, bad input"


@contextlib.contextmanager
def memory_full_of(value):
    """What forward is to save lies in memory full of this byte."""
    fresh = _ops._saved
    _ops._saved = lambda *arguments: fresh(*arguments).fill_(value)
    try:
        yield
    finally:
        _ops._saved = fresh


def opcheck(_):
    """And what opcheck sees by chance only: every byte of `saved` is written."""
    for plan in ("flash2,stabiliser=wide_output", "flash2,stabiliser=consistent", "bf16_all,stabiliser=consistent",
                 "bf16_all,stabiliser=wide_output", "bf16_all; head 1: output_for_delta=fp32", "fp32"):
        q, k, v, _ = tensors(1, 3, 3, 37, 21, 24, dtype=torch.float32 if plan == "fp32" else BF16)
        saved = []
        for value in (0x55, 0xAA):
            with memory_full_of(value), torch.no_grad():
                saved.append(_ops.forward_op(q, k, v, None, None, None, None, plan, False, 0.0, 0.0, -1, -1, 0, 0)[2])
        must(torch.equal(*saved), f"expected every byte of `saved` to be written with {plan}, found "
             f"{(saved[0] != saved[1]).sum().item()} of {saved[0].numel()} that were not")
    count = 0
    some = torch.linspace(-1, 1, 4)
    for case, plan, extras in ((dict(B=2, H=4, G=2, T=48, N=48, D=64), "flash2,stabiliser=wide_output", (None, None)),
                               (dict(B=2, H=4, G=2, T=48, N=48, D=64), "flash2,stabiliser=consistent", (some.abs(), some)),
                               (dict(B=1, H=2, G=2, T=33, N=20, D=24, dtype=torch.float32), "fp32", (None, None))):
        q, k, v, d_o = tensors(**case)
        for device in ("cuda", "cpu"):
            x = [t.detach().to(device).requires_grad_() for t in (q, k, v)]
            slopes, sinks = (None if t is None else t.to(device) for t in extras)
            rest = (None, None, slopes, sinks, plan, False, 0.0, 0.0, -1, -1, 0, 0)
            torch.library.opcheck(_ops.forward_op, (*x, *rest))
            with torch.no_grad():
                o, lse, saved = _ops.forward_op(*x, *rest)
            given = (d_o.to(device), *[t.detach() for t in x], o, lse, saved, None if sinks is None else torch.ones_like(lse))
            torch.library.opcheck(_ops.backward_op, (*given, *rest))
            count += 2
    return f"{count} calls"


def small_gpt(seed=5):
    torch.manual_seed(seed)
    model = Gpt(vocabulary=512, context=256, layers=2, heads=4, width=256).cuda()
    rows = torch.randint(0, 512, (4, 257), device="cuda")
    return model, rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def autocast():
    return torch.autocast("cuda", dtype=BF16)


def compile_(_):
    """patch(), torch.compile(fullgraph=True): loss and gradients as without the compiler; other lengths; no breaks."""
    with evenkeel.patched():
        model, tokens, targets = small_gpt()

        def loss_and_gradients(f, n):
            model.zero_grad(set_to_none=True)
            with autocast():
                loss = f(tokens[:, :n], targets[:, :n])
            loss.backward()
            return [loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])]

        lengths, errors = (248, 200, 136), []  # all slices: one that is whole has other strides, and a graph of its own
        expected = {n: loss_and_gradients(model, n) for n in lengths}
        for dynamic in (None, True):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
            errors += [apart(loss_and_gradients(compiled, n), expected[n]) for n in lengths]
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        must(max(errors) < 2e-2, f"expected what runs without the compiler, found relative errors {errors}")
        must(graphs == 1, f"expected one graph for all lengths with dynamic=True, found {graphs}")
        torch._dynamo.reset()
        with autocast():
            breaks = torch._dynamo.explain(model)(tokens, targets).graph_break_count
        must(breaks == 0, f"expected no graph breaks, found {breaks}")
        q = torch.randn(1, 2, 16, 64, device="cuda", dtype=BF16)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            falls_back = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.25), fullgraph=True)
            falls_back(q), falls_back(q)
        told = [str(w.message) for w in caught if "found 0.25" in str(w.message)]
        must(len(told) == 1, f"expected one warning of what is not taken, found {told}")
    return f"fullgraph, 0 breaks, 3 lengths (one graph with dynamic=True), worst difference {max(errors):.1e}"


def graph(_):
    """Both passes captured in a CUDA graph and replayed on other numbers: the bits of ordinary calls. And a whole model
    compiled with mode="reduce-overhead"."""
    q, k, v, d_o = tensors(2, 8, 8, 512, 512, 64)
    static = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    static_d_o = d_o.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            results(*static, static_d_o, is_causal=True)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outputs = results(*static, static_d_o, is_causal=True)
    for seed in (2, 3):
        q, k, v, d_o = tensors(2, 8, 8, 512, 512, 64, seed=seed)
        with torch.no_grad():
            for to, other in zip((*static, static_d_o), (q, k, v, d_o)):
                to.copy_(other)
        captured.replay()
        torch.cuda.synchronize()
        expected = results(q, k, v, d_o, is_causal=True)
        must(all(torch.equal(a, b) for a, b in zip(outputs, expected)), "a replay: other bits")
    with evenkeel.patched():
        model, tokens, targets = small_gpt()
        fast = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        losses = []
        for f in (model, fast, fast, fast):
            model.zero_grad(set_to_none=True)
            torch.compiler.cudagraph_mark_step_begin()
            with autocast():
                loss = f(tokens, targets)
            loss.backward()
            losses.append(loss.item())
        must(max(abs(x - losses[0]) for x in losses) < 1e-2, f"reduce-overhead: {losses}")
    return "2 replays with the bits of ordinary calls; reduce-overhead"


def streams(_):
    """Threads with a stream each, other shapes and plans at once: the bits of calls one after the other."""
    cases = []
    for n, (shape, plan) in enumerate(itertools.product(
            ((2, 4, 4, 300, 300, 64), (1, 8, 2, 129, 129, 128), (2, 2, 2, 64, 96, 32), (1, 3, 3, 77, 77, 24)),
            ("flash2,stabiliser=wide_output", "flash2,stabiliser=zero_sum", "bf16_all"))):
        x = tensors(*shape, seed=n)
        cases.append((x, plan, [t.clone() for t in results(*x, plan=plan)]))
    torch.cuda.synchronize()
    wrong = []

    def work(number):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(12):
                x, plan, expected = cases[(number * 5 + turn * 7) % len(cases)]
                try:
                    found = results(*x, plan=plan)
                    stream.synchronize()
                    if not all(torch.equal(a, b) for a, b in zip(found, expected)):
                        wrong.append(f"{tuple(x[0].shape)} {plan}")
                except Exception as error:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    must(not wrong, f"expected the same bits, found {len(wrong)} other: {wrong[:3]}")
    return "8 threads and streams, 96 calls of 12 problems, the same bits"


def transformers(_):
    from hf_models import compare
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    evenkeel.hf.register()
    evenkeel.hf.register("evenkeel_fp32", plan="fp32")
    gpt2 = GPT2Config(vocab_size=300, n_positions=128, n_embd=128, n_layer=2, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0,
                      resid_pdrop=0.0)
    llama = LlamaConfig(vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2)
    told = []
    folder = pathlib.Path(tempfile.mkdtemp())
    for name, kind, config in (("GPT-2", GPT2LMHeadModel, gpt2), ("Llama", LlamaForCausalLM, llama)):
        torch.manual_seed(1)
        model = kind(config).cuda().train()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 2:
                    p.mul_(3)  # scores that are not all alike
        tokens = torch.randint(0, 300, (3, 96), device="cuda")
        padding = torch.ones_like(tokens)
        padding[1, -20:] = 0
        def loss_and_gradients(implementation, around, mask):
            model.set_attn_implementation(implementation)
            model.zero_grad(set_to_none=True)
            with around:
                loss = model(tokens, attention_mask=mask, labels=tokens, use_cache=False).loss
                loss.backward()
            return loss.item(), [torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]

        for mask in (None, padding):
            # FP32: the judge is the backend whose products are torch.matmul's, without TF32 (main sees to that). How far
            # PyTorch's own choice is from it is printed, too.
            expected = loss_and_gradients("sdpa", sdpa_kernel(SDPBackend.MATH), mask)
            plain = contextlib.nullcontext()
            for label, around, limit, gradient_limit in (("evenkeel_fp32", plain, 1e-5, 1e-4), ("sdpa", plain, None, None),
                                                         ("evenkeel", autocast(), 2e-2, 5e-2)):
                if label == "evenkeel":
                    expected = loss_and_gradients("sdpa", autocast(), mask)
                found = loss_and_gradients(label, around, mask)
                difference, error = abs(found[0] - expected[0]), apart(found[1], expected[1])
                words = (f"{name} {label}, padding {mask is not None}: loss {found[0]:.6f} for {expected[0]:.6f}, gradients "
                         f"apart by {error:.1e}")
                print(f"  {words}")
                must(limit is None or (difference < limit and error < gradient_limit), words)
                if label == "evenkeel_fp32":
                    told.append(difference)
        generated = {}
        model.eval()
        for implementation in ("sdpa", "evenkeel_fp32"):
            model.set_attn_implementation(implementation)
            generated[implementation] = model.generate(tokens[:1, :8], max_new_tokens=12, do_sample=False, pad_token_id=0)
        must(torch.equal(generated["sdpa"], generated["evenkeel_fp32"]), f"{name}: other text")
        for implementation in ("sdpa", "evenkeel", "eager"):
            model.set_attn_implementation(implementation)
            model.train()
            out = folder / f"{name}-{implementation}"
            with evenkeel.Monitor(model, out, every=1, rows=32) as monitor:
                for _ in range(2):
                    loss = model(tokens, labels=tokens, use_cache=False).loss
                    loss.backward()
                    monitor.step(loss)
            lines = read_steps(out)
            must(len(lines) == 2 and all("probe" in line for line in lines), f"{name}: Monitor wrote {lines}"[:300])
            steps = [(line["step"], line["probe"]["step"]) for line in lines]
            must(steps == [(0, 0), (1, 1)], f"{name}: expected each step's probe in its own line, found {steps}")
            must(math.isfinite(lines[0]["probe"]["norm_q"][0][0]), f"{name}: expected norms of the projections, found none")
            evenkeel.capture(model, tokens, 1, folder / f"{name}.safetensors", heads=[1])
    for kind in ("gpt2", "llama"):
        for bf16, limit in ((False, 1e-3), (True, 5e-2)):
            sdpa, ours = compare(kind, "cuda", bf16)
            difference = max(abs(a - b) for a, b in zip(sdpa, ours))
            print(f"  {kind} trained for {len(sdpa)} steps, BF16 {bf16}: {sdpa[0]:.4f} -> {sdpa[-1]:.4f} with sdpa, "
                  f"{ours[-1]:.4f} with evenkeel, apart by {difference:.1e}")
            must(difference < limit and sdpa[-1] < sdpa[0] - 0.5, f"{kind}: expected losses within {limit}, found {difference}")
    return f"GPT-2 and Llama, padding and not, generate, Monitor, capture; FP32 losses apart by {max(told):.0e}"


_numbers = itertools.count()


class Contestant:
    """A training of GPT-2 124M: BF16 by autocast, compiled as a whole, fused AdamW. around: what chooses its attention."""

    def __init__(self, around, sequences):
        self.around = around
        draw = torch.Generator("cuda").manual_seed(1)
        self.batches = [torch.randint(0, 50257, (sequences, 1025), device="cuda", generator=draw) for _ in range(4)]
        # Code of its own: compiled code is kept by it, and which kernel scaled_dot_product_attention takes is no part of the key.
        code = Gpt.forward.__code__
        own = types.FunctionType(code.replace(co_filename=f"{code.co_filename}#{next(_numbers)}"), Gpt.forward.__globals__, "forward",
                                 Gpt.forward.__defaults__)
        with self.around():
            self.model = type("Gpt", (Gpt,), {"forward": own})(50304, 1024, 12, 12, 768).cuda()
            self.compiled = torch.compile(self.model, fullgraph=True)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        began = time.perf_counter()
        self.run(3)
        print(f"  compiled in {time.perf_counter() - began:.0f} s", flush=True)

    def run(self, steps):
        """Seconds a step."""
        with self.around():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for step in range(steps):
                rows = self.batches[step % len(self.batches)]
                self.optimizer.zero_grad(set_to_none=True)
                with autocast():
                    loss = self.compiled(rows[:, :-1], rows[:, 1:])
                loss.backward()
                self.optimizer.step()
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps


@functools.lru_cache(maxsize=1)  # compiled once for `speed` and `profile`
def contestants(sequences):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return {"cuDNN": Contestant(lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION), sequences),
            "FLASH": Contestant(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), sequences),
            "evenkeel": Contestant(evenkeel.patched, sequences)}


def speed(options):
    """A training step with our attention, with cuDNN's and with FLASH, in turns. A GPU's clock drifts by more than they differ,
    so each round runs all, one right behind the other and in both orders. What counts is the median of the rounds' ratios."""
    torch.set_float32_matmul_precision("high")
    both = contestants(options.sequences)
    for contestant in both.values():
        contestant.run(10)  # until the GPU is as warm as it will be
    for name, contestant in both.items():
        print(f"  {name}: {attention_kernel(contestant)}")
    times = {name: [] for name in both}
    for round_ in range(options.rounds):
        for name in sorted(both, reverse=round_ % 2 == 0):
            times[name].append(both[name].run(4))
    for name, t in times.items():
        middle = statistics.median(t)
        print(f"  {name:<10} {1e3 * middle:.2f} ms a step ({1e3 * min(t):.2f} to {1e3 * max(t):.2f}), "
              f"{options.sequences * 1024 / middle:,.0f} tokens/s")
    told, missed = [], []
    for name, least in (("cuDNN", 1.0), ("FLASH", 1.03)):
        ratios = [theirs / ours for theirs, ours in zip(times[name], times["evenkeel"])]
        lower, ratio, upper = statistics.quantiles(ratios, n=4)
        told.append(f"{ratio:.4f} of {name}'s speed (quartiles {lower:.4f} and {upper:.4f} of {len(ratios)} rounds)")
        missed += [f"expected {least} or more, found {told[-1]}"] if ratio < least else []
    must(not missed, "; ".join(missed))
    return "; ".join(told)


KINDS = (("fused by the compiler", "^triton"), ("attention", "fmha|flash|sdpa|cudnn|evenkeel"),
         ("products", "gemm|nvjet|cutlass|xmma|cublas|splitK"), ("optimizer", "multi_tensor|[aA]dam"), ("memory", "^Mem"),
         ("others", ""))


def kernel_times(contestant, steps):
    """Milliseconds and calls a step, by kernel. Numbers that the compiler gives its kernels are left out."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as told:
        contestant.run(steps)
    found = collections.defaultdict(lambda: [0.0, 0.0])
    for event in told.key_averages():
        time_us = event.self_device_time_total
        if time_us > 0 and not getattr(event, "is_user_annotation", False):
            kernel = found[re.sub(r"^(triton_\w+?)_\d+$", r"\1", event.key)]
            kernel[0] += time_us / 1e3 / steps
            kernel[1] += event.count / steps
    return found


def attention_kernel(contestant):
    """The kernel in which a step spends most of its attention: that the contestants are not one under several names."""
    found = {name: times[0] for name, times in kernel_times(contestant, 1).items() if re.search(dict(KINDS)["attention"], name)}
    return max(found, key=found.get)[:120] if found else "no attention kernel was seen"


def clock_and_power(contestant, steps):
    """In words: the GPU's clock and power while the steps run."""
    ask = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,enforced.power.limit", "--format=csv,noheader,nounits", "-lms", "50"]
    try:
        teller = subprocess.Popen(ask, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        return f"clock and power not known ({error})"
    contestant.run(steps)
    teller.terminate()
    lines = [line.split(", ") for line in teller.communicate()[0].splitlines()]
    try:
        clock, power, limit = (statistics.mean(float(line[n]) for line in lines[2:-1]) for n in range(3))
    except (IndexError, ValueError, statistics.StatisticsError):
        return f"clock and power not known ({lines[:1]})"
    return f"{clock:.0f} MHz, {power:.0f} W of {limit:.0f} W"


def profile(options):
    """What the GPU does in a step with either attention: kernels whose times differ, and the clock."""
    torch.set_float32_matmul_precision("high")
    steps = 5
    both = contestants(options.sequences)
    found = {}
    for name in both:
        both[name].run(10)
        found[name] = kernel_times(both[name], steps)
    theirs, ours = found["cuDNN"], found["evenkeel"]
    total = lambda kernels: sum(time for time, _ in kernels.values())
    line = lambda words, a, b: f"{words[:84]:<84} {a[0]:8.3f} {a[1]:6.1f} {b[0]:8.3f} {b[1]:6.1f} {a[0] - b[0]:+8.3f}"
    lines = [f"{'ms and calls a step':<84} {'evenkeel':>15} {'cuDNN':>15} {'more':>8}"]
    sums = {name: {label: [0.0, 0.0] for label, _ in KINDS} for name in found}
    for name, kernels in found.items():
        for kernel, (time_ms, calls) in kernels.items():
            label = next(label for label, pattern in KINDS if re.search(pattern, kernel))
            sums[name][label][0] += time_ms
            sums[name][label][1] += calls
    lines += [line(label, sums["evenkeel"][label], sums["cuDNN"][label]) for label, _ in KINDS]
    lines += [line("all", [total(ours), sum(n for _, n in ours.values())], [total(theirs), sum(n for _, n in theirs.values())])]
    none = (0.0, 0.0)
    difference = lambda kernel: ours.get(kernel, none)[0] - theirs.get(kernel, none)[0]
    lines += [line(kernel, ours.get(kernel, none), theirs.get(kernel, none))
              for kernel in sorted({*ours, *theirs}, key=difference, reverse=True) if abs(difference(kernel)) > 0.01]
    for name in both:
        lines.append(f"{name}: {clock_and_power(both[name], 30)}")
    options.tables.append("\n".join(lines))
    return f"{total(ours):.2f} ms of kernels a step, {total(theirs):.2f} with cuDNN's attention"


def conform(options):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def backend(which):
        def attend(q, k, v, is_causal=False):
            with sdpa_kernel(which):
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        return attend

    ours = lambda plan: lambda q, k, v, is_causal=False: evenkeel.attention(q, k, v, is_causal, plan=plan)
    contestants = {"PyTorch " + name: backend(getattr(SDPBackend, name)) for name in
                   ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")}
    for stabiliser in ("wide_output", "consistent", "zero_sum"):
        contestants[f"evenkeel {stabiliser}"] = ours(f"flash2,stabiliser={stabiliser}")
    every = [family for family, (_, masked) in evenkeel.conform_families().items() if not masked]
    families = every if options.families == "all" else SOME_FAMILIES
    reports = [evenkeel.conform(fn, "cuda", BF16, options.rows, families, name=name) for name, fn in contestants.items()]
    lines = [f"{'attention':<34} {'verdict':<8} {'most biased (z)':<30} noisiest (rms / bound)"]
    lines += [report.summary() for report in reports]
    by_family = [f"{'z, rms / bound':<18}" + "".join(f"{name.split()[-1][:16]:>20}" for name in contestants)]
    for n, family in enumerate(r["family"] for r in reports[0].results):
        row = f"{family:<18}"
        for report in reports:
            r = report.results[n]
            row += (f"{r['residual_z']:+.1f}, {r['residual_rms'] / r['residual_bound']:.2f}" if "residual_z" in r
                    else "raised").rjust(20)
        by_family.append(row)
    for report in reports:
        for r in report.results:
            if "residual_z" not in r:
                by_family.append(f"{report.name}, {r['family']}: {r['verdict']}")
    options.tables += ["\n".join(by_family), "\n".join(lines)]
    ran = [report for report in reports if not all("residual_z" not in r for r in report.results)]
    must(len(ran) == len(reports), f"expected all backends to run, found {len(ran)} of {len(reports)}")
    must(reports[-1].passes, "expected evenkeel zero_sum to pass")
    return ", ".join(f"{report.name.split()[-1]} {'pass' if report.passes else 'FAIL'}" for report in reports)


SECTIONS = {"kernels": kernels, "opcheck": opcheck, "compile": compile_, "graph": graph, "streams": streams,
            "transformers": transformers, **check_torch_doors.SECTIONS, "speed": speed, "conform": conform, "profile": profile}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="sections, separated by commas (default: all but profile)")
    parser.add_argument("--families", choices=("some", "all"), default="some", help="of conform")
    parser.add_argument("--rows", type=int, default=100_000, help="of a family of conform")
    parser.add_argument("--sequences", type=int, default=32, help="of 1024 tokens, a step of `speed`")
    parser.add_argument("--rounds", type=int, default=30, help="of `speed`")
    options = parser.parse_args()
    options.tables = []
    wanted = options.only.split(",") if options.only else [name for name in SECTIONS if name != "profile"]
    for name in wanted:
        if name not in SECTIONS:
            parser.error(f"expected sections among {', '.join(SECTIONS)}, found {name}")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, evenkeel {evenkeel.library_version()} "
          f"({evenkeel.library_path()})", flush=True)
    rows, failed = [], False
    for name in wanted:
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        torch.set_float32_matmul_precision("highest")  # no TF32 but where a section says so
        try:
            outcome, words = "passed", SECTIONS[name](options)
        except Exception as error:
            failed = True
            text = io.StringIO()
            traceback.print_exc(file=text)
            print("\n".join(text.getvalue().splitlines()[-14:]))
            cause = error.__cause__ or error.__context__
            while cause is not None:  # what lies behind it: the numbers that differ, say
                print(f"  because of {type(cause).__name__}: {str(cause).strip()[:800]}")
                cause = cause.__cause__ or cause.__context__
            outcome, words = "FAILED", f"{type(error).__name__}: {str(error).strip()}"[:160].replace("\n", " ")
        rows.append(f"{name:<13} {outcome:<7} {time.perf_counter() - began:5.0f} s  {words}")
        print(rows[-1], flush=True)
        if not {*wanted[wanted.index(name) + 1 :]} & {"speed", "profile"}:
            contestants.cache_clear()
        torch.cuda.empty_cache()
    for table in options.tables:
        print("\n" + table)
    print("\n" + "\n".join(rows))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
