"""evenkeel.isolate: the search of `evenkeel isolate` on anyone's PyTorch training. The program searches and judges; each
replay that it asks for is made here, by the training itself."""
import json
import math
import pathlib
import subprocess

import torch

from . import _layers, _program, _records, flash_attn
from ._library import EvenkeelError
from ._patch import patched
from ._watch import FACTS, Facts, Recorder


LINES_TOGETHER = 25  # steps of a replay that are read from the GPU together


class _Replays:
    """Makes replays: from a checkpoint, with a plan, on the recorded batches."""

    def __init__(self, training, checkpoints, sequences, rows):
        self.training, self.checkpoints, self.sequences, self.rows = training, checkpoints, sequences, rows

    def steps(self, asked):
        """The lines of metrics.jsonl of a replay."""
        begin, end = asked["begin"], asked["end"]
        self.training.load(self.checkpoints[begin])
        model = self.training.model
        late = end - max(1, (end - begin) // 4)
        # Facts of at most 8 steps of the last quarter, which decide, and of 4 before.
        probed = {late + n * (end - late) // 8 for n in range(8)} | {begin + n * (late - begin) // 4 for n in range(4)}
        recorder = Recorder(model, self.sequences, self.rows)
        _, unfollow = _layers.follow(model)
        flash_attn.configure(plan=asked["plan"])
        try:
            with patched(asked["plan"]):
                recorder.armed = begin in probed
                results, waiting = iter(self.training.steps(begin, end, asked["lr_factor"])), []
                for step in range(begin, end):
                    result = next(results, None)
                    if result is None:
                        raise EvenkeelError(f"expected steps {begin} to {end} of the training, found {step - begin} of them")
                    loss, norm = result if isinstance(result, tuple) else (result, None)
                    waiting.append({"step": step, "loss": loss, "gradient_norm": 1.0 if norm is None else norm})
                    taken = recorder.take()
                    if taken is not None:
                        facts = Facts(taken[0], plan_of_all_heads(asked["plan"]))
                        waiting[-1].update({name: facts.by_head[name] for name in FACTS})
                    recorder.armed = step + 1 in probed
                    if len(waiting) < LINES_TOGETHER and step + 1 < end:
                        continue
                    for line in with_numbers(waiting):
                        yield line
                        if not math.isfinite(line["loss"]):
                            return
                    waiting = []
        finally:
            flash_attn.configure()
            unfollow()
            recorder.close()


def with_numbers(lines):
    """The same lines, their losses and norms as numbers: what lies on a GPU comes in one piece, since each piece waits for it."""
    tensors = [line[name].detach().double().reshape(1) for line in lines for name in ("loss", "gradient_norm")
               if isinstance(line[name], torch.Tensor)]
    numbers = iter(torch.cat(tensors).tolist() if tensors else ())
    return [{**line, **{name: next(numbers) if isinstance(line[name], torch.Tensor) else float(line[name])
                        for name in ("loss", "gradient_norm")}} for line in lines]


def plan_of_all_heads(plan):
    """A plan without its clauses for layers and heads: what the leak is probed with. A clause that begins with a plan's name
    replaces all before it."""
    first, *clauses = (clause.strip() for clause in plan.split(";"))
    for clause in clauses:
        if not clause.startswith(("layer ", "head ")):
            first = f"{first},{clause}" if "=" in clause.split(",")[0] else clause
    return first


def isolate(training, checkpoints, run, steps=200, budget=40, exact=False, sequences=1, rows=256, tell=print):
    """Finds the rounding that makes a recorded training drift: which layer, which heads, which site; by replays of a stretch of
    it, against the same stretch in FP32 and against harmless changes of it, which tell what chance does; then proves it both ways. Returns the verdict, as
    `evenkeel isolate --json` prints it; run/verdict.json and run/isolate.json are what `evenkeel report run` shows.

    run: the folder that a Monitor wrote. training: an object with
        model                            the module whose attention is replayed; it calls scaled_dot_product_attention,
                                         evenkeel.flash_attn or transformers' attn_implementation="evenkeel"
        load(checkpoint)                 back to a checkpoint: weights, optimiser, schedule; model may be another object then
        steps(begin, end, lr_factor)     yields the loss of each recorded step from begin to end, on its own batches; or
                                         (loss, gradient norm); lr_factor is on the learning rate
    checkpoints: {step: what load takes}; the step that comes next after loading. {0: ...} is the beginning.
    steps, budget: of one replay, and replays at most. exact: replays repeat the recorded losses to the bit.
    """
    name = "evenkeel.isolate"
    for member in ("model", "load", "steps"):
        if not hasattr(training, member):
            raise TypeError(f"{name}: expected training.{member}, found none in {type(training).__name__}")
    if not checkpoints or any(not isinstance(step, int) or step < 0 for step in checkpoints):
        raise ValueError(f"{name}: expected checkpoints as {{step: checkpoint}}, found {checkpoints!r}")
    run = pathlib.Path(run)
    if not (run / _records.CONFIG).exists():
        raise ValueError(f"{name}: expected the folder of a Monitor that has probed a step, found no config.toml in {run}")
    replays = _Replays(training, dict(checkpoints), sequences, rows)
    command = [_program.program_path(), "isolate", str(run), "--ask", "--steps", str(steps), "--budget", str(budget),
               "--checkpoints", ",".join(map(str, sorted(checkpoints)))] + ([] if exact else ["--inexact"])
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        result = _answer(program, replays, checkpoints, tell or (lambda words: None))
    finally:
        program.kill()
        errors = program.communicate()[1]
    if result is None:
        raise EvenkeelError(f"{name}: {errors.strip() or 'the program ended without an answer'}")
    return result


def _answer(program, replays, checkpoints, tell):
    """Answers what the program asks, to its result; None where it ends without one."""
    def give(line):
        program.stdin.write(_records.line_of(line))

    for text in program.stdout:
        line = json.loads(text)
        if "tell" in line:
            tell(line["tell"])
        elif "result" in line:
            return line["result"]
        elif "replay" in line:
            asked = line["replay"]
            if asked["begin"] not in checkpoints:
                give({"error": f"no checkpoint of step {asked['begin']}: give one in checkpoints"})
            else:
                for step in replays.steps(asked):
                    give(step)
                give({"done": True})
            program.stdin.flush()
    return None
