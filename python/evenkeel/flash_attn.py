"""The flash_attn package's interface over evenkeel.attention; importable in its place:

    from evenkeel.flash_attn import flash_attn_func        # or import evenkeel.flash_attn as flash_attn
    evenkeel.flash_attn.install()                          # then `import flash_attn` finds this module, everywhere

Layouts, defaults and results are flash_attn's (2.8): q (B, T, H, D), k, v (B, N, G, D); with causal the last row sees the last
key. Always deterministic. What our kernels do not take (dropout, slopes that differ by sequence, head sizes beyond theirs) is computed by
evenkeel._plain in FP32, with one warning; evenkeel.coverage() lists each call. Where flash_attn would return the
probabilities (return_attn_probs), the third result is None. configure() chooses the plan for all of these functions.
"""
import sys
import types

import torch

from . import _coverage, _layers
from ._attention import run, run_packed, taken_by_a_kernel, under_autocast, unsuited, whole_plan
from ._plain import alibi_bias, and_masks, band, plain_attention

__version__ = "2.8.3"  # of the interface: libraries ask for it
_settings = {"plan": None, "stabiliser": None, "strict": False}


def configure(plan=None, stabiliser=None, strict=False):
    """The plan of these functions; strict: what our kernels do not take raises evenkeel.NotCovered. For clauses for layers,
    evenkeel.patch(model=model) comes first."""
    _layers.require(plan, "evenkeel.flash_attn.configure")
    _settings.update(plan=plan, stabiliser=stabiliser, strict=strict)


def _chosen(plan, stabiliser):
    return (_settings["plan"], _settings["stabiliser"]) if plan is None and stabiliser is None else (plan, stabiliser)


def _not_taken(q, k, v, dropout_p, alibi_slopes, scale, softcap, plan, stabiliser):
    """Why not by our kernels, of tensors (B, H, T, D); None: by ours."""
    if dropout_p:
        return ValueError, f"expected dropout_p of 0, found {dropout_p}"
    if scale == 0:
        return ValueError, "expected a scale other than 0, found 0"
    why = unsuited(q, k, v, plan, stabiliser)
    if why is not None or alibi_slopes is None:
        return why
    if alibi_slopes.dim() != 1 or softcap:
        return ValueError, "expected alibi_slopes of one number a head and no softcap, found others"
    if not taken_by_a_kernel(q, v, whole_plan(q.dtype, plan, stabiliser), slopes=True):
        return ValueError, "expected no alibi_slopes with such tensors or such a plan on a GPU, found some"
    return None


def _check_tensors(door, axes, *tensors):
    for name, t in zip("qkv", tensors):
        if not isinstance(t, torch.Tensor) or t.dim() != axes:
            found = tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
            raise ValueError(f"evenkeel.{door}: expected {name} with {axes} axes, found {found}")
    q, k, v = tensors
    if q.shape[-2] % k.shape[-2] != 0 or k.shape[-1] != q.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"evenkeel.{door}: expected k and v beside q {tuple(q.shape)}, found {tuple(k.shape)} and "
                         f"{tuple(v.shape)}")


def _window(causal, window_size):
    """As the library takes it: causal is a flag, not a right side of 0."""
    left, right = (-1 if n is None else int(n) for n in window_size)
    return bool(causal) or right == 0, (left, -1 if causal or right == 0 else right)


def _batched(door, q, k, v, dropout_p, scale, causal, window_size, softcap, alibi_slopes, plan, stabiliser, layer,
             visible=None):
    """o and lse of tensors (B, T, H, D), by our kernels or else in PyTorch's operations."""
    _check_tensors(door, 4, q, k, v)
    q, k, v = (t.transpose(1, 2) for t in under_autocast(q, k, v))
    causal, window = _window(causal, window_size)
    plan, stabiliser = _chosen(plan, stabiliser)
    layer = _layers.current.layer if layer is None else layer
    why = _not_taken(q, k, v, dropout_p, alibi_slopes, scale, softcap, plan, stabiliser)
    if why is None:
        o, lse = run("evenkeel." + door, q, k, v, causal, visible, plan, stabiliser, scale, softcap, window, None, layer,
                     door=door, slopes=alibi_slopes)
        return o.transpose(1, 2), lse
    _coverage.not_taken(door, why, _settings["strict"], q, "PyTorch's operations in FP32")
    T, N = q.shape[2], k.shape[2]
    bias = None if alibi_slopes is None else alibi_bias(alibi_slopes, T, N)
    o, lse = plain_attention(q, k, v, and_masks(band(T, N, causal, window, q.device), visible), bias, scale, softcap,
                             dropout_p=dropout_p)
    return o.transpose(1, 2), lse


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False, *, plan=None, stabiliser=None,
                    layer=None):
    """q (B, T, H, D), k, v (B, N, G, D); returns o (B, T, H, D), with return_attn_probs (o, lse (B, H, T), None)."""
    o, lse = _batched("flash_attn_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, plan,
                      stabiliser, layer)
    return (o, lse, None) if return_attn_probs else o


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """qkv (B, T, 3, H, D)."""
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """q (B, T, H, D), kv (B, N, 2, G, D)."""
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None, *, plan=None, stabiliser=None,
                           layer=None):
    """Packed sequences: q (rows, H, D), k, v (keys, G, D), or pages of keys (pages, page, G, D) with block_table
    (sequences, pages of each). Returns o (rows, H, D), with return_attn_probs (o, lse (H, rows), None)."""
    door = "flash_attn_varlen_func"
    if block_table is not None:
        k, v = (_unpaged(t, cu_seqlens_k, block_table) for t in (k, v))
    _check_tensors(door, 3, q, k, v)
    q, k, v = under_autocast(q, k, v)
    causal_flag, window = _window(causal, window_size)
    rows_first = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
    chosen, layer = _chosen(plan, stabiliser), _layers.current.layer if layer is None else layer
    why = _not_taken(*rows_first, dropout_p, alibi_slopes, softmax_scale, softcap, *chosen)
    if why is None:
        o, lse = run_packed("evenkeel." + door, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal_flag,
                            *chosen, softmax_scale, softcap, window, None, layer, door=door, slopes=alibi_slopes)
    else:
        _coverage.not_taken(door, why, _settings["strict"], rows_first[0], "PyTorch's operations in FP32, by sequence")
        o, lse = _by_sequence(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), dropout_p, softmax_scale, causal_flag,
                              window, softcap, alibi_slopes)
    return (o, lse, None) if return_attn_probs else o


def _by_sequence(q, k, v, rows, keys, dropout_p, scale, causal, window, softcap, alibi_slopes):
    outputs, sums = [], []
    for n in range(len(rows) - 1):
        part = [t[a:b].transpose(0, 1).unsqueeze(0) for t, (a, b) in
                ((q, rows[n : n + 2]), (k, keys[n : n + 2]), (v, keys[n : n + 2]))]
        T, N = part[0].shape[2], part[1].shape[2]
        if N == 0:  # rows without keys
            outputs.append(q.new_zeros(T, q.shape[1], v.shape[2]))
            sums.append(q.new_full((q.shape[1], T), -torch.inf, dtype=torch.float32))
            continue
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[n]
        bias = None if slopes is None else alibi_bias(slopes, T, N)
        o, lse = plain_attention(*part, band(T, N, causal, window, q.device), bias, scale, softcap, dropout_p=dropout_p)
        outputs.append(o[0].transpose(0, 1))
        sums.append(lse[0].to(torch.float32))
    return torch.cat(outputs), torch.cat(sums, dim=1)


def _unpaged(pages, starts, block_table):
    """Keys of all sequences behind one another, out of pages (pages, page, G, D)."""
    size, lengths = pages.shape[1], (starts[1:] - starts[:-1]).tolist()
    return torch.cat([pages[block_table[n, : -(-length // size)].long()].flatten(0, 1)[:length]
                      for n, length in enumerate(lengths)])


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """qkv (rows, 3, H, D)."""
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                    deterministic=False, return_attn_probs=False):
    """q (rows, H, D), kv (keys, 2, G, D)."""
    return flash_attn_varlen_func(q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def _rotated(x, cos, sin, positions, interleaved):
    """x (B, T, H, D) turned by its positions (B, T); cos, sin (positions, half of the turned features)."""
    half = cos.shape[1]
    c, s = (t[positions].unsqueeze(2).to(torch.float32) for t in (cos, sin))
    turned, rest = x[..., : 2 * half].to(torch.float32), x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, dim=-1)
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _cached(cache, new, lengths, batch_index, block_table):
    """Writes `new` (B, T, G, D) behind the keys that the cache has (B), in place; returns each sequence's keys (B, N, G, D)."""
    B = lengths.shape[0]
    rows = batch_index.long() if batch_index is not None else torch.arange(B, device=cache.device)
    if new is not None:
        for n in range(B):
            for t in range(new.shape[1]):
                place = int(lengths[n]) + t
                if block_table is None:
                    cache[rows[n], place] = new[n, t]
                else:
                    cache[block_table[n, place // cache.shape[1]].long(), place % cache.shape[1]] = new[n, t]
    if block_table is None:
        return cache[rows]
    return torch.stack([cache[block_table[n].long()].flatten(0, 1) for n in range(B)])


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                            return_softmax_lse=False):
    """Decoding: q (B, T, H, D) over a cache (B or more, N, G, D), or pages (pages, page, G, D) with block_table. New k, v
    (B, new, G, D) are turned by rotary_cos and rotary_sin and written into the cache first, in place. Sequence by sequence,
    without gradients."""
    door = "flash_attn_with_kvcache"
    with torch.no_grad():
        B, T = q.shape[:2]
        longest = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
        if cache_seqlens is None:
            cache_seqlens = longest
        lengths = (torch.full((B,), cache_seqlens, dtype=torch.int32, device=q.device) if isinstance(cache_seqlens, int)
                   else cache_seqlens)
        new = 0 if k is None else k.shape[1]
        if int(lengths.max()) + new > longest:
            raise ValueError(f"evenkeel.{door}: expected room for {int(lengths.max()) + new} keys in the cache, found {longest}")
        if rotary_cos is not None:
            behind = lengths.long().view(B, 1)
            at = lambda count: behind + torch.arange(count, device=q.device)
            if k is not None:
                k = _rotated(k, rotary_cos, rotary_sin, at(new), rotary_interleaved)
            rows = at(T) if causal or tuple(window_size) != (-1, -1) else behind.expand(B, T)
            q = _rotated(q, rotary_cos, rotary_sin, rows, rotary_interleaved)
        keys = _cached(k_cache, k, lengths, cache_batch_idx, block_table)
        values = _cached(v_cache, v, lengths, cache_batch_idx, block_table)
        outputs, sums = [], []
        for n in range(B):
            first, last = (0 if cache_leftpad is None else int(cache_leftpad[n])), int(lengths[n]) + new
            slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[n]
            o, lse = _batched(door, q[n : n + 1], keys[n : n + 1, first:last], values[n : n + 1, first:last], 0.0,
                              softmax_scale, causal, window_size, softcap, slopes, None, None, 0)
            outputs.append(o)
            sums.append(lse)
    o, lse = torch.cat(outputs), torch.cat(sums)
    return (o, lse) if return_softmax_lse else o


# --- flash_attn.bert_padding: padded batches to packed sequences and back


def index_first_axis(x, indices):
    return x[indices]


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """hidden_states (B, T, ...), attention_mask (B, T) -> (rows, ...), their places, cu_seqlens, the longest, lengths."""
    both = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = both.sum(-1, dtype=torch.int32), attention_mask.sum(-1, dtype=torch.int32)
    indices = both.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, starts, int(lengths.max()), used


def pad_input(hidden_states, indices, batch, seqlen):
    """(rows, ...) -> (batch, seqlen, ...), zeros in between."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_put((indices,), hidden_states).view(batch, seqlen, *hidden_states.shape[1:])


def install():
    """From now on `import flash_attn` finds this module, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding`
    too. Call it before whatever imports flash_attn. Returns a function that undoes it."""
    here = sys.modules[__name__]
    package = types.ModuleType("flash_attn", __doc__)
    package.__path__ = []  # a package: it has submodules
    package.__version__ = __version__
    package.__spec__ = types.SimpleNamespace(name="flash_attn", submodule_search_locations=[], loader=None, origin=__file__,
                                             parent="flash_attn", has_location=False)
    for name in INTERFACE + PADDING:
        setattr(package, name, getattr(here, name))
    modules = {"flash_attn": package, "flash_attn.flash_attn_interface": here, "flash_attn.bert_padding": here}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    package.flash_attn_interface = package.bert_padding = here

    def undo():
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module

    return undo


INTERFACE = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func",
             "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache")
PADDING = ("index_first_axis", "pad_input", "unpad_input")
