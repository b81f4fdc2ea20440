"""How fast the offset grows and what the loss pays: tables and figures of the study that compare kernels and trainers (study_docs.py).

Standard library only. The definitions (speed, its bound, crossing) are in study_curves.py.
"""

from study_curves import WINDOW, mean, median, rank_correlation
from study_runs import ADDED_NOISE
from study_sizes import on_cpu

LIMITS = (10_000, 40_000, 80_000, 160_000, 500_000)  # offsets at which the runs are compared
HARMED = 0.3  # of the loss, above the twin's
TORCH = {"flash": "PyTorch, FLASH", "hopper_none": "PyTorch, ours without a remedy", "cudnn": "PyTorch, cuDNN", "efficient": "PyTorch, EFFICIENT", "math": "PyTorch, MATH", "evenkeel": "PyTorch, ours"}
KERNELS = ("ours, fused Hopper kernels", "ours, any-plan kernels", *TORCH.values(), "ours, Hopper kernels")
# Runs of `flash2` on our Hopper kernels while a fused multiply-add left an error in the largest score's exponent.
FUSED = ("roads-flash2-1", "guard-flash2-1", "seeds-flash2-2", "seeds-flash2-3", "twins-ours-2", "twins-ours-3", "twins-ours-3b", "size-flash2-1")


def kernel(run):
    """Whose attention kernels, and in whose trainer. At nano and gpt2, plans other than flash2 run on the any-plan kernels."""
    if run.in_torch:
        return TORCH[run.in_torch]
    if run.plan.partition(",stabiliser=")[0].partition(",keel=")[0] != "flash2":
        return KERNELS[1]
    return KERNELS[0] if run.name in FUSED else KERNELS[-1]


def spread(values, words):
    """The least and the most."""
    low, high = words(min(values)), words(max(values))
    return low if low == high else f"{low} to {high}"


class Harm:
    """A part of Figures: `self.study` is the Study."""

    def drifting_runs(self):
        """Runs of nano and gpt2 that drift and were trained in one piece."""
        runs = self.study.distinct(name for name in self.study.runs if not on_cpu(self.study[name]) and not self.study[name].is_continued)
        return [run for run in runs if self.study.drift(run)]

    def harm_facts(self, run):
        speed, window, layer = max(self.study.speeds(run))
        return {"speed": speed, "step": window * WINDOW, "layer": layer, "share": speed / self.study.speed_bound(run), "offset": run.largest("offset")[0],
                "norm": self.study.largest_norm(run), "excess": max(self.study.excess(run))}  # fmt: skip

    def speed_before_failure(self, run):
        """The largest speed between windows that end before the failure; None: no failure."""
        failure = self.study.failure(run)
        return max((speed for speed, n, _ in self.study.speeds(run) if (n + 1) * WINDOW <= failure), default=None) if failure else None

    def harm_windows(self, least=10_000):
        """(speed, offset, excess, rise of the excess) of every window of 200 steps in which a run's largest offset is beyond `least`."""
        found = []
        for run in self.drifting_runs():
            excess, tops = self.study.excess(run), {}
            for speed, n, layer in self.study.speeds(run):
                offset = median([row[layer - 1] for step, row in zip(run.fact_steps, run.offset) if step // WINDOW == n])
                tops[n] = max(tops.get(n, (0, 0)), (offset, speed))
            found += [(speed, offset, excess[n], excess[n] - excess[n - 1]) for n, (offset, speed) in tops.items() if offset > least and 1 <= n < len(excess)]
        return found

    def harm_value(self, what, *rest):
        """`rank speed|offset|norm|before`: rank correlation with the largest loss above the twin's; `windows`, `window_rank speed|offset excess|rise`, `runs`, `bound SIZE`;
        `at LIMIT speed|norm|now|excess least|most KERNEL`, `at LIMIT runs KERNEL`: KERNEL counts the rows of KERNELS from 1 on, -1: all others than 1; `at_rank LIMIT speed|norm`: with the loss of the next 1,000 steps;
        `harmed`, `mild`: largest and least norm on both sides of HARMED."""
        facts = {run: self.harm_facts(run) for run in self.drifting_runs()}
        if what == "runs":
            return str(len(facts))
        if what == "rank":
            if rest[0] == "before":
                pairs = [(speed, facts[run]["excess"]) for run in facts if (speed := self.speed_before_failure(run)) is not None]
            else:
                pairs = [(one[rest[0]], one[rest[1] if len(rest) > 1 else "excess"]) for one in facts.values()]
            return f"{rank_correlation(*zip(*pairs)):.2f}"
        if what == "bound":
            return f"{self.study.speed_bound(next(run for run in self.study.runs.values() if run.size == rest[0] and not run.settings)):.1f}"
        if what in ("windows", "window_rank"):
            windows = self.harm_windows()
            columns = dict(zip(("speed", "offset", "excess", "rise"), zip(*windows)))
            return str(len(windows)) if what == "windows" else f"{rank_correlation(columns[rest[0]], columns[rest[1]]):.2f}"
        if what in ("harmed", "mild"):
            norms = [one["norm"] for one in facts.values() if (one["excess"] > HARMED) == (what == "harmed")]
            return {"count": lambda: str(len(norms)), "least": lambda: self.number(min(norms)), "most": lambda: self.number(max(norms))}[rest[0]]()
        limit, *rest = rest
        found = {run: at for run in facts if (at := self.study.crossing(run, float(limit)))}
        if what == "at_rank":
            return f"{rank_correlation([at[rest[0]] for at in found.values()], [at['excess'] for at in found.values()]):.2f}"
        which = int(rest[-1])
        chosen = [at for run, at in found.items() if (kernel(run) == KERNELS[abs(which) - 1]) == (which > 0)]
        if rest[0] == "runs":
            return str(len(chosen))
        value = {"least": min, "most": max}[rest[1]](at[rest[0]] for at in chosen)
        return self.percent(value).lstrip("+") if rest[0] in ("excess", "now") else f"{value:.1f}" if value < 10 else self.number(value)

    def harm_table(self):
        """One line a run that drifts, by kernel, the mildest first."""
        rows = []
        for run in sorted(self.drifting_runs(), key=lambda run: (KERNELS.index(kernel(run)), self.harm_facts(run)["excess"])):
            one = self.harm_facts(run)
            rows.append([run.name, kernel(run), f"{one['speed']:.2f} ({self.number(one['step'])})", f"{one['share']:.2f}", self.offset_cell(run), self.number(one["norm"]), self.percent(one["excess"])])
        return self.table(["run", "attention kernels", "largest speed (step)", "share of the bound", "largest offset", "largest gradient norm since the drift", "largest loss above the twin's"], rows)

    def fork_table(self):
        """At the first record beyond an offset: by kernel, least and most over runs."""
        rows = []
        for limit in LIMITS:
            for words in KERNELS:
                found = [at for run in self.drifting_runs() if kernel(run) == words and (at := self.study.crossing(run, limit))]
                if found:
                    rows.append([f"{limit:,}", words, str(len(found)), spread([at["speed"] for at in found], lambda v: f"{v:.1f}"), spread([at["norm"] for at in found], lambda v: f"{v:.1f}" if v < 10 else self.number(v)),
                                 spread([at["now"] for at in found if at["now"] == at["now"]], self.percent), spread([at["excess"] for at in found if at["excess"] == at["excess"]], self.percent)])  # fmt: skip
        return self.table(["offset passed", "attention kernels", "runs", "speed of the 100 steps before", "gradient norm there", "loss above the twin's in those 200 steps", "largest loss above the twin's within 1,000 steps"], rows)

    def mean_loss(self, run, begin, end):
        """Of the groups of steps that end there, as packed."""
        losses = [loss for last, loss in zip(run.packed["steps"], run.packed["loss"]) if begin < last <= end]
        return self.loss(mean(losses)) if run.last_step >= end - 1 else "–"

    def added_noise_table(self):
        """Branches of one drifting run with noise added to the leak: leak, offset and loss on the way."""
        rows = []
        for step in (700, 800):
            for name, (words, _) in ADDED_NOISE.items():
                run = self.study.runs.get(f"added_noise-{name}_{step}-1")
                if run is None:
                    continue
                law = run.packed["law"]
                leaks = [leak for at, leak in zip(law["steps"], law["leak_rms"]) if step <= at < step + 100]
                marks = [step + more for more in (50, 100, 200, 300)]
                offsets = [run.at("offset", mark) if mark <= run.last_step else None for mark in marks]
                means = [self.mean_loss(run, step + begin, step + end) for begin, end in ((0, 100), (200, 300))]
                norms = [norm for last, norm in zip(run.packed["steps"], run.packed["gradient_norm"]) if last >= step]
                rows.append([self.number(step), words, f"{median(leaks):.1e}" if leaks else "–", " / ".join(self.number(x) for x in offsets), f"{max(norms):.1f}", " / ".join(means)])
        if not rows:
            return "docs/curves holds no runs for this table yet.\n"
        return self.table(["from step", "noise added in", "leak, rms, first 100 steps", "offset 50 / 100 / 200 / 300 steps later", "largest gradient norm since", "mean loss of the first 100 steps / of steps 200 to 300"], rows)
