"""Evenkeel for PyTorch: attention whose rounding errors do not add up, and the instruments to see where others' do.

    evenkeel.attention(q, k, v, is_causal=True)     attention by a precision plan, with gradients
    evenkeel.patch()                                routes torch's scaled_dot_product_attention through it
    evenkeel.hf.register()                          then attn_implementation="evenkeel" in transformers
    evenkeel.flash_attn                             the flash_attn package's interface
    evenkeel.coverage()                             which kernel every attention call of the last step ran in, or why not
    evenkeel.Monitor(model, "runs/mine")            probes of every head while anyone's training goes on
    evenkeel.Guard(model, optimizer, "runs/mine")   the same, and heads that drift get the remedy
    evenkeel.isolate(training, checkpoints, run)    which rounding makes a recorded training drift
    evenkeel.integrations                           Monitor and Guard in the trainers of the field
    evenkeel.capture(model, tokens, layer, file)    one layer at one step, for `evenkeel probe`
    evenkeel.round(x, "e2m1*block32@e8m0_up")       the rounding emulator: any format that a plan takes
    evenkeel.conform(fn)                            any attention judged by the sign of its errors

docs/pytorch.md has an example of each.
"""
from . import flash_attn, hf, integrations
from ._attention import attention, attention_facts, kernel_choice
from ._conform import conform, conform_families
from ._coverage import NotCovered, coverage, next_step
from ._guard import Guard
from ._isolate import isolate
from ._library import EvenkeelError, library_path, library_version
from ._patch import patch, patched, register_flash_attention_impl, unpatch
from ._capture import capture
from ._round import round
from ._watch import Monitor
from .flash_attn import flash_attn_func, flash_attn_varlen_func

# Without round: `from evenkeel import *` must not hide Python's own.
__all__ = ["EvenkeelError", "Guard", "Monitor", "NotCovered", "attention", "attention_facts", "capture", "conform", "conform_families",
           "coverage", "flash_attn", "flash_attn_func", "flash_attn_varlen_func", "hf", "integrations", "isolate", "kernel_choice", "library_path", "library_version", "next_step",
           "patch", "patched", "register_flash_attention_impl", "unpatch"]


def __getattr__(name):
    # The library's, asked for when it is wanted: importing the package must not need the library.
    if name == "__version__":
        return library_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
