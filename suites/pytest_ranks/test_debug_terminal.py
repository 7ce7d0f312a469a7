"""A debugger on one rank in a real terminal: the foreground process group during the stop and afterwards."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from suites.pytest_ranks.sessions import BREAKPOINT, SESSION_TIMEOUT, SessionResult, write_test


@dataclass
class Typist:
    """A simulated user at the terminal of a pytest session; ``seen`` is the length of the output already checked."""

    process: subprocess.Popen[bytes]
    screen: int
    text: str = ""
    seen: int = 0

    def types(self, line: str) -> str:
        """Wait for the prompt of pdb and type ``line``; return the output up to the prompt."""
        assert self.shows("(Pdb) ", SESSION_TIMEOUT), f"no prompt came:\n{self.text}"
        at = self.text.index("(Pdb) ", self.seen) + len("(Pdb) ")
        found, self.seen = self.text[self.seen : at], at
        os.write(self.screen, line.encode())
        return found

    def interrupts(self) -> None:
        """Press Ctrl-C until it has an effect: readline ignores it for a moment after each key."""
        for _ in range(20):
            os.write(self.screen, b"\x03")
            if self.shows("KeyboardInterrupt", SESSION_TIMEOUT / 20):
                return
        raise AssertionError(f"Ctrl-C had no effect:\n{self.text}")

    def shows(self, expected: str, seconds: float) -> bool:
        """Whether the session prints ``expected`` within ``seconds``, after the output already checked."""
        end = time.monotonic() + seconds
        while expected not in self.text[self.seen :]:
            if not self.read(end - time.monotonic()):
                return False
        return True

    def read(self, seconds: float) -> bool:
        """Read available output; return False if none comes within ``seconds`` or all processes closed the terminal."""
        ready, _, _ = select.select([self.screen], [], [], max(0.0, seconds))
        try:
            data = os.read(self.screen, 1 << 16) if ready else b""
        except OSError:
            data = b""
        self.text += data.decode("ascii", errors="replace").replace(
            "\r", ""
        )  # a read may end between the \r and the \n of a line
        return bool(data)

    def result(self) -> SessionResult:
        """Wait for the end of the session and return its result."""
        end = time.monotonic() + SESSION_TIMEOUT
        while self.read(end - time.monotonic()):
            continue
        return SessionResult(self.text, self.process.wait(SESSION_TIMEOUT))


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Typist]]:
    """A function that runs pytest on a source in a new pseudo-terminal."""
    opened: list[Typist] = []

    def run(source: str, *args: str) -> Typist:
        screen, inside = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *write_test(tmp_path, source, args)],
            cwd=tmp_path,
            env={**os.environ, "TERM": "dumb"},
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inside)
        opened.append(Typist(process, screen))
        return opened[-1]

    yield run
    for typist in opened:
        typist.process.kill()
        typist.process.wait()
        os.close(typist.screen)


AFTERWARDS = """
def test_afterwards():
    terminal = os.open("/dev/tty", os.O_RDWR)
    assert os.tcgetpgrp(terminal) == os.getpgrp()
    breakpoint()
"""


def test_a_rank_gets_the_terminal_for_a_stop_and_pytest_gets_it_back(terminal: Callable[..., Typist]) -> None:
    typist = terminal(
        """
@pytest.mark.world_size(2)
def test_it(rank):
    number = rank + 40
    breakpoint()
    number += 1
"""
        + AFTERWARDS,
        "--pdb-rank=1",
    )
    typist.types("p number\n")
    assert "\n41\n" in typist.types("half a line")
    assert typist.shows("half a line", SESSION_TIMEOUT)
    typist.interrupts()
    typist.types("c\n")
    assert "stopped in" not in typist.types("p 6 * 7\n")
    assert "\n42\n" in typist.types("c\n")
    result = typist.result()
    assert result.counts == {"passed": 2}, result.text


def test_pytest_gets_the_terminal_back_from_a_rank_that_dies_in_the_debugger(terminal: Callable[..., Typist]) -> None:
    typist = terminal(BREAKPOINT + AFTERWARDS)
    typist.types("!import os; os._exit(3)\n")
    typist.types("c\n")
    result = typist.result()
    assert result.counts == {"failed": 1, "passed": 1}, result.text
