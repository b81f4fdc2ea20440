#!/usr/bin/env python3
"""A Lightning script with our attention and our records. Exit code 77 without Lightning.

    lightning_script.py [--steps 20] [--out runs/lightning]
"""
import argparse
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "examples"), str(ROOT / "examples")]

try:
    import lightning.pytorch as lightning
except ImportError:
    try:
        import pytorch_lightning as lightning
    except ImportError as error:
        print(f"skipped: no Lightning here: {error}")
        sys.exit(77)

import evenkeel  # noqa: E402
from plain_loop import batches  # noqa: E402
from train_nano import Gpt  # noqa: E402


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.gpt = Gpt(layers=2)

    def forward(self, tokens, targets):
        return self.gpt(tokens, targets)

    def training_step(self, batch, _):
        return self(*batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/lightning")
    options = parser.parse_args()
    evenkeel.patch()  # <- our attention
    trainer = lightning.Trainer(max_steps=options.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False,
                                callbacks=[evenkeel.integrations.LightningCallback(options.out, every=10)])  # <- the run's records
    # One loader of whole batches: Lightning takes a list as several loaders.
    trainer.fit(Model(), torch.utils.data.DataLoader(list(batches("cpu", options.steps)), batch_size=None))
    print(evenkeel.coverage())


if __name__ == "__main__":
    main()
