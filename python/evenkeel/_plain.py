"""Attention in ordinary PyTorch operations: what the library's kernels do not take (dropout, biases, slopes that differ by sequence, ...) is
computed here where PyTorch has no function for it. FP32 inside (FP64 for FP64); it keeps the (T, N) scores in memory."""
import torch
import torch.nn.functional as F


def band(T, N, causal=False, window=(-1, -1), device=None):
    """(T, N) of bool, True where a row sees a key; None where all are seen. The last row is at the last key, as in
    FlashAttention; window: keys to the left and to the right of it, below 0: all."""
    left, right = window
    right = 0 if causal and (right < 0 or right > 0) else right
    if left < 0 and right < 0:
        return None
    distance = torch.arange(N, device=device).view(1, N) - torch.arange(N - T, N, device=device).view(T, 1)
    visible = torch.ones(T, N, dtype=torch.bool, device=device)
    if right >= 0:
        visible &= distance <= right
    if left >= 0:
        visible &= distance >= -left
    return visible


def alibi_bias(slopes, T, N):
    """(B or 1, H, T, N): minus the slope times the distance from row to key; slopes (H) or (B, H)."""
    slopes = slopes if slopes.dim() == 2 else slopes.unsqueeze(0)
    rows = torch.arange(N - T, N, device=slopes.device).view(T, 1)
    distance = (torch.arange(N, device=slopes.device).view(1, N) - rows).abs()
    return -slopes.float().view(*slopes.shape, 1, 1) * distance


def and_masks(first, second):
    """Masks of bool, either of which may be None: all visible."""
    return second if first is None else first if second is None else first & second


def plain_attention(q, k, v, visible=None, bias=None, scale=None, softcap=0.0, sinks=None, dropout_p=0.0):
    """o (B, H, T, D of v) and the log-sum-exp (B, H, T), of q (B, H, T, D), k, v (B, G, N, D). Visible: bool. Bias: numbers
    added to the scores. Sinks (H): a score of each head that takes probability and gives no value. A row that sees no key
    is 0. With gradients of both results."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = q.shape[1] // k.shape[1]
    spread = lambda t: t.to(wide) if groups == 1 else t.to(wide).repeat_interleave(groups, dim=1)
    scores = q.to(wide) @ spread(k).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(wide)
    blind = None
    if visible is not None:
        visible = visible.to(torch.bool).expand(scores.shape)
        blind = ~visible.any(-1, keepdim=True)
        # A row without keys has 0 for all of its scores until its results are set: -inf would make gradients NaN.
        scores = scores.masked_fill(~visible & ~blind, float("-inf")).masked_fill(blind, 0.0)
    lse = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide).view(1, -1, 1, 1).expand_as(lse))
    probs = (scores - lse).exp()
    if dropout_p > 0:
        probs = F.dropout(probs, dropout_p)
    o = probs @ spread(v)
    if blind is not None:
        o, lse = o.masked_fill(blind, 0.0), lse.masked_fill(blind, float("-inf"))
    return o.to(q.dtype), lse.squeeze(-1)
