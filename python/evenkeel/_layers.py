"""Which layer of a model an attention call belongs to, for doors that do not say it: torch's and flash_attn's."""
import re

import torch


class _Current:
    layer = 0
    followed = 0  # models that say which layer runs


current = _Current()  # not by thread: code that torch compiles reads it when it is compiled


def blocks_of(model):
    """The model's list of layers: of its ModuleLists with linear layers in each entry the outermost, the longest; None: none."""
    found = None
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) > 0 and all(
                any(isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D" for m in block.modules()) for block in module):
            rank = (name.count("."), -len(module))
            if found is None or rank < found[0]:
                found = (rank, module)
    return None if found is None else found[1]


def follow(model):
    """From now on a block that runs says which it is, also where it is computed again for its gradient. Returns the number of
    blocks (0: no list of layers was found) and what undoes it."""
    blocks = blocks_of(model)
    if blocks is None:
        return 0, lambda: None

    def say(layer):
        def hook(*_):
            current.layer = layer

        return hook

    handles = [block.register_forward_pre_hook(say(layer)) for layer, block in enumerate(blocks)]
    current.followed += 1

    def undo():
        current.followed -= 1
        for handle in handles:
            handle.remove()

    return len(blocks), undo


def require(plan, function):
    """A plan with clauses for layers needs a model that says which layer runs: without, every call would be one of layer 0."""
    if plan and re.search(r"\blayer\s*\d", plan) and not current.followed:
        raise ValueError(f"{function}: expected a plan without clauses for layers, since the call does not say which layer it belongs to, found "
                         f"{plan!r}; evenkeel.patch(plan, model=model) follows the model's layers")
