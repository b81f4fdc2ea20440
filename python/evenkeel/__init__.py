"""Evenkeel for PyTorch: attention whose rounding errors do not add up, and the instruments to see where others' do.

    evenkeel.attention(q, k, v, is_causal=True)     attention by a precision plan, with gradients
    evenkeel.patch()                                routes torch's scaled_dot_product_attention through it
    evenkeel.hf.register()                          then attn_implementation="evenkeel" in transformers
    evenkeel.flash_attn_func                        FlashAttention's signature
    evenkeel.Monitor(model, "runs/mine")            probes of every head while anyone's training goes on
    evenkeel.capture(model, tokens, layer, file)    one layer at one step, for `evenkeel probe`
    evenkeel.conform(fn)                            any attention judged by the sign of its errors

docs/pytorch.md has an example of each.
"""
from . import hf
from ._attention import attention, attention_facts, flash_attn_func, kernel_choice
from ._conform import conform, conform_families
from ._library import EvenkeelError, library_path, library_version
from ._patch import patch, patched, unpatch
from ._watch import Monitor, capture

__all__ = ["EvenkeelError", "Monitor", "attention", "attention_facts", "capture", "conform", "conform_families",
           "flash_attn_func", "hf", "kernel_choice", "library_path", "library_version", "patch", "patched", "unpatch"]


def __getattr__(name):
    # The library's, asked for when it is wanted: importing the package must not need the library.
    if name == "__version__":
        return library_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
