"""Capture files and the library's probes of them: what src/diagnosis/capture.h describes, of one call of attention."""
import ctypes
import inspect
import json
import math
import struct

import torch

from ._library import check, library
from ._recording import Recording

CAPTURE_VERSION = "1"


def safetensors_of(tensors, metadata):
    """FP32 tensors, one behind the other, as src/base/safetensors.h reads them: bytes, as a tensor. PyTorch copies them, so that
    other threads of Python go on meanwhile."""
    header, place = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    text = struct.pack("<Q", len(text)) + text
    content = torch.empty(len(text) + place, dtype=torch.uint8)
    content[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    place = len(text)
    for tensor in tensors.values():
        size = tensor.numel() * 4
        content[place : place + size] = tensor.contiguous().view(-1).view(torch.uint8)
        place += size
    return content


def write_capture(file, *arguments, **options):
    """capture_of's bytes to a file."""
    content = capture_of(*arguments, **options)
    file.write(ctypes.string_at(content.data_ptr(), content.numel()))


def capture_of(call, layer, heads=None, plan="flash2", source="", model="", step=0, loss=math.nan):
    """Of one call; heads: their numbers, all by default."""
    B, H, T, D = call.q.shape
    G = call.k.shape[1]
    everyone = heads is None or list(heads) == list(range(H))
    heads = list(range(H)) if everyone else list(heads)
    # Key and value heads follow their query heads: one for each that was chosen.
    groups = list(range(G)) if everyone else [h // (H // G) for h in heads]
    some = lambda t, axis, which: t if everyone else t.index_select(axis, torch.tensor(which))
    tensors = {"q": some(call.q, 1, heads), "k": some(call.k, 1, groups), "v": some(call.v, 1, groups),
               "d_o": some(call.d_o, 1, heads)}
    if call.x is not None:
        w_q, w_k, w_v = call.weights
        tensors.update(x=call.x, w_q=some(w_q, 0, heads), w_k=some(w_k, 0, groups), w_v=some(w_v, 0, groups))
    return safetensors_of(tensors, {
        "evenkeel_capture": CAPTURE_VERSION, "source": source, "model": model, "step": str(step), "layer": str(layer),
        "heads": ",".join(map(str, heads)), "loss": repr(float(loss)), "scale": repr(call.scale),
        "softcap": repr(call.softcap), "causal": str(int(call.causal)), "tile_keys": "64",
        "plans": "; ".join([plan] * len(heads) if isinstance(plan, str) else [plan[h] for h in heads])})


def capture(model, run, layer, path, heads=None, plan="flash2", source="", step=0):
    """One forward and backward pass of the model; layer `layer`'s attention goes to the file `path`, for `evenkeel probe`.
    Returns the loss. The model's gradients are as they were before.

    run: a function that returns the loss of a forward pass, or tokens (B, T) for models of transformers.
    Heads: numbers in ascending order, all by default. Plan: what the probes compute with.
    """
    name = "evenkeel.capture"
    if isinstance(run, torch.Tensor):
        tokens = run
        try:
            inspect.signature(model.forward).bind(tokens, labels=tokens, use_cache=False)
        except TypeError:
            raise TypeError(f"{name}: expected a model of transformers for tokens, found {type(model).__name__}, whose forward does not take labels; "
                            "give a function that returns the loss: lambda: model(x, y)[1]") from None
        run = lambda: model(tokens, labels=tokens, use_cache=False).loss
    recording = Recording(model)
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        for p, _ in gradients:
            p.grad = None
        with torch.enable_grad(), recording.running():
            loss = run()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TypeError(f"{name}: expected a function that returns the loss, one number, found one that returns "
                                f"{type(loss).__name__}{f' of shape {tuple(loss.shape)}' if isinstance(loss, torch.Tensor) else ''}; where a "
                                "model returns (logits, loss): lambda: model(x, y)[1]")
            loss.backward()
    finally:
        for p, gradient in gradients:
            p.grad = gradient
    count = len(recording.calls)
    if not 0 <= layer < count:
        why = "".join(f"; {reason}" for reason in sorted(recording.skipped))
        raise ValueError(f"{name}: expected a layer from 0 on among the calls of attention that can be captured, found "
                         f"{layer} and {count} such calls in {type(model).__name__}{why}")
    call = recording.calls[layer].on_host()
    if call.d_o is None:
        raise ValueError(f"{name}: expected a gradient of the output of layer {layer}'s attention, found none")
    H = call.q.shape[1]
    if heads is not None and (not heads or list(heads) != sorted(set(heads)) or heads[0] < 0 or heads[-1] >= H):
        raise ValueError(f"{name}: expected heads from 0 to {H - 1} in ascending order, found {heads}")
    with open(path, "wb") as file:
        write_capture(file, call, layer, heads, plan, source, type(model).__name__, step, float(loss.detach()))
    return float(loss.detach())


# --- probes


def probe_fields():
    fields = []
    while True:
        name = library().evenkeel_probe_field(len(fields))
        if name is None:
            return fields
        fields.append(name.decode())


def probe(call, layer, plan):
    """name -> (H) numbers."""
    content, fields, H = capture_of(call, layer, plan=plan), probe_fields(), call.q.shape[1]
    values = (ctypes.c_double * (H * len(fields)))()
    check(library().evenkeel_probe(content.data_ptr(), content.numel(), values, len(values)), "evenkeel.Monitor")
    return {name: [values[h * len(fields) + n] for h in range(H)] for n, name in enumerate(fields)}


def spectral_norm(matrix):
    """The largest singular value of a matrix, by the library."""
    matrix, norm = matrix.detach().float().cpu().contiguous(), ctypes.c_double()
    check(library().evenkeel_spectral_norm(matrix.data_ptr(), *matrix.shape, ctypes.byref(norm)), "evenkeel.Monitor")
    return norm.value
