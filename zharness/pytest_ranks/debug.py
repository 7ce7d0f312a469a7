"""Debug one rank, which borrows the terminal of the pytest process; all other ranks skip their breakpoints.

[Note: one patched function]
``breakpoint()``, ``pdb.set_trace()``, ``pytest.set_trace()``, ``--pdb`` and ``--trace`` all call
``pytestPDB._init_pdb``, even if a test module imported ``set_trace`` before ranks were forked. So each rank replaces
that one function: on the rank of ``--pdb-rank`` the replacement first borrows the terminal, on other ranks it returns a
``SkippedDebugger``. pytest's hook ``pytest_enter_pdb`` comes too late: the debugger has opened its streams by then.

A debugger that ``PYTHONBREAKPOINT`` names instead of pdb does not go through pytest and is not supported.
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
from _pytest.debugging import pytestPDB  # see [Note: one patched function]
from _pytest.runner import check_interactive_exception

from zharness.pytest_ranks.terminal import Terminal, borrow_terminal
from zharness.world.current_rank import current_rank
from zharness.world.rank import ServerChannel, flush_streams

DEBUGGER_HOLD_REASON = "the debugger is open"

_T = TypeVar("_T")


def install_debugger(config: pytest.Config, rank: int, channel: ServerChannel, terminal: Terminal) -> None:
    """Install the debugger on the rank of ``--pdb-rank``, and a plugin that skips breakpoints on all other ranks.

    Call this function once in each rank.
    """
    pytestPDB._wrapped_pdb_cls = None  # the pytest process may have cached a class that uses its own output capture
    is_debugged = not terminal.unavailable_reason and rank == terminal.rank
    plugin = RankDebugger(config, channel, terminal) if is_debugged else BreakpointSkipper(config, terminal)
    pytestPDB._init_pdb = plugin.open_debugger  # type: ignore[method-assign]
    config.pluginmanager.register(plugin, "zharness-debugger")


class SkippedDebugger:
    """Replacement for pdb on ranks that cannot open a debugger.

    Instead of stopping, the replacement reports the skipped breakpoint and continues the test.
    """

    def __init__(self, notify: Callable[[str, FrameType | None], None]) -> None:
        self._notify = notify

    def set_trace(self, frame: FrameType | None) -> None:
        """Report the skipped breakpoint and return without stopping."""
        self._notify("breakpoint()", frame)

    def runcall(self, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call the test function without stopping; pytest calls this method for ``--trace``."""
        return function(*args, **kwargs)


class BreakpointSkipper:
    """Pytest plugin of a rank that opens no debugger: it reports each breakpoint at which the rank does not stop."""

    def __init__(self, config: pytest.Config, terminal: Terminal) -> None:
        self._config = config
        self._terminal = terminal
        for name in ("pdbinvoke", "pdbtrace"):
            if config.pluginmanager.hasplugin(name):
                config.pluginmanager.unregister(name=name)

    def open_debugger(self, method: str, *args: Any, **kwargs: Any) -> SkippedDebugger:
        """Return a SkippedDebugger, which reports the skipped breakpoint."""
        return SkippedDebugger(self.report_skipped_stop)

    def pytest_exception_interact(self) -> None:
        """Report that ``--pdb`` does not open a debugger for the failure of this rank."""
        if self._config.getoption("usepdb", default=False):
            self.report_skipped_stop("--pdb", None)

    def report_skipped_stop(self, trigger: str, frame: FrameType | None) -> None:
        """Report that ``trigger``, such as a breakpoint or ``--pdb``, does not stop this rank.

        If another rank of the test can be stopped, write a line to stderr. Otherwise issue a warning, which pytest
        shows even if the test passes.
        """
        reason = self.explain_unavailable()
        if not reason:
            self.write_stderr(
                f"{trigger} on rank {current_rank().rank} is skipped: --pdb-rank is {self._terminal.rank}\n"
            )
            return
        message = pytest.PytestWarning(f"{trigger} is skipped: {reason}")
        if frame is None:
            warnings.warn(message, stacklevel=1)
        else:
            warnings.warn_explicit(message, None, frame.f_code.co_filename, frame.f_lineno)

    def explain_unavailable(self) -> str:
        """Explain why no rank of this test can be stopped; return the empty string if a rank can be stopped."""
        terminal, world_size = self._terminal, current_rank().world_size
        if terminal.unavailable_reason or terminal.rank < world_size:
            return terminal.unavailable_reason
        return f"--pdb-rank is {terminal.rank}, but this test has ranks 0 to {world_size - 1}"

    def write_stderr(self, text: str) -> None:
        """Write to the rank's standard error, even while the test captures output with ``capsys`` or ``capfd``."""
        with self._config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            sys.stderr.write(text)


class RankDebugger:
    """Pytest plugin of the debugged rank: it borrows the terminal of the pytest process while the debugger is open."""

    def __init__(self, config: pytest.Config, channel: ServerChannel, terminal: Terminal) -> None:
        self._config = config
        self._channel = channel
        self._terminal = terminal
        self._init_pdb = pytestPDB._init_pdb
        self._pid = os.getpid()
        self._borrowed_terminal: ExitStack | None = None

    def open_debugger(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Borrow the terminal and return pytest's own debugger.

        In a child process of the rank, return a SkippedDebugger instead.
        """
        if os.getpid() != self._pid:
            return SkippedDebugger(report_stop_in_child)
        self.take_terminal()
        debugger = self._init_pdb(method, *args, **kwargs)  # type: ignore[no-untyped-call]
        # A breakpoint that the user set during an earlier stop opens no new debugger; pdb only interacts again.
        debugger.interaction = partial(self._interact, debugger.interaction)
        return debugger

    def _interact(self, interact: Callable[..., Any], *args: Any) -> Any:
        """Borrow the terminal and make pdb read commands from it."""
        self.take_terminal()
        self._flush()
        return interact(*args)

    def take_terminal(self) -> None:
        """Borrow the terminal of the pytest process and suspend the test's deadline until ``return_terminal`` runs."""
        if self._borrowed_terminal is not None:
            return
        self._borrowed_terminal = ExitStack()
        self._borrowed_terminal.enter_context(suspend_deadline(self._channel))
        self._config.pluginmanager.getplugin("capturemanager").suspend(in_=True)
        self._flush()
        self._borrowed_terminal.enter_context(borrow_terminal(self._terminal))
        writer = create_terminal_writer(self._config)
        writer.line()
        location = os.environ.get("PYTEST_CURRENT_TEST", "the teardown of a fixture after its last test")
        writer.sep(">", f"rank {current_rank().rank} of {current_rank().world_size} stopped in {location}")

    def return_terminal(self) -> None:
        """Hand the terminal back to the pytest process and resume the deadline.

        Do nothing if the terminal is not borrowed.
        """
        borrowed, self._borrowed_terminal = self._borrowed_terminal, None
        if borrowed is not None:
            self._flush()
            borrowed.close()

    def _flush(self) -> None:
        """Flush all streams before the file descriptors change, so that buffered text goes to the old descriptors."""
        self._config.get_terminal_writer().flush()
        flush_streams()

    def pytest_leave_pdb(self) -> None:
        """Hand the terminal back to the pytest process when the user continues the test."""
        self.return_terminal()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Hand the terminal back to the pytest process after the test."""
        try:
            return (yield)
        finally:
            self.return_terminal()  # pytest calls pytest_leave_pdb for "continue" only, not if pdb is left otherwise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Suspend the deadline before a failure is reported.

        Otherwise the rank server would stop all ranks soon after the failure.
        """
        self.return_terminal()  # the debugger may still have it: at the end of its input pdb raises BdbQuit
        if call.excinfo is None or not self._config.getoption("usepdb", default=False):
            return (yield)
        opens_debugger = False
        self._channel.hold(DEBUGGER_HOLD_REASON)
        try:
            report = yield
            opens_debugger = check_interactive_exception(call, report)
            return report
        finally:
            if not opens_debugger:  # otherwise pytest_exception_interact runs next and ends the hold
                self._channel.hold("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_exception_interact(self) -> Generator[None, object, object]:
        """Borrow the terminal while pytest shows a failure and opens the debugger for ``--pdb``."""
        if not self._config.getoption("usepdb", default=False):
            return (yield)
        self.take_terminal()  # before the debugger opens, because pytest prints the traceback first
        try:
            return (yield)
        finally:
            self.return_terminal()


@contextmanager
def return_terminal_afterwards(config: pytest.Config) -> Iterator[None]:
    """Hand the terminal back to the pytest process when the block ends.

    The block is a teardown of fixtures outside of ``pytest_runtest_protocol``.
    """
    try:
        yield
    finally:
        plugin = config.pluginmanager.getplugin("zharness-debugger")
        if isinstance(plugin, RankDebugger):
            plugin.return_terminal()


def report_stop_in_child(trigger: str, frame: FrameType | None) -> None:
    """Report a breakpoint that is skipped in a child process of the rank.

    A child process must not use the rank's terminal or the rank's connection to the server.
    """
    sys.stderr.write(f"{trigger} in a child process of rank {current_rank().rank} is skipped\n")


@contextmanager
def suspend_deadline(channel: ServerChannel) -> Iterator[None]:
    """Suspend the deadline of the test that runs on this rank, until the block ends."""
    channel.hold(DEBUGGER_HOLD_REASON)
    try:
        yield
    finally:
        channel.hold("")
