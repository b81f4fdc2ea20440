"""evenkeel.round: the rounding emulator, a tensor to any format that a plan takes."""
import ctypes

import torch

from . import _library


def round(x, format, seed=None):
    """x rounded to a format, as a plan rounds it at a site; float32 on the CPU, in and out.

    format: the text of a plan behind a site: "e4m3", "bf16/toward_zero", "e5m2/stochastic", "int8*row",
    "e2m1*block32@e8m0_up", "e2m1*block16@e4m3*tensor" (docs/study_a_format.md has all).
    Shared scales read x as (sequences, heads, rows, features): axes from the last one backwards, further ones count as
    sequences. So of a matrix `row` is a row, and `head` and `tensor` are all of it.
    seed: of stochastic rounding; element n draws the same number for the same seed. None: drawn from PyTorch's generator.

    A rounding has no gradient. For a straight-through estimate: x + (evenkeel.round(x.detach(), format) - x.detach()).
    """
    name = "evenkeel.round"
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(x).__name__}")
    if not isinstance(format, str):
        raise TypeError(f'{name}: expected a format as text, such as "e4m3", found {type(format).__name__}')
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense float32 tensor on the CPU, found {x.dtype} on {x.device}, {x.layout}; "
                         "give x.float().cpu()")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: expected a tensor that needs no gradient, found one that does, and a rounding has none; give "
                         "x.detach(), or take the straight-through estimate of this function's help")
    if seed is None:
        seed = int(torch.randint(2**31 - 1, ())) if "stochastic" in format else 0
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"{name}: expected a seed from 0 to 2^64 - 1, found {seed!r}")
    source = x.detach().contiguous()
    rounded = torch.empty_like(source)
    rows = [1] * (4 - x.dim()) + list(x.shape)
    sequences = 1
    for size in rows[:-3]:
        sequences *= size
    request = _library.Rounding(ctypes.sizeof(_library.Rounding), format.encode(), sequences, *rows[-3:], seed)
    _library.check(_library.library().evenkeel_round(ctypes.byref(request), source.data_ptr(), rounded.data_ptr()), name)
    return rounded
