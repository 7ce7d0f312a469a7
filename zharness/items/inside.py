"""The inside of a rank: pytest's own protocol of one test, told phase by phase."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns  # bound now: a test may patch the module's
from typing import Any, Protocol

import pytest
from _pytest.capture import CaptureManager  # no public way to give a process a capture of its own
from _pytest.runner import runtestprotocol  # what pytest-forked and pytest-rerunfailures call as well

from zharness.items import debug, elsewhere, given, measured
from zharness.items.facts import STRICT
from zharness.items.terminal import Terminal
from zharness.items.told import Told
from zharness.world.here import here
from zharness.world.leftovers import Fingerprint, fingerprint, left_behind
from zharness.world.messages import Standing
from zharness.world.rank import ServerChannel, seed_torch


@dataclass(frozen=True)
class Stop:
    """A test asked for the end of the whole session: by pytest.exit, or by a KeyboardInterrupt."""

    rank: int
    interrupt: str  # "exit" or "keyboard"
    reason: str
    status: int | None


@dataclass(frozen=True)
class Warned:
    """One warning as pytest recorded it."""

    category: type[Warning]
    message: str
    filename: str
    line: int
    when: str
    location: tuple[str, int, str] | None


@dataclass(frozen=True)
class Finished:
    """What a rank returns for one test: what does not belong to one phase."""

    warned: tuple[Warned, ...] = ()
    inner: tuple[dict[str, Any], ...] = ()  # reports that were logged within the test: those of subtests
    left_behind: tuple[str, ...] = ()
    changed: str = ""
    stop: Stop | None = None


@dataclass(frozen=True)
class State:
    """What a process has at one moment that its next test would find."""

    fingerprint: Fingerprint
    left: dict[str, str]

    @classmethod
    def now(cls) -> State:
        return cls(fingerprint(), left_behind())

    def change_since(self, states: Sequence[State]) -> str:
        """The names of what is as in none of ``states``."""
        changes = [set(state.fingerprint.changes(self.fingerprint)) for state in states]
        return ", ".join(sorted(set.intersection(*changes)))

    def added_since(self, states: Sequence[State]) -> dict[str, str]:
        """The threads and processes that are in none of ``states``."""
        return {key: words for key, words in self.left.items() if not any(key in state.left for state in states)}


class Line(Protocol):
    """A rank's line to whoever hears what it tells before its end."""

    def note(self, standing: Standing, payload: object, at_ns: int) -> None: ...

    def label(self, phase: str) -> None: ...


@dataclass(eq=False)  # older pytest keeps plugins in a set
class Teller:
    """A plugin of the rank: each phase's report goes to the server when it is made, so that a death loses nothing."""

    config: pytest.Config
    channel: Line
    warned: list[Warned] = field(default_factory=list)
    inner: list[dict[str, Any]] = field(default_factory=list)
    wide_before: list[tuple[str, int]] = field(default_factory=list)
    before_call: State | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        left_out = elsewhere.called(item, reports[0])
        if left_out is not None:
            self.channel.note(Standing.FINE, self.told(left_out), monotonic_ns())
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        self.channel.label("setup")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self.channel.label("call")
        if self.wide_before != wide_finalizers(item):
            self.before_call = State.now()
        with given.in_step(item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        self.channel.label("teardown")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        at_ns = monotonic_ns()  # now, and not when the traceback has been put into words
        report = yield
        # Here pytest fails a test of which a subtest failed, from a count that only this process has.
        self.config.hook.pytest_report_teststatus(report=report, config=self.config)
        self.channel.note(standing_of(report), self.told(report), at_ns)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.inner.append(self.told(report).report)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, location: tuple[str, int, str] | None
    ) -> None:
        self.warned.append(
            Warned(
                category=portable(warning_message.category or UserWarning),
                message=str(warning_message.message),
                filename=warning_message.filename,
                line=warning_message.lineno,
                when=when,
                location=location,
            )
        )

    def told(self, report: pytest.TestReport) -> Told:
        """The report as data. What a test recorded as a property may be anything: in words if it cannot be sent."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        try:
            pickle.dumps(data)
        except Exception:  # noqa: BLE001 - an object may raise whatever it likes when it is pickled
            data = {**data, "user_properties": [(name, repr(value)) for name, value in report.user_properties]}
        return Told(str(report.when), data)


def standing_of(report: pytest.TestReport) -> Standing:
    """FAILED, LEFT where the other ranks may wait for this one in vain (a skip, an expected failure), else FINE.

    A strict xfail mark whose test passed fails no rank by itself: another rank may fail as expected.
    """
    if report.failed:
        unexpected = isinstance(report.longrepr, str) and report.longrepr.startswith(STRICT)
        return Standing.FINE if unexpected else Standing.FAILED
    return Standing.LEFT if report.skipped else Standing.FINE


def portable(category: type[Warning]) -> type[Warning]:
    """The category, or the nearest of its bases that can be sent to another process."""
    for base in category.__mro__:
        if issubclass(base, Warning) and base.__module__ in sys.modules and can_be_found(base):
            return base
    return UserWarning


def can_be_found(category: type[Warning]) -> bool:
    """Whether another process would find the class by its name, as pickle does."""
    return getattr(sys.modules[category.__module__], category.__qualname__, None) is category


class Inside:
    """What the server's ranks inherit: the collected session, and how to run one of its tests in this process."""

    def __init__(
        self, session: pytest.Session, terminal: Terminal, ours: tuple[object, ...], settled: Teller | None = None
    ) -> None:
        """``ours`` are plugins of the pytest process that have no business in a rank.

        ``settled`` is there in a process that is a rank and stays what it was besides.
        """
        self._session = session
        self._terminal = terminal
        self._ours = ours
        self._told_of: set[str] = set()
        self._states: list[State] = []  # at most one: what this process had when its last test was over
        # One, once this process is a rank that has run something.
        self._tellers: list[Teller] = [] if settled is None else [settled]

    def __call__(self, index: int | None, following: int | None, room: str, fixture: str = "") -> Finished:
        """Run the item at ``index``, keeping what the item at ``following`` needs as well.

        ``index`` None only tears down what the item at ``following`` does not need. A ``fixture`` is one that runs
        elsewhere: only it is set up.
        """
        items = self._session.items
        nextitem = None if following is None else items[following]
        teller = self._teller(room)
        if index is None:
            return self._tear_down(teller, nextitem)
        with elsewhere.only(items[index], fixture):
            return self._run(teller, items[index], nextitem, room)

    def _run(self, teller: Teller, item: pytest.Item, nextitem: pytest.Item | None, room: str) -> Finished:
        seed(item.nodeid)
        item.stash[ROOM] = Path(room)
        before = self._found()
        teller.wide_before, teller.before_call = wide_finalizers(item), None
        stop = None
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        except pytest.exit.Exception as error:
            stop = Stop(here().rank, "exit", str(error.msg), error.returncode)
        except KeyboardInterrupt as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            words = f"{error}, in {place.name} ({Path(place.filename).name}, line {place.lineno})".lstrip(", ")
            stop = Stop(here().rank, "keyboard", words, None)
        if stop is not None:
            teller.channel.note(Standing.FAILED, stop, monotonic_ns())
        teller.channel.label("")
        after, states = State.now(), [before]
        if teller.wide_before != wide_finalizers(item) and nextitem is not None:
            # What fixtures of a wider scope start and change in set-up is there for the tests that follow.
            states.append(teller.before_call or after)
        self._states.append(after)
        return self._finished(teller, stop, after.change_since(states), after.added_since(states))

    def _found(self) -> State:
        """What the next test finds: as the last one left it, since nothing runs here in between."""
        return self._states.pop() if self._states else State.now()

    def _tear_down(self, teller: Teller, nextitem: pytest.Item | None) -> Finished:
        """Raises what a finaliser raises."""
        self._states.clear()
        teller.channel.label("teardown")
        with debug.left(self._session.config):
            self._session._setupstate.teardown_exact(nextitem)
        return self._finished(teller, None, "", left_behind() if nextitem is None else {})

    def _finished(self, teller: Teller, stop: Stop | None, changed: str, left: dict[str, str]) -> Finished:
        """What is left behind is told once: by the test, or when everything is torn down."""
        words = tuple(words for key, words in left.items() if key not in self._told_of)
        self._told_of.update(left)
        finished = Finished(tuple(teller.warned), tuple(teller.inner), words, changed, stop)
        teller.warned.clear()
        teller.inner.clear()
        return finished

    def _teller(self, room: str) -> Teller:
        if not self._tellers:
            self._tellers.append(self._settle_in(room))
        return self._tellers[0]

    def _settle_in(self, room: str) -> Teller:
        """Once in each rank: what the pytest process shares with its forks is replaced by something of its own."""
        config, me = self._session.config, here()
        channel = me.channel
        assert isinstance(channel, ServerChannel), "only a server's rank inherits this"
        plugins = config.pluginmanager
        for plugin in plugins.get_plugins():
            # xdist's worker would send over the pytest process's own connection; see also its own fork of pytest.
            if plugin in self._ours or type(plugin).__module__ in XDIST_WORKER:
                plugins.unregister(plugin)
        capture_nothing(config)
        own_base_of_tmp_path(config, Path(room) / f"rank{me.rank}")
        config.stash[BASE] = Path(room).parent
        measured.start(channel)
        debug.settle_in(config, me.rank, channel, self._terminal)
        teller = Teller(config, channel)
        plugins.register(teller, "zharness-teller")
        teller.warned.clear()  # pytest repeats to a new plugin what was recorded before, here while collecting
        return teller


ROOM = pytest.StashKey[Path]()  # on an item: a directory that its ranks share
BASE = pytest.StashKey[Path]()  # on the config: a directory that the ranks of all tests share
# The module of the worker's own plugin, under its name and as execnet calls what it has sent over.
XDIST_WORKER = ("xdist.remote", "__channelexec__")


def capture_nothing(config: pytest.Config) -> None:
    """Let what this rank prints run into its pipes, where it survives the rank; capsys and capfd work as ever."""
    plugins = config.pluginmanager
    old = plugins.getplugin("capturemanager")
    if old is not None:
        plugins.unregister(old)
    own = CaptureManager("no")
    own.start_global_capturing()
    plugins.register(own, "capturemanager")


def own_base_of_tmp_path(config: pytest.Config, base: Path) -> None:
    """Number this rank's temporary directories in a directory of its own: ranks would take each other's numbers."""
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is not None:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        factory._basetemp = base


def wide_finalizers(item: pytest.Item) -> list[tuple[str, int]]:
    """How many finalisers wait on the nodes above the item: other numbers, other wide fixtures."""
    stack = item.session._setupstate.stack
    # The first finaliser of a node is its own teardown, and no fixture's.
    counts = [(node.nodeid, len(finalizers) - 1) for node, (finalizers, _) in stack.items() if node is not item]
    return [(nodeid, fixtures) for nodeid, fixtures in counts if fixtures]


def seed(nodeid: str) -> None:
    """The same random numbers on every rank, in every mode and every run."""
    number = int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:4], "big")
    random.seed(number)
    seed_torch(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
