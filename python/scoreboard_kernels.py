"""Kernels for scripts/scoreboard that are nobody's product: a plain FlashAttention-2 in Triton, and 8-bit attention as
SageAttention's paper (arXiv 2410.02367) describes it, with the usual backward pass."""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # then there is no Triton kernel to judge
    triton = None

if triton is not None:

    @triton.jit
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

    @triton.jit
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

    @triton.jit
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
