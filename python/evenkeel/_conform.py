"""evenkeel.conform: the library makes hard inputs and judges; here is only the call of the function under test."""
import ctypes

import torch

from . import _library
from ._library import check, library

ROWS = 100_000  # from here on, bias is judged


def conform_families():
    """name -> (what it is, whether it comes with a mask)."""
    families, index = {}, 0
    while True:
        words, masked = ctypes.c_char_p(), ctypes.c_int32()
        name = library().evenkeel_conform_family(index, ctypes.byref(words), ctypes.byref(masked))
        if name is None:
            return families
        families[name.decode()] = (words.value.decode(), bool(masked.value))
        index += 1


def _numbers(address, shape, kind=ctypes.c_float, dtype=torch.float32):
    """A tensor on the library's memory."""
    count = 1
    for n in shape:
        count *= n
    return torch.frombuffer((kind * count).from_address(address), dtype=dtype).reshape(shape)


def _answer(fn, problem, device, dtype):
    p = problem
    queries, keys = (1, p.H, p.T, p.D), (1, p.H, p.N, p.D)
    load = lambda address, shape: _numbers(address, shape).to(device=device, dtype=dtype, copy=True)
    q, k, v = (load(a, s).requires_grad_() for a, s in ((p.q, queries), (p.k, keys), (p.v, keys)))
    options = {"is_causal": bool(p.causal)}
    if p.visible:
        mask = _numbers(p.visible, (1, p.H, p.T, p.N), ctypes.c_uint8, torch.uint8)
        options["attn_mask"] = mask.to(device=device).bool()
    with torch.enable_grad():
        o = fn(q, k, v, **options)
        if not isinstance(o, torch.Tensor) or o.shape != queries:
            raise TypeError(f"expected a tensor of shape {queries}, found "
                            f"{tuple(o.shape) if isinstance(o, torch.Tensor) else type(o).__name__}")
        gradients = torch.autograd.grad(o, (q, k, v), load(p.grad_output, queries).to(o.dtype))
    for address, shape, found in zip((p.o, p.dq, p.dk, p.dv), (queries, queries, keys, keys), (o, *gradients)):
        _numbers(address, shape).copy_(found.detach())


class ConformReport:
    """results: one dict a family; passes; str() is the table."""

    def __init__(self, name, results):
        self.name, self.results = name, results

    @property
    def passes(self):
        return all(r["passes"] for r in self.results)

    def worst(self):
        """The most biased family (by |z|, of those with enough rows) and the noisiest (rms / bound), or None each."""
        told = [r for r in self.results if "residual_z" in r]
        biased = max((r for r in told if r["rows"] >= ROWS), key=lambda r: abs(r["residual_z"]), default=None)
        noisy = max(told, key=lambda r: r["residual_rms"] / r["residual_bound"], default=None)
        return biased, noisy

    def summary(self):
        biased, noisy = self.worst()
        return (f"{self.name:<34} {'pass' if self.passes else 'FAIL':<8} "
                + (f"{biased['family']} ({biased['residual_z']:+.1f})" if biased else "-").ljust(30) + " "
                + (f"{noisy['family']} ({noisy['residual_rms'] / noisy['residual_bound']:.2f})" if noisy else "-"))

    def __str__(self):
        lines = [self.name, f"  {'zero-sum residual':<17}{'rows':>8} {'mean':>11} {'z':>9} {'rms':>10} {'bound':>10}  "
                 f"{'O bias (z)':>16} {'dQ bias (z)':>16}  verdict"]
        for r in self.results:
            if "residual_z" not in r:
                lines.append(f"  {r['family']:<17}{'':>87}  {r['verdict']}")
                continue
            bias = lambda x: f"{r[x + '_bias']:+.4f} ({r[x + '_z']:+.1f})"
            lines.append(f"  {r['family']:<17}{r['rows']:>8} {r['residual_mean']:>+11.2e} {r['residual_z']:>+9.1f} "
                         f"{r['residual_rms']:>10.2e} {r['residual_bound']:>10.2e}  {bias('o'):>16} {bias('dq'):>16}  "
                         f"{r['verdict']}")
        lines.append(f"verdict: {'pass' if self.passes else 'FAIL'}")
        return "\n".join(lines)


def conform(fn, device="cpu", dtype=torch.bfloat16, rows=ROWS, families=None, plan=None, seed=1, masks=False, name=None):
    """Judges fn(q, k, v, is_causal=..., [attn_mask=...]) by the sign of its errors on hard inputs, forward and backward:
    tensors (1, H, T, D) of `dtype`, scale 1 / sqrt(D). Under 100,000 rows nothing is judged for bias.

    families: names of conform_families(), all by default; those with a mask only where masks is set.
    plan: whose rounding of dS is granted as noise; by default FlashAttention-2's for 16-bit tensors, none for FP32.
    A family on which fn raises is a failure with its words.
    """
    if not callable(fn):
        raise TypeError(f"evenkeel.conform: expected a function of q, k and v, found {type(fn).__name__}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"evenkeel.conform: expected dtype bfloat16, float16 or float32, found {dtype}")
    known = conform_families()
    if families is None:
        families = [family for family, (_, masked) in known.items() if masks or not masked]
    for family in families:
        if family not in known:
            raise ValueError(f"evenkeel.conform: expected families among {', '.join(known)}, found {family!r}")
    plan = plan or ("fp32" if dtype == torch.float32 else "flash2")
    results = []
    for family in families:
        raised = []

        def kernel(_, problem):
            try:
                _answer(fn, problem.contents, torch.device(device), dtype)
                return 0
            except Exception as error:  # must not pass through the library
                raised.append(error)
                return 1

        request = _library.ConformRequest(ctypes.sizeof(_library.ConformRequest), family.encode(), plan.encode(), rows,
                                          seed)
        result = _library.ConformResult(struct_size=ctypes.sizeof(_library.ConformResult))
        status = library().evenkeel_conform(ctypes.byref(request), _library.ConformKernel(kernel), None,
                                            ctypes.byref(result))
        if raised:
            words = (str(raised[0]).splitlines() or [""])[0][:100]
            results.append({"family": family, "passes": False, "verdict": f"raised {type(raised[0]).__name__}: {words}"})
            continue
        check(status, "evenkeel.conform")
        told = {field: getattr(result, field) for field, _ in result._fields_[1:]}
        results.append({"family": family, **told, "passes": bool(result.passes), "verdict": result.verdict.decode()})
    return ConformReport(name or getattr(fn, "__name__", type(fn).__name__), results)
