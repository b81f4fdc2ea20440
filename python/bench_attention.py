"""Times attention on a GPU: Evenkeel through its C interface, next to PyTorch's own backends, on the same tensors.

usage: bench_attention.py REQUEST.json > RESULT.json

`evenkeel bench attention --gpu` writes the request and reads the result; it decides what is measured and judges. Here
is only the stopwatch. Exit code 77: there is no PyTorch that sees a GPU.

A request has `library` (libevenkeel.so), `rounds`, and `groups`. A group has a `shape` (B, H, T, D), a `value_size` (D_v), a
`layout` (bthd or bhtd), a share of `tied` rows, and `contestants`. These are {"name": "fa2"}, {"name": "cudnn"},
{"name": "efficient"}, or {"name": ..., "plan": ..., "facts": ...}. Each pass of each contestant is captured in a CUDA graph of several calls over
several sets of tensors (together larger than the cache), and the graphs take turns, in another order every round.
"""

import ctypes
import json
import math
import random
import sys

try:
    import torch

    torch.zeros(1, device="cuda")
except Exception as error:  # whatever keeps PyTorch from a GPU
    print(f"no PyTorch with a GPU: {error}", file=sys.stderr)
    sys.exit(77)

from evenkeel._library import ABI_VERSION, Attention, Backward, Forward, Sizes, Tensor

aten = torch.ops.aten

SETS_BYTES = 200e6  # q, k and v of all sets, against a cache of some tens of MB
GRAPH_SECONDS = 6e-3  # one graph: long against the gap between two
WARM_SECONDS = 0.3  # of one group, so that clocks settle
WRONG = 0.05  # ||ours - rival|| / ||rival|| beyond this is another function, not another rounding

# --- the C interface


def view(tensor):
    return Tensor(tensor.data_ptr(), (ctypes.c_int64 * 4)(*tensor.stride()))


class Library:
    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        self.c.evenkeel_last_error.restype = ctypes.c_char_p
        self.c.evenkeel_attention_defaults.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.c.evenkeel_attention_defaults.restype = None
        for call in ("forward", "backward"):
            getattr(self.c, f"evenkeel_attention_{call}").argtypes = [ctypes.c_void_p] * 3
        found = self.c.evenkeel_abi_version()
        if found != ABI_VERSION:
            raise RuntimeError(f"{path}: expected ABI version {ABI_VERSION}, found {found}")

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.c.evenkeel_last_error().decode())


# --- contestants: forward(set) and backward(set) launch on the current stream


class TensorSet:
    """q, k, v and dO of one problem, (B, H, T, D or D_v) views; contestants keep their own results beside."""

    def __init__(self, shape, value_size, layout, tied, seed):
        B, H, T, D = shape
        generator = torch.Generator("cuda").manual_seed(seed)

        def tensor(D):
            size = (B, T, H, D) if layout == "bthd" else (B, H, T, D)
            x = torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)
            return x.transpose(1, 2) if layout == "bthd" else x

        self.q, self.k, self.v, self.grad_output = (tensor(size) for size in (D, D, value_size, value_size))
        if tied == 1:  # every key twice: the maximum of every row is shared
            self.k[:, :, 1::2] = self.k[:, :, 0 : 2 * (T // 2) : 2]
        elif tied > 0:  # keys 0 and 1 alike, and some rows that look for them
            self.k[:, :, 1] = self.k[:, :, 0]
            every = round(1 / tied)
            self.q[:, :, ::every] = 2 * self.k[:, :, :1]


class Ours:
    def __init__(self, library, spec, shape, value_size, workspace_of):
        self.library = library
        a = self.attention = Attention()
        library.c.evenkeel_attention_defaults(ctypes.byref(a), ctypes.sizeof(a))
        a.device, a.type, a.causal = 1, 0, 1
        a.B, a.H, a.T, a.D = shape
        a.G, a.N, a.Dv = a.H, a.T, value_size
        a.plan = spec["plan"].encode()
        a.with_facts = int(spec.get("facts", False))
        kernel, why, sizes = ctypes.c_char_p(), ctypes.c_char_p(), Sizes()
        library.check(library.c.evenkeel_attention_kernel(ctypes.byref(a), ctypes.byref(kernel), ctypes.byref(why)))
        self.kernel, self.why = kernel.value.decode(), why.value.decode()
        library.check(library.c.evenkeel_attention_sizes(ctypes.byref(a), ctypes.byref(sizes)))
        self.saved_bytes = sizes.saved
        self.workspace = workspace_of(sizes.workspace)
        self.kept = {}

    def buffers(self, s):
        """What forward leaves for backward, and the gradients; one a set of tensors."""
        if id(s) not in self.kept:
            a = self.attention
            rows = dict(device="cuda", dtype=torch.float32)
            own = self.kept[id(s)] = {
                "o": torch.empty_like(s.grad_output),
                "lse": torch.empty(a.B, a.H, a.T, **rows),
                "saved": torch.empty(max(1, self.saved_bytes), device="cuda", dtype=torch.uint8),
                "dq": torch.empty_like(s.q),
                "dk": torch.empty_like(s.k),
                "dv": torch.empty_like(s.v),
            }
            if a.with_facts:
                own["ties"] = torch.empty(a.B, a.H, a.T, device="cuda", dtype=torch.int32)
                own["residual"] = torch.empty(a.B, a.H, a.T, **rows)
                own["delta_error"] = torch.empty(a.B, a.H, a.T, **rows)
            f, b = Forward(), Backward()
            f.struct_size, b.struct_size = ctypes.sizeof(f), ctypes.sizeof(b)
            for name in ("q", "k", "v"):
                setattr(f, name, view(getattr(s, name)))
                setattr(b, name, view(getattr(s, name)))
            f.o = b.o = view(own["o"])
            for name in ("lse", "saved"):
                setattr(f, name, own[name].data_ptr())
                setattr(b, name, own[name].data_ptr())
            f.workspace = b.workspace = self.workspace.data_ptr()
            b.grad_output = view(s.grad_output)
            for name in ("dq", "dk", "dv"):
                setattr(b, name, view(own[name]))
            if a.with_facts:
                f.ties = own["ties"].data_ptr()
                b.residual = own["residual"].data_ptr()
                b.delta_error = own["delta_error"].data_ptr()
            own["passes"] = f, b
        return self.kept[id(s)]

    def call(self, name, arguments):
        stream = torch.cuda.current_stream().cuda_stream
        self.library.check(
            getattr(self.library.c, f"evenkeel_attention_{name}")(
                ctypes.addressof(self.attention), ctypes.addressof(arguments), stream
            )
        )

    def forward(self, s):
        self.call("forward", self.buffers(s)["passes"][0])

    def backward(self, s):
        self.call("backward", self.buffers(s)["passes"][1])

    def results(self, s):
        own = self.buffers(s)
        return own["o"], own["dq"], own["dk"], own["dv"]


class FlashAttention2:
    kernel = "PyTorch's FlashAttention-2"
    why = "aten._scaled_dot_product_flash_attention"

    def __init__(self):
        self.kept = {}

    def forward(self, s):
        out = aten._scaled_dot_product_flash_attention(s.q, s.k, s.v, 0.0, True)
        self.kept.setdefault(id(s), {})["forward"] = out

    def backward(self, s):
        o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = self.kept[id(s)]["forward"]
        self.kept[id(s)]["backward"] = aten._scaled_dot_product_flash_attention_backward(
            s.grad_output, s.q, s.k, s.v, o, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
        )

    def results(self, s):
        return self.kept[id(s)]["forward"][0], *self.kept[id(s)]["backward"][:3]


class CuDnn(FlashAttention2):
    kernel = "PyTorch's cuDNN"
    why = "aten._scaled_dot_product_cudnn_attention"

    def forward(self, s):
        out = aten._scaled_dot_product_cudnn_attention(s.q, s.k, s.v, None, True, 0.0, True, False)
        self.kept.setdefault(id(s), {})["forward"] = out

    def backward(self, s):
        o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = self.kept[id(s)]["forward"]
        self.kept[id(s)]["backward"] = aten._scaled_dot_product_cudnn_attention_backward(
            s.grad_output, s.q, s.k, s.v, o, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
        )


class Efficient(FlashAttention2):
    kernel = "PyTorch's memory-efficient attention"
    why = "aten._scaled_dot_product_efficient_attention"

    def forward(self, s):
        out = aten._scaled_dot_product_efficient_attention(s.q, s.k, s.v, None, True, 0.0, True)
        self.kept.setdefault(id(s), {})["forward"] = out

    def backward(self, s):
        o, lse, seed, offset = self.kept[id(s)]["forward"]
        self.kept[id(s)]["backward"] = aten._scaled_dot_product_efficient_attention_backward(
            s.grad_output, s.q, s.k, s.v, None, o, lse, seed, offset, 0.0, [True, True, True, False], True
        )


RIVALS = {"fa2": FlashAttention2, "cudnn": CuDnn, "efficient": Efficient}

# --- measuring


def elapsed(work, repeats=1):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


class Pass:
    """One pass of one contestant as a graph; times are seconds a call, one a round."""

    def __init__(self, work, sets):
        for s in sets:
            work(s)  # modules load, libraries plan
        torch.cuda.synchronize()
        once = elapsed(lambda: [work(s) for s in sets]) / len(sets)
        self.calls = len(sets) * max(1, math.ceil(GRAPH_SECONDS / max(once, 1e-6) / len(sets)))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for n in range(self.calls):
                work(sets[n % len(sets)])
        self.graph.replay()
        torch.cuda.synchronize()
        self.seconds = []

    def measure(self):
        self.seconds.append(elapsed(self.graph.replay) / self.calls)


def difference(ours, theirs):
    """The largest ||ours - theirs|| / ||theirs|| of the results; NaN counts as infinite."""
    worst = 0.0
    for x, y in zip(ours, theirs):
        y = y.float()
        ratio = ((x.float() - y).norm() / y.norm()).item()
        worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return worst


def run_group(group, library, rounds, shuffle):
    shape, value_size = group["shape"], group["value_size"]
    B, H, T, D = shape
    count = max(2, math.ceil(SETS_BYTES / (3 * 2 * B * H * T * D)))
    sets = [TensorSet(shape, value_size, group["layout"], group["tied"], seed) for seed in range(count)]
    workspaces = {}

    def workspace_of(size):  # contestants take turns: one is enough
        largest = max([size, *workspaces.keys()])
        if largest not in workspaces:
            workspaces[largest] = torch.empty(largest, device="cuda", dtype=torch.uint8)
        return workspaces[largest]

    results, passes, reference = [], [], None
    for spec in group["contestants"]:
        result = {"name": spec["name"]}
        results.append(result)
        try:
            rival = RIVALS.get(spec["name"])
            contestant = rival() if rival else Ours(library, spec, shape, value_size, workspace_of)
            result["kernel"], result["why"] = contestant.kernel, contestant.why
            contestant.forward(sets[0])
            contestant.backward(sets[0])
            torch.cuda.synchronize()
            if rival:
                reference = reference or [x.clone() for x in contestant.results(sets[0])]
            elif reference:
                result["difference"] = difference(contestant.results(sets[0]), reference)
                if result["difference"] > WRONG:
                    raise RuntimeError(f"wrong results: {result['difference']:.3g} from the rival's")
            pair = {name: Pass(getattr(contestant, name), sets) for name in ("forward", "backward")}
            passes.append((result, pair, contestant))
        except Exception as error:
            result["error"] = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            if "CUDA error" in str(error):
                raise
    if passes:
        warmed = 0.0
        while warmed < WARM_SECONDS:
            warmed += sum(elapsed(p.graph.replay) for _, pair, _ in passes for p in pair.values())
        order = [p for _, pair, _ in passes for p in pair.values()]
        for _ in range(rounds):
            shuffle.shuffle(order)
            for p in order:
                p.measure()
    for result, pair, _ in passes:
        for name, p in pair.items():
            result[name] = p.seconds
            result["calls"] = p.calls
    return results


def main():
    with open(sys.argv[1]) as file:
        request = json.load(file)
    library = Library(request["library"])
    shuffle = random.Random(1)
    answer = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "groups": [],
    }
    for number, group in enumerate(request["groups"]):
        print(f"bench attention: {number + 1} of {len(request['groups'])}", file=sys.stderr)
        answer["groups"].append(run_group(group, library, request["rounds"], shuffle))
        torch.cuda.empty_cache()
    json.dump(answer, sys.stdout)


main()
