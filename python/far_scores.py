#!/usr/bin/env python3
"""Scores far away: how well attention kernels keep the sum of a row of dS when all scores share a large offset.

    far_scores.py [--device cuda|cpu] [--offsets 100,10000,500000,5000000]

q and k share a direction, spread over 16 features, that adds the offset to every score; softmax does not see it. So dq along
it is the rows' sum of dS, which is zero: what is found there, as mean and root mean square, is the kernel's. On a GPU
PyTorch's kernels and ours, on a CPU ours alone. Exit codes: 0 done, 77 no PyTorch, or none with that device.
"""
import argparse
import math
import sys

try:
    import torch
    import torch.nn.functional as F

    import evenkeel
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

from check_model import causal_attention

B, H, T, D, COMMON = 4, 6, 512, 64, 16
OURS = {"evenkeel, no remedy": ("flash2", "none"), "evenkeel, wide_output": ("flash2", "wide_output"),
        "evenkeel, consistent": ("flash2", "consistent"), "evenkeel, zero_sum": ("flash2", "zero_sum"),
        "evenkeel, any plan": ("flash2,row_sum=e8m22", "none")}  # fmt: skip


def kernels(device):
    found = {}
    if device == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def of(backend):
            def attention(q, k, v):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            return attention

        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
            found[f"PyTorch, {name}"] = of(getattr(SDPBackend, name))
    for name, (plan, stabiliser) in OURS.items():
        found[name] = lambda q, k, v, p=plan, s=stabiliser: evenkeel.attention(q, k, v, is_causal=True, plan=p, stabiliser=s)
    return found


def gradient_of_q(attention, q, k, v, d_o):
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    attention(q, k, v).backward(d_o)
    return q.grad.double()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--offsets", default="100,10000,500000,5000000")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: expected a PyTorch with a GPU (or --device cpu), found none")
        sys.exit(77)
    torch.manual_seed(1)
    draw = lambda: torch.randn(B, H, T, D, device=options.device)
    print("the rows' sums of dS: mean, root mean square")
    for offset in map(float, options.offsets.split(",")):
        q, k = draw(), draw()
        each = math.sqrt(offset * math.sqrt(D) / COMMON) * torch.sign(torch.randn(COMMON, device=options.device))
        q[..., :COMMON] = k[..., :COMMON] = each
        q, k, v, d_o = (t.to(torch.bfloat16) for t in (q, k, draw(), draw()))
        exact = gradient_of_q(causal_attention, *(t.double() for t in (q, k, v, d_o)))
        print(f"offset {offset:.0f}")
        for name, attention in kernels(options.device).items():
            sums = (gradient_of_q(attention, q, k, v, d_o) - exact)[..., 0] * math.sqrt(D) / k[0, 0, 0, 0].double()
            print(f"  {name:<30}{sums.mean().item():+.1e}  {sums.pow(2).mean().sqrt().item():.1e}", flush=True)


if __name__ == "__main__":
    main()
