"""evenkeel.conform: the library makes hard inputs and judges; here is only the call of the function under test. Forms, and
everything that is judged over them: _forms.py."""
import ctypes
import inspect
import json
import sys
import time

import torch

from . import _forms, _library
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
        if not isinstance(raised[0], (Exception, SystemExit)):
            raise raised[0]
        words = f"{type(raised[0]).__name__}: {(str(raised[0]).splitlines() or [''])[0][:100]}"
        return {"family": family, "passes": False, "verdict": f"ERROR: {words}", "error": words}
    check(status, "evenkeel.conform")
    told = {field: getattr(result, field) for field, _ in result._fields_[1:]}
    return {"family": family, **told, "passes": bool(result.passes), "verdict": result.verdict.decode(),
            "what_to_fix": result.what_to_fix.decode()}


class KernelReport:
    """A whole judgement. passes; verdict; results: one dict a family; forms: what was judged over forms, as a dict;
    risk: what the leak means for training, in words, or None; raised: the first exception's words, or None; refused: the
    words in which fn refused forms; str() is the text. save() writes files."""

    def __init__(self, judged, how):
        self._judged, self._how = judged, how
        self.json = judged.json
        self.name, self.passes, self.verdict = judged.json["kernel"], judged.passes, judged.json["verdict"]
        self.results, self.forms = judged.json["families"], judged.json["forms"]
        self.risk = judged.json["risk"]["words"] if "risk" in judged.json else None
        self.raised, self.refused = judged.raised, judged.refused
        self.json.update(raised=self.raised, refused=self.refused)

    def __str__(self):
        lines = [self._judged.text.rstrip(), *[f"  refused: {words}" for words in self.refused]]
        if "smallest" in self.forms:
            lines.append("  again:\n    " + "\n    ".join(self._how))
        return "\n".join(lines)

    def save(self, json_file=None, junit=None, badge=None):
        """Each where a file is named: the judgement as JSON, as JUnit's XML, as an SVG."""
        for file, text in ((json_file, json.dumps(self.json, indent=1)), (junit, self._judged.junit),
                           (badge, self._judged.badge)):
            if file:
                with open(file, "w", encoding="utf-8") as out:
                    out.write(text)


class _Bar:
    """One line on standard error: what is judged, a bar, the time that is left."""

    def __init__(self, shown):
        self.shown, self.start, self.what = shown, time.monotonic(), None

    def __call__(self, what, done, of):
        if what != self.what:
            self.what, self.start = what, time.monotonic()
        if not self.shown or not of:
            return
        spent = time.monotonic() - self.start
        filled = "#" * (30 * done // of)
        print(f"\rconform: {what} [{filled:<30}] {done} of {of}, about {spent / done * (of - done):.0f} s left ",
              end="\n" if done == of else "", file=sys.stderr, flush=True)


def _offers(fn):
    """_forms.offers_of, and how fn takes is_causal where it has no name for it: by place or in **options."""
    offers = _forms.offers_of(fn)
    call = _caller(fn)  # says what is missing
    if "causal" in offers:
        return fn, offers
    return (lambda q, k, v, is_causal=False, **options: call(q, k, v, is_causal, options.pop("attn_mask", None))
            ), {**{k: v for k, v in offers.items() if k == "mask"}, "causal": "is_causal",
                **({"mask": "attn_mask"} if "mask" in offers else {})}


def _whole(fn, device, dtype, rows, plan, seed, name, progress, quick, dtypes, deterministic, aligned, case, failing, shrink):
    types = {torch.bfloat16: _forms.BF16, torch.float16: _forms.FP16, torch.float32: _forms.FP32}
    taken = {types[d] for d in (dtypes or [dtype])}
    function, offers = _offers(fn)
    file = failing or case or "failing.safetensors"
    module, words = getattr(fn, "__module__", "my_module"), getattr(fn, "__qualname__", "my_function")
    how = ["import evenkeel, " + module,
           f"evenkeel.conform({module}.{words}, device={str(device)!r}, failing={str(file)!r})  # writes the file",
           f"print(evenkeel.conform({module}.{words}, device={str(device)!r}, case={str(file)!r}))"]
    judged = _forms.judge((function, offers), device, plan, taken, quick, seed, deterministic, aligned, name,
                          _Bar(progress), 0 if case else rows, types[dtype], case, failing, shrink)
    return KernelReport(judged, how)


def conform(fn, device="cpu", dtype=torch.bfloat16, rows=ROWS, families=None, plan=None, seed=1, masks=False, name=None,
            progress=None, quick=False, dtypes=None, deterministic=True, aligned=False, case=None, failing=None, shrink=True):
    """Judges fn(q, k, v, is_causal=..., ...), forward and backward: tensors (B, H, T, D) of `dtype`. `causal` is known as a
    name too; without either, the fourth parameter is is_causal. Under 100,000 rows nothing is judged for bias.

    Without `families` everything is judged: families of hard inputs, and forms that cross what fn offers by its parameters:
    attn_mask (mask), scale (softmax_scale), softcap, sinks (s_aux), window_size (a pair), enable_gqa, return_lse (fn returns
    O and L), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k (tensors (rows, H, D)). What fn does not offer, or
    refuses in words ("not supported", "must have", NotImplementedError), is listed as not judged. The answer is a
    KernelReport.
      quick: fewer forms, four families. dtypes: of the forms, [dtype] by default. deterministic: a second call must have the
      same bits. aligned: with T unlike N the last row is aligned with the last key, as FlashAttention does (torch: the
      first; there T is N). failing: a file for the smallest failing form. case: such a file, or a capture; it is judged
      alone. shrink: make the first failing form small, some fifty calls of other shapes.

    families: names of conform_families(), whose answer is a ConformReport; those with a mask only where masks is set.
    plan: whose roundings are granted; by default FlashAttention-2's for 16-bit tensors, none for FP32.
    progress: on standard error; by default where that is a terminal.
    A family on which fn raises has the verdict ERROR, with the exception's words.
    """
    if not callable(fn):
        raise TypeError(f"evenkeel.conform: expected a function of q, k and v, found {type(fn).__name__}")
    for kind in [dtype, *(dtypes or [])]:
        if kind not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"evenkeel.conform: expected dtype bfloat16, float16 or float32, found {kind}")
    plan = plan or ("fp32" if dtype == torch.float32 else "flash2")
    name = name or getattr(fn, "__name__", type(fn).__name__)
    progress = sys.stderr.isatty() if progress is None else progress
    if families is None:
        return _whole(fn, device, dtype, rows, plan, seed, name, progress, quick, dtypes, deterministic, aligned, case,
                      failing, shrink)
    known = conform_families()
    families = list(families)
    if not families:
        raise ValueError("evenkeel.conform: expected at least one family to judge, found none")
    for family in families:
        if family not in known:
            raise ValueError(f"evenkeel.conform: expected families among {', '.join(known)}, found {family!r}")
    call = _caller(fn)
    results, start = [], time.monotonic()
    for n, family in enumerate(families):
        results.append(_judge(call, family, plan, rows, seed, device, dtype))
        if progress:
            spent = time.monotonic() - start
            print(f"conform: {n + 1} of {len(families)}, {family}: {results[-1]['verdict']} "
                  f"({spent:.0f} s, about {spent / (n + 1) * (len(families) - n - 1):.0f} s left)", file=sys.stderr,
                  flush=True)
    return ConformReport(name, results)
