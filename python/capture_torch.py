#!/usr/bin/env python3
"""Captures one layer's attention of a Hugging Face model for `evenkeel probe`.

    capture_torch.py --model gpt2 --layer 1 --heads 0,3 --text FILE --plan flash2 -o layer1.safetensors
    capture_torch.py --self-test FOLDER     tiny random models, one capture each

Runs the model forward and backward once on some text (no padding, causal attention); evenkeel.capture sees q and k as
attention reads them, behind rotary embeddings and norms. Knows the projections of GPT-2 (c_attn) and of every model with
q_proj, k_proj and v_proj (Llama, Mistral, Qwen, ...); key and value heads may be fewer. The plan is what `evenkeel probe`
shall compute with; the model itself runs in FP32 unless --dtype says otherwise.

Needs torch and transformers (4.50 or newer). Exit code 77: they are not here.
"""
import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))


def self_test(folder):
    """Tiny random models, whose loss must be their own."""
    import torch
    from evenkeel import capture
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

        from evenkeel import capture
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
