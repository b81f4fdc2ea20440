"""The guard's rule, by the library: which heads drift, and what is to be done (src/diagnosis/drift_guard.h)."""
import ctypes
import re

from ._library import GuardEvent, check, library

KINDS = (None, "warning", "remedy", "roll_back")


class DriftRule:
    """Fed with the figures of every judged step, in ascending order."""

    def __init__(self, plan, layers, heads, bf16):
        self._plan, self.layers, self.heads, self._bf16 = plan, layers, heads, bf16
        self._guard = library().evenkeel_guard_new(plan.encode(), layers, heads, int(bf16))
        if not self._guard:
            raise ValueError(f"evenkeel.Guard: {library().evenkeel_last_error().decode()}")
        self._free = library().evenkeel_guard_free

    def take(self, step, lse, leak=None, delta=None, checkpoints=(), act=True):
        """An event as guard.jsonl has it (step, kind, heads, plan, words, to), or None. lse, leak, delta: (layers heads)."""
        numbers = lambda values: None if values is None else (ctypes.c_double * len(values))(*values)
        steps = (ctypes.c_int64 * len(checkpoints))(*checkpoints)
        event = GuardEvent(struct_size=ctypes.sizeof(GuardEvent))
        check(library().evenkeel_guard_take(self._guard, step, numbers(lse), numbers(leak), numbers(delta), steps,
                                            len(checkpoints), int(act), ctypes.byref(event)), "evenkeel.Guard")
        if event.kind == 0:
            return None
        clauses, words = event.clauses.decode(), event.words.decode()
        heads = [[int(layer), int(head)] for layer, head in re.findall(r"layer (\d+) head (\d+):", clauses)]
        found = {"step": step, "kind": KINDS[event.kind], "heads": heads or heads_in(words), "plan": clauses, "words": words}
        if event.to >= 0:
            found["to"] = event.to
        return found

    def __del__(self):
        if getattr(self, "_guard", None):
            self._free(self._guard)


def heads_in(words):
    """[layer, head] of each head that the words name: "layer 2 heads 0, 3 and layer 3 head 1: ..."."""
    found = []
    for layer, heads in re.findall(r"layer (\d+) heads? ((?:\d+(?:, )?)+)", words.split(":")[0]):
        found += [[int(layer), int(head)] for head in re.findall(r"\d+", heads)]
    return found
