"""The packed curves of the study (docs/curves/*.json), and its words as code: offset, drift, failure, lead time.

Standard library only. Nothing here writes. Layers are counted from 1, as in the text. A step is an index from 0; "by step n" means
that n steps were made.

A packed run (scripts/study --pack) has
    plan, seed, size, options, branch       what was trained; branch: (run, step) that it continues
    torch                                   its attention kernel, if PyTorch trained it
    steps, loss, gradient_norm              last step of each group of steps; the group's mean loss and median gradient norm
    fact_steps, offset, largest_score       recorded steps; by layer, the largest over heads
    largest                                 by layer, (value, step) over the whole record; runs packed before this field existed lack it
    loss_means                              means of 200 steps: of steps 0 to 199, 200 to 399, ...; may be lacking likewise
    validation                              (step, validation loss); may be lacking likewise
    text                                    which text it read, where that is not its size's own
    warmup                                  steps; runs packed before this field existed have their size's
    law                                     probes of the head with the largest offset (scripts/study, LAW_FIELDS); of runs with probes
    leak_share                              (step, leak share of the median head), of runs with probes
    summary                                 last step, final loss, validation loss, offset and score at some marks
"""

import functools
import json
import math
from pathlib import Path

from study_sizes import SIZES

WINDOW = 200  # steps of a mean loss: the unit in which failure is judged
DRIFT_FACTOR = 8  # an offset drifts that stays above this multiple of its healthy level and doubles
FAILURE_EXCESS = 0.05  # of the loss, above the healthy twin's
REMEDIES = ("zero_sum", "consistent", "wide_output")  # the one that keeps the sum best first


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def median(values):
    values = sorted(values)
    middle = len(values) // 2
    return math.nan if not values else values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def ranks(values):
    """From 0 on; equal values share the mean of their places."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def rank_correlation(ones, others):
    """Spearman's: 1 where both have one order, -1 where the orders are opposite."""
    ones, others = ranks(ones), ranks(others)
    a, b = mean(ones), mean(others)
    spread = math.sqrt(sum((x - a) ** 2 for x in ones) * sum((y - b) ** 2 for y in others))
    return sum((x - a) * (y - b) for x, y in zip(ones, others)) / spread if spread else math.nan


class Run:
    def __init__(self, name, packed):
        self.name, self.packed = name, packed
        self.plan, self.seed, self.size = packed["plan"], packed["seed"], packed["size"]
        self.branch, self.text = packed.get("branch"), packed.get("text", "")
        self.warmup = packed.get("warmup", SIZES[self.size].warmup)
        self.last_step = packed["summary"]["step"]  # steps made
        self.fact_steps, self.offset, self.score = packed["fact_steps"], packed["offset"], packed["largest_score"]
        self.layers = range(1, len(self.offset[0]) + 1)

    @property
    def in_torch(self):
        """The attention kernel of a run that PyTorch trained, from our first checkpoint on; else None."""
        return self.packed.get("torch")

    @property
    def is_continued(self):
        """Shares its first steps with the run it branched off."""
        return bool(self.branch) and not self.in_torch

    @property
    def stabiliser(self):
        return self.plan.partition("stabiliser=")[2].partition(",")[0]

    @property
    def settings(self):
        """The options that change what is trained, not how often something is recorded."""
        options, found = self.packed["options"], []
        for n, word in enumerate(options[:-1]):
            trained = word == "--set" and options[n + 1].startswith(("model.", "optimizer.")) and "tile_keys" not in options[n + 1]
            if trained or word in ("--optimizer", "--lr", "--sequences", "--schedule"):
                found.append(options[n + 1])
        return tuple(sorted(found))

    @property
    def lr(self):
        """The learning rate after the warm-up."""
        options = self.packed["options"]
        return float(options[options.index("--lr") + 1]) if "--lr" in options else SIZES[self.size].lr

    @property
    def is_guarded(self):
        return "--guard" in self.packed["options"]

    @property
    def is_whole_record(self):
        """Are maxima of this run maxima over every record, or of the points that were kept?"""
        return "largest" in self.packed or self.fact_steps[2] - self.fact_steps[1] <= SIZES[self.size].facts_every

    def largest(self, kind, layer=None, since=0):
        """(value, step) of the largest offset or score, of one layer or of all. Of the recorded points where the run was packed thinned."""
        found = []
        if kind in self.packed.get("largest", {}) and not since:
            by_layer = self.packed["largest"][kind]
            found = [tuple(pair) for pair in (by_layer if layer is None else [by_layer[layer - 1]])]
        found_whole = bool(found)
        rows = self.offset if kind == "offset" else self.score
        for step, row in zip(self.fact_steps, rows):
            if step >= since:
                found.append((max(row) if layer is None else row[layer - 1], step))
        if layer is None and not since and not found_whole:  # the marks were taken from the whole record, and name their steps only nearly
            found += [(mark[kind], int(step)) for step, mark in self.packed["summary"].get("marks", {}).items()]
        return max(found)

    def at(self, kind, step, layer=None):
        """The last recorded value at or before a step; None where the record ends earlier."""
        if not self.fact_steps or step > self.last_step + SIZES[self.size].facts_every:
            return None
        n = max((n for n, s in enumerate(self.fact_steps) if s <= step), default=None)
        if n is None:
            return None
        row = (self.offset if kind == "offset" else self.score)[n]
        return max(row) if layer is None else row[layer - 1]

    def worst_layer(self):
        return max(self.layers, key=lambda layer: self.largest("offset", layer)[0])

    @functools.cache
    def loss_means(self):
        """Mean loss of each whole window of 200 steps. From thinned curves: the groups' means, weighted by their part of the window."""
        if "loss_means" in self.packed:
            return [math.nan if loss is None else loss for loss in self.packed["loss_means"]]
        first = 1 if self.in_torch else 0
        edges, sums = [first], [0.0]
        for step, loss in zip(self.packed["steps"], self.packed["loss"]):
            edges.append(step + 1)
            sums.append(sums[-1] + loss * (step + 1 - edges[-2]))
        found, n = [], 0
        total_at = lambda x, n: sums[n] + (sums[n + 1] - sums[n]) * (x - edges[n]) / (edges[n + 1] - edges[n])
        totals = []
        for x in range(0, edges[-1] + 1, WINDOW):
            while n + 2 < len(edges) and edges[n + 1] < x:
                n += 1
            totals.append(total_at(max(x, first), n))
        for k in range(len(totals) - 1):
            found.append((totals[k + 1] - totals[k]) / (WINDOW - (first if k == 0 else 0)))
        return found

    def losses(self):
        """(step, loss) of every step: its group's mean."""
        begin = 1 if self.in_torch else 0
        for step, loss in zip(self.packed["steps"], self.packed["loss"]):
            yield from ((at, loss) for at in range(begin, step + 1))
            begin = step + 1

    def loss_by(self, step):
        """Mean loss of the 200 steps before a step that is a multiple of 200; NaN where there is none."""
        means, n = self.loss_means(), step // WINDOW - 1
        return means[n] if 0 <= n < len(means) else math.nan

    def final_loss(self):
        """Mean loss of the last whole window of 200 steps."""
        return self.loss_means()[-1] if self.loss_means() else math.nan

    def validation(self):
        """(step, loss) of the last validation; None where there was none."""
        if self.packed.get("validation"):
            return tuple(self.packed["validation"][-1])
        last = self.packed["summary"].get("validation_loss")
        return None if last is None else (self.last_step, last)


class Study:
    """All runs, each trajectory once."""

    def __init__(self, folder):
        self.runs = {}
        for path in sorted(Path(folder).glob("*.json")):
            for name, packed in json.loads(path.read_text()).items():
                if name in self.runs:
                    raise ValueError(f"{path}: expected each run once in {folder}, found {name} again")
                self.runs[name] = Run(name, packed)

    def __getitem__(self, name):
        if name not in self.runs:
            raise KeyError(f"expected a run of docs/curves, found {name}")
        return self.runs[name]

    def distinct(self, names):
        """Runs of these names that exist, each trajectory once: two runs are one where their losses are the same."""
        found, seen = [], set()
        for name in names:
            run = self.runs.get(name)
            if run is None:
                continue
            key = (run.size, run.seed, tuple(run.packed["loss"][:20]), tuple(run.packed["steps"][:20]), tuple(run.packed["loss"][-20:]))
            if key not in seen:
                seen.add(key)
                found.append(run)
        return found

    @functools.cache
    def twin(self, run):
        """The same run with a remedy: seed, batches and settings the same. None where there is no such run.

        First choice is the plan with a remedy added, then a run that is healthy by construction. Of several that go as far as the run, the one with the remedy that keeps the sum
        best; else the longest.
        """
        alike = [other for other in self.runs.values()
                 if other is not run and other.size == run.size and other.text == run.text and other.seed == run.seed and not other.is_continued and not other.is_guarded
                 and tuple(other.packed["loss"]) != tuple(run.packed["loss"])]  # fmt: skip
        if run.in_torch:
            first = [other for other in alike if other.in_torch in ("evenkeel", "math")]
        else:
            alike = [other for other in alike if not other.in_torch and other.settings == run.settings]
            base = run.plan.partition(",stabiliser=")[0]
            first = [other for remedy in REMEDIES for other in alike if other.plan == f"{base},stabiliser={remedy}"]
        second = [other for plan in SIZES[run.size].controls for other in alike if other.plan == plan]
        for candidates in (first, second):
            long_enough = [other for other in candidates if other.last_step >= run.last_step]
            if long_enough:
                return long_enough[0]
        return max(first + second, key=lambda other: other.last_step, default=None)

    @functools.cache
    def healthy_level(self, twin, layer, last_step):
        """Median offset of a healthy run's layer, from the end of the warm-up on, in as many steps as the other run made: healthy offsets may grow, too.

        ValueError where there is no such step: a run that short has neither drifted nor not drifted."""
        warmup = SIZES[twin.size].warmup
        offsets = [row[layer - 1] for step, row in zip(twin.fact_steps, twin.offset) if warmup <= step < last_step]
        if not offsets:
            raise ValueError(f"{twin.name}: expected offsets from step {warmup}, the end of the warm-up, to step {last_step}, found none: too short to judge")
        return median(offsets)

    @functools.cache
    def drift(self, run, twin=None):
        """(step, layer) from which a layer's offset stays above 8 times its healthy level and doubles; None: no drift.

        It stays above to the end of the record, and doubles where it reaches twice as much. Of several layers, the first. The healthy level is that of the run's twin, or of the one given.
        """
        twin = twin or self.twin(run)
        found = []
        for layer in run.layers if twin else ():
            limit = DRIFT_FACTOR * self.healthy_level(twin, layer, run.last_step)
            start = None
            for step, row in zip(run.fact_steps, run.offset):
                if not row[layer - 1] > limit:
                    start = None
                elif start is None:
                    start = step
            if start is not None and run.largest("offset", layer, start)[0] >= 2 * limit:
                found.append((start, layer))
        return min(found, default=None)

    @functools.cache
    def excess(self, run, twin=None):
        """Loss above the twin's, as a share of it, for each window of 200 steps. Beyond the twin's end, against its last mean: losses fall, so this understates."""
        twin = twin or self.twin(run)
        if twin is None:
            return []
        theirs = twin.loss_means()
        return [ours / theirs[min(n, len(theirs) - 1)] - 1 for n, ours in enumerate(run.loss_means())]

    def failure(self, run, twin=None):
        """Steps made when a drifted run's mean loss of 200 steps is first more than 5 % above its twin's; None: no failure."""
        drift = self.drift(run, twin)
        if drift is None:
            return None
        for n, excess in enumerate(self.excess(run, twin)):
            if (n + 1) * WINDOW > drift[0] and not excess <= FAILURE_EXCESS:
                return (n + 1) * WINDOW
        return None

    def failure_step(self, run):
        """As failure(), to the step and not to a multiple of 200: the mean of the last 200 losses is more than 5 % above the twin's of the same steps (or the last there
        was). Of a thinned curve, steps of a group have its mean."""
        drift, twin = self.drift(run), self.twin(run)
        if drift is None:
            return None
        theirs, window, reference = dict(twin.losses()), [], math.nan
        for step, loss in run.losses():
            window = [*window[-(WINDOW - 1) :], (loss, theirs.get(step, math.nan))]
            if len(window) < WINDOW or step < drift[0]:
                continue
            ours, beside = (mean(column) for column in zip(*window))
            reference = beside if beside == beside else reference
            if ours > (1 + FAILURE_EXCESS) * reference:
                return step
        return None

    def failures_by_control(self, run):
        """The step of failure against every control of the same seed: how far the choice of a twin moves it."""
        controls = [other for other in self.runs.values() if other is not run and other.size == run.size and other.text == run.text and other.seed == run.seed and other.plan in SIZES[run.size].controls]
        return [failure for other in controls if (failure := self.failure(run, other)) is not None]

    def lead(self, run):
        """Steps from drift to failure."""
        failure = self.failure(run)
        return None if failure is None else failure - self.drift(run)[0]

    def offset_share(self, run):
        """Offset over largest score in the layer that drifts, from the drift on: (least, most) of the recorded points."""
        drift = self.drift(run)
        if drift is None:
            return None
        step, layer = drift
        shares = [row[layer - 1] / score[layer - 1] for s, row, score in zip(run.fact_steps, run.offset, run.score) if s >= step]
        return min(shares), max(shares)

    def growth(self, run, low=40, high=1500):
        """E-foldings of the drifting layer's offset in 1,000 steps, from the last record below `low` to the first above `high`; None where either is not recorded."""
        drift = self.drift(run)
        if drift is None:
            return None
        points = [(step, row[drift[1] - 1]) for step, row in zip(run.fact_steps, run.offset) if step >= SIZES[run.size].warmup]
        end = next((step for step, offset in points if offset > high), None)
        begin = max((step for step, offset in points if end is not None and offset < low and step < end), default=None)
        return None if begin is None else 1000 * math.log(high / low) / (end - begin)

    @functools.cache
    def offset_at_doubled_gradient(self, run):
        """The drifting layer's offset when the gradient norm is first twice the twin's (group medians within 200 steps); None: never."""
        drift, twin = self.drift(run), self.twin(run)
        if drift is None:
            return None
        theirs = list(zip(twin.packed["steps"], twin.packed["gradient_norm"]))
        for step, norm in zip(run.packed["steps"], run.packed["gradient_norm"]):
            near = [other for at, other in theirs if abs(at - step) <= WINDOW] if step >= drift[0] else []
            if near and norm > 2 * median(near):
                return run.at("offset", step, drift[1])
        return None

    # How fast the offset grows. q and k of the tokens' common direction x are W_Q x and W_K x. AdamW moves a weight by the learning
    # rate eta a step at most (a factor of 1.17 more for single steps, by Cauchy-Schwarz with its 0.9 and 0.95). So each of the D
    # features of q moves by eta |x|_1 at most, and |x|_1 <= sqrt(width) |x|_2 = width behind a LayerNorm with gains of one. After t
    # steps of one direction |q| and |k| are at most sqrt(D) eta width t, and the offset q . k / sqrt(D) is at most
    # sqrt(D) (eta width t)^2. It is quadratic in the steps, so its root is what has a speed, and D^(1/4) eta width bounds that speed.

    @functools.cache
    def speeds(self, run):
        """(speed, window, layer): growth of the root of a layer's offset a step, between the medians of two successive windows of 200 steps; `window` is the second."""
        found = []
        for layer in run.layers:
            windows = {}
            for step, row in zip(run.fact_steps, run.offset):
                windows.setdefault(step // WINDOW, []).append(row[layer - 1])
            roots = {n: math.sqrt(median(offsets)) for n, offsets in windows.items()}
            found += [((roots[n] - roots[n - 1]) / WINDOW, n, layer) for n in roots if n - 1 in roots]
        return found

    def speed_bound(self, run):
        """The speed of AdamW's largest steps, all along one direction, with LayerNorm gains of one. Gains are trained: beyond one they raise it in proportion."""
        return SIZES[run.size].head_size ** 0.25 * run.lr * SIZES[run.size].width

    def largest_norm(self, run):
        """Of the gradient, since the drift: the largest median of a group of steps, as packed. Before the drift it is that of the first steps."""
        begin = self.drift(run)[0]
        return max(norm for step, norm in zip(run.packed["steps"], run.packed["gradient_norm"]) if step >= begin)

    def crossing(self, run, limit, back=100, ahead=1000):
        """Where a run's offset first is beyond a limit: step; speed since the last record at least `back` steps before; gradient norm of the group of steps it is in; loss above the twin's in that window of 200 steps (now), and the largest within `ahead` steps (excess). None: never."""
        tops = [max(row) for row in run.offset]
        n = next((n for n, top in enumerate(tops) if top > limit), None)
        if not n:
            return None
        step = run.fact_steps[n]
        before = max((m for m in range(n) if run.fact_steps[m] <= step - back), default=0)
        norms = [norm for last, norm in zip(run.packed["steps"], run.packed["gradient_norm"]) if last >= step]
        excess = self.excess(run)[step // WINDOW : (step + ahead) // WINDOW + 1]
        speed = (math.sqrt(tops[n]) - math.sqrt(tops[before])) / (step - run.fact_steps[before])
        return {"step": step, "speed": speed, "norm": norms[0] if norms else run.packed["gradient_norm"][-1], "now": excess[0] if excess else math.nan, "excess": max(excess, default=math.nan)}
