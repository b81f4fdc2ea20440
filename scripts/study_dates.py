"""Figures and tables of the study about `evenkeel forecast` (study_docs.py), from docs/forecast.json.

Standard library only.
"""

import math

from study_curves import median
from study_forecast import is_held_out
from study_sizes import SIZES

NO_FORECAST = "docs/forecast.json is not there: scripts/study --forecast makes it.\n"


class Dates:
    """A part of Figures: `self.forecast` is docs/forecast.json, `self.study` the Study."""

    def forecast_value(self, what, share=None, key=None):
        """Of docs/forecast.json: failing, healthy, alarms, drifting_alarms, hidden, rule; forecasts, within, in_interval, each at a share of a failing run's life;
        `design NAME KEY` and `law KEY [KEY]` of its designs; `history KEY` of runs that have an earlier one alike; `watched NAME first|last|count|every` of the runs that were asked more often;
        `held_out right|alarms|earlier_right|earlier_alarms` of the runs that no threshold was chosen on."""
        failing, others = self.forecast["failing"], self.forecast["others"]
        if what == "design":
            found = self.forecast["designs"][share][key]
            return str(len(found)) if isinstance(found, list) else f"{found} of {len(failing)}"
        if what == "history":
            history = self.forecast["history"]
            found = len(history[share]) if isinstance(history[share], list) else history[share]
            return str(found) if share in ("failing", "healthy") else f"{found} of {history['healthy' if share == 'false_alarms' else 'failing']}"
        if what == "law":
            found = self.forecast["designs"]["law_" + share]
            return f"{found[key]} of {found['runs']}" if key else self.number(found)
        if what == "watched":
            alarms = self.forecast["watched"][share]["alarms"]
            return {"first": lambda: self.number(alarms[0]), "last": lambda: self.number(alarms[-1]), "count": lambda: str(len(alarms)), "every": lambda: self.number(self.forecast["watched"][share]["every"])}[key]()
        if what == "held_out":
            return self.forecast_scores([name for name in [*failing, *others] if name in self.study.runs and is_held_out(self.study[name])])[share]
        healthy = [run for run in others.values() if not run["drifts"]]
        if what in ("forecasts", "within", "in_interval"):
            moments = [moment for life in failing.values() for moment in life["life"] if abs(moment["share"] - float(share)) < 1e-9]
            chosen = {"forecasts": lambda m: m["forecast"] is not None, "within": lambda m: m.get("within"), "in_interval": lambda m: m.get("in_interval")}[what]
            return f"{sum(bool(chosen(moment)) for moment in moments)} of {len(moments)}"
        if what in ("first_within", "first_in_interval"):
            firsts = [next((m for m in life["life"] if m["forecast"] is not None), None) for life in failing.values()]
            return f"{sum(bool(m and m[what.removeprefix('first_')]) for m in firsts)} of {len(firsts)}"
        if what == "first_share":  # of life, median of those with a forecast
            return f"{100 * median([next(m['share'] for m in life['life'] if m['forecast'] is not None) for life in failing.values() if any(m['forecast'] is not None for m in life['life'])]):.0f} %"
        drifting = [run for run in others.values() if run["drifts"]]
        sizes = lambda runs: ", ".join(f"{sum(run['size'] == size for run in runs)} of `{size}`" for size in SIZES if any(run["size"] == size for run in runs))
        return {
            "failing": lambda: str(len(failing)),
            "healthy": lambda: str(len(healthy)),
            "healthy_sizes": lambda: sizes(healthy),
            "failing_sizes": lambda: sizes(failing.values()),
            "alarms": lambda: str(sum(bool(run["alarms"]) for run in healthy)),
            "second_text": lambda: str(sum(bool(run["text"]) for run in healthy)),
            "drifting_alarms": lambda: f"{sum(bool(run['alarms']) for run in drifting)} of {len(drifting)}",
            "hidden": lambda: f"{sum((life['half_life_ratio'] or math.inf) < 2 for life in failing.values())} of {len(failing)}",
        }[what]()

    def forecast_table(self):
        """By share of a failing run's life: forecasts, right ones, and what the rule "as long again" would score."""
        if not self.forecast:
            return NO_FORECAST
        rows, lives, factor = [], list(self.forecast["failing"].values()), self.forecast["factor"]
        for n, moment in enumerate(lives[0]["life"]):
            share, moments = moment["share"], [life["life"][n] for life in lives]
            if round(share * 20) % 2:
                continue
            count = lambda key: str(sum(bool(m.get(key)) for m in moments))
            right = len(lives) if 1 / factor <= 2 * share <= factor else 0
            rows.append([f"{share:.0%}", str(sum(m["forecast"] is not None for m in moments)), count("within"), count("in_interval"), str(right)])
        return self.table(["share of the run's life", "runs with a forecast", f"right within a factor of {factor}", "in the stated interval", '"as long again" would be right in'], rows)

    def half_right(self, name):
        """Is the forecast of a failing run's own records right at half of its life?"""
        return any(abs(moment["share"] - 0.5) < 1e-9 and moment.get("within") for moment in self.forecast["failing"][name]["life"])

    def forecast_scores(self, names):
        """Of these runs: failing ones whose date at half of life is right, healthy ones with an alarm, by their own records and by earlier runs (where they have one)."""
        earlier = self.forecast["history"].get("right", {})
        failing = [name for name in names if name in self.forecast["failing"]]
        healthy = [name for name in names if name in self.forecast["others"] and not self.forecast["others"][name]["drifts"]]
        count = lambda chosen, of: f"{sum(map(chosen, of))} of {len(of)}"
        known = lambda names: [name for name in names if name in earlier]
        return {"right": count(self.half_right, failing), "alarms": count(lambda name: bool(self.forecast["others"][name]["alarms"]), healthy),
                "earlier_right": count(lambda name: earlier[name], known(failing)) if earlier else self.NONE, "earlier_alarms": count(lambda name: not earlier[name], known(healthy)) if earlier else self.NONE}  # fmt: skip

    def held_out_table(self):
        """The forecast on all runs and on those that were trained after its thresholds were chosen; these by size and text."""
        if not self.forecast:
            return NO_FORECAST
        texts = {"": "the usual text of this size", "llama_settings": "`llama_settings` (a Llama block)"}
        judged = {name: self.study.runs[name] for kind in ("failing", "others") for name in self.forecast[kind] if name in self.study.runs}
        held_out = {name: run for name, run in judged.items() if is_held_out(run)}
        groups = {"all": judged, "not held out": [name for name in judged if name not in held_out], "**held out**": held_out}
        for run in held_out.values():
            words = f"held out: `{run.size}`, {texts.get(run.text, f'`{run.text}`')}"
            groups.setdefault(words, []).append(run.name)
        rows = [[words, *self.forecast_scores(names).values()] for words, names in groups.items()]
        return self.table(["runs", "own records: failing runs right within 1.5 at half of life", "own records: healthy runs with an alarm", "earlier runs: failing runs right, of those that have one", "earlier runs: healthy runs with an alarm, of those that have one"], rows)

    def false_alarms_table(self):
        """Every healthy run with a forecast of failure at some moment."""
        if not self.forecast:
            return NO_FORECAST
        rows = []
        for name, found in sorted(self.forecast["others"].items()):
            run = self.study.runs.get(name)
            if not run or found["drifts"] or not found["alarms"]:
                continue
            alarms = [f"{step:,}" for step in sorted(set(found["alarms"]))]
            twin = self.study.twin(run)
            value, step = run.largest("offset")
            rows.append([name, self.plan_cell(run), self.number(run.last_step), alarms[0] if len(alarms) == 1 else f"{alarms[0]} to {alarms[-1]}", f"{self.number(value)} ({self.number(step)})", self.number(run.at("offset", run.last_step)),
                         self.number(self.study.healthy_level(twin, run.worst_layer(), run.last_step)) if twin else self.NONE, self.end_excess(run), "yes" if is_held_out(run) else "no"])  # fmt: skip
        return self.table(["run", "plan", "steps", "alarms at steps", "largest offset (step)", "offset at the end", "healthy level of that layer", "loss above the twin's", "held out"], rows)

    def designs_table(self):
        """What each design of a forecast reaches."""
        count, healthy = len(self.forecast["failing"]), sum(not run["drifts"] for run in self.forecast["others"].values())
        rows = []
        for name in ("offsets", "statistics", "twin", "law", "both", "history", "all"):
            one = self.forecast["designs"][name]
            rows.append([one["words"], f"{one['half']} of {count}", f"{one['half_right']} of {count}", f"{one['first_right']} of {count}", f"{len(one['false_alarms'])} of {healthy}"])
        return self.table(["what the forecast knows", "alarm at half of life", "and a date right within 1.5", "first forecast right within 1.5", "healthy runs with an alarm at any moment"], rows)
