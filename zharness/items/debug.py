"""A debugger on one rank: it gets the terminal of the pytest process, and the other ranks pass their breakpoints over.

[Note: one seam]
``breakpoint()``, ``pdb.set_trace()``, ``pytest.set_trace()``, ``--pdb`` and ``--trace`` all come to
``pytestPDB._init_pdb``, also where a test module took its ``set_trace`` at import, long before there were ranks. So a
rank has that one function replaced: on the chosen rank it takes the terminal first, on the others it hands out
``Passed``. pytest's hook ``pytest_enter_pdb`` would come too late: its debugger has chosen its streams by then.

A ``PYTHONBREAKPOINT`` that names another debugger than pdb goes past pytest, and so past this.
"""

from __future__ import annotations

import fcntl
import io
import os
import signal
import stat
import sys
import termios
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import pytest
from _pytest.config import create_terminal_writer
from _pytest.debugging import pytestPDB  # see [Note: one seam]
from _pytest.runner import check_interactive_exception

from zharness.errors import UsageError
from zharness.world.here import here
from zharness.world.rank import ServerChannel, flush

LOOKING = "a person looks at it in the debugger"

_T = TypeVar("_T")


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
    group: int = 0
    settings: tuple[Any, ...] = ()
    refusal: str = ""


def terminal(config: pytest.Config) -> Terminal:
    """The terminal as a rank may have it. Raises UsageError where ``--pdb`` or ``--trace`` asks for it in vain."""
    rank = int(config.getoption("--pdb-rank"))
    if rank < 0:
        raise UsageError(f"--pdb-rank {rank}: expected the number of a rank, from 0 up")
    if hasattr(config, "workerinput"):
        words = "an xdist worker has no terminal; run with -n 0 or -p no:xdist"
        return Terminal(rank, refusal=words)
    with real_stdin(config):
        words = unreadable()
        if not words:
            return Terminal(rank, os.dup(0), os.dup(1), os.dup(2), *owned(0))
    for option, name in (("--pdb", "usepdb"), ("--trace", "trace")):
        if config.getoption(name, default=False):
            raise UsageError(f"{option} cannot open a debugger in a rank: {words}")
    return Terminal(rank, refusal=words)


@contextmanager
def real_stdin(config: pytest.Config) -> Iterator[None]:
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


def unreadable() -> str:
    """Why nobody can type into standard input; the empty string when somebody, or something, can."""
    if sys.__stdin__ is None:  # whatever has descriptor 0 by now is some other file
        return "standard input is closed"
    found = os.fstat(0)
    if stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev:
        return f"standard input is {os.devnull}"
    if fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        return "standard input is open for writing only"
    if foreground_of(0) not in (0, os.getpgrp()):
        return "pytest runs in the background of its terminal"
    return ""


def foreground_of(descriptor: int) -> int:
    """The process group that may read from a terminal; 0 for what is no terminal, or not that of this session."""
    try:
        return os.tcgetpgrp(descriptor)
    except OSError:
        return 0


def owned(descriptor: int) -> tuple[int, tuple[Any, ...]]:
    """The owner of a terminal, and its settings."""
    group = foreground_of(descriptor)
    return group, tuple(termios.tcgetattr(descriptor)) if group else ()


def hand_over(descriptor: int, group: int) -> None:
    """Make ``group`` the one that reads from a terminal."""
    # The kernel stops whoever does this from the background, unless that one blocks the signal.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with suppress(OSError):  # the terminal was closed
            os.tcsetpgrp(descriptor, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def reclaim(terminal: Terminal) -> None:
    """In the pytest process: take the terminal back from a rank that died with it."""
    owner = foreground_of(terminal.stdin) if terminal.group else 0
    if owner in (0, terminal.group):
        return
    try:
        os.killpg(owner, 0)
    except ProcessLookupError:  # of a living owner, such as a shell that has put pytest aside, nothing is taken
        hand_over(terminal.stdin, terminal.group)
        termios.tcsetattr(terminal.stdin, termios.TCSADRAIN, list(terminal.settings))
    except PermissionError:
        return


def settle_in(config: pytest.Config, rank: int, channel: ServerChannel, terminal: Terminal) -> None:
    """Once in each rank: give ``breakpoint()`` and ``--pdb`` the terminal on the chosen rank, words on the others."""
    pytestPDB._wrapped_pdb_cls = None  # made for another capture, if the pytest process has been in the debugger
    chosen = not terminal.refusal and rank == terminal.rank
    plugin = Debugger(config, channel, terminal) if chosen else Bystander(config, terminal)
    pytestPDB._init_pdb = plugin.opened  # type: ignore[method-assign]
    config.pluginmanager.register(plugin, "zharness-debugger")


class Passed:
    """What stands in for a debugger that cannot be opened: it says so, and lets the test go on."""

    def __init__(self, say: Callable[[str, FrameType | None], None]) -> None:
        self._say = say

    def set_trace(self, frame: FrameType | None) -> None:
        self._say("breakpoint()", frame)

    def runcall(self, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        return function(*args, **kwargs)


class Bystander:
    """The plugin of a rank that opens no debugger."""

    def __init__(self, config: pytest.Config, terminal: Terminal) -> None:
        self._config = config
        self._terminal = terminal
        for name in ("pdbinvoke", "pdbtrace"):
            if config.pluginmanager.hasplugin(name):
                config.pluginmanager.unregister(name=name)

    def opened(self, method: str, *args: Any, **kwargs: Any) -> Passed:
        return Passed(self.say)

    def pytest_exception_interact(self) -> None:
        if self._config.getoption("usepdb", default=False):
            self.say("--pdb", None)

    def say(self, what: str, frame: FrameType | None) -> None:
        """A warning where no rank of the test can be stopped; else one line that only a failure shows."""
        why = self.nobody()
        if not why:
            self.print(f"{what} on rank {here().rank} is passed over: --pdb-rank is {self._terminal.rank}\n")
            return
        message = pytest.PytestWarning(f"{what} is passed over: {why}")
        if frame is None:
            warnings.warn(message, stacklevel=1)
        else:
            warnings.warn_explicit(message, None, frame.f_code.co_filename, frame.f_lineno)

    def nobody(self) -> str:
        """Why no rank of this test can be stopped; the empty string when another one can."""
        terminal, world_size = self._terminal, here().world_size
        if terminal.refusal or terminal.rank < world_size:
            return terminal.refusal
        return f"--pdb-rank is {terminal.rank}, and this test's ranks are 0 to {world_size - 1}"

    def print(self, text: str) -> None:
        """Not into what a test captures by itself, where nobody expects it."""
        with self._config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            sys.stderr.write(text)


class Debugger:
    """The plugin of the chosen rank: the terminal is taken when a debugger opens and given back when it is left."""

    def __init__(self, config: pytest.Config, channel: ServerChannel, terminal: Terminal) -> None:
        self._config = config
        self._channel = channel
        self._terminal = terminal
        self._open = pytestPDB._init_pdb
        self._process = os.getpid()
        self._taken: ExitStack | None = None

    def opened(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """pytest's own debugger, on the terminal."""
        if os.getpid() != self._process:
            return Passed(in_a_child)
        self.take()
        debugger = self._open(method, *args, **kwargs)  # type: ignore[no-untyped-call]
        # A breakpoint that was set in an earlier stop opens no new debugger, it only interacts again.
        debugger.interaction = partial(self._interaction, debugger.interaction)
        return debugger

    def _interaction(self, interact: Callable[..., Any], *args: Any) -> Any:
        self.take()
        self._flush()
        return interact(*args)

    def take(self) -> None:
        """Have the terminal, and the deadline off, until ``give_back``."""
        if self._taken is not None:
            return
        self._taken = ExitStack()
        self._taken.enter_context(held(self._channel))
        self._config.pluginmanager.getplugin("capturemanager").suspend(in_=True)
        self._flush()
        for borrowed in (descriptors(self._terminal), streams(), foreground(self._terminal), keys()):
            self._taken.enter_context(borrowed)
        writer = create_terminal_writer(self._config)
        writer.line()
        where = os.environ.get("PYTEST_CURRENT_TEST", "a fixture that outlived its tests")
        writer.sep(">", f"rank {here().rank} of {here().world_size} stopped in {where}")

    def give_back(self) -> None:
        """Undo ``take``."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._flush()
            taken.close()

    def _flush(self) -> None:
        """What pytest's own writer holds belongs to the descriptors as they are now."""
        self._config.get_terminal_writer().flush()
        flush()

    def pytest_leave_pdb(self) -> None:
        self.give_back()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self.give_back()  # pytest tells of "continue", and of no other way to leave the debugger

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """With the deadline off before the server hears of the failure, which would end this rank within a moment."""
        self.give_back()  # at the end of its input a debugger raises BdbQuit
        if call.excinfo is None or not self._config.getoption("usepdb", default=False):
            return (yield)
        interactive = False
        self._channel.hold(LOOKING)
        try:
            report = yield
            interactive = check_interactive_exception(call, report)
            return report
        finally:
            if not interactive:  # else the next hook is pytest_exception_interact, at whose end the hold ends
                self._channel.hold("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_exception_interact(self) -> Generator[None, object, object]:
        if not self._config.getoption("usepdb", default=False):
            return (yield)
        self.take()  # before the debugger opens: the traceback goes to the terminal as well
        try:
            return (yield)
        finally:
            self.give_back()


@contextmanager
def left(config: pytest.Config) -> Iterator[None]:
    """For what runs outside of pytest's own protocol of a test: afterwards the terminal is given back."""
    try:
        yield
    finally:
        plugin = config.pluginmanager.getplugin("zharness-debugger")
        if isinstance(plugin, Debugger):
            plugin.give_back()


def in_a_child(what: str, frame: FrameType | None) -> None:
    """The terminal is the rank's own, and so is its line to the server."""
    sys.stderr.write(f"{what} in a child process of rank {here().rank} is passed over\n")


@contextmanager
def held(channel: ServerChannel) -> Iterator[None]:
    """With the deadline of the work off."""
    channel.hold(LOOKING)
    try:
        yield
    finally:
        channel.hold("")


@contextmanager
def descriptors(terminal: Terminal) -> Iterator[None]:
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
def streams() -> Iterator[None]:
    """With Python's streams on descriptors 0, 1 and 2, whatever the test has made of them."""
    own: dict[str, io.TextIOWrapper] = {
        "stdin": io.TextIOWrapper(ByteByByte()),  # type: ignore[arg-type]  # its stub asks for a name
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


class ByteByByte(io.RawIOBase):
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
def foreground(terminal: Terminal) -> Iterator[None]:
    """With this process in the terminal's foreground: it leads a process group of its own, which could not read."""
    if not terminal.group:
        yield
        return
    before, settings = owned(terminal.stdin)
    hand_over(terminal.stdin, os.getpgrp())
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(terminal.stdin, termios.TCSADRAIN, list(settings))
        hand_over(terminal.stdin, before)


@contextmanager
def keys() -> Iterator[None]:
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
