#!/usr/bin/env python3
"""A GPT in plain PyTorch that drifts. Monitor forecasts the failure, Guard prevents it in a Trainer while it runs, and
evenkeel.isolate finds the rounding. Three processes, of which the last starts when the first has drifted far.

    field_story.py --evenkeel PROGRAM --folder FOLDER [--size nano|tiny] [--device cuda|cpu] [--from N] [--steps N]
                   [--tokens FOLDER] [--seconds S] [--budget N] [--part unguarded|guarded|isolate]

unguarded  BF16 autocast and PyTorch's FLASH kernel, with Monitor: forecasts, alarms, checkpoints. It runs to --steps, so that the
           loss fails, too.
guarded    the same steps with Guard, which trains in FlashAttention-2's arithmetic and remedies heads that drift. It runs in
           transformers' Trainer where that is here, else in a plain loop.
isolate    Which rounding it was: replays from the unguarded run's checkpoints

Weights and batches are those of `evenkeel train --preset nano --seed 3`, which drifts by step 4,000. With --from N
PyTorch continues from step N (1: from the beginning). The size tiny is for a CPU: a model that drifts in some 300 steps by a coarse plan of ours in
the place of FLASH. The --tokens are a folder of `evenkeel data prepare` (default: made from this machine's Python sources, as
scripts/study does). FOLDER/story.json has what each part found. The last lines are a table of what each instrument said and when.
A failure is a loss more than 5 % above the guarded run's (means of 200 steps). Exit codes: 0 the story holds, 1 it does not, 3 a part failed,
77 no PyTorch.
"""
import argparse
import contextlib
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time
import warnings

try:
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import evenkeel  # noqa: E402
from evenkeel._records import CONFIG, METRICS, largest_offset, line_of, read_config, read_steps  # noqa: E402
from check_model import read_safetensors  # noqa: E402
from twin_torch import batches_of, read_tokens  # noqa: E402

ROWS = 128  # of the sequence that is probed
SEED = 3  # of the weights and the batches
COMMON = ["--schedule", "constant", "--seed", str(SEED), "--set", "run.divergence = 0.0", "--plan", "flash2"]
SIZES = {
    "nano": dict(options="--preset nano --sequences 32 --lr 3e-3 --warmup 500 --backend cuda".split(), steps=5500, every=25,
                 guard_every=50, save_every=250, far=2000, drifts=None, guarded="flash2", replay=200),
    "tiny": dict(options="--preset micro --sequences 4 --lr 2e-2 --warmup 1 --threads 1 --set".split() +
                 ["model.layers = 2", "--set", "model.heads = 1", "--set", "model.width = 32", "--set", "model.context = 32",
                  "--set", "optimizer.weight_decay = 0.1", "--set", "optimizer.clip = 0.0"],
                 steps=900, every=5, guard_every=5, save_every=50, far=2000, drifts="fp32,row_sum=e5m2", guarded="fp32,row_sum=e5m2",
                 replay=60),
}


# --- The model and its training, as anyone writes them


class Block(nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width, bias), "c_proj": nn.Linear(width, width, bias)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width, bias), "c_proj": nn.Linear(4 * width, width, bias)})

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.attn["c_attn"](self.ln_1(x)).split(C, dim=2))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.attn["c_proj"](o)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2 with the names of its weights."""

    def __init__(self, weights, heads):
        super().__init__()
        (vocabulary, width), layers = weights["wte.weight"].shape, sum(name.endswith("ln_1.weight") for name in weights)
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(weights["wpe.weight"].shape[0], width)
        self.h = nn.ModuleList(Block(width, heads, "h.0.attn.c_attn.bias" in weights) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens, targets):
        """tokens, targets (B, T); the loss."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))


def as_linear(name, tensor):
    """A weight of the checkpoint, whose matrices are (in, out), as the module has it."""
    return tensor.t() if tensor.dim() == 2 and name not in ("wte.weight", "wpe.weight") else tensor


class Training:
    """From the first checkpoint of a run of `evenkeel train`, on its batches; as evenkeel.isolate takes one."""

    def __init__(self, options):
        self.size, self.device = SIZES[options.size], options.device
        first = options.folder / "first"
        self.first = options.first
        checkpoint = first / "checkpoints" / f"step-{self.first:08}"
        self.weights = read_safetensors(checkpoint / "model.safetensors")
        self.states = read_safetensors(checkpoint / "optimizer.safetensors")
        config = json.loads((options.folder / "settings.json").read_text())
        self.heads, self.lr, self.warmup = config["heads"], config["lr"], config["warmup"]
        self.optimizer_options = config["optimizer"]
        starts, self.length = batches_of(first / "batches.bin", SEED, options.steps)
        self.starts = torch.from_numpy(starts.copy()).to(self.device)
        self.tokens = torch.from_numpy(read_tokens(pathlib.Path(config["tokens"])).astype(np.int32)).to(self.device)
        self.place = torch.arange(self.length, device=self.device)
        self.load(None)

    def load(self, checkpoint):
        """checkpoint: a file of save(); None: the beginning, of which step --from is next."""
        self.model = Gpt(self.weights, self.heads)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in self.weights:
                    p.copy_(as_linear(name, self.weights[name]))
                else:  # a norm without bias
                    p.zero_().requires_grad_(False)
        self.model = self.model.to(self.device).train()
        given, on_gpu = self.optimizer_options, self.device == "cuda"
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        groups = [{"params": [p for p in named.values() if (p.dim() == 2) == decay],
                   "weight_decay": given["weight_decay"] if decay else 0.0} for decay in (True, False)]
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(given["beta1"], given["beta2"]), eps=given["epsilon"],
                                           **({"fused": True} if on_gpu else {}))
        for name, p in named.items():
            state = lambda kind: as_linear(name, self.states[f"{kind}.{name}"]).float().contiguous().to(self.device)
            self.optimizer.state[p] = {"step": torch.tensor(float(self.first), device=self.device if on_gpu else "cpu"),
                                       "exp_avg": state("first"), "exp_avg_sq": state("second")}
        if checkpoint is not None:
            weights, state = torch.load(checkpoint, map_location=self.device)
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)

    def save(self, file):
        partial = pathlib.Path(str(file) + ".partial")
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), partial)
        partial.rename(file)

    def rate(self, step):
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup))

    def rows(self, step):
        return self.tokens[self.starts[step][:, None] + self.place].long()

    def mixed(self):
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.device == "cuda" else contextlib.nullcontext()

    def step(self, step, factor=1.0):
        """The loss and the gradient's norm, tensors."""
        rows = self.rows(step)
        for group in self.optimizer.param_groups:
            group["lr"] = factor * self.rate(step)
        with self.mixed():
            loss = self.model(rows[:, :-1], rows[:, 1:])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optimizer_options["clip"] or math.inf)
        self.optimizer.step()
        return loss.detach(), norm

    def steps(self, begin, end, lr_factor):
        for step in range(begin, end):
            yield self.step(step, lr_factor)


# --- The three parts


def failure_of(folder, healthy, window=200):
    """The step by which the mean loss of a window of steps is more than 5 % above the healthy run's; None: it is not."""
    losses = [{line["step"]: float(line["loss"]) for line in read_steps(run)} for run in (folder, healthy)]
    steps = sorted(set(losses[0]) & set(losses[1]))
    for end in range(window, len(steps) + 1, window):
        bad, good = (sum(one[step] for step in steps[end - window : end]) for one in losses)
        if not bad <= 1.05 * good:
            return steps[end - 1] + 1
    return None


def offsets_of(folder):
    """step -> the largest offset of any head."""
    found = {}
    for line in read_steps(folder):
        if "probe" in line:
            found[line["step"]] = largest_offset(line["probe"]["offset"])
    return found


def flash(size):
    """What chooses the kernel that drifts."""
    if size["drifts"] is not None:
        return evenkeel.patched(size["drifts"])
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def unguarded(options):
    training, size = Training(options), SIZES[options.size]
    forecasts, folder, drifted = [], options.folder / "unguarded", False
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    continue_record(options.folder / "first", folder, options.first)

    def note(step, numbers):
        if "evenkeel/forecast_fails" in numbers:
            told = {name: numbers.get(f"evenkeel/forecast_{name}") for name in ("step", "earliest", "latest", "layer", "head")}
            expected = told.pop("step")  # none where the run has failed
            forecasts.append({"at": step, "failure_at": numbers.get("evenkeel/failed_since") if expected is None else expected, **told})

    with warnings.catch_warnings(), flash(size), evenkeel.Monitor(training.model, folder, every=size["every"], rows=ROWS,
                                                                  first_step=options.first, plan=size["guarded"],
                                                                  loggers=[note]) as monitor:
        warnings.simplefilter("ignore")
        for step in range(options.first, options.steps):
            if step % size["save_every"] == 0 and not drifted:
                training.save(folder / "checkpoints" / f"{step}.pt")
            loss, norm = training.step(step)
            offset = monitor.step(loss, lr=training.rate(step), gradient_norm=norm).get("evenkeel/offset", 0.0)
            if offset > size["far"] and not drifted:
                drifted = True
                (options.folder / "drifted").touch()  # isolate may begin
            if is_done(options, step + 1):
                break
    return {"steps": step + 1, "alarms": [{name: event[name] for name in ("step", "heads", "words")} for event in monitor.alarms],
            "forecasts": forecasts, "worst_head": worst_head(folder), **course(offsets_of(folder))}


def continue_record(before, folder, first):
    """The record of the steps before, which `evenkeel train` made: a forecast needs the course from the warm-up on."""
    (folder / METRICS).write_text("".join(line_of(line) for line in read_steps(before) if line["step"] < first))
    shutil.copy(before / CONFIG, folder / CONFIG)


def worst_head(folder):
    """[layer, head] with the largest offset in the last probed step."""
    probes = [line["probe"]["offset"] for line in read_steps(folder) if "probe" in line]
    sizes = [(float(x) if math.isfinite(float(x)) else math.inf, layer, head)
             for layer, heads in enumerate(probes[-1]) for head, x in enumerate(heads)]
    return list(max(sizes)[1:])


def course(offsets):
    """Of a run's offsets: the healthy level (the median of the first quarter), the largest, and from where on they stay beyond
    8 times the healthy level."""
    steps = sorted(offsets)
    early = sorted(offsets[step] for step in steps[: max(1, len(steps) // 4)])
    healthy = early[len(early) // 2]
    within = [step for step in steps if offsets[step] <= 8 * healthy]
    beyond = [step for step in steps if not within or step > within[-1]]
    return {"healthy_offset": healthy, "largest_offset": max(offsets.values()), "last_offset": offsets[steps[-1]],
            "drift_from": beyond[0] if beyond else None}


def lasting(forecasts):
    """The first of the forecasts of a failure that were not taken back; None: there is none."""
    found = None
    for forecast in forecasts:
        found = (found or forecast) if forecast["failure_at"] is not None else None
    return found


class Wrapped(nn.Module):
    """Returns what transformers' Trainer expects."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        return {"loss": self.model(tokens, targets)}


def in_a_trainer(training, options, given):
    """Guard as the one line of a transformers Trainer."""
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            for step in range(options.first, options.steps):
                rows = training.rows(step)
                yield {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

    class Ordered(Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(Batches(), batch_size=None)

    class Stop(TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            control.should_training_stop |= is_done(options, options.first + state.global_step)

    rate = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda n: training.rate(n + options.first) / training.lr)
    callback = evenkeel.integrations.TrainerCallback(options.folder / "guarded", guard=True, first_step=options.first, **given)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(scratch, max_steps=options.steps - options.first, bf16=training.device == "cuda", report_to=[],
                                      save_strategy="no", logging_steps=10**9, disable_tqdm=True,
                                      max_grad_norm=training.optimizer_options["clip"] or 0.0,
                                      use_cpu=training.device == "cpu")
        Ordered(Wrapped(training.model), arguments, optimizers=(training.optimizer, rate),
                callbacks=[callback, Stop()]).train()
    return callback.monitor


def in_a_loop(training, options, given):
    with evenkeel.Guard(training.model, training.optimizer, options.folder / "guarded", first_step=options.first, **given) as guard:
        for step in range(options.first, options.steps):
            guard.step(training.step(step)[0])
            if is_done(options, step + 1):
                break
    return guard


def is_done(options, steps):
    """Whether the parts' time is nearly over: what there is then is told."""
    return steps % 25 == 0 and time.time() > options.ends - 20


def guarded(options):
    training, size = Training(options), SIZES[options.size]
    given = dict(every=size["guard_every"], plan=size["guarded"], rows=ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how, why = "a transformers Trainer", None
        try:
            guard = in_a_trainer(training, options, given)
        except Exception as error:  # not here, or another interface: the loop is anyone's
            how, why = "a plain loop", f"{type(error).__name__}: {str(error)[:300]}"
            shutil.rmtree(options.folder / "guarded", ignore_errors=True)
            training.load(None)
            guard = in_a_loop(training, options, given)
    offsets = offsets_of(options.folder / "guarded")
    return {"in": how, "not_in_a_trainer": why, "steps": max(offsets) + 1,
            "events": [{name: event[name] for name in ("step", "kind", "heads", "words")} for event in guard.alarms],
            **course(offsets)}


def isolate(options):
    training, run = Training(options), options.folder / "unguarded"
    checkpoints = {int(file.stem): file for file in (run / "checkpoints").glob("*.pt")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = evenkeel.isolate(training, checkpoints, run, steps=SIZES[options.size]["replay"], budget=options.budget, rows=ROWS)
    return {"verdict": verdict}


PARTS = {"unguarded": unguarded, "guarded": guarded, "isolate": isolate}


# --- All of it


def train(options, name, steps):
    """A run of `evenkeel train` in FOLDER/name, once."""
    folder = options.folder / name
    if (folder / "batches.bin").exists() and (folder / "checkpoints").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    command = [options.evenkeel, "train", *SIZES[options.size]["options"], *COMMON, "--data", options.tokens, "--out", folder,
               "--steps", str(steps)]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def prepare(options):
    """Tokens, and the first weights."""
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.tokens is None:
        if options.size == "nano":
            study = HERE.parent / "scripts" / "study"
            subprocess.run([sys.executable, study, "--evenkeel", options.evenkeel, "--folder", options.folder / "data", "--prepare",
                            "nano"], check=True)
            options.tokens = options.folder / "data" / "tokens"
        else:
            options.tokens = options.folder / "text"
            options.tokens.mkdir(exist_ok=True)
            subprocess.run([options.evenkeel, "data", "synth", "--out", options.tokens / "a.txt", "--bytes", "12000", "--seed", "2"],
                           check=True, stdout=subprocess.DEVNULL)
    began = time.monotonic()
    train(options, "first", options.first)
    config = read_config(options.folder / "first")
    (options.folder / "settings.json").write_text(json.dumps({
        "heads": config["model"]["heads"], "lr": config["schedule"]["lr"], "warmup": config["schedule"]["warmup"],
        "optimizer": config["optimizer"], "tokens": str(options.tokens)}))
    return time.monotonic() - began


def start(options, part):
    command = [sys.executable, __file__, "--evenkeel", options.evenkeel, "--folder", options.folder, "--size", options.size,
               "--device", options.device, "--steps", options.steps, "--from", options.first, "--budget", options.budget, "--ends", options.ends, "--part", part]
    log = open(options.folder / f"{part}.log", "w", encoding="utf-8")
    return subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT)


def all_parts(options):
    story = {"seconds": {"preparation on the GPU": round(prepare(options), 1)}}
    options.ends, running, began = time.time() + options.seconds, {}, {}
    (options.folder / "drifted").unlink(missing_ok=True)

    def run(part):
        running[part], began[part] = start(options, part), time.monotonic()

    run("unguarded"), run("guarded")
    while running:
        if "isolate" not in began and ((options.folder / "drifted").exists() or (options.folder / "unguarded.json").exists()):
            run("isolate")
        for part, process in list(running.items()):
            late = time.time() > options.ends
            if late:
                process.kill()
            if process.poll() is None:
                continue
            del running[part]
            process.wait()
            story["seconds"][part] = round(time.monotonic() - began[part], 1)
            answer = options.folder / f"{part}.json"
            lines = (options.folder / f"{part}.log").read_text().strip().splitlines() or [""]
            story[part] = json.loads(answer.read_text()) if answer.exists() else \
                {"failed": "not done in time" if late else f"code {process.returncode}: {lines[-1][:300]}"}
            (options.folder / "story.json").write_text(json.dumps(story, indent=1))
            print(f"{part}: {json.dumps(story[part])[:1500]} ({story['seconds'][part]} s)", flush=True)
        time.sleep(0.2)
    return judged(story, options.folder)


def judged(story, folder):
    """0: the story holds. Says what does not, then what each instrument said and when."""
    free, kept, found = (story.get(part, {"failed": "not run"}) for part in PARTS)
    failed = [part for part in PARTS if "failed" in story.get(part, {"failed": ""})]
    if failed:
        print(f"field_story.py: {', '.join(failed)} failed")
        return 3
    cause, told, drift = found["verdict"].get("cause"), lasting(free["forecasts"]), free["drift_from"]
    failure = story["failure_at"] = failure_of(folder / "unguarded", folder / "guarded")
    warned = next((alarm["step"] for alarm in free["alarms"] if free["worst_head"] in alarm["heads"]), None)
    checks = {
        f"the unguarded run drifts: from step {drift}, offset {free['largest_offset']:.0f}, healthy {free['healthy_offset']:.0f}":
            drift is not None,
        f"Monitor's forecast told of the failure before it came (by step {failure}), and did not take it back: {told}":
            told is not None and told["at"] < (failure or told["failure_at"]),
        f"Guard remedied heads in {kept['in']}: {[(event['step'], event['heads']) for event in kept['events'][:4]]}":
            any(event["kind"] in ("remedy", "roll_back") for event in kept["events"]),
        f"the guarded run's offset ends below half of that: {kept['last_offset']:.0f}": kept["last_offset"] < 0.5 * free["last_offset"],
        f"the guarded run ended with the other: {kept['steps']} steps and {free['steps']}": kept["steps"] <= free["steps"],
        f"isolate established a rounding: {found['verdict'].get('words', '')[:160]}":
            bool(found["verdict"].get("sites")) and cause not in ("healthy", "not_established"),
    }
    for words, holds in checks.items():
        print(f"{'yes' if holds else 'NO '}  {words}")
    print_table(story, told, warned, failure)
    (folder / "story.json").write_text(json.dumps(story, indent=1))
    return 0 if all(checks.values()) else 1


def print_table(story, told, warned, failure):
    free, kept, verdict = story["unguarded"], story["guarded"], story["isolate"]["verdict"]
    layer, head = free["worst_head"]
    others = [(alarm["step"], alarm["heads"]) for alarm in free["alarms"] if free["worst_head"] not in alarm["heads"]]
    taken_back = [one["at"] for one in free["forecasts"] if one["failure_at"] is not None and told is not None and one["at"] < told["at"]]
    remedies = [(event["step"], event["heads"]) for event in kept["events"] if event["kind"] != "warning"]
    expected = "" if told is None else f"failure near step {told['failure_at']:.0f} ({told['earliest']:.0f} to {told['latest']:.0f})"
    rows = [("Monitor's alarm", warned, f"of layer {layer} head {head}, which drifts most; of other heads: {others}"),
            ("Monitor's forecast", told and told["at"], f"{expected}; earlier ones that it took back: {taken_back}"),
            ("the offset", free["drift_from"], f"beyond 8 times its healthy level ({free['healthy_offset']:.0f}) for good; {free['largest_offset']:.0f} at most"),
            ("the loss", failure, f"more than 5 % above the guarded run's; {free['steps']} steps"),
            ("Guard", remedies[0][0] if remedies else None, f"remedies: {remedies}; offset {kept['last_offset']:.0f} at step {kept['steps']}"),
            ("isolate", None, f"steps {verdict.get('begin')} to {verdict.get('end')}, {verdict.get('replays')} replays: {verdict.get('words')} ({verdict.get('certainty')})")]
    print("\n| instrument | at step | what it says |\n|---|---|---|")
    for name, step, words in rows:
        print(f"| {name} | {'-' if step is None else step} | {words} |")
    print(f"\nseconds: {story['seconds']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evenkeel", default=os.environ.get("EVENKEEL_PROGRAM"), help="the program (default: EVENKEEL_PROGRAM)")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--size", choices=list(SIZES), default="nano")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--from", dest="first", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tokens", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=185, help="for the parts together, at most")
    parser.add_argument("--budget", type=int, default=48, help="replays of isolate, at most")
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--ends", type=float, default=math.inf, help="of a part: when its time is over, seconds since 1970")
    options = parser.parse_args()
    if not options.evenkeel:
        parser.error("expected --evenkeel PROGRAM")
    os.environ.setdefault("EVENKEEL_PROGRAM", str(options.evenkeel))
    options.steps = options.steps or SIZES[options.size]["steps"]
    if options.part is None:
        return all_parts(options)
    torch.manual_seed(1)
    torch.set_num_threads(1)  # the library has threads of its own, and three parts share the cores
    answer = PARTS[options.part](options)
    partial = options.folder / f"{options.part}.json.partial"
    partial.write_text(json.dumps(answer))
    partial.rename(options.folder / f"{options.part}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
