"""Other designs of a forecast than the program's, judged on the same runs and moments (study_forecast.py): what would each reach, and what bounds it?

statistics   what the recorded offsets and scores can tell at best: a logistic regression on nine statistics of their course
law          what the plan tells before the first step: a survival law on the leak that `evenkeel conform` finds in it and on the learning rate
both         the law's date, and the program's forecast from the moment on at which there is one
twin         the healthy twin as a second run beside it: an offset of twice the twin's
history      earlier runs of the same plan and settings with other seeds, as `evenkeel forecast --history` judges them
all          the history's date where there is one, else the program's, else the law's

Fits never see the judged run, nor any run that rounds at the same place (`site`). Standard library only.
"""

import json
import math
import subprocess

import study_runs
from study_curves import median
from study_sizes import SIZES, on_cpu

LEAST_LEAK = 1e-4  # of delta: plans that leak less do not fail by the law
HORIZON = 1.5  # planned lengths of a run: the law raises no alarm for what comes later
KERNEL_PLANS = {"flash": "flash2", "cudnn": "flash2", "hopper_none": "flash2", "math": "fp32", "evenkeel": "flash2,stabiliser=wide_output"}
RIDGE = 0.02  # of the fits: of the order of one run's weight


# --- linear algebra in the small


def solve(matrix, right):
    """Gauss, with pivots."""
    rows = [[*row, y] for row, y in zip(matrix, right)]
    for k in range(len(rows)):
        pivot = max(range(k, len(rows)), key=lambda n: abs(rows[n][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for n in range(k + 1, len(rows)):
            factor = rows[n][k] / rows[k][k]
            rows[n] = [a - factor * b for a, b in zip(rows[n], rows[k])]
    found = [0.0] * len(rows)
    for k in reversed(range(len(rows))):
        found[k] = (rows[k][-1] - sum(rows[k][n] * found[n] for n in range(k + 1, len(rows)))) / rows[k][k]
    return found


def least_squares(points, values, weights, ridge):
    """Weighted; the first column is the constant, which the ridge spares."""
    size = len(points[0])
    matrix, right = [[0.0] * size for _ in range(size)], [0.0] * size
    for x, y, w in zip(points, values, weights):
        for a in range(size):
            wx = w * x[a]
            right[a] += wx * y
            row = matrix[a]
            for b in range(size):
                row[b] += wx * x[b]
    for a in range(1, size):
        matrix[a][a] += ridge
    return solve(matrix, right)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


# --- what is known of a run


def site(run):
    """What rounds: runs of one site are left out together."""
    plan = run.plan or KERNEL_PLANS[run.in_torch]
    if plan.startswith("fp32"):
        for word, name in (("row_sum=", "row sum"), ("pv=", "O"), ("output", "O"), ("scores=", "scores"), ("dprobs=", "dP"), ("probs=", "P"), ("delta=", "delta")):
            if word in plan:
                return name
    return plan.partition(",stabiliser=")[0]


def parts(run):
    """The plans of a run's heads, the default first."""
    plan = run.plan or KERNEL_PLANS[run.in_torch]
    default, *scopes = plan.split(";")
    without_keel = lambda text: ",".join(clause for clause in text.strip().split(",") if not clause.startswith("keel="))
    return [without_keel(default)] + [without_keel(default) + "," + without_keel(scope.partition(":")[2]) for scope in scopes]


def is_bounded(run):
    """Something pulls the offset back or bounds it, whatever leaks. The law does not hold there."""
    options = " ".join(run.packed["options"])
    return "keel=" in run.plan or "--guard" in options or "qk_clip" in options


def rate(run):
    options = run.packed["options"]
    given = [float(options[n + 1]) for n, word in enumerate(options[:-1]) if word == "--lr"]
    return given[-1] if given else SIZES[run.size].lr


def planned_steps(run):
    known = {line.folder: line.steps for line in study_runs.runs(None)}
    return max(run.last_step, known.get(run.name.rstrip("bc"), 0))


def leaks_of_plans(program, plans):
    """By plan: (mean leak where the loss has seen the error, rms leak where it has not), in units of delta's rms."""
    found = {}
    for plan in plans:
        done = subprocess.run([program, "conform", "--json", "--rows", "8192", "--plan", plan, "--case", "loss_feedback", "--case", "one_signed_v"], capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{plan}: expected a judgement, found exit code {done.returncode}: {done.stderr or done.stdout}")
        cases = {case["case"]: case["residual"] for case in json.loads(done.stdout)["plans"][0]["cases"]}
        found[plan] = (abs(cases["loss_feedback"]["mean"]), cases["one_signed_v"]["rms"])
    return found


# --- the law


class Law:
    """ln(rate x step of failure) is normal around a line in: the constant, linear layers in BF16 or not, ln mean leak, ln rms leak."""

    def __init__(self, study, leaks, runs):
        self.leaks = leaks
        points = [self.point(run) for run in runs]
        failures = [study.failure(run) for run in runs]
        ends = [math.log(rate(run) * (failure or run.last_step)) for run, failure in zip(runs, failures)]
        # Runs that ended before they failed count by what is expected beyond their end (EM of a censored regression).
        values, self.line, self.spread = list(ends), None, 1.0
        for _ in range(200):
            self.line = least_squares(points, values, [1.0] * len(points), RIDGE)
            squares = 0.0
            for n, (x, end, failure) in enumerate(zip(points, ends, failures)):
                mean = dot(x, self.line)
                if failure:
                    squares += (end - mean) ** 2
                    continue
                z = (end - mean) / self.spread
                hazard = math.sqrt(2 / math.pi) * math.exp(-z * z / 2) / max(math.erfc(z / math.sqrt(2)), 1e-300) if z < 8 else z
                values[n] = mean + self.spread * hazard
                squares += self.spread**2 * (1 + z * hazard)
            self.spread = math.sqrt(squares / len(points))

    def point(self, run):
        mean, rms = max(self.leaks[plan] for plan in parts(run))
        return [1.0, float(not on_cpu(run)), math.log(max(mean, 1e-9)), math.log(max(rms, 1e-9))]

    def holds(self, run):
        """Does the plan leak, in most heads, with nothing to bound it?"""
        return self.leaks[parts(run)[0]][0] > LEAST_LEAK and not is_bounded(run)

    def step(self, run, now=0):
        """The median step of failure of a run that has lasted so long."""
        middle = dot(self.point(run), self.line) - math.log(rate(run))
        alive = 0.5 * math.erfc((math.log(max(now, 1)) - middle) / self.spread / math.sqrt(2))
        low, high = math.log(max(now, 1)), middle + 20 * self.spread
        for _ in range(60):  # bisection for half of what is alive
            half = (low + high) / 2
            low, high = (half, high) if 0.5 * math.erfc((half - middle) / self.spread / math.sqrt(2)) > alive / 2 else (low, half)
        return math.exp(low)


# --- the statistics of a course


def slope(x, y):
    """(slope, its error, the line's end) by least squares; neighbours err alike (src/diagnosis/forecast.cpp)."""
    n, mx, my = len(x), sum(x) / len(x), sum(y) / len(y)
    xx = sum((a - mx) ** 2 for a in x)
    found = sum((a - mx) * (b - my) for a, b in zip(x, y)) / xx
    rest = [b - my - found * (a - mx) for a, b in zip(x, y)]
    squares = sum(r * r for r in rest)
    alike = min(max(sum(a * b for a, b in zip(rest, rest[1:])) / squares, 0), 0.95) if squares else 0
    return found, math.sqrt(squares / max(1, n - 2) / xx * (1 + alike) / (1 - alike)), my + found * (x[-1] - mx)


def statistics(run, now):
    """Of the layer that grows most: what its offsets and scores were like up to a step. None: too short."""
    count = sum(step <= now for step in run.fact_steps)
    first = sum(step < run.warmup for step in run.fact_steps)
    if count - first < 8 or now < 1.5 * run.warmup:
        return None
    steps = [float(step) for step in run.fact_steps[first:count]]
    log = lambda rows, layer: [math.log(max(1, abs(row[layer]))) if math.isfinite(row[layer]) else 20 for row in rows[first:count]]
    found = []
    for layer in range(len(run.offset[0])):
        offsets = log(run.offset, layer)
        row = []
        for window in (0.4, 0.2):
            begin = min(sum(step < now - window * (now - run.warmup) for step in steps), len(steps) - 4)
            grown, error, end = slope(steps[begin:], offsets[begin:])
            row += [grown * now, (grown - 2 * error) * now, end - median(offsets[: max(begin, 1)])]
        found.append([*row, end, end - log(run.score, layer)[-1]])
    best = max(found, key=lambda row: row[1] + row[6])
    others = [row[6] for row in found if row is not best]
    return [max(-30.0, min(30.0, x)) for x in (*best, best[6] - median(others) if others else 0.0)]


class Logistic:
    """Weighted, with a ridge, by Newton's method, on statistics of mean 0 and deviation 1."""

    def __init__(self, points, labels, weights):
        total = sum(weights)
        self.means = [sum(w * x[k] for x, w in zip(points, weights)) / total for k in range(len(points[0]))]
        self.scales = [math.sqrt(sum(w * (x[k] - m) ** 2 for x, w in zip(points, weights)) / total) or 1.0 for k, m in enumerate(self.means)]
        scaled = [self.scaled(x) for x in points]
        self.line = [0.0] * len(scaled[0])
        for _ in range(8):
            work, importance = [], []
            for x, label, w in zip(scaled, labels, weights):
                z = max(-12.0, min(12.0, dot(x, self.line)))
                p = 1 / (1 + math.exp(-z))
                importance.append(w * p * (1 - p))
                work.append(z + (label - p) / (p * (1 - p)))
            self.line = least_squares(scaled, work, importance, 1.0)

    def scaled(self, x):
        return [1.0, *((a - m) / s for a, m, s in zip(x, self.means, self.scales))]

    def score(self, x):
        return dot(self.scaled(x), self.line)


# --- the judgement


def first_of(*designs):
    """At each moment the date of the first design that has one."""
    return {name: [(moments[0][0], next((date for _, date in moments if date is not None), None)) for moments in zip(*(design[name] for design in designs))]
            for name in designs[0]}  # fmt: skip


class Designs:
    """runs, failing, healthy, moments ({name: steps}) as study_forecast has them; alarms: {name: [(step, expected failure or None)]} of the program."""

    def __init__(self, study, failing, healthy, moments, alarms, factor):
        self.study, self.failing, self.healthy, self.moments, self.alarms, self.factor = study, failing, healthy, moments, alarms, factor

    def left_out(self, make, runs, key=site):
        """{name: what `make` fits to the runs of other sites}."""
        fits = {name: make([run for run in runs if key(run) != name]) for name in sorted({key(run) for run in self.failing + self.healthy})}
        return {run.name: fits[key(run)] for run in self.failing + self.healthy}

    def scored(self, words, forecasts):
        """forecasts: {name: [(step, expected failure or None)]}."""
        right = lambda run, expected: expected is not None and 1 / self.factor <= expected / self.study.failure(run) <= self.factor
        half, first = [], []
        for run in self.failing:
            life = forecasts[run.name]
            half.append((run, min(life, key=lambda moment: abs(moment[0] - self.study.failure(run) / 2))[1]))
            first.append(right(run, next((expected for _, expected in life if expected is not None), None)))
        wrong = sorted(run.name for run in self.healthy if any(expected is not None for _, expected in forecasts[run.name]))
        return {"words": words, "half": sum(expected is not None for _, expected in half), "half_right": sum(right(*one) for one in half), "first_right": sum(first), "false_alarms": wrong}

    def statistics(self):
        """At as many false alarms as the program has. The limit is read off the judged scores, so this is a bound from above."""
        known = {run.name: [(step, statistics(run, step)) for step in self.moments[run.name]] for run in self.failing + self.healthy}
        fitted_on = lambda run: [x for _, x in (known[run.name][::2] if run in self.failing else known[run.name][-20:]) if x]

        def make(runs):
            points, labels, weights = [], [], []
            for run in runs:
                rows = fitted_on(run)
                points += rows
                labels += [float(run in self.failing)] * len(rows)
                weights += [1 / len(rows)] * len(rows) if rows else []
            return Logistic(points, labels, weights)

        models = self.left_out(make, self.failing + self.healthy)
        scores = {name: [(step, models[name].score(x) if x else -math.inf) for step, x in rows] for name, rows in known.items()}
        worst = sorted((max(score for _, score in scores[run.name]) for run in self.healthy), reverse=True)
        allowed = sum(any(expected is not None for _, expected in self.alarms[run.name]) for run in self.healthy)
        return {name: [(step, 1.5 * step if score > worst[allowed] else None) for step, score in rows] for name, rows in scores.items()}

    def law(self, laws):
        found = {}
        for run in self.failing + self.healthy:
            law, within = laws[run.name], HORIZON * planned_steps(run)
            dates = [(step, law.step(run, step) if law.holds(run) else math.inf) for step in self.moments[run.name]]
            found[run.name] = [(step, date if date < within else None) for step, date in dates]
        return found

    def twin(self):
        """An alarm where a layer's offset is twice the twin's at that step."""
        found = {}
        for run in self.failing + self.healthy:
            twin, dates = self.study.twin(run), []
            for step in self.moments[run.name]:
                ratios = []
                for layer in run.layers if twin and step >= run.warmup and step <= twin.last_step else ():
                    ours, theirs = run.at("offset", step, layer), twin.at("offset", step, layer)
                    ratios.append(ours / theirs if ours and theirs else 0)
                dates.append((step, 1.5 * step if max(ratios, default=0) >= 2 else None))
            found[run.name] = dates
        return found

    def judge(self, leaks, history):
        """leaks: of leaks_of_plans, of all plans of the judged runs; history: {name: [(step, expected failure or None)]} of earlier runs."""
        known = [run for run in self.failing + self.healthy if leaks[parts(run)[0]][0] > LEAST_LEAK and not is_bounded(run)]
        make = lambda runs: Law(self.study, leaks, [run for run in runs if run in known])
        laws, whole = self.left_out(make, known), make(known)
        law = self.law(laws)
        both = first_of(self.alarms, law)
        errors = [abs(math.log(laws[run.name].step(run) / self.study.failure(run))) for run in self.failing if run in known]
        of_size = self.left_out(make, known, lambda run: "micro" if on_cpu(run) else "larger")
        carried = [abs(math.log(of_size[run.name].step(run) / self.study.failure(run))) for run in self.failing if run in known and run.size == "nano"]
        one = next(run for run in known if run.plan == "flash2" and run.size == "nano")
        return {
            "offsets": self.scored("offsets, as `evenkeel forecast` does it", self.alarms),
            "statistics": self.scored("offsets and scores, nine statistics in a logistic regression", self.statistics()),
            "twin": self.scored("a healthy twin beside the run: twice its offset", self.twin()),
            "law": self.scored("the plan before the first step: the law below", law),
            "both": self.scored("the law, then the program's forecast", both),
            "history": self.scored("earlier runs of the same plan and settings, other seeds, where there are any", history),
            "all": self.scored("earlier runs, else the program's forecast, else the law", first_of(history, self.alarms, law)),
            "law_at_start": {"runs": len(errors), **{str(factor): sum(error < math.log(factor) for error in errors) for factor in (1.5, 2, 3)}},
            "law_line": [round(x, 2) for x in whole.line], "law_spread": round(whole.spread, 2),
            "law_carried": round(math.exp(median(carried)), 1),
            "law_flash2_nano": round(whole.step(one), -2),
        }  # fmt: skip
