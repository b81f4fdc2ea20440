"""Compares Evenkeel's models with PyTorch's and Hugging Face's. tests/pytorch_test.cpp runs it.

usage: check_model.py gradients FOLDER...  loss and gradients, against PyTorch in FP64
       check_model.py make FOLDER          a tiny random model of transformers, saved, with some of its logits; the folder's name
                                           is its type: gpt2, llama or qwen3
       check_model.py load FOLDER          FOLDER/ours, written by Evenkeel, read by transformers: the same logits?

`gradients` reads model.safetensors, gradients.safetensors and batch.json (heads, tokens, targets, loss). In the place of the
first two there may be folders model and gradients in transformers' form (of type llama or qwen3). It writes faults.json, a list
of what is not equal. One call takes many folders, since loading PyTorch takes most of the time. `make` writes
model.safetensors, config.json and logits.json (tokens, logits of the token behind each prefix). `load` reads
ours and compares with logits.json. Exit code 0: equal within the bounds; 1: not; 77: a package is not
there.
"""

import json
import math
import struct
import sys
from pathlib import Path

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

# Of FP32 sums in other orders: the largest ||ours - theirs|| / ||theirs|| of a tensor, and of the loss. A wrong factor or
# a missing term is larger by orders of magnitude.
GRADIENT_BOUND = 1e-5
LOSS_BOUND = 1e-6
LOGIT_BOUND = 1e-5  # of the largest logit


def read_safetensors(path):
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        assert entry["dtype"] == "F32", entry
        values = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32)
        tensors[name] = values.reshape(entry["shape"]).double()
    return tensors


def causal_attention(q, k, v):
    """O by its definition; q, k, v, O: (B, H, T, D)."""
    T = q.shape[-2]
    hidden = torch.triu(torch.ones(T, T, dtype=torch.bool, device=q.device), 1)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def gpt2_loss(w, heads, tokens, targets, attention=causal_attention):
    """GPT-2 by its definition, plain operations on whole tensors (B, T). w: tensors by Hugging Face's names."""

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    def linear(x, name):  # (in, out), as Conv1D keeps it
        y = x @ w[f"{name}.weight"]
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    B, T = tokens.shape
    x = w["wte.weight"][tokens] + w["wpe.weight"][:T]
    layer = 0
    while f"h.{layer}.ln_1.weight" in w:
        h = f"h.{layer}"
        C = x.shape[-1]
        q, k, v = (
            t.reshape(B, T, heads, C // heads).transpose(1, 2)
            for t in linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(C, dim=2)
        )
        o = attention(q, k, v).transpose(1, 2).reshape(B, T, C)
        x = x + linear(o, f"{h}.attn.c_proj")
        inner = F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + linear(inner, f"{h}.mlp.c_proj")
        layer += 1
    logits = norm(x, "ln_f") @ w.get("lm_head.weight", w["wte.weight"]).T
    return F.cross_entropy(logits.reshape(B * T, -1), targets.reshape(B * T))


def turned(x, base):
    """Rotary positions of x (B, H, T, D): features p and p + D / 2 are one complex number, turned by its place."""
    D, T = x.shape[-1], x.shape[-2]
    angle = torch.outer(torch.arange(T, dtype=x.dtype), base ** (-torch.arange(0, D, 2, dtype=x.dtype) / D))
    z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), dim=-1)


def llama_loss(w, config, tokens, targets, attention=causal_attention):
    """A Llama or a Qwen3 by its definition. w: tensors by the names of transformers; config: its config.json."""
    heads, groups, D = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def of_heads(x, name, count, is_key_or_query):
        x = linear(x, f"{name}_proj").reshape(B, T, count, D)
        if is_key_or_query and f"{name}_norm.weight" in w:
            x = norm(x, f"{name}_norm")
        x = x.transpose(1, 2)
        return turned(x, config["rope_theta"]) if is_key_or_query else x

    B, T = tokens.shape
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        inner = norm(x, f"{name}.input_layernorm")
        q = of_heads(inner, f"{name}.self_attn.q", heads, True)
        k, v = (of_heads(inner, f"{name}.self_attn.{kind}", groups, kind == "k") for kind in "kv")
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        o = attention(q, k, v).transpose(1, 2).reshape(B, T, heads * D)
        x = x + linear(o, f"{name}.self_attn.o_proj")
        inner = norm(x, f"{name}.post_attention_layernorm")
        inner = F.silu(linear(inner, f"{name}.mlp.gate_proj")) * linear(inner, f"{name}.mlp.up_proj")
        x = x + linear(inner, f"{name}.mlp.down_proj")
    logits = norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
    return F.cross_entropy(logits.reshape(B * T, -1), targets.reshape(B * T))


def check_gradients(folder):
    batch = json.loads((folder / "batch.json").read_text())
    tokens, targets = torch.tensor(batch["tokens"]), torch.tensor(batch["targets"])
    whole = folder / "model"  # in transformers' form, or a file of our names
    weights = read_safetensors(whole / "model.safetensors" if whole.exists() else folder / "model.safetensors")
    ours = read_safetensors(folder / "gradients" / "model.safetensors" if whole.exists() else folder / "gradients.safetensors")
    for tensor in weights.values():
        tensor.requires_grad_(True)
    if whole.exists():
        loss = llama_loss(weights, json.loads((whole / "config.json").read_text()), tokens, targets)
    else:
        loss = gpt2_loss(weights, batch["heads"], tokens, targets)
    loss.backward()
    faults = []
    error = abs(batch["loss"] - loss.item()) / loss.item()
    if not error <= LOSS_BOUND:
        faults.append(f"loss: expected {loss.item()}, found {batch['loss']}")
    if set(weights) != set(ours):
        faults.append(f"tensors: expected {sorted(weights)}, found {sorted(ours)}")
    worst = 0.0
    for name, tensor in weights.items():
        difference = ((ours[name] - tensor.grad).norm() / tensor.grad.norm()).item()
        worst = max(worst, difference)
        if not difference <= GRADIENT_BOUND:
            faults.append(f"{name}: ||ours - PyTorch's|| / ||PyTorch's|| is {difference:.3g}, above {GRADIENT_BOUND}")
    print(f"loss within {error:.1e}, {len(weights)} gradients within {worst:.1e} (bounds {LOSS_BOUND}, {GRADIENT_BOUND})")
    (folder / "faults.json").write_text(json.dumps(faults))
    return faults


def transformers():
    try:
        import transformers as package
    except ImportError as error:
        print(f"skipped: {error}")
        sys.exit(77)
    return package


def last_logits(model, tokens):
    """Logits (V) of the token behind each prefix of the tokens."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].tolist()


def config_of(kind):
    """A tiny one of transformers' own: gpt2, llama or qwen3. 77 where this version does not know it."""
    common = dict(vocab_size=37, bos_token_id=0, eos_token_id=0, use_cache=False)
    if kind == "gpt2":
        return transformers().GPT2Config(n_layer=2, n_head=3, n_embd=24, n_positions=16, **common)
    common |= dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16)
    if kind == "llama":
        return transformers().LlamaConfig(num_key_value_heads=2, tie_word_embeddings=False, **common)
    if not hasattr(transformers(), "Qwen3Config"):
        print("skipped: this version of transformers has no Qwen3")
        sys.exit(77)
    return transformers().Qwen3Config(num_key_value_heads=1, head_dim=10, tie_word_embeddings=True, **common)


def make(folder):
    torch.manual_seed(1)
    model = transformers().AutoModelForCausalLM.from_config(config_of(folder.name)).float().eval()
    with torch.no_grad():  # gains and biases too, and large enough to matter
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, safe_serialization=True)
    tokens = torch.randint(0, 37, (16,)).tolist()
    (folder / "logits.json").write_text(json.dumps({"tokens": tokens, "logits": last_logits(model, tokens)}))
    return []


def load(folder):
    kept = json.loads((folder / "logits.json").read_text())
    model = transformers().AutoModelForCausalLM.from_pretrained(folder / "ours").float().eval()
    found, expected = torch.tensor(last_logits(model, kept["tokens"])), torch.tensor(kept["logits"])
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    print(f"{folder.name}: logits within {error:.1e} (bound {LOGIT_BOUND})")
    return [] if error <= LOGIT_BOUND else [f"logits: largest difference {error:.3g} of the largest, above {LOGIT_BOUND}"]


def main():
    verbs = {"gradients": check_gradients, "make": make, "load": load}
    if len(sys.argv) < 3 or sys.argv[1] not in verbs:
        sys.exit(__doc__)
    faults = [fault for folder in sys.argv[2:] for fault in verbs[sys.argv[1]](Path(folder))]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
