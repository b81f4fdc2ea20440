"""python -m evenkeel conform MODULE:FUNCTION: judges an attention function of anyone's module."""
import argparse
import ctypes
import mmap
import os
import resource
import signal
import sys
import traceback

from ._named import function_named

_PROGRAM = "python -m evenkeel conform"
_PR_SET_PDEATHSIG = 1


def _in_child_process(judge):
    """The exit code of judge(), which calls code of others in a child process. Whatever that does to its process, this one is
    left to say so: an end without a verdict, by os._exit(0) too, is an error; after a signal this process ends by the same."""
    verdict = mmap.mmap(-1, 1)  # 1 + the exit code, 0: none; both processes see it
    sys.stdout.flush()  # or both would print it
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches both; one trace is enough
        code = None
        try:
            code = judge()
        except SystemExit as ended:  # 2 is argparse's, with words; anything else is the module's own
            code = 2 if ended.code == 2 else None
        except Exception:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        verdict[0] = 0 if code is None else 1 + code
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if verdict[0]:
        return verdict[0] - 1
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        print(f"{_PROGRAM}: ended by signal {number} ({signal.strsignal(number)}) in code of the function's module", file=sys.stderr)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # ours would show nothing
        os.kill(os.getpid(), number)
        return 128 + number  # a signal that ends nobody
    print(f"{_PROGRAM}: ERROR: expected a verdict, found a call that ended the process (exit code {os.WEXITSTATUS(status)}): mend "
          "the function first; it was not judged", file=sys.stderr)
    return 1


def main(arguments):
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__)
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="of q, k, v and is_causal (evenkeel.conform says more)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float16", "float32"), help="of the forms")
    parser.add_argument("--plan", help="whose roundings are granted (default: flash2, of float32: fp32)")
    parser.add_argument("--rows", type=int, default=100_000, help="of a family; 0: no families")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer forms, four families")
    parser.add_argument("--aligned", action="store_true", help="causal: the last row is aligned with the last key")
    parser.add_argument("--not-deterministic", action="store_true", help="a second call may have other bits")
    parser.add_argument("--case", metavar="FILE", help="judge this form alone, as --failing writes it")
    parser.add_argument("--failing", metavar="FILE", help="write the smallest failing form there (safetensors)")
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="the judgement as JSON (default: printed)")
    parser.add_argument("--junit", metavar="FILE", help="for a test runner")
    parser.add_argument("--badge", metavar="FILE", help="an SVG")
    options = parser.parse_args(arguments)
    return _in_child_process(lambda: _judged(parser, options))


def _judged(parser, options):
    import faulthandler

    import torch

    faulthandler.enable(sys.__stderr__)  # a function that ends the process by a signal is named with its line
    from ._conform import conform

    fn = function_named(parser, options.function, "an attention function of yours (docs/check_my_kernel.md)")
    report = conform(fn, options.device, getattr(torch, options.dtype), options.rows, plan=options.plan, seed=options.seed,
                     quick=options.quick, dtypes=[getattr(torch, d) for d in options.dtypes or []] or None,
                     deterministic=not options.not_deterministic, aligned=options.aligned, case=options.case,
                     failing=options.failing)
    report.save(None if options.json == "-" else options.json, options.junit, options.badge)
    if options.json == "-":
        import json

        print(json.dumps(report.json, indent=1))
    else:
        print(report)
    return 0 if report.passes else 1
