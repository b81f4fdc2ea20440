"""evenkeel.attention: checks, autocast, random draws, sharded tensors; the doors (_patch, flash_attn, hf) come through here."""
import ctypes
import functools

import torch
import torch.nn.functional as F

from . import _coverage, _library, _ops, _packed, _watch_calls

DEFAULT_PLANS = {torch.bfloat16: "flash2,stabiliser=wide_output", torch.float16: "flash2,stabiliser=wide_output",
                 torch.float32: "fp32", torch.float64: "fp32"}
DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32),
          "cpu": (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
# Asked once, here: code that torch compiles cannot ask the library.
LARGEST_HEADS, COMMON_HEADS = _library.largest_heads(), _library.largest_heads(of=min)


def whole_plan(dtype, plan, stabiliser):
    """The plan's text with the stabiliser in it, in front of clauses for layers and heads. Without both: the dtype's
    default, which is FlashAttention-2's roundings with the remedy for BF16 and FP16, and no rounding for FP32 and FP64."""
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


def unsuited(q, k, v, plan=None, stabiliser=None):
    """What is wrong with q, k and v, or why no kernels take them with this plan (whole_plan): the exception's type and words;
    None where nothing is. Not an exception itself: its words could not be read in code that torch compiles."""
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
    if k.shape[:3] != v.shape[:3] or v.shape[3] == 0:
        return ValueError, f"expected k and v of as many heads and keys, found k {tuple(k.shape)} and v {tuple(v.shape)}"
    if k.shape[0] != B or k.shape[3] != D:
        return ValueError, (f"expected k of shape ({B}, key heads, keys, {D}) beside q {tuple(q.shape)}, "
                            f"found {tuple(k.shape)}")
    if H % k.shape[1] != 0:
        return ValueError, f"expected query heads in whole groups for {k.shape[1]} key heads, found {H} query heads"
    D = max(D, v.shape[3])
    if device in LARGEST_HEADS and D > LARGEST_HEADS[device]:
        return ValueError, f"expected a head size from 1 to {LARGEST_HEADS[device]} on a GPU, found {D}"
    if device != "cuda":
        return None
    why = unsuited_gpu(q.device.index or 0)
    # FP16 and larger heads are for some kernels alone, which do not take every plan.
    if why is None and (q.dtype == torch.float16 or D > COMMON_HEADS.get(device, D)):
        refused = refusal(q.device.index or 0, dtype_name(q), int(H), int(D), whole_plan(q.dtype, plan, stabiliser), False, False)
        why = (ValueError, refused) if refused else None
    return why


def gpu_number(t):
    """As `refusal` takes it."""
    return t.device.index or 0 if t.device.type == "cuda" else -1


def dtype_name(t):
    return str(t.dtype).replace("torch.", "")


@_coverage.at_compilation
def refusal(gpu, dtype, H, D, plan, slopes, sinks, D_v=None):
    """Why no kernels take such calls; "" where some do. gpu: its number, or -1 for the CPU; dtype: its name."""
    return _asked_refusal(gpu, dtype, H, D, D if D_v is None else D_v, plan, slopes, sinks)


@functools.lru_cache(maxsize=1024)
def _asked_refusal(gpu, dtype, H, D, D_v, plan, slopes, sinks):
    device = torch.device("cpu") if gpu < 0 else torch.device("cuda", gpu)
    for text in _ops.plans_of(plan):
        kernel, why = _kernel_of(device, getattr(torch, dtype), (1, H, H, 1, 1, D, D_v), _ops.Forms(slopes=slopes, sinks=sinks),
                                 (text, False, 0.0, 0.0, -1, -1, 0, 0))
        if kernel == "refused":
            return why.replace(f"{_ops.NAME}: ", "", 1)
    return ""


def taken_by_a_kernel(q, v, plan, slopes=False, sinks=False):
    """Whether some kernels take such calls with slopes by distance, with sinks."""
    return not refusal(gpu_number(q), dtype_name(q), int(q.shape[1]), int(max(q.shape[3], v.shape[3])), plan, slopes, sinks)


@_coverage.at_compilation
def unsuited_gpu(index):
    """What keeps this GPU from the library's kernels: a build without CUDA, ROCm, an old chip; None where nothing does."""
    return _asked_gpu(index)


@functools.lru_cache(maxsize=None)
def _asked_gpu(index):
    if getattr(torch.version, "hip", None):
        return RuntimeError, f"expected an NVIDIA GPU, found ROCm {torch.version.hip}"
    device = torch.device("cuda", index)
    problem = _ops._problem(device, torch.bfloat16, (1, 1, 1, 1, 1, 8, 8), _ops.Forms(), "flash2", False, 0.0, 0.0, -1, -1, 0, 0, 0)
    name, why = ctypes.c_char_p(), ctypes.c_char_p()
    with _ops._on(device) if torch.cuda.is_available() else _ops._Nowhere():
        status = _library.library().evenkeel_attention_kernel(ctypes.byref(problem), ctypes.byref(name), ctypes.byref(why))
    return None if status == 0 else (RuntimeError, _library.library().evenkeel_last_error().decode())


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


@_coverage.at_compilation
def draws(plan, function="evenkeel.attention"):
    """Whether some kernel draws random numbers for this plan (of a table: for one of its plans)."""
    return any(_asked_draws(text, function) for text in _ops.plans_of(plan))


@functools.lru_cache(maxsize=1024)
def _asked_draws(plan, function):
    answer = ctypes.c_int32()
    _library.check(_library.library().evenkeel_plan_draws(plan.encode(), ctypes.byref(answer)), function)
    return bool(answer.value)


def step_of(step, plan, q, function):
    """The step of the random numbers: (device_step, step). None: drawn from PyTorch's generator, as dropout is. So draws differ
    from call to call, repeat after torch.manual_seed, and are the same where a checkpointed layer is computed again."""
    if step is None:
        return (torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=q.device) if draws(plan) else None), 0
    if not isinstance(step, torch.Tensor):
        return None, int(step)
    if step.device != q.device or step.dtype != torch.int32 or step.numel() != 1:
        raise ValueError(f"{function}: expected step as a number or as one int32 on q's device, found {step.numel()} of "
                         f"{step.dtype} on {step.device}")
    return step, 0


def local_tensors(function, *tensors):
    """DTensors by their local parts: (tensors, wrap). Attention of a rank needs no other rank's numbers where batch and heads
    are sharded, alike in q, k and v. The function `wrap` makes the output a DTensor of q's kind again. Ordinary tensors: as given."""
    q = tensors[0]
    if type(q) in (torch.Tensor, torch.nn.Parameter) or not hasattr(q, "placements"):
        return tensors, lambda o: o
    for name, t in zip("qkv", tensors):
        if not hasattr(t, "placements") or tuple(t.placements) != tuple(q.placements) or t.device_mesh != q.device_mesh:
            raise ValueError(f"{function}: expected q, k and v sharded alike, found {name} with "
                             f"{getattr(t, 'placements', 'no placements')} beside q with {q.placements}")
    for placement in q.placements:
        if not placement.is_replicate() and not (placement.is_shard() and placement.dim in (0, 1)):
            raise ValueError(f"{function}: expected q, k and v sharded over the batch (axis 0) or the heads (axis 1), found "
                             f"{q.placements}; redistribute them first")
    return tuple(t.to_local() for t in tensors), lambda o: type(q).from_local(o, q.device_mesh, q.placements, run_check=False)


def listed(door, q, k, v, forms, options):
    """One call of our kernels, for coverage()."""
    kernel, why = "compiled", ""
    if not compiling():
        *before, _, layer = options
        kernel, why = _kernel_of(q.device, q.dtype, _ops._shape(q, k, v), forms,
                                 (_ops.plans_of(before[0])[0], *before[1:], 0, layer))
    _coverage.note(door, _coverage.shape_text(q), dtype_name(q), kernel, _ops.plans_of(options[0])[0], why)


@functools.lru_cache(maxsize=4096)
def _kernel_of(device, dtype, shape, forms, options):
    try:
        return _ops.chosen_kernel(device, dtype, shape, forms, *options)
    except (ValueError, _library.EvenkeelError) as error:  # the call itself says it
        return "refused", str(error)


def one_head_size(q, k, v, scale, plan):
    """q, k, v with as many features each, filled with zeros, and the scale of the original ones. As given where kernels take
    values of another head size, and no faster ones take the filled tensors; but a capture knows one head size alone. Heads are
    on axis 1."""
    D, D_v = q.shape[-1], v.shape[-1]
    if D == D_v:
        return q, k, v, scale
    if max(D, D_v) > COMMON_HEADS.get(q.device.type, 0) and not _watch_calls.is_recording() and \
            not refusal(gpu_number(q), dtype_name(q), int(q.shape[1]), int(D), plan, False, False, int(D_v)):
        return q, k, v, scale
    fill = lambda t: F.pad(t, (0, max(D, D_v) - t.shape[-1])) if t.shape[-1] < max(D, D_v) else t
    return fill(q), fill(k), fill(v), D ** -0.5 if scale is None else scale


def numbers_of_heads(numbers, q, heads, name, function):
    """Slopes or sinks as the kernels take them: (H), FP32."""
    if numbers is None:
        return None
    if not isinstance(numbers, torch.Tensor) or tuple(numbers.shape) != (heads,) or numbers.device != q.device:
        found = (tuple(numbers.shape), numbers.device) if isinstance(numbers, torch.Tensor) else type(numbers).__name__
        raise ValueError(f"{function}: expected {name} of {heads} numbers, one for each query head, on {q.device}, found {found}")
    return numbers.to(torch.float32).contiguous()


def sinks_beside(q, v, plan, sinks):
    """Whether sinks are computed beside the kernels, from the log-sum-exp: where no kernels take them, and where the call is
    recorded, since a capture knows no sinks."""
    return sinks is not None and (_watch_calls.is_recording() or not taken_by_a_kernel(q, v, plan, sinks=True))


def with_sinks(o, lse, sinks, by_row):
    """A sink takes exp(s) of the row's sum: what is left of the probability is the keys'. by_row: from the axes of lse to o's."""
    sinks = sinks.view(-1, 1)
    return o * by_row(torch.sigmoid(lse - sinks)).unsqueeze(-1).to(o.dtype), torch.logaddexp(lse, sinks.expand_as(lse))


def run(function, q, k, v, causal=False, visible=None, plan=None, stabiliser=None, scale=None, softcap=0.0,
        window=(-1, -1), step=None, layer=0, door=None, slopes=None, sinks=None):
    """Checked attention; the last row sees the last key. Returns o, lse."""
    wrap = lambda o: o
    if all(isinstance(t, torch.Tensor) for t in (q, k, v)):
        (q, k, v), wrap = local_tensors(function, *under_autocast(q, k, v))
    require(unsuited(q, k, v, plan, stabiliser), function)
    if visible is not None:
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        require(unsuited_mask(visible, shape, q.device), function)
        visible = visible.to(torch.uint8).expand(shape)
    plan = whole_plan(q.dtype, plan, stabiliser)
    features = v.shape[3]
    q, k, v, scale = one_head_size(q, k, v, scale, plan)
    slopes = numbers_of_heads(slopes, q, q.shape[1], "alibi_slopes", function)
    sinks = numbers_of_heads(sinks, q, q.shape[1], "sinks", function)
    device_step, step = step_of(step, plan, q, function)
    options = (plan, bool(causal), scale_of(scale, function), float(softcap or 0.0), int(window[0]), int(window[1]), step,
               int(layer))
    beside = sinks_beside(q, v, plan, sinks)
    extras = (visible, device_step, slopes, None if beside else sinks)
    call = lambda: _ops.forward_op(q, k, v, *extras, *options)
    listed(door or function, q, k, v, _ops._forms(visible, slopes, extras[3]), options)
    if compiling():
        o, lse, _ = call()
    else:
        o, lse, _ = (_watch_calls.seen(call, q, k, v, options[2], options[3], options[1], visible,
                                        plan=_ops.plans_of(plan)[0]) if slopes is None
                     else _watch_calls.not_recorded(call, "expected attention without slopes by distance (ALiBi), found some"))
        _watch_calls.tell_lse(lse)
    if beside:
        o, lse = with_sinks(o, lse, sinks, lambda x: x)
    return wrap(o[..., :features]) if features < o.shape[-1] else wrap(o), lse


def check_starts(q, k, starts_q, starts_k, function):
    for name, starts, rows in (("cu_seqlens_q", starts_q, q.shape[0]), ("cu_seqlens_k", starts_k, k.shape[0])):
        if not isinstance(starts, torch.Tensor) or starts.dim() != 1 or starts.shape[0] < 2 or starts.device != q.device:
            raise ValueError(f"{function}: expected {name} of one axis with 2 or more numbers on {q.device}, found "
                             f"{tuple(starts.shape) if isinstance(starts, torch.Tensor) else type(starts).__name__}")
        if starts.device.type == "cpu" and (starts[0] != 0 or starts[-1] != rows or (starts[1:] < starts[:-1]).any()):
            raise ValueError(f"{function}: expected {name} from 0 to {rows} in ascending order, found {starts.tolist()}")
    if starts_q.shape != starts_k.shape:
        raise ValueError(f"{function}: expected as many sequences of rows as of keys, found {starts_q.shape[0] - 1} and "
                         f"{starts_k.shape[0] - 1}")


def run_packed(function, q, k, v, starts_q, starts_k, longest_q, longest_k, causal=False, plan=None, stabiliser=None,
               scale=None, softcap=0.0, window=(-1, -1), step=None, layer=0, door=None, slopes=None, sinks=None):
    """The same for packed sequences: q (R, H, D), k (S, G, D), v (S, G, D_v), starts (sequences + 1) of int32. Returns o (R, H, D) and
    lse (H, R)."""
    require(next(((TypeError, f"expected {name} to be a tensor, found {type(t).__name__}") for name, t in zip("qkv", (q, k, v))
                  if not isinstance(t, torch.Tensor)), None), function)
    q, k, v = under_autocast(q, k, v)
    require(unsuited(*(t.transpose(0, 1).unsqueeze(0) if t.dim() == 3 else t for t in (q, k, v)), plan, stabiliser), function)
    check_starts(q, k, starts_q, starts_k, function)
    plan = whole_plan(q.dtype, plan, stabiliser)
    features = v.shape[2]
    q, k, v, scale = one_head_size(q, k, v, scale, plan)
    slopes = numbers_of_heads(slopes, q, q.shape[1], "alibi_slopes", function)
    sinks = numbers_of_heads(sinks, q, q.shape[1], "sinks", function)
    device_step, step = step_of(step, plan, q, function)
    options = (plan, bool(causal), scale_of(scale, function), float(softcap or 0.0), int(window[0]), int(window[1]), step,
               int(layer))
    starts_q, starts_k = (t.to(torch.int32).contiguous() for t in (starts_q, starts_k))
    heads_first = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
    beside = sinks_beside(heads_first[0], heads_first[2], plan, sinks)
    extras = (device_step, slopes, None if beside else sinks)
    call = lambda: _packed.packed_op(q, k, v, starts_q, starts_k, *extras, int(longest_q), int(longest_k), *options)
    listed(door or function, *heads_first, _ops._forms(None, slopes, extras[2]), options)
    if compiling():
        o, lse, _ = call()
    else:
        o, lse, _ = (_watch_calls.seen_packed(call, q, k, v, starts_q, starts_k, options[2], options[3], options[1], options[4:6],
                                               plan=_ops.plans_of(plan)[0])
                     if slopes is None
                     else _watch_calls.not_recorded(call, "expected attention without slopes by distance (ALiBi), found some"))
        _watch_calls.tell_lse(lse.unsqueeze(0))
    if beside:
        o, lse = with_sinks(o, lse, sinks, lambda x: x.t())
    return o[..., :features] if features < o.shape[-1] else o, lse


def attention(q, k, v, is_causal=False, plan=None, stabiliser=None, attn_mask=None, scale=None, softcap=0.0, step=None,
              layer=0, return_lse=False, door="evenkeel.attention", alibi_slopes=None, sinks=None):
    """Attention of q (B, H, T, D) over k, v (B, G, N, D), H a multiple of G; returns o (B, H, T, D of v), and the
    log-sum-exp of every row (B, H, T) where return_lse is set. Both have gradients (the log-sum-exp's with softcap where the
    kernels take it: not with FP32 on a GPU).

    is_causal: row i sees keys up to i, as in torch's scaled_dot_product_attention.
    plan: a precision plan, "bf16_all,row_sum=fp32"; stabiliser: the remedy, "wide_output", "consistent", "zero_sum", ...
    attn_mask: bool, True where a key is visible, broadcast to (B, H, T, N).
    step: of the random numbers, for plans that draw some. A number, or one int32 on q's device. With None it is drawn from
    PyTorch's generator, so it differs from call to call and repeats after torch.manual_seed.
    layer: for plans with clauses for layers.
    alibi_slopes: (H). A score falls by slope times the distance of row and key; the last row is at the last key. For BF16
    and FP16, and on a CPU. Not with softcap. They have no gradient.
    sinks: (H). One more score of every row, without a value. It takes its share of the probability, and the log-sum-exp counts
    it. They have a gradient.
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
    o, lse = run(name, q, k, v, is_causal, attn_mask, plan, stabiliser, scale, softcap, (-1, -1), step, layer, door, alibi_slopes,
                 sinks)
    return (o, lse) if return_lse else o


def attention_facts(q, k, v, grad_output, is_causal=False, plan=None, stabiliser=None, attn_mask=None, scale=None,
                    softcap=0.0, step=0, layer=0):
    """Both passes and the facts of every row: a dict of o, lse, ties, dq, dk, dv, delta, residual (the sum of the
    row of dS / scale, 0 in exact arithmetic) and residual_floor (the standard deviation that rounding dS must give it).
    With is_causal, the last row sees the last key. No autograd; on a GPU the any-plan kernels run."""
    name = "evenkeel.attention_facts"
    require(unsuited(q, k, v), name)
    if not isinstance(grad_output, torch.Tensor) or grad_output.shape != (*q.shape[:3], v.shape[3]) or \
            grad_output.dtype != q.dtype:
        found = (tuple(grad_output.shape), grad_output.dtype) if isinstance(grad_output, torch.Tensor) else grad_output
        raise ValueError(f"{name}: expected grad_output of o's shape and dtype {(*q.shape[:3], v.shape[3])}, {q.dtype}, "
                         f"found {found}")
    if attn_mask is not None:
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        require(unsuited_mask(attn_mask, shape, q.device), name)
        attn_mask = attn_mask.to(torch.uint8).expand(shape)
    with torch.no_grad():
        return _ops.facts(q, k, v, grad_output, attn_mask, whole_plan(q.dtype, plan, stabiliser), bool(is_causal),
                          scale_of(scale, name), float(softcap or 0.0), -1, -1, int(step), int(layer))


def kernel_choice(q, k, v, is_causal=False, plan=None, stabiliser=None, attn_mask=None, scale=None, softcap=0.0, layer=0):
    """Which kernel runs ("hopper", "hopper_fp8", "ampere", "any_plan" or "cpu"), and why."""
    name = "evenkeel.kernel_choice"
    require(unsuited(q, k, v), name)
    return _ops.kernel(q, k, v, attn_mask, whole_plan(q.dtype, plan, stabiliser), bool(is_causal), scale_of(scale, name),
                       float(softcap or 0.0), -1, -1, 0, int(layer))
