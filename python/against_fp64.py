#!/usr/bin/env python3
"""One step of a recorded run, tensor by tensor, against FP64: what our trainer computes and what PyTorch computes at the same weights.

    against_fp64.py RUN@STEP --ours BRANCH [--captures FOLDER] [--attention flash|math|fp32] [--device cuda|cpu] [--json FILE]

BRANCH is `evenkeel train --branch RUN@STEP --steps STEP+1`: its optimiser's first moments give our gradient of that step.
FOLDER/layer-N.safetensors are our captures of the step (`evenkeel capture RUN@STEP --layer N`): x, q, k, v and dO of each layer.
Every number is ||found - FP64|| / ||FP64||. W_Q, W_K and W_V are listed separately. Where PyTorch is as far from FP64 as we are, the
distance is the formats'; where we are further, look there first.
Exit codes: 0 done, 1 wrong input, 77 no PyTorch.
"""
import argparse
import json
import math
import sys
from pathlib import Path

try:
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

from check_model import causal_attention, gpt2_loss, read_safetensors
from twin_torch import checkpoint_of, expect, fp32_attention, read_batches, read_tokens, sdpa
from _records import read_config, read_steps  # beside twin_torch's


class Watched:
    """Attention that keeps what it reads and the gradient of what it returns, layer by layer."""

    def __init__(self, attention):
        self.attention, self.layers = attention, []

    def __call__(self, q, k, v):
        o = self.attention(q, k, v)
        o.retain_grad()
        self.layers.append({"q": q, "k": k, "v": v, "o": o})
        return o


def passes(weights, heads, rows, attention, dtype, mixed):
    """Loss, gradients by name, and each layer's q, k, v, dO; all FP64."""
    parameters = {name: tensor.detach().to(rows.device, dtype, copy=True).requires_grad_(True) for name, tensor in weights.items()}
    watched = Watched(attention)
    with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=mixed):
        loss = gpt2_loss(parameters, heads, rows[:, :-1], rows[:, 1:], watched)
    loss.backward()
    wide = lambda tensor: tensor.detach().double().cpu()
    layers = [{**{name: wide(layer[name]) for name in "qkv"}, "d_o": wide(layer["o"].grad)} for layer in watched.layers]
    return loss.item(), {name: wide(tensor.grad) for name, tensor in parameters.items()}, layers


def parts(gradients):
    """The gradients by name, with q, k and v apart."""
    found = {}
    for name, gradient in gradients.items():
        if name.endswith("attn.c_attn.weight"):
            found.update({f"{name}[{letter}]": part for letter, part in zip("qkv", gradient.chunk(3, dim=1))})
        else:
            found[name] = gradient
    return found


def distance(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


def our_gradients(folder, step, optimizer, norm):
    """From first moments before and after: m' = beta m + (1 - beta) g, g after clipping."""
    states = [read_safetensors(folder / "checkpoints" / f"step-{n:08}" / "optimizer.safetensors") for n in (step, step + 1)]
    beta, clip = optimizer["beta1"], optimizer["clip"]
    scale = max(1.0, norm / clip) if clip else 1.0
    return {name.removeprefix("first."): (states[1][name] - beta * states[0][name]) / (1 - beta) * scale
            for name in states[0] if name.startswith("first.")}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN@STEP")
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--captures", type=Path)
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--attention", choices=["flash", "math", "fp32"], default="flash")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder, step, checkpoint = checkpoint_of(options.run)
    config = read_config(options.ours)
    heads, bf16 = config["model"]["heads"], config["model"]["precision"] == "bf16"
    starts, length, _ = read_batches(options.ours / "batches.bin")
    expect(len(starts) > step, f"batches of step {step} in {options.ours}", len(starts))
    device = torch.device(options.device)
    tokens = torch.from_numpy(read_tokens(options.tokens or Path(config["data"]["train"])).astype("int32"))
    rows = tokens[torch.from_numpy(starts[step].copy())[:, None] + torch.arange(length)].long().to(device)
    weights = read_safetensors(checkpoint / "model.safetensors")

    exact_loss, exact, exact_layers = passes(weights, heads, rows, causal_attention, torch.float64, False)
    attention = fp32_attention if options.attention == "fp32" else sdpa
    if options.attention != "fp32" and device.type == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if options.attention == "flash" else SDPBackend.MATH):
            torch_loss, theirs, torch_layers = passes(weights, heads, rows, attention, torch.float32, bf16)
    else:
        torch_loss, theirs, torch_layers = passes(weights, heads, rows, attention, torch.float32, bf16)
    line = next(line for line in read_steps(options.ours) if line["step"] == step)
    ours = our_gradients(options.ours, step, config["optimizer"], float(line["gradient_norm"]))

    found = {"run": options.run, "loss": {"fp64": exact_loss, "ours": float(line["loss"]), "pytorch": torch_loss}, "layers": [], "gradients": {}}
    print(f"loss: FP64 {exact_loss:.4f}, ours {float(line['loss']):.4f}, PyTorch {torch_loss:.4f}")
    print(f"{'':<34}{'ours':>10}{'PyTorch':>10}")
    for n, layer in enumerate(exact_layers):
        scores = layer["q"] @ layer["k"].transpose(-1, -2) / math.sqrt(layer["q"].shape[-1])
        means = (scores.tril().sum(-1) / torch.arange(1, scores.shape[-1] + 1)).abs().max().item()
        row = {"offset": means}
        capture = options.captures / f"layer-{n}.safetensors" if options.captures else None
        ours_layer = read_safetensors(capture) if capture and capture.exists() else None
        print(f"layer {n}, offset {means:.0f}")
        for name in ("q", "k", "v", "d_o"):
            count = len(ours_layer[name]) if ours_layer else 0
            row[name] = {"ours": distance(ours_layer[name], layer[name][:count]) if ours_layer else None, "pytorch": distance(torch_layers[n][name], layer[name])}
            print(f"  {name:<32}{row[name]['ours'] if ours_layer else math.nan:>10.2e}{row[name]['pytorch']:>10.2e}")
        found["layers"].append(row)
    exact, theirs, ours = parts(exact), parts(theirs), parts(ours)
    for name in exact:
        found["gradients"][name] = {"ours": distance(ours[name], exact[name]), "pytorch": distance(theirs[name], exact[name]),
                                    "norm": exact[name].norm().item(), "our_norm": ours[name].norm().item(), "torch_norm": theirs[name].norm().item()}  # fmt: skip
        print(f"gradient of {name:<22}{found['gradients'][name]['ours']:>10.2e}{found['gradients'][name]['pytorch']:>10.2e}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
