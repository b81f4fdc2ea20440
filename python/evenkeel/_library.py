"""libevenkeel.so by ctypes: the structs of include/evenkeel.h, its calls, and its status codes as exceptions."""
import ctypes
import functools
import os
import pathlib

ABI_VERSION = 1
CPU, CUDA = 0, 1
BF16, FP32, FP64, FP16 = 0, 1, 2, 3
BAD_ARGUMENT = 1


class EvenkeelError(RuntimeError):
    """The library, the GPU or the data is not as it must be. A bad argument is a ValueError or a TypeError."""


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4)]


class Attention(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint64), ("device", ctypes.c_int32), ("type", ctypes.c_int32),
        *[(size, ctypes.c_int64) for size in "BHGTND"],
        ("plan", ctypes.c_char_p), ("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("causal", ctypes.c_int32),
        ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("query_lengths", "key_lengths", "query_offsets", "key_offsets")],
        ("query_rows", ctypes.c_int64), ("key_rows", ctypes.c_int64),
        ("visible", Tensor), ("tile_keys", ctypes.c_int64), ("step", ctypes.c_uint32), ("layer", ctypes.c_uint32),
        ("device_step", ctypes.c_void_p), ("with_facts", ctypes.c_int32), ("aligned", ctypes.c_int32),
        ("slopes", ctypes.c_void_p), ("sinks", ctypes.c_void_p), ("with_grad_lse", ctypes.c_int32), ("reserved", ctypes.c_int32),
        ("Dv", ctypes.c_int64),
    ]


class Forward(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint64),
        *[(name, Tensor) for name in ("q", "k", "v", "o")],
        *[(name, ctypes.c_void_p) for name in ("lse", "saved", "workspace", "ties")],
    ]


class Backward(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint64),
        *[(name, Tensor) for name in ("q", "k", "v", "grad_output", "o")],
        *[(name, ctypes.c_void_p) for name in ("lse", "saved", "workspace")],
        *[(name, Tensor) for name in ("dq", "dk", "dv")],
        *[(name, ctypes.c_void_p) for name in ("delta", "residual", "residual_floor", "delta_error", "grad_lse", "dsinks")],
    ]


class Sizes(ctypes.Structure):
    _fields_ = [("saved", ctypes.c_uint64), ("workspace", ctypes.c_uint64)]


class KernelFamily(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint64), ("name", ctypes.c_char_p), ("device", ctypes.c_int32),
                ("types", ctypes.c_uint32), ("largest_head", ctypes.c_int64), ("head_step", ctypes.c_int64)]


class ConformProblem(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint64), *[(size, ctypes.c_int64) for size in "HTND"], ("causal", ctypes.c_int32),
        *[(name, ctypes.c_void_p)
          for name in ("visible", "q", "grad_output", "k", "v", "o", "dq", "dk", "dv")],
    ]


ConformKernel = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ConformProblem))


class ConformRequest(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint64), ("family", ctypes.c_char_p), ("plan", ctypes.c_char_p),
                ("rows", ctypes.c_int64), ("seed", ctypes.c_uint64)]


class ConformResult(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint64), ("rows", ctypes.c_int64), ("nonfinite", ctypes.c_int64),
        ("passes", ctypes.c_int32), ("verdict", ctypes.c_char_p),
        *[(name, ctypes.c_double)
          for name in ("residual_mean", "residual_z", "residual_rms", "residual_bound", "o_bias", "o_z", "dq_bias",
                       "dq_z", "dk_bias", "dk_z", "dv_bias", "dv_z")],
        ("unwritten", ctypes.c_int64),
        *[(name, ctypes.c_double) for name in ("residual_allowed", "o_over", "dq_over", "dk_over", "dv_over")],
        ("what_to_fix", ctypes.c_char_p),
    ]


class Rounding(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint64), ("format", ctypes.c_char_p), *[(size, ctypes.c_int64) for size in "BHTD"],
                ("seed", ctypes.c_uint64)]


class GuardEvent(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint64), ("kind", ctypes.c_int32), ("last_good", ctypes.c_int64),
                ("to", ctypes.c_int64), ("clauses", ctypes.c_char_p), ("words", ctypes.c_char_p)]


def library_path():
    """EVENKEEL_LIBRARY, or the library beside this package (pip install .), or that of the source tree's build."""
    asked = os.environ.get("EVENKEEL_LIBRARY")
    if asked:
        return pathlib.Path(asked)
    here = pathlib.Path(__file__).resolve().parent
    places = [here / "libevenkeel.so", here.parents[1] / "build" / "libevenkeel.so"]
    for place in places:
        if place.exists():
            return place
    raise EvenkeelError("evenkeel: expected libevenkeel.so at one of " + ", ".join(map(str, places)) +
                        ", found none; `pip install .` builds it, EVENKEEL_LIBRARY names another one")


@functools.lru_cache(maxsize=None)
def library():
    path = library_path()
    try:
        c = ctypes.CDLL(str(path))
    except OSError as error:
        raise EvenkeelError(f"evenkeel: {path} cannot be loaded: {error}") from None
    c.evenkeel_abi_version.restype = ctypes.c_int32
    found = c.evenkeel_abi_version()
    if found != ABI_VERSION:
        raise EvenkeelError(f"evenkeel: expected a library of ABI version {ABI_VERSION}, found {found} in {path}")
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
    for name, result, arguments in (
            ("version", text, []),
            ("last_error", text, []),
            ("attention_defaults", None, [pointer, ctypes.c_size_t]),
            ("plan_draws", number, [text, ctypes.POINTER(number)]),
            ("plan_of_head", number, [text, number, number, ctypes.POINTER(text)]),
            ("attention_sizes", number, [pointer, pointer]),
            ("attention_kernel", number, [pointer, ctypes.POINTER(text), ctypes.POINTER(text)]),
            ("attention_family", number, [number, pointer]),
            ("attention_forward", number, [pointer] * 3),
            ("attention_backward", number, [pointer] * 3),
            ("conform_family", text, [number, ctypes.POINTER(text), ctypes.POINTER(number)]),
            ("conform", number, [pointer, ConformKernel, pointer, pointer]),
            ("judge", number, [pointer] * 4),
            ("judge_write_form", number, [text]),
            ("kernel_error", None, [text]),
            ("round", number, [pointer] * 3),
            ("probe_field", text, [number]),
            ("spectral_norm", number, [pointer, ctypes.c_int64, ctypes.c_int64, pointer]),
            ("guard_new", pointer, [text, ctypes.c_int64, ctypes.c_int64, number]),
            ("guard_free", None, [pointer]),
            ("guard_take", number, [pointer, ctypes.c_int64, *[pointer] * 4, ctypes.c_size_t, number, pointer]),
            ("probe", number, [pointer, ctypes.c_size_t, pointer, ctypes.c_size_t])):
        call = getattr(c, "evenkeel_" + name, None)
        if call is None:
            raise EvenkeelError(f"evenkeel: expected a library as new as this package, found {path} without evenkeel_{name}; build it "
                                "again (`./evenkeel info` in the source folder, or `pip install .`)")
        call.restype, call.argtypes = result, arguments
    return c


def kernel_families():
    """The families of kernels with their limits, as the library has them: a list of KernelFamily."""
    families = []
    while True:
        family = KernelFamily(struct_size=ctypes.sizeof(KernelFamily))
        if library().evenkeel_attention_family(len(families), ctypes.byref(family)) != 0:
            return families
        families.append(family)


def largest_heads(of=max):
    """The largest head size that some family takes (of=min: every family), by device type. A device that takes any is not in
    it; without a library nothing is: the first call says that it is missing."""
    try:
        families = kernel_families()
    except EvenkeelError:
        return {}
    sizes = {name: [f.largest_head for f in families if f.device == device] for name, device in (("cpu", CPU), ("cuda", CUDA))}
    return {name: of(found) for name, found in sizes.items() if 0 not in found}


def library_version():
    return library().evenkeel_version().decode()


def check(status, function):
    """Raises where a call of the library failed, with the function that the user called and the library's words."""
    if status != 0:
        words = f"{function}: {library().evenkeel_last_error().decode()}"
        raise ValueError(words) if status == BAD_ARGUMENT else EvenkeelError(words)
