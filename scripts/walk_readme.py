"""Run the README's commands, top to bottom, in an empty virtual environment, with a stopwatch.

    python scripts/walk_readme.py clone|wheel FOLDER [--skip TEXT ...] [--minutes 10]

``clone`` installs a fresh clone of this repository and works in it. ``wheel`` builds a wheel of the clone, installs it
and works in a folder beside it; commands that would install the clone install the wheel instead. FOLDER must not exist.
The Python files that the README shows are written before the first command. A command that contains one of the TEXTs,
such as the name of an engine, is skipped. A command that runs longer than ``--minutes`` is ended, unless it installs
packages. The exit code is 1 if a command is ended, prints a traceback, or has another exit code than 0. Commands about
the broken engine of the page may exit with 1, and so may the scripts that torchrun starts, for which torchrun prints a
traceback.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from suites.meta.documents import ROOT, code_blocks, parse_commands, python_files

README = ROOT / "README.md"
INSTALL_SECONDS = 3600.0
BROKEN_ENGINES = ("zharness.mutants:", "failing.jsonl")  # a command about one of these may find a broken law
TORCHRUN = "torchrun "  # its scripts show a bug, with exit code 1
TRACEBACK = "Traceback (most recent call last)"
ENDED = (124, 137, -9)  # the exit codes of a command that was ended because it ran too long
INSTALLED_CLONE = re.compile(r'-e (?:"?\.(\[[\w,]+\])?"?) -c constraints\.txt')


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command: its exit code (None if it was ended), its output, and its seconds."""

    code: int | None
    output: str
    errors: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Return the last line of the output that is not empty, or of the errors if there is no output."""
        lines = [line for line in (self.output.strip() or self.errors.strip()).splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def is_expected(self, line: str) -> bool:
        """Return whether the command ``line`` may have this outcome."""
        may_fail = line.startswith(TORCHRUN) or any(text in line for text in BROKEN_ENGINES)
        has_traceback = TRACEBACK in self.output or (TRACEBACK in self.errors and not line.startswith(TORCHRUN))
        return self.code in ((0, 1) if may_fail else (0,)) and not has_traceback


@dataclass(frozen=True)
class Walk:
    """A folder with an environment of its own, and the folder in which the commands run.

    ``wheel`` is empty for a clone.
    """

    folder: Path
    work: Path
    wheel: str

    def describe_environment(self) -> dict[str, str]:
        """Return the variables of a new shell in which the environment is activated."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        programs = self.folder / "env" / "bin"
        return {**kept, "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(programs.parent)}

    def translate(self, line: str) -> str:
        """Return the command as a user of the wheel types it."""
        if not self.wheel:
            return line
        installed = INSTALLED_CLONE.sub(
            lambda found: f"'{self.wheel}{found[1] or ''}' -c {self.folder}/clone/constraints.txt", line
        )
        scripts = next((self.folder / "env" / "lib").glob("python3*")) / "site-packages" / "zharness" / "repro"
        return re.sub(r" repro/", f" {scripts}/", installed)

    def run(self, line: str, seconds: float) -> Outcome:
        """Run a command in bash, which is ended after ``seconds``."""
        began = time.monotonic()
        command = ["timeout", "--signal=INT", "--kill-after=60", str(seconds), "bash", "-c", self.translate(line)]
        done = subprocess.run(
            command, cwd=self.work, env=self.describe_environment(), stdin=subprocess.DEVNULL, capture_output=True,
            text=True,
        )  # fmt: skip
        code = None if done.returncode in ENDED else done.returncode
        return Outcome(code, done.stdout, done.stderr, time.monotonic() - began)


def prepare(kind: str, folder: Path) -> Walk:
    """Clone the repository, make an empty environment, and build the wheel."""
    folder.mkdir(parents=True)
    clone = folder / "clone"
    subprocess.run([shutil.which("git") or "git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    if kind == "clone":
        return Walk(folder, clone, "")
    work = folder / "work"
    work.mkdir()
    pip = [str(folder / "env" / "bin" / "python"), "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*pip, str(clone)], check=True)
    return Walk(folder, work, str(next(folder.glob("*.whl"))))


def list_lines(skipped: list[str]) -> Iterator[str]:
    """Yield the README's commands that contain none of the texts ``skipped``."""
    for command in parse_commands(README):
        if not any(text in command.line for text in skipped):
            yield command.line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("clone", "wheel"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--skip", action="append", default=[], metavar="TEXT", help="may be repeated")
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists; name a folder that does not")
    walk, wrong = prepare(arguments.kind, arguments.folder.resolve()), 0
    for name, text in python_files(README).items():
        (walk.work / name).write_text(text, encoding="utf-8")
    assert code_blocks(README, "console"), "the README has commands"
    for line in list_lines(arguments.skip):
        done = walk.run(line, INSTALL_SECONDS if line.startswith("pip ") else 60 * arguments.minutes)
        print(f"{done.seconds:6.1f} s  exit {done.code}  {line}\n            {done.last_line[:150]}", flush=True)
        if not done.is_expected(line):
            wrong += 1
            print((done.output + done.errors)[-4000:], flush=True)
    print(f"{wrong} commands went wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
