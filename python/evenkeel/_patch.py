"""PyTorch's own doors, routed through evenkeel.attention: torch.nn.functional.scaled_dot_product_attention, the registry of
flash attention implementations, and varlen_attn."""
import contextlib
import functools
import sys

import torch
import torch.nn.functional as F

from . import _coverage, _layers
from ._attention import attention, draws, run_packed, under_autocast, unsuited, unsuited_mask, whole_plan

NAME = "scaled_dot_product_attention"
_undo = []  # of each patch still in force


def _replace(owner, name, value):
    """Sets owner.name, also where other modules imported the old value under that name; returns what undoes it."""
    before, missing = getattr(owner, name, None), not hasattr(owner, name)
    setattr(owner, name, value)
    others = [] if before is None else [
        module for module in list(sys.modules.values())
        if module is not owner and getattr(module, "__dict__", {}).get(name) is before]
    for module in others:
        setattr(module, name, value)

    def undo():
        if missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
        for module in others:
            setattr(module, name, before)

    return undo


def fall_back(why, original, strict, *arguments, **options):
    """The original's answer, with one warning for each reason; an error where there is no original."""
    kind, words = why
    if original is None:
        raise kind(f"evenkeel.patch: {words}; this torch has no {NAME} of its own to fall back to")
    _coverage.not_taken(NAME, why, strict, arguments[0])
    return original(*arguments, **options)


def _reason(query, key, value, attn_mask, dropout_p, is_causal, more, plan, stabiliser):
    if more:
        return TypeError, f"expected no other keywords, found {', '.join(sorted(more))}"
    if dropout_p > 0:
        return ValueError, f"expected dropout_p of 0, found {dropout_p}"
    why = unsuited(query, key, value, plan, stabiliser)
    if why is None and attn_mask is not None:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        why = unsuited_mask(attn_mask, shape, query.device)
        if why is None and is_causal:
            why = ValueError, "expected is_causal or attn_mask, found both"
    return why


@functools.lru_cache(maxsize=None)  # the same function for the same plan: compiled code must not be compiled again
def _routed(original, plan, stabiliser, strict):
    def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                     enable_gqa=False, **more):
        given = (query, key, value)
        query, key, value = under_autocast(query, key, value)
        flat = query.dim() == 3 and key.dim() == 3 and value.dim() == 3  # (batch, rows, head size)
        if flat:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            if attn_mask is not None and attn_mask.dim() == 3:
                attn_mask = attn_mask.unsqueeze(1)
        why = _reason(query, key, value, attn_mask, dropout_p, is_causal, more, plan, stabiliser)
        if why is None and scale == 0:
            why = ValueError, "expected a scale other than 0, found 0"
        if why is None and key.shape[1] != query.shape[1] and not enable_gqa:
            why = ValueError, (f"expected as many key heads as query heads without enable_gqa, found {key.shape[1]} and "
                               f"{query.shape[1]}")
        if why is not None:
            if flat and attn_mask is not None and attn_mask.dim() == 4:
                attn_mask = attn_mask.squeeze(1)
            # Of what this torch's function does not know, only what was set.
            more = {**more, **({} if scale is None else {"scale": scale}), **({"enable_gqa": True} if enable_gqa else {})}
            return fall_back(why, original, strict, *given, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
                             **more)
        o = attention(query, key, value, is_causal, plan, stabiliser, attn_mask, scale, layer=_layers.current.layer, door=NAME)
        return o.squeeze(1) if flat else o

    scaled_dot_product_attention.evenkeel_original = original
    return scaled_dot_product_attention


def patch(plan=None, stabiliser=None, strict=False, model=None):
    """From now on torch.nn.functional.scaled_dot_product_attention is evenkeel.attention with this plan, and so is
    torch.nn.attention.varlen.varlen_attn where this torch has it. What it does not take goes to PyTorch's own, with one
    warning for each reason; strict: evenkeel.NotCovered instead. Call it before a model is built (nanoGPT looks for the
    function then) or compiled. On torch 1.x, which has no such function, it comes into being.
    A plan with clauses for layers needs the model: its list of layers then says which one runs."""
    undo = []
    if model is not None:
        blocks, unfollow = _layers.follow(model)
        undo.append(unfollow)
        if blocks == 0:
            raise ValueError(f"evenkeel.patch: expected a model with a list of layers (torch.nn.ModuleList), found none in {type(model).__name__}")
    try:
        _layers.require(plan, "evenkeel.patch")
        if plan is not None or stabiliser is not None:
            draws(whole_plan(torch.bfloat16, plan, stabiliser), "evenkeel.patch")  # a misspelt word is said now, not in the first step
    except BaseException:
        for action in undo:
            action()
        raise
    before = getattr(F, NAME, None)
    original = before if before is None or not hasattr(before, "evenkeel_original") else before.evenkeel_original
    undo.append(_replace(F, NAME, _routed(original, plan, stabiliser, strict)))
    varlen = sys.modules.get("torch.nn.attention.varlen")
    if varlen is None and hasattr(torch.nn, "attention"):
        with contextlib.suppress(ImportError):
            import torch.nn.attention.varlen as varlen
    if varlen is not None and hasattr(varlen, "varlen_attn"):
        before = varlen.varlen_attn
        undo.append(_replace(varlen, "varlen_attn",
                             _routed_varlen(getattr(before, "evenkeel_original", before), plan, stabiliser, strict)))
    _undo.append(undo)


@functools.lru_cache(maxsize=None)
def _routed_varlen(original, plan, stabiliser, strict):
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *positional, scale=None, window_size=(-1, -1),
                    return_aux=None, **more):
        asked = {name: value for name, value in more.items() if value is not None and value is not False}
        why = None
        if positional or asked:
            why = TypeError, f"expected no other arguments, found {', '.join(sorted(asked)) or positional}"
        else:
            q, k, v = under_autocast(query, key, value)
            why = unsuited(*(t.transpose(0, 1).unsqueeze(0) if t.dim() == 3 else t for t in (q, k, v)), plan, stabiliser)
        if why is not None:
            _coverage.not_taken("varlen_attn", why, strict, query)
            given = {**more, **({} if scale is None else {"scale": scale}),
                     **({} if return_aux is None else {"return_aux": return_aux})}
            return original(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *positional, window_size=window_size, **given)
        window = tuple(window_size)
        o, lse = run_packed("varlen_attn", q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window[1] == 0, plan, stabiliser, scale,
                            window=(window[0], -1) if window[1] == 0 else window, layer=_layers.current.layer)
        return (o, lse) if return_aux is not None and return_aux.lse else o

    varlen_attn.evenkeel_original = original
    return varlen_attn


def unpatch():
    """Undoes the last patch()."""
    if not _undo:
        raise RuntimeError("evenkeel.unpatch: expected a patch() before, found none")
    for action in reversed(_undo.pop()):
        action()


@contextlib.contextmanager
def patched(plan=None, stabiliser=None, strict=False, model=None):
    """patch() for a while."""
    patch(plan, stabiliser, strict, model)
    try:
        yield
    finally:
        unpatch()


class _Active:
    """What torch's registry of flash attention implementations keeps while ours is active."""

    def remove(self):
        unpatch()


def register_flash_attention_impl(name="evenkeel", plan=None, stabiliser=None, strict=False):
    """Puts us into torch.nn.attention's registry of flash attention implementations (PyTorch 2.11 or newer); then
    torch.nn.attention.activate_flash_attention_impl(name) is patch(), and restore_flash_attention_impl() undoes it."""
    register = getattr(getattr(torch.nn, "attention", None), "register_flash_attention_impl", None)
    if register is None:
        raise ImportError("evenkeel.register_flash_attention_impl: expected a PyTorch with "
                          f"torch.nn.attention.register_flash_attention_impl (2.11 or newer), found {torch.__version__}")

    def activate():
        patch(plan, stabiliser, strict)
        return _Active()

    register(name, register_fn=activate)
