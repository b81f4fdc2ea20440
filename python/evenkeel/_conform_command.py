"""python -m evenkeel conform MODULE:FUNCTION: judges an attention function of anyone's module."""
import argparse
import sys

from ._named import function_named


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m evenkeel conform", description=__doc__)
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
