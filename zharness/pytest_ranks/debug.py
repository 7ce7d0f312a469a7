"""A debugger on one rank: it gets the terminal of the pytest process, and the other ranks pass their breakpoints over.

[Note: one seam]
``breakpoint()``, ``pdb.set_trace()``, ``pytest.set_trace()``, ``--pdb`` and ``--trace`` all come to
``pytestPDB._init_pdb``, also where a test module took its ``set_trace`` at import, long before there were ranks. So a
rank has that one function replaced: on the chosen rank it takes the terminal first, on the others it hands out
``Passed``. pytest's hook ``pytest_enter_pdb`` would come too late: its debugger has chosen its streams by then.

A ``PYTHONBREAKPOINT`` that names another debugger than pdb goes past pytest, and so past this.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import pytest
from _pytest.config import create_terminal_writer
from _pytest.debugging import pytestPDB  # see [Note: one seam]
from _pytest.runner import check_interactive_exception

from zharness.pytest_ranks.terminal import Terminal, borrow_terminal
from zharness.world.current_rank import current_rank
from zharness.world.rank import ServerChannel, flush_streams

DEBUGGER_HOLD_REASON = "a person looks at it in the debugger"

_T = TypeVar("_T")


def install_debugger(config: pytest.Config, rank: int, channel: ServerChannel, terminal: Terminal) -> None:
    """Once in each rank: give ``breakpoint()`` and ``--pdb`` the terminal on the chosen rank, words on the others."""
    pytestPDB._wrapped_pdb_cls = None  # made for another capture, if the pytest process has been in the debugger
    chosen = not terminal.unavailable_reason and rank == terminal.rank
    plugin = RankDebugger(config, channel, terminal) if chosen else BreakpointSkipper(config, terminal)
    pytestPDB._init_pdb = plugin.open_debugger  # type: ignore[method-assign]
    config.pluginmanager.register(plugin, "zharness-debugger")


class SkippedDebugger:
    """What stands in for a debugger that cannot be opened: it says so, and lets the test go on."""

    def __init__(self, notify: Callable[[str, FrameType | None], None]) -> None:
        self._notify = notify

    def set_trace(self, frame: FrameType | None) -> None:
        self._notify("breakpoint()", frame)

    def runcall(self, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        return function(*args, **kwargs)


class BreakpointSkipper:
    """The plugin of a rank that opens no debugger."""

    def __init__(self, config: pytest.Config, terminal: Terminal) -> None:
        self._config = config
        self._terminal = terminal
        for name in ("pdbinvoke", "pdbtrace"):
            if config.pluginmanager.hasplugin(name):
                config.pluginmanager.unregister(name=name)

    def open_debugger(self, method: str, *args: Any, **kwargs: Any) -> SkippedDebugger:
        return SkippedDebugger(self.report_skipped_stop)

    def pytest_exception_interact(self) -> None:
        if self._config.getoption("usepdb", default=False):
            self.report_skipped_stop("--pdb", None)

    def report_skipped_stop(self, trigger: str, frame: FrameType | None) -> None:
        """A warning where no rank of the test can be stopped; else one line that only a failure shows."""
        why = self.explain_unavailable()
        if not why:
            self.write_stderr(
                f"{trigger} on rank {current_rank().rank} is passed over: --pdb-rank is {self._terminal.rank}\n"
            )
            return
        message = pytest.PytestWarning(f"{trigger} is passed over: {why}")
        if frame is None:
            warnings.warn(message, stacklevel=1)
        else:
            warnings.warn_explicit(message, None, frame.f_code.co_filename, frame.f_lineno)

    def explain_unavailable(self) -> str:
        """Why no rank of this test can be stopped; the empty string when another one can."""
        terminal, world_size = self._terminal, current_rank().world_size
        if terminal.unavailable_reason or terminal.rank < world_size:
            return terminal.unavailable_reason
        return f"--pdb-rank is {terminal.rank}, and this test's ranks are 0 to {world_size - 1}"

    def write_stderr(self, text: str) -> None:
        """Not into what a test captures by itself, where nobody expects it."""
        with self._config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            sys.stderr.write(text)


class RankDebugger:
    """The plugin of the chosen rank: the terminal is taken when a debugger opens and given back when it is left."""

    def __init__(self, config: pytest.Config, channel: ServerChannel, terminal: Terminal) -> None:
        self._config = config
        self._channel = channel
        self._terminal = terminal
        self._init_pdb = pytestPDB._init_pdb
        self._pid = os.getpid()
        self._borrowed_terminal: ExitStack | None = None

    def open_debugger(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """pytest's own debugger, on the terminal."""
        if os.getpid() != self._pid:
            return SkippedDebugger(report_stop_in_child)
        self.take_terminal()
        debugger = self._init_pdb(method, *args, **kwargs)  # type: ignore[no-untyped-call]
        # A breakpoint that was set in an earlier stop opens no new debugger, it only interacts again.
        debugger.interaction = partial(self._interact, debugger.interaction)
        return debugger

    def _interact(self, interact: Callable[..., Any], *args: Any) -> Any:
        self.take_terminal()
        self._flush()
        return interact(*args)

    def take_terminal(self) -> None:
        """Have the terminal, and the deadline off, until ``give_back``."""
        if self._borrowed_terminal is not None:
            return
        self._borrowed_terminal = ExitStack()
        self._borrowed_terminal.enter_context(suspend_deadline(self._channel))
        self._config.pluginmanager.getplugin("capturemanager").suspend(in_=True)
        self._flush()
        self._borrowed_terminal.enter_context(borrow_terminal(self._terminal))
        writer = create_terminal_writer(self._config)
        writer.line()
        where = os.environ.get("PYTEST_CURRENT_TEST", "a fixture that outlived its tests")
        writer.sep(">", f"rank {current_rank().rank} of {current_rank().world_size} stopped in {where}")

    def return_terminal(self) -> None:
        """Undo ``take``."""
        taken, self._borrowed_terminal = self._borrowed_terminal, None
        if taken is not None:
            self._flush()
            taken.close()

    def _flush(self) -> None:
        """What pytest's own writer holds belongs to the descriptors as they are now."""
        self._config.get_terminal_writer().flush()
        flush_streams()

    def pytest_leave_pdb(self) -> None:
        self.return_terminal()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self.return_terminal()  # pytest tells of "continue", and of no other way to leave the debugger

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """With the deadline off before the server hears of the failure, which would end this rank within a moment."""
        self.return_terminal()  # at the end of its input a debugger raises BdbQuit
        if call.excinfo is None or not self._config.getoption("usepdb", default=False):
            return (yield)
        interactive = False
        self._channel.hold(DEBUGGER_HOLD_REASON)
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
        self.take_terminal()  # before the debugger opens: the traceback goes to the terminal as well
        try:
            return (yield)
        finally:
            self.return_terminal()


@contextmanager
def return_terminal_afterwards(config: pytest.Config) -> Iterator[None]:
    """For what runs outside of pytest's own protocol of a test: afterwards the terminal is given back."""
    try:
        yield
    finally:
        plugin = config.pluginmanager.getplugin("zharness-debugger")
        if isinstance(plugin, RankDebugger):
            plugin.return_terminal()


def report_stop_in_child(trigger: str, frame: FrameType | None) -> None:
    """The terminal is the rank's own, and so is its line to the server."""
    sys.stderr.write(f"{trigger} in a child process of rank {current_rank().rank} is passed over\n")


@contextmanager
def suspend_deadline(channel: ServerChannel) -> Iterator[None]:
    """With the deadline of the work off."""
    channel.hold(DEBUGGER_HOLD_REASON)
    try:
        yield
    finally:
        channel.hold("")
