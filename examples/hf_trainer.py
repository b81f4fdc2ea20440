#!/usr/bin/env python3
"""A transformers Trainer with our attention and our records. Nothing is downloaded; exit code 77 without transformers.

    hf_trainer.py [--steps 20] [--out runs/hf]
"""
import argparse
import pathlib
import sys
import tempfile

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "examples")]

try:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
except ImportError as error:
    print(f"skipped: no transformers here: {error}")
    sys.exit(77)

import evenkeel  # noqa: E402
from train_nano import own_text  # noqa: E402


class Text(torch.utils.data.Dataset):
    def __init__(self, length=64):
        text = torch.tensor(list(own_text()), dtype=torch.long)
        self.rows = text[: len(text) // length * length].view(-1, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, n):
        return {"input_ids": self.rows[n], "labels": self.rows[n]}


def train(steps, out):
    torch.manual_seed(1)
    evenkeel.hf.register()
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64)
    config._attn_implementation = "evenkeel"  # <- our attention
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(scratch, max_steps=steps, per_device_train_batch_size=4, learning_rate=3e-3, report_to=[],
                                      save_strategy="no", logging_steps=steps, disable_tqdm=True,
                                      use_cpu=not torch.cuda.is_available())
        Trainer(model, arguments, train_dataset=Text(),
                callbacks=[evenkeel.integrations.TrainerCallback(out, every=10)]).train()  # <- the run's records


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/hf")
    options = parser.parse_args()
    train(**vars(options))
    print(evenkeel.coverage())


if __name__ == "__main__":
    main()
