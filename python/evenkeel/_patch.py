"""torch.nn.functional.scaled_dot_product_attention, routed through evenkeel.attention."""
import contextlib
import functools
import warnings

import torch
import torch.nn.functional as F

from ._attention import attention, under_autocast, unsuited, unsuited_mask

NAME = "scaled_dot_product_attention"
_originals = []  # what was there before each patch still in force; None: nothing (before torch 2.0)
_warned = set()


def _at_compilation(function):
    """In code that torch compiles: called once, when it is compiled."""
    mark = getattr(getattr(torch, "compiler", None), "assume_constant_result", None)
    return function if mark is None else mark(function)


@_at_compilation
def _warn_once(words):
    if words not in _warned:
        _warned.add(words)
        warnings.warn(f"evenkeel: {NAME} goes to PyTorch's own: {words}", stacklevel=4)


def fall_back(why, original, *arguments, **options):
    """The original's answer, with one warning for each reason; an error where there is no original."""
    kind, words = why
    if original is None:
        raise kind(f"evenkeel.patch: {words}; this torch has no {NAME} of its own to fall back to")
    _warn_once(words)
    return original(*arguments, **options)


def _reason(query, key, value, attn_mask, dropout_p, is_causal):
    if dropout_p > 0:
        return ValueError, f"expected dropout_p of 0, found {dropout_p}"
    why = unsuited(query, key, value)
    if why is None and attn_mask is not None:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        why = unsuited_mask(attn_mask, shape, query.device)
        if why is None and is_causal:
            why = ValueError, "expected is_causal or attn_mask, found both"
    return why


@functools.lru_cache(maxsize=None)  # the same function for the same plan: compiled code must not be compiled again
def _routed(original, plan, stabiliser):
    def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                     enable_gqa=False):
        given = (query, key, value)
        query, key, value = under_autocast(query, key, value)
        flat = query.dim() == 3 and key.dim() == 3 and value.dim() == 3  # (batch, rows, head size)
        if flat:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            if attn_mask is not None and attn_mask.dim() == 3:
                attn_mask = attn_mask.unsqueeze(1)
        why = _reason(query, key, value, attn_mask, dropout_p, is_causal)
        if why is None and key.shape[1] != query.shape[1] and not enable_gqa:
            why = ValueError, (f"expected as many key heads as query heads without enable_gqa, found {key.shape[1]} and "
                               f"{query.shape[1]}")
        if why is not None:
            if flat and attn_mask is not None and attn_mask.dim() == 4:
                attn_mask = attn_mask.squeeze(1)
            # Of what this torch's function does not know, only what was set.
            more = {**({} if scale is None else {"scale": scale}), **({"enable_gqa": True} if enable_gqa else {})}
            return fall_back(why, original, *given, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **more)
        o = attention(query, key, value, is_causal, plan, stabiliser, attn_mask, scale)
        return o.squeeze(1) if flat else o

    scaled_dot_product_attention.evenkeel_original = original
    return scaled_dot_product_attention


def patch(plan=None, stabiliser=None):
    """From now on torch.nn.functional.scaled_dot_product_attention is evenkeel.attention with this plan; what it does not
    take goes to PyTorch's own, with one warning. Call it before a model is built (nanoGPT looks for the function then) or
    compiled. On torch 1.x, which has no such function, it comes into being."""
    before = getattr(F, NAME, None)
    _originals.append(before)
    original = before if before is None or not hasattr(before, "evenkeel_original") else before.evenkeel_original
    setattr(F, NAME, _routed(original, plan, stabiliser))


def unpatch():
    """Undoes the last patch()."""
    if not _originals:
        raise RuntimeError("evenkeel.unpatch: expected a patch() before, found none")
    before = _originals.pop()
    if before is None:
        delattr(F, NAME)
    else:
        setattr(F, NAME, before)


@contextlib.contextmanager
def patched(plan=None, stabiliser=None):
    """patch() for a while."""
    patch(plan, stabiliser)
    try:
        yield
    finally:
        unpatch()
