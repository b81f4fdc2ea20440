"""What rivals of `evenkeel bench attention --gpu --forms` share: PyTorch on a GPU or exit code 77, answers in lines of JSON, a stopwatch."""

import contextlib
import json
import sys

answers = sys.stdout
sys.stdout = sys.stderr  # nothing but answers goes to the pipe

CALLS = 4  # that follow one another without a gap


@contextlib.contextmanager
def on_gpu():
    """The imports of a rival. Exit code 77 where one fails, or there is no PyTorch that sees a GPU."""
    try:
        yield
        import torch

        torch.zeros(1, device="cuda")
    except Exception as error:  # whatever keeps PyTorch from a GPU
        print(f"no PyTorch with a GPU: {error}", file=sys.stderr)
        sys.exit(77)


def seconds_of(call):
    import torch

    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    began.record()
    for _ in range(CALLS):
        call()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) * 1e-3 / CALLS


def serve(answer_of):
    """Says which PyTorch this is, then answers every line of standard input: what answer_of(question) returns, or its error."""
    import torch

    def answer(what):
        print(json.dumps(what), file=answers, flush=True)

    answer({"torch": torch.__version__})
    for line in sys.stdin:
        try:
            answer(answer_of(json.loads(line)))
        except Exception as error:
            answer({"error": (str(error).strip() or repr(error)).splitlines()[0]})
