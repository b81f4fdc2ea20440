#!/usr/bin/env python3
"""FSDP2 on two CPU ranks, in torchtitan's manner: every block and the model sharded, records by one line. Exit code 77 where this
PyTorch has no fully_shard (2.6 or newer has).

    fsdp2.py [--steps 10] [--out runs/fsdp2]

Prints the largest difference to the records of the same training on one rank.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "examples"), str(ROOT / "examples")]

try:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except (ImportError, ValueError) as error:  # PyTorch 1.13's cannot be imported by Python 3.11
    print(f"skipped: no fully_shard here: {error}")
    sys.exit(77)

import evenkeel  # noqa: E402
from plain_loop import batches  # noqa: E402
from train_nano import Gpt  # noqa: E402


def train(steps, out, mesh=None):
    torch.manual_seed(1)
    model = Gpt(layers=2)
    if mesh is not None:
        for block in model.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = evenkeel.integrations.attach(model, optimizer, out, every=5)  # <- the run's records, on every rank
    for tokens, targets in batches("cpu", steps):  # the same on every rank, so that one rank has the same numbers
        optimizer.zero_grad(set_to_none=True)
        model(tokens, targets).backward()
        optimizer.step()
    monitor.close()


def rank(number, steps, out, meet):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=number, world_size=2)
    evenkeel.patch()  # <- our attention
    train(steps, out, init_device_mesh("cpu", (2,)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", default="runs/fsdp2")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return rank(options.rank, options.steps, options.out, options.meet)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, os.path.abspath(__file__), "--steps", str(options.steps), "--out", options.out, "--meet",
                   f"{scratch}/meet", "--rank"]
        ranks = [subprocess.Popen([*command, str(n)]) for n in range(2)]
        if any(process.wait() for process in ranks):
            sys.exit("a rank failed")
        evenkeel.patch()
        train(options.steps, f"{scratch}/one")
        read = lambda folder: [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]
        worst = 0.0
        for two, one in zip(read(options.out)[-options.steps :], read(f"{scratch}/one")):
            worst = max(worst, abs(two["loss"] - one["loss"]))
            for field in ("offset", "mean_lse"):
                for a, b in zip(sum(two.get(field, []), []), sum(one.get(field, []), [])):
                    worst = max(worst, abs(a - b) / max(1.0, abs(b)))
        print(f"{options.steps} steps on two ranks and on one: largest difference {worst:.1e}")
        if worst > 1e-3:
            sys.exit("expected the numbers of one rank")


if __name__ == "__main__":
    main()
