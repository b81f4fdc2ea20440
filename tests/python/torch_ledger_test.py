"""python/offset_ledger.py on runs of seconds: its two parts add up, training is the trainer's, a kept sum leaks nothing, a planted bias is seen."""
import contextlib
import io
import json
import os
import subprocess
import unittest
from unittest import mock

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core: threads that wait for each other cost ten times as much here

from torch_cases import ROOT, TorchCase, lines_of

import offset_ledger  # noqa: E402  (torch_cases says where it is)

PROGRAM = os.environ.get("EVENKEEL_PROGRAM", str(ROOT / "build" / "evenkeel"))
TEXT = "".join(f"line {n}: the quick brown fox jumps over {n * n % 997} lazy dogs and {n * 7919 % 10007} cats.\n" for n in range(2000))
STEPS = 60


class OffsetLedger(TorchCase):
    def run_of(self, plan, steps=STEPS, rate=6e-3):
        """A run of our trainer from step 1 on, with a checkpoint there: a tiny GPT-2 whose two heads see 32 tokens."""
        folder = self.folder()
        (folder / "text").mkdir()
        (folder / "text" / "text.txt").write_text(TEXT)
        settings = [word for text in ("model.layers = 2", "model.heads = 2", "model.width = 32", "model.context = 32", "run.keep_every = 1", "run.divergence = 0.0") for word in ("--set", text)]
        done = subprocess.run([PROGRAM, "train", "--preset", "micro", *settings, "--threads", "1", "--sequences", "8", "--lr", str(rate), "--warmup", "10", "--schedule", "constant", "--data", folder / "text",
                               "--plan", plan, "--steps", str(steps), "--checkpoint-every", "1", "--facts-every", "1", "--out", folder / "run"], capture_output=True, text=True)  # fmt: skip
        self.assertIn(done.returncode, (0, 1), done.stderr)
        return folder / "run"

    def ledger(self, run, plan, *more):
        out = run.parent / "ledger.json"
        words = [f"{run}@1", "--plan", plan, "--out", str(out), "--every", "20", *map(str, more)]
        with mock.patch("sys.argv", ["offset_ledger.py", *words]), contextlib.redirect_stdout(io.StringIO()):
            offset_ledger.main()
        return json.loads(out.read_text())

    def refused(self, run, plan, *more):
        with self.assertRaises(SystemExit) as refusal:
            self.ledger(run, plan, *more)
        return str(refusal.exception)

    def test_the_parts_add_up_and_the_run_is_the_trainers(self):
        plan = "fp32,row_sum=e5m2"
        run = self.run_of(plan, steps=40, rate=3e-4)  # small steps: to first order the parts are all
        found = self.ledger(run, plan, "--layer", "2")
        self.assertEqual([one["steps"] for one in found["windows"]], [[1, 20], [20, 40]])
        self.assertEqual((found["plan"], found["layer"]), (plan, 2))
        recorded = {line["step"]: line for line in lines_of(run)}
        for one in found["windows"]:
            losses = [recorded[step]["loss"] for step in range(*one["steps"])]
            self.assertAlmostEqual(one["loss"], sum(losses) / len(losses), delta=1e-3 * one["loss"])
            for head in one["heads"]:
                both = head["leak"] + head["rest"]
                size = abs(head["leak"]) + abs(head["rest"])
                self.assertLess(abs(head["moved"] - both), 0.1 * size, one)
                for kind in ("leak", "rest"):
                    self.assertAlmostEqual(sum(head["by_weights"][kind].values()), head[kind], delta=2e-3 * size)
                    self.assertEqual(set(head["by_weights"][kind]), {"W_Q", "W_K", "gain", "others"})
                self.assertGreater(abs(head["leak"]), 0)
                self.assertTrue(0 < head["key_share"] < 1)
        for head in range(2):  # momentum hands on all of a leak, a little later
            leak, push = (sum(one["heads"][head][kind] * steps for one, steps in zip(found["windows"], scale)) for kind, scale in (("leak", [1, 1]), ("push", [19, 20])))
            self.assertTrue(0.4 < leak / push < 1.6, (leak, push))  # a decay of 0.5 would hand on a fifth

    def test_a_kept_sum_leaks_nothing(self):
        run = self.run_of("fp32", steps=2)
        for plan in ("fp32", "fp32,output=e8m2/stochastic,output_for_delta=fp32"):  # the loss alone reads the rounded O
            for one in self.ledger(run, plan, "--steps", "5")["windows"]:
                for head in one["heads"]:
                    self.assertLess(abs(head["leak"]), 1e-5 * abs(head["rest"]) + 1e-7, plan)

    def test_an_error_that_the_loss_has_seen_has_a_direction(self):
        """An O of one bit pushes the heads' mean scores up where delta reads what the loss has read, and nowhere where delta alone reads it."""
        plan = "fp32,output=e8m1/stochastic"
        run = self.run_of(plan)
        z = {}
        for name, text in (("both", plan), ("delta", "fp32,output_for_delta=e8m1/stochastic")):
            found = self.ledger(run, text, "--every", STEPS)
            z[name] = sum(head["push_z"] for head in found["windows"][0]["heads"]) / 2**0.5  # of two heads
        self.assertGreater(z["both"], 4.0, z)
        self.assertLess(abs(z["delta"]), 3.0, z)

    def test_what_it_refuses(self):
        run = self.run_of("fp32", steps=2)
        self.assertIn("expected a plan whose forward pass is the same with zero_sum", self.refused(run, "flash2,stabiliser=consistent"))
        self.assertIn("expected a model with at least 3 layers, found 2", self.refused(run, "fp32", "--layer", 3))
        self.assertIn("expected --layer and --every from 1 on", self.refused(run, "fp32", "--layer", 0))
        self.assertIn("expected a checkpoint's folder", self.refused(run.parent / "nowhere", "fp32"))


if __name__ == "__main__":
    unittest.main()
