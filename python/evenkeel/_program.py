"""The evenkeel program: where pip put it, of the source tree's build, or on the PATH."""
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sysconfig

from ._library import EvenkeelError


def program_path():
    """EVENKEEL_PROGRAM, or the program beside the package's Python, or that of the source tree's build, or on the PATH."""
    asked = os.environ.get("EVENKEEL_PROGRAM")
    here = pathlib.Path(__file__).resolve().parent
    places = [pathlib.Path(asked)] if asked else [
        pathlib.Path(sysconfig.get_path("scripts")) / "evenkeel", here.parent / "bin" / "evenkeel",
        here.parents[1] / "build" / "evenkeel"]
    for place in places:
        if place.is_file():
            return str(place)
    found = None if asked else shutil.which("evenkeel")
    if found is None:
        raise EvenkeelError(f"evenkeel: expected the program at one of {', '.join(map(str, places))} or on the PATH, found none")
    return found


def json_of(command, *arguments):
    """`evenkeel COMMAND ARGUMENTS --json`: its answer. Exit code 1 is a finding, not an error."""
    done = subprocess.run([program_path(), command, *map(str, arguments), "--json"], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        words = (done.stderr or done.stdout).strip()
        with contextlib.suppress(ValueError, KeyError, TypeError):  # with --json, errors are JSON, too
            words = json.loads(words)["error"]["message"]
        raise EvenkeelError(f"evenkeel {command}: {words}")
    return json.loads(done.stdout)
