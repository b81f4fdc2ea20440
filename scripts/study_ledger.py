"""Where offsets come from, step by step: tables and figures of the study from docs/ledger.json (study_docs.py).

docs/ledger.json has, by name, what python/offset_ledger.py wrote of each run. Standard library only.
"""

from study_curves import median

# Runs of docs/ledger.json: words of the table, names.
LEDGERS = (
    ("O, seen by the loss and by delta", ("both",)),
    ("O, rounded to nearest, seen by both", ("nearest",)),
    ("row sum, rounded to nearest", ("row_sum",)),
    ("O, seen by delta alone", ("delta_alone",)),
)  # fmt: skip
FIRST = 100  # steps: the warm-up
# Whose shares are the healthy ones, by part: runs of the same text and size that have them recorded. A run with a twin of its own that has them is judged beside that.
KEY_CONTROLS = {"hostile_micro": "hostile_micro-plain_zero_sum-1", "llama_settings": "llama_settings-plain_zero_sum-1", "other_text": "other_text-fp32-1"}
KEYS_FROM = 200  # steps: in the warm-up every share is high
CLEAR = 2  # standard errors
MISSING = "docs/ledger.json is not there: python/offset_ledger.py makes its parts.\n"


def name_of(key):
    return key.rpartition("-")[0]


class Ledgers:
    """A part of Figures: `self.study` is the Study, `self.ledger` is docs/ledger.json."""

    def key_control(self, run):
        twin = self.study.twin(run)
        return twin if twin and "key_share" in twin.packed else self.study.runs.get(KEY_CONTROLS.get(run.name.partition("-")[0]))

    def beyond_since(self, run, field, layer):
        """The step from which on a layer's `field` stays beyond all that its control has from KEYS_FROM on; None: it does not."""
        rows = lambda one: [(step, row[layer - 1]) for step, row in zip(one.fact_steps, one.packed[field]) if step >= KEYS_FROM]
        limit, since = max(value for _, value in rows(self.key_control(run))), None
        for step, value in reversed(rows(run)):
            if not value > limit:
                break
            since = step
        return since

    def keyed_runs(self):
        """Drifting runs whose shares are recorded, with a control: (run, step of drift, layer)."""
        found = [run for run in self.study.runs.values() if "key_share" in run.packed and self.study.drift(run) and not run.is_continued and self.key_control(run)]
        return [(run, *self.study.drift(run)) for run in sorted(found, key=lambda run: run.name)]

    def keys_table(self):
        """What moves first: what the keys share, or the offset? In the layer that drifts."""
        rows = []
        for run, step, layer in self.keyed_runs():
            share, offset = (self.beyond_since(run, field, layer) for field in ("key_share", "offset"))
            rows.append([run.name, str(layer), *(f"{KEYS_FROM} or before" if at == KEYS_FROM else self.number(at) for at in (share, offset)), self.key_control(run).name, self.number(step), self.number(self.study.failure(run)), f"{max(row[layer - 1] for at, row in zip(run.fact_steps, run.packed['key_share']) if at >= KEYS_FROM):.2f}"])
        return self.table(["run", "layer", "share beyond its control's since step", "offset likewise", "control", "drift from", "failure at", "largest share from then on"], rows) if rows else "docs/curves holds no run with shares of keys.\n"

    def keys_value(self, what):
        """`runs`: that drift and have shares; `first`: of them, those whose share leaves its control's range before the offset does; `lead`: by how many steps then, median; `late`: the others."""
        pairs = [[self.beyond_since(run, field, layer) for field in ("key_share", "offset")] for run, _, layer in self.keyed_runs()]
        leads = [offset - share for share, offset in pairs if share is not None and offset is not None and share < offset]
        return {"runs": str(len(pairs)), "first": f"{len(leads)} of {len(pairs)}", "lead": self.number(median(leads)) if leads else self.NONE, "late": str(len(pairs) - len(leads))}[what]

    def ledger_windows(self, key, head=None):
        """(window, head) of a run behind the warm-up; of one head, or of all."""
        for window in self.ledger[key]["windows"]:
            if window["steps"][0] >= FIRST:
                yield from ((window, one) for n, one in enumerate(window["heads"]) if head in (None, n))

    def ledger_head(self, key):
        """The head with the largest offset at the end."""
        heads = self.ledger[key]["windows"][-1]["heads"]
        return max(range(len(heads)), key=lambda head: heads[head]["offset"])

    def ledger_course_table(self, key="both-1"):
        """One run window by window: the head whose offset is the largest at the end."""
        if key not in self.ledger:
            return MISSING
        head, signed = self.ledger_head(key), lambda x: f"{x:+.2g}" if abs(x) < 100 else f"{x:+,.0f}"
        rows = [[f"{self.number(window['steps'][0])} to {self.number(window['steps'][1])}", self.number(one["offset"]), signed(one["moved"]), signed(one["leak"]), signed(one["rest"]), f"{one['push_z']:.1f}", f"{one['key_share']:.2f}"]
                for window, one in self.ledger_windows(key, head)]  # fmt: skip
        return self.table(["steps", "offset at the end", "mean score moved by", "of it by the leak", "by the rest", "z", "share of the keys"], rows)

    def ledger_table(self):
        """A line a run: is there a direction, and does anything pull back?"""
        rows = []
        for words, names in LEDGERS:
            for key in sorted(key for key in self.ledger if name_of(key) in names):
                run, found = self.ledger[key], list(self.ledger_windows(key))
                z = [one["push_z"] for _, one in found]
                own = list(self.ledger_windows(key, self.ledger_head(key)))
                shares = [one["key_share"] for _, one in own]
                counts = f"{sum(x > CLEAR for x in z)} and {sum(x < -CLEAR for x in z)} of {len(z)}"
                rows.append([words, f"{run['seed']}, {run['layer']}", self.number(run["windows"][-1]["steps"][1]), counts, f"{median(z):.1f} ({min(z):.1f} to {max(z):.1f})", self.number(max(one["offset"] for _, one in found)), f"{shares[0]:.2f} to {shares[-1]:.2f}"])
        return self.table(["error in", "seed, layer", "steps", "windows of a head with z above 2, below -2", "z, median (all)", "largest offset at a window's end", "share of that head's keys, at step 200 and at the end"], rows) if rows else MISSING

    def ledger_value(self, what, *rest):
        """Over the runs of a NAME: `pushes up|down|all NAME`, windows and heads beyond CLEAR standard errors; `most|least push NAME`, in standard errors; `positive NAME`, heads whose c is positive at the end.
        Of the head of a run with the largest offset: `rest_over_leak|moved|leak|rest KEY BEGIN END`, `share|offset KEY STEP` at the end of a window.
        `closes QUANTILE`: by how much the parts miss what was moved, as a share of their sizes, over the windows of all runs."""
        if what in ("pushes", "most", "least"):
            z = [one["push_z"] for key in self.ledger if name_of(key) == rest[1] for _, one in self.ledger_windows(key)]
            if what != "pushes":
                return f"{(max if what == 'most' else min)(z):.1f}"
            return str({"up": sum(x > CLEAR for x in z), "down": sum(x < -CLEAR for x in z), "all": len(z)}[rest[0]])
        if what == "positive":
            last = [head["c"] for key in self.ledger if name_of(key) == rest[0] for head in self.ledger[key]["windows"][-1]["heads"]]
            return f"{sum(c > 0 for c in last)} of {len(last)}"
        if what == "closes":
            missed = [abs(one["moved"] - one["leak"] - one["rest"]) / (abs(one["leak"]) + abs(one["rest"])) for key in self.ledger for _, one in self.ledger_windows(key)]
            return f"{100 * sorted(missed)[int(float(rest[0]) * (len(missed) - 1))]:.1f} %"
        key, *steps = rest
        begin, end = int(steps[0]) if len(steps) > 1 else None, int(steps[-1])  # one step: the window that ends there
        found = [one for window, one in self.ledger_windows(key, self.ledger_head(key)) if (window["steps"][1] == end if begin is None else begin <= window["steps"][0] and window["steps"][1] <= end)]
        if not found:
            raise ValueError(f"expected windows of {key} up to step {end}, found none")
        if what in ("share", "offset"):
            return f"{found[-1]['key_share']:.2f}" if what == "share" else self.number(found[-1]["offset"])
        total = lambda field: sum(one[field] for one in found)
        if what == "rest_over_leak":
            return f"{-100 * total('rest') / total('leak'):.0f} %"
        return f"{total(what):+.3g}"
