"""PyTorch's FlexAttention with sliding windows, as the rival of `evenkeel bench attention --gpu --forms`.

usage: bench_windows.py

The first line on standard output is {"torch": VERSION}. Then each line {"shape": [B, H, T, D], "left": N} on standard input (causal,
a row sees its own key and N before it) is answered with {"forward": SECONDS, "backward": SECONDS}, or {"error": WORDS}.
BF16; compiled at the first question of its kind. Exit code 77: there is no PyTorch that sees a GPU.
"""

from rival import on_gpu, seconds_of, serve

with on_gpu():
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention


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


windows = {}


def answer_of(question):
    kind = (*question["shape"], question["left"])
    if kind not in windows:
        windows[kind] = Window(question["shape"], question["left"])
    return windows[kind].seconds()


serve(answer_of)
