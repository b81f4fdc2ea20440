"""evenkeel.coverage(): every attention call of the last step, with the kernel and the plan it ran by, or why not by ours.

A step ends with an optimiser's step (PyTorch 2.1 or newer has a hook), Monitor.step() or evenkeel.next_step(). Without any of
them the list goes back to the start. Equal calls are one line with a count. Compiled code is listed when it is compiled.
"""
import importlib
import threading
import warnings

import torch

_lock = threading.Lock()
_calls = {}  # (door, shape, dtype, kernel, plan, why) -> how often
_step_is_over = False
_warned = set()
_hooked = False


class NotCovered(RuntimeError):
    """strict=True, and a call of attention that the library's kernels do not take."""


class Coverage(list):
    """Dicts of door, shape, dtype, kernel, plan, why and calls; str() is a table."""

    @property
    def covered(self):
        """Whether there was a call, and every call ran in the library's kernels."""
        return bool(self) and all(call["kernel"] != "pytorch" for call in self)

    def __str__(self):
        if not self:
            return "no call of attention has come through evenkeel"
        lines = [f"{'calls':>5}  {'door':<30} {'kernel':<9} {'q':<22} {'dtype':<9} plan, or why PyTorch's own"]
        for c in self:
            words = c["plan"] if c["kernel"] != "pytorch" else c["why"]
            lines.append(f"{c['calls']:>5}  {c['door']:<30} {c['kernel']:<9} {c['shape']:<22} {c['dtype']:<9} {words}")
        return "\n".join(lines)


def _hook_optimizers():
    """Once: every optimiser's step ends a step."""
    global _hooked
    if not _hooked:
        _hooked = True
        register = getattr(importlib.import_module("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
        if register is not None:
            register(lambda *_: next_step())


def next_step():
    """The step is over: the next call of attention starts a new list of coverage()."""
    global _step_is_over
    _step_is_over = True


def at_compilation(function):
    """In code that torch compiles: called once, when it is compiled."""
    mark = getattr(getattr(torch, "compiler", None), "assume_constant_result", None)
    return function if mark is None else mark(function)


@at_compilation
def note(door, shape, dtype, kernel, plan, why):
    """One call; all of it text. Returns None."""
    global _step_is_over
    _hook_optimizers()
    key = (door, shape, dtype, kernel, plan, why)
    with _lock:
        if _step_is_over:
            _calls.clear()
            _step_is_over = False
        _calls[key] = _calls.get(key, 0) + 1


def coverage():
    """The attention calls of the last step: a list of dicts (door, shape of q, dtype, kernel, plan, why, calls). Print it
    for a table. The kernel is "hopper", "hopper_fp8", "ampere", "any_plan" or "cpu". It is "pytorch" where PyTorch's own code ran; `why` says why."""
    names = ("door", "shape", "dtype", "kernel", "plan", "why")
    with _lock:
        return Coverage({**dict(zip(names, key)), "calls": calls} for key, calls in _calls.items())


@at_compilation
def warn_once(words):
    if words not in _warned:
        _warned.add(words)
        warnings.warn(words, stacklevel=4)


def not_taken(door, reason, strict, q, route="PyTorch's own"):
    """A call that our kernels do not take: listed; NotCovered where strict, else one warning for each reason."""
    kind, words = reason
    if isinstance(q, torch.Tensor):
        note(door, shape_text(q), str(q.dtype).replace("torch.", ""), "pytorch", "", words)
    if strict:
        raise NotCovered(f"{door}: {words}; strict was asked for, so PyTorch's own is not used instead")
    warn_once(f"evenkeel: {door} goes to {route}: {words}")


def shape_text(t):
    """Of a tensor's shape; symbols of compiled code are not looked at."""
    compiler = getattr(torch, "compiler", None)
    if compiler is not None and hasattr(compiler, "is_compiling") and compiler.is_compiling():
        return "compiled"
    return str(tuple(t.shape))
