"""Hugging Face transformers: evenkeel.hf.register(), then attn_implementation="evenkeel"."""
import torch

from . import _patch
from ._attention import attention, under_autocast, unsuited, unsuited_mask


def _forward(plan, stabiliser):
    def evenkeel_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                           softcap=None, **options):
        """query (B, H, T, D), key, value (B, G, N, D); returns (B, T, H, D), None."""
        mask = attention_mask
        if mask is not None and mask.dim() == 4:
            mask = mask[:, :, :, : key.shape[2]]
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        # A row alone sees every key that is there; a mask says all that is to be said.
        causal = bool(is_causal) and query.shape[2] > 1 and mask is None
        q, k, v = under_autocast(query, key, value)
        why = unsuited(q, k, v)
        if why is None and mask is not None:
            why = unsuited_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), q.device)
        if why is None and dropout > 0:
            why = ValueError, f"expected a dropout of attention of 0 (attn_pdrop, attention_dropout), found {dropout}"
        if why is None and options.get("s_aux") is not None:
            why = ValueError, "expected attention without sinks of its own, found s_aux"
        if why is not None:
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            return _patch.fall_back(why, sdpa_attention_forward, module, query, key, value, attention_mask,
                                    dropout=dropout, scaling=scaling, is_causal=is_causal, **options)
        layer = getattr(module, "layer_idx", None) or 0
        o = attention(q, k, v, causal, plan, stabiliser, mask, scaling, softcap or 0.0, layer=layer)
        return o.transpose(1, 2).contiguous(), None

    return evenkeel_attention


def register(name="evenkeel", plan=None, stabiliser=None):
    """Makes `name` an attention implementation of transformers: attention and mask. Layers of plans are the model's."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(f"evenkeel.hf.register: expected transformers 4.53 or newer, found: {error}") from None
    AttentionInterface.register(name, _forward(plan, stabiliser))
    AttentionMaskInterface.register(name, sdpa_mask)
