"""Judges `evenkeel forecast` on the runs of docs/curves (scripts/study --forecast) and keeps what it found in docs/forecast.json.

Every run is cut at several moments, and the program is asked what it forecasts from the records up to there. A forecast is
right where the forecast step of failure is within a factor of FACTOR of the true one (study_curves.py defines failure).
The one fitted number that sets the dates, kForecastTimeLeft (src/diagnosis/forecast.h), is fitted anew for each run, to the
first forecasts of all *other* failing runs. The thresholds that decide whether there is a forecast were last chosen when
docs/curves had no run that is_held_out() names. So alarms, false and true, are judged fairly on these runs alone, and the number
that dates them is fitted to the other ones. Other designs are judged beside (study_designs.py).

Standard library only; the curves are by layer (largest over heads), so a layer stands for a head here.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "python" / "evenkeel"))
from _records import CONFIG, METRICS, line_of, read_steps
from study_curves import Study, median
from study_designs import Designs, leaks_of_plans, parts
from study_sizes import SIZES

FACTOR = 1.5
SHARES = [n / 20 for n in range(6, 20)]  # of a failing run's life
MOMENTS = 20  # of a run that does not fail, and
EARLY = 10  # times its warm-up: so long, every second record too, since offsets of healthy runs grow there
# What was trained after the thresholds of src/diagnosis/forecast.h were last chosen: runs on these texts, and parts.
HELD_OUT_TEXTS, HELD_OUT_PARTS = ("hostile_micro", "llama_settings"), ("mini-", "other_text-")
WATCHED, WATCHED_EVERY = ("cure-wide_output-1", "size-flash2-2"), 250  # runs that are asked more often, and steps between
NOT_FINITE = ("shift-paper_",)  # ended by NaN, not by drift: neither healthy nor failing here


def is_held_out(run):
    return run.text in HELD_OUT_TEXTS or run.name.startswith(HELD_OUT_PARTS)


def write_cut(folder, run, step):
    """A run's folder as it was at a step."""
    folder.mkdir()
    (folder / CONFIG).write_text(f"""[model]
width = {SIZES[run.size].head_size * 8}
heads = 8
precision = "{SIZES[run.size].linear}"
[schedule]
warmup = {run.warmup}
[data]
seed = {run.seed}
[study]
settings = {json.dumps([run.size, run.text, run.in_torch or "", *run.settings, *(["guard"] if run.is_guarded else [])])}
""" + (f'[attention]\nplan = "{run.plan}"\n' if run.plan else ""))
    with open(folder / METRICS, "w") as file:
        for at, row in zip(run.fact_steps, run.offset):
            if at <= step:
                file.write(line_of({"step": at, "offset": [[x] for x in row]}))


def ask(program, cuts, more=()):
    """What the program forecasts of each cut: (run, step). In calls of 200 folders."""
    answers = []
    for begin in range(0, len(cuts), 200):
        with tempfile.TemporaryDirectory() as name:
            folders = []
            for n, (run, step) in enumerate(cuts[begin : begin + 200]):
                folders.append(Path(name) / str(n))
                write_cut(folders[-1], run, step)
            done = subprocess.run([program, "forecast", "--json", *folders, *(more or ["--alone"])], capture_output=True, text=True)
            if done.returncode not in (0, 1):
                raise RuntimeError(f"expected a forecast, found exit code {done.returncode}: {done.stderr or done.stdout}")
            answers += json.loads(done.stdout)
    return answers


def write_losses(folder, run):
    """Adds the losses of a whole run to its folder: of every step, its group's mean."""
    lines = {line["step"]: line for line in read_steps(folder)}
    with open(folder / METRICS, "w") as file:
        for at, loss in run.losses():
            file.write(line_of({**lines.get(at, {"step": at}), "loss": loss}))


def ask_history(program, runs, moments):
    """{name: [(step, expected failure or None)]} and {name: earlier runs of its plan and settings}, by `forecast --history` with all runs
    of other seeds: what a person knows who has trained the same before."""
    expected, alike = {}, {}
    for seed in sorted({run.seed for run in runs}):
        with tempfile.TemporaryDirectory() as name:
            home = Path(name)
            for run in runs:
                if run.seed != seed:
                    write_cut(home / run.name, run, run.last_step)
                    write_losses(home / run.name, run)
            cuts = [(run, step) for run in runs if run.seed == seed for step in moments[run.name]]
            for (run, step), answer in zip(cuts, ask(program, cuts, ["--history", str(home)])):
                found = answer["history"]
                expected.setdefault(run.name, []).append((step, found and found["failure"]))  # None: its own record shows the failure
                alike[run.name] = max(alike.get(run.name, 0), len(found["alike"]) if found else 0)
    return expected, alike


def soonest(answer):
    """(outlook, step of failure, earliest, latest) of the layer that is expected to fail first; None: no failure is forecast."""
    if not answer["at_risk"]:
        return None
    layer = answer["at_risk"][0][0]
    head = next(head for head in answer["heads"] if head["layer"] == layer)
    return head["outlook"], head["failure"], head["earliest"], head["latest"]


def fitted_time_left(root):
    text = (root / "src/diagnosis/forecast.h").read_text()
    return float(re.search(r"kForecastTimeLeft = ([\d.]+)", text)[1])


def fitted_on(name, study, first):
    """The first forecasts that date a run: those of all other failing runs; of a run that is held out, of those that are not."""
    held_out = is_held_out(study[name])
    return [left for other, left in first.items() if other != name and not (held_out and is_held_out(study[other]))]


def life_of(name, study, forecasts, first, compiled):
    """One failing run: what was forecast at each share of its life."""
    run, failure = study[name], study.failure(study[name])
    scale = median(fitted_on(name, study, first)) / compiled
    life = []
    for share, found in forecasts:
        if found is None:
            life.append({"share": share, "forecast": None})
            continue
        outlook, expected, earliest, latest = found
        now = share * failure
        if outlook == "drift":
            expected, earliest, latest = (now + (x - now) * scale for x in (expected, earliest, latest))
        life.append({"share": share, "forecast": round(expected), "within": bool(failure / FACTOR <= expected <= failure * FACTOR),
                     "in_interval": bool(earliest <= failure <= latest)})  # fmt: skip
    # Could it be seen at all? The drifting layer's offset at half of the life, against the healthy twin's at the same step.
    layer, twin = study.drift(run)[1], study.twin(run)
    ours, theirs = run.at("offset", failure / 2, layer), twin.at("offset", min(failure / 2, twin.last_step), layer)
    return {"size": run.size, "failure": failure, "life": life, "half_life_ratio": round(ours / theirs, 2) if ours and theirs else None}


def judge(root, program):
    study, compiled = Study(root / "docs" / "curves"), fitted_time_left(root)
    runs = [run for run in study.distinct(study.runs) if not run.is_continued and not run.name.startswith(NOT_FINITE)]
    failing = [run for run in runs if study.failure(run)]
    twins = {study.twin(run) for run in runs}  # healthy by definition, also where they have no twin of their own
    healthy = [run for run in runs if study.drift(run) is None and (study.twin(run) or run in twins)]
    drifting = [run for run in runs if study.drift(run) and not study.failure(run)]
    early = lambda run: [step for step in run.fact_steps[::2] if step <= EARLY * run.warmup]
    moments = {run.name: [share * study.failure(run) for share in SHARES] if run in failing else early(run) + [run.last_step * n / MOMENTS for n in range(1, MOMENTS + 1)] for run in runs}
    cuts = [(run, step) for run in runs for step in moments[run.name] if step >= run.fact_steps[0]]
    found = {}
    for (run, step), answer in zip(cuts, ask(program, cuts)):
        found.setdefault(run.name, []).append((step, soonest(answer)))

    # The time left at each failing run's first forecast, as a share of its life so far.
    first = {}
    for run in failing:
        step, one = next(((step, one) for step, one in found[run.name] if one), (0, None))
        if one and one[0] == "drift":
            first[run.name] = study.failure(run) / step - 1
    lives = {run.name: life_of(run.name, study, [(share, f) for share, (_, f) in zip(SHARES, found[run.name])], first, compiled) for run in failing}
    alarms = {}
    for run in healthy + drifting:
        steps = [round(step) for step, f in found[run.name] if f]
        alarms[run.name] = {"size": run.size, "text": run.text, "steps": run.last_step, "drifts": run in drifting, "alarms": steps}
    answer = {"factor": FACTOR, "time_left": compiled, "fitted_time_left": round(median(first.values()), 3), "failing": lives, "others": alarms}
    expected = {run.name: [(moment["share"] * lives[run.name]["failure"], moment["forecast"]) for moment in lives[run.name]["life"]] for run in failing}
    expected |= {run.name: [(step, one and one[1]) for step, one in found[run.name]] for run in healthy}
    moments = {name: [step for step, _ in life] for name, life in expected.items()}
    of_others, alike = ask_history(program, failing + healthy, moments)
    leaks = leaks_of_plans(program, sorted({plan for run in runs for plan in parts(run)}))
    answer["designs"] = Designs(study, failing, healthy, moments, expected, FACTOR).judge(leaks, of_others)
    answer["leaks"] = {plan: [float(f"{leak:.3g}") for leak in pair] for plan, pair in leaks.items()}
    answer["watched"] = watched(program, study)
    answer["history"] = history_summary(study, failing, healthy, of_others, alike)
    (root / "docs" / "forecast.json").write_text(json.dumps(answer, indent=0) + "\n")
    print_summary(answer)
    return 0


def watched(program, study):
    """{name: {"every": steps, "alarms": steps with a forecast of failure}} of the runs in WATCHED."""
    cuts = [(study[name], step) for name in WATCHED if name in study.runs for step in range(WATCHED_EVERY, study[name].last_step + 1, WATCHED_EVERY)]
    found = {run.name: {"every": WATCHED_EVERY, "alarms": []} for run, _ in cuts}
    for (run, step), answer in zip(cuts, ask(program, cuts)):
        if soonest(answer):
            found[run.name]["alarms"].append(step)
    return found


def history_summary(study, failing, healthy, expected, alike):
    """Of the runs that have an earlier one alike, with another seed: dates at half of life, and false alarms at any moment. Both failures are to the step, since a multiple
    of 200 is coarse beside a factor of 1.5."""
    known = [run for run in failing if alike[run.name]]
    true = {run.name: study.failure_step(run) or study.failure(run) for run in known}
    half = {run.name: min(expected[run.name], key=lambda moment: abs(moment[0] - study.failure(run) / 2))[1] for run in known}
    right = [name for name in true if half[name] and 1 / FACTOR <= half[name] / true[name] <= FACTOR]
    others = [run for run in healthy if alike[run.name]]
    wrong = sorted(run.name for run in others if any(date for _, date in expected[run.name]))
    judged = {name: name in right for name in true} | {run.name: run.name not in wrong for run in others}
    return {"right": judged, "failing": len(known), "half": sum(date is not None for date in half.values()), "half_right": len(right), "missed": sorted(set(half) - set(right)),
            "healthy": len(others), "false_alarms": wrong, "sizes": {size: sum(run.size == size for run in known) for size in sorted({run.size for run in known})},
            "healthy_sizes": {size: sum(run.size == size for run in others) for size in sorted({run.size for run in others})}}  # fmt: skip


def print_summary(answer):
    failing, others = answer["failing"], answer["others"]
    print(f"{'share of life':<16}" + "".join(f"{share:>7.2f}" for share in SHARES))
    at = lambda n: [life["life"][n] for life in failing.values()]
    print(f"{'forecasts':<16}" + "".join(f"{sum(m['forecast'] is not None for m in at(n)):>7}" for n in range(len(SHARES))))
    print(f"{'within 1.5':<16}" + "".join(f"{sum(m.get('within', False) for m in at(n)):>7}" for n in range(len(SHARES))))
    print(f"{'in interval':<16}" + "".join(f"{sum(m.get('in_interval', False) for m in at(n)):>7}" for n in range(len(SHARES))))
    print(f"{len(failing)} failing runs; {sum((life['half_life_ratio'] or math.inf) < 2 for life in failing.values())} of them have, at half of their life, an offset below twice their healthy twin's")
    healthy = {name: run for name, run in others.items() if not run["drifts"]}
    wrong = {name: run["alarms"] for name, run in healthy.items() if run["alarms"]}
    print(f"{len(healthy)} healthy runs, {len(wrong)} with a forecast of failure: {wrong}")
    print("history:", {key: value for key, value in answer["history"].items() if key != "right"})
    for name in ("offsets", "statistics", "twin", "law", "both", "history", "all"):
        one = answer["designs"][name]
        print(f"{name:<12} at half of life {one['half']} alarms, {one['half_right']} right; first forecasts right {one['first_right']}; false alarms {len(one['false_alarms'])}: {one['false_alarms'][:8]}")
    print({key: value for key, value in answer["designs"].items() if key.startswith("law_")})
    print(f"kForecastTimeLeft: {answer['time_left']} compiled, {answer['fitted_time_left']} by all runs")
