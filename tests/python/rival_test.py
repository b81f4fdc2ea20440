"""The rivals of `evenkeel bench attention --gpu --forms` answer in lines of JSON and say nothing else there, with a stand-in for PyTorch on a GPU. Python's
standard library only."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Every call takes 2 ms by its clock, and it talks.
TORCH = """
import types
print("a library that talks")
__version__, bfloat16 = "0.0", "bf16"
def zeros(*_, device): {zeros}
class Tensor:
    shape = (1, 1, 1, 1)
    def requires_grad_(self): return self
def randn(*_, **__): return Tensor()
def Generator(_): return types.SimpleNamespace(manual_seed=lambda seed: None)
def compile(function, dynamic): return function
autograd = types.SimpleNamespace(grad=lambda *_, **__: None)
class Event:
    def __init__(self, enable_timing): pass
    def record(self): pass
    def elapsed_time(self, _): return 8.0
cuda = types.SimpleNamespace(Event=Event, synchronize=lambda: None)
"""
ATTENTION = """
import contextlib, enum
class SDPBackend(enum.Enum): FLASH_ATTENTION, CUDNN_ATTENTION, EFFICIENT_ATTENTION = range(3)
@contextlib.contextmanager
def sdpa_kernel(backend):
    if backend != SDPBackend.CUDNN_ATTENTION: raise RuntimeError("not here")
    yield
"""
FLEX = """
def create_block_mask(sees, *_, device): return None
def flex_attention(*_, block_mask): return None
"""
FUNCTIONAL = "def scaled_dot_product_attention(*_, **__): pass\n"


class Rivals(unittest.TestCase):
    def ask(self, script, questions, zeros="return None"):
        with tempfile.TemporaryDirectory() as folder:
            nn = Path(folder) / "torch" / "nn"
            (nn / "attention").mkdir(parents=True)
            (nn.parent / "__init__.py").write_text(TORCH.format(zeros=zeros))
            (nn / "__init__.py").write_text("")
            (nn / "functional.py").write_text(FUNCTIONAL)
            (nn / "attention" / "__init__.py").write_text(ATTENTION)
            (nn / "attention" / "flex_attention.py").write_text(FLEX)
            (Path(folder) / "flash_attn.py").write_text("raise ImportError\n")
            text = "".join(json.dumps(question) + "\n" for question in questions)
            ended = subprocess.run([sys.executable, "-B", ROOT / "python" / script], input=text, capture_output=True, text=True,
                                   env={**os.environ, "PYTHONPATH": folder})
        return ended.returncode, [json.loads(line) for line in ended.stdout.splitlines()], ended.stderr

    def test_questions_are_answered_in_their_order(self):
        windows = [{"shape": [1, 2, 8, 4], "left": 3}, {"left": 3}, {"shape": [1, 2, 8, 4], "left": 3}]
        seconds = {"forward": 0.002, "backward": 0.002}
        self.assertEqual(self.ask("bench_windows.py", windows)[:2], (0, [{"torch": "0.0"}, seconds, {"error": "'shape'"}, seconds]))
        decoding = [{"shape": [1, 2, 1, 1, 8, 4]}, {"shape": [1]}]
        code, answers, said = self.ask("bench_decoding.py", decoding)
        self.assertEqual((code, answers[:2]), (0, [{"torch": "0.0"}, {"seconds": 0.002, "backend": "CUDNN_ATTENTION"}]), said)
        self.assertIn("not enough values", answers[2]["error"])
        self.assertIn("FLASH_ATTENTION: not here", said)

    def test_without_a_gpu_there_is_no_rival(self):
        for script in ("bench_windows.py", "bench_decoding.py"):
            code, answers, said = self.ask(script, [], zeros='raise RuntimeError("no device")')
            self.assertEqual((code, answers), (77, []))
            self.assertIn("no PyTorch with a GPU: no device", said)


if __name__ == "__main__":
    unittest.main()
