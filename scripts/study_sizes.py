"""The sizes at which the study trains: one table for every script.

Standard library only.
"""

from dataclasses import dataclass

KEPT = ("bf16_all,stabiliser=zero_sum", "bf16_all,stabiliser=wide_output", "flash2,stabiliser=wide_output")


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int
    context: int
    sequences: int  # of a step
    lr: float  # after the warm-up, where a run's options say nothing else
    warmup: int  # steps
    facts_every: int  # steps between records of offset and score
    text: float  # tokens of its own text
    controls: tuple  # plans that are healthy by construction, for runs without a twin of their own plan
    colour: str  # of its dots in figures
    on_cpu: bool = False
    linear: str = "bf16"  # linear layers
    speed: tuple = (0, 0, 0)  # steps a second on one H200, for estimates (docs/experiments.md): our fast kernels, the any-plan kernels, PyTorch

    @property
    def head_size(self):
        return self.width // self.heads

    @property
    def tokens(self):
        """Of a step."""
        return self.sequences * self.context


SIZES = {
    "micro": Size(3, 4, 128, 128, 16, 6e-3, 100, 10, 16e6, ("fp32",), "#0072b2", on_cpu=True, linear="fp32", speed=(60, 60, 60)),
    "mini": Size(4, 6, 192, 256, 8, 4e-3, 100, 10, 16e6, ("fp32",), "#cc79a7", on_cpu=True, linear="fp32", speed=(30, 30, 30)),
    "nano": Size(6, 6, 384, 512, 32, 3e-3, 500, 25, 40e6, KEPT, "#d55e00", speed=(200, 170, 70)),
    "gpt2": Size(12, 12, 768, 1024, 16, 1e-3, 500, 25, 256e6, KEPT[2:], "#009e73", speed=(35, 20, 25)),
}


def on_cpu(run):
    return SIZES[run.size].on_cpu
