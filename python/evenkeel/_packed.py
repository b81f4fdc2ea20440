"""Packed sequences (cu_seqlens): rows of all sequences behind one another, q (R, H, D), k (S, G, D), v (S, G, D_v). A GPU computes all
sequences in one call; the CPU's kernels know no packing, so there each sequence is a call.

Both passes are one operation for PyTorch, as in _ops.py. `saved` is flat: what the kernels leave to the backward pass.
"""
import ctypes
from typing import Optional, Tuple

import torch

from . import _library, _ops
from ._library import check, library

Tensor = torch.Tensor
NAME = "evenkeel.attention_packed"


def _row_bytes(q, k, v, forms, options):
    """Of `saved`, for one row of one head."""
    return _ops._sizes(q, _ops.row_shape(q, k, v), forms, options)[0] // int(q.shape[1])


def _new_output(q, v):
    return q.new_empty((*q.shape[:2], v.shape[2]))


def _new_saved(q, k, v, starts_q, longest_q, forms, options):
    rows = q.shape[0] if q.device.type == "cpu" else (starts_q.shape[0] - 1) * longest_q
    return q.new_empty(rows * q.shape[1] * _row_bytes(q, k, v, forms, options), dtype=torch.uint8)


def _heads_first(t):
    """(rows, heads, D) as (1, heads, rows, D)."""
    return t.transpose(0, 1).unsqueeze(0)


def _sequences(starts_q, starts_k):
    q, k = starts_q.tolist(), starts_k.tolist()
    return [(slice(*rows), slice(*keys)) for rows, keys in zip(zip(q, q[1:]), zip(k, k[1:])) if rows[1] > rows[0]]


def _cpu_forward(q, k, v, starts_q, starts_k, device_step, slopes, sinks, longest_q, options):
    o, lse = torch.zeros_like(_new_output(q, v)), q.new_full(q.shape[1::-1], -torch.inf, dtype=torch.float32)
    forms = _ops._forms(None, slopes, sinks)
    saved = _new_saved(q, k, v, starts_q, longest_q, forms, options)
    row = q.shape[1] * _row_bytes(q, k, v, forms, options)
    for rows, keys in _sequences(starts_q, starts_k):
        if keys.stop == keys.start:  # no key: the output is 0
            continue
        found = _ops._forward(*(_heads_first(t[at]) for t, at in ((q, rows), (k, keys), (v, keys))), None, device_step, slopes,
                              sinks, options)
        o[rows], lse[:, rows] = found[0][0].transpose(0, 1), found[1][0]
        saved[rows.start * row : rows.start * row + found[2].numel()] = found[2].flatten()
    return o, lse, saved


def _cpu_backward(grad_output, q, k, v, o, lse, saved, grad_lse, starts_q, starts_k, device_step, slopes, sinks, options):
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    dsinks = _ops._like_sinks(q, sinks)
    row = q.shape[1] * _row_bytes(q, k, v, _ops._forms(None, slopes, sinks), options)
    for rows, keys in _sequences(starts_q, starts_k):
        if keys.stop == keys.start:
            continue
        x = [_heads_first(t[at]) for t, at in ((grad_output, rows), (q, rows), (k, keys), (v, keys), (o, rows))]
        kept = saved[rows.start * row : rows.stop * row].clone()
        of_rows = [None if t is None else t[:, rows].contiguous().unsqueeze(0) for t in (lse, grad_lse)]
        found = _ops._backward(*x, of_rows[0], kept, of_rows[1], None, device_step, slopes, sinks, options)
        for to, at, gradient in ((dq, rows, found[0]), (dk, keys, found[1]), (dv, keys, found[2])):
            to[at] += gradient[0].transpose(0, 1)
        dsinks += found[3]
    return dq, dk, dv, dsinks


def _packed_problem(q, k, v, starts_q, starts_k, device_step, slopes, sinks, longest_q, longest_k, options, with_grad_lse=False):
    """The problem of the C interface, and what must live as long as the call."""
    B = starts_q.shape[0] - 1
    shape = (B, q.shape[1], k.shape[1], longest_q, longest_k, q.shape[2], v.shape[2])
    a = _ops._problem(q.device, q.dtype, shape, _ops.Forms(grad_lse=with_grad_lse), *options)
    kept = [starts_q[:-1].contiguous(), starts_k[:-1].contiguous(), (starts_q[1:] - starts_q[:-1]).contiguous(),
            (starts_k[1:] - starts_k[:-1]).contiguous()]
    a.query_offsets, a.key_offsets, a.query_lengths, a.key_lengths = (t.data_ptr() for t in kept)
    a.query_rows, a.key_rows = q.shape[0], k.shape[0]
    _ops._set_extras(a, None, device_step, slopes, sinks)
    sizes = _library.Sizes()
    check(library().evenkeel_attention_sizes(ctypes.byref(a), ctypes.byref(sizes)), NAME)
    return a, kept, sizes


def _packed_view(t):
    """(1, heads, rows, D) with a batch stride of 0."""
    view = _ops._view(t)
    view.stride[0] = 0
    return view


def _like(t):
    return _heads_first(torch.empty_like(t, memory_format=torch.contiguous_format))


def _places(starts, rows):
    """Of each row: its sequence, and its place in it."""
    place = torch.arange(rows, device=starts.device, dtype=starts.dtype)
    sequence = torch.searchsorted(starts[1:].contiguous(), place, right=True)
    return sequence.long(), (place - starts[sequence]).long()


def _by_sequence(of_rows, starts, longest, beyond):
    """(H, rows) as the kernels have it, (sequences, H, longest)."""
    sequence, place = _places(starts, of_rows.shape[1])
    found = of_rows.new_full((starts.shape[0] - 1, of_rows.shape[0], longest), beyond)
    found[sequence, :, place] = of_rows.t()
    return found


def _gpu_forward(q, k, v, starts_q, starts_k, device_step, slopes, sinks, longest_q, longest_k, options):
    with _ops._on(q.device):
        a, kept, sizes = _packed_problem(q, k, v, starts_q, starts_k, device_step, slopes, sinks, longest_q, longest_k, options)
        saved = _new_saved(q, k, v, starts_q, longest_q, _ops._forms(None, slopes, sinks), options)
        if saved.numel() < sizes.saved:
            raise _library.EvenkeelError(f"{NAME}: expected a library that saves {saved.numel()} bytes, found {sizes.saved}")
        workspace = q.new_empty(sizes.workspace, dtype=torch.uint8)
        o, x = _heads_first(_new_output(q, v)), [_ops._readable(_heads_first(t)) for t in (q, k, v)]
        lse = q.new_empty((starts_q.shape[0] - 1, q.shape[1], longest_q), dtype=torch.float32)
        p = _library.Forward(struct_size=ctypes.sizeof(_library.Forward), o=_packed_view(o), lse=lse.data_ptr(),
                             saved=saved.data_ptr(), workspace=workspace.data_ptr(),
                             **{name: _packed_view(t) for name, t in zip("qkv", x)})
        check(library().evenkeel_attention_forward(ctypes.byref(a), ctypes.byref(p), _ops._stream(q.device)), NAME)
    sequence, place = _places(starts_q, q.shape[0])
    return o[0].transpose(0, 1), lse[sequence, :, place].t().contiguous(), saved


def _gpu_backward(grad_output, q, k, v, o, lse, saved, grad_lse, starts_q, starts_k, device_step, slopes, sinks, longest_q,
                  longest_k, options):
    with _ops._on(q.device):
        a, kept, sizes = _packed_problem(q, k, v, starts_q, starts_k, device_step, slopes, sinks, longest_q, longest_k, options,
                                         grad_lse is not None)
        workspace = q.new_empty(sizes.workspace, dtype=torch.uint8)
        by_sequence = _by_sequence(lse, starts_q, longest_q, -torch.inf)
        dq, dk, dv, dsinks = _like(q), _like(k), _like(v), _ops._like_sinks(q, sinks)
        x = [_ops._readable(_heads_first(t)) for t in (q, k, v, grad_output, o)]
        p = _library.Backward(struct_size=ctypes.sizeof(_library.Backward), lse=by_sequence.data_ptr(),
                              saved=saved.data_ptr(), workspace=workspace.data_ptr(), dq=_packed_view(dq),
                              dk=_packed_view(dk), dv=_packed_view(dv),
                              **{name: _packed_view(t) for name, t in zip(("q", "k", "v", "grad_output", "o"), x)})
        if sinks is not None:
            p.dsinks = dsinks.data_ptr()
        if grad_lse is not None:
            grad_lse = _by_sequence(grad_lse, starts_q, longest_q, 0.0)
            p.grad_lse = grad_lse.data_ptr()
        check(library().evenkeel_attention_backward(ctypes.byref(a), ctypes.byref(p), _ops._stream(q.device)), NAME)
    return (*(t[0].transpose(0, 1) for t in (dq, dk, dv)), dsinks)


def _forward(q, k, v, starts_q, starts_k, device_step, slopes, sinks, longest_q, longest_k, *options):
    options, extras = (*options, 0), (starts_q, starts_k, device_step, slopes, sinks)
    if q.device.type == "cpu":
        return _cpu_forward(q, k, v, *extras, longest_q, options)
    return _gpu_forward(q, k, v, *extras, longest_q, longest_k, options)


def _backward(grad_output, q, k, v, o, lse, saved, grad_lse, starts_q, starts_k, device_step, slopes, sinks, longest_q, longest_k,
              *options):
    options, extras = (*options, 0), (starts_q, starts_k, device_step, slopes, sinks)
    if q.device.type == "cpu":
        return _cpu_backward(grad_output, q, k, v, o, lse, saved, grad_lse, *extras, options)
    return _gpu_backward(grad_output, q, k, v, o, lse, saved, grad_lse, *extras, longest_q, longest_k, options)


def _all_gradients(forward, backward, saved_tensors, grad_output, grad_lse, options):
    """Of the inputs of packed_op; options: from longest_q on. lse is (H, rows), q (rows, H, D)."""
    tensors, extras = saved_tensors[:6], saved_tensors[6:]
    run = lambda *t: forward(*t, *extras, *options), lambda *t: backward(*t, *extras, *options)
    *_, slopes, sinks = extras
    *of_tensors, dsinks = _ops.all_gradients(run, tensors, grad_output, grad_lse, options[2:], _ops._forms(None, slopes, sinks),
                                             name=NAME, by_row=lambda weight: weight.t())
    return (*of_tensors, None, None, None, None, dsinks if sinks is not None else None, *[None] * 10)


class _Function(torch.autograd.Function):
    """Before torch 2.4."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.options = inputs[8:]
        o, lse, saved = _forward(*inputs)
        ctx.save_for_backward(*inputs[:3], o, lse, saved, *inputs[3:8])
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        return o, lse, saved

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output, grad_lse, _saved):
        return _all_gradients(_forward, _backward, ctx.saved_tensors, grad_output, grad_lse, ctx.options)


if _ops.HAS_CUSTOM_OPS:

    @torch.library.custom_op(f"{_ops.NAMESPACE}::attention_packed", mutates_args=(), device_types=("cpu", "cuda"))
    def packed_op(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, device_step: Optional[Tensor],
                  slopes: Optional[Tensor], sinks: Optional[Tensor], longest_q: int, longest_k: int, plan: str, causal: bool,
                  scale: float, softcap: float, window_left: int, window_right: int, step: int,
                  layer: int) -> Tuple[Tensor, Tensor, Tensor]:
        return _forward(q, k, v, starts_q, starts_k, device_step, slopes, sinks, longest_q, longest_k, plan, causal, scale,
                        softcap, window_left, window_right, step, layer)

    @packed_op.register_fake
    def _(q, k, v, starts_q, starts_k, device_step, slopes, sinks, longest_q, longest_k, *options):
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        return _new_output(q, v), lse, _new_saved(q, k, v, starts_q, longest_q, _ops._forms(None, slopes, sinks), (*options, 0))

    @torch.library.custom_op(f"{_ops.NAMESPACE}::attention_packed_backward", mutates_args=(), device_types=("cpu", "cuda"))
    def packed_backward_op(grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: Tensor,
                           grad_lse: Optional[Tensor], starts_q: Tensor, starts_k: Tensor, device_step: Optional[Tensor],
                           slopes: Optional[Tensor], sinks: Optional[Tensor], longest_q: int, longest_k: int, plan: str,
                           causal: bool, scale: float, softcap: float, window_left: int, window_right: int, step: int,
                           layer: int) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        return _backward(grad_output, q, k, v, o, lse, saved, grad_lse, starts_q, starts_k, device_step, slopes, sinks,
                         longest_q, longest_k, plan, causal, scale, softcap, window_left, window_right, step, layer)

    @packed_backward_op.register_fake
    def _(grad_output, q, k, v, o, lse, saved, grad_lse, starts_q, starts_k, device_step, slopes, sinks, *_rest):
        gradients = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        return (*gradients, _ops._like_sinks(q, sinks))

    def _setup_context(ctx, inputs, output):
        ctx.options = inputs[8:]
        o, lse, saved = output
        ctx.save_for_backward(*inputs[:3], o, lse, saved, *inputs[3:8])
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)

    def _autograd(ctx, grad_output, grad_lse, _saved):
        return _all_gradients(packed_op, packed_backward_op, ctx.saved_tensors, grad_output, grad_lse, ctx.options)

    packed_op.register_autograd(_autograd, setup_context=_setup_context)
else:

    def packed_op(*arguments):
        return _Function.apply(*arguments)
