#!/usr/bin/env python3
"""Where a head's offset comes from: a recorded run, continued in PyTorch, whose every step is split into what the leak did and what the rest did.

    offset_ledger.py RUN@STEP --plan PLAN --out FILE [--layer L] [--steps N] [--every N] [--tokens FILE] [--device cuda|cpu]

RUN is a folder of `evenkeel train` of a GPT-2 with AdamW and a constant learning rate behind its warm-up; STEP one of its checkpoints, an early
one: what the leak did before it is not known. It trains on RUN's batches to step --steps (default: as many as the batches have), with
attention by PLAN. PLAN has no stabiliser, or one that does not change the forward pass. The divisor and the clipping contain the leak,
too: this is accounting, and not a run without it. Offset and key_share are those before the window's last step, c is behind it.

Every step computes two gradients at the same weights, with the same random numbers: g by PLAN and h by PLAN with zero_sum. So g - h is
the leak's part, of all weights. AdamW's step is linear in the gradients that it has averaged, once its divisor is known: it falls into the leak's part and the rest. For each
head of layer L (from 1), c is the mean of its rows' mean scores over the batch; its change is, to first order, the sum over all weights of dc/dw times the step.
FILE gets, for every window of --every steps and every head:
  c, offset     at the window's end: c, and the largest absolute row mean
  moved         what c changed in the window's steps, each on its own batch
  leak, rest    what the two parts of the steps contributed to that; `moved` less both is of second order
  push, push_z  what the leak of one step's gradient alone would do to c: the mean over the window, and that mean over its standard error.
                Noise without a direction has |push_z| below 2 in 19 of 20 windows
  by_weights    leak and rest again, by where the weights are: W_Q and W_K of the head, the norm's gain before them, all others
  key_share     |mean key|^2 over the mean |key|^2: how much of the keys is the part that they share, at the window's end
Exit codes: 0 done, 1 wrong input, 77 no PyTorch.
"""
import argparse
import itertools
import json
import math
import sys
from pathlib import Path

try:
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

from check_model import gpt2_loss, read_safetensors
from twin_torch import batches_of, checkpoint_of, expect, read_tokens, settings_of


class Found(Exception):
    """The layer that was looked for has been computed."""


class Ledger:
    def __init__(self, checkpoint, config, plan, layer, device):
        import evenkeel

        self.attention, self.plan, self.config, self.layer = evenkeel.attention, plan, config, layer
        weights, states = (read_safetensors(checkpoint / f"{kind}.safetensors") for kind in ("model", "optimizer"))
        self.names, self.heads = list(weights), config["model"]["heads"]
        self.weights = {name: weights[name].float().to(device).requires_grad_(True) for name in self.names}
        self.first, self.second = ({name: states[f"{kind}.{name}"].float().to(device) for name in self.names} for kind in ("first", "second"))
        self.leaked = {name: torch.zeros_like(tensor) for name, tensor in self.first.items()}  # the leak's part of `first`
        self.device = torch.device(device).type

    def loss(self, rows, attention):
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.config["model"]["precision"] == "bf16"):
            return gpt2_loss(self.weights, self.heads, rows[:, :-1], rows[:, 1:], attention)

    def gradient(self, value, keep=False):
        """By name; None where `value` does not depend on a tensor."""
        return dict(zip(self.names, torch.autograd.grad(value, [self.weights[name] for name in self.names], retain_graph=keep, allow_unused=True)))

    def gradient_by(self, rows, step, stabiliser):
        """(loss, gradient) of attention by the plan."""
        layer = itertools.count()
        attention = lambda q, k, v: self.attention(q, k, v, is_causal=True, plan=self.plan, stabiliser=stabiliser, step=step, layer=next(layer))
        loss = self.loss(rows, attention)
        return loss.item(), self.gradient(loss)

    def scores(self, rows):
        """Of the layer, of its heads: c with its graph, the largest |row mean|, key_share; (heads) each. rows (B, T + 1)."""
        found, layer = {}, itertools.count()

        def looking(q, k, v):
            s = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, T)
            T = s.shape[-1]
            visible = torch.ones(T, T, dtype=torch.bool, device=s.device).tril()
            if next(layer) < self.layer:
                return (torch.softmax(s.masked_fill(~visible, -math.inf), -1) @ v.float()).to(q.dtype)
            means = (s * visible).sum(-1) / visible.sum(-1)  # (B, H, T)
            keys = k.float().mean((0, 2)).square().sum(-1) / k.float().square().sum(-1).mean((0, 2))
            found.update(c=means.mean((0, 2)), offset=means.abs().amax((0, 2)).tolist(), key_share=keys.tolist())
            raise Found

        try:
            self.loss(rows, looking)
        except Found:
            pass
        expect("c" in found, f"a model with at least {self.layer + 1} layers", f"{self.config['model']['layers']}")
        return found

    def parts(self, name, product, head):
        """The sum of a product of two tensors of this name's shape, by where the weights are."""
        if name == f"h.{self.layer}.attn.c_attn.weight":  # (C, 3 C): queries, keys, values
            C = product.shape[0]
            own = slice(head * C // self.heads, (head + 1) * C // self.heads)
            return {"W_Q": product[:, :C][:, own].sum().item(), "W_K": product[:, C : 2 * C][:, own].sum().item()}
        return {"gain" if name == f"h.{self.layer}.ln_1.weight" else "others": product.sum().item()}

    def step(self, rows, n):
        """Trains step n; a dict of the step's figures, lists of (heads)."""
        optimizer, schedule = self.config["optimizer"], self.config["schedule"]
        rate = schedule["lr"] * min(1.0, (n + 1) / max(1, schedule["warmup"]))
        loss, g = self.gradient_by(rows, n, None)
        other, h = self.gradient_by(rows, n, "zero_sum")
        expect(loss == other, "a plan whose forward pass is the same with zero_sum", f"losses {loss!r} and {other!r} at step {n}")
        norm = math.sqrt(sum(x.double().square().sum().item() for x in g.values()))
        clip = min(1.0, optimizer["clip"] / norm) if optimizer["clip"] else 1.0
        seen = self.scores(rows)
        slopes = [self.gradient(c, keep=True) for c in seen["c"]]
        found = {"loss": loss, "offset": seen["offset"], "key_share": seen["key_share"], "push": [0.0] * self.heads,
                 "leak": [{} for _ in slopes], "rest": [{} for _ in slopes]}  # fmt: skip
        count, steps = n + 1, {}
        beta1, beta2 = optimizer["beta1"], optimizer["beta2"]
        for name in self.names:
            leak = g[name] - h[name]
            self.first[name].mul_(beta1).add_(g[name], alpha=(1 - beta1) * clip)
            self.leaked[name].mul_(beta1).add_(leak, alpha=(1 - beta1) * clip)
            self.second[name].mul_(beta2).addcmul_(g[name], g[name], value=(1 - beta2) * clip * clip)
            divisor = (self.second[name] / (1 - beta2**count)).sqrt_().add_(optimizer["epsilon"])
            decay = optimizer["weight_decay"] if self.weights[name].dim() == 2 else 0.0
            by_leak = self.leaked[name] / divisor * (-rate / (1 - beta1**count))
            steps[name] = self.first[name] / divisor * (-rate / (1 - beta1**count)) - self.weights[name].detach() * (rate * decay)
            for head, slope in enumerate(slopes):
                if slope[name] is None:
                    continue
                found["push"][head] += (leak / divisor * slope[name]).sum().item() * -rate * clip
                for kind, step in (("leak", by_leak), ("rest", steps[name] - by_leak)):
                    for place, value in self.parts(name, step * slope[name], head).items():
                        found[kind][head][place] = found[kind][head].get(place, 0.0) + value
        with torch.no_grad():
            for name, step in steps.items():
                self.weights[name] += step
            after = self.scores(rows)["c"]
        return found | {"c": after.tolist(), "moved": (after - seen["c"]).tolist()}


def window(rows, begin, heads):
    """What FILE has of some steps' figures."""
    mean = lambda values: sum(values) / len(values)

    def of_head(head):
        push = [row["push"][head] for row in rows]
        error = math.sqrt(sum((x - mean(push)) ** 2 for x in push) / max(1, len(push) - 1) / len(push))
        places = {kind: {place: sum(row[kind][head].get(place, 0.0) for row in rows) for place in rows[0][kind][head]} for kind in ("leak", "rest")}
        return {"c": rows[-1]["c"][head], "offset": rows[-1]["offset"][head], "moved": sum(row["moved"][head] for row in rows),
                "leak": sum(places["leak"].values()), "rest": sum(places["rest"].values()), "push": mean(push), "push_z": mean(push) / error if error > 0 else 0.0,
                "by_weights": places, "key_share": rows[-1]["key_share"][head]}  # fmt: skip

    return {"steps": [begin, begin + len(rows)], "loss": mean([row["loss"] for row in rows]), "heads": [of_head(head) for head in range(heads)]}


def shortened(value):
    """Numbers with four digits."""
    if isinstance(value, dict):
        return {key: shortened(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shortened(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN@STEP")
    parser.add_argument("--plan", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main():
    options = parse_options()
    folder, begin, checkpoint = checkpoint_of(options.run)
    expect(options.layer >= 1 and options.every >= 1, "--layer and --every from 1 on", f"{options.layer} and {options.every}")
    config = settings_of(folder)
    starts, length = batches_of(folder / "batches.bin", config["data"]["seed"], options.steps)
    expect(begin < len(starts), f"steps above {begin}", len(starts))
    tokens = torch.from_numpy(read_tokens(options.tokens or Path(config["data"]["train"])).astype("int32")).to(options.device)
    starts = torch.from_numpy(starts.copy()).to(options.device)
    ledger = Ledger(checkpoint, config, options.plan, options.layer - 1, options.device)
    place, rows, windows = torch.arange(length, device=options.device), [], []
    for n in range(begin, len(starts)):
        rows.append(ledger.step(tokens[starts[n][:, None] + place].long(), n))
        if (n + 1) % options.every and n + 1 < len(starts):
            continue
        windows.append(window(rows, n + 1 - len(rows), ledger.heads))
        most = max(windows[-1]["heads"], key=lambda head: head["offset"])
        print(f"steps {windows[-1]['steps']}  loss {windows[-1]['loss']:.3f}  largest offset {most['offset']:.4g}: moved {most['moved']:.3g} = leak {most['leak']:.3g} + rest {most['rest']:.3g}, push_z {most['push_z']:.1f}", flush=True)
        rows = []
        options.out.write_text(json.dumps({"plan": options.plan, "seed": config["data"]["seed"], "layer": options.layer, "windows": shortened(windows)}))  # a kill loses one window


if __name__ == "__main__":
    main()
