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
from uuid import uuid4

from zharness.errors import HarnessFault

GRACE_SECONDS = 10.0
_MARK_VARIABLE = "ZHARNESS_LAUNCH"  # in the environment of a command and of all that it starts, with a word of its own


class CommandGroup:
    """The commands that several threads wait for; any thread can end them all, for only one of them hears a Ctrl-C."""

    def __init__(self) -> None:
        self._children: dict[subprocess.Popen[bytes], str] = {}
        self._lock = Lock()
        self._stopped_event = Event()

    def terminate(self) -> None:
        """End every command, and let none begin."""
        with self._lock:
            self._stopped_event.set()
            children = dict(self._children)
        for child, mark in children.items():
            terminate_tree(child, mark)

    @contextmanager
    def start(
        self, command: list[str], env: Mapping[str, str], output: IO[bytes], folder: Path | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A child, in ``folder`` where one is given, that is gone with all it started when the block ends.

        Raises KeyboardInterrupt once ``end`` was called.
        """
        child, mark = None, uuid4().hex
        try:
            with self._lock:
                if self._stopped_event.is_set():
                    raise KeyboardInterrupt
                # A session of its own: Ctrl-C reaches this process alone, which then ends the tree in order.
                child = subprocess.Popen(
                    command, env={**env, _MARK_VARIABLE: mark}, cwd=folder, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
                self._children[child] = mark
            yield child
        finally:
            if child is not None:
                terminate_tree(child, mark)
                with self._lock:
                    self._children.pop(child, None)


def run_torchrun(
    arguments: list[str], env: Mapping[str, str], seconds: float, command_group: CommandGroup
) -> tuple[int | None, str]:
    """Exit code (None: ended at the deadline) and output of ``python -m torch.distributed.run`` with ``arguments``.

    ``arguments`` begin with the interpreter.
    """
    with tempfile.TemporaryDirectory() as logs, open(Path(logs) / "output", "wb") as output:
        # A file, not a pipe: a rank that outlived its launcher would keep a pipe open and the reader waiting.
        # A log for each rank: what they write into one file at the same time is not lines any more.
        own = ["-m", "torch.distributed.run", f"--log-dir={logs}", "--redirects=3"]
        # torchrun's own default number of threads, set here so that it does not warn.
        with command_group.start(
            [arguments[0], *own, *arguments[1:]], {"OMP_NUM_THREADS": "1", **env}, output
        ) as child:
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
        written = [*sorted(Path(logs).rglob("std*.log")), Path(logs) / "output"]
        return code, "\n".join(file.read_text(errors="replace") for file in written)


def terminate_tree(child: subprocess.Popen[bytes], mark: str) -> None:
    """End ``child`` and what it started, also where it has ended and its ranks have not.

    Ranks have sessions of their own, so one killpg does not reach them, and no parent any more when the launcher is
    gone; ``mark`` in their environment tells them.
    """
    try:
        child.terminate()  # the launcher ends its ranks in answer
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
    finally:
        # A second Ctrl-C comes through here too.
        child.kill()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):  # it ended while we were looking
                _kill_marked(int(process.name), mark)
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired as alive:
        raise HarnessFault(f"process {child.pid} cannot be ended: {child.args!r}") from alive


def _kill_marked(pid: int, mark: str) -> None:
    """Kill a process that has ``mark``, and wait for its end, which on a busy machine comes a while later."""
    if not _has_mark(pid, mark):
        return
    process = os.pidfd_open(pid)  # there wherever /proc is, from which its number was read
    try:
        # Only who is still the same process: the number may have been given to another one meanwhile.
        if _has_mark(pid, mark):
            signal.pidfd_send_signal(process, signal.SIGKILL)
            wait([process], timeout=GRACE_SECONDS)
    finally:
        os.close(process)


def _has_mark(pid: int, mark: str) -> bool:
    """Whether a process began with ``mark`` in its environment; those that have ended, and of others, have none."""
    try:
        return f"{_MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
