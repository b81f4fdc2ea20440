"""evenkeel.Monitor: the records of a run, from anyone's training. What a head's probes are is defined by the library alone."""
import collections
import contextlib
import ctypes
import itertools
import json
import math
import os
import pathlib
import queue
import subprocess
import threading
import time
import warnings

import torch

from . import _coverage, _ops, _program, _records, _watch_calls
from ._capture import probe, spectral_norm, write_capture
from ._drift import DriftRule
from ._library import check, library
from ._recording import Recording, some_of

METRICS_SCHEMA = 1


def _short(x):
    """Five digits, as the trainer's records have."""
    return float(f"{x:.4e}") if math.isfinite(x) else x


# Of the probes, those that the trainer's records have beside the step, too: the facts of src/records/schema.h, in its order
# (a test compares them).
FACTS = ("largest_score", "offset", "mean_lse", "largest_lse", "key_share", "tied_rows", "leak_mean", "leak_error", "leak_rms",
         "delta_rms")


FORECAST_FIRST = 8  # probed steps: fewer say nothing (src/diagnosis/forecast.h)
FORECAST_GROWTH = 1.05  # of the record, from one forecast to the next: reading it costs in proportion


def _world():
    """This process's rank, and of how many."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _whole(t):
    """A weight wherever its parts lie; where it is sharded, every rank must ask."""
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def weights_to_measure(model, parts):
    """name -> matrix, of every weight of two axes; q, k and v side by side in one weight are three. parts: from a recording."""
    found = {}
    for name, weight in model.named_parameters():
        if weight.dim() != 2:
            continue
        matrix, columns = _whole(weight), parts.get(name)
        if columns is None:
            found[name] = matrix
            continue
        features = 0 if max(int(c.max()) for c in columns) < matrix.shape[0] and matrix.shape[0] != matrix.shape[1] and \
            sum(c.numel() for c in columns) == matrix.shape[0] else 1
        for letter, c in zip("qkv", columns):
            found[f"{name}[{letter}]"] = some_of(matrix, c.flatten(), features)
    return found


def copied(matrices):
    """The same as they are now, whatever the optimiser does next: on their GPU where its memory allows, since nobody waits for
    that; else on the CPU."""
    on_gpu = sum(m.numel() * m.element_size() for m in matrices.values() if m.is_cuda)
    there = on_gpu > 0 and on_gpu < 0.25 * torch.cuda.mem_get_info()[0]
    return {name: m.clone() if there or not m.is_cuda else m.float().cpu() for name, m in matrices.items()}


def schedule_of(folder):
    """The largest learning rate and the end of the warm-up by a run's config.toml; (0, 0) without one. A training that goes on has
    its warm-up behind it, which its first learning rate does not show."""
    try:
        schedule = _records.read_config(folder)["schedule"]
        return float(schedule["lr"]), float(schedule["warmup"])
    except (OSError, KeyError, TypeError, ValueError):  # none, or without these
        return 0.0, 0


def plan_of(call, plan):
    """The plan that was asked for; else that of our attention; else what most kernels of the dtype do."""
    return plan or call.plan or ("fp32" if call.dtype in (torch.float32, torch.float64) else "flash2")


def plan_of_head(plan, layer, head):
    """A plan without clauses: what one head has of it."""
    text = ctypes.c_char_p()
    check(library().evenkeel_plan_of_head(plan.encode(), layer, head, ctypes.byref(text)), "evenkeel.Monitor")
    return text.value.decode()


class Facts:
    """What one recorded step says of every head: probes (name -> (L, H)), sequences, rows."""

    def __init__(self, calls, plan, by_head=None):
        """plan: a text, or None for the call's or the dtype's own; by_head: a function of layer and number of heads, a plan for each."""
        for call in calls:
            call.on_host()

        def plans(call, layer):
            heads = range(call.q.shape[1])
            if by_head:
                return [_ops.in_format(text, call.dtype) for text in by_head(layer, len(heads))]
            return [plan_of_head(_ops.in_format(plan_of(call, plan), call.dtype), layer, head) for head in heads]

        self.plans = [plans(call, layer) for layer, call in enumerate(calls)]  # (L, H): of each head, without clauses
        layers = [probe(call, layer, self.plans[layer]) for layer, call in enumerate(calls)]
        self.by_head = {name: [[_short(x) for x in fields[name]] for fields in layers] for name in layers[0]}
        self.sequences = calls[0].q.shape[0]
        self.rows = self.sequences * calls[0].q.shape[2]
        self.bf16 = calls[0].dtype == torch.bfloat16
        self.head_size = calls[0].q.shape[3]
        self.plan = plan_of(calls[0], plan)

    @property
    def shape(self):
        return len(self.by_head["offset"]), len(self.by_head["offset"][0])

    def flat(self, name):
        return [x for layer in self.by_head[name] for x in layer]

    def gathered(self, group):
        """The heads of all ranks of a tensor-parallel group, side by side in the order of the ranks."""
        if group is None:
            return self
        everyone = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(everyone, self.by_head, group=group)
        self.by_head = {name: [sum(parts, []) for parts in zip(*(one[name] for one in everyone))] for name in self.by_head}
        return self


class Recorder:
    """Records the attention of a model's next forward and backward pass, when armed."""

    def __init__(self, model, sequences, rows):
        self.model, self.sequences, self.rows = model, sequences, rows
        self.armed, self.recording, self._open = False, None, None
        self.lse = []  # of the last forward pass's calls of evenkeel's attention, (B, H, T) each
        self._handles = [model.register_forward_pre_hook(self._enter), model.register_forward_hook(self._leave)]

    def _enter(self, *_):
        if self._open is not None:  # the last forward pass was left by an exception
            self._open.close()
            self._open = self.recording = None
        if not torch.is_grad_enabled():
            return
        self.lse = []
        _watch_calls.listen_to_lse(self._hear)
        if not self.armed or self.recording is not None:
            return
        self.recording = Recording(self.model, self.sequences, self.rows)
        self._open = contextlib.ExitStack()
        stance = getattr(getattr(torch, "compiler", None), "set_stance", None)
        if stance is not None:
            self._open.enter_context(stance("force_eager"))
        self._open.enter_context(self.recording.running())

    def _hear(self, lse):
        self.lse.append(lse.detach())

    def _leave(self, *_):
        _watch_calls.listen_to_lse(None)
        if self._open is not None:
            self._open.close()
            self._open = None

    def lse_by_head(self):
        """mean_lse and largest_lse, tensors (L, H), of the last pass; {} where our attention did not compute all of it."""
        lse, self.lse = self.lse, []
        if len({t.shape[1] for t in lse}) != 1:  # one number of heads
            return {}
        # Layers of one shape together: a few operations, however many layers.
        parts = [torch.stack(lse)] if len({t.shape for t in lse}) == 1 else [t.unsqueeze(0) for t in lse]
        return {"mean_lse": torch.cat([t.mean((1, 3)) for t in parts]),
                "largest_lse": torch.cat([t.abs().amax((1, 3)) for t in parts])}

    def take(self, deeper=0):
        """The recorded calls that have a gradient, and the recording; None where nothing was recorded."""
        recording, self.recording = self.recording, None
        if recording is None:
            return None
        calls = [call for call in recording.calls if call.d_o is not None]
        heads = {call.q.shape[1] for call in calls}
        if len(heads) != 1:
            why = "; ".join(sorted(recording.skipped)) or f"{len(recording.calls)} calls, {len(calls)} with a gradient"
            if not recording.calls and not recording.skipped:
                why = ("no call. Attention that a model computes by hand, as a product and a softmax, is not seen: call "
                       "torch.nn.functional.scaled_dot_product_attention or evenkeel.attention there")
            elif len(heads) > 1:
                why = f"numbers {sorted(heads)}"
            warnings.warn(f"evenkeel.Monitor: expected layers of attention with one number of heads, found {why}; this step is not "
                          "probed", stacklevel=3 + deeper)
            return None
        return calls, recording

    def close(self):
        for handle in self._handles:
            handle.remove()
        self._leave()


def log_to(logger, step, numbers):
    """TensorBoard's SummaryWriter, wandb (or a run of it), MLflow, or any function of step and numbers."""
    if hasattr(logger, "add_scalar"):
        for name, value in numbers.items():
            logger.add_scalar(name, value, step)
    elif hasattr(logger, "log_metrics"):
        logger.log_metrics(numbers, step=step)
    elif hasattr(logger, "log") and not callable(logger):
        logger.log(numbers, step=step)
    elif callable(logger):
        logger(step, numbers)
    else:
        raise TypeError(f"evenkeel.Monitor: expected loggers with add_scalar, log or log_metrics, or functions, found "
                        f"{type(logger).__name__}")


MOST_LINES_ON_THEIR_WAY = 1000  # beyond, step() waits for the GPU


class _Line:
    """A step's line on its way to the file: tensors in it become numbers when they have come from the GPU."""

    def __init__(self, line):
        self.line, self.numbers, self.probing = line, {}, False
        self._on_gpu = {name: value for name, value in line.items() if isinstance(value, torch.Tensor) and value.is_cuda}
        self._host, self._event, self._come = None, None, False
        if self._on_gpu:
            flat = torch.cat([value.detach().float().flatten() for value in self._on_gpu.values()])
            self._host = torch.empty(flat.shape, pin_memory=True).copy_(flat, non_blocking=True)
            with torch.cuda.device(flat.device):
                self._event = torch.cuda.Event()
                self._event.record()

    def has_come(self, wait=False):
        """Are all numbers here but a probe's?"""
        if self._come:
            return True
        if self._event is not None:
            if not wait and not self._event.query():
                return False
            self._event.synchronize()
            sizes = [value.numel() for value in self._on_gpu.values()]
            self.line.update({name: part.view(value.shape) for (name, value), part in
                              zip(self._on_gpu.items(), self._host.split(sizes))})
            self._on_gpu = self._event = None
        for name, value in self.line.items():
            if isinstance(value, torch.Tensor):
                self.line[name] = value.item() if value.numel() == 1 and value.dim() < 2 else \
                    [[_short(x) for x in layer] for layer in value.tolist()]
        own = {name: value for name, value in self.line.items() if isinstance(value, (int, float)) and name != "schema"}
        self.numbers, self._come = {**own, **self.numbers}, True
        return True

    def is_whole(self):
        return self._come and not self.probing


def _beside_training(tensors):
    """A context for another thread: its copies from the GPU wait for what was asked of the GPU so far, and for nothing else."""
    device = next((t.device for t in tensors if t.is_cuda), None)
    if device is None:
        return contextlib.nullcontext
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()

    @contextlib.contextmanager
    def beside():
        stream = torch.cuda.Stream(device)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    return beside


RECORDS = (_records.METRICS, _records.CONFIG, "guard.jsonl", "findings.json", "captures", "verdict.json", "isolate.json")


def set_aside(folder, deeper=0):
    """Moves an earlier training's record out of the way: its alarms and its verdict are not those of the training that begins."""
    record = folder / _records.METRICS
    if not record.exists() or record.stat().st_size == 0:
        return
    number = next(n for n in itertools.count(1) if not (folder / f"before-{n}").exists())
    aside = folder / f"before-{number}"
    aside.mkdir()
    for name in RECORDS:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    warnings.warn(f"evenkeel.Monitor: expected no record in {folder} for a training that begins at step 0, found one; it is in "
                  f"{aside} now. A training that goes on says so with first_step=", stacklevel=3 + deeper)


class Monitor:
    """Writes a run folder like `evenkeel train`'s from anyone's training loop, for `verdict`, `report`, `watch`, ...:

        monitor = evenkeel.Monitor(model, "runs/mine", every=100)
        for step in range(steps):
            loss = model(...); loss.backward(); optimizer.step()
            monitor.step(loss, lr=lr)                # after the backward pass, once a step

    Every step: step, loss, lr, gradient_norm, tokens_per_second, as far as they are given. With evenkeel's attention, not
    compiled, also mean_lse and largest_lse of every layer and head. Every `every` steps the attention of the first
    forward pass is recorded and probed on the first `sequences` sequences and `rows` rows. The probes of every layer and head are
    log-sum-exp, offset, ties, leak and largest scores. Every `norms_every` such steps the spectral norms of all weights join them
    (by default each time, and every tenth on a GPU, from which the weights must be copied). A head that drifts raises
    an alarm: a warning, a line of guard.jsonl, and the attention of that step in captures/ for `evenkeel probe`.
    First step: where the training goes on. A folder that holds the record of the steps before is continued. A training that
    begins at step 0 has its own record: what an earlier one left in the folder moves to a folder within it.
    Plan: the arithmetic that ties and leaks are computed with. By default the plan of evenkeel's attention where that runs, and of
    others FlashAttention-2's for BF16, none for FP32.
    Loggers: TensorBoard's SummaryWriter, wandb, MLflow, or functions of (step, numbers).
    Background: a thread beside the training computes the probes; by default on a GPU. A line is written when it is whole,
    so lines wait for the probe before them. The method step() does not wait for the GPU. It returns the numbers of the latest
    step that has arrived.
    On several ranks: make one on each. Rank 0 writes. tensor_parallel: the group of ranks over which heads are split.
    A compiled model must be given as torch.compile returned it; recorded steps run without the compiler.
    """

    def __init__(self, model, folder, every=100, sequences=1, rows=256, plan=None, first_step=0, loggers=(), norms_every=None,
                 tensor_parallel=None, background=None):
        on_gpu = isinstance(model, torch.nn.Module) and any(p.is_cuda for p in model.parameters())
        norms_every = (10 if on_gpu else 1) if norms_every is None else norms_every
        for name, value in (("every", every), ("sequences", sequences), ("rows", rows), ("norms_every", norms_every)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"evenkeel.Monitor: expected {name} of 1 or more, found {value!r}")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"evenkeel.Monitor: expected a torch.nn.Module, found {type(model).__name__}")
        if background and tensor_parallel is not None:
            raise ValueError("evenkeel.Monitor: expected background=False with tensor_parallel, whose ranks gather every probe "
                             "together, found True")
        library()  # now, not at the first recorded step
        self.model, self.every, self.plan, self.norms_every = model, every, plan, norms_every
        self.loggers = list(loggers) if isinstance(loggers, (list, tuple)) else [loggers]
        self.folder, self._group = pathlib.Path(folder), tensor_parallel
        self.rank, self.ranks = _world()
        self._file = None
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            if first_step == 0:
                set_aside(self.folder, self._deeper)
            self._file = _records.open_record(self.folder / _records.METRICS, "a")
        self._next, self._goes_on, self._first, self._probed = first_step, first_step > 0, True, 0
        self._largest_lr, self._warmup = schedule_of(self.folder) if first_step > 0 else (0.0, 0)
        self._running, self._rule, self._config = {}, None, None
        self.alarms = []  # the events of guard.jsonl so far
        self._recorder = Recorder(model, sequences, rows)
        self._recorder.armed = self._next % every == 0
        self._forecast = _Forecast(self.folder) if self.rank == 0 else None
        background = on_gpu and tensor_parallel is None if background is None else background
        self._worker = _Worker(on_gpu) if background else None
        self._lines, self._arrived = collections.deque(), {}  # steps that are not written yet; numbers of the latest that came
        self._began = time.perf_counter()

    _deeper = 0  # calls between the training and step(), for the line that a warning names
    plans_by_head = None  # of the guard, whose heads may have plans of their own
    guard_mode = "off"  # in config.toml: off, warn or act, as of `evenkeel train`

    def step(self, loss, lr=None, gradient_norm=None, tokens=None):
        """Takes the step's numbers; returns those of the latest step that has arrived as a flat dict, for any logger: on a CPU
        this one. tokens: how many it read."""
        now = time.perf_counter()
        line = {"step": self._next}
        for name, value in (("loss", loss), ("lr", lr), ("gradient_norm", gradient_norm)):
            if value is not None:
                line[name] = value if isinstance(value, torch.Tensor) else float(value)
        if lr is not None and float(lr) > 1.01 * self._largest_lr:
            if self._largest_lr > 0 or not self._goes_on:  # the first rate of a training that goes on is no rise
                self._warmup = self._next  # it ends where the rate stops rising; a forecast looks behind it
        self._largest_lr = max(self._largest_lr, 0.0 if lr is None else float(lr))
        if tokens is not None:
            line["tokens_per_second"] = tokens / (now - self._began)
        if self._first:
            line["schema"], line["backend"], self._first = METRICS_SCHEMA, "pytorch", False
        line.update(self._recorder.lse_by_head())
        one = _Line(line)
        self._lines.append(one)
        taken = self._recorder.take(self._deeper)
        if taken is not None:
            self._probe(one, *taken)
        late = self._add_late()
        if self._forecast is not None:
            one.numbers.update(self._forecast.numbers(deeper=self._deeper))
        self._write_ready()
        self._next += 1
        self._recorder.armed = self._next % self.every == 0
        _coverage.next_step()
        self._began = time.perf_counter()
        return {**self._arrived, **late}

    def go_back(self, step):
        """The training goes on at this step, from a checkpoint: the next line is that step's again."""
        self._next = step
        self._recorder.armed = self._next % self.every == 0

    def _write_ready(self, wait=False):
        """Writes the lines that are whole, in the order of their steps."""
        for one in self._lines:
            if not one.has_come(wait or len(self._lines) > MOST_LINES_ON_THEIR_WAY):
                break
            self._arrived = one.numbers
        while self._lines and self._lines[0].is_whole():
            one = self._lines.popleft()
            self._write(one.line)
            for logger in self.loggers if self.rank == 0 else ():
                log_to(logger, one.line["step"], one.numbers)

    def _write(self, line):
        if self._file is not None:
            self._file.write(_records.line_of(line))
            self._file.flush()
            if "probe" in line:
                self._forecast.see_probe()

    def _probe(self, one, calls, recording):
        measured = weights_to_measure(self.model, recording.parts) if self._probed % self.norms_every == 0 else {}
        self._probed += 1
        if self.rank != 0 and self._group is None:
            return
        if self._worker is None:
            one.has_come(wait=True)
            self._add(one, calls, Facts(calls, self.plan, self.plans_by_head).gathered(self._group), self._norms(measured))
            return
        one.probing = True
        measured, beside = copied(measured), _beside_training([*measured.values(), calls[0].q])

        def job():
            with beside():
                return calls, Facts(calls, self.plan, self.plans_by_head), self._norms(measured)

        self._worker.give(one, job)

    def _add_late(self):
        """Puts finished probes into the lines of their steps; the latest's figures."""
        late = {}
        for one, result, error in self._worker.done() if self._worker is not None else ():
            one.probing = False
            if error is not None:
                raise error
            one.has_come(wait=True)
            late = self._add(one, *result)
        return late

    @staticmethod
    def _norms(measured):
        return {name: _short(spectral_norm(matrix)) for name, matrix in measured.items()}

    def _add(self, one, calls, facts, norms):
        """The probes of a step, into its line. Returns their figures."""
        if self.rank != 0:
            return {}
        line, step, loss = one.line, one.line["step"], one.line.get("loss", math.nan)
        for layer, values in enumerate(facts.by_head["delta_error_sum"]):
            running = self._running.setdefault(layer, [0.0] * len(values))
            for h, value in enumerate(values):
                running[h] += value if not math.isnan(value) else 0.0
        facts.by_head["delta_error_running"] = [[_short(x) for x in self._running[layer]] for layer in sorted(self._running)]
        line["probe"] = {"step": step, "loss": loss, "sequences": facts.sequences, "rows": facts.rows, **facts.by_head}
        if norms:
            line["probe"]["norms"] = norms
        line.update({"fact_sequences": facts.sequences, **{name: facts.by_head[name] for name in FACTS}})
        self._write_config(facts)
        event = self._judge(step, facts)
        figures = {**summary(facts), "evenkeel/alarm": 0 if event is None else 1}
        if event is not None:
            line["guard"] = event
            self._tell(event, calls, facts, loss)
        one.numbers.update(figures)
        return figures

    def _write_config(self, facts):
        """config.toml, by which the commands know the run."""
        layers, heads = facts.shape
        lines = ["[model]", f"layers = {layers}", f"heads = {heads}", f"head_size = {facts.head_size}", "", "[schedule]", f"lr = {self._largest_lr!r}", f"warmup = {int(self._warmup)}", "",
                 "[attention]", f"plan = {json.dumps(facts.plan)}", "", "[run]", 'trainer = "pytorch"',
                 f"probe_every = {self.every}", f'guard = "{self.guard_mode}"', ""]
        text = "\n".join(lines)
        if text != self._config:
            self._config = text
            partial = self.folder / ".config.toml.partial"
            with _records.open_record(partial, "w") as file:
                file.write(text)
            partial.replace(self.folder / _records.CONFIG)

    def _judge(self, step, facts):
        """The library's rule on this step: an event of guard.jsonl, or None."""
        if self._rule is None:
            self._rule = DriftRule(facts.plan, *facts.shape, facts.bf16)
        event = self._rule.take(step, facts.flat("largest_lse"), facts.flat("leak_rms"), facts.flat("delta_rms"), act=False)
        if event is not None and event["plan"]:
            event["next_command"] = (f'go on from a checkpoint of before with evenkeel.patch(plan="{facts.plan}; {event["plan"]}", model=model), '
                                     "or train with evenkeel.Guard")
        return event

    def _tell(self, event, calls, facts, loss):
        self.alarms.append(event)
        with _records.open_record(self.folder / "guard.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")
        folder = self.folder / "captures"
        _records.refuse_link(folder, "a folder")
        folder.mkdir(exist_ok=True)
        for layer in sorted({layer for layer, _ in event["heads"]} & set(range(len(calls)))):
            with _records.open_record(folder / f"step-{event['step']}-layer-{layer}.safetensors", "wb") as file:
                write_capture(file, calls[layer], layer, plan=facts.plans[layer], source=str(self.folder),
                              model=type(self.model).__name__, step=event["step"], loss=loss)
        following = f"; next: {event['next_command']}" if event.get("next_command") else ""
        warnings.warn(f"evenkeel.{type(self).__name__}: step {event['step']}: {event['words']}{following}", stacklevel=5 + self._deeper)

    def forecast(self, history=()):
        """What `evenkeel forecast` says of this run so far: a dict. history: folders of earlier runs of the same training (same plan and
        settings, any seed), or folders of such; without it, those beside this run's folder. The dict's "history" is what they say; it
        knows more than a run's own first half."""
        earlier = [history] if isinstance(history, (str, os.PathLike)) else list(history)
        return _only(_program.json_of("forecast", self.folder, *(["--history", *earlier] if earlier else [])))

    def verdict(self):
        """What `evenkeel verdict` says of this run so far: a dict."""
        return _program.json_of("verdict", self.folder)

    def close(self):
        self._recorder.close()
        try:
            if self._worker is not None:
                self._worker.finish()
                self._add_late()
        finally:
            self._write_ready(wait=True)
            if self._file is not None:
                self._file.close()
            if self._forecast is not None:
                self._forecast.numbers(wait=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _only(found):
    """Of a command that answers for several runs: the answer for one."""
    return found[0] if isinstance(found, list) else found


class _Forecast:
    """`evenkeel forecast` of the run's folder in a process beside the training, one at a time."""

    def __init__(self, folder):
        self._folder, self._thread, self._answer, self._told = folder, None, None, set()
        self._probes, self._due = 0, FORECAST_FIRST

    def see_probe(self):
        """A probed step has been written."""
        self._probes += 1
        if self._probes >= self._due and self._thread is None:
            self._due = max(self._probes + 1, int(self._probes * FORECAST_GROWTH))
            self._thread = threading.Thread(target=self._ask, daemon=True)  # starting a program takes a while, too
            self._thread.start()

    def _ask(self):
        self._answer = None
        with contextlib.suppress(_program.EvenkeelError, OSError, ValueError):  # without the program there is none
            done = subprocess.run([_program.program_path(), "forecast", str(self._folder), "--alone", "--json"], stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, text=True)
            self._answer = _only(json.loads(done.stdout)) if done.returncode in (0, 1) else None

    def numbers(self, wait=False, deeper=0):
        """Of a forecast that is ready: whether the run fails, and at which step it is expected to, with the interval; or since
        which step it has failed."""
        if self._thread is None or (not wait and self._thread.is_alive()):
            return {}
        self._thread.join()
        found, self._thread = self._answer, None
        if found is None:
            return {}
        failed = (found.get("failed") or {}).get("lasts", False)
        if found["fails"] and failed not in self._told:  # once that it will fail, and once that it has
            self._told.add(failed)
            warnings.warn(f"evenkeel.Monitor: {found['words']}", stacklevel=3 + deeper)
        numbers = {"evenkeel/forecast_fails": int(bool(found["fails"]))}
        if failed:
            numbers["evenkeel/failed_since"] = found["failed"]["since"]
        expected = [head for head in found["heads"] if head["failure"] is not None]
        if found["fails"] and expected:
            soonest = min(expected, key=lambda head: head["failure"])
            numbers.update({"evenkeel/forecast_step": soonest["failure"], "evenkeel/forecast_earliest": soonest["earliest"],
                            "evenkeel/forecast_latest": soonest["latest"], "evenkeel/forecast_layer": soonest["layer"],
                            "evenkeel/forecast_head": soonest["head"]})
        return {name: value for name, value in numbers.items() if value is not None}


def summary(facts):
    """The figures of a step for loggers: the worst head of each kind."""
    layers, heads = facts.shape
    numbers = {}
    for name in ("offset", "largest_lse", "largest_score", "tied_rows", "leak_share", "norm_q", "norm_k"):
        values = [abs(x) if math.isfinite(x) else math.inf for x in facts.flat(name)]
        known = [x for x, raw in zip(values, facts.flat(name)) if not math.isnan(raw)]
        if known:
            numbers[f"evenkeel/{name}"] = max(known)
            if name == "offset":
                worst = max(range(len(values)), key=values.__getitem__)
                numbers["evenkeel/worst_layer"], numbers["evenkeel/worst_head"] = divmod(worst, heads)
    return numbers


MOST_PROBES_ON_THEIR_WAY = 4  # each holds tensors: beyond, step() waits for the thread


class _Worker:
    """One thread that computes what it is given, in order."""

    def __init__(self, beside_a_gpu):
        self._modest = beside_a_gpu
        self._work, self._results = queue.Queue(MOST_PROBES_ON_THEIR_WAY), queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _be_modest(self):
        """The thread that feeds the GPU comes first: this one, and those that the library starts from it, have a quarter of the
        cores at a low priority."""
        with contextlib.suppress(AttributeError, OSError):  # not on every system
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cores[: max(1, len(cores) // 4)])
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)

    def _run(self):
        if self._modest:
            self._be_modest()
        for key, job in iter(self._work.get, None):
            try:
                self._results.put((key, job(), None))
            except Exception as error:  # raised where the results are taken
                self._results.put((key, None, error))

    def give(self, key, job):
        self._work.put((key, job))

    def done(self):
        """What is finished so far, in order: (key, result, error)."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._results.get_nowait())
        return found

    def finish(self):
        self._work.put(None)
        self._thread.join()
