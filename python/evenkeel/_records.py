"""The files of a run's folder for Python: metrics.jsonl, an object a step, and config.toml. Standard library only, so that scripts
which have no PyTorch read them too. The same rules as src/records: a record may still be written, or be of another version."""
import errno
import json
import math
import os
import pathlib

METRICS, CONFIG = "metrics.jsonl", "config.toml"
# Older names of fields, of a line and of the probe in it: those of the schema's table (src/records/schema.cpp; records_test
# compares them).
ALIASES = {"": {"largest_row_mean": "offset", "residual_mean": "leak_mean", "residual_error": "leak_error",
                "residual_rms": "leak_rms"},
           "probe": {"largest_row_mean": "offset", "residual_mean": "leak_mean", "residual_error": "leak_error",
                     "residual_z": "leak_z", "residual_rms": "leak_rms", "residual_share": "leak_size"}}
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _worded(value):
    """The same for JSON, which has no word for NaN and infinities: the strings that src/records writes and reads."""
    if isinstance(value, dict):
        return {name: _worded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_worded(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _numbered(value):
    """The opposite of _worded; null is a number that is not known."""
    if isinstance(value, dict):
        return {name: inner if name == "guard" else _numbered(inner) for name, inner in value.items()}  # its words are no numbers
    if isinstance(value, list):
        return [_numbered(inner) for inner in value]
    return math.nan if value is None else _NUMBERS.get(value, value) if isinstance(value, str) else value


def _renamed(fields, inside):
    for old, name in ALIASES[inside].items():
        if old in fields:
            fields.setdefault(name, fields.pop(old))
    return fields


def refuse_link(path, expected):
    """OSError where there is a symbolic link; expected: what may stand there. A run is not written through links: its folder may be
    somebody else's work, and a link may lead anywhere."""
    if os.path.islink(path):
        raise OSError(errno.ELOOP, f"expected {expected} or nothing, found a symbolic link: a run is not written through links; only "
                      "its whole folder may be one", str(path))


def open_record(path, mode):
    """A file of a run's folder, to be written."""
    refuse_link(path, "a regular file")
    opener = lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)


def line_of(fields):
    """A line of metrics.jsonl."""
    return json.dumps(_worded(fields), allow_nan=False) + "\n"


def step_of(line):
    """The fields of a line by their names of today, numbers as numbers; None for a line that is torn or of no step."""
    try:
        fields = json.loads(line)
        fields["step"] = int(fields["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    if "null" in line or "NaN" in line or "Infinity" in line:  # seldom: a walk through every number is slow
        fields = _numbered(fields)
    _renamed(fields, "")
    if isinstance(fields.get("probe"), dict):
        _renamed(fields["probe"], "probe")
    return fields


def read_steps(folder):
    """Every recorded step of a run's folder, ascending; of one that was made again (after a roll-back or a kill), the last. An
    empty list without a record."""
    steps = {}
    try:
        with open(pathlib.Path(folder) / METRICS, encoding="utf-8", errors="replace") as file:
            for fields in map(step_of, file):
                if fields is not None:
                    steps[fields["step"]] = fields
    except OSError:
        pass
    return [steps[step] for step in sorted(steps)]


def largest_offset(layers):
    """Of a line's or a probe's field `offset`; a number that is none is infinite."""
    return max(x if math.isfinite(x) else math.inf for heads in layers for x in heads)


def read_config(folder):
    """config.toml as a dict; OSError or ValueError where there is none that can be read."""
    text = (pathlib.Path(folder) / CONFIG).read_text(encoding="utf-8")
    try:
        import tomllib
    except ImportError:  # before Python 3.11: the lines `name = value` of tables, which is all that this package needs
        return _plain_config(text)
    return tomllib.loads(text)


def _plain_config(text):
    tables, table = {}, {}
    for line in map(str.strip, text.splitlines()):
        name, equals, value = (part.strip() for part in line.partition("="))
        if line.startswith("[") and line.endswith("]"):
            table = tables.setdefault(line.strip("[]"), {})
        elif equals:
            try:
                table[name] = json.loads(value)
            except ValueError:
                continue
    return tables
