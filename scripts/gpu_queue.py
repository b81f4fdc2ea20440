"""A queue of steps for a GPU that is there for a short time: `scripts/gpu --minutes M --state FOLDER`.

usage: scripts/gpu --minutes M --state FOLDER [--build FOLDER] [--old PROGRAM] [--again]
                     [--study FOLDER --study-only PART,... [--study-first PART,...]]
       scripts/gpu --list [the same options]

Tests come first, then benches, then training runs (with --study). Those of --study-first train while the tests run, which leave most
of a GPU free; benches wait for them. A step starts only if its estimated time is left; shorter ones
behind it may still fit. FOLDER keeps each step's output (NAME.log) and what became of it (steps.json), so the next call goes on
where this one ended. A step has half as much again as its estimate, and 15 seconds; after that it is stopped and counts as failed.
A step that is stopped because the minutes are over runs again in the next call, and so does one that was skipped, or whose
program has changed since. The table of all steps comes last. Exit code: 1 where a step failed. A call that is stopped stops its
step, too.

--minutes     how long the machine is there, from now on
--state       where outputs and outcomes go
--build       a build with EVENKEEL_GPU_TESTS=ON (default: build)
--old         another evenkeel program; its bench runs in turns with the new one's
--study       trains runs of scripts/study into this folder, as many as the rest of the time allows; repeated by every call
--study-only  which parts of the study
--study-first which of its runs train from the start on, beside the tests
--again       steps that failed run again
--list        shows the steps with estimates and outcomes, and starts nothing

FOLDER/estimates.json ({"NAME": SECONDS, ...}) replaces estimates. A step that was done tells its own time.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TURNS = 2  # of the old and the new bench
KILL_AFTER = 5  # seconds from the polite signal to the other one
RESERVE = 2 * KILL_AFTER + 5  # seconds: for stopping the last step and telling what became of it


@dataclass
class Step:
    name: str
    estimate: float  # seconds
    command: list
    environment: dict = field(default_factory=dict)
    takes_the_rest: bool = False  # runs until the time is over, and is never finished
    is_timed: bool = True  # a bench: nothing may run beside it

    def program(self):
        """Of the file that is run, what tells it from another one; empty where it is not there."""
        try:
            found = os.stat(self.command[0])
        except OSError:
            return ""
        return f"{found.st_size} {found.st_mtime_ns}"


def steps_of(options):
    build = options.build
    program = build / "evenkeel"
    bench = ["bench", "attention", "--gpu"]
    # Seconds on one H200, with room; hopper_test took 37, any_plan_test more than two minutes.
    tests = dict(hopper_test=60, hopper_facts_test=60, fused_forms_test=180, fp8_test=60, conform_gpu_test=60, any_plan_test=240, gpt2_cuda_test=120, ranks_cuda_test=90)
    steps = [Step(name, estimate, [build / name], is_timed=False) for name, estimate in tests.items()]
    # Rows that see one key, far away: Hopper's kernels with these remedies are exact there (docs/kernels.md).
    plans = [word for remedy in ("none", "wide_output", "zero_sum", "consistent") for word in ("--plan", f"flash2,stabiliser={remedy}")]
    far = [program, "conform", "--gpu", *plans, "--case", "far_one_key", "--case", "far_padding"]
    steps.insert(1, Step("conform_far", 60, far, is_timed=False))
    if options.old:
        alone = {"EVENKEEL_PYTHON": "none"}  # no rival: it would take most of the time
        for turn in range(1, TURNS + 1):
            for name, of in (("new", program), ("old", options.old)):
                steps.append(Step(f"attention_{name}_{turn}", 60, [of, *bench, "--quick"], alone))
                steps.append(Step(f"train_{name}_{turn}", 60, [of, "bench", "train", "--gpu", "--rounds", "5"], alone))
    steps.append(Step("bench", 150, [program, *bench]))
    steps.append(Step("bench_forms", 200, [program, *bench, "--forms"]))
    steps.append(Step("bench_train", 150, [program, "bench", "train", "--gpu", "--preset", "gpt2"]))
    steps.append(Step("bench_probes", 90, [program, "bench", "probes", "--gpu"]))
    if options.study:
        steps.append(training("study", options, options.study_only))
    return steps


def training(name, options, parts):
    program = options.build / "evenkeel"
    command = [ROOT / "scripts" / "study", "--evenkeel", program, "--folder", options.study, "--cpu", "0", "--only", parts]
    ours = {"EVENKEEL_LIBRARY": str(options.build / "libevenkeel.so"), "EVENKEEL_PROGRAM": str(program)}
    return Step(name, 180, command, ours, takes_the_rest=True)


def read_json(path):
    """Of a file that need not be there; one that is damaged is put aside, and nothing is known."""
    try:
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    except FileNotFoundError:
        return {}
    except ValueError:
        pass
    path.replace(path.with_suffix(".bad"))
    print(f"{path}: expected a JSON object, found something else; it is {path.with_suffix('.bad')} now")
    return {}


def adopt_orphans():
    """From now on a process whose parent has ended becomes a child of this one, so that descendants() finds it."""
    PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(process):
    """The numbers of the running processes that it started, and those did."""
    children = {}  # number: those of its children, with their states
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has ended
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append((int(folder.name), state))
    found, waiting = [], [process]
    while waiting:
        for number, state in children.get(waiting.pop(), []):
            waiting.append(number)
            if state not in "ZX":  # a zombie runs no more
                found.append(number)
    return found


class Queue:
    def __init__(self, options):
        self.options = options
        self.state = options.state
        self.steps = steps_of(options)
        self.beside = training("study_first", options, options.study_first) if options.study_first else None
        self.trains = None  # its process, while it runs
        self.outcomes = read_json(self.state / "steps.json") if self.state else {}
        estimates = read_json(self.state / "estimates.json") if self.state else {}
        for step in self.all_steps():
            step.estimate = estimates.get(step.name, step.estimate)

    def all_steps(self):
        return [self.beside, *self.steps] if self.beside else self.steps

    def is_done(self, step):
        known = self.outcomes.get(step.name)
        if not known or step.takes_the_rest or known.get("program") != step.program():
            return False
        return known["outcome"] not in ("cut off", "skipped") and not (self.options.again and known["outcome"].startswith("FAILED"))

    def note(self, step, outcome, seconds):
        self.outcomes[step.name] = {"outcome": outcome, "seconds": round(seconds, 1), "program": step.program()}
        whole = self.state / "steps.json.new"  # a call that is killed leaves the old file or the new one
        whole.write_text(json.dumps(self.outcomes, indent=1) + "\n")
        whole.replace(self.state / "steps.json")

    def start(self, step, left):
        """The step's process; its output goes to its log."""
        command = [str(word) for word in step.command]
        if step.takes_the_rest:  # it ends by itself a little earlier
            command += ["--budget", f"{max(0, left - 30) / 60:.2f}"]
        with open(self.state / f"{step.name}.log", "w") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                                    start_new_session=True, env={**os.environ, **step.environment})

    def run(self, step, left):
        limit = left if step.takes_the_rest else min(1.5 * step.estimate + 15, left)
        began = time.monotonic()
        try:
            child = self.start(step, left)
        except OSError as error:
            return f"FAILED: {step.command[0]} does not start ({error.strerror})", 0.0
        return self.outcome(child, limit), time.monotonic() - began

    def outcome(self, child, limit):
        """What became of the process, at the latest after `limit` seconds; then it is stopped."""
        try:
            status = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            outcome = f"FAILED: not done in {limit:.0f} s" if self.left() > 0 else "cut off"
            self.stop()
            child.wait()
            return outcome
        return {0: "passed", 77: "skipped"}.get(status, f"FAILED (exit code {status})")

    def others(self):
        """All that this call has started and that runs, in whatever session (runs of the study have their own), but for what trains
        beside the tests."""
        trains = [self.trains.pid, *descendants(self.trains.pid)] if self.trains else []
        return [process for process in descendants(os.getpid()) if process not in trains]

    def stop(self):
        """The step and all that it started. Returns when none of it runs."""
        signalled = set()
        began = time.monotonic()
        while running := self.others():
            waited = time.monotonic() - began
            if waited > 2 * KILL_AFTER:  # in the kernel, and deaf to signals
                print(f"processes {running} do not end", flush=True)
                return
            sign = signal.SIGKILL if waited > KILL_AFTER else signal.SIGTERM
            for process in running:
                if (process, sign) not in signalled:  # others may have been started since
                    signalled.add((process, sign))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, sign)
            time.sleep(0.01)
        with contextlib.suppress(ChildProcessError):  # none is left
            while not self.trains and os.waitpid(-1, os.WNOHANG)[0]:  # the orphans' exit codes: nobody else asks for them
                pass

    def left(self):
        return self.deadline - time.monotonic()

    def begins(self, step):
        if self.is_done(step) or step.estimate > self.left():
            return False
        print(f"{step.name} ... ({self.left() / 60:.1f} minutes left)", flush=True)
        return True

    def ended(self, step, outcome, seconds):
        self.note(step, outcome, seconds)
        print(f"{step.name}: {outcome}, {seconds:.0f} s", flush=True)

    def run_all(self):
        began = time.monotonic()
        self.deadline = began + 60 * self.options.minutes - RESERVE
        try:
            if self.beside and self.begins(self.beside):
                self.trains = self.start(self.beside, self.left())
            for step in self.steps:
                if step.is_timed:
                    self.await_training(began)
                if self.begins(step):
                    self.ended(step, *self.run(step, self.left()))
            self.await_training(began)
        except BaseException:  # this call is stopped
            self.trains = None
            self.stop()
            raise

    def await_training(self, began):
        if not self.trains:
            return
        child, self.trains = self.trains, None
        self.ended(self.beside, self.outcome(child, max(0, self.left())), time.monotonic() - began)

    def table(self):
        lines = [f"{'step':<20}{'estimate':>10}  outcome"]
        for step in self.all_steps():
            known = self.outcomes.get(step.name)
            outcome = f"{known['outcome']}, {known['seconds']:.0f} s" if known else "waits"
            lines.append(f"{step.name:<20}{step.estimate:>8.0f} s  {outcome}")
        return "\n".join(lines)

    def has_failed(self):
        return any(self.outcomes.get(step.name, {}).get("outcome", "").startswith("FAILED") for step in self.all_steps())


def main():
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=0)
    for name in ("--state", "--old", "--study"):
        parser.add_argument(name, type=lambda text: Path(text).resolve())
    parser.add_argument("--build", type=lambda text: Path(text).resolve(), default=ROOT / "build")
    for name in ("--study-only", "--study-first"):
        parser.add_argument(name)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if not options.list and (options.minutes <= 0 or not options.state):
        parser.error("expected --minutes above 0 and --state FOLDER, or --list")
    if options.study and not options.study_only:
        parser.error("expected --study-only PART,... with --study: text is made ready for all runs before the first one starts")
    if options.study_first and not options.study:
        parser.error("expected --study FOLDER with --study-first")
    if options.old and not (options.old.parent / "libevenkeel.so").exists():
        parser.error(f"expected libevenkeel.so beside {options.old}, found none: its bench would use another stopwatch than the new one's")
    if options.state:
        options.state.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, lambda number, _: sys.exit(128 + number))
    queue = Queue(options)
    if not options.list:
        queue.run_all()
    print(queue.table())
    return int(not options.list and queue.has_failed())


if __name__ == "__main__":
    sys.exit(main())
