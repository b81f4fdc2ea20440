"""A queue of steps for a GPU that is there for a short time: `scripts/gpu --minutes M --state FOLDER`.

usage: scripts/gpu --minutes M --state FOLDER [--build FOLDER] [--old PROGRAM] [--again] [--at-once N]
                     [--study FOLDER --study-only PART,... [--study-first PART,...]]
       scripts/gpu --list [the same options]

Steps come in the order of their worth: tests of the kernels that change most, benches of the old program against the new one (with
--old), the other tests, the other benches, then training runs (with --study). Most of a test is FP64 on one core, while the GPU has
nothing to do. So several tests run at a time, long ones in parts (NAME_1_of_4 is one, as googletest deals them out). Nothing runs
beside a bench. Runs of --study-first train from the start on beside the tests; benches wait for them.

A step starts only if its estimated time is left; shorter ones behind it may still fit. FOLDER keeps each step's output (NAME.log) and
what became of it (steps.json), so the next call goes on where this one ended. A step has half as much again as its estimate, and 15
seconds; after that it is stopped and counts as failed. A step that is stopped because the minutes are over runs again in the next
call, and so does one that was skipped, or whose program has changed since. The table of all steps comes last, with their times and
with what was not reached. Exit code: 1 where a step failed. A call that is stopped stops its steps, too.

--minutes     how long the machine is there, from now on
--state       where outputs and outcomes go
--build       a build with EVENKEEL_GPU_TESTS=ON (default: build)
--old         another evenkeel program; its bench runs in turns with the new one's
--study       trains runs of scripts/study into this folder, as many as the rest of the time allows; repeated by every call
--study-only  which parts of the study
--study-first which of its runs train from the start on, beside the tests
--at-once     how many tests run at a time (default: half as many as there are cores, at most 8)
--again       steps that failed run again
--list        shows the steps with estimates and outcomes, and starts nothing

FOLDER/estimates.json ({"NAME": SECONDS, ...}) replaces estimates. A step that was done tells its own time.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import shutil
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


MARK = "EVENKEEL_QUEUE_STEP"  # in the environment of a step's processes: its name


@dataclass
class Step:
    name: str
    estimate: float  # seconds
    command: list
    environment: dict = field(default_factory=dict)
    takes_the_rest: bool = False  # runs until the time is over, and is never finished
    is_timed: bool = True  # a bench: nothing may run beside it
    cache: str = ""  # whose choices of products are its own: timed beside other tests, or by another program, they are not for a bench
    tested: Path = None  # the program, where the command is another one that runs it

    def program(self):
        """Of the file that is run, what tells it from another one; empty where it is not there."""
        try:
            found = os.stat(self.tested or self.command[0])
        except OSError:
            return ""
        return f"{found.st_size} {found.st_mtime_ns}"


def parts_of(name, estimate, count, command, **more):
    """A test in parts, each a step of its own: its log, its outcome and its time have its name."""
    environment = more.pop("environment", {})
    if count == 1:
        return [Step(name, estimate, command, environment, is_timed=False, cache="tests", **more)]
    parts = [{**environment, "GTEST_TOTAL_SHARDS": str(count), "GTEST_SHARD_INDEX": str(part)} for part in range(count)]
    return [Step(f"{name}_{part + 1}_of_{count}", estimate, command, variables, is_timed=False, cache="tests", **more)
            for part, variables in enumerate(parts)]


def first_tests(build):
    """Of the kernels that change most. Seconds of a part on one H200, with room: hopper_test took 37 in all, fused_forms_test 153."""
    ampere = {"EVENKEEL_KERNELS": "ampere"}  # by name, where Hopper's would be chosen
    # Rows that see one key, far away: the kernels with these remedies are exact there (docs/kernels.md).
    plans = [word for remedy in ("none", "wide_output", "zero_sum", "consistent") for word in ("--plan", f"flash2,stabiliser={remedy}")]
    far = [build / "evenkeel", "conform", "--gpu", *plans, "--case", "far_one_key", "--case", "far_padding"]
    return [
        *parts_of("hopper_test", 40, 2, [build / "hopper_test"]),
        *parts_of("fp8_test", 60, 1, [build / "fp8_test"]),
        *parts_of("hopper_facts_test", 60, 1, [build / "hopper_facts_test"]),
        *parts_of("fused_forms_test", 70, 6, [build / "fused_forms_test"]),
        *parts_of("conform_far", 60, 1, far),
        *parts_of("gpt2_cuda_test", 60, 2, [build / "gpt2_cuda_test"]),
        *parts_of("device_product_test", 30, 1, [build / "device_product_test"]),
        *parts_of("hopper_test_ampere", 40, 2, [build / "hopper_test"], environment=ampere),
        *parts_of("conform_far_ampere", 60, 1, far, environment=ampere),
    ]


def other_tests(build):
    """The rest, the longest first; any_plan_test took more than two minutes in all."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    checked = [step for name in ("fused_forms_test", "hopper_facts_test")
               for step in parts_of(f"{name}_memcheck", 120, 1, [sanitizer, "--tool", "memcheck", "--error-exitcode", "1", build / name],
                                    environment={"EVENKEEL_SMALL": "1"}, tested=build / name)]
    whole = dict(ranks_cuda_test=90, conform_gpu_test=60, optimizer_cuda_test=40, cross_entropy_test=20)
    return [*checked, *parts_of("any_plan_test", 80, 4, [build / "any_plan_test"]),
            *(step for name, estimate in whole.items() for step in parts_of(name, estimate, 1, [build / name]))]


def steps_of(options):
    build = options.build
    program = build / "evenkeel"
    bench = ["bench", "attention", "--gpu"]
    steps = first_tests(build)
    if options.old:
        alone = {"EVENKEEL_PYTHON": "none"}  # no rival: it would take most of the time
        for turn in range(1, TURNS + 1):
            for name, of, cache in (("new", program, ""), ("old", options.old, "old")):
                steps.append(Step(f"attention_{name}_{turn}", 60, [of, *bench, "--quick"], alone, cache=cache))
                # FP8 beside BF16, which --quick alone has not.
                steps.append(Step(f"fp8_{name}_{turn}", 40, [of, *bench, "--row", "5", "--quick"], alone, cache=cache))
                steps.append(Step(f"train_{name}_{turn}", 60, [of, "bench", "train", "--gpu", "--rounds", "5"], alone, cache=cache))
    steps += other_tests(build)
    steps.append(Step("bench", 150, [program, *bench]))
    steps.append(Step("bench_forms", 270, [program, *bench, "--forms"]))
    steps.append(Step("bench_train", 150, [program, "bench", "train", "--gpu", "--preset", "gpt2"]))
    steps.append(Step("bench_probes", 120, [program, "bench", "probes", "--gpu"]))
    steps.append(Step("bench_ampere", 90, [program, *bench, "--quick"], {"EVENKEEL_KERNELS": "ampere"}))
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


def belongs_to(process, step):
    """Was it started by this step, whatever its parent and its session are?"""
    with contextlib.suppress(OSError):  # it has ended
        return f"{MARK}={step.name}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return False


@dataclass
class Running:
    step: Step
    child: subprocess.Popen
    began: float
    limit: float  # seconds; then it is stopped

    def processes(self):
        """All that runs of the step."""
        tree = {self.child.pid, *descendants(self.child.pid)}
        return [process for process in descendants(os.getpid()) if process in tree or belongs_to(process, self.step)]


class Queue:
    def __init__(self, options):
        self.options = options
        self.state = options.state
        self.steps = steps_of(options)
        self.beside = training("study_first", options, options.study_first) if options.study_first else None
        self.outcomes = read_json(self.state / "steps.json") if self.state else {}
        estimates = read_json(self.state / "estimates.json") if self.state else {}
        for step in self.all_steps():
            step.estimate = estimates.get(step.name, step.estimate)

    def all_steps(self):
        return [self.beside, *self.steps] if self.beside else self.steps

    def known(self, step):
        """What became of the step with this program; empty where it has not run to its end."""
        known = self.outcomes.get(step.name)
        return known if known and known.get("program") == step.program() and known["outcome"] != "cut off" else {}

    def is_done(self, step):
        outcome = self.known(step).get("outcome", "skipped")
        return not (step.takes_the_rest or outcome == "skipped" or self.options.again and outcome.startswith("FAILED"))

    def note(self, step, outcome, seconds):
        self.outcomes[step.name] = {"outcome": outcome, "seconds": round(seconds, 1), "program": step.program()}
        whole = self.state / "steps.json.new"  # a call that is killed leaves the old file or the new one
        whole.write_text(json.dumps(self.outcomes, indent=1) + "\n")
        whole.replace(self.state / "steps.json")

    def start(self, step):
        """The step as it runs, its output in its log; nothing where it does not start."""
        left, began = self.left(), time.monotonic()
        command = [str(word) for word in step.command]
        environment = {**os.environ, **step.environment, MARK: step.name}
        if step.takes_the_rest:  # it ends by itself a little earlier
            command += ["--budget", f"{max(0, left - 30) / 60:.2f}"]
        if step.cache:
            environment["XDG_CACHE_HOME"] = str(self.state / f"cache_of_{step.cache}")
        try:
            with open(self.state / f"{step.name}.log", "w") as log:
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                                         start_new_session=True, env=environment)
        except OSError as error:
            self.ended(step, f"FAILED: {step.command[0]} does not start ({error.strerror})", 0)
            return None
        return Running(step, child, began, left if step.takes_the_rest else min(1.5 * step.estimate + 15, left))

    def outcome(self, running):
        """What became of it; nothing while it runs and has time."""
        status = running.child.poll()
        if status is not None:
            return {0: "passed", 77: "skipped"}.get(status, f"FAILED (exit code {status})")
        if time.monotonic() - running.began < running.limit:
            return None
        outcome = f"FAILED: not done in {running.limit:.0f} s" if self.left() > 0 else "cut off"
        self.stop(running.processes)
        running.child.wait()
        return outcome

    def stop(self, processes):
        """All of them and what they start. Returns when none of them runs."""
        signalled = set()
        began = time.monotonic()
        while found := processes():
            waited = time.monotonic() - began
            if waited > 2 * KILL_AFTER:  # in the kernel, and deaf to signals
                print(f"processes {found} do not end", flush=True)
                return
            sign = signal.SIGKILL if waited > KILL_AFTER else signal.SIGTERM
            for process in found:
                if (process, sign) not in signalled:  # others may have been started since
                    signalled.add((process, sign))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, sign)
            time.sleep(0.01)
        steps = {running.child.pid for running in self.running}
        for process, _ in signalled:  # the orphans' exit codes: nobody else asks for them
            with contextlib.suppress(ChildProcessError):
                if process not in steps:
                    os.waitpid(process, os.WNOHANG)

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

    def look_after(self):
        """Notes what has become of the steps that run."""
        time.sleep(0.02)
        for running in list(self.running):
            if outcome := self.outcome(running):
                self.running.remove(running)
                self.ended(running.step, outcome, time.monotonic() - running.began)

    def run(self, steps, at_once):
        waiting = list(steps)
        mine = []  # of what runs; training beside these steps does not count
        while waiting or mine:
            while waiting and len(mine) < at_once:
                step = waiting.pop(0)
                if self.begins(step) and (running := self.start(step)):
                    self.running.append(running)
                    mine.append(running)
            if mine:
                self.look_after()
            mine = [running for running in mine if running in self.running]

    def run_all(self):
        self.deadline = time.monotonic() + 60 * self.options.minutes - RESERVE
        self.running = []
        try:
            if self.beside and self.begins(self.beside) and (training := self.start(self.beside)):
                self.running.append(training)
            for is_timed, steps in itertools.groupby(self.steps, key=lambda step: step.is_timed):
                while is_timed and self.running:  # a bench waits for what trains beside the tests
                    self.look_after()
                self.run(steps, 1 if is_timed else self.options.at_once)
        except BaseException:  # this call is stopped
            self.stop(lambda: descendants(os.getpid()))
            raise

    def table(self):
        lines = [f"{'step':<28}{'estimate':>10}  outcome"]
        for step in self.all_steps():
            known = self.outcomes.get(step.name)
            outcome = f"{known['outcome']}, {known['seconds']:.0f} s" if known else "waits"
            lines.append(f"{step.name:<28}{step.estimate:>8.0f} s  {outcome}")
        left = [step for step in self.steps if not self.known(step) and not step.takes_the_rest]
        tests = [step.estimate for step in left if not step.is_timed]
        timed = [step.estimate for step in left if step.is_timed]
        if left:
            lines.append(f"not reached: {', '.join(step.name for step in left)}")
            lines.append(f"they need {max(max(tests, default=0), sum(tests) / self.options.at_once):.0f} s for tests, "
                         f"{self.options.at_once} at a time, and {sum(timed):.0f} s for benches, by the estimates")
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
    parser.add_argument("--at-once", type=int, default=max(1, min(8, len(os.sched_getaffinity(0)) // 2)))
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if not options.list and (options.minutes <= 0 or not options.state):
        parser.error("expected --minutes above 0 and --state FOLDER, or --list")
    if options.at_once < 1:
        parser.error(f"expected --at-once of 1 or more, got {options.at_once}")
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
