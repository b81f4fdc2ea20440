"""evenkeel.Monitor, evenkeel.capture, evenkeel.conform and the examples, on the CPU; with transformers where it is."""
import contextlib
import importlib
import importlib.util
import io
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import types
import unittest
import unittest.mock
import warnings

from torch_cases import ROOT, TorchCase, evenkeel, exact, lines_of, lower, main, torch

import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from train_nano import Gpt, train  # noqa: E402

PROGRAM = os.environ.get("EVENKEEL_PROGRAM")  # the command; without it, what it says of our files is not asked


def tokens(rows=2, length=64, seed=1):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def read_capture(path):
    """name -> tensor, and the metadata."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata, found = header.pop("__metadata__"), {}
    for name, entry in header.items():
        begin, end = (8 + length + n for n in entry["data_offsets"])
        found[name] = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).reshape(entry["shape"])
    return found, metadata


class Captures(TorchCase):
    def setUp(self):
        self.model = Gpt(layers=2)
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(3)

    def test_a_capture_has_what_attention_read(self):
        path, x = self.folder() / "layer1.safetensors", tokens()
        with evenkeel.patched():
            loss = self.model(x, x)
            loss.backward()
            expected = self.model.h[1].attn.c_attn.weight.grad.clone()
            self.model.zero_grad(set_to_none=True)
            captured_loss = evenkeel.capture(self.model, lambda: self.model(x, x), 1, path, plan="bf16_all", step=7)
        self.assertEqual(captured_loss, float(loss.detach()))
        t, metadata = read_capture(path)
        self.assertEqual((metadata["step"], metadata["layer"], metadata["heads"], metadata["causal"]), ("7", "1", "0,1", "1"))
        self.assertEqual({name: tuple(v.shape) for name, v in t.items()}, {
            "q": (2, 2, 64, 32), "k": (2, 2, 64, 32), "v": (2, 2, 64, 32), "d_o": (2, 2, 64, 32), "x": (2, 64, 64),
            "w_q": (2, 64, 32), "w_k": (2, 64, 32), "w_v": (2, 64, 32)})
        # q is x W_Q, and the captured numbers give the gradient of W_Q that autograd found.
        self.assert_near([torch.einsum("btc,hcd->bhtd", t["x"], t["w_q"])], [t["q"]], 1e-5)
        q = t["q"].requires_grad_()
        (dq,) = torch.autograd.grad(exact(q, t["k"], t["v"], lower(64, 64)), q, t["d_o"])
        found = torch.einsum("btc,bhtd->hdc", t["x"], dq).reshape(64, 64)
        self.assertLess((found - expected[:64]).norm() / expected[:64].norm(), 1e-4)
        if PROGRAM:
            told = subprocess.run([PROGRAM, "probe", path, "--json"], capture_output=True, text=True)
            self.assertIn(told.returncode, (0, 1), told.stderr)
            json.loads(told.stdout)

    def test_a_capture_leaves_the_gradients_as_they_were(self):
        path, x = self.folder() / "c.safetensors", tokens()
        gradients = lambda: [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]

        def fails():
            self.model(x, x).backward()
            raise RuntimeError("in the middle of a pass")

        with evenkeel.patched():
            for _ in range(2):  # without gradients, then with some
                before = gradients()
                evenkeel.capture(self.model, lambda: self.model(x, x), 0, path)
                with self.assertRaises(RuntimeError):
                    evenkeel.capture(self.model, fails, 0, path)
                for found, expected in zip(gradients(), before, strict=True):
                    self.assertTrue(found is None if expected is None else torch.equal(found, expected))
                self.model(x, x).backward()

    def test_some_heads_and_bad_requests(self):
        path, x = self.folder() / "c.safetensors", tokens()
        with evenkeel.patched():
            run = lambda: self.model(x, x)
            evenkeel.capture(self.model, run, 0, path, heads=[1])
            t, metadata = read_capture(path)
            self.assertEqual((metadata["heads"], tuple(t["q"].shape), tuple(t["w_k"].shape)), ("1", (2, 1, 64, 32), (1, 64, 32)))
            self.assert_says(ValueError, lambda: evenkeel.capture(self.model, run, 2, path), "capture: expected a layer",
                             "found 2 and 2")
            for heads in ([2], [-1], [1, 0], []):
                self.assert_says(ValueError, lambda: evenkeel.capture(self.model, run, 0, path, heads=heads),
                                 "heads from 0 to 1", str(heads))
        with evenkeel.patched(), self.assertRaises(ValueError) as raised:  # attention over other keys than its rows
            side = torch.nn.Linear(4, 4)
            attend = lambda: F.scaled_dot_product_attention(*[side(torch.ones(1, 1, n, 4)) for n in (3, 5, 5)]).sum()
            evenkeel.capture(side, attend, 0, path)
        self.assertIn("keys of one sequence", str(raised.exception))


class Monitoring(TorchCase):
    def run_monitor(self, folder, steps=5, every=2, rows=48, plan="flash2"):
        model, x = Gpt(layers=2), tokens()
        with evenkeel.patched(plan), evenkeel.Monitor(model, folder, every=every, rows=rows, plan=plan) as monitor:
            for _ in range(steps):
                loss = model(x, x)
                loss.backward()
                monitor.step(loss, lr=1e-3, gradient_norm=2.5, tokens=x.numel())
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def test_the_trainers_keys(self):
        lines = self.run_monitor(self.folder())
        self.assertEqual([line["step"] for line in lines], [0, 1, 2, 3, 4])
        self.assertEqual([("probe" in line) for line in lines], [True, False, True, False, True])
        self.assertEqual((lines[0]["schema"], lines[0]["backend"]), (1, "pytorch"))
        self.assertGreater(lines[1]["tokens_per_second"], 0)
        self.assertEqual({"loss", "lr", "gradient_norm"} - set(lines[3]), set())
        probe = lines[2]["probe"]
        self.assertEqual((probe["sequences"], probe["rows"]), (1, 48))
        self.assertEqual((probe["step"], probe["loss"]), (2, lines[2]["loss"]))
        for name in ("largest_score", "row_mean", "offset", "mean_lse", "tied_rows", "leak_z", "norm_q",
                     "leak_share", "delta_error_running", "entropy"):
            self.assertEqual([len(layer) for layer in probe[name]], [2, 2], name)
            self.assertTrue(all(math.isfinite(x) for layer in probe[name] for x in layer), name)
        self.assertEqual(lines[2]["mean_lse"], probe["mean_lse"])
        self.assertEqual([len(layer) for layer in lines[1]["mean_lse"]], [2, 2])  # our own attention returns it at every step
        self.assertGreater(lines[1]["largest_lse"][0][0], lines[1]["mean_lse"][0][0])
        self.assertIn("h.1.attn.c_attn.weight[k]", probe["norms"])
        self.assertIn("wte.weight", probe["norms"])

    def test_numbers_are_the_definitions(self):
        torch.manual_seed(2)
        model, x, folder = Gpt(layers=1, heads=1), tokens(), self.folder()
        with torch.no_grad():
            model.h[0].attn.c_attn.weight.mul_(8)
        seen = {}
        model.h[0].attn.c_attn.register_forward_hook(lambda _m, _i, o: seen.update(qkv=o.detach()))
        with evenkeel.patched(), evenkeel.Monitor(model, folder, every=1, sequences=2) as monitor:
            loss = model(x, x)
            loss.backward()
            monitor.step(loss)
        line = json.loads((folder / "metrics.jsonl").read_text())
        q, k, _ = seen["qkv"].double().split(64, dim=2)
        scores = (q @ k.transpose(1, 2) / 8).masked_fill(~lower(64, 64), float("-inf"))
        near = lambda name, value: self.assertAlmostEqual(line[name][0][0] / value, 1, delta=2e-4, msg=name)
        near("mean_lse", scores.logsumexp(-1).mean().item())
        near("largest_score", scores.max().item())
        means = scores.masked_fill(~lower(64, 64), 0).sum(-1) / torch.arange(1, 65)
        near("offset", means.abs().max().item())
        norm = torch.linalg.matrix_norm(model.h[0].attn.c_attn.weight[:64].detach(), 2).item()
        self.assertAlmostEqual(line["probe"]["norms"]["h.0.attn.c_attn.weight[q]"] / norm, 1, delta=2e-4)
        self.assertAlmostEqual(line["probe"]["norm_q"][0][0] / norm, 1, delta=2e-4)

    def test_nothing_is_left_behind(self):
        before = getattr(F, "scaled_dot_product_attention", None)
        model, x = Gpt(layers=1), tokens()
        with evenkeel.patched():
            inside = F.scaled_dot_product_attention
            with evenkeel.Monitor(model, self.folder(), every=1) as monitor:
                with self.assertRaises(IndexError):
                    model(x + 1000, x)  # in the middle of a recorded forward pass
                loss = model(x, x)
                loss.backward()
                self.assertIs(F.scaled_dot_product_attention, inside)
                monitor.step(loss)
            self.assertEqual(len(model._forward_hooks) + len(model._forward_pre_hooks), 0)
            self.assertEqual(len(model.h[0].attn._forward_hooks) + len(model.h[0].attn._forward_pre_hooks), 0)
        self.assertIs(getattr(F, "scaled_dot_product_attention", None), before)

    def test_a_loss_that_is_not_finite_and_a_model_without_attention(self):
        folder, model = self.folder(), torch.nn.Linear(3, 3)
        with evenkeel.Monitor(model, folder, every=1) as monitor, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(1, 3)).sum().backward()
            monitor.step(float("nan"))
        self.assertTrue(any("expected layers of attention" in str(w.message) for w in caught))
        self.assertEqual(json.loads((folder / "metrics.jsonl").read_text())["loss"], "NaN")
        if PROGRAM:  # whose reader takes it for what it is
            told = subprocess.run([PROGRAM, "report", folder, "-o", folder / "page.html"], capture_output=True, text=True)
            self.assertEqual(told.returncode, 0, told.stderr)
            self.assertIn("the loss of step 0 is not finite", (folder / "page.html").read_text())
        self.assert_says(ValueError, lambda: evenkeel.Monitor(model, folder, every=0), "Monitor: expected every", "0")
        self.assert_says(TypeError, lambda: evenkeel.Monitor(3, folder), "Monitor: expected a torch.nn.Module", "int")

    def test_gradients_that_are_not_finite_are_no_failure_of_the_run(self):
        """A step that loss scaling skips: its loss and its forward pass are as ever."""
        model, x, folder = Gpt(layers=2), tokens(), self.folder()
        with evenkeel.patched(), evenkeel.Monitor(model, folder, every=5) as monitor:
            for step in range(21):
                model.zero_grad(set_to_none=True)
                loss = model(x, x)
                (loss * (math.inf if step == 20 else 1)).backward()
                monitor.step(loss, lr=1e-3)
        line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        self.assertGreater(line["probe"]["nonfinite"][0][0], 0)
        for name in ("offset", "largest_lse", "mean_lse"):
            self.assertTrue(all(isinstance(x, float) and math.isfinite(x) for layer in line["probe"][name] for x in layer), name)
        if PROGRAM:
            for command in ("verdict", "forecast"):
                told = subprocess.run([PROGRAM, command, folder], capture_output=True, text=True)
                self.assertEqual(told.returncode, 0, told.stdout + told.stderr)
                self.assertNotIn("not finite", told.stdout)

    def test_records_are_not_written_through_links(self):
        precious = self.folder() / "precious"
        precious.write_text("precious\n")
        words = "or nothing, found a symbolic link: a run is not written through links"
        for name in ("metrics.jsonl", "guard.jsonl", ".config.toml.partial"):
            folder = self.folder()
            (folder / name).symlink_to(precious)
            self.assert_says(OSError, lambda: evenkeel._records.open_record(folder / name, "a"), "expected a regular file", words, name)
            if name == "metrics.jsonl":
                self.assert_says(OSError, lambda: evenkeel.Monitor(torch.nn.Linear(3, 3), folder, first_step=3), "symbolic link")
            self.assertEqual(precious.read_text(), "precious\n")

    def test_the_example_derails_and_with_the_remedy_does_not(self):
        # Two texts: so short a run drifts with some, by chance. Row sums that are always too small make it likely: on four
        # courses (run_test.sh) the largest offset was 13 to 165 times that with the remedy; rounded to nearest, 2 to 27 times.
        folder, steps, coarse = self.folder(), 251, "fp32,row_sum=e5m1/toward_zero"
        if not PROGRAM:
            self.skipTest("expected EVENKEEL_PROGRAM, which makes the text")
        small = dict(layers=2, heads=1, width=32, context=32, sequences=4, peak=2e-2, warmup=20)
        offsets = {None: [], "zero_sum": []}
        for seed in ("4", "7"):
            file = folder / f"text-{seed}"
            subprocess.run([PROGRAM, "data", "synth", "--out", file, "--bytes", "12000", "--seed", seed], check=True)
            for stabiliser, found in offsets.items():
                found.append(train(coarse, stabiliser, steps, folder / f"{stabiliser}-{seed}", every=50, text=file.read_bytes(), say=None,
                                   **small)[1][steps - 1])
        derailed, kept = map(max, offsets.values())
        print(f"  largest offset of two runs: {derailed:.1f}, with the remedy {kept:.1f}")
        self.assertGreater(derailed, 5 * kept)
        self.assertLess(kept, 100)


class Conform(TorchCase):
    def test_the_judge_finds_planted_faults_and_is_quiet_elsewhere(self):
        plain = lambda q, k, v, is_causal: exact(q, k, v, lower(q.shape[2], k.shape[2]) if is_causal else None)
        judged = lambda fn, **o: evenkeel.conform(fn, dtype=torch.float32, rows=640, **o)
        families = ["random", "ties_2_tail", "one_row", "odd_rows", "loss_feedback"]
        report = judged(plain, families=families, name="plain")
        self.assertTrue(report.passes, str(report))
        self.assertIn("verdict: pass", str(report))
        self.assertIn("plain", report.summary())

        class Leaky(torch.autograd.Function):  # every row of dS sums to a little more than 0: dQ moves along the keys' constant
            @staticmethod
            def forward(ctx, q):
                return q.clone()

            @staticmethod
            def backward(ctx, gradient):
                return gradient + 1e-3

        report = judged(lambda q, k, v, is_causal: plain(Leaky.apply(q), k, v, is_causal), families=families)
        self.assertFalse(report.passes)
        self.assertTrue(all(r["verdict"] == "WRONG, NOISY" and r["residual_mean"] > 0 for r in report.results), str(report))
        report = judged(lambda q, k, v, is_causal: plain(q, k, v, is_causal) * float("nan"), families=["random"])
        self.assertEqual(report.results[0]["verdict"], "NOT FINITE")

    def test_flash2_is_found_biased_and_its_remedy_is_not(self):
        ours = lambda plan: lambda q, k, v, is_causal: evenkeel.attention(q, k, v, is_causal, plan=plan)
        report = evenkeel.conform(ours("flash2"), families=["ties_2_tail"])
        self.assertIn("BIASED", report.results[0]["verdict"], str(report))
        report = evenkeel.conform(ours("flash2,stabiliser=zero_sum"), families=["ties_2_tail"])
        self.assertTrue(report.passes, str(report))

    def test_masks_exceptions_and_bad_requests(self):
        masked = lambda q, k, v, is_causal, attn_mask=None: evenkeel.attention(q, k, v, plan="fp32", attn_mask=attn_mask)
        report = evenkeel.conform(masked, dtype=torch.float32, rows=640, families=["masked_rows"])
        self.assertTrue(report.passes, str(report))
        report = evenkeel.conform(lambda q, k, v, is_causal: 1 / 0, rows=64, families=["random"])
        self.assertEqual(report.results[0]["verdict"], "ERROR: ZeroDivisionError: division by zero")
        self.assertEqual((report.verdict, report.passes), ("ERROR", False))
        # A function that ends its process is judged, too, with the families alone and with forms.
        ends = lambda q, k, v, is_causal: sys.exit(0)
        self.assertEqual(evenkeel.conform(ends, rows=64, families=["random"]).results[0]["verdict"], "ERROR: SystemExit: 0")
        report = evenkeel.conform(ends, quick=True, rows=0, shrink=False)
        self.assertEqual((report.passes, report.verdict), (False, "ERROR: the kernel raised: SystemExit: 0"))
        report = evenkeel.conform(lambda q, k, v, is_causal: q[:, :1], rows=640, families=["random"])
        self.assertIn("ERROR: TypeError: expected a tensor of shape", report.results[0]["verdict"])
        self.assertFalse(report.passes)
        self.assert_says(ValueError, lambda: evenkeel.conform(masked, families=["x"]), "conform: expected families", "'x'")
        self.assert_says(TypeError, lambda: evenkeel.conform(3), "conform: expected a function", "int")
        self.assert_says(TypeError, lambda: evenkeel.conform(masked, dtype=torch.int8), "found torch.int8")
        self.assert_says(ValueError, lambda: evenkeel.conform(masked, rows=0, families=["random"]), "rows", "0")
        self.assert_says(ValueError, lambda: evenkeel.conform(masked, families=[]), "at least one family")
        self.assert_says(TypeError, lambda: evenkeel.conform(lambda q, k, v: q), "is_causal", "(q, k, v)")

    def test_forms_are_judged_named_and_repeated(self):
        def attend(q, k, v, is_causal=False, attn_mask=None, window_size=(-1, -1), enable_gqa=False, wider=0):
            if v.shape[-1] != q.shape[-1]:
                raise NotImplementedError
            T, N = q.shape[2], k.shape[2]
            i, j = torch.arange(T)[:, None], torch.arange(N)[None]
            seen = (j <= i) if is_causal else torch.ones(T, N, dtype=torch.bool)
            if window_size[0] >= 0:
                seen = seen & (j >= i - window_size[0] - wider)
            if window_size[1] >= 0:
                seen = seen & (j <= i + window_size[1])
            group = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            return evenkeel.attention(q, k, v, plan="fp32" if q.dtype == torch.float32 else "flash2,stabiliser=zero_sum",
                                      attn_mask=seen if attn_mask is None else seen & attn_mask)

        def wide(q, k, v, is_causal=False, window_size=(-1, -1)):
            return attend(q, k, v, is_causal, window_size=window_size, wider=1)

        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "failing.safetensors"
            right = lambda q, k, v, is_causal=False, window_size=(-1, -1): attend(q, k, v, is_causal, window_size=window_size)
            report = evenkeel.conform(right, quick=True, rows=0)
            self.assertTrue(report.passes, str(report))
            self.assertIn("sinks: yes", report.forms["not_judged"])
            self.assertIn("value head size: another", report.forms["not_judged"])
            single = evenkeel.conform(right, dtype=torch.float32, quick=True, rows=0)
            self.assertTrue(single.passes, str(single))
            self.assertGreater(single.forms["judged"], 30)
            report = evenkeel.conform(wide, quick=True, rows=0, failing=file)
            self.assertFalse(report.passes)
            self.assertIn("the window is one key too wide (left)", report.verdict)
            self.assertIn("again:", str(report))
            report.save(file.with_suffix(".json"), file.with_suffix(".xml"), file.with_suffix(".svg"))
            self.assertIn("<failure", file.with_suffix(".xml").read_text())
            self.assertFalse(evenkeel.conform(wide, case=file).passes)
            self.assertTrue(evenkeel.conform(right, case=file).passes)
            raises = evenkeel.conform(lambda q, k, v, is_causal: 1 / 0, quick=True, rows=0)
            self.assertEqual(raises.verdict, "ERROR: the kernel raised: ZeroDivisionError: division by zero")
            self.assertIn(": " + raises.verdict, str(raises).splitlines()[0])
            self.assertFalse(raises.passes)
            writes = lambda q, k, v, is_causal: (right(q, k, v, is_causal), k.data.add_(1))[0]
            self.assertIn("wrote into its inputs", str(evenkeel.conform(writes, quick=True, rows=0)))

            def interrupted(q, k, v, is_causal):
                raise KeyboardInterrupt
            with self.assertRaises(KeyboardInterrupt):
                evenkeel.conform(interrupted, quick=True, rows=0)

    def test_no_null_kernel_passes(self):
        every = [family for family, (_, masked) in evenkeel.conform_families().items() if not masked]
        nulls = {"zeros": lambda q, k, v, causal: 0 * (q + k.sum() + v.sum()),
                 "q": lambda q, k, v, causal: q + 0 * (k.sum() + v.sum()),
                 "a million": lambda q, k, v, causal: 1e6 + 0 * (q + k.sum() + v.sum())}
        for name, null in nulls.items():
            report = evenkeel.conform(null, dtype=torch.float32, rows=64, families=every, name=name)
            self.assertEqual(report.verdict, "FAIL")
            for r in report.results:
                self.assertFalse(r["passes"], f"{name} on {r['family']}: {r['verdict']}")
        self.assertIn("WRONG", str(report))
        self.assertIn("times as far from FP64", "\n".join(report.what_to_fix()))

    def test_kernels_that_compute_nothing_fail_over_forms(self):
        judged = lambda fn: evenkeel.conform(fn, quick=True, rows=0, shrink=False)
        nulls = {"raises": lambda q, k, v, is_causal: 1 / 0,
                 "NaN": lambda q, k, v, is_causal: q * float("nan") + 0 * (k.sum() + v.sum()),
                 "a view of its input": lambda q, k, v, is_causal: v[:, :, :q.shape[2]],
                 "its input": lambda q, k, v, is_causal: q,
                 "None": lambda q, k, v, is_causal: None,
                 "without a gradient": lambda q, k, v, is_causal: q.detach(),
                 "takes nothing": lambda is_causal: None,
                 "takes q alone": lambda q, is_causal: q}
        for name, null in nulls.items():
            report = judged(null)
            self.assertFalse(report.passes, name)
            # What raises is an error, also where that is on some forms alone.
            verdict = "FAIL" if report.raised is None else "ERROR: the kernel raised: "
            self.assertTrue(report.verdict.startswith(verdict), (name, report.verdict))
        # A kernel that refuses everything is not judged, and that is no pass.
        for words in ("head size must be 96", "this type is not supported", ""):
            def refuses(q, k, v, is_causal=False):
                raise NotImplementedError if not words else ValueError(words)
            report = judged(refuses)
            self.assertFalse(report.passes)
            self.assertEqual(report.forms["judged"], 0)
            self.assertEqual(report.refused, [f"ValueError: {words}"] if words else [])
            self.assertEqual(report.verdict, "nothing was judged")

    def test_what_a_kernel_refuses_in_words_is_not_offered(self):
        def attend(q, k, v, is_causal=False):
            if v.shape[-1] != q.shape[-1]:
                raise RuntimeError(f"v must have shape {tuple(k.shape)}")
            return evenkeel.attention(q, k, v, is_causal, plan="flash2,stabiliser=zero_sum")

        report = evenkeel.conform(attend, quick=True, rows=0)
        self.assertTrue(report.passes, str(report))
        self.assertIn("value head size: another", report.forms["not_judged"])
        self.assertIn("RuntimeError: v must have shape", str(report))

        def breaks(q, k, v, is_causal=False):
            if v.shape[-1] != q.shape[-1]:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return attend(q, k, v, is_causal)
        report = evenkeel.conform(breaks, quick=True, rows=0, shrink=False)
        self.assertFalse(report.passes)
        self.assertIn("illegal memory access", report.raised)

    def test_files_to_judge(self):
        attend = lambda q, k, v, is_causal=False, scale=None: evenkeel.attention(
            q, k, v, is_causal, plan="flash2,stabiliser=zero_sum", scale=scale)
        capture = ROOT / "tests" / "captures" / "ties.safetensors"
        self.assertTrue(evenkeel.conform(attend, case=capture).passes)
        self.assertFalse(evenkeel.conform(lambda q, k, v, is_causal=False, scale=None: v, case=capture).passes)
        empty = self.folder() / "empty.safetensors"
        empty.write_bytes(b"")
        with self.assertRaisesRegex(Exception, "empty.safetensors"):
            evenkeel.conform(attend, case=empty)

    def test_the_documented_signatures_work(self):
        plain = lambda q, k, v, is_causal: exact(q, k, v, lower(q.shape[2], k.shape[2]) if is_causal else None)
        signatures = [lambda q, k, v, causal: plain(q, k, v, causal), lambda q, k, v, is_causal: plain(q, k, v, is_causal),
                      lambda a, b, c, d: plain(a, b, c, d), lambda *a: plain(*a),
                      lambda q, k, v, **options: plain(q, k, v, options["is_causal"]),
                      lambda q, k, v, *, causal: plain(q, k, v, causal)]
        for fn in signatures:
            report = evenkeel.conform(fn, dtype=torch.float32, rows=64, families=["random", "odd_rows"])
            self.assertTrue(report.passes, str(report))

    def test_columns_never_touch(self):
        wide = {"family": "a" * 17, "rows": 12345678, "passes": False, "verdict": "FAIL", "what_to_fix": "x",
                **{key: -1.23456e-123 for key in ("residual_mean", "residual_allowed", "residual_rms", "residual_bound")},
                **{key: -98765432.1 for key in ("residual_z", "o_bias", "o_z", "dq_bias", "dq_z")}}
        report = type(evenkeel.conform(lambda q, k, v, causal: q, rows=64, families=["random"]))("b" * 40, [wide])
        cells = next(line for line in str(report).splitlines() if "a" * 17 in line).split()
        self.assertEqual(len(cells), 12, cells)  # seven, two biases with their z, the verdict
        self.assertEqual(report.summary().split()[:2], ["b" * 40, "FAIL"])

    def test_an_interrupt_is_an_interrupt_and_progress_is_told(self):
        def interrupted(q, k, v, causal):
            raise KeyboardInterrupt
        with self.assertRaises(KeyboardInterrupt):
            evenkeel.conform(interrupted, rows=64, families=["random"])
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            evenkeel.conform(lambda q, k, v, causal: q, rows=64, families=["random", "sink"], progress=True)
        self.assertEqual(told.getvalue().count("\n"), 2)
        self.assertIn("1 of 2, random", told.getvalue())


class Scoreboard(TorchCase):
    def board(self, folder, *arguments):
        return subprocess.run([sys.executable, ROOT / "scripts" / "scoreboard", *arguments, "--out", folder / "page.md", "--json",
                               folder / "found.json"], capture_output=True, text=True)

    def test_a_kernel_that_crashes_does_not_end_the_others(self):
        folder = self.folder()
        (folder / "kernels.py").write_text("import os\n"
                                           "def crash(q, k, v, is_causal=False): os.abort()\n"
                                           "def no_mask(q, k, v): return q\n"
                                           "KERNELS = {'mine: crash': crash, 'mine: no mask': no_mask, 'mine: absent': 'not here'}\n")
        done = self.board(folder, "--device", "cpu", "--with", folder / "kernels.py", "--only", "mine", "--jobs", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads((folder / "found.json").read_text())["kernels"]
        self.assertIn("code -6", found["mine: crash"]["why_not"])
        self.assertIn("is_causal (or causal)", found["mine: no mask"]["why_not"])
        self.assertEqual(found["mine: absent"]["why_not"], "not here")
        self.assertIn("| mine: crash | not judged: its process ended", (folder / "page.md").read_text())

    def test_records_are_merged(self):
        judged = lambda verdict: {"verdict": verdict, "forms": {"judged": 3, "failed": 0}, "seconds": 1, "date": "2026-01-01"}
        record = lambda machine, **kernels: json.dumps({"machine": {"device": machine}, "kernels": kernels})
        folder = self.folder()
        (folder / "found.json").write_text(record("a", old=judged("first"), kept=judged("kept"), late={"why_not": "slow"}))
        (folder / "new.json").write_text(record("a", old=judged("second"), kept={"why_not": "no time"}, late=judged("done")))
        done = self.board(folder, "--merge", folder / "new.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads((folder / "found.json").read_text())["kernels"]
        self.assertEqual({name: entry.get("verdict") for name, entry in found.items()},
                         {"old": "second", "kept": "kept", "late": "done"})
        page = (folder / "page.md").read_text()
        self.assertIn("| old | second | 3 / 0 |", page)
        self.assertIn("2026-01-01", page)
        self.assertEqual(self.board(folder, "--merge", folder / "nothing.json").returncode, 2)

    def test_what_was_not_judged_is_grouped_and_reports_are_links(self):
        folder = self.folder()
        entry = {"verdict": "pass", "seconds": 1, "families_not_judged": ["sink: not offered"],
                 "forms": {"judged": 3, "failed": 0, "not_judged": ["type: fp16", "mask: window", "type: fp32", "2 of 9 forms",
                                                                    "the conditions of pytorch 1, trl 2 (a mask)", "the conditions of elsewhere 3 (scores)"]}}
        (folder / "new.json").write_text(json.dumps({"machine": {"device": "a"}, "kernels": {"mine": entry}}))
        self.assertEqual(self.board(folder, "--merge", folder / "new.json").returncode, 0)
        page = (folder / "page.md").read_text()
        reports = "[`pytorch 1`](https://github.com/pytorch/pytorch/issues/1), [`trl 2`](https://github.com/huggingface/trl/issues/2), `elsewhere 3`"
        self.assertIn(f"- type: fp16, fp32; mask: window\n- conditions of {reports}\n- families: sink\n- 2 of 9 forms\n", page)

    def test_each_kernel_is_granted_its_own_plan(self):
        import scoreboard_kernels

        kernels = scoreboard_kernels.contestants("cpu")
        for name, contestant in kernels.items():
            if name.startswith("evenkeel"):
                self.assertTrue(name.endswith(contestant.plan) and contestant.aligned, name)
            else:
                self.assertIsNone(contestant.plan, name)
        # The row sum of `consistent` is that of rounded probabilities: within its plan's bound, beyond flash2's.
        consistent = kernels["evenkeel flash2,stabiliser=consistent"]
        judged = lambda plan: evenkeel.conform(consistent.fn, quick=True, rows=0, plan=plan, aligned=True, shrink=False)
        report = judged(consistent.plan)
        self.assertTrue(report.passes, str(report))
        self.assertFalse(judged(None).passes)


class Batches(TorchCase):
    def test_of_large_texts_they_are_those_of_the_definition(self):
        """batch_offsets of src/training/token_file.cpp: the high half of 64 random bits times the places, here in whole numbers. In
        small texts the low 32 bits hardly ever matter; pytorch_test compares those with a run's."""
        import twin_torch

        source, tokens = 4_000_000_000, 1025
        words = twin_torch.random_words(7, 50, 0x62617463, 32).tolist()
        expected = [[(high << 32 | low) * (source - tokens + 1) >> 64 for high, low in zip(row[0::2], row[1::2])] for row in words]
        self.assertEqual(twin_torch.drawn_batches(7, 50, 16, tokens, source).tolist(), expected)


class FieldStory(TorchCase):
    """The judgement of python/field_story.py on planted courses; the story itself takes a minute (its size tiny)."""

    def judged(self, story, folder=None):
        import field_story

        with contextlib.redirect_stdout(io.StringIO()) as said:
            return field_story.judged(story, folder or self.folder()), said.getvalue()

    def losses(self, bad_from):
        """A folder with the records of both runs, 1,000 steps; the unguarded one's loss is a tenth higher from a step on."""
        folder = self.folder()
        for run, begin in (("unguarded", bad_from), ("guarded", 1000)):
            (folder / run).mkdir()
            (folder / run / "metrics.jsonl").write_text("".join(
                json.dumps({"step": step, "loss": 3.3 if step >= begin else 3.0}) + "\n" for step in range(1000)))
        return folder

    def test_what_holds_and_what_does_not(self):
        import field_story

        flat = {step: 10.0 for step in range(0, 1000, 25)}
        grown = {step: 10.0 * (1.02 ** max(0, step - 500)) for step in flat}
        self.assertIsNone(field_story.course(flat)["drift_from"])
        self.assertEqual(field_story.course(grown)["drift_from"], 625)  # 1.02^125 is 12, 1.02^100 is 7
        back = {**grown, 975: 11.0}
        self.assertIsNone(field_story.course(back)["drift_from"])  # it came back
        interval = {"earliest": 400, "latest": 2000}
        told = [{"at": 100, "failure_at": 300, **interval}, {"at": 200, "failure_at": None}, {"at": 300, "failure_at": 900, **interval}]
        self.assertEqual(field_story.lasting(told)["at"], 300)
        self.assertIsNone(field_story.lasting(told[:2]))
        self.assertIsNone(field_story.lasting([]))
        story = {"unguarded": {"forecasts": told, "alarms": [{"step": 250, "heads": [[1, 2]]}], "worst_head": [1, 2], "steps": 1000, **field_story.course(grown)},
                 "guarded": {"in": "a loop", "events": [{"step": 600, "kind": "remedy", "heads": [[1, 2]]}], "steps": 1000, **field_story.course(flat)},
                 "isolate": {"verdict": {"cause": "drift", "sites": ["output"], "words": "Drift"}}, "seconds": 1}
        folder = self.losses(bad_from=600)
        code, said = self.judged(story, folder)
        self.assertEqual(code, 0, said)
        self.assertIn("| the loss | 800 |", said)
        self.assertIn("NO   Monitor's forecast", self.judged(story, self.losses(bad_from=0))[1])  # it came too late
        self.assertEqual(self.judged({})[0], 3)  # nothing ran
        self.assertEqual(self.judged({**story, "isolate": {"failed": "code 1"}})[0], 3)
        for part, change, words in (("unguarded", field_story.course(flat), "NO   the unguarded run drifts"),
                                    ("unguarded", {"forecasts": told[:2]}, "NO   Monitor's forecast"),
                                    ("guarded", {"events": []}, "NO   Guard remedied"),
                                    ("guarded", field_story.course(grown), "NO   the guarded run's offset"),
                                    ("guarded", {"steps": 1500}, "NO   the guarded run ended"),
                                    ("isolate", {"verdict": {"cause": "healthy", "sites": []}}, "NO   isolate")):
            code, said = self.judged({**story, part: {**story[part], **change}}, folder)
            self.assertEqual(code, 1, said)
            self.assertIn(words, said)


class HuggingFace(TorchCase):
    def setUp(self):
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            self.skipTest(f"no transformers here: {error}")

    def test_gpt2_and_llama(self):
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        evenkeel.hf.register("evenkeel_fp32", plan="fp32")
        models = (GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.0,
                                             embd_pdrop=0.0, resid_pdrop=0.0)),
                  LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                               num_attention_heads=4, num_key_value_heads=2)))
        x = tokens(2, 24)
        mask = torch.ones_like(x)
        mask[1, -7:] = 0
        for model in models:
            for padding in (None, mask):
                losses = []
                for implementation in ("sdpa", "evenkeel_fp32"):
                    model.set_attn_implementation(implementation)
                    losses.append(model(x, attention_mask=padding, labels=x).loss.item())
                self.assertAlmostEqual(*losses, delta=1e-5)
            for implementation in ("sdpa", "eager", "evenkeel_fp32"):
                model.set_attn_implementation(implementation)
                path = self.folder() / "c.safetensors"
                evenkeel.capture(model, x, 1, path, heads=[1])
                self.assertEqual(tuple(read_capture(path)[0]["w_k"].shape[:1]), (1,))



    def test_the_example(self):
        from hf_models import compare

        for kind in ("gpt2", "llama"):
            sdpa, ours = compare(kind)
            self.assertLess(sdpa[-1], sdpa[0] - 0.5)
            self.assertLess(max(abs(a - b) for a, b in zip(sdpa, ours)), 1e-3)


class WithoutTransformers(TorchCase):
    def test_register_says_what_it_needs(self):
        try:
            import transformers  # noqa: F401

            self.skipTest("transformers is here")
        except ImportError:
            self.assert_says(ImportError, evenkeel.hf.register, "hf.register: expected transformers", "found")


class Examples(TorchCase):
    def test_each_runs_or_says_what_it_lacks(self):
        sys.path.insert(0, str(ROOT / "examples"))
        self.addCleanup(sys.path.remove, str(ROOT / "examples"))
        import plain_loop

        before = evenkeel._patch._undo[:]
        losses = plain_loop.train(6, self.folder(), every=3)
        self.assertEqual(len(losses), 6)
        self.assertLess(losses[-1], losses[0])
        self.assertEqual(evenkeel._patch._undo, before)
        for name, needs in (("hf_trainer", "transformers"), ("lightning_script", "lightning"), ("fsdp2", None)):
            source = (ROOT / "examples" / f"{name}.py").read_text()
            compile(source, name, "exec")
            self.assertIn("# <- the run's records", source)
            here = importlib.util.find_spec(needs) is not None if needs else int(torch.__version__.split(".")[0]) >= 2
            if here:
                continue  # shown by check_torch_gpu.py, where there is time for it
            with self.assertRaises(SystemExit) as left, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                importlib.import_module(name)
            self.assertEqual(left.exception.code, 77, name)

    def test_the_lightning_script_with_a_stand_in(self):
        """Lightning's contract as far as the script needs it: several loaders in a list give one batch of each a step."""

        class Trainer:
            global_step, accumulate_grad_batches, loggers = 0, 1, ()

            def __init__(self, max_steps, callbacks, **_):
                self.max_steps, self.callbacks = max_steps, callbacks

            def fit(self, model, loaders):
                several = isinstance(loaders, (list, tuple))
                batches = (list(step) for step in zip(*loaders)) if several else loaders
                self.optimizers = [model.configure_optimizers()]
                self.callbacks[0].on_train_start(self, model)
                for n, batch in zip(range(self.max_steps), batches):
                    loss = model.training_step(batch, n)
                    self.optimizers[0].zero_grad()
                    loss.backward()
                    self.optimizers[0].step()
                    self.global_step += 1
                    self.callbacks[0].on_train_batch_end(self, model, {"loss": loss.detach()}, batch, n)
                self.callbacks[0].on_train_end(self, model)

        stand_in = types.ModuleType("lightning.pytorch")
        stand_in.Trainer, stand_in.LightningModule, stand_in.Callback = Trainer, nn.Module, object
        package = types.ModuleType("lightning")
        package.pytorch = stand_in
        folder, before = self.folder(), evenkeel._patch._undo[:]
        sys.path.insert(0, str(ROOT / "examples"))
        self.addCleanup(sys.path.remove, str(ROOT / "examples"))
        modules = {"lightning": package, "lightning.pytorch": stand_in}
        with unittest.mock.patch.dict(sys.modules, modules), open(os.devnull, "w") as nowhere, \
                unittest.mock.patch.object(sys, "argv", ["lightning_script.py", "--steps", "3", "--out", str(folder)]), \
                contextlib.redirect_stdout(nowhere):
            sys.modules.pop("lightning_script", None)
            importlib.import_module("lightning_script").main()
            sys.modules.pop("lightning_script")
        while evenkeel._patch._undo != before:
            evenkeel.unpatch()
        lines = lines_of(folder)
        self.assertEqual([line["step"] for line in lines], [0, 1, 2])
        self.assertLess(lines[-1]["loss"], lines[0]["loss"])


if __name__ == "__main__":
    main()
