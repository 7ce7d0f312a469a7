"""Programs that a warm Python runs, for tests that need a process of its own and no new Python."""

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
LEFTOVER_TIMEOUT = 5.0  # seconds in which everything has to be gone
INITIAL_ENVIRONMENT = dict(os.environ)  # before any test has changed it


@functools.cache
def start_warm_python() -> tuple[socket.socket, Mapping[str, str]]:
    """The way to a warm Python, which ends with this process, and what Python read of the environment at its start."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen([sys.executable, "-m", "suites.warm.server"], cwd=ROOT, stdin=theirs, env=INITIAL_ENVIRONMENT)
    return ours, select_startup_variables(INITIAL_ENVIRONMENT)


def select_startup_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What only a new Python would see. PYTHONPATH is not of it: a program has what it is given."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON") and name != "PYTHONPATH"}


class Program:
    """``python WORDS`` in a process of its own. Its standard input is a pipe that has ``typed`` and has been closed.

    The first Pythons that it starts, ``spares`` of them, are forks as well. Use it as a context manager, or call
    ``close``, which ends what is left of it.
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
        way, started_with = start_warm_python()
        environment = dict(os.environ if environment is None else environment)
        assert select_startup_variables(environment) == started_with, "Python reads these at its start: start one"
        self._status_socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open_stdin_pipe(stdin_text) as entry:
            descriptors = [file.fileno() for file in (entry, output, errors, theirs)]
            send_request(way, ProgramRequest(arguments, str(folder), environment, spares), descriptors)
        self._status_socket.settimeout(PROGRAM_TIMEOUT)
        told = self._status_socket.recv(64).split()
        assert told, "the warm Python has ended; what it wrote to its errors says why"
        self._supervisor_pid, self.pid = map(int, told)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, as subprocess has it; None while it runs."""
        return (
            self.wait(0.0)
            if self.returncode is not None or select.select([self._status_socket], [], [], 0)[0]
            else None
        )

    def wait(self, timeout: float = PROGRAM_TIMEOUT) -> int:
        """Its exit status. Raises TimeoutError where it does not end in time."""
        if self.returncode is None:
            self._status_socket.settimeout(timeout)
            told = self._status_socket.recv(64)
            assert told, "whoever keeps the program has ended"
            self.returncode = int(told)
        return self.returncode

    def send_signal(self, signal_number: signal.Signals) -> None:
        """To the program, and to nothing else, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal_number)

    def find_descendants(self) -> dict[int, str]:
        """The command lines of all living processes of this program, those included that have lost their parent."""
        return find_descendants(self._supervisor_pid)

    def wait_for_leftovers(self) -> dict[int, str]:
        """Those that are still there ``GONE`` seconds from now."""
        until = time.monotonic() + LEFTOVER_TIMEOUT
        while (found := self.find_descendants()) and time.monotonic() < until:
            threading.Event().wait(0.02)
        return found

    def close(self) -> None:
        """Leave nothing to the tests that follow."""
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
    """The end to read from of a pipe that is closed at the other."""
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
    """``python WORDS`` from its start to its end, and what it printed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        with Program(arguments, output, errors, folder, environment, stdin_text=stdin_text, spares=spares) as program:
            status = program.wait()
        return subprocess.CompletedProcess(arguments, status, read_output(output), read_output(errors))


def read_output(file: IO[bytes]) -> str:
    """What a program has written to it. The position in the file is the program's too."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()
