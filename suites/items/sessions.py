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

HEAD = "import os, pdb, sys, threading\nfrom pdb import set_trace\nimport pytest\n"
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:randomly", "--color=no")
PATIENCE = 240.0  # seconds for a session of pytest


def command(directory: Path, source: str, args: tuple[str, ...]) -> list[str]:
    """The command that runs ``source`` as a test file of ``directory``, away from the settings of this repository."""
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (directory / "test_it.py").write_text(HEAD + dedent(source), encoding="utf-8")
    return [sys.executable, "-m", "pytest", *OPTIONS, f"--rootdir={directory}", "test_it.py", *args]


@dataclass(frozen=True)
class Told:
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


Session = Callable[..., Told]


def session_in(directory: Path) -> Session:
    """A function that runs pytest on a source, with ``typed`` in the pipe that is its standard input."""

    def run(source: str, *args: str, typed: str = "", **kwargs: Any) -> Told:
        given = kwargs or {"input": typed}
        done = subprocess.run(
            command(directory, source, args),
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
            **given,
        )
        return Told(done.stdout, done.returncode)

    return run


BREAKPOINT = """
@pytest.mark.world_size(2)
def test_it():
    breakpoint()
"""
