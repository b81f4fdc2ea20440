"""Watching attention in anyone's model: evenkeel.Monitor over a training, evenkeel.capture for one layer at one step.

Both see q, k and v as attention reads them, and dO, wherever the model calls torch's scaled_dot_product_attention,
transformers' attention interface or evenkeel.attention. What a head's probes are is defined by the library alone.
"""
import contextlib
import ctypes
import io
import json
import math
import pathlib
import struct
import time
import warnings

import torch
import torch.nn.functional as F

from . import _watch_calls
from ._library import check, library
from .hf import same_sequence

CAPTURE_VERSION = "1"
METRICS_SCHEMA = 1


# --- one pass of a model, recorded


class Call:
    """One call of attention: q (B, H, T, D), k, v (B, G, T, D), d_o as q, on the CPU in FP32."""

    def __init__(self, part, q, k, v, scale, softcap, causal, module, x):
        """part: the piece of a tensor that is kept, (B, heads, T, D); x: the layer's input, as if it had one head."""
        self.part, self.module = part, module
        self.q, self.k, self.v = (_kept(part(t)) for t in (q, k, v))
        self.x = None if x is None else _kept(part(x))[:, 0]  # (B, T, C)
        self.scale, self.softcap, self.causal, self.dtype = float(scale), float(softcap), bool(causal), q.dtype
        self.d_o = None

    def set_gradient(self, gradient):
        self.d_o = _kept(self.part(self.of_output(gradient)))

    @staticmethod
    def of_output(gradient):
        return gradient


def _kept(t):
    return t.detach().float().cpu().contiguous()


def one_sequence(visible, causal):
    """The longest stretch [a, e) of rows that see just the keys of the stretch: all of them, or with causal those up to the
    row's own; of a mask (T, T) of bool. Padding on either side, packed sequences and the first rows of a sliding window have
    one. Returns a, e, is it causal; None where there is none of two rows or more."""
    T = visible.shape[0]
    row = torch.arange(T)
    count = visible.sum(-1)
    first = visible.to(torch.uint8).argmax(-1)
    last = T - 1 - visible.flip(-1).to(torch.uint8).argmax(-1)
    whole = (count > 0) & (count == last - first + 1)  # no hole
    best = None
    for start in torch.unique(first[whole]).tolist():
        for is_causal, fits in ((True, whole & (first == start) & (last == row)), (False, whole & (first == start) & (row <= last))):
            end = start
            stop = T if is_causal or not whole[start] else int(last[start]) + 1
            while end < stop and bool(fits[end]) and (is_causal or int(last[end]) == stop - 1):
                end += 1
            if not is_causal and end != stop:
                continue  # some row of the stretch sees other keys
            if end - start >= 2 and (best is None or end - start > best[1] - best[0]):
                best = (start, end, is_causal)
    return best


class Recording:
    """The attention calls of one forward and backward pass, in their order. Of each: the first `sequences` sequences and
    the first `rows` rows, which with causal attention is a smaller problem of the same numbers. Of a call with a mask or with
    packed sequences: one sequence, where one can be cut out."""

    def __init__(self, model, sequences=None, rows=None):
        self.model, self.sequences, self.rows, self.calls = model, sequences, rows, []
        self.skipped = set()
        self._modules = []  # attention modules whose forward is running: (module, x)

    def _take(self, part, q, k, v, scale, softcap, causal, of_output):
        module, x = self._modules[-1] if self._modules else (None, None)
        if x is not None:
            x = x.unsqueeze(1) if q.dim() == 4 else x.flatten(0, 1).unsqueeze(1)
            rows = 2 if q.dim() == 4 else 0
            x = x if x.shape[0] == q.shape[0] and x.shape[rows] == q.shape[rows] else None
        call = Call(part, q, k, v, scale or q.shape[-1] ** -0.5, softcap or 0.0, causal, module, x)
        call.of_output = of_output
        self.calls.append(call)
        return call

    def _skip(self, reason):
        self.skipped.add(reason)

    def _rows(self, first, end, causal, window):
        """Where a stretch of rows may end: a window beyond its first rows would need a mask."""
        limits = [end] + [first + n for n in (self.rows, window[0] + 1 if window[0] >= 0 else None) if n is not None]
        if not causal and min(limits) < end:
            return None
        return min(limits)

    def add(self, q, k, v, scale, softcap, causal, visible, heads_axis, window=(-1, -1)):
        q, k, v = (t.to_local() if hasattr(t, "to_local") else t for t in (q, k, v))
        if q.dim() != 4 or q.shape[2] != k.shape[2] or k.shape != v.shape:
            return self._skip(f"expected rows and keys of one sequence, found q {tuple(q.shape)}, k {tuple(k.shape)}")
        first, end, sequence = 0, q.shape[2], slice(0, self.sequences)
        if visible is not None:
            if visible.dtype not in (torch.bool, torch.uint8) or self._heads_differ(visible):
                return self._skip("expected a mask of bool that is the same for all heads, found another one")
            mask = visible.detach().expand(q.shape[0], visible.shape[-3] if visible.dim() > 2 else 1, *q.shape[2:3], k.shape[2])
            found = one_sequence(mask[0, 0].bool().cpu(), causal)
            if found is None:
                return self._skip("expected a mask with a stretch of rows that see each other alone, found none")
            first, end, causal = found
            sequence = slice(0, 1)
        end = self._rows(first, end, causal, window)
        if end is None:
            return self._skip(f"expected causal attention or at most {self.rows} rows, found {q.shape[2]}")
        part = lambda t: t.detach()[sequence, :, first:end]
        return self._take(part, q, k, v, scale, softcap, causal, (lambda g: g) if heads_axis == 1 else (lambda g: g.transpose(1, 2)))

    @staticmethod
    def _heads_differ(visible):
        return visible.dim() == 4 and visible.shape[1] > 1 and visible.stride(1) != 0

    def add_packed(self, q, k, v, starts_q, starts_k, scale, softcap, causal, window):
        """The longest of the first sequences that fit."""
        rows, keys = starts_q.tolist(), starts_k.tolist()
        lengths = [(b - a, -a) for a, b, c, d in zip(rows, rows[1:], keys, keys[1:]) if (a, b) == (c, d)]
        if not lengths or k.shape != v.shape:
            return self._skip("expected packed sequences with as many keys as rows, found none")
        length, first = max(lengths)
        first, end = -first, self._rows(-first, length - first, causal, window)
        if end is None:
            return self._skip(f"expected causal attention or at most {self.rows} rows, found {length}")
        part = lambda t: t.detach()[first:end].transpose(0, 1).unsqueeze(0)  # of (rows, heads, D)
        return self._take(part, q, k, v, scale, softcap, causal, lambda g: g)

    # --- where calls are seen

    def _sdpa(self, original):
        def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
            call = lambda: original(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
                                    **options)
            return _watch_calls.seen(call, query, key, value, options.get("scale"), 0.0, is_causal, attn_mask)

        return scaled_dot_product_attention

    def _interface(self, original):
        def attention(module, query, key, value, attention_mask, *arguments, **options):
            call = lambda: original(module, query, key, value, attention_mask, *arguments, **options)
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            window = options.get("sliding_window")
            window = (window - 1, -1) if window and attention_mask is None else (-1, -1)
            starts = options.get("cu_seq_lens_q")
            if starts is not None and attention_mask is None and query.shape[0] == 1:
                T, N = query.shape[2], key.shape[2]
                attention_mask = same_sequence(starts, options.get("cu_seq_lens_k"), T, N)
                attention_mask = attention_mask.tril() if causal else attention_mask
            return _watch_calls.seen(call, query, key, value, options.get("scaling"), options.get("softcap"), causal,
                                     attention_mask, 2, window)

        return attention

    @contextlib.contextmanager
    def running(self):
        """Attention calls and their gradients are recorded: gradients as long as the recording lives."""
        undo = []
        original = getattr(F, "scaled_dot_product_attention", None)
        if original is not None:
            F.scaled_dot_product_attention = self._sdpa(original)
            undo.append(lambda: setattr(F, "scaled_dot_product_attention", original))
        undo += self._watch_interface()
        for module in self.model.modules():
            if has_projections(module):
                undo += self._watch_module(module)
        _watch_calls.start(self)
        try:
            yield self
        finally:
            _watch_calls.stop()
            for action in reversed(undo):
                action()

    def _watch_interface(self):
        """transformers: the implementation that the model's configuration names, wrapped; SDPA instead of eager, which is
        no function of the interface."""
        config = getattr(self.model, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if implementation is None:
            return []
        try:
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        except ImportError:
            return []
        undo = []
        if implementation == "eager":
            config._attn_implementation = implementation = "sdpa"
            undo.append(lambda: setattr(config, "_attn_implementation", "eager"))
        original = ALL_ATTENTION_FUNCTIONS[implementation]
        local = getattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", None)
        had = local is not None and implementation in local
        before = local[implementation] if had else None
        ALL_ATTENTION_FUNCTIONS[implementation] = self._interface(original)

        def restore():
            if had or local is None:
                ALL_ATTENTION_FUNCTIONS[implementation] = before if had else original
            else:
                del local[implementation]

        return undo + [restore]

    def _watch_module(self, module):
        def enter(module, arguments, options=None):
            x = (options or {}).get("hidden_states", arguments[0] if arguments else None)
            self._modules.append((module, x if isinstance(x, torch.Tensor) and x.dim() == 3 else None))

        def leave(module, _arguments, _result):
            if self._modules:
                self._modules.pop()

        try:
            handles = [module.register_forward_pre_hook(enter, with_kwargs=True)]
        except TypeError:  # torch 1.x
            handles = [module.register_forward_pre_hook(enter)]
        handles.append(module.register_forward_hook(leave))
        return [handle.remove for handle in handles]


# --- projections


def has_projections(module):
    return hasattr(module, "c_attn") or all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj"))


def projections(module, H, G, D):
    """W_Q (H, C, D), W_K and W_V (G, C, D), as x W; None where the module's are not of these sizes."""
    def matrix(layer):  # (C, out): Linear keeps it transposed, transformers' Conv1D does not
        weight = layer.weight.detach()
        return weight.t() if isinstance(layer, torch.nn.Linear) else weight

    if hasattr(module, "c_attn"):
        whole = matrix(module.c_attn)
        if whole.shape[1] != (H + 2 * G) * D:
            return None
        parts = whole.split([H * D, G * D, G * D], dim=1)
    else:
        parts = [matrix(getattr(module, name)) for name in ("q_proj", "k_proj", "v_proj")]
        if [part.shape[1] for part in parts] != [H * D, G * D, G * D]:
            return None
    return [w.reshape(w.shape[0], n, D).transpose(0, 1).float().cpu() for w, n in zip(parts, (H, G, G))]


# --- captures


def write_safetensors(file, tensors, metadata):
    """FP32 tensors, one behind the other, as src/base/safetensors.h reads them."""
    header, place = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        tensor = tensor.contiguous()
        file.write(ctypes.string_at(tensor.data_ptr(), tensor.numel() * 4))


def write_capture(file, call, layer, heads=None, plan="flash2", source="", model="", step=0, loss=math.nan):
    """What src/diagnosis/capture.h describes, of one call; heads: their numbers, all by default."""
    B, H, T, D = call.q.shape
    G = call.k.shape[1]
    everyone = heads is None or list(heads) == list(range(H))
    heads = list(range(H)) if everyone else list(heads)
    # Key and value heads follow their query heads: one for each that was chosen.
    groups = list(range(G)) if everyone else [h // (H // G) for h in heads]
    tensors = {"q": call.q[:, heads], "k": call.k[:, groups], "v": call.v[:, groups], "d_o": call.d_o[:, heads]}
    weights = None if call.module is None else projections(call.module, H, G, D)
    if call.x is not None and weights is not None:
        w_q, w_k, w_v = weights
        tensors.update(x=call.x, w_q=w_q[heads], w_k=w_k[groups], w_v=w_v[groups])
    write_safetensors(file, tensors, {
        "evenkeel_capture": CAPTURE_VERSION, "source": source, "model": model, "step": str(step), "layer": str(layer),
        "heads": ",".join(map(str, heads)), "loss": repr(float(loss)), "scale": repr(call.scale),
        "softcap": repr(call.softcap), "causal": str(int(call.causal)), "tile_keys": "64",
        "plans": "; ".join([plan] * len(heads))})


def capture(model, run, layer, path, heads=None, plan="flash2", source="", step=0):
    """One forward and backward pass of the model; layer `layer`'s attention goes to the file `path`, for `evenkeel probe`.
    Returns the loss.

    run: a function that returns the loss of a forward pass; or tokens (B, T), for models of transformers.
    heads: numbers in ascending order; all by default. plan: what the probes shall compute with.
    """
    name = "evenkeel.capture"
    if isinstance(run, torch.Tensor):
        tokens = run
        run = lambda: model(tokens, labels=tokens, use_cache=False).loss
    recording = Recording(model)
    with torch.enable_grad(), recording.running():
        loss = run()
        loss.backward()
    count = len(recording.calls)
    if not 0 <= layer < count:
        why = "".join(f"; {reason}" for reason in sorted(recording.skipped))
        raise ValueError(f"{name}: expected a layer from 0 on among the calls of attention that can be captured, found "
                         f"{layer} and {count} such calls in {type(model).__name__}{why}")
    call = recording.calls[layer]
    if call.d_o is None:
        raise ValueError(f"{name}: expected a gradient of the output of layer {layer}'s attention, found none")
    H = call.q.shape[1]
    if heads is not None and (not heads or list(heads) != sorted(set(heads)) or heads[0] < 0 or heads[-1] >= H):
        raise ValueError(f"{name}: expected heads from 0 to {H - 1} in ascending order, found {heads}")
    window = getattr(call.module, "sliding_window", None)
    if window is not None and call.q.shape[2] > window:
        raise ValueError(f"{name}: expected at most {window} rows, the layer's sliding window, found {call.q.shape[2]}")
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
    file = io.BytesIO()
    write_capture(file, call, layer, plan=plan)
    content, fields, H = file.getvalue(), probe_fields(), call.q.shape[1]
    values = (ctypes.c_double * (H * len(fields)))()
    check(library().evenkeel_probe(content, len(content), values, len(values)), "evenkeel.Monitor")
    return {name: [values[h * len(fields) + n] for h in range(H)] for n, name in enumerate(fields)}


def _short(x):
    """Five digits, as the trainer's records have."""
    return float(f"{x:.4e}") if math.isfinite(x) else x


def _worded(value):
    """The same for JSON, which has no word for NaN and infinities: the strings that src/records writes and reads."""
    if isinstance(value, dict):
        return {name: _worded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_worded(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def spectral_norms(model):
    """name -> the largest singular value of every weight of two axes; q, k and v side by side are three."""
    norms = {}
    for name, weight in model.named_parameters():
        if weight.dim() != 2:
            continue
        parts, labels = [weight.detach()], [name]
        if name.endswith("c_attn.weight"):
            axis = 0 if weight.shape[0] == 3 * weight.shape[1] else 1
            parts, labels = weight.detach().chunk(3, dim=axis), [f"{name}[{letter}]" for letter in "qkv"]
        for label, part in zip(labels, parts):
            part = part.double()
            gram = part.t() @ part if part.shape[0] > part.shape[1] else part @ part.t()
            largest = torch.linalg.eigvalsh(gram)[-1] if bool(torch.isfinite(gram).all()) else gram.new_tensor(math.nan)
            norms[label] = _short(math.sqrt(max(0.0, float(largest))) if math.isfinite(float(largest)) else math.nan)
    return norms


# Of the probes, those that the trainer's records have beside the step, too: the facts of src/records/schema.h, in its order
# (a test compares them).
_FACTS = ("largest_score", "offset", "mean_lse", "largest_lse", "tied_rows", "leak_mean", "leak_error", "leak_rms",
          "delta_rms")


class Monitor:
    """Writes folder/metrics.jsonl, with the keys of `evenkeel train`, from anyone's training loop:

        monitor = evenkeel.Monitor(model, "runs/mine", every=100)
        for step in range(steps):
            loss = model(...); loss.backward(); optimizer.step()
            monitor.step(loss, lr=lr)                # after the backward pass, once a step

    Every step: step, loss, lr, gradient_norm, tokens_per_second, as far as they are given; with evenkeel's attention, not
    compiled, mean_lse and largest_lse of every layer and head too. Every `every`-th step the
    attention of the first forward pass is recorded and probed: log-sum-exp, offset, ties, leak, largest scores,
    spectral norms, for every layer and head, on the first `sequences` sequences and `rows` rows.
    plan: the arithmetic that ties and leaks are computed with; by default FlashAttention-2's for BF16, none for FP32.
    A compiled model must be given as torch.compile returned it; recorded steps run without the compiler.
    """

    def __init__(self, model, folder, every=100, sequences=1, rows=256, plan=None, first_step=0):
        for name, value in (("every", every), ("sequences", sequences), ("rows", rows)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"evenkeel.Monitor: expected {name} of 1 or more, found {value!r}")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"evenkeel.Monitor: expected a torch.nn.Module, found {type(model).__name__}")
        library()  # now, not at the first recorded step
        self.model, self.every, self.sequences, self.rows, self.plan = model, every, sequences, rows, plan
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / "metrics.jsonl", "a", encoding="utf-8")
        self._next, self._recording, self._open = first_step, None, None
        self._running, self._first = {}, True
        self._lse = []  # of this step's calls of evenkeel's attention: mean and largest |L|, (H) each
        self._began = time.perf_counter()
        self._handles = [model.register_forward_pre_hook(self._enter), model.register_forward_hook(self._leave)]

    def _enter(self, *_):
        if self._open is not None:  # the last forward pass was left by an exception
            self._open.close()
            self._open = self._recording = None
        if not torch.is_grad_enabled():
            return
        self._lse = []
        _watch_calls.listen_to_lse(self._hear)
        if self._next % self.every != 0 or self._recording is not None:
            return
        self._recording = Recording(self.model, self.sequences, self.rows)
        self._open = contextlib.ExitStack()
        stance = getattr(getattr(torch, "compiler", None), "set_stance", None)
        if stance is not None:
            self._open.enter_context(stance("force_eager"))
        self._open.enter_context(self._recording.running())

    def _hear(self, lse):
        lse = lse.detach()
        self._lse.append((lse.mean((0, 2)), lse.abs().amax((0, 2))))

    def _leave(self, *_):
        _watch_calls.listen_to_lse(None)
        if self._open is not None:
            self._open.close()
            self._open = None

    def step(self, loss, lr=None, gradient_norm=None, tokens=None):
        """Writes the step's line. tokens: how many it read."""
        now = time.perf_counter()
        line = {"step": self._next, "loss": float(loss.detach() if isinstance(loss, torch.Tensor) else loss)}
        for name, value in (("lr", lr), ("gradient_norm", gradient_norm)):
            if value is not None:
                line[name] = float(value)
        if tokens is not None:
            line["tokens_per_second"] = tokens / (now - self._began)
        if self._first:
            line["schema"], line["backend"], self._first = METRICS_SCHEMA, "pytorch", False
        if len({len(mean) for mean, _ in self._lse}) == 1:  # one number of heads
            for name, values in zip(("mean_lse", "largest_lse"), zip(*self._lse)):
                line[name] = [[_short(x) for x in layer] for layer in torch.stack(values).tolist()]
        if self._recording is not None:
            line.update(self._probed(self._recording, line["loss"]))
            self._recording = None
        self._file.write(json.dumps(_worded(line), allow_nan=False) + "\n")
        self._file.flush()
        self._next += 1
        self._began = time.perf_counter()

    def _probed(self, recording, loss):
        calls = [call for call in recording.calls if call.d_o is not None]
        heads = {call.q.shape[1] for call in calls}
        if len(heads) != 1:
            why = "; ".join(sorted(recording.skipped)) or f"{len(recording.calls)} calls, {len(calls)} with a gradient"
            warnings.warn(f"evenkeel.Monitor: expected layers of attention with one number of heads, found {len(heads)} "
                          f"such numbers: {why}", stacklevel=3)
            return {}
        layers = []
        for layer, call in enumerate(calls):
            plan = self.plan or ("fp32" if call.dtype == torch.float32 else "flash2")
            layers.append(probe(call, layer, plan))
        for layer, fields in enumerate(layers):
            running = self._running.setdefault(layer, [0.0] * len(fields["delta_error_sum"]))
            for h, value in enumerate(fields["delta_error_sum"]):
                running[h] += value if not math.isnan(value) else 0.0
            fields["delta_error_running"] = running
        by_head = {name: [[_short(x) for x in fields[name]] for fields in layers] for name in layers[0]}
        sequences = calls[0].q.shape[0]
        probed = {"step": self._next, "loss": loss, "sequences": sequences,
                  "rows": sequences * calls[0].q.shape[2], **by_head, "norms": spectral_norms(self.model)}
        return {"fact_sequences": sequences, **{name: by_head[name] for name in _FACTS}, "probe": probed}

    def close(self):
        for handle in self._handles:
            handle.remove()
        self._leave()
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
