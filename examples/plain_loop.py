#!/usr/bin/env python3
"""A training loop in nanoGPT's manner. One line makes it a run that evenkeel can watch, judge and forecast; another one mends
heads that drift.

    plain_loop.py [--steps 60] [--out runs/plain] [--guard] [--device cuda --bf16]

Then: evenkeel verdict runs/plain, evenkeel forecast runs/plain, evenkeel report runs/plain -o page.html
"""
import argparse
import contextlib
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "examples")]

import evenkeel  # noqa: E402
from train_nano import Gpt, own_text  # noqa: E402


def batches(device, steps, sequences=4, context=64):
    """This project's own documentation, as bytes."""
    text = torch.tensor(list(own_text()), dtype=torch.long)
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = torch.stack([text[s : s + context + 1] for s in torch.randint(len(text) - context - 1, (sequences,), generator=draw)])
        yield rows[:, :-1].to(device), rows[:, 1:].to(device)


def train(steps, out, guard=False, device="cpu", bf16=False, every=20):
    evenkeel.patch()  # <- the remedy: our attention in the place of scaled_dot_product_attention
    torch.manual_seed(1)
    model = Gpt(layers=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    watched = evenkeel.integrations.watched(batches(device, steps), model, out, optimizer, guard, every=every)  # <- the run's records
    for tokens, targets in watched:
        with torch.autocast(device, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = model(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    evenkeel.unpatch()
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="runs/plain")
    parser.add_argument("--guard", action="store_true", help="heads that drift get the remedy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    losses = train(**vars(parser.parse_args()))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(evenkeel.coverage())


if __name__ == "__main__":
    main()
