"""Attention's two passes as PyTorch operations: custom ops from torch 2.4 on, so that torch.compile and CUDA graphs take
them; an autograd.Function before. Tensors are (B, H, T, D) and (B, G, N, D), with D_v for v and o, with any strides; memory
comes from torch.

No check of its own: the library checks, and says what it expected and found.
"""
import ctypes
import functools
import re
from typing import NamedTuple, Optional, Tuple

import torch

from . import _library
from ._library import check, library

Tensor = torch.Tensor
NAME = "evenkeel.attention"
NAMESPACE = re.sub(r"\W", "_", __package__)  # of the operations: a copy of the package under another name has its own
TYPES = {torch.bfloat16: _library.BF16, torch.float32: _library.FP32, torch.float64: _library.FP64,
         torch.float16: _library.FP16}
HALVES = (torch.bfloat16, torch.float16)


# "@name" -> plans, of which the first holds now and every one may: a plan that may change while compiled code runs (the
# guard's). Compiled code keeps the name; the text is read at every call.
PLAN_TABLES = {}


def plans_of(plan):
    """Every text that may be in force under this name, the present one first."""
    return PLAN_TABLES[plan] if plan in PLAN_TABLES else (plan,)


def in_format(plan, dtype):
    """flash2 stands for its roundings in the format of the tensors: of a plan that begins with it, the text for this dtype."""
    if dtype != torch.float16:
        return plan
    sites = "".join(f",{site}=fp16" for site in ("probs", "output", "probs_bwd", "dscores", "dq", "dk", "dv"))
    return re.sub(r"^\s*flash2\b", "flash2" + sites, plan)


class Forms(NamedTuple):
    """What a call comes with, besides numbers: kernels are chosen by it."""
    masked: bool = False
    slopes: bool = False
    sinks: bool = False
    grad_lse: bool = False


def _problem(device, dtype, shape, forms, plan, causal, scale, softcap, window_left, window_right, step, layer, facts):
    """The options of a call; `shape` is (B, H, G, T, N, D, D_v)."""
    a = _library.Attention()
    library().evenkeel_attention_defaults(ctypes.byref(a), ctypes.sizeof(a))
    a.device = _library.CUDA if device.type == "cuda" else _library.CPU
    # The CPU has no tensors of 16 bits: they are widened, which is exact.
    a.type = _library.FP32 if device.type == "cpu" and dtype in HALVES else TYPES[dtype]
    a.B, a.H, a.G, a.T, a.N, a.D, a.Dv = shape
    a.plan = in_format(plans_of(plan)[0], dtype).encode()
    a.scale, a.softcap, a.causal = scale, softcap, causal
    a.window_left, a.window_right = window_left, window_right
    a.step, a.layer = step % 2**32, layer
    a.with_facts, a.with_grad_lse = facts, forms.grad_lse
    # For the sizes; a call sets the addresses themselves.
    if forms.masked:
        a.visible.data = 1
    if forms.slopes:
        a.slopes = 1
    if forms.sinks:
        a.sinks = 1
    return a


def _shape(q, k, v):
    return tuple(int(n) for n in (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]))


def row_shape(q, k, v):
    """The shape of one row and one key of all heads; q, k, v with their heads on axis 1 and features on the last."""
    return 1, int(q.shape[1]), int(k.shape[1]), 1, 1, int(q.shape[-1]), int(v.shape[-1])


@functools.lru_cache(maxsize=4096)
def _asked_sizes(device, dtype, shape, forms, *options):
    sizes = _library.Sizes()
    problem = _problem(device, dtype, shape, forms, *options)
    with _on(device):
        check(library().evenkeel_attention_sizes(ctypes.byref(problem), ctypes.byref(sizes)), NAME)
    return sizes.saved, sizes.workspace


def _sizes(q, shape, forms, options):
    """Bytes of `saved` and of the workspace: the most that any plan of the name needs. Neither depends on the step, which
    may be a symbol."""
    plan, *before, _, layer, facts = options
    asked = [_asked_sizes(q.device, q.dtype, shape, forms, text, *before, 0, layer, facts) for text in plans_of(plan)]
    return max(saved for saved, _ in asked), max(workspace for _, workspace in asked)


def _saved(q, k, v, forms, options):
    """Memory for what forward leaves to backward: bytes, (B, H, T, of a row). Those of a row depend on neither B, T nor N
    (evenkeel.h), which may be symbols here: code compiled for one length serves others."""
    of_all_heads, _ = _sizes(q, row_shape(q, k, v), forms, options)
    return q.new_empty((*q.shape[:3], of_all_heads // int(q.shape[1])), dtype=torch.uint8)


class _Nowhere:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def _on(device):
    return torch.cuda.device(device) if device.type == "cuda" else _Nowhere()


def _stream(device):
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _like(x, of=None):
    """Memory for something of x's shape, with the features of `of`, rows outermost but for the batch: (B, T, H, D) seen as
    (B, H, T, D). What follows attention in a model wants it so."""
    B, H, T, _ = x.shape
    return x.new_empty((B, T, H, (x if of is None else of).shape[3])).transpose(1, 2)


def _is_aligned(x):
    """As evenkeel.h's `aligned` promises."""
    if x.data_ptr() % 16 != 0 or (x.shape[3] > 1 and x.stride(3) != 1):
        return False
    return all(size == 1 or (stride % 8 == 0 and (stride > 0 or axis == 0))
               for axis, (size, stride) in enumerate(zip(x.shape[:3], x.stride()[:3])))


def _readable(x):
    """x as the library reads it. A copy where the fast kernels could not: it costs far less than the slow ones."""
    if x.device.type == "cpu":
        return x.float() if x.dtype in HALVES else x
    if x.dtype in HALVES and x.shape[3] % 8 == 0 and not _is_aligned(x):
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


def _set_extras(a, visible, device_step, slopes, sinks):
    """The addresses of a call's own tensors."""
    if visible is not None:
        a.visible = _view(visible)
    for name, tensor in (("device_step", device_step), ("slopes", slopes), ("sinks", sinks)):
        if tensor is not None:
            setattr(a, name, tensor.data_ptr())


def _forms(visible, slopes, sinks, grad_lse=None):
    return Forms(visible is not None, slopes is not None, sinks is not None, grad_lse is not None)


def _forward(q, k, v, visible, device_step, slopes, sinks, options, ties=None):
    """o (B, H, T, D_v), lse (B, H, T), saved (as _saved has it). slopes, sinks: (H), FP32, or None."""
    device_step, options = _with_step(device_step, options)
    shape, dtype, device = _shape(q, k, v), q.dtype, q.device
    forms = _forms(visible, slopes, sinks)
    saved_bytes, workspace_bytes = _sizes(q, shape, forms, options)
    saved, workspace = _saved(q, k, v, forms, options), q.new_empty(workspace_bytes, dtype=torch.uint8)
    if saved.numel() != saved_bytes:
        raise _library.EvenkeelError(f"{NAME}: expected a library that saves {saved.shape[3]} bytes of every row, found one "
                                     f"that saves {saved_bytes} bytes of {q.shape[:3].numel()} rows")
    q, k, v = _readable(q), _readable(k), _readable(v)
    o = _like(q, v)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    a = _problem(device, dtype, shape, Forms(), *options)
    _set_extras(a, visible, device_step, slopes, sinks)
    p = _library.Forward(struct_size=ctypes.sizeof(_library.Forward), q=_view(q), k=_view(k), v=_view(v), o=_view(o),
                         lse=lse.data_ptr(), saved=saved.data_ptr(), workspace=workspace.data_ptr())
    if ties is not None:
        p.ties = ties.data_ptr()
    with _on(device):
        check(library().evenkeel_attention_forward(ctypes.byref(a), ctypes.byref(p), _stream(device)), NAME)
    return o.to(dtype), lse, saved


def _backward(grad_output, q, k, v, o, lse, saved, grad_lse, visible, device_step, slopes, sinks, options, facts=None):
    """dq, dk, dv of their tensors' shapes, dsinks (H; none without sinks: 0). facts: tensors to be filled, by name."""
    device_step, options = _with_step(device_step, options)
    shape, dtype, device = _shape(q, k, v), q.dtype, q.device
    forms = _forms(visible, slopes, sinks, grad_lse)
    workspace = q.new_empty(_sizes(q, shape, forms, options)[1], dtype=torch.uint8)
    grad_output, q, k, v, o = (_readable(x) for x in (grad_output, q, k, v, o))
    dq, dk, dv, dsinks = _like(q), _like(k), _like(v), _like_sinks(q, sinks)
    a = _problem(device, dtype, shape, Forms(grad_lse=forms.grad_lse), *options)
    _set_extras(a, visible, device_step, slopes, sinks)
    p = _library.Backward(struct_size=ctypes.sizeof(_library.Backward), q=_view(q), k=_view(k), v=_view(v),
                          grad_output=_view(grad_output), o=_view(o), lse=lse.data_ptr(), saved=saved.data_ptr(),
                          workspace=workspace.data_ptr(), dq=_view(dq), dk=_view(dk), dv=_view(dv))
    if sinks is not None:
        p.dsinks = dsinks.data_ptr()
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
        p.grad_lse = grad_lse.data_ptr()
    for name, tensor in (facts or {}).items():
        setattr(p, name, tensor.data_ptr())
    with _on(device):
        check(library().evenkeel_attention_backward(ctypes.byref(a), ctypes.byref(p), _stream(device)), NAME)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks


def _like_sinks(q, sinks):
    return q.new_zeros(0 if sinks is None else sinks.shape[0], dtype=torch.float32)


@functools.lru_cache(maxsize=4096)
def takes_grad_lse(device, dtype, shape, forms, *options):
    """Whether the kernels that these calls run in take a gradient of the log-sum-exp. shape: row_shape."""
    forward = chosen_kernel(device, dtype, shape, forms, *options)[0]
    try:
        return chosen_kernel(device, dtype, shape, forms._replace(grad_lse=True), *options)[0] == forward
    except ValueError:  # none of the device does
        return False


def all_gradients(run, tensors, grad_output, grad_lse, options, forms, name=NAME, by_row=lambda weight: weight):
    """dq, dk, dv, dsinks of both outputs; either gradient may be None. Function `run`: both passes (forward of q, k, v; backward of
    grad_output, `tensors`, which are q, k, v, o, lse, saved, and grad_lse) with the problem's options, which are from `plan` on.
    Function `by_row`: from the axes of lse to those of q, without the last one.

    Where the kernels do not take the gradient of the log-sum-exp, it is added to dq and dk here. With k in the place of v,
    sum_j P_ij k_j is attention's output. With an output gradient of dL_i q_i, sum_i P_ij (dL_i q_i) is dv. (Kernels that take
    values of another head size take this gradient, too.)"""
    forward, backward = run
    q, k, v, o, lse, _ = tensors
    plan, causal, scale, softcap, left, right, _, layer = options
    if grad_lse is not None:  # a row without keys has none
        grad_lse = torch.where(torch.isfinite(lse), grad_lse, torch.zeros_like(grad_lse))
        known = (plans_of(plan)[0], causal, scale, softcap, left, right, 0, layer)
        if takes_grad_lse(q.device, q.dtype, row_shape(q, k, v), forms, *known):
            return backward(torch.zeros_like(o) if grad_output is None else grad_output, *tensors, grad_lse)
    if grad_output is None:
        dq, dk, dv, dsinks = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None
    else:
        dq, dk, dv, dsinks = backward(grad_output, *tensors, None)
    if grad_lse is None:
        return dq, dk, dv, dsinks
    if softcap != 0 or forms.sinks:
        raise NotImplementedError(f"{name}: expected no gradient of the log-sum-exp with softcap or sinks, which these kernels "
                                  "do not take, found one")
    weight = by_row(grad_lse).unsqueeze(-1) * (scale or int(q.shape[-1]) ** -0.5)
    dq = dq + (weight * forward(q, k, k)[0]).to(q.dtype)
    dk = dk + backward((weight * q).to(q.dtype), *tensors, None)[2]
    return dq, dk, dv, dsinks


def _all_gradients(forward, backward, saved_tensors, grad_output, grad_lse, options):
    """Of the inputs of forward_op, as autograd wants them."""
    *tensors, visible, device_step, slopes, sinks = saved_tensors
    extras = (visible, device_step, slopes, sinks)
    run = lambda *t: forward(*t, *extras, *options), lambda *t: backward(*t, *extras, *options)
    *of_tensors, dsinks = all_gradients(run, tensors, grad_output, grad_lse, options, _forms(visible, slopes, sinks))
    return (*of_tensors, None, None, None, dsinks if sinks is not None else None, *[None] * 8)


class _Function(torch.autograd.Function):
    """Before torch 2.4."""

    @staticmethod
    def forward(ctx, q, k, v, visible, device_step, slopes, sinks, *options):
        ctx.options = options
        o, lse, saved = _forward(q, k, v, visible, device_step, slopes, sinks, (*options, 0))
        ctx.save_for_backward(q, k, v, o, lse, saved, visible, device_step, slopes, sinks)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        return o, lse, saved

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output, grad_lse, _saved):
        forward = lambda *a: _forward(*a[:7], (*a[7:], 0))
        backward = lambda *a: _backward(*a[:12], (*a[12:], 0))
        return _all_gradients(forward, backward, ctx.saved_tensors, grad_output, grad_lse, ctx.options)


HAS_CUSTOM_OPS = hasattr(torch.library, "custom_op") and hasattr(torch.library, "register_autograd")

if HAS_CUSTOM_OPS:

    @torch.library.custom_op(f"{NAMESPACE}::attention", mutates_args=(), device_types=("cpu", "cuda"))
    def forward_op(q: Tensor, k: Tensor, v: Tensor, visible: Optional[Tensor], device_step: Optional[Tensor],
                   slopes: Optional[Tensor], sinks: Optional[Tensor], plan: str, causal: bool, scale: float, softcap: float,
                   window_left: int, window_right: int, step: int, layer: int) -> Tuple[Tensor, Tensor, Tensor]:
        options = (plan, causal, scale, softcap, window_left, window_right, step, layer, 0)
        return _forward(q, k, v, visible, device_step, slopes, sinks, options)

    @forward_op.register_fake
    def _(q, k, v, visible, device_step, slopes, sinks, *options):
        saved = _saved(q, k, v, _forms(visible, slopes, sinks), (*options, 0))
        return _like(q, v), q.new_empty(q.shape[:3], dtype=torch.float32), saved

    @torch.library.custom_op(f"{NAMESPACE}::attention_backward", mutates_args=(), device_types=("cpu", "cuda"))
    def backward_op(grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: Tensor,
                    grad_lse: Optional[Tensor], visible: Optional[Tensor], device_step: Optional[Tensor],
                    slopes: Optional[Tensor], sinks: Optional[Tensor], plan: str, causal: bool, scale: float, softcap: float,
                    window_left: int, window_right: int, step: int, layer: int) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        options = (plan, causal, scale, softcap, window_left, window_right, step, layer, 0)
        return _backward(grad_output, q, k, v, o, lse, saved, grad_lse, visible, device_step, slopes, sinks, options)

    @backward_op.register_fake
    def _(grad_output, q, k, v, o, lse, saved, grad_lse, visible, device_step, slopes, sinks, *options):
        return _like(q), _like(k), _like(v), _like_sinks(q, sinks)

    def _setup_context(ctx, inputs, output):
        q, k, v, visible, device_step, slopes, sinks, *ctx.options = inputs
        o, lse, saved = output
        ctx.save_for_backward(q, k, v, o, lse, saved, visible, device_step, slopes, sinks)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)

    def _autograd(ctx, grad_output, grad_lse, _saved):
        return _all_gradients(forward_op, backward_op, ctx.saved_tensors, grad_output, grad_lse, ctx.options)

    forward_op.register_autograd(_autograd, setup_context=_setup_context)
else:

    def forward_op(*arguments):
        return _Function.apply(*arguments)


def facts(q, k, v, grad_output, visible, *options):
    """Both passes with every fact of every row; no autograd. options: as forward_op's from `plan` on."""
    options = (*options, 1)
    rows = lambda dtype: q.new_zeros(q.shape[:3], dtype=dtype)
    told = {"ties": rows(torch.int32)}
    o, lse, saved = _forward(q, k, v, visible, None, None, None, options, told["ties"])
    of_rows = {name: rows(torch.float32) for name in ("delta", "residual", "residual_floor")}
    dq, dk, dv, _ = _backward(grad_output, q, k, v, o, lse, saved, None, visible, None, None, None, options, of_rows)
    return {"o": o, "lse": lse, **told, "dq": dq, "dk": dk, "dv": dv, **of_rows}


def kernel(q, k, v, visible, *options):
    return chosen_kernel(q.device, q.dtype, _shape(q, k, v), Forms(visible is not None), *options)


def chosen_kernel(device, dtype, shape, forms, *options):
    """Which family of kernels, and why; shape is (B, H, G, T, N, D, D_v)."""
    problem = _problem(device, dtype, shape, forms, *options, 0)
    name, why = ctypes.c_char_p(), ctypes.c_char_p()
    with _on(device):
        check(library().evenkeel_attention_kernel(ctypes.byref(problem), ctypes.byref(name), ctypes.byref(why)), NAME)
    return name.value.decode(), why.value.decode()
