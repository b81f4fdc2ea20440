"""Attention's two passes as PyTorch operations: custom ops from torch 2.4 on, so that torch.compile and CUDA graphs take
them; an autograd.Function before. Tensors are (B, H, T, D) and (B, G, N, D) with any strides; memory comes from torch.

No check of its own: the library checks, and says what it expected and found.
"""
import ctypes
import functools
import re
from typing import Optional, Tuple

import torch

from . import _library
from ._library import check, library

Tensor = torch.Tensor
NAME = "evenkeel.attention"
NAMESPACE = re.sub(r"\W", "_", __package__)  # of the operations: a copy of the package under another name has its own
TYPES = {torch.bfloat16: _library.BF16, torch.float32: _library.FP32, torch.float64: _library.FP64}


# "@name" -> plans, of which the first holds now and every one may: a plan that may change while compiled code runs (the
# guard's). Compiled code keeps the name; the text is read at every call.
PLAN_TABLES = {}


def plans_of(plan):
    """Every text that may be in force under this name, the present one first."""
    return PLAN_TABLES[plan] if plan in PLAN_TABLES else (plan,)


def _problem(device, dtype, shape, masked, plan, causal, scale, softcap, window_left, window_right, step, layer, facts):
    """The options of a call; `shape` is (B, H, G, T, N, D)."""
    a = _library.Attention()
    library().evenkeel_attention_defaults(ctypes.byref(a), ctypes.sizeof(a))
    a.device = _library.CUDA if device.type == "cuda" else _library.CPU
    # The CPU has no BF16 tensors: they are widened, which is exact.
    a.type = _library.FP32 if device.type == "cpu" and dtype == torch.bfloat16 else TYPES[dtype]
    a.B, a.H, a.G, a.T, a.N, a.D = shape
    a.plan = plans_of(plan)[0].encode()
    a.scale, a.softcap, a.causal = scale, softcap, causal
    a.window_left, a.window_right = window_left, window_right
    a.step, a.layer = step % 2**32, layer
    a.with_facts = facts
    if masked:
        a.visible.data = 1  # for the sizes; a call sets the mask itself
    return a


def _shape(q, k):
    return tuple(int(n) for n in (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]))


@functools.lru_cache(maxsize=4096)
def _asked_sizes(device, dtype, shape, masked, *options):
    sizes = _library.Sizes()
    problem = _problem(device, dtype, shape, masked, *options)
    with _on(device):
        check(library().evenkeel_attention_sizes(ctypes.byref(problem), ctypes.byref(sizes)), NAME)
    return sizes.saved, sizes.workspace


def _sizes(q, shape, masked, options):
    """Bytes of `saved` and of the workspace: the most that any plan of the name needs. Neither depends on the step, which
    may be a symbol."""
    plan, *before, _, layer, facts = options
    asked = [_asked_sizes(q.device, q.dtype, shape, masked, text, *before, 0, layer, facts) for text in plans_of(plan)]
    return max(saved for saved, _ in asked), max(workspace for _, workspace in asked)


def _saved(q, k, masked, options):
    """Memory for what forward leaves to backward: bytes, (B, H, T, of a row). Those of a row depend on neither B, T nor N
    (evenkeel.h), which may be symbols here: code compiled for one length serves others."""
    H, G, D = int(q.shape[1]), int(k.shape[1]), int(q.shape[3])
    of_all_heads, _ = _sizes(q, (1, H, G, 1, 1, D), masked, options)
    return q.new_empty((*q.shape[:3], of_all_heads // H), dtype=torch.uint8)


class _Nowhere:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def _on(device):
    return torch.cuda.device(device) if device.type == "cuda" else _Nowhere()


def _stream(device):
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _like(x):
    """Memory for something of x's shape, rows outermost but for the batch: (B, T, H, D) seen as (B, H, T, D). What
    follows attention in a model wants it so."""
    B, H, T, D = x.shape
    return x.new_empty((B, T, H, D)).transpose(1, 2)


def _is_aligned(x):
    """As evenkeel.h's `aligned` promises."""
    if x.data_ptr() % 16 != 0 or (x.shape[3] > 1 and x.stride(3) != 1):
        return False
    return all(size == 1 or (stride % 8 == 0 and (stride > 0 or axis == 0))
               for axis, (size, stride) in enumerate(zip(x.shape[:3], x.stride()[:3])))


def _readable(x):
    """x as the library reads it. A copy where the fast kernels could not: it costs far less than the slow ones."""
    if x.device.type == "cpu":
        return x.float() if x.dtype == torch.bfloat16 else x
    if x.dtype == torch.bfloat16 and x.shape[3] % 8 == 0 and not _is_aligned(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x


def _view(x):
    return _library.Tensor(x.data_ptr(), (ctypes.c_int64 * 4)(*x.stride()))


def _with_step(device_step, options):
    """The CPU has no steps in device memory: it reads the number."""
    if device_step is None or device_step.is_cuda:
        return device_step, options
    *before, _, layer, facts = options
    return None, (*before, int(device_step) % 2**32, layer, facts)


def _forward(q, k, v, visible, device_step, options, ties=None):
    """o (B, H, T, D), lse (B, H, T), saved (as _saved has it)."""
    device_step, options = _with_step(device_step, options)
    shape, dtype, device = _shape(q, k), q.dtype, q.device
    masked = visible is not None
    saved_bytes, workspace_bytes = _sizes(q, shape, masked, options)
    saved, workspace = _saved(q, k, masked, options), q.new_empty(workspace_bytes, dtype=torch.uint8)
    if saved.numel() != saved_bytes:
        raise _library.EvenkeelError(f"{NAME}: expected a library that saves {saved.shape[3]} bytes of every row, found one "
                                     f"that saves {saved_bytes} bytes of {q.shape[:3].numel()} rows")
    q, k, v = _readable(q), _readable(k), _readable(v)
    o = _like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    a = _problem(device, dtype, shape, False, *options)
    if visible is not None:
        a.visible = _view(visible)
    if device_step is not None:
        a.device_step = device_step.data_ptr()
    p = _library.Forward(struct_size=ctypes.sizeof(_library.Forward), q=_view(q), k=_view(k), v=_view(v), o=_view(o),
                         lse=lse.data_ptr(), saved=saved.data_ptr(), workspace=workspace.data_ptr())
    if ties is not None:
        p.ties = ties.data_ptr()
    with _on(device):
        check(library().evenkeel_attention_forward(ctypes.byref(a), ctypes.byref(p), _stream(device)), NAME)
    return o.to(dtype), lse, saved


def _backward(grad_output, q, k, v, o, lse, saved, visible, device_step, options, facts=None):
    """dq (B, H, T, D), dk, dv (B, G, N, D). facts: tensors to be filled, by name."""
    device_step, options = _with_step(device_step, options)
    shape, dtype, device = _shape(q, k), q.dtype, q.device
    workspace = q.new_empty(_sizes(q, shape, visible is not None, options)[1], dtype=torch.uint8)
    grad_output, q, k, v, o = (_readable(x) for x in (grad_output, q, k, v, o))
    dq, dk, dv = _like(q), _like(k), _like(v)
    a = _problem(device, dtype, shape, False, *options)
    if visible is not None:
        a.visible = _view(visible)
    if device_step is not None:
        a.device_step = device_step.data_ptr()
    p = _library.Backward(struct_size=ctypes.sizeof(_library.Backward), q=_view(q), k=_view(k), v=_view(v),
                          grad_output=_view(grad_output), o=_view(o), lse=lse.data_ptr(), saved=saved.data_ptr(),
                          workspace=workspace.data_ptr(), dq=_view(dq), dk=_view(dk), dv=_view(dv))
    for name, tensor in (facts or {}).items():
        setattr(p, name, tensor.data_ptr())
    with _on(device):
        check(library().evenkeel_attention_backward(ctypes.byref(a), ctypes.byref(p), _stream(device)), NAME)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def all_gradients(run, tensors, grad_output, grad_lse, scale, softcap, name=NAME, by_row=lambda weight: weight):
    """dq, dk, dv of both outputs; either gradient may be None. run: both passes (forward of q, k, v; backward of grad_output and
    `tensors`, which are q, k, v, o, lse, saved) with the problem's options. by_row: from the axes of lse to those of q, without
    the last one.

    The gradient of the log-sum-exp adds to dq and dk: sum_j P_ij k_j is attention's output with k in the place of v, and
    sum_i P_ij (dL_i q_i) is dv for an output gradient of dL_i q_i. So no kernel needs to know dL."""
    forward, backward = run
    q, k, v, _, lse, _ = tensors
    if grad_output is None:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    else:
        dq, dk, dv = backward(grad_output, *tensors)
    if grad_lse is None:
        return dq, dk, dv
    if softcap != 0:
        raise NotImplementedError(f"{name}: expected no gradient of the log-sum-exp with softcap, found one")
    # A row without keys has no gradient.
    weight = by_row(torch.where(torch.isfinite(lse), grad_lse, torch.zeros_like(grad_lse))).unsqueeze(-1)
    weight = weight * (scale or q.shape[-1] ** -0.5)
    dq = dq + (weight * forward(q, k, k)[0]).to(q.dtype)
    dk = dk + backward((weight * q).to(q.dtype), *tensors)[2]
    return dq, dk, dv


def _all_gradients(forward, backward, saved_tensors, grad_output, grad_lse, options):
    *tensors, visible, device_step = saved_tensors
    run = (lambda *t: forward(*t, visible, device_step, *options), lambda *t: backward(*t, visible, device_step, *options))
    return all_gradients(run, tensors, grad_output, grad_lse, scale=options[2], softcap=options[3])


class _Function(torch.autograd.Function):
    """Before torch 2.4."""

    @staticmethod
    def forward(ctx, q, k, v, visible, device_step, *options):
        ctx.options = options
        o, lse, saved = _forward(q, k, v, visible, device_step, (*options, 0))
        ctx.save_for_backward(q, k, v, o, lse, saved, visible, device_step)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        return o, lse, saved

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output, grad_lse, _saved):
        forward = lambda *a: _forward(*a[:5], (*a[5:], 0))
        backward = lambda *a: _backward(*a[:9], (*a[9:], 0))
        gradients = _all_gradients(forward, backward, ctx.saved_tensors, grad_output, grad_lse, ctx.options)
        return (*gradients, *[None] * 10)


HAS_CUSTOM_OPS = hasattr(torch.library, "custom_op") and hasattr(torch.library, "register_autograd")

if HAS_CUSTOM_OPS:

    @torch.library.custom_op(f"{NAMESPACE}::attention", mutates_args=(), device_types=("cpu", "cuda"))
    def forward_op(q: Tensor, k: Tensor, v: Tensor, visible: Optional[Tensor], device_step: Optional[Tensor], plan: str,
                   causal: bool, scale: float, softcap: float, window_left: int, window_right: int, step: int,
                   layer: int) -> Tuple[Tensor, Tensor, Tensor]:
        options = (plan, causal, scale, softcap, window_left, window_right, step, layer, 0)
        return _forward(q, k, v, visible, device_step, options)

    @forward_op.register_fake
    def _(q, k, v, visible, device_step, plan, causal, scale, softcap, window_left, window_right, step, layer):
        options = (plan, causal, scale, softcap, window_left, window_right, step, layer, 0)
        return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32), _saved(q, k, visible is not None, options)

    @torch.library.custom_op(f"{NAMESPACE}::attention_backward", mutates_args=(), device_types=("cpu", "cuda"))
    def backward_op(grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: Tensor,
                    visible: Optional[Tensor], device_step: Optional[Tensor], plan: str, causal: bool, scale: float,
                    softcap: float, window_left: int, window_right: int, step: int,
                    layer: int) -> Tuple[Tensor, Tensor, Tensor]:
        options = (plan, causal, scale, softcap, window_left, window_right, step, layer, 0)
        return _backward(grad_output, q, k, v, o, lse, saved, visible, device_step, options)

    @backward_op.register_fake
    def _(grad_output, q, k, v, o, lse, saved, visible, device_step, plan, causal, scale, softcap, window_left,
          window_right, step, layer):
        return _like(q), _like(k), _like(v)

    def _setup_context(ctx, inputs, output):
        q, k, v, visible, device_step, *ctx.options = inputs
        o, lse, saved = output
        ctx.save_for_backward(q, k, v, o, lse, saved, visible, device_step)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)

    def _autograd(ctx, grad_output, grad_lse, _saved):
        gradients = _all_gradients(forward_op, backward_op, ctx.saved_tensors, grad_output, grad_lse, ctx.options)
        return (*gradients, *[None] * 10)

    forward_op.register_autograd(_autograd, setup_context=_setup_context)
else:

    def forward_op(*arguments):
        return _Function.apply(*arguments)


def facts(q, k, v, grad_output, visible, *options):
    """Both passes with every fact of every row; no autograd. options: as forward_op's from `plan` on."""
    options = (*options, 1)
    rows = lambda dtype: q.new_zeros(q.shape[:3], dtype=dtype)
    told = {"ties": rows(torch.int32)}
    o, lse, saved = _forward(q, k, v, visible, None, options, told["ties"])
    of_rows = {name: rows(torch.float32) for name in ("delta", "residual", "residual_floor")}
    dq, dk, dv = _backward(grad_output, q, k, v, o, lse, saved, visible, None, options, of_rows)
    return {"o": o, "lse": lse, **told, "dq": dq, "dk": dk, "dv": dv, **of_rows}


def kernel(q, k, visible, *options):
    return chosen_kernel(q.device, q.dtype, _shape(q, k), visible is not None, *options)


def chosen_kernel(device, dtype, shape, masked, *options):
    """Which family of kernels, and why; shape is (B, H, G, T, N, D)."""
    problem = _problem(device, dtype, shape, masked, *options, 0)
    name, why = ctypes.c_char_p(), ctypes.c_char_p()
    with _on(device):
        check(library().evenkeel_attention_kernel(ctypes.byref(problem), ctypes.byref(name), ctypes.byref(why)), NAME)
    return name.value.decode(), why.value.decode()
