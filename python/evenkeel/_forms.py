"""The judge over forms: attention problems that cross every feature a kernel may offer. The library makes the inputs and
judges; here a form becomes a call of the function under test."""
import ctypes
import inspect
import json
import re

import torch

from ._library import check, library

BF16, FP32, FP16 = 0, 1, 3  # of evenkeel.h
NOT_OFFERED = 100
_DTYPES = {BF16: torch.bfloat16, FP32: torch.float32, FP16: torch.float16}
_GUARD = 64  # numbers before and behind each input


class Form(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint64), *[(size, ctypes.c_int64) for size in ("B", "H", "G", "T", "N", "D", "Dv")],
        ("type", ctypes.c_int32), ("causal", ctypes.c_int32), ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64), ("scale", ctypes.c_float), ("softcap", ctypes.c_float),
        *[(name, ctypes.c_void_p)
          for name in ("visible", "query_starts", "key_starts", "sinks", "grad_lse", "q", "k", "v", "grad_output", "o",
                       "dq", "dk", "dv", "lse", "grad_sinks")],
    ]


FormKernel = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(Form))
ProgressCall = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)


class Request(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint64), ("name", ctypes.c_char_p), ("plan", ctypes.c_char_p),
                ("rows", ctypes.c_int64), ("seed", ctypes.c_uint64),
                *[(flag, ctypes.c_int32) for flag in ("quick", "type", "not_deterministic", "not_aligned")],
                ("form", ctypes.c_char_p), ("progress", ProgressCall), ("not_shrunk", ctypes.c_int32)]


class Result(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint64), ("passes", ctypes.c_int32),
                *[(text, ctypes.c_char_p) for text in ("json", "text", "junit", "badge")]]


class NotOffered(Exception):
    """The function under test has no way to be asked for this form, or refuses it in words."""


# Words by which kernels refuse what they do not take. A refused form counts as not judged, never as passed.
_REFUSAL = re.compile(r"not[ _]support|\bno [a-z ]*\bsupport|unsupported|n't support|only supports?\b|not (yet )?implemented|no available kernel"
                      r"|\bmust (be|have|equal|match)\b", re.IGNORECASE)


def _words(error):
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def is_refusal(error):
    """Whether an exception of the function under test says that it does not take such a form."""
    return isinstance(error, NotImplementedError) or (isinstance(error, (RuntimeError, TypeError, ValueError))
                                                      and _REFUSAL.search(str(error)) is not None)


# What a function is asked for, by the names that the field uses. The first that it has is taken.
NAMES = {
    "causal": ("is_causal", "causal"),
    "mask": ("attn_mask", "mask"),
    "scale": ("scale", "softmax_scale"),
    "softcap": ("softcap",),
    "sinks": ("sinks", "s_aux", "learnable_sink"),
    "window": ("window_size", "window"),
    "lse": ("return_lse", "return_attn_probs"),
    "packed": ("cu_seqlens_q",),
    "grouped": ("enable_gqa",),
}


def offers_of(fn):
    """feature -> the parameter's name, for the features that fn's signature shows. A function without a signature is taken
    to be like torch's own scaled_dot_product_attention."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        words = getattr(fn, "__doc__", "") or ""
        return {feature: name for feature, name in (("causal", "is_causal"), ("mask", "attn_mask"), ("scale", "scale"),
                                                    ("grouped", "enable_gqa"))
                if feature in ("causal", "mask") or name in words}
    return {feature: name for feature, names in NAMES.items() for name in names if name in parameters}


def _numbers(address, shape, kind=ctypes.c_float, dtype=torch.float32):
    """A tensor on the library's memory."""
    count = 1
    for n in shape:
        count *= n
    return torch.frombuffer((kind * count).from_address(address), dtype=dtype).reshape(shape)


class _Call:
    """One form as a call of fn."""

    def __init__(self, fn, offers, device, form):
        self.fn, self.offers, self.device, self.f = fn, offers, device, form
        self.dtype = _DTYPES[form.type]
        self.packed = bool(form.query_starts)
        self.guards = []

    def name(self, feature):
        if feature not in self.offers:
            raise NotOffered(feature)
        return self.offers[feature]

    def load(self, address, heads, rows, width):
        """(B, heads, rows, width), or (rows, heads, width) packed; with guards around its memory."""
        f = self.f
        shape = (heads, rows, width) if self.packed else (f.B, heads, rows, width)
        values = _numbers(address, shape).to(self.dtype)
        values = values.transpose(0, 1).contiguous() if self.packed else values
        memory = torch.full((values.numel() + 2 * _GUARD,), 7.0, dtype=self.dtype, device=self.device)
        memory[_GUARD:-_GUARD] = values.reshape(-1).to(self.device)
        self.guards.append((memory, memory.clone()))
        return memory[_GUARD:-_GUARD].view(values.shape)

    def options(self):
        f, options = self.f, {}
        if f.causal or "causal" in self.offers:
            options[self.name("causal")] = bool(f.causal)
        if f.visible:
            options[self.name("mask")] = _numbers(f.visible, (f.B, f.H, f.T, f.N), ctypes.c_uint8,
                                                  torch.uint8).to(self.device).bool()
        usual = f.D ** -0.5
        if "scale" in self.offers:
            options[self.name("scale")] = f.scale
        elif abs(f.scale - usual) > 1e-6 * usual:
            raise NotOffered("scale")
        if f.softcap:
            options[self.name("softcap")] = f.softcap
        if f.window_left >= 0 or f.window_right >= 0:
            options[self.name("window")] = (f.window_left, f.window_right)
        if f.H != f.G:
            options[self.name("grouped")] = True
        if self.packed:
            self.name("packed")
            for axis, starts, longest in (("q", f.query_starts, f.T), ("k", f.key_starts, f.N)):
                options[f"cu_seqlens_{axis}"] = _numbers(starts, (f.B + 1,), ctypes.c_int32, torch.int32).to(
                    self.device, copy=True)
                options[f"max_seqlen_{axis}"] = f.T if axis == "q" else f.N
        return options

    def rows(self):
        """Rows and keys on the tensors' axes."""
        f = self.f
        if not self.packed:
            return f.T, f.N
        last = lambda starts: int(_numbers(starts, (f.B + 1,), ctypes.c_int32, torch.int32)[-1])
        return last(f.query_starts), last(f.key_starts)

    def run(self):
        f = self.f
        rows, keys = self.rows()
        options = self.options()
        sinks = None
        if f.sinks:
            sinks = _numbers(f.sinks, (f.H,)).to(self.device, copy=True).requires_grad_()
            options[self.name("sinks")] = sinks
        if f.grad_lse:
            options[self.name("lse")] = True
        q, k, v = (self.load(a, h, r, d).requires_grad_()
                   for a, h, r, d in ((f.q, f.H, rows, f.D), (f.k, f.G, keys, f.D), (f.v, f.G, keys, f.Dv)))
        expected = (rows, f.H, f.Dv) if self.packed else (f.B, f.H, f.T, f.Dv)
        with torch.enable_grad():
            answer = self.asked(lambda: self.fn(q, k, v, **options))
            o, lse = (answer[0], answer[1]) if isinstance(answer, tuple) else (answer, None)
            if not isinstance(o, torch.Tensor) or tuple(o.shape) != expected:
                raise TypeError(f"expected a tensor of shape {expected}, found "
                                f"{tuple(o.shape) if isinstance(o, torch.Tensor) else type(o).__name__}")
            outputs, gradients = [o], [self.load(f.grad_output, f.H, rows, f.Dv).to(o.dtype)]
            if f.grad_lse:
                outputs.append(lse)
                gradients.append(_numbers(f.grad_lse, (f.H, rows) if self.packed else (f.B, f.H, rows)).to(
                    self.device, dtype=lse.dtype))
            inputs = [q, k, v] + ([sinks] if sinks is not None else [])
            found = self.asked(lambda: torch.autograd.grad(outputs, inputs, gradients, allow_unused=True))
        self.write(f.o, o, f.H, rows, f.Dv)
        for address, x, heads, r, width in ((f.dq, found[0], f.H, rows, f.D), (f.dk, found[1], f.G, keys, f.D),
                                            (f.dv, found[2], f.G, keys, f.Dv)):
            if x is not None:
                self.write(address, x, heads, r, width)
        if f.grad_lse:
            _numbers(f.lse, (f.H, rows) if self.packed else (f.B, f.H, rows)).copy_(lse.detach())
        if sinks is not None and found[3] is not None:
            _numbers(f.grad_sinks, (f.H,)).copy_(found[3])
        for memory, before in self.guards:
            if not torch.equal(torch.nan_to_num(memory), torch.nan_to_num(before)):
                raise RuntimeError("the function wrote into its inputs, or around them")

    @staticmethod
    def asked(call):
        """What the function under test answers; NotOffered where it refuses."""
        try:
            return call()
        except Exception as error:
            if is_refusal(error):
                raise NotOffered(_words(error) if str(error) else "") from None
            raise

    def write(self, address, x, heads, rows, width):
        x = x.detach()
        _numbers(address, (heads, rows, width) if self.packed else (self.f.B, heads, rows, width)).copy_(
            x.transpose(0, 1) if self.packed else x)


class FormsJudgement:
    """passes; json: the judgement as a dict; str() is the text; junit, badge: texts of files."""

    def __init__(self, result):
        self.passes = bool(result.passes)
        self.json = json.loads(result.json.decode())
        self.text, self.junit, self.badge = result.text.decode(), result.junit.decode(), result.badge.decode()

    def __str__(self):
        return self.text


def judge(fn, device, plan, types, quick, seed, deterministic, aligned, name, progress, rows=0, family_type=BF16,
          case=None, failing=None, shrink=True):
    """fn over forms, and over families where rows is not 0. failing: where the smallest failing form goes."""
    offers = dict(offers_of(fn)) if not isinstance(fn, tuple) else fn[1]
    function = fn if not isinstance(fn, tuple) else fn[0]
    raised, refused, interrupted = [], [], []

    def kernel(_, form):
        if interrupted:
            return 1
        try:
            if form.contents.type not in types:
                return NOT_OFFERED
            _Call(function, offers, torch.device(device), form.contents).run()
            return 0
        except NotOffered as refusal:
            if ":" in str(refusal) and str(refusal) not in refused:  # the function's own words
                refused.append(str(refusal))
            return NOT_OFFERED
        except (Exception, SystemExit) as error:  # a finding: a function that ends the process is none that passes
            raised.append(_words(error))
            library().evenkeel_kernel_error(raised[-1].encode())
            return 1
        except BaseException as error:  # Ctrl-C must not pass through the library
            interrupted.append(error)
            return 1

    def advance(_, what, done, of):
        if progress:
            progress(what.decode(), done, of)

    calls = FormKernel(kernel), ProgressCall(advance)  # kept while the library calls them
    request = Request(ctypes.sizeof(Request), name.encode(), plan.encode(), rows, seed, quick, family_type,
                      not deterministic, not aligned, str(case).encode() if case else None, calls[1], not shrink)
    result = Result(struct_size=ctypes.sizeof(Result))
    status = library().evenkeel_judge(ctypes.byref(request), calls[0], None, ctypes.byref(result))
    if interrupted:
        raise interrupted[0]
    check(status, "evenkeel.conform")
    found = FormsJudgement(result)
    found.raised, found.refused = raised[0] if raised else None, refused
    if failing and "smallest" in found.json["forms"]:
        check(library().evenkeel_judge_write_form(str(failing).encode()), "evenkeel.conform")
    return found
