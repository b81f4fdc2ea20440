"""The record that a Monitor writes: one of a run that has failed, one in a folder that has an earlier one, a guard's without layers."""
import contextlib
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import warnings

from torch_cases import ROOT, TorchCase, evenkeel, exact, lines_of, lower, main, torch

from evenkeel import _library, _program, _records, _watch  # noqa: E402
from train_nano import Gpt  # noqa: E402

try:
    PROGRAM = _program.program_path()
except evenkeel.EvenkeelError:
    PROGRAM = None


def train(watcher, model, steps, growth=1.0):
    """Steps in which the scores of the second layer's first head grow by this factor each; the warnings of them."""
    x = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            with torch.no_grad():
                model.h[1].attn.c_attn.weight[:8] *= growth
                model.h[1].attn.c_attn.weight[16:24] *= growth
            loss = model(x, x)
            loss.backward()
            watcher.step(loss, lr=1e-3)
    assert all(one.filename == __file__ for one in caught), caught  # a warning names the line of the training
    return [str(one.message) for one in caught]


class Files(TorchCase):
    """The one reader of a run's files (_records)."""

    def test_what_is_torn_old_or_made_again_is_read(self):
        folder = self.folder()
        folder.mkdir(exist_ok=True)
        self.assertEqual(_records.read_steps(folder / "none"), [])
        (folder / "metrics.jsonl").write_text(
            '{"step": 1, "loss": 3.0, "largest_row_mean": [[1.0, "Infinity"]], "probe": {"residual_share": [[0.5, null]], "step": 1}}\n'
            '{"step": 0, "loss": "NaN", "offset": [[2.0]], "guard": {"kind": "warning", "plan": "NaN", "to": null}}\n'
            '[1, 2]\n7\n{"loss": 1.0}\n{"step": "x"}\n{"step": "Infinity"}\n{"step": Infinity}\nnot JSON\n'
            '{"step": 2, "loss": 9.0}\n{"step": 2, "loss": 2.5}\n{"step": 3, "lo')
        zero, one, two = _records.read_steps(folder)
        self.assertEqual((zero["step"], one["step"], two), (0, 1, {"step": 2, "loss": 2.5}))
        self.assertTrue(math.isnan(zero["loss"]))
        self.assertEqual(zero["guard"], {"kind": "warning", "plan": "NaN", "to": None})
        self.assertEqual(one["offset"], [[1.0, math.inf]])
        self.assertNotIn("largest_row_mean", one)
        self.assertEqual(one["probe"]["leak_size"][0][0], 0.5)
        self.assertTrue(math.isnan(one["probe"]["leak_size"][0][1]))
        self.assertEqual(_records.largest_offset([[1.0, math.nan], [3.0]]), math.inf)

    def test_what_is_written_is_read_again(self):
        line = _records.line_of({"step": 3, "loss": math.nan, "offset": [(1.5, -math.inf)], "name": "a"})
        self.assertEqual(line, '{"step": 3, "loss": "NaN", "offset": [[1.5, "-Infinity"]], "name": "a"}\n')
        self.assertEqual(_records.step_of(line)["offset"], [[1.5, -math.inf]])

    def test_a_schedule_is_that_of_its_table(self):
        folder = self.folder()
        folder.mkdir(exist_ok=True)
        self.assertEqual(_watch.schedule_of(folder), (0.0, 0))
        for text in ('[keel]\nlr = 5.0\nwarmup = 7\n\n[schedule]\nlr=0.01\nwarmup = 3 # steps\n', '[schedule]\nlr = 0.01\nwarmup = 3\n'):
            (folder / "config.toml").write_text(text)
            self.assertEqual(_watch.schedule_of(folder), (0.01, 3.0))
        self.assertEqual(_records._plain_config(text), _records.read_config(folder))
        for text in ("[schedule", "[schedule]\nlr = 0.01\n", "schedule = 3\n"):
            (folder / "config.toml").write_text(text)
            self.assertEqual(_watch.schedule_of(folder), (0.0, 0))


class Record(TorchCase):
    def model(self):
        torch.manual_seed(1)
        return Gpt(64, 32, layers=2, heads=2, width=16)

    def monitored(self, folder, steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor = evenkeel.Monitor(self.model(), folder, every=2, plan="flash2")
        with evenkeel.patched("flash2"), monitor:
            train(monitor, monitor.model, steps)
        return [str(one.message) for one in caught]

    @unittest.skipUnless(PROGRAM, "needs the program")
    def test_a_run_that_has_failed_is_told_so_and_gets_no_date(self):
        folder = self.folder()
        folder.mkdir(exist_ok=True)
        line = lambda step, loss: json.dumps({"step": step, "loss": loss, "offset": [[20.0, 5000.0 if step > 90 else 30.0]]}) + "\n"
        record = "".join(line(step, 4.0) for step in range(300))
        told = _watch._Forecast(folder)
        said = []
        for more in ("", "".join(line(step, 6.0) for step in range(300, 400)), line(400, 6.0)):
            record += more
            (folder / "metrics.jsonl").write_text(record)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(_watch.FORECAST_FIRST):
                    told.see_probe()
                numbers = told.numbers(wait=True)
            said.append(([str(one.message) for one in caught], numbers))
        (first, will), (second, has), (third, still) = said
        self.assertIn("failure near step", first[0])
        self.assertGreater(will["evenkeel/forecast_step"], 300)
        self.assertNotIn("evenkeel/failed_since", will)
        self.assertIn("has failed since about step 32", second[0])
        self.assertNotIn("evenkeel/forecast_step", has)
        self.assertTrue(300 < has["evenkeel/failed_since"] < 340, has)
        self.assertEqual(third, [])  # once is enough
        self.assertEqual(still["evenkeel/failed_since"], has["evenkeel/failed_since"])

    def test_a_training_from_the_beginning_has_its_own_record(self):
        folder = self.folder()
        self.assertEqual(self.monitored(folder, steps=6), [])
        first = (folder / "metrics.jsonl").read_text()
        (folder / "guard.jsonl").write_text('{"step": 4, "kind": "remedy", "heads": [[0, 0]], "plan": "", "words": "of the first"}\n')
        self.assertIn("before-1", self.monitored(folder, steps=4)[0])
        self.assertEqual([line["step"] for line in lines_of(folder)], list(range(4)))
        self.assertFalse((folder / "guard.jsonl").exists())
        self.assertEqual((folder / "before-1" / "metrics.jsonl").read_text(), first)
        self.assertTrue((folder / "before-1" / "guard.jsonl").exists())
        self.assertIn("before-2", self.monitored(folder, steps=2)[0])
        self.assertIn("head_size = 8", (folder / "config.toml").read_text())  # by which a forecast knows what is harmful

    def test_leaks_are_those_of_the_plan_that_runs(self):
        # Of our own attention the plan is known: nothing has to be said twice, and remedied heads do not leak.
        for plan, leaking in (("fp32,row_sum=e5m2", [True] * 4), ("fp32,row_sum=e5m2,stabiliser=zero_sum", [False] * 4), ("fp32", [False] * 4),
                              ("fp32,row_sum=e5m2; layer 1 head 0: stabiliser=zero_sum", [True, True, False, True])):
            folder, model = self.folder(), self.model()
            with evenkeel.patched(plan, model=model), evenkeel.Monitor(model, folder, every=1) as monitor:
                said = train(monitor, model, steps=12, growth=2.0)
            line = lines_of(folder)[0]
            ratio = [leak / delta for leaks, deltas in zip(line["leak_rms"], line["delta_rms"]) for leak, delta in zip(leaks, deltas)]
            self.assertEqual([one > 1e-5 for one in ratio], leaking, (plan, ratio))
            self.assertIn(f"plan = {json.dumps(plan)}", (folder / "config.toml").read_text())
            if leaking == [True] * 4:
                self.assertTrue(any("; next: go on from a checkpoint of before with evenkeel.patch(plan=" in words for words in said), said)
            # The captures of an alarm have the plan of each head, without clauses.
            for path in sorted(folder.glob("captures/*.safetensors")):
                layer = int(path.stem.rpartition("-")[2])
                plans = json.loads(path.read_bytes()[8:8 + int.from_bytes(path.read_bytes()[:8], "little")])["__metadata__"]["plans"]
                self.assertEqual(plans, "; ".join(_watch.plan_of_head(plan, layer, head) for head in range(2)))
                if PROGRAM:
                    self.assertEqual(subprocess.run([PROGRAM, "probe", str(path)], capture_output=True).returncode, 0, path)
            self.assertTrue(any(folder.glob("captures/*")), plan)
        # As the library reads it: with tabs, without blanks, without a plan of its own for the others.
        self.assertEqual(_watch.plan_of_head("flash2; layer0 head 0,2-3: stabiliser=zero_sum", 0, 3), "flash2,stabiliser=zero_sum")
        self.assertEqual(_watch.plan_of_head("flash2; layer\t0: stabiliser=zero_sum", 1, 3), "flash2")
        self.assertEqual(_watch.plan_of_head("layer 0: stabiliser=zero_sum", 1, 0), "fp32")
        text = ctypes.c_char_p()
        for plan, layer, head in ((None, 0, 0), (b"fp32", -1, 0), (b"fp32", 0, -1), (b"nonsense", 0, 0)):
            self.assertNotEqual(_library.library().evenkeel_plan_of_head(plan, layer, head, ctypes.byref(text)), 0, plan)
        self.assertNotEqual(_library.library().evenkeel_plan_of_head(b"fp32", 0, 0, None), 0)
        # What is not ours has what most kernels of its dtype do, unless it is said.
        folder, model = self.folder(), self.model()
        plain = lambda q, k, v, **_: exact(q, k, v, lower(16, 16))
        with unittest.mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", plain, create=True):
            with evenkeel.Monitor(model, folder, every=1) as monitor:
                train(monitor, model, steps=1)
        self.assertIn('plan = "fp32"', (folder / "config.toml").read_text())

    def test_clauses_for_layers_reach_their_layers(self):
        # Without the model every call would be one of layer 0.
        tokens = torch.arange(32).view(2, 16)

        def gradients(plan, **options):
            torch.manual_seed(1)
            model = self.model()
            with evenkeel.patched(plan, **({"model": model} if options.get("model") else {})):
                model(tokens, tokens).backward()
            return [p.grad.clone() for p in model.parameters()]

        same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a, b))
        plain, everywhere = gradients("fp32,row_sum=e5m2"), gradients("fp32,row_sum=e5m2,stabiliser=zero_sum")
        one = [gradients(f"fp32,row_sum=e5m2; layer {layer}: stabiliser=zero_sum", model=True) for layer in (0, 1)]
        self.assertFalse(any(same(a, b) for a, b in ((plain, everywhere), (one[0], plain), (one[1], plain), (one[0], one[1]), (one[0], everywhere))))
        self.assertTrue(same(gradients("fp32,row_sum=e5m2; layer 0-1: stabiliser=zero_sum", model=True), everywhere))
        self.assertTrue(same(gradients("fp32,row_sum=e5m2; layer 7: stabiliser=zero_sum", model=True), plain))
        for door in (evenkeel.patch, evenkeel.flash_attn.configure):
            self.assert_says(ValueError, lambda: door("fp32; layer 1: pv=bf16"), "without clauses for layers", "model=model")
        self.assert_says(ValueError, lambda: evenkeel.patch("fp32; layer 1: pv=bf16", model=torch.nn.Linear(2, 2)), "a list of layers")
        self.assert_says(ValueError, lambda: evenkeel.patch(stabiliser="zerosum"), "zerosum", "zero_sum")
        self.assertFalse(hasattr(getattr(torch.nn.functional, "scaled_dot_product_attention", None), "evenkeel_original"))

    def test_a_guard_says_that_it_replaces_a_patch(self):
        model = self.model()
        with evenkeel.patched(stabiliser="zero_sum"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            guard = evenkeel.Guard(model, None, self.folder(), every=1, plan="fp32,row_sum=e5m2")
            train(guard, model, steps=1)
            guard.close()
            self.assertTrue(any("expected no evenkeel.patch() before it" in str(one.message) for one in caught))
            self.assertEqual({call["plan"] for call in evenkeel.coverage()}, {"fp32,row_sum=e5m2"})

    def test_capture_says_what_it_expected(self):
        model, tokens = self.model(), torch.arange(32).view(2, 16)
        file = self.folder() / "layer0.safetensors"
        for run, words in ((tokens, "expected a model of transformers"), (lambda: (1, torch.zeros(())), "returns tuple"),
                           (lambda: torch.zeros(3), "of shape (3,)")):
            self.assert_says(TypeError, lambda: evenkeel.capture(model, run, 0, file), words, "lambda: model(x, y)[1]")

    def test_where_layers_are_not_known_the_remedy_goes_to_all(self):
        folder, model = self.folder(), self.model()
        guard = evenkeel.Guard(model, None, folder, every=1, plan="bf16_all")
        self.addCleanup(guard.close)
        guard._blocks = 7  # as of a model whose layers are in no list
        said = train(guard, model, steps=12, growth=2.0)
        event = [json.loads(line) for line in (folder / "guard.jsonl").read_text().splitlines()][0]
        self.assertEqual((event["kind"], event["plan"]), ("remedy", "head 0: stabiliser=zero_sum"))
        self.assertIn("head 0: stabiliser=zero_sum", guard.plan_now)
        self.assertTrue(any("expected a list of 2 layers" in words for words in said), said)
        self.assertTrue(any(words.startswith(f"evenkeel.Guard: step {event['step']}") for words in said), said)

    def test_attention_that_is_not_seen_is_said_with_what_to_do(self):
        class ByHand(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv = torch.nn.Linear(4, 12)

            def forward(self, x):
                q, k, v = self.qkv(x).chunk(3, -1)
                return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).square().mean()

        model = ByHand()
        with evenkeel.Monitor(model, self.folder(), every=1) as monitor, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = model(torch.randn(2, 5, 4))
            loss.backward()
            monitor.step(loss)
            self.assertIn("found no call. Attention that a model computes by hand", str(caught[0].message))
            self.assertIn("scaled_dot_product_attention", str(caught[0].message))
            self.assertEqual(caught[0].filename, __file__)  # the line of the training that called step()
            if PROGRAM:
                with self.assertRaises(evenkeel.EvenkeelError) as raised:
                    monitor.forecast()
                self.assertIn("expected recorded offsets", str(raised.exception))
                self.assertNotIn("{", str(raised.exception))  # words, not JSON

    def test_the_command_says_what_it_expected(self):
        from evenkeel.__main__ import main as command

        folder = self.folder()
        (folder / "of_mine.py").write_text("def number(): return 3\ndef training(): return 3, {0: 'a'}\n")
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(folder)
        (folder / "faulty.py").write_text("import os\nos.nothing\n")
        with self.assertRaises(AttributeError):  # of the module itself: its author wants the whole trace
            command(["isolate", "faulty:training", "runs/mine"])
        isolate = lambda name: ["isolate", name, "runs/mine"]
        conform = lambda name: ["conform", name]
        for arguments, name, words in ((isolate, "MODULE:FUNCTION", "no module 'MODULE'"), (isolate, "of_mine:nothing", "no 'nothing' in 'of_mine'"),
                                       (isolate, "of_mine:number", "returns int"), (isolate, "of_mine:training", "expected training.model"),
                                       (conform, "MODULE:FUNCTION", "no module 'MODULE'"), (conform, "of_mine:nothing", "no 'nothing' in 'of_mine'")):
            with tempfile.TemporaryFile("w+") as said, contextlib.redirect_stderr(said):  # a child process writes to it, too
                try:
                    code = command(arguments(name))
                except SystemExit as ended:
                    code = ended.code
                said.seek(0)
                text = said.read()
            self.assertEqual(code, 2, name)
            self.assertIn(words, text)
            self.assertIn("expected", text)

    def test_the_judged_function_cannot_end_its_judge(self):
        folder = self.folder()
        (folder / "of_mine.py").write_text("""import os, signal
def exits(q, k, v, is_causal): os._exit(0)
def is_ended(q, k, v, is_causal): signal.raise_signal(signal.SIGTERM)
def wrong(q, k, v, is_causal): return q.clone()
""")
        (folder / "exits_at_once.py").write_text("import os\nos._exit(0)\n")
        (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
        # A process of its own: a fork of this one would have no more than one of PyTorch's threads, and wait for the others.
        script = """import sys
from evenkeel._conform_command import main
for name in sys.argv[1:]:
    print(name, main([name, "--rows", "64", "--quick"]), flush=True)
"""
        names = ["of_mine:exits", "exits_at_once:f", "leaves:f", "of_mine:wrong", "of_mine:is_ended"]
        ended = subprocess.run([sys.executable, "-c", script, *names], cwd=folder, capture_output=True, text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
        self.assertEqual(ended.returncode, -signal.SIGTERM, ended.stderr)
        codes = [line for line in ended.stdout.splitlines() if line.split()[0] in names]
        self.assertEqual(codes, [f"{name} 1" for name in names[:-1]], ended.stdout + ended.stderr)
        self.assertEqual(ended.stderr.count("ERROR: expected a verdict, found a call that ended the process (exit code 0)"), 3)
        self.assertIn("ended by signal 15", ended.stderr)

    def test_an_older_library_is_named(self):
        class Older:
            def __getattr__(self, name):
                if name == "evenkeel_round":
                    raise AttributeError(name)
                return lambda *_: _library.ABI_VERSION

        with unittest.mock.patch.object(_library.ctypes, "CDLL", lambda path: Older()):
            self.assert_says(evenkeel.EvenkeelError, _library.library.__wrapped__, "as new as this package", "without evenkeel_round",
                             "pip install .")


if __name__ == "__main__":
    main()
