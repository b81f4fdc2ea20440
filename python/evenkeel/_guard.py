"""evenkeel.Guard: a Monitor that acts. Heads that drift get the remedy while the training goes on."""
import importlib.util
import itertools
import re
import warnings

import torch

from . import _layers, _ops, flash_attn, hf
from ._drift import DriftRule
from ._patch import patch, unpatch
from ._watch import Monitor

REMEDY = "zero_sum"
_numbers = itertools.count()


class Guard(Monitor):
    """Trains with `plan` (FlashAttention-2's roundings) and gives the stabiliser to heads that drift, before the loss notices:

        guard = evenkeel.Guard(model, optimizer, "runs/mine", save=save, load=load)     # before the model is compiled
        while guard.next_step < steps:
            loss = model(*batch(guard.next_step)); loss.backward(); optimizer.step()
            guard.step(loss)                         # after the backward pass, once a step

    Every `every` steps a step is probed and judged by the same rule as in `evenkeel train --guard`. A head whose log-sum-exp
    drifts while its rows of dS miss their zero sum gets zero_sum from the next step on. Where that is too late, load(step) is
    called with an earlier step that was saved, and next_step is that step again. Every `save_every` steps save(step) is called
    with the step that would come next. A training that saves by itself says so: guard.saved(step). With act=False the guard only
    reports.

    The remedy reaches scaled_dot_product_attention, varlen_attn, evenkeel.flash_attn, and transformers where the model uses
    attn_implementation="evenkeel"; compiled code too, since the plan is looked up at every call. A CUDA graph has its kernels
    recorded: on_change(event) is called when the plan has changed, to capture anew.
    """

    def __init__(self, model, optimizer=None, folder="runs/guarded", every=10, plan="flash2", act=True, save=None, load=None,
                 save_every=500, on_change=None, **options):
        if options.pop("background", False):
            raise ValueError("evenkeel.Guard: expected background=False, since it acts on the step at hand")
        super().__init__(model, folder, every=every, plan=plan, background=False, **options)
        self.optimizer, self.act, self._save, self._load = optimizer, act, save, load
        self.save_every, self.on_change = save_every, on_change
        self.checkpoints, self._remedied, self._back = [], set(), None
        self._name, self._base = f"@guard-{next(_numbers)}", plan
        if hasattr(getattr(torch.nn.functional, "scaled_dot_product_attention", None), "evenkeel_original"):
            warnings.warn(f"evenkeel.Guard: expected no evenkeel.patch() before it, found one; the guard's plan replaces it: {plan}", stacklevel=2)
        self._blocks, self._unfollow = _layers.follow(model)
        self._set_plan()
        patch(plan=self._name)
        flash_attn.configure(plan=self._name)
        if importlib.util.find_spec("transformers") is not None:
            hf.register("evenkeel", plan=self._name)

    _deeper = 1

    @property
    def guard_mode(self):
        return "act" if self.act else "warn"

    @property
    def plan_now(self):
        """The plan in force, with the clauses of remedied heads."""
        return _ops.PLAN_TABLES[self._name][0]

    @property
    def next_step(self):
        return self._next

    def _set_plan(self):
        by_layer = {}
        for layer, head in sorted(self._remedied):
            by_layer.setdefault(layer, []).append(str(head))
        clauses = [f"{'' if layer is None else f'layer {layer} '}head {','.join(heads)}: stabiliser={REMEDY}"
                   for layer, heads in by_layer.items()]
        # All that may come: its memory is allocated at the beginning.
        _ops.PLAN_TABLES[self._name] = ("; ".join([self._base, *clauses]), f"{self._base},stabiliser={REMEDY}", self._base)

    def plans_by_head(self, layer, heads):
        everywhere = {head for one, head in self._remedied if one is None or one == layer}
        return [f"{self._base},stabiliser={REMEDY}" if head in everywhere else self._base for head in range(heads)]

    def saved(self, step):
        """The training has saved the state from which `step` comes next."""
        self.checkpoints = sorted({*self.checkpoints, step})

    def step(self, loss, lr=None, gradient_norm=None, tokens=None):
        if lr is None and self.optimizer is not None:
            lr = self.optimizer.param_groups[0]["lr"]
        numbers = super().step(loss, lr, gradient_norm, tokens)
        if self._back is not None:
            step, self._back = self._back, None
            self._load(step)
            self.go_back(step)
            self.checkpoints = [n for n in self.checkpoints if n <= step]
            self._rule = DriftRule(self.plan_now, self._rule.layers, self._rule.heads, self._bf16)
        elif self._save is not None and self._next % self.save_every == 0:
            self._save(self._next)
            self.saved(self._next)
        return numbers

    def _judge(self, step, facts):
        if self._rule is None:
            self._bf16 = facts.bf16
            self._rule = DriftRule(self._base, *facts.shape, facts.bf16)
        checkpoints = self.checkpoints if self._load is not None else ()
        event = self._rule.take(step, facts.flat("largest_lse"), facts.flat("leak_rms"), facts.flat("delta_rms"), checkpoints,
                                self.act)
        if event is not None and event["kind"] != "warning":
            layers = facts.shape[0]
            if layers != self._blocks:  # the layers of calls are not known: the heads of this number, in all layers
                warnings.warn(f"evenkeel.Guard: expected a list of {layers} layers in the model, one for each attention call, "
                              f"found {self._blocks}; the remedy goes to heads of the same number in all layers", stacklevel=6)
                event["plan"] = re.sub(r"layer \d+ (head)", r"\1", event["plan"])
            self._remedied |= {(layer if layers == self._blocks else None, head) for layer, head in event["heads"]}
            self._set_plan()
            self._back = event.get("to")
            if self.on_change is not None:
                self.on_change(event)
        return event

    def close(self):
        super().close()
        self._unfollow()
        flash_attn.configure()
        unpatch()
        _ops.PLAN_TABLES.pop(self._name, None)
