"""Run Python programs in forks of a warm Python, for tests that need a process but not a new interpreter."""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from suites.warm.program_request import ProgramRequest, find_descendants, send_request

ROOT = Path(__file__).parents[2]
PROGRAM_TIMEOUT = 300.0  # seconds for one program
LEFTOVER_TIMEOUT = 5.0  # seconds within which every process of a program has to end after it
INITIAL_ENVIRONMENT = dict(os.environ)  # before any test has changed it


@functools.cache
def start_warm_python() -> tuple[socket.socket, Mapping[str, str]]:
    """Start the warm Python, which ends with this process; return the socket to it and its start-up variables."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen([sys.executable, "-m", "suites.warm.server"], cwd=ROOT, stdin=theirs, env=INITIAL_ENVIRONMENT)
    return ours, select_startup_variables(INITIAL_ENVIRONMENT)


def select_startup_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python reads only at its start; PYTHONPATH is not one, since each program sets it."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON") and name != "PYTHONPATH"}


class Program:
    """``python ARGUMENTS`` in a process of its own, with ``stdin_text`` as its standard input.

    The first ``spares`` Python processes that it starts are forks as well. Use it as a context manager, or call
    ``close``, which kills all its remaining processes.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: IO[bytes],
        errors: IO[bytes],
        folder: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        *,
        stdin_text: str = "",
        spares: int = 0,
    ) -> None:
        warm_python, startup_variables = start_warm_python()
        environment = dict(os.environ if environment is None else environment)
        assert select_startup_variables(environment) == startup_variables, "other start-up variables need a new Python"
        self._status_socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open_stdin_pipe(stdin_text) as entry:
            descriptors = [file.fileno() for file in (entry, output, errors, theirs)]
            send_request(warm_python, ProgramRequest(arguments, str(folder), environment, spares), descriptors)
        self._status_socket.settimeout(PROGRAM_TIMEOUT)
        pids = self._status_socket.recv(64).split()
        assert pids, "the warm Python has ended; its standard error says why"
        self._supervisor_pid, self.pid = map(int, pids)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status as subprocess does; None while the program runs."""
        return (
            self.wait(0.0)
            if self.returncode is not None or select.select([self._status_socket], [], [], 0)[0]
            else None
        )

    def wait(self, timeout: float = PROGRAM_TIMEOUT) -> int:
        """Wait for the exit status and return it. Raises TimeoutError if the program does not end in time."""
        if self.returncode is None:
            self._status_socket.settimeout(timeout)
            status = self._status_socket.recv(64)
            assert status, "the supervisor of the program has ended"
            self.returncode = int(status)
        return self.returncode

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to the program's own process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal_number)

    def find_descendants(self) -> dict[int, str]:
        """Return the command lines of all living processes of this program, orphans included."""
        return find_descendants(self._supervisor_pid)

    def wait_for_leftovers(self) -> dict[int, str]:
        """Wait up to ``LEFTOVER_TIMEOUT`` until all processes have ended; return those that have not."""
        until = time.monotonic() + LEFTOVER_TIMEOUT
        while (descendants := self.find_descendants()) and time.monotonic() < until:
            threading.Event().wait(0.02)
        return descendants

    def close(self) -> None:
        """Kill all processes of the program, so that none is left to the next tests."""
        while pids := self.find_descendants():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._status_socket.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_stdin_pipe(text: str) -> IO[bytes]:
    """Return the reading end of a pipe that has ``text`` and whose other end is closed."""
    read, write = os.pipe()
    with open(write, "wb", buffering=0) as pipe:
        os.set_blocking(write, False)
        assert pipe.write(text.encode()) == len(text.encode()), "more than a pipe holds"
    return open(read, "rb")


def run(
    *arguments: str,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    stdin_text: str = "",
    spares: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` to its end; return its exit status and what it printed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        with Program(arguments, output, errors, folder, environment, stdin_text=stdin_text, spares=spares) as program:
            status = program.wait()
        return subprocess.CompletedProcess(arguments, status, read_output(output), read_output(errors))


def read_output(file: IO[bytes]) -> str:
    """Return what a program has written to the file, without moving the file position, which the program shares."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()
