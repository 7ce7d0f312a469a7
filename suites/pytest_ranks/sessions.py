"""Sessions of pytest in which somebody, or a script, is at standard input."""

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
from suites.world.faults.sessions import pytest

HEAD = "import os, pdb, sys, threading\nfrom pdb import set_trace\nimport pytest\n"
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:randomly", "--color=no")
PYTEST = ("pytest",)
SESSION_TIMEOUT = 240.0  # seconds for a session of pytest


def write_test(directory: Path, source: str, args: tuple[str, ...]) -> list[str]:
    """``source`` as a test file of ``directory``, away from the settings of this repository: pytest's arguments."""
    (directory / "pytest.ini").write_text(inner.settings(source), encoding="utf-8")
    (directory / "test_it.py").write_text(HEAD + dedent(source), encoding="utf-8")
    return [*OPTIONS, f"--rootdir={directory}", "test_it.py", *args]


@dataclass(frozen=True)
class SessionResult:
    """What a session of pytest printed, and its status."""

    text: str
    status: int

    def count(self, words: str) -> int:
        return self.text.count(words)

    @property
    def counts(self) -> dict[str, int]:
        """The last line's numbers: ``{"passed": 1}``."""
        *_, last = (line for line in self.text.splitlines() if re.search(r" in [\d.]+s", line))
        return {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|error)", last)}


Session = Callable[..., SessionResult]


def make_session(directory: Path) -> Session:
    """A function that runs pytest on a source, with ``typed`` in the pipe that is its standard input; or with another
    one, by subprocess's arguments."""

    def run(source: str, *args: str, typed: str = "", **given: Any) -> SessionResult:
        arguments = write_test(directory, source, args)
        return run_started(directory, arguments, given) if given else run_forked(directory, arguments, typed)

    return run


def run_forked(directory: Path, arguments: list[str], typed: str) -> SessionResult:
    """A session that has no imports to wait for, nor has its worker, where it is to have one."""
    with pytest(directory, arguments, {}, typed, spares=arguments.count("-n1")) as program:
        status = program.wait()
    return SessionResult((directory / "output.txt").read_text(), status)


def run_started(
    directory: Path, arguments: list[str], how: dict[str, Any], command: tuple[str, ...] = PYTEST
) -> SessionResult:
    """A session in a process of its own, run_started with subprocess's arguments ``how``."""
    done = subprocess.run(
        [sys.executable, "-m", *command, *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SESSION_TIMEOUT,
        check=False,
        **how,
    )
    return SessionResult(done.stdout, done.returncode)


BREAKPOINT = """
@pytest.mark.world_size(2)
def test_it():
    breakpoint()
"""
