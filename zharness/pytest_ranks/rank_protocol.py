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

from zharness.pytest_ranks import debug, hypothesis_sync, rank_coverage, remote_fixtures
from zharness.pytest_ranks.phase_report import PhaseReport
from zharness.pytest_ranks.rank_problems import STRICT_XPASS_PREFIX
from zharness.pytest_ranks.terminal import Terminal
from zharness.world.current_rank import current_rank
from zharness.world.leftovers import ProcessFingerprint, find_leftovers, take_fingerprint
from zharness.world.messages import RankStatus
from zharness.world.rank import ServerChannel, seed_torch


@dataclass(frozen=True)
class SessionStop:
    """A test asked for the end of the whole session: by pytest.exit, or by a KeyboardInterrupt."""

    rank: int
    trigger: str  # "exit" or "keyboard"
    reason: str
    returncode: int | None


@dataclass(frozen=True)
class RecordedWarning:
    """One warning as pytest recorded it."""

    category: type[Warning]
    message: str
    filename: str
    line: int
    when: str
    location: tuple[str, int, str] | None


@dataclass(frozen=True)
class RankSideEffects:
    """What a rank returns for one test: what does not belong to one phase."""

    recorded_warnings: tuple[RecordedWarning, ...] = ()
    inner_reports: tuple[dict[str, Any], ...] = ()  # reports that were logged within the test: those of subtests
    leftovers: tuple[str, ...] = ()
    changed_state: str = ""
    stop: SessionStop | None = None


@dataclass(frozen=True)
class ProcessState:
    """What a process has at one moment that its next test would find."""

    fingerprint: ProcessFingerprint
    leftovers: dict[str, str]

    @classmethod
    def capture(cls) -> ProcessState:
        return cls(take_fingerprint(), find_leftovers())

    def describe_changes_since(self, states: Sequence[ProcessState]) -> str:
        """The names of what is as in none of ``states``."""
        changes = [set(state.fingerprint.list_changes(self.fingerprint)) for state in states]
        return ", ".join(sorted(set.intersection(*changes)))

    def leftovers_since(self, states: Sequence[ProcessState]) -> dict[str, str]:
        """The threads and processes that are in none of ``states``."""
        return {
            key: words for key, words in self.leftovers.items() if not any(key in state.leftovers for state in states)
        }


class ReportChannel(Protocol):
    """A rank's line to whoever hears what it tells before its end."""

    def note(self, standing: RankStatus, payload: object, at_ns: int) -> None: ...

    def label(self, phase: str) -> None: ...


@dataclass(eq=False)  # older pytest keeps plugins in a set
class PhaseReporter:
    """A plugin of the rank: each phase's report goes to the server when it is made, so that a death loses nothing."""

    config: pytest.Config
    channel: ReportChannel
    recorded_warnings: list[RecordedWarning] = field(default_factory=list)
    inner_reports: list[dict[str, Any]] = field(default_factory=list)
    wide_finalizers_before: list[tuple[str, int]] = field(default_factory=list)
    state_before_call: ProcessState | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        left_out = remote_fixtures.make_skipped_call_report(item, reports[0])
        if left_out is not None:
            self.channel.note(RankStatus.OK, self.make_phase_report(left_out), monotonic_ns())
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        self.channel.label("setup")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self.channel.label("call")
        if self.wide_finalizers_before != count_wide_finalizers(item):
            self.state_before_call = ProcessState.capture()
        with hypothesis_sync.sync_examples(item):
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
        self.channel.note(classify_report(report), self.make_phase_report(report), at_ns)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.inner_reports.append(self.make_phase_report(report).report)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, location: tuple[str, int, str] | None
    ) -> None:
        self.recorded_warnings.append(
            RecordedWarning(
                category=find_picklable_category(warning_message.category or UserWarning),
                message=str(warning_message.message),
                filename=warning_message.filename,
                line=warning_message.lineno,
                when=when,
                location=location,
            )
        )

    def make_phase_report(self, report: pytest.TestReport) -> PhaseReport:
        """The report as data. What a test recorded as a property may be anything: in words if it cannot be sent."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        try:
            pickle.dumps(data)
        except Exception:  # noqa: BLE001 - an object may raise whatever it likes when it is pickled
            data = {**data, "user_properties": [(name, repr(value)) for name, value in report.user_properties]}
        return PhaseReport(str(report.when), data)


def classify_report(report: pytest.TestReport) -> RankStatus:
    """FAILED, LEFT where the other ranks may wait for this one in vain (a skip, an expected failure), else FINE.

    A strict xfail mark whose test passed fails no rank by itself: another rank may fail as expected.
    """
    if report.failed:
        unexpected = isinstance(report.longrepr, str) and report.longrepr.startswith(STRICT_XPASS_PREFIX)
        return RankStatus.OK if unexpected else RankStatus.FAILED
    return RankStatus.SKIPPED if report.skipped else RankStatus.OK


def find_picklable_category(category: type[Warning]) -> type[Warning]:
    """The category, or the nearest of its bases that can be sent to another process."""
    for base in category.__mro__:
        if issubclass(base, Warning) and base.__module__ in sys.modules and is_importable(base):
            return base
    return UserWarning


def is_importable(category: type[Warning]) -> bool:
    """Whether another process would find the class by its name, as pickle does."""
    return getattr(sys.modules[category.__module__], category.__qualname__, None) is category


class RankTestRunner:
    """What the server's ranks inherit: the collected session, and how to run one of its tests in this process."""

    def __init__(
        self,
        session: pytest.Session,
        terminal: Terminal,
        main_process_plugins: tuple[object, ...],
        reporter: PhaseReporter | None = None,
    ) -> None:
        """``ours`` are plugins of the pytest process that have no business in a rank.

        ``settled`` is there in a process that is a rank and stays what it was besides.
        """
        self._session = session
        self._terminal = terminal
        self._main_process_plugins = main_process_plugins
        self._reported_leftovers: set[str] = set()
        self._previous_states: list[ProcessState] = []  # at most one: what this process had when its last test was over
        # One, once this process is a rank that has run something.
        self._reporters: list[PhaseReporter] = [] if reporter is None else [reporter]

    def __call__(self, index: int | None, next_index: int | None, test_dir: str, fixture: str = "") -> RankSideEffects:
        """Run the item at ``index``, keeping what the item at ``following`` needs as well.

        ``index`` None only tears down what the item at ``following`` does not need. A ``fixture`` is one that runs
        elsewhere: only it is set up.
        """
        items = self._session.items
        nextitem = None if next_index is None else items[next_index]
        teller = self._get_reporter(test_dir)
        if index is None:
            return self._tear_down(teller, nextitem)
        with remote_fixtures.limit_to_fixture(items[index], fixture):
            return self._run_item(teller, items[index], nextitem, test_dir)

    def _run_item(
        self, reporter: PhaseReporter, item: pytest.Item, nextitem: pytest.Item | None, test_dir: str
    ) -> RankSideEffects:
        seed_generators(item.nodeid)
        item.stash[TEST_DIR] = Path(test_dir)
        before = self._take_previous_state()
        reporter.wide_finalizers_before, reporter.state_before_call = count_wide_finalizers(item), None
        stop = None
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        except pytest.exit.Exception as error:
            stop = SessionStop(current_rank().rank, "exit", str(error.msg), error.returncode)
        except KeyboardInterrupt as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            words = f"{error}, in {place.name} ({Path(place.filename).name}, line {place.lineno})".lstrip(", ")
            stop = SessionStop(current_rank().rank, "keyboard", words, None)
        if stop is not None:
            reporter.channel.note(RankStatus.FAILED, stop, monotonic_ns())
        reporter.channel.label("")
        after, states = ProcessState.capture(), [before]
        if reporter.wide_finalizers_before != count_wide_finalizers(item) and nextitem is not None:
            # What fixtures of a wider scope start and change in set-up is there for the tests that follow.
            states.append(reporter.state_before_call or after)
        self._previous_states.append(after)
        return self._collect_side_effects(
            reporter, stop, after.describe_changes_since(states), after.leftovers_since(states)
        )

    def _take_previous_state(self) -> ProcessState:
        """What the next test finds: as the last one left it, since nothing runs here in between."""
        return self._previous_states.pop() if self._previous_states else ProcessState.capture()

    def _tear_down(self, reporter: PhaseReporter, nextitem: pytest.Item | None) -> RankSideEffects:
        """Raises what a finaliser raises."""
        self._previous_states.clear()
        reporter.channel.label("teardown")
        with debug.return_terminal_afterwards(self._session.config):
            self._session._setupstate.teardown_exact(nextitem)
        return self._collect_side_effects(reporter, None, "", find_leftovers() if nextitem is None else {})

    def _collect_side_effects(
        self, reporter: PhaseReporter, stop: SessionStop | None, changed_state: str, leftovers: dict[str, str]
    ) -> RankSideEffects:
        """What is left behind is told once: by the test, or when everything is torn down."""
        words = tuple(words for key, words in leftovers.items() if key not in self._reported_leftovers)
        self._reported_leftovers.update(leftovers)
        finished = RankSideEffects(
            tuple(reporter.recorded_warnings), tuple(reporter.inner_reports), words, changed_state, stop
        )
        reporter.recorded_warnings.clear()
        reporter.inner_reports.clear()
        return finished

    def _get_reporter(self, test_dir: str) -> PhaseReporter:
        if not self._reporters:
            self._reporters.append(self._set_up_rank(test_dir))
        return self._reporters[0]

    def _set_up_rank(self, test_dir: str) -> PhaseReporter:
        """Once in each rank: what the pytest process shares with its forks is replaced by something of its own."""
        config, me = self._session.config, current_rank()
        channel = me.channel
        assert isinstance(channel, ServerChannel), "only a server's rank inherits this"
        plugins = config.pluginmanager
        for plugin in plugins.get_plugins():
            # xdist's worker would send over the pytest process's own connection; see also its own fork of pytest.
            if plugin in self._main_process_plugins or type(plugin).__module__ in XDIST_WORKER_MODULES:
                plugins.unregister(plugin)
        disable_capture(config)
        use_private_tmp_path_base(config, Path(test_dir) / f"rank{me.rank}")
        config.stash[RANKS_BASE_DIR] = Path(test_dir).parent
        rank_coverage.set_up_rank_coverage(channel)
        debug.install_debugger(config, me.rank, channel, self._terminal)
        teller = PhaseReporter(config, channel)
        plugins.register(teller, "zharness-teller")
        teller.recorded_warnings.clear()  # pytest repeats to a new plugin what was recorded before, here while collecting
        return teller


TEST_DIR = pytest.StashKey[Path]()  # on an item: a directory that its ranks share
RANKS_BASE_DIR = pytest.StashKey[Path]()  # on the config: a directory that the ranks of all tests share
# The module of the worker's own plugin, under its name and as execnet calls what it has sent over.
XDIST_WORKER_MODULES = ("xdist.remote", "__channelexec__")


def disable_capture(config: pytest.Config) -> None:
    """Let what this rank prints run into its pipes, where it survives the rank; capsys and capfd work as ever."""
    plugins = config.pluginmanager
    old = plugins.getplugin("capturemanager")
    if old is not None:
        plugins.unregister(old)
    own = CaptureManager("no")
    own.start_global_capturing()
    plugins.register(own, "capturemanager")


def use_private_tmp_path_base(config: pytest.Config, base: Path) -> None:
    """Number this rank's temporary directories in a directory of its own: ranks would take each other's numbers."""
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is not None:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        factory._basetemp = base


def count_wide_finalizers(item: pytest.Item) -> list[tuple[str, int]]:
    """How many finalisers wait on the nodes above the item: other numbers, other wide fixtures."""
    stack = item.session._setupstate.stack
    # The first finaliser of a node is its own teardown, and no fixture's.
    counts = [(node.nodeid, len(finalizers) - 1) for node, (finalizers, _) in stack.items() if node is not item]
    return [(nodeid, fixtures) for nodeid, fixtures in counts if fixtures]


def seed_generators(nodeid: str) -> None:
    """The same random numbers on every rank, in every mode and every run."""
    number = int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:4], "big")
    random.seed(number)
    seed_torch(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
