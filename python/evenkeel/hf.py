"""Hugging Face transformers: evenkeel.hf.register(), then attn_implementation="evenkeel"."""
import sys

import torch

from . import _coverage
from ._attention import attention, run, run_packed, taken_by_a_kernel, under_autocast, unsuited, unsuited_mask, whole_plan

DOOR = "transformers"
# Keywords that do not change what attention computes here: positions and caches are in q, k, v and the mask already.
# Any other keyword with a value may: then the model's own eager function computes, which knows it.
HARMLESS = {"position_ids", "position_embeddings", "cache_position", "past_key_value", "past_key_values", "use_cache",
            "output_hidden_states", "return_dict", "deterministic", "target_dtype", "num_items_in_batch", "logits_to_keep",
            "labels", "inputs_embeds", "input_ids", "implementation", "use_top_left_mask", "token_type_ids"}
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _unknown(options):
    """Names of keywords that were given and that nobody here knows."""
    return sorted(name for name, value in options.items() if value is not None and value is not False
                  and name not in HARMLESS)


def _eager(module, query, key, value, mask, causal, scaling, dropout, why, options, strict):
    """The model's own eager function, with the mask of numbers that it adds to the scores."""
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    if eager is None:
        kind, words = why
        raise kind(f"evenkeel.hf: {words}; {type(module).__module__} has no eager_attention_forward to fall back to")
    _coverage.not_taken(DOOR, why, strict, query, "the model's eager attention")
    T, N = query.shape[2], key.shape[2]
    if mask is None and causal:
        mask = torch.ones(T, N, dtype=torch.bool, device=query.device).tril().view(1, 1, T, N)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    if scaling is None:
        scaling = query.shape[3] ** -0.5
    return eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **options)


def same_sequence(starts_q, starts_k, T, N):
    """(1, 1, T, N) of bool: row and key belong to one sequence of a packed batch."""
    sequence = lambda starts, n: torch.searchsorted(starts[1:].contiguous(), torch.arange(n, device=starts.device), right=True)
    return (sequence(starts_q, T).view(T, 1) == sequence(starts_k, N).view(1, N)).view(1, 1, T, N)


def _packed(q, k, v, packing, causal, window, plan, stabiliser, scaling, softcap, layer, sinks):
    """A packed batch: one row of sequences behind one another."""
    rows = [t[0].transpose(0, 1) for t in (q, k, v)]
    starts_q, starts_k, longest_q, longest_k = packing
    o, _ = run_packed("evenkeel.hf", *rows, starts_q, starts_k, int(longest_q), int(longest_k), causal, plan, stabiliser,
                      scaling, softcap, window, None, layer, door=DOOR, sinks=sinks)
    return o.transpose(0, 1).unsqueeze(0)


def _forward(plan, stabiliser, strict):
    def evenkeel_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                           softcap=None, sliding_window=None, s_aux=None, **options):
        """query (B, H, T, D), key, value (B, G, N, D); returns (B, T, H, D), None."""
        packing = [options.pop(name, None) for name in PACKING]
        mask = attention_mask
        if mask is not None and mask.dim() == 4:
            mask = mask[:, :, :, : key.shape[2]]
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        T, N = query.shape[2], key.shape[2]
        if packing[0] is not None and (mask is not None or query.shape[0] != 1):
            same = same_sequence(packing[0], packing[1], T, N)
            if mask is None and is_causal:
                same = same & torch.ones(T, N, dtype=torch.bool, device=query.device).tril()
            mask, packing = same if mask is None else mask & same if mask.dtype == torch.bool else mask, [None] * 4
        # A row alone sees every key that is there; a mask says all that is to be said.
        causal = bool(is_causal) and (T > 1 or packing[0] is not None) and mask is None
        window = (int(sliding_window) - 1, -1) if sliding_window and mask is None and causal and N > sliding_window else (-1, -1)
        q, k, v = under_autocast(query, key, value)
        why = unsuited(q, k, v, plan, stabiliser)
        if why is None and mask is not None:
            why = unsuited_mask(mask, (q.shape[0], q.shape[1], T, N), q.device)
        if why is None and dropout > 0:
            why = ValueError, f"expected a dropout of attention of 0 (attn_pdrop, attention_dropout), found {dropout}"
        if why is None and s_aux is not None and softcap and \
                not taken_by_a_kernel(q, v, whole_plan(q.dtype, plan, stabiliser), sinks=True):
            why = ValueError, "expected sinks (s_aux) or softcap with such tensors on a GPU, found both"
        unknown = _unknown(options)
        if why is None and unknown:
            why = TypeError, f"expected no keywords that change attention, found {', '.join(unknown)}"
        if why is not None:
            if packing[0] is not None:
                mask = same_sequence(packing[0], packing[1], T, N)
                mask = mask & torch.ones(T, N, dtype=torch.bool, device=query.device).tril() if causal else mask
            given = {name: value for name, value in (("softcap", softcap), ("sliding_window", sliding_window),
                                                     ("s_aux", s_aux)) if value is not None}
            return _eager(module, query, key, value, mask, causal, scaling, dropout, why, {**options, **given}, strict)
        layer = getattr(module, "layer_idx", None) or 0
        if s_aux is not None:
            s_aux = s_aux.to_local() if hasattr(s_aux, "to_local") else s_aux
        if packing[0] is not None:
            o = _packed(q, k, v, packing, causal, window, plan, stabiliser, scaling, softcap or 0.0, layer, s_aux)
        elif window != (-1, -1):
            o, _ = run("evenkeel.hf", q, k, v, True, None, plan, stabiliser, scaling, softcap, window, None, layer, DOOR,
                       sinks=s_aux)
        else:
            o = attention(q, k, v, causal, plan, stabiliser, mask, scaling, softcap or 0.0, layer=layer, door=DOOR, sinks=s_aux)
        return o.transpose(1, 2).contiguous(), None

    return evenkeel_attention


def register(name="evenkeel", plan=None, stabiliser=None, strict=False):
    """Makes `name` an attention implementation of transformers: attention and mask. Layers of plans are the model's. What our
    kernels do not take is computed by the model's own eager attention, with one warning; strict: evenkeel.NotCovered."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(f"evenkeel.hf.register: expected transformers 4.53 or newer, found: {error}") from None
    AttentionInterface.register(name, _forward(plan, stabiliser, strict))
    AttentionMaskInterface.register(name, sdpa_mask)
