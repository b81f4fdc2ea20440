"""Where attention calls are seen: a recording gets q, k, v and, in the backward pass, dO. One at a time."""
import threading

_recording = None  # has add(...) and add_packed(...): a call with set_gradient(d_o), or None
_lse_listener = None  # is called with the log-sum-exp of every call of ours, (B, H, T)
_inside = threading.local()


def start(recording):
    global _recording
    _recording = recording


def stop():
    global _recording
    _recording = None


def is_recording():
    return _recording is not None


def not_recorded(call, why):
    """call()'s result; a recording gets the reason why it does not have the call."""
    if _recording is not None and not getattr(_inside, "call", False):
        _recording.skip(why)
    return call()


def listen_to_lse(listener):
    global _lse_listener
    _lse_listener = listener


def tell_lse(lse):
    if _lse_listener is not None:
        _lse_listener(lse)


def _observed(call, add, plan=None):
    """call()'s result; its first tensor, the output, is watched for its gradient. An attention inside another one (SDPA that
    is routed here) is the same one, and seen once. plan: of our attention, where it is ours."""
    recording = _recording
    if recording is None:
        return call()
    if getattr(_inside, "call", False):
        _inside.plan = plan or _inside.plan
        return call()
    _inside.call, _inside.plan = True, plan
    try:
        result = call()
    finally:
        _inside.call = False
    noted = add(recording)
    if noted is not None:
        noted.plan = _inside.plan
    o = result[0] if isinstance(result, tuple) else result
    if noted is not None and o.requires_grad:
        o.register_hook(noted.set_gradient)
    return result


def seen(call, q, k, v, scale, softcap, causal, visible=None, heads_axis=1, window=(-1, -1), plan=None):
    """q (B, H, T, D), k, v (B, G, N, D). The output has its heads on that axis, 1 or 2, or that function brings it to
    (B, T, H, D). Visible: bool or uint8, broadcast to (B, H, T, N), or None."""
    return _observed(call, lambda recording: recording.add(q, k, v, scale, softcap, causal, visible, heads_axis, window), plan)


def seen_packed(call, q, k, v, starts_q, starts_k, scale, softcap, causal, window=(-1, -1), plan=None):
    """q (R, H, D), k, v (S, G, D), the output as q."""
    return _observed(call, lambda recording: recording.add_packed(q, k, v, starts_q, starts_k, scale, softcap, causal, window), plan)
