"""What the tests of the Python package share: the package itself or a clear skip, attention by its formula, a folder."""
import json
import os
import pathlib
import shutil
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "examples")]

try:
    import torch
except ImportError as error:
    print(f"skipped: no PyTorch here: {error}")
    sys.exit(77)

import evenkeel  # noqa: E402

torch.set_num_threads(1)  # the library has threads of its own


def exact(q, k, v, visible=None, scale=None):
    """Attention by its formula, for autograd; q (B, H, T, D), k, v (B, G, N, D), visible (T, N) or more."""
    wide = lambda t: t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)
    scores = q @ wide(k).transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ wide(v)


def lower(T, N):
    return torch.ones(T, N, dtype=torch.bool).tril()


def drawn(*shapes, dtype=torch.float32, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


def lines_of(folder):
    """Of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def with_gradients(fn, inputs, d_o=None):
    o = fn(*inputs)
    if d_o is None:
        d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(2)).to(o.dtype)
    return [o.detach(), *torch.autograd.grad(o, inputs, d_o)]


class TorchCase(unittest.TestCase):
    def folder(self):
        path = tempfile.mkdtemp(prefix="evenkeel-torch-")
        self.addCleanup(shutil.rmtree, path, ignore_errors=True)
        return pathlib.Path(path)

    def assert_near(self, found, expected, tolerance, words=""):
        """Largest error of each pair, relative to the pair's largest true value where that is above 1."""
        for n, (f, e) in enumerate(zip(found, expected)):
            self.assertEqual(f.shape, e.shape)
            error = (f.double() - e.double()).abs().max().item() / max(1.0, e.double().abs().max().item())
            self.assertLessEqual(error, tolerance, f"{words}: number {n} of the results is off by {error}")

    def assert_says(self, kind, call, *words):
        """call raises `kind` with all of the words: the function, what was expected, what was found."""
        with self.assertRaises(kind) as raised:
            call()
        for word in words:
            self.assertIn(word, str(raised.exception))


def main():
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, evenkeel {evenkeel.library_version()} "
          f"({os.fspath(evenkeel.library_path())})", flush=True)
    unittest.main(verbosity=1)
