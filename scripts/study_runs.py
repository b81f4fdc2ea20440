"""Every run of the study, a line each: what is trained, in which part, and how long it takes on a GPU (estimated). scripts/study trains them.

A part is a function; paired() adds the twin with the default remedy: same seed, batches and settings.
"""

from dataclasses import dataclass, field

from study_sizes import SIZES

COMMON = ["--schedule", "constant", "--set", "run.checkpoints_kept = 1", "--set", "run.divergence = 0.0"]
ONE_SUM = ["--set", "model.tile_keys = 0"]  # sums are rounded once a row, not after every 64 keys as well
MINI = [word for key in ("layers", "heads", "width", "context") for word in ("--set", f"model.{key} = {getattr(SIZES['mini'], key)}")]
OF_SIZE = {
    "micro": ["--preset", "micro", "--threads", "1", "--checkpoint-every", "400"],
    "mini": ["--preset", "micro", *MINI, "--threads", "1", "--checkpoint-every", "400"],
    "nano": ["--preset", "nano", "--backend", "cuda", "--checkpoint-every", "2500", *ONE_SUM],
    # No checkpoints on the way: each is 1.5 GB, and every run is made in one piece.
    "gpt2": ["--preset", "gpt2", "--backend", "cuda", "--checkpoint-every", "0", "--validate-every", "2000", *ONE_SUM],
}


def options_of(name):
    """Of `train`, for a size."""
    size = SIZES[name]
    return [*OF_SIZE[name], "--sequences", str(size.sequences), "--lr", str(size.lr), "--warmup", str(size.warmup), "--facts-every", str(size.facts_every)]


START = 0.3  # minutes until a run's first step, its last validation included


@dataclass
class Run:
    part: str
    name: str
    plan: str
    seed: int = 1
    steps: int = 1600
    size: str = "micro"
    more: list = field(default_factory=list)  # further options of `train`
    branch: tuple = ()  # (name of another run, step): goes on from there
    torch: str = ""  # in PyTorch, with this attention kernel of its own, on the batches of its seed (python/twin_torch.py)

    @property
    def folder(self):
        return f"{self.part}-{self.name}-{self.seed}"

    @property
    def minutes(self):
        """Estimated, on one H200 by itself."""
        fast = self.plan.partition(",stabiliser=")[0].partition(",keel=")[0] in ("flash2", "fp8_trains")
        speed = SIZES[self.size].speed[2 if self.torch else 0 if fast else 1]
        wider = 1.0
        for n, word in enumerate(self.more):
            if word == "--sequences":
                wider = int(self.more[n + 1]) / SIZES[self.size].sequences
        return START + (self.steps - (self.branch[1] if self.branch else 0)) / speed * max(0.6, wider) / 60


def setting(text):
    return ["--set", text]


PROBES = ["--probe-every", "25"]
LAW_PROBES = ["--probe-every", "20"]
ZERO, WIDE, CONSISTENT = ",stabiliser=zero_sum", ",stabiliser=wide_output", ",stabiliser=consistent"


def micro(part, name, plan, seeds=(1,), more=(), **others):
    return [Run(part, name, plan, seed, more=list(more), **others) for seed in seeds]


def nano(part, name, plan, steps, seeds=(1,), more=(), **others):
    return [Run(part, name, plan, seed, steps, "nano", list(more), **others) for seed in seeds]


def gpt2(part, name, plan, steps, seeds=(1,), more=(), **others):
    return [Run(part, name, plan, seed, steps, "gpt2", list(more), **others) for seed in seeds]


VALIDATE = ["--validate-every", "1000"]


def roads():
    """Issue and cure at length: the headline."""
    found = nano("roads", "row_sum", "flash2,row_sum=bf16", 25_000)
    found += nano("roads", "paper", "bf16_all,row_sum=fp32", 25_000)
    found += nano("roads", "zero_sum", "bf16_all" + ZERO, 25_000)
    found += nano("roads", "wide_output", "bf16_all" + WIDE, 25_000)
    found += nano("roads", "flash2", "flash2", 25_000)
    return found


def seeds():
    """The same with other seeds, as far as is needed to tell the healthy from the others."""
    found = nano("seeds", "flash2", "flash2", 9_000, (2, 3))
    found += nano("seeds", "row_sum", "flash2,row_sum=bf16", 3_000, (2, 3))
    found += nano("seeds", "zero_sum", "bf16_all" + ZERO, 6_000, (2, 3))
    found += nano("seeds", "wide_output", "bf16_all" + WIDE, 6_000, (2, 3))
    return found


def cure():
    """The default remedy where its twin fails: other seeds, and to 25,000 steps."""
    found = nano("cure", "wide_output", "flash2" + WIDE, 9_000, (2, 3), VALIDATE)
    found += nano("cure", "wide_output", "flash2" + WIDE, 25_000, (1,), VALIDATE)
    found += nano("cure", "consistent", "flash2" + CONSISTENT, 9_000, (3,), VALIDATE)
    return found


def matrix():
    """The rest of the cure matrix: every remedy on both plans, three seeds, one of them to 25,000 steps."""
    found = []
    for plan in ("flash2", "bf16_all"):
        for name, clause in (("consistent", CONSISTENT), ("zero_sum", ZERO), ("keel", ",keel=1e-5"), ("wide_output", WIDE)):
            label = f"{plan}_{name}"
            if (plan, name) != ("flash2", "wide_output"):  # cure has it
                found += nano("matrix", label, plan + clause, 9_000, (2, 3), VALIDATE)
                if not (plan == "bf16_all" and name in ("zero_sum", "wide_output")):  # roads has them
                    found += nano("matrix", label, plan + clause, 25_000, (1,), VALIDATE)
    return found


def size():
    """The paper's size and learning rate: GPT-2 124M, FlashAttention-2's arithmetic beside its remedy, the same batches."""
    found = []
    for seed in (1, 2):
        found += gpt2("size", "flash2", "flash2", 20_000, (seed,))
        found += gpt2("size", "wide_output", "flash2" + WIDE, 20_000, (seed,))
    found += gpt2("size", "first", "flash2", 1, more=["--checkpoint-every", "1"])
    found += gpt2("size", "flash", "", 20_000, branch=("size-first-1", 1), torch="flash")
    found += gpt2("size", "paper", "bf16_all,row_sum=fp32", 20_000)
    return found


def length():
    """GPT-2 124M until it fails, or to 50,000 steps."""
    return gpt2("length", "flash2", "flash2", 50_000) + gpt2("length", "wide_output", "flash2" + WIDE, 50_000)


def paired(part, name, plan, steps, seeds, more=(), make=nano):
    """A run and its twin with the default remedy."""
    return [run for seed in seeds for run in make(part, name, plan, steps, (seed,), more) + make(part, name + "_twin", plan + WIDE, steps, (seed,), more)]


def hostile():
    """FlashAttention-2's arithmetic where others say it is safe: weight decay, a larger epsilon, QK norm, a decaying rate."""
    found = []
    for name, more in (
        ("weight_decay_0.1", setting("optimizer.weight_decay = 0.1")),
        ("weight_decay_0.3", setting("optimizer.weight_decay = 0.3")),
        ("weight_decay_1", setting("optimizer.weight_decay = 1.0")),
        ("epsilon_1e-6", setting("optimizer.epsilon = 1e-6")),
        ("epsilon_1e-5", setting("optimizer.epsilon = 1e-5")),
        ("qk_norm", setting("model.qk_norm = true")),
        ("cosine", ["--schedule", "cosine", *setting("schedule.last_lr = 3e-4")]),
    ):
        found += paired("hostile", name, "flash2", 9_000, (3, 1), more)
    return found


NOISY = "fp32,output=e8m2/stochastic"  # at micro: FlashAttention-2's site, coarse enough to fail within 1,000 steps
# What users say they train with: run -> (words of the study's table, options). 1/(lr wd) is 1,667, 556, 167 and 56 steps.
USERS_SETTINGS = {
    "plain": ("as in the other runs of `micro`", []),
    "weight_decay_0.1": ("weight decay 0.1", setting("optimizer.weight_decay = 0.1")),
    "weight_decay_0.3": ("weight decay 0.3", setting("optimizer.weight_decay = 0.3")),
    "weight_decay_1": ("weight decay 1", setting("optimizer.weight_decay = 1.0")),
    "weight_decay_3": ("weight decay 3", setting("optimizer.weight_decay = 3.0")),
    "epsilon_1e-6": ("AdamW's epsilon 1e-6", setting("optimizer.epsilon = 1e-6")),
    "epsilon_1e-5": ("AdamW's epsilon 1e-5", setting("optimizer.epsilon = 1e-5")),
    "qk_norm": ("QK norm", setting("model.qk_norm = true")),
    "cosine": ("cosine decay to a tenth", ["--schedule", "cosine", *setting("schedule.last_lr = 6e-4")]),
    "decay_cosine": ("weight decay 0.1 and cosine decay to a tenth (nanoGPT)", ["--schedule", "cosine", *setting("schedule.last_lr = 6e-4"), *setting("optimizer.weight_decay = 0.1")]),
    "softcap": ("a soft cap of 50 (Gemma-2)", setting("model.softcap = 50.0")),
    "qk_clip": ("QK clip at 100 (Kimi K2)", ["--facts-every", "1", *setting("model.qk_clip = 100.0")]),
    "sinks": ("sinks (gpt-oss)", setting("model.sinks = true")),
    "gated": ("gated attention (Qwen3-Next)", setting("model.gated_attention = true")),
    "rotary": ("rotary positions", setting('model.positions = "rotary"')),
    "alibi": ("ALiBi (MPT)", setting('model.positions = "alibi"')),
    "muon": ("Muon", ["--optimizer", "muon"]),
}
SETTINGS_STEPS = 1_000
SLOW_SETTINGS = {"qk_norm": 4_000}  # steps: offsets grow slowly there, and were still growing at step 1,000
LLAMA_SLOW_SETTINGS = {"qk_norm": 1_800}
WIDE_SETTINGS = ("plain", "sinks", "gated", "rotary")  # with the default remedy, too


def hostile_micro():
    """The same question at micro: does it hit me with my settings? Each beside its twin with zero_sum, some with the default; fp32: the control of other parts that read this text."""
    kept = [*LAW_PROBES, "--checkpoint-every", "100", *setting("run.keep_every = 100")]  # added_noise branches off there
    found = []
    for seed in (1, 2, 3):
        found += micro("hostile_micro", "fp32", "fp32", (seed,), steps=4_000 if seed < 3 else 1_600)  # as far as exponents_micro-bits_3
        for name, (_, more) in USERS_SETTINGS.items():
            steps = SLOW_SETTINGS.get(name, SETTINGS_STEPS)
            found += micro("hostile_micro", name, NOISY, (seed,), [*more, *(kept if name == "plain" else [])], steps=steps)
            found += micro("hostile_micro", name + "_zero_sum", NOISY + ZERO, (seed,), more, steps=steps)
            if name in WIDE_SETTINGS:
                found += micro("hostile_micro", name + "_wide_output", NOISY + WIDE, (seed,), more, steps=steps)
    return found


# Noise that is added to the leak of a drifting run: words of the study's table, clauses.
ADDED_NOISE = {"as_it_is": ("none", ""), "delta": ("delta, 2 bits, stochastic", "delta=e8m2/stochastic"), "both": ("delta and dP, 1 bit, stochastic", "delta=e8m1/stochastic,dprobs=e8m1/stochastic")}


def added_noise():
    """Does a noisier leak slow a drifting run? hostile_micro-plain-1 continued from two of its checkpoints, with noise added where rounding alone does not drift."""
    found = []
    for step in (800, 700):
        for name, (_, clauses) in ADDED_NOISE.items():
            found += micro("added_noise", f"{name}_{step}", "", (1,), [*(["--at", f"{step} {clauses}"] if clauses else []), *LAW_PROBES, "--checkpoint-every", "0"], steps=step + 300, branch=("hostile_micro-plain-1", step))
    return found


def exponents_micro():
    """Steps until the offset passes 1,000, against the bits of O, the learning rate and the batch; a run may be ended soon after."""
    found = []
    for name, plan, more, steps in (
        ("bits_1", "fp32,output=e8m1", [], 1_600),
        ("bits_2", "fp32,output=e8m2", [], 1_600),
        ("bits_1_stochastic", "fp32,output=e8m1/stochastic", [], 1_600),
        ("lr_1.2e-2", NOISY, ["--lr", "1.2e-2"], 1_600),
        ("lr_3e-3", NOISY, ["--lr", "3e-3"], 3_000),
        ("lr_3e-3_zero_sum", NOISY + ZERO, ["--lr", "3e-3"], 3_000),
        ("batch_8", NOISY, ["--sequences", "8"], 1_600),
        ("batch_32", NOISY, ["--sequences", "32"], 1_600),
        ("bits_3", "fp32,output=e8m3", [], 4_000),
        ("bits_3_stochastic", "fp32,output=e8m3/stochastic", [], 3_000),
        ("bits_4_stochastic", "fp32,output=e8m4/stochastic", [], 8_000),
    ):
        found += micro("exponents_micro", name, plan, (1, 2), more, steps=steps)
    return found


LR_INTEGRAL = 27  # of the learning rate over steps: 9,000 steps at 3e-3


def llama():
    """The same arithmetic in a Llama block (rotary positions, RMS norms, SwiGLU, grouped queries), with QK norm, and with sinks, which let
    softmax see the offset; sinks and ALiBi in nano's own block."""
    block = ["--preset", "llama-nano"]
    found = []
    for name, more in (
        ("plain", block),
        ("qk_norm", block + setting("model.qk_norm = true")),
        ("sinks", block + setting("model.sinks = true")),
        ("gpt2_sinks", setting("model.sinks = true")),
        ("gpt2_alibi", setting('model.positions = "alibi"')),
    ):
        found += paired("llama", name, "flash2", 9_000, (3,), more)
    return found


def sinks():
    """Does a softmax that sees the offset stop the drift? micro, where the same plan without sinks fails (derailing-row_sum_e5m2)."""
    base, on = "fp32,row_sum=e5m2", setting("model.sinks = true")
    found = micro("sinks", "row_sum_e5m2", base, (1, 2, 3), on)
    found += micro("sinks", "row_sum_e5m2_zero_sum", base + ZERO, (1, 2, 3), on)
    distances = setting('model.positions = "alibi"')
    found += micro("sinks", "alibi_row_sum_e5m2", base, (1, 2), distances)
    found += micro("sinks", "alibi_row_sum_e5m2_zero_sum", base + ZERO, (1, 2), distances)
    return found


def llama_micro():
    """A Llama block at micro: does it drift with row sums of two bits, is it rescued, does the guard hold it? planted: one head, for isolate."""
    block, base, kept = ["--preset", "llama-micro"], "fp32,row_sum=e5m2", ["--checkpoint-every", "100", *setting("run.keep_every = 100")]
    found = []
    for seed in (1, 2):
        found += micro("llama_micro", "row_sum_e5m2", base, (seed,), [*block, *kept], steps=1_200)
        found += micro("llama_micro", "row_sum_e5m2_zero_sum", base + ZERO, (seed,), block, steps=1_200)
        if seed == 1:
            found += micro("llama_micro", "guarded", base, (seed,), [*block, "--guard"], steps=1_200)
            found += micro("llama_micro", "planted", "fp32; layer 0 head 1: row_sum=e5m1/nearest_away", (seed,), [*block, *kept], steps=600)
        found += micro("llama_micro", "fp32", "fp32", (seed,), block, steps=1_200)
    return found


# What a Llama block is trained with: run -> (words of the study's table, options).
LLAMA_SETTINGS = {
    "plain": ("a Llama block", []),
    "qk_norm": ("with QK norm", setting("model.qk_norm = true")),
    "sinks": ("with sinks", setting("model.sinks = true")),
}


def llama_settings():
    """The Llama block with the rounding of hostile_micro: do QK norm or sinks hold it? Each beside its twins with zero_sum and with the default."""
    found = []
    for seed in (1, 2, 3):
        for name, (_, more) in LLAMA_SETTINGS.items():
            for remedy, clause in (("", ""), ("_zero_sum", ZERO), ("_wide_output", WIDE)):
                found += micro("llama_settings", name + remedy, NOISY + clause, (seed,), ["--preset", "llama-micro", *more], steps=LLAMA_SLOW_SETTINGS.get(name, SETTINGS_STEPS))
    return found


def rates():
    """Other learning rates to the same integral."""
    found = []
    for rate in ("6e-3", "2e-3", "1e-3", "6e-4"):
        found += paired("rates", f"lr_{rate}", "flash2", round(LR_INTEGRAL / float(rate) / 500) * 500, (3, 2), ["--lr", rate])
    return found


def feedback():
    """Does the loss make the bias in a whole model? The error in delta alone, in the loss alone, the same in both."""
    found = nano("feedback", "both", "flash2,output=bf16/stochastic", 9_000, (3, 2))
    found += nano("feedback", "delta_alone", "flash2,output=fp32,output_for_delta=bf16/stochastic", 9_000, (3, 2))
    found += nano("feedback", "loss_alone", "flash2,output=bf16/stochastic,output_for_delta=fp32", 9_000, (3, 2))
    return found


def square():
    """The same at micro: 2 x 2 on O of two bits, three seeds; the fourth corner is FP32 (law-fp32)."""
    found = []
    for seed in (1, 2, 3):
        found += micro("square", "both", "fp32,output=e8m2/stochastic", (seed,), LAW_PROBES, steps=1_000)
        found += micro("square", "loss_alone", "fp32,output=e8m2/stochastic,output_for_delta=fp32", (seed,), LAW_PROBES, steps=1_000)
        found += micro("square", "delta_alone", "fp32,output_for_delta=e8m2/stochastic", (seed,), LAW_PROBES, steps=1_000)
    return found


def exponents():
    """Time to failure against the bits of O and against the batch."""
    found = []
    for count in (5, 6, 7, 8, 9):
        found += nano("exponents", f"output_{count}", f"flash2,output=e8m{count},row_sum=e8m22", 9_000, (3, 2))
    for sequences in ("16", "64"):
        found += paired("exponents", f"batch_{sequences}", "flash2", 9_000, (3, 2), ["--sequences", sequences])
    return found


def field_cases():
    """Three reports of the field, as near as this trainer comes to them."""
    # nanoGPT 137: flash attention is less stable at a large rate, AdamW's epsilon of 1e-5 is said to cure.
    found = paired("field", "nanogpt_137", "flash2", 20_000, (1,), ["--lr", "6e-3"])
    found += paired("field", "nanogpt_137_epsilon", "flash2", 20_000, (1,), ["--lr", "6e-3", *setting("optimizer.epsilon = 1e-5")])
    # llm-foundry 284: MPT-125M (ALiBi) explodes with flash and Triton attention, not with torch's.
    found += paired("field", "mpt_125m", "flash2", 20_000, (1,), ["--lr", "6e-4", *setting('model.positions = "alibi"')], make=gpt2)
    # SageBwd: smoothing K is essential, dS is guilty.
    found += nano("field", "smoothed_keys", "flash2,stabiliser=centre_keys", 9_000, (3,))
    found += nano("field", "dscores_8_bits", "flash2,dscores=e4m3", 9_000, (3,))
    found += nano("field", "dscores_8_bits_smoothed", "flash2,dscores=e4m3,stabiliser=centre_keys", 9_000, (3,))
    return found


def second_text():
    """Healthy and failing runs on another text (all text of the machine), for the forecast: nano as it is, and micro on C and HTML."""
    found = nano("second_text", "flash2", "flash2", 9_000, (1, 2, 3))
    found += nano("second_text", "wide_output", "flash2" + WIDE, 9_000, (1, 2, 3))
    return found


def twins():
    """The same weights and batches in PyTorch, with its own attention kernels: is it our trainer?"""
    found = []
    for seed, steps in ((3, 5_000), (2, 7_000)):
        found += nano("twins", "ours", "flash2", steps, (seed,))
        found += nano("twins", "first", "flash2", 1, (seed,))
        for kernel in ("flash", "math", "evenkeel", "cudnn", "efficient"):  # evenkeel: as the package is, with its remedy
            found += nano("twins", kernel, "", steps, (seed,), branch=(f"twins-first-{seed}", 1), torch=kernel)
    return found


def parting():
    """Why did gradient norms run off at offsets of 80,000 on our Hopper kernels alone? The same plan on the Hopper kernel without the residue of its shift (seeds-flash2 and
    twins-ours had it), on the any-plan kernels, and on the Hopper kernel in PyTorch's trainer, each beyond that offset."""
    found = nano("parting", "no_residue", "flash2", 9_000, (3, 2))
    found += nano("parting", "any_plan", "flash2,row_sum=e8m22", 9_000, (3, 2))
    for seed in (3, 2):
        found += nano("parting", "first", "flash2", 1, (seed,))
        found += nano("parting", "hopper_none", "", 8_000, (seed,), branch=(f"parting-first-{seed}", 1), torch="hopper_none")
    return found


def controls():
    """FlashAttention-2's arithmetic: is it the kernel, the seed, or the rounding of O?"""
    found = nano("controls", "any_plan", "flash2,row_sum=e8m22", 9_000)  # the CPU's arithmetic to the bit
    found += nano("controls", "wide_output", "flash2" + WIDE, 9_000)
    found += nano("controls", "consistent", "flash2" + CONSISTENT, 9_000)
    found += nano("controls", "probs_fp32", "flash2,probs=fp32", 4_500)
    found += nano("controls", "output_for_delta_fp32", "flash2,output_for_delta=fp32,row_sum=e8m22", 4_500)
    found += nano("controls", "backward_fp32", "flash2,probs_bwd=fp32,dscores=fp32,dq=fp32,dk=fp32,dv=fp32", 4_500)
    return found


def detect():
    """Healthy and drifting runs with all probes: which indicator raises its alarm first?"""
    derailing = [
        ("row_sum_e5m2", "fp32,row_sum=e5m2", (1, 2, 3)),
        ("row_sum_e5m2_stochastic", "fp32,row_sum=e5m2/stochastic", (1, 2)),
        ("row_sum_e4m3", "fp32,row_sum=e4m3", (1, 2)),
        ("pv_2_bits", "fp32,pv=e8m2", (1, 2)),
        ("pv_2_bits_stochastic", "fp32,pv=e8m2/stochastic", (1, 2)),
        ("output_2_bits", "fp32,output=e8m2", (1,)),
    ]
    healthy = [
        ("fp32", "fp32", (1, 2, 3)),
        ("row_sum_e5m2_zero_sum", "fp32,row_sum=e5m2" + ZERO, (1, 2, 3)),
        ("row_sum_stochastic_zero_sum", "fp32,row_sum=e5m2/stochastic" + ZERO, (1,)),
        ("pv_2_bits_zero_sum", "fp32,pv=e8m2" + ZERO, (1, 2)),
        ("probs_2_bits", "fp32,probs=e8m2" + CONSISTENT, (1,)),
        ("bf16_all_zero_sum", "bf16_all" + ZERO, (1,)),
        ("flash2_wide_output", "flash2" + WIDE, (1,)),
    ]
    found = []
    for name, plan, which in derailing:
        found += micro("derailing", name, plan, which, PROBES)
    for name, plan, which in healthy:
        found += micro("healthy", name, plan, which, PROBES)
    return found


def bits():
    """Time to failure against significand bits, site by site; bias against noise."""
    found = []
    for site in ("row_sum", "pv", "output"):
        for count in (2, 3, 4, 5):
            found += micro("bits", f"{site}_{count}", f"fp32,{site}=e8m{count}", (1,))
    for site in ("output", "probs", "scores", "dprobs", "delta"):
        found += micro("noise", f"{site}_stochastic", f"fp32,{site}=e8m2/stochastic", (1, 2))
        if site != "output":
            found += micro("noise", f"{site}_nearest", f"fp32,{site}=e8m2", (1, 2))
    return found


def nano_bits():
    found = []
    for count in (8, 9, 10, 12):
        found += nano("nano_bits", f"row_sum_{count}", f"flash2,row_sum=e8m{count}", 5_000)
    return found


def others():
    """What else is said to help, against a row sum of 8 bits (e5m2)."""
    base = "fp32,row_sum=e5m2"
    found = []
    for keel in ("1e-5", "1e-4", "1e-3"):
        found += micro("keel", f"leaking_{keel}", f"{base},keel={keel}")
        found += micro("keel", f"fp32_{keel}", f"fp32,keel={keel}")
    for name, more in (
        ("qk_norm", setting("model.qk_norm = true")),
        ("qk_clip_50", setting("model.qk_clip = 50.0") + ["--facts-every", "1"]),
        ("gated", setting("model.gated_attention = true")),
        ("softcap_50", setting("model.softcap = 50.0")),
        ("weight_decay", setting("optimizer.weight_decay = 0.1")),
        ("muon", ["--optimizer", "muon"]),
        ("deeper", setting("model.layers = 6")),
        ("wider", setting("model.width = 256") + setting("model.heads = 8")),
        # Steps of lr / epsilon m: momentum, without AdamW's division by the gradient's size
        ("momentum", setting("optimizer.epsilon = 1.0") + ["--lr", "0.5"]),
    ):
        found += micro("others", name, base, (1, 2), more=more)
        found += micro("others", name + "_zero_sum", base + ZERO, (1, 2), more=more)
    found += micro("others", "centre_keys", base + ",stabiliser=centre_keys", (1, 2))
    road_a = "fp32,pv=e8m2,scores=bf16"
    found += micro("shift", "none", road_a, (1, 2))
    for name, clause in (
        ("paper_2", "paper,beta=2"),
        ("paper_4", "paper,beta=4"),
        ("paper_8", "paper,beta=8"),
        ("capped", "paper_capped"),
        ("every_row", "paper_capped,cap=1,tie_tolerance=1000"),  # ties or not: every row is shifted
        ("dither", "dither"),
        ("zero_sum", "zero_sum"),
    ):
        found += micro("shift", name, f"{road_a},stabiliser={clause}", (1, 2))
    return found


RESCUES = (
    ("zero_sum", "stabiliser=zero_sum", []),
    ("fp32_scores", "stabiliser=zero_sum,scores=fp32,shifted=fp32", []),
    ("centre_keys", "stabiliser=centre_keys,output_for_delta=fp32,pv=fp32", []),
    ("keel", "stabiliser=zero_sum,keel=1e-5", ["--keel-ramp", "2000"]),
)


def guard():
    """The guard from the beginning, on the fastest road; what isolate searches; the healthy run to compare with."""
    road, often = "flash2,row_sum=bf16", ["--validate-every", "1000", "--checkpoint-every", "250", "--set", "run.checkpoints_kept = 3"]
    found = nano("guard", "unguarded", road, 3_000, more=[*often, *setting("run.keep_every = 250"), "--probe-every", "50"])
    found += nano("guard", "guarded", road, 6_000, more=[*often, "--guard"])
    found += nano("guard", "wide_output", "flash2" + WIDE, 6_000, more=["--validate-every", "1000"])
    found += nano("guard", "flash2", "flash2", 6_000, more=["--validate-every", "1000"])
    return found


def rescue():
    """A drifting run that gets a remedy late: when is it too late, and what still helps?"""
    keep = setting("run.keep_every = 1000") + ["--checkpoint-every", "1000", "--probe-every", "500"]
    found = nano("rescue", "unmended", "bf16_all,row_sum=fp32", 15_500, more=keep)
    for name, clauses, more in RESCUES:
        for step in (15_000, 8_000, 12_000, 4_000):
            found += nano("rescue", f"{name}_{step}", "", step + 3_000, branch=("rescue-unmended-1", step),
                          more=["--at", f"{step} {clauses}", *more, "--checkpoint-every", "0"])  # fmt: skip
    # What a roll-back does: the remedy from the last checkpoint with a small offset on, whenever the alarm came.
    found += nano("rescue", "rolled_back_2000", "", 8_000, branch=("rescue-unmended-1", 2_000),
                  more=["--at", "2000 stabiliser=zero_sum", "--checkpoint-every", "0"])  # fmt: skip
    return found


def paper():
    """The paper's claims on its own road (BF16 scores and O-bar, FP32 row sum)."""
    road, steps = "bf16_all,row_sum=fp32", 6_000
    rounded = lambda form: f"scores={form},shifted={form},pv={form},dprobs={form}"
    found = []
    for name, plan, more in (
        ("as_it_is", road, []),
        ("layer_2_alone", "flash2,row_sum=e8m22; layer 1: " + rounded("bf16"), []),
        ("all_but_layer_2", road + "; layer 1: " + rounded("fp32"), []),
        ("output_fp32", road + ",output_for_delta=fp32", []),
        ("pv_fp32", road + ",pv=fp32", []),
        ("tiles_of_64", road, setting("model.tile_keys = 64")),
        ("paper_2", road + ",stabiliser=paper,beta=2", []),
        ("capped", road + ",stabiliser=paper_capped", []),
        ("qk_norm", road, setting("model.qk_norm = true")),
        ("qk_clip", road, setting("model.qk_clip = 100.0") + ["--facts-every", "1"]),
        ("gated", road, setting("model.gated_attention = true")),
        ("muon", road, ["--optimizer", "muon"]),
        ("deeper", road, setting("model.layers = 12")),
        ("wider", road, setting("model.width = 768") + setting("model.heads = 12")),
        ("weight_decay", road, setting("optimizer.weight_decay = 0.1")),
        ("fp8", "fp8", []),
        ("fp8_zero_sum", "fp8" + ZERO, []),
    ):
        found += nano("paper", name, plan, steps, more=more)
    return found


def claims():
    """The paper's claims in the small: an O-bar of two bits (in the place of BF16's eight), and FP8."""
    road, found = "fp32,pv=e8m2", []
    for name, plan, more in (
        ("tiles_of_64", road, []),
        ("one_tile", road, setting("model.tile_keys = 0")),
        ("tiles_of_16", road, setting("model.tile_keys = 16")),  # on the CPU alone
        *((f"layer_{n}_alone", f"fp32; layer {n - 1}: pv=e8m2", []) for n in (1, 2, 3)),
        *((f"all_but_layer_{n}", f"{road}; layer {n - 1}: pv=fp32", []) for n in (1, 2, 3)),
        ("one_head", "fp32; layer 0 head 0: pv=e8m2", []),
        ("wide_output", road + WIDE, []),
        ("consistent", road + CONSISTENT, []),
        ("output_and_delta", "fp32,output=e8m2", []),  # delta from the O that was stored, as FlashAttention has it
        ("output_delta_wide", "fp32,output=e8m2,output_for_delta=fp32", []),
        ("fp8", "fp8", []),
        ("fp8_zero_sum", "fp8" + ZERO, []),
    ):
        found += micro("claims", name, plan, (1, 2), more=more)
    return found


# The systems of papers (src/attention/precision_plan.h), and what a reader of the papers looks for.
NAMED_SYSTEMS = {"fp8_fa3": "FlashAttention-3, FP8", "fp8_deepseek": "DeepSeek-V3's FP8", "mxfp8": "MXFP8", "nvfp4": "Attn-QAT, NVFP4", "sage_int8": "SageBwd, INT8",
                 "turbo": "TurboAttention, INT8", "hifloat8": "HiFloat8", "pasa_fp16": "PASA, FP16"}  # fmt: skip


# Which operands may have 6 and 4 bits: all of them in one format, and each alone in 4 bits. Run -> words of the study's table.
OPERANDS = {"q": "q", "k": "k", "v": "v", "grad_output": "dO", "probs": "P of the forward pass", "probs_bwd": "P of the backward pass", "dscores": "dS"}
ALL_OPERANDS = {"mxfp6": ("E2M3, blocks of 32", "e2m3*block32@e8m0_up"), "mxfp4": ("E2M1, blocks of 32", "e2m1*block32@e8m0_up"), "int4_row": ("INT4, rows", "int4*row")}
FEW_BITS = {**{name: f"all: {words}" for name, (words, _) in ALL_OPERANDS.items()}, **{f"{site}_mxfp4": f"{words} alone: E2M1, blocks of 32" for site, words in OPERANDS.items()}}


def formats():
    """Formats below BF16, on the CPU: the systems of papers with and without the sum kept, and what their papers blame, site by
    site."""
    found = []
    for system in NAMED_SYSTEMS:
        found += micro("formats", system, system, (1, 2, 3))
        found += micro("formats", system + "_zero_sum", system + ZERO, (1, 2, 3))
        found += micro("formats", system + "_consistent", system + CONSISTENT, (1,))
    for name, (_, text) in ALL_OPERANDS.items():
        plan = "flash2," + ",".join(f"{site}={text}" for site in OPERANDS)
        found += micro("formats", name, plan, (1, 2, 3)) + micro("formats", name + "_zero_sum", plan + ZERO, (1, 2, 3))
    for site in OPERANDS:
        found += micro("formats", f"{site}_mxfp4", f"flash2,{site}=e2m1*block32@e8m0_up", (1, 2, 3))
        found += micro("formats", f"{site}_mxfp4_zero_sum", f"flash2,{site}=e2m1*block32@e8m0_up" + ZERO, (1, 2, 3))
    # SageBwd: is the mean key essential, is dS guilty, is the normalisation of q and k needed?
    for name, plan, more in (
        ("sage_given_keys", "sage_int8,keys=given", ()),
        ("sage_queries_centred", "sage_int8,queries=centred", ()),
        # SageAttention2's four bits, with and without the mean query; a scale for each feature of the keys, as KIVI has.
        ("sage_int4", "sage_int8,q=int4*tile,k=int4*tile", ()),
        ("sage_int4_queries_centred", "sage_int8,q=int4*tile,k=int4*tile,queries=centred", ()),
        ("k_int4_row", "flash2,k=int4*row", ()),
        ("k_int4_column", "flash2,k=int4*column", ()),
        ("sage_dscores_bf16", "sage_int8,dscores=bf16", ()),
        ("sage_dscores_alone", "flash2,dscores=int8*tile", ()),
        ("sage_qk_norm", "sage_int8", setting("model.qk_norm = true")),
        ("sage_large_batch", "sage_int8", ["--sequences", "64"]),
        ("sage_large_batch_zero_sum", "sage_int8" + ZERO, ["--sequences", "64"]),
        # Attn-QAT: the backward pass reads other operands than the forward pass read; delta from a wide O.
        ("nvfp4_unmatched", "nvfp4,q_bwd=bf16,k_bwd=bf16,probs_bwd=bf16", ()),
        ("nvfp4_wide_output", "nvfp4" + WIDE, ()),
        # PASA: FP16 with the keys as they are.
        ("pasa_given_keys", "pasa_fp16,keys=given", ()),
        # The tensor cores' 13 bits, and DeepSeek's promotion.
        ("fa3_h200", "fp8_fa3,accumulate=h200", ()),
        ("deepseek_h200", "fp8_deepseek,accumulate=h200", ()),
        ("deepseek_h200_promoted", "fp8_deepseek,accumulate=h200/4", ()),
    ):
        found += micro("formats", name, plan, more=more)
    return found


# Every operand in 8 bits. GPU kernels have no scales that blocks of P or dS share. So P is exp times 2^8 (at most 448), and dS,
# which is far below 1, has a fixed power of two. fp8_trains: what the FP8 kernels run, 8 bits forward and BF16 backward.
EIGHT_BITS = {
    "fp8_trains": "fp8_trains",
    "e4m3": "mxfp8,probs=e4m3^8/saturate,probs_bwd=e4m3^8/saturate,dscores=e5m2^22/saturate",
    "hif8": "hifloat8,dscores=hif8^16/nearest_away",
}


def eight_bits():
    """Operands of attention's products in 8 bits at nano: with the sum kept, and as they are."""
    found = []
    for name, plan in EIGHT_BITS.items():
        found += nano("eight_bits", name + "_zero_sum", plan + ZERO, 9_000, more=VALIDATE)
        found += nano("eight_bits", name, plan, 9_000, more=VALIDATE)
    return found


def law():
    """Runs at micro with what the law of drift needs: bits, learning rate and batch around one failing run."""
    found = micro("law", "output_2", "fp32,output=e8m2", (1,), LAW_PROBES, steps=1_500)
    found += micro("law", "fp32", "fp32", (1,), LAW_PROBES)
    found += micro("law", "output_3", "fp32,output=e8m3", (1,), LAW_PROBES)
    noisy = "fp32,output=e8m2/stochastic"
    found += micro("law", "lr_3e-3", noisy, (1,), [*LAW_PROBES, "--lr", "3e-3"], steps=2_000)
    found += micro("law", "lr_1.2e-2", noisy, (1,), [*LAW_PROBES, "--lr", "1.2e-2"], steps=700)
    found += micro("law", "batch_32", noisy, (1,), [*LAW_PROBES, "--sequences", "32"], steps=800)
    return found


def leaks():
    """Plans that leak in different places and sizes, probed, of a seed that no other run has: what does the leak of the first steps say?
    No number of the forecast was chosen on these runs."""
    found = []
    for name, plan, steps in (
        ("fp32", "fp32", 1_200),
        ("row_sum_2", "fp32,row_sum=e8m2", 800),
        ("row_sum_3", "fp32,row_sum=e8m3", 1_200),
        ("pv_stochastic", "fp32,pv=e8m2/stochastic", 1_000),
        ("scores", "fp32,scores=e8m2", 1_000),
        ("nvfp4", "nvfp4", 1_200),
        ("mxfp8", "mxfp8", 1_000),
        ("delta", "fp32,delta=e8m2/stochastic", 1_000),
        ("row_sum_2_zero_sum", "fp32,row_sum=e8m2" + ZERO, 800),
    ):
        found += micro("leaks", name, plan, (4,), LAW_PROBES, steps=steps)
    return found


def texts():
    """micro on another text (C headers, HTML, documentation): failing and healthy, for the forecast."""
    found = micro("texts", "output_2", "fp32,output=e8m2", (1,), LAW_PROBES)
    found += micro("texts", "fp32", "fp32", (1,), LAW_PROBES)
    found += micro("texts", "wide_output", "flash2" + WIDE, (1,), LAW_PROBES)
    found += micro("texts", "zero_sum", "fp32,row_sum=e5m2" + ZERO, (1,), LAW_PROBES)
    return found


def judged(part, size):
    """Failing and healthy runs of three seeds, so that each has earlier ones. No number of the forecast was chosen on them."""
    found = []
    for seed in (1, 2, 3):
        for name, plan in (("fp32", "fp32"), ("output", NOISY), ("row_sum", "fp32,row_sum=e5m2")):
            found += micro(part, name, plan, (seed,), steps=1_200, size=size)
            if name != "fp32":
                found += micro(part, name + "_zero_sum", plan + ZERO, (seed,), steps=1_200, size=size)
    return found


def mini():
    """A size between micro and nano: three times the parameters of micro, twice the context."""
    return judged("mini", "mini")


def other_text():
    """micro on another text (C headers, HTML, documentation), as `texts`, with more seeds."""
    return judged("other_text", "micro")


PARTS = (cure, size, matrix, hostile, hostile_micro, added_noise, exponents_micro, llama, llama_micro, llama_settings, sinks, rates, feedback, exponents, second_text, field_cases, length, square, law, leaks, texts, mini, other_text, parting, controls, seeds, twins, detect, bits, others, claims, guard, rescue, paper, nano_bits, roads, formats, eight_bits)


def runs(only):
    found = [run for part in PARTS for run in part()]
    if only:
        found = [run for run in found if run.part in only or run.folder in only or f"{run.part}-{run.name}" in only]
        found.sort(key=lambda run: min(only.index(key) for key in (run.part, run.folder, f"{run.part}-{run.name}") if key in only))
    return found
