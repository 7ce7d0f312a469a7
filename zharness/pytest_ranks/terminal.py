"""Let a rank use the terminal of the pytest process for a debugger."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import stat
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from zharness.errors import UsageError
from zharness.pytest_ranks.options import get_option


@dataclass(frozen=True)
class Terminal:
    """Duplicates of the pytest process's standard streams, and the rank that may use them.

    ``foreground_pgid`` is the foreground process group of the terminal, or 0 if standard input is not a terminal.
    ``settings`` are the terminal's attributes. If ``unavailable_reason`` is not empty, no rank can use the streams, and
    the descriptors are -1.
    """

    rank: int
    stdin: int = -1
    stdout: int = -1
    stderr: int = -1
    foreground_pgid: int = 0
    settings: tuple[Any, ...] = ()
    unavailable_reason: str = ""


def open_terminal(config: pytest.Config) -> Terminal:
    """Duplicate the standard streams for the rank of ``--pdb-rank``.

    Raises UsageError for a negative rank, and with ``--pdb`` or ``--trace`` if standard input cannot be read.
    """
    rank = int(get_option(config, "pdb-rank"))
    if rank < 0:
        raise UsageError(f"--pdb-rank {rank}: expected the number of a rank, from 0 up")
    if hasattr(config, "workerinput"):
        reason = "an xdist worker has no terminal; run with -n 0 or -p no:xdist"
        return Terminal(rank, unavailable_reason=reason)
    with use_real_stdin(config):
        reason = explain_unreadable_stdin()
        if not reason:
            return Terminal(rank, os.dup(0), os.dup(1), os.dup(2), *get_terminal_state(0))
    for option, name in (("--pdb", "usepdb"), ("--trace", "trace")):
        if config.getoption(name, default=False):
            raise UsageError(f"{option} cannot open a debugger on a rank: {reason}")
    return Terminal(rank, unavailable_reason=reason)


@contextmanager
def use_real_stdin(config: pytest.Config) -> Iterator[None]:
    """Restore the real standard input within the block; pytest's capture redirects descriptor 0 to /dev/null."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    capture.suspend_global_capture(in_=True)
    try:
        yield
    finally:
        capture.resume_global_capture()  # only this captures standard input again
        capture.suspend_global_capture()


def explain_unreadable_stdin() -> str:
    """Explain why a debugger cannot read commands from standard input; return the empty string if it can read them."""
    if sys.__stdin__ is None:  # descriptor 0 may have been reused for another file
        return "standard input is closed"
    status = os.fstat(0)
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev:
        return f"standard input is {os.devnull}"
    if fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        return "standard input is open for writing only"
    if get_foreground_pgid(0) not in (0, os.getpgrp()):
        return "pytest runs in the background of its terminal"
    return ""


def get_foreground_pgid(descriptor: int) -> int:
    """Return the foreground process group of a terminal, or 0 if ``descriptor`` is not this session's terminal."""
    try:
        return os.tcgetpgrp(descriptor)
    except OSError:
        return 0


def get_terminal_state(descriptor: int) -> tuple[int, tuple[Any, ...]]:
    """Return a terminal's foreground process group and settings, or (0, ()) if ``descriptor`` is not a terminal."""
    pgid = get_foreground_pgid(descriptor)
    return pgid, tuple(termios.tcgetattr(descriptor)) if pgid else ()


def set_foreground_pgid(descriptor: int, pgid: int) -> None:
    """Make ``pgid`` the foreground process group of a terminal. Only the foreground group may read from a terminal."""
    # The kernel stops a background process that does this, unless the process blocks SIGTTOU.
    original_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with suppress(OSError):  # the terminal was closed
            os.tcsetpgrp(descriptor, pgid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, original_mask)


def restore_settings(descriptor: int, settings: tuple[Any, ...]) -> None:
    """Restore a terminal's settings, which line editing may have changed."""
    with suppress(termios.error):  # the terminal was closed
        termios.tcsetattr(descriptor, termios.TCSADRAIN, list(settings))


def reclaim_terminal(terminal: Terminal) -> None:
    """Restore the terminal for the pytest process if the rank that used the terminal has died."""
    pgid = get_foreground_pgid(terminal.stdin) if terminal.foreground_pgid else 0
    if pgid in (0, terminal.foreground_pgid):
        return
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:  # leave the terminal to a living process group, such as the shell of a suspended pytest
        set_foreground_pgid(terminal.stdin, terminal.foreground_pgid)
        restore_settings(terminal.stdin, terminal.settings)
    except PermissionError:
        return


@contextmanager
def borrow_terminal(terminal: Terminal) -> Iterator[None]:
    """Within the block, connect this rank to the standard streams, foreground and key signals of the pytest process."""
    with ExitStack() as stack:
        for part in (
            redirect_descriptors(terminal),
            replace_std_streams(),
            enter_foreground(terminal),
            set_key_signals(),
        ):
            stack.enter_context(part)
        yield


@contextmanager
def redirect_descriptors(terminal: Terminal) -> Iterator[None]:
    """Redirect descriptors 0, 1 and 2 to the terminal within the block.

    A descriptor that other code redirects inside the block is not restored: pdb's "continue" resumes ``capfd`` before
    the block ends.
    """
    copies = (terminal.stdin, terminal.stdout, terminal.stderr)
    before = [os.dup(descriptor) for descriptor in range(3)]
    for descriptor, copy in enumerate(copies):
        os.dup2(copy, descriptor)
    try:
        yield
    finally:
        for descriptor, copy in enumerate(copies):
            if os.path.sameopenfile(descriptor, copy):
                os.dup2(before[descriptor], descriptor)
            os.close(before[descriptor])


@contextmanager
def replace_std_streams() -> Iterator[None]:
    """Replace ``sys.stdin``, ``stdout`` and ``stderr`` by streams on descriptors 0, 1 and 2 within the block."""
    streams: dict[str, io.TextIOWrapper] = {
        "stdin": io.TextIOWrapper(UnbufferedStdin()),  # type: ignore[arg-type]  # the stub requires a name attribute
        "stdout": open(1, "w", buffering=1, closefd=False),  # noqa: SIM115 - a closed debugger may still refer to it
        "stderr": open(2, "w", buffering=1, closefd=False),  # noqa: SIM115 - as above
    }
    originals = {name: getattr(sys, name) for name in streams}
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in streams.items():
            stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, originals[name])


class UnbufferedStdin(io.RawIOBase):
    """Standard input without read-ahead, because later lines may belong to the next debugger, on another rank."""

    def readable(self) -> bool:
        """Return True: standard input can be read."""
        return True

    def fileno(self) -> int:
        """Return descriptor 0."""
        return 0

    def isatty(self) -> bool:
        """Return whether descriptor 0 is a terminal."""
        return os.isatty(0)

    def readinto(self, buffer: Any) -> int:
        """Read at most one byte into ``buffer`` and return the number of bytes read."""
        data = os.read(0, 1)
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def enter_foreground(terminal: Terminal) -> Iterator[None]:
    """Put this rank into the terminal's foreground within the block.

    Only the foreground process group can read from a terminal.
    """
    if not terminal.foreground_pgid:
        yield
        return
    original_pgid, settings = get_terminal_state(terminal.stdin)
    set_foreground_pgid(terminal.stdin, os.getpgrp())
    try:
        yield
    finally:
        restore_settings(terminal.stdin, settings)
        set_foreground_pgid(terminal.stdin, original_pgid)


@contextmanager
def set_key_signals() -> Iterator[None]:
    """Within the block, make Ctrl-C interrupt the debugger and ignore Ctrl-Z, which would suspend only this rank."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTSTP, before[1])
