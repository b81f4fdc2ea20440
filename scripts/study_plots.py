"""Figures of the study that compare runs: survival, forecasts against what happened, exponents, the 2 x 2. scripts/picture writes them.

Each function takes Figures (study_docs.py) and returns the text of an SVG, or None where docs/curves has no runs for it yet.
"""

import math

from study_curves import WINDOW
from study_docs import nano_group, number
from study_harm import FUSED, KERNELS, kernel
from study_micro import NOISY_RUNS
from study_sizes import SIZES

STYLE = """<style>
svg { background: #fff } text { font: 12px system-ui, sans-serif; fill: #444 } .title { font-weight: 600; fill: #222 }
.grid { stroke: #ddd; stroke-width: 1 } .cell { stroke: #fff; stroke-width: 2 }
</style>"""


def svg(width, height, words, body):
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{words}">
<title>{words}</title>
{STYLE}
""" + "\n".join(body) + "\n</svg>\n"


class Axes:
    """A chart's frame: places of values, grid and ticks. Logarithmic where asked for."""

    def __init__(self, left, top, width, height, x, y, log_x=False, log_y=False):
        self.left, self.top, self.width, self.height = left, top, width, height
        self.low_x, self.high_x, self.low_y, self.high_y = *x, *y
        self.scale_x, self.scale_y = (math.log10 if log else float for log in (log_x, log_y))

    def x(self, value):
        return self.left + self.width * (self.scale_x(value) - self.scale_x(self.low_x)) / (self.scale_x(self.high_x) - self.scale_x(self.low_x))

    def y(self, value):
        return self.top + self.height * (1 - (self.scale_y(value) - self.scale_y(self.low_y)) / (self.scale_y(self.high_y) - self.scale_y(self.low_y)))

    def frame(self, title, x_label, ticks_x, ticks_y, words=number):
        out = [f'<text x="{self.left}" y="{self.top - 12}" class="title">{title}</text>']
        for value in ticks_y:
            out.append(f'<line x1="{self.left}" x2="{self.left + self.width}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}" class="grid"/>')
            out.append(f'<text x="{self.left - 8}" y="{self.y(value) + 4:.1f}" text-anchor="end">{words(value)}</text>')
        for value in ticks_x:
            out.append(f'<text x="{self.x(value):.1f}" y="{self.top + self.height + 18}" text-anchor="middle">{words(value)}</text>')
        out.append(f'<text x="{self.left + self.width / 2}" y="{self.top + self.height + 38}" text-anchor="middle">{x_label}</text>')
        return out

    def line(self, points, colour, dash="", width=1.8):
        path = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'

    def dot(self, a, b, colour, filled=True, words=""):
        title = f"<title>{words}</title>" if words else ""
        return f'<circle cx="{self.x(a):.1f}" cy="{self.y(b):.1f}" r="4" fill="{colour if filled else "#fff"}" stroke="{colour}" stroke-width="1.5">{title}</circle>'


def legend(left, top, entries):
    out = []
    for n, (words, colour) in enumerate(entries):
        out.append(f'<rect x="{left}" y="{top + 18 * n - 9}" width="12" height="10" fill="{colour}"/><text x="{left + 18}" y="{top + 18 * n}">{words}</text>')
    return out


def survival_curve(study, runs, integral):
    """Kaplan-Meier: (integral of the learning rate, share that has not failed); runs that end count until they end."""
    ends = sorted((integral(study.failure(run) or run.last_step), study.failure(run) is None) for run in runs)
    share, points = 1.0, [(0.0, 1.0)]
    for n, (place, healthy) in enumerate(ends):
        if not healthy:
            points.append((place, share))
            share *= 1 - 1 / (len(ends) - n)
            points.append((place, share))
    return points + [(ends[-1][0], share)]


def survival(figures):
    study = figures.study
    named = lambda *rows: [run for plan, trainer in rows for run in figures.match(nano_group(plan, trainer))]
    healthy = [run for plan, remedy in (("flash2", "wide_output"), ("flash2", "consistent"), ("flash2", "zero_sum"), ("bf16_all", "wide_output"), ("bf16_all", "consistent"), ("bf16_all", "zero_sum"))
               for seed in (1, 2, 3) for run in figures.cure_runs(plan, remedy, "ours", seed)]  # fmt: skip
    flash2, in_torch = [("`flash2`", f"ours, {kernels} kernels") for kernels in ("fused Hopper", "Hopper", "any-plan")], [(kernel, "PyTorch") for kernel in ("FLASH", "cuDNN", "evenkeel without a remedy")]
    groups = (("flash2, ours", "#cc79a7", named(*flash2)), ("PyTorch: FLASH, cuDNN, ours bare", "#000000", named(*in_torch)), ("bf16_all,row_sum=fp32", "#e69f00", named(("`bf16_all,row_sum=fp32`", "ours"))),
              ("flash2,row_sum=bf16", "#d55e00", named(("`flash2,row_sum=bf16`", "ours"))), ("with a remedy", "#0072b2", healthy))  # fmt: skip
    integral = lambda step: SIZES["nano"].lr * max(0.0, step - 250)  # 500 steps of warm-up count half
    axes = Axes(60, 40, 520, 240, (0, 75), (0, 1))
    body = axes.frame("share of runs that have not failed, nano", "integral of the learning rate over steps", (0, 15, 30, 45, 60, 75), (0, 0.25, 0.5, 0.75, 1), lambda v: f"{v:g}")
    for words, colour, runs in groups:
        body.append(axes.line(survival_curve(study, runs, integral), colour))
    body += legend(600, 60, [(f"{words} ({len(runs)} runs)", colour) for words, colour, runs in groups])
    return svg(980, 340, "nano: share of runs that have not failed against the integral of the learning rate, by arithmetic", body)


def predicted(figures):
    """The first forecast of every failing run against the step at which it failed."""
    if not figures.forecast:
        return None
    axes = Axes(70, 40, 420, 320, (300, 30_000), (100, 30_000), True, True)
    ticks = (300, 1_000, 3_000, 10_000, 30_000)
    body = axes.frame("step of failure by the first forecast", "step of failure", ticks, (100, *ticks))
    factor = figures.forecast["factor"]
    for times, dash in ((1, ""), (factor, "5 4"), (1 / factor, "5 4")):
        body.append(axes.line([(300, 300 * times), (30_000 / max(1, times), 30_000 * min(1, times))], "#999", dash, 1))
    for name, life in figures.forecast["failing"].items():
        first = next((moment for moment in life["life"] if moment["forecast"] is not None), None)
        if first:
            body.append(axes.dot(life["failure"], first["forecast"], SIZES[life["size"]].colour, first["within"], f"{name}: forecast at {first['share']:.0%} of its life"))
    body += legend(510, 60, [(size, SIZES[size].colour) for size in SIZES if any(life["size"] == size for life in figures.forecast["failing"].values())])
    body.append(f'<text x="510" y="130">filled: within a factor of {factor}</text>')
    return svg(720, 420, "Step of failure by the first forecast against the true one, every failing run", body)


# Runs that differ in one thing: size -> axis -> (value, names).
EXPONENTS = {
    "micro": {"stored bits of O": [(bits, (f"~exponents_micro-bits_{bits}-?",)) for bits in (1, 2, 3)],
              "stored bits of O, stochastic": [(2, NOISY_RUNS), *((bits, (f"~exponents_micro-bits_{bits}_stochastic-?",)) for bits in (1, 3, 4))],
              "learning rate": [(3e-3, ("~exponents_micro-lr_3e-3-?",)), (6e-3, NOISY_RUNS), (1.2e-2, ("~exponents_micro-lr_1.2e-2-?",))],
              "sequences a step": [(8, ("~exponents_micro-batch_8-?",)), (16, NOISY_RUNS), (32, ("~exponents_micro-batch_32-?",))]},
    "nano": {"stored bits of O": [(bits, (f"~exponents-output_{bits}-?",)) for bits in (5, 6, 7, 8, 9)],
             "learning rate": [(float(lr), (f"~rates-lr_{lr}-?",)) for lr in ("6e-4", "1e-3", "2e-3", "6e-3")],
             "sequences a step": [(count, (f"~exponents-batch_{count}-?",)) for count in (16, 64)]},
}  # fmt: skip


def exponents(figures):
    """Step at which the offset passes 1,000 against the bits of O, the learning rate and the batch; a line of panels a size."""
    body, top, wide = [], 40, 0
    for size, panels in EXPONENTS.items():
        left = 70
        for axis, settings in panels.items():
            found = [(value, run) for value, names in settings for run in figures.match(names)]
            if len({value for value, _ in found}) < 2:
                continue
            log = not axis.startswith("stored bits")
            values = sorted({value for value, _ in found})
            axes = Axes(left, top, 240, 240, (values[0] / 1.2, values[-1] * 1.2) if log else (values[0] - 0.5, values[-1] + 0.5), (100, 10_000) if size == "micro" else (500, 50_000), log, True)
            body += axes.frame(f"{size}: offset of 1,000 at step", axis, values, (100, 200, 500, 1_000, 2_000, 5_000, 10_000) if size == "micro" else (500, 1_000, 5_000, 10_000, 50_000), lambda v: f"{v:g}")
            for value, run in found:
                passed = run.packed["summary"].get("offset_1000_at")
                body.append(axes.dot(value, passed or run.last_step, SIZES[size].colour, bool(passed), f"{run.name}: {passed or f'not by step {run.last_step}'}"))
            left += 330
        if left > 70:
            top, wide = top + 320, max(wide, left)
    if not body:
        return None
    body.append(f'<text x="70" y="{top}">Filled: a run. Hollow: a run that did not pass 1,000, at its last step.</text>')
    return svg(wide, top + 20, "Step at which the offset passes 1,000 against bits, learning rate and batch", body)


SQUARE = (("both", "the loss and delta", "see the same error"), ("loss_alone", "the loss alone", "sees the error"), ("delta_alone", "delta alone", "sees the error"), ("neither", "neither", "sees an error"))


def square(figures):
    """Error of O in the loss, in delta, in both, in neither: micro, O of two bits, stochastic."""
    # FP32 of seed 1 read law's text, of the others hostile_micro's, as the other three corners did.
    names = lambda name: [f"square-{name}-?"] if name != "neither" else ["law-fp32-1", "~hostile_micro-fp32-[23]"]
    found = {name: figures.match([f"~{pattern.lstrip('~')}" for pattern in names(name)]) for name, *_ in SQUARE}
    if not all(found.values()):
        return None
    left, top, wide, high = 20, 40, 330, 110
    body = [f'<text x="{left}" y="{top - 14}" class="title">largest offset within the first 1,000 steps, by seed: micro, O of two bits, stochastic</text>']
    for n, (name, first, second) in enumerate(SQUARE):
        x, y = left + wide * (n % 2), top + high * (n // 2)
        runs = sorted(found[name], key=lambda run: run.seed)
        offsets = [max(max(row) for step, row in zip(run.fact_steps, run.offset) if step < 1_000) for run in runs]
        colour = "#f2c3a7" if max(offsets) > 1_000 else "#bfe0f2"
        body.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" fill="{colour}" class="cell"/>')
        body.append(f'<text x="{x + wide / 2}" y="{y + 34}" text-anchor="middle" class="title">{first} {second}</text>')
        body.append(f'<text x="{x + wide / 2}" y="{y + 66}" text-anchor="middle">offsets {", ".join(number(x) for x in offsets)}</text>')
    return svg(left * 2 + wide * 2, top + high * 2 + 20, "micro, 2 x 2: an error of O seen by the loss, by delta, by both, by neither", body)


SIZE_LINES = (("size-flash2-", "fused", "ours, fused multiply-add", "#d55e00"), ("size-flash2-", "", "ours, without it", "#e69f00"), ("size-flash-", "", "PyTorch, FLASH", "#000000"),
              ("size-paper-", "", "bf16_all,row_sum=fp32", "#cc79a7"), ("size-wide_output-", "", "ours, default remedy", "#0072b2"))  # fmt: skip


def size(figures):
    """GPT-2 124M: offset (largest over layers and heads) and loss against step, one above the other; seeds after the first are dashed."""
    drawn = [(words, colour, run) for part, kind, words, colour in SIZE_LINES for run in sorted(figures.study.distinct(figures.study.runs), key=lambda run: run.seed)
             if run.name.startswith(part) and (kind == "fused") == (run.name in FUSED)]  # fmt: skip
    if not drawn:
        return None
    last = max(run.last_step for _, _, run in drawn)
    steps = range(0, last + 1, last // 5)
    offset = Axes(70, 40, 560, 190, (0, last), (1, 1e8), log_y=True)
    loss = Axes(70, 300, 560, 150, (0, last), (1, 4))
    whole = lambda v: f"{v:,.0f}" if v < 1e5 else f"10{'⁰¹²³⁴⁵⁶⁷⁸⁹'[round(math.log10(v))]}"
    body = offset.frame("largest offset, log axis", "", steps, (1, 100, 1e4, 1e6, 1e8), whole)
    body += loss.frame("loss, nats a token (means of 200 steps)", "step", steps, (1, 2, 3, 4), whole)
    for _, colour, run in drawn:
        dash = "" if run.seed == 1 else "6 3"
        body.append(offset.line([(step, max(1, *row)) for step, row in zip(run.fact_steps, run.offset)], colour, dash))
        means = [(WINDOW * (n + 0.5), mean) for n, mean in enumerate(run.loss_means())]
        body.append(loss.line([(step, mean) for step, mean in means if mean <= loss.high_y], colour, dash))
    seeds = {(words, colour): sorted(run.seed for one, _, run in drawn if one == words) for words, colour, _ in drawn}
    body += legend(646, 60, [(f"{words}, seed {' and '.join(map(str, found))}", colour) for (words, colour), found in seeds.items()])
    return svg(880, 500, "GPT-2 124M at a learning rate of 1e-3: largest offset and loss against step, by arithmetic", body)


KERNEL_COLOURS = dict(zip(KERNELS, ("#cc79a7", "#d55e00", "#000000", "#009e73", "#56b4e9", "#e69f00", "#999999", "#f0e442", "#0072b2")))


def harm(figures):
    """Runs of nano and gpt2 that drift: the largest loss above the twin's against the largest speed, and against the largest gradient norm."""
    runs = figures.drifting_runs()
    if not runs:
        return None
    body, percents = [], (0.003, 0.01, 0.1, 1, 4)
    for n, (key, label, span, ticks) in enumerate((("speed", "largest speed of the offset's root, a step", (0.02, 20), (0.1, 1, 10)), ("norm", "largest gradient norm since the drift", (0.2, 1e9), (1, 1e3, 1e6, 1e9)))):
        axes = Axes(64 + 400 * n, 40, 310, 260, span, (0.003, 5), True, True)
        # Each axis has words of its own: shares upward, powers of ten across.
        words = lambda tick: f"{tick:g}" if tick < 1e4 else f"10{'⁰¹²³⁴⁵⁶⁷⁸⁹'[round(math.log10(tick))]}"
        body += axes.frame("largest loss above the twin's" if n == 0 else "", label, ticks, (), words)
        for share in percents:
            body.append(f'<line x1="{axes.left}" x2="{axes.left + axes.width}" y1="{axes.y(share):.1f}" y2="{axes.y(share):.1f}" class="grid"/>')
            body.append(f'<text x="{axes.left - 8}" y="{axes.y(share) + 4:.1f}" text-anchor="end">{100 * share:g} %</text>')
        for run in runs:
            facts = figures.harm_facts(run)
            body.append(axes.dot(facts[key], max(facts["excess"], 0.003), KERNEL_COLOURS[kernel(run)], run.size == "nano", f"{run.name}: {facts[key]:.3g}, {facts['excess']:.1%}"))
    body += legend(800, 60, [(words, KERNEL_COLOURS[words]) for words in KERNELS if any(kernel(run) == words for run in runs)])
    body.append('<text x="800" y="170">filled: nano; open: GPT-2 124M</text>')
    return svg(1010, 360, "Largest loss above the twin's against the largest speed of the offset and the largest gradient norm, by attention kernel", body)


# The loop of how_it_works.md: words of each link, and what carries it to the next.
LOOP = (("rounding", "an error e of O"), ("leak", "rows of dS do not sum to 0"), ("W_Q, W_K", "steps along the mean key"), ("offset", "nothing pulls it back"), ("the gradient", "more of it is leak"))


def loop(figures):
    """Five boxes in a row and the arrow back."""
    wide, high, gap, top = 152, 58, 26, 14
    right = 8 + len(LOOP) * (wide + gap) - gap
    body = ['<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="#d55e00"/></marker></defs>']
    for n, (name, words) in enumerate(LOOP):
        x = 8 + n * (wide + gap)
        body.append(f'<rect x="{x}" y="{top}" width="{wide}" height="{high}" rx="6" fill="#fbeee6" stroke="#d55e00"/>')
        body.append(f'<text x="{x + wide / 2:g}" y="{top + 25}" text-anchor="middle" class="title">{name}</text>')
        body.append(f'<text x="{x + wide / 2:g}" y="{top + 44}" text-anchor="middle" style="font-size:10.5px">{words}</text>')
        if n + 1 < len(LOOP):
            body.append(f'<path d="M{x + wide} {top + high / 2:g}h{gap - 2}" stroke="#d55e00" stroke-width="2" marker-end="url(#tip)"/>')
    middle, back = 8 + wide / 2, top + high + 26
    body.append(f'<path d="M{right - wide / 2:g} {top + high}V{back}H{middle:g}V{top + high + 3}" fill="none" stroke="#d55e00" stroke-width="2" marker-end="url(#tip)"/>')
    body.append(f'<text x="{right / 2:g}" y="{back + 18}" text-anchor="middle">a stabiliser breaks the loop at the leak</text>')
    return svg(right + 8, back + 30, "The loop of drift: rounding, leak, steps of W_Q and W_K, offset, share of the gradient", body)


FIGURES = (("docs/loop.svg", loop), ("docs/size.svg", size), ("docs/survival.svg", survival), ("docs/forecast.svg", predicted), ("docs/exponents.svg", exponents), ("docs/square.svg", square), ("docs/harm.svg", harm))
