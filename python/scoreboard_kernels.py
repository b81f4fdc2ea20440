"""The kernels of scripts/scoreboard: PyTorch's, ours, and some that are nobody's product: the definition, one with a planted
fault, a plain FlashAttention-2 in Triton, and 8-bit attention as SageAttention's paper (arXiv 2410.02367) describes it, with
the usual backward pass."""
import dataclasses
import functools
import inspect

import torch
import torch.nn.functional as F

from evenkeel import _attention

try:
    import triton
    import triton.language as tl
except ImportError:  # then there is no Triton kernel to judge
    triton = None

if triton is not None:
    # Otherwise lengths of 1 and multiples of 16 are compiled apart, which takes a minute.
    _for_all_lengths = triton.jit(do_not_specialize=["T", "N"])

    @_for_all_lengths
    def _forward(q, k, v, o, lse, T, N, scale, causal: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                 KEYS: tl.constexpr):
        head, rows = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        d = tl.arange(0, D)
        x = tl.load(q + head * T * D + rows[:, None] * D + d[None], mask=rows[:, None] < T, other=0.0)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        sum = tl.zeros([ROWS, D], tl.float32)
        for first in range(0, N, KEYS):
            keys = first + tl.arange(0, KEYS)
            y = tl.load(k + head * N * D + keys[:, None] * D + d[None], mask=keys[:, None] < N, other=0.0)
            z = tl.load(v + head * N * D + keys[:, None] * D + d[None], mask=keys[:, None] < N, other=0.0)
            s = tl.dot(x, tl.trans(y)) * scale
            seen = keys[None] < N
            if causal:
                seen = seen & (keys[None] <= rows[:, None])
            s = tl.where(seen, s, float("-inf"))
            new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp(s - new[:, None])
            alpha = tl.exp(m - new)
            l = l * alpha + tl.sum(p, 1)
            sum = sum * alpha[:, None] + tl.dot(p.to(z.dtype), z)
            m = new
        tl.store(o + head * T * D + rows[:, None] * D + d[None], (sum / l[:, None]).to(o.dtype.element_ty),
                 mask=rows[:, None] < T)
        tl.store(lse + head * T + rows, m + tl.log(l), mask=rows < T)

    @_for_all_lengths
    def _backward_rows(q, k, v, d_o, lse, delta, dq, T, N, scale, causal: tl.constexpr, D: tl.constexpr,
                       ROWS: tl.constexpr, KEYS: tl.constexpr):
        head, rows = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        d = tl.arange(0, D)
        at = head * T * D + rows[:, None] * D + d[None]
        x = tl.load(q + at, mask=rows[:, None] < T, other=0.0)
        g = tl.load(d_o + at, mask=rows[:, None] < T, other=0.0)
        L = tl.load(lse + head * T + rows, mask=rows < T, other=0.0)
        di = tl.load(delta + head * T + rows, mask=rows < T, other=0.0)
        sum = tl.zeros([ROWS, D], tl.float32)
        for first in range(0, N, KEYS):
            keys = first + tl.arange(0, KEYS)
            y = tl.load(k + head * N * D + keys[:, None] * D + d[None], mask=keys[:, None] < N, other=0.0)
            z = tl.load(v + head * N * D + keys[:, None] * D + d[None], mask=keys[:, None] < N, other=0.0)
            seen = (keys[None] < N) & (rows[:, None] < T)
            if causal:
                seen = seen & (keys[None] <= rows[:, None])
            p = tl.where(seen, tl.exp(tl.dot(x, tl.trans(y)) * scale - L[:, None]), 0.0)
            ds = p * (tl.dot(g, tl.trans(z)) - di[:, None])
            sum += tl.dot(ds.to(y.dtype), y)
        tl.store(dq + at, (sum * scale).to(dq.dtype.element_ty), mask=rows[:, None] < T)

    @_for_all_lengths
    def _backward_keys(q, k, v, d_o, lse, delta, dk, dv, T, N, scale, causal: tl.constexpr, D: tl.constexpr,
                       ROWS: tl.constexpr, KEYS: tl.constexpr):
        head, keys = tl.program_id(1), tl.program_id(0) * KEYS + tl.arange(0, KEYS)
        d = tl.arange(0, D)
        at = head * N * D + keys[:, None] * D + d[None]
        y = tl.load(k + at, mask=keys[:, None] < N, other=0.0)
        z = tl.load(v + at, mask=keys[:, None] < N, other=0.0)
        sum_k = tl.zeros([KEYS, D], tl.float32)
        sum_v = tl.zeros([KEYS, D], tl.float32)
        for first in range(0, T, ROWS):
            rows = first + tl.arange(0, ROWS)
            of = head * T * D + rows[:, None] * D + d[None]
            x = tl.load(q + of, mask=rows[:, None] < T, other=0.0)
            g = tl.load(d_o + of, mask=rows[:, None] < T, other=0.0)
            L = tl.load(lse + head * T + rows, mask=rows < T, other=0.0)
            di = tl.load(delta + head * T + rows, mask=rows < T, other=0.0)
            seen = (keys[None] < N) & (rows[:, None] < T)
            if causal:
                seen = seen & (keys[None] <= rows[:, None])
            p = tl.where(seen, tl.exp(tl.dot(x, tl.trans(y)) * scale - L[:, None]), 0.0)
            ds = p * (tl.dot(g, tl.trans(z)) - di[:, None])
            sum_v += tl.dot(tl.trans(p.to(g.dtype)), g)
            sum_k += tl.dot(tl.trans(ds.to(x.dtype)), x)
        tl.store(dk + at, (sum_k * scale).to(dk.dtype.element_ty), mask=keys[:, None] < N)
        tl.store(dv + at, sum_v.to(dv.dtype.element_ty), mask=keys[:, None] < N)

    class _Triton(torch.autograd.Function):
        BLOCK = 64

        @staticmethod
        def forward(ctx, q, k, v, causal, scale):
            q, k, v = (x.contiguous() for x in (q, k, v))
            B, H, T, D = q.shape
            N, size = k.shape[2], _Triton.BLOCK
            o, lse = torch.empty_like(q), torch.empty(B, H, T, device=q.device, dtype=torch.float32)
            _forward[(triton.cdiv(T, size), B * H)](q, k, v, o, lse, T, N, scale, causal, D, size, size)
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.causal, ctx.scale = causal, scale
            return o

        @staticmethod
        def backward(ctx, d_o):
            q, k, v, o, lse = ctx.saved_tensors
            B, H, T, D = q.shape
            N, size, d_o = k.shape[2], _Triton.BLOCK, d_o.contiguous()
            delta = (d_o.float() * o.float()).sum(-1)
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            _backward_rows[(triton.cdiv(T, size), B * H)](q, k, v, d_o, lse, delta, dq, T, N, ctx.scale, ctx.causal, D,
                                                          size, size)
            _backward_keys[(triton.cdiv(N, size), B * H)](q, k, v, d_o, lse, delta, dk, dv, T, N, ctx.scale, ctx.causal,
                                                          D, size, size)
            return dq, dk, dv, None, None


def triton_flash2(q, k, v, is_causal=False, scale=None):
    """FlashAttention-2 in Triton: delta from the rounded O, dS rounded to the tensors' type."""
    D = q.shape[-1]
    if triton is None or q.shape[1] != k.shape[1] or D not in (32, 64, 128) or v.shape[-1] != D or q.dtype == torch.float32:
        raise NotImplementedError
    return _Triton.apply(q, k, v, is_causal, D ** -0.5 if scale is None else scale)


def _int8(x, rows):
    """Rounded to 8 bits with one scale for so many rows: numbers of x's size that 8 bits and the scale can hold."""
    B, H, T, D = x.shape
    padded = torch.nn.functional.pad(x, (0, 0, 0, -T % rows)).view(B, H, -1, rows, D)
    scale = padded.abs().amax((-1, -2), keepdim=True).clamp_min(1e-30) / 127
    return (torch.round(padded / scale).clamp(-127, 127) * scale).view(B, H, -1, D)[:, :, :T]


class _Sage(torch.autograd.Function):
    @staticmethod
    def scores(q, k, causal, scale):
        # K less its mean over the keys: softmax does not see it, and 8 bits hold the rest better.
        smooth = k - k.mean(2, keepdim=True)
        s = _int8(q * scale, 128) @ _int8(smooth, 64).transpose(-1, -2)
        if causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(), float("-inf"))
        return s

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        s = _Sage.scores(q.float(), k.float(), causal, scale)
        lse = torch.logsumexp(s, -1, keepdim=True)
        o = (torch.exp(s - lse).to(q.dtype).float() @ v.float()).to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.scale = causal, scale
        return o

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, o, lse = ctx.saved_tensors
        p = torch.exp(_Sage.scores(q.float(), k.float(), ctx.causal, ctx.scale) - lse)
        g, delta = d_o.float(), (d_o.float() * o.float()).sum(-1, keepdim=True)
        ds = (p * (g @ v.float().transpose(-1, -2) - delta)).to(q.dtype).float()
        rounded = p.to(q.dtype).float()
        return ((ds @ k.float() * ctx.scale).to(q.dtype), (ds.transpose(-1, -2) @ q.float() * ctx.scale).to(q.dtype),
                (rounded.transpose(-1, -2) @ g).to(q.dtype), None, None)


def sage_int8(q, k, v, is_causal=False, scale=None):
    """Q K^T in INT8 with smoothed keys, P V in the tensors' type, FlashAttention-2's backward pass."""
    if q.shape[1] != k.shape[1] or q.dtype == torch.float32 or (is_causal and q.shape[2] != k.shape[2]):
        raise NotImplementedError
    return _Sage.apply(q, k, v, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)


def sdpa(backend):
    """PyTorch's own attention with one backend, or the reason why not."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return f"PyTorch {torch.__version__} has no sdpa_kernel"
    if not hasattr(SDPBackend, backend):
        return f"PyTorch {torch.__version__} has no {backend}"

    def attend(q, k, v, is_causal=False, attn_mask=None, scale=None, enable_gqa=False):
        if is_causal and attn_mask is not None:
            raise NotImplementedError
        with sdpa_kernel(getattr(SDPBackend, backend)):
            try:
                return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
                                                      enable_gqa=enable_gqa)
            except RuntimeError as error:  # "No available kernel": this backend does not take such a form
                if "available kernel" in str(error) or "not support" in str(error):
                    raise NotImplementedError from None
                raise

    return attend


def flex(compiled):
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        return f"PyTorch {torch.__version__} has no flex_attention"
    state = {}  # from the first call on: whoever lists the kernels needs no GPU

    def mask_with(ahead):
        return lambda b, h, i, j: j <= i + ahead[b]

    def prepare(device):
        state["ahead"] = torch.zeros(8, dtype=torch.int32, device=device)
        state["mask"], state["run"] = mask_with(state["ahead"]), flex_attention
        if not compiled:
            return
        # By other names: `import torch.x` within a function would make `torch` a name of its own there.
        from torch._inductor import config as inductor
        from torch.fx.experimental import _config as symbols

        # A compilation takes ten seconds and more, so that few must do. Lengths are dynamic, and not taken to be one number
        # where they are equal by chance; all masks are one function.
        if hasattr(symbols, "use_duck_shape"):
            symbols.use_duck_shape = False
        inductor.compile_threads = 1
        torch._dynamo.config.cache_size_limit = 16
        # Short rows would have a kernel of their own, made for decoding.
        state["run"] = functools.partial(torch.compile(flex_attention, dynamic=True),
                                         kernel_options={"FORCE_USE_FLEX_ATTENTION": True})

    def attend(q, k, v, is_causal=False):
        B, H, T, D = q.shape
        # Batches, heads and head sizes are compiled in. 100 heads: the families.
        if compiled and (B != 1 or H not in (2, 100) or D != 64 or v.shape[-1] != D or min(T, k.shape[2]) < 2):
            raise NotImplementedError("one sequence, head size 64, two heads and 100: each other shape is compiled anew")
        if not state:
            prepare(q.device)
        state["ahead"].fill_(0 if is_causal else k.shape[2])
        # One block: their number is compiled in where it is 1.
        blocks = create_block_mask(state["mask"], None, None, T, k.shape[2], device=q.device, BLOCK_SIZE=256)
        return state["run"](q, k, v, block_mask=blocks)

    return attend


def varlen():
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"PyTorch {torch.__version__} has no varlen_attn"
    # By name since 2.11, or as a window.
    named = "is_causal" in inspect.signature(varlen_attn).parameters
    causal = lambda asked: {"is_causal": asked} if named else {"window_size": (-1, 0 if asked else -1)}

    def attend(q, k, v, is_causal=False, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0):
        if cu_seqlens_q is None or v.shape[-1] != q.shape[-1]:
            raise NotImplementedError
        return varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **causal(is_causal))

    return attend


def ours(plan):
    """With every form that some family of ours takes; the last row is at the last key, as in FlashAttention."""

    def attend(q, k, v, is_causal=False, attn_mask=None, scale=None, softcap=0.0, window_size=(-1, -1), sinks=None,
               return_lse=False, enable_gqa=False, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0):
        # One step: random numbers are drawn anew in every call else, and two calls differ by them.
        given = dict(plan=plan, scale=scale, softcap=softcap, window=window_size, sinks=sinks, step=0)
        if _attention.unsuited(*(t.transpose(0, 1).unsqueeze(0) if t.dim() == 3 else t for t in (q, k, v))) is not None:
            raise NotImplementedError
        if cu_seqlens_q is not None:
            found = _attention.run_packed("scoreboard", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                          is_causal, **given)
        else:
            found = _attention.run("scoreboard", q, k, v, is_causal, attn_mask, **given)
        return found if return_lse else found[0]

    return attend


def definition(q, k, v, is_causal=False, attn_mask=None, scale=None, enable_gqa=False):
    """Attention in FP64, rounded once: what no kernel does better."""
    H, G, T, N = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    x, y, z = q.double(), k.double().repeat_interleave(H // G, 1), v.double().repeat_interleave(H // G, 1)
    s = x @ y.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(T, N, dtype=torch.bool, device=q.device)
    seen = seen.tril() if is_causal else seen
    seen = seen if attn_mask is None else seen & attn_mask
    s = s.masked_fill(~seen, float("-inf"))
    empty = torch.isinf(s).all(-1, keepdim=True)
    return (torch.softmax(s.masked_fill(empty, 0), -1).masked_fill(empty, 0) @ z).to(q.dtype)


def late_key(q, k, v, is_causal=False, attn_mask=None, scale=None, enable_gqa=False):
    """A planted fault: the causal mask shows one key too many. The scoreboard must show it."""
    if not is_causal:
        return definition(q, k, v, False, attn_mask, scale)
    T, N = q.shape[2], k.shape[2]
    seen = torch.ones(T, N, dtype=torch.bool, device=q.device).tril(1)
    return definition(q, k, v, False, seen if attn_mask is None else seen & attn_mask, scale)


@dataclasses.dataclass
class Contestant:
    make: object           # gives `fn`; called once, where it is asked for: some import much
    plan: str = None       # whose roundings are granted; None: conform's default
    aligned: bool = False  # with T unlike N, the last row is at the last key
    family: str = ""       # of our kernels: asked for by name
    slow: bool = False     # compiles: started first

    @functools.cached_property
    def fn(self):
        """A function for evenkeel.conform, or the words why there is none."""
        return self.make()


def contestants(device):
    """name -> Contestant, in the page's order."""
    gpu = (lambda make: make) if device == "cuda" else lambda make: lambda: "needs a GPU"
    out = {"the definition (FP64)": Contestant(lambda: definition), "planted: one key too many": Contestant(lambda: late_key)}
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        make = functools.partial(sdpa, backend)
        out["PyTorch " + backend] = Contestant(make if backend == "MATH" else gpu(make), slow=backend == "CUDNN_ATTENTION")
    out["PyTorch FlexAttention, compiled"] = Contestant(gpu(lambda: flex(True)), slow=True)
    out["PyTorch FlexAttention, not compiled"] = Contestant(gpu(lambda: flex(False)))
    out["PyTorch varlen_attn"] = Contestant(gpu(varlen))
    out["FlashAttention-2 in Triton"] = Contestant(gpu(lambda: triton_flash2 if triton else "needs Triton"), slow=True)
    out["INT8 as SageAttention"] = Contestant(lambda: sage_int8)
    # Ours are granted what their plans say that they round: `consistent` has its row sum of rounded probabilities.
    for plan in ("flash2", "flash2,stabiliser=wide_output", "flash2,stabiliser=consistent", "flash2,stabiliser=zero_sum",
                 "bf16_all,stabiliser=consistent"):
        out["evenkeel " + plan] = Contestant(functools.partial(ours, plan), plan, aligned=True)
    for plan in ("flash2,stabiliser=wide_output", "flash2,stabiliser=zero_sum"):
        out["evenkeel, Ampere-class kernels, " + plan] = Contestant(gpu(functools.partial(ours, plan)), plan, aligned=True,
                                                                    family="ampere")
    return out
