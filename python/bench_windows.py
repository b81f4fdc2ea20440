"""PyTorch's FlexAttention with sliding windows, as the rival of `evenkeel bench attention --gpu --forms`.

usage: bench_windows.py

The first line on standard output is {"torch": VERSION}. Then each line {"shape": [B, H, T, D], "left": N} on standard input (causal,
a row sees its own key and N before it) is answered with {"forward": SECONDS, "backward": SECONDS}, or {"error": WORDS}.
BF16; compiled at the first question of its kind. Exit code 77: there is no PyTorch that sees a GPU.
"""

import json
import sys

answers = sys.stdout
sys.stdout = sys.stderr  # nothing but answers goes to the pipe
try:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.zeros(1, device="cuda")
except Exception as error:  # whatever keeps PyTorch from a GPU
    print(f"no PyTorch with a GPU: {error}", file=sys.stderr)
    sys.exit(77)

CALLS = 4  # that follow one another without a gap


class Window:
    def __init__(self, shape, left):
        generator = torch.Generator("cuda").manual_seed(1)

        def tensor():
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        def sees(b, h, row, key):
            return (key <= row) & (row - key <= left)

        T = shape[2]
        self.mask = create_block_mask(sees, None, None, T, T, device="cuda")
        self.compiled = torch.compile(flex_attention, dynamic=False)
        self.inputs = [tensor().requires_grad_() for _ in range(3)]
        self.grad_output = tensor()
        self.o = self.forward()
        self.backward()

    def forward(self):
        return self.compiled(*self.inputs, block_mask=self.mask)

    def backward(self):
        return torch.autograd.grad(self.o, self.inputs, self.grad_output, retain_graph=True)

    def seconds(self):
        return {"forward": seconds_of(self.forward), "backward": seconds_of(self.backward)}


def seconds_of(call):
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    began.record()
    for _ in range(CALLS):
        call()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) * 1e-3 / CALLS


def answer(what):
    print(json.dumps(what), file=answers, flush=True)


windows = {}
answer({"torch": torch.__version__})
for line in sys.stdin:
    question = json.loads(line)
    try:
        kind = (*question["shape"], question["left"])
        if kind not in windows:
            windows[kind] = Window(question["shape"], question["left"])
        answer(windows[kind].seconds())
    except Exception as error:
        answer({"error": (str(error).strip() or repr(error)).splitlines()[0]})
