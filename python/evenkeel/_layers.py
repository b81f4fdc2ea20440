"""Which layer of a model an attention call belongs to, for doors that do not say it: torch's and flash_attn's."""
import torch


class _Current:
    layer = 0


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
    return len(blocks), lambda: [handle.remove() for handle in handles]
