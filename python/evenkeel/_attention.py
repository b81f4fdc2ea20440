"""evenkeel.attention, and FlashAttention's signature over it."""
import torch

from . import _library, _ops, _watch_calls

DEFAULT_PLANS = {torch.bfloat16: "flash2,stabiliser=wide_output", torch.float32: "fp32", torch.float64: "fp32"}
DTYPES = {"cuda": (torch.bfloat16, torch.float32), "cpu": (torch.bfloat16, torch.float32, torch.float64)}
LARGEST_HEADS = _library.largest_heads()  # asked once, here: code that torch compiles cannot ask the library


def whole_plan(dtype, plan, stabiliser):
    """The plan's text with the stabiliser in it, in front of clauses for layers and heads. Without both: the dtype's
    default, which is FlashAttention-2's roundings with the remedy for BF16, and no rounding for FP32 and FP64."""
    if plan is None and stabiliser is None:
        return DEFAULT_PLANS[dtype]
    if plan is None:
        plan = DEFAULT_PLANS[dtype].split(",")[0]
    if stabiliser is None:
        return plan
    everywhere, semicolon, scoped = plan.partition(";")
    return f"{everywhere},stabiliser={stabiliser}{semicolon}{scoped}"


def under_autocast(*tensors):
    """The tensors in autocast's dtype where autocast is on, as for torch's own scaled_dot_product_attention."""
    device = tensors[0].device.type
    if device not in DTYPES:
        return tensors
    try:
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    except (AttributeError, TypeError):  # before torch 2.4
        if device == "cuda":
            enabled, dtype = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
        else:
            enabled, dtype = torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
    if not enabled:
        return tensors
    return tuple(t.to(dtype) if t.dtype in (torch.float16, torch.bfloat16, torch.float32) else t for t in tensors)


def unsuited(q, k, v):
    """What is wrong with q, k and v: the exception's type and words; None where nothing is. Not an exception itself: its
    words could not be read in code that torch compiles."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            return TypeError, f"expected {name} to be a tensor, found {type(t).__name__}"
        if t.layout != torch.strided:
            return TypeError, f"expected {name} to be a strided tensor, found {t.layout}"
        if t.dim() != 4:
            return ValueError, f"expected {name} with 4 axes, (batch, heads, rows, head size), found {tuple(t.shape)}"
        if t.device != q.device:
            return ValueError, f"expected q, k and v on one device, found {name} on {t.device} and q on {q.device}"
        if t.dtype != q.dtype:
            return TypeError, f"expected q, k and v of one dtype, found {name} of {t.dtype} and q of {q.dtype}"
    device = q.device.type
    if device not in DTYPES:
        return ValueError, f"expected tensors on a CPU or a CUDA device, found {q.device}"
    if q.dtype not in DTYPES[device]:
        known = ", ".join(str(d).replace("torch.", "") for d in DTYPES[device])
        return TypeError, f"expected one of {known} on a {device} device, found {str(q.dtype).replace('torch.', '')}"
    if q.numel() == 0 or k.numel() == 0:
        return ValueError, f"expected tensors with no empty axis, found q {tuple(q.shape)} and k {tuple(k.shape)}"
    B, H, _, D = q.shape
    if k.shape != v.shape:
        return ValueError, f"expected k and v of one shape, found k {tuple(k.shape)} and v {tuple(v.shape)}"
    if k.shape[0] != B or k.shape[3] != D:
        return ValueError, (f"expected k of shape ({B}, key heads, keys, {D}) beside q {tuple(q.shape)}, "
                            f"found {tuple(k.shape)}")
    if H % k.shape[1] != 0:
        return ValueError, f"expected query heads in whole groups for {k.shape[1]} key heads, found {H} query heads"
    if device in LARGEST_HEADS and D > LARGEST_HEADS[device]:
        return ValueError, f"expected a head size from 1 to {LARGEST_HEADS[device]} on a GPU, found {D}"
    return None


def unsuited_mask(mask, shape, device):
    """The same for a mask that must broadcast to `shape`."""
    if not isinstance(mask, torch.Tensor):
        return TypeError, f"expected attn_mask to be a tensor, found {type(mask).__name__}"
    if mask.dtype not in (torch.bool, torch.uint8):
        return TypeError, f"expected attn_mask of bool (True: visible), found {str(mask.dtype).replace('torch.', '')}"
    if mask.device != device:
        return ValueError, f"expected attn_mask on {device}, found it on {mask.device}"
    fits = mask.dim() <= 4 and all(m in (1, n) for m, n in zip(reversed(mask.shape), reversed(shape)))
    if not fits:
        return ValueError, f"expected attn_mask that broadcasts to {tuple(shape)}, found {tuple(mask.shape)}"
    return None


def require(fault, function):
    if fault is not None:
        kind, words = fault
        raise kind(f"{function}: {words}")


def scale_of(scale, function):
    """As the library takes it, where 0 stands for the default, 1 / sqrt(head size)."""
    if scale is None:
        return 0.0
    if scale == 0:
        raise ValueError(f"{function}: expected a scale other than 0, or None for 1 / sqrt(head size), found {scale}")
    return float(scale)


def compiling():
    compiler = getattr(torch, "compiler", None)
    return compiler is not None and hasattr(compiler, "is_compiling") and compiler.is_compiling()


def run(function, q, k, v, causal=False, visible=None, plan=None, stabiliser=None, scale=None, softcap=0.0,
        window=(-1, -1), step=0, layer=0):
    """Checked attention; the last row sees the last key. Returns o, lse."""
    q, k, v = under_autocast(q, k, v) if all(isinstance(t, torch.Tensor) for t in (q, k, v)) else (q, k, v)
    require(unsuited(q, k, v), function)
    device_step = None
    if isinstance(step, torch.Tensor):
        if step.device != q.device or step.dtype != torch.int32 or step.numel() != 1 or not step.is_cuda:
            raise ValueError(f"{function}: expected step as a number or as one int32 on q's GPU, found "
                             f"{step.numel()} of {step.dtype} on {step.device}")
        device_step, step = step, 0
    if visible is not None:
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        require(unsuited_mask(visible, shape, q.device), function)
        visible = visible.to(torch.uint8).expand(shape)
    options = (whole_plan(q.dtype, plan, stabiliser), bool(causal), scale_of(scale, function), float(softcap or 0.0),
               int(window[0]), int(window[1]), int(step), int(layer))
    call = lambda: _ops.forward_op(q, k, v, visible, device_step, *options)
    if compiling():
        o, lse, _ = call()
    else:
        o, lse, _ = _watch_calls.seen(call, q, k, v, options[2], options[3], options[1], visible is not None)
        _watch_calls.tell_lse(lse)
    return o, lse


def attention(q, k, v, is_causal=False, plan=None, stabiliser=None, attn_mask=None, scale=None, softcap=0.0, step=0,
              layer=0, return_lse=False):
    """Attention of q (B, H, T, D) over k, v (B, G, N, D), H a multiple of G; returns o (B, H, T, D), and the
    log-sum-exp of every row (B, H, T; no gradient) where return_lse is set.

    is_causal: row i sees keys up to i, as in torch's scaled_dot_product_attention.
    plan: a precision plan, "bf16_all,row_sum=fp32"; stabiliser: the remedy, "wide_output", "consistent", "zero_sum", ...
    attn_mask: bool, True where a key is visible, broadcast to (B, H, T, N).
    step: of the random numbers of stochastic sites; an int32 tensor on the GPU where a CUDA graph is replayed.
    layer: for plans with clauses for layers.
    """
    name = "evenkeel.attention"
    if is_causal and attn_mask is not None:
        raise ValueError(f"{name}: expected is_causal or attn_mask, found both")
    if is_causal and isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == k.dim() == 4:
        T, N = q.shape[2], k.shape[2]
        if T < N:  # no row sees the keys beyond
            k, v = k[:, :, :T], v[:, :, :T] if isinstance(v, torch.Tensor) and v.dim() == 4 else v
        elif T > N:  # rows beyond the last key see all of them
            is_causal, attn_mask = False, torch.ones(T, N, dtype=torch.bool, device=q.device).tril()
    o, lse = run(name, q, k, v, is_causal, attn_mask, plan, stabiliser, scale, softcap, (-1, -1), step, layer)
    return (o, lse) if return_lse else o


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False, *, plan=None, stabiliser=None,
                    layer=0):
    """FlashAttention's function of this name: q (B, T, H, D), k, v (B, N, G, D); with causal the last row sees the last
    key. Always deterministic. return_attn_probs: (o, lse, None)."""
    name = "evenkeel.flash_attn_func"
    if dropout_p:
        raise ValueError(f"{name}: expected dropout_p of 0, found {dropout_p}")
    if alibi_slopes is not None:
        raise ValueError(f"{name}: expected no alibi_slopes, found some")
    q, k, v = (t.transpose(1, 2) if isinstance(t, torch.Tensor) and t.dim() == 4 else t for t in (q, k, v))
    o, lse = run(name, q, k, v, causal, None, plan, stabiliser, softmax_scale, softcap, window_size, 0, layer)
    o = o.transpose(1, 2)
    return (o, lse, None) if return_attn_probs else o


def attention_facts(q, k, v, grad_output, is_causal=False, plan=None, stabiliser=None, attn_mask=None, scale=None,
                    softcap=0.0, step=0, layer=0):
    """Both passes and what can be told of every row: a dict of o, lse, ties, dq, dk, dv, delta, residual (the sum of the
    row of dS / scale, 0 in exact arithmetic) and residual_floor (the standard deviation that rounding dS must give it).
    With is_causal, the last row sees the last key. No autograd; on a GPU the any-plan kernels run."""
    name = "evenkeel.attention_facts"
    require(unsuited(q, k, v), name)
    if not isinstance(grad_output, torch.Tensor) or grad_output.shape != q.shape or grad_output.dtype != q.dtype:
        found = (tuple(grad_output.shape), grad_output.dtype) if isinstance(grad_output, torch.Tensor) else grad_output
        raise ValueError(f"{name}: expected grad_output of q's shape and dtype {tuple(q.shape)}, {q.dtype}, found {found}")
    if attn_mask is not None:
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        require(unsuited_mask(attn_mask, shape, q.device), name)
        attn_mask = attn_mask.to(torch.uint8).expand(shape)
    with torch.no_grad():
        return _ops.facts(q, k, v, grad_output, attn_mask, whole_plan(q.dtype, plan, stabiliser), bool(is_causal),
                          scale_of(scale, name), float(softcap or 0.0), -1, -1, int(step), int(layer))


def kernel_choice(q, k, v, is_causal=False, plan=None, stabiliser=None, attn_mask=None, scale=None, softcap=0.0, layer=0):
    """Which kernel runs ("hopper", "any_plan" or "cpu"), and why."""
    name = "evenkeel.kernel_choice"
    require(unsuited(q, k, v), name)
    return _ops.kernel(q, k, attn_mask, whole_plan(q.dtype, plan, stabiliser), bool(is_causal), scale_of(scale, name),
                       float(softcap or 0.0), -1, -1, 0, int(layer))
