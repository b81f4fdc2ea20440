"""python -m evenkeel isolate MODULE:FUNCTION RUN [--steps N] [--budget N] [--exact]: FUNCTION returns a training and its
checkpoints, as evenkeel.isolate takes them. With `python -m evenkeel conform MODULE:FUNCTION [options]` an attention function is
judged. Any other command goes to the evenkeel program."""
import os
import sys

from . import _program
from ._named import function_named


def _isolate(arguments):
    import argparse

    parser = argparse.ArgumentParser(prog="python -m evenkeel isolate", description=__doc__)
    parser.add_argument("training", metavar="MODULE:FUNCTION", help="a function that returns (training, checkpoints)")
    parser.add_argument("run", metavar="RUN", help="the folder that a Monitor wrote")
    parser.add_argument("--steps", type=int, default=200, help="of one replay at most")
    parser.add_argument("--budget", type=int, default=40, help="replays at most")
    parser.add_argument("--exact", action="store_true", help="replays repeat the recorded losses to the bit")
    options = parser.parse_args(arguments)
    from ._isolate import isolate
    from ._library import EvenkeelError

    wanted = "a function of yours that returns (training, checkpoints) (docs/pytorch.md, \"Which rounding did it?\")"
    made = function_named(parser, options.training, wanted)()
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        parser.error(f"expected MODULE:FUNCTION, {wanted}, found one that returns {type(made).__name__}")
    try:
        found = isolate(*made, options.run, options.steps, options.budget, options.exact,
                        tell=lambda words: print(f"  {words}", flush=True))
    except (EvenkeelError, ValueError, TypeError) as error:
        if not str(error).startswith("evenkeel.isolate: "):
            raise  # of the training itself: its author wants the whole trace
        print(error, file=sys.stderr)
        return 3 if isinstance(error, EvenkeelError) else 2  # as the program: bad data, bad arguments
    for link in found["evidence"]:
        print(f"- {link}")
    print(f"verdict: {found['cause']}\n{found['words']}\nhow sure: {found['certainty']}")
    if found["next_command"]:
        print(f"next: {found['next_command']}")
    return 0 if found["cause"] == "healthy" else 1


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    # A run of our own trainer is the program's; MODULE:FUNCTION is ours.
    if arguments[:1] == ["isolate"] and len(arguments) > 1 and (":" in arguments[1] or arguments[1] in ("-h", "--help")):
        return _isolate(arguments[1:])
    # The program judges its own kernels and those of libraries.
    if arguments[:1] == ["conform"] and any(":" in a and not a.startswith("-") for a in arguments[1:]):
        from ._conform_command import main as judge

        return judge(arguments[1:])
    program = _program.program_path()
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    sys.exit(main())
