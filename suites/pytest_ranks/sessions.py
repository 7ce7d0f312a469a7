"""Run pytest sessions whose standard input a test controls."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from suites import inner
from suites.world.faults.sessions import start_pytest

HEAD = "import os, pdb, sys, threading\nfrom pdb import set_trace\nimport pytest\n"
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:randomly", "--color=no")
PYTEST = ("pytest",)
SESSION_TIMEOUT = 240.0  # seconds for a session of pytest


def write_test(directory: Path, source: str, args: tuple[str, ...]) -> list[str]:
    """Write ``source`` as a test file with a pytest.ini of its own; return pytest's arguments to run it."""
    (directory / "pytest.ini").write_text(inner.settings(source), encoding="utf-8")
    (directory / "test_it.py").write_text(HEAD + dedent(source), encoding="utf-8")
    return [*OPTIONS, f"--rootdir={directory}", "test_it.py", *args]


@dataclass(frozen=True)
class SessionResult:
    """The output and the exit status of a pytest session."""

    text: str
    status: int

    def count(self, text: str) -> int:
        """Count how often the session printed ``text``."""
        return self.text.count(text)

    @property
    def counts(self) -> dict[str, int]:
        """The number of tests by outcome, as in ``{"passed": 1}``, from the last line of the output."""
        *_, summary = (line for line in self.text.splitlines() if re.search(r" in [\d.]+s", line))
        return {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|failed|error)", summary)}


Session = Callable[..., SessionResult]


def make_session(directory: Path) -> Session:
    """Return a function that runs pytest on a source with ``typed`` in its standard input.

    With keyword arguments of ``subprocess.run`` instead, it starts a new process with these.
    """

    def run(source: str, *args: str, typed: str = "", **subprocess_options: Any) -> SessionResult:
        arguments = write_test(directory, source, args)
        if subprocess_options:
            return run_subprocess(directory, arguments, subprocess_options)
        return run_forked(directory, arguments, typed)

    return run


def run_forked(directory: Path, arguments: list[str], typed: str) -> SessionResult:
    """Run a session, and its xdist worker if any, in forks of a process that has imported pytest and torch already."""
    with start_pytest(directory, arguments, {}, typed, spares=arguments.count("-n1")) as program:
        status = program.wait()
    return SessionResult((directory / "output.txt").read_text(), status)


def run_subprocess(
    directory: Path, arguments: list[str], options: dict[str, Any], command: tuple[str, ...] = PYTEST
) -> SessionResult:
    """Run a session in a new process with these ``options`` of ``subprocess.run``."""
    done = subprocess.run(
        [sys.executable, "-m", *command, *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SESSION_TIMEOUT,
        check=False,
        **options,
    )
    return SessionResult(done.stdout, done.returncode)


BREAKPOINT = """
@pytest.mark.world_size(2)
def test_it():
    breakpoint()
"""
