"""Tables of the study about runs at the size of micro (study_docs.py): users' settings, exponents, formats below BF16, format by site.

Standard library only.
"""

import math

from study_curves import median
from study_runs import FEW_BITS, LLAMA_SETTINGS, NAMED_SYSTEMS, USERS_SETTINGS

OUTCOME = ["runs (seeds)", "drifted", "failed", "drift from step", "failure at step", "largest offset"]  # what group_row tells

# The same run as hostile_micro-plain, by seed: O of two bits, stochastic, on one text.
NOISY_RUNS = ("~hostile_micro-plain-?", "~square-both-[23]")
# Pairs of settings, the slower first: words, exponent, octaves between the two, names. Only runs of one text are compared.
EXPONENT_PAIRS = (
    ("O, 2 bits: nearest against stochastic, half an octave of error", "alpha", 0.5, ("derailing-output_2_bits-1", "bits-output_2-1", "claims-output_and_delta-?", "~law-output_2-1", "~exponents_micro-bits_2-?"), ("noise-output_stochastic-?", "~square-both-1", *NOISY_RUNS)),
    ("O: 2 bits, stochastic, against 1 bit, nearest, half an octave of error", "alpha", 0.5, NOISY_RUNS, ("~exponents_micro-bits_1-?",)),
    ("O: 2 bits against 1, an octave of error", "alpha", 1, ("~exponents_micro-bits_2-?",), ("~exponents_micro-bits_1-?",)),
    ("O: 3 bits against 2, an octave of error", "alpha", 1, ("~exponents_micro-bits_3-?",), ("~exponents_micro-bits_2-?",)),
    ("O, stochastic: 2 bits against 1, an octave of error", "alpha", 1, NOISY_RUNS, ("~exponents_micro-bits_1_stochastic-?",)),
    ("O, stochastic: 3 bits against 2, an octave of error", "alpha", 1, ("~exponents_micro-bits_3_stochastic-?",), NOISY_RUNS),
    ("O, stochastic: 4 bits against 3, an octave of error", "alpha", 1, ("~exponents_micro-bits_4_stochastic-?",), ("~exponents_micro-bits_3_stochastic-?",)),
    ("O-bar, 2 bits: nearest against stochastic, half an octave of error", "alpha", 0.5, ("derailing-pv_2_bits-?", "bits-pv_2-1"), ("derailing-pv_2_bits_stochastic-*",)),
    ("row sum, 2 bits: the same", "alpha", 0.5, ("derailing-row_sum_e5m2-*", "bits-row_sum_2-1"), ("derailing-row_sum_e5m2_stochastic-*",)),
    ("row sum: 3 bits against 2, an octave of error", "alpha", 1, ("derailing-row_sum_e4m3-*", "bits-row_sum_3-1"), ("derailing-row_sum_e5m2-*", "bits-row_sum_2-1")),
    ("O, 2 bits, stochastic: lr 6e-3 against 1.2e-2", "beta", 1, ("~square-both-1", *NOISY_RUNS), ("~law-lr_1.2e-2-1", "~exponents_micro-lr_1.2e-2-?")),
    ("O, 2 bits, stochastic: lr 3e-3 against 6e-3", "beta", 1, ("~exponents_micro-lr_3e-3-?",), NOISY_RUNS),
    ("O, 2 bits, stochastic: 8 sequences a step against 16", "zeta", 1, ("~exponents_micro-batch_8-?",), NOISY_RUNS),
    ("O, 2 bits, stochastic: 16 sequences a step against 32", "zeta", 1, NOISY_RUNS, ("~exponents_micro-batch_32-?",)),
)  # fmt: skip

# Claims of papers, site by site: words of the table, run of the part formats.
FORMAT_CLAIMS = (
    ("SageBwd: keys not centred", "sage_given_keys"),
    ("SageBwd: dS in BF16", "sage_dscores_bf16"),
    ("SageBwd: dS alone in INT8", "sage_dscores_alone"),
    ("SageBwd: queries centred, too", "sage_queries_centred"),
    ("SageBwd: q and k in INT4", "sage_int4"),
    ("SageBwd: q and k in INT4, queries centred", "sage_int4_queries_centred"),
    ("k alone: INT4, a scale a row", "k_int4_row"),
    ("k alone: INT4, a scale a feature", "k_int4_column"),
    ("Attn-QAT: the backward pass reads BF16", "nvfp4_unmatched"),
    ("Attn-QAT: delta from a wide O", "nvfp4_wide_output"),
    ("PASA: keys not centred", "pasa_given_keys"),
    ("FlashAttention-3, FP8: sums as an H200's tensor cores make them", "fa3_h200"),
    ("DeepSeek-V3's FP8: sums as an H200's tensor cores make them", "deepseek_h200"),
    ("SageBwd: q and k normalised", "sage_qk_norm"),
    ("SageBwd: 64 sequences a step for 16", "sage_large_batch"),
    ("SageBwd: 64 sequences a step, `zero_sum`", "sage_large_batch_zero_sum"),
)
# Beside which run, where there is no fp32 run of the same settings: nothing else that is healthy has them.
OTHER_CONTROLS = {"formats-sage_qk_norm-1": "hostile_micro-qk_norm_zero_sum-1", "formats-sage_large_batch_zero_sum-1": "formats-sage_large_batch-1"}

# Words of plans in the table of leaks, by run; plans that are not here stand there as they are.
CLAIM_WORDS = {**{name: words for words, name in FORMAT_CLAIMS}, **FEW_BITS}
LEAK_PARTS = ("formats-", "noise-", "bits-", "derailing-")

# Format by site: rounded, format, runs as they are, runs with the sum kept.
FORMAT_BY_SITE = (
    ("row sum", "2 bits", ("derailing-row_sum_e5m2-*", "bits-row_sum_2-1"), ("healthy-row_sum_e5m2_zero_sum-*",)),
    ("row sum", "3 bits", ("derailing-row_sum_e4m3-*", "bits-row_sum_3-1"), ()),
    ("row sum", "4 and 5 bits", ("bits-row_sum_[45]-1",), ()),
    ("O-bar", "2 bits", ("derailing-pv_2_bits-?", "bits-pv_2-1"), ("healthy-pv_2_bits_zero_sum-*",)),
    ("O", "2 bits, stochastic", ("noise-output_stochastic-?", "~square-both-?", "~hostile_micro-plain-?"), ("~hostile_micro-plain_zero_sum-?",)),
    ("O", "2 bits", ("derailing-output_2_bits-1", "bits-output_2-1", "claims-output_and_delta-?", "~law-output_2-1", "~exponents_micro-bits_2-?"), ()),
    ("O or O-bar", "3 to 5 bits", ("bits-pv_[345]-1", "bits-output_[345]-1", "~law-output_3-1"), ()),
    ("scores", "2 bits", ("noise-scores_nearest-?",), ()),
    ("P of the forward pass", "2 bits", ("noise-probs_nearest-?",), ()),
    ("P of the forward pass", "E2M1, blocks of 32", ("formats-probs_mxfp4-?",), ("~formats-probs_mxfp4_zero_sum-?",)),
    ("P of the backward pass", "E2M1, blocks of 32", ("formats-probs_bwd_mxfp4-?",), ("~formats-probs_bwd_mxfp4_zero_sum-?",)),
    ("dP or delta", "2 bits", ("noise-dprobs_nearest-?", "noise-delta_nearest-?"), ()),
    ("dS", "E2M1, blocks of 32", ("formats-dscores_mxfp4-?",), ("~formats-dscores_mxfp4_zero_sum-?",)),
    ("q, k, v or dO, each alone", "E2M1, blocks of 32", ("formats-q_mxfp4-?", "formats-k_mxfp4-?", "formats-v_mxfp4-?", "formats-grad_output_mxfp4-?"), ()),
    ("k", "INT4, a scale a row or a feature", ("~formats-k_int4_row-?", "~formats-k_int4_column-?"), ()),
    ("all operands", "E2M3, blocks of 32", ("formats-mxfp6-?",), ("~formats-mxfp6_zero_sum-?",)),
    ("all operands", "E2M1, blocks of 32", ("formats-mxfp4-?",), ("formats-mxfp4_zero_sum-?",)),
    ("all operands", "INT4, rows", ("formats-int4_row-?",), ("formats-int4_row_zero_sum-?",)),
    ("all operands", "NVFP4 (`nvfp4`)", ("formats-nvfp4-?",), ("formats-nvfp4_zero_sum-?",)),
    ("all operands", "INT8 (`sage_int8`, `turbo`)", ("formats-sage_int8-?", "formats-turbo-?"), ("formats-sage_int8_zero_sum-?", "formats-turbo_zero_sum-?")),
    ("all operands", "8 bits (`fp8_fa3`, `fp8_deepseek`, `mxfp8`, `hifloat8`)", ("formats-fp8_fa3-?", "formats-fp8_deepseek-?", "formats-mxfp8-?", "formats-hifloat8-?"), ("formats-fp8_fa3_zero_sum-?", "formats-fp8_deepseek_zero_sum-?", "formats-mxfp8_zero_sum-?", "formats-hifloat8_zero_sum-?")),
)  # fmt: skip


class Micro:
    """A part of Figures: `self.study` is the Study."""

    def fp32_control(self, run):
        """FP32 with the same seed and text."""
        found = [other for other in self.study.runs.values() if other.size == run.size and other.plan == "fp32" and other.seed == run.seed and other.text == run.text and not other.settings]
        if not found:
            raise ValueError(f"expected an fp32 run of seed {run.seed} on the text of {run.name}, found none")
        return max(found, key=lambda other: other.last_step)

    def control(self, run):
        """What a run is judged beside: FP32 where its settings are the usual ones; else its twin, or the run of OTHER_CONTROLS."""
        return self.study.runs.get(OTHER_CONTROLS.get(run.name)) or (self.study.twin(run) if run.settings else self.fp32_control(run))

    def outcome(self, words, runs):
        """A row: words, what group_row tells, steps, loss above the control's at the end of the shorter of both."""
        excess, judge = [], {}
        for run in runs:
            control = self.control(run)
            if run.name in OTHER_CONTROLS:
                judge = {"drift": lambda run: self.study.drift(run, self.control(run)), "failure": lambda run: self.study.failure(run, self.control(run))}
            found = self.study.excess(run, control)
            excess.append(found[min(len(found), len(control.loss_means())) - 1])
        return self.group_row(words, runs, **judge) + [self.listed([run.last_step for run in runs], self.number), self.listed(excess, self.percent)]

    def formats_table(self):
        """The systems of papers, as published and with the sum kept."""
        rows = []
        for system, words in NAMED_SYSTEMS.items():
            for remedy in ("none", "zero_sum", "consistent"):
                if runs := self.match([f"~formats-{system}{'' if remedy == 'none' else '_' + remedy}-[0-9]"]):
                    rows.append(self.outcome((f"{words} (`{system}`)", f"`{remedy}`"), runs))
        return self.table(["system", "remedy", *OUTCOME, "steps", "loss above FP32's"], rows)

    def formats_sites_table(self):
        """Operands of 6 and 4 bits: all of them, and each alone."""
        rows = []
        for name, words in FEW_BITS.items():
            for remedy in ("none", "zero_sum"):
                if runs := self.match([f"~formats-{name}{'' if remedy == 'none' else '_' + remedy}-[0-9]"]):
                    rows.append(self.outcome((words, f"`{remedy}`"), runs))
        return self.table(["operands", "remedy", *OUTCOME, "steps", "loss above FP32's"], rows)

    def formats_claims_table(self):
        beside = lambda run: "FP32" if not run.settings else "its twin" if run.name not in OTHER_CONTROLS else f"`{self.control(run).name}`"
        rows = [self.outcome((words,), runs) + [beside(runs[0])] for words, name in FORMAT_CLAIMS if (runs := self.match([f"~formats-{name}-[0-9]"]))]
        return self.table(["what is changed", *OUTCOME, "steps", "loss above the control's", "control"], rows) if rows else "docs/curves holds no runs for this table yet.\n"

    def format_by_site_table(self):
        """docs/study_a_format.md's: what drifted and failed, as it is and with zero_sum."""
        rows = []
        for site, form, free, kept in FORMAT_BY_SITE:
            cells = []
            for runs in (self.match(free), self.match(kept)):
                drifted, failed = (sum(judge(run) is not None for run in runs) for judge in (self.study.drift, self.study.failure))
                cells.append(f"{drifted} drifted, {failed} failed of {len(runs)}" if runs else "not run")
            if self.match(free):
                rows.append([site, form, *cells, self.listed(sorted({run.last_step for run in self.match((*free, *kept))}), self.number)])
        return self.table(["rounded", "format", "as it is", "with `zero_sum`", "steps"], rows)

    def leak_rows(self):
        """(words, mean leak, rms leak, runs) of every unprotected plan of LEAK_PARTS with settings as usual, the largest mean leak first; of docs/forecast.json."""
        leaks, runs = (self.forecast or {}).get("leaks", {}), {}
        for run in self.study.distinct(name for name in self.study.runs if name.startswith(LEAK_PARTS)):
            if run.plan in leaks and not run.stabiliser and not run.settings and ";" not in run.plan and self.study.twin(run):
                runs.setdefault(run.plan, []).append(run)
        words = lambda found: CLAIM_WORDS.get(found[0].name.partition("-")[2].rpartition("-")[0], f"`{found[0].plan}`")
        return sorted(((words(found), *leaks[plan], found) for plan, found in runs.items()), key=lambda row: -row[1])

    def leak_value(self, part, what, key="leak"):
        """Of the plans of a part, by mean leak: `always`, from which on all runs of every plan fail; `never`, up to which no run of any plan fails; `drifting`, the least of those that drift and never
        fail; `level`, the largest of those that do not drift. `count` for leak: how many plans. `of RUN`: of its plan."""
        if part == "of":
            return f"{self.forecast['leaks'][self.study[what].plan][0]:.2g}"
        judged = lambda judge, runs: sum(judge(run) is not None for run in runs)
        rows = [(mean, len(runs), judged(self.study.drift, runs), judged(self.study.failure, runs)) for _, mean, _, runs in self.leak_rows() if runs[0].name.startswith(part + "-")]
        spared = max(row[0] for row in rows if row[3] < row[1])
        chosen = {
            "always": [row for row in rows if row[0] > spared],
            "never": [row for row in rows if row[0] < min(row[0] for row in rows if row[3])],
            "drifting": [row for row in rows if row[2] and not row[3]],
            "level": [row for row in rows if not row[2]],
        }[what]
        found = (min if what in ("always", "drifting") else max)(row[0] for row in chosen) if chosen else None
        return str(len(chosen)) if key == "count" else f"{found:.2g}"

    def leak_table(self):
        """Does the leak that the judge finds before training say which plans drift and fail?"""
        rows = []
        for words, mean, rms, runs in self.leak_rows():
            drifted, failed = (sum(judge(run) is not None for run in runs) for judge in (self.study.drift, self.study.failure))
            rows.append([words, f"{mean:.2g}", f"{rms:.2g}", str(len(runs)), str(drifted), str(failed), self.listed([run.last_step for run in runs], self.number)])
        return self.table(["unprotected plan", "mean leak, `loss_feedback`", "rms leak, `one_signed_v`", "runs", "drifted", "failed", "steps"], rows) if rows else "docs/forecast.json has no leaks yet: scripts/study --forecast finds them.\n"

    def ending_row(self, words, runs):
        """A row: words, what group_row tells, steps, loss at the run's end."""
        return self.group_row(words, runs) + [self.listed([run.last_step for run in runs], self.number), self.listed([run.final_loss() for run in runs], self.loss)]

    def settings(self, part, settings, others=()):
        """O of two bits (stochastic) as it is and with remedies, by setting; others: runs that are `plain` under another name."""
        rows = []
        lines = [(words, part, name) for name, (words, _) in settings.items()]
        if part == "hostile_micro" and self.match(["~exponents_micro-lr_3e-3_zero_sum-[0-9]"]):
            lines.insert(1, ("half the learning rate", "exponents_micro", "lr_3e-3"))
        for words, folder, name in lines:
            for remedy in ("none", "zero_sum", "wide_output"):
                names = [f"~{folder}-{name}{'' if remedy == 'none' else '_' + remedy}-[0-9]"]
                runs = self.match(names + list(others) * (name == "plain" and remedy == "none"))
                if runs:
                    rows.append(self.ending_row((words, f"`{remedy}`"), runs))
        return self.table(["setting", "remedy", *OUTCOME, "steps", "loss at the end"], rows) if rows else "docs/curves holds no runs for this table yet.\n"

    def hostile_micro_table(self):
        return self.settings("hostile_micro", USERS_SETTINGS, ["~square-both-[23]"])

    def judged_table(self):
        """A third size and a second text: the parts that no number of the forecast was chosen on."""
        rows = []
        for part, words in (("mini", "`mini`, Python sources"), ("other_text", "`micro`, C headers, HTML and documentation")):
            for name, rounded in (("fp32", "nothing"), ("output", "O, 2 bits, stochastic"), ("row_sum", "row sum, 2 bits")):
                for remedy in ("none", "zero_sum"):
                    if runs := self.match([f"~{part}-{name}{'' if remedy == 'none' else '_' + remedy}-[0-9]"]):
                        rows.append(self.ending_row((words, rounded, f"`{remedy}`"), runs))
        return self.table(["size, text", "rounded", "remedy", *OUTCOME, "steps", "loss at the end"], rows) if rows else "docs/curves holds no runs for this table yet.\n"

    def llama_settings_table(self):
        return self.settings("llama_settings", LLAMA_SETTINGS)

    def exponent_rows(self):
        """(words, exponent's name, runs of the slower and of the faster setting, its values of all pairs)."""
        passed = lambda run: run.packed["summary"].get("offset_1000_at")
        for words, exponent, octaves, slower, faster in EXPONENT_PAIRS:
            ones, others = ([run for run in self.match(names) if passed(run)] for names in (slower, faster))
            pairs = [(one, other) for one in ones for other in others if one.text == other.text]
            if not pairs:
                continue
            values = [math.log2(passed(one) / passed(other)) / octaves for one, other in pairs]
            yield words, exponent, *(list(dict.fromkeys(pair[n] for pair in pairs)) for n in (0, 1)), values

    def exponent_value(self, *words):
        """The median of the pair of settings whose words end so."""
        words = " ".join(words)
        return next(f"{median(values):.1f}" for found, _, _, _, values in self.exponent_rows() if found.endswith(words))

    def noise_exponent_table(self):
        """Times to an offset of 1,000 in pairs of settings, and the exponent that they give: per octave of error for bits, per octave of learning rate or batch for those."""
        rows = []
        for words, exponent, ones, others, values in self.exponent_rows():
            spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
            times = [self.listed([run.packed["summary"]["offset_1000_at"] for run in runs], self.number) for runs in (ones, others)]
            rows.append([words, *times, str(len(values)), f"{exponent} = {median(values):.1f}{spread}"])
        return self.table(["pair", "offset of 1,000 at step", "the same", "pairs", "exponent, median (least to most of all pairs)"], rows)
