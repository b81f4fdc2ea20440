"""Writes what the pages of README.md and docs take from elsewhere (scripts/study --docs), or checks it (--docs --check).

A page has eight kinds of marks, all HTML comments, which a reader does not see:
    <!-- study: NAME --> ... <!-- end -->               a table: the function NAME_table of study_docs.py, from docs/curves or a table of docs/experiments.md
    <!-- evenkeel ARGUMENTS --> ... <!-- end -->         what the program prints: commands, options, plans, records
    <!-- shown: evenkeel ARGUMENTS --> ... <!-- end -->  the command and what it prints, as a terminal shows them
    <!-- include/evenkeel.h --> ... <!-- end -->         the functions of the C interface
    <!-- src/FILE NAME -->value<!-- -->                 a constant of the code
    <!-- = QUANTITY RUN... -->value<!-- -->             a figure, see Figures.value; RUN may have * for any characters, @NAME is a row of GROUPS
    <!-- experiments.md -->value<!-- -->                a figure that docs/experiments.md has in the same words; no curve is behind it
    <!-- given -->words<!-- -->                         chosen or defined, not measured: a setting, a formula; several lines end with <!-- end -->
Every other number must be quoted ("") or in code (``), or be of a kind that NAMES lists: else --check names it. So no result can be typed by hand.
The pages of NOT_LINTED are left out, each for the reason that stands there.
docs/experiments.md marks a table that others show in part: <!-- table: NAME --> before its first line.
"""

import re
import shlex
import subprocess

from study_docs import NONE, Figures, table

NOT_LINTED = {
    "docs/experiments.md": "the log: every section has the commands of its figures",
    "docs/scoreboard.md": "scripts/scoreboard writes all of it",
    "docs/kernels.md": "budgets are computed where they stand",
}

BLOCK = re.compile(r"(<!-- study: (\S+) -->\n)(.*?)(<!-- end -->)", re.S)
INLINE = re.compile(r"(<!-- = ([^>]*?) -->)(.*?)(<!-- -->)", re.S)
PRINTED = re.compile(r"(<!-- evenkeel ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.S)
SHOWN = re.compile(r"(<!-- shown: evenkeel ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.S)
CONSTANT = re.compile(r"(<!-- (src/\S+ k\w+) -->)(.*?)(<!-- -->)", re.S)
DECLARED = re.compile(r"(<!-- (include/evenkeel\.h) -->\n)(.*?)(<!-- end -->)", re.S)
GIVEN = re.compile(r"<!-- given -->.*?<!-- (end )?-->", re.S)
CITED = re.compile(r"(<!-- experiments\.md(?:: ([^>]*?))? -->)(.*?)(<!-- -->)", re.S)


def line_of(text, place):
    return text.count("\n", 0, place) + 1


def section_of(log, beginning):
    """The one section of the log whose heading, without its date, begins so; its smaller headings belong to it."""
    headings = list(re.finditer(r"^(#+) (?:\d{4}-\d\d-\d\d: )?(.*)$", re.sub(r"```.*?```", lambda code: re.sub(r"[^\n]", " ", code[0]), log, flags=re.S), re.M))
    found = [n for n, heading in enumerate(headings) if beginning and heading[2].startswith(beginning)]
    if len(found) != 1:
        raise ValueError(f'expected one section of docs/experiments.md that begins with "{beginning}", found {len(found)}')
    first = headings[found[0]]
    end = next((heading.start() for heading in headings[found[0] + 1 :] if len(heading[1]) <= len(first[1])), len(log))
    return log[first.start() : end]


def has_words(text, words):
    """Do these words stand there as a whole? "4" does not stand in "46", "1,4", "4.5", "1e-4" or "4 %"."""
    return re.search(r"(?<![\w.,+-])" + re.escape(words) + r"(?!\w|[.,-]\d| ?%)", text) is not None


def printed(program, arguments):
    """What the program prints, without a blank line at its ends. An exit code of 1 is a finding, and what it found is printed."""
    done = subprocess.run([program, *shlex.split(arguments)], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise ValueError(f"evenkeel {arguments}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip("\n") + "\n"


def constant(root, words):
    """The number that a line of the code gives to a name."""
    file, name = words.split()
    path = root / file
    found = re.search(rf"\b{name} = ([\d.'e+-]+)f?[;,]", path.read_text()) if path.exists() else None
    if not found:
        raise ValueError(f"expected {name} = NUMBER in {file}, found none")
    value = float(found[1].replace("'", ""))
    return f"{value:,.0f}" if value == int(value) else found[1]


def declared(header):
    """The functions of the C interface: each with the comment above or beside it."""
    comment = r"/\*(?:[^*]|\*(?!/))*\*/"
    plain = lambda text: re.sub(r"\s+", " ", text).strip()
    rows = []
    for note, call, beside in re.findall(rf"({comment}\n)?^EVENKEEL_API ([^;]*);(?: ({comment}))?", header, re.M):
        words = plain(re.sub(r"^/\*|\*/$|^ \* ?", " ", (beside or note).strip(), flags=re.M)).removeprefix("--- ")
        rows.append([f"`{plain(call)}`", words.replace("|", "\\|")])
    return table(["function", "contract"], rows)


def page_with_figures(root, name, text, figures, program):
    """The page as it should be, and what is wrong with it as it is: (line, words)."""
    faults = []

    def content(match):
        """What belongs between the marks of a block."""
        if match.re is PRINTED:
            return printed(program, match[2])
        if match.re is SHOWN:
            return f"```\n$ evenkeel {match[2]}\n{printed(program, match[2])}```\n"
        if match.re is DECLARED:
            return declared(figures.header)
        wanted = getattr(figures, match[2] + "_table", None)
        if wanted is None:
            raise ValueError(f"expected the name of a table, found {match[2]}")
        return wanted()

    def block(match):
        try:
            return match[1] + "\n" + content(match) + "\n" + match[4]
        except (ValueError, TypeError, KeyError, IndexError, OSError) as error:
            faults.append((line_of(text, match.start()), f"{match[2]}: {error}"))
            return match[0]

    def inline(match):
        try:
            value = constant(root, match[2]) if match.re is CONSTANT else figures.value(match[2])
            if value in ("", NONE, "NaN"):
                raise ValueError("expected a value, found that the curves have none")
            return match[1] + value + match[4]
        except (ValueError, TypeError, KeyError, IndexError, OSError) as error:
            faults.append((line_of(text, match.start()), f"{match[2]}: {error}"))
            return match[0]

    for match in CITED.finditer(text):
        try:
            if not has_words(section_of(figures.experiments, match[2] or ""), match[3]):
                faults.append((line_of(text, match.start()), f'expected words of docs/experiments.md, section "{match[2]}", found "{match[3]}"'))
        except ValueError as error:
            faults.append((line_of(text, match.start()), f"{match[3]}: {error}"))
    kinds = ((BLOCK, block), (PRINTED, block), (SHOWN, block), (DECLARED, block), (INLINE, inline), (CONSTANT, inline))
    for pattern, replace in kinds:
        for match in pattern.finditer(text):
            wanted = replace(match)
            if wanted != match[0]:
                for n, (old, new) in enumerate(zip(match[0].splitlines(), wanted.splitlines())):
                    if old != new:
                        faults.append((line_of(text, match.start()) + n, f"expected {new.strip()}, found {old.strip()}"))
                        break
                else:
                    faults.append((line_of(text, match.start()), f"{match[2]}: expected {len(wanted.splitlines())} lines, found {len(match[0].splitlines())}"))
    wanted = text
    for pattern, replace in kinds:
        wanted = pattern.sub(replace, wanted)
    faults = list(dict.fromkeys(faults))
    return wanted, faults + (unmarked_numbers(text) if name not in NOT_LINTED else [])


# What a number may be outside the marks: the kinds that no measurement gives.
NAMES = re.compile("|".join((
    r"GPT-2( 124M)?|HiFloat8|FlashAttention-\d|ZeRO-\d|FSDP\d|W_\w|log2|H\d00|C\+\+20|\b[a-z]\d\b",  # names of things
    r"(Debian|CUDA|Python|PyTorch|cuDNN|transformers|flash_attn|capability) \d+(\.\d+)?( and \d)?",  # versions
    r"arXiv \d+\.\d+(v\d)?|sections? \d|Figures? \d+( and \d+)?",  # places in a text
    r"\bE\dM\d|\b(BF|FP|TF)\d+|\d+(,? (and )?\d+)* ((extra|significand|exponent) )?bits?\b|\b2\^\(?-?\w+",  # formats and powers of two
    r"layers? \d( (or|and) \d)?|[Ss]eeds? \d(, \d)*( and \d)?|[Rr]anks? \d",  # which of several
    r"^\| \d{1,2} (?=\|)|^\*\*\d+\.",  # numbers of rows and paragraphs
)), re.M)  # fmt: skip


def unmarked_numbers(text):
    """(line, words) of every number that is neither generated, cited, given, quoted nor in code."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])
    for pattern in (BLOCK, PRINTED, SHOWN, DECLARED, GIVEN, INLINE, CONSTANT, CITED, re.compile(r"```.*?```", re.S), re.compile(r"^(    .*|#.*)$", re.M),
                    re.compile(r"`[^`]*`"), re.compile(r'"[^"]*"'), re.compile(r"\]\([^)]*\)"), re.compile(r"<!--.*?-->", re.S), re.compile(r"^\s*\d+\. ", re.M), NAMES):  # fmt: skip
        text = pattern.sub(blank, text)
    return [(line_of(text, m.start()), f"expected a figure from the curves (or a mark that says where it comes from), found {m[0]}")
            for m in re.finditer(r"\d[\d.,]*", text)]  # fmt: skip


def pages_of(root):
    return ["README.md"] + sorted(f"docs/{path.name}" for path in (root / "docs").glob("*.md"))


def write_docs(root, check, program):
    """Returns the exit code: 0, or 1 where a page differs from its sources (check) or has a number from nowhere."""
    figures = Figures(root / "docs" / "curves", (root / "docs" / "experiments.md").read_text())
    header = root / "include" / "evenkeel.h"
    figures.header = header.read_text() if header.exists() else ""
    failed = False
    for name in pages_of(root):
        path = root / name
        text = path.read_text()
        wanted, faults = page_with_figures(root, name, text, figures, program)
        if not check and wanted != text:
            path.write_text(wanted)
            print(f"{name}: written")
            faults = page_with_figures(root, name, wanted, figures, program)[1]
        for line, words in faults:
            print(f"{name}:{line}: {words}")
        failed = failed or bool(faults)
    if failed and check:
        print("scripts/study --docs writes the generated parts of the pages")
    return 1 if failed else 0
