#!/usr/bin/env python3
"""A nanoGPT-style training with evenkeel's attention, small enough for a CPU: it drifts with a coarse plan, and does not
with the remedy.

    train_nano.py --plan fp32,row_sum=e5m2                          the scores drift (offset), then the loss rises
    train_nano.py --plan fp32,row_sum=e5m2 --stabiliser zero_sum    the same rounding, the sum of dS restored
    train_nano.py --device cuda --bf16 --width 384 --heads 6 --layers 6 --context 512 --plan bf16_all

The model is as nanoGPT's: it calls torch.nn.functional.scaled_dot_product_attention, which evenkeel.patch() routes. Text
is bytes; the offset is the largest row mean of the scores, which softmax cannot see and nothing pulls back.
"""
import argparse
import contextlib
import math
import pathlib
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import evenkeel  # noqa: E402
from evenkeel._records import largest_offset, read_steps  # noqa: E402


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary=256, context=64, layers=3, heads=2, width=64):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02)

    def forward(self, tokens, targets):
        """tokens, targets (B, T); the loss."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


def own_text():
    """The documentation of this project: text that is there."""
    files = sorted(ROOT.glob("docs/*.md")) + [ROOT / "README.md"]
    return b"\n".join(file.read_bytes() for file in files)


def train(plan=None, stabiliser=None, steps=400, out=None, every=50, text=None, device="cpu", bf16=False, context=64,
          layers=3, heads=2, width=64, sequences=8, peak=6e-3, warmup=50, seed=3, say=print):
    """Returns the losses and, by step, the offset of every step that was probed."""
    torch.manual_seed(seed)
    data = torch.tensor(list(text if text is not None else own_text()), dtype=torch.long)
    with contextlib.ExitStack() as stack:
        stack.enter_context(evenkeel.patched(plan, stabiliser))
        model = Gpt(256, context, layers, heads, width).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
        monitor = None
        if out is not None:
            whole = ",".join(part for part in (plan, stabiliser and f"stabiliser={stabiliser}") if part)
            monitor = stack.enter_context(evenkeel.Monitor(model, out, every=every, plan=whole or None))
        draw = torch.Generator().manual_seed(seed)
        losses = []
        for step in range(steps):
            lr = peak * min(1.0, (step + 1) / warmup)
            optimizer.param_groups[0]["lr"] = lr
            starts = torch.randint(len(data) - context - 1, (sequences,), generator=draw)
            rows = torch.stack([data[s : s + context + 1] for s in starts]).to(device)
            with torch.autocast(device, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext():
                loss = model(rows[:, :-1], rows[:, 1:])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            if monitor is not None:
                monitor.step(loss, lr=lr, gradient_norm=norm, tokens=sequences * context)
            if say is not None and (step % every == 0 or step == steps - 1):
                say(f"step {step:5d}  loss {losses[-1]:.3f}")
    offsets = {}
    if out is not None:
        offsets = {line["step"]: largest_offset(line["offset"]) for line in read_steps(out) if "offset" in line}
    return losses, offsets


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", help="a precision plan (default: by the tensors' dtype)")
    parser.add_argument("--stabiliser", help="the remedy")
    parser.add_argument("--out", default="runs/nano-torch", help="the run's folder, for `evenkeel report` and `watch`")
    parser.add_argument("--text", help="a file to train on (default: this project's documentation)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    for name, default in (("steps", 400), ("every", 50), ("context", 64), ("layers", 3), ("heads", 2), ("width", 64),
                          ("sequences", 8), ("seed", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    if options["text"]:
        options["text"] = pathlib.Path(options["text"]).read_bytes()
    _, offsets = train(**options)
    for step, offset in offsets.items():
        print(f"step {step:5d}  offset {offset:.1f}")


if __name__ == "__main__":
    main()
