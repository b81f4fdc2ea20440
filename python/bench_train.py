"""GPT-2 and Llama in PyTorch, as the rival of `evenkeel bench train`: the same sizes, batch, optimiser and clipping.

usage: bench_train.py REQUEST

REQUEST is a JSON object: `device` (cpu or cuda), `threads`, `sequences`, and `model` (layers, heads, width, context,
vocabulary, norm_bias; key_heads, hidden, norm, positions, mlp, rotary_base: learned positions mean GPT-2, rotary ones Llama). On the CPU everything is FP32; on a GPU BF16 by autocast, torch.compile and the fused AdamW, once
with each of the attention backends that PyTorch has. The first line on standard output says which variants there are;
then each line {"variant": NAME, "steps": N} on standard input is answered with {"seconds": S}. Exit code 77: there is no
PyTorch for the device.
"""

import json
import os
import sys
import time

request = json.loads(sys.argv[1])
answers = sys.stdout
sys.stdout = sys.stderr  # nothing but answers goes to the pipe

# PyTorch's cache of compiled code does not know which attention kernel was chosen: without this, the second variant runs the first's.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
if request["device"] == "cpu":  # read when the libraries are loaded
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = str(request["threads"])
try:
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    torch.zeros(1, device=request["device"])
except Exception as error:  # whatever keeps PyTorch from the device
    print(f"no PyTorch for {request['device']}: {error}", file=sys.stderr)
    sys.exit(77)

on_gpu = request["device"] == "cuda"
sizes = request["model"]
L, H, C, T, V = (sizes[name] for name in ("layers", "heads", "width", "context", "vocabulary"))
if on_gpu:
    V = (V + 63) // 64 * 64  # as everyone pads it: faster
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
else:
    torch.set_num_threads(request["threads"])


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))
        self.bias = nn.Parameter(torch.zeros(C)) if sizes["norm_bias"] else None

    def forward(self, x):
        return F.layer_norm(x, (C,), self.weight, self.bias, 1e-5)


def attention(q, k, v, mask):
    """(B, H, T, D) each."""
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q @ k.transpose(-2, -1)) * (q.size(-1) ** -0.5)
    return torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ v


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = Norm(), Norm()
        self.c_attn = nn.Linear(C, 3 * C, bias=False)
        self.c_proj = nn.Linear(C, C, bias=False)
        self.c_fc = nn.Linear(C, 4 * C, bias=False)
        self.c_out = nn.Linear(4 * C, C, bias=False)

    def forward(self, x, mask):
        B = x.size(0)
        q, k, v = (t.view(B, T, H, C // H).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        x = x + self.c_proj(attention(q, k, v, mask).transpose(1, 2).reshape(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x):
        if hasattr(F, "rms_norm"):
            return F.rms_norm(x, (C,), self.weight, 1e-5)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def turned(x, cosine, sine):
    """Rotary positions: features p and p + D / 2 of x (B, H, T, D) are one complex number."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1).to(x.dtype)


class LlamaBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.D, self.G, self.F = C // H, sizes["key_heads"], sizes["hidden"]
        self.ln_1, self.ln_2 = RmsNorm(), RmsNorm()
        self.c_attn = nn.Linear(C, C + 2 * self.G * self.D, bias=False)
        self.c_proj = nn.Linear(C, C, bias=False)
        self.c_fc = nn.Linear(C, 2 * self.F, bias=False)
        self.c_out = nn.Linear(self.F, C, bias=False)
        place = torch.arange(T).float()
        angle = torch.outer(place, sizes["rotary_base"] ** (-torch.arange(0, self.D, 2).float() / self.D))
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(self, x, mask):
        B, K = x.size(0), self.G * self.D
        q, k, v = (t.view(B, T, -1, self.D).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split((C, K, K), dim=2))
        q, k = turned(q, self.cosine, self.sine), turned(k, self.cosine, self.sine)
        if self.G == H:
            o = attention(q, k, v, mask)
        elif on_gpu:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            o = attention(q, *(t.repeat_interleave(H // self.G, dim=1) for t in (k, v)), mask)
        x = x + self.c_proj(o.transpose(1, 2).reshape(B, T, C))
        gate, up = self.c_fc(self.ln_2(x)).split(self.F, dim=2)
        return x + self.c_out(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        llama = sizes.get("positions", "learned") == "rotary"
        self.wte, self.wpe = nn.Embedding(V, C), None if llama else nn.Embedding(T, C)
        self.h = nn.ModuleList(LlamaBlock() if llama else Block() for _ in range(L))
        self.ln_f = RmsNorm() if llama else Norm()
        self.register_buffer("mask", torch.triu(torch.ones(T, T, dtype=torch.bool), 1))
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets, backend=None):
        # Read here, so that torch.compile makes a graph for each: the backend itself is set around the call.
        assert backend != ""
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe.weight
        for block in self.h:
            x = block(x, self.mask)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, V), targets.view(-1))


class Variant:
    def __init__(self, model, loss, **adamw):
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, **adamw
        )
        generator = torch.Generator().manual_seed(1)
        self.batches = []  # tokens and targets, (B, T) each
        for _ in range(8):
            rows = torch.randint(0, sizes["vocabulary"], (request["sequences"], T + 1), generator=generator)
            self.batches.append([part.contiguous().to(request["device"]) for part in (rows[:, :-1], rows[:, 1:])])
        self.steps = 0
        self.run(2)  # compiles, plans, warms up

    def run(self, steps):
        began = time.perf_counter()
        for _ in range(steps):
            batch = self.batches[self.steps % len(self.batches)]
            self.steps += 1
            self.optimizer.zero_grad(set_to_none=True)
            self.loss(*batch).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began


def gpu_variants():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):

        def make(name=name, backend=backend):
            model = Model().cuda()
            compiled = torch.compile(model)

            def loss(tokens, targets):
                with sdpa_kernel(backend), torch.autocast("cuda", dtype=torch.bfloat16):
                    return compiled(tokens, targets, name)

            return Variant(model, loss, fused=True)

        yield f"PyTorch compiled, {name} attention", make


def cpu_variants():
    for name, options in (("foreach", {"foreach": True}), ("loop", {"foreach": False})):

        def make(options=options):
            model = Model()
            return Variant(model, model, **options)

        yield f"PyTorch, AdamW {name}", make


def answer(what):
    print(json.dumps(what), file=answers, flush=True)


variants, failed = {}, {}
for name, make in gpu_variants() if on_gpu else cpu_variants():
    try:
        variants[name] = make()
    except Exception as error:
        failed[name] = (str(error).strip() or repr(error)).splitlines()[0]
answer({"torch": torch.__version__, "variants": list(variants), "failed": failed})
for line in sys.stdin:
    question = json.loads(line)
    try:
        answer({"seconds": variants[question["variant"]].run(question["steps"])})
    except Exception as error:
        answer({"error": (str(error).strip() or repr(error)).splitlines()[0]})
