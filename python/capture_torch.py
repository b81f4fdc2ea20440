#!/usr/bin/env python3
"""Captures one layer's attention of a Hugging Face model for `evenkeel probe`.

    capture_torch.py --model gpt2 --layer 1 --heads 0,3 --text FILE --plan flash2 -o layer1.safetensors
    capture_torch.py --self-test FOLDER     tiny random models, one capture each

Runs the model forward and backward once on some text (no padding, causal attention) with attention written out here, so
that q and k are seen as attention reads them: behind rotary embeddings and norms. Knows GPT-2 (c_attn) and every model
with q_proj, k_proj and v_proj (Llama, Mistral, Qwen, ...); key and value heads may be fewer. The plan is what
`evenkeel probe` shall compute with; the model itself runs in FP32 unless --dtype says otherwise.

Needs torch and transformers (4.50 or newer). Exit code 77: they are not here.
"""
import argparse
import json
import struct
import sys

NAME = "evenkeel_capture"


def write_safetensors(path, tensors, metadata):
    """The same layout as src/base/safetensors.h reads: header length, header, tensors one behind the other."""
    header, place = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().numpy().tobytes())


def attend(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, **options):
    """Causal attention, written out. query (B, H, T, D); key, value (B, G, T, D); returns (B, T, H, D)."""
    import torch

    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    softcap = options.get("softcap") or 0.0
    wide = lambda t: t.repeat_interleave(query.shape[1] // t.shape[1], dim=1)
    scores = query @ wide(key).transpose(-1, -2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[-2:]
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).triu(keys - rows + 1)
    probabilities = scores.float().masked_fill(hidden, float("-inf")).softmax(-1)
    out = probabilities.to(value.dtype) @ wide(value)
    seen = getattr(module, NAME, None)
    if seen is not None:
        seen.update(q=query, k=key, v=value, scale=float(scale), softcap=float(softcap))
        out.register_hook(lambda gradient: seen.update(d_o=gradient))
    return out.transpose(1, 2).contiguous(), None


def find_attention(model, layer):
    """The attention module of a layer: the one with that layer_idx and projections that we know."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) == layer and (hasattr(module, "c_attn") or hasattr(module, "q_proj")):
            return module
    sys.exit(f"expected an attention module with c_attn or q_proj in layer {layer}, found none in {type(model).__name__}")


def projections(module, heads, groups, size):
    """W_Q (H, C, D), W_K and W_V (G, C, D), as x W."""
    if hasattr(module, "c_attn"):  # Conv1D: (C, 3 C)
        parts = module.c_attn.weight.detach().split(heads * size, dim=1)
    else:  # Linear: (out, C)
        parts = [getattr(module, name).weight.detach().T for name in ("q_proj", "k_proj", "v_proj")]
    return [w.reshape(w.shape[0], n, size).transpose(0, 1) for w, n in zip(parts, (heads, groups, groups))]


def capture(model, tokens, layer, path, heads=None, plan="flash2", source="", step=0):
    """One forward and backward pass on tokens (B, T), each predicting the next; writes the capture; returns the loss."""
    import torch
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    module, seen = find_attention(model, layer), {}
    setattr(module, NAME, seen)
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(x=kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]),
        with_kwargs=True)
    try:
        with torch.enable_grad():
            loss = model(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
    finally:
        hook.remove()
        delattr(module, NAME)
        model.config._attn_implementation = before
    if "d_o" not in seen:
        sys.exit(f"expected {type(module).__name__} to call the attention function that transformers names, it did not")
    _, H, T, D = seen["q"].shape
    G = seen["k"].shape[1]
    window = getattr(module, "sliding_window", None)
    if window is not None and T > window:
        sys.exit(f"expected at most {window} tokens, the layer's sliding window, got {T}")
    heads = list(range(H)) if heads is None else heads
    # Key and value heads follow their query heads: one for each that was chosen.
    groups = [h // (H // G) for h in heads]
    if heads == list(range(H)):
        groups = list(range(G))
    w_q, w_k, w_v = projections(module, H, G, D)
    plain = lambda t: t.detach().float().cpu()
    tensors = {"q": seen["q"][:, heads], "k": seen["k"][:, groups], "v": seen["v"][:, groups],
               "d_o": seen["d_o"][:, heads], "x": seen["x"], "w_q": w_q[heads], "w_k": w_k[groups], "w_v": w_v[groups]}
    write_safetensors(path, {name: plain(t) for name, t in tensors.items()}, {
        NAME: "1", "source": source, "model": type(model).__name__, "step": str(step), "layer": str(layer),
        "heads": ",".join(map(str, heads)), "loss": repr(float(loss)), "scale": repr(seen["scale"]),
        "softcap": repr(seen["softcap"]), "causal": "1", "tile_keys": "64", "plans": "; ".join([plan] * len(heads))})
    return float(loss)


def self_test(folder):
    """Tiny random models. The captured tensors must give the gradient of W_Q that autograd found."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    tokens = torch.randint(0, 50, (2, 9))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3, attn_pdrop=0.0,
                                      embd_pdrop=0.0, resid_pdrop=0.0))
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2))
    for name, model in (("gpt2", gpt2), ("llama", llama)):
        model.eval()
        expected = model(tokens, labels=tokens).loss.item()
        loss = capture(model, tokens, 1, f"{folder}/{name}.safetensors", source=name, plan="bf16_all")
        assert abs(loss - expected) < 1e-5, f"{name}: expected the model's own loss {expected}, found {loss}"
        capture(model, tokens, 1, f"{folder}/{name}-head.safetensors", heads=[1], source=name)
        print(f"{name}: loss {loss:.4f}, captured")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or a folder that transformers knows")
    parser.add_argument("--layer", type=int, default=0, help="from 0 on")
    parser.add_argument("--heads", help="from 0 on, as in 0,3 (default: all)")
    parser.add_argument("--text", help="a file whose beginning the model reads")
    parser.add_argument("--tokens", type=int, default=512, help="how many of it")
    parser.add_argument("--plan", default="flash2", help="the precision plan to be looked at")
    parser.add_argument("--dtype", default="float32", help="of the model: float32 or bfloat16")
    parser.add_argument("-o", dest="out", help="the capture")
    parser.add_argument("--self-test", metavar="FOLDER")
    options = parser.parse_args()
    try:
        import torch
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    except ImportError as error:
        print(f"torch and transformers 4.50 or newer are needed: {error}", file=sys.stderr)
        sys.exit(77)
    if options.self_test:
        self_test(options.self_test)
        return
    if not (options.model and options.text and options.out):
        parser.error("expected --model, --text and -o")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with open(options.text, encoding="utf-8") as file:
        tokens = tokenizer(file.read(), return_tensors="pt").input_ids[:, : options.tokens]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).to(device).eval()
    heads = sorted(map(int, options.heads.split(","))) if options.heads else None
    loss = capture(model, tokens.to(device), options.layer, options.out, heads, options.plan, source=options.model)
    print(f"{options.out}: layer {options.layer}, {tokens.shape[1]} tokens, loss {loss:.4f}")


if __name__ == "__main__":
    main()
