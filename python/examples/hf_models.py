#!/usr/bin/env python3
"""A small GPT-2 and a small Llama of Hugging Face transformers, trained with attn_implementation="evenkeel" and with "sdpa":
the losses are the same within rounding. Nothing is downloaded. Needs transformers 4.53 or newer; exit code 77 without.

    hf_models.py [--device cuda] [--bf16] [--steps 20]
"""
import argparse
import contextlib
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import evenkeel  # noqa: E402


def make(kind):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0.0,
                                          embd_pdrop=0.0, resid_pdrop=0.0))
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128))


def losses(kind, implementation, device="cpu", bf16=False, steps=20):
    """Of every step, on this file's own text."""
    model = make(kind).to(device).train()
    model.set_attn_implementation(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(pathlib.Path(__file__).read_bytes()[: 8 * 96 * 4]), device=device)
    batches = text[: len(text) // (4 * 96) * (4 * 96)].view(-1, 4, 96)
    told = []
    for step in range(steps):
        tokens = batches[step % len(batches)]
        with torch.autocast(device, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = model(tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


def compare(kind, device="cpu", bf16=False, steps=20):
    """The losses with SDPA, the losses with evenkeel."""
    evenkeel.hf.register()
    return [losses(kind, implementation, device, bf16, steps) for implementation in ("sdpa", "evenkeel")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"skipped: no transformers here: {error}")
        sys.exit(77)
    for kind in ("gpt2", "llama"):
        sdpa, ours = compare(kind, **vars(options))
        print(f"{kind:<6} loss {sdpa[0]:.4f} -> {sdpa[-1]:.4f} with sdpa, {ours[0]:.4f} -> {ours[-1]:.4f} with evenkeel, "
              f"largest difference {max(abs(a - b) for a, b in zip(sdpa, ours)):.1e}")


if __name__ == "__main__":
    main()
