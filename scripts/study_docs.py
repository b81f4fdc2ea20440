"""Every table and figure that a page of README.md and docs can ask for, from docs/curves and docs/experiments.md. page_marks.py writes them."""

import fnmatch
import json
import math
import re
from pathlib import Path

from study_curves import DRIFT_FACTOR, WINDOW, Study, median
from study_dates import Dates
from study_micro import Micro
from study_harm import FUSED, Harm
from study_ledger import Ledgers
from study_sizes import SIZES, on_cpu

THINNED = "†"
NONE = "–"

# Runs at the size of nano without a remedy, by what rounds and who trains: words, names.
NANO_GROUPS = (
    ("`flash2`", "ours, fused Hopper kernels", tuple(name for name in FUSED if not name.startswith("size"))),
    ("`flash2`", "ours, Hopper kernels", ("parting-no_residue-2", "parting-no_residue-3")),
    ("`flash2`", "ours, any-plan kernels", ("controls-any_plan-1",)),
    ("FLASH", "PyTorch", ("twins-flash-2", "twins-flash-3")),
    ("cuDNN", "PyTorch", ("twins-cudnn-2", "twins-cudnn-3")),
    ("evenkeel without a remedy", "PyTorch", ("twins-hopper_none-3",)),
    ("`bf16_all,row_sum=fp32`", "ours", ("roads-paper-1", "rescue-unmended-1", "rescue-unmended-1b")),
    ("`flash2,row_sum=bf16`", "ours", ("roads-row_sum-1", "guard-unguarded-1", "guard-unguarded-1b", "guard-unguarded-1c", "roads-row_sum-2", "seeds-row_sum-2", "seeds-row_sum-3")),
    ("MATH (FP32 inside)", "PyTorch", ("twins-math-3",)),
    ("evenkeel with its remedy", "PyTorch", ("twins-evenkeel-3",)),
)  # fmt: skip


def nano_group(plan, trainer):
    """The names of the runs in a line of NANO_GROUPS."""
    return next(names for one, other, names in NANO_GROUPS if (one, other) == (plan, trainer))


# Sets of runs that figures ask for by name.
GROUPS = {
    "@fused": nano_group("`flash2`", "ours, fused Hopper kernels"),
    "@unfused": nano_group("`flash2`", "ours, Hopper kernels"),
    "@flash2": nano_group("`flash2`", "ours, fused Hopper kernels") + nano_group("`flash2`", "ours, Hopper kernels"),
    "@kept": ("roads-zero_sum-1", "roads-wide_output-1", "seeds-zero_sum-*", "seeds-wide_output-*", "controls-wide_output-1", "guard-wide_output-1", "twins-evenkeel-3", "~cure-*", "~matrix-*_wide_output-?", "~matrix-*_consistent-?", "~matrix-*_zero_sum-?"),
}

EIGHT_BITS = ("fp8_fa3", "fp8_deepseek", "mxfp8", "hifloat8", "sage_int8", "turbo")
GROUPS |= {f"@eight_bits{part}": tuple(f"formats-{system}{remedy}-?" for system in EIGHT_BITS) for part, remedy in (("", ""), ("_kept", "_zero_sum"))}

# The cure matrix: plan and remedy, and the parts whose runs belong there.
CURES = (
    ("flash2", "wide_output", "ours"),
    ("flash2", "consistent", "ours"),
    ("flash2", "zero_sum", "ours"),
    ("flash2", "keel", "ours"),
    ("bf16_all", "wide_output", "ours"),
    ("bf16_all", "consistent", "ours"),
    ("bf16_all", "zero_sum", "ours"),
    ("bf16_all", "keel", "ours"),
    ("flash2", "wide_output", "PyTorch"),
)
SEEDS = (1, 2, 3)

# At the size of micro: words, names.
MICRO_SITES = (
    ("nothing", "–", ("healthy-fp32-*",)),
    ("row sum, 2 bits", "nearest", ("derailing-row_sum_e5m2-*", "bits-row_sum_2-1")),
    ("row sum, 2 bits", "stochastic", ("derailing-row_sum_e5m2_stochastic-*",)),
    ("row sum, 3 bits", "nearest", ("derailing-row_sum_e4m3-*", "bits-row_sum_3-1")),
    ("row sum, 4 and 5 bits", "nearest", ("bits-row_sum_4-1", "bits-row_sum_5-1")),
    ("O-bar, 2 bits", "nearest", ("derailing-pv_2_bits-?", "bits-pv_2-1")),
    ("O-bar, 2 bits", "stochastic", ("derailing-pv_2_bits_stochastic-*",)),
    ("O-bar, 2 bits, one tile", "nearest", ("claims-one_tile-[12]",)),
    ("O, 2 bits", "nearest", ("derailing-output_2_bits-1", "bits-output_2-1", "claims-output_and_delta-[12]")),
    ("O, 2 bits", "stochastic", ("noise-output_stochastic-[12]",)),
    ("O or O-bar, 3 to 5 bits", "nearest", ("bits-pv_[345]-1", "bits-output_[345]-1")),
    ("scores, 2 bits", "nearest", ("noise-scores_nearest-[12]",)),
    ("scores, 2 bits", "stochastic", ("noise-scores_stochastic-[12]",)),
    ("probabilities for PV, 2 bits", "nearest", ("noise-probs_nearest-[12]",)),
    ("probabilities for PV, 2 bits", "stochastic", ("noise-probs_stochastic-[12]",)),
    ("dP or delta, 2 bits", "nearest", ("noise-dprobs_nearest-[12]", "noise-delta_nearest-[12]")),
    ("dP or delta, 2 bits", "stochastic", ("noise-dprobs_stochastic-[12]", "noise-delta_stochastic-[12]")),
    ("O-bar, 2 bits, layer 1 alone", "nearest", ("claims-layer_1_alone-[12]",)),
    ("O-bar, 2 bits, layer 2 or 3 alone", "nearest", ("claims-layer_[23]_alone-[12]",)),
    ("O-bar, 2 bits, all layers but the first", "nearest", ("claims-all_but_layer_1-[12]",)),
    ("O-bar, 2 bits, one head", "nearest", ("claims-one_head-[12]",)),
    ("`fp8` (q, k, v, P in E4M3)", "nearest", ("claims-fp8-[12]",)),
)
MICRO_CURES = (
    ("row sum, 2 bits", "`zero_sum`", ("healthy-row_sum_e5m2_zero_sum-*", "healthy-row_sum_stochastic_zero_sum-1")),
    ("O-bar, 2 bits", "`zero_sum`", ("healthy-pv_2_bits_zero_sum-*",)),
    ("O-bar, 2 bits", "`wide_output`", ("claims-wide_output-[12]",)),
    ("O-bar, 2 bits", "`consistent`", ("claims-consistent-[12]",)),
    ("O, 2 bits", "delta from O in FP32", ("claims-output_delta_wide-[12]",)),
    ("probabilities, 2 bits", "`consistent`", ("healthy-probs_2_bits-1",)),
    ("`bf16_all`", "`zero_sum`", ("healthy-bf16_all_zero_sum-1",)),
    ("`flash2`", "`wide_output`", ("healthy-flash2_wide_output-1",)),
    ("`fp8`", "`zero_sum`", ("claims-fp8_zero_sum-[12]",)),
    ("row sum, 2 bits", "keel 1e-5", ("keel-leaking_1e-5-1",)),
    ("row sum, 2 bits", "keel 1e-4", ("keel-leaking_1e-4-1",)),
    ("row sum, 2 bits", "keel 1e-3", ("keel-leaking_1e-3-1",)),
    ("row sum, 2 bits", "`centre_keys`", ("others-centre_keys-[12]",)),
    ("row sum, 2 bits", "QK norm", ("others-qk_norm-[12]",)),
    ("row sum, 2 bits", "QK clip at 50", ("others-qk_clip_50-[12]",)),
    ("row sum, 2 bits", "softcap 50", ("others-softcap_50-[12]",)),
    ("row sum, 2 bits", "gated attention", ("others-gated-[12]",)),
    ("row sum, 2 bits", "sinks", ("sinks-row_sum_e5m2-*",)),
    ("row sum, 2 bits", "ALiBi", ("sinks-alibi_row_sum_e5m2-*",)),
    ("row sum, 2 bits", "weight decay 0.1", ("others-weight_decay-[12]",)),
    ("row sum, 2 bits", "Muon for AdamW", ("others-muon-[12]",)),
    ("row sum, 2 bits", "momentum for AdamW", ("others-momentum-[12]",)),
    ("row sum, 2 bits", "6 layers", ("others-deeper-[12]",)),
    ("row sum, 2 bits", "width 256", ("others-wider-[12]",)),
    ("row sum, 2 bits", "`zero_sum` and one of: QK norm, QK clip, softcap, gating, weight decay, Muon, momentum, 6 layers", ("others-qk_norm_zero_sum-[12]", "others-qk_clip_50_zero_sum-[12]", "others-softcap_50_zero_sum-[12]", "others-gated_zero_sum-[12]",
                                                 "others-weight_decay_zero_sum-[12]", "others-muon_zero_sum-[12]", "others-momentum_zero_sum-[12]", "others-deeper_zero_sum-[12]")),
    ("row sum, 2 bits", "`zero_sum` and sinks", ("sinks-row_sum_e5m2_zero_sum-*",)),
    ("row sum, 2 bits", "`zero_sum` and ALiBi", ("sinks-alibi_row_sum_e5m2_zero_sum-*",)),
    ("row sum, 2 bits", "`zero_sum` and width 256", ("others-wider_zero_sum-[12]",)),
    ("O-bar of 2 bits, BF16 scores", "none", ("shift-none-[12]",)),
    ("O-bar of 2 bits, BF16 scores", "the paper's shift, beta 2, 4, 8", ("shift-paper_*-[12]",)),
    ("O-bar of 2 bits, BF16 scores", "the paper's shift, capped", ("shift-capped-[12]",)),
    ("O-bar of 2 bits, BF16 scores", "every row shifted", ("shift-every_row-[12]",)),
    ("O-bar of 2 bits, BF16 scores", "dither", ("shift-dither-[12]",)),
    ("O-bar of 2 bits, BF16 scores", "`zero_sum`", ("shift-zero_sum-[12]",)),
)  # fmt: skip
LLAMA_MICRO = (
    ("nothing (`fp32`)", "none", ("~llama_micro-fp32-*",)),
    ("row sum, 2 bits", "none", ("llama_micro-row_sum_e5m2-[12]",)),
    ("row sum, 2 bits", "`zero_sum`", ("llama_micro-row_sum_e5m2_zero_sum-*",)),
    ("row sum, 2 bits", "the guard", ("llama_micro-guarded-1",)),
    ("row sum of layer 0 head 1, 1 bit", "none", ("~llama_micro-planted-1",)),
)
KERNEL_WORDS = {"flash": "FLASH", "math": "MATH", "cudnn": "cuDNN", "efficient": "EFFICIENT", "evenkeel": "evenkeel with its remedy", "hopper_none": "evenkeel without a remedy"}
RESCUES = ("zero_sum", "fp32_scores", "centre_keys", "keel")
RESCUE_WORDS = {"zero_sum": "`zero_sum`", "fp32_scores": "`zero_sum`, FP32 scores", "centre_keys": "`centre_keys`, O-bar and O in FP32",
                "keel": "`zero_sum`, keel 1e-5 over 2,000 steps"}  # fmt: skip


def number(value):
    """Three digits or so, as a reader wants them."""
    if value is None or isinstance(value, float) and math.isnan(value):
        return NONE
    if abs(value) >= 99_950:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.1f}"


def percent(value):
    return NONE if value is None or math.isnan(value) else f"{100 * value:+.1f} %".replace("-0.0", "+0.0")


def loss(value):
    return "NaN" if value is None or math.isnan(value) else f"{value:.3f}"


def listed(values, words):
    """All of up to three values, else the least and the most."""
    known = [value for value in values if value is not None and value == value]
    if not known:
        return NONE
    if len(known) <= 3:
        return ", ".join(dict.fromkeys(words(value) for value in sorted(known)))
    return f"{words(min(known))} to {words(max(known))}"


def plan_cell(run):
    return f"`{run.plan}`" if run.plan else f"PyTorch, {KERNEL_WORDS.get(run.in_torch, run.in_torch)}"


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


class Figures(Harm, Micro, Dates, Ledgers):
    """Every figure and table that a page can ask for."""

    number, percent, table, listed, loss, plan_cell = (staticmethod(words) for words in (number, percent, table, listed, loss, plan_cell))
    NONE = NONE

    def __init__(self, folder, experiments):
        self.study, self.experiments = Study(folder), experiments
        beside = lambda name: json.loads((Path(folder).parent / name).read_text()) if (Path(folder).parent / name).exists() else None
        self.forecast, self.is_it_us, self.llama_patterns = beside("forecast.json"), beside("is_it_us.json"), beside("llama_patterns.json")
        self.field_story, self.ledger = beside("field_story.json"), beside("ledger.json") or {}

    def match(self, patterns):
        """Runs by name, * for any characters; one trajectory once. A name that begins with ~ may be absent."""
        names = []
        for pattern in [member for pattern in patterns for member in GROUPS.get(pattern, (pattern,))]:
            found = sorted(name for name in self.study.runs if fnmatch.fnmatchcase(name, pattern.lstrip("~")))
            if not found and not pattern.startswith("~"):
                raise ValueError(f"expected a run of docs/curves, found {pattern}")
            names += found
        return self.study.distinct(names)

    # --- single figures

    def quantity(self, run, words):
        """QUANTITY[:layer][@step] of a run, as text."""
        name, _, step = words.partition("@")
        name, _, layer = name.partition(":")
        layer = int(layer) if layer else None
        study = self.study
        if name == "drift_layer":
            return str(study.drift(run)[1])
        if name in ("offset", "score"):
            return number(run.at(name, int(step), layer) if step else run.largest(name, layer)[0])
        if name in ("span", "factor"):  # @A..B: least and most of the offset in these steps; its last over its first there
            begin, end = map(int, step.split(".."))
            offsets = [max(row) if layer is None else row[layer - 1] for at, row in zip(run.fact_steps, run.offset) if begin <= at <= end]
            return f"{number(min(offsets))} to {number(max(offsets))}" if name == "span" else number(offsets[-1] / offsets[0])
        if name == "within":  # steps made before the mean loss of 200 is first more than this share above the twin's
            return number(next((WINDOW * n for n, excess in enumerate(study.excess(run)) if not excess <= float(step)), run.last_step))
        if name == "loss":
            return loss(run.loss_by(int(step)) if step else run.final_loss())
        if name == "mean_x":  # size of the tokens' mean input to the layer with the largest offset, at the last probe by then
            law = run.packed["law"]
            return f"{[x for at, x in zip(law['steps'], law['mean_x']) if at <= int(step)][-1]:.1f}"
        if name == "twin_loss":
            theirs = study.twin(run).loss_means()  # beyond its end, its last
            return loss(theirs[min((int(step) if step else run.last_step) // WINDOW, len(theirs)) - 1])
        plain = {
            "offset_step": lambda: run.largest("offset", layer)[1],
            "score_step": lambda: run.largest("score", layer)[1],
            "steps": lambda: run.last_step,
            "layer": lambda: run.worst_layer(),
            "drift": lambda: study.drift(run)[0],
            "limit": lambda: DRIFT_FACTOR * study.healthy_level(study.twin(run), layer, run.last_step),
            "failure": lambda: study.failure(run),
            "lead": lambda: study.lead(run),
            "failure_least": lambda: min(study.failures_by_control(run)),
            "failure_most": lambda: max(study.failures_by_control(run)),
            "doubled": lambda: study.offset_at_doubled_gradient(run),
            "passed": lambda: run.packed["summary"]["offset_1000_at"],
            "largest_norm": lambda: study.largest_norm(run),
        }
        if name in plain:
            return number(plain[name]()) if name != "layer" else str(plain[name]())
        if name == "excess":
            return (percent(study.excess(run)[int(step) // WINDOW - 1]) if step else self.end_excess(run)).replace("+", "")
        if name == "peak_excess":
            return percent(max(study.excess(run))).lstrip("+")
        if name == "late_growth":  # of the largest offset, e-foldings in 1,000 steps, by least squares over the second half of the run
            points = [(at, math.log(max(row))) for at, row in zip(run.fact_steps, run.offset) if at >= run.last_step / 2]
            x, y = (sum(column) / len(points) for column in zip(*points))
            return f"{1000 * sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points):.1f}"
        if name == "growth":
            return f"{study.growth(run):.1f}"
        if name == "share":
            return "{:.2f} to {:.2f}".format(*study.offset_share(run))
        if name == "validation":
            return f"{dict(run.packed['validation'])[int(step)] if step else run.validation()[1]:.4f}"
        if name == "gap":  # steps made when, drifting, the mean loss is first this much above the twin's
            above = [ours * excess / (1 + excess) for ours, excess in zip(run.loss_means(), study.excess(run))]
            return number(next(WINDOW * (n + 1) for n in range(len(above)) if WINDOW * n >= study.drift(run)[0] and above[n] >= float(step)))
        if name == "group_gap":  # last step of the first group, of those the curve was packed in, whose mean loss is this much above zero_sum's
            theirs = study[f"roads-zero_sum-{run.seed}"].packed["loss"]
            return number(next(s for s, ours, other in zip(run.packed["steps"], run.packed["loss"], theirs) if s >= study.drift(run)[0] and ours - other >= float(step)))
        if name == "peak_loss":  # of one group of steps, as packed
            return f"{max(run.packed['loss'][n] for n, s in enumerate(run.packed['steps']) if s >= int(step or 0)):.2f}"
        raise ValueError(f"expected a quantity that study_docs.py knows, found {words}")

    def value(self, words):
        """A figure: `QUANTITY RUN...`, `least|most QUANTITY RUN...`, `runs|drifted|failed|seeds RUN...`, `epochs SIZE STEPS`, `above LIMIT RUN...`, `over HEALTHY RUN...`, `level SIZE...`, `kept_gap`,
        `forecast`, `harm`, `leak`, `exponent`, `is_it_us`, `ledger`, `keys` and what their functions say."""
        first, *rest = words.split()
        if first == "epochs":
            return f"{int(rest[1]) * SIZES[rest[0]].tokens / SIZES[rest[0]].text:.1f}"
        if first in ("runs", "drifted", "failed"):
            runs = self.match(rest)
            chosen = {"runs": lambda run: True, "drifted": self.study.drift, "failed": self.study.failure}[first]
            count = sum(chosen(run) is not None for run in runs)
            return str(count) if first == "runs" else f"{count} of {len(runs)}"
        if of_kind := getattr(self, f"{first}_value", None):  # `forecast`, `harm`, ...
            return of_kind(*rest)
        if first == "kept_gap":  # most steps between two records that are kept
            return number(max(b - a for run in self.study.runs.values() for a, b in zip(run.fact_steps, run.fact_steps[1:])))
        if first == "level":  # the largest offset of any run of these sizes that was judged and has not drifted
            twins = {self.study.twin(run) for run in self.study.runs.values()}
            return number(max(run.largest("offset")[0] for run in self.study.runs.values() if run.size in rest and not run.is_continued and not self.study.drift(run) and (self.study.twin(run) or run in twins)))
        if first == "seeds":
            seeds = [str(seed) for seed in sorted({run.seed for run in self.match(rest)})]
            return " and ".join([", ".join(seeds[:-1]), seeds[-1]]) if len(seeds) > 1 else seeds[0]
        if first == "over":  # the loss at the end, above that of the first run in the same steps
            return listed([self.study.excess(run, self.study[rest[0]])[-1] for run in self.match(rest[1:])], percent).replace("+", "")
        if first == "above":
            runs = self.match(rest[1:])
            return f"{sum(run.largest('offset')[0] > float(rest[0]) for run in runs)} of {len(runs)}"
        if first in ("least", "most"):
            texts = [self.quantity(run, rest[0]) for run in self.match(rest[1:])]
            size = lambda text: float(re.sub(r"at least | %|,", "", text))
            return (min if first == "least" else max)((text for text in texts if text not in (NONE, "NaN")), key=size)
        texts = [self.quantity(run, first) for run in self.match(rest)]
        return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1]

    def is_it_us_value(self, what, moment="last"):
        """The most by which mean losses differ, over checkpoints: `spread`, of all arms at the end; `pair first|last`, of both trainers with FP32 attention. `steps`."""
        found = [{name: runs for name, runs in one["arms"].items() if runs} for one in self.is_it_us.values()]
        if what == "steps":
            return number(max(run["steps"] for arms in found for runs in arms.values() for run in runs))
        chosen = [[run[moment] for name, runs in arms.items() if what == "spread" or name in ("ours_fp32", "pytorch") for run in runs] for arms in found]
        return f"{max(max(losses) - min(losses) for losses in chosen):.2f}"

    # --- tables

    def risk_table(self):
        """Leak share of the median head where it is packed with the run: before drift, by run."""
        rows = []
        for run in sorted(self.study.distinct(self.study.runs), key=lambda run: -(run.packed.get("leak_share") or [[0, 0]])[-1][1]):
            shares = run.packed.get("leak_share")
            if not shares or run.is_continued:  # a branch has no beginning of its own
                continue
            failure = self.study.failure(run)
            half = [share for step, share in shares if run.warmup <= step <= (failure or run.last_step) / 2]
            rows.append([run.name, f"`{run.plan}`", number(run.last_step), number(failure), f"{median(half):.2g}" if half else NONE, number(run.largest("offset")[0])])
        if not rows:
            return "docs/curves holds no run with probes.\n"
        rows.sort(key=lambda row: -float(row[4]) if row[4] != NONE else 0)
        return table(["run", "plan", "steps", "failure at", "leak share, median head, first half of life", "largest offset"], rows)

    def is_it_us_table(self):
        """One step at large offsets: ours and PyTorch's against FP64; then some steps from there."""
        if not self.is_it_us:
            return "docs/is_it_us.json is not there: scripts/is_it_us makes it.\n"
        rows = []
        for place, found in self.is_it_us.items():
            one = found["one_step"]
            worst = max(one["layers"], key=lambda layer: layer["offset"])
            layer = one["layers"].index(worst)
            plain = (found.get("one_step_fp32") or one)["gradients"]
            cell = lambda pair: f"{pair['ours']:.1%} / {pair['pytorch']:.1%}"
            gradient = lambda name: f"{one['gradients'][name]['ours']:.1%} / {plain[name]['ours']:.1%} / {plain[name]['pytorch']:.1%}"
            rows.append([number(worst["offset"]), f"{one['loss']['fp64']:.3f} / {one['loss']['ours']:.3f} / {one['loss']['pytorch']:.3f}", cell(worst["q"]), gradient(f"h.{layer}.attn.c_attn.weight[q]"),
                         gradient("wte.weight"), gradient("ln_f.weight")])  # fmt: skip
        return table(["offset", "loss: FP64 / ours / PyTorch", "q: ours / PyTorch", "gradient of W_Q there: ours with `flash2` / ours with FP32 attention / PyTorch with FP32 attention", "gradient of the embeddings, likewise", "gradient behind the last layer"], rows)

    def is_it_us_steps_table(self):
        if not self.is_it_us:
            return "docs/is_it_us.json is not there: scripts/is_it_us makes it.\n"
        words = {"ours": "ours, BF16", "ours_fp32": "ours, FP32 attention", "ours_all_fp32": "ours, all FP32", "pytorch": "PyTorch, FP32 attention"}
        rows = []
        for found in self.is_it_us.values():
            offset = max(layer["offset"] for layer in found["one_step"]["layers"])
            cells = []
            for arm in words:
                runs = found["arms"].get(arm, [])
                cells.append(", ".join(f"{run['first']:.3f} to {run['last']:.3f}" for run in runs) or "not run")
            rows.append([number(offset), str(max((run["steps"] for runs in found["arms"].values() for run in runs), default=0)), *cells])
        return table(["offset", "steps", *words.values()], rows)

    def law_windows(self, run, width=5):
        """(predicted, measured) growth of the worst head's signed offset, e-foldings a step, over windows of `width` probes behind the warm-up.

        Predicted by the model's term for W_Q: eta |x| leak / (s |q|), leak and s along the mean key and input, scaled from the probed rows to the step's (N for a mean, sqrt N for noise).
        """
        law, found = run.packed["law"], []
        more_rows = math.sqrt(SIZES[run.size].tokens / 256)
        for n in range(0, len(law["steps"]) - width, width):
            first, last = law["mean_score"][n], law["mean_score"][n + width]
            if law["steps"][n] < run.warmup or min(abs(first), abs(last)) < 3:
                continue
            terms = [-run.lr * law["mean_x"][i] * law["leak_along"][i] / (law["gradient_along"][i] * law["mean_q"][i]) * math.copysign(more_rows, law["mean_score"][i]) for i in range(n, n + width)]
            found.append((sum(terms) / width, math.log(abs(last / first)) / (law["steps"][n + width] - law["steps"][n])))
        return found

    def prediction_table(self):
        rows = []
        for run in sorted((run for run in self.study.distinct(self.study.runs) if "law" in run.packed and not run.is_continued), key=lambda run: run.name):
            windows = self.law_windows(run)
            if len(windows) < 4:
                continue
            agree = sum((a > 0) == (b > 0) for a, b in windows)
            rows.append([run.name, f"`{run.plan}`", str(len(windows)), f"{1000 * median([a for a, _ in windows]):.1f}", f"{1000 * median([b for _, b in windows]):.1f}", f"{agree} of {len(windows)}"])
        if not rows:
            return "docs/curves holds no run with probes.\n"
        return table(["run", "plan", "windows of 100 steps", "predicted growth, median, e-foldings in 1,000 steps", "measured", "windows in which both have one sign"], rows)

    def figure_exponents_table(self):
        return self.figure("exponents", "exponents.svg", "Step at which the offset passes 1,000 against bits, learning rate and batch")

    def figure_square_table(self):
        return self.figure("square", "square.svg", "An error of O seen by the loss, by delta, by both, by neither")

    def figure(self, name, file, words):
        """A figure that is drawn as soon as its runs are packed."""
        import study_plots

        return f"![{words}]({file})\n" if getattr(study_plots, name)(self) else "docs/curves holds no runs for this figure yet.\n"

    def offset_cell(self, run):
        value, _ = run.largest("offset")
        return number(value) + ("" if run.is_whole_record else THINNED)

    def end_excess(self, run):
        """Loss at the end above the twin's. Of a run that goes further than its twin it is a lower bound, since the twin's loss would have fallen on."""
        excess = self.study.excess(run)
        if not excess:
            return NONE
        return ("at least " if len(excess) > len(self.study.twin(run).loss_means()) else "") + percent(excess[-1])

    def common_excess(self, run):
        """Loss above the twin's where the shorter of the two ends."""
        excess = self.study.excess(run)
        return percent(excess[min(len(excess), len(self.study.twin(run).loss_means())) - 1]) if excess else NONE

    def group_row(self, words, runs, drift=None, failure=None):
        """drift and failure: of a run, where another than its twin judges it."""
        drift, failure = drift or self.study.drift, failure or self.study.failure
        seeds = sorted({run.seed for run in runs})
        count = f"{len(runs)} (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))})"
        thinned = "" if all(run.is_whole_record for run in runs) else THINNED
        return [*words, count, f"{sum(drift(run) is not None for run in runs)}", f"{sum(failure(run) is not None for run in runs)}",
                listed([drift(run)[0] for run in runs if drift(run)], number), listed([failure(run) for run in runs], number),
                listed([run.largest("offset")[0] for run in runs], number) + thinned]  # fmt: skip

    def failures_table(self):
        head = ["arithmetic", "trained by", "runs (seeds)", "drifted", "failed", "drift from step", "failure at step", "largest offset",
                "lead time", "largest loss above the twin's", "the same at the end"]  # fmt: skip
        rows = []
        for plan, trainer, names in NANO_GROUPS:
            runs = self.match(names)
            excess = [self.study.excess(run) for run in runs]
            rows.append(self.group_row((plan, trainer), runs) + [listed([self.study.lead(run) for run in runs], number),
                        listed([max(e) for e in excess], percent), listed([e[-1] for e in excess], percent)])  # fmt: skip
        return table(head, rows)

    def runs_table(self):
        """One line a run of nano and gpt2."""
        rows = []
        for run in self.study.distinct(name for name in self.study.runs if not on_cpu(self.study[name]) and not self.study[name].is_continued):
            twin, drift = self.study.twin(run), self.study.drift(run)
            value, step = run.largest("offset")
            rows.append([run.name, plan_cell(run), number(run.last_step), f"{self.offset_cell(run)} ({number(step)}, {run.worst_layer()})",
                         number(drift[0]) if drift else NONE, number(self.study.failure(run)), loss(run.final_loss()), self.end_excess(run),
                         twin.name if twin else NONE])  # fmt: skip
        return table(["run", "plan", "steps", "largest offset (step, layer)", "drift from", "failure at", "loss at the end", "above the twin's", "twin"], rows)

    def sites_table(self):
        rows = []
        for site, mode, names in MICRO_SITES:
            runs = self.match(names)
            rows.append(self.group_row((site, mode), runs) + [listed([run.final_loss() for run in runs], loss)])
        return table(["rounded", "mode", "runs (seeds)", "drifted", "failed", "drift from step", "failure at step", "largest offset", "loss at the end"], rows)

    def micro_cures_table(self):
        rows = []
        for site, cure, names in MICRO_CURES:
            runs = self.match(names)
            ends = listed([run.final_loss() for run in runs], loss)
            rows.append(self.group_row((site, cure), runs) + [ends if any(run.final_loss() == run.final_loss() for run in runs) else "NaN"])
        return table(["rounded", "with", "runs (seeds)", "drifted", "failed", "drift from step", "failure at step", "largest offset", "loss at the end"], rows)

    def llama_micro_table(self):
        rows = []
        for site, cure, names in LLAMA_MICRO:
            if runs := self.match(names):
                rows.append(self.group_row((site, cure), runs) + [listed([run.final_loss() for run in runs], loss)])
        return table(["rounded", "with", "runs (seeds)", "drifted", "failed", "drift from step", "failure at step", "largest offset", "loss at the end"], rows)

    def llama_patterns_table(self):
        """Of docs/llama_patterns.json, which `scripts/study --patterns` writes."""
        rows = []
        for one in self.llama_patterns or ():
            rows.append([one["run"], number(one["step"]), f"layer {one['layer']} head {one['head']}", number(one["offset"]), f"{one['slow_share']:.2f}", f"{one['similarity']:.2f}", f"{one['sink_mass']:.2f}",
                         f"{100 * one['tied_rows']:.1f} %", number(one["leak_share"])])  # fmt: skip
        return table(["run", "step", "head", "offset", "of it in slow pairs", "mean cosine of (PK)^T X", "weight on the first key", "rows with ties", "leak share"], rows)

    def cure_runs(self, plan, remedy, trainer, seed):
        if trainer == "PyTorch":
            found = [run for run in self.study.runs.values() if run.in_torch == "evenkeel" and run.seed == seed]
        else:
            whole = f"{plan},keel=1e-5" if remedy == "keel" else f"{plan},stabiliser={remedy}"
            found = [run for run in self.study.runs.values() if run.size == "nano" and run.plan == whole and run.seed == seed
                     and not run.in_torch and not run.is_continued]  # fmt: skip
        return self.study.distinct(run.name for run in found)

    def cure_table(self):
        """Plan and remedy against seed; of each cell's runs the largest offset, the most steps, the loss against the twin's, validation."""
        rows = []
        for plan, remedy, trainer in CURES:
            cells = []
            for seed in SEEDS:
                runs = self.cure_runs(plan, remedy, trainer, seed)
                if not runs:
                    cells.append("not run")
                    continue
                longest = max(runs, key=lambda run: run.last_step)
                drifted = [run for run in runs if self.study.drift(run)]
                validation = longest.validation()
                words = f"{number(longest.last_step)} steps: {'**drift**, ' if drifted else ''}offset {max((run.largest('offset')[0], self.offset_cell(run)) for run in runs)[1]}"
                words += f", loss {self.common_excess(longest)}" if self.study.twin(longest) else ""
                words += f", validation {validation[1]:.4f}" if validation else ""
                cells.append(words + (f" ({len(runs)} runs)" if len(runs) > 1 else ""))
            rows.append([f"`{plan}`", f"`{remedy}`", trainer, *cells])
        return table(["plan", "remedy", "trained by", *(f"seed {seed}" for seed in SEEDS)], rows)

    def size_table(self):
        runs = self.study.distinct(name for name in self.study.runs if self.study[name].size == "gpt2")
        if not runs:
            return "docs/curves holds no run of this size.\n"
        rows = []
        for run in sorted(runs, key=lambda run: (run.plan, run.seed)):
            drift, (value, step), validation = self.study.drift(run), run.largest("offset"), run.validation()
            rows.append([plan_cell(run), str(run.seed), number(run.last_step), f"{number(value)} ({number(step)}, {run.worst_layer()})",
                         number(drift[0]) if drift else NONE, number(self.study.failure(run)), loss(run.final_loss()), self.end_excess(run),
                         f"{validation[1]:.4f}" if validation else NONE])  # fmt: skip
        return table(["plan", "seed", "steps", "largest offset (step, layer)", "drift from", "failure at", "loss at the end", "above the twin's", "validation loss"], rows)

    def rescue_table(self):
        rows = []
        for remedy in RESCUES:
            for start in (4_000, 8_000, 12_000, 15_000):
                run = self.study.runs.get(f"rescue-{remedy}_{start}-1")
                if run is None:
                    continue
                offsets = [run.at("offset", start + more, 2) if start + more <= run.last_step else None for more in (0, 500, 1_000, 2_000, 3_000)]
                excess = self.study.excess(run)
                after = excess[start // WINDOW :]
                rows.append([RESCUE_WORDS[remedy], number(start), " / ".join(number(x) for x in offsets), f"{number(run.at('score', start, 2))} to {number(run.at('score', run.last_step, 2))}",
                             number(run.last_step), loss(run.final_loss()), percent(after[-1]), percent(max(after))])  # fmt: skip
        return table(["remedy", "from step", "offset of layer 2 then, and 500 / 1,000 / 2,000 / 3,000 steps later", "its largest score, then and at the end", "end", "loss at the end",
                      "above the healthy run's", "at most since the remedy"], rows)  # fmt: skip

    def maxima_table(self):
        """What was said to be the largest offset, and what is."""
        said = (
            ("`micro`, FP32", "31", ("healthy-fp32-*",)),
            ("O and O-bar of 3 to 5 bits", "21", ("bits-pv_[345]-1", "bits-output_[345]-1")),
            ("O-bar of 2 bits in one head", "18", ("claims-one_head-1",)),
            ("O-bar of 2 bits in layers 2 and 3 alone", "19", ("claims-layer_[23]_alone-1",)),
            ("O-bar of 2 bits, `consistent`", "24", ("claims-consistent-1",)),
            ("`fp8`, without and with `zero_sum`", "14, 19", ("claims-fp8-1", "claims-fp8_zero_sum-1")),
            ("row sum of 2 bits, weight decay, `zero_sum`", "12", ("others-weight_decay_zero_sum-1",)),
            ("row sum of 2 bits, gated, `zero_sum`", "104", ("others-gated_zero_sum-1",)),
            ("O-bar of 2 bits, BF16 scores, `zero_sum`", "20", ("shift-zero_sum-1",)),
            ("`nano`, guarded (two recordings)", "120", ("guard-guarded-1*",)),
        )
        rows = []
        for words, old, names in said:
            offsets = [run.largest("offset")[0] for run in self.match(names)]
            rows.append([words, old, ", ".join(number(x) for x in offsets) if len(offsets) <= 2 else number(max(offsets))])
        return table(["run", "said", "largest offset"], rows)

    def law_table(self):
        rows = []
        for plan, trainer, names in NANO_GROUPS:
            for run in self.match(names):
                growth, doubled = self.study.growth(run), self.study.offset_at_doubled_gradient(run)
                if self.study.drift(run):
                    failure = self.study.failure(run)
                    rows.append([run.name, plan, trainer, f"{growth:.1f}" if growth else NONE, number(doubled), number(failure and run.at("offset", failure, self.study.drift(run)[1])),
                                 "{:.2f} to {:.2f}".format(*self.study.offset_share(run))])  # fmt: skip
        return table(["run", "arithmetic", "trained by", "e-foldings in 1,000 steps, 40 to 1,500", "offset where the gradient norm has doubled", "offset at failure", "offset over largest score"], rows)

    def cures_table(self):
        """README's: what was rounded, by remedy; runs at the size of nano; the time of attention against none."""
        ours = lambda plan, remedy: [run.name for seed in SEEDS for run in self.cure_runs(plan, remedy, "ours", seed)]
        torch = lambda remedy: [run.name for seed in SEEDS for run in self.cure_runs("flash2", remedy, "PyTorch", seed)]
        rows = []
        for remedy, words, names in (
            (None, "FlashAttention-2's arithmetic, our trainer", GROUPS["@unfused"]),
            (None, "PyTorch's FLASH kernel", nano_group("FLASH", "PyTorch")),
            (None, "PyTorch's cuDNN kernel", nano_group("cuDNN", "PyTorch")),
            ("wide_output", "`wide_output` (default): delta uses O with 8 extra bits", ours("flash2", "wide_output") + ours("bf16_all", "wide_output") + torch("wide_output")),
            ("consistent", "`consistent`: both passes use the same P", ours("flash2", "consistent") + ours("bf16_all", "consistent")),
            ("zero_sum", "`zero_sum`: delta = sum P dP / sum P", ours("flash2", "zero_sum") + ours("bf16_all", "zero_sum")),
        ):
            if not names:
                continue
            _, count, drifted, failed, _, _, offset = self.group_row((words,), self.match(names))
            steps = listed([run.last_step for run in self.match(names)], number)
            if coarser := sum(run.plan.startswith("bf16_all") for run in self.match(names)):
                count = count.replace(")", f"; {coarser} of `bf16_all`)")
            rows.append([words, count, drifted, failed, offset, steps, self.price(remedy) if remedy else NONE])
        return table(["attention", "runs (seeds)", "drifted", "failed", "largest offset", "steps", "attention's time"], rows)

    def price(self, stabiliser):
        """Of both passes on an H200, no ties, against none: the last list of every stabiliser in docs/experiments.md."""
        found = re.findall(rf"`{stabiliser}` (\d\.\d\d) / ", self.experiments)
        if not found:
            raise ValueError(f"expected the price of {stabiliser} in docs/experiments.md, found none")
        return f"x {found[-1]}"

    def logged_table(self, name):
        """Rows of the table that docs/experiments.md marks with <!-- table: NAME -->, as dictionaries by column."""
        found = re.search(rf"<!-- table: {re.escape(name)} -->\n((?:\|.*\n)+)", self.experiments)
        if not found:
            raise ValueError(f"expected <!-- table: {name} --> before a table of docs/experiments.md, found none")
        cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in found[1].splitlines()]
        return [dict(zip(cells[0], row)) for row in cells[2:]]

    def speed_table(self):
        """README's: TFLOP/s of both passes together."""
        both = lambda cell: re.search(r"/ \**(\d+)\**(?: \(|$)", cell)[1]
        rows = [[row["B,H,T,D"], both(row["FlashAttention-2"]), both(row["cuDNN"]), both(row["ours, `wide_output` (default)"])]
                for row in self.logged_table("attention_speed") if row["B,H,T,D"]]  # fmt: skip
        return table(["B,H,T,D", "FlashAttention-2", "cuDNN", "Evenkeel, `wide_output`"], rows)

    def one_head_table(self):
        """docs/how_it_works.md's: one head, trained, with one number per row kept in two bits, and two remedies."""
        rows = {row["plan"]: row for row in self.logged_table("one_head")}
        wanted = (("`fp32`", "nothing is rounded"), ("`fp32,row_sum=e8m2`", "one number per row is rounded"), ("`fp32,row_sum=e8m2,stabiliser=zero_sum`", "the same, the sum restored"),
                  ("`fp32,row_sum=e8m2,keel=1e-3`", "the same, with a restoring force"))  # fmt: skip
        return table(["plan", "means", "offset at the end", "loss"], [[plan, words, rows[plan]["offset"], rows[plan]["loss"]] for plan, words in wanted])

    def twins_table(self):
        """docs/pytorch.md's: PyTorch's kernels and ours from one checkpoint."""
        marks = (1_000, 2_000, 3_000, 4_000, 5_000)
        rows = []
        for words, name in (("PyTorch's FLASH", "twins-flash-3"), ("PyTorch's cuDNN", "twins-cudnn-3"), ("`evenkeel.patch()`", "twins-evenkeel-3"), ("PyTorch's MATH", "twins-math-3")):
            run = self.study[name]
            rows.append([words] + [number(run.at("offset", step, 2)) if step <= run.last_step else NONE for step in marks])
        return table(["attention", *(f"{mark:,} steps" if mark == marks[0] else f"{mark:,}" for mark in marks)], rows)

    def field_story_table(self):
        """docs/pytorch.md's: what each instrument said of one drift in plain PyTorch, in the order of steps."""
        if not self.field_story:
            return "docs/field_story.json is not there: python/field_story.py makes it.\n"
        free, kept, verdict = (self.field_story[part] for part in ("unguarded", "guarded", "isolate"))
        verdict, heads = verdict["verdict"], lambda listed: ", ".join(f"layer {layer} head {head}" for layer, head in listed)
        guilty = [(head["layer"], head["head"]) for head in verdict["heads"]]
        alarm = next(alarm for alarm in free["alarms"] if any(tuple(head) in guilty for head in alarm["heads"]))
        told = next(told for n, told in enumerate(free["forecasts"]) if all(later["failure_at"] is not None for later in free["forecasts"][n:]))
        acted = [event for event in kept["events"] if event["kind"] != "warning"]
        rows = [(told["at"], "Monitor's forecast", f"failure near step {number(round(told['failure_at']))} ({number(round(told['earliest']))} to {number(round(told['latest']))})"),
                (alarm["step"], "Monitor's alarm", f"{heads(alarm['heads'])} drifts"),
                (free["drift_from"], "offset", f"beyond 8 times its healthy level ({number(round(free['healthy_offset']))}) for good; {number(round(free['largest_offset']))} at most"),
                (self.field_story["failure_at"], "loss", "more than 5 % above the guarded run's"),
                (acted[0]["step"], "Guard, in a run of its own", f"{len(acted)} remedies, the last at step {number(acted[-1]['step'])}; offset {number(round(kept['largest_offset']))} at most, to its last step, {number(kept['steps'])}"),
                (verdict["begin"], "`evenkeel.isolate`", f"{verdict['replays']} replays of {verdict['end'] - verdict['begin']} steps: `{'`, `'.join(verdict['sites'])}` ({', '.join(verdict['formats'])}) of {heads(guilty)}; {verdict['certainty']}")]  # fmt: skip
        return table(["at step", "what", "says"], [[number(step), *words] for step, *words in sorted(rows)])

    def micro_runs_table(self):
        rows = []
        for name in ("healthy-fp32-1", "derailing-row_sum_e5m2-1", "healthy-row_sum_e5m2_zero_sum-1"):
            run = self.study[name]
            rows.append([f"`{run.plan}`", " / ".join(number(run.at("offset", step)) for step in (400, 800, 1_600)), self.offset_cell(run),
                         " / ".join(loss(run.loss_by(step)) for step in (400, 800, 1_600))])  # fmt: skip
        return table(["plan", "offset at step 400 / 800 / 1,600", "largest offset", "loss at the same steps"], rows)
