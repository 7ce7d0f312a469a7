"""The terminal of the pytest process, and how a rank borrows it."""

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


@dataclass(frozen=True)
class Terminal:
    """Copies of the pytest process's standard streams, and the rank that may have them.

    ``group`` is the process group that owns the terminal, 0 where standard input is none, and ``settings`` those of the
    terminal. ``refusal`` says why nobody can have the streams, or is empty; then they are -1.
    """

    rank: int
    stdin: int = -1
    stdout: int = -1
    stderr: int = -1
    foreground_pgid: int = 0
    settings: tuple[Any, ...] = ()
    unavailable_reason: str = ""


def open_terminal(config: pytest.Config) -> Terminal:
    """The terminal as a rank may have it. Raises UsageError where ``--pdb`` or ``--trace`` asks for it in vain."""
    rank = int(config.getoption("--pdb-rank"))
    if rank < 0:
        raise UsageError(f"--pdb-rank {rank}: expected the number of a rank, from 0 up")
    if hasattr(config, "workerinput"):
        words = "an xdist worker has no terminal; run with -n 0 or -p no:xdist"
        return Terminal(rank, unavailable_reason=words)
    with use_real_stdin(config):
        words = explain_unreadable_stdin()
        if not words:
            return Terminal(rank, os.dup(0), os.dup(1), os.dup(2), *get_terminal_state(0))
    for option, name in (("--pdb", "usepdb"), ("--trace", "trace")):
        if config.getoption(name, default=False):
            raise UsageError(f"{option} cannot open a debugger in a rank: {words}")
    return Terminal(rank, unavailable_reason=words)


@contextmanager
def use_real_stdin(config: pytest.Config) -> Iterator[None]:
    """Descriptor 0 as it was before pytest's capture, which leaves it at /dev/null between two tests."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    capture.suspend_global_capture(in_=True)
    try:
        yield
    finally:
        capture.resume_global_capture()  # the only way to have standard input captured again
        capture.suspend_global_capture()


def explain_unreadable_stdin() -> str:
    """Why nobody can type into standard input; the empty string when somebody, or something, can."""
    if sys.__stdin__ is None:  # whatever has descriptor 0 by now is some other file
        return "standard input is closed"
    found = os.fstat(0)
    if stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev:
        return f"standard input is {os.devnull}"
    if fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        return "standard input is open for writing only"
    if get_foreground_pgid(0) not in (0, os.getpgrp()):
        return "pytest runs in the background of its terminal"
    return ""


def get_foreground_pgid(descriptor: int) -> int:
    """The process group that may read from a terminal; 0 for what is no terminal, or not that of this session."""
    try:
        return os.tcgetpgrp(descriptor)
    except OSError:
        return 0


def get_terminal_state(descriptor: int) -> tuple[int, tuple[Any, ...]]:
    """The owner of a terminal, and its settings."""
    group = get_foreground_pgid(descriptor)
    return group, tuple(termios.tcgetattr(descriptor)) if group else ()


def set_foreground_pgid(descriptor: int, pgid: int) -> None:
    """Make ``group`` the one that reads from a terminal."""
    # The kernel stops whoever does this from the background, unless that one blocks the signal.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with suppress(OSError):  # the terminal was closed
            os.tcsetpgrp(descriptor, pgid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def restore_settings(descriptor: int, settings: tuple[Any, ...]) -> None:
    """Give a terminal its settings back, of which a line that was being typed may have changed some."""
    with suppress(termios.error):  # the terminal was closed
        termios.tcsetattr(descriptor, termios.TCSADRAIN, list(settings))


def reclaim_terminal(terminal: Terminal) -> None:
    """In the pytest process: take the terminal back from a rank that died with it."""
    owner = get_foreground_pgid(terminal.stdin) if terminal.foreground_pgid else 0
    if owner in (0, terminal.foreground_pgid):
        return
    try:
        os.killpg(owner, 0)
    except ProcessLookupError:  # of a living owner, such as a shell that has put pytest aside, nothing is taken
        set_foreground_pgid(terminal.stdin, terminal.foreground_pgid)
        restore_settings(terminal.stdin, terminal.settings)
    except PermissionError:
        return


@contextmanager
def borrow_terminal(terminal: Terminal) -> Iterator[None]:
    """In a rank: with standard streams, foreground and keys as the pytest process has them."""
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
    """With descriptors 0, 1 and 2 on the terminal.

    "continue" has capfd back at work before anybody hears of it: what it has redirected meanwhile is left to it.
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
    """With Python's streams on descriptors 0, 1 and 2, whatever the test has made of them."""
    own: dict[str, io.TextIOWrapper] = {
        "stdin": io.TextIOWrapper(UnbufferedStdin()),  # type: ignore[arg-type]  # its stub asks for a name
        "stdout": open(1, "w", buffering=1, closefd=False),  # noqa: SIM115 - a debugger that was left may still hold it
        "stderr": open(2, "w", buffering=1, closefd=False),  # noqa: SIM115 - as above
    }
    before = {name: getattr(sys, name) for name in own}
    for name, stream in own.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in own.items():
            stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


class UnbufferedStdin(io.RawIOBase):
    """Descriptor 0, of which nothing is taken ahead: the rest of a script is for the rank that is stopped next."""

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def isatty(self) -> bool:
        return os.isatty(0)

    def readinto(self, buffer: Any) -> int:
        data = os.read(0, 1)
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def enter_foreground(terminal: Terminal) -> Iterator[None]:
    """With this process in the terminal's foreground: it leads a process group of its own, which could not read."""
    if not terminal.foreground_pgid:
        yield
        return
    before, settings = get_terminal_state(terminal.stdin)
    set_foreground_pgid(terminal.stdin, os.getpgrp())
    try:
        yield
    finally:
        restore_settings(terminal.stdin, settings)
        set_foreground_pgid(terminal.stdin, before)


@contextmanager
def set_key_signals() -> Iterator[None]:
    """With Ctrl-C for the debugger and nothing for Ctrl-Z, which would stop this rank and leave pytest waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTSTP, before[1])
