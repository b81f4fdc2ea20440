"""Sections of check_torch_gpu.py: the doors of the PyTorch package on a GPU, its instruments there, and the examples."""
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import types
import warnings

import torch
import torch.nn.functional as F

import evenkeel
from evenkeel import _attention, _plain, flash_attn
from evenkeel._records import read_steps
from train_nano import Gpt

ROOT = pathlib.Path(__file__).resolve().parents[1]
BF16 = torch.bfloat16


def must(condition, words):
    if not condition:
        raise AssertionError(words)


def apart(found, expected):
    """The largest ||found - expected|| / ||expected|| of the pairs."""
    return max(((f.float() - e.float()).norm() / e.float().norm().clamp_min(1e-30)).item() for f, e in zip(found, expected))


def with_gradients(fn, inputs, d_o):
    o = fn(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, d_o)]


def doors(_):
    """Packed sequences in one call, windows, caches, the gradient of the log-sum-exp, random draws, coverage."""
    draw = torch.Generator("cuda").manual_seed(1)
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=BF16, generator=draw).requires_grad_()
    worst = 0.0
    for lengths, H, G, D in (([300, 1, 64, 129, 500], 8, 8, 64), ([33, 257, 70], 8, 2, 128), ([5, 9], 2, 1, 40)):
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        rows, longest = sum(lengths), max(lengths)
        q, k, v, d_o = make(rows, H, D), make(rows, G, D), make(rows, G, D), make(rows, H, D).detach()
        for causal in (True, False):
            run = lambda *t: flash_attn.flash_attn_varlen_func(*t, starts, starts, longest, longest, causal=causal)
            plain = lambda *t: torch.cat([
                _plain.plain_attention(*(x[a:b].transpose(0, 1).unsqueeze(0) for x in t),
                                       _plain.band(b - a, b - a, causal, device="cuda"))[0][0].transpose(0, 1)
                for a, b in zip(starts.tolist(), starts.tolist()[1:])])
            error = apart(with_gradients(run, (q, k, v), d_o), with_gradients(plain, (q, k, v), d_o))
            print(f"  packed {lengths}, {H}/{G} heads of {D}, causal {causal}: {error:.1e}")
            must(error < 1e-2, f"packed sequences: {error}")
            worst = max(worst, error)
    compiled = torch.compile(run, fullgraph=True)
    must(apart([compiled(q, k, v)], [run(q, k, v)]) < 1e-2, "packed sequences, compiled")
    q, k, v = make(2, 8, 128, 64), make(2, 4, 128, 64), make(2, 4, 128, 64)
    d_o, d_l = make(2, 8, 128, 64).detach(), torch.randn(2, 8, 128, device="cuda")
    both = lambda fn: torch.autograd.grad(fn(q, k, v), (q, k, v), [d_o, d_l])
    error = apart(both(lambda *t: evenkeel.attention(*t, is_causal=True, return_lse=True)),
                  both(lambda *t: _plain.plain_attention(*t, _plain.band(128, 128, True, device="cuda"))))
    must(error < 1e-2, f"gradient of the log-sum-exp: {error}")
    first = lambda t: t.transpose(1, 2)
    windowed = lambda *t: first(flash_attn.flash_attn_func(*map(first, t), causal=True, window_size=(20, 0)))
    error = apart(with_gradients(windowed, (q, k, v), d_o), with_gradients(
        lambda *t: _plain.plain_attention(*t, _plain.band(128, 128, True, (20, 0), "cuda"))[0], (q, k, v), d_o))
    must(error < 1e-2, f"a window: {error}")
    worst = max(worst, forms(make))
    gradients = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        gradients.append(with_gradients(lambda *t: evenkeel.attention(*t, is_causal=True), (q, k, v), d_o))
    same = [all(torch.equal(a, b) for a, b in zip(gradients[0], other)) for other in gradients[1:]]
    must(same[0], "expected the same bits after the same seed")
    hopper = torch.cuda.get_device_capability() == (9, 0)
    must(not hopper or not same[1], "expected other random draws after another seed")
    must(all(c["kernel"] != "pytorch" for c in evenkeel.coverage()), str(evenkeel.coverage()))
    print(evenkeel.coverage())
    return f"packed, windows, log-sum-exp; worst error {worst:.1e}; draws repeat from a seed and differ by seed"


def forms(make):
    """Slopes, sinks, values of another head size, the gradient of the log-sum-exp, both 16-bit types, batched and packed: against
    plain PyTorch; the largest error. And compiled as a whole."""
    worst, T, N = 0.0, 150, 200
    slopes, sinks = torch.tensor([0.5, 0.1, 0.0, 0.03], device="cuda"), torch.tensor([0.3, -2.0, 1.0, 4.0], device="cuda")
    sinks.requires_grad_()
    for dtype, D_v in ((BF16, 64), (torch.float16, 64), (BF16, 40)):
        x = [t.detach().to(dtype).requires_grad_() for t in (make(2, 4, T, 64), make(2, 2, N, 64), make(2, 2, N, D_v))] + [sinks]
        d_o, d_l = make(2, 4, T, D_v).detach().to(dtype), torch.randn(2, 4, T, device="cuda")
        both = lambda fn: torch.autograd.grad(fn(*x), x, [d_o, d_l])
        ours = lambda q, k, v, s: _attention.run("forms", q, k, v, True, slopes=slopes, sinks=s)
        plain = lambda q, k, v, s: _plain.plain_attention(q, k, v, _plain.band(T, N, True, device="cuda"),
                                                          _plain.alibi_bias(slopes, T, N), sinks=s)
        error = apart(both(ours), both(plain))
        print(f"  slopes, sinks, gradient of L, {dtype}, values of {D_v}: {error:.1e}")
        must(error < 1e-2, f"slopes and sinks: {error}")
        worst = max(worst, error)
    torch._dynamo.reset()
    must(apart(both(torch.compile(ours, fullgraph=True)), both(plain)) < 1e-2, "slopes and sinks, compiled")
    starts = torch.tensor([0, 70, 71, 150], device="cuda", dtype=torch.int32)
    q, k, v = make(150, 4, 64), make(150, 2, 64), make(150, 2, 64)
    x, d_o, d_l = (q, k, v, sinks), make(150, 4, 64).detach(), torch.randn(4, 150, device="cuda")
    ours = lambda q, k, v, s: _attention.run_packed("forms", q, k, v, starts, starts, 79, 79, True, slopes=slopes, sinks=s)

    def plain(q, k, v, s):
        parts = []
        for a, b in zip(starts.tolist(), starts.tolist()[1:]):
            o, lse = _plain.plain_attention(*(t[a:b].transpose(0, 1).unsqueeze(0) for t in (q, k, v)),
                                            _plain.band(b - a, b - a, True, device="cuda"),
                                            _plain.alibi_bias(slopes, b - a, b - a), sinks=s)
            parts.append((o[0].transpose(0, 1), lse[0]))
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], 1)

    error = apart(*(torch.autograd.grad(fn(*x), x, [d_o, d_l]) for fn in (ours, plain)))
    print(f"  the same, packed: {error:.1e}")
    must(error < 1e-2, f"slopes and sinks, packed: {error}")
    first = lambda t: t.transpose(1, 2)
    x = [make(2, 4, T, 64), make(2, 2, N, 64), make(2, 2, N, 64)]
    door = lambda *t: first(flash_attn.flash_attn_func(*map(first, t), causal=True, alibi_slopes=slopes))
    expected = lambda *t: _plain.plain_attention(*t, _plain.band(T, N, True, device="cuda"), _plain.alibi_bias(slopes, T, N))[0]
    d_o = make(2, 4, T, 64).detach()
    must(apart(with_gradients(door, x, d_o), with_gradients(expected, x, d_o)) < 1e-2, "alibi_slopes of flash_attn_func")
    return max(worst, error)


def registry(_):
    """torch.nn.attention.activate_flash_attention_impl("evenkeel"), with varlen_attn."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
    import torch.nn.attention.varlen as varlen

    evenkeel.register_flash_attention_impl()
    before = F.scaled_dot_product_attention
    activate_flash_attention_impl("evenkeel")
    try:
        q = torch.randn(1, 4, 64, 64, device="cuda", dtype=BF16)
        evenkeel.next_step()
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        x = torch.randn(96, 4, 64, device="cuda", dtype=BF16)
        starts = torch.tensor([0, 32, 96], device="cuda", dtype=torch.int32)
        varlen.varlen_attn(x, x, x, starts, starts, 64, 64, window_size=(-1, 0))
        listed = evenkeel.coverage()
        must(listed.covered and {c["door"] for c in listed} == {"scaled_dot_product_attention", "varlen_attn"}, str(listed))
    finally:
        restore_flash_attention_impl()
    must(F.scaled_dot_product_attention is before, "expected PyTorch's own again")
    return "activated, seen by coverage(), restored"


def with_fields(config, **fields):
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def tiny_models():
    """name -> (model, inputs): random weights, a few layers."""
    import transformers as t

    sizes = dict(vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=128)
    made = {
        "GPT-2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=200, n_positions=128, n_embd=64, n_layer=2, n_head=4,
                                                        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)),
        "Llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes)),
        "Qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, head_dim=16)),
        "Gemma-2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**sizes, head_dim=128, sliding_window=16, query_pre_attn_scalar=64)),
        "Gemma-2, heads of 256": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**sizes, head_dim=256, sliding_window=16,
                                                                            query_pre_attn_scalar=64)),
        "gpt-oss": lambda: t.GptOssForCausalLM(t.GptOssConfig(**sizes, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
                                                              sliding_window=16)),
        "T5": lambda: t.T5ForConditionalGeneration(with_fields(
            t.T5Config(vocab_size=200, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0),
            decoder_start_token_id=0, pad_token_id=0)),
        "DeepSeek-V3": lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(
            **{**sizes, "num_key_value_heads": 4}, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16,
            first_k_dense_replace=1)),
    }
    return made


def answers(model, implementation, run):
    """What run(model) returns and the gradients of it, or the exception: a refusal is an answer, if ours."""
    try:
        model.set_attn_implementation(implementation)
        model.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = run(model)
        value.backward()
        return [value.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]
    except Exception as error:
        return error


def compared(ours, eager):
    if isinstance(ours, Exception):
        return f"refused: {type(ours).__name__}: {str(ours)[:90]}"
    return f"eager itself: {str(eager)[:60]}" if isinstance(eager, Exception) else apart(ours, eager)


LENGTHS = (17, 5, 26)  # of the sequences of a packed batch


def packed_cases(tokens):
    """Functions of a model: the weighted sum of its logits of sequences one by one, and of all of them in one row. In a row
    positions that start again separate them, and cu_seq_lens besides."""
    starts = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    row = tokens.flatten()[: starts[-1]].unsqueeze(0)
    weight = torch.randn(1, starts[-1], 200, device="cuda", generator=torch.Generator("cuda").manual_seed(3)) / starts[-1]
    positions = torch.cat([torch.arange(n, device="cuda") for n in LENGTHS]).unsqueeze(0)
    bounds = torch.tensor(starts, device="cuda", dtype=torch.int32)
    lengths = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS))
    one_by_one = lambda model: sum((model(input_ids=row[:, a:b], use_cache=False).logits * weight[:, a:b]).sum()
                                   for a, b in zip(starts, starts[1:]))
    by = lambda **given: lambda model: (model(input_ids=row, position_ids=positions, use_cache=False, **given).logits * weight).sum()
    return one_by_one, {"positions": by(), "cu_seq_lens": by(**lengths)}


def models(_):
    """transformers' models with our attention against eager: loss and gradients, plain, padded and packed; or a refusal."""
    evenkeel.hf.register("evenkeel_fp32", plan="fp32")
    tokens = torch.randint(0, 200, (2, 48), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    padding = torch.ones_like(tokens)
    padding[1, -13:] = 0
    told, failed = [], []
    one_by_one, packed = packed_cases(tokens)
    for name, make in tiny_models().items():
        try:
            torch.manual_seed(1)
            model = make().cuda().float().train()
        except (AttributeError, TypeError, ValueError) as error:
            told.append(f"{name}: not in this transformers ({type(error).__name__}: {str(error)[:60]})")
            print("  " + told[-1], flush=True)
            continue
        evenkeel.next_step()
        loss = lambda mask: lambda model: model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        errors = {label: compared(answers(model, "evenkeel_fp32", loss(mask)), answers(model, "eager", loss(mask)))
                  for label, mask in (("plain", None), ("padded", padding))}
        if not model.config.is_encoder_decoder:
            alone = answers(model, "eager", one_by_one)
            errors["cu_seq_lens"] = compared(answers(model, "evenkeel_fp32", packed["cu_seq_lens"]), alone)
            # Whether positions that start again separate sequences is the model's to say: its mask comes from there.
            own = answers(model, "eager", packed["positions"])
            errors["positions"] = compared(answers(model, "evenkeel_fp32", packed["positions"]), own)
            separated = compared(own, alone)
            if not isinstance(separated, float) or separated > 1e-3:
                print(f"  {name}'s own eager attention does not separate sequences by their positions: {separated}")
        kernels = sorted({c["kernel"] + (f" ({c['why']})" if c["kernel"] == "pytorch" else "") for c in evenkeel.coverage()})
        words = ", ".join(f"{label} {e:.1e}" if isinstance(e, float) else f"{label} {e}" for label, e in errors.items())
        told.append(f"{name}: {words} by {', '.join(kernels) or 'its own attention, which no door reaches'}")
        print("  " + told[-1], flush=True)
        if any(e > 1e-3 for e in errors.values() if isinstance(e, float)):
            failed.append(told[-1])
        if name in ("GPT-2", "Llama", "Qwen3", "Gemma-2", "gpt-oss") and not all(isinstance(e, float) for e in errors.values()):
            failed.append(told[-1])
    must(not failed, f"expected eager's numbers, found {failed}")
    return "; ".join(told)


def instruments(_):
    """Guard changes the plan of compiled code without compiling again; Monitor in a GPT-2's training costs under 1 %."""
    torch.set_float32_matmul_precision("high")
    folder = pathlib.Path(tempfile.mkdtemp())
    torch.manual_seed(1)
    model = Gpt(vocabulary=512, context=256, layers=2, heads=4, width=256).cuda()
    rows = torch.randint(0, 512, (4, 257), device="cuda")
    guard = evenkeel.Guard(model, None, folder / "guard", every=1000, first_step=1)
    try:
        compiled = torch.compile(model, fullgraph=True)

        def gradients():
            model.zero_grad(set_to_none=True)
            torch.manual_seed(3)
            with torch.autocast("cuda", dtype=BF16):
                loss = compiled(rows[:, :-1], rows[:, 1:])
            loss.backward()
            return [block.attn.c_attn.weight.grad.clone() for block in model.h]

        gradients()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        before = gradients()
        guard._remedied = {(1, 2)}
        guard._set_plan()
        after = gradients()
        must(torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "expected no new compilation")
        changed = [(a != b).view(3, 4, -1).any(-1) for a, b in zip(before, after)]
        must(bool(changed[1][0, 2]), "expected the remedy to reach layer 1 head 2")
    finally:
        guard.close()
    torch._dynamo.reset()
    share, words = monitor_share(folder)
    must(share < 0.01, f"expected Monitor under 1 %, found {words}")
    return words + "; the guard's plan reaches compiled code"


def monitor_share(folder, rounds=7, steps=20):
    """What Monitor adds to a step of GPT-2 124M with every=100. Rounds of steps without it and with it take turns, so that a
    clock that drifts or a busy machine meets both. The first step of a round with it is recorded, and the next ones carry
    what its thread takes. Nobody waits for the GPU but at the ends of stretches, as in a training that logs now and then."""
    torch.manual_seed(1)
    with evenkeel.patched():
        model = Gpt(vocabulary=50304, context=1024, layers=12, heads=12, width=768).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        compiled = torch.compile(model)
        data = torch.randint(0, 50000, (16, 1025), device="cuda")

        def stretch(count, monitor):
            """Seconds."""
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                with torch.autocast("cuda", dtype=BF16):
                    loss = compiled(data[:, :-1], data[:, 1:])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                if monitor is not None:
                    monitor.step(loss, lr=1e-4)
            torch.cuda.synchronize()
            return time.perf_counter() - began

        stretch(5, None)
        ordinary, recorded, parts = [], [], []
        for n in range(rounds):
            plain = stretch(steps, None) / steps
            with evenkeel.Monitor(compiled, folder / f"monitor-{n}", every=100 * steps, norms_every=10) as monitor:
                monitor._probed = 0 if n == 1 else 1  # norms come with every tenth recorded step
                first = stretch(3 * steps, monitor)
                while any(line.probing for line in monitor._lines):
                    time.sleep(0.01)
                    monitor._add_late()
                rest = stretch(steps, monitor) / steps
            again = stretch(steps, None) / steps
            without = (plain + again) / 2
            ordinary.append(rest - without)
            recorded.append(first - 3 * steps * rest)
            parts.append(without)
        without = statistics.median(parts)
        # The first round warms up kernels that only a recorded step has; the second measures norms, as every tenth does.
        of_recorded = statistics.median(recorded[2:]) + max(0.0, recorded[1] - statistics.median(recorded[2:])) / 10
        share = (statistics.median(ordinary) + of_recorded / 100) / without
    words = (f"{1e3 * without:.2f} ms a step; Monitor {100 * share:+.2f} %: {1e3 * statistics.median(ordinary):+.3f} ms of every "
             f"step, {1e3 * of_recorded:.1f} ms of a recorded one in 100 (with norms {1e3 * recorded[1]:.1f}, by round "
             + ", ".join(f"{1e3 * r:.0f}" for r in recorded) + ")")
    print("  " + words)
    return share, words


PYTEST = """
import torch

def exact(q, k, v, is_causal=False):
    s = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(), float("-inf"))
    return (s.softmax(-1) @ v.double()).to(q.dtype)

def late(q, k, v, is_causal=False):
    return exact(q, k, v, False)

def test_exact(evenkeel_conform):
    evenkeel_conform(exact, device="cuda", rows=2000)

def test_late(evenkeel_conform):
    evenkeel_conform(late, device="cuda", rows=2000)
"""


def integrations(_):
    """The pytest plugin, the hook for torchtitan and the plain loop, each once. Trainer and Lightning: see examples."""
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "test_kernels.py").write_text(PYTEST)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "evenkeel.pytest_plugin", "--evenkeel-quick",
                           "--evenkeel-failing", str(folder / "failing"), str(folder)], capture_output=True, text=True, timeout=200,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
    last = (done.stdout.strip().splitlines() or [done.stderr[-300:]])[-1]
    if "1 failed, 1 passed" not in last:
        print(done.stdout[-3000:])
    must("1 failed, 1 passed" in last and (folder / "failing" / "test_late.safetensors").exists(), f"pytest: {last}")

    def ours(q, k, v, is_causal=False):
        if max(q.shape[-1], v.shape[-1]) > 128:
            raise NotImplementedError
        return evenkeel.attention(q, k, v, is_causal, plan="flash2,stabiliser=zero_sum")

    report = evenkeel.conform(ours, "cuda", rows=2000, quick=True)
    if not report.passes:
        print(report)
    torch.manual_seed(1)
    model = Gpt(vocabulary=512, context=256, layers=2, heads=4, width=256).cuda()
    rows = torch.randint(0, 512, (4, 257), device="cuda")

    def step(optimizer):
        with torch.autocast("cuda", dtype=BF16):
            loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    with evenkeel.patched():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        container = types.SimpleNamespace(step=None, optimizers=[optimizer])  # as torchtitan has it
        monitor = evenkeel.integrations.attach(model, container, folder / "attach", every=2)
        for _ in range(6):
            step(optimizer)
        monitor.close()
        for _ in evenkeel.integrations.watched(range(6), model, folder / "watched", optimizer, every=2, guard=False):
            step(optimizer)
    for name in ("attach", "watched"):
        lines = read_steps(folder / name)
        found = [(line["step"], "probe" in line) for line in lines]
        must(found == [(n, n % 2 == 0) for n in range(6)], f"{name}: expected 6 steps, every second probed, found {found}")
        must(all("mean_lse" in line for line in lines), f"{name}: expected log-sum-exps of every step")
    must(report.passes, f"expected evenkeel.attention with zero_sum to pass, found {report.verdict}")
    return f"pytest plugin ({last}), attach, watched; zero_sum passes {report.forms['judged']} forms"


def examples(_):
    """Every example, as a user runs it."""
    told = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plain_loop", "hf_trainer", "lightning_script", "fsdp2"):
            done = subprocess.run([sys.executable, str(ROOT / "examples" / f"{name}.py"), "--steps", "10", "--out", f"{folder}/{name}"],
                                  capture_output=True, text=True, timeout=100)
            words = (done.stdout + done.stderr).strip().splitlines()
            told.append(f"{name}: " + ("skipped" if done.returncode == 77 else "passed" if done.returncode == 0 else "FAILED"))
            if done.returncode not in (0, 77):
                print("\n".join(words[-12:]))
            elif done.returncode == 0:
                lines = read_steps(pathlib.Path(folder) / name)
                must(len(lines) >= 10 and any("probe" in line for line in lines), f"{name}: expected 10 steps with probes")
    must(not any("FAILED" in one for one in told), "; ".join(told))
    return "; ".join(told)


SECTIONS = {"doors": doors, "registry": registry, "models": models, "instruments": instruments, "integrations": integrations,
            "examples": examples}
