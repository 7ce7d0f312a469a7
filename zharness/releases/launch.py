"""Run a command until it ends or its deadline has passed, and then end all processes that the command started."""

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
_MARK_VARIABLE = "ZHARNESS_LAUNCH"  # environment variable by which a command's descendants are found


class CommandGroup:
    """The running commands of several threads, which can be ended together from any thread.

    Only the main thread receives Ctrl-C, so the main thread has to end the commands of the other threads.
    """

    def __init__(self) -> None:
        self._children: dict[subprocess.Popen[bytes], str] = {}
        self._lock = Lock()
        self._stopped_event = Event()

    def terminate(self) -> None:
        """End every running command, and prevent further commands from being started."""
        with self._lock:
            self._stopped_event.set()
            children = dict(self._children)
        for child, mark in children.items():
            terminate_tree(child, mark)

    @contextmanager
    def start(
        self, command: list[str], env: Mapping[str, str], output: IO[bytes], folder: Path | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command in ``folder`` (None: the current folder), and end it and its descendants when the block ends.

        Raises KeyboardInterrupt if ``terminate`` was called before.
        """
        child, mark = None, uuid4().hex
        try:
            with self._lock:
                if self._stopped_event.is_set():
                    raise KeyboardInterrupt
                # In a new session, Ctrl-C reaches only this process, which then ends the process tree in order.
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


def run_command(
    command: list[str], env: Mapping[str, str], seconds: float, command_group: CommandGroup, folder: Path
) -> tuple[int | None, str]:
    """Run ``command`` in ``folder``; return its exit code, or None after ``seconds``, and its output."""
    with tempfile.TemporaryFile() as output:
        with command_group.start(command, env, output, folder) as child:
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
        output.seek(0)
        return code, output.read().decode(errors="replace")


def run_torchrun(
    arguments: list[str], env: Mapping[str, str], seconds: float, command_group: CommandGroup
) -> tuple[int | None, str]:
    """Run ``python -m torch.distributed.run`` and return its exit code and its output.

    ``arguments`` are the path of the interpreter, then torchrun's options and the script. The exit code is None if the
    command was ended at the deadline, after ``seconds``.
    """
    with tempfile.TemporaryDirectory() as logs, open(Path(logs) / "output", "wb") as output:
        # Use a file, because a rank that outlives its launcher would keep a pipe open and block the reader.
        # Use one log for each rank, because lines that are written to one file at the same time get mixed.
        module = ["-m", "torch.distributed.run", f"--log-dir={logs}", "--redirects=3"]
        # This is torchrun's own default number of threads; it is set here so that torchrun does not warn.
        with command_group.start(
            [arguments[0], *module, *arguments[1:]], {"OMP_NUM_THREADS": "1", **env}, output
        ) as child:
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
        written = [*sorted(Path(logs).rglob("std*.log")), Path(logs) / "output"]
        return code, "\n".join(file.read_text(errors="replace") for file in written)


def terminate_tree(child: subprocess.Popen[bytes], mark: str) -> None:
    """End ``child`` and all processes that ``child`` started, even if ``child`` has ended already.

    Ranks run in sessions of their own, so killpg does not reach them. After the end of torchrun, they are not its
    children either. So the processes are identified by ``mark`` in their environment.
    """
    try:
        child.terminate()  # torchrun then ends its ranks
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
    finally:
        # This also runs on a second Ctrl-C.
        child.kill()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):  # the process ended in the meantime
                _kill_marked(int(process.name), mark)
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise HarnessFault(f"process {child.pid} cannot be ended: {child.args!r}") from error


def _kill_marked(pid: int, mark: str) -> None:
    """Kill the process ``pid`` if ``mark`` is in its environment, and wait until it has ended."""
    if not _has_mark(pid, mark):
        return
    process = os.pidfd_open(pid)  # available wherever /proc is
    try:
        # Check again, because the pid may have been reused before the pidfd was opened.
        if _has_mark(pid, mark):
            signal.pidfd_send_signal(process, signal.SIGKILL)
            wait([process], timeout=GRACE_SECONDS)
    finally:
        os.close(process)


def _has_mark(pid: int, mark: str) -> bool:
    """Return whether ``mark`` is in the environment with which the process ``pid`` was started.

    Return False if the process has ended or belongs to another user.
    """
    try:
        return f"{_MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
