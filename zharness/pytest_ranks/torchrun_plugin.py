"""Tests in ranks that torchrun started: rank 0 conducts and reports, the other processes are its ranks.

[Note: pytest under torchrun]
``torchrun ... -m pytest`` runs the same command in every process. Where tests in ranks or cells are collected, the
plugin attaches: the pytest of rank 0 goes on as the only one that anybody sees, with a conductor whose ranks are the
launch's (``world/leader.py``), and that of every other rank runs what it is told. A test of fewer ranks than were
launched runs on the first of them, one of more is deselected, one without a world size runs on rank 0 alone. The ranks
live on, and fixtures of every scope are set up for each test anew: they could not outlive a change of the world size.
Where nothing of ours is collected, every process runs pytest as if this plugin were not there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # as in inside.py

from zharness.errors import UsageError
from zharness.pytest_ranks.controller import RankTestController, iter_side_effects
from zharness.pytest_ranks.merge_reports import merge_reports
from zharness.pytest_ranks.rank_problems import load_phase_report
from zharness.pytest_ranks.rank_protocol import RANKS_BASE_DIR, PhaseReporter, RankSideEffects, RankTestRunner
from zharness.pytest_ranks.rank_requirements import RankRequirements, get_rank_requirements, parse_world_size
from zharness.pytest_ranks.silent_pytest import (
    DeferredTerminalOutput,
    find_capture_files,
    unregister_file_writers,
    use_private_basetemp,
)
from zharness.pytest_ranks.terminal import Terminal
from zharness.world import GroupOutcome, Isolation, RankServer, current_rank
from zharness.world.launch import Launch, detect_launch
from zharness.world.launched_rank import Follower
from zharness.world.leader import PEER_LOST_MESSAGES, Leader
from zharness.world.messages import RankStatus
from zharness.world.outcome import CapturedOutput, RankEnd, RankOutcome
from zharness.world.store import StoreChannel
from zharness.world.task import Group

PLUGIN_NAME = "zharness-attached"


def register_torchrun_plugin(config: pytest.Config) -> None:
    """Register the plugin if torchrun has made this process a rank, and if it runs the tests itself."""
    divided = getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput")
    launch = None if divided or config.option.collectonly else detect_launch()
    if launch is not None:
        config.pluginmanager.register(TorchrunPlugin(config, launch), PLUGIN_NAME)


def get_torchrun_plugin(config: pytest.Config) -> TorchrunPlugin | None:
    """The plugin, once it is attached."""
    plugin: TorchrunPlugin | None = config.pluginmanager.getplugin(PLUGIN_NAME)
    return plugin if plugin is not None and plugin.engaged else None


@dataclass(frozen=True)
class CollectionQuery:
    """What rank 0 asks every other: whether it has these tests, and sees this file."""

    nodeids: tuple[str, ...]
    file: str


@dataclass(frozen=True)
class CollectionReply:
    """Which tests a rank lacks, why it may be so, and whether it sees the file of rank 0."""

    missing_nodeids: tuple[str, ...]
    collection_errors: tuple[str, ...]
    sees_file: bool


class TorchrunPlugin:
    """The plugin of one process of the launch."""

    def __init__(self, config: pytest.Config, launch: Launch) -> None:
        self.engaged = False
        self.leader: Leader | None = None
        self._config = config
        self._launch = launch
        self._terminal_output = DeferredTerminalOutput(config)
        self._follower: Follower | None = None
        self._controller: TorchrunTestController | None = None
        self._items_by_nodeid: dict[str, pytest.Item] = {}
        self._collection_errors: list[str] = []
        self._deselected_tests: list[str] = []
        self._exit_status = 0
        self._running_nodeid = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        if self._launch.rank:
            self._terminal_output.start_buffering()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_errors.append(f"{report.nodeid}: {report.longreprtext}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        """All tests are remembered: what one process deselects, by its own cache say, rank 0 may want of it."""
        self._items_by_nodeid = {item.nodeid: item for item in items}
        result = yield
        try:
            self.engaged = any(get_item_world_size(item) is not None for item in self._items_by_nodeid.values())
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        if self.engaged:
            self._deselect_oversized(items)
        return result

    def _deselect_oversized(self, items: list[pytest.Item]) -> None:
        out = [item for item in items if (get_item_world_size(item) or 1) > self._launch.world_size]
        if out:
            items[:] = [item for item in items if item not in out]
            self._config.hook.pytest_deselected(items=out)
            self._deselected_tests = [f"{item.nodeid} (world size {get_item_world_size(item)})" for item in out]

    def pytest_report_collectionfinish(self) -> list[str]:
        if not self.engaged:
            return []
        lines = [
            f"attached to {self._launch.describe()}: they live on, and fixtures of every scope are set up for each "
            "test anew, whatever --isolation says"
        ]
        if self._deselected_tests:
            lines.append(
                f"deselected, launched with {self._launch.world_size} ranks: {', '.join(self._deselected_tests)}"
            )
        return lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not self.engaged:
            self._terminal_output.release()
            return
        inside = TorchrunTestRunner(session)
        captured = find_capture_files(self._config)
        if self._launch.rank:
            self._terminal_output.discard()
            unregister_file_writers(self._config)
            use_private_basetemp(self._config, self._launch.rank)
            self._follower = Follower(self._launch, inside, captured)
            self._follower.answer_leader(lambda question: self._answer_query(session, question))
            return
        self.leader = Leader(self._launch, self._report_lost_rank, inside, captured)
        try:
            self._controller = TorchrunTestController(session, self.leader)
            self._config.pluginmanager.register(self._controller, "zharness-conductor")
            self._controller.verify_collection()
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None

    def _answer_query(self, session: pytest.Session, query: CollectionQuery) -> CollectionReply:
        """Have rank 0's tests in rank 0's order, as it names them by number."""
        session.items[:] = [self._items_by_nodeid[name] for name in query.nodeids if name in self._items_by_nodeid]
        missing = tuple(name for name in query.nodeids if name not in self._items_by_nodeid)
        return CollectionReply(missing, tuple(self._collection_errors), Path(query.file).exists())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool | None:
        if self._follower is None:
            return None
        self._exit_status = self._follower.follow()
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running_nodeid = nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._follower is not None:
            session.exitstatus = self._exit_status
        if self.leader is not None:
            self.leader.stop_guard()

    @pytest.hookimpl(trylast=True, specname="pytest_sessionfinish")
    def pytest_tell_status(self, session: pytest.Session) -> None:
        if self.leader is not None:
            self.leader.follower_status = int(session.exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self.leader is not None:
            self.leader.close()

    def _report_lost_rank(self, outcome: GroupOutcome | None, message: str) -> int:
        """The report as it stands, with the test that ran. What is set up is not torn down: that could hang as well."""
        config = self._config
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend(in_=True)
            if capture.is_globally_capturing():
                capture.read_global_capture()  # the witness has it; unread, it would be printed in the end
        assert self._controller is not None, "nothing runs before there is a conductor"
        session = self._controller.session
        if outcome is not None:
            self._controller.log_lost_test(outcome, message)
        elif self._running_nodeid:
            message = f"{message} ({self._running_nodeid} was running on rank 0)"
        session.shouldfail = message
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session._setupstate.stack.clear()
        config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
        config._ensure_unconfigure()
        return int(session.exitstatus)


class TorchrunTestController(RankTestController):
    """A conductor whose ranks are the launch's, this very process among them."""

    def __init__(self, session: pytest.Session, leader: Leader) -> None:
        self.session = session
        self._leader = leader
        self._current_item: pytest.Item | None = None
        self._local_item: pytest.Item | None = None
        self._lacks_shared_filesystem = False  # whether the ranks have no file system in common
        super().__init__(session)

    def _make_server(self, warm_engine: str, test_runner: RankTestRunner) -> RankServer:
        return self._leader

    def verify_collection(self) -> None:
        """See to it that every rank has every test. Raises UsageError that names the rank, and what it lacks."""
        file = self._base_dir / "attached"
        file.touch()
        question = CollectionQuery(tuple(item.nodeid for item in self.session.items), str(file))
        answers: dict[int, CollectionReply] = self._leader.ask_followers(question)
        file.unlink()
        self._lacks_shared_filesystem = not all(answer.sees_file for answer in answers.values())
        lacking = next(((rank, answer) for rank, answer in answers.items() if answer.missing_nodeids), None)
        if lacking is not None:
            rank, answer = lacking
            why = "\n".join(answer.collection_errors) or "every rank has to see the same files and the same options"
            raise UsageError(f"rank {rank} did not collect {', '.join(answer.missing_nodeids)}, as rank 0 did; {why}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        self._leader.task_title = item.nodeid
        if get_rank_requirements(item) is not None:
            return super().pytest_runtest_protocol(item, nextitem)
        self._local_item = item
        if nextitem is None or get_rank_requirements(nextitem) is None:
            return None
        return self._run_locally(item)  # the next one runs in this process too, as rank 0, and must find nothing set up

    def _run_locally(self, item: pytest.Item) -> bool:
        """Run a test in this process, with everything torn down behind it."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=None)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run_rank_test(self, item: pytest.Item, nextitem: pytest.Item | None, requirements: RankRequirements) -> None:
        if self._lacks_shared_filesystem and "shared_tmp_path" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip("shared_tmp_path: the machines of this launch share no file system"))
            runtestprotocol(item, nextitem=None)
            return
        group = Group.NONE if requirements.group is Group.NONE else Group.DEFAULT
        self._current_item = item
        super()._run_rank_test(item, nextitem, replace(requirements, isolation=Isolation.FRESH, group=group))
        self._current_item = None

    def _call_ranks(
        self,
        index: int | None,
        next_index: int | None,
        requirements: RankRequirements,
        test_dir: Path,
        fixture: str = "",
    ) -> GroupOutcome:
        outcome = super()._call_ranks(index, next_index, requirements, test_dir, fixture)
        return mark_cut_off_ranks(outcome) if self._leader.is_group_broken else outcome

    def _log_reports(
        self, item: pytest.Item, reports: Iterable[pytest.TestReport], side_effects: dict[int, RankSideEffects]
    ) -> None:
        """What rank 0 itself warned of and logged within the test, this process has recorded when it came about."""
        own = side_effects.get(0, RankSideEffects())
        rest = {
            rank: replace(
                done, recorded_warnings=tuple(one for one in done.recorded_warnings if one not in own.recorded_warnings)
            )
            for rank, done in side_effects.items()
            if rank
        }
        super()._log_reports(item, reports, rest)

    def log_lost_test(self, outcome: GroupOutcome, message: str) -> None:
        """Log the test during which a rank was lost."""
        if self._current_item is not None:
            item = self._current_item
            self._log_reports(item, merge_reports(item, mark_cut_off_ranks(outcome)), dict(iter_side_effects(outcome)))
        elif self._local_item is not None:  # a test on rank 0 that had sent out a cell
            item = self._local_item
            text = f"{message}\n\n{outcome.describe()}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            item.ihook.pytest_runtest_logreport(report=report)


class TorchrunTestRunner:
    """Runs a test's part in this process, which is a rank for that long."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._reporter: PhaseReporter | None = None
        self._test_runner: RankTestRunner | None = None

    def __call__(self, index: int, next_index: int | None, test_dir: str, fixture: str = "") -> RankSideEffects:
        config, channel = self._session.config, current_rank().channel
        assert isinstance(channel, StoreChannel), "only a rank of a launch performs"
        if self._reporter is None or self._test_runner is None:
            self._reporter = PhaseReporter(config, channel)
            refused = Terminal(-1, unavailable_reason="torchrun's ranks have no terminal")
            self._test_runner = RankTestRunner(self._session, refused, (), self._reporter)
        self._reporter.channel = channel
        config.stash[RANKS_BASE_DIR] = Path(test_dir).parent
        item: Any = self._session.items[index]
        # A fixture that runs elsewhere has the item changed, in ranks that were to end with it.
        names, setup_only = list(getattr(item, "fixturenames", ())), config.option.setuponly
        config.pluginmanager.register(self._reporter, "zharness-teller")
        self._reporter.recorded_warnings.clear()  # pytest tells a new plugin of all warnings that there were
        try:
            return self._test_runner(index, next_index, test_dir, fixture)
        finally:
            config.pluginmanager.unregister(self._reporter)
            config.option.setuponly = setup_only
            if names:
                item.fixturenames[:] = names


def mark_cut_off_ranks(outcome: GroupOutcome) -> GroupOutcome:
    """The outcome, with ranks as stopped that failed because a peer had hung up on them, or had died."""
    return replace(outcome, ranks=tuple(map(mark_if_cut_off, outcome.ranks)))


def mark_if_cut_off(rank: RankOutcome) -> RankOutcome:
    """A rank without the failure that only says that a peer was gone; what it had printed until then is kept."""
    for note in rank.notes:
        told = load_phase_report(note)
        if (
            told is None
            or note.status is not RankStatus.FAILED
            or not any(one in str(told.report) for one in PEER_LOST_MESSAGES)
        ):
            continue
        notes = tuple(other for other in rank.notes if other is not note)
        printed = [
            CapturedOutput(told.phase, stream, text)
            for title, text in told.report["sections"]
            for stream in ("stdout", "stderr")
            if title == f"Captured {stream} {told.phase}"
        ]
        end = RankEnd.STOPPED if rank.end is RankEnd.RETURNED else rank.end
        return replace(
            rank,
            end=end,
            at_ns=note.at_ns,
            notes=notes,
            phase=told.phase,
            captured_output=(*rank.captured_output, *printed),
        )
    return rank


def get_item_world_size(item: pytest.Item) -> int | None:
    """The world size of a test in ranks, or of a test's cell; None for any other."""
    cell = getattr(getattr(item, "callspec", None), "params", {}).get("cell")
    size: int | None = getattr(getattr(cell, "cell", None), "world_size", None)
    return parse_world_size(item) if size is None else size
