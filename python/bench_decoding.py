"""PyTorch's attention for one query row a head and many keys, as the rival of `evenkeel bench attention --gpu --forms`.

usage: bench_decoding.py

The first line on standard output is {"torch": VERSION}. Then each line {"shape": [B, H, G, T, N, D]} on standard input (BF16, forward
alone, every row sees all keys) is answered with {"seconds": SECONDS, "backend": NAME} of the fastest that takes it, or {"error": WORDS}.
That is PyTorch's scaled_dot_product_attention with each of its kernels, and flash_attn's for a cache of keys where it is installed.
Exit code 77: there is no PyTorch that sees a GPU.
"""

import sys

from rival import on_gpu, seconds_of, serve

with on_gpu():
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
try:
    from flash_attn import flash_attn_with_kvcache
except Exception:
    flash_attn_with_kvcache = None


def calls_for(q, k, v):
    """The kernels that take these tensors, by name."""

    def of_backend(backend):
        def call():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

        return call

    calls = {backend.name: of_backend(backend) for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)}
    if flash_attn_with_kvcache:
        rows, keys, values = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        calls["flash_attn_with_kvcache"] = lambda: flash_attn_with_kvcache(rows, keys, values)
    taken = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            taken[name] = call
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
    return taken


kept, calls = None, {}  # of the shape that was asked for last


def answer_of(question):
    global kept, calls
    shape = question["shape"]
    if kept != shape:
        kept, calls = None, {}
        B, H, G, T, N, D = shape
        generator = torch.Generator("cuda").manual_seed(1)
        sizes = ((B, H, T, D), (B, G, N, D), (B, G, N, D))
        calls = calls_for(*(torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator) for size in sizes))
        kept = shape
    seconds, backend = min((seconds_of(call), name) for name, call in calls.items())
    return {"seconds": seconds, "backend": backend}


serve(answer_of)
