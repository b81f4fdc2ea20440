"""Where attention calls are seen: a recording is told of q, k, v and, in the backward pass, of dO. One at a time."""
import threading

_recording = None  # has add(q, k, v, scale, softcap, causal, masked, heads_axis): a call with set_gradient(d_o), or None
_lse_listener = None  # is called with the log-sum-exp of every call of ours, (B, H, T)
_inside = threading.local()


def start(recording):
    global _recording
    _recording = recording


def stop():
    global _recording
    _recording = None


def listen_to_lse(listener):
    global _lse_listener
    _lse_listener = listener


def tell_lse(lse):
    if _lse_listener is not None:
        _lse_listener(lse)


def seen(call, q, k, v, scale, softcap, causal, masked, heads_axis=1):
    """call()'s result; its first tensor, the output with its heads on that axis, is watched for its gradient. An attention
    inside another one (SDPA that is routed here) is the same one, and seen once."""
    recording = _recording
    if recording is None or getattr(_inside, "call", False):
        return call()
    _inside.call = True
    try:
        result = call()
    finally:
        _inside.call = False
    noted = recording.add(q, k, v, scale, softcap, causal, masked, heads_axis)
    o = result[0] if isinstance(result, tuple) else result
    if noted is not None and o.requires_grad:
        o.register_hook(noted.set_gradient)
    return result
