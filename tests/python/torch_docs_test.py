"""Every python block of README.md and docs, run in order, a page at a time (docs_test.py has the marks and the rest of the rules).

The names that snippets take from their reader are made here: a model of two layers, 16 tokens of text, 3 steps, an optimiser, q, k, v,
an attention to judge. A judgement has 500 rows. What a block prints is compared with its lines that begin with "#> ", where it has
some."""
import contextlib
import functools
import io
import os
import unittest
import warnings
from unittest import mock

from torch_cases import ROOT, TorchCase, evenkeel, exact, lower, torch
from docs_test import PAGES, blocks
from train_nano import Gpt


def attention(q, k, v, is_causal=False):
    """In FP32 within: Debian's PyTorch has BF16 products that not every CPU can run."""
    visible = lower(q.shape[2], k.shape[2]) if is_causal else None
    return exact(q.float(), k.float(), v.float(), visible).to(q.dtype)


SHOWN = "#> "


class Snippets(TorchCase):
    def names(self):
        torch.manual_seed(1)
        model = Gpt(layers=2)
        tokens = torch.randint(0, 256, (2, 17))
        q, k, v = torch.randn(3, 1, 2, 16, 8)
        return {"torch": torch, "evenkeel": evenkeel, "model": model, "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "steps": 3, "lr": 1e-3, "q": q, "k": k, "v": v,
                "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "save": lambda step: None, "load": lambda step: None, "my_attention": attention}  # fmt: skip

    def test_python_blocks_run(self):
        count = 0
        self.addCleanup(os.chdir, os.getcwd())
        conform = mock.patch.object(evenkeel, "conform", functools.partial(evenkeel.conform, rows=500))
        conform.start()
        self.addCleanup(conform.stop)
        for page in PAGES:
            os.chdir(self.folder())
            names = self.names()
            for block in blocks((ROOT / page).read_text()):
                if block.language != "python" or block.reason:
                    continue
                count += 1
                with self.subTest(page=page, line=block.line), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with contextlib.redirect_stdout(io.StringIO()) as printed:
                        exec(compile(block.text, f"{page}:{block.line}", "exec"), names)
                    shown = [line[len(SHOWN):] for line in block.text.splitlines() if line.startswith(SHOWN)]
                    if shown:
                        self.assertEqual(shown, printed.getvalue().splitlines())
                with contextlib.suppress(RuntimeError):  # not patched
                    evenkeel.unpatch()
        self.assertGreater(count, 5)


if __name__ == "__main__":
    unittest.main()
