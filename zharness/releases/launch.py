"""A command of our own making, run to its end or to its deadline; the whole tree of its processes is gone then."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from threading import Event, Lock
from typing import IO

from zharness.errors import HarnessFault

GRACE_SECONDS = 10.0


class Running:
    """The commands that several threads wait for; any thread can end them all, for only one of them hears a Ctrl-C."""

    def __init__(self) -> None:
        self._children: set[subprocess.Popen[bytes]] = set()
        self._gate = Lock()
        self._over = Event()

    def end(self) -> None:
        """End every command, and let none begin."""
        with self._gate:
            self._over.set()
            children = tuple(self._children)
        for child in children:
            end(child)

    @contextmanager
    def started(
        self, command: list[str], env: Mapping[str, str], output: IO[bytes]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A child that is gone when the block ends. Raises KeyboardInterrupt once ``end`` was called."""
        with self._gate:
            if self._over.is_set():
                raise KeyboardInterrupt
            # A session of its own: Ctrl-C reaches this process alone, which then ends the tree in order.
            child = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            self._children.add(child)
        try:
            yield child
        finally:
            end(child)
            with self._gate:
                self._children.discard(child)


def torchrun(arguments: list[str], env: Mapping[str, str], seconds: float, running: Running) -> tuple[int | None, str]:
    """Exit code (None: ended at the deadline) and output of ``python -m torch.distributed.run`` with ``arguments``.

    ``arguments`` begin with the interpreter.
    """
    with tempfile.TemporaryDirectory() as logs, open(Path(logs) / "output", "wb") as output:
        # A file, not a pipe: a rank that outlived its launcher would keep a pipe open and the reader waiting.
        # A log for each rank: what they write into one file at the same time is not lines any more.
        own = ["-m", "torch.distributed.run", f"--log-dir={logs}", "--redirects=3"]
        # torchrun's own default number of threads, set here so that it does not warn.
        with running.started([arguments[0], *own, *arguments[1:]], {"OMP_NUM_THREADS": "1", **env}, output) as child:
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
        written = [*sorted(Path(logs).rglob("std*.log")), Path(logs) / "output"]
        return code, "\n".join(file.read_text(errors="replace") for file in written)


def end(child: subprocess.Popen[bytes]) -> None:
    """End ``child`` and what it started: its ranks have sessions of their own, so one killpg does not reach them."""
    if child.poll() is not None:
        return
    family = _descendants(child.pid)
    child.terminate()  # the launcher ends its ranks in answer
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
    # Only who is still the same process: a number may have been given to another one meanwhile.
    for pid in family & _processes().keys():
        with suppress(ProcessLookupError):
            _kill(pid[0])
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired as alive:
        raise HarnessFault(f"process {child.pid} of a reproduction cannot be ended") from alive


def _kill(pid: int) -> None:
    """Kill a process and wait for its end, which on a busy machine comes a while later."""
    ended = os.pidfd_open(pid)  # there wherever /proc is, from which its number was read
    try:
        os.kill(pid, signal.SIGKILL)
        wait([ended], timeout=GRACE_SECONDS)
    finally:
        os.close(ended)


def _processes() -> dict[tuple[int, str], int]:
    """Every process (number and start time) and its parent, where the system lists them; empty where it does not."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while we were looking
            fields = status.read_text().rpartition(")")[2].split()
            found[int(status.parent.name), fields[19]] = int(fields[1])
    return found


def _descendants(pid: int) -> set[tuple[int, str]]:
    """The processes below ``pid``."""
    parents = _processes()
    found: set[tuple[int, str]] = set()
    left = [pid]
    while left:
        above = left.pop()
        below = {process for process, parent in parents.items() if parent == above}
        found |= below
        left += [process[0] for process in below]
    return found
