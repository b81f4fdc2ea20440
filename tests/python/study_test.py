"""The study's words as code, the packing of its curves, and that the pages say what their sources say: the curves, the program, the C header.
Python's standard library only."""

import importlib.machinery
import importlib.util
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import page_marks
import study_designs
import study_docs
import study_forecast
import study_ledger
from study_curves import Study, rank_correlation


def script(name):
    """A program without a suffix, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def curve(offsets, losses, **more):
    """A packed run of nano: one layer; an offset and a mean loss for every 200 steps."""
    steps = [200 * (n + 1) - 1 for n in range(len(losses))]
    return {"plan": "flash2", "seed": 1, "size": "nano", "options": [], "steps": steps, "loss": losses, "gradient_norm": [1.0] * len(losses),
            "fact_steps": [200 * n for n in range(len(offsets))], "offset": [[x] for x in offsets], "largest_score": [[2 * x] for x in offsets],
            "summary": {"step": 200 * len(losses)}, **more}  # fmt: skip


class Definitions(unittest.TestCase):
    def study(self, **runs):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "curves.json").write_text(json.dumps(runs))
            return Study(folder)

    def pair(self, offsets, losses, **more):
        remedy = curve([10.0] * 8, [3.01, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3], plan="flash2,stabiliser=wide_output")
        study = self.study(run=curve(offsets, losses, **more), remedy=remedy)
        return study, study["run"]

    HEALTHY = [3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3]
    DRIFTING = [10.0, 10.0, 10.0, 81.0, 90.0, 100.0, 200.0, 400.0]

    def test_drift_needs_8_times_the_healthy_level_to_the_end(self):
        study, run = self.pair(self.DRIFTING, self.HEALTHY)
        self.assertEqual(study.drift(run), (600, 1))
        study, run = self.pair([10, 10, 10, 200, 80, 80, 80, 80], self.HEALTHY)
        self.assertIsNone(study.drift(run))  # 8 times is not beyond 8 times
        study, run = self.pair([10, 10, 10, 400, 400, 400, 400, 70], self.HEALTHY)
        self.assertIsNone(study.drift(run))  # came back
        study, run = self.pair([10, 10, 10, 90, 100, 110, 120, 130], self.HEALTHY)
        self.assertIsNone(study.drift(run))  # did not double

    def test_a_run_that_ends_in_its_warm_up_is_not_judged(self):
        study = self.study(run=curve([10.0], [3.0]), remedy=curve([10.0], [3.01], plan="flash2,stabiliser=wide_output"))
        for judged in (study.drift, study.failure):
            with self.assertRaisesRegex(ValueError, "remedy: expected offsets from step .* found none: too short to judge"):
                judged(study["run"])

    def test_failure_is_drift_and_5_percent(self):
        losses = [3.0, 2.9, 2.8, 2.7, 2.6, 2.5 * 1.04, 2.4 * 1.06, 7.0]
        study, run = self.pair(self.DRIFTING, losses)
        self.assertEqual((study.failure(run), study.lead(run)), (1400, 800))
        study, run = self.pair([10.0] * 8, losses)
        self.assertIsNone(study.failure(run))  # a worse loss without drift is something else
        study, run = self.pair(self.DRIFTING, self.HEALTHY)
        self.assertIsNone(study.failure(run))
        study, run = self.pair(self.DRIFTING, losses, seed=2)
        self.assertIsNone(study.twin(run))  # another seed is no twin
        self.assertIsNone(study.failure(run))

    def test_a_nan_loss_is_a_failure(self):
        study, run = self.pair(self.DRIFTING, [3.0, 2.9, 2.8, 2.7, float("nan"), float("nan"), float("nan"), float("nan")])
        self.assertEqual(study.failure(run), 1000)

    def test_one_trajectory_is_counted_once(self):
        study = self.study(a=curve([1.0] * 8, self.HEALTHY), b=curve([1.0] * 8, self.HEALTHY, plan="another name"),
                           c=curve([1.0] * 8, [3.1] * 8))  # fmt: skip
        self.assertEqual([run.name for run in study.distinct(["a", "b", "c", "absent"])], ["a", "c"])

    def test_means_of_200_steps_from_groups_of_other_widths(self):
        losses = [float(n) for n in range(1, 5)]  # groups of 150 steps: 0-149, 150-299, 300-449, 450-599
        study = self.study(run=curve([1.0] * 4, losses, steps=[149, 299, 449, 599]))
        for found, expected in zip(study["run"].loss_means(), [(150 * 1 + 50 * 2) / 200, (100 * 2 + 100 * 3) / 200, (50 * 3 + 150 * 4) / 200]):
            self.assertAlmostEqual(found, expected)

    def test_speed_is_that_of_the_root_of_the_offset(self):
        roots = [math.sqrt(10.0), 10.0, 50.0, 150.0, 160.0, 170.0, 180.0, 190.0]
        study, run = self.pair([root * root for root in roots], self.HEALTHY)
        speed, window, layer = max(study.speeds(run))
        self.assertEqual((round(speed, 9), window, layer), (0.5, 3, 1))  # from 50 to 150 in 200 steps
        self.assertAlmostEqual(study.speed_bound(run), 64**0.25 * 3e-3 * 384)
        study, run = self.pair([1.0] * 8, self.HEALTHY, options=["--lr", "6e-3"])
        self.assertAlmostEqual(study.speed_bound(run), 64**0.25 * 6e-3 * 384)

    def test_crossing_reads_the_group_of_steps_that_the_record_is_in(self):
        losses = [3.0, 2.9, 2.8, 2.7, 2.6 * 1.5, 2.5, 2.4 * 9, 2.3]
        study, run = self.pair([10.0, 10.0, 100.0, 2500.0, 10000.0, 12000.0, 12000.0, 12000.0], losses, gradient_norm=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        found = study.crossing(run, 5000, ahead=200)
        self.assertEqual((found["step"], found["norm"]), (800, 5.0))  # steps 800 to 999
        self.assertAlmostEqual(found["speed"], (100 - 50) / 200)
        self.assertAlmostEqual(found["now"], 0.5)
        self.assertAlmostEqual(found["excess"], 0.5)  # the ninefold loss comes later
        self.assertAlmostEqual(study.crossing(run, 5000, ahead=400)["excess"], 8)
        self.assertIsNone(study.crossing(run, 20_000))
        self.assertEqual(study.largest_norm(run), 8.0)

    def test_rank_correlation(self):
        self.assertAlmostEqual(rank_correlation([1, 2, 3, 4], [10, 20, 300, 4000]), 1)
        self.assertAlmostEqual(rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]), -1)
        self.assertAlmostEqual(rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]), 4.5 / math.sqrt(4.5 * 5))  # ties share their places
        self.assertAlmostEqual(rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]), 0.8)

    def test_a_name_in_two_files_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            for file in ("a.json", "b.json"):
                (Path(folder) / file).write_text(json.dumps({"run": curve([1.0] * 3, [1.0] * 3)}))
            with self.assertRaisesRegex(ValueError, "expected each run once"):
                Study(folder)


class Packing(unittest.TestCase):
    def test_maxima_losses_and_validation_are_of_the_whole_record(self):
        study = script("study")
        run = study.Run("part", "name", "flash2", steps=4000, size="nano")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / run.folder).mkdir()
            with open(folder / run.folder / "metrics.jsonl", "w") as file:
                def write(step, loss):
                    row = {"step": step, "loss": loss, "gradient_norm": 1.0}
                    if step % 5 == 0:  # 800 records, of which every second is kept
                        peak = 900.0 if step == 2005 else 30.0
                        row.update(largest_score=[[50.0, 60.0], [70.0, 80.0]], largest_row_mean=[[1.0, 20.0], [peak, 10.0]])
                    if step % 1000 == 999:
                        row["validation_loss"] = 5.0 - step / 1000
                    file.write(json.dumps(row) + "\n")
                for step in range(300):
                    write(step, 9.0)
                for step in range(200, 4000):  # 200 to 299 were rolled back
                    write(step, "NaN" if step >= 3900 else 2.0)
                file.write('{"step": 4000, "lo')
            packed = study.packed(run, study.read_steps(folder / run.folder))
        self.assertNotIn(900.0, [row[1] for row in packed["offset"]])  # thinned out of the curve
        self.assertEqual(packed["largest"]["offset"], [[20.0, 0], [900.0, 2005]])
        self.assertEqual(packed["largest"]["score"], [[60.0, 0], [80.0, 0]])
        self.assertEqual(packed["loss_means"][:3], [9.0, 2.0, 2.0])
        self.assertEqual(len(packed["loss_means"]), 20)
        self.assertNotEqual(packed["loss_means"][19], packed["loss_means"][19])  # NaN
        self.assertEqual([step for step, _ in packed["validation"]], [999, 1999, 2999, 3999])
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "curves.json").write_text(json.dumps({"run": packed}))
            read = Study(name)["run"]
            self.assertEqual(read.largest("offset"), (900.0, 2005))
            self.assertEqual(read.validation()[0], 3999)


    def test_curves_are_packed_while_runs_train(self):
        study = script("study")
        with tempfile.TemporaryDirectory() as name:
            folder, file = Path(name), Path(name) / "curves.json"
            packer = study.Packer(folder, ["square"], str(file))
            self.assertEqual(packer.write(set()), 0)  # nothing has begun
            run = next(run for run in packer.runs if run.folder == "square-both-1")
            (folder / run.folder).mkdir()
            row = lambda step: json.dumps({"step": step, "loss": 2.0, "gradient_norm": 1.0, "largest_score": [[5.0]], "offset": [[3.0]]}) + "\n"
            record = folder / run.folder / "metrics.jsonl"
            record.write_text("".join(row(step) for step in range(300)) + '{"step": 300, "lo')  # as a kill leaves it
            self.assertEqual(packer.write({run.folder}), 1)
            self.assertEqual(json.loads(file.read_text())[run.folder]["summary"]["step"], 300)
            record.write_text("".join(row(step) for step in range(500)))
            packer.write(set())
            self.assertEqual(json.loads(file.read_text())[run.folder]["summary"]["step"], 500)
            record.unlink()  # what is done is read once
            self.assertEqual(packer.write(set()), 1)

    def test_every_run_has_a_name_of_its_own_and_a_price(self):
        study = script("study")
        every = study.runs([])
        self.assertEqual(len({run.folder for run in every}), len(every))
        self.assertGreater(len(every), 150)
        for run in every:
            self.assertTrue(0 < run.minutes < 60, run.folder)
        for run in every:  # a twin for every run of the parts that compare with one
            if run.part in ("hostile", "rates", "llama") and not run.name.endswith("_twin"):
                twin = [other for other in every if other.part == run.part and other.name == run.name + "_twin" and other.seed == run.seed]
                self.assertEqual([(other.steps, other.more, other.plan) for other in twin], [(run.steps, run.more, run.plan + ",stabiliser=wide_output")])

    def test_a_budget_starts_what_fits_and_resumes_nothing(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            begun = folder / "work" / "square-both-1"
            begun.mkdir(parents=True)
            (begun / "metrics.jsonl").write_text('{"step": 0, "loss": 5.0, "gradient_norm": 1.0}\n')
            program = folder / "trains"  # in place of the program: says which run it was asked for
            program.write_text("#!/bin/sh\necho \"$@\" >> " + str(folder / "asked") + "\n")
            program.chmod(0o755)
            (folder / "text").mkdir()
            done = subprocess.run([sys.executable, ROOT / "scripts/study", "--evenkeel", program, "--folder", folder / "work", "--only", "square-both,law-lr_3e-3", "--budget", "0.8",
                                   "--cpu", "2", "--gpu", "0", "--text", folder / "text", "--pack", folder / "curves.json"], capture_output=True, text=True)  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("square-both-1: begun and not finished", done.stdout)
            self.assertIn("square-both-1", json.loads((folder / "curves.json").read_text()))
            asked = (folder / "asked").read_text()
            self.assertNotIn("--resume", asked)
            self.assertIn("square-both-2", asked)
            self.assertNotIn("law-lr_3e-3", asked)
            self.assertIn("law-lr_3e-3-1: not started: it needs 0.9 minutes", done.stdout)


class IsItUs(unittest.TestCase):
    def test_figures_of_an_arm_that_was_killed(self):
        module = script("is_it_us")
        with tempfile.TemporaryDirectory() as name:
            rows = [{"step": step, "loss": "NaN" if step == 999 else 2.0 + (step >= 140), "gradient_norm": 1.0} | ({"offset": [[10.0 * step, 1.0]]} if step % 25 == 0 else {}) for step in range(90, 200)]
            (Path(name) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 200, "lo')
            read = module.rows_of(Path(name), 100)  # what was recorded before the checkpoint is not the arm's
            self.assertEqual((read[0]["step"], len(read)), (100, 100))
            found = module.figures(read)
            self.assertEqual((found["first"], found["most"], found["offsets"]), (2.0, 3.0, [1000.0, 1750.0]))
            self.assertAlmostEqual(found["last"], 2.6)
        self.assertEqual(module.rows_of(Path("/nowhere"), 0), [])
        self.assertEqual(set(module.arms("flash2", "fp32")), {"ours", "ours_fp32", "ours_all_fp32", "pytorch"})


class LedgerScript(unittest.TestCase):
    def test_what_is_finished_stays_and_the_rest_is_made(self):
        """With stand-ins for the program and for Python: a finished ledger, one that was cut off, one that fails."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ledger = lambda steps: json.dumps({"windows": [{"steps": [0, steps]}]})
            (folder / "both-1.json").write_text(ledger(1000))
            (folder / "both-2.json").write_text(ledger(300))
            program, python = folder / "program", folder / "python"
            program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/trained\nfor out; do :; done\nmkdir -p "$out/checkpoints/step-00000001"\n')
            python.write_text(f'#!/bin/sh\nfor out; do :; done\ncase "$out" in *row_sum*) exit 1;; esac\necho "$@" >> {folder}/asked\ncat > "$out" <<END\n{ledger(1000)}\nEND\n')
            for file in (program, python):
                file.chmod(0o755)
            done = subprocess.run([sys.executable, ROOT / "scripts/ledger", "--evenkeel", program, "--python", python, "--folder", folder, "--text", "T", "--out", folder / "all.json",
                                   "--only", "both-1,both-2,row_sum-1"], capture_output=True, text=True)  # fmt: skip
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("row_sum-1: failed", done.stdout)
            self.assertEqual(list(json.loads((folder / "all.json").read_text())), ["both-1", "both-2"])
            asked = (folder / "asked").read_text()
            self.assertNotIn("both-1.json", asked)
            self.assertIn("first-2@1 --plan fp32,output=e8m2/stochastic --layer 2 --steps 1000", asked)
            self.assertEqual((folder / "trained").read_text().count("--seed"), 2)
        done = subprocess.run([sys.executable, ROOT / "scripts/ledger", "--folder", "x", "--text", "T", "--only", "nonsense"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)


class LedgerFigures(unittest.TestCase):
    """The definitions of study_ledger.py, on planted courses."""

    class Run:
        def __init__(self, shares, offsets):
            self.fact_steps = [100 * n for n in range(len(shares))]
            self.packed = {"key_share": [[x] for x in shares], "offset": [[x] for x in offsets]}

    def test_beyond_its_control_since(self):
        control = self.Run([0.9, 0.8, 0.2, 0.3, 0.2, 0.1], [9, 9, 5, 6, 7, 8])  # what is before step 200 does not count
        figures = study_ledger.Ledgers()
        figures.key_control = lambda run: control
        run = self.Run([0.9, 0.4, 0.4, 0.3, 0.31, 0.5], [1, 1, 1, 9, 8, 9])
        self.assertEqual(figures.beyond_since(run, "key_share", 1), 400)  # at 300 it is the control's largest, not beyond
        self.assertEqual(figures.beyond_since(run, "offset", 1), 500)
        self.assertIsNone(figures.beyond_since(control, "offset", 1))
        self.assertIsNone(figures.beyond_since(self.Run([0.5] * 5 + [math.nan], [1] * 6), "key_share", 1))

    def test_sums_over_windows(self):
        figures = study_ledger.Ledgers()
        head = lambda leak, rest, z, offset: {"leak": leak, "rest": rest, "moved": leak + rest, "push_z": z, "offset": offset, "c": leak, "key_share": 0.5}
        figures.ledger = {"a-1": {"windows": [{"steps": [0, 100], "heads": [head(9, 9, 9, 1), head(9, 9, 9, 2)]}, {"steps": [100, 200], "heads": [head(4, -3, 3, 7), head(1, 0, -3, 2)]},
                                              {"steps": [200, 300], "heads": [head(6, -2, 1, 8), head(-1, 0, 0, 9)]}]}}  # fmt: skip
        figures.number = str
        self.assertEqual(figures.ledger_head("a-1"), 1)
        self.assertEqual([figures.ledger_value("pushes", what, "a") for what in ("up", "down", "all")], ["1", "1", "4"])  # the warm-up does not count
        self.assertEqual(figures.ledger_value("positive", "a"), "1 of 2")
        self.assertEqual(figures.ledger_value("closes", "1"), "0.0 %")
        self.assertEqual(figures.ledger_value("offset", "a-1", "200"), "2")
        self.assertRaises(ValueError, figures.ledger_value, "share", "a-1", "250")


class Designs(unittest.TestCase):
    """The fits behind study_designs.py, on planted runs."""

    class Run:
        size, in_torch, warmup, packed = "micro", None, 100, {"options": []}

        def __init__(self, plan, last_step):
            self.plan, self.last_step = plan, last_step

    class Study:
        def __init__(self, failures):
            self.failures = failures

        def failure(self, run):
            return self.failures[run.plan]

    def planted_law(self, censored):
        """Steps of failure of 40 plans, 1 / (10 mean leak sqrt(rms leak)) each with 20 % of chance; some runs end before."""
        rng, leaks, failures, runs = random.Random(1), {}, {}, []
        for n in range(40):
            plan = f"plan{n}"
            leaks[plan] = (math.exp(rng.uniform(-6, -2)), math.exp(rng.uniform(-6, -2)))
            step = 10 / (leaks[plan][0] * leaks[plan][1] ** 0.5) * math.exp(rng.gauss(0, 0.2))
            ends_early = censored and n % 3 == 0
            failures[plan] = None if ends_early else step
            runs.append(self.Run(plan, step / 2 if ends_early else 2 * step))
        return study_designs.Law(self.Study(failures), leaks, runs), runs, failures

    def test_the_law_finds_planted_exponents(self):
        for censored in (False, True):
            law, runs, failures = self.planted_law(censored)
            self.assertAlmostEqual(law.line[2], -1, delta=0.15, msg=censored)
            self.assertAlmostEqual(law.line[3], -0.5, delta=0.15, msg=censored)
            for run in runs:
                if failures[run.plan]:
                    self.assertLess(abs(math.log(law.step(run) / failures[run.plan])), 0.8)
                    self.assertGreater(law.step(run, 10 * failures[run.plan]), 10 * failures[run.plan])  # it lasts: later

    def test_plans_that_do_not_leak_or_are_bounded_have_no_law(self):
        law, runs, _ = self.planted_law(False)
        law.leaks |= {"fp32": (1e-9, 1e-9), "fp32,pv=e8m2": (0.1, 0.1)}
        self.assertTrue(law.holds(runs[0]))
        self.assertFalse(law.holds(self.Run("fp32", 100)))
        self.assertFalse(law.holds(self.Run("fp32; layer 0: pv=e8m2", 100)))  # one layer of several
        self.assertTrue(law.holds(self.Run("fp32,pv=e8m2", 100)))
        self.assertFalse(law.holds(self.Run("fp32,pv=e8m2,keel=1e-3", 100)))

    def test_runs_that_round_at_one_place_are_left_out_together(self):
        site = lambda plan: study_designs.site(self.Run(plan, 100))
        self.assertEqual(site("fp32,row_sum=e5m2"), site("fp32,row_sum=e8m3/stochastic,stabiliser=zero_sum"))
        self.assertEqual(site("fp32,pv=e8m2"), site("fp32; layer 0: pv=e8m2"))
        self.assertEqual(site("fp32,pv=e8m2"), site("fp32,output=e8m2/stochastic"))
        self.assertEqual(site("nvfp4"), site("nvfp4,stabiliser=consistent"))
        self.assertEqual(len({site(plan) for plan in ("fp32", "fp32,probs=e8m2", "fp32,dprobs=e8m2", "fp32,delta=e8m2", "fp32,row_sum=e5m2", "fp32,pv=e8m2", "nvfp4", "flash2")}), 8)
        runs = [self.Run(plan, 100) for plan in ("fp32,pv=e8m2", "fp32,output=e8m2", "nvfp4", "flash2")]
        designs = study_designs.Designs(None, runs[:2], runs[2:], {}, {}, 1.5)
        for run in runs:
            run.name = run.plan
        seen = designs.left_out(lambda others: {study_designs.site(other) for other in others}, runs)
        for run in runs:
            self.assertNotIn(study_designs.site(run), seen[run.name])
            self.assertTrue(seen[run.name])

    def test_the_regression_separates_what_can_be_separated(self):
        rng = random.Random(1)
        labels = [float(n % 2) for n in range(200)]
        points = [[rng.gauss(2 * label, 1), rng.gauss(0, 1)] for label in labels]
        model = study_designs.Logistic(points, labels, [1.0] * len(points))
        right = sum((model.score(x) > 0) == bool(label) for x, label in zip(points, labels))
        self.assertGreater(right, 150)
        self.assertGreater(model.line[1], 3 * abs(model.line[2]))  # the second says nothing


class Tables(unittest.TestCase):
    def test_runs_that_come_later_fill_their_tables(self):
        wide = "flash2,stabiliser=wide_output"
        healthy, drifting = [10.0] * 8, Definitions.DRIFTING
        with tempfile.TemporaryDirectory() as folder:
            size = {"size-flash2-1": curve(drifting, [3.0] * 8, size="gpt2"), "size-wide_output-1": curve(healthy, Definitions.HEALTHY, size="gpt2", plan=wide)}
            (Path(folder) / "size.json").write_text(json.dumps(size))
            cure = {"cure-wide_output-2": curve(healthy, Definitions.HEALTHY, plan=wide, seed=2, validation=[[1599, 2.34567]]),
                    "cure-wide_output-3": curve(drifting, [2.0] * 8, plan=wide, seed=3),
                    "controls-zero_sum-3": curve(healthy, Definitions.HEALTHY, plan="bf16_all,stabiliser=zero_sum", seed=3)}  # fmt: skip
            (Path(folder) / "cure.json").write_text(json.dumps(cure))
            figures = study_docs.Figures(folder, "")
        self.assertIn("| `flash2` | 1 | 1,600 | 400 (1,400, 1) | 600 | 800 | 3.000 | +30.4 % |", figures.size_table())
        self.assertIn("| `flash2` | `wide_output` | ours | not run | 1,600 steps: offset 10†, validation 2.3457 | 1,600 steps: **drift**, offset 400†, loss -13.0 % |", figures.cure_table())

    def figures(self, forecast=None, **runs):
        """Figures of planted runs, and of a planted forecast."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "curves"
            folder.mkdir()
            (folder / "runs.json").write_text(json.dumps({name.replace("__", "-"): packed for name, packed in runs.items()}))
            if forecast:
                (Path(name) / "forecast.json").write_text(json.dumps(forecast))
            return study_docs.Figures(folder, "")

    def names_in(self, figures, text):
        """The runs that have a line of their own."""
        cells = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| ")]
        return [cell for cell in cells if cell in figures.study.runs]

    def test_a_trajectory_has_one_line_in_a_table(self):
        figures = study_docs.Figures(ROOT / "docs/curves", (ROOT / "docs/experiments.md").read_text())
        figures.header = (ROOT / "include/evenkeel.h").read_text()
        course = lambda run: json.dumps([run.size, run.seed, run.packed["steps"], run.packed["loss"]])
        of_runs = 0
        for name in dir(figures):
            if name.endswith("_table") and name != "logged_table":
                names = sorted(set(self.names_in(figures, getattr(figures, name)())))
                courses = [course(figures.study[one]) for one in names]
                self.assertEqual([one for one, mine in zip(names, courses) if courses.count(mine) > 1], [], name)
                of_runs += bool(names)
        self.assertGreater(of_runs, 4)

    def test_a_trajectory_under_two_names_is_found(self):
        losses = [3.0 - n / 100 for n in range(40)]
        law = {"layer": 1, "head": 1, "steps": [600 + 20 * n for n in range(40)], **{field: [5.0 * 1.1**n for n in range(40)] for field in script("study").LAW_FIELDS}}
        probed = curve([10.0] * 40, losses, law=law, leak_share=[[600, 0.2], [800, 0.3]])
        figures = self.figures(one=probed, other=probed, third=curve([10.0] * 40, [loss + 1 for loss in losses], law=law, leak_share=[[600, 0.1]]))
        for text in (figures.prediction_table(), figures.risk_table()):
            self.assertEqual(sorted(self.names_in(figures, text)), ["one", "third"])

    def test_figures_of_stretches(self):
        study = {"run": curve([10.0, 20.0, 40.0, 30.0], [3.0, 3.0, 3.3, 3.3]), "remedy": curve([10.0] * 4, [3.0] * 4, plan="flash2,stabiliser=wide_output")}
        value = self.figures(**study).value
        self.assertEqual((value("span@200..600 run"), value("factor@0..400 run"), value("within@0.05 run"), value("within@0.2 run")), ("20 to 40", "4.0", "400", "800"))
        self.assertEqual((value("limit:1 run"), value("level nano"), value("seeds run remedy"), value("kept_gap")), ("80", "40", "1", "200"))
        validated = self.figures(run=curve([10.0] * 2, [3.0] * 2, validation=[[199, 2.5], [399, 2.4]])).value
        self.assertEqual((validated("validation@199 run"), validated("validation run")), ("2.5000", "2.4000"))
        with self.assertRaises(KeyError):
            validated("validation@200 run")

    def test_a_maximum_has_the_step_of_its_record(self):
        marks = {"marks": {"800": {"offset": 90.0, "score": 99.0, "layer": 1}}, "step": 800}
        whole = self.figures(run=curve([10.0] * 4, [3.0] * 4, summary=marks, largest={"offset": [[90.0, 775]], "score": [[99.0, 775]]})).study["run"]
        self.assertEqual(whole.largest("offset"), (90.0, 775))
        self.assertEqual(self.figures(run=curve([10.0] * 4, [3.0] * 4, summary=marks)).study["run"].largest("offset"), (90.0, 800))  # all that is known

    def micro(self, plan, losses, offsets=(10.0,) * 8, **more):
        return curve(list(offsets), losses, plan=plan, size="micro", text="hostile_micro", **more)

    def test_settings_show_every_remedy_that_has_run(self):
        noisy, twin = "fp32,output=e8m2/stochastic", "fp32,output=e8m2/stochastic,stabiliser=zero_sum"
        runs = {"hostile_micro__plain-1": self.micro(noisy, [3.0] * 8, Definitions.DRIFTING), "hostile_micro__plain_zero_sum-1": self.micro(twin, [2.5] * 8),
                "exponents_micro__lr_3e-3-1": self.micro(noisy, [3.0] * 8, Definitions.DRIFTING, options=["--lr", "3e-3"])}  # fmt: skip
        without = self.figures(**runs).hostile_micro_table()
        self.assertNotIn("wide_output", without)
        self.assertNotIn("half the learning rate", without)  # no twin, no row
        runs |= {"hostile_micro__plain_wide_output-1": self.micro(noisy + ",stabiliser=wide_output", [2.6] * 8), "exponents_micro__lr_3e-3_zero_sum-1": self.micro(twin, [2.4] * 8, options=["--lr", "3e-3"])}
        table = self.figures(**runs).hostile_micro_table()
        for line in ("| as in the other runs of `micro` | `wide_output` | 1 (seed 1) | 0 | 0 |", "| half the learning rate | `none` | 1 (seed 1) | 1 | 1 |", "| half the learning rate | `zero_sum` | 1 (seed 1) | 0 | 0 |"):
            self.assertIn(line, table)

    def test_a_claim_with_other_settings_is_judged_beside_a_run_that_has_them(self):
        large = ["--sequences", "64"]
        runs = {"hostile_micro__fp32-1": self.micro("fp32", [3.0] * 8), "formats__sage_dscores_bf16-1": self.micro("sage_int8,dscores=bf16", [3.3] * 8),
                "formats__sage_large_batch-1": self.micro("sage_int8", [1.0] * 8, Definitions.DRIFTING, options=large),
                "formats__sage_large_batch_zero_sum-1": self.micro("sage_int8,stabiliser=zero_sum", [0.8] * 8, options=large),
                "formats__sage_qk_norm-1": self.micro("sage_int8", [2.2] * 8, Definitions.DRIFTING, options=["--set", "model.qk_norm = true"]),
                "hostile_micro__qk_norm_zero_sum-1": self.micro("fp32,output=e8m2/stochastic,stabiliser=zero_sum", [2.0] * 5, options=["--set", "model.qk_norm = true"])}  # fmt: skip
        table = self.figures(**runs).formats_claims_table()
        for line in ("| SageBwd: dS in BF16 | 1 (seed 1) | 0 | 0 | – | – | 10† | 1,600 | +10.0 % | FP32 |", "| SageBwd: 64 sequences a step for 16 | 1 (seed 1) | 1 | 1 | 600 | 800 | 400† | 1,600 | +25.0 % | its twin |",
                     "| SageBwd: q and k normalised | 1 (seed 1) | 1 | 1 | 600 | 800 | 400† | 1,600 | +10.0 % | `hostile_micro-qk_norm_zero_sum-1` |"):  # fmt: skip
            self.assertIn(line, table)

    def test_what_the_thresholds_were_not_chosen_on_stands_apart(self):
        losses = [3.0] * 8
        runs = {"bits__old-1": curve(Definitions.DRIFTING, losses, size="micro"), "mini__row_sum-1": curve(Definitions.DRIFTING, losses, size="mini"), "mini__fp32-1": curve([9.0] * 8, losses, size="mini"),
                "other_text__fp32-2": curve([9.0] * 8, losses, size="micro", text="other_text", seed=2), "llama_settings__plain-1": curve(Definitions.DRIFTING, losses, size="micro", text="llama_settings")}  # fmt: skip
        life = lambda size, within: {"size": size, "failure": 800, "life": [{"share": 0.5, "forecast": 800, "within": within, "in_interval": within}]}
        healthy = lambda size, alarms: {"size": size, "text": "", "steps": 1600, "drifts": False, "alarms": alarms}
        forecast = {"factor": 1.5, "failing": {"bits-old-1": life("micro", True), "mini-row_sum-1": life("mini", True), "llama_settings-plain-1": life("micro", False)},
                    "others": {"mini-fp32-1": healthy("mini", [300]), "other_text-fp32-2": healthy("micro", [])}, "history": {"right": {"mini-row_sum-1": False, "other_text-fp32-2": True}}}  # fmt: skip
        figures = self.figures(forecast, **runs)
        self.assertEqual([name for name, run in figures.study.runs.items() if study_forecast.is_held_out(run)], ["mini-row_sum-1", "mini-fp32-1", "other_text-fp32-2", "llama_settings-plain-1"])
        table = figures.held_out_table()
        for line in ("| all | 2 of 3 | 1 of 2 | 0 of 1 | 0 of 1 |", "| **held out** | 1 of 2 | 1 of 2 | 0 of 1 | 0 of 1 |", "| held out: `mini`, the usual text of this size | 1 of 1 | 1 of 1 | 0 of 1 | 0 of 0 |",
                     "| held out: `micro`, `other_text` | 0 of 0 | 0 of 1 | 0 of 0 | 0 of 1 |", "| held out: `micro`, `llama_settings` (a Llama block) | 0 of 1 | 0 of 0 | 0 of 0 | 0 of 0 |"):  # fmt: skip
            self.assertIn(line, table)
        self.assertIn("| mini-fp32-1 | `flash2` | 1,600 | 300 |", figures.false_alarms_table())
        # The number that dates a run that is held out comes from runs that are not.
        first = {"bits-old-1": 0.1, "mini-row_sum-1": 0.5, "llama_settings-plain-1": 0.9}
        self.assertEqual(study_forecast.fitted_on("mini-row_sum-1", figures.study, first), [0.1])
        self.assertEqual(study_forecast.fitted_on("bits-old-1", figures.study, first), [0.5, 0.9])

    def test_the_leaks_of_plans_stand_beside_what_their_runs_did(self):
        runs = {"formats__a-1": self.micro("nvfp4", [3.0] * 8, Definitions.DRIFTING), "formats__a-2": self.micro("nvfp4", [3.0] * 8, seed=2), "bits__b-1": self.micro("fp32,row_sum=e8m4", [2.4] * 8),
                "formats__c-1": self.micro("nvfp4,stabiliser=zero_sum", [2.5] * 8), "hostile_micro__fp32-1": self.micro("fp32", [2.5] * 8), "hostile_micro__fp32-2": self.micro("fp32", [2.5] * 8, seed=2)}  # fmt: skip
        figures = self.figures({"leaks": {"nvfp4": [0.02, 0.03], "fp32,row_sum=e8m4": [0.001, 0.0011], "nvfp4,stabiliser=zero_sum": [1e-9, 1e-9]}, "failing": {}, "others": {}}, **runs)
        self.assertEqual(figures.value("leak of bits-b-1"), "0.001")
        self.assertEqual(figures.leak_table().splitlines()[2:], ["| `nvfp4` | 0.02 | 0.03 | 2 | 1 | 1 | 1,600 |", "| `fp32,row_sum=e8m4` | 0.001 | 0.0011 | 1 | 0 | 0 | 1,600 |"])

    def test_leaks_from_which_on_all_runs_fail_and_up_to_which_none_does(self):
        courses = {"fails": (Definitions.DRIFTING, 3.0), "drifts": (Definitions.DRIFTING, 2.5), "level": ([10.0] * 8, 2.5)}
        planted = (("a", 0.5, "fails"), ("b", 0.4, "fails"), ("c", 0.3, "level"), ("d", 0.2, "fails"), ("e", 0.1, "drifts"), ("f", 0.05, "level"))
        runs = {f"formats__{name}-1": self.micro(name, [courses[kind][1] + n / 1000] * 8, courses[kind][0]) for n, (name, _, kind) in enumerate(planted)}
        figures = self.figures({"leaks": {name: [leak, leak] for name, leak, _ in planted}, "failing": {}, "others": {}}, **runs, **{"hostile_micro__fp32-1": self.micro("fp32", [2.5] * 8)})
        found = [figures.value(f"leak formats {what}") for what in ("always", "always count", "never", "never count", "drifting", "level")]
        self.assertEqual(found, ["0.4", "2", "0.1", "2", "0.1", "0.3"])


class Pages(unittest.TestCase):
    """README.md, the pages of docs and the figures against docs/curves, docs/experiments.md, the program and include/evenkeel.h."""

    def check(self, root):
        return subprocess.run([sys.executable, ROOT / "scripts/study", "--docs", "--check", "--root", root], capture_output=True, text=True)

    def assert_planted_faults_are_found(self, *faults):
        """faults: (file, old, new, words): --check names each in a copy of the pages in which these places are changed."""
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            for folder in ("docs", "include"):
                (root / folder).mkdir()
            for page in ("README.md", "include/evenkeel.h", *(f"docs/{file.name}" for kind in ("*.md", "*.svg", "*.json") for file in (ROOT / "docs").glob(kind))):
                shutil.copy(ROOT / page, root / page)
            shutil.copytree(ROOT / "docs/curves", root / "docs/curves")
            shutil.copytree(ROOT / "src/diagnosis", root / "src/diagnosis", ignore=shutil.ignore_patterns("*.cpp"))
            for file, old, new, _ in faults:
                text = (root / file).read_text()
                self.assertIn(old, text, "the place to plant a fault is gone")
                (root / file).write_text(text.replace(old, new, 1))
            done = self.check(root)
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            for *_, words in faults:
                self.assertIn(words, done.stdout)

    def test_pages_say_what_the_curves_say(self):
        done = self.check(ROOT)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_verdict_calls_fewer_steps_few_than_any_failing_run_had(self):
        few = int(re.search(r"kFewSteps = (\d+)", (ROOT / "src/diagnosis/verdict.cpp").read_text())[1])
        study = Study(ROOT / "docs" / "curves")
        failures = [study.failure_step(run) or study.failure(run) for run in study.runs.values() if study.failure(run)]
        self.assertGreater(len(failures), 50)
        self.assertLess(few, min(failures))
        self.assertGreater(few, 0.9 * min(failures))  # no smaller than it has to be

    def test_forecasts_are_of_these_curves_and_this_model(self):
        found, study = json.loads((ROOT / "docs/forecast.json").read_text()), Study(ROOT / "docs/curves")
        self.assertEqual(found["time_left"], study_forecast.fitted_time_left(ROOT))
        failing = {run.name: study.failure(run) for run in study.distinct(study.runs) if not run.is_continued and study.failure(run)}
        self.assertEqual({name: life["failure"] for name, life in found["failing"].items()}, failing, "scripts/study --forecast judges the curves anew")
        self.assertGreater(len(found["others"]), 20)

    def test_a_changed_digit_is_found(self):
        mark = "<!-- = failure roads-flash2-1 -->"
        value = (ROOT / "docs/study.md").read_text().split(mark)[1].split("<!--")[0]
        self.assert_planted_faults_are_found(
            ("docs/study.md", mark + value, mark + value[:-1] + "1", f"expected {mark}{value}"),
            ("docs/study.md", "| row sum, 2 bits | nearest | 3 (", "| row sum, 2 bits | nearest | 4 (", "expected | row sum, 2 bits | nearest | 3 ("),
            ("docs/train_with_it.md", "| `fp32` | 15 /", "| `fp32` | 16 /", "docs/train_with_it.md:"),
            ("README.md", "| PyTorch's FLASH kernel | 2 (", "| PyTorch's FLASH kernel | 3 (", "expected | PyTorch's FLASH kernel | 2 ("),
            ("README.md", "| 317 |", "| 417 |", "found | 64,12,1024,64 | 187 | 264 | 417 |"),
        )

    def test_a_changed_curve_is_found(self):
        largest = json.loads((ROOT / "docs/curves/nano.json").read_text())["seeds-flash2-3"]
        peak = max(row[1] for row in largest["offset"])
        self.assert_planted_faults_are_found(
            ("docs/curves/nano.json", str(peak), str(3 * peak), "docs/study.md:"),
            ("docs/drift.svg", 'polyline points="6', 'polyline points="7', "docs/drift.svg: differs"),
        )

    def test_what_the_program_or_the_log_no_longer_says_is_found(self):
        self.assert_planted_faults_are_found(
            ("docs/reference.md", "| `--to FORMAT` |", "| `--too FORMAT` |", "found | `--too FORMAT` |"),
            ("docs/reference.md", "| `offset` | list of lists", "| `offsets` | list of lists", "found | `offsets` | list of lists"),
            ("docs/study_a_format.md", "0x6A", "0x6B", "docs/study_a_format.md:"),
            ("src/diagnosis/health.h", "kDriftTimes = 8;", "kDriftTimes = 9;", "docs/how_it_works.md:"),
            ("docs/my_run_blew_up.md", "src/diagnosis/isolate.h kReplaySteps", "src/diagnosis/isolate.h kReplayStepz", "expected kReplayStepz = NUMBER in src/diagnosis/isolate.h, found none"),
            ("include/evenkeel.h", "evenkeel_probe_field(int32_t index)", "evenkeel_probe_field(int64_t index)", "evenkeel_probe_field(int64_t index)"),
            ("docs/experiments.md", "<!-- table: attention_speed -->\n", "", "expected <!-- table: attention_speed --> before a table"),
        )

    def test_a_number_from_nowhere_is_found(self):
        self.assert_planted_faults_are_found(
            *((page, "\n\n", "\n\nIt fails 17.5 times.\n\n", f"{page}:3: expected a figure from the curves (or a mark that says where it comes from), found 17.5")
              for page in page_marks.pages_of(ROOT) if page not in page_marks.NOT_LINTED),
            ("docs/study.md", "## The law\n", "## The law\n\n<!-- experiments.md: what speaks first -->17.171717<!-- -->\n", '"what speaks first", found "17.171717"'),
            ("docs/study.md", "## The mechanism\n", "## The mechanism\n\n<!-- experiments.md -->169<!-- -->\n", "169: expected one section of docs/experiments.md"),
            ("docs/study.md", "<!-- experiments.md: what speaks first -->169 (34..622)<!-- -->", "<!-- experiments.md: what speaks first -->168 (34..622)<!-- -->", 'found "168 (34..622)"'),
            ("docs/study.md", "<!-- experiments.md: what speaks first -->106 (37..150)<!-- -->", "<!-- experiments.md: noise is not enough -->106 (37..150)<!-- -->", '"noise is not enough", found "106 (37..150)"'),
            ("docs/study.md", "-->13 replays<!-- -->", "-->3 replays<!-- -->", 'found "3 replays"'),
            ("docs/study.md", "= failure roads-flash2-1 ", "= failure roads-flash9-1 ", "expected a run of docs/curves"),
        )

    def test_a_citation_is_of_whole_words_of_one_section(self):
        for words, text in (("4", "46 steps"), ("46", "1,046"), ("46", "46.5"), ("46", "46,000"), ("4", "1e-4"), ("4", "4e-3"), ("0.2", "0.2 %"), ("16", "2026-11-16"), ("1e-6", "-1e-6"), ("5", "0.5"), ("11", "11-16")):
            self.assertFalse(page_marks.has_words(text, words), (words, text))
        for words, text in (("46", "at 46, healthy"), ("46", "is 46."), ("46", "(46)"), ("0.2 %", "pays 0.2 %."), ("8 / 4 / 4", "| 8 / 4 / 4 |"), ("1.19", "1.19 / 1.17"), ("z = -16", "(z = -16)")):
            self.assertTrue(page_marks.has_words(text, words), (words, text))
        log = "# Log\n1\n## 2026-11-15: one thing\n2\n### A part\n3\n```\n# a comment 4\n```\n## 2026-11-16: one more thing\n5\n"
        self.assertEqual([page_marks.has_words(page_marks.section_of(log, "one thing"), n) for n in "12345"], [False, True, True, True, False])
        self.assertEqual([page_marks.has_words(page_marks.section_of(log, "A part"), n) for n in "2345"], [False, True, True, False])
        for beginning in ("one", "two", ""):
            with self.assertRaisesRegex(ValueError, "expected one section"):
                page_marks.section_of(log, beginning)

    def test_only_some_kinds_of_numbers_need_no_mark(self):
        for words in ("GPT-2 124M on an H200 with PyTorch 2.11, transformers 4.53, compute capability 8.0", "BF16, E4M3 and HiFloat8, 8 extra bits, 2^-24",
                      "seeds 1, 2 and 3 in layer 2 of rank 0", "| 10 | a row |", "`--steps 300` and \"400 steps\"", "<!-- given -->5 %<!-- -->"):  # fmt: skip
            self.assertEqual(page_marks.unmarked_numbers(words), [], words)
        for words in ("0.2 % of a step", "1.26 times", "313 TFLOP/s", "| a row | 10 |", "12 of 12", "an offset of 1e6", "46 s", "1,201", "seed 1 fails at 16,400"):
            self.assertEqual(len(page_marks.unmarked_numbers(words)) > 0, True, words)


if __name__ == "__main__":
    unittest.main()
