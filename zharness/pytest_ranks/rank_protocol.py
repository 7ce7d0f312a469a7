"""Run pytest's protocol of one test on a rank and send the report of each phase to the pytest process."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
import traceback
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns  # imported by name, because a test may patch time.monotonic_ns
from typing import Protocol

import pytest
from _pytest.capture import CaptureManager  # there is no public way to replace the capture of a process
from _pytest.runner import runtestprotocol  # pytest-forked and pytest-rerunfailures use it as well

from zharness.pytest_ranks import allure_results, benchmarks, debug, hypothesis_sync, rank_coverage, remote_fixtures
from zharness.pytest_ranks.inner_reports import make_inner_report
from zharness.pytest_ranks.known_examples import NO_EXAMPLES, KnownExamples
from zharness.pytest_ranks.listeners import silence_listeners
from zharness.pytest_ranks.phase_replay import add_error
from zharness.pytest_ranks.phase_report import PhaseReport
from zharness.pytest_ranks.plugin_support import add_scenario
from zharness.pytest_ranks.rank_problems import STRICT_XPASS_PREFIX
from zharness.pytest_ranks.side_effects import RankSideEffects, RecordedWarning, SessionStop
from zharness.pytest_ranks.terminal import Terminal
from zharness.world.current_rank import current_rank
from zharness.world.leftovers import ProcessFingerprint, find_leftovers, take_fingerprint
from zharness.world.messages import RankStatus
from zharness.world.rank import ServerChannel, seed_torch


@dataclass(frozen=True)
class ProcessState:
    """The process-wide state that a test could leave for the next test: settings, threads and child processes."""

    fingerprint: ProcessFingerprint
    leftovers: dict[str, str]

    @classmethod
    def capture(cls) -> ProcessState:
        """Capture the current state of this process."""
        return cls(take_fingerprint(), find_leftovers())

    def describe_changes_since(self, states: Sequence[ProcessState]) -> str:
        """Return, separated by commas, the names of the settings whose value here is in none of ``states``."""
        changes = [set(state.fingerprint.list_changes(self.fingerprint)) for state in states]
        return ", ".join(sorted(set.intersection(*changes)))

    def leftovers_since(self, states: Sequence[ProcessState]) -> dict[str, str]:
        """Return the threads and processes that exist in none of ``states``, as a mapping from key to description."""
        return {
            key: description
            for key, description in self.leftovers.items()
            if not any(key in state.leftovers for state in states)
        }


class ReportChannel(Protocol):
    """The interface through which a rank sends reports before the test ends: ServerChannel or StoreChannel."""

    def note(self, status: RankStatus, payload: object, at_ns: int) -> None:
        """Send ``payload``, which reports an event, and ``at_ns``, the time of the event.

        If ``status`` is FAILED, the receiver stops the other ranks.
        """

    def label(self, phase: str) -> None:
        """Mark all output that the rank writes from now on as output of ``phase``."""


@dataclass(eq=False)  # hashable, because older versions of pytest keep plugins in a set
class PhaseReporter:
    """Pytest plugin of a rank that sends the report of each phase as soon as pytest makes it.

    If the rank crashes, the reports of earlier phases are not lost.
    """

    config: pytest.Config
    channel: ReportChannel
    recorded_warnings: list[RecordedWarning] = field(default_factory=list)
    is_in_phase: bool = False  # whether setup, call or teardown runs now
    wide_finalizers_before: list[tuple[str, int]] = field(default_factory=list)
    state_before_call: ProcessState | None = None
    known_examples: KnownExamples = NO_EXAMPLES

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run setup, call and teardown of the item without logging: the pytest process logs the merged reports."""
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        call_report = remote_fixtures.make_skipped_call_report(item, reports[0])
        if call_report is not None:
            self.channel.note(RankStatus.OK, self.make_phase_report(call_report), monotonic_ns())
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        """Mark the output that follows as output of setup."""
        with self.mark_phase("setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Mark the output that follows as output of the call, and synchronize Hypothesis with the other ranks."""
        with self.mark_phase("call"):
            if self.wide_finalizers_before != count_wide_finalizers(item):
                self.state_before_call = ProcessState.capture()
            synced = hypothesis_sync.sync_examples(item, known=self.known_examples)
            with synced, benchmarks.sync_benchmarks(item):
                return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """Mark the output that follows as output of teardown."""
        with self.mark_phase("teardown"):
            return (yield)

    @contextmanager
    def mark_phase(self, phase: str) -> Iterator[None]:
        """Mark all output from now on as output of ``phase``, which runs until the block ends."""
        self.channel.label(phase)
        self.is_in_phase = True
        try:
            yield
        finally:
            self.is_in_phase = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send the report of a phase, with the time at which the phase ended.

        A report that is made while a phase runs, such as that of a subtest, is not the report of the phase.
        """
        at_ns = monotonic_ns()  # before the traceback is formatted, which takes long and would distort the order
        report = yield
        if self.is_in_phase:
            return report
        if report.failed and call.excinfo is not None:
            add_error(report, call.excinfo.value)
        add_scenario(report)
        # This hook of pytest fails a test if one of its subtests failed; only this process has counted them.
        self.config.hook.pytest_report_teststatus(report=report, config=self.config)
        self.channel.note(classify_report(report), self.make_phase_report(report), at_ns)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report that is logged during the test, such as that of a subtest."""
        self.channel.note(RankStatus.OK, make_inner_report(report), monotonic_ns())

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, location: tuple[str, int, str] | None
    ) -> None:
        """Keep a warning for the pytest process, which shows the warnings of all ranks."""
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
        """Serialize a report. A user property that cannot be pickled is replaced by its ``repr``."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        try:
            pickle.dumps(data)
        except Exception:  # noqa: BLE001 - an object may raise any exception when it is pickled
            data = {**data, "user_properties": [(name, repr(value)) for name, value in report.user_properties]}
        return PhaseReport(str(report.when), data)


def classify_report(report: pytest.TestReport) -> RankStatus:
    """Return FAILED for a failure, SKIPPED for a skip or an expected failure, and OK otherwise.

    After a report with SKIPPED, the other ranks may wait for this rank forever. A test that passes under a strict xfail
    mark is OK, because another rank may fail as expected.
    """
    if report.failed:
        is_strict_xpass = isinstance(report.longrepr, str) and report.longrepr.startswith(STRICT_XPASS_PREFIX)
        return RankStatus.OK if is_strict_xpass else RankStatus.FAILED
    return RankStatus.SKIPPED if report.skipped else RankStatus.OK


def find_picklable_category(category: type[Warning]) -> type[Warning]:
    """Return the warning category, or its nearest base class that another process can unpickle."""
    for base in category.__mro__:
        if issubclass(base, Warning) and base.__module__ in sys.modules and is_importable(base):
            return base
    return UserWarning


def is_importable(category: type[Warning]) -> bool:
    """Return whether pickle finds the class by its module and name."""
    return getattr(sys.modules[category.__module__], category.__qualname__, None) is category


class RankTestRunner:
    """A callable that runs one collected test on the rank that calls it. Ranks inherit the object through the fork."""

    def __init__(
        self,
        session: pytest.Session,
        terminal: Terminal,
        main_process_plugins: tuple[object, ...],
        reporter: PhaseReporter | None = None,
    ) -> None:
        """Prepare to run tests of ``session``; ``main_process_plugins`` are unregistered in each forked rank.

        A process that torchrun started is already set up as a rank, so in such a process the caller passes the existing
        ``reporter``.
        """
        self._session = session
        self._terminal = terminal
        self._main_process_plugins = main_process_plugins
        self._reported_leftovers: set[str] = set()
        self._previous_state: ProcessState | None = None  # the state of this process at the end of its last test
        self._reporter = reporter  # None until this rank runs its first test
        self._until_rank_ends = ExitStack()

    def __call__(
        self,
        index: int | None,
        next_index: int | None,
        test_dir: str,
        fixture: str = "",
        known_examples: KnownExamples = NO_EXAMPLES,
    ) -> RankSideEffects:
        """Run the item at ``index``, and keep the fixtures that the item at ``next_index`` needs too.

        If ``index`` is None, only tear down the fixtures that the item at ``next_index`` does not need. If ``fixture``
        is the name of a remote fixture, only set up that fixture. ``known_examples`` of a Hypothesis test are not run.
        """
        items = self._session.items
        nextitem = None if next_index is None else items[next_index]
        reporter = self._get_reporter(test_dir)
        allure_results.start_result(reporter.config)
        if index is None:
            return self._tear_down(reporter, nextitem)
        reporter.known_examples = known_examples
        with remote_fixtures.limit_to_fixture(items[index], fixture):
            return self._run_item(reporter, items[index], nextitem, test_dir)

    def _run_item(
        self, reporter: PhaseReporter, item: pytest.Item, nextitem: pytest.Item | None, test_dir: str
    ) -> RankSideEffects:
        """Run one item and return its side effects, found by comparing the process's state with earlier states."""
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
            frame = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{error}, in {frame.name} ({Path(frame.filename).name}, line {frame.lineno})".lstrip(", ")
            stop = SessionStop(current_rank().rank, "keyboard", reason, None)
        if stop is not None:
            reporter.channel.note(RankStatus.FAILED, stop, monotonic_ns())
        reporter.channel.label("")
        after, states = ProcessState.capture(), [before]
        if reporter.wide_finalizers_before != count_wide_finalizers(item) and nextitem is not None:
            # Fixtures of a wider scope may start threads and change settings in setup for the tests that follow.
            states.append(reporter.state_before_call or after)
        self._previous_state = after
        return self._collect_side_effects(
            reporter, stop, after.describe_changes_since(states), after.leftovers_since(states)
        )

    def _take_previous_state(self) -> ProcessState:
        """Return the process's state at the end of the last test, or the current state if no state is stored.

        No other code runs between tests, so the two states are equal. The stored state is removed, because it is no
        longer valid if the next test does not end normally.
        """
        state, self._previous_state = self._previous_state, None
        return ProcessState.capture() if state is None else state

    def _tear_down(self, reporter: PhaseReporter, nextitem: pytest.Item | None) -> RankSideEffects:
        """Tear down the fixtures that ``nextitem`` does not need. Raises the exception of a fixture's teardown."""
        self._previous_state = None
        reporter.channel.label("teardown")
        with debug.return_terminal_afterwards(self._session.config):
            self._session._setupstate.teardown_exact(nextitem)
        return self._collect_side_effects(reporter, None, "", find_leftovers() if nextitem is None else {})

    def _collect_side_effects(
        self, reporter: PhaseReporter, stop: SessionStop | None, changed_state: str, leftovers: dict[str, str]
    ) -> RankSideEffects:
        """Return the side effects of a test, with the warnings that ``reporter`` has kept.

        Each leftover thread or process is reported only once.
        """
        new_leftovers = tuple(text for key, text in leftovers.items() if key not in self._reported_leftovers)
        self._reported_leftovers.update(leftovers)
        side_effects = RankSideEffects(
            tuple(reporter.recorded_warnings),
            new_leftovers,
            changed_state,
            stop,
            benchmarks.take_results(reporter.config),
            allure_results.take_results(reporter.config),
        )
        reporter.recorded_warnings.clear()
        return side_effects

    def _get_reporter(self, test_dir: str) -> PhaseReporter:
        """Return this rank's reporter; the first call also sets up the rank."""
        if self._reporter is None:
            self._reporter = self._set_up_rank(test_dir)
        return self._reporter

    def _set_up_rank(self, test_dir: str) -> PhaseReporter:
        """Replace what a forked rank shares with the pytest process: plugins, capture, temporary directories."""
        config, this_rank = self._session.config, current_rank()
        channel = this_rank.channel
        assert isinstance(channel, ServerChannel), "only a rank that a server forked needs this set-up"
        plugins = config.pluginmanager
        for plugin in plugins.get_plugins():
            # The plugin of an xdist worker would send reports over the connection of the pytest process.
            if plugin in self._main_process_plugins or type(plugin).__module__ in XDIST_WORKER_MODULES:
                plugins.unregister(plugin)
        disable_capture(config)
        use_private_tmp_path_base(config, Path(test_dir) / f"rank{this_rank.rank}")
        config.stash[RANKS_BASE_DIR] = Path(test_dir).parent
        rank_coverage.set_up_rank_coverage(channel)
        debug.install_debugger(config, this_rank.rank, channel, self._terminal)
        reporter = PhaseReporter(config, channel)
        plugins.register(reporter, REPORTER_NAME)
        self._until_rank_ends.enter_context(silence_listeners(plugins, reporter))
        reporter.recorded_warnings.clear()  # pytest calls the hook of a new plugin for all earlier warnings
        return reporter


REPORTER_NAME = "zharness-phase-reporter"
TEST_DIR = pytest.StashKey[Path]()  # on an item: a directory that its ranks share
RANKS_BASE_DIR = pytest.StashKey[Path]()  # on the config: a directory that the ranks of all tests share
# Modules of an xdist worker's plugin: its name, and the name that execnet gives to code that it has sent.
XDIST_WORKER_MODULES = ("xdist.remote", "__channelexec__")


def disable_capture(config: pytest.Config) -> None:
    """Stop pytest's global capture, so that output goes to the rank's pipes and is kept if the rank crashes.

    ``capsys`` and ``capfd`` still work.
    """
    plugins = config.pluginmanager
    inherited_manager = plugins.getplugin("capturemanager")
    if inherited_manager is not None:
        plugins.unregister(inherited_manager)
    manager = CaptureManager("no")
    manager.start_global_capturing()
    plugins.register(manager, "capturemanager")


def use_private_tmp_path_base(config: pytest.Config, base: Path) -> None:
    """Make ``base`` the base of this rank's ``tmp_path``, so that no two ranks create the same directory."""
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is not None:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        factory._basetemp = base


def count_wide_finalizers(item: pytest.Item) -> list[tuple[str, int]]:
    """Count the finalizers on the nodes above the item; the counts change if a fixture of wider scope is set up."""
    stack = item.session._setupstate.stack
    # The first finalizer of a node is the teardown of the node itself, not that of a fixture.
    counts = [(node.nodeid, len(finalizers) - 1) for node, (finalizers, _) in stack.items() if node is not item]
    return [(nodeid, fixtures) for nodeid, fixtures in counts if fixtures]


def seed_generators(nodeid: str) -> None:
    """Seed random, torch and numpy from the test's id, so that every rank and every run draws the same numbers."""
    number = int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:4], "big")
    random.seed(number)
    seed_torch(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
