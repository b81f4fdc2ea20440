"""One forward and backward pass of a model, recorded: every call of attention, whatever door it takes. A call has q, k and v as
attention reads them, dO, and the projections they came from."""
import contextlib
import inspect
import sys

import torch
import torch.nn.functional as F

from . import _watch_calls
from ._patch import _replace
from .hf import same_sequence


def kept(t):
    """A tensor for later: on the CPU in FP32; of a GPU a copy there, which nobody waits for (Call.on_host brings it)."""
    t = t.detach()
    return t.clone(memory_format=torch.contiguous_format) if t.is_cuda else t.float().cpu().contiguous()


def kept_weights(weights):
    """The same for weights, which are larger: on their GPU where its memory is ample."""
    size = sum(w.numel() * w.element_size() for w in weights)
    if weights[0].is_cuda and torch.cuda.mem_get_info(weights[0].device)[0] < 100 * size:
        return [w.detach().float().cpu() for w in weights]
    return [kept(w) for w in weights]


class Call:
    """One call of attention: q (B, H, T, D), k, v (B, G, T, D), d_o as q, after on_host() on the CPU in FP32. Where
    its projections were found, also x (B, T, C), weights w_q (H, C, D), w_k, w_v (G, C, D)."""

    def __init__(self, part, of_output, q, k, v, scale, softcap, causal):
        """part: the piece of a tensor that is kept, (B, heads, T, D). of_output: the output's gradient in q's layout."""
        self._part, self._of_output = part, of_output
        self.q, self.k, self.v = (kept(part(t)) for t in (q, k, v))
        self.scale, self.softcap, self.causal, self.dtype = float(scale), float(softcap), bool(causal), q.dtype
        self.d_o = self.x = self.weights = None
        self.plan = None  # of our attention, with its clauses; None where it is another's

    def set_projections(self, x, weights):
        """x: the projections' input, as if it had one head."""
        self.x, self.weights = kept(self._part(x))[:, 0], weights

    def set_gradient(self, gradient):
        self.d_o = kept(self._part(self._of_output(gradient)))

    def on_host(self):
        """Brings everything to the CPU, in FP32; waits for the GPU where it is there. Through memory that the GPU's copies do
        not hold up other calls for (pinned), one call's tensors at a time."""
        names = ("q", "k", "v", "d_o", "x")
        tensors = [getattr(self, name) for name in names] + list(self.weights or ())
        brought = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                   if t is not None and t.is_cuda else t for t in tensors]
        for device in {t.device for t in tensors if t is not None and t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        brought = [None if t is None else t.float() for t in brought]
        for name, t in zip(names, brought):
            setattr(self, name, t)
        self.weights = self.weights and brought[len(names) :]
        return self


def one_sequence(visible):
    """The longest stretch [a, e) of rows that see just the keys of the stretch, in a mask (T, T) of bool. They see all of
    them, or those up to the row's own (causal). Padding on either side, packed sequences and the first rows of a sliding window have
    one. Returns a, e, is it causal; None where there is none of two rows or more."""
    T = visible.shape[0]
    row, count = torch.arange(T), visible.sum(-1)
    first = visible.to(torch.uint8).argmax(-1)
    last = T - 1 - visible.flip(-1).to(torch.uint8).argmax(-1)
    whole = (count > 0) & (count == last - first + 1)  # no hole
    best = None
    for start in torch.unique(first[whole]).tolist():
        causal = whole & (first == start) & (last == row)
        full = whole & (first == start) & (last == last[start])
        for is_causal, fits in ((True, causal), (False, full)):
            broken = (~fits[start:]).nonzero()
            end = start + (int(broken[0]) if len(broken) else T - start)
            if not is_causal and end != int(last[start]) + 1:
                continue  # some row of the stretch sees other keys
            if end - start >= 2 and (best is None or end - start > best[1] - best[0]):
                best = (start, end, is_causal)
    return best


# --- projections, found by what flowed through them


def _storage(t):
    return t.untyped_storage().data_ptr() if hasattr(t, "untyped_storage") else t.storage().data_ptr()


def _columns(view, out, heads_axis):
    """Which features of a linear layer's output `out` (..., features) a head's tensor is a view of: (heads, D); None where it
    is no view of it."""
    if _storage(view) != _storage(out) or view.dtype != out.dtype:
        return None
    offset = (view.storage_offset() - out.storage_offset()) % max(1, out.stride(-2))
    heads, D = view.shape[heads_axis], view.shape[-1]
    columns = (offset + torch.arange(heads).view(-1, 1) * view.stride(heads_axis) + torch.arange(D) * view.stride(-1))
    return columns if int(columns.max()) < out.shape[-1] and int(columns.min()) >= 0 else None


def _fused_columns(H, G, D, of_v):
    """The features of q, k and v in one layer's output: [q | k | v], or group by group where v says so."""
    per_group = H // G + 2
    if of_v is not None and G > 1 and int(of_v[1, 0] - of_v[0, 0]) == per_group * D:  # [q.. k v] of each group
        start = torch.arange(G).view(-1, 1) * per_group * D
        at = lambda n: start + n * D + torch.arange(D)
        return torch.stack([at(n) for n in range(H // G)], 1).view(H, D), at(H // G), at(H // G + 1)
    features = torch.arange((H + 2 * G) * D)
    return tuple(part.view(-1, D) for part in features.split([H * D, G * D, G * D]))


def some_of(matrix, indices, axis):
    """These rows (axis 0) or columns (axis 1). A stretch of them is a view: indices from the CPU would wait for a GPU."""
    first = int(indices[0])
    if torch.equal(indices, torch.arange(first, first + len(indices))):
        return matrix.narrow(axis, first, len(indices))
    return matrix.index_select(axis, indices.to(matrix.device))


def find_projections(linears, q, k, v, heads_axis):
    """linears: (name, weight (C, features), input, output) of the linear layers since the last attention. Returns the input,
    [w_q (H, C, D), w_k, w_v (G, C, D)] and the parts of weights by name; None where none fit. They are found by sizes: one
    layer with all features, or three layers of one input with H D, G D and G D. That is their order unless k and v are views that
    say otherwise."""
    H, G, D = q.shape[heads_axis], k.shape[heads_axis], q.shape[-1]
    pick = lambda weight, columns: some_of(weight, columns.flatten(), 1).reshape(weight.shape[0], -1, D).transpose(0, 1).clone()
    for name, weight, x, out in reversed(linears):
        if out.shape[-1] == (H + 2 * G) * D:
            given = [_columns(t, out, heads_axis) for t in (q, k, v)]
            guessed = _fused_columns(H, G, D, given[2])
            columns = [g if g is not None else c for g, c in zip(given, guessed)]
            return x, [pick(weight, c) for c in columns], {name: columns}
    for _, _, x, _ in reversed(linears):
        same = [one for one in linears if one[2].data_ptr() == x.data_ptr() and one[2].shape == x.shape]
        sizes = [one[3].shape[-1] for one in same]
        whole = torch.arange(H * D).view(H, D), torch.arange(G * D).view(G, D)
        if H * D in sizes and 2 * G * D in sizes and sizes.count(H * D) == 1 and 2 * G * D != H * D:  # q, and k beside v
            of_q, of_kv = same[sizes.index(H * D)], same[sizes.index(2 * G * D)]
            return x, [pick(of_q[1], whole[0]), pick(of_kv[1], whole[1]), pick(of_kv[1], whole[1] + G * D)], {}
        of_keys = [one for one in same if one[3].shape[-1] == G * D]
        if H == G and len(of_keys) >= 3:
            of_q, *of_keys = of_keys[:3]
        elif H * D in sizes and len(of_keys) >= 2 and H != G:
            of_q = same[sizes.index(H * D)]
        else:
            continue
        if _columns(v, of_keys[0][3], heads_axis) is not None or _columns(k, of_keys[1][3], heads_axis) is not None:
            of_keys = [of_keys[1], of_keys[0]]
        return x, [pick(of_q[1], whole[0]), pick(of_keys[0][1], whole[1]), pick(of_keys[1][1], whole[1])], {}
    return None


def _is_linear(module):
    weight = getattr(module, "weight", None)
    return (isinstance(weight, torch.Tensor) and weight.dim() == 2 and not isinstance(module, torch.nn.Embedding)
            and not list(module.children()))


def _matrix(module):
    """(C, features) of the weights in use now, a rank's own part: Linear keeps it transposed, transformers' Conv1D does not."""
    weight = module.weight.detach()
    weight = weight.to_local() if hasattr(weight, "to_local") else weight
    return weight if type(module).__name__ == "Conv1D" else weight.t()


class Recording:
    """The attention calls of one forward and backward pass, in their order. Of each: the first `sequences` sequences and
    the first `rows` rows, which with causal attention is a smaller problem of the same numbers. Of a call with a mask or with
    packed sequences: one sequence, where one can be cut out."""

    def __init__(self, model, sequences=None, rows=None):
        self.model, self.sequences, self.rows, self.calls = model, sequences, rows, []
        self.skipped, self.parts = set(), {}  # parts: name of a weight -> features of q, k, v
        self._linears = []  # (name, module, input, output) since the last attention

    def _take(self, part, of_output, q, k, v, scale, softcap, causal):
        call = Call(part, of_output, q, k, v, scale or q.shape[-1] ** -0.5, softcap or 0.0, causal)
        linears = [(name, _matrix(module), x, out) for name, module, x, out in self._linears]
        self._linears.clear()
        packed = q.dim() == 3
        found = find_projections(linears, q, k, v, heads_axis=1)
        if found is not None:
            x, weights, parts = found
            x = x.reshape(-1, 1, x.shape[-1]) if packed else x.unsqueeze(1)
            fits = x.shape[0] == q.shape[0] and (packed or x.dim() == 4 and x.shape[2] == q.shape[2])
            if fits:
                call.set_projections(x, kept_weights(weights))
                self.parts.update(parts)
        self.calls.append(call)
        return call

    def skip(self, reason):
        self._linears.clear()
        self.skipped.add(reason)

    def _end(self, first, end, causal, window):
        """Where a stretch of rows may end: a window beyond its first rows would need a mask. None: nowhere."""
        limits = [end] + [first + n for n in (self.rows, window[0] + 1 if window[0] >= 0 else None) if n is not None]
        return None if not causal and min(limits) < end else min(limits)

    def add(self, q, k, v, scale, softcap, causal, visible, heads_axis, window=(-1, -1)):
        q, k, v = (t.to_local() if hasattr(t, "to_local") else t for t in (q, k, v))
        if q.dim() != 4 or q.shape[2] != k.shape[2] or k.shape != v.shape:
            return self.skip(f"expected rows and keys of one sequence, found q {tuple(q.shape)}, k {tuple(k.shape)}")
        first, end, sequence = 0, q.shape[2], slice(0, self.sequences)
        if visible is not None:
            by_head = visible.dim() == 4 and visible.shape[1] > 1 and visible.stride(1) != 0
            if visible.dtype not in (torch.bool, torch.uint8) or by_head:
                return self.skip("expected a mask of bool that is the same for all heads, found another one")
            visible = visible.detach().reshape((1,) * (4 - visible.dim()) + tuple(visible.shape))[:1, :1]
            found = one_sequence(visible.expand(1, 1, q.shape[2], k.shape[2])[0, 0].bool().cpu())
            if found is None:
                return self.skip("expected a mask with a stretch of rows that see each other alone, found none")
            first, end, causal = found
            sequence = slice(0, 1)
        end = self._end(first, end, causal, window)
        if end is None:
            return self.skip(f"expected causal attention or at most {self.rows} rows, found {q.shape[2]}")
        part = lambda t: t.detach()[sequence, :, first:end]
        of_output = {1: lambda g: g, 2: lambda g: g.transpose(1, 2)}.get(heads_axis)
        if of_output is None:  # a function that brings the output to (B, T, H, D)
            of_output = lambda g: heads_axis(g).transpose(1, 2)
        return self._take(part, of_output, q, k, v, scale, softcap, causal)

    def add_packed(self, q, k, v, starts_q, starts_k, scale, softcap, causal, window):
        """The longest of the sequences, the first of them."""
        rows, keys = starts_q.tolist(), starts_k.tolist()
        lengths = [(b - a, -a) for a, b, c, d in zip(rows, rows[1:], keys, keys[1:]) if (a, b) == (c, d) and b > a]
        if not lengths or k.shape != v.shape:
            return self.skip("expected packed sequences with as many keys as rows, found none")
        length, first = max(lengths)
        first, end = -first, self._end(-first, length - first, causal, window)
        if end is None:
            return self.skip(f"expected causal attention or at most {self.rows} rows, found {length}")
        part = lambda t: t.detach()[first:end].transpose(0, 1).unsqueeze(0)  # of (rows, heads, D)
        return self._take(part, lambda g: g, q, k, v, scale, softcap, causal)

    @contextlib.contextmanager
    def running(self):
        """Attention calls and their gradients are recorded: gradients as long as the recording lives."""
        undo = [*_watch_doors(), *_watch_interface(self.model), *_watch_transformer_engine(self.model)]
        for name, module in self.model.named_modules():
            if _is_linear(module):
                undo.append(self._watch_linear(name, module))
        _watch_calls.start(self)
        try:
            yield self
        finally:
            _watch_calls.stop()
            self._linears.clear()
            for action in reversed(undo):
                action()

    def _watch_linear(self, name, module):
        def seen(module, inputs, output):
            if inputs and isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
                local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).detach()
                self._linears.append((name + ".weight", module, local(inputs[0]), local(output)))

        return module.register_forward_hook(seen).remove


# --- where calls are seen: everybody's doors


def _watch_doors():
    """torch's scaled_dot_product_attention and flex_attention, and flash_attn's functions, wherever they were imported."""
    undo = []
    if hasattr(F, "scaled_dot_product_attention"):
        undo.append(_replace(F, "scaled_dot_product_attention", _sdpa(F.scaled_dot_product_attention)))
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None and hasattr(flex, "flex_attention"):
        undo.append(_replace(flex, "flex_attention", _flex(flex.flex_attention)))
    for owner in ("flash_attn", "flash_attn_interface", "flash_attn.flash_attn_interface"):
        module = sys.modules.get(owner)
        for name, wrap in (("flash_attn_func", _flash), ("flash_attn_varlen_func", _flash_varlen)):
            function = getattr(module, name, None)
            # Ours are seen where they compute.
            if function is not None and not getattr(function, "__module__", "").startswith("evenkeel") and \
                    not hasattr(function, "evenkeel_watched"):
                undo.append(_replace(module, name, wrap(function)))
    return undo


def _sdpa(original):
    def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        call = lambda: original(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **options)
        return _watch_calls.seen(call, query, key, value, options.get("scale"), 0.0, is_causal, attn_mask)

    return scaled_dot_product_attention


def _flex(original):
    def flex_attention(query, key, value, score_mod=None, block_mask=None, scale=None, **options):
        call = lambda: original(query, key, value, score_mod, block_mask, scale, **options)
        if score_mod is not None:  # another model of scores than ours
            return call()
        visible = None
        if block_mask is not None:
            at = lambda n: torch.arange(n, device=query.device)
            zero = torch.zeros((), dtype=torch.long, device=query.device)
            visible = block_mask.mask_mod(zero, zero, at(query.shape[2]).view(-1, 1), at(key.shape[2]).view(1, -1))
        return _watch_calls.seen(call, query, key, value, scale, 0.0, False, visible)

    return flex_attention


def _arguments(function, arguments, options):
    """By name, with defaults; what the signature does not tell is not there."""
    try:
        bound = inspect.signature(function).bind(*arguments, **options)
        bound.apply_defaults()
        return dict(bound.arguments)
    except (TypeError, ValueError):
        return dict(zip("qkv", arguments), **options)


def _flash(original):
    def flash_attn_func(*arguments, **options):
        call = lambda: original(*arguments, **options)
        a = _arguments(original, arguments, options)
        q, k, v = (a[name].transpose(1, 2) for name in "qkv")
        window = tuple(-1 if n is None else n for n in a.get("window_size") or (-1, -1))
        causal = bool(a.get("causal")) or window[1] == 0
        return _watch_calls.seen(call, q, k, v, a.get("softmax_scale"), a.get("softcap"), causal, None, 2, window)

    flash_attn_func.evenkeel_watched = True
    return flash_attn_func


def _flash_varlen(original):
    def flash_attn_varlen_func(*arguments, **options):
        call = lambda: original(*arguments, **options)
        a = _arguments(original, arguments, options)
        if a.get("block_table") is not None or a.get("cu_seqlens_q") is None:
            return call()
        window = tuple(-1 if n is None else n for n in a.get("window_size") or (-1, -1))
        return _watch_calls.seen_packed(call, a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["cu_seqlens_k"],
                                        a.get("softmax_scale"), a.get("softcap"), bool(a.get("causal")) or window[1] == 0, window)

    flash_attn_varlen_func.evenkeel_watched = True
    return flash_attn_varlen_func


def _interface(original):
    def attention(module, query, key, value, attention_mask, *arguments, **options):
        call = lambda: original(module, query, key, value, attention_mask, *arguments, **options)
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        window = options.get("sliding_window")
        window = (window - 1, -1) if window and attention_mask is None else (-1, -1)
        starts, mask = options.get("cu_seq_lens_q"), attention_mask
        if starts is not None and mask is None and query.shape[0] == 1:
            mask = same_sequence(starts, options.get("cu_seq_lens_k"), query.shape[2], key.shape[2])
            mask = mask.tril() if causal else mask
        return _watch_calls.seen(call, query, key, value, options.get("scaling"), options.get("softcap"), causal, mask, 2,
                                 window)

    return attention


def _watch_interface(model):
    """transformers: the implementation that the model's configuration names, wrapped; SDPA instead of eager, which is
    no function of the interface."""
    config = getattr(model, "config", None)
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
    ALL_ATTENTION_FUNCTIONS[implementation] = _interface(original)

    def restore():
        if had or local is None:
            ALL_ATTENTION_FUNCTIONS[implementation] = before if had else original
        else:
            del local[implementation]

    return undo + [restore]


def _watch_transformer_engine(model):
    """TransformerEngine's DotProductAttention modules: (s, b, h, d), (b, s, h, d) or (rows, h, d) by their qkv_format."""
    undo = []
    for module in model.modules():
        if type(module).__name__ != "DotProductAttention" or "forward" in vars(module):
            continue

        def forward(query_layer, key_layer, value_layer, *arguments, original=module.forward, module=module, **options):
            call = lambda: original(query_layer, key_layer, value_layer, *arguments, **options)
            layout = options.get("qkv_format") or getattr(module, "qkv_format", "sbhd")
            causal = "causal" in (options.get("attn_mask_type") or getattr(module, "attn_mask_type", "causal"))
            scale = getattr(module, "softmax_scale", None)
            scale = scale if isinstance(scale, float) else None
            if layout == "thd":
                starts = [options.get(f"cu_seqlens_{side}") for side in ("q", "kv")]
                return _watch_calls.seen_packed(call, query_layer, key_layer, value_layer, *starts, scale, 0.0, causal)
            order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
            q, k, v = (t.permute(order) for t in (query_layer, key_layer, value_layer))
            # The output is (s, b, h d) or (b, s, h d): brought to (b, s, h, d), whose heads are on axis 2.
            heads = lambda o: (o.transpose(0, 1) if layout == "sbhd" else o).unflatten(-1, (q.shape[1], -1))
            return _watch_calls.seen(call, q, k, v, scale, 0.0, causal, None, heads)

        module.forward = forward
        undo.append(lambda module=module: module.__dict__.pop("forward", None))
    return undo
