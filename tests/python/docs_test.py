"""README.md and the pages of docs as a reader uses them: links, anchors, commands, options, plans, shell snippets. Standard library only.

Snippets are blocks between ``` marks. A block `sh` is run, `python` is run by torch_docs_test.py, `plan` is a precision plan a line, `yaml`
is a file; a block without a name shows output or a formula. The line <!-- not run: REASON --> above a block says why it cannot run in
a test. Commands and options are checked in every block and in every `code` of a paragraph, run or not.

How long commands become short: every page has a folder of its own with a text (`docs`), a run of 8 steps (`RUN`) and a capture (`FILE`).
The program is replaced by STAND_IN below. It trains two layers for at most 8 steps, reads step 4 wherever a page names another, and judges 500
rows. It stops the live view as soon as it serves, and leaves `demo`, `bench` and `test` to tests of their own.
"""

import ctypes
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("EVENKEEL_PROGRAM", str(ROOT / "build/evenkeel"))
LIBRARY = os.environ.get("EVENKEEL_LIBRARY", str(ROOT / "build/libevenkeel.so"))
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"] + sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
LOG = "docs/experiments.md"  # dated: its commands are those of their day
README_BYTES = 7_000

STAND_IN = r"""#!/usr/bin/env python3
import os, re, subprocess, sys
PROGRAM, words = os.environ["EVENKEEL_PROGRAM"], sys.argv[1:]
command = words[0] if words else ""
if command in ("demo", "bench", "test"):
    sys.exit(0)
words = [re.sub(r"^(\S+)@(STEP|\d+)$", r"\1@4", re.sub(r"^(STEP|\d+)(?= \w)", "4", word)) for word in words]
words = [re.sub(r"^run\.keep_every=.*", "run.keep_every=4", word) for word in words]
for n in range(1, len(words)):
    if words[n - 1] in ("--steps", "--warmup", "--tokens") and words[n].isdigit():
        words[n] = str(min(int(words[n]), 8))
if command == "train" and "--preset" in words:
    words += ["--set", "model.layers=2", "--set", "model.context=32", "--sequences", "2", "--backend", "cpu"]
if command == "conform":
    words += ["--rows", "500"]
if command == "watch":
    served = subprocess.Popen([PROGRAM, *words, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    line = served.stdout.readline()
    served.terminate()
    served.wait()
    sys.exit(0 if "http://127.0.0.1:" in line else 1)
code = subprocess.run([PROGRAM, *words], stdin=subprocess.DEVNULL).returncode
sys.exit(0 if code == 1 and command in ("forecast", "verdict", "isolate", "conform") else code)  # 1: a finding
"""


class Block:
    """A fenced block: its language, first line of text, text, and why it is not run ("" where it is)."""

    def __init__(self, language, line, text, reason):
        self.language, self.line, self.text, self.reason = language, line, text, reason


def blocks(text):
    found, before = [], ""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        fence = re.match(r"\s*```(\S*)$", line)
        if fence:
            inside = []
            for _, more in lines:
                if re.match(r"\s*```$", more):
                    break
                inside.append(more)
            reason = re.match(r"<!-- not run: (.+) -->$", before)
            found.append(Block(fence[1], number + 1, "\n".join(inside) + "\n", reason[1] if reason else ""))
        before = line
    return found


def without_blocks(text):
    """The page with its blocks blanked, line by line, fences included; indented code likewise."""
    text = re.sub(r"^\s*```\S*\n.*?^\s*```$", lambda match: re.sub(r"[^\n]", "", match[0]), text, flags=re.S | re.M)
    return re.sub(r"^    .*$", "", text, flags=re.M)


def slug(heading):
    """GitHub's anchor of a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def anchors(path):
    seen, out = {}, set()
    for heading in re.findall(r"^#+ (.*)$", without_blocks(path.read_text()), re.M):
        name = slug(heading)
        out.add(name if name not in seen else f"{name}-{seen[name]}")
        seen[name] = seen.get(name, 0) + 1
    return out


def link_faults(page, text):
    faults = []
    for number, line in enumerate(without_blocks(text).splitlines(), 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            path = (ROOT / page).parent / file if file else ROOT / page
            if not path.exists():
                faults.append(f"{page}:{number}: expected a file, found none: {target}")
            elif anchor and path.suffix == ".md" and anchor not in anchors(path):
                faults.append(f"{page}:{number}: expected a heading of {path.name}, found none: #{anchor}")
    return faults


def command_lines(text):
    """(line, words after `evenkeel`) of every command in a block or in code."""
    for block in blocks(text):
        joined = re.sub(r"\\\n", "  ", block.text)
        for number, line in enumerate(joined.splitlines()):
            for words in re.findall(r"(?:^|[\s;&\"'])(?:\./|\$ )?evenkeel ([a-z][^;&|\"]*)", re.sub(r"(^|\s)#.*", "", line)):
                yield block.line + number, words
    for number, line in enumerate(without_blocks(text).splitlines(), 1):
        for words in re.findall(r"`(?:\./)?evenkeel ([a-z][^`]*)`", line):
            yield number, words


def split(words):
    try:
        return shlex.split(words)
    except ValueError:  # a quote that a line ends in
        return words.split()


def command_faults(page, text, known):
    """known: options by command."""
    faults = []
    for number, line in command_lines(text):
        words = split(line)
        command = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        if command == "test" or not re.fullmatch(r"[a-z]+( [a-z]+)?", command):
            continue
        if command not in known:
            faults.append(f"{page}:{number}: expected a command of the program, found evenkeel {command}")
            continue
        for word in words:
            option = re.match(r"-{1,2}[a-z][a-z-]*", word)
            if option and option[0] not in known[command] | {"--help", "--version"}:
                faults.append(f"{page}:{number}: expected an option of evenkeel {command}, found {option[0]}")
    return faults


def plan_faults(page, text, library):
    plans = [(block.line + n, line) for block in blocks(text) if block.language == "plan" for n, line in enumerate(block.text.splitlines())]
    for number, line in command_lines(text):
        words = split(line)
        plans += [(number, value) for option, value in zip(words, words[1:]) if option == "--plan" and not re.fullmatch(r"[A-Z]+|\.\.\.", value)]
    draws = ctypes.c_int32()
    return [f"{page}:{number}: not a plan: {plan}: {library.evenkeel_last_error().decode()}" for number, plan in plans
            if library.evenkeel_plan_draws(plan.encode(), ctypes.byref(draws)) != 0]  # fmt: skip


# Words that the glossary replaces, with what to say instead.
AVOIDED = {r"derail\w*": "drift or failure", r"common (part|mode)": "offset", r"speaks?": "raises an alarm", r"told|tells": "reports, returns", r"aside": "separately", r"mend(ed|ing)?": "fix",
           r"that (is|are) none": "not a valid ...", r"go(es)? on with": "continue"}  # fmt: skip
LONGEST = 30  # words of a sentence


def prose_faults(page, text):
    """Sentences that are too long to be read once, and words that are not the glossary's, outside code, tables and headings."""
    faults = []
    text = re.sub(r"^\s*```.*?^\s*```$|<!--.*?-->|^(    |#|\|)[^\n]*$", lambda match: re.sub(r"[^\n]", "", match[0]), text, flags=re.S | re.M)
    text = re.sub(r"^(\s*)([-*]|\d+\.) ", r"\1\n", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n", text):
        plain = re.sub(r"\([^()]*\)", " x ", re.sub(r"`[^`]*`|\]\([^)]*\)", " x ", paragraph))
        for sentence in re.split(r"(?<=[.!?;:])\s+(?=[A-Zx*\[])", plain):
            words = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
            if words > LONGEST:
                faults.append(f"{page}: expected at most {LONGEST} words a sentence, found {words}: {' '.join(sentence.split())[:100]}")
        faults += [f"{page}: expected {better}, found {found[0]}" for pattern, better in AVOIDED.items() for found in re.finditer(rf"\b({pattern})\b", plain, re.I)]
    return faults


def known_options():
    answer = json.loads(subprocess.run([PROGRAM, "help", "--json"], capture_output=True, text=True, check=True).stdout)
    return {row["command"]: {option["name"] for option in row["options"]} for row in answer["commands"]}


def the_library():
    library = ctypes.CDLL(LIBRARY)
    library.evenkeel_last_error.restype = ctypes.c_char_p
    return library


class Pages(unittest.TestCase):
    def read(self, page):
        return (ROOT / page).read_text()

    def test_the_readme_takes_a_minute(self):
        self.assertLessEqual(len(self.read("README.md").encode()), README_BYTES)

    def test_links_lead_somewhere(self):
        self.assertEqual([fault for page in PAGES for fault in link_faults(page, self.read(page))], [])

    def test_commands_and_options_exist(self):
        known = known_options()
        faults = [fault for page in PAGES if page != LOG for fault in command_faults(page, self.read(page), known)]
        self.assertEqual(faults, [])
        self.assertGreater(sum(len(list(command_lines(self.read(page)))) for page in PAGES), 50)

    def test_plans_parse(self):
        library = the_library()
        self.assertEqual([fault for page in PAGES if page != LOG for fault in plan_faults(page, self.read(page), library)], [])

    def test_the_ten_questions_are_answered(self):
        rows = re.findall(r"^\| \d+ \| .* \| \[.*?\]\((.*?)\) \| \"(.*)\" \|$", self.read("docs/ten_questions.md"), re.M)
        self.assertEqual(len(rows), 10)
        for target, words in rows:
            text = (ROOT / "docs" / target).read_text()
            self.assertIn(words, re.sub(r"\s+", " ", re.sub(r"<!--.*?-->", "", text)), target)

    def test_sentences_are_short_and_words_the_glossarys(self):
        theirs = {LOG, "docs/kernels.md"}  # a log, budgets: lists of figures
        self.assertEqual([fault for page in PAGES if page not in theirs for fault in prose_faults(page, self.read(page))], [])

    def test_what_looks_like_a_command_is_in_a_block_that_is_run(self):
        faults = []
        for page in PAGES:
            if page == LOG:
                continue
            text = self.read(page)
            faults += [f"{page}:{block.line}: expected sh, python, plan, yaml or no name, found {block.language}" for block in blocks(text) if block.language not in ("sh", "python", "plan", "yaml", "")]
            outside = re.sub(r"^\s*```\S*\n.*?^\s*```$", lambda match: re.sub(r"[^\n]", "", match[0]), text, flags=re.S | re.M)
            for number, line in enumerate(outside.splitlines(), 1):
                if re.match(r"    +(\./)?(evenkeel|scripts/|pip |python3? |import |from \w+ import|mpirun|srun)", line):
                    faults.append(f"{page}:{number}: expected a block of sh or python, found {line.strip()}")
        self.assertEqual(faults, [])


class Faults(unittest.TestCase):
    """Each check finds what it is for."""

    def test_links(self):
        page = "[good](docs/study.md#the-law) [gone](docs/gone.md) [here](#limits) [nowhere](#b-a) [no](docs/study.md#law)\n"
        self.assertEqual([fault.split(": ")[-1] for fault in link_faults("README.md", page)], ["docs/gone.md", "#b-a", "#law"])

    def test_commands(self):
        known = known_options()
        page = "`evenkeel train --steps 3 --stepz 4` and `evenkeel trane`\n\n```sh\nx=1 evenkeel data prepare --tokeniser a  # --foo\n```\n"
        self.assertEqual([fault.split("found ")[-1] for fault in command_faults("x", page, known)], ["--tokeniser", "--stepz", "evenkeel trane"])

    def test_plans(self):
        page = "```plan\nflash2\nflash3\n```\n\n`evenkeel train --plan 'fp32,row_sun=bf16'`\n"
        faults = plan_faults("x", page, the_library())
        self.assertEqual([fault.split(": ")[0] for fault in faults], ["x:3", "x:6"])

    def test_prose(self):
        words = lambda count: "w " * (count - 1) + "end"
        page = f"# {words(40)}\n\n| {words(40)} |\n\n```\n{words(40)}\n```\n\n{words(31)}. The run derails. `{words(40)}` {words(29)}\n- {words(20)}\n- {words(20)}\n"
        self.assertEqual([fault.split("found ")[-1].split(":")[0] for fault in prose_faults("x", page)], ["31", "derails"])

    def test_blocks(self):
        found = blocks("<!-- not run: why -->\n```sh\na\n```\n\n```\nb\n```\n")
        self.assertEqual([(block.language, block.line, block.text, block.reason) for block in found], [("sh", 3, "a\n", "why"), ("", 7, "b\n", "")])


class Snippets(unittest.TestCase):
    def test_shell_blocks_run(self):
        shared = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, shared)
        environment = dict(os.environ, PATH=f"{shared / 'bin'}:{os.environ['PATH']}", EVENKEEL_PROGRAM=PROGRAM, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                           OMPI_MCA_rmaps_base_oversubscribe="1")  # fmt: skip
        (shared / "bin").mkdir()
        for program in (shared / "bin" / "evenkeel",):
            program.write_text(STAND_IN)
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        (shared / "first" / "docs").mkdir(parents=True)
        (shared / "first" / "docs" / "text.md").write_text("".join(f"the {'keel' if n % 7 == 0 else 'sail'} is {n % 10}.\n" for n in range(2_000)))
        run = lambda script, folder: subprocess.run(["sh", "-euxc", script], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        made = run("evenkeel train --preset micro --data docs --steps 8 --set run.keep_every=4 --plan fp32,row_sum=e5m2 --out RUN; evenkeel capture RUN@4 --layer 0 -o FILE", shared / "first")
        self.assertEqual(made.returncode, 0, made.stdout)
        count = 0
        for page in PAGES:
            script = ""
            for block in blocks((ROOT / page).read_text()):
                if block.language == "sh" and not block.reason:
                    count += 1
                    script += block.text if shutil.which("mpirun") else re.sub(r"^mpirun.*\n|^cmp .*\n", "", block.text, flags=re.M)
            if script:
                folder = shared / page.replace("/", "-")
                shutil.copytree(shared / "first", folder)
                (folder / "evenkeel").symlink_to(shared / "bin" / "evenkeel")
                done = run(script, folder)
                self.assertEqual(done.returncode, 0, f"{page}: exit code {done.returncode}\n{done.stdout}")
        self.assertGreater(count, 5)


if __name__ == "__main__":
    unittest.main()
