"""evenkeel.conform: the library makes hard inputs and judges; here is only the call of the function under test."""
import ctypes
import inspect
import sys
import time

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


def _caller(fn):
    """fn as a function of (q, k, v, causal, mask or None), by the names of its parameters: is_causal or causal, else the
    fourth parameter; attn_mask or mask."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # built in: taken to be like torch's own
        parameters = None
    kinds = inspect.Parameter
    named = lambda *names: next((n for n in names if parameters is None or n in parameters
                                 or any(p.kind == kinds.VAR_KEYWORD for p in parameters.values())), None)
    by_name, mask_name = named("is_causal", "causal"), named("attn_mask", "mask")
    places = 4 if parameters is None else sum(
        p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD) for p in parameters.values())
    if any(p.kind == kinds.VAR_POSITIONAL for p in (parameters or {}).values()):
        places = 4
    if not by_name and places < 4:
        raise TypeError("evenkeel.conform: expected a function of q, k, v and is_causal (or causal), found the parameters "
                        f"({', '.join(parameters)})")

    def call(q, k, v, causal, mask):
        options = {}
        if mask is not None:
            if not mask_name:
                raise TypeError("expected a parameter attn_mask (or mask) for families with a mask, found none")
            options[mask_name] = mask
        return fn(q, k, v, **{by_name: causal}, **options) if by_name else fn(q, k, v, causal, **options)

    return call


def _answer(call, problem, device, dtype):
    p = problem
    queries, keys = (1, p.H, p.T, p.D), (1, p.H, p.N, p.D)
    load = lambda address, shape: _numbers(address, shape).to(device=device, dtype=dtype, copy=True)
    q, k, v = (load(a, s).requires_grad_() for a, s in ((p.q, queries), (p.k, keys), (p.v, keys)))
    mask = None
    if p.visible:
        mask = _numbers(p.visible, (1, p.H, p.T, p.N), ctypes.c_uint8, torch.uint8).to(device=device).bool()
    with torch.enable_grad():
        o = call(q, k, v, bool(p.causal), mask)
        if not isinstance(o, torch.Tensor) or o.shape != queries:
            raise TypeError(f"expected a tensor of shape {queries}, found "
                            f"{tuple(o.shape) if isinstance(o, torch.Tensor) else type(o).__name__}")
        gradients = torch.autograd.grad(o, (q, k, v), load(p.grad_output, queries).to(o.dtype))
    for address, shape, found in zip((p.o, p.dq, p.dk, p.dv), (queries, queries, keys, keys), (o, *gradients)):
        _numbers(address, shape).copy_(found.detach())


class ConformReport:
    """results: one dict a family; passes; verdict ("pass", "FAIL", or "ERROR" where the function raised); str() is the
    table."""

    def __init__(self, name, results):
        self.name, self.results = name, results

    @property
    def passes(self):
        return bool(self.results) and all(r["passes"] for r in self.results)

    @property
    def verdict(self):
        return "ERROR" if any("error" in r for r in self.results) else "pass" if self.passes else "FAIL"

    def worst(self):
        """The most biased family (mean over what is allowed, of those with enough rows) and the noisiest (rms over what is
        allowed), or None each."""
        told = [r for r in self.results if "error" not in r]
        biased = max((r for r in told if r["rows"] >= ROWS),
                     key=lambda r: abs(r["residual_mean"]) / r["residual_allowed"], default=None)
        noisy = max(told, key=lambda r: r["residual_rms"] / r["residual_bound"], default=None)
        return biased, noisy

    def summary(self):
        biased, noisy = self.worst()
        return (f"{self.name:<34} {self.verdict:<8} "
                + (f"{biased['family']} ({biased['residual_mean']:+.1e}, allowed {biased['residual_allowed']:.1e})"
                   if biased else "-").ljust(46) + " "
                + (f"{noisy['family']} ({noisy['residual_rms'] / noisy['residual_bound']:.2f})" if noisy else "-"))

    def what_to_fix(self):
        """One line a kind of failure: its first family, and what mends it."""
        lines, seen = [], set()
        for r in self.results:
            if r["passes"] or r["verdict"].split(":")[0] in seen:
                continue
            seen.add(r["verdict"].split(":")[0])
            words = ("fn raised: mend the call first; nothing was judged there" if "error" in r else r["what_to_fix"])
            lines.append(f"{r['family']} ({r['verdict']}): {words}")
        return lines

    def __str__(self):
        lines = [self.name, f"  {'leak (zero sum)':<17} {'rows':>8} {'mean':>10} {'z':>9} {'allowed':>9} {'rms':>9} "
                 f"{'allowed':>9} {'O bias (z)':>19} {'dQ bias (z)':>19}  verdict"]
        for r in self.results:
            if "error" in r:
                lines.append(f"  {r['family']:<17} {r['verdict']}")
                continue
            bias = lambda x: f"{r[x + '_bias']:+.4f} ({r[x + '_z']:+.1f})"
            lines.append(f"  {r['family']:<17} {r['rows']:>8} {r['residual_mean']:>+10.2e} {r['residual_z']:>+9.1f} "
                         f"{r['residual_allowed']:>9.2e} {r['residual_rms']:>9.2e} {r['residual_bound']:>9.2e} "
                         f"{bias('o'):>19} {bias('dq'):>19}  {r['verdict']}")
        return "\n".join([*lines, f"verdict: {self.verdict}", *self.what_to_fix()])


def _judge(call, family, plan, rows, seed, device, dtype):
    """The family's result. What fn raises is an error, not a failure; Ctrl-C and the like go on to the caller."""
    raised = []

    def kernel(_, problem):
        try:
            _answer(call, problem.contents, torch.device(device), dtype)
            return 0
        except BaseException as error:  # must not pass through the library
            raised.append(error)
            return 1

    request = _library.ConformRequest(ctypes.sizeof(_library.ConformRequest), family.encode(), plan.encode(), rows, seed)
    result = _library.ConformResult(struct_size=ctypes.sizeof(_library.ConformResult))
    status = library().evenkeel_conform(ctypes.byref(request), _library.ConformKernel(kernel), None,
                                        ctypes.byref(result))
    if raised:
        if not isinstance(raised[0], Exception):
            raise raised[0]
        words = f"{type(raised[0]).__name__}: {(str(raised[0]).splitlines() or [''])[0][:100]}"
        return {"family": family, "passes": False, "verdict": f"ERROR: {words}", "error": words}
    check(status, "evenkeel.conform")
    told = {field: getattr(result, field) for field, _ in result._fields_[1:]}
    return {"family": family, **told, "passes": bool(result.passes), "verdict": result.verdict.decode(),
            "what_to_fix": result.what_to_fix.decode()}


def conform(fn, device="cpu", dtype=torch.bfloat16, rows=ROWS, families=None, plan=None, seed=1, masks=False, name=None,
            progress=None):
    """Judges fn(q, k, v, is_causal=..., [attn_mask=...]) by the sign of its errors on hard inputs, forward and backward:
    tensors (1, H, T, D) of `dtype`, scale 1 / sqrt(D). `causal` and `mask` are known as names too; without either, the
    fourth parameter is is_causal. Under 100,000 rows nothing is judged for bias.

    families: names of conform_families(), all by default; those with a mask only where masks is set.
    plan: whose roundings are granted; by default FlashAttention-2's for 16-bit tensors, none for FP32.
    progress: a line a family on standard error; by default where that is a terminal.
    A family on which fn raises has the verdict ERROR, with the exception's words.
    """
    if not callable(fn):
        raise TypeError(f"evenkeel.conform: expected a function of q, k and v, found {type(fn).__name__}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"evenkeel.conform: expected dtype bfloat16, float16 or float32, found {dtype}")
    known = conform_families()
    if families is None:
        families = [family for family, (_, masked) in known.items() if masks or not masked]
    families = list(families)
    if not families:
        raise ValueError("evenkeel.conform: expected at least one family to judge, found none")
    for family in families:
        if family not in known:
            raise ValueError(f"evenkeel.conform: expected families among {', '.join(known)}, found {family!r}")
    plan = plan or ("fp32" if dtype == torch.float32 else "flash2")
    call = _caller(fn)
    progress = sys.stderr.isatty() if progress is None else progress
    results, start = [], time.monotonic()
    for n, family in enumerate(families):
        results.append(_judge(call, family, plan, rows, seed, device, dtype))
        if progress:
            spent = time.monotonic() - start
            print(f"conform: {n + 1} of {len(families)}, {family}: {results[-1]['verdict']} "
                  f"({spent:.0f} s, about {spent / (n + 1) * (len(families) - n - 1):.0f} s left)", file=sys.stderr,
                  flush=True)
    return ConformReport(name or getattr(fn, "__name__", type(fn).__name__), results)
