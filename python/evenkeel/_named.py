"""MODULE:FUNCTION of a command line: anyone's function, found or refused in words."""
import importlib
import os
import sys


def function_named(parser, text, wanted):
    """The function. parser.error (exit code 2) where there is none; wanted: what was expected of it."""
    module, colon, words = text.partition(":")
    if not colon:
        parser.error(f"expected MODULE:FUNCTION, found {text!r}")
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise  # the module is there and lacks another one
        parser.error(f"expected MODULE:FUNCTION, {wanted}, found no module {module!r} here or on PYTHONPATH")
    for word in words.split("."):
        if not hasattr(found, word):
            parser.error(f"expected MODULE:FUNCTION, {wanted}, found no {word!r} in {module!r}")
        found = getattr(found, word)
    return found
