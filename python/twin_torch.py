#!/usr/bin/env python3
"""Continues a recorded run in PyTorch: the same weights, optimiser state, batches and learning rates. Attention is one of
PyTorch's own kernels, or ours through evenkeel.patched(). So a failure is shown to be the arithmetic's, not
the trainer's, and a cure to be the kernel's.

    twin_torch.py RUN@STEP --out TWIN [--steps N] [--attention flash|cudnn|efficient|math|fp32|evenkeel] [--plan PLAN]
                  [--stabiliser NAME] [--batches FILE] [--tokens FILE] [--every N] [--device cuda|cpu]

RUN is a folder of `evenkeel train` with AdamW and a constant learning rate behind its warm-up; STEP one of its checkpoints.
It stops at step --steps (default: as many as the batches have). Another run's batches.bin can be given by --batches; steps
behind the record's end get the batches that RUN would have drawn by its seed.
--attention fp32 computes it by its definition in FP32; --plan and --stabiliser are for evenkeel. TWIN/metrics.jsonl has step, loss, gradient_norm and, every N
steps, largest_score and offset by layer and head, so that `evenkeel report RUN TWIN` shows both.
Exit codes: 0 done, 1 wrong input, 77 no PyTorch.
"""
import argparse
import contextlib
import math
import struct
import sys
from pathlib import Path

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

from check_model import causal_attention, gpt2_loss, read_safetensors

sys.path.insert(1, str(Path(__file__).resolve().parent / "evenkeel"))  # its records alone: the package needs the library
from _records import METRICS, line_of, read_config  # noqa: E402

BATCHES = struct.Struct("<8sqqq")  # "EKBATCH1", sequences, tokens a sequence, tokens of the source
PROBED_SEQUENCES = 8


def expect(condition, what, found):
    if not condition:
        sys.exit(f"{Path(sys.argv[0]).name}: expected {what}, found {found}")


def checkpoint_of(text):
    """RUN@STEP: the run's folder, the step, the checkpoint's folder."""
    run, _, step = text.rpartition("@")
    expect(run and step.isdigit(), "RUN@STEP", text)
    checkpoint = Path(run) / "checkpoints" / f"step-{int(step):08}"
    expect(checkpoint.is_dir(), "a checkpoint's folder", checkpoint)
    return Path(run), int(step), checkpoint


def read_batches(path):
    """(steps, sequences): where each sequence begins; tokens a sequence; tokens of the source."""
    data = path.read_bytes()
    expect(len(data) >= BATCHES.size and data.startswith(b"EKBATCH1"), f"a record of batches in {path}", f"{len(data)} bytes")
    _, sequences, tokens, source = BATCHES.unpack_from(data)
    steps = (len(data) - BATCHES.size) // (8 * sequences)
    return np.frombuffer(data, "<i8", steps * sequences, BATCHES.size).reshape(steps, sequences), tokens, source


def random_words(seed, steps, tensor, elements):
    """(steps, elements): src/numerics/random.h's random_bits of the streams of steps 0, 1, ... (Philox4x32-10)."""
    low = np.uint64(0xFFFFFFFF)
    element = np.arange(elements, dtype=np.uint64)[None, :]
    counter = element // np.uint64(64) * np.uint64(16) + element % np.uint64(16)
    step = np.arange(steps, dtype=np.uint64)[:, None]
    words = [np.broadcast_to(word, (steps, elements)) for word in (counter & low, counter >> np.uint64(32), np.uint64(tensor), step)]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]
        words = [second >> np.uint64(32) ^ words[1] ^ np.uint64(keys[0]), second & low, first >> np.uint64(32) ^ words[3] ^ np.uint64(keys[1]), first & low]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.choose(np.broadcast_to(element % np.uint64(64) // np.uint64(16), (steps, elements)).astype(np.int64), words)


def drawn_batches(seed, steps, sequences, tokens, source):
    """(steps, sequences): where `evenkeel train` with this seed begins its sequences (batch_offsets of src/training/token_file.cpp)."""
    words = random_words(seed, steps, 0x62617463, 2 * sequences)
    places, high, low = np.uint64(source - tokens + 1), words[:, 0::2], words[:, 1::2]
    expect(source - tokens + 1 < 2**32, "fewer than 2^32 tokens", source)
    # The high half of (high 2^32 + low) places, in 64 bits.
    return ((high * places + (low * places >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)


def batches_of(path, seed, steps):
    """(steps, sequences) from the record at `path`, and drawn where it ends; tokens a sequence. The drawn ones must agree with the record."""
    starts, tokens, source = read_batches(path)
    steps = steps or len(starts)
    if steps > len(starts):
        drawn = drawn_batches(seed, steps, starts.shape[1], tokens, source)
        expect(len(starts) > 0 and (drawn[: len(starts)] == starts).all(), f"batches drawn by seed {seed} in {path}", "others")
        starts = drawn
    return starts[:steps], tokens


def read_tokens(path):
    """nanoGPT's headerless uint16, which a prepared folder has in train.bin; of a folder of text, its files' bytes in the order of their paths."""
    if path.is_dir() and not (path / "train.bin").exists():
        files = sorted(str(file) for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        return np.concatenate([np.fromfile(file, np.uint8) for file in files]).astype(np.uint16)
    if path.is_dir():
        path /= "train.bin"
    expect(path.exists(), "a token file", path)
    return np.fromfile(path, np.uint16)


def fp32_attention(q, k, v):
    with torch.autocast(q.device.type, enabled=False):
        return causal_attention(q.float(), k.float(), v.float()).to(q.dtype)


def sdpa(q, k, v):
    """Looked up at every call: evenkeel.patched() puts another function there."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Twin(torch.nn.Module):
    """GPT-2 with weights by Hugging Face's names."""

    def __init__(self, weights, heads, attention):
        super().__init__()
        self.names = list(weights)
        self.values = torch.nn.ParameterList(torch.nn.Parameter(weights[name].float()) for name in self.names)
        self.heads, self.attention = heads, attention

    def weights(self):
        return dict(zip(self.names, self.values))

    def forward(self, tokens, targets):
        """tokens, targets (B, T); the loss."""
        return gpt2_loss(self.weights(), self.heads, tokens, targets, self.attention)


def facts(model, rows):
    """rows (B, T + 1). Largest score and largest |row mean| by layer and head, of q and k as the linear layers give them."""
    out = {"largest_score": [], "offset": []}

    def looking(q, k, v):
        s = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        T = s.shape[-1]
        visible = torch.ones(T, T, dtype=torch.bool, device=s.device).tril()
        means = (s * visible).sum(-1) / visible.sum(-1)
        out["largest_score"].append(s.masked_fill(~visible, -math.inf).amax((0, 2, 3)).tolist())
        out["offset"].append(means.abs().amax((0, 2)).tolist())
        return model.attention(q, k, v)

    with torch.no_grad():
        gpt2_loss(model.weights(), model.heads, rows[:, :-1], rows[:, 1:], looking)
    return out


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN@STEP")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--attention", choices=["flash", "cudnn", "efficient", "math", "fp32", "evenkeel"], default="flash")
    parser.add_argument("--plan")
    parser.add_argument("--stabiliser")
    parser.add_argument("--batches", type=Path)
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def settings_of(folder):
    """The run's settings, where this script can repeat them."""
    config = read_config(folder)
    for key in ("qk_norm", "sinks", "gated_attention", "softcap", "qk_clip"):
        expect(not config["model"].get(key), f"a plain GPT-2 without {key}", config["model"].get(key))
    expect(config["optimizer"]["kind"] == "adamw", "AdamW", config["optimizer"]["kind"])
    expect(config["schedule"]["course"] == "constant", "a constant learning rate", config["schedule"]["course"])
    return config


def adam_of(model, checkpoint, step, config, device):
    """AdamW with the checkpoint's moments."""
    optimizer = config["optimizer"]
    states = read_safetensors(checkpoint / "optimizer.safetensors")
    matrices = [name for name in model.names if model.weights()[name].dim() == 2]
    groups = [{"params": [model.weights()[n] for n in model.names if (n in matrices) == decay],
               "weight_decay": optimizer["weight_decay"] if decay else 0.0} for decay in (True, False)]
    adam = torch.optim.AdamW(groups, lr=config["schedule"]["lr"], betas=(optimizer["beta1"], optimizer["beta2"]),
                             eps=optimizer["epsilon"], **({"fused": True} if device.type == "cuda" else {}))
    for name, weight in model.weights().items():
        adam.state[weight] = {"step": torch.tensor(float(step), device=device if device.type == "cuda" else "cpu"),
                              "exp_avg": states[f"first.{name}"].float().to(device),
                              "exp_avg_sq": states[f"second.{name}"].float().to(device)}
    return adam


def attention_kernels(options, device):
    """The context in which torch's attention is what --attention names."""
    if options.attention == "evenkeel":
        import evenkeel

        return evenkeel.patched(options.plan, options.stabiliser)
    if options.attention == "fp32" or device.type != "cuda":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
             "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    return sdpa_kernel(kinds[options.attention])


def train(model, adam, batches, steps, config, options, record):
    """Trains steps[0] to steps[1] - 1; `batches(n)` is a step's rows of T + 1 tokens. Writes a line a step."""
    device, schedule = torch.device(options.device), config["schedule"]
    bf16 = config["model"]["precision"] == "bf16"
    run = torch.compile(model) if device.type == "cuda" else model
    waiting = []  # lines of steps: read together, so that no step waits for its numbers
    for n in range(*steps):
        rows = batches(n)
        lr = schedule["lr"] * min(1.0, (n + 1) / max(1, schedule["warmup"]))
        told = n % options.every == 0 or n + 1 == steps[1]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            seen = facts(model, rows[:PROBED_SEQUENCES]) if told else {}
            loss = run(rows[:, :-1], rows[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config["optimizer"]["clip"] or math.inf)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        adam.zero_grad(set_to_none=True)
        waiting.append({"step": n, "loss": loss.detach(), "gradient_norm": norm, "lr": lr} | seen)
        if not told:
            continue
        for line in waiting:
            line |= {"loss": float(line["loss"]), "gradient_norm": float(line["gradient_norm"])}
            record.write(line_of(line))
        record.flush()
        if n % (40 * options.every) == 0 or n + 1 == steps[1]:
            largest = [f"{max(layer):.4g}" for layer in waiting[-1]["offset"]]
            print(f"step {n}  loss {waiting[-1]['loss']:.4f}  offset by layer {' '.join(largest)}", flush=True)
        waiting.clear()


def main():
    options = parse_options()
    expect(options.device != "cuda" or torch.cuda.is_available(), "a PyTorch with a GPU (or --device cpu)", "none")
    folder, step, checkpoint = checkpoint_of(options.run)
    config = settings_of(folder)
    starts, length = batches_of(options.batches or folder / "batches.bin", config["data"]["seed"], options.steps)
    steps = len(starts)
    expect(step < steps, f"steps above {step}", steps)
    device, heads = torch.device(options.device), config["model"]["heads"]
    tokens = torch.from_numpy(read_tokens(options.tokens or Path(config["data"]["train"])).astype(np.int32)).to(device)
    starts = torch.from_numpy(starts.copy()).to(device)
    place = torch.arange(length, device=device)
    attention = fp32_attention if options.attention == "fp32" else sdpa
    model = Twin(read_safetensors(checkpoint / "model.safetensors"), heads, attention).to(device)
    adam = adam_of(model, checkpoint, step, config, device)
    options.out.mkdir(parents=True, exist_ok=True)
    with attention_kernels(options, device), open(options.out / METRICS, "w") as record:
        train(model, adam, lambda n: tokens[starts[n][:, None] + place].long(), (step, steps), config, options, record)


if __name__ == "__main__":
    main()
